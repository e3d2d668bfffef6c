"""The experiment that counts which changes of the code the tests notice: its rows, and a gate
that takes no lines of other code."""

import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import turboquant_nb

pytest.importorskip("run")
pytest.importorskip("triton")
import processes
from eval import mutation


COUNT = itertools.count()


def line(module, outcome, was="x = 1", now="x = 2"):
    what = dict(module=module, line=1, operator="o", occurrence=next(COUNT))
    return what | dict(outcome=outcome, was=was, now=now)


LINES = [
    line("theory/a", "killed"),
    line("theory/a", "late"),
    line("theory/b", "survived", "def f(x): ...", "def f(y): ..."),
    line("theory/b", "equivalent"),
    line("checks", "import"),
    line("checks", "killed"),
]
SOURCES = {
    "theory/a": "x = 1",
    "theory/b": "x = 1\ndef f(x):\n    return x\n",
    "checks": "x = 1",
}


def test_what_is_listed_as_seen_by_nobody_stands_in_the_code():
    package = Path(turboquant_nb.__file__).parent  # CI has the wheel, not the tree
    found = mutation.mutants.equivalent()
    names = {module for module, _, _ in found}
    sources = {x: (package / f"{x}.py").read_text(encoding="utf-8") for x in names}
    listed = [dict(module=module, was=was) for module, was, _ in found]
    assert mutation.gate(listed, sources)["not there"] == []


def test_changes_of_other_code_are_refused():
    assert mutation.gate(LINES, SOURCES)["passed"]
    assert not mutation.gate([], SOURCES)["passed"]
    for other in (
        line("theory/a", "killed", "x = 3"),  # of another commit
        line("theory/c", "killed"),  # a module that is gone
        line("checks", "killed", "def f(x): ..."),  # another module's
    ):
        found = mutation.gate([*LINES, other], SOURCES)
        assert not found["passed"] and found["not there"] == [other["module"]]


def test_a_row_for_each_package(monkeypatch, tmp_path):
    monkeypatch.setattr(mutation.mutants, "mutants", lambda name, source: iter(source))
    ground, theory = mutation.rows(LINES, SOURCES | {"kernels/decode_mma": "x = 1"})
    assert (ground["package"], ground["changes"], ground["drawn"]) == ("ground", 5, 2)
    assert (ground["killed"], ground["not_importable"], ground["survivors"]) == (1, 1, [])
    assert (theory["package"], theory["drawn"], theory["changes"]) == ("theory", 4, 34)
    assert (theory["killed"], theory["survived"], theory["equivalent"]) == (2, 1, 1)
    assert theory["survivors"] == [
        dict(module="theory/b", line=1, was="def f(x): ...", now="def f(y): ...")
    ]
    for name, x in (("a", LINES[:4]), ("b", LINES[4:])):
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in x))
    paths = [tmp_path / "a", tmp_path / "b"]
    assert mutation.lines(paths) == LINES
    listed = {("theory/b", "def f(x): ...", "def f(y): ..."): "nobody asks"}
    monkeypatch.setattr(mutation.mutants, "equivalent", lambda: listed)
    assert [x["outcome"] for x in mutation.lines(paths)].count("equivalent") == 2
    monkeypatch.setattr(mutation.mutants, "equivalent", dict)
    paths.append(tmp_path / "again")
    paths[-1].write_text(json.dumps(LINES[2] | {"outcome": "elsewhere"}))
    (_, theory) = mutation.rows(mutation.lines(paths), SOURCES)
    assert (theory["killed"], theory["elsewhere"], theory["survived"]) == (2, 1, 0)


def test_the_head_of_a_result(monkeypatch, tmp_path):
    "What was killed of what counts; the gate is asked of the code that is here."
    (tmp_path / "a").write_text("".join(f"{json.dumps(x)}\n" for x in LINES))
    found = mutation.plan(SimpleNamespace(sample=[tmp_path / "a"], seed=5, without=["a=b=c"]))
    assert found.seeds == [5] and found.data["n"] == 6 and not found.gate["passed"]
    assert (found.more["killed"], found.more["counted"]) == (3, 4)
    low, high = found.more["interval"]
    assert 0.2 < low < 0.75 < high < 1 and found.more["left_out"]["a"] == "b=c"
    assert "Gluon" in found.more["left_out"]["kernels/decode_mma"]


SOURCE = """# %% auto 0
__all__ = ["f"]

# %% ../a.ipynb #one
def f():
    return 1

# %% ../a.ipynb #two
def g():
    return 1
"""
NEW = SOURCE.replace("return 1", "return 2", 1)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    "A tree with a module of two cells, a change of the first, and what its commands end with."
    tool = mutation.mutants
    cells = {"one": "#| export\ndef f():\n    return 1", "three": "assert f() == 1"}
    cells = [dict(id=k, cell_type="code", source=x) for k, x in cells.items()]
    (tmp_path / "tests" / "ground").mkdir(parents=True)
    (tmp_path / "tests" / "ground" / "test_a.py").touch()
    (tmp_path / tool.PACKAGE).mkdir()
    (tmp_path / tool.PACKAGE / "a.py").write_text(SOURCE)
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(tool, "mutated", lambda mutant, source: NEW)
    found = tool.Trial(tmp_path)
    found.mutant, found.met = tool.Mutant("a", "o", 0, 6), []
    found.seconds = dict.fromkeys(found.commands(found.mutant), 1.0)

    def ends(*statuses):
        left = iter(statuses)

        def ended(command, root, seconds):
            found.met.append((command, seconds))
            assert (root / tool.PACKAGE / "a.py").read_text() == NEW
            assert (
                "return 2" in json.loads((root / "a.ipynb").read_text())["cells"][0]["source"]
            )
            return next(left), ""

        found.ended = ended
        return found.tried(found.mutant, tmp_path)[0]

    yield found, ends
    assert (tmp_path / tool.PACKAGE / "a.py").read_text() == SOURCE
    assert json.loads((tmp_path / "a.ipynb").read_text()) == {"cells": cells}


@pytest.mark.parametrize(
    "statuses, outcome",
    [
        ((0, 0), "survived"),
        ((1,), "killed"),
        ((0, 1), "killed"),  # by the notebook
        ((None,), "late"),
        ((2, 1), "import"),  # tests are not collected, and the module is not imported
        ((2, 0), "killed"),  # a test calls the function while it is collected
    ],
)
def test_what_becomes_of_a_change(trial, statuses, outcome):
    found, ends = trial
    assert ends(*statuses) == outcome and len(found.met) == len(statuses)
    tests, seconds = found.met[0]
    assert tests[-2:] == ("tests/ground/test_a.py", "tests/tools/test_promises.py")
    assert seconds == 23


def test_what_other_files_of_tests_notice_is_counted_apart(trial):
    found, ends = trial
    found.given = ("tests/other.py",)
    (command,) = found.commands(found.mutant)
    assert command[-1] == "tests/other.py"
    found.seconds[command] = 1.0
    assert ends(1) == "elsewhere" and found.met == [(command, 23)]


def test_a_change_that_nobody_can_see_meets_no_test(trial, monkeypatch):
    found, ends = trial
    found.known = {("a", "return 1", "return 2"): "nobody asks"}
    assert ends() == "equivalent" and not found.met
    broken = SOURCE.replace("return 1", "return not", 1)
    monkeypatch.setattr(mutation.mutants, "mutated", lambda *_: broken)
    assert ends() == "import" and not found.met


def test_tests_that_fail_without_a_change_stop_the_run(trial, tmp_path):
    found, _ = trial
    found.ended = lambda command, root, seconds: (1, "1 failed")
    with pytest.raises(mutation.mutants.Failed, match="without any change:\n1 failed"):
        found.measure(("-m", "pytest"), tmp_path)


def test_a_command_and_what_it_started_end_in_time():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    begin = time.monotonic()
    assert processes.ended([sys.executable, "-c", code], 1)[0] is None
    assert time.monotonic() - begin < 20
    assert processes.ended([sys.executable, "-c", "print(1); exit(3)"], 60) == (3, "1\n")
