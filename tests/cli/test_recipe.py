"""turboquant recipe: what it prints can be passed on; its bits are those that are stored."""

from dataclasses import replace

import pytest
import torch

from turboquant_nb.cli import plan
from turboquant_nb.quant.codes import make_quantizer
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import PRESETS, Recipe, as_recipe, preset
from tests.helpers import ONE_THREAD, refuses

pytestmark = ONE_THREAD


@pytest.mark.parametrize("name", PRESETS)
def test_recipe_prints_what_can_be_passed_on(call, name):
    code, out, err = call("recipe", name)
    assert code == 0 and Recipe.from_json(out) == preset(name) and "bits per value" in err
    assert call("recipe", out.strip(), "--quiet") == (0, out, "")


def test_recipe_options_and_file(call, tmp_path):
    code, out, _ = call("recipe k4v3 --bits 3 --sinks 1 --recent 7")
    assert Recipe.from_json(out) == replace(as_recipe("k4v3", 3), sinks=1, recent=7)
    file = tmp_path / "mine.json"
    file.write_text(out)
    assert call(f"recipe {file}")[1] == out
    got = call.json("recipe k4v3 --json")
    assert (
        got["nominal_bits"] == 3.5
        and got["bits_with_scale"] == {"64": 3.75, "128": 3.625}
        and got["recipe"]["key"]["bits"] == 4
    )
    with refuses("d must be"):
        plan.bits_per_value(preset("k3v3"), 0)


@pytest.mark.parametrize(
    "recipe, nominal, costs, words",
    [
        (
            as_recipe("k3v3", 2.5),
            2.5,
            {"64": 2.75, "128": 2.625},
            "2.5 bits per value nominal, with scale 2.75 at d = 64 and 2.625 at d = 128",
        ),
        (
            Recipe(residual="prod"),
            3,
            {"64": 3.375, "128": 3.1875},
            "3.375 at d = 64 and 3.1875 at d = 128",
        ),  # the keys' second number
        (as_recipe("k3v3", 2.3), 2.3, {}, "which neither d = 64 nor d = 128 allows"),
        (Recipe(Spec((4,) * 8), Spec((2,) * 4)), 3, {}, "nominal"),
    ],
)
def test_prices(call, recipe, nominal, costs, words):
    got = call.json("recipe", recipe.to_json(), "--json")
    assert got["nominal_bits"] == pytest.approx(nominal) and got[
        "bits_with_scale"
    ] == costs == plan.bits_by_head_size(recipe)
    assert words in call("recipe", recipe.to_json())[2]


def test_price_is_what_is_stored():
    for recipe in (
        as_recipe("k4v3", 2.5),
        Recipe(residual="prod"),
        Recipe(residual="sign"),
        Recipe(Spec((4, 2) * 16), Spec(1, scale_dtype="float32")),
    ):
        total = 0
        for spec in (recipe.key, recipe.value):
            q = make_quantizer(spec, 32)
            coded = q.encode(torch.ones(32))
            total += sum(q.channel_bits) + 8 * coded.scale.nbytes
            if coded.residual:  # the last bit of each channel, and a second number
                total += coded.residual["signs"].numel()
                total += 8 * coded.residual["residual_norm"].nbytes
        assert plan.bits_per_value(recipe, 32) == total / 64
