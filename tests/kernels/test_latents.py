"""The kernels for latents against attention in fp64 on what codes stand for: in Triton's
interpreter, on a GPU where there is one, with operands in registers too."""

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from tests.helpers import SLOW, ahead_of_time
from turboquant_nb.cache.attention import Call, attend, visible
from turboquant_nb.cache.store import KVStore
from turboquant_nb.kernels import latents, ops
from turboquant_nb.kernels.latents import Form, Latents, refuses
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(latents.triton.language is None, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
needs_gluon = pytest.mark.skipif(
    latents.gluon.language is None, reason="needs Triton 3.6, whose Gluon has mma_v2"
)
FORMS = [None, Form(16, 16, 8, 1, 1)] if CUDA else [None]


def made(b=2, r=64, t=16, n=(300,), bits=(3, 4), dtype=torch.float32, start=None, **more):
    "A store of latents, and their exact states."
    g = torch.Generator().manual_seed(r + t)
    exact = {name: more.pop(name) for name in ("sinks", "recent") if name in more}
    settings = {
        name: more.pop(name) for name in ("tile", "static", "max_length") if name in more
    }
    recipe = Recipe(*(Spec(x, **more) for x in bits), **exact)
    store = KVStore(recipe, b, 1, r, t, dtype, DEVICE, **settings)
    if start is not None:
        store.set_range(start=torch.tensor(start))
    states = [torch.randn(b, 1, sum(n), d, generator=g).to(dtype) + 0.5 for d in (r, t)]
    for a, z in zip([sum(n[:i]) for i in range(len(n))], n):
        store.append(*(x[:, :, a : a + z].to(DEVICE) for x in states))
    return store, [x.to(DEVICE) for x in states]


def decoded(store, part, side):
    "What codes stand for, in fp64: [B, T, d]."
    coded, rotation = store.coded(side, store.offset, store.length), part.q.rotation
    levels = part.q.code.levels(coded.codes).double() * coded.scale.double()[..., None]
    mean = 0 if part.mean is None else part.mean.double()
    return (levels @ rotation.matrix.double() + mean)[:, 0]


def oracle(call):
    "Attention in fp64."
    store, rule, q = call.store, call.rule, call.q.double()
    n, past = q.shape[2], store.length - (0 if call.k is None else call.k.shape[2])
    coded = [decoded(store, part, side) for part, side in zip(store.parts, ("key", "value"))]
    exact = [store.exact(side) for side in ("key", "value")]
    at = torch.arange(store.offset, store.length, device=q.device)
    seen = visible(store, n, at[None], True, rule.sliding_window)  # [B, 1, n, T]
    out = torch.zeros(*q.shape[:3], store.key.q.d, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device)
    for b in range(len(q)):
        for i in range(n):
            sides = [x[b].clone() for x in coded]
            near = at[-1] - n + i + 2 - (call.recent or store.length)  # exact from here on
            for x, (states, places) in zip(sides, exact):
                for state, place in zip(states[b, 0], places[b % len(places)].tolist()):
                    sink = place < int(store.start[b]) + store.recipe.sinks
                    if store.offset <= place < past and (sink or place >= near):
                        x[place - store.offset] = state.double()
            values = sides[0].clone()
            if call.k is not None:
                own = at[at >= past][at[at >= past] >= near] - past
                k = call.k[b, 0, own].double().split([x.shape[1] for x in sides], -1)
                for x, state in zip(sides, k):
                    x[own + past - store.offset] = state
                values[own + past - store.offset] = call.v[b, 0, own].double()
            scores = q[b, :, i] @ torch.cat(sides, -1).T * rule.scaling
            if rule.softcap:
                scores = rule.softcap * (scores / rule.softcap).tanh()
            scores = scores.masked_fill(~seen[b % len(seen), 0, i], -torch.inf)
            lse[b, :, i] = scores.logsumexp(-1)
            out[b, :, i] = (scores - lse[b, :, i, None].clamp(min=-1e38)).exp() @ values
    return out, lse


def check(store, heads, n=1, chunk=0, states=None, form=None, splits=None, **rule):
    "The kernel's error against fp64: at most three times that of the reference, in fp32."
    g = torch.Generator().manual_seed(heads)
    sizes = sum(part.q.d for part in store.parts)
    q = torch.randn(store.batch, heads, n, sizes, generator=g).to(DEVICE, store.dtype)
    k = v = None
    if chunk:
        k, v = torch.cat(states, -1)[:, :, -chunk:], states[0][:, :, -chunk:] * 0.5
    call = Call.of(q, store, k, v, scaling=0.2, latent=True, **rule).into_frame()
    want, lse = oracle(call)
    assert not refuses(call)
    ours, theirs = (
        Latents(form, splits).run(call),
        attend(q, store, k, v, scaling=0.2, latent=True, **rule),
    )
    far = lambda x, y: float((x.double() - y).norm() / y.norm().clamp(min=1e-30))
    assert far(ours.out, want) <= 3 * far(theirs.out, want) + 1e-6, (
        far(ours.out, want),
        far(theirs.out, want),
    )
    error = (ours.lse.double() - lse).nan_to_num(0).abs().max()  # rows that see nothing: -inf
    assert error <= (1e-5 if store.dtype == torch.float32 else 3e-3)
    assert torch.equal(ours.lse.isinf(), lse.isinf())
    return ours


CASES = {
    "one token": (dict(n=(1,), sinks=0, recent=0), dict(heads=4)),
    "nothing coded yet": (dict(n=(1,), sinks=4, recent=8), dict(heads=2)),
    "sinks and recent tokens": (dict(n=(300, 1, 7), sinks=2, recent=9), dict(heads=8, n=3)),
    "512 and 64 channels": (dict(b=1, r=512, t=64, sinks=2, recent=5), dict(heads=3)),
    "256 and 64, centred": (
        dict(b=1, r=256, t=64, center="prompt_mean", dtype=torch.bfloat16),
        dict(heads=2),
    ),
    "sizes that are no power of two": (dict(r=48, t=32, bits=(2, 3)), dict(heads=20)),
    "128 heads": (dict(b=1, n=(100,), r=32), dict(heads=128)),
    "padding": (dict(start=[0, 70], sinks=3, recent=4), dict(heads=4, n=2)),
    "a row that sees nothing": (dict(start=[0, 299], sinks=0, recent=0), dict(heads=2, n=3)),
    "a window": (dict(n=(700,), sinks=0, recent=0), dict(heads=4, sliding_window=100)),
    "a window and exact tokens": (dict(n=(520,)), dict(heads=4, n=4, sliding_window=300)),
    "a cap": (dict(bits=(4, 2)), dict(heads=4, softcap=2.0)),
    "a chunk": (dict(sinks=2, recent=5), dict(heads=4, n=7, chunk=9)),
    "drafts": (dict(sinks=2, recent=5), dict(heads=2, n=17, chunk=20, recent=3)),
    "small tiles, haar": (dict(tile=64, rotation="haar"), dict(heads=4, splits=3)),
    "fp16": (dict(dtype=torch.float16, scale_dtype="bfloat16"), dict(heads=4, chunk=2)),
    "bf16": (dict(dtype=torch.bfloat16, scale="norm"), dict(heads=4)),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name, form):
    case, how = CASES[name]
    store, states = made(**case)
    check(store, states=states, form=form, **how)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("seed", range(6) if CUDA or SLOW else (0, 2, 4, 5))
def test_random_cases(seed, form):
    draw = random.Random(seed)
    pick = lambda *x: draw.choice(x)
    sinks, recent, length = pick(0, 3), pick(0, 1, 40), draw.randint(30, 400)
    store, states = made(
        b=pick(1, 2),
        r=pick(32, 96, 256, 512) if CUDA else pick(32, 80, 128),
        t=pick(16, 64),
        n=(length - 9, 9),
        bits=(pick(2, 3, 4), pick(2, 3, 4)),
        dtype=pick(torch.float32, torch.float16, torch.bfloat16),
        center=pick("none", "prompt_mean"),
        sinks=sinks,
        recent=recent,
    )
    n = pick(1, 1, 2, 3)
    how = dict(sliding_window=pick(None, 70), softcap=pick(None, 3.0), splits=pick(None, 1, 7))
    check(store, pick(1, 5, 16, 20), n, pick(0, n + 2), states, form, **how)


def test_splits_agree_and_a_wrong_scale_shows():
    store, _ = made(sinks=0, recent=0, n=(600,))
    one, seven = (check(store, 4, splits=s).out for s in (1, 7))
    torch.testing.assert_close(one, seven, rtol=1e-5, atol=1e-5)
    q = torch.randn(2, 4, 1, 80, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    call = Call.of(q, store, scaling=0.2, latent=True)
    want, _ = oracle(call)
    store.value.tensors["scale"].mul_(1.1)  # the mutant
    assert (Latents().run(call).out - want).norm() > 1e-3 * want.norm()


def test_the_device_may_count():
    "A store whose length only the device knows: what is captured is right for later lengths."
    store, _ = made(static=True, max_length=600, n=(300,), sinks=2, recent=5)
    q = torch.randn(2, 4, 1, 80, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    call = Call.of(q, store, scaling=0.2, latent=True)
    want = attend(q, store, scaling=0.2, latent=True)
    real, store.length = store.length, 1  # the host's number is not asked
    store.clock.position.fill_(real)
    parts = latents._shared(call, q, 0)
    assert parts["HAS_LENGTH"]
    got = Latents()._run(call)
    torch.testing.assert_close(got.out, want.out, rtol=1e-4, atol=1e-5)
    store.length = real


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_graph_replays_it():
    store, _ = made(static=True, max_length=600, r=512, t=64, dtype=torch.bfloat16, recent=5)
    q = torch.randn(2, 16, 1, 576, device=DEVICE, dtype=torch.bfloat16)
    run = lambda: ops.attend(q, store, scaling=0.2, latent=True)
    want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    store.append(*(torch.randn(2, 1, 1, d, device=DEVICE).bfloat16() for d in (512, 64)))
    graph.replay()
    assert torch.equal(got.out, run().out) and not torch.equal(got.out, want.out)


REFUSED = {
    "keys and values are not latents": (dict(), dict(latent=False)),
    "masks": (dict(), dict(mask=torch.ones(1, 1, 1, 300, dtype=torch.bool))),
    "no bias": (dict(), dict(bias=torch.zeros(1, 1, 1, 300))),
    "equally many bits": (dict(bits=(2.5, 3)), dict()),
    "latents: codes must have 2 to 4 bits": (dict(bits=(1, 3)), dict()),
    "rotary parts: codes must have 2 to 4 bits": (dict(bits=(3, 1)), dict()),
    "one table for all channels": (dict(codebook="trellis", bits=(2, 2)), dict()),
    "up to 512, got 24": (dict(r=24), dict()),
    "up to 128, got 144": (dict(t=144), dict()),
    "64, 128 or 256 tokens, got 32": (dict(tile=32), dict()),
    "at most 128 query heads": (dict(), dict(heads=130)),
    "1 to 16 query tokens are supported, got 17": (dict(), dict(n=17)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_says_why_and_is_served_otherwise(why):
    case, how = REFUSED[why]
    store, _ = made(**case)
    rule = dict(latent=True) | how
    heads, n = rule.pop("heads", 4), rule.pop("n", 1)
    d = store.key.q.d + (store.value.q.d if rule["latent"] else 0)
    rule = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in rule.items()}
    q = torch.randn(2, heads, n, d, device=DEVICE)
    assert why in refuses(Call.of(q, store, **rule))
    with pytest.raises(ValueError, match=f"'latents' cannot serve.*{why}"):
        ops.attend(q, store, backend="latents", **rule)
    if rule["latent"]:
        assert ops.select_backend(Call.of(q, store, **rule)).backend in ("blocks", "torch")
        assert ops.attend(q, store, **rule).out.isfinite().all()


def test_who_serves():
    "A GPU's kernel without a remark; a processor's reason is that of its own kernel."
    store, _ = made()
    q = torch.randn(2, 4, 1, 80, device=DEVICE)
    choice = ops.select_backend(Call.of(q, store, latent=True))
    if CUDA:
        assert choice == ("latents", "")
        return
    why = "the look-up multiplies queries with keys of one side, latents have two"
    assert choice == ("torch", why)
    assert ops.select_backend(Call.of(q, store, latent=True, backend="latents")) == (
        "latents",
        "",
    )
    named = ops.attend(q, store, latent=True, backend="latents").out
    torch.testing.assert_close(named, ops.attend(q, store, latent=True).out)


def test_stores_of_a_kind_share_their_tables():
    """A graph of the second cache, which runs no eager step, cannot make them; nor may what a
    store forgets take away what its graph reads."""
    (one, _), (two, _) = made(recent=4), made(n=(40,), recent=4)
    mine = latents._bases(one)
    assert mine is latents._bases(two)
    one.changed()
    assert latents._bases(one) is mine
    assert latents._bases(made(bits=(4, 4), recent=4)[0]) is not mine


def test_nan_in_a_query_is_that_rows():
    store, _ = made()
    q = torch.randn(2, 4, 1, 80, device=DEVICE)
    q[1, 2] = torch.nan
    bad = ops.attend(q, store, latent=True, backend="latents").out.isnan().all(-1)[..., 0]
    assert bad.nonzero().tolist() == [[1, 2]]


@needs_gluon
def test_registers_of_the_kernels():
    "Two programs of the kernel with operands in registers fit, without a spill worth naming."
    jobs = [
        {"kernel": "fragments", "capability": x, "d": d}
        for x, d in ((80, 512), (90, 256), (90, 512))
    ]
    jobs.append({"kernel": "fragments", "capability": 90, "flags": True})
    jobs += [{"kernel": "fragments", "capability": 90, "cells": n} for n in (64, 128)]
    jobs.append({"kernel": "tiles", "capability": 90, "flags": True})
    jobs.append({"kernel": "tiles", "capability": 90, "cells": 256})
    *fast, plain, cells = ahead_of_time(*jobs, script="aot_latents.py")
    assert all(x["shared"] <= 48 * 1024 and x["spills"] <= 256 for x in fast), fast
    assert all(x["shared"] <= 160 * 1024 for x in (plain, cells)), (plain, cells)
