"""The book's own promises: each box of the example stands in the chapter that the front page
names, made by a cell; each problem of a part has an answer that is computed and checked."""

import json
import re
from pathlib import Path

NBS = Path(__file__).resolve().parents[2] / "nbs"
HEAD = "## The 8B example"


def cells(name):
    return json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


def boxes(found):
    "What the cells behind each heading of the example show, as text."
    for i, cell in enumerate(found):
        if source(cell).startswith(HEAD):
            behind = found[i + 1 : i + 3]
            outs = [o for c in behind for o in c.get("outputs", [])]
            yield "".join("".join(o.get("data", {}).get("text/markdown", "")) for o in outs)


def test_the_front_page_names_the_chapters_with_a_box():
    page = "\n".join(source(c) for c in cells("book"))
    named = re.findall(r"^\| \[\w+\]\((\w+)\.ipynb#the-8b-example\)", page, re.M)
    found = {p.stem: list(boxes(cells(p.stem))) for p in NBS.rglob("*.ipynb")}
    assert sorted(named) == sorted(name for name, shown in found.items() if shown)
    assert 8 <= len(named) <= 12
    for name in named:
        (box,) = found[name]  # one a chapter, with numbers, short
        assert box.startswith("> **8B.** ") and re.search(r"\d", box), name
        assert len(box.split()) <= 75, (name, len(box.split()))
