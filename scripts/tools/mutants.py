#!/usr/bin/env python3
"""Change the code on purpose, one small thing at a time, and see whether the tests notice.

    python scripts/tools/mutants.py --seconds 600            a sample of all mutants
    python scripts/tools/mutants.py --module rates --seed 1  another sample, of one module
    python scripts/tools/mutants.py --all --module rope      every mutant of a module
    python scripts/tools/mutants.py --workers 16 --suite --out x.jsonl    sixteen at a time,
                                                             against the whole suite, kept
    python scripts/tools/mutants.py --retry x.jsonl          those of it that survived, after a
                                                             test was added
    python scripts/tools/mutants.py --list                   how many mutants each module has
    python scripts/tools/mutants.py --prune                  drop from mutants_equivalent.txt
                                                             what no module says any more

cosmic-ray makes the mutants (pip install -c constraints.txt ".[mutants]"). It would start a
process for each, and importing torch takes longer than most tests; here one process imports the
libraries once and forks for each mutant. Each file of tests runs once without any change,
observed; then a mutant meets first the tests that enter its function, the fastest first, and
after them the others (those up to the one that kills it run again without the change): a
default is checked by who never calls it, and a result that is kept was made by an earlier test.
A mutant is killed if a test of its own module's files (`tests_of`) fails, or runs much longer
than it should; what passes them meets the cells of the module's chapter, which check it too.
With --suite every other file counts too, by its tests that enter the function, as many as take
a minute: that is what the checks would notice; of tests that do not enter it as many run as
take another minute. With --in-order nothing is observed and the tests of a module's
own files run as they stand: for files that take minutes, as those of kernels do. Kernels run in
Triton's interpreter. What cannot be imported at all does not count. A survivor is either a test
that is missing or a change that nothing can see (`x < 0` for `x <= 0` where both give the
same): those are listed, with the reason, in mutants_equivalent.txt, by the statement that is
changed and not by how it is laid out, and count no more."""

import argparse
import ast
import importlib
import importlib.machinery
import json
import linecache
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from pytest import hookimpl as pytest_hook

sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebooks import directives, text_of
from preview_docs import copy_tree

SCRIPTS = Path(__file__).resolve().parent
EQUIVALENT = SCRIPTS / "mutants_equivalent.txt"
GROUND = "ground"  # the folder of tests for modules that lie in no wing
WHOLE = "hf", "vllm"  # wings where a cache reaches every module: all of their tests count
SWAPS = (
    "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitAnd_BitOr "
    "BitOr_BitXor LShift_RShift RShift_LShift"
).split()
COMPARISONS = (
    "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE Gt_LtE Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is".split()
)
OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd "
    "ReplaceBreakWithContinue NumberReplacer ZeroIterationForLoop"
).split()
UNARY = "USub_UAdd Delete_Not".split()
PRELOAD = (
    "numpy scipy.integrate scipy.optimize scipy.special scipy.stats safetensors.torch torch "
    "triton transformers hypothesis _pytest.assertion.rewrite"
).split()
CONTROL = "no change"
# seconds for one mutant of the tests that do not enter its function; with --suite also of those
# of other modules' files that do
NEAR = 60
KEEPS_KIND = (
    "abs",
    "ceil",
    "clamp",
    "clip",
    "clone",
    "floor",
    "flip",
    "round",
    "sort",
    "sqrt",
)  # x.f(...) and x are of one kind


def modules(package):
    "The modules that are changed, as wing/name, or by name alone."
    found = (p.relative_to(package).with_suffix("") for p in sorted(package.rglob("*.py")))
    return [p.as_posix() for p in found if not p.name.startswith("_")]


def tests_of(module, tests):
    """The files of tests that have to notice a change of a module: its own, or else those of
    its wing that import it, or else all that do, or else all of its wing; and what is
    promised. Of the wings in `WHOLE` all."""
    wing, _, name = module.rpartition("/")
    above = wing or "turboquant_nb"
    imports = re.compile(rf"\b{above}\.{name}\b|\b{above} import [^\n]*\b{name}\b")
    wing = wing or GROUND
    using = [
        x for x in sorted(tests.rglob("test_*.py")) if imports.search(x.read_text("utf-8"))
    ]
    own = [tests / wing / f"test_{name}{kind}.py" for kind in ("", "_kernel")]
    own = [x for x in own if x.exists()]
    all_of = sorted((tests / wing).glob("test_*.py"))
    found = [] if wing in WHOLE else own or [x for x in all_of if x in using] or using
    if not (found := found or all_of):
        raise Failed(f"no file of tests imports {module}")
    return list(dict.fromkeys([*found, tests / "tools" / "test_promises.py"]))


class Failed(Exception):
    "The mutants could not be tried; the message says why."


# ---------------------------------------------------------------- what is changed


def own_operators():
    "Three that cosmic-ray lacks: an operand dropped, a method call dropped, min for max."
    from cosmic_ray.operators.operator import Operator

    class DropOperand(Operator):
        "a - b becomes a."

        def mutation_positions(self, node):
            if node.type in ("arith_expr", "term"):
                yield from ((x.start_pos, x.end_pos) for x in node.children[1::2])

        def mutate(self, node, index):
            del node.children[2 * index + 1 : 2 * index + 3]
            return node

        @classmethod
        def examples(cls):
            return ()

    class DropCall(DropOperand):
        "x.clamp(min=0) becomes x."

        def _calls(self, node):
            if node.type in ("atom_expr", "power"):
                for i, (name, call) in enumerate(zip(node.children[1:], node.children[2:]), 1):
                    is_call = (
                        name.type == call.type == "trailer"
                        and name.children[0] == "."
                        and call.children[0] == "("
                    )
                    if (
                        is_call
                        and name.children[1].value in KEEPS_KIND
                        and getattr(node.children[0], "value", "")
                        not in ("torch", "math", "np")
                    ):
                        yield i

        def mutation_positions(self, node):
            yield from (
                (node.children[i].start_pos, node.children[i + 1].end_pos)
                for i in self._calls(node)
            )

        def mutate(self, node, index):
            i = list(self._calls(node))[index]
            del node.children[i : i + 2]
            return node

    class MinMax(DropOperand):
        "min for max, and max for min."

        def mutation_positions(self, node):
            if node.type == "name" and node.value in ("min", "max"):
                yield node.start_pos, node.end_pos

        def mutate(self, node, index):
            node.value = {"min": "max", "max": "min"}[node.value]
            return node

    return {x.__name__: x for x in (DropOperand, DropCall, MinMax)}


@cache
def operators():
    "name -> operator."
    try:
        from cosmic_ray.operators.provider import OperatorProvider
    except ImportError as error:
        raise Failed(
            f"cosmic-ray makes the mutants ({error}): pip install -c constraints.txt "
            '".[mutants]"'
        ) from error
    names = (
        [f"ReplaceBinaryOperator_{x}" for x in SWAPS]
        + [f"ReplaceComparisonOperator_{x}" for x in COMPARISONS]
        + [f"ReplaceUnaryOperator_{x}" for x in UNARY]
    )
    theirs = OperatorProvider()
    return {name: theirs[name]() for name in names + OTHERS} | {
        name: x() for name, x in own_operators().items()
    }


@dataclass(frozen=True)
class Mutant:
    "One place of a module, and what is done there."

    module: str  # wing/name
    operator: str
    occurrence: int  # of the operator in the module
    line: int  # from 1


def is_message(node):
    "Inside a raise statement: what is changed there are words."
    while node and node.type != "raise_stmt":
        node = node.parent
    return node is not None


def mutants(module, source):
    "All mutants of a module, except those of its error messages."
    from cosmic_ray.ast import ast_nodes, get_ast

    tree = get_ast(source)
    for name, operator in operators().items():
        places = (
            (node, start[0])
            for node in ast_nodes(tree)
            for start, _ in operator.mutation_positions(node)
        )
        yield from (
            Mutant(module, name, i, line)
            for i, (node, line) in enumerate(places)
            if not is_message(node)
        )


def mutated(mutant, source):
    "The module's source with that one change."
    from cosmic_ray.mutating import mutate_code

    return mutate_code(source, operators()[mutant.operator], mutant.occurrence)


BELOW = "body", "orelse", "finalbody", "handlers"


def below(node):
    "The statements that a statement holds."
    return [x for name in BELOW for x in getattr(node, name, ()) if isinstance(x, ast.AST)]


def head(node):
    "A statement without what it holds, in one line, as Python lays it out."
    if isinstance(node, ast.Module):
        return ""
    given = {name: getattr(node, name) for name in node._fields if name not in BELOW}
    if hasattr(node, "body") and isinstance(node.body, list):
        given |= {"body": [ast.Expr(ast.Constant(...))], "orelse": [], "finalbody": []}
        given |= {"handlers": []} if isinstance(node, ast.Try) else {}
    bare = type(node)(**{k: x for k, x in given.items() if k in node._fields})
    return " ".join(ast.unparse(ast.fix_missing_locations(bare)).split())


def holds(node, line):
    "Whether a statement, its decorators included, has this line."
    first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
    return first <= line <= node.end_lineno


def change(old, new, line):
    "The innermost statement on a line of two sources: (as it was, as it is)."
    old, new = ast.parse(old), ast.parse(new)
    while True:
        pairs = zip(below(old), below(new))
        inside = next((x for x in pairs if holds(x[0], line)), None)
        if inside is None:
            return head(old), head(new)
        old, new = inside


def equivalent():
    "{(module, as it was, as it is): why} of the changes that nothing can see."
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    rows = [
        [x.strip() for x in line.split(" || ")]
        for line in lines
        if line.strip() and not line.startswith("#")
    ]
    if wrong := [row for row in rows if len(row) != 4]:
        raise Failed(
            f"{EQUIVALENT.name}: expected `module || as it was || as it is || why`, got "
            f"{wrong[0]}"
        )
    return {tuple(row[:3]): row[3] for row in rows}


def stale(sources):
    "Those of `equivalent` whose statement is in no module any more."
    said = {
        (name, head(x))
        for name, source in sources.items()
        for x in ast.walk(ast.parse(source))
        if isinstance(x, ast.stmt | ast.ExceptHandler)
    }
    return [x for x in equivalent() if x[:2] not in said]


def prune(sources):
    "Write the list without what is stale; how many went."
    gone = {" || ".join(x) for x in stale(sources)}
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    kept = [x for x in lines if x.rpartition(" || ")[0] not in gone]
    EQUIVALENT.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return len(lines) - len(kept)


# ---------------------------------------------------------------- how it is tried


def functions(source):
    """line -> the lines on which the functions that hold it begin; a decorator belongs to its
    function."""
    out = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
            for line in range(first, node.end_lineno + 1):
                out.setdefault(line, set()).add(first)
    return out


NOT_RUN = {"default_exp", "notest", "gpu", "slow", "eval"}


def run_chapter(path, source, name):
    """Run the cells of the chapters that a module's source comes from, in their folder, with
    what they export taken from that source."""
    chunks = re.split(r"^# %% (\S+\.ipynb) #(\S+)$", source, flags=re.M)[1:]
    exported = {at: code for _, at, code in zip(*[iter(chunks)] * 3)}
    os.environ["MPLBACKEND"] = "agg"
    for chapter in dict.fromkeys(chunks[::3]):
        notebook = (path.parent / chapter).resolve()
        os.chdir(notebook.parent)
        scope = {"__name__": name, "__package__": name.rpartition(".")[0]}
        for i, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
            found, code = directives(text_of(cell["source"]))
            if cell["cell_type"] != "code" or NOT_RUN & set(found):
                continue
            code = exported.get(cell["id"], code)
            code = "".join(
                x for x in code.splitlines(True) if not x.lstrip().startswith(("%", "!"))
            )
            file = f"<cell {i} of {notebook.name}>"
            linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
            exec(compile(code, file, "exec"), scope)


@dataclass
class Test:
    "What a test did when nothing was changed."

    seconds: float = 0.0
    passed: bool = True
    entered: tuple = ()  # first lines of the module's functions that it ran


class Observe:
    "A pytest plugin: what each test does to the modules at these paths."

    def __init__(self, paths, trace=True):  # {module: path}
        self.trace = trace
        self.names = {str(path): name for name, path in paths.items()}
        self.tests = {name: {} for name in paths}

    @pytest_hook(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        entered = {name: set() for name in self.tests}

        def see(frame, event, arg):
            if name := self.names.get(frame.f_code.co_filename):
                entered[name].add(frame.f_code.co_firstlineno)

        begin = time.monotonic()
        sys.settrace(see if self.trace else None)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            seconds = time.monotonic() - begin  # one for all: modules share their order
            for name, tests in self.tests.items():
                test = tests.setdefault(item.nodeid, Test())
                test.seconds = seconds
                test.entered = tuple(sorted(entered[name]))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            for tests in self.tests.values():
                tests.setdefault(report.nodeid, Test()).passed = False


class Order:
    """A pytest plugin: these tests, in this order. A test that takes half a minute more than
    ten times its time ends the process (the first one imports what all need)."""

    def __init__(self, tests):  # {node id: Test}
        self.tests, self.failed = tests, None

    @pytest_hook(trylast=True)
    def pytest_collection_modifyitems(self, items):
        found = {x.nodeid: x for x in items}
        items[:] = [found[name] for name in self.tests if name in found]

    @pytest_hook(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        signal.setitimer(signal.ITIMER_REAL, 30 + 10 * self.tests[item.nodeid].seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid


@dataclass
class Tree:
    "A copy of the repository, the package's sources, and what the tests of each module do."

    root: Path
    package: str

    def __post_init__(self):
        self.measured = ()  # modules whose tests were observed
        self.suite = False  # whether all files of tests count
        self.in_order = False  # whether tests run as they stand in their files
        self.given = ()  # files of tests that were named instead of a module's own
        self.observed = {}  # {file of tests: {node id: {module: Test}}}
        self.chapters = {}  # {module: seconds of its chapter's cells}, where they pass
        names = modules(self.root / self.package)
        self.sources = {name: self.path(name).read_text(encoding="utf-8") for name in names}
        self.functions = {name: functions(x) for name, x in self.sources.items()}

    def path(self, module):
        return self.root / self.package / f"{module}.py"

    def files(self, module):
        "The files of tests that are a module's own, or those that were named, from the root."
        if self.given:
            return list(self.given)
        found = tests_of(module, self.root / "tests")
        return [x.relative_to(self.root).as_posix() for x in found]

    def tests(self, module, near=frozenset()):
        """{node id: Test} that a change of a module meets, in order: those of the suite that
        enter one of the functions that begin on these lines, the fastest first, then the
        others of its own files; without those that fail when nothing is changed."""
        own, found = set(self.files(module)), []
        for file, tests in self.observed.items():
            for name, seen in tests.items():
                test, is_own = seen[module], file in own
                enters = bool(near & set(test.entered))
                if test.passed and (enters or is_own):
                    found.append((not enters, test.seconds, is_own, name, test))
        spent, out = {True: 0.0, False: 0.0}, {}
        if not self.in_order:
            found.sort(key=lambda x: x[:2])
        for far, seconds, is_own, name, test in found:
            free = is_own and not (far and self.suite)
            spent[far] += 0 if free else seconds
            if free or spent[far] < NEAR:
                out[name] = test
        return out

    def measure(self, modules, workers, suite=False, in_order=False):
        """Run the files of tests of these modules (all files with `suite`) as they are, each
        once, observed unless they stay in order. Says which tests fail; raises Failed if none
        of a module passes."""
        self.in_order = in_order
        files = dict.fromkeys(file for name in modules for file in self.files(name))
        for path in sorted((self.root / "tests").rglob("test_*.py")) if suite else ():
            files[path.relative_to(self.root).as_posix()] = None
        outs = {file: self.root / f"observed-{i}" for i, file in enumerate(files)}
        jobs = ((file, self._watch(file, modules, out), 3600) for file, out in outs.items())
        bad = []
        for file, said, log in side_by_side(jobs, workers):
            if said != 0 or not outs[file].is_file():
                bad.append(f"{file} (cannot run: {log.strip()[-200:]!r})")
                continue
            self.observed[file] = {
                name: {module: Test(*x) for module, x in seen.items()}
                for name, seen in json.loads(outs[file].read_text()).items()
            }
            bad += [
                name
                for name, seen in self.observed[file].items()
                if not all(x.passed for x in seen.values())
            ]
        if bad:
            print(f"left out, since they fail without any change: {', '.join(bad)}", flush=True)
        begun, out = {}, lambda x: begun.setdefault(x, time.monotonic())
        chapters = ((x, lambda x=x: self._chapter(x), 300) for x in modules if out(x))
        for name, said, log in side_by_side(() if self.given else chapters, workers):
            if said == 0:
                self.chapters[name] = time.monotonic() - begun[name]
            else:
                print(
                    f"the chapter of {name} does not run here: {log.strip()[-200:]}", flush=True
                )
        self.measured, self.suite = tuple(modules), suite
        for name in modules:
            if not self.tests(name):
                raise Failed(f"no test of {name} passes without any change")

    def _chapter(self, module, source=None):
        "Run the cells of a module's chapter, with this source of it."
        path = self.path(module)
        name = ".".join(path.relative_to(self.root).with_suffix("").parts)
        importlib.import_module(name)
        run_chapter(path, source or self.sources[module], name)
        return 0

    def _watch(self, file, modules, out):
        def run():
            observe = Observe({name: self.path(name) for name in modules}, not self.in_order)
            self._pytest([file], observe)
            found = {}
            for name, tests in observe.tests.items():
                for k, x in tests.items():
                    found.setdefault(k, {})[name] = x.seconds, x.passed, x.entered
            out.write_text(json.dumps(found))
            return 0

        return run

    def attempt(self, mutant, known, last=None):
        """(What a child does: say the change, import the module with it and run its tests, up
        to `last`; seconds after which it is late.)"""

        def run():
            path, source = self.path(mutant.module), self.sources[mutant.module]
            new = mutated(mutant, source) if mutant.operator != CONTROL else source
            try:
                both = change(source, new, mutant.line)
            except SyntaxError as error:  # `not x := y`
                print(json.dumps(("", f"not Python: {error}")), flush=True)
                return 3
            print(json.dumps(both), flush=True)
            if (mutant.module, *both) in known or (
                new != source and ast.dump(ast.parse(new)) == ast.dump(ast.parse(source))
            ):
                return 5  # the second: 1e38 + 1 is written `1e+38`
            import_from(str(path), new)
            try:
                importlib.import_module(
                    ".".join(path.relative_to(self.root).with_suffix("").parts)
                )
            except Exception as error:
                print(f"not importable: {error!r}")
                return 3
            code = self._pytest(files, order := Order(tests), "-x")
            print(f"\n{order.failed or ''}")
            if not code and last is None and mutant.module in self.chapters:
                self._chapter(mutant.module, new)
            return 1 if code else 0

        near = self.functions[mutant.module].get(mutant.line, set())
        tests = self.tests(mutant.module, near)
        if last is not None:
            names = list(tests)
            tests = {name: tests[name] for name in names[: names.index(last) + 1]}
        files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
        seconds = sum(x.seconds for x in tests.values()) + self.chapters.get(mutant.module, 0)
        return run, 20 + 3 * seconds

    def _pytest(self, files, plugin, *more):
        import pytest

        scratch = self.root / f"scratch-{os.getpid()}"
        try:
            return pytest.main(
                [
                    *files,
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:randomly",
                    f"--basetemp={scratch}",
                    *more,
                ],
                plugins=[plugin],
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def import_from(path, source):
    """Whoever imports the module at `path` gets this source, and Triton's interpreter, which
    reads the lines of a kernel, too."""
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code
    loader.get_code = lambda self, name: (
        compile(source, path, "exec") if self.path == path else get_code(self, name)
    )


def start(run, log):
    """The id of a child in a process group of its own, which runs it and ends with what it
    returns."""
    child = os.fork()
    if child:
        return child
    code = 4
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        code = run()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def side_by_side(jobs, workers):
    """Run jobs (key, function, seconds), at most so many at a time; yields (key, exit code or
    None if late, log) as they end."""
    jobs, running = iter(jobs), {}
    with tempfile.TemporaryDirectory(prefix="turboquant-logs-") as folder:
        try:
            while True:
                while len(running) < workers and (job := next(jobs, None)):
                    log = Path(folder) / f"{time.monotonic_ns()}.log"
                    running[start(job[1], log)] = job[0], time.monotonic() + job[2], log
                if not running:
                    return
                time.sleep(0.02)
                for child, (key, end, log) in list(running.items()):
                    done, status = os.waitpid(child, os.WNOHANG)
                    code = os.waitstatus_to_exitcode(status) if done else None
                    if not done and time.monotonic() < end:
                        continue
                    _end_group(child, waited=bool(done))
                    del running[child]
                    yield (
                        key,
                        None if code == -signal.SIGALRM else code,
                        log.read_text(errors="replace"),
                    )
        finally:
            for child in running:
                _end_group(child)


def _end_group(child, waited=False):
    "End a child and what it started."
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not waited:
        os.waitpid(child, 0)


def prepared(root, package):
    "The tree, with the libraries imported and its package first on the path."
    if not hasattr(os, "fork"):
        raise Failed("mutants need a system that can fork")
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(root),
    }
    sys.dont_write_bytecode = False  # the copy is thrown away, and its tests are compiled once
    sys.path.insert(0, str(root))
    os.chdir(root)
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # tests that need it skip or say so
    if loaded := [x for x in sys.modules if x.split(".")[0] == package]:
        raise Failed(f"{loaded[0]} was imported before any mutant")
    return Tree(root, package)


def interval(k, n):
    "Wilson's 95 % interval of k out of n."
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


@dataclass(frozen=True)
class Tried:
    "A mutant and what became of it."

    mutant: Mutant
    outcome: str  # survived, killed, late, import (not importable) or equivalent
    was: str
    now: str
    log: str = ""


class _Jobs:
    "Mutants while there is time, and before the next of them the controls that are due."

    def __init__(self, tree, chosen, seconds):
        self.tree, self.known, self.due = tree, equivalent(), []
        end = time.monotonic() + seconds
        self.chosen = takewhile(lambda _: time.monotonic() < end, chosen)

    def __iter__(self):
        return self

    def __next__(self):
        mutant, last = self.due.pop() if self.due else (next(self.chosen), None)
        return (mutant, last), *self.tree.attempt(mutant, self.known, last)


def try_out(tree, chosen, seconds, workers=1):
    """Try mutants until the time is over; yields what became of each, in the order in which
    they end. The tests that a killed one met, up to the one that failed, run again without the
    change; raises Failed if one fails then, which it does in this order alone."""
    names = {0: "survived", 3: "import", 5: "equivalent", None: "late"}
    jobs = _Jobs(tree, chosen, seconds)
    for (mutant, last), code, log in side_by_side(jobs, workers):
        said, _, log = log.partition("\n")
        if mutant.operator == CONTROL:
            if code != 0:
                raise Failed(
                    f"tests of {mutant.module} up to {last} fail in another order, without any "
                    f"change:\n{log[-3000:]}"
                )
            continue
        failed = log.removesuffix("\n").rpartition("\n")[2]  # "" if no test was met
        if code == 1 and failed and not tree.in_order:  # as they stand they passed before
            jobs.due.append((Mutant(mutant.module, CONTROL, 0, mutant.line), failed))
        yield Tried(mutant, names.get(code, "killed"), *json.loads(said), log)


def report(found):
    "Lines of the result, and the score of those that count: (lines, killed, counted)."
    table, lines = {}, []
    for x in found:
        table.setdefault(x.mutant.module, Counter())[x.outcome] += 1
    killed = lambda c: c["killed"] + c["late"]
    for module, c in sorted(table.items()):
        lines.append(
            f"{module:22} {killed(c):4} of {killed(c) + c['survived']:4} killed, "
            f"{c['equivalent']} equivalent, {c['import']} not importable"
        )
    total = sum(table.values(), Counter())
    k, n = killed(total), killed(total) + total["survived"]
    if n:
        low, high = interval(k, n)
        lines.append(
            f"score {k / n:.1%} of {n} mutants (95 % interval {low:.1%} to {high:.1%}), "
            f"{total['equivalent']} equivalent, {total['import']} not importable"
        )
    return lines, k, n


def survivors(path, tree):
    "The mutants that survived in a file of `--out`, found again by what they change."
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    wanted = Counter(
        (x["module"], x["operator"], x["was"], x["now"])
        for x in rows
        if x["outcome"] == "survived"
    )
    wanted_at = {x[:3] for x in wanted}
    for name in sorted({x[0] for x in wanted}):
        source = tree.sources[name]
        held = {  # the innermost statement of a line comes last
            line: head(x)
            for x in ast.walk(ast.parse(source))
            if isinstance(x, ast.stmt | ast.ExceptHandler)
            for line in range(x.lineno, x.end_lineno + 1)
        }
        for mutant in mutants(name, source):
            if (name, mutant.operator, held.get(mutant.line)) not in wanted_at:
                continue  # making the change takes longer than all the rest
            key = (name, mutant.operator, *change(source, mutated(mutant, source), mutant.line))
            if wanted[key]:
                wanted[key] -= 1
                yield mutant
    if gone := +wanted:
        print(
            f"{sum(gone.values())} survivors of {path} change code that is not there any more",
            flush=True,
        )


def run(args):
    "Copy the tree, draw mutants, try them, and print; returns the last line. Raises Failed."
    out, again = (x and Path(x).resolve() for x in (args.out, args.retry))
    with tempfile.TemporaryDirectory(prefix="turboquant-mutants-") as folder:
        copy_tree(Path(folder))
        tree = prepared(Path(folder), "turboquant_nb")
        tree.given = args.tests or ()
        if lost := [x for x in tree.given if not (tree.root / x).is_file()]:
            raise Failed(f"--tests must name files of tests from the root, got {lost[0]}")
        if again:
            pool = list(survivors(again, tree))
        else:
            chosen = named(args.module, tree.sources)
            pool = [m for name in chosen for m in mutants(name, tree.sources[name])]
        if not args.all:
            random.Random(args.seed).shuffle(pool)
        begin = time.monotonic()
        tree.measure(
            sorted({m.module for m in pool[: args.most]}, key=list(tree.sources).index),
            args.workers,
            args.suite,
            args.in_order,
        )
        print(
            f"{len(tree.observed)} files of tests observed in {time.monotonic() - begin:.0f} s",
            flush=True,
        )
        found = []
        for x in try_out(tree, pool[: args.most], args.seconds, args.workers):
            found.append(x)
            if out:
                with out.open("a", encoding="utf-8") as f:
                    f.write(
                        json.dumps(
                            asdict(x.mutant)
                            | {
                                "outcome": x.outcome,
                                "was": x.was,
                                "now": x.now,
                                "seconds": round(time.monotonic() - begin),
                            }
                        )
                        + "\n"
                    )
            if x.outcome == "survived":
                print(
                    f"survived {x.mutant.module}.py:{x.mutant.line} ({x.mutant.operator})\n    "
                    f"- {x.was}\n    + {x.now}",
                    flush=True,
                )
        lines, *_ = report(found)
        print("\n".join(lines) or "no mutant was tried")
        os.chdir("/")
        return (
            f"{lines[-1]}; {len(found)} of {len(pool)} tried, seed {args.seed}"
            if lines
            else "no mutant was tried"
        )


def named(wanted, known):
    "The modules that were asked for, by wing/name or the name alone; all where none was."
    found = [x for x in known if not wanted or {x, x.rpartition("/")[2]} & {*wanted}]
    if not found:
        raise Failed(f"--module must be among {', '.join(known)}, got {', '.join(wanted)}")
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        metavar="S",
        help="begin no further mutant after so many (default: 600)",
    )
    parser.add_argument("--most", type=int, metavar="N", help="try at most so many")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="mutants tried at the same time (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order in which mutants are drawn"
    )
    parser.add_argument(
        "--module", action="append", metavar="NAME", help="only this module (may be repeated)"
    )
    parser.add_argument(
        "--suite",
        action="store_true",
        help="a mutant meets the tests of all files that enter its function",
    )
    parser.add_argument(
        "--in-order",
        action="store_true",
        help="run a module's own tests as they stand, unobserved: for files that take minutes",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="FILE",
        help="these files alone instead of a module's own: what they miss counts as missed",
    )
    parser.add_argument(
        "--all", action="store_true", help="in the order of the file instead of drawn"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="append a line of JSON for each mutant that was tried"
    )
    parser.add_argument(
        "--retry", metavar="FILE", help="only those that survived in a file of --out"
    )
    parser.add_argument(
        "--list", action="store_true", help="count the mutants of each module and stop"
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help=f"drop from {EQUIVALENT.name} what no module says any more, and stop",
    )
    args = parser.parse_args(argv)
    if args.suite and args.in_order:
        parser.error("--suite needs to observe what tests enter; --in-order does not")
    try:
        if args.list or args.prune:
            root = SCRIPTS.parents[1]
            sources = {
                name: (root / "turboquant_nb" / f"{name}.py").read_text(encoding="utf-8")
                for name in modules(root / "turboquant_nb")
            }
            if args.prune:
                print(f"{prune(sources)} changes are not listed any more")
                return 0
            for name in named(args.module, sources):
                files = " ".join(x.stem for x in tests_of(name, root / "tests"))
                count = sum(1 for _ in mutants(name, sources[name]))
                print(f"{name:22} {count:5}   tests: {files}")
            return 0
        print(run(args))
    except Failed as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
