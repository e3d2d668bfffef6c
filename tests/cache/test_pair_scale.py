"""A scale for each pair of channels, which the frame of a model has: keys are multiplied by it,
queries divided. That no score changes by it, whoever attends. (test_store.py draws it in
random sequences of operations.)"""

from dataclasses import replace

import pytest
import torch

from turboquant_nb.cache.attention import dense_attention
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.kernels import launch, ops
from turboquant_nb.quant.calibration import LayerFrame
from turboquant_nb.testing import same
from turboquant_nb.theory.rope import apply_rope
from turboquant_nb.theory.transforms import pair_scales
from tests.helpers import ONE_THREAD, random_transform, refuses, seeded

pytestmark = ONE_THREAD
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
    g = seeded(seed)
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


def fitted(recipe, data, n=200, **how):
    "A store of the first n tokens."
    q, k, v, freq, frame = data
    rope = {"inv_freq": freq} if recipe.key.centre.rotates else {}
    how |= dict(dtype=k.dtype, frame=frame) | rope
    store = KVStore(recipe, k.shape[0], k.shape[1], k.shape[3], **how)
    store.append(k[:, :, :n], v[:, :, :n])
    return store


# --- scores


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


def test_a_file_with_a_scale_that_cannot_be_is_refused():
    tensors, header = state_of(fitted(scaled(), states()))
    for bad, why in (
        (0.0, "key.pair must be at least"),
        (torch.nan, "key.pair must be finite"),
    ):
        with refuses(why):
            store_of(tensors | {"key.pair": tensors["key.pair"] * bad}, header)
    with refuses("key.pair must be"):
        store_of({n: t for n, t in tensors.items() if n != "key.pair"}, header)


# --- where it cannot be


def test_where_it_is_refused():
    with refuses("pair_scale must be one of"):
        Spec(pair_scale="calibrated")
    with refuses("pair_scale='frame' is for keys: a frame says nothing"):
        Recipe(value=Spec(pair_scale="frame"))
    name = random_transform(2, 32).name
    with refuses("do the same work"):
        Spec(pair_scale="frame", rotation=name)
    recipe = scaled()
    assert Recipe.from_json(recipe.to_json()) == recipe
