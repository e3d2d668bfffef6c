"""How many small changes of the code the tests notice: run.py mutants --sample FILE …
--out FILE.

scripts/tools/mutants.py makes the changes, one at a time, and says what became of each; its
lines of JSON are read here, of a change that was tried again the last. Parts of the package may
be drawn in runs of their own, each in proportion to the changes that it could have: the tests
of kernels take minutes, those of theory seconds. Killed is a change that its own module's files
of tests or its notebook notice; those that only files of other modules notice, in a run with
--tests, are counted apart. Gate: each statement that was changed stands in the committed code,
as it was before the change."""

import ast
import json
from collections import Counter
from pathlib import Path

import transformers  # noqa: F401  the record names the versions that tests ran with
import triton  # noqa: F401
from plan import Plan
from tools import mutants

PACKAGE = Path(__file__).resolve().parents[2] / mutants.PACKAGE
COUNTED = "killed", "late", "elsewhere", "survived"


def options(p):
    p.add_argument(
        "--sample", nargs="+", default=[], metavar="FILE", help="what mutants.py --out wrote"
    )
    p.add_argument("--seed", type=int, default=0, help="with which changes were drawn")
    p.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="MODULE=WHY",
        help="from which nothing was drawn, though it could have been, and why",
    )


def lines(paths) -> list:
    """What became of each change, from files of JSON lines; a survivor that was listed since as
    one that nothing can see is one of those."""
    listed, found = mutants.equivalent(), {}
    text = "".join(Path(path).read_text(encoding="utf-8") for path in paths)
    for x in map(json.loads, text.splitlines()):
        if x["outcome"] == "survived" and (x["module"], x["was"], x["now"]) in listed:
            x["outcome"] = "equivalent"
        place = x["module"], x["operator"], x["occurrence"], x["was"], x["now"]
        found[place] = x
    return list(found.values())


def gate(found, sources) -> dict:  # {"cmd", "passed", "not there"}
    "Whether all that was changed is of these sources: {module: text}."
    said = {
        (name, mutants.head(x))
        for name in {x["module"] for x in found} & set(sources)
        for x in ast.walk(ast.parse(sources[name]))
        if isinstance(x, ast.stmt | ast.ExceptHandler)
    }
    gone = [x["module"] for x in found if (x["module"], x["was"]) not in said and x["was"]]
    cmd = "each statement that was changed stands in the committed code"
    return {"cmd": cmd, "passed": bool(found) and not gone, "not there": gone[:20]}


def rows(found, sources):
    "A row for each package that was drawn from."
    package = lambda name: name.rpartition("/")[0] or "ground"
    for name in sorted({package(x["module"]) for x in found}):
        mine = [x for x in found if package(x["module"]) == name]
        became = Counter(x["outcome"] for x in mine)
        modules = [x for x in sources if package(x) == name and x not in mutants.LEFT_OUT]
        survivors = [
            {k: x[k] for k in ("module", "line", "was", "now")}
            for x in mine
            if x["outcome"] == "survived"
        ]
        yield dict(
            package=name,
            changes=sum(1 for x in modules for _ in mutants.mutants(x, sources[x])),
            drawn=len(mine),
            killed=became["killed"] + became["late"],
            elsewhere=became["elsewhere"],
            survived=became["survived"],
            equivalent=became["equivalent"],
            not_importable=became["import"],
            survivors=survivors,
            unit="changes",
        )


def plan(a):
    names = mutants.modules(PACKAGE)
    sources = {x: (PACKAGE / f"{x}.py").read_text(encoding="utf-8") for x in names}
    found = lines(a.sample)
    became = Counter(x["outcome"] for x in found)
    counted = sum(became[x] for x in COUNTED)
    more = {
        "left_out": mutants.LEFT_OUT | dict(x.split("=", 1) for x in a.without),
        "killed": (killed := became["killed"] + became["late"]),
        "elsewhere": became["elsewhere"],
        "counted": counted,
    }
    if counted:
        more["interval"] = list(mutants.interval(killed, counted))
    data = {"id": "small changes of the package's modules", "n": len(found)}
    about = gate(found, sources)
    return Plan("mutants", about, rows(found, sources), data, seeds=[a.seed], more=more)
