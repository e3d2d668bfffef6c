#!/usr/bin/env python3
"""Let the site's search find public names: search_names.py SITE, after Quarto has rendered it.

Quarto's index has an entry for a page and for each of its sections of the second level; the
section of a public name is of the third, so a search for `TurboQuantCache` leads to the chapter
and not to the class. This adds an entry for each public function, class and method with a
section of its own: its name, the first sentence of its documentation, the page it stands on.
Running it again changes nothing. Exit 1 for a name that has no section."""

import argparse
import ast
import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "turboquant_nb").is_dir():  # the tests run beside a wheel
    ROOT = Path(importlib.util.find_spec("turboquant_nb").origin).parents[1]


def public_names(root=ROOT):
    """(name, page.html#anchor, first sentence of its documentation) of everything public;
    methods as Class.method."""
    index = runpy.run_path(str(root / "turboquant_nb" / "_modidx.py"))["d"]
    for module, symbols in index["syms"].items():
        path = root.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        documented = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                documented[node.name] = ast.get_docstring(node) or ""
                if isinstance(node, ast.ClassDef):
                    documented |= {
                        f"{node.name}.{x.name}": ast.get_docstring(x) or ""
                        for x in node.body
                        if isinstance(x, ast.FunctionDef)
                    }
        for symbol, (where, _) in symbols.items():
            name = symbol.removeprefix(f"{module}.")
            if not any(part.startswith("_") for part in name.split(".")):
                text = " ".join(
                    (documented.get(name) or documented.get(name.split(".")[-1]) or "").split()
                )
                yield name, where, re.split(r"(?<=\.) ", text)[0]


def anchors(page):
    "The ids of a rendered page."
    return (
        set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))
        if page.is_file()
        else set()
    )


def entries(site, root=ROOT):  # ([entry], [name of a function or class without a section])
    """What is added to the index; methods without a section of their own are left to their
    class."""
    found, missing, ids = [], [], {}
    for name, where, text in public_names(root):
        page, _, anchor = where.partition("#")
        if page not in ids:
            ids[page] = anchors(site / page)
        if anchor in ids[page]:
            found.append(
                {
                    "objectID": where,
                    "href": where,
                    "title": page.removesuffix(".html"),
                    "section": name,
                    "text": text,
                }
            )
        elif "." not in name:
            missing.append(f"{name} ({where})")
    return found, missing


def add_names(index, new):
    """Quarto's index with the new entries, under the titles that pages have there; those that
    were added before are replaced."""
    pages = {e["href"]: e for e in index if "#" not in e["href"]}
    known = {e["href"] for e in new}
    out = [e for e in index if e["href"] not in known]
    for e in new:
        page = pages.get(e["href"].partition("#")[0], {})
        out.append(e | {k: page[k] for k in ("title", "crumbs") if k in page})
    return out


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "site", type=Path, help="the rendered site, which has Quarto's search.json"
    )
    site = parser.parse_args(argv).site
    file = site / "search.json"
    if not file.is_file():
        sys.exit(f"{file} is not there; render the site with Quarto first")
    new, missing = entries(site)
    if missing:
        sys.exit("no section for " + ", ".join(missing))
    file.write_text(
        json.dumps(
            add_names(json.loads(file.read_text(encoding="utf-8")), new),
            ensure_ascii=False,
            indent=2,
        ),
        encoding="utf-8",
    )
    print(f"{len(new)} names can be searched for")
    return 0


if __name__ == "__main__":
    sys.exit(main())
