"""The experiment that counts which changes of the code the tests notice: its rows, and a gate
that takes no lines of other code."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import turboquant_nb

pytest.importorskip("run")
pytest.importorskip("triton")
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
    again = [LINES[2] | {"outcome": "killed"}, LINES[0] | {"outcome": "survived"}]
    paths.append(tmp_path / "again")
    paths[-1].write_text("".join(f"{json.dumps(x)}\n" for x in again))
    found = [x["outcome"] for x in mutation.lines(paths)]
    assert found == ["killed", "late", "elsewhere", "equivalent", "import", "killed"]
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


def test_a_change_that_is_no_python_counts_as_not_importable(tmp_path, monkeypatch, capsys):
    "`not` before a walrus: the run went no further."
    tool, source = mutation.mutants, "if x := 1:\n    pass\n"
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_text(source)
    tree, mutant = tool.Tree(tmp_path, "p"), tool.Mutant("a", "AddNot", 0, 1)
    tree.tests = lambda *_: {}
    monkeypatch.setattr(tool, "mutated", lambda *_: source.replace("if", "if not"))
    run, _ = tree.attempt(mutant, {})
    assert run() == 3 and "not Python" in json.loads(capsys.readouterr().out)[1]


def test_what_passes_the_tests_meets_the_cells_of_its_chapter(tmp_path, capsys):
    tool, source = mutation.mutants, "# %% ../a.ipynb #one\ndef f():\n    return 1\n"
    held = {"one": "def f():\n    return 1", "two": "assert f() == 1", "three": "#| gpu\n?"}
    cells = [dict(id=k, cell_type="code", source=x) for k, x in held.items()]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "p").mkdir()
    path, other = tmp_path / "p" / "a.py", source.replace("return 1", "return 2")
    jobs = [(x, lambda x=x: tool.run_chapter(path, x, "p.a") or 0, 60) for x in (source, other)]
    with capsys.disabled():  # what a child says is in its log
        (_, kept, log), (_, code, said) = tool.side_by_side(jobs, 1)
    assert kept == 0, log
    assert code == 4 and "assert f() == 1" in said


def test_a_mutant_that_stops_the_collection_has_no_test_to_run_again(capsys):
    tool, mutant = mutation.mutants, mutation.mutants.Mutant("a", "o", 0, 1)
    log = '["x", "y"]\n1 error in 0.1s\n\n'
    tried = [lambda: print(log, end="") or 1]  # a second run is none
    tree = SimpleNamespace(in_order=False, attempt=lambda *_: (tried.pop(), 9))
    with capsys.disabled():
        assert [x.outcome for x in tool.try_out(tree, [mutant], 9)] == ["killed"]
