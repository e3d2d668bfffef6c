"""A scale for each pair of channels, which the frame of a model has: keys are multiplied by it,
queries divided. That no score changes by it, and that what moves a store takes it along."""

from dataclasses import replace

import pytest
import torch

from turboquant_nb.cache.attention import dense_attention
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.cache.store import KVStore, bytes_by_kind, expected_nbytes, tail_with
from turboquant_nb.kernels import launch, ops
from turboquant_nb.quant.calibration import LayerFrame
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
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
        Spec(bits, center=center, pair_scale="frame", **more), Spec(value), sinks, recent
    )


def states(b=2, h=2, groups=3, d=32, n=300, seed=0, dtype=torch.float32, rotary=None):
    """Keys with a mean and queries, of pairs of unequal energies, rotated by RoPE; and the
    frame of their layer: (q, k, v, inv_freq, frame)."""
    g = torch.Generator().manual_seed(seed)
    r = d // 2 * 2 if rotary is None else rotary
    size = torch.randn(h, r // 2, generator=g).exp()
    size = torch.cat([size, size, torch.randn(h, d - r, generator=g).exp()], 1)[:, None]
    mean = 2 * torch.randn(h, d, generator=g)
    k = torch.randn(b, h, n, d, generator=g) * size + mean[:, None]
    q = torch.randn(b, h, groups * n, d, generator=g) / size
    q, v = q.view(b, h * groups, n, d), torch.randn(b, h, n, d, generator=g)
    freq = 10_000.0 ** (-torch.arange(max(1, r // 2)) / max(1, r // 2))
    if r:
        at = torch.arange(n)
        q, k = (apply_rope(x, at, rotary_dim=r, inv_freq=freq) for x in (q, k))
    pair = pair_scales(size[:, 0] ** -2, size[:, 0].square(), r)
    frame = LayerFrame(mean if r else None, k.mean((0, 2)), pair)
    return q.to(dtype), k.to(dtype), v.to(dtype), freq, frame


def fitted(recipe, data, n=200, start=None, **how):
    "A store of the first n tokens."
    q, k, v, freq, frame = data
    rope = {"inv_freq": freq} if recipe.key.centre.rotates else {}
    how |= dict(dtype=k.dtype, frame=frame) | rope
    store = KVStore(recipe, k.shape[0], k.shape[1], k.shape[3], **how)
    if start is not None:
        store.set_range(start=torch.tensor(start))
    store.append(k[:, :, :n], v[:, :, :n])
    return store


# --- scores


@pytest.mark.parametrize(
    "dtype, groups, d, rotary",
    [(torch.float32, 1, 32, 32), (torch.float16, 3, 64, 16), (torch.bfloat16, 2, 20, 20)],
)
def test_exact_tokens_give_the_scores_they_gave(dtype, groups, d, rotary):
    data = q, k, v, *_ = states(groups=groups, d=d, rotary=rotary, dtype=dtype)
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
    data = q, k, v, *_ = states(n=150, groups=2, d=64)  # what chains of kernels have
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
    q, k, v, freq, frame = states(n=103)
    stores = []
    for name in ("torch", "triton"):
        store = KVStore(scaled(3), 2, 2, 32, inv_freq=freq, frame=frame)
        for a, b in zip(k.split((100, 1, 1, 1), 2), v.split((100, 1, 1, 1), 2)):
            ops.append(store, a, b, backend=name)
        stores.append(store)
    a, b = (store.coded("key", 0, 103) for store in stores)
    assert (a.codes != b.codes).float().mean() < 2e-3
    assert (stores[0].read()[0] - stores[1].read()[0]).norm() < 0.05 * k.norm()
    same(*(store.key.exact.recent for store in stores))


def test_a_long_chunk_and_a_sliding_window():
    data = q, k, v, *_ = states(n=300)
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


def test_every_token_of_every_store_has_one_frame():
    "Before the first token, after any number of them, and when all are gone."
    data = q, k, v, *_, frame = states()
    store, pair = fitted(scaled(), data, n=0), frame.pair.bfloat16()[None, :, None]
    assert pair.float().std() > 0.1
    for change in (
        lambda: None,
        lambda: store.append(k[:, :, :200], v[:, :, :200]),
        lambda: store.append(k[:, :, 200:], v[:, :, 200:]),
        lambda: store.crop(100),
        lambda: store.crop(200),
        lambda: store.append(k[:, :, 100:], v[:, :, 100:]),
    ):
        change()
        same(store.key.frame.pair, pair)
    assert store.length == 200 and store.value.frame.pair is None


def test_what_is_not_asked_for_is_not_taken():
    'Without a frame "auto" is "none"; with one, "none" stays it.'
    q, k, v, freq, frame = states()
    of = lambda center, scale: replace(
        scaled(), key=replace(scaled().key, center=center, pair_scale=scale)
    )
    plain, auto, bare = (
        KVStore(of(*kind), 2, 2, 32, inv_freq=freq, frame=given)
        for *kind, given in (
            ("none", "none", None),
            ("auto", "auto", None),
            ("none", "none", frame),
        )
    )
    for s in (plain, auto, bare):
        s.append(k, v)
        assert s.key.frame == (None, None)
    for a, b, c in zip(plain.read(), auto.read(), bare.read()):
        same(a, b)
        same(a, c)


def test_padding_that_is_learnt_later_keeps_the_frame():
    data = q, k, v, *_ = states()
    store = fitted(scaled(), data)
    pair = store.key.frame.pair.clone()
    store.set_range(start=torch.tensor([0, 30]), k=k[:, :, :200], v=v[:, :, :200])
    same(store.key.frame.pair, pair)
    assert (store.read()[0] - k[:, :, :200])[1, :, 30:34].abs().max() < 1e-5  # its sinks
    for a, b in zip(store.read(), fitted(scaled(), data, start=[0, 30]).read()):
        same(a[:1], b[:1])
        same(a[1:, :, 30:].contiguous(), b[1:, :, 30:].contiguous())


def test_files_carry_it():
    data = q, k, v, *_ = states()
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


def test_rows_share_it():
    data = q, k, v, *_ = states()
    store, pair = fitted(scaled(), data), fitted(scaled(), data).key.frame.pair
    store.select([1, 0, 1])
    store.repeat(2)
    same(store.key.frame.pair, pair)
    read = store.read()[0]
    same(read[2], fitted(scaled(), data).read()[0][0])


def test_rejected_drafts_leave_what_would_have_been():
    data = q, k, v, *_ = states()
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
        *_, inv_freq, frame = data = states(d=d)
        store = fitted(scaled(center=center), data)
        assert store.nbytes == expected_nbytes(store)
        assert bytes_by_kind(store)["pair"] == 2 * 2 * d
        plain = replace(store.recipe, key=replace(store.recipe.key, pair_scale="none"))
        assert "pair" not in bytes_by_kind(
            KVStore(plain, 1, 2, d, inv_freq=inv_freq, frame=frame)
        )


@pytest.mark.parametrize("coder", ["torch", "triton"])
@KERNELS
def test_captured_steps(coder):
    "The device counts: the codes and the exact tokens of steps that the host takes."
    data = q, k, v, *_ = states(n=120)
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
    with pytest.raises(
        ValueError, match="pair_scale='frame' is for keys: a frame says nothing"
    ):
        Recipe(value=Spec(pair_scale="frame"))
    name = random_transform(2, 32).name
    with pytest.raises(ValueError, match="do the same work"):
        Spec(pair_scale="frame", rotation=name)
    recipe = scaled()
    assert Recipe.from_json(recipe.to_json()) == recipe
