"""Files that an earlier version wrote (commit 3b70b000, the last before the cache became a
package of modules) load today, with the same bits."""

import json
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file

from tests.helpers import DATA
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.quant.calibration import load_calibration, save_calibration
from turboquant_nb.quant.quantizer import Recipe

FACTS = json.loads((DATA / "archives.json").read_text())
CONFIG = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
)
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def load(name):
    if name != "compressed":
        return TurboQuantCache.load(DATA / f"{name}.safetensors", CONFIG)
    pytest.importorskip("constriction")
    from turboquant_nb.hf.storage import load_compressed

    return load_compressed(DATA / "compressed.safetensors", CONFIG)


@pytest.mark.parametrize("name", ["cache", "static", "compressed"])
def test_a_cache_of_an_earlier_version_loads(name):
    "Its size, recipe, padding, and what its codes stand for are what the earlier version said."
    cache, facts = load(name), FACTS[name]
    report = cache.report()
    for key in ("nbytes", "tokens"):
        assert report[key] == facts[key], key
    assert Recipe.from_json(report["recipe"]) == Recipe.from_json(facts["recipe"])
    assert cache.static == (name == "static") and all(
        list(x.starts) == facts["starts"] == x.store.start.tolist() for x in cache.layers
    )
    for layer, norms in zip(cache.layers, facts["norms"]):
        for x, norm in zip(layer.store.read(), norms):
            assert abs(float(x.double().norm()) / norm - 1) < 1e-5


@pytest.mark.parametrize("name", ["cache", "static"])
def test_saved_again_it_is_the_same_but_for_words(name, tmp_path):
    """Every tensor to the bit; the header says today's words; a second copy is the first, byte
    for byte."""
    load(name).save(tmp_path / "again")
    TurboQuantCache.load(tmp_path / "again", CONFIG).save(tmp_path / "third")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "third").read_bytes()
    then, now = load_file(DATA / f"{name}.safetensors"), load_file(tmp_path / "again")
    assert {n.replace(".window", ".recent"): x.shape for n, x in then.items()} == {
        n: x.shape for n, x in now.items()
    }
    assert all(torch.equal(x, now[n.replace(".window", ".recent")]) for n, x in then.items())


def test_the_compressed_file_holds_the_same_tensors():
    plain, compressed = load("cache").states()[0], load("compressed").states()[0]
    for (a, ha), (b, hb) in zip(plain, compressed):
        assert ha == hb and a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", ["cache", "compressed"])
def test_a_changed_file_is_refused(name, tmp_path):
    from turboquant_nb.hf.storage import load_compressed

    data = bytearray((DATA / f"{name}.safetensors").read_bytes())
    data[-2000] ^= 1
    (tmp_path / "changed").write_bytes(data)
    with pytest.raises(ValueError, match="was changed after it was written"):
        TurboQuantCache.load(
            tmp_path / "changed", CONFIG
        ) if name == "cache" else load_compressed(tmp_path / "changed", CONFIG)


def test_a_calibration_of_an_earlier_version_loads(tmp_path):
    """The same transforms by name, the same recipes for a budget, no centres; written again it
    has the format of today and the same contents."""
    path, facts = DATA / "calibration.safetensors", FACTS["calibration"]
    found = load_calibration(path)
    found.check(CONFIG)
    assert [m.name for m in found.transforms] == facts["maps"]
    recipes = TurboQuantCache(CONFIG, "k3v3", calibration=path, budget=facts["budget"]).recipes
    assert recipes == [Recipe.from_json(x) for x in facts["recipes"]]
    save_calibration(found, tmp_path / "again")
    again = load_calibration(tmp_path / "again")
    assert (
        found.centers == again.centers == []
        and again.header == found.header
        and [m.name for m in again.transforms] == facts["maps"]
    )
    with (
        warnings.catch_warnings(),
        pytest.raises(
            ValueError, match="the calibration is of another model: it has layers 2, not 3"
        ),
    ):
        TurboQuantCache(
            transformers.LlamaConfig(**CONFIG.to_dict() | {"num_hidden_layers": 3}),
            calibration=path,
        )


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(num_key_value_heads=2), "KV heads 1, not 2"),
        (dict(head_dim=32), "head size 16, not 32"),
        (dict(num_attention_heads=4, head_dim=16), "query heads 2, not 4"),
        (
            dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            "RoPE rotates keys of layer 0 by other frequencies",
        ),
    ],
)
def test_a_model_of_other_heads_or_frequencies_is_refused(change, why, tmp_path):
    """It loaded, and failed with the first token, or, with another base of RoPE, went on from a
    wrong past."""
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    cache = TurboQuantCache(model, "k3v3")
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.long), past_key_values=cache)
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match=f"is of another model: .*{why}"):
        TurboQuantCache.load(
            tmp_path / "cache", transformers.LlamaConfig(**CONFIG.to_dict() | change)
        )
    assert TurboQuantCache.load(tmp_path / "cache", CONFIG).get_seq_length() == 5
