"""What a notebook shows must be what its cells print: of a file of results exactly, of what is
computed by its words and sizes."""

import copy
import json
import re
import sys

import pytest

from tests.helpers import ROOT

pytest.importorskip("nbdev")
import check
import test_notebooks as tool

tool.compared.__test__ = False
FOLDERS = re.compile(r"(?<![\w.])/(?:tmp|home|root|opt|srv|Users|var)/[\w.-]+/")


def cell(source, *outputs, kind="code", id="a"):
    return {"cell_type": kind, "id": id, "source": source, "outputs": list(outputs)}


def says(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def test_what_counts_as_text():
    picture = {
        "output_type": "display_data",
        "data": {"image/png": "abc", "text/plain": "<Figure>"},
    }
    value = {
        "output_type": "execute_result",
        "data": {"text/plain": ["3", "4"], "text/markdown": "**34**"},
    }
    assert (
        tool.printed(cell("", says("a\n"), says("late", "stderr"), picture, value))
        == "a\na picture\n**34**"
    )


@pytest.mark.parametrize(
    "stem,source,kind,shown",
    [
        ("speed", "print(3)", "code", True),
        ("speed", "print(3)", "markdown", False),
        ("04_codebook", "print(3)", "code", False),
        ("24_sensitivity", "rows = rows_of('x.json')", "code", True),
        ("24_sensitivity", "x = results.load(p)", "code", True),
        ("results", "results.load(p)", "code", False),
    ],
)
def test_which_cells(stem, source, kind, shown):
    assert tool.shows_results(stem, cell(source, kind=kind)) is shown


def test_a_changed_number_is_found(tmp_path):
    path = tmp_path / "speed.ipynb"
    held = [cell("x", says("one 1.0\ntwo 2.0\n")), cell("y", says("same\n"), id="b")]
    path.write_text(json.dumps({"cells": held}))
    assert list(tool.differences(path, copy.deepcopy(held))) == []
    now = copy.deepcopy(held)
    now[0]["outputs"][0]["text"] = "one 1.0\ntwo 2.1\n"
    (line,) = tool.differences(path, now)
    assert "two 2.0" in line and "two 2.1" in line and "cell a" in line
    now[0]["outputs"] = []
    assert len(list(tool.differences(path, now))) == 1


STORE = "KVStore(2 x 3 heads x 700 tokens, 4.49 bits per value): 301,840 bytes"
REFUSED = "raised ValueError: backend must be 'auto', 'cpu', 'torch'; got 'cuda'"


@pytest.mark.parametrize(
    "held, now, same",
    [
        (REFUSED, REFUSED.replace("'cpu'", "'many', 'cpu'"), False),  # a list that has grown
        ("cpu     serves", "many    cannot\ncpu     serves", False),
        ("done", "", False),
        ("z = +0.72, off by 3e-06", "z = -0.05, off by 0", True),
        ("[ 0.1  -0.25 12.  ]", "[-0.13  0.5 9.]", True),  # NumPy's columns
        ("[1, 0.5] of 1,086,600.", "[0.98, 0.5] of 999.5.", True),
        ("equal 3 of 4: [True, False]", "equal 3 of 4: [True, True]", False),
        ("map-7aec131b0b817c56", "map-00ee31b0b817c561", True),
        ("the folder /tmp/tmpe3ptk_8o/a", "the folder /tmp/tmpger_ocy4/a", True),
        ("effaced at 0.5", "defaced at 0.5", False),  # a word, though of hexadecimal letters
        (STORE, STORE.replace("4.49", "3.13"), False),
        (STORE, STORE.replace("301,840", "420,000"), False),
        (STORE, STORE.replace("301,840", "301,844"), True),  # what is entropy coded
        ("45,588 bytes; 141.0 tokens/s", "45,588 bytes; 17.2 tokens/s", True),
    ],
)  # fmt: skip
def test_words_and_sizes_must_be_those_of_the_run(held, now, same, tmp_path, monkeypatch):
    path = tmp_path / "04_codebook.ipynb"
    path.write_text(json.dumps({"cells": [cell("print(x)", says(held))]}))
    monkeypatch.setattr(tool, "elsewhere", lambda: "")
    found = list(tool.differences(path, [cell("print(x)", says(now))]))
    assert (found == []) is same
    path.write_text(json.dumps({"cells": [cell("#| varies\nprint(x)", says(held))]}))
    assert list(tool.differences(path, [cell("print(x)", says(now))])) == []
    path.write_text(json.dumps({"cells": [cell("print(x)", says(held))]}))
    monkeypatch.setattr(tool, "elsewhere", lambda: "torch is 2.9.0, not 2.13.0")
    assert list(tool.differences(path, [cell("print(x)", says(now))])) == []


def test_a_run_finds_a_stale_output(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "elsewhere", lambda: "")
    monkeypatch.setattr(tool.interpreter, "quicken", lambda: None)
    code = "print(sorted({'a': 1, 'b': 2}))"
    cases = (code, "['a', 'b']\n", True), (code, "['a']\n", False), ("a = 1", "1\n", False)
    for code, text, passed in cases:
        path = tmp_path / "04_codebook.ipynb"
        found = {"cells": [cell(code, says(text))], "metadata": {}, "nbformat": 4}
        found["cells"][0] |= {"execution_count": None, "metadata": {}}
        path.write_text(json.dumps(found | {"nbformat_minor": 5}))
        assert tool.compared(path)[0] is passed


def test_where_words_are_not_compared(tmp_path, monkeypatch):
    reason, pins = tool.elsewhere.__wrapped__, tmp_path / "constraints.txt"
    python = "Python {}.{}, ".format(*sys.version_info) + tool.platform.system()
    text = f"# ({python}, CPU)\npytest=={pytest.__version__}\nno-such-package==1\n"
    pins.write_text(text)
    monkeypatch.setattr(tool, "CONSTRAINTS", pins)
    monkeypatch.setattr(tool.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tool.shutil, "which", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reason() == ""
    pins.write_text(text.replace(pytest.__version__, "0.1"))
    assert reason() == f"pytest is {pytest.__version__}, not 0.1"
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    assert reason() == "there is no compiler of C++"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert reason() == "kernels do not run in Triton's interpreter"
    pins.write_text("# (Python 2.7, Linux, CPU)\n")
    assert reason() == f"this is {python} on x86_64"


def test_no_output_names_a_folder_of_the_machine_that_ran_it():
    told = {
        p.name: [
            t
            for c in json.loads(p.read_text())["cells"]
            if c["cell_type"] == "code"
            for t in FOLDERS.findall(tool.printed(c))
        ]
        for p in sorted((ROOT / "nbs").rglob("*.ipynb"))
    }
    assert len(told) > 60 and {name: found for name, found in told.items() if found} == {}


def test_a_notebook_in_a_folder_is_not_skipped_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "settings", lambda: {"nbs_path": "nbs"})
    (tmp_path / "settings.ini").write_text("[DEFAULT]\nnbs_path = nbs\n")
    there = ["10_a.ipynb", "reference/87a_b.ipynb", "guide.ipynb"]
    for name in (*there, ".ipynb_checkpoints/10_a-checkpoint.ipynb"):
        (tmp_path / "nbs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nbs" / name).write_text("{}")
    assert [check.in_nbs(p) for p in check.notebooks()] == there
    for name, why in (
        ("reference/guide.ipynb", "one name: guide.ipynb, reference/guide.ipynb"),
        ("_new/11_c.ipynb", "nbdev skips nbs/_new/11_c.ipynb: _new must not"),
    ):
        (new := tmp_path / "nbs" / name).parent.mkdir(exist_ok=True)
        new.write_text("{}")
        with pytest.raises(check.Failed, match=why):
            check.notebooks()
        new.unlink()
