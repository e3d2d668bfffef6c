"""One row for each cache: stored bits, perplexity, divergence, time of a prompt and of a token:
run.py columns --out FILE [--model M] [--text FOLDER] [--length N …] [--times B N S].

Windows are the first tokens of a folder's texts, in alphabetical order, of those that are long
enough. A row of `decode` or `stress` (all-quantised) is of float32 weights and bfloat16 states,
as chapter 28 says: stored bits, change of perplexity and its standard error, and of the
divergence from the uncompressed model's distribution the mean, its error, the median and the
99th percentile. A row of `time` is of bfloat16 weights and `model.generate()`: seconds of a
prompt with its first token, and of each of S tokens more, B prompts of N tokens at once.

Presets, and those with other scales, are read in one pass, others by caches of their
own: transformers' QuantizedCache on quanto and HQQ, with groups along channels of keys (axis -1
or 1) or as it comes; KIVI's codes as its paper has them, of at least the 128 newest values and
at most as many keys not coded; codecs of packages, unpacked below --peers, on every token.
`holds` says of what a time is: of codes, or of states that a codec decoded at once, whose bits
are then those that it counts.

Gate: one pass against token by token on the real cache of k3v3."""

import math
import sys
import time
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from eval.inputs import measured, opened, options as given, windows
from plan import Plan
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedCache

from turboquant_nb.evaluation.candidates import Candidate, as_candidate
from turboquant_nb.evaluation.score import (
    one_pass_gate,
    paired,
    prefill,
    score,
    select_backend,
    text_windows,
)
from turboquant_nb.hf import ModelInfo, TurboQuantCache
from turboquant_nb.quant.recipe import preset

PRESETS = "k2v2", "k3v3", "k4v4", "k2v2-scalar"
# how a scale is chosen, of keys and of values
SCALES = {
    "values unbiased": ("mse", "unbiased"),
    "keys by norm": ("norm", "unbiased"),
    "all unbiased": ("unbiased", "unbiased"),
}
GROUP, RESIDUAL = 32, 128  # of KIVI: numbers with one scale, tokens that are not coded


# --- caches that are not ours


class Codec(NamedTuple):
    "What another package or paper makes of states, as soon as they come."

    code: Callable  # (layer, tokens before, keys, values [B, H, n, d]) -> both, decoded
    bits: tuple  # stored for a key's number, and for a value's


class CodedLayer(DynamicLayer):
    "Holds what a codec makes of states."

    def __init__(self, code, index):
        super().__init__()
        self.code, self.index = code, index

    def update(self, key_states, value_states, *args, **kwargs):
        both = self.code(self.index, self.get_seq_length(), key_states, value_states)
        return super().update(*(x.to(key_states.dtype) for x in both))


class KiviLayer(DynamicLayer):
    "Codes tokens a residual at a time, values a residual later than keys."

    def __init__(self, code, index):
        super().__init__()
        self.code, self.done = code, [0, 0]

    def update(self, key_states, value_states, *args, **kwargs):
        if self.is_initialized:
            due = self.get_seq_length() // RESIDUAL * RESIDUAL
            self.keys, self.values = (
                self._coded(*x) for x in ((0, self.keys, due), (1, self.values, due - RESIDUAL))
            )
        return super().update(key_states, value_states)

    def _coded(self, side, held, due):
        new = slice(self.done[side], max(due, self.done[side]))
        part = held[:, :, new]
        if not part.shape[2]:
            return held
        self.done[side] = new.stop
        part = self.code(None, new.start, part, part)[side].to(held)
        return torch.cat([held[:, :, : new.start], part, held[:, :, new.stop :]], 2)


class Counted(Cache):
    "Layers that hold decoded states, and the bits that their codes would take."

    def __init__(self, model, codec, layer=CodedLayer, exact=(0, 0)):
        self.coded, self.bits, self.exact = ModelInfo(model).coded, codec.bits, exact
        super().__init__(layers=[layer(codec.code, i) for i in range(len(self.coded))])

    def report(self):
        "Stored bits a value, where a layer with a window holds no more than that."
        total = numbers = 0
        for x in self.coded:
            held = self.get_seq_length()
            held = held if x.sliding_window is None else min(held, x.sliding_window - 1)
            for size, bits, exact in zip((x.key_size, x.value_size), self.bits, self.exact):
                exact = min(exact, held)
                total += x.heads * size * (bits * (held - exact) + 16 * exact)
                numbers += x.heads * size * held
        return {"bits_per_value": total / numbers}


def min_max(x: Tensor, bits: int) -> Tensor:
    "Whole steps between the smallest and the largest of the last dimension's groups."
    groups = x.unflatten(-1, (-1, GROUP))
    low = groups.amin(-1, True).half().float()
    step = ((groups.amax(-1, True) - low) / (2**bits - 1)).half().float().clamp(1e-7)
    return (((groups - low) / step).round().clamp(0, 2**bits - 1) * step + low).flatten(-2)


def kivi(bits: int) -> Codec:
    """Keys in groups of tokens for each channel, values in groups of channels for each token,
    both with a scale and a zero of 16 bits. Source: Liu et al. 2024, arXiv 2402.02750, 3.3."""

    def code(_layer, _start, k, v):
        n = k.shape[2]
        whole = torch.cat([k, k[:, :, -1:].expand(-1, -1, -n % GROUP, -1)], 2).float()
        return min_max(whole.mT, bits).mT[:, :, :n], min_max(v.float(), bits)

    return Codec(code, (bits + 32 / GROUP,) * 2)


def fp8_calibrated(model, tokenizer) -> Codec:
    "A scale for the keys and one for the values of a layer, of the package's own text."
    ids = text_windows(tokenizer, None, 1, 1024).to(model.device)
    states = prefill(model, ids).states
    scales = {i: [x.abs().amax() / 448 for x in both] for i, both in states.items()}

    def code(layer, _start, *both):
        cut = ((x / s).clamp(-448, 448) for x, s in zip(both, scales[layer]))
        return [x.to(torch.float8_e4m3fn).to(s) * s for x, s in zip(cut, scales[layer])]

    return Codec(code, (8, 8))


def turbo_attn(bits, model, _tokenizer) -> Codec:
    from tkv import TkvCodec

    own = {}
    for x in ModelInfo(model).coded:
        own[x.key_size] = TkvCodec(x.key_size, bits, device=str(model.device))
    one, d = next(iter(own.values())), ModelInfo(model).coded[0].key_size

    def code(_layer, _start, k, v):
        flat = [x.float().reshape(-1, x.shape[-1]) for x in (k, v)]
        keys = one.decompress_k(*one.compress_k(flat[0]))
        return keys.view_as(k), one.decompress_v(*one.compress_v(flat[1])).view_as(v)

    return Codec(code, (8 * one.bytes_per_k_vector / d, 8 * one.bytes_per_v_vector / d))


def kakeya(q_range, model, _tokenizer) -> Codec:
    from kakeyalattice import V15KakeyaZamirE8GPU

    d = ModelInfo(model).coded[0].key_size
    one = V15KakeyaZamirE8GPU(D=d, q_range=q_range, device=str(model.device))
    code = lambda _layer, _start, *both: [one.roundtrip(x.float()) for x in both]
    return Codec(code, (one.bits_per_token_per_head / d,) * 2)


def nexusquant(bits, model, _tokenizer) -> Codec:
    from nexusquant.integrations.quantized_cache import E8QuantizedCache
    from nexusquant.pipeline import NexusQuantQuantOnly

    rope, one = NexusQuantQuantOnly(), E8QuantizedCache(*bits)
    rope.set_model_config(model.config.get_text_config())

    def code(layer, start, k, v):
        one.rope_base, _, one.rope_scaling = rope._resolve_layer_rope(layer)
        return one._e8_keys(k, start), one._e8_values(v)

    d = ModelInfo(model).coded[0].key_size
    # points of eight numbers: half of all whole ones, and all halves between; it counts 2**bits
    points = [((2**b + 1) ** 8 / 2 + 2 ** (8 * b)) for b in bits]
    return Codec(code, tuple(math.log2(x) / 8 + 16 / d for x in points))


def spectralquant(preset, model, tokenizer) -> Codec:
    import spectralquant

    d, own = ModelInfo(model).coded[0].key_size, model.config._attn_implementation
    one = spectralquant.SpectralQuant(compression=preset, head_dim=d, device=str(model.device))
    one.calibrate(model, tokenizer)
    model.set_attn_implementation(own)
    heads = one.engine._head_engines
    held = [torch.tensor(x.bytes_per_token(use_qjl=False)) for x in heads.values()]

    def code(layer, _start, k, v):
        out = [], []
        for h in range(k.shape[1]):
            one = heads[layer, h].to(k.device)
            keys = one.compress_keys(k[:, h].reshape(-1, d).half())["k_mse"]
            values = one.compress_values(v[:, h].reshape(-1, d).half())
            for x, like, found in zip(out, (k, v), (keys, values)):
                x.append(found.view_as(like[:, h]))
        return [torch.stack(x, 1) for x in out]

    return Codec(code, tuple((8 * torch.stack(held).mean(0) / d).tolist()))


PEERS = {  # name: (unpacked wheels, the codec, of which settings)
    "turbo-attn, 2 bits": ("turbo-attn", turbo_attn, 2),
    "turbo-attn, 4 bits": ("turbo-attn", turbo_attn, 4),
    "nexusquant-kv, K2V2": ("nexusquant-kv", nexusquant, (2, 2)),
    "nexusquant-kv, K3V2": ("nexusquant-kv", nexusquant, (3, 2)),
    "kakeyalattice, E8, Q 2": ("kakeyalattice", kakeya, 2),
    "kakeyalattice, E8, Q 10": ("kakeyalattice", kakeya, 10),
    "spectralquant, standard": ("spectralquant", spectralquant, "standard"),
}
QUANTIZED = {  # name: (backend, bits, axis of keys, of values, numbers with one scale)
    "quanto, 2 bits, keys by channel": ("quanto", 2, -1, 0, 32),
    "quanto, 4 bits, keys by channel": ("quanto", 4, -1, 0, 64),
    "HQQ, 2 bits": ("hqq", 2, 1, 1, 32),
    "HQQ, 4 bits": ("hqq", 4, 1, 1, 64),
}


def scaled(name, key, value):
    "A preset with other scales: `unbiased` keeps products with a vector, `norm` its length."
    recipe = preset(name)
    key, value = replace(recipe.key, scale=key), replace(recipe.value, scale=value)
    return replace(recipe, key=key, value=value)


def of_backend(name, model, protocol):
    backend, bits, key, value, group = QUANTIZED[name]
    if protocol == "stress" and key == -1:
        group = 32  # quanto's groups of channels must divide a window's 1,023 tokens
    about = dict(nbits=bits, axis_key=key, axis_value=value, q_group_size=group)
    make = lambda: QuantizedCache(backend, model.config, **about)
    return Candidate(name, make, block=RESIDUAL)


def of_codec(name, model, codec, protocol=None):
    return Candidate(name, lambda: Counted(model, codec), block=0)


def of_kivi(bits, model, protocol):
    name, codec = f"KIVI, {bits} bits", kivi(bits)
    if protocol == "stress":
        return of_codec(name, model, codec)
    exact = RESIDUAL / 2, RESIDUAL  # of keys on average
    make = lambda: Counted(model, codec, KiviLayer, exact)
    return Candidate(name, make, block=RESIDUAL)


def candidates(a, model, tokenizer, length=None):
    """(name, what its cache holds, package, protocol -> Candidate), the important first. Ours
    have room for `length` tokens, which is what they are said to store."""
    ours = lambda what: lambda _protocol: as_candidate(model, what, max_length=length)
    for name in PRESETS:
        yield name, "codes", None, ours(name)
    for name, (how, scales) in product(PRESETS, SCALES.items()):
        if (recipe := scaled(name, *scales)) != preset(name):
            yield f"{name}, {how}", "codes", None, ours(recipe)
    for name in ("fp8-head", "fp8-tensor"):
        yield name, "codes", None, lambda _protocol, name=name: as_candidate(model, name)
    fp8 = cache(lambda: fp8_calibrated(model, tokenizer))
    calibrated = lambda _protocol: of_codec("", model, fp8())
    yield "fp8, calibrated", "decoded states", None, calibrated
    for bits in (2, 4):
        yield f"KIVI, {bits} bits", "decoded states", None, partial(of_kivi, bits, model)
    for name, (backend, *_) in QUANTIZED.items():
        yield name, "codes", backend, partial(of_backend, name, model)
    for name, (package, codec, setting) in PEERS.items():

        @cache  # calibrated once
        def made(package=package, codec=codec, setting=setting):
            if a.peers is None:
                raise ImportError(f"--peers has no {package}")
            sys.path.insert(0, str(Path(a.peers).resolve() / package))
            return codec(setting, model, tokenizer)

        peer = lambda _protocol, made=made: of_codec("", model, made())
        yield name, "decoded states", package, peer


# --- rows


class Scored(NamedTuple):
    "Windows of one length, and the uncompressed model's losses there."

    ids: Tensor  # [n, length]
    prompt: int
    batch: int
    plain: object  # `Scores`

    def row(self, model, candidate, protocol):
        about = self.prompt, self.batch
        got = score(model, self.ids, candidate, protocol, *about, distributions=True)
        each = got.kl.mean(1)
        percent, stderr = paired(got.loss, self.plain.loss)
        return self.about(got.loss, got.bits) | dict(
            percent=percent,
            stderr=stderr,
            kl=float(each.mean()),
            kl_stderr=float(each.std() / len(each) ** 0.5),
            kl_median=float(got.kl.median()),
            kl_99=float(got.kl.flatten()[:: -(-got.kl.numel() // 10**7)].quantile(0.99)),
            top1=float(got.same.double().mean()),
            read=select_backend(candidate, protocol).name,
        )

    def about(self, loss, bits):
        losses = [round(float(x), 6) for x in loss.mean(1)]
        return dict(
            bits=bits, ppl=float(loss.mean().exp()), n=loss.numel(), window_losses=losses
        )


def timed(model, make, shape):
    "Seconds of prompts with their first tokens, and of a token more: medians of three calls."
    batch, length, steps = shape
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 10_000, (batch, length), generator=g).to(model.device)
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None

    def call(n):
        held = make()
        wait()
        began = time.perf_counter()
        about = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False)
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=held, **about)
        wait()
        return time.perf_counter() - began

    call(3)
    first, whole = (sorted(call(n) for _ in range(3))[1] for n in (1, 1 + steps))
    return dict(prompt_s=first, token_s=(whole - first) / steps)


def options(p):
    given(p)
    p.add_argument("--windows", type=int, default=32)
    p.add_argument("--length", type=int, nargs="+", default=[1024])
    p.add_argument("--long-windows", type=int, default=2, help="of more than 4,096 tokens")
    p.add_argument("--prompt", type=int, help="default: a half, and all but 4,096 tokens")
    p.add_argument("--batch", type=int, default=4, help="windows of up to 4,096 tokens")
    p.add_argument("--protocols", nargs="*", default=["decode", "stress"])
    p.add_argument("--only", nargs="+", help="beginnings of names")
    p.add_argument("--times", type=int, nargs=3, metavar=("B", "N", "S"), default=(8, 4096, 64))
    p.add_argument("--peers", help="folder of unpacked wheels, one folder each")


def scored(a, model, tokenizer, length):
    n = a.windows if length <= 4096 else a.long_windows
    ids = windows(a.text, tokenizer, n, length).to(model.device)
    prompt = a.prompt or max(length // 2, length - 4096)
    batch = a.batch if length <= 4096 else 1
    return Scored(ids, prompt, batch, score(model, ids, None, "stress", prompt, batch))


def rows(a, model, tokenizer, known):
    wanted = lambda name: not a.only or name.startswith(tuple(a.only))
    of_length = lambda n: [x for x in candidates(a, model, tokenizer, n) if wanted(x[0])]
    for length in a.length if a.protocols else ():
        every = of_length(length)
        here = scored(a, model, tokenizer, length)
        about = dict(
            length=length, prompt=here.prompt, windows=len(here.ids), unit="perplexity"
        )
        plain = dict(cache="uncompressed", protocol="all") | about
        if ("uncompressed", "all", length) not in known:
            yield plain | here.about(here.plain.loss, 32.0)
        for (name, holds, package, new), protocol in product(every, a.protocols):
            if (name, protocol, length) in known:
                continue
            row = dict(cache=name, protocol=protocol, package=package, holds=holds) | about
            try:
                candidate = replace(new(protocol), name=name)
                row |= here.row(model, candidate, protocol)
            except Exception as error:  # what a package raises is what a reader wants to know
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            yield row
    for p in model.parameters():
        p.data = p.data.bfloat16()
    batch, tokens, steps = a.times
    if not batch:
        return
    room = dict(max_length=tokens + steps + 1)
    makers = [("uncompressed", "states", lambda: DynamicCache(config=model.config))]
    for name, holds, _, new in of_length(None):
        if name.endswith(tuple(SCALES)):  # takes no other time
            continue
        ours = lambda name=name: TurboQuantCache(model, name, **room)
        theirs = lambda new=new: new("decode").make()
        makers.append((name, holds, ours if name in PRESETS else theirs))
    for name, holds, make in makers:
        if (name, "time", tokens) in known:
            continue
        row = dict(cache=name, protocol="time", length=tokens, batch=batch, steps=steps)
        try:
            row |= timed(model, make, a.times) | dict(holds=holds, n=3)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield row | dict(unit="seconds")


def plan(a):
    model, tokenizer, about = opened(a)
    before = measured(a)
    known = {(r["cache"], r["protocol"], r["length"]) for r in before}
    gate = one_pass_gate(model, windows(a.text, tokenizer, 1, 80).to(model.device))
    data = {"id": a.data_id, "n": a.windows}
    return Plan("columns", gate, rows(a, model, tokenizer, known), data, about, before=before)
