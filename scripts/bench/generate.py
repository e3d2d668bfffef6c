"""Decode steps of a whole model on one NVIDIA GPU: run.py generate [--tiny] [--quick]
[--seconds S] [--after FILE] [--wall 1x8192 …] [--prompts 1x32768 …] [--drafts 1x8192 …] --out
FILE.

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
`quanto`, `hqq` transformers' QuantizedCache where these packages are installed; `turboquant`
this package with attention on codes. mode `eager` launches from Python, `graph` replays one
CUDA graph of the whole step, appending included (flash with its length fixed at capture, which
favours it). Other modes: `launches` of an eager step, `host` Python's time for one layer,
`fits` the context at three bits in the memory that bf16 takes for 8 x 32,768 tokens, `largest`
the longest context of eight sequences that fits on the GPU, with what was tried, `prefill` a
prompt at once or in chunks, after one that is not timed. `filling_peak_bytes` is the most that
was allocated while a cache was filled, `reserved_bytes` with the allocator's holes.

--wall BxT measures whole calls of generate() instead, by the clock, on prompts of random ids:
`first_ms` until the first token's logits, `step_ms` what each of the `new - 1` tokens after it
took on average, recording a graph included; every mode once before that on a short prompt, for
kernels and compilers. `cache kept`: one cache for all calls, emptied by reset(). --rounds N:
the modes of a shape take turns, N times. --prompts BxT with --chunks N …: calls for one token,
the prompt at once and in chunks, by transformers' dynamic cache and by ours; `begun_ms` is the
first of them, `of_whole` the time over that of the same cache at once, `of_best` over the
shorter of both caches' at once, `peak_bytes` what was allocated at most beside the weights;
`prompt, kernels` the GPU's time in chunks by what kernels do. --drafts 1xT with --lookup N …:
calls with prompt lookup of N tokens (0: one by one) on a model that counts, t, t+1, …, after a
prompt that does too but for a jump in one of --jumps tokens: the drafts that meet no jump are
right. Every mode must give the tokens that counting gives; `passes` are forward passes after
the prompt, `a_pass` the tokens that each gave. --filled BxT: caches filled by random states,
from which calls go on, so without `first_ms`. `speedup`: tokens/s of a row over those of
transformers' best mode for the shape.

Gate, on a small model of the same kind: logits after filling are those after a prompt; of
kernels those of PyTorch's attention on codes; of replayed graphs those of eager steps; and no
timed step of ours was served by anything but kernels. No row is written on a red gate."""

import gc
import re
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from cases import CASES, Context
from plan import Plan
from timing import host_times, replayed, step_times
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from turboquant_nb import results
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.quant.quantizer import preset

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
    f"{name}, prompt mean": preset(name).settled(rope=False) for name in ("k3v3", "k4v4")
}  # by name alone keys have the pre-RoPE mean where the model has it
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(sizes, dtype=torch.bfloat16):
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
                torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
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


AttentionInterface.register("in_place", in_place)
AttentionMaskInterface.register("in_place", lambda *a, **k: None)


# --- caches filled with random states


def states(config, batch, n, seed):
    g = torch.Generator(DEVICE).manual_seed(seed)
    shape = (2, batch, config.num_key_value_heads, n, config.head_dim)
    return torch.randn(shape, generator=g, device=DEVICE, dtype=torch.bfloat16)


def empty(kind, recipe, config, batch, tokens, graph):
    "A cache of a kind with room for `tokens` and 256 more."
    if kind == "turboquant":
        return TurboQuantCache(
            config,
            PLAIN.get(recipe, recipe),
            max_length=tokens + 256,
            static=graph,
            backend="triton" if DEVICE == "cuda" else "auto",
        )
    if kind == "dynamic":
        return DynamicCache(config=config)
    if kind == "static":
        return StaticCache(config=config, max_cache_len=tokens + 256)
    if kind == "flash":
        return FlashCache(config, batch, tokens + 256, tokens)
    return transformers.QuantizedCache(kind, config, nbits=recipe, residual_length=128)


def put(cache, kind, layer, at, k, v):
    "Tokens from position `at` on, as a prompt would bring them."
    if kind == "turboquant":
        cache.layers[layer]._append(k, v, at == 0)
    elif kind == "flash":
        (
            cache.k[layer][:, :, at : at + k.shape[2]],
            cache.v[layer][:, :, at : at + k.shape[2]],
        ) = k, v
    else:
        cache.update(k, v, layer)


def filled(kind, recipe, config, batch, tokens, graph):
    """A cache of a kind that holds `tokens` random tokens. Of ours all layers get a short chunk
    first: a store allocates at its first chunk, beside float32 copies of it, and the next
    layer's planes would be cut out of what such large copies leave, with a hole each."""
    return fill(empty(kind, recipe, config, batch, tokens, graph), kind, config, batch, tokens)


def fill(cache, kind, config, batch, tokens):
    "See `filled`."
    step = max(1024, 262144 // batch)
    first = min(1024 if kind == "turboquant" else step, tokens)
    pieces = [(i, 0, first) for i in range(config.num_hidden_layers)]
    pieces += [
        (i, a, min(a + step, tokens))
        for i in range(config.num_hidden_layers)
        for a in range(first, tokens, step)
    ]
    for i, a, z in pieces:
        x = states(config, batch, z - a, i)
        put(cache, kind, i, a, x[0], x[1])
        del x
    return cache


# --- time

NAMES = {"turboquant": "turboquant", "flash": "in_place"}


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


def memory(name, weights):
    """The most that was allocated since the peak was reset, and reserved with the allocator's
    holes."""
    return {
        name: torch.cuda.max_memory_allocated() - weights,
        "reserved_bytes": torch.cuda.max_memory_reserved() - weights,
    }


def measure(model, kind, recipe, case: Context, mode, seconds):
    "One row, or one that says that memory ran out."
    batch, tokens = case
    row = {
        "cache": kind,
        "recipe": str(recipe or "bf16"),
        "batch": batch,
        "tokens": tokens,
        "mode": mode,
    }
    gc.collect()  # a cache that refers to itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated()
    cache = step = run = None
    try:
        model.set_attn_implementation(NAMES.get(kind, "sdpa"))
        cache = filled(kind, recipe, model.config, batch, tokens, mode == "graph")
        torch.cuda.synchronize()
        row["cache_bytes"] = torch.cuda.memory_allocated() - weights
        row |= memory("filling_peak_bytes", weights)
        torch.cuda.reset_peak_memory_stats()
        ids = torch.ones(batch, 1, dtype=torch.long, device=DEVICE)
        step = partial(model, ids, past_key_values=cache, logits_to_keep=1)
        run = replayed(step) if mode == "graph" else step
        row |= step_times(run, seconds=seconds)
        row |= {
            "tokens_s": batch / row["p50"] * 1e3,
            "peak_bytes": torch.cuda.max_memory_allocated() - weights,
        }
        if kind == "turboquant":
            row["bits_per_value"] = on_kernels(cache)["bits_per_value"]
    except torch.OutOfMemoryError:
        row |= {"error": "out of memory"} | memory(
            "peak_bytes" if "cache_bytes" in row else "filling_peak_bytes", weights
        )
    except Exception as error:  # another package's cache may fail; ours may not
        if kind == "turboquant":
            raise
        row["error"] = repr(error)[:200]
    finally:
        cache = step = run = None
        torch.cuda.empty_cache()
    return row


def launches(model, kind, recipe, batch=1, tokens=2048):
    """Kernel launches of one eager decode step, how often the host waits in it, and its time on
    the host."""
    from torch.profiler import ProfilerActivity, profile

    model.set_attn_implementation(NAMES.get(kind, "sdpa"))
    cache, layers = (
        filled(kind, recipe, model.config, batch, tokens, False),
        model.config.num_hidden_layers,
    )
    step, host = (
        partial(
            model,
            torch.ones(batch, 1, dtype=torch.long, device=DEVICE),
            past_key_values=cache,
            logits_to_keep=1,
        ),
        [],
    )
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    on_gpu = [
        e.name
        for e in prof.events()
        if str(e.device_type).endswith("CUDA") and not e.name.startswith(("Memcpy", "Memset"))
    ]
    waits = (
        sum(
            e.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
            for e in prof.events()
        )
        - 1
    )
    row = {
        "cache": kind,
        "recipe": str(recipe or "bf16"),
        "batch": batch,
        "tokens": tokens,
        "mode": "launches",
        "n": 1,
        "unit": "launches a step",
        "p20": len(on_gpu),
        "p50": len(on_gpu),
        "p80": len(on_gpu),
        "per_layer": len(on_gpu) / layers,
        "waits": waits,
        "host_us_per_layer": sorted(host)[4] / layers * 1e6,
    }
    return row


def host_cost(model):
    "Microseconds of Python that update and attention of one layer take in an eager step."
    from turboquant_nb.hf import turboquant_attention

    model.set_attn_implementation("turboquant")
    cache = filled("turboquant", "k3v3", model.config, 1, 2048, False)
    c = model.config
    k = states(c, 1, 1, 0)[0]
    q = torch.randn(
        1, c.num_attention_heads, 1, c.head_dim, device=DEVICE, dtype=torch.bfloat16
    )
    update = lambda: cache.layers[0].update(k, k)
    whole = lambda: turboquant_attention(None, q, *update(), None, 0.1)
    took = {what: host_times(f, 20, 5) for what, f in (("whole", whole), ("update", update))}
    out, update = sorted(took["whole"]), sorted(took["update"])[2]
    row = {
        "cache": "turboquant",
        "recipe": "k3v3",
        "batch": 1,
        "tokens": 2048,
        "mode": "host",
        "p20": out[1],
        "p50": out[2],
        "p80": out[3],
        "n": 150,
        "unit": "us a layer",
        "update": update,
    }
    return row


# --- memory


def contexts(model, rows):
    """The context at three bits in the memory of bf16's 8 x 32,768 tokens, and the longest that
    fits on this GPU for both; filled, and a few steps taken."""
    took = {
        r["cache"]: r["cache_bytes"] / (r["tokens"] + 256)
        for r in rows
        if (r["batch"], r["tokens"], r["mode"]) == (8, 32768, "graph")
        and r["recipe"] in ("bf16", "k3v3")
    }
    dense = took["flash"] * (32768 + 256)
    fits = int(dense / took["turboquant"]) // 256 * 256 - 256
    row = measure(model, "turboquant", "k3v3", Context(8, fits), "eager", 0.1)
    out = [
        row | {"mode": "fits", "fits_in_bytes": dense, "ratio": (fits + 256) / (32768 + 256)}
    ]
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] - 3 * 2**30
    for kind, recipe in (("flash", None), ("turboquant", "k3v3")):
        out.append(
            longest(
                lambda tokens, what=(kind, recipe): measure(
                    model, *what, Context(8, tokens), "eager", 0.1
                ),
                int(free / took[kind]),
            )
        )
    return out


def longest(measured, estimate, least=0.6, near=0.02):
    """The row of the longest context that fits: the estimate, or else between `least` of it and
    that by halves, to `near` of it. If not even that fits, the row that says so."""
    tried = []

    def attempt(part):
        row = measured(int(part * estimate) // 1024 * 1024)
        tried.append([row["tokens"], row.get("error", "fits")])
        return row

    row, high = attempt(1), 1.0
    if "error" in row:
        row, low = attempt(least), least
        while "error" not in row and high - low > near:
            middle = (low + high) / 2
            found = attempt(middle)
            if "error" in found:
                high = middle
            else:
                row, low = found, middle
    return row | {"mode": "largest", "estimate": estimate, "tried": tried}


def prefills(model, lengths, chunk=2048):
    """Peak memory beside weights and cache of generate() for one token, the prompt at once or
    in chunks."""
    rows = []
    model.set_attn_implementation("turboquant")
    for size in (None, chunk):  # kernels are compiled and chosen outside of what is timed
        model.generate(
            torch.zeros(1, 2 * chunk, dtype=torch.long, device=DEVICE),
            past_key_values=empty("turboquant", "k3v3", model.config, 1, 2 * chunk, False),
            max_new_tokens=1,
            do_sample=False,
            prefill_chunk_size=size,
        )
    for tokens in lengths:
        ids = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(0)).to(
            DEVICE
        )
        for size in (None, chunk):
            cache = empty("turboquant", "k3v3", model.config, 1, tokens, False)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            weights, began = torch.cuda.memory_allocated(), time.perf_counter()
            model.generate(
                ids,
                past_key_values=cache,
                max_new_tokens=1,
                do_sample=False,
                prefill_chunk_size=size,
            )
            torch.cuda.synchronize()
            seconds, held = time.perf_counter() - began, cache.report()["nbytes"]
            rows.append(
                {
                    "cache": "turboquant",
                    "recipe": "k3v3",
                    "batch": 1,
                    "tokens": tokens,
                    "mode": "prefill",
                    "chunk": size or tokens,
                    "p20": seconds * 1e3,
                    "p50": seconds * 1e3,
                    "p80": seconds * 1e3,
                    "n": 1,
                    "unit": "ms",
                    "cache_bytes": held,
                    "peak_bytes": torch.cuda.max_memory_allocated() - weights - held,
                    "served": cache.report()["served"],
                }
            )
            del cache
    return rows


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
        model.set_attn_implementation(NAMES.get(kind, "sdpa"))
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
    ("turboquant k3v3", "graphs, cache kept"),
]


class Clock(transformers.LogitsProcessor):
    "Notes when the logits of the first token are there."

    def __init__(self):
        self.at = None

    def __call__(self, ids, scores):
        if self.at is None:
            torch.cuda.synchronize()
            self.at = time.perf_counter()
        return scores


def call(model, batch, prompt, new, seed, **options):
    "(seconds to the first token, seconds for each further one, tokens) of one call."
    ids = torch.randint(
        5,
        min(model.config.vocab_size, 1000),
        (batch, prompt),
        generator=torch.Generator().manual_seed(seed),
    ).to(DEVICE)
    clock = Clock()
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        logits_processor=[clock],
        pad_token_id=0,
        **options,
    )
    torch.cuda.synchronize()
    return clock.at - began, (time.perf_counter() - clock.at) / (new - 1), out[:, prompt:]


def wall_filled(model, cache, mode, batch, tokens, new, repeats):
    """One row of a cache that was filled by random states instead of a prompt: calls that go on
    from there; the first, which compiles and captures, is not counted."""
    ours = cache.startswith("turboquant")
    model.set_attn_implementation("turboquant" if ours else "sdpa")
    row = {
        "cache": cache,
        "mode": mode,
        "batch": batch,
        "prompt": tokens,
        "filled": True,
        "new": new,
        "n": repeats,
        "unit": "ms",
    }
    length = -(-(tokens + (repeats + 1) * new) // 256) * 256
    gc.collect()
    torch.cuda.empty_cache()
    try:
        made = DynamicCache(config=model.config)
        if ours:
            made = TurboQuantCache(
                model,
                "k3v3",
                max_length=length,
                static=mode.endswith("kept"),
                graphs=mode != "eager",
            )
        with torch.no_grad():
            fill(made, "turboquant" if ours else cache, model.config, batch, tokens)
        torch.cuda.reset_peak_memory_stats()
        took = [
            call(model, batch, int(made.get_seq_length()) + 1, new, i, past_key_values=made)[1]
            for i in range(repeats + 1)
        ][1:]
        row |= {
            "steps_ms": [1e3 * x for x in took],
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        row |= {"step_ms": sorted(row["steps_ms"])[(repeats - 1) // 2]}
        row["tokens_s"] = batch / row["step_ms"] * 1e3
        if ours:
            row |= {
                "bits_per_value": made.report()["bits_per_value"],
                "graphs": {k: x for k, x in made.report()["graphs"].items() if k != "line"},
            }
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    return row


def wall(model, cache, mode, batch, prompt, new, repeats):
    "One row of a shape and a mode."
    ours = cache.startswith("turboquant")
    model.set_attn_implementation("turboquant" if ours else "sdpa")
    length, kept = -(-(prompt + new) // 256) * 256, None
    if cache == "static":
        kept = StaticCache(config=model.config, max_cache_len=length)
    elif mode.endswith("kept"):
        kept = TurboQuantCache(model, "k3v3", max_length=length, static=True)

    def fresh():
        if kept is None:
            return TurboQuantCache(model, "k3v3", graphs=mode != "eager") if ours else None
        kept.reset()
        return kept

    row = {
        "cache": cache,
        "mode": mode,
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "n": repeats,
        "unit": "ms",
    }
    options = (
        {"prefill_chunk_size": 8192} if batch * prompt > 300_000 and cache != "static" else {}
    )  # of a static cache chunks are compiled too
    row |= options
    try:
        call(model, batch, 600, 6, 0, past_key_values=fresh())
        took = []
        for i in range(repeats):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            used = fresh()
            took.append(
                call(model, batch, prompt, new, 1 + i, past_key_values=used, **options)[:2]
            )
            if ours:
                row["graphs"] = {
                    k: x for k, x in used.report()["graphs"].items() if k != "line"
                }
                row["bits_per_value"] = used.report()["bits_per_value"]
            del used
        row |= {
            "first_ms": 1e3 * min(x for x, _ in took),
            "steps_ms": [1e3 * x for _, x in took],
        }
        row |= {
            "step_ms": sorted(row["steps_ms"])[(repeats - 1) // 2],
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        row["tokens_s"] = batch / row["step_ms"] * 1e3
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    except Exception as error:
        if ours:
            raise
        row["error"] = repr(error)[:200]
    return row


KERNELS = {
    "decoding blocks": "_read_kernel",
    "joining pieces": "_join_kernel",
    "coding": "_encode_kernel",
    "attention": "attention|flash|fprop|sdpa",
    "products": "nvjet|gemm|gemv",
}


def where_time_goes(model, batch, prompt, chunk):
    "A row: the GPU's time for a prompt in chunks on our cache, by what kernels do."
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(
            model,
            batch,
            prompt,
            2,
            0,
            past_key_values=TurboQuantCache(model, "k3v3"),
            prefill_chunk_size=chunk,
        )
    spent = dict.fromkeys((*KERNELS, "the rest"), 0.0)
    for event in profile.key_averages():
        name = next(
            (name for name, kinds in KERNELS.items() if re.search(kinds, event.key)), "the rest"
        )
        spent[name] += event.self_device_time_total / 1e3
    return {
        "cache": "turboquant k3v3",
        "mode": "prompt, kernels",
        "batch": batch,
        "prompt": prompt,
        "chunk": chunk,
        "unit": "ms",
        "n": 1,
        "kernels": spent,
    }


def prompts(model, shapes, chunks, repeats):
    """Rows of calls of generate() for one token: the prompt at once and in chunks, by both
    caches; and where the GPU's time goes in the smallest chunks."""
    for batch, prompt in shapes:
        whole = {}
        for chunk in (None, *chunks):
            for cache in ("dynamic", "turboquant k3v3"):
                ours, took = cache != "dynamic", []
                model.set_attn_implementation("turboquant" if ours else "sdpa")
                gc.collect()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                for i in range(repeats + 1):
                    used = (
                        TurboQuantCache(model, "k3v3")
                        if ours
                        else DynamicCache(config=model.config)
                    )
                    took.append(
                        1e3
                        * call(
                            model,
                            batch,
                            prompt,
                            2,
                            i,
                            past_key_values=used,
                            prefill_chunk_size=chunk,
                        )[0]
                    )
                    report = used.report() if ours else {}
                    del used
                row = {
                    "cache": cache,
                    "mode": "prompt",
                    "batch": batch,
                    "prompt": prompt,
                    "chunk": chunk or prompt,
                    "n": repeats,
                    "unit": "ms",
                    "begun_ms": took[0],
                    "firsts_ms": took[1:],
                }
                row |= {
                    "first_ms": min(took[1:]),
                    "peak_bytes": torch.cuda.max_memory_allocated() - before,
                } | ({"served": report["served"]} if ours else {})
                whole.setdefault(cache, row["first_ms"])
                yield (
                    row
                    | {"of_whole": row["first_ms"] / whole[cache]}
                    | (
                        {"of_best": row["first_ms"] / min(whole.values())}
                        if len(whole) > 1
                        else {}
                    )
                )
        yield where_time_goes(model, batch, prompt, min(chunks))


def merged(taken):
    "One row of those that a mode got in several rounds."
    if any("error" in r for r in taken):
        return next(r for r in taken if "error" in r)
    steps = [x for r in taken for x in r["steps_ms"]]
    row = taken[-1] | {
        "n": len(steps),
        "steps_ms": steps,
        "step_ms": sorted(steps)[(len(steps) - 1) // 2],
        "peak_bytes": max(r["peak_bytes"] for r in taken),
    }
    row |= {"tokens_s": row["batch"] / row["step_ms"] * 1e3} | (
        {"first_ms": min(r["first_ms"] for r in taken)} if "first_ms" in row else {}
    )
    return row


def walls(model, shapes, new, repeats, rounds, skip, before=(), held=False):
    """Rows of all modes for each shape, with their speedup over transformers' best mode, of
    earlier rows too where a mode is left out."""
    for batch, prompt in shapes:
        left_out = {*skip, *(["static/compiled"] if held else [])} | {
            x.split("@")[0] for x in skip if x.endswith(f"@{batch}x{prompt}")
        }
        how = [x for x in WALL if "/".join(x) not in left_out]
        n = repeats if batch * prompt < 100_000 else min(2, repeats)
        taken = [
            [(wall_filled if held else wall)(model, *x, batch, prompt, new, n) for x in how]
            for _ in range(rounds)
        ]
        found = [merged(x) for x in zip(*taken)]
        known = [
            r
            for r in before
            if (r["batch"], r["prompt"], r.get("filled", False)) == (batch, prompt, held)
        ]
        best = max(
            (
                r["tokens_s"]
                for r in [*found, *known]
                if "tokens_s" in r and not r["cache"].startswith("turboquant")
            ),
            default=None,
        )
        for r in found:
            yield r | ({"speedup": r["tokens_s"] / best} if best and "tokens_s" in r else {})


COUNTED = 997  # tokens of the model that counts


def counting(model):
    """Let a model count: the layers hardly change what comes in, and the head of t + 1 is the
    embedding of t. Every product is made as before."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 1e-3
            layer.mlp.down_proj.weight *= 1e-3
        given, n = model.model.embed_tokens.weight, min(COUNTED, model.config.vocab_size)
        model.lm_head.weight[:n] = given[:n].roll(1, 0)
    return n


def counted(n, length, jumps, seed):
    "Tokens that count modulo n, and jump elsewhere once in `jumps` tokens (0: never)."
    g = torch.Generator().manual_seed(seed)
    by = torch.ones(length, dtype=torch.long)
    if jumps:
        by = torch.where(
            torch.rand(length, generator=g) < 1 / jumps,
            torch.randint(n, (length,), generator=g),
            by,
        )
    return by.cumsum(0)[None] % n


def drafts(model, shapes, lookups, jumps, new, repeats):
    "Rows of calls of generate() with prompt lookup and one by one, by both caches."
    n, passes = counting(model), []
    hook = model.register_forward_pre_hook(
        lambda module, args, given: passes.append(given["position_ids"]), with_kwargs=True
    )
    for (batch, prompt), often in ((shape, x) for shape in shapes for x in jumps):
        best = 0
        for cache in ("dynamic", "turboquant k3v3"):
            model.set_attn_implementation("turboquant" if cache != "dynamic" else "sdpa")
            for tokens in lookups:
                took = []
                for i in range(repeats + 1):
                    ids = counted(n, prompt, often, i).to(DEVICE)
                    used, clock, options = (
                        DynamicCache(config=model.config),
                        Clock(),
                        {"prompt_lookup_num_tokens": tokens} if tokens else {},
                    )
                    if cache != "dynamic":
                        used = TurboQuantCache(model, "k3v3")
                    torch.cuda.synchronize()
                    passes.clear()
                    out = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=new,
                        do_sample=False,
                        logits_processor=[clock],
                        pad_token_id=0,
                        past_key_values=used,
                        **options,
                    )
                    torch.cuda.synchronize()
                    after = time.perf_counter() - clock.at
                    later = (
                        prompt + new - int(passes[1][0, 0]) - 1
                    )  # tokens of all passes but the first
                    took.append(1e3 * after / later)
                    want = (ids[0, -1] + 1 + torch.arange(new, device=DEVICE)) % n
                    if not torch.equal(out[0, prompt:], want):
                        raise RuntimeError(
                            f"{cache}, {tokens} drafts: not the tokens of a model that counts"
                        )
                    report = used.report() if cache != "dynamic" else {}
                    del used
                row = {
                    "cache": cache,
                    "mode": "prompt lookup" if tokens else "one by one",
                    "drafts": tokens,
                    "jumps": often,
                    "batch": batch,
                    "prompt": prompt,
                    "new": new,
                    "n": repeats,
                    "unit": "ms",
                }
                row |= {
                    "token_ms": min(took[1:]),
                    "tokens_ms": took[1:],
                    "passes": len(passes) - 1,
                    "a_pass": later / (len(passes) - 1),
                }
                row |= {
                    "pass_ms": row["token_ms"] * row["a_pass"],
                    "tokens_s": 1e3 / row["token_ms"],
                }
                row |= (
                    {
                        "served": report["served"],
                        "graphs": {k: x for k, x in report["graphs"].items() if k != "line"},
                    }
                    if report
                    else {}
                )
                best = max(best, row["tokens_s"] if cache == "dynamic" else 0)
                yield row | {"speedup": row["tokens_s"] / best}
    hook.remove()


def replayed_tokens():
    """Whether generate() gives the same tokens with replayed steps as with eager ones, padded
    and over a tile's border."""
    model, ids = (
        make_model(TINY),
        torch.randint(5, 256, (3, 240), generator=torch.Generator().manual_seed(1)).to(DEVICE),
    )
    model.set_attn_implementation("turboquant")
    mask, outs = torch.ones_like(ids), []
    mask[1, :9] = 0
    for graphs in (True, False):
        cache = TurboQuantCache(model, "k3v3", max_length=512, graphs=graphs)
        outs.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=60,
                do_sample=False,
                pad_token_id=0,
                past_key_values=cache,
            )
        )
        print("gate:", cache.report()["graphs"], flush=True)
    return torch.equal(*outs)


@torch.no_grad()
def gate():
    "Whether all logits agree to 3 %; filling is exact up to the shapes of products."
    model, prompt = (
        make_model(TINY),
        torch.randint(256, (2, 500), generator=torch.Generator().manual_seed(0)).to(DEVICE),
    )
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
    p.add_argument("--quick", action="store_true", help="two sizes")
    p.add_argument("--seconds", type=float, default=0.6, help="for each row")
    p.add_argument(
        "--after",
        type=Path,
        help="a file of this bench: its rows are kept with their commit, not measured again",
    )
    p.add_argument(
        "--wall",
        nargs="+",
        metavar="BxT",
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
    p.add_argument(
        "--prompts",
        nargs="+",
        metavar="BxT",
        default=(),
        help=(
            "measure whole calls of generate() for one token, at once and in chunks, and "
            "nothing else"
        ),
    )
    p.add_argument(
        "--chunks",
        nargs="+",
        type=int,
        default=(8192, 2048),
        help="with --prompts: tokens of a chunk",
    )
    p.add_argument(
        "--drafts",
        nargs="+",
        metavar="1xT",
        default=(),
        help="measure whole calls of generate() with drafts by prompt lookup, and nothing else",
    )
    p.add_argument(
        "--lookup",
        nargs="+",
        type=int,
        default=(0, 4, 8),
        help="with --drafts: tokens of a draft, 0 for none",
    )
    p.add_argument(
        "--jumps",
        nargs="+",
        type=int,
        default=(0, 8),
        help="with --drafts: one in so many tokens is not what counting gives; 0 for none",
    )
    p.add_argument(
        "--new", type=int, default=65, help="with --wall and --drafts: tokens that a call makes"
    )
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
            "with --wall: caches and modes left out, as in 'turboquant k3v3/eager', or of one "
            "shape 'static/compiled@8x8192'"
        ),
    )


def measured(case: Context, peers):
    "(cache, recipe, mode) of the rows of one size."
    yield from (
        (*x, mode)
        for x in (("flash", None), ("turboquant", "k3v3"))
        for mode in ("eager", "graph")
    )
    yield from (("turboquant", recipe, "graph") for recipe in ("k4v4", *PLAIN))
    if case in CASES["generate, transformers' caches"]:
        yield from (
            ("static", None, "eager"),
            ("static", None, "graph"),
            ("dynamic", None, "eager"),
        )
    if case == Context(1, 8192):
        yield from ((kind, 4, "eager") for kind in peers)


@torch.no_grad()
def rows(a, before):
    model, found = make_model(TINY if a.tiny else LLAMA), [*before]
    print(f"{sum(x.nbytes for x in model.parameters()) / 1e9:.2f} GB of weights", flush=True)
    if not before:
        yield host_cost(model)
        for kind, recipe in (("static", None), ("flash", None), ("turboquant", "k3v3")):
            yield launches(model, kind, recipe)
    peers = [
        kind
        for kind, there in (
            ("quanto", is_optimum_quanto_available()),
            ("hqq", is_hqq_available()),
        )
        if there
    ]
    done = {Context(r["batch"], r["tokens"]) for r in before if r["mode"] in ("eager", "graph")}
    for case in CASES["generate, quick" if a.quick else "generate"]:
        for kind, recipe, mode in measured(case, peers) if case not in done else ():
            found.append(measure(model, kind, recipe, case, mode, a.seconds))
            yield found[-1]
    yield from prefills(model, (512, 4096) if a.tiny else (8192, 32768))
    if not a.tiny:
        yield from contexts(model, found)


def by_the_clock(a, before):
    "Rows of whole calls of generate() for the shapes that were asked for."
    with torch.no_grad():
        model = make_model(TINY if a.tiny else LLAMA)
    model.generation_config.eos_token_id = None
    pairs = lambda shapes: [tuple(map(int, x.split("x"))) for x in shapes]
    for shapes, held in ((a.filled, True), (a.wall or (), False)):
        yield from walls(model, pairs(shapes), a.new, a.repeats, a.rounds, a.skip, before, held)
    yield from prompts(model, pairs(a.prompts), a.chunks, a.repeats)
    yield from drafts(
        model, pairs(a.drafts), a.lookup, a.jumps, a.new, a.repeats
    )  # the last: they change the weights


def plan(a):
    if a.wall or a.prompts or a.drafts:
        before, logits = results.earlier(a.after, a.draft) if a.after else [], gate()
        checked = {
            "cmd": "tokens of replayed steps are those of eager ones; " + logits["cmd"],
            "passed": bool(replayed_tokens() and logits["passed"]),
        }
        shape = {
            "id": "tiny" if a.tiny else "random weights, Llama-3.1-8B shapes",
            "revision": "none",
        }
        return Plan(
            "generate",
            checked,
            by_the_clock(a, before),
            {
                "id": "random ids",
                "n": len(a.wall or ()) + len(a.filled) + len(a.prompts) + len(a.drafts),
            },
            shape,
            before=before,
        )
    again = ("prefill", "fits", "largest")  # these are measured in every run
    before = [
        row
        for row in (results.earlier(a.after, a.draft) if a.after else ())
        if row["mode"] not in again
    ]
    shape = {
        "id": "tiny" if a.tiny else "random weights, Llama-3.1-8B shapes",
        "revision": "none",
    }
    data = {
        "id": "random states in place of a prompt, normal",
        "n": len(CASES["generate, quick" if a.quick else "generate"]),
    }
    return Plan("generate", gate(), rows(a, before), data, shape, before=before)
