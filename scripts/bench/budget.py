"""A budget on a GPU: time and bytes as a context grows, and the allocator's peak in random use.
Parts of run.py budget, see there."""

import random
import time

import torch
from bench.cases import DEVICE, DTYPE, frames, wait
from bench.generate import LLAMA, TINY, clean, make_model, random_ids, reset_peak
from bench.timing import quantiles
from transformers import DynamicCache

from turboquant_nb import TurboQuantCache, checks

SHARES = 0.5, 0.95, 1.5, 2, 3, 4, 5  # of the context that bf16 would hold in the budget
FILL, STEPS = 4096, 16  # tokens of a chunk, steps that are timed at each length
OPERATIONS = 16  # of a random run
WIDE = TINY | dict(  # whose cache is that of a large model, and little else is
    hidden_size=1024, num_hidden_layers=4, num_key_value_heads=8, head_dim=128
)


def milliseconds(f):
    "Of one call, its work on the device included."
    wait()
    began = time.perf_counter()
    f()
    wait()
    return 1e3 * (time.perf_counter() - began)


def token_bytes(model):
    "Bytes of a token in all layers, as it came."
    c = model.config
    values = 2 * c.num_key_value_heads * c.head_dim * c.num_hidden_layers
    return values * model.dtype.itemsize


def grow(cache, model, tokens, batch=1):
    "Tokens of random states for each row, through the cache's `update`, layer by layer."
    c = model.config
    shape = 2, batch, c.num_key_value_heads, tokens, c.head_dim
    for i in range(c.num_hidden_layers):
        cache.update(*torch.randn(shape, device=DEVICE, dtype=model.dtype), i)


def fresh(model, kind, memory):
    "An empty cache of this kind: transformers' own, a fixed recipe, or a budget."
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    how = dict(memory=memory) if kind == "budget" else dict(recipe=kind)
    return TurboQuantCache(model, frame=frames(model.config), **how)


def stands_of(report):
    "Tokens of a layer by their bits, on average over layers, as a cache reports them."
    tokens = report["budget"]["tokens"]
    return {b: sum(x.get(b, 0) for x in tokens) / len(tokens) for b in (16, 4, 3, 2)}


@torch.no_grad()
def curve(a):
    "Rows of a context that grows; SystemExit where more was allocated than the budget allows."
    model = make_model(TINY if a.tiny else LLAMA)
    model.set_attn_implementation("sdpa")
    memory = checks.nbytes(a.memory, "memory")
    limit, began = memory // token_bytes(model), time.perf_counter()
    ids = random_ids(model, 1, 1, 0)
    for kind in ("budget", "dynamic", *a.beside):
        clean()
        weights = torch.cuda.memory_allocated()
        cache, held = fresh(model, kind, memory), 0
        step = lambda cache=cache: model(ids, past_key_values=cache)
        for share in SHARES:
            over = time.perf_counter() - began > a.seconds
            if over or kind == "dynamic" and share > 1:
                break
            filling, target = 0.0, int(share * limit)
            while held < target:
                n = min(FILL, target - held)
                filling += milliseconds(lambda c=cache, n=n: grow(c, model, n))
                held += n
            for _ in range(3):
                step()
            times = [milliseconds(step) for _ in range(STEPS)]
            row = dict(part="curve", cache=kind, tokens=held, share=share, memory=memory)
            row |= quantiles(times) | dict(n=len(times), unit="ms", slowest=max(times))
            row |= dict(filling_ms=filling, bf16_bytes=held * token_bytes(model))
            held += 3 + STEPS
            if kind != "dynamic":
                report = cache.report()
                row |= {x: report[x] for x in ("nbytes", "served", "reasons", "coded")}
                graphs = report["graphs"]
                row |= {x: graphs.get(x) for x in ("captured", "replayed", "why_not")}
            if kind == "budget":
                row |= dict(tokens_by_bits=stands_of(report), reach=report["budget"]["reach"])
            row["peak_bytes"] = peak = torch.cuda.max_memory_allocated() - weights
            row["reserved_bytes"] = torch.cuda.max_memory_reserved() - weights
            if kind == "budget" and peak > 1.02 * memory:
                raise SystemExit(f"{peak:,} bytes were allocated of {memory:,}")
            yield row
        del cache, step


class Random:
    """A cache under a budget in random use. What an operation takes is the allocator's peak in
    it, without what lived before the run and without its own: the states that it is given, or
    what the same pass of the model takes without a past, cache aside."""

    def __init__(self, model, seed, own):
        self.model, self.rng, self.own = model, random.Random(seed), own
        self.memory = int(self.rng.uniform(1.5, 3) * 2**30 / (1 if DEVICE == "cuda" else 100))
        self.full = self.rng.choice(("error", "evict"))
        self.before = torch.cuda.memory_allocated()
        how = dict(memory=self.memory, full=self.full, frame=frames(model.config))
        self.cache, self.batch, self.worst = TurboQuantCache(model, **how), 1, {}

    def watch(self, name, f, own=0):
        "Do something, and note the most bytes, over those of the budget."
        reset_peak()
        try:
            f()
        except ValueError as error:
            if "Nothing was lost" not in str(error):
                raise
            self.cache.recover()
            self.cache.reset()
        taken = (torch.cuda.max_memory_allocated() - self.before - own) / self.memory
        self.worst[name] = max(self.worst.get(name, 0.0), taken)

    def passes(self, n):
        "What a pass of so many tokens for each row takes beside its cache."
        ids = random_ids(self.model, self.batch, n, n)
        if (kind := (self.batch, n)) not in self.own:
            lives = torch.cuda.memory_allocated()
            other = DynamicCache(config=self.model.config)
            reset_peak()
            self.model(ids, past_key_values=other)
            cached = self.batch * n * token_bytes(self.model)
            self.own[kind] = max(0, torch.cuda.max_memory_allocated() - lives - cached)
        run = lambda: self.model(ids, past_key_values=self.cache)
        self.watch(f"pass of {n}", run, self.own[kind])

    def operate(self):
        "One operation that the generator draws."
        what = self.rng.choice(
            ("fill",) * 5 + ("pass",) * 4 + ("crop", "rows", "beams", "reset")
        )
        held, rng = self.cache.get_seq_length(), self.rng
        if what == "fill" or not held:
            self.batch = rng.choice((1, 1, 2, 4)) if not held else self.batch
            n = int(rng.uniform(0.01, 0.6) * self.memory / token_bytes(self.model) / self.batch)
            states = self.batch * n * token_bytes(self.model) // len(self.cache.layers)
            run = lambda: grow(self.cache, self.model, n, self.batch)
            self.watch("fill", run, states)
        elif what == "pass":
            self.passes(rng.choice((1, 1, 5, 500)))
        elif what == "crop":
            n = rng.randint(1, max(1, (held - self.cache.layers[0].store.freed) // 3))
            self.watch("crop", lambda: self.cache.crop(-n))
        elif what == "beams":
            rows = torch.tensor([rng.randrange(self.batch) for _ in range(self.batch)])
            self.watch("beams", lambda: self.cache.reorder_cache(rows.to(DEVICE)))
        elif what == "rows":
            index = [0, *range(self.batch)] if self.batch < 4 else [rng.randrange(self.batch)]
            self.watch("rows", lambda: self.cache.reorder_cache(torch.tensor(index).to(DEVICE)))
            self.batch = len(index) if self.cache.get_seq_length() else 1
        else:
            self.watch("reset", self.cache.reset)


@torch.no_grad()
def peaks(a):
    """Rows of random runs; SystemExit where the allocator's peak in one of them is above the
    budget by more than 2 %."""
    model, own, began = make_model(WIDE), {}, time.perf_counter()
    model.set_attn_implementation("sdpa")
    for seed in range(a.runs):
        if time.perf_counter() - began > a.seconds:
            break
        run = Random(model, seed, own)
        for _ in range(OPERATIONS):
            run.operate()
        stands = stands_of(run.cache.report()) if run.cache.get_seq_length() else {}
        row = dict(part="peaks", seed=seed, memory=run.memory, full=run.full, n=OPERATIONS)
        row |= dict(worst=run.worst, p50=max(run.worst.values()), unit="of the budget")
        row |= dict(tokens_by_bits=stands)
        if row["p50"] > 1.02:
            raise SystemExit(f"more was allocated than the budget allows: {row}")
        yield row
        run.cache.reset()
        clean()


def told(model):
    """Logits of the same tokens, in a chunk, one by one and in a long chunk, by the name of the
    cache: transformers' own, a budget that is never short, without graphs and with them, one
    that is short, and the latter read back for the model's own attention."""
    ids, out = random_ids(model, 1, 3000, 0), {}
    ends = [0, 2000, *range(2001, 2041), 3000]
    short = dict(memory=1000 * token_bytes(model))
    kinds = dict(dynamic=None, exact=dict(memory="1GB", graphs=False), codes=short)
    kinds |= dict(replayed=dict(memory="1GB"))
    for name, how in (kinds | dict(read=short | dict(attention="dense"))).items():
        cache = DynamicCache(config=model.config)
        if how:
            cache = TurboQuantCache(model, frame=frames(model.config), **how)
        run = lambda a, b, cache=cache: model(ids[:, a:b], past_key_values=cache).logits
        out[name] = torch.cat([run(a, b) for a, b in zip(ends, ends[1:])], 1).float()
    return out


@torch.no_grad()
def gate():
    """On a small model, of 32 and of 16 bits: logits before the first move are those of
    transformers' cache, to the bit without graphs, later ones those of the same tokens read
    back, to half of what the codes themselves change."""
    found = []
    for dtype in {torch.float32, DTYPE}:
        model = make_model(WIDE | dict(num_hidden_layers=2), dtype)
        model.set_attn_implementation("sdpa")
        out = told(model)
        apart = lambda x, y, out=out: float((out[x] - out[y]).norm() / out[y].norm())
        here = {"dtype": str(dtype), "same_bits": torch.equal(out["exact"], out["dynamic"])}
        here |= {"exact": apart("exact", "dynamic"), "codes": apart("codes", "read")}
        here |= {"replayed": apart("replayed", "dynamic")}
        found.append(here | {"limit": apart("codes", "exact") / 2})
    cmd = "logits of transformers' cache before the first move; later of what is read back"
    passed = all(max(x["exact"], x["codes"], x["replayed"]) < x["limit"] for x in found)
    return {"cmd": cmd, "value": found, "passed": passed}
