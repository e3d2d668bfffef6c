"A skip is an error in CI, unless a GPU is missing: conftest.py sees to it."

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_a_skip_in_ci_is_an_error(tmp_path):
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
    argv = "-m pytest -q -p no:cacheprovider --continue-on-collection-errors".split()
    done = subprocess.run(
        [sys.executable, *argv, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"CI": "true"},
        capture_output=True,
        text=True,
    )
    last = done.stdout.splitlines()[-1]
    for words in ("1 failed", "1 passed", "1 skipped", "1 xfailed", "2 errors"):
        assert words in last, done.stdout
    assert done.returncode and "no_such_package" in done.stdout
