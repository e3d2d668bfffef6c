"""What several tests share: where files of older versions lie, tiny random models of every
family, and how they generate."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from turboquant_nb.cache.clock import CAPTURE
from turboquant_nb.cache.budget import TieredStore, ladder
from turboquant_nb.cache.pages import Recent
from turboquant_nb.cache.store import KVStore
from turboquant_nb.kernels import decode_mma, launch
from turboquant_nb.quant.calibration import Calibration, LayerFrame
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.theory.rotation import Transform
from turboquant_nb.theory.transforms import HeadTransform, register_transform

SLOW = bool(
    os.environ.get("TURBOQUANT_SLOW")
)  # everything; without it the widest matrices are truncated (CONTRIBUTING.md says which)

ROOT = Path(__file__).parents[1]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
needs_triton = pytest.mark.skipif(
    not CUDA and not launch.is_interpreted(), reason="needs Triton"
)
needs_gluon = pytest.mark.skipif(
    decode_mma.gluon.language is None, reason="needs Triton 3.6, whose Gluon has mma_v2"
)
interpreted = pytest.mark.skipif(
    CUDA or not launch.is_interpreted(), reason="Triton's interpreter, where there is no GPU"
)
ONE_THREAD = pytest.mark.usefixtures("one_thread")
QUIETLY = [ONE_THREAD, pytest.mark.filterwarnings("ignore")]


def refuses(why, kind=ValueError):
    "What follows is refused in words that match `why`."
    return pytest.raises(kind, match=why)


def seeded(seed=0):
    "A generator that begins with this seed."
    return torch.Generator().manual_seed(seed)


def cells(name, kind=None):
    "Cells of the notebook of this name, all or of a kind."
    (path,) = (ROOT / "nbs").rglob(f"{name}.ipynb")
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in found if kind in (None, c["cell_type"])]


def source(cell):
    return "".join(cell["source"])


def covering_pairs(one, other):
    """Every pair of two lists where TURBOQUANT_SLOW is set; else each of the longer one once,
    with the others in turn."""
    if SLOW:
        return [(a, b) for a in one for b in other]
    return [
        (one[i % len(one)], other[i % len(other)]) for i in range(max(len(one), len(other)))
    ]


def ahead_of_time(*cases, of="", by="golden.kernels"):
    """Rows of what kernels need that are compiled for a GPU: names, or cases of a part of the
    package, by a module of tests. A process of its own, since the interpreter excludes the
    compiler."""
    texts = (x if isinstance(x, str) else f"{of} {json.dumps(x)}".strip() for x in cases)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.{by}", *texts]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def host_calls(step):
    "Functions that Python calls in a step, its own and C's."
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


class Calls(TorchDispatchMode):
    """Counts PyTorch's operations; not the questions by which `Tensor.numpy` asks, in such a
    mode alone, whether it may."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += (
            func.overloadpacket.__name__ not in ("detach", "resolve_conj", "resolve_neg")
            and func._overloadname != "dtype_layout"
        )
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    "Names of what is computed or copied."

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [] if func.is_view else [func.overloadpacket.__name__]
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    "The largest tensor that torch makes, in bytes."

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


class FoundOnce:
    """A kernel that gives what it compiled, as Triton's compiler does and its interpreter does
    not; how often it was searched for, and how often what was found was launched."""

    def __init__(self, kernel):
        self.kernel, self.searched, self.launched = kernel, 0, 0

    def __getitem__(self, grid):
        def search(*args, **options):
            self.searched += 1
            return self.kernel[grid](*args, **options) or self.Compiled(self)

        return search

    class Compiled:
        def __init__(self, found):
            self.found = found

        def __getitem__(self, grid):
            def launch(*args):
                self.found.launched += 1
                self.found.kernel[grid](*args)

            return launch


@contextmanager
def recording():
    "What runs here is as in a recorded step: the device counts, the host is told nothing."
    CAPTURE.tape = True
    try:
        yield
    finally:
        CAPTURE.tape = False


class RecentBlocks:
    """An engine's blocks of recent tokens, for requests whose tokens are numbers and whose
    states are those numbers: whole units are shared by requests that begin alike, from the
    moment they are scheduled; what lies behind a window is given to others, full of NaN."""

    def __init__(self, block, sinks, window, unit, gen, store, locate, blocks=200):
        self.block, self.sinks, self.window, self.unit, self.gen, self.store, self.locate = (
            block,
            sinks,
            window,
            unit,
            gen,
            store,
            locate,
        )
        self.cache, self.known, self.rows, self.past = (
            torch.full((blocks, 2, block + sinks, 2), torch.nan),
            {},
            {},
            {},
        )
        self.seen = dict(hits=0, followed=0, freed=0, read=0)

    def begin(self, name, ids):
        """Give a request the longest known beginning, of whole units, that leaves a token to
        compute."""
        n, p = self.block, (len(ids) - 1) // self.unit * self.unit
        needed = lambda p: range(max(0, p - self.window) // n, p // n)
        while p and not all(tuple(ids[: (i + 1) * n]) in self.known for i in needed(p)):
            p -= self.unit
        self.rows[name], self.past[name] = (
            [
                self.known.get(tuple(ids[: (i + 1) * n]), 0) if i in needed(p) else 0
                for i in range(p // n)
            ],
            p,
        )
        self.seen["hits"] += p > 0

    def end(self, name):
        del self.rows[name], self.past[name]

    def step(self, work):
        """work: {request: (its tokens up to the end of this step, how many of them stay)}.
        Returns what is wrong with the first tokens that are read."""
        news, n = [], self.block
        for name, (ids, stay) in work.items():
            row = self.rows[name]
            row += [self.free() for _ in range(-(-len(ids) // n) - len(row))]
            self.known |= {
                tuple(ids[: (i + 1) * n]): row[i]
                for i in range(self.past[name] // n, stay // n)
            }
            news.append(torch.tensor(ids[self.past[name] :]))
            for (
                later
            ) in work:  # those that begin in this step may begin with what was just scheduled
                if later not in self.rows:
                    self.begin(later, work[later][0])
                    break
        names, pasts = list(work), [self.past[x] for x in work]
        order = torch.randperm(len(names), generator=self.gen).tolist()
        names, pasts, news = ([x[i] for i in order] for x in (names, pasts, news))
        table = torch.zeros(
            len(names), max(len(self.rows[x]) for x in names), dtype=torch.int32
        )
        for row, name in zip(table, names):
            row[: len(self.rows[name])] = torch.tensor(self.rows[name])
        slots = torch.cat(
            [
                row[(t := torch.arange(p, p + len(x))) // n] * n + t % n
                for row, p, x in zip(table, pasts, news)
            ]
            + [torch.full((2,), -1)]
        )
        starts = torch.tensor([0, *map(len, news)], dtype=torch.int32).cumsum(0).int()
        lengths = torch.tensor([p + len(x) for p, x in zip(pasts, news)], dtype=torch.int32)
        x = (
            torch.cat([*news, torch.zeros(2)])[:, None, None]
            .expand(-1, 2, 1)
            .float()
            .contiguous()
        )
        origins = self.locate(table, lengths, starts, slots, n, self.sinks)
        self.store(self.cache, x, -x, slots, origins)
        for a, z, p in zip(starts.tolist(), starts[1:].tolist(), pasts):
            self.seen["followed"] += int(
                ((origins[a:z] >= 0) & ((origins[a:z] < a) | (origins[a:z] >= z))).sum()
            )
        recent, wrong = Recent(self.cache, table, self.window, self.sinks), []
        for i, (name, p) in enumerate(zip(names, pasts)):
            (((k, v), _),) = recent.read(recent.places([(i, p)]), 1)
            ids = torch.tensor(work[name][0][: len(k)])[:, None, None].expand(-1, 2, 1)
            self.seen["read"] += len(k)
            if not (torch.equal(k, ids.float()) and torch.equal(v, -ids.float())):
                wrong.append((name, p, k[:, 0, 0].tolist()))
            self.past[name] = work[name][1]
        return wrong

    def free(self):
        "A block that no window needs, full of NaN."
        held = {
            b
            for name, row in self.rows.items()
            for b in row[max(0, self.past[name] - self.window) // self.block :]
        }
        block = next(
            b
            for b in torch.randperm(len(self.cache), generator=self.gen).tolist()
            if b and b not in held
        )
        self.seen["freed"] += bool(self.cache[block].isfinite().any())
        self.known = {ids: b for ids, b in self.known.items() if b != block}
        self.cache[block] = torch.nan
        return block


def random_history(engine, steps, gen):
    """Requests with common beginnings that come in chunks, begin together, draft, are thrown
    out and end. Returns what was wrong, and counts."""
    draw = lambda low, high: int(torch.randint(low, high, (), generator=gen))
    text, alive, wrong, born = [], {}, [], 0
    for _ in range(steps):
        if len(alive) < 2:
            text = torch.randint(1, 999, (2, 60), generator=gen).tolist()
        for _ in range(4 if len(alive) < 2 else 0):
            alive[born] = [
                *text[draw(0, 2)][: draw(0, 60)],
                *torch.randint(1, 999, (draw(1, 30),), generator=gen).tolist(),
            ]
            born += 1
        for name in list(engine.rows):
            if draw(0, 12) == 0:  # thrown out, and it comes back
                engine.end(name)
        if not engine.rows:
            engine.begin(next(iter(alive)), next(iter(alive.values())))
        work = {}
        for name in [*engine.rows, *(x for x in alive if x not in engine.rows)]:
            ids, p = alive[name], engine.past.get(name, 0)
            stay = min(len(ids), p + draw(1, 9)) if name in engine.rows else len(ids)
            drafts = (
                torch.randint(1, 999, (draw(1, 4),), generator=gen).tolist()
                if stay == len(ids) and draw(0, 2)
                else []
            )
            work[name] = ([*ids[:stay], *drafts], stay)
        wrong += engine.step(work)
        for name in [x for x in alive if engine.past[x] == len(alive[x])]:
            if draw(0, 6) == 0:
                engine.end(name)
                del alive[name]
            else:
                alive[name] = [*alive[name], draw(1, 999)]
    return wrong, engine.seen


DATA = Path(__file__).parent / "data"
VOCAB, DROP = 61, "drop this entry"
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
MOE = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(  # multi-head latent attention
    MOE,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=8,
    q_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=6,
    num_key_value_heads=4,
)
SLIDES = dict(sliding_window=12, layer_types=["sliding_attention", "full_attention"])
SHARING = dict(  # the last layers read the keys of others
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    sliding_window=8,
    layer_types=SLIDES["layer_types"] * 2,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=VOCAB,
)
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=12)),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", dict(sliding_window=12, query_pre_attn_scalar=8)),
    "gemma3_text": ("Gemma3Text", dict(SLIDES, query_pre_attn_scalar=8)),
    "gemma3n_text": (
        "Gemma3nText",
        dict(SHARING, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4),
    ),
    "gemma4_text": ("Gemma4Text", dict(SHARING, global_head_dim=16)),
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    "gpt_neox": ("GPTNeoX", dict(rotary_pct=0.5)),
    "opt": ("OPT", dict(ffn_dim=48, word_embed_proj_dim=32)),
    "falcon": (
        "Falcon",
        dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False, head_dim=DROP),
    ),
    "stablelm": ("StableLm", {}),
    "cohere2": ("Cohere2", SLIDES),
    "gpt_oss": ("GptOss", dict(MOE, **SLIDES)),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0])),
    "mixtral": ("Mixtral", dict(MOE, sliding_window=None)),
    "phi": ("Phi", {}),
    "glm4": ("Glm4", {}),
    "deepseek_v3": ("DeepseekV3", dict(LATENT, head_dim=4)),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            MOE,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            decoder_sparse_step=1,
        ),
    ),
    "lfm2": ("Lfm2", dict(layer_types=["conv", "full_attention"])),
    "falcon_h1": (  # both in one layer
        "FalconH1",
        dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
    ),
}
HYBRID = (
    "qwen3_next",
    "lfm2",
    "falcon_h1",
)  # layers with a recurrent state: transformers' own, not to be cropped
SLIDING = ("mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss")
MODES = {
    "beams": dict(num_beams=3),
    "beams returned": dict(num_beams=4, num_return_sequences=2, length_penalty=0.7),
    "sampling": dict(do_sample=True, num_return_sequences=2, top_k=20, temperature=0.8),
    "beam sampling": dict(num_beams=2, do_sample=True),
    "prefill in chunks": dict(prefill_chunk_size=18),
    "repetition penalty": dict(repetition_penalty=1.3),
}
_made = {}


def tiny(name="llama", seed=0, **changes):
    "A random model with weights large enough that its tokens depend on the context."
    key = (name, seed, repr(sorted(changes.items())))
    if key not in _made:
        import transformers

        prefix, extra = FAMILIES.get(name, (name, {}))
        settings = {k: x for k, x in {**BASE, **extra, **changes}.items() if x != DROP}
        config = getattr(transformers, prefix + "Config")(**settings)
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        generator = seeded(seed)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(0, 0.15, generator=generator)
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        _made[key] = model, versions(model)
    model, before = _made[key]
    assert versions(model) == before, (
        "a test changed weights of a model that others use: copy it"
    )
    model.set_attn_implementation("sdpa" if fused(model) else "eager")
    return model


HEADS, GROUP = 1, 2  # KV heads, and query heads of each


def sliding_config(window, *kinds):
    "A configuration of so many layers of one head of 16 channels, without a model."
    from transformers import Gemma3TextConfig

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    heads = dict(num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS)
    of_layers = dict(num_hidden_layers=len(kinds), layer_types=[*kinds], sliding_window=window)
    config = Gemma3TextConfig(**dict.fromkeys(sizes, 16), **heads, **of_layers)
    config._attn_implementation = "sdpa"
    return config


def versions(model):
    "How often each weight was written to."
    return [p._version for p in model.parameters()]


def fused(model):
    """Whether SDPA computes what the model says: it knows no softcap, and transformers 5.17
    drops Gemma 2's without a word."""
    return (
        model._supports_sdpa and getattr(model.config, "attn_logit_softcapping", None) is None
    )


def prompt(batch=3, length=30, seed=0, padded=True):
    g = seeded(seed)
    ids = torch.randint(2, VOCAB, (batch, length), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        for row, n in enumerate((0, 7, 13)[:batch]):
            ids[row, :n], mask[row, :n] = 0, 0
    return dict(input_ids=ids, attention_mask=mask)


def cache_for(model, *args, **kwargs):
    """A cache that is read on codes where the model is set to "turboquant", and decoded for any
    other attention: the two paths that must agree."""
    from turboquant_nb.hf import TurboQuantCache

    own = model.config.get_text_config()._attn_implementation != "turboquant"
    return TurboQuantCache(model, *args, attention="dense" if own else "auto", **kwargs)


def generate(model, inputs, attention, recipe="k4v4", cache=None, padding=True, **kwargs):
    '(tokens, cache) under one attention implementation, decoded but for "turboquant".'
    model.set_attn_implementation(attention)
    if cache is None:
        cache = cache_for(model, recipe)
        if padding and "attention_mask" in inputs:
            cache.set_padding(inputs["attention_mask"])
    torch.manual_seed(7)
    return model.generate(
        **inputs,
        **{"max_new_tokens": 8, "do_sample": False, "past_key_values": cache, **kwargs},
    ), cache


def given_frame(source, seed=0):
    "A random frame of a model or of its config, another one in each layer."
    from turboquant_nb.hf import ModelInfo

    info = ModelInfo(source)
    of = lambda x: random_frame(x.heads, x.key_size, x.rotary_size, 100 * seed + x.index)
    frames = tuple(LayerFrame() if x.latent else of(x) for x in info.coded)
    return Calibration([], {"about": info.facts, "tokens": 0, "gain": []}, frames)


def exact_recipe():
    "Everything lies in the window: the cache must then equal transformers' own."
    return Recipe(sinks=0, recent=512)


def three(model):
    "The attentions to compare."
    return [a for a in ("eager", "sdpa", "turboquant") if a != "sdpa" or fused(model)]


# --- calibrated ones

MODELS = {  # to calibrate: name and what changes
    "llama": {},
    "qwen2": {},  # a bias of keys
    "mistral": {},  # all layers slide
    "gemma3_text": dict(
        head_dim=16
    ),  # norms of q and k, two bases of RoPE, a head size that is not hidden / heads
    "gemma2": {},  # softcap
    "qwen3": {},  # norms of q and k
    "stablelm": {},  # RoPE on a quarter of the channels
    "gpt_neox": dict(
        num_key_value_heads=DROP
    ),  # RoPE on half of them; its config knows no KV heads
}
_found = {}


def made(name):
    """A random model of its own, whose channels of queries and keys are of unequal size, and
    its calibration."""
    from turboquant_nb.calibration.fit import calibrate

    if name not in _found:
        model = tiny(name, seed=5, **MODELS[name])
        g = seeded(6)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if any(x in n for x in ("k_proj.bias", "q_norm", "k_norm")):
                    p.normal_(0, 1, generator=g)
                elif p.ndim > 1 and ("k_proj" in n or "q_proj" in n):
                    p.mul_(torch.randn(len(p), 1, generator=g).exp2())
        _found[name] = model, calibrate(model, texts(4, 60, seed=3))
    model, found = _found[name]
    model.set_attn_implementation("sdpa" if fused(model) else "eager")
    return model, found


def texts(n=2, length=40, seed=0):
    return prompt(n, length, seed, padded=False)["input_ids"]


def longer(mask, n):
    "An attention mask after n tokens more."
    return torch.nn.functional.pad(mask, (0, n), value=1)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def random_transform(heads, d):
    "Matrices that are no rotations, other ones for each head."
    g = seeded(heads * 1000 + d)
    u, v = torch.linalg.qr(torch.randn(2, heads, d, d, generator=g))[0]
    return register_transform(HeadTransform.of(u * torch.linspace(0.3, 2, d) @ v))


def random_frame(heads, d, rotary=0, seed=0):
    """A layer's frame that says something of every channel: means (the one before RoPE where
    channels rotate), and a pair scale, alike in both channels of a RoPE pair."""
    g = seeded(1000 * seed + 10 * heads + d)
    mean, fixed = 2 * torch.randn(2, heads, d, generator=g)
    pair, half = (torch.randn(heads, d, generator=g) / 2).exp2(), rotary // 2
    pair[:, half:rotary] = pair[:, :half]
    return LayerFrame(mean if rotary else None, fixed, pair)


class Shuffle(Transform):
    "Channels in another order, without signs: a transform that the package does not have."

    name = "shuffle"

    def __init__(self, order):
        self.d, self.order, self.matrix = len(order), order, torch.eye(len(order))[order]

    def apply(self, x):
        return x.float()[..., self.order]

    def inverse(self, y):
        return y.float()[..., self.order.argsort()]

    def to(self, device):
        return self


def attended_store(
    B=2,
    H=2,
    G=2,
    d=32,
    dv=None,
    T=300,
    kb=3,
    vb=3,
    n=1,
    dtype=torch.float32,
    center="fixed",
    sinks=4,
    win=16,
    m=0,
    start=None,
    rotary=None,
    rotating=None,
    static=False,
    scale="mse",
    rot="hadamard",
    tile=256,
    residual="none",
    evict=0,
    big=False,
    scale_dtype="float16",
    table="sphere",
    tiers=(),
    base=10000.0,
):
    """A query, a store with T tokens, and the last m of them exact. `tiers`: where those of 2,
    3 and 4 bits end, and the others lie as they came."""
    g = seeded(1)
    rand = lambda *s: torch.randn(*s, generator=g)
    dv = dv or d
    spec = dict(scale=scale, scale_dtype=scale_dtype, codebook=table)
    of_keys, of_values = (
        (random_transform(H, d).name, "hadamard") if rot == "transform" else (rot, rot)
    )
    recipe = Recipe(
        Spec(bits=kb, center=center, residual=residual, rotation=of_keys, **spec),
        Spec(bits=vb, rotation=of_values, **spec),
        sinks=sinks,
        recent=win,
    )
    inv_freq = (
        base ** (-torch.arange(0, rotary or d, 2) / (rotary or d))
        if center == "pre_rope"
        else None
    )
    if rotating:  # channel pairs; the others have frequency 0
        inv_freq[rotating:] = 0
    more = dict(max_length=T + 8, static=True) if static else {}
    k, v = rand(B, H, T, d) + 2 * rand(1, H, 1, d), rand(B, H, T, dv) + rand(1, H, 1, dv)
    mean = k.mean((0, 2))
    more |= dict(inv_freq=inv_freq, frame=LayerFrame(mean, mean))
    how = (B, H, d, dv, dtype, DEVICE)
    store = TieredStore if tiers else KVStore
    store = store(ladder(top=recipe) if tiers else recipe, *how, tile=tile, **more)
    if start is not None:
        store.set_range(start=torch.tensor(start))
    q = rand(B, n, H * G, d).transpose(1, 2)
    if big:
        v[:, :, T // 2] *= 1000
        q[..., 0] *= 1000
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    store.append(k[:, :, :-n], v[:, :, :-n])
    store.append(k[:, :, -n:], v[:, :, -n:])
    if tiers:
        store.settle((0, *tiers, T))
    if evict:
        store.evict(evict)
    return q, store, dict(k=k[:, :, -m:], v=v[:, :, -m:]) if m else {}
