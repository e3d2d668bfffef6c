"""Nothing finished is lost: output that cannot be encoded is escaped, files are written before
anything is printed, and Ctrl-C leaves what was done, says where, and exits with 130."""

import io
import json
import os
import signal
import sys

import pytest
import typer

from turboquant_nb.cli import calibrate, main
from turboquant_nb.cli import eval as evals
from turboquant_nb.cli import generate as writes
from turboquant_nb.cli.app import app
from turboquant_nb.quant.calibration import load_calibration
from tests.helpers import ONE_THREAD

from .conftest import shell

pytestmark = ONE_THREAD
CTRL_C = KeyboardInterrupt
EVAL = "eval ppl --windows 2 --length 40 --prompt 20 --recipe k4v4 k3v3 k2v2"


def words_of(group, words=()):
    "Every command of the program, and every group of commands."
    yield words
    for name, x in getattr(group, "commands", {}).items():
        yield from words_of(x, (*words, name))


COMMANDS = [*words_of(typer.main.get_command(app))]


@pytest.fixture
def ascii(monkeypatch):
    "Run a command with standard output and error that take ASCII alone; (code, out, err)."

    def run(*words):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
        with monkeypatch.context() as m:
            m.setattr(sys, "stdout", streams[0])
            m.setattr(sys, "stderr", streams[1])
            code = main([*map(str, words)])
        for x in streams:
            x.flush()
        return code, *(x.buffer.getvalue().decode("ascii") for x in streams)

    return run


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command_in_ascii(words, ascii):
    code, out, err = ascii(*words, "--help")
    assert code == 0 and out.startswith("Usage: turboquant") and err == ""
    assert len(COMMANDS) > 15


def test_a_run_in_ascii_is_printed_escaped(ascii, tiny, tmp_path):
    (tmp_path / "wal.txt").write_text("Wal und Möwe, 20 % … 80 %", encoding="utf-8")
    words = f"generate --model {tiny} --max-new-tokens 12 --compare --no-chat --file".split()
    code, out, _ = ascii(*words, tmp_path / "wal.txt")
    assert code == 0 and "\\ufffd" in out  # a random model writes no UTF-8


def test_help_in_a_process_of_its_own():
    done = shell("eval", "--help", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0 and "Usage" in done.stdout and done.stderr == ""


def test_files_are_written_before_anything_is_printed(call, tiny, tmp_path, monkeypatch):
    "Standard output that is full, or gone, costs no result."
    seen = []

    def broken(*_, **__):
        seen.append((tmp_path / "r.json").exists())
        raise OSError("standard output is full")

    monkeypatch.setattr(evals, "show_table", broken)
    code, out, err = call(f"{EVAL} --model {tiny} --out {tmp_path / 'r.json'}")
    assert (code, out, seen) == (1, "", [True]) and "is full" in err
    assert json.loads((tmp_path / "r.json").read_text())["rows"]


def pressed(monkeypatch, module, name, after):
    "Ctrl-C after so many rows of a function of a module."
    inner = getattr(module, name)

    def rows(*args, **kwargs):
        for i, row in enumerate(inner(*args, **kwargs)):
            if i == after:
                raise CTRL_C
            yield row

    monkeypatch.setattr(module, name, rows)


@pytest.mark.parametrize("after", [2, 0])
@pytest.mark.parametrize("out", [True, False])
def test_rows_that_were_measured_stay(out, after, call, tiny, tmp_path, monkeypatch):
    pressed(monkeypatch, evals.scores, "perplexity", after)
    path = tmp_path / "r.json"
    code, said, err = call(f"{EVAL} --model {tiny} --json", *["--out", path] * out)
    assert code == 130
    if not after:  # nothing was finished, so nothing is left
        assert said == "" and not path.exists() and "stopped" not in err
        return
    found = json.loads(said)
    assert found["stopped"] and len(found["rows"]) == 2
    assert not out or json.loads(path.read_text())["rows"] == found["rows"]
    assert f"2 finished rows are {path if out else 'on standard output'}" in err


@pytest.mark.parametrize("as_json", [True, False])
def test_an_answer_that_was_begun_stays(as_json, call, tiny, monkeypatch):
    put, n = writes.TokenRecorder.put, [0]

    def stops(self, value):
        put(self, value)
        n[0] += 1
        if n[0] == 4:  # the prompt, and three tokens
            raise CTRL_C

    monkeypatch.setattr(writes.TokenRecorder, "put", stops)
    line = f"generate --model {tiny} --prompt Whales --max-new-tokens 9 --compare"
    code, out, err = call(line, *["--json"] * as_json)
    assert code == 130 and "the 3 tokens so far are on standard output" in err
    if as_json:
        found = json.loads(out)
        assert found["stopped"] and found["new_tokens"] == 3 and "compare" not in found
        assert found["cache"]["tokens"] > 0
    else:
        assert out.strip() and "uncompressed" not in out


def test_windows_that_were_read_stay(call, tiny, tmp_path, monkeypatch):
    "Ctrl-C while the third of eight windows is read: the batch ends, transforms are found."
    whole, n = calibrate.fits.calibrate, [0]

    def reads(model, ids, progress, ended):
        def press():
            progress()
            n[0] += 1
            if n[0] == 3:
                signal.raise_signal(signal.SIGINT)

        return whole(model, ids, progress=press, ended=ended)

    from turboquant_nb.calibration import fit

    monkeypatch.setattr(fit, "calibrate", reads)
    path, before = tmp_path / "c.st", signal.getsignal(signal.SIGINT)
    line = f"calibrate --model {tiny} --windows 8 --length 64 --layers --out {path}"
    code, out, err = call(line)
    found = load_calibration(path)
    assert code == 130 and found.header["tokens"] == 4 * 60 and "losses" not in found.header
    assert "Ctrl-C again ends at once" in err and str(path) in out
    assert f"{path} has the transforms of the windows that were read" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_transforms_stay_if_layers_are_broken_off(call, tiny, tmp_path, monkeypatch):
    def stops(*_, **__):
        raise CTRL_C

    from turboquant_nb.calibration import sensitivity

    monkeypatch.setattr(sensitivity, "measure_sensitivity", stops)
    path = tmp_path / "c.st"
    line = f"calibrate --model {tiny} --windows 2 --length 64 --layers --out {path}"
    code, _, err = call(line)
    assert code == 130 and f"{path} has the transforms, without the layers" in err
    assert load_calibration(path).transforms
    code, _, _ = call(f"{line}2 --no-transforms")
    assert code == 130 and not (tmp_path / "c.st2").exists()


def test_a_real_ctrl_c(tiny, forked):
    ask = f"generate --model {tiny} --prompt Whales --max-new-tokens 4000"
    process, out, err = forked(ask)
    first = out.read(1)
    os.kill(process.pid, signal.SIGINT)
    assert process.ends() == 130 and first
    said = err.read()
    assert b"Traceback" not in said and b"tokens so far are on standard output" in said
