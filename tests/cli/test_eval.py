"""turboquant eval: rows and records of every measure."""

import json
import os

import pytest

from turboquant_nb import cli, preset, results
from turboquant_nb.evaluation import candidates
from tests.helpers import ONE_THREAD

from .test_output import SHORT

pytestmark = ONE_THREAD


@pytest.mark.parametrize("measure", ["ppl", "logits", "attention"])
def test_eval_measures_windows(call, plain, tmp_path, monkeypatch, measure):
    "Rows on standard output, the same rows with their origin in the file, a picture."
    monkeypatch.chdir(tmp_path)
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    code, said, err = call(
        f"eval {measure} --model {plain} {SHORT} --against dense --out r.json --plot r.png "
        "--recipe k4v4",
        '{"key": {"bits": 2}, "value": {"bits": 1}, "sinks": 0, "recent": 0}',
    )
    assert code == 0 and err == ""
    record = json.loads(out.read_text())
    layers = measure == "attention"
    caches = ["k4v4", "recipe 2", "dense"]
    want = ["uncompressed"] * (measure == "ppl") + [
        x for x in caches for _ in range(1 + layers)
    ]
    assert [r["cache"] for r in record["rows"]] == want
    assert (
        record["gate"]["passed"]
        and record["data"]["n"] == 2
        and record["command"].startswith(f"turboquant eval {measure}")
    )
    assert len(said.splitlines()) == len(want) + 1 and picture.stat().st_size > 3000
    key = {"ppl": "percent", "logits": "kl", "attention": "error"}[measure]
    value = {(r["cache"], r.get("layer", 0)): abs(r[key]) for r in record["rows"]}
    assert value["dense", 0] < value["k4v4", 0] < value["recipe 2", 0]


def test_eval_takes_texts_and_a_recipe_per_layer(call, plain, tmp_path):
    for x in "ab":
        (tmp_path / x).write_text(f"{x} few words of text, over and over. " * 60)
    per_layer = json.dumps([json.loads(preset(n).to_json()) for n in ("k4v4", "k2v2")])
    code, said, err = call(
        f"eval ppl --model {plain} --text {tmp_path / 'a'} {tmp_path / 'b'} --protocol stress "
        f"--json {SHORT} --recipe",
        per_layer,
    )
    record = json.loads(said)
    assert code == 0 and record["data"]["id"] == "a, b"
    assert record["rows"][1]["cache"] == "recipe 1" and len(record["rows"][1]["recipe"]) == 2


def test_eval_outside_a_repository_names_the_release(call, plain, monkeypatch):
    monkeypatch.setattr(results, "_git", lambda *a: None)
    monkeypatch.delenv("TURBOQUANT_COMMIT", raising=False)
    _, said, _ = call(f"eval ppl --model {plain} --recipe k4v4 --json {SHORT}")
    assert (
        json.loads(said)["commit"] == f"release {cli.version()}"
        and "TURBOQUANT_COMMIT" not in os.environ
    )


@pytest.mark.parametrize("dirty", [True, False])
def test_eval_of_uncommitted_code_is_marked_as_a_draft(
    call, plain, monkeypatch, tmp_path, dirty
):
    monkeypatch.setattr(results, "_git", lambda *a: None)  # as where there is no git
    monkeypatch.setenv("TURBOQUANT_COMMIT", "0" * 40)
    monkeypatch.setenv("TURBOQUANT_DIRTY", str(int(dirty)))
    code, _, _ = call(
        f"eval ppl --model {plain} --recipe k4v4 --out {tmp_path / 'r.json'} {SHORT}"
    )
    assert (
        code == 0
        and results.load(tmp_path / "r.json", draft=dirty).get("draft", False) == dirty
    )


def test_eval_of_a_cache_that_is_not_installed(call, plain, monkeypatch):
    monkeypatch.setattr(candidates, "find_spec", lambda name: None)
    code, _, err = call(f"eval ppl --model {plain} --against quanto4 {SHORT}")
    assert code == 1 and "pip install optimum-quanto" in err
