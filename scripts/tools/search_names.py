#!/usr/bin/env python3
"""Write the index of the site's search: search_names.py SITE, after Quarto has rendered it.

Quarto's own index holds all code, 1.1 MB compressed, and puts a chapter whose title has the
word above the guide that answers. This one has an entry for each page and each section of the
second level with its prose, in the form that Quarto's script reads, and `rank`, the shelf of
the page: 0 the Manual, 1 what teaches or shows results, 2 how it is built. site.js lists what
is found by it. The section of a public name is of the third level: each function, class and
method with one gets an entry too, with the first sentence of its documentation. Running it
again changes nothing. Exit 1 for a name that has no section."""

import argparse
import ast
import gzip
import importlib.util
import json
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebooks import VOID, page_name, site_map

ROOT = TREE = Path(__file__).resolve().parents[2]
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
            found.append({"objectID": where, "href": where, "section": name, "text": text})
        elif "." not in name:
            missing.append(f"{name} ({where})")
    return found, missing


RANKS = {"manual": 0, "built": 2}  # of shelves; any other is 1


class Sections(HTMLParser):
    """[id, heading, words] of a page and of its sections of the second level. Source code and
    formulas are left out, and what cells printed unless `outputs`."""

    def __init__(self, text, outputs):
        super().__init__(convert_charrefs=True)
        self.found, self.stack, self.outputs, self.title = [["", "", []]], [], outputs, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        classes = (attrs.get("class") or "").split()
        if tag in VOID:
            return
        left_out = (
            tag in ("script", "style", "nav", "math", "summary", "button")
            or {"sourceCode", "math"} & set(classes)
            or (tag == "pre" and not self.outputs)
        )
        self.stack.append((tag, "left out" if left_out else ""))
        if "level2" in classes and attrs.get("id"):
            self.found.append([attrs["id"], "", []])

    def handle_endtag(self, tag):
        if any(tag == name for name, _ in self.stack):
            while self.stack.pop()[0] != tag:
                pass

    def handle_data(self, data):
        tags = [tag for tag, _ in self.stack]
        if "main" not in tags or any(why for _, why in self.stack):
            return
        if "h1" in tags:
            self.title += data
        elif "h2" in tags:
            self.found[-1][1] += data
        else:
            self.found[-1][2].append(data)


def index_of(site, root=ROOT):
    """(all entries of the index in their order, [name of a function or class without a
    section]) of a rendered site."""
    names, missing = entries(site, root)
    out = []
    pages = [
        (RANKS.get(shelf, 1), page_name(href), [x for x in (section, text) if x])
        for shelf, sections in site_map(TREE)[1].items()
        for section, items in sections
        for text, href in items
    ]
    for rank, page, crumbs in pages:
        if not (site / page).is_file():
            continue
        read = Sections((site / page).read_text(encoding="utf-8"), outputs=rank == 0)
        same = {"title": " ".join(read.title.split()), "crumbs": crumbs, "rank": rank}
        for anchor, heading, words in read.found:
            address = f"{page}#{anchor}" if anchor else page
            out.append(
                {"objectID": address, "href": address, "section": " ".join(heading.split())}
                | {"text": " ".join("".join(words).split())}
                | same
            )
        for e in names:
            if e["href"].partition("#")[0] == page:
                out.append(e | same)
    return out, missing


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path, help="the rendered site")
    site = parser.parse_args(argv).site
    index, missing = index_of(site)
    if not index:
        sys.exit(f"{site} has no pages; render the site first")
    if missing:
        sys.exit("no section for " + ", ".join(missing))
    text = json.dumps(index, ensure_ascii=False)
    (site / "search.json").write_text(text, encoding="utf-8")
    size = len(gzip.compress(text.encode())) // 1000
    print(f"{len(index)} sections and names can be searched for, {size} KB compressed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
