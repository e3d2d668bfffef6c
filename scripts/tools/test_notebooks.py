#!/usr/bin/env python3
"""nbdev_test, with the notebooks that take longest first; the options are those of nbdev_test.

nbdev_test starts notebooks by name. A long one near the end then runs alone while the other
processes wait. It also forgets what the cells print. Here a cell must print what the notebook
holds. What is read from a file of results is compared as it is: a page cannot show the table of
a file that has changed since. What is computed differs in its digits from one processor to the
next, so of other cells the words are compared, and the sizes. Cells marked `#| varies`, as
where a model writes text, are not compared."""

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import interpreter
import nbdev.test
from notebooks import directives, emptied, text_of

LONGEST = (
    "24_sensitivity evaluation_harness 28_score 12_codes 25_serving evaluation_models "
    "29_claims 02_ten_minutes 23_graphs 07_qjl kernels_viterbi guide images retrieval"
).split()
PAGES = (
    "speed leaderboard generate proteins 03_roofline index"
).split()  # nothing on them is computed but from results/
READS = (
    "results.load(",
    "results.newest(",
    "rows_of(",
    "#| exec_doc",
)  # what a cell elsewhere says that prints a file of results, or docstrings
EXAMPLES = "results".split()  # its files are made and read in the same cell
# what differs from run to run: layout, names of temporary folders, digests, numbers
VARIES = re.compile(
    r"\s+|tmp[a-z0-9_]{8}\b|-?\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b"
    r"|[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?\.?"
)
SIZE = re.compile(r"(\d[\d,]*(?:\.\d+)?) (?:bytes|bits per value|layers)\b")
# entropy coding has sizes that depend on codes, and these on the processor; tiny caches are
# mostly tables, which notebooks of one process share: which these are depends on the clock
NEAR = 0.2
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
parallel, test_nb = nbdev.test.parallel, nbdev.test.test_nb


def place(path):
    "Where a notebook comes in the order."
    return LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST)


def longest_first(f, files, **kwargs):
    "As fastcore's parallel, in another order; the results come in the order of `files`."
    order = sorted(range(len(files)), key=lambda i: place(files[i]))
    results = dict(zip(order, parallel(compared, [files[i] for i in order], **kwargs)))
    return [results[i] for i in range(len(files))]


def printed(cell):
    """What a cell shows as text: standard output and text of values. Pictures count as
    pictures: their bytes depend on fonts."""
    out = []
    for x in cell.get("outputs") or []:
        data = x.get("data") or {}
        if x["output_type"] == "stream":
            out.append(text_of(x["text"]) if x.get("name", "stdout") == "stdout" else "")
        elif "image/png" in data:
            out.append("a picture\n")
        else:
            out.append(
                text_of(
                    next(
                        (
                            data[k]
                            for k in ("text/markdown", "text/html", "text/plain")
                            if k in data
                        ),
                        "",
                    )
                )
            )
    return "".join(out).strip()


def shows_results(stem, cell):
    "Whether the output of a code cell is that of a file of results."
    source = text_of(cell["source"])
    return (
        cell["cell_type"] == "code"
        and stem not in EXAMPLES
        and (stem in PAGES or any(x in source for x in READS))
    )


@functools.cache
def elsewhere():
    """Why cells may print other words here than where the notebooks were run, or "": on Linux
    without a GPU, with a compiler and the versions of constraints.txt."""
    pins = CONSTRAINTS.read_text(encoding="utf-8")
    python = "Python {}.{}, ".format(*sys.version_info) + platform.system()
    if python not in pins or platform.machine() != "x86_64":
        return f"this is {python} on {platform.machine()}"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels do not run in Triton's interpreter"
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "there is no compiler of C++"
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", pins, re.M):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name).partition("+")[0]
            if found != pinned:
                return f"{name} is {found}, not {pinned}"
    return ""


def words(text):
    "A text without what differs from run to run."
    return VARIES.sub(lambda found: "#" if found[0].strip() else "", text)


def alike(a, b):
    "Whether two texts have the same words, and sizes that are nearly the same."
    sizes = ([float(x.replace(",", "")) for x in SIZE.findall(text)] for text in (a, b))
    return words(a) == words(b) and all(math.isclose(*x, rel_tol=NEAR) for x in zip(*sizes))


def differences(path, cells):
    "Lines on the cells (as just run) that print other than what the notebook holds."
    held = {cell["id"]: cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    for cell in cells:
        old = held.get(cell["id"])
        if not old or old["cell_type"] != "code":
            continue
        exact = shows_results(path.stem, old)
        if not exact and (elsewhere() or "varies" in directives(text_of(old["source"]))[0]):
            continue
        equal = str.__eq__ if exact else alike
        if not equal(printed(old), printed(cell)):
            pairs = zip([*printed(old).splitlines(), ""], [*printed(cell).splitlines(), ""])
            a, b = next(((a, b) for a, b in pairs if not equal(a, b)), ("", ""))
            yield (
                f"{path.name}, cell {cell['id']}: the notebook shows\n    {a[:160]}\n"
                f"and the cell gives\n    {b[:160]}\n"
                f"(run scripts/tools/run_notebooks.py on it)"
            )


@contextlib.contextmanager
def kept(cells):
    "While this lasts, cells that a shell has run are appended."
    run_all = nbdev.test.CaptureShell.run_all

    def keep(self, nb, *args, preproc=lambda cell: False, postproc=lambda cell: None, **kwargs):
        run_all(
            self,
            nb,
            *args,
            preproc=emptied(preproc),
            postproc=lambda cell: (cells.append(cell), postproc(cell)),
            **kwargs,
        )

    nbdev.test.CaptureShell.run_all = keep
    try:
        yield
    finally:
        nbdev.test.CaptureShell.run_all = run_all


def compared(fn, **kwargs):
    "test_nb, which also fails where a cell prints other than what the notebook holds."
    cells = []
    interpreter.quicken()
    with kept(cells):
        passed, seconds = test_nb(fn, **kwargs)
    wrong = list(differences(fn, cells)) if passed else []
    for line in wrong:
        sys.stderr.write(line + "\n")
    return passed and not wrong, seconds


if __name__ == "__main__":
    # by its name: a process that has run a notebook has another __main__, where `compared` is
    # not found
    import test_notebooks

    if test_notebooks.elsewhere():
        print(f"words of cells are not compared: {test_notebooks.elsewhere()}", flush=True)
    nbdev.test.parallel = test_notebooks.longest_first
    nbdev.test.nbdev_test()
