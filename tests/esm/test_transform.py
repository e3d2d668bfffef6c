"""Transform codes: specs, allocation, layout and files, without a model."""

import hashlib
import itertools

import pytest
import torch

from turboquant_nb.esm import transform as M
from turboquant_nb.esm.transform import (
    RECIPES,
    SideCode,
    SideSpec,
    TransformRecipe,
    code_states,
    look_up,
)
from tests.helpers import refuses, seeded


def side(bits, seed=0, inv_freq=None):
    "A code with random transforms and tables and these bits [L, H, d]."
    g = seeded(seed)
    layers, heads, d = bits.shape
    into = torch.linalg.qr(torch.randn(layers, heads, d, d, generator=g))[0]
    into = into * torch.rand(layers, heads, d, 1, generator=g).add(0.5)
    count = {b: int((bits == b).sum()) for b in set(bits.flatten().tolist()) - {0}}
    levels = {b: torch.randn(n, 2**b, generator=g).sort(1).values for b, n in count.items()}
    mean = torch.randn(layers, heads, d, generator=g)
    return SideCode(mean, into, into.inverse(), bits, M.join_levels(bits, levels), inv_freq)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_several_layers_are_looked_up_at_once(most):
    """All at once, some or one: the same bits, from a view of a longer store too."""
    g = seeded(most)
    bits = torch.randint(0, most + 1, (4, 3, 8), generator=g).to(torch.uint8)
    bits[2] = 0  # a layer without bits among others
    s, x = side(bits), torch.randn(4, 2, 3, 9, 8, generator=g)
    store = torch.zeros(2, sum(s.widths), 12, dtype=torch.uint8)
    store[:, :, :9] = code_states(s, x, torch.arange(9).expand(2, -1)).mT
    edges = list(itertools.accumulate(s.widths, initial=0))
    one = [
        look_up(s, store[:, a:b, :9].contiguous(), i, i + 1)
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    one = torch.cat(one, 1)
    for first, last in ((0, 4), (1, 4), (0, 2), (2, 3), (1, 3)):
        got = look_up(s, store[:, edges[first] : edges[last], :9], first, last)
        assert got.shape == (2, last - first, 3, 8, 9) and torch.equal(got, one[:, first:last])
    assert not one[:, 2].any() and one[:, 3].any() and not torch.equal(one[:, 0], one[:, 1])


@pytest.mark.parametrize(
    "most, digest", [(1, "e3593f8358545cca"), (4, "09038d399d0e8445"), (8, "0e63902ffa28bb1c")]
)
def test_bytes_are_as_they_were(most, digest):
    """The layout of bits that files of states and other programs would rely on, and what it
    stands for. States, transforms and levels are small integers, so that every processor
    computes without rounding."""
    g = seeded(most)
    shape = layers, heads, d = 3, 3, 8
    bits = torch.randint(0, most + 1, shape, generator=g).to(torch.uint8)
    bits[1], bits[..., 0] = bits[1].clamp(max=1), most
    into = torch.randint(-2, 3, (*shape, d), generator=g).tril(-1) + 2 * torch.eye(d)
    mean = torch.randint(-3, 4, shape, generator=g).float()
    count = {b: int((bits == b).sum()) for b in set(bits.flatten().tolist()) - {0}}
    tables = {
        b: torch.randint(1, 5, (n, 2**b), generator=g).cumsum(1) - 5 * 2 ** (b - 1)
        for b, n in count.items()
    }
    still = torch.zeros(d // 2)  # RoPE that rotates nothing: cosines are 1
    back = into.double().inverse().float()
    s = SideCode(mean, into.float(), back, bits, M.join_levels(bits, tables), still)
    x = torch.randint(-9, 10, (layers, 2, heads, 7, d), generator=g).float()
    at = torch.arange(7) - torch.tensor([[0], [3]])
    packed = code_states(s, x, at)
    rows = packed.mT.contiguous()
    said = packed, look_up(s, rows), M.energy_beyond(s, M.transform_states(s, x, at))
    found = hashlib.sha256()
    for t in said:
        found.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    assert found.hexdigest()[:16] == digest


def test_recipes():
    named = {
        f"water{b}{more}": (b, 0.01 * (more == "+")) for b in (2, 3, 4) for more in ("", "+")
    }
    found = {n: (r.key.bits, r.value.bits, r.outliers) for n, r in RECIPES.items()}
    assert found == {n: (b, b, outliers) for n, (b, outliers) in named.items()}
    for name, r in RECIPES.items():
        assert (r.key.center, r.value.center) == ("pre_rope", "mean") and r.min_bits == 1
        assert M.as_transform(name) == (name, r) and M.as_transform(r) == (name, r)
    assert M.as_transform(TransformRecipe(outliers=3.0))[0] == "custom"
    for bad, words in (
        (dict(allocation="x"), "allocation must be"),
        (dict(min_bits=4), "min_bits must be"),
        (dict(outliers=-1.0), "outliers must be"),
        (dict(value=SideSpec(center="pre_rope")), "RoPE rotates no values"),
    ):
        with refuses(words):
            TransformRecipe(**bad)
    for name, bad in (("bits", 0), ("bits", 9), ("rotation", "x"), ("center", "x")):
        with refuses(f"{name} must be"):
            SideSpec(**{name: bad})


# --- fitting


def statistics(layers=2, heads=2, d=8, seed=0):
    "Of two batches of states with means, one of them padded; and those states."
    g = seeded(seed)
    w = torch.randn(layers, heads, d, 3 * d, generator=g).double()
    inv_freq = 10.0 ** -torch.arange(d // 2)
    center = torch.randn(layers, heads, d, generator=g)
    gain = torch.rand(layers, generator=g).double() + 0.5
    m = M.CodeStatistics(center, inv_freq, w @ w.mT, gain)
    batches = []
    for n in (40, 30):
        q, k, v = torch.randn(3, layers, 2, heads, n, d, generator=g)
        v = v * torch.linspace(0.2, 2, d) + torch.randn(layers, 1, heads, 1, d, generator=g)
        k = k + M.centre_at(center, torch.arange(n).expand(1, -1), inv_freq)
        real = torch.arange(n) < torch.tensor([[n], [n - 7]])
        batches.append((q, k, v, real, real[:, None, None]))
    over = lambda take: [
        take(i, q[i], k[i], v[i], real, seen)
        for q, k, v, real, seen in batches
        for i in range(layers)
    ]
    over(m.take)
    return m, over


def transformed(fit, over, side, layers=2):
    "What a transform makes of the states of each layer: [L, N, H, d]."
    found = [[] for _ in range(layers)]

    def take(layer, q, k, v, real, visible):
        x = fit.apply(layer, k if side == "key" else v)
        found[layer].append(x.transpose(1, 2)[real].double())

    over(take)
    return torch.stack([torch.cat(x) for x in found])


SPECS = [
    (side, SideSpec(rotation=rotation, center=center, aware=aware))
    for side in ("key", "value")
    for rotation in ("svd", "hadamard", "none")
    for center in ("pre_rope", "mean", "none")
    for aware in (True, False)
    if (side, center) != ("value", "pre_rope") and (rotation, center) != ("hadamard", "none")
]


@pytest.mark.parametrize("side, spec", SPECS)
def test_a_transform_says_where_its_channels_lie(side, spec):
    """Mean and variance of each channel are those of the states that it was fitted to; it is
    the root of the metric, behind a rotation; and the first channels of "svd" have most."""
    m, over = statistics()
    fit = M.fit_transform(m, side, spec)
    z = transformed(fit, over, side)
    assert z.shape[1] == m.moments.tokens == 2 * 40 + 2 * 30 - 14
    torch.testing.assert_close(z.mean(1), fit.off, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z.var(1, correction=0), fit.var, rtol=1e-4, atol=1e-4)
    assert (fit.off.abs().max() < 1e-6) == (spec.center == "mean")
    eye = torch.eye(8).double().expand(2, 2, 8, 8)
    torch.testing.assert_close(fit.into @ fit.back, eye, rtol=1e-6, atol=1e-6)
    gram, metric = fit.into.mT @ fit.into, m.metric(side)
    metric = metric.tril() + metric.tril(-1).mT  # fp32 sums differ across it; `eigh` reads this
    level = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    want = metric + 0.01 * level * eye if spec.aware else eye
    torch.testing.assert_close(gram, want, rtol=1e-6, atol=1e-6)
    if spec.rotation == "svd":
        energy = z.square().mean(1)
        assert (energy.diff(dim=-1) < 1e-6).all() and energy[..., 0].min() > 0
        across = torch.einsum("lnhd,lnhe->lhde", z, z) / z.shape[1]
        off = across - torch.diag_embed(across.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-3 * energy.max()
    assert (fit.inv_freq is None) == (spec.center != "pre_rope")


def test_what_an_error_costs():
    "Of keys what queries make of it, of values what the output makes of it; times the gain."
    m, _ = statistics()
    gain = m.gain[:, None, None, None]
    assert torch.equal(m.metric("value"), gain * m.output)
    assert torch.equal(m.metric("key"), gain * m.mean_square("query"))
    still = M.CodeStatistics(m.center, m.inv_freq, 0 * m.output, m.gain, m.moments)
    fit = M.fit_transform(still, "value", SideSpec(rotation="none"))  # no error costs anything
    assert fit.into.isfinite().all() and fit.back.isfinite().all()


def identity(heads=1, d=4):
    "A transform that leaves states as they are, of a normal law."
    eye, zero = torch.eye(d).double().expand(1, heads, d, d), torch.zeros(1, heads, d).double()
    return M.FittedTransform(zero, eye, eye, None, zero, torch.ones(1, heads, d).double())


def histograms(x, aware=False, **how):
    "Of states [B, H, n, d] as keys and values, which all tokens see."
    fits = {"key": identity(*x.shape[1::2]), "value": identity(*x.shape[1::2])}
    recipe = TransformRecipe(SideSpec(3.0, aware=aware), SideSpec(3.0, aware=aware))
    fill = M.Histograms(fits, recipe, **how)
    real = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool)
    fill.take(0, x, x, x, real, real[:, None, None])
    return fill.out["key"]


def test_histograms_count_every_state_where_it_lies():
    x = torch.tensor([[0.0, -3.01, 1.49, 99.0], [1.0, 2.0, -15.99, -99.0]])[None, None]
    h = histograms(x, bins=64)  # from -16 to 16 in steps of a half
    assert h.low.tolist() == [-16.0] * 4 and h.step.tolist() == [0.5] * 4
    want = [[32, 34], [25, 36], [34, 0], [63, 0]]  # what lies beyond is counted at the end
    assert [row.nonzero().flatten().tolist() for row in h.count] == [sorted(x) for x in want]
    assert h.count.sum().item() == 8 and h.values(torch.full((4, 1), 32.5))[0] == 0.25
    fits = {"key": identity(), "value": identity()}
    fill = M.Histograms(fits, TransformRecipe(), bins=64)
    real = torch.tensor([[True, False]])
    fill.take(0, x, x, x, real, real[:, None, None])
    assert fill.out["value"].count.sum().item() == 4  # of a token, and none of padding


def test_tokens_count_by_how_they_are_attended_to():
    "Half of a token's weight is its own, half that of the squared weights that it gets."
    x = torch.zeros(1, 1, 3, 4)
    x[0, 0, :, 0] = torch.tensor([-2.0, 0.0, 3.0])
    h = histograms(x, aware=True, bins=64)
    p = (x @ x.mT).softmax(-1).square().sum(2)[0, 0].double()
    want = 0.5 + 0.5 * p / p.mean()
    found = [float(h.count[0, b]) for b in (28, 32, 38)]
    assert found == pytest.approx(want.tolist(), rel=1e-5) and max(found) > 1.2
    assert h.count[0].sum().item() == pytest.approx(3)


@pytest.mark.parametrize(
    "allocation, least", [("model", 0), ("model", 2), ("layer", 1), ("none", 1)]
)
def test_bits_are_spent_where_the_recipe_says(allocation, least):
    """As many as were asked for over the model or each layer, at least so many a channel, and
    more where an error costs more."""
    m, over = statistics()
    side = SideSpec(3.0) if allocation == "none" else SideSpec(2.5)
    recipe = TransformRecipe(side, side, allocation, least)
    w = torch.randn(2, 24, 16, generator=seeded(1))
    code = M.fit_code(m, recipe, over, over, list(w), {}, ["a", "b"])
    bits = torch.stack([s.bits for s in code.sides], 1).float()  # [L, side, H, d]
    assert bits.min() >= least
    if allocation == "none":
        assert (bits == 3).all()
        return
    assert bits.mean() == 2.5 and len(bits.unique()) > 2
    by_layer = bits.mean((1, 2, 3))
    assert allocation == "model" or (by_layer == 2.5).all()
    assert code.value.bits[..., 0].sum() > code.value.bits[..., -1].sum()  # "svd": most first
    at = torch.arange(20)[None]
    for s, name in zip(code.sides, ("key", "value")):
        fit = M.fit_transform(m, name, side)
        assert torch.equal(s.into, fit.into.float()) and s.levels.isfinite().all()
        x = torch.randn(2, 1, 2, 20, 8) + s.mean[:, None, :, None]
        code_states(s, x, at)  # tables fit the bits
    assert code.hashes.tolist() == M.text_hashes(["b", "A"]).tolist()
