"""Losses of layers and budgets as a stranger would try them: every kind of decoder, files,
generation, and what is refused."""

import copy
import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import QUIETLY, generate, logits, made, prompt, refuses, texts, tiny
from turboquant_nb.calibration import sensitivity as A, fit as C
from turboquant_nb.calibration.sensitivity import measure_sensitivity
from turboquant_nb.quant.calibration import allocate_layers, save_calibration
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.score import score
from turboquant_nb import Recipe, Spec, TurboQuantCache
from turboquant_nb.testing import same

pytestmark = QUIETLY


@pytest.mark.parametrize(
    "name, transformed", [("qwen2", True), ("gpt_neox", False), ("gemma3_text", True)]
)
def test_losses_are_what_the_cache_loses(name, transformed):
    """The loss of one side of one layer is that of a cache that codes it so and the rest with
    many bits, by the stress protocol; the model stays as it was."""
    model, calibration = made(name)
    ids = texts(2, 40, seed=7)
    before, kind = logits(model, ids), model.config._attn_implementation
    found = measure_sensitivity(model, ids, calibration if transformed else None)
    same(logits(model, ids), before)
    assert model.config._attn_implementation == kind
    losses = found.header["losses"]
    layers = model.config.num_hidden_layers
    assert (
        losses["bits"] == [2, 3, 4]
        and losses["tokens"] == 2 * 36
        and len(losses["key"]) == len(losses["value"]) == layers
    )
    assert bool(found.transforms) == transformed
    for side in ("key", "value"):
        for a, b, c in losses[side]:
            assert a > 0 and b > 0 and c > 0 and a > c, "fewer bits, more loss"
    if name == "gemma3_text":
        return  # all-quantised needs a cache that returns all tokens of every layer
    recipe = TurboQuantCache(
        model,
        Recipe(Spec(2, center="fixed"), Spec(2), sinks=4, recent=0),
        calibration=calibration if transformed else None,
    ).recipes
    both = score(
        model,
        ids,
        as_candidate(model, recipe, "x", dtype=None),
        "stress",
        8,
        distributions=True,
    )
    alone = sum(x[0] for side in ("key", "value") for x in losses[side])
    assert 0.3 < alone / float(both.kl.mean()) < 3


@pytest.mark.parametrize("name", ("llama", "gemma3_text"))
def test_a_budget_runs_and_comes_back(name, tmp_path):
    """Every layer gets its bits, with its transform; generation, saving and loading
    keep them; one file serves all budgets."""
    model, calibration = made(name)
    found = measure_sensitivity(model, texts(1, 32), calibration)
    save_calibration(found, file := tmp_path / "f.safetensors")
    assert json.dumps(found.header)
    for budget in (2.5, 3.3):
        cache = TurboQuantCache(model, "k3v3", calibration=file, budget=budget)
        bits = [b for r in cache.recipes for b in (r.key.bits, r.value.bits)]
        assert budget - 1 / len(bits) < sum(bits) / len(bits) <= budget
        assert all(r.key.rotation.startswith("map-") and r.sinks == 4 for r in cache.recipes)
        out, _ = generate(model, prompt(2, 40, padded=False), "turboquant", cache=cache)
        cache.save(tmp_path / "cache")
        back = TurboQuantCache.load(tmp_path / "cache", model)
        assert out.shape[1] > 40 and back.recipes == cache.recipes
        for a, b in zip(cache.coded_layers, back.coded_layers):
            for x, y in zip(a.store.read(), b.store.read()):
                same(x, y)


def test_a_pass_that_begins_late_gives_the_same_numbers(monkeypatch):
    """Layers before the coded one give what they gave in the exact pass: the losses are those
    of whole passes to the bit, and the model is as it was."""
    model, ids = copy.deepcopy(tiny("llama")), texts(2, 24)
    kept = lambda: [
        (vars(x).get("forward"), dict(x._forward_hooks)) for x in model.model.layers
    ]
    before = kept()  # a model that other tests used may carry hooks of transformers' own
    found = measure_sensitivity(model, ids).header["losses"]
    assert kept() == before
    runs = []
    monkeypatch.setattr(A._Prefix, "try_out", lambda self, *a: setattr(self, "sound", False))
    model.model.layers[0].register_forward_hook(lambda *a: runs.append(1))
    assert measure_sensitivity(model, ids).header["losses"] == found
    assert (
        len(runs) == 2 * (1 + 2 * 2 * 3) + 1
    )  # windows, of the exact pass and of each side, layer and bits; one token to see the keys


def test_a_model_that_hands_on_more_than_its_output_is_measured_whole(monkeypatch):
    """The last layer adds what the first one noted on its way. The mutant leaves the first one
    out all the same."""
    model, ids = copy.deepcopy(tiny("llama")), texts(2, 24)
    first, last, note = model.model.layers[0], model.model.layers[-1], {}
    one, two = first.forward, last.forward

    def noting(x, *args, **kwargs):
        note["x"] = one(x, *args, **kwargs)
        return note["x"]

    first.forward, last.forward = (
        noting,
        lambda *args, **kwargs: two(*args, **kwargs) + note["x"].roll(1, 1),
    )
    found = measure_sensitivity(model, ids).header["losses"]
    assert first.forward is noting
    for sound in (False, True):
        monkeypatch.setattr(
            A._Prefix, "try_out", lambda self, *a: setattr(self, "sound", sound)
        )
        assert (measure_sensitivity(model, ids).header["losses"] == found) is not sound


def test_a_layer_that_does_not_matter_gets_no_bits():
    "Values of a layer whose output is thrown away lose nothing; the budget goes elsewhere."
    model = tiny("llama", seed=9)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    losses = measure_sensitivity(model, texts(2, 40)).header["losses"]
    assert max(losses["key"][0] + losses["value"][0]) < 1e-6 < losses["value"][1][0]
    assert allocate_layers(losses, 2.5 if len(losses["key"]) == 2 else 2.25)[0] == (2, 2)


def test_what_is_refused():
    model, calibration = made("llama")
    found = measure_sensitivity(model, texts(1, 32), bits=(2, 4))
    with refuses("from 2 to 4"):
        TurboQuantCache(model, calibration=found, budget=math.nan)
    with refuses("is of another model"):
        TurboQuantCache(tiny("qwen2"), calibration=found, budget=3)
    with refuses("is of another model"):
        measure_sensitivity(tiny("qwen2"), texts(), calibration)
    broken = copy.deepcopy(tiny("llama", seed=3))
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = math.inf
    with refuses("is not finite where key of layer 0"):
        measure_sensitivity(broken, texts())
    assert broken.config._attn_implementation != C.NAME


def test_an_error_in_the_middle_leaves_the_model_as_it_was():
    model, _ = made("llama")
    kind = model.config._attn_implementation

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(model, texts(), progress=stop)
    assert model.config._attn_implementation == kind


def test_a_budget_that_is_met_exactly_is_not_lost_to_rounding():
    "2.05 bits of 100 numbers are 205, in floating point a little less; 2.0499 buy no step."
    losses = dict(bits=[2, 3], key=[[1.0, 0.5]], value=[[0.9, 0.1]], size=[[5, 95]])
    assert 2.05 * 100 < 205
    assert allocate_layers(losses, 2.05) == [(3, 2)]
    assert allocate_layers(losses, 2.0499) == [(2, 2)]
