#!/usr/bin/env python3
"""Every message of an error in the package: python -m tests.golden.messages writes
messages.json.

A message is what follows `raise X(`, or a sentence of a function that says why something is not
served. Of an f-string its words count and not its expressions, which are written as {}."""

import ast
import json
import re
from pathlib import Path

import turboquant_nb

PACKAGE = Path(turboquant_nb.__file__).parent
FILE = Path(__file__).parent / "messages.json"
SAYS_WHY = re.compile(r"why|reason|refus|support")


def skeleton(node):
    "The text of a string, an f-string or a sum of them; None for anything else."
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [skeleton(node.left), skeleton(node.right)]
        if any(parts):
            return "".join("{}" if x is None else x for x in parts)
    return None


def strings(tree):
    "All strings below a node, the longest sums and f-strings whole."
    found, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if (text := skeleton(node)) is None:
            waiting += ast.iter_child_nodes(node)
        else:
            found.add(text)
    return found


def is_sentence(text):
    words = re.findall(r"[A-Za-z]{2,}", text.replace("{}", " "))
    return len(words) >= 3 and len(" ".join(words)) >= 12


def messages(tree):
    "The messages of one module."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                found |= strings(argument)
        if isinstance(node, ast.FunctionDef) and SAYS_WHY.search(node.name):
            lines = [x for x in ast.walk(node) if isinstance(x, (ast.Return, ast.Assign))]
            found |= {text for x in lines if x.value for text in strings(x.value)}
    return {text for text in found if is_sentence(text)}


def modules():
    "(name, syntax tree) of every module of the package."
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def main():
    found = {name: sorted(messages(tree)) for name, tree in modules()}
    found = {name: x for name, x in found.items() if x}
    FILE.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{sum(map(len, found.values()))} messages of {len(found)} modules")


if __name__ == "__main__":
    main()
