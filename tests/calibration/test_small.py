"""Small files: what comes back is within half a step, whatever the model; other codes, other
models and changed files are refused, before much is allocated."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("constriction")

from tests.helpers import records_of, reseal
from tests.hf.test_archive import Allocations
from turboquant_nb.calibration import small
from turboquant_nb.calibration.small import (
    SmallCode,
    fit_small,
    load_small,
    read_small,
    save_small,
)
from turboquant_nb.hf import TurboQuantCache

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    initializer_range=0.3,
)


def made(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | more)).eval()


def ids(n, rows=1, seed=0):
    return torch.randint(1, 64, (rows, n), generator=torch.Generator().manual_seed(seed))


def filled(model, cache, n=50):
    with torch.no_grad():
        model(ids(n), past_key_values=cache)
    return cache


@pytest.mark.parametrize("group", (1, 2, 3))
def test_what_comes_back_is_within_half_a_step(group, tmp_path):
    model = made()
    code = fit_small(model, ids(60, 4, 1), group)
    assert [len(g) for g in code.groups] == {1: [1, 1, 1], 2: [2, 1], 3: [3]}[group]
    for b in code.bases.values():
        one = b.vectors.T @ b.vectors - torch.eye(len(b.mean))
        assert float(one.abs().max()) < 1e-5 and bool((b.weight > 0).all())
    exact = filled(model, transformers.DynamicCache(config=model.config))
    sizes = [save_small(exact, tmp_path / "x", code, s)["nbytes"] for s in (0.1, 0.3, 1.0)]
    assert sizes[0] > sizes[1] > sizes[2]
    save_small(exact, tmp_path / "x", code, 0.1)
    found = {i: (k, v) for i, k, v in read_small(tmp_path / "x", code)}
    for g in code.groups:
        for n, side in enumerate(("key", "value")):
            b, rows = code.bases[g[0], side], []
            for i in g:
                own = (exact.layers[i].keys, exact.layers[i].values)[n]
                assert torch.equal(found[i][n][:, :, :4], own[:, :, :4])
                inv = small._frequencies(code, i, side)
                rows.append(small._flat(found[i][n], inv) - small._flat(own, inv))
            y = (torch.cat(rows, 1) * b.weight) @ b.vectors
            assert 0.03 < float(y[4:].abs().max()) < 0.055


def test_a_cache_of_codes_is_stored_and_goes_on(tmp_path):
    model = made()
    code = fit_small(model, ids(60, 4, 1), 3)
    code.save(tmp_path / "code")
    again = SmallCode.load(tmp_path / "code")
    assert again.digest == code.digest and again.header == code.header
    cache = filled(model, TurboQuantCache(model, "k4v4"))
    save_small(cache, tmp_path / "x", code, 0.05)
    back = load_small(tmp_path / "x", again, model, "k4v4")
    assert back.get_seq_length() == 50 and back.recipes == cache.recipes
    for a, b in zip(cache.layers, back.layers):
        for x, y in zip(a.store.read(), b.store.read()):
            assert float((x - y).norm() / x.norm()) < 0.2
    with torch.no_grad():
        logits = [model(ids(3), past_key_values=c).logits for c in (cache, back)]
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.2


def test_what_is_refused(tmp_path):
    model = made()
    code = fit_small(model, ids(60, 4, 1), 3)
    cache = filled(model, TurboQuantCache(model, "k4v4"))
    with pytest.raises(ValueError, match="more tokens than a group's 48 channels, got 36"):
        fit_small(model, ids(40), 3)
    two = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(20, 2), past_key_values=two)
    with pytest.raises(ValueError, match="one sequence without padding"):
        save_small(two, tmp_path / "x", code)
    with pytest.raises(ValueError, match="step must leave something"):
        many = filled(model, transformers.DynamicCache(config=model.config), 3000)
        save_small(many, tmp_path / "x", code, 1e6)
    assert not [*tmp_path.iterdir()]
    save_small(cache, tmp_path / "x", code)
    with pytest.raises(ValueError, match="written with another code"):
        load_small(tmp_path / "x", fit_small(model, ids(60, 4, 2), 3), model)
    with pytest.raises(ValueError, match="code must be of this model"):
        load_small(tmp_path / "x", code, made(num_key_value_heads=1))
    whole = (tmp_path / "x").read_bytes()
    for n in range(0, len(whole), 7):
        (tmp_path / "y").write_bytes(whole[:n])
        with pytest.raises(ValueError):
            [*read_small(tmp_path / "y", code)]
    for at in range(0, len(whole), 5):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (tmp_path / "y").write_bytes(data)
        with pytest.raises(ValueError):
            [*read_small(tmp_path / "y", code)]


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(tokens=2**22), "cannot hold"),
        (dict(tokens=51), "layers|data must"),
        (dict(sinks=60), "channels"),
        (dict(dtype="int64"), "dtype must be"),
        (dict(heads=[[[1, 8], [1, 8]]] * 3), "channels"),
        (dict(heads=[]), "channels"),
    ],
)
def test_a_header_that_says_something_else(change, why, tmp_path):
    model = made()
    code = fit_small(model, ids(60, 4, 1), 3)
    save_small(filled(model, TurboQuantCache(model, "k4v4")), tmp_path / "x", code)
    header, records = records_of(tmp_path / "x", small.FORMAT_SMALL)
    about = json.loads(bytes(records[0][4])) | change
    records[0][4] = json.dumps(about).encode()
    reseal(tmp_path / "x", header | {"format": small.FORMAT_SMALL}, records)
    with Allocations() as found, pytest.raises(ValueError, match=why):
        [*read_small(tmp_path / "x", code)]
    assert found.largest < 2**21


def test_a_header_that_nests_too_deep(tmp_path):
    model = made()
    code = fit_small(model, ids(60, 4, 1), 3)
    save_small(filled(model, TurboQuantCache(model, "k4v4")), tmp_path / "x", code)
    header, records = records_of(tmp_path / "x", small.FORMAT_SMALL)
    records[0][4] = b"[" * 100_000
    reseal(tmp_path / "x", header | {"format": small.FORMAT_SMALL}, records)
    with pytest.raises(ValueError, match="nests too deep"):
        [*read_small(tmp_path / "x", code)]
