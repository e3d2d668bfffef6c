"A skip is an error in CI, unless a GPU is missing: conftest.py sees to it."

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("reason", ["needs a GPU", "no such package"])
def test_skip(reason):
    pytest.skip(reason)

@pytest.mark.skip(reason="because")
def test_mark(): pass

@pytest.mark.xfail
def test_fails(): raise ValueError

def test_passes(): pass
"""


@pytest.mark.parametrize(
    "ci, want", [("true", {"failed": 1, "skipped": 1, "errors": 2}), ("", {"skipped": 4})]
)
def test_a_skip_in_ci_is_an_error(tmp_path, ci, want):
    """Also one of a whole file. Mutants: a hook that is not called, and one that lets every
    reason pass."""
    root = Path(__file__).parents[2]
    for name in ("tests/conftest.py", "scripts/tools/interpreter.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(root / name, tmp_path / name)
    (tmp_path / "tests" / "test_one.py").write_text(TESTS)
    (tmp_path / "tests" / "test_two.py").write_text(
        'import pytest\npytest.importorskip("no_such_package")\n'
    )
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        str(tmp_path),
    ]
    done = subprocess.run(
        argv, cwd=tmp_path, env=os.environ | {"CI": ci}, capture_output=True, text=True
    )
    last = done.stdout.splitlines()[-1]
    assert {
        w: int(n)
        for n, w in zip(last.split(), last.replace(",", "").split()[1:])
        if w in ("failed", "skipped", "errors")
    } == want, done.stdout
    assert (done.returncode == 0) == (not ci) and ("no_such_package" in done.stdout) == bool(ci)
