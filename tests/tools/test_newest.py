"""`results/newest.json` knows every file of results, and no page shows a run that a newer one
replaced, unless it says that it wants an older one."""

import ast
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.helpers import ROOT, source
from tests.helpers import cells as cells_of
from turboquant_nb import results

RESULTS = ROOT / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="results/ is not beside the tests")
KNOWN = json.loads((RESULTS / "newest.json").read_text("utf-8")) if RESULTS.exists() else {}
RUNS, ALONE = KNOWN.get("runs", {}), KNOWN.get("alone", [])
REPLACED = sorted({x for first, *rest in RUNS.values() for x in rest})
NOTEBOOKS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "nbs").rglob("*.ipynb"))


EXAMPLES = "5e71ab12 03ab0011".split()  # 03 shows what is found, and defines `newest`


def text_of(node):
    "A string or a path, `…` for what is computed in it; None if the node is neither."
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(x.value if isinstance(x, ast.Constant) else "…" for x in parts)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{text_of(left) or '…'}/{text_of(right) or '…'}"
        case ast.Call(func=ast.Attribute(value=folder, attr="glob"), args=[pattern]):
            return f"{text_of(folder) or '…'}/{text_of(pattern)}"
        case ast.Call(args=[first, *_]):
            return text_of(first)


def named(
    source: str,  # of a cell
) -> list:  # replaced runs that it loads
    if not re.search(r"(load|locate|glob)\(", source):
        return []
    lines = [x for x in source.splitlines() if not x.lstrip().startswith(("!", "%"))]
    nodes = list(ast.walk(ast.parse("\n".join(lines))))
    below = lambda text: text.rpartition("results/")[2].removesuffix(".json")
    words = {below(text_of(x) or "") for x in nodes if not isinstance(x, ast.Call)}
    paths = {
        below(text_of(x))
        for x in nodes
        if isinstance(x, ast.Call) and text_of(x)
        if ast.unparse(x.func).endswith(("load", "locate", "glob"))
    }
    for _ in range(2):  # what is computed may be another string of the cell
        paths |= {
            p.replace("…", x, 1) for p in paths for x in words if x.strip("…") and "*" not in x
        }
    known = [x.replace("…", "*") for x in paths if re.fullmatch(r"[^…*/]+/(?!…$)[^/]+", x)]
    return [run for run in REPLACED if any(fnmatch(run, x) for x in known)]


def cells(notebook):
    for cell in cells_of(Path(notebook).stem, "code"):
        if cell["id"] not in EXAMPLES:
            yield cell["id"], source(cell)


def asked(source):
    "What a cell asks `newest` for, where that is one string."
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("newest"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value


def test_every_file_of_results_is_a_run_of_something_or_alone():
    files = {
        p.relative_to(RESULTS).with_suffix("").as_posix() for p in RESULTS.glob("*/*.json")
    }
    runs = {x for found in RUNS.values() for x in found}
    assert files == runs | set(ALONE), "say in results/newest.json what a new run replaces"
    assert len(ALONE) == len(set(ALONE)) and not runs & set(ALONE)


@pytest.mark.parametrize("what", RUNS)
def test_the_newest_run_comes_first(what):
    times = [json.loads((RESULTS / f"{x}.json").read_text("utf-8"))["utc"] for x in RUNS[what]]
    assert times == sorted(times, reverse=True)
    assert results.newest(what)["utc"] == times[0]
    assert results.newest(what, older=len(times) - 1)["utc"] == times[-1]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_no_page_shows_a_run_that_a_newer_one_replaced(notebook):
    shown = {(name, run) for name, source in cells(notebook) for run in named(source)}
    assert not shown, "ask results.newest for what the page shows, with older= for an older run"


@pytest.mark.parametrize(
    "source, found",
    [
        ('results.load("../results/generate/wall-h200.json")', ["generate/wall-h200"]),
        ('load("generate/wall-h200")', ["generate/wall-h200"]),
        ('[load(f"../results/{x}.json") for x in ("generate/wall-h200", "eval/cpu-few")]', 1),
        ('[load(f"../results/generate/{n}.json") for n in ("cpu", "wall-h200")]', 1),
        ('[load(f"../results/generate/{n}-h200.json") for n in ("wall", "kept")]', 1),
        ('[p for p in locate("../../results/generate").glob("*.json")]', 3),
        ('load(locate("../results/generate") / "wall-h200.json")', ["generate/wall-h200"]),
        ('results.newest("whole calls of generate(), H200", older=1)', []),
        ('results.load("../results/generate/kept-h200.json")', []),
        ('results.load("../results/eval/h200-peers.json"); "wall-h200"', []),
        ('[load(f"../results/calibrated/{n}.json") for n in ("wall-h200", "h200")]', []),
    ],
)
def test_a_page_that_names_a_replaced_run_is_seen(source, found):
    seen = named(source)
    if isinstance(found, list):
        assert seen == found
    else:
        assert len(seen) >= found and "generate/wall-h200" in seen


def test_the_wheel_knows_the_newest_run_too(tmp_path, monkeypatch):
    "Beside an installed package there is no folder of results: its own copy is read."
    what, (run, *_) = next(iter(RUNS.items()))
    for name in ("newest", run):
        target = tmp_path / "package" / "data" / "results" / f"{name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((RESULTS / f"{name}.json").read_bytes())
    monkeypatch.setattr(results, "_HERE", str(tmp_path / "package"))
    monkeypatch.setattr(results, "_PACKAGED", tmp_path / "package" / "data" / "results")
    assert results.newest(what) == results.load(RESULTS / f"{run}.json")
    with pytest.raises(FileNotFoundError):
        results.newest(what, older=1)


def test_words_of_older_files_are_those_of_pages():
    shown = repr(results.Table(("cache", "protocol"), [("water3, strays 0.01", "stress")]))
    assert shown.splitlines()[1].split("  ") == ["water3, outliers 0.01", "all-quantised"]
    assert results.worded("distress, remapped") == "distress, remapped"


def test_what_pages_ask_for_is_known():
    wanted = {
        x
        for n in NOTEBOOKS
        for _, source in cells(n)
        if "newest(" in source
        for x in asked(source)
    }
    assert wanted <= set(RUNS) | {"speed"}  # the chapter of results shows what is refused
