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
    TransformCode,
    TransformRecipe,
    code_states,
    load_code,
    look_up,
    save_code,
)


def side(bits, seed=0, inv_freq=None):
    "A code with random transforms and tables and these bits [L, H, d]."
    g = torch.Generator().manual_seed(seed)
    layers, heads, d = bits.shape
    into = torch.linalg.qr(torch.randn(layers, heads, d, d, generator=g))[0]
    into = into * torch.rand(layers, heads, d, 1, generator=g).add(0.5)
    count = {b: int((bits == b).sum()) for b in set(bits.flatten().tolist()) - {0}}
    levels = {b: torch.randn(n, 2**b, generator=g).sort(1).values for b, n in count.items()}
    mean = torch.randn(layers, heads, d, generator=g)
    return SideCode(mean, into, into.inverse(), bits, M.join_levels(bits, levels), inv_freq)


@pytest.mark.parametrize("d, heads", [(4, 1), (8, 3), (16, 20), (24, 2), (64, 2)])
@pytest.mark.parametrize("most", [1, 4, 8])
@pytest.mark.parametrize("pre_rope", [False, True])
def test_round_trip(d, heads, most, pre_rope):
    g = torch.Generator().manual_seed(d + most)
    bits = torch.randint(0, most + 1, (3, heads, d), generator=g).to(torch.uint8)
    bits[..., 0] = most
    s = side(bits, inv_freq=torch.rand(d // 2, generator=g) if pre_rope else None)
    x = torch.randn(3, 2, heads, 5, d, generator=g)
    at = torch.arange(5) + torch.tensor([[0], [-3]])
    packed = code_states(s, x, at)
    assert packed.shape == (2, 5, sum(s.widths))
    z = M.transform_states(s, x, at).view(3, heads, d, 2, 5)
    tables, first = iter(s.levels.split((2 ** bits.flatten().long()).tolist())), 0
    for i, width in enumerate(s.widths):
        rows = packed[..., first : first + width].mT.contiguous()
        got, first = look_up(s, rows, i, i + 1)[:, 0], first + width
        for h, j in itertools.product(range(heads), range(d)):
            near = (z[i, h, j, ..., None] - next(tables)).abs().min(-1).values
            far = (z[i, h, j] - got[:, h, j]).abs()
            torch.testing.assert_close(far, near, rtol=1e-3, atol=1e-5)
        back = M.decode_states(s, packed[..., first - width : first], at, i)
        mean = M.centre_at(s.mean[i], at, s.inv_freq)
        want = torch.einsum("hed,bhdn->bhne", s.into[i].inverse(), got) + mean
        torch.testing.assert_close(back, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_several_layers_are_looked_up_at_once(most):
    """All at once, some or one: the same bits, from a view of a longer store too."""
    g = torch.Generator().manual_seed(most)
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
    g = torch.Generator().manual_seed(most)
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


def test_width_counts_whole_bytes():
    bits = torch.tensor([[[3, 1, 2, 0]], [[4, 4, 4, 4]]], dtype=torch.uint8)
    s = side(bits)
    assert s.widths == [3, 4]
    nine = torch.ones(1, 1, 9, dtype=torch.uint8)
    assert side(nine).widths == [2]


def test_recipes():
    named = {f"water{b}{more}": (b, 0.01 * (more == "+")) for b in (2, 3, 4) for more in ("", "+")}
    found = {n: (r.key.bits, r.value.bits, r.outliers) for n, r in RECIPES.items()}
    assert found == {n: (b, b, outliers) for n, (b, outliers) in named.items()}
    for r in RECIPES.values():
        assert (r.key.center, r.value.center) == ("pre_rope", "mean") and r.min_bits == 1
        assert r.allocation == "model" and r.key.aware and r.value.rotation == "svd"
    for name, r in RECIPES.items():
        assert M.as_transform(name) == (name, r) and M.as_transform(r) == (name, r)
    assert M.as_transform(TransformRecipe(outliers=3.0))[0] == "custom"
    for bad, words in (
        (dict(allocation="x"), "allocation must be"),
        (dict(min_bits=4), "min_bits must be"),
        (dict(outliers=-1.0), "outliers must be"),
        (dict(value=SideSpec(center="pre_rope")), "RoPE rotates no values"),
        (dict(key=SideSpec(2.5), allocation="none"), "bits must be an integer"),
    ):
        with pytest.raises(ValueError, match=words):
            TransformRecipe(**bad)
    for name, bad in (("bits", 0), ("bits", 9), ("rotation", "x"), ("center", "x")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            SideSpec(**{name: bad})


def test_file_and_held_out(tmp_path):
    bits = torch.randint(0, 5, (2, 3, 8), generator=torch.Generator().manual_seed(0))
    key, value = side(bits.to(torch.uint8), 1, torch.ones(4)), side(bits.to(torch.uint8), 2)
    hashes = M.text_hashes(["MKV"])
    code = TransformCode(key, value, RECIPES["water2"], {"model": "x"}, hashes)
    path = tmp_path / "a.safetensors"
    save_code(code, path)
    back = load_code(path)
    assert back.recipe == code.recipe and back.header["model"] == "x"
    assert (
        back.bits_per_value == code.bits_per_value and back.tables_nbytes == code.tables_nbytes
    )
    for a, b in ((key, back.key), (value, back.value)):
        assert a.tensors().keys() == b.tensors().keys()
        assert all(torch.equal(a.tensors()[n], b.tensors()[n]) for n in a.tensors())
    with pytest.raises(ValueError, match="calibration set"):
        back.check_held_out(["AAA", "mkv"])
    back.check_held_out(["AAA"])
    with pytest.raises(FileNotFoundError):
        load_code(tmp_path / "b")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a readable code"):
        load_code(path)
