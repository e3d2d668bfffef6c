"""The lecturer's sheet lists the exercises that there are: all of the chapters of a lecture,
and none that is not."""

import re
from functools import lru_cache

from tests.helpers import cells, source

LISTED = re.compile(r"^\| \[\w+\]\((?:\w+/)?(\w+)\.ipynb#exercises\)\.(\d+) \|", re.M)


@lru_cache
def texts(name):
    "The markdown cells of a notebook."
    return [*map(source, cells(name, "markdown"))]


@lru_cache
def exercises(name):
    "The numbers of a chapter's exercises."
    at = [i for i, s in enumerate(texts(name)) if s.startswith("## Exercises")]
    return (
        [int(m[1]) for s in texts(name)[at[0] :] if (m := re.match(r"\*\*(\d+)\.\*\*", s))]
        if at
        else []
    )


def lectures(sheet):
    "Of each lecture: its chapters, and what its table lists, as (chapter, number)."
    for i, s in enumerate(sheet):
        if re.match(r"## \d ·", s):
            chapters = re.findall(
                r"\]\((?:[a-z]+/)?(\w+)\.ipynb\)", s.split("*Prerequisites*")[0]
            )
            yield chapters, [(name, int(k)) for name, k in LISTED.findall(sheet[i + 1])]


def unlisted(sheet):
    "What a lecture's table lacks or invents, in words."
    for number, (chapters, listed) in enumerate(lectures(sheet), 1):
        for name in chapters:
            yield from (
                f"lecture {number} lacks {name}, {k}"
                for k in exercises(name)
                if (name, k) not in listed
            )
        yield from (
            f"lecture {number} names {name}, {k}, which is not there"
            for name, k in listed
            if k not in exercises(name)
        )
        yield from (
            f"lecture {number} names {x} twice" for x in set(listed) if listed.count(x) > 1
        )


def test_sheet_lists_the_exercises_of_its_chapters():
    found = list(lectures(texts("lecturer")))
    assert len(found) == 8 and all(chapters and listed for chapters, listed in found)
    assert not list(unlisted(texts("lecturer")))
