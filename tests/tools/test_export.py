"A notebook may export several modules: each is written whole, however often."

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

SETTINGS = """[DEFAULT]
repo = r
lib_name = lib
lib_path = lib
nbs_path = nbs
user = u
version = 0
doc_host = h
doc_baseurl = /
git_url = g
branch = main
author = a
author_email = a@b.c
copyright = c
description = d
keywords = k
language = English
license = l
min_python = 3.11
status = 3
audience = Developers
title = t
"""
CELLS = [
    ("markdown", "# 4 · One\n\n> The first."),
    ("code", "#| default_exp a.one"),
    ("code", "#| export\nimport math"),
    ("code", "#| export\ndef f():\n    return math.pi"),
    ("markdown", "## Two\n\n> The second."),
    ("code", "#| export +a.two\nfrom lib.a.one import f"),
    ("code", "#| exporti +a.two\ndef h():\n    return 1"),
    ("code", "#| exports +a.two\ndef g():\n    return f() + h()"),
]


def notebook(cells):
    found = [
        {"cell_type": kind, "id": f"c{i}", "metadata": {}, "source": source}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for i, (kind, source) in enumerate(cells)
    ]
    return json.dumps({"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def run(tmp_path, *command):
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "settings.ini").write_text(SETTINGS)
    (tmp_path / "nbs").mkdir()
    (tmp_path / "nbs" / "04_one.ipynb").write_text(notebook(CELLS))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("")
    return tmp_path


def test_two_modules_of_one_notebook_are_written_once(tree):
    command = sys.executable, str(ROOT / "scripts" / "tools" / "export.py")
    for _ in range(2):
        assert run(tree, *command).returncode == 0
        one, two = ((tree / "lib" / "a" / f"{x}.py").read_text() for x in ("one", "two"))
        assert one.startswith('"""The first."""') and one.count("def f") == 1
        assert two.startswith('"""The second."""') and two.count("def g") == 1
        assert "__all__ = ['g']" in two and "from .one import f" in two
        assert "# %% ../../nbs/04_one.ipynb #c7" in two and "def g" not in one
    index = (tree / "lib" / "_modidx.py").read_text()
    assert "'lib.a.two.g': ('one.html#g', 'lib/a/two.py')" in index


def test_nbdev_export_itself_stops(tree):
    "It would append the cells of the second module each time."
    tool = Path(sys.executable).with_name("nbdev_export")
    found = run(tree, str(tool))
    assert found.returncode and "a/two.py does not exist" in found.stderr
