"A skip is an error in CI, unless a GPU is missing: conftest.py sees to it."

import os
import shutil
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
    told, into = os.pipe()
    if not (child := os.fork()):  # which has imported what takes seconds
        os.dup2(into, 1)
        os.chdir(tmp_path)
        os.environ["CI"], sys.stdout = "true", open(1, "w")
        argv = "-q -p no:cacheprovider --continue-on-collection-errors".split()
        code = pytest.main([*argv, str(tmp_path)])
        sys.stdout.flush()
        os._exit(code)
    os.close(into)
    with open(told) as lines:
        said = lines.read()
    for words in ("1 failed", "1 passed", "1 skipped", "1 xfailed", "2 errors"):
        assert words in said.splitlines()[-1], said
    assert os.waitpid(child, 0)[1] and "no_such_package" in said
