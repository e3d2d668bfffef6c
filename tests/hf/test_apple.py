"""What a person with Apple silicon gets is PyTorch's path: each of its operators is one that
MPS has. Walked under a stand-in (`apple.py`), not run."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchgen")

from tests.helpers import QUIETLY, prompt, refuses, tiny
from tests.hf.apple import MPS, apple, send, supported
from turboquant_nb import KVStore, Recipe, Spec, TurboQuantCache, attend, preset
from turboquant_nb.cache import store as append

pytestmark = QUIETLY
HOW = dict(max_new_tokens=4, do_sample=False)


def test_the_stand_in_refuses_what_mps_has_not():
    assert supported("add.Tensor") and supported("bitwise_and.Tensor")
    assert not supported("geqrf") and not supported("_linalg_eigvals")
    x = torch.arange(6)
    with apple() as used:
        y = x.to("mps").float()
        assert y.device == MPS and (y + 1).sum().item() == 21
        assert torch.equal(y.cpu(), x.float()) and "add.Tensor" in used
        y[2:4] = 0
        assert y.tolist() == [0, 1, 0, 0, 4, 5]
        for bad in (
            lambda: y.double(),
            lambda: y.to("mps", torch.complex64),
            lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
            lambda: x.double().to("mps"),
        ):
            with refuses("Metal does not know", TypeError):
                bad()
        with refuses("mps and on cpu meet", RuntimeError):
            y + x
        with refuses("numpy", TypeError):
            y.numpy()
        with refuses("no kernel for MPS", NotImplementedError):
            torch.geqrf(torch.zeros(2, 2, device="mps"))
    with refuses("outside of", RuntimeError):
        y + 1


PRESETS = "k4v3", "k1v1", "k2v2-trellis"  # each number of bits, each kind
RECIPES = {name: name for name in PRESETS} | {
    "pair scale": Recipe(key=Spec(2, pair_scale="frame"), value=Spec(2)),
    "fractions": Recipe(key=Spec(2.5), value=Spec(3.25)),
    "QJL": Recipe(key=Spec(3), value=Spec(3), residual="prod"),
    "sinks": Recipe(key=Spec(3), value=Spec(3), sinks=4, recent=8),
    "unbiased": Recipe(Spec(3, "haar", scale="unbiased"), Spec(4, codebook="uniform")),
    "turning mean": Recipe(Spec(3, center="pre_rope"), Spec(2.5)),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_model(recipe):
    "Tokens are those of the same path in ordinary memory."
    model, inputs = tiny(head_dim=16), prompt(2, 40)
    want = model.generate(
        **inputs,
        past_key_values=TurboQuantCache(model, RECIPES[recipe], backend="torch"),
        **HOW,
    )
    away = send(copy.deepcopy(model))
    with torch.no_grad(), apple() as used:
        cache = TurboQuantCache(away, RECIPES[recipe])
        inputs = {name: x.to("mps") for name, x in inputs.items()}
        got = away.generate(**inputs, past_key_values=cache, **HOW)
        assert got.device == MPS and len(used) > 60
        assert cache.get_seq_length() == 43 and not cache.report()["served"].get("dense")
        assert got.cpu().tolist() == want.tolist()


@pytest.mark.parametrize("name", ["gemma3_text", "gemma2", "phi", "gpt_oss"])
def test_families(name):
    model = send(copy.deepcopy(tiny(name)))
    with torch.no_grad(), apple():
        cache = TurboQuantCache(model, "k3v3")
        inputs = {name: x.to("mps") for name, x in prompt(2, 40).items()}
        model.generate(**inputs, past_key_values=cache, **HOW)
        assert cache.get_seq_length() == 43


def test_what_is_done_to_a_cache(tmp_path):
    "Beams, drafts, crop, files, memory of the host."
    model = send(copy.deepcopy(tiny()))
    with torch.no_grad(), apple():
        one = {name: x.to("mps") for name, x in prompt(1, 40, padded=False).items()}
        for more in (dict(num_beams=2), dict(prompt_lookup_num_tokens=2)):
            cache = TurboQuantCache(model, "k3v3")
            model.generate(**one, past_key_values=cache, **HOW, **more)
            assert cache.get_seq_length() >= 42
        cache.crop(20 - cache.get_seq_length())
        assert cache.get_seq_length() == 20
        cache.save(tmp_path / "a.safetensors")
        again = TurboQuantCache.load(tmp_path / "a.safetensors", model)
        assert again.get_seq_length() == 20
        assert again.layers[0].store.device == cache.layers[0].store.device == MPS


def test_a_float64_on_the_path_is_found(monkeypatch):
    "The walk is one that fails: a conversion that a processor does not mind stops it."
    with torch.no_grad(), apple():
        store = KVStore(preset("k3v3"), 1, 2, 64, device="mps", dtype=torch.float32)
        k = torch.randn(1, 2, 300, 64).to("mps")
        store.append(k, k)
        encode = append.encode
        wide = lambda q, x, *more: encode(q, x.double().float(), *more)
        with monkeypatch.context() as patch:
            patch.setattr(append, "encode", wide)
            with refuses("float64", TypeError):
                store.append(k, k)
        out, _ = attend(torch.randn(1, 4, 1, 64).to("mps"), store)
        assert out.device == MPS and out.isfinite().all()
