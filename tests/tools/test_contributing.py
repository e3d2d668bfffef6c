"""The questions of CONTRIBUTING.md: each has one file, and every file and name that the page
gives exists."""

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
def test_a_question_has_one_file_with_the_names_that_it_gives(question, answer):
    ((name, names),) = re.findall(r"`([\w/]+\.py)`(?: \(((?:`[\w.]+`(?:, )?)+))?", answer)
    wrong = set(re.findall(r"`([\w.]+)`", names)) - defined(PACKAGE / name)
    assert not wrong, f"{name} has no {', '.join(sorted(wrong))}"


def test_there_are_fifteen_questions():
    assert len(QUESTIONS) == 15 and any("padding" in q for q, _ in QUESTIONS)


def test_wings_name_their_modules():
    "Every module of the package stands in the row of its folder, and no other does."
    listed = set()
    for wing, modules in re.findall(r"^\| \dx (.+?) \| (.+?) \|", TEXT, re.M):
        folders = re.findall(r"`(\w+)/`", wing) or [""]
        for folder, names in zip(folders, modules.split(";")):
            listed |= {f"{folder}/{x}".strip("/") for x in re.findall(r"`(\w+)`", names)}
    there = {p.relative_to(PACKAGE).with_suffix("").as_posix() for p in PACKAGE.rglob("*.py")}
    there = {x for x in there if not x.rpartition("/")[2].startswith("_")}
    assert listed == {x for x in there if not x.startswith("cli/")}
