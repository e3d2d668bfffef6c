"""Transforms by name: what a new one and a new codebook need, files written before the class
had its name, and refusals."""

import pytest
import torch

from tests.helpers import Shuffle
from turboquant_nb.cache.attention import attend
from turboquant_nb.cache.store import KVStore
from turboquant_nb.quant import quantizer
from turboquant_nb.quant.quantizer import Quantizer, Recipe, Spec, decided
from turboquant_nb.theory import transforms
from turboquant_nb.theory.codebook import from_levels
from turboquant_nb.theory.rotation import Rotation, Transform, make_rotation
from turboquant_nb.theory.transforms import (
    HeadTransform,
    find_transform,
    fit_head_transform,
    register_transform,
    transform_class,
)


class Quantiles:
    "Levels at the quantiles of the normal law, as in NF4."

    def __call__(self, bits, d):
        return from_levels(
            torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
        )


def test_a_new_transform_and_a_new_codebook_touch_one_class_each(monkeypatch):
    monkeypatch.setitem(quantizer.CODEBOOKS, "quantiles", Quantiles())
    monkeypatch.setattr(transforms, "_registered", {})
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    register_transform(Shuffle(order))
    side = Spec(4, rotation="shuffle", codebook="quantiles")
    store = KVStore(
        Recipe.from_json(Recipe(side, side, sinks=1, recent=2).to_json()), 1, heads=2, d_key=16
    )
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(1))
    store.append(k, v)
    out, _ = attend(q[:, :, -1:], store)
    read = store.read()
    dense = (q[:, :, -1:] @ read[0].mT / 4).softmax(-1) @ read[1]
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)
    assert (
        0.002 < float((read[0] - k).square().mean() / k.square().mean()) < 0.05
    )  # 4 bits, and not exact
    assert set(read[0][0, 0, 5].tolist()) <= {float(x) for x in values_of(store, 5)}, (
        "levels of the table, times the token's scale"
    )
    assert (
        bool(decided(store.key.q, k).float().mean() > 0.99)
        and store.key.q.rotation.nbytes == 4 * 16**2
    )


def values_of(store, token):
    "Every value that a token of the first head may read as."
    return (
        store.key.q.codebook.levels
        * store.key.memory.read(token, token + 1).scale[0, 0].float()
    )


def test_the_interface_is_one():
    "A store, a file and a kernel ask these of a rotation and of a head transform alike."
    m = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fitted = fit_head_transform(m @ m.mT, m.mT @ m)
    for t in (
        make_rotation("hadamard", 8),
        make_rotation("haar", 8),
        make_rotation("identity", 8),
        fitted,
    ):
        q, k = torch.randn(2, 3, 2, 5, 8, generator=torch.Generator().manual_seed(1))
        assert (
            isinstance(t, Transform)
            and t.to("cpu") is t
            and t.nbytes == sum(x.nbytes for x in t.tables)
        )
        torch.testing.assert_close(
            (t.query(q) * t.apply(k)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(t.inverse(t.apply(k)), k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(q @ t.query_matrix.mT, t.query(q), rtol=1e-5, atol=1e-5)
        assert (
            t.per_head
            == bool(t.stored)
            == bool(t.refuses("values"))
            == bool(t.refuses("sketch"))
        )
        assert find_transform(t.name, 8) is t and transform_class(t.name) is type(t)
    t.check_heads(2)
    with pytest.raises(ValueError, match="a transform of 2 heads cannot serve 3"):
        t.check_heads(3)
    with pytest.raises(TypeError, match="one matrix for all vectors"):
        decided(Quantizer(Spec(rotation=t.name), 8), k)


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match="transform must be a Transform, got str"):
        register_transform("hadamard")
    with pytest.raises(ValueError, match="a name of its own, got 'haar'"):
        register_transform(make_rotation("haar", 8))
    with pytest.raises(ValueError, match="map-0 is not known here"):
        find_transform("map-0", 8)
    with pytest.raises(ValueError, match="is for head size 4, not 8"):
        find_transform(register_transform(HeadTransform.of(torch.eye(4)[None])).name, 8)
    assert transform_class("map-0") is HeadTransform and transform_class("haar") is Rotation


def test_the_best_metric_keeps_the_energy_of_keys():
    "tr(CP) = tr(C): the scale of P, which a common factor of all scales would hide."
    g = torch.Generator().manual_seed(0)
    queries, keys = (x @ x.mT for x in torch.randn(2, 3, 6, 6, generator=g).double())
    p, trace = (
        transforms.best_metric(queries, keys, shrink=0.0),
        lambda x: x.diagonal(dim1=1, dim2=2).sum(1),
    )
    assert torch.allclose(trace(keys @ p), trace(keys), rtol=1e-9) and not torch.allclose(
        trace(p), trace(keys), rtol=0.1
    )


def test_a_map_whose_inverse_fp32_cannot_serve_is_refused():
    "The limit of the condition is 1e4, with powers of two on both sides of it."
    matrix = lambda power: torch.diag(torch.tensor([2.0**power, 1.0]))[None]
    assert torch.equal(
        transforms.HeadTransform.of(matrix(13)).inverse_matrix[0], matrix(-13)[0]
    )
    with pytest.raises(ValueError, match="below 1e4.*got 1.64e"):
        transforms.HeadTransform.of(matrix(14))
