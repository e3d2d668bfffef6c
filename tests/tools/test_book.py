"""The book's own promises: each box of the example stands in the chapter that the front page
names, made by a cell; each problem of a part has an answer that is computed and checked."""

import re

from tests.helpers import ROOT, cells, source

HEAD = "## The 8B example"


def boxes(found):
    "What the cells behind each heading of the example show, as text."
    for i, cell in enumerate(found):
        if source(cell).startswith(HEAD):
            behind = found[i + 1 : i + 3]
            outs = [o for c in behind for o in c.get("outputs", [])]
            yield "".join("".join(o.get("data", {}).get("text/markdown", "")) for o in outs)


def test_the_front_page_names_the_chapters_with_a_box():
    page = "\n".join(source(c) for c in cells("book"))
    named = re.findall(r"^\| \[\w+\]\((?:\w+/)?(\w+)\.ipynb#the-8b-example\)", page, re.M)
    found = {p.stem: list(boxes(cells(p.stem))) for p in (ROOT / "nbs").rglob("*.ipynb")}
    assert sorted(named) == sorted(name for name, shown in found.items() if shown)
    assert 8 <= len(named) <= 12
    for name in named:
        (box,) = found[name]  # one a chapter, with numbers, short
        assert box.startswith("> **8B.** ") and re.search(r"\d", box), name
        assert len(box.split()) <= 75, (name, len(box.split()))


def parts(found):
    "Heading of each part of the problem page -> its problems: (number, cell of the answer)."
    sets, part = {}, None
    for i, cell in enumerate(found):
        text = source(cell)
        if m := re.match(r"## (\d) · ", text):
            part = m[1]
        elif m := re.match(r"\*\*(\d\.\d)\.\*\* ", text):
            sets.setdefault(part, []).append((m[1], found[i + 1] if i + 1 < len(found) else {}))
    return sets


def unchecked(sets):
    "Problems without an answer that is folded, hidden and held to something."
    for part, problems in sets.items():
        for i, (number, answer) in enumerate(problems, 1):
            text = source(answer) if answer.get("cell_type") == "code" else ""
            head = '#| code-fold: true\n#| code-summary: "Answer ' + number
            held = re.search(r"^ *(assert|bounded\(|same\(|within_z\()", text, re.M)
            if not (
                number == f"{part}.{i}"
                and text.startswith(head)
                and "#| output: false" in text
                and held
            ):
                yield number


def test_each_part_has_problems_and_each_problem_an_answer_that_is_checked():
    sets = parts(cells("problems"))
    assert [*sets] == ["1", "2", "3", "4", "5", "6"]
    assert all(4 <= len(problems) <= 6 for problems in sets.values())
    assert not list(unchecked(sets))


def unprinted(found):
    "Microseconds of the ladder's table that the cell which climbs it has not printed."
    table = next(source(c) for c in found if source(c).startswith("| rung |"))
    (climb,) = (c for c in found if "def climb(" in source(c))
    printed = re.findall(r"([\d.]+) µs", "".join(climb["outputs"][0]["text"]))
    shown = [row.split("|")[3].strip().replace(",", "") for row in table.split("\n")[2:13]]
    return [
        x
        for x, y in zip(shown, printed, strict=True)
        if float(x) not in (float(y), round(float(y)))
    ]


def test_the_ladder_shows_what_was_printed():
    found = cells("19_decode")
    assert unprinted(found) == []
    (climb,) = (c for c in found if "def climb(" in source(c))
    climb["outputs"][0]["text"] = ["".join(climb["outputs"][0]["text"]).replace("28.9", "27.9")]
    assert unprinted(found) == ["28.9"]
