#!/usr/bin/env python3
"""Change the code on purpose, one small thing at a time, and see whether the tests notice.

    python scripts/tools/mutants.py --seconds 600              a sample of the core modules' mutants
    python scripts/tools/mutants.py --module rates --seed 1    another sample, of one module
    python scripts/tools/mutants.py --all --module rope        every mutant of a module
    python scripts/tools/mutants.py --list                     how many mutants each module has

cosmic-ray makes the mutants (pip install -c constraints.txt ".[mutants]"). It would start a process for each, and importing torch takes longer
than most tests; here one process imports the libraries once and forks for each mutant, so some hundred run in ten minutes.
A mutant is killed if a test of its own module's files (MODULES) fails, or runs much longer than it should. What cannot be
imported at all does not count. A survivor is either a test that is missing or a change that nothing can see (`x < 0` for
`x <= 0` where both give the same): those are listed, with the reason, in mutants_equivalent.txt, and count no more."""
import argparse
import importlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
EQUIVALENT = SCRIPTS / "mutants_equivalent.txt"
MODULES = {  # module -> the tests that have to notice
    "codebook": "codebook survivors", "rotation": "rotation", "rope": "rope", "quantizer": "quantizer survivors", "qjl": "qjl", "residual": "residual",
    "rates": "rates survivors", "packing": "packing", "store": "store survivors", "attention": "attention",
}
SWAPS = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitAnd_BitOr BitOr_BitXor LShift_RShift RShift_LShift".split()
COMPARISONS = "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE Gt_LtE Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is".split()
OTHERS = "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue NumberReplacer ZeroIterationForLoop".split()
UNARY = "USub_UAdd Delete_Not".split()
PRELOAD = "numpy scipy.integrate scipy.optimize scipy.special scipy.stats safetensors.torch torch triton transformers hypothesis _pytest.assertion.rewrite".split()
KEEPS_KIND = ("abs", "ceil", "clamp", "clip", "clone", "floor", "flip", "round", "sort", "sqrt")  # x.f(...) and x are of one kind


def place(folder, name):
    "The file of a module or a test, in whatever wing it is. Raises Failed unless there is one."
    found = sorted(folder.rglob(f"{name}.py"))
    found = [x for x in found if x.parent.name not in ("kernels", "hf", "esm", "cli")] if len(found) > 1 else found
    if len(found) != 1:
        raise Failed(f"{folder.name} must have one file {name}.py, got {len(found)}")
    return found[0]


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
                    is_call = name.type == call.type == "trailer" and name.children[0] == "." and call.children[0] == "("
                    if is_call and name.children[1].value in KEEPS_KIND and getattr(node.children[0], "value", "") not in ("torch", "math", "np"):
                        yield i

        def mutation_positions(self, node):
            yield from ((node.children[i].start_pos, node.children[i + 1].end_pos) for i in self._calls(node))

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
        raise Failed(f'cosmic-ray makes the mutants ({error}): pip install -c constraints.txt ".[mutants]"') from error
    names = [f"ReplaceBinaryOperator_{x}" for x in SWAPS] + [f"ReplaceComparisonOperator_{x}" for x in COMPARISONS] + [f"ReplaceUnaryOperator_{x}" for x in UNARY]
    theirs = OperatorProvider()
    return {name: theirs[name]() for name in names + OTHERS} | {name: x() for name, x in own_operators().items()}


@dataclass(frozen=True)
class Mutant:
    "One place of a module, and what is done there."

    module: str
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
        places = ((node, start[0]) for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        yield from (Mutant(module, name, i, line) for i, (node, line) in enumerate(places) if not is_message(node))


def mutated(mutant, source):
    "The module's source with that one change."
    from cosmic_ray.mutating import mutate_code

    return mutate_code(source, operators()[mutant.operator], mutant.occurrence)


def change(old, new):
    "The first line that differs: (as it was, as it is)."
    pairs = zip([*old.splitlines(), ""], [*new.splitlines(), ""])
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))


def equivalent():
    "(module, as it was, as it is) of the changes that nothing can see."
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    rows = [[x.strip() for x in line.split(" || ")] for line in lines if line.strip() and not line.startswith("#")]
    if wrong := [row for row in rows if len(row) != 4]:
        raise Failed(f"{EQUIVALENT.name}: expected `module || as it was || as it is || why`, got {wrong[0]}")
    return {tuple(row[:3]) for row in rows}


# ---------------------------------------------------------------- how it is tried

@dataclass
class Tree:
    "A copy of the repository, the package's sources, and how long the tests of each module take."

    root: Path
    package: str

    def __post_init__(self):
        self.seconds, self.log = {}, self.root / "mutant.log"
        self.sources = {name: self.path(name).read_text(encoding="utf-8") for name in MODULES}

    def path(self, module):
        return place(self.root / self.package, module)

    def outcome(self, module, source):
        "survived, killed, late or import, of the module with this source; unmutated it must survive."
        self.path(module).write_text(source, encoding="utf-8")
        try:
            return self._forked(module, 10 + 4 * self.seconds.get(module, 150))
        finally:
            self.path(module).write_text(self.sources[module], encoding="utf-8")

    def measure(self, module):
        "Run the tests of a module as it is."
        if module not in self.seconds:
            begin = time.monotonic()
            said = self.outcome(module, self.sources[module])
            if said != "survived":
                raise Failed(f"the tests of {module} do not pass without any change ({said}):\n{self.log.read_text(errors='replace')[-3000:]}")
            self.seconds[module] = time.monotonic() - begin

    def _forked(self, module, limit):
        child = os.fork()
        if not child:
            self._try(module)
        end = time.monotonic() + limit
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return {0: "survived", 3: "import"}.get(code, "killed")
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "late"

    def _try(self, module):
        "In the child: import the module, run its tests, and end."
        code = 4
        try:
            os.setsid()
            out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            os.chdir(self.root)
            try:
                path = place(self.root / self.package, module)
                importlib.import_module(".".join(path.relative_to(self.root).with_suffix("").parts))
            except Exception as error:  # noqa: BLE001
                print(f"not importable: {error!r}")
                code = 3
            else:
                import pytest

                files = [str(place(self.root / "tests", f"test_{name}")) for name in MODULES[module].split()]
                code = 1 if pytest.main([*files, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]) else 0
        finally:
            sys.stdout.flush()
            os._exit(code)


def prepared(root, package):
    "The tree, with the libraries imported and its package first on the path."
    if not hasattr(os, "fork"):
        raise Failed("mutants need a system that can fork")
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
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


def try_out(tree, chosen, seconds):
    "Try mutants until the time is over; yields (mutant, outcome, as it was, as it is)."
    known, end = equivalent(), time.monotonic() + seconds
    for mutant in chosen:
        if time.monotonic() > end:
            return
        source = tree.sources[mutant.module]
        new = mutated(mutant, source)
        was, now = change(source, new)
        if (mutant.module, was, now) in known:
            yield mutant, "equivalent", was, now
            continue
        tree.measure(mutant.module)
        yield mutant, tree.outcome(mutant.module, new), was, now


def report(found):
    "Lines of the result, and the score of those that count: (lines, killed, counted)."
    table, lines = {}, []
    for mutant, said, *_ in found:
        table.setdefault(mutant.module, Counter())[said] += 1
    killed = lambda c: c["killed"] + c["late"]
    for module, c in sorted(table.items()):
        lines.append(f"{module:10} {killed(c):4} of {killed(c) + c['survived']:4} killed, {c['equivalent']} equivalent, {c['import']} not importable")
    total = sum(table.values(), Counter())
    k, n = killed(total), killed(total) + total["survived"]
    if n:
        low, high = interval(k, n)
        lines.append(f"score {k / n:.1%} of {n} mutants (95 % interval {low:.1%} to {high:.1%}), {total['equivalent']} equivalent, {total['import']} not importable")
    return lines, k, n


def run(seconds, seed=0, modules=(), everything=False):
    "Copy the tree, draw mutants, try them, and print; returns the last line. Raises Failed."
    sys.path.insert(0, str(SCRIPTS))
    from preview_docs import copy_tree

    with tempfile.TemporaryDirectory(prefix="turboquant-mutants-") as folder:
        copy_tree(Path(folder))
        tree = prepared(Path(folder), "turboquant_nb")
        pool = [m for name in modules or MODULES for m in mutants(name, tree.sources[name])]
        if not everything:
            random.Random(seed).shuffle(pool)
        found = []
        for mutant, said, was, now in try_out(tree, pool, seconds):
            found.append((mutant, said))
            if said == "survived":
                print(f"survived {mutant.module}.py:{mutant.line} ({mutant.operator})\n    - {was}\n    + {now}", flush=True)
        lines, *_ = report(found)
        print("\n".join(lines) or "no mutant was tried")
        return f"{lines[-1]}; {len(found)} of {len(pool)} tried, seed {seed}" if lines else "no mutant was tried"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="begin no further mutant after so many (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which mutants are drawn")
    parser.add_argument("--module", action="append", choices=list(MODULES), metavar="NAME", help="only this module (may be repeated)")
    parser.add_argument("--all", action="store_true", help="in the order of the file instead of drawn")
    parser.add_argument("--list", action="store_true", help="count the mutants of each module and stop")
    args = parser.parse_args(argv)
    try:
        if args.list:
            for name in MODULES:
                source = place(SCRIPTS.parents[1] / "turboquant_nb", name).read_text(encoding="utf-8")
                print(f"{name:10} {sum(1 for _ in mutants(name, source)):5}   tests: {MODULES[name]}")
            return 0
        print(run(args.seconds, args.seed, args.module or (), args.all))
    except Failed as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
