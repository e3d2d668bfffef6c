"""A code, a centre and a transform that nothing in the package was made for: a whole model
generates with each, saves, crops, captures its steps and searches by beams. A family of models:
tests/hf/test_family.py; a backend: tests/kernels/test_ops.py."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.helpers import QUIETLY, Shuffle
from tests.quant.lives import lives
from turboquant_nb.quant import quantizer
from turboquant_nb.cache.store import bytes_by_kind, expected_nbytes
from turboquant_nb.quant.quantizer import Code, Spec, register_code
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.testing import same
from turboquant_nb.theory import centre, transforms
from turboquant_nb.theory.centre import Centre, Terms, register_centre

pytestmark = QUIETLY


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
    assert store.nbytes == expected_nbytes(store) and bytes_by_kind(store)["negative"]


class Half(Centre):
    "Half of the mean that the model's frame has."

    name = "half"

    def at(self, mean, rows=None):
        return mean.float() / 2

    def query(self, q, mean, rotary=0):
        return Terms(q @ self.at(mean).mT)


def test_a_new_centre_is_one_class_and_one_line(monkeypatch, tmp_path):
    monkeypatch.delitem(centre.CENTRES, Half.name, raising=False)
    register_centre(Half())
    recipe = Recipe(Spec(3, center=Half.name), Spec(3), sinks=1, recent=4)
    store = lives(recipe, tmp_path).layers[0].store
    same(store.center("key", 0, 3), store.key.mean.float() / 2)
    same(store.key.mean[0, :, 0], store.frame.fixed.bfloat16())
    assert store.key.mean.any()


def test_a_new_transform_is_one_class_and_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(transforms, "_registered", {})
    transforms.register_transform(new := Shuffle(torch.arange(32).view(2, 16).T.flatten()))
    side = Spec(4, rotation="shuffle")
    store = lives(Recipe(side, side, sinks=1, recent=4), tmp_path).layers[0].store
    x = torch.randn(1, 2, 8, 32)
    assert torch.equal(store.key.q.rotation.apply(x), x @ new.matrix.T)
