"""The questions of CONTRIBUTING.md: each has one file, and every file and name that the page
gives exists."""

import re
from pathlib import Path

import check
import pytest

import turboquant_nb
from tests.helpers import ROOT
from turboquant_nb import _modidx

PACKAGE = Path(turboquant_nb.__file__).parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
QUESTIONS = re.findall(r"^- \*(.+?\?)\* (.+)$", TEXT, re.M)


@pytest.mark.parametrize("question, answer", QUESTIONS, ids=[q for q, _ in QUESTIONS])
def test_a_question_has_one_file_with_the_names_that_it_gives(question, answer):
    ((name, names),) = re.findall(r"`([\w/]+\.py)`(?: \(((?:`[\w.]+`(?:, )?)+))?", answer)
    module = f"turboquant_nb.{name.removesuffix('.py').replace('/', '.')}"
    known = {x.removeprefix(f"{module}.") for x in _modidx.d["syms"][module]}
    wrong = set(re.findall(r"`([\w.]+)`", names)) - known
    assert not wrong, f"{name} has no {', '.join(sorted(wrong))}"


def test_there_are_fifteen_questions():
    assert len(QUESTIONS) == 15 and any("padding" in q for q, _ in QUESTIONS)


def test_wings_name_their_modules():
    "Every module of the package stands in the row of its wing, in the order of imports."
    listed = []
    for wing, modules in re.findall(r"^\| (?:`(\w+)/`|ground) \| (.+?) \|", TEXT, re.M):
        listed += [f"{wing}/{x}".strip("/") for x in re.findall(r"`(\w+)`", modules)]
    assert listed == [
        f"{wing}/{x}".strip("/") for wing, names in check.WINGS.items() for x in names.split()
    ]
    there = {p.relative_to(PACKAGE).with_suffix("").as_posix() for p in PACKAGE.rglob("*.py")}
    there = {x for x in there if not x.rpartition("/")[2].startswith("_")}
    assert set(listed) == there
