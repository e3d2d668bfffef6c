"""turboquant calibrate: files that the other commands take."""

import json

import pytest
from tests.helpers import ONE_THREAD

from .conftest import refused
from .test_output import SHORT

pytestmark = ONE_THREAD


@pytest.mark.parametrize("more, maps", [("--no-maps", False), ("", True)])
def test_layers_are_measured_and_a_budget_is_spent(call, plain, tmp_path, more, maps):
    "With key transforms and without."
    shared, file = f"--model {plain} --quiet --json", tmp_path / "layers.safetensors"
    ask = f"calibrate --windows 1 --length 64 --out {file} --layers {shared} {more}"
    code, out, _ = call(ask)
    about = json.loads(out)
    losses, layers = about["losses"], about["about"]["layers"]
    assert code == 0 and losses["bits"] == [2, 3, 4] and bool(about["nbytes"]) == maps
    assert len(losses["key"]) == len(losses["value"]) == layers
    with_file = f"{shared} --calibration {file} --budget 2.5"
    code, out, _ = call(f"generate --max-new-tokens 3 --prompt a {with_file}")
    said = json.loads(out)["cache"]["recipe"]  # one that all layers share, or a list
    recipes = [json.loads(x) for x in said] if isinstance(said, list) else [said]
    bits = [r[side]["bits"] for r in recipes for side in ("key", "value")]
    assert code == 0 and sum(bits) == 2.5 * len(bits)
    assert ("map-" in json.dumps(recipes)) == maps
    code, out, _ = call(f"eval ppl --recipe k2v2-scalar {SHORT} {with_file}")
    names = [r["cache"] for r in json.loads(out)["rows"]]
    assert code == 0 and f"k2v2-scalar{' + transforms' * maps} at 2.5 bits" in names
    refused(
        call(f"generate --prompt a --model {plain} --quiet --calibration {file} --budget 5"),
        "budget must be from 2 to 4",
    )


def test_a_budget_needs_layers_that_were_measured(call, plain, tmp_path):
    file = tmp_path / "maps.safetensors"
    ask = f"calibrate --windows 1 --length 64 --out {file} --model {plain} --quiet"
    assert call(ask)[0] == 0
    ask = f"generate --prompt a --model {plain} --quiet --calibration {file} --budget 2.5"
    refused(call(ask), "a budget needs layers that were measured")


def test_a_short_text_is_refused(call, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Call me Ishmael.")
    ask = f"calibrate --out c.st --model {plain} --text short.txt --length 128 --quiet"
    refused(call(ask), "--text: the text must give 1 or more windows of 128 tokens, it gives 0")
    assert {x.name for x in tmp_path.iterdir()} == {"short.txt"}
