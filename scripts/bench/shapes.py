"""A decode step of models of 2026, by shape: run.py shapes [--models gpt-oss-20b …] [--shapes
8x32768 …] [--tiny] --out FILE.

Random bf16 weights of the real sizes in fewer layers (`layers` of `of_layers`, in the model's
own order); all experts, the whole vocabulary. A prompt of 8 tokens goes through the model, then
the layers with keys and values are filled with random states up to the tokens of the shape.
Recurrent layers run by transformers' PyTorch code: the kernels of its hub, mamba-ssm and fla
are not used.

Rows of `what` "step": one token of each sequence through the whole model. `cache` and `mode`:
`dynamic` and `static` are transformers' caches, with the attention that it takes for the model
by itself; `k3v3` is TurboQuantCache(model, "k3v3"), as it comes: `replayed` of its steps were,
or `why` not; `k3v3, static` the same with max_length and static=True. `eager` launches from
Python, `graph` replays one CUDA graph of the step. `cache_bytes` are of all tensors held,
recurrent states apart in `state_bytes`.

Rows of `what` "attention": one layer of each kind (`ran` of them in the step, `count` in the
whole model), the kernels alone, replayed from a graph with an empty L2 cache: `p50` ours on the
codes of the cache above, learnt logits included; `bf16_ms` the fastest (`bf16_by`) of torch's
scaled_dot_product_attention, the same with the query heads of a KV head as its rows, plain
products, and a split-KV Triton kernel, on random states of what a layer of transformers holds
(the window where it slides), without learnt logits. `ratio` is ours over theirs; `bytes` and
`bf16_bytes` are of a token of the shape in one layer.

Gate: a small model of each class writes the tokens of DynamicCache where all are held exactly,
and attention of each kind of layer on a cache of 1,500 tokens is that of the reference in fp64
on the same codes."""

import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from bench.cases import DEVICE
from bench.decode_kernel import fastest_dense
from bench.generate import clean, noting, parts, put, states, step_of
from bench.models import GEMMA_4_31B, GPT_OSS_20B
from bench.timing import QUANTILES, Clock, kernel_times, quantiles, replayed, step_times
from eval.architectures import EXACT, VOCAB, small
from plan import Plan, seconds
from transformers import DynamicCache, StaticCache

from turboquant_nb.cache import attention
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.kernels import ops

PROMPT, ROOM, NEAR = 8, 256, 1500
SLIDES, FULL, STATE = "sliding_attention", "full_attention", "linear_attention"


def times(f, device, seconds: float) -> dict:
    "Quantiles of single calls in ms; of processor time on a CPU."
    if device.type == "cuda":
        found = kernel_times(replayed(f), seconds)
        return {name: found[name] / 1e3 for name in QUANTILES} | {"n": 1, "unit": "ms"}
    out, until = [], time.perf_counter() + seconds
    while len(out) < 3 or time.perf_counter() < until:
        with Clock() as spent:
            f()
        out.append(1e3 * spent.cpu)
    return quantiles(out) | {"n": len(out), "unit": "ms"}


class Model(NamedTuple):
    "Sizes of a model, with fewer layers."

    name: str  # the class without its task
    of_layers: int
    kinds: list  # of the layers that are made
    count: dict  # of layers with keys and values in the whole model, by kind
    sizes: dict
    listed: str = "layer_types"  # where a configuration takes the kinds


MODELS = {
    "gpt-oss-20b": Model("GptOss", 24, [SLIDES, FULL] * 2, {SLIDES: 12, FULL: 12}, GPT_OSS_20B),
    "gemma-4-31b": Model(
        "Gemma4",
        60,
        [SLIDES] * 5 + [FULL],
        {SLIDES: 50, FULL: 10},
        GEMMA_4_31B | dict(final_logit_softcapping=30.0),
    ),
    "qwen3.5-27b": Model(
        "Qwen3_5",
        64,
        ([STATE] * 3 + [FULL]) * 2,
        {FULL: 16},
        dict(
            hidden_size=5120,
            intermediate_size=17408,
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_value_heads=48,
        ),
    ),
    "nemotron-h-8b": Model(
        "NemotronH",
        52,
        [
            {"M": STATE, "-": "mlp", "*": FULL}[x]
            for x in "M-M-M-M*-M-M-M-M-M*-"  # the first 20
        ],
        {FULL: 4},
        dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128),
        "layers_block_type",
    ),
}
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    head_dim=32,
    global_head_dim=64,
    sliding_window=128,
    num_local_experts=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=2,
    ssm_state_size=8,
)


def made(spec: Model, tiny: bool):
    "A model with random weights, made where it is used."
    kind = getattr(transformers, f"{spec.name}ForCausalLM")
    sizes = spec.sizes | {spec.listed: spec.kinds, "max_position_embeddings": 1 << 18}
    if spec.listed == "layer_types":
        sizes["num_hidden_layers"] = len(spec.kinds)
    if tiny:
        own = kind.config_class()
        named = lambda x: x in spec.sizes or hasattr(own, x)
        sizes |= {name: x for name, x in TINY.items() if named(name)}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    with torch.device(DEVICE):
        model = kind._from_config(kind.config_class(**sizes), dtype=dtype)
    return model.eval()


# --- caches


def empty(model, kind: str, tokens: int):
    "A cache that is to hold `tokens`, and some more."
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=tokens + ROOM)
    how = dict(max_length=tokens + ROOM, static=True, graphs=False)
    return TurboQuantCache(model, "k3v3", **(how if kind == "k3v3, static" else {}))


def filled(model, kind: str, infos: list, batch: int, tokens: int):
    "A cache of a kind that holds a prompt, and random states behind it."
    cache, ours = empty(model, kind, tokens), kind.startswith("k3v3")
    ids = torch.ones(batch, PROMPT, dtype=torch.long, device=DEVICE)
    model(ids, past_key_values=cache, logits_to_keep=1)
    step = max(1024, 65536 // batch)
    for x in infos:
        sizes = SimpleNamespace(num_key_value_heads=x.heads, head_dim=x.key_size)
        for at in range(PROMPT, tokens, step):
            k, v = states(sizes, batch, min(step, tokens - at), x.index).to(model.dtype)
            put(cache, "turboquant" if ours else kind, x.index, at, k, v)
            if ours:
                cache.layers[x.index].free(cache.layers[x.index].first)
    return cache


def held_bytes(cache, infos: list) -> dict:
    "Bytes of keys and values, and of recurrent states."
    named = ("conv_states", "recurrent_states")
    tensors = [getattr(x, name, {}) for x in cache.layers for name in named]
    rest = sum(t.nbytes for held in tensors for t in held.values() if t is not None)
    if isinstance(cache, TurboQuantCache):
        return {"cache_bytes": cache.report()["nbytes"], "state_bytes": rest}
    found = (
        t for x in infos for t in (cache.layers[x.index].keys, cache.layers[x.index].values)
    )
    return {"cache_bytes": sum(t.nbytes for t in found), "state_bytes": rest}


# --- one layer


class Layer(NamedTuple):
    "What attention of a layer is asked with."

    info: object  # its `LayerInfo`
    q: torch.Tensor
    k: torch.Tensor  # the newest token
    v: torch.Tensor
    store: object  # its codes
    rule: dict
    sinks: torch.Tensor | None  # learnt logits

    def attend(self, f, *states):
        "Attention as a step of the model calls it, by `f`."
        answer = f(*(states or (self.q, self.store, self.k, self.v)), **self.rule)
        return attention.with_sinks(*answer, self.sinks, need_lse=False).out


def layer_of(model, cache, info, batch: int) -> Layer:
    "A layer of our cache, with random queries."
    held = next(x for x in cache.coded_layers if x.index == info.index)
    draw = lambda n: torch.randn(batch, n, 1, info.key_size, device=DEVICE, dtype=model.dtype)
    rule = dict(scaling=info.key_size**-0.5, sliding_window=info.sliding_window)
    sinks = [p.detach() for name, p in model.named_parameters() if name.endswith("sinks")]
    sinks = sinks[info.index] if sinks else None  # every layer of such a model has them
    states = draw(info.query_heads), draw(info.heads), draw(info.heads)
    return Layer(info, *states, held.store, rule, sinks)


def exact_forms(info, batch: int, tokens: int, dtype, seconds: float) -> dict:
    "Attention on exact states of as many tokens as a layer holds, by name."
    held = min(tokens, info.sliding_window or tokens)
    group, d = info.query_heads // info.heads, info.key_size
    sizes = SimpleNamespace(num_key_value_heads=info.heads, head_dim=d)
    k, v = states(sizes, batch, held, 1).to(dtype)
    q = torch.randn(batch, info.query_heads, 1, d, device=DEVICE, dtype=dtype)
    rows = q.reshape(batch, info.heads, group, d)  # share every key: one token, so no order
    sdpa = F.scaled_dot_product_attention
    forms = {"sdpa, grouped": lambda: sdpa(rows, k, v)}
    forms["products"] = lambda: ((rows @ k.mT) * d**-0.5).softmax(-1) @ v
    if DEVICE == "cuda":
        if d <= 256:  # beyond it, SDPA would repeat keys for every query head
            forms["sdpa"] = partial(sdpa, q, k, v, enable_gqa=True)
        if held % 128 == 0 and d & (d - 1) == 0:
            with suppress(TypeError):  # no form of it fits the GPU
                forms["triton"], _ = fastest_dense(q, k, v, seconds)
    return forms


def attention_row(model, cache, info, batch, tokens, seconds) -> dict:
    "Attention of one layer, ours and the best that bf16 has."
    ask = layer_of(model, cache, info, batch)
    call = attention.Call.of(ask.q, ask.store, ask.k, ask.v, **ask.rule)
    served = ops.select_backend(call)
    best, exact = {}, exact_forms(info, batch, tokens, model.dtype, seconds)
    for name, f in exact.items():
        with suppress(torch.OutOfMemoryError, RuntimeError):  # a form that does not fit
            best[name] = times(f, ask.q.device, seconds)["p50"]
    fastest = min(best, key=best.get)
    report = cache.report()
    each = dict(zip((x.index for x in cache.info.coded), report["per_layer"]))
    held = min(tokens, (info.sliding_window or tokens + 1) - 1)
    bf16 = 2 * info.heads * (info.key_size + info.value_size) * held / tokens
    ours = times(partial(ask.attend, ops.attend), ask.q.device, seconds)
    return dict(
        kind=kind_of(info),
        heads=info.heads,
        group=info.query_heads // info.heads,
        d=info.key_size,
        window=info.sliding_window or 0,
        backend=served.backend,
        why=served.why,
        bytes=each[info.index] / batch / tokens,
        bf16_bytes=bf16,
        bf16_ms=best[fastest],
        bf16_by=fastest,
        bf16_forms=best,
        ratio=ours["p50"] / best[fastest],
        **ours,
    )


# --- gate


def same_tokens(name: str) -> bool:
    "Whether a small model of a class writes the same where all tokens are held exactly."
    model = small(f"{name}ForCausalLM").to(DEVICE)
    ids = torch.randint(2, VOCAB - 1, (2, 19), generator=torch.Generator().manual_seed(1))
    made = [
        model.generate(
            ids.to(DEVICE),
            attention_mask=torch.ones_like(ids).to(DEVICE),
            past_key_values=held,
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        for held in (TurboQuantCache(model, EXACT), DynamicCache(config=model.config))
    ]
    return torch.equal(*made)


def apart(model, cache, info, batch: int) -> float:
    "Attention of a layer against the reference in fp64 on the same codes."
    ask = layer_of(model, cache, info, batch)
    q, k, v = (x.double() for x in (ask.q, ask.k, ask.v))
    got = ask.attend(ops.attend).double()
    want = ask.attend(attention.attend, q, ask.store, k, v)
    return float((got - want).norm() / want.norm())


def kind_of(info) -> str:
    return SLIDES if info.sliding_window else FULL


def firsts(infos: list) -> list:
    "One layer of each kind."
    return list({kind_of(x): x for x in infos}.values())


def gate(a, models: dict):
    found = {}
    for name, model in models.items():
        equal = same_tokens(MODELS[name].name)
        infos = TurboQuantCache(model, "k3v3").info.coded
        near = filled(model, "k3v3", infos, 2, NEAR)
        errors = {kind_of(x): apart(model, near, x, 2) for x in firsts(infos)}
        found[name] = errors | {"equal tokens": equal}
    limit = 2e-2 if DEVICE == "cuda" else 1e-4
    good = all(x["equal tokens"] for x in found.values())
    errors = [v for x in found.values() for k, v in x.items() if k != "equal tokens"]
    good = good and all(v < limit for v in errors)  # of each: max may pass over a NaN
    text = (
        "a small model of each class writes the tokens of DynamicCache where all are exact; "
        f"attention of each kind against the reference in fp64 on the same codes, below {limit}"
    )
    return {"cmd": text, "value": max(errors), "found": found, "passed": good}


# --- rows

MODES = [
    ("dynamic", "eager"),
    ("k3v3", "as it comes"),
    ("static", "graph"),
    ("k3v3, static", "graph"),
    ("static", "eager"),
]


def timed(step, mode: str, seconds: float) -> dict:
    "Quantiles of a step in ms."
    if DEVICE != "cuda":
        return times(step, torch.device(DEVICE), seconds)
    return step_times(replayed(step) if mode == "graph" else step, seconds=seconds)


def rows(a, models: dict):
    for name, model in models.items():
        for text in a.shapes:
            batch, tokens = map(int, text.split("x"))
            yield from measured(a, name, model, batch, tokens)


@torch.no_grad()
def measured(a, name: str, model, batch: int, tokens: int):
    "Rows of a model and a shape."
    spec = MODELS[name]
    head = dict(model=name, batch=batch, tokens=tokens, layers=len(spec.kinds))
    head |= dict(of_layers=spec.of_layers)
    infos = TurboQuantCache(model, "k3v3").info.coded
    for kind, mode in MODES:
        if DEVICE != "cuda" and mode == "graph":
            continue
        row = head | dict(what="step", cache=kind, mode=mode)
        clean_up()
        with noting(row, False), parts(model, "turboquant", "graphs"):
            cache = filled(model, kind, infos, batch, tokens)
            row |= held_bytes(cache, infos)
            row["bytes"] = row["cache_bytes"] / batch / tokens
            row |= timed(step_of(model, cache, batch), mode, a.seconds)
            if kind.startswith("k3v3"):
                said = cache.report()
                row |= {x: said[x] for x in ("backends", "coded", "reasons")}
                graphs = said["graphs"]
                row |= dict(replayed=graphs.get("replayed", 0), why=graphs.get("why_not", ""))
        say(row)
        yield row
        if kind == "k3v3" and "error" not in row:
            for info in firsts(infos):
                ran = sum(kind_of(x) == kind_of(info) for x in infos)
                row = head | dict(what="attention", ran=ran, count=spec.count[kind_of(info)])
                with noting(row, False):
                    row |= attention_row(model, cache, info, batch, tokens, a.seconds / 10)
                say(row)
                yield row
        cache = None


def say(row):
    "A row's error, whole: nothing else stops for it."
    if "error" in row:
        print(row["model"], row["what"], row["error"], flush=True)


def clean_up():
    if DEVICE == "cuda":
        clean()


def options(p):
    p.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    p.add_argument("--shapes", nargs="+", default=["8x32768", "1x131072"], metavar="BxT")
    p.add_argument("--seconds", type=float, default=0.5, help="for each step")
    p.add_argument("--tiny", action="store_true", help="small sizes: does the bench run?")


def plan(a):
    with torch.no_grad():
        models = {name: made(MODELS[name], a.tiny) for name in a.models}
        print(f"made after {seconds():.0f} s", flush=True)
        checked = gate(a, models)
    sizes = "small sizes" if a.tiny else "random weights, real sizes, fewer layers"
    return Plan(
        "shapes",
        checked,
        rows(a, models),
        {"id": "random states behind a prompt of 8 tokens", "n": len(a.shapes)},
        {"id": ", ".join(a.models), "revision": sizes},
    )
