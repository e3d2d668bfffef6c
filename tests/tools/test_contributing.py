"""The paths of CONTRIBUTING.md: a question leads through three files at most, and every file
and name that it gives exists."""

import ast
import re
from pathlib import Path

import pytest

import turboquant_nb

ROOT, PACKAGE = Path(__file__).parents[2], Path(turboquant_nb.__file__).parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
QUESTIONS = re.findall(r"^- \*(.+?\?)\* (.+)$", TEXT, re.M)


def defined(path):
    """Names of a module, those of its classes as Class.name; fastcore's `@patch` counts for the
    class of `self`."""
    out = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            out |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            out.add(node.name)
        if isinstance(node, ast.ClassDef):
            out |= {
                f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)
            }
            out |= {
                f"{node.name}.{x.target.id}" for x in node.body if isinstance(x, ast.AnnAssign)
            }
        if (
            isinstance(node, ast.FunctionDef)
            and node.args.args
            and isinstance(node.args.args[0].annotation, ast.Name)
        ):
            out.add(f"{node.args.args[0].annotation.id}.{node.name}")
    return out


@pytest.mark.parametrize("question, answer", QUESTIONS, ids=[q for q, _ in QUESTIONS])
def test_a_question_has_a_short_path_of_names_that_exist(question, answer):
    found = re.findall(r"`([\w/]+\.py)`(?: \(((?:`[\w.]+`(?:, )?)+))?", answer)
    own = [(PACKAGE / name, names) for name, names in found if not name.startswith("tests/")]
    assert 1 <= len({path for path, _ in own}) <= 3
    for path, names in own:
        wrong = set(re.findall(r"`([\w.]+)`", names)) - defined(path)
        assert not wrong, f"{path.name} has no {', '.join(sorted(wrong))}"


def test_there_are_questions():
    assert len(QUESTIONS) > 12 and any("padding" in q for q, _ in QUESTIONS)
