#!/usr/bin/env python3
"""Make a rendered site its own: finish_pages.py SITE, after Quarto has rendered it.

nbdev links names in backticks also in the comments of a signature, where Markdown is code: a
link is made there. For a page with an output in HTML Quarto loads require.js and jQuery from
another host; nothing here uses them. The picture of Colab's badge lies on Colab's host; its
text takes its place. A link to a definition gets the number of its line. Then each page is
read: it may load nothing of another host. What a first visit of the heaviest pages loads is
printed; the limit of 600 KB, compressed, is held by preview_docs.py, where Quarto's own theme
is not counted. Running it again changes nothing. Exit 1 with a list if a page loads from
another host."""

import argparse
import gzip
import posixpath
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebooks import settings, site_address

ROOT = Path(__file__).resolve().parents[2]
MAX_PAGE = 600_000  # bytes of a first visit
TEXT = {".html", ".css", ".js", ".svg", ".json"}  # what a server sends compressed
NEVER = re.compile(
    r"\.ttf|KaTeX_(?:Fraktur|Script|SansSerif-(?:Bold|Italic)|\w+-BoldItalic|Caligraphic-Bold)"
)
LOADS = {"rel": {"stylesheet", "icon", "preload", "modulepreload", "prefetch"}}


def with_line(found):
    "The address of a definition in a file of the repository, which ends in its line."
    start, path, name = found.groups()
    if re.fullmatch(r"L\d+", name):
        return found[0]
    code = read(ROOT / path).splitlines()
    defined = re.compile(rf"(?:class |def |(?:\w+, )*){name}\b")
    return f"{start}{path}#L{next(i for i, x in enumerate(code, 1) if defined.match(x))}"


def finish(text, address, up=""):
    """A rendered page without what it would ask other hosts for. `address` is the published
    site's, `up` leads from the page to its folder."""
    text = re.sub(r"<img\b[^>]*/colab-badge\.svg[^>]*>", "Open in Colab", text)
    foreign = r'src="https?://[^"]*/(?:require|jquery)(?:\.min)?\.js"'
    text = re.sub(rf"<script\b[^>]*{foreign}[^>]*></script>\s*", "", text)
    text = re.sub(r"<script\b[^>]*>\s*define\('jquery'.*?</script>\s*", "", text, flags=re.S)

    def link(found):
        name, to = found.groups()
        if to.partition("#")[2].startswith("_"):  # private: no page shows it
            return name
        return f'<a href="{to.replace(address, up, 1)}">{name}</a>'

    def linked(block):
        return re.sub(r"\[`([^`\]]+)`\]\((https?://[^\s()]+)\)", link, block[0])

    text = re.sub(r"<pre\b.*?</pre>", linked, text, flags=re.S)
    return re.sub(r'(?<=")(\S+/blob/\w+/)(\w[\w/]*\.py)#([A-Za-z_]\w*)(?=")', with_line, text)


class Loads(HTMLParser):
    "What a browser fetches for a page: addresses, as the page names them."

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.style = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs, self.style = dict(attrs), tag == "style"
        if tag == "link" and set((attrs.get("rel") or "").split()) & LOADS["rel"]:
            self.found.append(attrs.get("href") or "")
        if tag in {"script", "img", "iframe", "embed", "source", "video", "audio", "track"}:
            self.found.append(attrs.get("src") or "")
        self.found += in_style(attrs.get("style") or "")

    def handle_data(self, data):
        if self.style:
            self.found += in_style(data)


def in_style(text):
    """What a style sheet fetches: of the formats of a font the one that browsers take, and no
    font of KaTeX whose letters no formula has."""
    found = re.findall(r"""(?:url\(|@import\s)\s*["']?([^"')\s]+)""", text)
    return [x for x in found if not re.match("data:", x) and not NEVER.search(x)]


def is_foreign(address):
    return bool(urlsplit(address).netloc)


def loads(site, page):
    """({file of the site}, {address on another host}) that a page asks for, style sheets of the
    site read too. A font counts whether its letters appear or not."""
    files, foreign, left = {page}, set(), [(page, x) for x in Loads(read(site / page)).found]
    while left:
        base, address = left.pop()
        if is_foreign(address):
            foreign.add(address)
        elif address and not urlsplit(address).scheme:
            name = unquote(urlsplit(address).path)
            name = posixpath.normpath(posixpath.join(posixpath.dirname(base), name))
            if name not in files and (site / name).is_file():
                files.add(name)
                if name.endswith(".css"):
                    left += [(name, x) for x in in_style(read(site / name))]
    return files, foreign


@cache
def read(path):
    return path.read_text(encoding="utf-8")


@cache
def size(path):
    "Bytes of a file on its way to a browser."
    data = path.read_bytes()
    return len(gzip.compress(data, mtime=0) if path.suffix in TEXT else data)


def weight(site, page):
    "What a first visit of a page loads, (bytes, file) with the heaviest first."
    return sorted(((size(site / x), x) for x in loads(site, page)[0]), reverse=True)


def page_problems(site, page):
    "What one page loads that it should not."
    for address in sorted(loads(site, page)[1]):
        yield f"loads {address} from another host"
    heavy = [x for x in weight(site, page) if not x[1].startswith("shell/")]  # Quarto's own
    total = sum(n for n, _ in heavy)
    if total > MAX_PAGE:
        parts = ", ".join(f"{x} {n // 1000} KB" for n, x in heavy[:4])
        yield (
            f"a first visit loads {total // 1000} KB, the limit is {MAX_PAGE // 1000}: {parts}"
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path, help="the rendered site")
    site, problems = parser.parse_args(argv).site, []
    pages = sorted(p.relative_to(site) for p in site.rglob("*.html"))
    if not pages:
        sys.exit(f"{site} has no pages; render the site first")
    for page in pages:
        path = site / page
        done = finish(
            path.read_text(encoding="utf-8"),
            site_address(settings(ROOT)),
            "../" * (len(page.parts) - 1),
        )
        path.write_text(done, encoding="utf-8")
        foreign = sorted(loads(site, page.as_posix())[1])
        problems += [f"{page}: loads {x} from another host" for x in foreign]
    weights = {x: sum(n for n, _ in weight(site, x.as_posix())) // 1000 for x in pages}
    for page in sorted(pages, key=weights.get)[-3:]:
        print(f"a first visit of {page} loads {weights[page]} KB")
    print("\n".join([*problems, f"{len(pages)} pages, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
