#!/usr/bin/env python3
"""Everything that must hold before a commit, in one command (the second one of the README).

    python scripts/check.py           all steps, quick ones first; stops at the first that fails
    python scripts/check.py --list    what the steps are
    python scripts/check.py --only lint --only docs
    python scripts/check.py --only tests --numerics default    under another arithmetic of the
                                      processor; `all`: under each

The notebooks and the tests run under named settings of the arithmetic (CONTRIBUTING.md says
why). Without --numerics they run under `native`; without --only too, the notebooks run under a
setting that is not this processor's own: their outputs were saved under its own.

The steps work on copies of the tree in a temporary folder and change no tracked file. The tests
in tests/ run against the built wheel, not against the source tree. Needs the [dev] extra: pip
install -c constraints.txt ".[dev]"."""

import argparse
import ast
import atexit
import difflib
import functools
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "scripts" / "tools"
sys.path.insert(0, str(TOOLS))
import notebooks as notebook_tools
import preview_docs
from notebooks import text_of

IMPORT_BUDGET = 0.5  # seconds that `import turboquant_nb` may take beyond `import torch`
MOST_WORKERS = 4  # processes that run notebooks or tests at once, where there are as many cores
STEPS = {}
closing_line = ""  # what pytest said last


class Failed(Exception):
    "A step did not hold; the message says what and what to do."


def step(f):
    "Register a step; its docstring is what --list shows."
    STEPS[f.__name__.removeprefix("step_")] = f
    return f


# ---------------------------------------------------------------- helpers


@functools.cache
def settings():
    "settings.ini as a dict."
    return notebook_tools.settings(ROOT)


@functools.cache
def scratch():
    "One temporary folder for the whole run."
    path = Path(tempfile.mkdtemp(prefix="turboquant-check-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def copy_tree(name):
    "A copy of what git would carry (without git: all but build products), as scratch()/name."
    target = scratch() / name
    shutil.rmtree(target, ignore_errors=True)
    preview_docs.copy_tree(target)
    return target


def run(args, cwd=ROOT, env=None, show=False):
    """Run a command; returns (exit status, output). With show=True its lines also appear at
    once, with the seconds since its start. A variable of env that is None is taken away."""
    env = (
        {"PYTHONDONTWRITEBYTECODE": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
    )  # .ci/run lets modules be compiled
    env = {name: value for name, value in env.items() if value is not None}
    lines, start = [], time.perf_counter()
    with subprocess.Popen(
        [str(a) for a in args],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if show:
                print(f"{time.perf_counter() - start:6.1f}  {line}", end="", flush=True)
    return process.returncode, "".join(lines)


def must(args, hint, **kwargs):
    "Run a command that has to succeed; returns its output."
    status, output = run(args, **kwargs)
    if status:
        shown = "" if kwargs.get("show") else "\n" + output[-6000:].rstrip()
        raise Failed(f"{hint}{shown}")
    return output


def tool(name):
    "A console script of this very environment."
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise Failed(f'{name} is not installed here: pip install -c constraints.txt ".[dev]"')
    return found


def notebooks():
    """All of them, in folders too; Failed for one that nbdev would skip in silence (a file or
    folder whose name begins with . or _), and for two of one name."""
    nbs = ROOT / settings()["nbs_path"]
    found, first = notebook_tools.notebooks(ROOT), {}
    for path in found:
        name = path.relative_to(nbs).as_posix()
        hidden = [part for part in name.split("/") if part[0] in "._"]
        if hidden:
            raise Failed(f"nbdev skips {nbs.name}/{name}: {hidden[0]} must not begin so")
        if first.setdefault(path.name, name) != name:
            raise Failed(f"two notebooks have one name: {first[path.name]}, {name}")
    return found


def in_nbs(path):
    "The name of a notebook from nbs/, its folder included."
    return path.relative_to(ROOT / settings()["nbs_path"]).as_posix()


def is_chapter(path):
    """Whether a notebook is a chapter, whose name begins with its number, and not a page such
    as the index or the guide."""
    return path.name[0].isdigit()


def compare(old, new, names):
    "Unified diffs of the files that differ between two folders."
    out = []
    for name in names:
        texts = [
            p.read_text(encoding="utf-8").splitlines() if (p := folder / name).exists() else []
            for folder in (old, new)
        ]
        out += difflib.unified_diff(
            *texts, f"committed/{name}", f"expected/{name}", lineterm="", n=1
        )
    return out


def listing(lines, most=40):
    more = [f"... and {len(lines) - most} more lines"] if len(lines) > most else []
    return "\n".join([*lines[:most], *more])


# ---------------------------------------------------------------- the processor's arithmetic

# A sum in another order has another last bit, and a value that lies at the edge of a code then
# gets the code beside it. The order
# depends on the vector unit, on the libraries that multiply matrices, and on the number of
# threads; each can be chosen before
# torch is imported.
NUMERICS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "threads-1": {"OMP_NUM_THREADS": "1"},
    "threads-2": {"OMP_NUM_THREADS": "2"},
}
PROBE = """
import json, os, torch
b = torch.backends
print(json.dumps({"capability": b.cpu.get_cpu_capability(), "threads": torch.get_num_threads(), "mkl": b.mkl.is_available(), "onednn": b.mkldnn.is_available(), "cuda": torch.cuda.is_available()}))
"""


def arithmetic(name):
    """The environment variables of one setting; those of the other settings are taken away
    (None). One thread, unless the setting or the caller says otherwise."""
    others = {variable: None for variables in NUMERICS.values() for variable in variables}
    return (
        others | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1"} | NUMERICS[name]
    )


@functools.cache
def probe(name="native"):
    "What torch says about itself in a new process under a setting."
    return json.loads(
        must(
            [sys.executable, "-c", PROBE],
            f"torch cannot be imported under the numerics {name}:",
            env=arithmetic(name),
        ).splitlines()[-1]
    )


def why_not(name):
    "Why this processor cannot compute as the setting says; an empty text if it can."
    has = probe()
    x86 = has["capability"] in ("AVX2", "AVX512")
    if name in ("avx2", "onednn-avx2") and not x86:
        return f"torch finds no AVX2 here ({has['capability']})"
    if name == "onednn-avx2" and not has["onednn"]:
        return "this torch has no oneDNN"
    if name == "mkl-compatible" and not has["mkl"]:
        return "this torch has no MKL"
    return ""


def same_as_native(name):
    "Whether a setting chooses what this processor does anyway."
    own = {"AVX2": ("avx2", "onednn-avx2"), "DEFAULT": ("default",)}.get(
        probe()["capability"], ()
    )
    return name != "native" and (name in own or arithmetic(name) == arithmetic("native"))


def foreign():
    """A setting that computes otherwise than this processor does: the next narrower vectors,
    else another library, else other threads."""
    narrower = {"AVX512": "avx2", "DEFAULT": None}.get(probe()["capability"], "default")
    return next(
        name for name in (narrower, "mkl-compatible", "threads-2") if name and not why_not(name)
    )


def workers(name):
    "Processes at once: as many as keep every core busy with one thread each and no more."
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    return max(1, min(MOST_WORKERS, cores // int(arithmetic(name)["OMP_NUM_THREADS"])))


def announce(name):
    "Print a setting and what torch makes of it; Failed if torch did not take it."
    said, chosen = (
        probe(name),
        " ".join(f"{k}={v}" for k, v in NUMERICS[name].items()) or "the processor's own",
    )
    print(
        f"    numerics {name}: {chosen}; torch says {said['capability']}, {said['threads']} "
        f"thread{'s' * (said['threads'] > 1)}; {workers(name)} at once",
        flush=True,
    )
    wanted = {"avx2": "AVX2", "default": "DEFAULT"}.get(name, said["capability"])
    if (
        said["capability"] != wanted
        or str(said["threads"]) != arithmetic(name)["OMP_NUM_THREADS"]
    ):
        raise Failed(f"the numerics {name} did not reach torch")


# ---------------------------------------------------------------- steps

INSTALL = r"""#\| eval: false
# On Colab, run this once: it installs the package that the cells below import\.
!pip install -q "{lib_name}(\[[a-z,]+\])? @ git\+{git_url}"\Z"""


def runs_alone(path, sources):
    """Whether a reader may run a notebook on Colab: its cells import the package. The index is
    README's source, and its badge leads to the guide; the book's front page counts the chapters
    that lie beside it."""
    imports = any("import" in x and "turboquant_nb" in x for x in sources)
    return path.stem not in ("index", "book") and imports


def notebook_problems(path):
    "What a notebook's first cells and outputs lack."
    cfg = settings()
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = [text_of(cell["source"]).strip() for cell in cells]
    head = [line for line in sources[0].splitlines() if line.strip()] if cells else []
    if (
        len(head) < 2
        or not head[0].startswith("# ")
        or not head[1].startswith("> ")
        or any(not line.startswith("- ") for line in head[2:])
    ):
        yield (
            "the first cell must be `# Title` and one `> line`, nothing else: nbdev turns it "
            "into front matter and the rest would vanish from the site"
        )
    if is_chapter(path) or runs_alone(path, sources):
        address = f"https://colab.research.google.com/github/{cfg['user']}/{cfg['repo']}/blob/{cfg['branch']}/{cfg['nbs_path']}/{in_nbs(path)}"
        badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address})"
        if badge not in sources[:5]:
            yield (
                f"one of the first five cells must be the Colab badge and nothing else: {badge}"
            )
        elif not re.match(
            INSTALL.format(
                lib_name=re.escape(cfg["lib_name"]),
                git_url=re.escape(f"https://github.com/{cfg['user']}/{cfg['repo']}"),
            ),
            sources[sources.index(badge) + 1],
        ):
            yield (
                "the cell after the Colab badge must be the install cell (see CONTRIBUTING.md)"
            )
        exports = any(re.match(r"#\| *default_exp +\S", source) for source in sources[:3])
        if is_chapter(path) and not exports:
            yield "one of the first three cells must be `#| default_exp name`"
    if path.parent.name == "reference" and path.stem != "api":
        named = [m[1] for x in sources[:3] if (m := re.match(r"#\| *default_exp +(\S+)", x))]
        if [x.removesuffix(".__init__").replace(".", "_") for x in named] != [path.stem]:
            yield f"a page of the reference has the name of its module, {named}"
    if any(out["output_type"] == "error" for cell in cells for out in cell.get("outputs", [])):
        yield "a cell's saved output is an error"
    for cell in cells:
        said = "".join(text_of(x.get("text", "")) for x in cell.get("outputs", []))
        for where in sorted(set(re.findall(r"\S*/site-packages/\S*|<ipython-input\S*", said))):
            yield f"the output of cell {cell['id']} holds a place of one machine: {where}"
    ids = [cell["id"] for cell in cells]
    for twice in sorted({x for x in ids if ids.count(x) > 1}):
        yield f"two cells have the id {twice}"
    for cell in cells:
        if cell["cell_type"] == "code":
            for line in re.findall(r"^\s*# \|.*", text_of(cell["source"]), re.M):
                yield f"nbdev takes this comment for a directive, and drops it: {line.strip()}"


def other_homes(text):
    "Addresses of this repository and of its site in a text that are not those of settings.ini."
    cfg = settings()
    found = re.findall(
        r"(?:github\.com/|google\.com/github/|githubusercontent\.com/)"
        rf"([\w.-]+/{re.escape(cfg['repo'])})\b",
        text,
    )
    found += [
        f"{user}/{repo}"
        for user, repo in re.findall(r"https://([\w-]+)\.github\.io/([\w.-]+)", text)
        if repo == cfg["repo"]
    ]
    return sorted({x for x in found if x != f"{cfg['user']}/{cfg['repo']}"})


@step
def step_notebooks():
    """notebooks are clean (nbdev_clean changes nothing), begin as agreed, and nbs/nbdev.yml and
    every address of the repository fit settings.ini"""
    problems = [
        f"{path.name}: {problem}" for path in notebooks() for problem in notebook_problems(path)
    ]
    texts = [
        *notebooks(),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "_quarto.yml")),
    ]
    problems += [
        f"{path.name}: the repository is named {other}, settings.ini says another"
        for path in texts
        for other in other_homes(path.read_text(encoding="utf-8"))
    ]
    if problems:
        raise Failed(listing(problems))
    tree = copy_tree("clean")
    must([tool("nbdev_clean")], "nbdev_clean failed", cwd=tree)
    nbs = settings()["nbs_path"]
    dirty = [
        path.name
        for path in notebooks()
        if path.read_bytes() != (tree / nbs / in_nbs(path)).read_bytes()
    ]
    if dirty:
        raise Failed(f"not clean: {', '.join(dirty)} (run nbdev_clean)")
    must(
        [
            sys.executable,
            "-c",
            "from nbdev.quarto import refresh_quarto_yml; refresh_quarto_yml()",
        ],
        "nbdev could not write nbdev.yml",
        cwd=tree,
    )
    different = compare(ROOT / nbs, tree / nbs, ["nbdev.yml"])
    if different:
        raise Failed("nbs/nbdev.yml is not what settings.ini gives:\n" + listing(different))
    return f"{len(notebooks())} notebooks"


@step
def step_export():
    "the package is what the notebooks export"
    tree, lib = copy_tree("export"), settings()["lib_path"]
    for path in (tree / lib).rglob("*.py"):
        if re.match(
            r"(?s).{0,300}(AUTOGENERATED! DO NOT EDIT|Autogenerated by nbdev)",
            path.read_text(encoding="utf-8"),
        ):
            path.unlink()
    must([sys.executable, TOOLS / "export.py"], "the export failed", cwd=tree)
    names = sorted(
        {p.relative_to(base / lib) for base in (ROOT, tree) for p in (base / lib).rglob("*.py")}
    )
    different = compare(ROOT / lib, tree / lib, names)
    if different:
        raise Failed(
            f"{lib}/ is not what the notebooks export (run scripts/tools/export.py):\n"
            + listing(different)
        )
    return f"{len(names)} modules"


@step
def step_readme():
    "README.md is what index.ipynb gives, and its test command is the one that .ci/run calls"
    must(
        [sys.executable, TOOLS / "make_readme.py", "--check"],
        "README.md is out of date (run scripts/tools/make_readme.py):",
    )
    command = (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().splitlines()[-1]
    lines = [
        line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    ]
    if command not in lines:
        raise Failed(f"README.md has no line that is exactly what .ci/run calls:\n{command}")
    if "scripts/check.py" not in command:
        raise Failed(f".ci/run must end with the test command, not with: {command}")
    demo = 'pip install -c constraints.txt ".[demo]" && turboquant demo'
    if demo not in lines:
        raise Failed(f"README.md has no line that installs and runs the main job:\n{demo}")
    return command


WIDTH = 96  # characters of a line, as ruff.toml has it


def long_lines(text):
    """(number, line) beyond WIDTH of a text of Python. Addresses, `#|` directives and the lines
    of long string literals (docstrings aside) may be longer."""
    lines = text.splitlines()
    long = {
        i
        for i, line in enumerate(lines, 1)
        if len(line) > WIDTH and "://" not in line and not line.startswith("#|")
    }
    nodes = list(ast.walk(ast.parse(text))) if long else []
    docstrings = [x.value for x in nodes if isinstance(x, ast.Expr)]
    for node in nodes:
        is_text = isinstance(node, ast.JoinedStr | ast.Constant) and node not in docstrings
        if is_text and node.lineno < node.end_lineno:
            long -= set(range(node.lineno, node.end_lineno + 1))
    return [(i, lines[i - 1]) for i in sorted(long)]


def python_of(cell):
    "The Python of a code cell: other languages' cells are empty, IPython's lines are passed."
    text = text_of(cell["source"])
    return "" if text.startswith("%%") else re.sub(r"^( *)[%!].*$", r"\1pass", text, flags=re.M)


@step
def step_lint():
    """ruff finds nothing in the package, scripts/ and tests/ and formats nothing anew; lines of
    code have 96 characters at most"""
    written = [x for x in ("scripts", "tests", "setup.py") if (ROOT / x).exists()]
    ruff = [sys.executable, "-m", "ruff"]
    must([*ruff, "check", "--no-cache", settings()["lib_path"], *written], "ruff:")
    must(
        [*ruff, "format", "--check", "--quiet", "--no-cache", settings()["nbs_path"], *written],
        "not as ruff formats it (run ruff format nbs scripts tests setup.py):",
    )
    texts = {
        f"{path.name}, cell {cell['id']}": python_of(cell)
        for path in notebooks()
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    } | {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in written
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    long = [
        f"{where}, line {i}: {len(line)} characters: {line.strip()[:60]}"
        for where, text in texts.items()
        for i, line in long_lines(text)
    ]
    if long:
        raise Failed(f"lines of more than {WIDTH} characters:\n" + listing(long))


def imported(path, name, modules):
    """(line, module of the package) of every import, inside functions too, and of every
    import_module or lazy of a literal."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = []
        if isinstance(node, ast.Import):
            found = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            )
            base = ".".join([*above, *filter(None, [node.module])])
            found = [
                full if (full := f"{base}.{x.name}") in modules else base for x in node.names
            ]
        elif isinstance(node, ast.Call) and getattr(
            node.func, "attr", getattr(node.func, "id", "")
        ) in ("import_module", "lazy"):
            found = [x.value for x in node.args[:1] if isinstance(x, ast.Constant)]
        yield from ((node.lineno, x) for x in found if x in modules and x != name)


# Wings in the order of imports, and their modules in the same order: the only place where it is
# written. A wing's front (`__init__`) comes after its modules, the package's own after all.
WINGS = {
    "": "testing checks files results",
    "theory": "codebook rotation rope centre qjl transforms rates trellis",
    "quant": "quantizer recipe codes layers calibration",
    "cache": "packing exact memory clock store budget disk attention pages",
    "kernels": ("encode viterbi decode decode_mma blocks launch cpu cells cell_attention ops"),
    "hf": (
        "model_info hooks latents attention graphs layer frame compiled runner cache archive"
    ),
    "calibration": "fit sensitivity",
    "vllm": "step pages backend",
    "esm": "transform checkpoints codes model calibration mutations folding",
    "evaluation": "models candidates score harness",
    "cli": "app eval generate demo plan proteins calibrate serve",
}


def order_of(wings):
    "{module, without the name of the package: its place}."
    names = []
    for wing, modules in wings.items():
        names += [f"{wing}.{name}".lstrip(".") for name in modules.split()]
        names += [wing] if wing else []
    return {name: i for i, name in enumerate([*names, ""])}


def modules_of(root):
    "{module, the name of the package included: its file}."
    return {
        ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p
        for p in (root / settings()["lib_path"]).rglob("*.py")
        if p.name != "_modidx.py"
    }


def upward(root, wings=None):
    """({"importer -> imported": where}, a circle or None, number of imports) of the exported
    package under root, by the order of WINGS; Failed for a module that has no place in it."""
    lib, paths, place = settings()["lib_path"], modules_of(root), order_of(wings or WINGS)
    short = lambda name: name.removeprefix(lib).lstrip(".") or lib
    at = {name: place.get(short(name).replace(lib, "")) for name in paths}
    if lost := sorted(short(name) for name, i in at.items() if i is None):
        raise Failed(f"modules without a place in WINGS (scripts/check.py): {', '.join(lost)}")
    bad, graph, count = {}, {}, 0
    for name in sorted(set(paths) - {lib}):
        for line, other in imported(paths[name], name, paths):
            count += 1
            graph.setdefault(name, set()).add(other)
            if at[other] >= at[name]:
                where = f"{paths[name].relative_to(root)}:{line}"
                bad.setdefault(f"{short(name)} -> {short(other)}", where)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return bad, " -> ".join(map(short, error.args[1][::-1])), count
    return bad, None, count


def behind(root, wings=None):
    """Chapters that stand before one whose module comes earlier, in words: numbers rise with
    the order of WINGS. Fronts gather what others define, so a chapter that exports one may
    stand anywhere."""
    paths, highest = modules_of(root), (0, "")
    for name in order_of(wings or WINGS):
        path = paths.get(f"{settings()['lib_path']}.{name}")
        if path is None or path.name == "__init__.py":
            continue
        text = path.read_text(encoding="utf-8")
        for number in map(int, re.findall(r"^# %% \S*?/(\d\d)_\w+\.ipynb #", text, re.M)):
            if number < highest[0]:
                yield f"{name} is of chapter {number}, {highest[1]} before it of {highest[0]}"
                break
            highest = number, name


def chapters():
    """[(file name, number, title)] in the order of the numbers; Failed if a name is not of two
    digits and a word, or a title does not say the number."""
    found = []
    for path in notebooks():
        if is_chapter(path):
            title = text_of(
                json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
            ).splitlines()[0]
            name = re.fullmatch(r"(\d\d)_[a-z_]+", path.stem)
            if not name:
                raise Failed(f"{path.name}: a chapter has two digits and a word, no letter")
            match = re.match(r"# (\d+) · (.+)", title)
            if not match or int(match[1]) != int(name[1]):
                raise Failed(
                    f"{path.name}: the title must be `# {int(name[1])} · …`, it is {title!r}"
                )
            found.append((in_nbs(path), match[1], match[2]))
    return found


def misplaced(wanted, sidebar, book):
    """What in the texts of the sidebars and of the book's front page is not the chapters (file,
    number, title). Each sidebar has them in their order, between them they name each once, and
    the front page names those of the book's sidebar."""
    chapters = {name: f"{number} · {title} ({name})" for name, number, title in wanted}
    bars = [
        [f"{number} · {title} ({href})" for number, title, href in found]
        for found in (
            re.findall(r'- text: "?(\w+) · (.*?)"?\n +href: (\S+)', bar)
            for bar in re.split(r"^ *- title: ", sidebar, flags=re.M)
        )
    ]
    listed = re.findall(
        r"^\| (\w+) \| \[([^\]]+)\]\((\S+?\.ipynb)\) \|",
        book.partition("## Reading order")[2],
        re.M,
    )
    right, here = [*chapters.values()], "a sidebar of _quarto.yml"
    pairs = [(here, bar, [x for x in right if x in bar]) for bar in bars]
    pairs += [("the sidebars of _quarto.yml", sorted(sum(bars, [])), sorted(right))]
    front = [f"{number} · {title} ({name})" for number, title, name in listed]
    titles = re.findall(r"^ *- title: (.*)$", sidebar, re.M)
    of_the_book = bars[titles.index("Book") + 1] if "Book" in titles else []
    pairs += [("the reading order of book.ipynb", front, of_the_book)]
    for where, found, want in pairs:
        yield from difflib.unified_diff(found, want, where, "chapters", lineterm="", n=0)


@step
def step_order():
    """chapters have one order in files, titles, sidebar and the front page of the book, that of
    their modules; an exported cell imports lower wings and modules only, inside functions too;
    no circle"""
    wanted, book = (
        chapters(),
        json.loads((ROOT / settings()["nbs_path"] / "book.ipynb").read_text(encoding="utf-8")),
    )
    different = list(
        misplaced(
            wanted,
            (ROOT / "_quarto.yml").read_text(encoding="utf-8"),
            "\n".join(text_of(cell["source"]) for cell in book["cells"]),
        )
    )
    if different:
        raise Failed("not the chapters as they are:\n" + listing(different))
    bad, circle, count = upward(ROOT)
    if bad:
        raise Failed(
            "imports that go up (move what is needed down):\n"
            + listing([f"{pair}  ({where})" for pair, where in bad.items()])
        )
    if circle:
        raise Failed(f"modules import each other: {circle}")
    if early := list(behind(ROOT)):
        raise Failed("chapters whose numbers do not rise:\n" + listing(early))
    return f"{len(wanted)} chapters, {count} imports"


@functools.cache
def built():
    "(wheel, sdist): the sdist of a clean copy, and the wheel built from that sdist."
    tree, dist = copy_tree("source"), scratch() / "dist"
    must(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist],
        "the package does not build:",
        cwd=tree,
    )
    return next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))


@functools.cache
def installed():
    "The wheel, installed alone into a folder of its own."
    target = scratch() / "installed"
    must(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--target",
            target,
            built()[0],
        ],
        "the wheel does not install:",
    )
    return target


@step
def step_wheel():
    """sdist and wheel build; the wheel holds the package with its data and nothing else; the
    metadata fit settings.ini"""
    cfg, (wheel, sdist) = settings(), built()
    lib = cfg["lib_path"]
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        meta = message_from_string(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    tree = scratch() / "source"
    wanted = {p.relative_to(tree).as_posix() for p in (tree / lib).rglob("*") if p.is_file()}
    wanted |= {
        f"{lib}/data/{p.relative_to(tree).as_posix()}"
        for p in (tree / "results").rglob("*.json")
    }  # what notebooks read where there is no clone
    inside = {name for name in names if not name.startswith(info)}
    if inside != wanted:
        raise Failed(
            f"the wheel lacks {sorted(wanted - inside)} and has too much "
            f"{sorted(inside - wanted)}"
        )
    version = "".join(
        re.findall(
            r'^__version__ = "(.*?)"',
            (ROOT / lib / "__init__.py").read_text(encoding="utf-8"),
            re.M,
        )
    )
    extras = {key.removesuffix("_requirements") for key in cfg if key.endswith("_requirements")}
    checks = {
        "Version": (meta["Version"], cfg["version"]),
        "__version__": (version, cfg["version"]),
        "Name": (meta["Name"], cfg["lib_name"]),
        "Requires-Python": (meta["Requires-Python"], ">=" + cfg["min_python"]),
        "extras": (set(meta.get_all("Provides-Extra") or []), extras),
        "requirements": (
            sum("extra ==" not in r for r in meta.get_all("Requires-Dist")),
            len(cfg["requirements"].split()),
        ),
        "console script": (cfg["console_scripts"].replace("=", " = ") in scripts, True),
        "license file": (any("LICENSE" in n for n in names), True),
    }
    wrong = [
        f"{what}: {got!r}, expected {expected!r}"
        for what, (got, expected) in checks.items()
        if got != expected
    ]
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    wrong += [
        f"the sdist lacks {name}"
        for name in ("settings.ini", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")
        if name not in source
    ]
    if wrong:
        raise Failed(listing(wrong))
    return f"{wheel.name}, {len(inside)} files, {wheel.stat().st_size / 1024:.0f} kB"


OPTIONAL = (
    "transformers",
    "triton",
    "matplotlib",
    "gguf",
    "accelerate",
    "esm",
    "nbdev",
    "tqdm",
    "IPython",
    "lm_eval",
)
TIMED = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {optional!r}:
            raise ModuleNotFoundError("No module named " + repr(name) + " (left out for this check)", name=name)
sys.meta_path.insert(0, Block())
import importlib.util
found = importlib.util.find_spec  # says None for what is not installed; torch asks it
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in {optional!r} else found(name, package)
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if "pip install \\"{package}[" not in str(error):  # a module may ask for its extra, if it says how to get it
            raise
        print(name)
"""


@step
def step_imports():
    """import turboquant_nb needs no extra, loads no heavy library and takes little longer than
    import torch"""
    target, lib = installed(), settings()["lib_path"]
    kwargs = {"cwd": scratch(), "env": {"PYTHONPATH": str(target)}}
    kept = must(
        [
            sys.executable,
            "-c",
            f"import {lib}, sys; print(*[m for m in {OPTIONAL!r} if m in sys.modules])",
        ],
        f"import {lib} failed:",
        **kwargs,
    ).split()
    kept = [name for name in kept if name in ("transformers", "triton", "matplotlib")]
    if kept:
        raise Failed(f"import {lib} also imports {', '.join(kept)}")
    files = [p for p in (target / lib).rglob("*.py") if p.name != "_modidx.py"]
    modules = sorted(
        ".".join(p.relative_to(target).with_suffix("").parts).removesuffix(".__init__")
        for p in files
    )
    code = BLOCKED.format(optional=OPTIONAL, modules=modules, package=settings()["lib_name"])
    asking = must(
        [sys.executable, "-c", code],
        "a module cannot be imported with the core requirements alone:",
        **kwargs,
    ).split()
    times = {name: [] for name in ("torch", lib)}
    for _ in range(3):
        for name, taken in times.items():
            taken.append(
                float(
                    must(
                        [sys.executable, "-c", TIMED.format(name)],
                        f"import {name} failed:",
                        **kwargs,
                    ).split()[-1]
                )
            )
    base, ours = min(times["torch"]), min(times[lib])
    if ours - base > IMPORT_BUDGET:
        raise Failed(
            f"import {lib} takes {ours:.2f} s, import torch {base:.2f} s: more than "
            f"{IMPORT_BUDGET} s on top"
        )
    return (
        f"{len(modules)} modules ({', '.join(asking) or 'none'} asks for an extra); import "
        f"torch {base:.2f} s, import {lib} {ours:.2f} s"
    )


def alone(name):
    """A folder with the notebooks and nothing else of the repository, as on Colab; settings.ini
    says which cells a test leaves out."""
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / settings()["nbs_path"]).mkdir(parents=True)
    shutil.copyfile(ROOT / "settings.ini", folder / "settings.ini")
    for path in notebooks():
        target = folder / settings()["nbs_path"] / in_nbs(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


@step
def step_nbtest(numerics="native"):
    """every notebook runs from top to bottom (nbdev_test): natively in a copy of the tree,
    under other arithmetic in an empty folder with the wheel"""
    tree = copy_tree("nbtest") if numerics == "native" else alone("alone")
    env = arithmetic(numerics) | {
        "PYTHONPATH": str(tree if numerics == "native" else installed()),
        "MPLBACKEND": "agg",
    }
    if not probe()[
        "cuda"
    ]:  # kernels run in Triton's interpreter, which is chosen when Triton is first imported
        env["TRITON_INTERPRET"] = "1"
    said = must(
        [
            sys.executable,
            TOOLS / "test_notebooks.py",
            "--n_workers",
            workers(numerics),
            "--do_print",
            "--timing",
            "--skip_file_re",
            "^[_.]",
        ],
        "nbdev_test failed (its output is above)",
        cwd=tree,
        env=env,
        show=True,
    )
    ran = set(re.findall(r"^(\S+\.ipynb): \d+ secs$", said, re.M))
    skipped = {path.name for path in notebooks()} - ran
    if skipped:
        raise Failed(f"nbdev_test left out {', '.join(sorted(skipped))}")
    return f"{len(ran)} notebooks"


@functools.cache
def pages():
    """(the process that renders and checks the site, what it prints): mostly one thread, so a
    full run begins it first and other steps run beside it."""
    log = scratch() / "docs.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, TOOLS / "preview_docs.py", "--check"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    atexit.register(process.terminate)
    return process, log


@step
def step_docs():
    "every page of the site renders; links, formulas, figures and the sidebar hold"
    process, log = pages()
    status, output = process.wait(), log.read_text(encoding="utf-8", errors="replace")
    if status:
        raise Failed(f"the pages have problems:\n{output[-6000:].rstrip()}")
    return output.strip().splitlines()[-1]


@step
def step_tests(numerics="native"):
    "pytest over tests/, importing the built wheel and not the source tree"
    global closing_line
    target, lib, tree = installed(), settings()["lib_path"], copy_tree("tests")
    shutil.rmtree(tree / lib)  # nothing but the wheel is left to import
    kwargs = {"cwd": tree, "env": arithmetic(numerics) | {"PYTHONPATH": str(target)}}
    where = Path(
        must(
            [sys.executable, "-c", f"import {lib}; print({lib}.__file__)"],
            "the wheel cannot be imported:",
            **kwargs,
        ).split()[-1]
    )
    if target not in where.parents:
        raise Failed(f"the tests would import {where}, not the wheel in {target}")
    several = (
        ["-n", workers(numerics), "--dist", "loadfile", "--no-loadscope-reorder"]
        if workers(numerics) > 1
        else []
    )  # conftest.py puts the longest files first
    status, output = run(
        [
            sys.executable,
            "-m",
            "pytest",
            "tests",
            "-q",
            "-p",
            "no:cacheprovider",
            "--durations=10",
            *several,
        ],
        show=True,
        **kwargs,
    )
    said = [
        line.strip()
        for line in output.splitlines()
        if re.search(
            r"\b(passed|failed|error|errors|no tests ran|skipped)\b.* in [\d.]+s", line
        )
    ]
    closing_line = said[-1] if said else ""
    if status:
        raise Failed(f"pytest ended with status {status}: {closing_line or 'no closing line'}")
    return closing_line


NUMERIC = ("nbtest", "tests")  # the steps that compute


# ---------------------------------------------------------------- main


def under(numerics):
    "The settings to run under; what is left out is said."
    if numerics is None:
        return ["native"]
    out = []
    for name in NUMERICS if numerics == "all" else [numerics]:
        reason = why_not(name) or (
            "what native does here" if numerics == "all" and same_as_native(name) else ""
        )
        if reason:
            print(f"numerics {name}: left out, {reason}", flush=True)
        else:
            out.append(name)
    return out


def plan(only, numerics):
    "What to run, in order: (step, its arguments): a setting, for steps that compute."
    chosen = [name for name in STEPS if not only or name in only]
    chosen_settings = under(numerics) if any(name in NUMERIC for name in chosen) else []
    full, runs = not only and not numerics, []
    for name in chosen:
        runs += [(name, (x,)) for x in chosen_settings] if name in NUMERIC else [(name, ())]
    if full:
        runs[runs.index(("nbtest", ("native",)))] = "nbtest", (foreign(),)
        runs.sort(key=lambda run: run[0] == "docs")  # mostly one thread, beside the others
    return runs


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only",
        action="append",
        choices=list(STEPS),
        metavar="STEP",
        help="run only this step (may be repeated)",
    )
    parser.add_argument(
        "--numerics",
        choices=[*NUMERICS, "all"],
        metavar="NAME",
        help=(
            f"run {' and '.join(NUMERIC)} under this setting of the processor's arithmetic, or "
            "under `all`"
        ),
    )
    parser.add_argument(
        "--list", action="store_true", help="list the steps and the settings of --numerics"
    )
    args = parser.parse_args(argv)
    if args.list:
        for name, f in STEPS.items():
            print(f"{name:14} {f.__doc__}")
        print()
        for name, variables in NUMERICS.items():
            print(
                f"{name:14} "
                + (
                    " ".join(f"{k}={v}" for k, v in variables.items())
                    or "the processor as it is"
                )
            )
        return 0
    start, runs = time.perf_counter(), plan(args.only, args.numerics)
    if any(name == "docs" for name, _ in runs):
        pages()
    for i, (name, how) in enumerate(runs, 1):
        title = f"{name} ({how[0]})" if how else name
        print(f"[{i}/{len(runs)}] {title}: {STEPS[name].__doc__}", flush=True)
        begin = time.perf_counter()
        try:
            if how:
                announce(how[0])
            said = STEPS[name](*how)
        except Failed as error:
            print(
                f"FAILED {title} after {time.perf_counter() - begin:.1f} s: {error}", flush=True
            )
            if closing_line:
                print(closing_line)
            return 1
        print(
            f"    ok, {time.perf_counter() - begin:.1f} s{': ' + said if said else ''}",
            flush=True,
        )
    print(f"all {len(runs)} steps passed in {time.perf_counter() - start:.0f} s")
    if closing_line:
        print(closing_line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
