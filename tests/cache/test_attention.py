"Attention on codes against plain attention over the decoded states, in every configuration."

import math
import random

import pytest
import torch

from turboquant_nb import KVStore, Recipe
from turboquant_nb.cache.attention import attend, dense_attention
from turboquant_nb.quant.quantizer import decode
from turboquant_nb.testing import same
from tests.cache.test_store import random_recipe
from tests.helpers import ONE_THREAD, random_frame, refuses, seeded

pytestmark = ONE_THREAD


def filled(
    recipe,
    batch,
    heads,
    d,
    dv,
    tokens,
    seed=0,
    dtype=torch.float32,
    tile=8,
    start=None,
    chunks=1,
    **kwargs,
):
    g = seeded(seed)
    half = max(d // 2 - seed % 2, 1)  # channel pairs that rotate
    kwargs |= dict(inv_freq=0.6 ** torch.arange(1.0, half + 1), tile=tile)
    frame = random_frame(heads, d, 2 * half, seed)
    store = KVStore(recipe, batch, heads, d, dv, dtype, frame=frame, **kwargs)
    k, v = (torch.randn(batch, heads, tokens, x, generator=g).to(dtype) for x in (d, dv))
    if start is not None:
        store.set_range(start=start)
    for a, b in zip(k.chunk(chunks, 2), v.chunk(chunks, 2)):
        store.append(a, b)
    return store, k, v


def seen_by(store, n, first, causal, sliding_window):
    """Which positions first … length the last n tokens may look at, from the definition: [B, 1,
    n, T]."""
    at = torch.arange(store.length - n, store.length)[:, None]
    p = torch.arange(first, store.length)[None]
    ok = torch.ones(n, p.shape[1], dtype=torch.bool)
    ok = ok & (p <= at) if causal else ok
    ok = ok & (p > at - sliding_window) if sliding_window else ok
    ok = ok[None].expand(store.batch, -1, -1) & (p >= store.start[:, None])[:, None]
    return ok[:, None]


def read_unrounded(store, name):
    """What `store.read` gives, in the frame, before it is rounded to the model's dtype: [B, H,
    length - freed, d] fp64."""
    coded = []
    for run in store.runs:
        span = name, run.offset, run.length
        coded.append(decode(getattr(run, name).q, run.coded(*span), run.center(*span)))
    x = torch.cat(coded, 2).double()
    states, positions = store.exact(name)
    rows, slots = (positions >= store.freed).nonzero(as_tuple=True)
    x[rows, :, positions[rows, slots] - store.freed] = states[rows, :, slots].double()
    same(x.to(store.dtype), store.read(framed=True)[name == "value"])
    return x


def reference(q, store, chunk, mask, first, **kwargs):
    """fp64 softmax over `store.read`, with the exact chunk in place of its codes; in the frame,
    rounded to the dtype as queries and keys are there."""
    pair = store.key.frame.pair
    if pair is not None:
        by_query = pair.float().repeat_interleave(q.shape[1] // store.heads, 1)
        q = (q.float() / by_query).to(q.dtype)
        if chunk is not None:
            chunk = (chunk[0].float() * pair).to(q.dtype), chunk[1]
    k, v = (read_unrounded(store, side) for side in ("key", "value"))
    k, v = (x[:, :, first - store.freed :].clone() for x in (k, v))
    if chunk is not None:
        for dense, exact in ((k, chunk[0]), (v, chunk[1])):
            m = min(exact.shape[2], dense.shape[2])
            dense[:, :, dense.shape[2] - m :] = exact[:, :, exact.shape[2] - m :].double()
    groups = q.shape[1] // store.heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.double() @ k.transpose(-1, -2) * (kwargs.get("scaling") or q.shape[3] ** -0.5)
    cap = kwargs.get("softcap")
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.clamp(min=-1e300)[..., None]).exp()
    return p @ v, lse


def compare(got, want, dtype):
    out, lse = got
    assert out.dtype == dtype and lse.dtype == torch.float32
    tolerance = {torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[
        dtype
    ]  # half a unit of the output's last place, doubled, plus fp32 sums
    error = (out.double() - want[0]).abs()
    assert bool((error <= tolerance * (1 + want[0].abs())).all()), float(error.max())
    seen = want[1] > -math.inf
    assert torch.equal(lse > -math.inf, seen) and bool((out[~seen] == 0).all())
    assert float((lse.double() - want[1])[seen].abs().max() if seen.any() else 0) < 1e-4


@pytest.mark.parametrize("block", range(6))
def test_random_configurations(block):
    """6 x 20 of them: groups, sizes, padding, ends, windows, caps, masks per head, chunks,
    eviction, dtypes, block sizes."""
    for trial in range(20):
        rng = random.Random(500 * block + trial)
        batch, heads, groups = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 8)
        d, dv, tokens = rng.choice((4, 7, 16)), rng.choice((4, 9, 16)), rng.randint(1, 70)
        n, dtype = (
            rng.randint(1, min(20, tokens)),
            rng.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)),
        )
        start = (
            torch.tensor([rng.randint(0, 12) for _ in range(batch)])
            if rng.random() < 0.5
            else None
        )
        store, k, v = filled(
            random_recipe(rng, d, dv),
            batch,
            heads,
            d,
            dv,
            tokens,
            rng.randrange(99),
            dtype,
            8,
            start,
            rng.randint(1, 3),
        )
        if rng.random() < 0.4:
            store.evict(rng.randint(0, max(0, tokens - n)))
        chunk = (k[:, :, tokens - n :], v[:, :, tokens - n :]) if rng.random() < 0.6 else None
        g = seeded(trial)
        q = torch.randn(batch, heads * groups, n, d, generator=g).to(dtype)
        kwargs = dict(scaling=rng.choice((None, 0.3)), softcap=rng.choice((None, None, 2.0)))
        causal, sliding_window, first = True, None, store.freed
        if rng.random() < 0.5:
            first = rng.randint(store.freed, tokens - 1)
            mask = (
                torch.rand(
                    rng.choice((1, batch)),
                    rng.choice((1, heads * groups)),
                    n,
                    tokens - first,
                    generator=g,
                )
                < 0.6
            )
            if rng.random() < 0.5:
                mask[:, :, rng.randrange(n)] = False
            call, want = dict(kwargs, mask=mask, first=first), mask
        else:
            causal, sliding_window = rng.random() < 0.8, rng.choice((None, None, 1, 5, 30))
            first = rng.choice((first, rng.randint(first, tokens - 1)))
            call, want = (
                dict(kwargs, causal=causal, sliding_window=sliding_window, first=first),
                seen_by(store, n, first, causal, sliding_window),
            )
        expect = reference(q, store, chunk, want, first, **kwargs)
        for block_size in (rng.choice((1, 2, 5)), rng.choice((8, 13, 64)), 1024):
            compare(
                attend(q, store, *(chunk or (None, None)), block=block_size, **call),
                expect,
                dtype,
            )


def test_dense_attention_is_the_reference():
    """The library's own oracle against fp64, and its row blocks; rows of a mask go with their
    queries, and it replaces the sliding window."""
    g = seeded(3)
    q, k, v = (torch.randn(2, h, n, 8, generator=g) for h, n in ((6, 9), (3, 14), (3, 14)))
    at, p = torch.arange(5, 14)[:, None], torch.arange(14)
    given = torch.rand(2, 6, 9, 14, generator=g) < 0.5
    given[..., 0] = True
    for how, mask in (
        (dict(), p <= at),
        (dict(causal=False, softcap=3.0), p >= 0),
        (dict(sliding_window=4), (p <= at) & (p > at - 4)),
        (dict(mask=given, sliding_window=2, scaling=0.3), given),
    ):
        kk, vv = (x.double().repeat_interleave(2, 1) for x in (k, v))
        scores = q.double() @ kk.mT * how.get("scaling", 8**-0.5)
        cap = how.get("softcap", math.inf)
        scores = (cap * torch.tanh(scores / cap) if cap < math.inf else scores).masked_fill(
            ~mask, -math.inf
        )
        want = scores.softmax(-1) @ vv, scores.logsumexp(-1)
        for rows in (2, 256):
            compare(dense_attention(q, k, v, rows=rows, **how), want, torch.float32)


def test_all_masked_rows_and_empty():
    store, k, v = filled(Recipe(sinks=2, recent=3), 2, 2, 8, 8, 20)
    q = torch.randn(2, 4, 3, 8)
    out, lse = attend(q[:, :, :0], store)
    assert out.shape == (2, 4, 0, 8) and lse.shape == (2, 4, 0)
    nothing = torch.zeros(1, 1, 3, 20, dtype=torch.bool)
    answers = [attend(q, store, mask=nothing), dense_attention(q, k, v, mask=nothing)]
    store.set_range(start=20, k=k, v=v)
    for out, lse in (*answers, attend(q, store)):
        assert float(out.abs().max()) == 0 and bool((lse == -math.inf).all())


def test_extreme_scores():
    "Scores of ±1e4 and queries of zero: no overflow, no NaN."
    store, k, v = filled(Recipe(sinks=0, recent=0), 1, 1, 8, 8, 40)
    for size in (0.0, 1e4):
        q = torch.randn(1, 3, 2, 8) * size
        out, lse = attend(q, store, block=4)
        want = reference(q, store, None, seen_by(store, 2, 0, True, None), 0)
        assert out.isfinite().all() and lse.isfinite().all()
        assert float((out.double() - want[0]).abs().max()) < (1e-5 if size == 0 else 0.02)


def test_nan_in_queries_is_not_hidden():
    store, _, _ = filled(Recipe(), 1, 1, 8, 8, 40)
    q = torch.randn(1, 2, 1, 8)
    q[0, 0, 0, 3] = math.nan
    out, _ = attend(q, store)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


def test_inputs_are_not_changed():
    store, k, v = filled(Recipe(sinks=2, recent=3), 1, 2, 8, 8, 20)
    q = torch.randn(1, 3, 4, 8).transpose(1, 2)
    held = [q, k, v, *(t for s in store.parts for t in s.tensors.values())]
    before = [x.clone() for x in held]
    a, b = (attend(x, store, k[:, :, -3:], v[:, :, -3:])[0] for x in (q, q.contiguous()))
    same(a, b)
    for x, y in zip(held, before):
        same(x, y)


@pytest.mark.parametrize(
    "kwargs, error, name",
    [
        (dict(q=[1.0]), TypeError, "q"),
        (dict(q=torch.ones(1, 4, 8)), ValueError, "q"),
        (dict(q=torch.ones(2, 4, 2, 8)), ValueError, "q"),
        (dict(q=torch.ones(1, 4, 2, 8, device="meta")), ValueError, "q"),
        (dict(q=torch.ones(1, 4, 21, 8)), ValueError, "q"),
        (dict(k=torch.ones(1, 2, 2, 7), v=torch.ones(1, 2, 2, 8)), ValueError, "k"),
        (dict(k=torch.ones(1, 2, 2, 8), v=torch.ones(1, 2, 3, 8)), ValueError, "v"),
        (dict(mask=torch.ones(1, 1, 2, 20)), TypeError, "mask"),
        (dict(mask=torch.ones(1, 1, 3, 20, dtype=torch.bool)), ValueError, "mask"),
        (dict(mask=torch.ones(1, 3, 2, 20, dtype=torch.bool)), ValueError, "mask"),
        (dict(mask=[[True]]), (TypeError, ValueError), "mask"),
        (dict(first=-1), ValueError, "first"),
        (dict(sliding_window=0), ValueError, "sliding_window"),
        (dict(block=0), ValueError, "block"),
    ],
)
def test_refuses(kwargs, error, name):
    store, _, _ = filled(Recipe(), 1, 2, 8, 8, 20)
    with refuses(name, error):
        attend(kwargs.pop("q", torch.ones(1, 4, 2, 8)), store, **kwargs)
