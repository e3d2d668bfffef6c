"""Transforms by name: what a new one and a new codebook need, files written before the class
had its name, and refusals."""

import pytest
import torch

from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.quant import quantizer
from turboquant_nb.quant.quantizer import Quantizer, decided
from turboquant_nb.testing import same
from turboquant_nb.theory import transforms
from turboquant_nb.theory.codebook import from_levels
from turboquant_nb.theory.rotation import Transform, make_rotation
from turboquant_nb.theory.transforms import (
    PAIR_RANGE,
    HeadTransform,
    find_transform,
    fit_head_transform,
    pair_scales,
    transform_class,
)
from tests.helpers import refuses, seeded


class Quantiles:
    "Levels at the quantiles of the normal law, as in NF4."

    def __call__(self, bits, d):
        return from_levels(
            torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
        )


def test_a_new_codebook_is_one_class(monkeypatch):
    "A new transform, centre and code: tests/quant/test_own.py."
    monkeypatch.setitem(quantizer.CODEBOOKS, "quantiles", Quantiles())
    side = Spec(4, codebook="quantiles")
    recipe = Recipe.from_json(Recipe(side, side, sinks=0, recent=0).to_json())
    store = KVStore(recipe, 1, heads=2, d_key=16)
    k, v = torch.randn(2, 1, 2, 40, 16, generator=seeded(1))
    store.append(k, v)
    held = store.key.memory.read(0, 40)
    levels = held.scale[..., None].float() * store.key.q.codebook.levels
    read = store.key.q.rotation.apply(store.read()[0])
    assert (read[..., None] - levels[..., None, :]).abs().amin(-1).max() < 1e-5
    assert 0.002 < float((store.read()[0] - k).square().mean() / k.square().mean()) < 0.05


def test_the_interface_is_one():
    "A store, a file and a kernel ask these of a rotation and of a head transform alike."
    m = torch.randn(2, 8, 8, generator=seeded(), dtype=torch.float64)
    fitted = fit_head_transform(m @ m.mT, m.mT @ m)
    for t in (
        make_rotation("hadamard", 8),
        make_rotation("haar", 8),
        make_rotation("identity", 8),
        fitted,
    ):
        q, k = torch.randn(2, 3, 2, 5, 8, generator=seeded(1))
        assert (
            isinstance(t, Transform)
            and t.to("cpu") is t
            and t.nbytes == sum(x.nbytes for x in t.tables)
        )
        torch.testing.assert_close(q @ t.query_matrix.mT, t.query(q), rtol=1e-5, atol=1e-5)
        assert (
            t.per_head
            == bool(t.stored)
            == bool(t.refuses("values"))
            == bool(t.refuses("sketch"))
        )
        assert find_transform(t.name, 8) is t and transform_class(t.name) is type(t)
    t.check_heads(2)
    with refuses("one matrix for all vectors", TypeError):
        decided(Quantizer(Spec(rotation=t.name), 8), k)


def test_the_best_metric_keeps_the_energy_of_keys():
    "tr(CP) = tr(C): the scale of P, which a common factor of all scales would hide."
    g = seeded()
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
    with refuses("below 1e4.*got 1.64e"):
        transforms.HeadTransform.of(matrix(14))


# ------------------------------------------------- against the sums they stand for


def moments_of(*shape, seed=0):
    "Second moments of heads: symmetric, positive, far from the identity."
    x = torch.randn(*shape, shape[-1], generator=seeded(seed)).double()
    return x @ x.mT + 0.1 * torch.eye(shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("shrink", (0.0, 0.25, 1.0))
def test_the_best_metric_solves_its_equation(shrink):
    "P C P is M times a number (14.3), for moments shrunk towards their mean variance."
    m, c = moments_of(2, 5, seed=2), moments_of(2, 5, seed=3)
    eye = torch.eye(5, dtype=torch.float64)
    level = lambda x: x.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    small = lambda x: (1 - shrink) * x + shrink * level(x) * eye
    p = transforms.best_metric(m, c, shrink)
    ratio = torch.linalg.solve(small(m), p @ small(c) @ p)
    torch.testing.assert_close(
        ratio, level(ratio) * eye, rtol=1e-5, atol=1e-5 * float(level(ratio).max())
    )


def test_nearly_symmetric_is_symmetric():
    "What rounding to bf16 leaves is no reason to refuse: up to 1e-4 of the largest entry."
    x = torch.eye(3)[None].clone()
    x[0, 0, 1] = 0.9e-4
    assert transforms.best_metric(x, torch.eye(3)[None]).isfinite().all()
    x[0, 0, 1] = 1.1e-4
    with refuses("symmetric"):
        transforms.best_metric(x, torch.eye(3)[None])
    x[0, 0, 1] = 0.9e-4
    assert transforms.best_metric(-x, torch.eye(3)[None]).isfinite().all()


@pytest.mark.parametrize("rotary", (0, 4, 6))
@pytest.mark.parametrize("seed", range(3))
def test_no_rounding_of_the_scales_costs_less(seed, rotary):
    "Of eight roundings, which a common factor allows, the cheapest by sum(c s²) sum(m / s²)."
    g = seeded(seed)
    m, c = (10 ** torch.randn(2, 3, 6, generator=g).double()).unbind()
    scales = transforms.best_scales(m, c, rotary).double()
    for x in (m, c):  # what the two channels of a pair need together
        for i in range(rotary // 2):
            x[:, [i, i + rotary // 2]] = x[:, [i, i + rotary // 2]].mean(1, keepdim=True)
    cost = lambda s: (c * s.square()).sum(1) * (m / s.square()).sum(1)
    log = 0.25 * ((m + 1e-6 * m.amax(1, True)) / (c + 1e-6 * c.amax(1, True))).log2()
    log = log - log.mean(1, True)
    all_of = torch.stack([cost((log + i / 8).round().exp2()) for i in range(8)])
    torch.testing.assert_close(cost(scales), all_of.amin(0), rtol=1e-9, atol=0)
    assert (all_of.amax(0) > all_of.amin(0)).any()


def test_a_channel_that_nobody_reads_keeps_the_scale_of_the_middle():
    """No query reads channel 1, no key uses channel 2: neither pulls the others, and both are
    scaled as the median of the head."""
    m = torch.tensor([[256.0, 0.0, 256.0, 256.0, 1.0]])
    c = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])
    scales = transforms.best_scales(m, c, 0)[0]
    assert scales[1] == scales[2] == scales[0] == scales[3] and scales[4] == scales[0] / 4
    assert (transforms.best_scales(torch.zeros(1, 4), torch.ones(1, 4), 4) == 1).all()
    assert (transforms.best_scales(torch.ones(1, 4), torch.zeros(1, 4), 4) == 1).all()
    wide = transforms.best_scales(torch.tensor([[1e9, 1e4]]), torch.tensor([[1e4, 1e9]]), 0)
    assert (wide[0, 0] / wide[0, 1]).log2() in (8, 9)  # 1e10 ** 0.25


@pytest.mark.parametrize(
    "queries, keys, rotary, said",
    (
        (torch.ones(4), torch.ones(4), 0, r"got \[4\], \[4\] and 0"),
        (torch.ones(1, 4), torch.ones(1, 5), 0, "alike"),
        (torch.ones(1, 4), torch.ones(1, 4), 5, "and 5"),
        (torch.tensor([[1.0, -1]]), torch.ones(1, 2), 2, "queries must be .* not negative"),
        (torch.ones(1, 2), torch.tensor([[-1.0, 1]]), 2, "keys must be .* not negative"),
        (torch.ones(1, 4) * torch.inf, torch.ones(1, 4), 4, "queries must be finite"),
    ),
)
def test_what_are_no_energies(queries, keys, rotary, said):
    with refuses(said):
        transforms.best_scales(queries, keys, rotary)


def test_the_fitted_map_is_the_rotated_root_of_the_metric():
    "Wᵀ W = P up to bf16, and the seed turns it without changing it."
    m, c = moments_of(2, 8, seed=9), moments_of(2, 8, seed=10)
    p = transforms.best_metric(m, c)
    one, other = fit_head_transform(m, c), fit_head_transform(m, c, seed=1)
    for t in (one, other):
        w = t.matrix.double()
        torch.testing.assert_close(w.mT @ w, p, rtol=0.03, atol=0.03 * float(p.abs().max()))
    assert one.name != other.name and one.name.startswith("map-") and len(one.name) == 20
    assert fit_head_transform(m, c).name == one.name
    assert fit_head_transform(m, c, shrink=0.9).name != one.name
    assert one.heads == 2 and one.d == 8 and find_transform(one.name, 8) is one


def test_a_file_of_codes_brings_its_map(monkeypatch):
    monkeypatch.setattr(transforms, "_registered", {})
    t = HeadTransform.of(torch.diag(torch.tensor([2.0, 0.5]))[None])
    back = transforms.restore_transforms(t.stored)
    assert back.name == t.name and find_transform(t.name, 2) is back
    assert transforms.restore_transforms({}) is None
    with refuses("got 3"):
        transform_class(3)


def test_pair_scales_are_the_fourth_root_with_the_mean_one():
    g = seeded()
    m, c = torch.rand(2, 3, 24, generator=g) + 0.1, torch.rand(2, 3, 24, generator=g) + 0.1
    got = pair_scales(m, c, 16)
    pair = lambda x: torch.cat([(x[..., :8] + x[..., 8:16]) / 2] * 2 + [x[..., 16:]], -1)
    want = (pair(m) / pair(c)) ** 0.25
    want = want / want.log().mean(-1, keepdim=True).exp()
    assert (got / want - 1).abs().max() < 2**-8  # as bf16 holds them
    same(got[..., :8], got[..., 8:16])
    same(got, got.bfloat16().float())
    same(pair_scales(m, 7 * c, 16), pair_scales(5 * m, c, 16))  # common factors say nothing
    assert not torch.equal(got, pair_scales(c, m, 16))  # the mutant


def test_pair_scales_of_what_cannot_be_scaled_are_one():
    one = torch.ones(1, 8)
    for m, c in ((0 * one, one), (one, 0 * one), (one * torch.nan, one), (one, one / 0)):
        same(pair_scales(m, c, 8), one)
    m, c = one.clone(), one.clone()
    m[0, 1], c[0, 6], c[0, 3] = 0, 0, 16.0
    got = pair_scales(m, c, 0)
    assert got[0, 1] == got[0, 6] == 1 and got[0, 3] < got[0, 0]
    far = pair_scales(torch.tensor([[1e30, 1.0, 1.0, 1.0]]), torch.ones(1, 4), 0)
    same(far, torch.tensor([[1.0] * 4]))  # beside 1e30 the others are nothing
    wide = pair_scales(torch.tensor([[1e5, 1.0]]), torch.tensor([[1.0, 1e5]]), 0)
    same(wide, torch.tensor([[16.0, 1 / 16]]))
    assert PAIR_RANGE == 16.0
    for queries, keys, rotary in ((one, one[:, :4], 0), (one, one, 3), (one, one, 10)):
        with refuses("queries and keys must be"):
            pair_scales(queries, keys, rotary)


def test_moments_of_a_sum_alone_have_no_products_and_kinds_are_apart():
    sums, x = transforms.Moments(), torch.ones(2, 1, 3)
    for kind, layer, products in (("key", 4, True), ("key", 1, True), ("query", 2, False)):
        sums.add(kind, layer, x, products=products)
    sums.add("value", 0, x)
    assert sums.layers("key") == [1, 4] and sums.layers("query") == []
    assert set(sums.first) == {*sums.second, ("query", 2)}
