"""A scale for each pair of channels: keys are multiplied by it, queries divided. What it is
fitted to, that no score changes by it, and that what moves a store takes it along."""

from dataclasses import replace

import pytest
import torch

from turboquant_nb.cache.attention import attend, dense_attention
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.cache.store import KVStore, bytes_by_kind, expected_nbytes, tail_with
from turboquant_nb.kernels import launch, ops
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.serving.step import serving_recipe
from turboquant_nb.testing import same
from turboquant_nb.theory.rope import apply_rope
from turboquant_nb.theory.transforms import pair_scales
from tests.helpers import random_transform, recording

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = pytest.mark.skipif(
    not launch.is_interpreted(), reason="states are on the CPU: needs Triton's interpreter"
)


def scaled(bits=2, sinks=4, recent=16, center="pre_rope", value=4, **more):
    return Recipe(
        Spec(bits, center=center, pair_scale="prompt", **more), Spec(value), sinks, recent
    )


def states(b=2, h=2, groups=3, d=32, n=300, seed=0, dtype=torch.float32, rotary=None):
    """Keys with a mean and queries, of pairs of unequal energies: (q, k, v, inv_freq), rotated
    by RoPE."""
    g = torch.Generator().manual_seed(seed)
    r = d // 2 * 2 if rotary is None else rotary
    size = torch.randn(h, r // 2, generator=g).exp()
    size = torch.cat([size, size, torch.randn(h, d - r, generator=g).exp()], 1)[:, None]
    k = torch.randn(b, h, n, d, generator=g) * size + 2
    q = torch.randn(b, h, groups * n, d, generator=g) / size
    q, v = q.view(b, h * groups, n, d), torch.randn(b, h, n, d, generator=g)
    freq = 10_000.0 ** (-torch.arange(max(1, r // 2)) / max(1, r // 2))
    if r:
        at = torch.arange(n)
        q, k = (apply_rope(x, at, rotary_dim=r, inv_freq=freq) for x in (q, k))
    return q.to(dtype), k.to(dtype), v.to(dtype), freq


def fitted(recipe, data, n=200, start=None, **how):
    "A store whose first n tokens came with their queries."
    q, k, v, freq = data
    rope = {"inv_freq": freq} if recipe.key.centre.rotates else {}
    store = KVStore(recipe, k.shape[0], k.shape[1], k.shape[3], dtype=k.dtype, **rope, **how)
    if start is not None:
        store.set_range(start=torch.tensor(start))
    store.wait(k[:, :, :n], v[:, :, :n])
    store.complete(q[:, :, :n])
    return store


# --- the scales


def test_what_it_is_fitted_to():
    "Real tokens behind the sinks, of keys without their mean, and of all queries of the group."
    q, k, v, freq = states()
    store = fitted(scaled(), (q, k, v, freq), start=[0, 30])
    got = store.key.frame.pair
    for row, first in ((0, 4), (1, 34)):
        one = KVStore(scaled(sinks=0), 1, 2, 32, inv_freq=freq)
        cut = lambda x: x[row : row + 1, :, first:200]
        one.cos_sin.reach(400)
        back = apply_rope(
            k[row, :, first:200].double(), -torch.arange(first, 200), inv_freq=freq
        )
        mean = back.mean(1, keepdim=True)
        energy = (back - mean).square().mean(1)
        asked = cut(q).double().square().view(1, 2, 3, -1, 32).mean((2, 3))[0]
        want = pair_scales(asked, energy, 32)
        assert (got[row, :, 0].float() / want - 1).abs().max() < 0.03
    same(got[..., :16], got[..., 16:])
    assert got.float().std() > 0.1


# --- scores


@pytest.mark.parametrize(
    "dtype, groups, d, rotary",
    [(torch.float32, 1, 32, 32), (torch.float16, 3, 64, 16), (torch.bfloat16, 2, 20, 20)],
)
def test_exact_tokens_give_the_scores_they_gave(dtype, groups, d, rotary):
    data = q, k, v, freq = states(groups=groups, d=d, rotary=rotary, dtype=dtype)
    store = fitted(scaled(recent=512), data)
    store.append(k[:, :, 200:], v[:, :, 200:])
    assert store.key.frame.pair.std() > 0.05
    got = ops.attend(q[:, :, -2:], store, k[:, :, -2:], v[:, :, -2:])
    want = dense_attention(q[:, :, -2:].float(), k.float(), v.float())
    eps = torch.finfo(dtype).eps
    size = (q[:, :, -2:].float().norm(dim=-1).max() * k.float().norm(dim=-1).max()) * d**-0.5
    assert (got.lse - want[1]).abs().max() < 2 * eps * size  # a rounding of q and one of k
    assert (got.out.float() - want[0]).abs().max() < 8 * eps * size
    read = store.read()[0]
    assert ((read - k).abs() <= 2 * eps * k.abs()).all()


def decoded(store, q, k, v, **how):
    "Attention on what the store reads back, and the newest tokens as they are."
    dense_k, dense_v = (x.clone().float() for x in store.read())
    m = k.shape[2]
    dense_k[:, :, -m:], dense_v[:, :, -m:] = k.float(), v.float()
    return dense_attention(q.float(), dense_k, dense_v, **how)


@pytest.mark.parametrize("backend", ("torch", "cpu", "blocks", "triton"))
@pytest.mark.parametrize(
    "codebook, center", [("sphere", "none"), ("trellis", "fixed"), ("sphere", "pre_rope")]
)
def test_every_backend_reads_what_the_store_reads_back(backend, codebook, center):
    if backend in ("blocks", "triton") and not launch.is_interpreted():
        pytest.skip("states are on the CPU: needs Triton's interpreter")
    data = q, k, v, freq = states(n=150, groups=2, d=64)  # what chains of kernels have
    recipe = scaled(center=center, codebook=codebook, value=2)
    recipe = replace(recipe, value=replace(recipe.value, codebook=codebook))
    store = fitted(recipe, data, n=100)
    store.append(k[:, :, 100:], v[:, :, 100:])
    near = q[:, :, -1:], k[:, :, -1:], v[:, :, -1:]
    got = ops.attend(near[0], store, *near[1:], backend=backend)
    want = decoded(store, *near)
    assert (got.out - want[0]).abs().max() < 2e-5 * want[0].abs().max() + 2e-3 * (
        backend == "triton"
    )
    wrong = decoded(
        store, near[0] / store.key.frame.pair.float().repeat_interleave(2, 1), *near[1:]
    )
    assert (got.out - wrong[0]).abs().max() > 0.05  # the mutant: what was divided stays so


@KERNELS
def test_kernels_code_what_pytorch_codes():
    q, k, v, freq = states(n=103)
    stores = []
    for name in ("torch", "triton"):
        store = KVStore(scaled(3), 2, 2, 32, inv_freq=freq)
        store.wait(
            k[:, :, :100], v[:, :, :100], lambda s, a, b: ops.append(s, a, b, backend=name)
        )
        store.complete(q[:, :, :100])
        for i in range(100, 103):
            ops.append(store, k[:, :, i : i + 1], v[:, :, i : i + 1], backend=name)
        stores.append(store)
    a, b = (store.coded("key", 0, 103) for store in stores)
    assert (a.codes != b.codes).float().mean() < 2e-3
    assert (stores[0].read()[0] - stores[1].read()[0]).norm() < 0.05 * k.norm()
    same(*(store.key.exact.recent for store in stores))


def test_a_long_chunk_and_a_sliding_window():
    data = q, k, v, freq = states(n=300)
    store = fitted(scaled(), data)
    store.append(k[:, :, 200:], v[:, :, 200:])
    chunk = q[:, :, 200:], k[:, :, 200:], v[:, :, 200:]
    for window in (None, 120):
        want = decoded(store, *chunk, sliding_window=window)
        for backend in ("flash", "torch"):
            got = ops.attend(
                chunk[0], store, *chunk[1:], backend=backend, sliding_window=window
            )
            assert (got.out - want[0]).abs().max() < 1e-4, backend


# --- a store's life


def test_later_chunks_keep_the_frame_and_an_empty_store_has_none():
    data = q, k, v, freq = states()
    store = fitted(scaled(), data)
    first = store.key.frame.pair.clone()
    store.append(k[:, :, 200:], v[:, :, 200:])
    store.complete(q[:, :, 200:])
    same(store.key.frame.pair, first)
    store.crop(100)
    same(store.key.frame.pair, first)
    store.crop(200)
    same(store.key.frame.pair, torch.ones_like(first))
    store.wait(k[:, :, 100:], v[:, :, 100:])
    store.complete(q[:, :, 100:])
    assert not torch.equal(store.key.frame.pair, first)
    assert not torch.equal(store.key.frame.pair, fitted(scaled(), data).key.frame.pair)


def test_without_queries_it_is_one():
    q, k, v, freq = states()
    plain = KVStore(
        replace(scaled(), key=replace(scaled().key, pair_scale="none")), 2, 2, 32, inv_freq=freq
    )
    store = KVStore(scaled(), 2, 2, 32, inv_freq=freq)
    late = KVStore(scaled(), 2, 2, 32, inv_freq=freq)
    late.wait(k, v)
    for s in (plain, store):
        s.append(k, v)
    for a, b, c in zip(plain.read(), store.read(), late.read()):
        same(a, b)
        same(a, c)
    same(store.key.frame.pair, torch.ones(2, 2, 1, 32, dtype=torch.bfloat16))


def test_what_waits_is_coded_by_whoever_needs_it():
    q, k, v, freq = states()
    for act in (
        lambda s: s.append(k[:, :, :1], v[:, :, :1]),
        lambda s: s.crop(1),
        lambda s: s.select([1, 0]),
        lambda s: attend(q[:, :, -1:], s),
        lambda s: ops.attend(q[:, :, -1:], s),
        lambda s: state_of(s),
        lambda s: s.set_range(end=299),
        lambda s: s.to("cpu"),
    ):
        store = KVStore(scaled(), 2, 2, 32, inv_freq=freq)
        store.wait(k, v)
        assert store.length == 300 and store.waiting and not store.key.memory.tiles
        act(store)
        assert not store.waiting and store.key.memory.tiles
    got = ops.attend(q[:, :, -1:], store, k[:, :, -1:], v[:, :, -1:]).out
    assert got.isfinite().all()


def test_what_cannot_wait():
    q, k, v, freq = states()
    store = KVStore(scaled(), 2, 2, 32, inv_freq=freq)
    for bad, why in ((torch.nan, "k must be finite"), (torch.inf, "k must be finite")):
        x = k.clone()
        x[0, 0, 0, 0] = bad
        with pytest.raises(ValueError, match=why):
            store.wait(x, v)
    with pytest.raises(ValueError, match="k must have shape"):
        store.wait(k[:1], v)
    with pytest.raises(ValueError, match="k must be torch.float32"):
        store.wait(k.half(), v)
    assert store.length == 0 and not store.waiting
    store.wait(k[:, :, :0], v[:, :, :0])
    assert not store.waiting
    store.append(k, v)
    with pytest.raises(ValueError, match="only a first chunk can wait: 300 tokens are coded"):
        store.wait(k, v)
    full = KVStore(scaled(), 2, 2, 32, inv_freq=freq, max_length=100)
    with pytest.raises(ValueError, match="max_length is 100"):
        full.wait(k, v)


@pytest.mark.parametrize("error", (ValueError, MemoryError, KeyboardInterrupt))
def test_an_error_while_it_is_coded(error):
    "What cannot be coded is forgotten; what was broken off waits as before."
    q, k, v, freq = states()
    store, broken = KVStore(scaled(), 2, 2, 32, inv_freq=freq), []

    def fails(s, a, b):
        s.append(a[:, :, : None if broken else 50], b[:, :, : None if broken else 50])
        if not broken:
            broken.append(error("no more"))
            raise broken[0]

    store.wait(k, v, fails)
    with pytest.raises(error, match="no more"):
        store.complete(q)
    forgotten = error is ValueError
    assert store.length == (0 if forgotten else 300)
    assert bool(store.waiting) == (not forgotten)
    same(store.key.frame.pair, torch.ones_like(store.key.frame.pair))
    if forgotten:
        store.wait(k, v)
    store.complete(q)
    same(store.read()[0], fitted(scaled(), (q, k, v, freq), n=300).read()[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_queries_and_keys_that_say_nothing(bad):
    q, k, v, freq = states()
    store = fitted(scaled(), (torch.full_like(q, bad), k, v, freq))
    same(store.key.frame.pair, torch.ones_like(store.key.frame.pair))
    store = fitted(scaled(), (q, 0 * k, v, freq))
    same(store.key.frame.pair, torch.ones_like(store.key.frame.pair))
    short = fitted(scaled(), (q, k, v, freq), n=3)  # sinks alone
    same(short.key.frame.pair, torch.ones_like(short.key.frame.pair))


def test_padding_that_is_learnt_while_it_waits():
    q, k, v, freq = states()
    want = fitted(scaled(), (q, k, v, freq), start=[0, 30])
    store = KVStore(scaled(), 2, 2, 32, inv_freq=freq)
    store.wait(k[:, :, :200], v[:, :, :200])
    store.set_range(start=torch.tensor([0, 30]))
    assert store.waiting
    store.complete(q[:, :, :200])
    same(store.key.frame.pair, want.key.frame.pair)
    same(store.read()[0], want.read()[0])


def test_padding_that_is_learnt_later_keeps_the_frame():
    q, k, v, freq = states()
    store = fitted(scaled(), (q, k, v, freq))
    pair = store.key.frame.pair.clone()
    store.set_range(start=torch.tensor([0, 30]), k=k[:, :, :200], v=v[:, :, :200])
    same(store.key.frame.pair, pair)
    assert (store.read()[0] - k[:, :, :200])[1, :, 30:34].abs().max() < 1e-5  # its sinks
    assert (store.read()[0] - k[:, :, :200])[:, :, 34:].norm() < 0.6 * k.norm()


def test_files_carry_it():
    data = q, k, v, freq = states()
    store = fitted(scaled(), data)
    again = store_of(*state_of(store))
    for a, b in zip(store.read(), again.read()):
        same(a, b)
    same(store.key.frame.pair, again.key.frame.pair)
    near = q[:, :, 200:201], k[:, :, 200:201], v[:, :, 200:201]
    for s in (store, again):
        s.append(*near[1:])
    same(ops.attend(near[0], store).out, ops.attend(near[0], again).out)
    tensors, header = state_of(store)
    for bad, why in (
        (0.0, "key.pair must be at least"),
        (torch.nan, "key.pair must be finite"),
    ):
        with pytest.raises(ValueError, match=why):
            store_of(tensors | {"key.pair": tensors["key.pair"] * bad}, header)
    with pytest.raises(ValueError, match="key.pair must be"):
        store_of({n: t for n, t in tensors.items() if n != "key.pair"}, header)


def test_rows_take_it_along():
    data = q, k, v, freq = states()
    store, pair = fitted(scaled(), data), fitted(scaled(), data).key.frame.pair
    store.select([1, 0, 1])
    same(store.key.frame.pair, pair[[1, 0, 1]])
    store.repeat(2)
    same(store.key.frame.pair, pair[[1, 1, 0, 0, 1, 1]])
    read = store.read()[0]
    same(read[2], fitted(scaled(), data).read()[0][0])


def test_rejected_drafts_leave_what_would_have_been():
    data = q, k, v, freq = states()
    store, want = (fitted(scaled(), data) for _ in range(2))
    into = store.key.into_frame
    tail = tail_with(store, into(k[:, :, 200:210]), v[:, :, 200:210])
    store.append(k[:, :, 200:210], v[:, :, 200:210])
    store.crop(7, tail)
    want.append(k[:, :, 200:203], v[:, :, 200:203])
    for a, b in zip(store.read(), want.read()):
        same(a, b)


def test_bytes_are_counted():
    for d, center in ((32, "none"), (64, "pre_rope")):
        store = fitted(scaled(center=center), states(d=d))
        assert store.nbytes == expected_nbytes(store)
        assert bytes_by_kind(store)["pair"] == 2 * 2 * 2 * d
        plain = replace(store.recipe, key=replace(store.recipe.key, pair_scale="none"))
        assert "pair" not in bytes_by_kind(KVStore(plain, 1, 1, d, inv_freq=states(d=d)[3]))


@pytest.mark.parametrize("coder", ["torch", "triton"])
@KERNELS
def test_captured_steps(coder):
    "The device counts: the codes and the exact tokens of steps that the host takes."
    data = q, k, v, freq = states(n=120)
    how = dict(max_length=140, static=True)
    fixed, grows = fitted(scaled(), data, n=100, **how), fitted(scaled(), data, n=100)
    for i in range(100, 104):
        new = fixed.key.into_frame(k[:, :, i : i + 1]), v[:, :, i : i + 1]
        with recording():
            ops.CODERS[coder].append(fixed, *new)
        grows.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    assert fixed.sync() == 104
    same(fixed.key.frame.pair, grows.key.frame.pair)
    same(fixed.key.exact.recent, grows.key.exact.recent)
    codes = [s.coded("key", 0, 104).codes for s in (fixed, grows)]
    assert (codes[0] != codes[1]).float().mean() < 2e-3
    near = q[:, :, 103:104], k[:, :, 103:104], v[:, :, 103:104]
    got, want = (ops.attend(near[0], s, *near[1:], backend="torch").out for s in (fixed, grows))
    assert (got - want).abs().max() < 0.05
    fixed.crop(20)  # the ring is written again from codes, which are in the frame
    assert (fixed.read()[0] - grows.read(0, 84)[0]).norm() < 0.1 * k.norm()


# --- where it cannot be


def test_where_it_is_refused():
    with pytest.raises(ValueError, match="pair_scale must be one of"):
        Spec(pair_scale="calibrated")
    with pytest.raises(ValueError, match="pair_scale='prompt' is for keys: no query reads"):
        Recipe(value=Spec(pair_scale="prompt"))
    name = random_transform(2, 32).name
    with pytest.raises(ValueError, match="do the same work"):
        Spec(pair_scale="prompt", rotation=name)
    with pytest.raises(ValueError, match="key.pair_scale must be 'none'.*blocks are shared"):
        serving_recipe(scaled(sinks=0, center="none"))
    recipe = scaled()
    assert Recipe.from_json(recipe.to_json()) == recipe
    old = (
        recipe.to_json()
        .replace(', "pair_scale": "prompt"', "")
        .replace(', "pair_scale": "none"', "")
    )
    assert "pair_scale" not in old and Recipe.from_json(old).key.pair_scale == "none"
