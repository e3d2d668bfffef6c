"""A code and a centre that nothing in the package was made for: a whole model generates with
each, saves, crops, captures its steps and searches by beams."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.helpers import generate, prompt, tiny
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.quant import quantizer
from turboquant_nb.quant.quantizer import Code, Recipe, Spec, register_code
from turboquant_nb.quant.trellis import TrellisCode
from turboquant_nb.serving.step import serving_recipe
from turboquant_nb.theory import centre
from turboquant_nb.theory.centre import Centre, Terms, register_centre

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def lives(recipe, tmp_path):
    "A tiny Llama generates on this recipe by every way of holding it; its last cache."
    model, inputs = tiny(hidden_size=128, head_dim=32), prompt(2, 20)
    new = lambda **how: TurboQuantCache(model, recipe, **how)
    run = lambda cache, **how: generate(model, inputs, "turboquant", cache=cache, **how)[0]
    want = run(kept := new())
    assert torch.equal(run(new(max_length=64, static=True)), want)  # in place
    assert torch.equal(run(captured := new(max_length=64, graphs=Tape)), want)
    assert captured.report()["graphs"]["replayed"] > 0
    kept.save(tmp_path / "cache")
    again = TurboQuantCache.load(tmp_path / "cache", model)
    for a, b in zip(again.layers, kept.layers):
        assert all(map(torch.equal, a.store.read(), b.store.read()))
    again.crop(-5)
    model(want[:, -5:], past_key_values=again)
    for a, b in zip(again.layers, kept.layers):  # the last token was not fed yet
        assert a.store.length == b.store.length
    assert run(new(), num_beams=3).shape == want.shape
    assert (
        kept.report()["backends"].keys() <= {"torch", "flash"}
        or recipe.key.codebook == "sphere"
    )
    return kept


def test_a_trellis_code_serves_a_whole_model(tmp_path):
    side = Spec(2, codebook="trellis")
    cache = lives(Recipe(side, side, sinks=1, recent=4), tmp_path)
    assert isinstance(cache.layers[0].store.key.q.code, TrellisCode)
    with pytest.raises(ValueError, match="codebook must be a table, got 'trellis'"):
        serving_recipe(Recipe(side, side))


class Halves(Code):
    "The sign of each channel, and how many of them are negative: a number of no use."

    extras = (quantizer.Extra("negative", 0),)

    def __init__(self, spec, d):
        self.d, self.channel_bits = d, (1,) * d

    def to(self, device):
        return self

    def encode(self, u):
        return (u > 0).to(torch.uint8)

    def levels(self, codes, check_range=False):
        return codes.float() * 2 - 1

    def residual(self, error):
        return {"negative": (error < 0).float().sum(-1)}


def test_a_new_code_is_one_class_and_one_line(monkeypatch, tmp_path):
    monkeypatch.delitem(quantizer.CODES, "halves", raising=False)
    register_code("halves", Halves)
    cache = lives(Recipe(Spec(1, codebook="halves"), Spec(1, codebook="halves")), tmp_path)
    store = cache.layers[0].store
    assert store.nbytes == store.expected_nbytes() and store.parts()["negative"]


class HalfOfLast(Centre):
    "Half of the prompt's last state, padding or not."

    name = "half of last"

    def fit(self, x, start, skip, rows=None):
        return x[:, :, -1:].to(torch.bfloat16)

    def at(self, mean, rows=None):
        return mean.float() / 2

    def query(self, q, mean, rotary=0):
        return Terms(q @ self.at(mean).mT)

    def output(self, out, weight, mean):
        return out + weight * self.at(mean)


def test_a_new_centre_is_one_class_and_one_line(monkeypatch, tmp_path):
    monkeypatch.delitem(centre.CENTRES, HalfOfLast.name, raising=False)
    register_centre(HalfOfLast())
    side = Spec(3, center=HalfOfLast.name)
    store = lives(Recipe(side, side, sinks=1, recent=4), tmp_path).layers[0].store
    for name, side in (("key", store.key), ("value", store.value)):
        assert torch.equal(store.center(name, 0, 3), side.mean.float() / 2) and side.mean.any()
