"""Decode steps of a whole model on one NVIDIA GPU: run.py generate [--tiny] [--seconds S]
[--after FILE] [--wall 1x8192 …] [--filled 1x8192 …] --out FILE.

Llama-3.1-8B shapes with random bf16 weights (speed does not depend on their values). Caches are
filled with random states in place of a prompt, so that no time goes into prefill; a step is the
model's own forward pass for one new token of each sequence, without sampling. One process,
medians with 20th and 80th percentiles of CUDA events around single steps, in ms. `tokens_s` =
batch / median. `cache_bytes` is what filling the cache took from the allocator.

Caches: `dynamic` transformers' DynamicCache, `static` its StaticCache (both with torch's SDPA),
`flash` keys and values in place in preallocated tensors and torch's flash attention on them,
grouped heads shared and no mask: the best that bf16 does here (`dynamic` is no yardstick on
PyTorch
2.11, whose SDPA takes cuDNN for it, which plans anew on the host for each new length);
`turboquant` this package with attention on codes. mode `eager` launches from Python, `graph`
replays one CUDA graph of the whole step, appending included (flash with its length fixed at
capture, which favours it). What else results/generate/h200.json has (launches, Python's time,
the longest contexts, transformers' QuantizedCache) is closed: bb56ccce has this script with it.
So are prompts in chunks and drafts by prompt lookup: 2ae2200c.
`filling_peak_bytes` is the most that was allocated while a cache was filled, `reserved_bytes`
with the allocator's holes.

--wall BxT measures whole calls of generate() instead, by the clock, on prompts of random ids:
`first_ms` until the first token's logits, `step_ms` what each of the `new - 1` tokens after it
took on average, recording a graph included; every mode once before that on a short prompt, for
kernels and compilers. `graphs, sdpa`: the model is left as it loads. `graphs, compiled`: so is
its attention, and norms, MLPs and RoPE of steps are compiled (compile_steps). `graphs, chosen`:
so does generate() by itself, here from the first step of a batch size on; in all other modes
never. `cache kept`: one cache for all calls, emptied by reset(). --rounds N: the modes of a
shape take turns, N times.
--filled BxT: caches filled by random states, from which calls go on, so without
`first_ms`. `speedup`: tokens/s of a row over those of transformers' best mode for the shape.

Gate, on a small model of the same kind: logits after filling are those after a prompt; of
kernels those of PyTorch's attention on codes; of replayed graphs those of eager steps; and no
timed step of ours was served by anything but kernels. No row is written on a red gate."""

import gc
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from bench.cases import CASES, DEVICE, DTYPE, Context, frames, wait
from bench.timing import replayed, step_times
from plan import Plan, earlier
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.compiled import StepChoice, compile_steps
from turboquant_nb.hf.hooks import Pass, register
from turboquant_nb.quant.recipe import preset

LLAMA = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    max_position_embeddings=1 << 18,
)
TINY = dict(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1 << 18,
)
PLAIN = {
    f"{name}, fixed mean": replace(x, key=replace(x.key, center="fixed"))
    for name in ("k3v3", "k4v4")
    for x in (preset(name),)
}  # by name alone keys have the mean before RoPE, if the frame has it


def make_model(sizes, dtype=DTYPE):
    "Random weights, made where they are used."
    config = LlamaConfig(**sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=DEVICE).eval()
    g = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02, generator=g) if p.ndim > 1 else p.fill_(1)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(DEVICE)
    return model


# --- the best that bf16 does: flash attention on preallocated tensors


class FlashCache(transformers.Cache):
    "Keys and values in place; handed to the `in_place` attention as views of the tokens held."

    def __init__(self, config, batch, length, held):
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        super().__init__(layers=[])
        self.k, self.v = (
            [
                torch.empty(shape, dtype=DTYPE, device=DEVICE)
                for _ in range(config.num_hidden_layers)
            ]
            for _ in range(2)
        )
        self.held, self.at = held, torch.full((1,), held, dtype=torch.long, device=DEVICE)

    def get_seq_length(self, layer_idx=0):
        return self.at[0]

    def get_mask_sizes(self, query_length, layer_idx):
        return self.held + query_length, 0

    def update(self, k, v, layer_idx, *args, **kwargs):
        kc, vc = self.k[layer_idx], self.v[layer_idx]
        kc.index_copy_(2, self.at, k)
        vc.index_copy_(2, self.at, v)
        return kc[:, :, : self.held + 1], vc[:, :, : self.held + 1]


def in_place(module, query, key, value, attention_mask, scaling=None, **kwargs):
    return F.scaled_dot_product_attention(
        query, key, value, scale=scaling, enable_gqa=True
    ).transpose(1, 2), None


register("in_place", in_place, lambda *a, **k: None)


# --- caches filled with random states


def states(config, batch, n, seed):
    g = torch.Generator(DEVICE).manual_seed(seed)
    shape = (2, batch, config.num_key_value_heads, n, config.head_dim)
    return torch.randn(shape, generator=g, device=DEVICE, dtype=DTYPE)


def empty(kind, recipe, config, batch, tokens, graph):
    "A cache of a kind with room for `tokens` and 256 more."
    if kind == "turboquant":
        return TurboQuantCache(
            config,
            PLAIN.get(recipe, recipe),
            max_length=tokens + 256,
            static=graph,
            backend="triton" if DEVICE == "cuda" else "auto",
            frame=frames(config),
        )
    if kind == "dynamic":
        return DynamicCache(config=config)
    if kind == "static":
        return StaticCache(config=config, max_cache_len=tokens + 256)
    return FlashCache(config, batch, tokens + 256, tokens)


def put(cache, kind, layer, at, k, v):
    "Tokens from position `at` on, as a prompt would bring them."
    if kind == "turboquant":
        filling = Pass(hooked=False)
        filling.on_codes = True  # nothing is read back
        cache.layers[layer].update(k, v, now=filling)
    elif kind == "flash":
        (
            cache.k[layer][:, :, at : at + k.shape[2]],
            cache.v[layer][:, :, at : at + k.shape[2]],
        ) = k, v
    else:
        cache.update(k, v, layer)


def filled(kind, recipe, config, batch, tokens, graph):
    "A cache of a kind that holds `tokens` random tokens."
    return fill(empty(kind, recipe, config, batch, tokens, graph), kind, config, batch, tokens)


def fill(cache, kind, config, batch, tokens):
    """Fill an empty cache. Of ours all layers get a short chunk first: a store allocates at its
    first chunk, beside float32 copies of it, and the next layer's planes would be cut out of
    what such large copies leave, with a hole each."""
    step, layers = max(1024, 262144 // batch), range(config.num_hidden_layers)
    first = min(1024 if kind == "turboquant" else step, tokens)
    pieces = [(i, 0, first) for i in layers]
    pieces += [
        (i, a, min(a + step, tokens)) for i in layers for a in range(first, tokens, step)
    ]
    for i, a, z in pieces:
        put(cache, kind, i, a, *states(config, batch, z - a, i))
    return cache


# --- single steps

ATTENTION = {"turboquant": "turboquant", "flash": "in_place"}


def use(model, kind, mode=""):
    "Attend as a kind of cache wants it; kinds of whole calls name their recipe, too."
    own = (
        "sdpa"
        if mode.endswith(("sdpa", "compiled", "chosen"))
        else ATTENTION.get(kind.split()[0], "sdpa")
    )
    model.set_attn_implementation(own)


def step_of(model, cache, batch):
    "A forward pass for one new token of each sequence."
    ids = torch.ones(batch, 1, dtype=torch.long, device=DEVICE)
    return partial(model, ids, past_key_values=cache, logits_to_keep=1)


def on_kernels(cache):
    "Raises if anything else served, or would serve a replayed step."
    r = cache.report()
    captured = {answer for answers in r["captured_by"].values() for answer in answers}
    if (
        set(r["served"]) != {"kernel"}
        or r["reasons"]
        or set(r["coded"]) != {"kernel"}
        or captured - {("triton", "")}
    ):
        raise RuntimeError(
            f"not served by kernels: {r['served']} {r['reasons']} {r['coded']} {captured}"
        )
    return r


def reset_peak():
    "Of the allocator of the GPU, if there is one."
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def clean():
    "Nothing of an earlier cache is left, one that refers to itself neither."
    gc.collect()
    torch.cuda.empty_cache()
    reset_peak()


def peak(weights, name="peak_bytes"):
    """The most that was allocated since the peak was reset, and reserved with the allocator's
    holes."""
    return {
        name: torch.cuda.max_memory_allocated() - weights,
        "reserved_bytes": torch.cuda.max_memory_reserved() - weights,
    }


@contextmanager
def noting(row, ours, memory=dict):
    "A row says that memory ran out. Another cache may fail otherwise too; not ours."
    try:
        yield
    except torch.OutOfMemoryError:
        row |= {"error": "out of memory"} | memory()
    except Exception as error:
        if ours:
            raise
        row["error"] = repr(error)[:200]


def about(kind, recipe, case, mode):
    what = {"cache": kind, "recipe": str(recipe or "bf16"), "mode": mode}
    return what | case._asdict()


def measure(model, kind, recipe, case: Context, mode, seconds):
    "One row, or one that says that memory ran out."
    batch, tokens = case
    row = about(kind, recipe, case, mode)
    clean()
    weights = torch.cuda.memory_allocated()
    name = lambda: "peak_bytes" if "cache_bytes" in row else "filling_peak_bytes"
    with noting(row, kind == "turboquant", lambda: peak(weights, name())):
        use(model, kind)
        cache = filled(kind, recipe, model.config, batch, tokens, mode == "graph")
        wait()
        row["cache_bytes"] = torch.cuda.memory_allocated() - weights
        row |= peak(weights, "filling_peak_bytes")
        reset_peak()
        step = step_of(model, cache, batch)
        row |= step_times(replayed(step) if mode == "graph" else step, seconds=seconds)
        row["tokens_s"] = batch / row["p50"] * 1e3
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - weights
        if kind == "turboquant":
            row["bits_per_value"] = on_kernels(cache)["bits_per_value"]
    return row


# --- gate


def apart(a, b):
    "Relative difference of logits."
    return float((a.float() - b.float()).norm() / b.float().norm())


def filling(model, prompt):
    """Logits of a step after filling with the states that a prompt brings, against those after
    the prompt itself."""
    model.set_attn_implementation("sdpa")
    seen, step = DynamicCache(config=model.config), prompt[:, :1]
    model(prompt, past_key_values=seen)
    pieces = [(x.keys.clone(), x.values.clone()) for x in seen.layers]
    dense, worst = model(step, past_key_values=seen).logits, {}
    for kind, recipe in (
        ("dynamic", None),
        ("static", None),
        ("flash", None),
        ("turboquant", "k3v3"),
    ):
        use(model, kind)
        cache, want = (
            empty(kind, recipe, model.config, len(prompt), prompt.shape[1], False),
            dense,
        )
        for i, (k, v) in enumerate(pieces):
            put(cache, kind, i, 0, k, v)
        if kind == "turboquant":
            model.set_attn_implementation("sdpa")  # the very states that were recorded
            told = empty(kind, recipe, model.config, len(prompt), prompt.shape[1], False)
            model(prompt, past_key_values=told)
            model.set_attn_implementation("turboquant")
            want = model(step, past_key_values=told).logits
        worst[kind] = apart(model(step, past_key_values=cache).logits, want)
    return worst


def replaying(model, recipe, prompt):
    "Logits of kernels against PyTorch's on codes, and of replayed steps against eager ones."
    model.set_attn_implementation("turboquant")
    caches = [
        TurboQuantCache(model, recipe, backend=b, graphs=False) for b in ("triton", "torch")
    ]
    caches += [TurboQuantCache(model, recipe, max_length=600, static=True, graphs=False)]
    for c in caches:
        model(prompt[:, :500], past_key_values=c)
    ids, worst = torch.zeros(2, 1, dtype=torch.long, device=DEVICE), 0.0
    step = partial(model, ids, past_key_values=caches[2])
    step()
    step()
    caches[2].crop(-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step().logits
    for i in range(8):
        ids.copy_(prompt[:, i : i + 1])
        a, b = (model(ids, past_key_values=c).logits for c in caches[:2])
        graph.replay()
        worst = max(worst, apart(a, b), apart(logits, a))
    return worst


# --- whole calls of generate()

WALL = [
    ("dynamic", "eager"),
    ("static", "compiled"),
    ("turboquant k3v3", "eager"),
    ("turboquant k3v3", "graphs"),
    ("turboquant k3v3", "graphs, sdpa"),
    ("turboquant k3v3", "graphs, compiled"),
    ("turboquant k3v3", "graphs, chosen"),
    ("turboquant k3v3", "graphs, cache kept"),
]


class Clock(transformers.LogitsProcessor):
    "Notes when the logits of the first token are there."

    def __init__(self):
        self.at = None

    def __call__(self, ids, scores):
        if self.at is None:
            wait()
            self.at = time.perf_counter()
        return scores


def random_ids(model, batch, prompt, seed):
    gen, most = torch.Generator().manual_seed(seed), min(model.config.vocab_size, 1000)
    return torch.randint(5, most, (batch, prompt), generator=gen).to(DEVICE)


def generated(model, ids, new, cache, mask=None, **options):
    "Prompts and the new tokens of one call."
    mask = torch.ones_like(ids) if mask is None else mask
    how = dict(max_new_tokens=new, do_sample=False, pad_token_id=0) | options
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **how)
    wait()
    return out


def call(model, ids, new, cache, **options):
    "Milliseconds of one call: to the first token, and of all tokens after it."
    clock = Clock()
    wait()
    began = time.perf_counter()
    generated(model, ids, new, cache, logits_processor=[clock], **options)
    return 1e3 * (clock.at - began), 1e3 * (time.perf_counter() - clock.at)


def is_ours(cache):
    return cache.startswith("turboquant")


def new_cache(model, cache, mode="graphs", length=None):
    "A cache of whole calls; with a length ours has room for it."
    if cache == "dynamic":
        return DynamicCache(config=model.config)
    if cache == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    room = dict(max_length=length, static=mode.endswith("kept")) if length else {}
    return TurboQuantCache(model, cache.split()[1], graphs=mode != "eager", **room)


def said(cache):
    "What our cache reports of its graphs and bits."
    report = cache.report()
    graphs = {k: x for k, x in report["graphs"].items() if k != "line"}
    return {"graphs": graphs, "bits_per_value": report["bits_per_value"]}


def middle(batch, steps):
    "Times of a step, their (lower) median, and tokens per second by it."
    step = sorted(steps)[(len(steps) - 1) // 2]
    return {"steps_ms": steps, "step_ms": step, "tokens_s": batch / step * 1e3}


def wall(model, cache, mode, batch, prompt, new, repeats, held=False):
    """One row of a shape and a mode. `held`: a cache that was filled by random states instead
    of a prompt, with calls that go on from there; the first, which compiles and captures, is
    not counted."""
    use(model, cache, mode)
    row = dict(
        cache=cache, mode=mode, batch=batch, prompt=prompt, new=new, n=repeats, unit="ms"
    )
    row |= {"filled": True} if held else {}
    options = {}
    if batch * prompt > 300_000 and cache != "static" and not held:
        options = {"prefill_chunk_size": 8192}  # of a static cache chunks are compiled too
    row |= options
    tokens = prompt + new * (repeats + 1 if held else 1)
    room = -(-tokens // 256) * 256
    kept = held or cache == "static" or mode.endswith("kept")
    clean()
    with noting(row, is_ours(cache)), parts(model, cache, mode) as compiled:
        one = new_cache(model, cache, mode, room) if kept else None

        def fresh():
            if one is None:
                return new_cache(model, cache, mode)
            one.reset()
            return one

        took = []
        if held:
            with torch.no_grad():
                fill(one, cache.split()[0], model.config, batch, prompt)
            reset_peak()
            for i in range(repeats + 1):
                ids = random_ids(model, batch, int(one.get_seq_length()) + 1, i)
                took.append(call(model, ids, new, one))
            took, used = took[1:], one
        else:
            call(model, random_ids(model, batch, 600, 0), 6, fresh())
            for i in range(repeats):
                clean()
                used = fresh()
                ids = random_ids(model, batch, prompt, 1 + i)
                took.append(call(model, ids, new, used, **options))
            row["first_ms"] = min(first for first, _ in took)
        row |= middle(batch, [later / (new - 1) for _, later in took])
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row |= said(used) if is_ours(cache) else {}
        row |= {"compiled": compiled} if compiled else {}
    return row


@contextmanager
def parts(model, cache, mode):
    "Norms, MLPs and RoPE of steps compiled, in the mode that has them so; what was compiled."
    StepChoice.seconds = 0.0 if mode.endswith("chosen") else 1e9
    if not (is_ours(cache) and mode.endswith("compiled")):
        yield ""
        return
    steps = compile_steps(model)
    try:
        yield repr(steps)
    finally:
        steps.undo()


def merged(taken):
    "One row of those that a mode got in several rounds."
    if failed := [r for r in taken if "error" in r]:
        return failed[0]
    row = taken[-1] | middle(taken[-1]["batch"], [x for r in taken for x in r["steps_ms"]])
    row |= {"n": len(row["steps_ms"]), "peak_bytes": max(r["peak_bytes"] for r in taken)}
    firsts = [r["first_ms"] for r in taken if "first_ms" in r]
    return row | ({"first_ms": min(firsts)} if firsts else {})


def walls(a, model, shapes, before=(), held=False):
    """Rows of all modes for each shape, with their speedup over transformers' best mode, of
    earlier rows too where a mode is left out."""
    for batch, prompt in shapes:
        here = f"@{batch}x{prompt}"
        left_out = {*a.skip, *(x.removesuffix(here) for x in a.skip)}
        left_out |= {"static/compiled"} if held else set()
        how = [x for x in WALL if "/".join(x) not in left_out]
        n = a.repeats if batch * prompt < 100_000 else min(2, a.repeats)
        rounds = [
            [wall(model, *x, batch, prompt, a.new, n, held) for x in how]
            for _ in range(a.rounds)
        ]
        found = [merged(x) for x in zip(*rounds)]
        same = lambda r: (r["batch"], r["prompt"], r.get("filled", False))
        known = [r for r in before if same(r) == (batch, prompt, held)]
        theirs = [
            r["tokens_s"]
            for r in [*found, *known]
            if "tokens_s" in r and not is_ours(r["cache"])
        ]
        for r in found:
            counts = theirs and "tokens_s" in r
            yield r | ({"speedup": r["tokens_s"] / max(theirs)} if counts else {})


def replayed_tokens():
    """Whether generate() gives the same tokens with replayed steps as with eager ones, padded
    and over a tile's border."""
    model = make_model(TINY)
    ids = random_ids(model, 3, 240, 1)
    model.set_attn_implementation("turboquant")
    mask, outs = torch.ones_like(ids), []
    mask[1, :9] = 0
    for graphs in (True, False):
        cache = TurboQuantCache(model, "k3v3", max_length=512, graphs=graphs)
        outs.append(generated(model, ids, 60, cache, mask))
        print("gate:", cache.report()["graphs"], flush=True)
    return torch.equal(*outs)


@torch.no_grad()
def gate():
    "Whether all logits agree to 3 %; filling is exact up to the shapes of products."
    model = make_model(TINY)
    prompt = random_ids(model, 2, 500, 0)
    fill = filling(model, prompt)
    replay = {recipe: replaying(model, recipe, prompt) for recipe in ("k3v3", "k4v4")}
    print("gate: filling", fill, "replaying", replay, flush=True)
    cmd = (
        "logits after filling and after a prompt, of kernels and of PyTorch on codes, of "
        "replayed graphs and of eager steps agree to 3 %; timed steps ran on kernels"
    )
    return {"cmd": cmd, "passed": max(*fill.values(), *replay.values()) < 0.03}


def options(p):
    p.add_argument("--tiny", action="store_true", help="a small model: does the bench run?")
    p.add_argument("--seconds", type=float, default=0.6, help="for each row")
    p.add_argument(
        "--after",
        help="a file of this bench: its rows are kept with their commit, not measured again",
    )
    p.add_argument(
        "--wall",
        nargs="+",
        metavar="BxT",
        default=(),
        help="measure whole calls of generate() for these batches and prompts, nothing else",
    )
    p.add_argument(
        "--filled",
        nargs="+",
        metavar="BxT",
        default=(),
        help=(
            "with --wall: the same for caches that are filled by random states, so without a "
            "first token"
        ),
    )
    p.add_argument("--new", type=int, default=65, help="with --wall: tokens that a call makes")
    p.add_argument(
        "--repeats",
        type=int,
        default=3,
        help=(
            "with --wall: calls of each kind, of which the (lower) median counts; two where "
            "they hold more than 100,000 tokens"
        ),
    )
    p.add_argument(
        "--rounds",
        type=int,
        default=1,
        help=(
            "with --wall: times that all modes of a shape are taken in turn, for a host that "
            "is slow for seconds at a time"
        ),
    )
    p.add_argument(
        "--skip",
        nargs="*",
        default=(),
        help=(
            "with --wall: caches and modes left out, as in 'dynamic/eager'; of one shape alone: "
            "'static/compiled@8x8192'"
        ),
    )


# (cache, recipe, mode) of the rows of one size, and of some sizes
MEASURED = [
    ("flash", None, "eager"),
    ("flash", None, "graph"),
    ("turboquant", "k3v3", "eager"),
    ("turboquant", "k3v3", "graph"),
    *(("turboquant", recipe, "graph") for recipe in ("k4v4", *PLAIN)),
]
THEIRS = [("static", None, "eager"), ("static", None, "graph"), ("dynamic", None, "eager")]


@torch.no_grad()
def rows(a, before):
    model = make_model(TINY if a.tiny else LLAMA)
    done = {Context(r["batch"], r["tokens"]) for r in before}
    for case in (x for x in CASES["generate"] if x not in done):
        theirs = THEIRS if case in CASES["generate, transformers' caches"] else []
        for kind, recipe, mode in MEASURED + theirs:
            yield measure(model, kind, recipe, case, mode, a.seconds)


def by_the_clock(a, before):
    "Rows of whole calls of generate() for the shapes that were asked for."
    with torch.no_grad():
        model = make_model(TINY if a.tiny else LLAMA)
    model.generation_config.eos_token_id = None
    pairs = lambda shapes: [tuple(map(int, x.split("x"))) for x in shapes]
    yield from walls(a, model, pairs(a.filled), before, held=True)
    yield from walls(a, model, pairs(a.wall), before)


def plan(a):
    name = "tiny" if a.tiny else "random weights, Llama-3.1-8B shapes"
    about = dict(model={"id": name, "revision": "none"})
    before, checked = earlier(a), gate()
    calls = [*a.wall, *a.filled]
    if calls:
        cmd = "tokens of replayed steps are those of eager ones; " + checked["cmd"]
        checked = {"cmd": cmd, "passed": bool(checked["passed"] and replayed_tokens())}
        data = {"id": "random ids", "n": len(calls)}
        todo = by_the_clock(a, before)
    else:
        before = [r for r in before if r["mode"] in ("eager", "graph")]
        cases = CASES["generate"]
        data = {"id": "random states in place of a prompt, normal", "n": len(cases)}
        todo = rows(a, before)
    return Plan("generate", checked, todo, data, before=before, **about)
