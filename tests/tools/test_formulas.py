"The page of formulas shows each one as its chapter does, and names what computes it."

import re
from pathlib import Path

import pytest

from tests.helpers import cells, source
from turboquant_nb import _modidx

ROW = re.compile(
    r"\| .+?<br>\$(.+)\$ \| \[\((\d+(?:\.\d+)?)\)\]\((\S+?)\)"
    r"(?:<br>\[<code>(\w+)</code>\]\(\S+\))? \|"
)


def prose(page):
    return "\n\n".join(map(source, cells(Path(page).stem, "markdown")))


def plain(formula):
    "Without spaces, and with one way to write a bar: in a table a bare one ends the cell."
    for long, short in {
        r"\lVert": r"\|",
        r"\rVert": r"\|",
        r"\Vert": r"\|",
        r"\lvert": "|",
        r"\rvert": "|",
        r"\mid": r"\,|\,",
    }.items():
        formula = formula.replace(long, short)
    return "".join(formula.split())


ROWS = [m.groups() for m in ROW.finditer(prose("formulas.ipynb"))]


def test_the_page_is_read_whole():
    lines = [x for x in prose("formulas.ipynb").splitlines() if "<br>$" in x]
    assert (
        len(ROWS)
        == len(lines)
        == int(re.search(r"The (\d+) formulas", prose("formulas.ipynb"))[1])
    )
    assert plain(r"\lVert a\rVert \mid b") == plain(r"\|a\|\,|\,b") != plain("|a| b")


@pytest.mark.parametrize("formula, number, page, name", ROWS)
def test_a_formula_is_its_chapter_s(formula, number, page, name):
    shown = re.findall(r"\$\$(.*?)\$\$", prose(page), re.S)
    (there,) = [x for x in shown if rf"\tag{{{number}}}" in x]
    assert plain(formula) in plain(there)
    defined = {x.rpartition(".")[2] for names in _modidx.d["syms"].values() for x in names}
    assert name is None or name in defined
