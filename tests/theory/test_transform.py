"""Transform codes: specs, allocation, layout and files, without a model."""

import itertools

import pytest
import torch

from tests.helpers import DATA
from turboquant_nb.esm import transform as M
from turboquant_nb.esm.transform import (
    RECIPES,
    SideCode,
    SideSpec,
    TransformCode,
    TransformRecipe,
    Workspace,
    code_states,
    load_code,
    look_up,
    save_code,
    transformed_states,
)


def side(bits, seed=0, inv_freq=None):
    "A code with random transforms and tables and these bits [L, H, d]."
    g = torch.Generator().manual_seed(seed)
    layers, heads, d = bits.shape
    into = torch.linalg.qr(torch.randn(layers, heads, d, d, generator=g))[0]
    into = into * torch.rand(layers, heads, d, 1, generator=g).add(0.5)
    levels, edges = {}, {}
    for b in sorted(set(bits.flatten().tolist()) - {0}):
        n = int((bits == b).sum())
        levels[b] = torch.randn(n, 2**b, generator=g).sort(1).values
        edges[b] = (levels[b][:, 1:] + levels[b][:, :-1]) / 2
    mean = torch.randn(layers, heads, d, generator=g)
    return SideCode(mean, into, into.inverse(), bits, levels, edges, inv_freq)


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
    assert packed.shape == (2, 5, sum(s.width(i) for i in range(3)))
    z = torch.einsum("lhde,lbhne->lbhnd", s.into, x - M.centre_at(s.mean, at, s.inv_freq))
    first, rows = 0, dict.fromkeys(s.levels, 0)
    for i in range(3):
        got = transformed_states(s, packed[..., first : first + s.width(i)], i)
        first += s.width(i)
        for h, j in itertools.product(range(heads), range(d)):
            b = int(bits[i, h, j])
            if not b:
                assert not got[:, h, :, j].any()
                continue
            levels, rows[b] = s.levels[b][rows[b]], rows[b] + 1
            near = (z[i, :, h, :, j, None] - levels).abs().min(-1).values
            far = (z[i, :, h, :, j] - got[:, h, :, j]).abs()
            torch.testing.assert_close(far, near, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_several_layers_are_looked_up_at_once(most):
    """All at once, some, one, or through a workspace that held something longer: the same bits,
    from a view of a longer store too."""
    g = torch.Generator().manual_seed(most)
    bits = torch.randint(0, most + 1, (4, 3, 8), generator=g).to(torch.uint8)
    bits[2] = 0  # a layer without bits among others
    s, x = side(bits), torch.randn(4, 2, 3, 9, 8, generator=g)
    store = torch.zeros(2, sum(s.width(i) for i in range(4)), 12, dtype=torch.uint8)
    store[:, :, :9] = code_states(s, x, torch.arange(9).expand(2, -1)).mT
    edges = torch.tensor([0, *(s.width(i) for i in range(4))]).cumsum(0).tolist()
    one = torch.stack(
        [
            transformed_states(s, store[:, a:b, :9].mT, i).mT
            for i, (a, b) in enumerate(itertools.pairwise(edges))
        ],
        1,
    )
    workspace = Workspace()
    look_up(s, store, 0, 4, workspace)
    for first, last in ((0, 4), (1, 4), (0, 2), (2, 3), (1, 3)):
        got = look_up(s, store[:, edges[first] : edges[last], :9], first, last, workspace)
        assert got.shape == (2, last - first, 3, 8, 9) and torch.equal(got, one[:, first:last])
    assert not one[:, 2].any() and one[:, 3].any() and not torch.equal(one[:, 0], one[:, 1])


def test_width_counts_whole_bytes():
    bits = torch.tensor([[[3, 1, 2, 0]], [[4, 4, 4, 4]]], dtype=torch.uint8)
    s = side(bits)
    assert [s.width(i) for i in range(2)] == [3, 4]
    nine = torch.ones(1, 1, 9, dtype=torch.uint8)
    assert side(nine).width(0) == 2


def test_recipes():
    for name, r in RECIPES.items():
        assert M.as_transform(name) == (name, r) and M.as_transform(r) == (name, r)
    assert M.as_transform(TransformRecipe(sinks=3))[0] == "custom"
    for bad in (dict(allocation="x"), dict(min_bits=4), dict(sinks=-1), dict(one_table=True)):
        with pytest.raises(ValueError):
            TransformRecipe(**bad)
    for bad in (
        dict(bits=0),
        dict(bits=9),
        dict(rotation="x"),
        dict(table="x"),
        dict(center="x"),
    ):
        with pytest.raises(ValueError):
            SideSpec(**bad)


def test_file_and_held_out(tmp_path):
    bits = torch.randint(0, 5, (2, 3, 8), generator=torch.Generator().manual_seed(0))
    key, value = side(bits.to(torch.uint8), 1, torch.ones(4)), side(bits.to(torch.uint8), 2)
    hashes = torch.tensor([M._text_hash("MKV")])
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


def test_file_of_the_first_format():
    """A file written by version 0.1.0: recipe, tables, and what given bytes stand for, to the
    bit."""
    code = load_code(DATA / "esm-code-1.safetensors")
    want = TransformRecipe(
        SideSpec(2.0, center="pre_rope"), SideSpec(2.0), sinks=1, outliers=0.25
    )
    assert code.recipe == want and code.header["name"] == "custom"
    assert code.bits_per_value == 3.0 and code.tables_nbytes == 2376
    assert code.key.bits.flatten().tolist() == [3, 3, 3, 1, 4, 4, 3, 2, 1, 1, 1, 1, 2, 1, 1, 1]
    means = {
        "key": [
            -0.021849308162927628,
            -0.02669123187661171,
            -0.025320617482066154,
            -0.014073430560529232,
            -0.029652411118149757,
        ],
        "value": [
            -0.21021448075771332,
            0.32613062858581543,
            -0.12159892171621323,
            -0.028813159093260765,
            0.15753409266471863,
        ],
    }
    for name, values in means.items():
        s = getattr(code, name)
        packed = (torch.arange(3 * s.width(1)) * 37 % 256).to(torch.uint8).view(1, 3, -1)
        assert transformed_states(s, packed, 1).flatten()[::5].tolist() == values
