"""How many small changes of the code the tests notice: run.py mutants --out FILE
[--sample FILE …].

scripts/tools/mutants.py makes the changes, one at a time, and says what became of each; its
lines of JSON are read here from the files of --sample, or drawn now. Parts of the package
may be drawn in runs of their own, each in proportion to the changes that it could have: the
tests of kernels take minutes, those of theory seconds. Killed is a change that its own
module's files of tests notice; those that only files of other modules notice, in a run with
--retry and --tests, are counted apart. Gate: each statement that was changed stands in the
committed code, as it was before the change."""

import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import transformers  # noqa: F401  the record names the versions that tests ran with
import triton  # noqa: F401
from plan import Plan
from tools import mutants

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"kernels/decode_mma": "Gluon, in which it is written, has no interpreter"}


def options(p):
    p.add_argument("--sample", nargs="+", metavar="FILE", help="what mutants.py --out wrote")
    p.add_argument("--seed", type=int, default=0, help="with which changes are or were drawn")
    p.add_argument("--most", type=int, default=60, help="changes, where they are drawn now")
    p.add_argument("--seconds", type=int, default=3600, help="begin no further change after")
    p.add_argument("--workers", type=int, default=1, help="changes tried at the same time")
    p.add_argument("--module", nargs="+", help="of these modules; default: all with tests here")
    p.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="MODULE=WHY",
        help="from which nothing was drawn, though it could have been, and why",
    )


def drawn(a, modules) -> list:
    "Lines of a run of mutants.py, in a process that has not imported the package."
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines"
        how = {x: str(getattr(a, x)) for x in ("seed", "most", "seconds", "workers")}
        words = [f"--{name}={x}" for name, x in how.items()]
        words += [f"--module={x}" for x in a.module or modules]
        script = str(ROOT / "scripts" / "tools" / "mutants.py")
        subprocess.run([sys.executable, script, *words, f"--out={out}"], check=True)
        return lines([out])


def lines(paths) -> list:
    """What became of each change, from files of JSON lines; a survivor that was listed since as
    one that nothing can see is one of those, and one that died when it was tried again, with
    other files of tests, died elsewhere."""
    text = "".join(Path(path).read_text(encoding="utf-8") for path in paths)
    listed, found = mutants.equivalent(), {}
    for x in map(json.loads, text.splitlines()):
        place = x["module"], x["operator"], x["occurrence"], x["was"], x["now"]
        first = found.setdefault(place, x)
        if first is not x and first["outcome"] == "survived" and x["outcome"] != "survived":
            first["outcome"] = "elsewhere"
        if x["outcome"] == "survived" and (x["module"], x["was"], x["now"]) in listed:
            x["outcome"] = "equivalent"
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
    changes = Counter()
    for name in sources:
        if name not in LEFT_OUT:
            changes[package(name)] += sum(1 for _ in mutants.mutants(name, sources[name]))
    for name in sorted({package(x["module"]) for x in found}):
        mine = [x for x in found if package(x["module"]) == name]
        became = Counter(x["outcome"] for x in mine)
        survivors = [
            {k: x[k] for k in ("module", "line", "was", "now")}
            for x in mine
            if x["outcome"] == "survived"
        ]
        yield dict(
            package=name,
            changes=changes[name],
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
    package = ROOT / "turboquant_nb"
    sources = {
        x: (package / f"{x}.py").read_text(encoding="utf-8") for x in mutants.modules(package)
    }
    found = lines(a.sample) if a.sample else drawn(a, [x for x in sources if x not in LEFT_OUT])
    left_out = LEFT_OUT | dict(x.split("=", 1) for x in a.without)
    about = gate(found, sources)
    became = Counter(x["outcome"] for x in found)
    killed = became["killed"] + became["late"]
    counted = killed + became["elsewhere"] + became["survived"]
    more = {"left_out": left_out, "killed": killed, "elsewhere": became["elsewhere"]}
    more["counted"] = counted
    if counted:
        more["interval"] = list(mutants.interval(killed, counted))
    data = {"id": "small changes of the package's modules", "n": len(found)}
    return Plan("mutants", about, rows(found, sources), data, seeds=[a.seed], more=more)
