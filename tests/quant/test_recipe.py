"""Recipes: what is refused and in which words, JSON and back, presets."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from tests.helpers import random_frame, random_transform, refuses
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb import KVStore, Recipe, Spec, preset
from turboquant_nb.quant.calibration import LayerFrame
from turboquant_nb.quant.recipe import PRESETS, as_recipe
from turboquant_nb.testing import same


@pytest.mark.parametrize(
    "kwargs, error, name",
    [
        (dict(key=3), TypeError, "key"),
        (dict(value=None), TypeError, "value"),
        (dict(sinks=-1), ValueError, "sinks"),
        (dict(sinks=1.0), TypeError, "sinks"),
        (dict(recent=-5), ValueError, "recent"),
        (dict(recent=True), TypeError, "recent"),
        (dict(value=Spec(center="auto")), ValueError, "center='auto' is for keys: a frame"),
        (dict(value=Spec(pair_scale="frame")), ValueError, "pair_scale='frame' is for keys"),
    ],
)
def test_recipe_refuses(kwargs, error, name):
    with refuses(name, error):
        Recipe(**kwargs)


def test_recipe_json_round_trip_and_hash():
    for bits, rotation, scale, table, center, dtype in (
        (1, "hadamard", "norm", "uniform", "none", "float32"),
        (2.5, "haar", "mse", "sphere", "fixed", "bfloat16"),
        ((4, 1), "identity", "unbiased", "sphere", "pre_rope", "float16"),
    ):
        key = Spec(bits, rotation, 7, scale, table, center, dtype)
        recipe = Recipe(key=key, value=Spec(bits=2), sinks=3, recent=5)
        again = Recipe.from_json(recipe.to_json())
        assert again == recipe and hash(again) == hash(recipe)
        assert recipe != replace(recipe, recent=6) and asdict(again) == asdict(recipe)
    assert len({Recipe(), Recipe(), preset("k2v2")}) == 2
    with pytest.raises(AttributeError):
        Recipe().sinks = 9


def test_residual_shorthand():
    base = Recipe(Spec(4, center="fixed", seed=5), Spec(2), 1, 2)
    for name, key in (
        ("none", {}),
        ("sign", dict(residual="sign")),
        ("prod", dict(residual="qjl")),
        ("rescale", dict(scale="unbiased")),
    ):
        r = Recipe(base.key, base.value, 1, 2, residual=name)
        assert r == replace(base, key=replace(base.key, **key)) == as_recipe(r)
        assert Recipe.from_json(r.to_json()) == r == replace(base, residual=name)
        sides = {"key": asdict(base.key), "value": asdict(base.value)}
        body = sides | {"sinks": 1, "recent": 2, "residual": name}
        assert Recipe.from_json(json.dumps(body)) == r
    assert Recipe(Spec(4, residual="sign"), Spec(), residual="none").key.residual == "none"
    assert as_recipe(Recipe(residual="prod"), bits=2).key == Spec(
        2, center="auto", pair_scale="auto", residual="qjl"
    )
    with refuses("residual='sign' bits must be"):
        Recipe(Spec(1), Spec(4), residual="sign")
    with refuses("residual='qjl' bits must be"):
        as_recipe(Recipe(residual="prod"), bits=2.5)


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        "",
        "null",
        '"k3v3"',
        '{"key":{}}',
        '{"key":{},"value":{},"foo":1}',
        '{"key":[],"value":{}}',
        '{"key":{"bit":3},"value":{}}',
    ],
)
def test_recipe_from_bad_json(text):
    with refuses("not a recipe"):
        Recipe.from_json(text)


def test_presets_and_as_recipe():
    for name, (k, v) in PRESETS.items():
        r = preset(name)
        assert (
            (r.key.bits, r.value.bits) == (k, v)
            and name.partition("-")[0] == f"k{k}v{v}"
            and as_recipe(name) == r
            and r.key.center == "auto"
            and r.key.codebook
            == r.value.codebook
            == ("trellis" if name == "k2v2" or "trellis" in name else "sphere")
            and r.key.pair_scale == "auto"
            and r.value.pair_scale == "none"
        )
    assert as_recipe() == as_recipe(None) == preset("k3v3") and as_recipe(Recipe()) == Recipe()
    assert as_recipe("k4v3", bits=1) == replace(
        preset("k4v3"),
        key=replace(preset("k4v3").key, bits=1),
        value=replace(preset("k4v3").value, bits=1),
    )
    for bad in (0, 9, 5, "3", 2.0, 4.5, True):
        with refuses("bits"):
            as_recipe("k3v3", bits=bad)
    with refuses("recipe", TypeError):
        as_recipe({"key": 1})


def test_the_window_is_long_where_either_side_is_coarse():
    "`min(k, v) > 2`, not `k > 2` or `v > 2`."
    windows = {name: preset(name).recent for name in PRESETS}
    assert windows == {
        "k4v4": 16,
        "k4v3": 16,
        "k3v3": 16,
        "k2v2": 64,
        "k3v3-trellis": 16,
        "k2v2-scalar": 64,
        "k2v2-trellis": 64,
        "k1v1": 64,
    }


def test_the_json_of_a_recipe_is_sorted_and_says_what_is_missing():
    "Sorted: two equal recipes have one text, whatever the order of fields in a later version."
    fields = json.loads(
        Recipe().to_json(), object_pairs_hook=lambda pairs: [k for k, _ in pairs]
    )
    assert fields == sorted(fields)
    with refuses("^not a recipe: 'key' is missing$"):
        Recipe.from_json("{}")


def test_what_a_frame_settles():
    """ "auto" becomes the mean before RoPE, else the one after it, and the pair scale, unless a
    transform of each head does its work; what was chosen stays."""
    full = random_frame(2, 8, 6)
    fixed = replace(full, mean=None)
    auto = Recipe()
    names = lambda r, frame=None: (r.settled(frame).key.center, r.settled(frame).key.pair_scale)
    assert names(auto) == names(auto, LayerFrame()) == ("none", "none")
    assert names(auto, full) == ("pre_rope", "frame")
    assert names(auto, fixed) == ("fixed", "frame")
    assert names(auto, replace(fixed, pair=None)) == ("fixed", "none")
    assert names(auto, LayerFrame(pair=full.pair)) == ("none", "frame")
    of_heads = replace(auto, key=replace(auto.key, rotation=random_transform(2, 8).name))
    assert names(of_heads, full) == ("pre_rope", "none")
    for center in ("none", "fixed", "pre_rope"):
        for scale in ("none", "frame"):
            chosen = Recipe(Spec(3, center=center, pair_scale=scale))
            assert chosen.settled() == chosen.settled(full) == chosen
            assert chosen.wants_frame == ((center, scale) != ("none", "none"))
    assert auto.wants_frame and auto.settled(full).value == auto.value


@pytest.mark.parametrize("bad", (-1.0, 0.0, 1 / 17, 17.0))
def test_a_pair_scale_of_a_frame_has_a_range(bad):
    "What a file of a store may hold, so that what was saved is read again."
    pair = torch.ones(2, 8)
    pair[1, 3] = bad
    with refuses("pair must lie from 1/16 to 16"):
        LayerFrame(pair=pair)
    pair[1, 3] = 16.0 if bad > 1 else 1 / 16
    frame, recipe = LayerFrame(pair=pair), Recipe(Spec(3, pair_scale="frame"))
    store = store_of(*state_of(KVStore(recipe, 1, 2, 8, frame=frame)))
    same(store.key.frame.pair[0, :, 0].float(), pair)


@pytest.mark.parametrize(
    "bad, why",
    (
        (dict(fixed=[[0.0]]), "fixed must be"),
        (dict(pair=torch.ones(2, 8, dtype=torch.int32)), "pair must be"),
    ),
)
def test_what_is_no_frame(bad, why):
    with refuses(why, TypeError):
        LayerFrame(**bad)
