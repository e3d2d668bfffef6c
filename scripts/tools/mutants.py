#!/usr/bin/env python3
"""Change the code on purpose, one small thing at a time, and see whether the tests notice.

    python scripts/tools/mutants.py --seconds 600            a sample of all mutants
    python scripts/tools/mutants.py --module rates --seed 1  another sample, of one module
    python scripts/tools/mutants.py --workers 16 --out x.jsonl    sixteen at a time, a line of
                                                             JSON for each; the same again,
                                                             after a test was added, tries
                                                             those that survived
    python scripts/tools/mutants.py --tests tests/a.py --out x.jsonl    those against other
                                                             files of tests

cosmic-ray makes the mutants (pip install -c constraints.txt ".[mutants]"). Each is written into
a copy of the tree, where it meets the files of tests of its own module (`tests_of`), up to the
first test that fails, and then the notebook that the changed cell comes from. It is killed if
one of them fails or runs much longer than it should. All of them run first without a change,
and must pass. Kernels run in Triton's interpreter. What cannot be imported at all does not
count. A survivor is either a test that is missing or a change that nothing can see (`x < 0` for
`x <= 0` where both give the same): those are listed, with the reason, in
mutants_equivalent.txt, by the statement that is changed and not by how it is laid out, and
count no more."""

import argparse
import ast
import json
import os
import queue
import random
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebooks import text_of
from preview_docs import copy_tree
from processes import ended

EQUIVALENT = Path(__file__).with_name("mutants_equivalent.txt")
PACKAGE = "turboquant_nb"
LEFT_OUT = {"kernels/decode_mma": "Gluon, in which it is written, has no interpreter"}
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
# x.f(...) and x are of one kind
KEEPS_KIND = "abs ceil clamp clip clone floor flip round sort sqrt".split()


def modules(package):
    "The modules that are changed, as wing/name, or by name alone."
    found = (p.relative_to(package).with_suffix("") for p in sorted(package.rglob("*.py")))
    return [p.as_posix() for p in found if not p.name.startswith("_")]


def tests_of(module, tests):
    """The files of tests that have to notice a change of a module: its own, or else those of
    its wing that import it, or else all that do, or else all of its wing; and what is
    promised. Of the wings in `WHOLE` all, those that have its name first."""
    wing, _, name = module.rpartition("/")
    above = wing or PACKAGE
    imports = re.compile(rf"\b{above}\.{name}\b|\b{above} import [^\n]*\b{name}\b")
    whole, wing = wing in WHOLE, wing or GROUND
    all_of = sorted((tests / wing).glob("test_*.py"), key=lambda path: name not in path.stem)
    using = [
        x for x in sorted(tests.rglob("test_*.py")) if imports.search(x.read_text("utf-8"))
    ]
    own = [x for x in all_of if x.stem in (f"test_{name}", f"test_{name}_kernel")]
    found = [] if whole else own or [x for x in all_of if x in using] or using
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


# ---------------------------------------------------------------- how it is tried


def home(path, source, line):
    "The notebook that a line of a module comes from."
    above = "\n".join(source.splitlines()[:line])
    return (path.parent / re.findall(r"^# %% (\S+\.ipynb) #", above, re.M)[-1]).resolve()


@contextmanager
def written(path, source, new, notebook):
    """While this lasts a module is `new`, and the cell of the notebook that its change comes
    from is so, too."""
    cells = (re.split(r"^# %% .*$", x, flags=re.M) for x in (source, new))
    was, now = next((a.strip(), b.strip()) for a, b in zip(*cells) if a != b)
    text = notebook.read_text(encoding="utf-8")
    held = json.loads(text)
    for cell in held["cells"]:
        cell["source"] = text_of(cell["source"]).replace(was, now)
    path.write_text(new, encoding="utf-8")
    notebook.write_text(json.dumps(held), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")
        notebook.write_text(text, encoding="utf-8")


@dataclass
class Trial:
    "What mutants meet, and how long that takes without a change."

    root: Path  # a copy of the tree
    given: tuple = ()  # files of tests that were named instead of a module's own

    def __post_init__(self):
        self.seconds = {}  # {command: seconds it took}
        self.known = equivalent()
        package = self.root / PACKAGE
        names = modules(package)
        self.sources = {x: (package / f"{x}.py").read_text(encoding="utf-8") for x in names}

    def path(self, module, root):
        return root / PACKAGE / f"{module}.py"

    def commands(self, mutant):
        "What a mutant meets, as words of commands."
        path, source = self.path(mutant.module, self.root), self.sources[mutant.module]
        tests = [self.root / x for x in self.given] or tests_of(
            mutant.module, self.root / "tests"
        )
        files = (x.relative_to(self.root).as_posix() for x in tests)
        yield "-m", "pytest", "-xq", "-p", "no:cacheprovider", *files
        if not self.given:
            notebook = home(path, source, mutant.line).relative_to(self.root)
            tool = "scripts/tools/test_notebooks.py"
            yield tool, "--n_workers", "0", "--path", notebook.as_posix()

    def ended(self, command, root, seconds):
        "(exit status, None if late; what was printed) of a command in a copy of the tree."
        env = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        env |= {"PYTHONPATH": path, "MPLBACKEND": "agg"}
        return ended((sys.executable, *command), seconds, cwd=root, env=os.environ | env)

    def measure(self, command, root):
        "Run a command without a change. Raises Failed if it does not pass."
        begin = time.monotonic()
        status, said = self.ended(command, root, 3600)
        if status != 0:  # None: it takes an hour
            raise Failed(f"{command[-1]} fails without any change:\n{said[-3000:]}")
        self.seconds[command] = time.monotonic() - begin

    def became(self, mutant, command, root):
        "What becomes of a mutant that is written there when it meets a command."
        status, _ = self.ended(command, root, 20 + 3 * self.seconds[command])
        module = ".".join((PACKAGE, *mutant.module.split("/")))
        if status is None:
            return "late"
        # pytest's answer where something could not be imported
        if status == 2 and self.ended(("-c", f"import {module}"), root, 60)[0]:
            return "import"
        if status:
            return "elsewhere" if self.given else "killed"
        return "survived"

    def tried(self, mutant, root):
        "(outcome, the statement as it was, as it is) of a mutant."
        source = self.sources[mutant.module]
        new = mutated(mutant, source)
        try:
            was, now = change(source, new, mutant.line)
        except SyntaxError as error:  # `not x := y`
            return "import", "", f"not Python: {error}"
        # the second: 1e38 + 1 is written `1e+38`
        same = ast.dump(ast.parse(new)) == ast.dump(ast.parse(source))
        if same or (mutant.module, was, now) in self.known:
            return "equivalent", was, now
        path = self.path(mutant.module, root)
        with written(path, source, new, home(path, source, mutant.line)):
            met = (self.became(mutant, x, root) for x in self.commands(mutant))
            return next((x for x in met if x != "survived"), "survived"), was, now


def interval(k, n):
    "Wilson's 95 % interval of k out of n."
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def score(outcomes) -> str:
    "How many of those that count were killed."
    became = Counter(outcomes)
    killed = became["killed"] + became["late"] + became["elsewhere"]
    n = killed + became["survived"]
    if not n:
        return "no mutant was tried"
    low, high = interval(killed, n)
    return (
        f"score {killed / n:.1%} of {n} mutants (95 % interval {low:.1%} to {high:.1%}), "
        f"{became['equivalent']} equivalent, {became['import']} not importable"
    )


def pool_of(args, sources):
    "The mutants of the modules that were asked for, in the order in which they are drawn."
    names = {x: {x, x.rpartition("/")[2]} for x in sources}
    chosen = [x for x in sources if x not in LEFT_OUT and not args.module]
    chosen += [x for x in sources if names[x] & {*args.module}]
    if not chosen:
        raise Failed(
            f"--module must be among {', '.join(sources)}, got {', '.join(args.module)}"
        )
    pool = [m for name in chosen for m in mutants(name, sources[name])]
    random.Random(args.seed).shuffle(pool)
    return pool[: args.most]


def run(args, folder):
    "Draw mutants, try them in copies of the tree, print and keep what became of each."
    roots = queue.SimpleQueue()
    for i in range(args.workers):
        copy_tree(folder / str(i))
        roots.put(folder / str(i))
    trial = Trial(folder / "0", tuple(args.tests))
    end, out = time.monotonic() + args.seconds, args.out and Path(args.out)
    lines = out.read_text(encoding="utf-8").splitlines() if out and out.exists() else []
    place = lambda x: (x["module"], x["operator"], x["occurrence"])
    known = {place(x): x["outcome"] for x in map(json.loads, lines)}
    pool = [
        m
        for m in pool_of(args, trial.sources)
        if known.get(place(asdict(m)), "survived") == "survived"
    ]

    def within(work, what):
        root = roots.get()
        try:
            return work(what, root)
        finally:
            roots.put(root)

    def tried(mutant):
        if time.monotonic() < end:
            return mutant, *within(trial.tried, mutant)
        return mutant, None, "", ""

    outcomes = []
    with ThreadPoolExecutor(args.workers) as threads:
        commands = dict.fromkeys(x for mutant in pool for x in trial.commands(mutant))
        for _ in threads.map(lambda x: within(trial.measure, x), commands):
            pass
        for mutant, outcome, was, now in threads.map(tried, pool):
            if outcome is None:
                continue
            outcomes.append(outcome)
            row = asdict(mutant) | {"outcome": outcome, "was": was, "now": now}
            if out:
                with out.open("a", encoding="utf-8") as f:
                    f.write(json.dumps(row) + "\n")
            if outcome == "survived":
                where = f"{mutant.module}.py:{mutant.line} ({mutant.operator})"
                print(f"survived {where}\n    - {was}\n    + {now}", flush=True)
    print(f"{score(outcomes)}; {len(outcomes)} of {len(pool)} tried, seed {args.seed}")


def main(argv=None):
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=600, help="begin no further mutant after")
    p.add_argument("--most", type=int, default=60, help="mutants that are drawn")
    p.add_argument("--workers", type=int, default=1, help="mutants at the same time")
    p.add_argument("--seed", type=int, default=0, help="with which mutants are drawn")
    p.add_argument("--module", nargs="+", default=(), help="of these modules alone")
    p.add_argument("--tests", nargs="+", default=(), help="instead of a module's own files")
    p.add_argument("--out", metavar="FILE", help="append a line of JSON for each")
    args = p.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="turboquant-mutants-") as folder:
            run(args, Path(folder))
    except Failed as error:
        sys.exit(f"mutants: {error}")


if __name__ == "__main__":
    main()
