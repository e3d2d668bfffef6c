"""Each chapter, and page with a Colab badge, alone, as a reader runs it there: run.py chapters
--out FILE [--chapters 04_codebook …] [--limit-each 60] [--first FOLDER] [--workers N].

An empty folder holds the notebook and settings.ini; the package is a wheel of this tree, alone
in a folder of its own (--installed: the one that is installed here). Kernels are compiled anew
for each chapter: no cache of another run is read. Where there is a GPU, cells marked for one
run too and nothing is interpreted; elsewhere Triton's interpreter runs kernels. --first names a
folder that comes first on the path, with another transformers in it for one. A row says whether
the chapter ran and in how many seconds, Python's start included. Gate: of three notebooks, one
right, one wrong and one that does not end, each is told for what it is."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from plan import Plan

import turboquant_nb

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "scripts" / "tools"
sys.path.insert(0, str(TOOLS))
from notebooks import notebooks
from preview_docs import copy_tree
from processes import ended

sys.path.remove(str(TOOLS))
PROBE = "import torch, transformers; print(torch.__version__, transformers.__version__)"


def options(p):
    p.add_argument("--chapters", nargs="+", help="names of notebooks, without .ipynb")
    p.add_argument("--limit-each", type=float, default=60, help="seconds a chapter may take")
    p.add_argument("--first", default="", help="a folder that comes first on Python's path")
    p.add_argument("--installed", action="store_true", help="the package as installed here")
    p.add_argument("--workers", type=int, default=1, help="chapters at a time")


def package(a, folder):
    "The folder on Python's path that holds the package."
    if a.installed:
        return Path(turboquant_nb.__file__).resolve().parents[1]
    copy_tree(folder / "tree")
    target = folder / "installed"
    pip = "-m pip install -q --no-deps --no-build-isolation --disable-pip-version-check"
    subprocess.run(
        [sys.executable, *pip.split(), "--target", target, folder / "tree"], check=True
    )
    return target


def chosen(a):
    "The notebooks to run. Raises SystemExit for a name that is none."
    badge = "colab-badge.svg"
    found = {p.stem: p for p in notebooks(ROOT) if badge in p.read_text(encoding="utf-8")}
    if unknown := set(a.chapters or ()) - found.keys():
        raise SystemExit(f"no such chapters: {', '.join(sorted(unknown))}")
    return [found[x] for x in a.chapters or found]


def run(path, inside, env, seconds):
    "(whether a notebook ran, seconds, what it said last) in an empty folder."
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        target = Path(tmp) / "nbs" / inside
        target.parent.mkdir(parents=True)
        target.write_bytes(path.read_bytes())
        (Path(tmp) / "settings.ini").write_bytes((ROOT / "settings.ini").read_bytes())
        caches = {x: f"{tmp}/{x}" for x in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        flags = ["--flags", "gpu"] if torch.cuda.is_available() else []
        command = [sys.executable, TOOLS / "test_notebooks.py", "--path", target]
        begin = time.perf_counter()
        words = *command, "--n_workers", 0, *flags
        status, said = ended(words, seconds, cwd=tmp, env=env | caches)
        passed = status == 0 and "Success." in said
        said = f"did not end in {seconds:g} s" if status is None else said
        return passed, time.perf_counter() - begin, "" if passed else why(said)


def why(said):
    "The failing line of the notebook's own cell, and the error, from what nbdev_test printed."
    lines = [x.strip() for x in said.splitlines() if x.strip(" =")]
    last = next((x for x in reversed(lines) if "Error" in x), lines[-1] if lines else "")
    at = [i for i, x in enumerate(lines) if re.match(r'File "<ipython-input-\S+", line', x)]
    code = f"{lines[at[0] + 1][:200]}: " if at and len(lines) > at[0] + 1 else ""
    return code + last[:200]


def gate(env, folder):
    "Three notebooks, and what is said of them."
    told = {}
    for name, source in (
        ("right", "x = 1"),
        ("wrong", "1 / 0"),
        ("endless", "while True: pass"),
    ):
        cells = [{"cell_type": "code", "id": "a", "source": source, "metadata": {}}]
        cells[0] |= {"outputs": [], "execution_count": None}
        path = folder / f"{name}.ipynb"
        text = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        path.write_text(json.dumps(text), encoding="utf-8")
        seconds = 60 if name != "endless" else 2 * told["right"][1]  # both have begun by then
        told[name] = run(path, path.name, env, seconds)
    passed = told["right"][0] and "ZeroDivisionError" in told["wrong"][2]
    passed = passed and "did not end" in told["endless"][2]
    return {"cmd": "a right, a wrong and an endless notebook are told apart", "passed": passed}


def plan(a):
    folder = Path(tempfile.mkdtemp(prefix="turboquant-chapters-"))
    on_path = [
        x for x in (a.first and str(Path(a.first).resolve()), str(package(a, folder))) if x
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(on_path), "MPLBACKEND": "agg"}
    env |= {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "4")}
    env.pop("TRITON_INTERPRET", None)
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    about = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True
    )
    if about.returncode:
        raise SystemExit(f"torch or transformers cannot be imported: {about.stderr[-500:]}")
    versions = dict(zip(("torch", "transformers"), about.stdout.split()))
    paths = chosen(a)

    def rows():
        def one(path):
            inside = path.relative_to(ROOT / "nbs")
            passed, seconds, said = run(path, inside, env, a.limit_each)
            row = {"chapter": path.stem, "passed": passed, "seconds": round(seconds, 1)}
            return row | versions | {"said": said, "workers": a.workers}

        with ThreadPoolExecutor(a.workers) as pool:
            yield from pool.map(one, paths)

    data = {"id": "notebooks of this commit", "n": len(paths)}
    more = {"limit_each": a.limit_each}
    return Plan("chapters", gate(env, folder), rows(), data, more=more)
