#!/usr/bin/env python3
"""Render the website without Quarto, and check it.

    scripts/tools/preview_docs.py                    write _site/ (open _site/index.html)
    scripts/tools/preview_docs.py --check            write to a temporary folder, only report
    scripts/tools/preview_docs.py --glossary         write nbs/glossary.js again, after the
                                                     glossary of book.ipynb changed
    scripts/tools/preview_docs.py --only guide.ipynb --only 05_rotation.ipynb
                                                     these notebooks alone; links from them to
                                                     others are then not checked

nbdev prepares the notebooks exactly as it does for Quarto (exported cells become signatures,
names become links); pandoc, from the pypandoc_binary wheel, turns each into a page. Around it
stands what Quarto 1.7.34 writes: its themes, its bar with the search and the dark switch, its
scripts, and KaTeX (scripts/tools/shell; npm brings bootstrap, sass and the search). Without npm
a plain layout takes its place, which does not show a defect of Quarto's own parts.
Then every page is checked: links and anchors resolve, formulas convert, cited figures exist,
equations are numbered by chapter and cited by a number that there is, no section is empty, no
directive or fence leaks into the text, pictures stay small, every public name has a section
that a search can lead to, the sidebar of _quarto.yml names every notebook, no page asks another
host or loads more than 600 KB, no shelf has more words than its bound. With chromium on
the PATH every page is also laid out at the widths of a phone and of a laptop, where nothing may
stick out of the page: what is wide scrolls within itself, and nothing that is to be read is
cut, covered or folded away; the search finds the Manual first; and axe reads every page, light
and dark, and may find nothing critical or serious. Exit 1 with a list if anything is wrong. The
work happens in a copy of the tree, so no tracked file changes."""

import argparse
import base64
import contextlib
import hashlib
import html
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent))
from finish_pages import finish, page_problems
from notebooks import notebooks as all_notebooks
from notebooks import (
    VOID,
    directives,
    fence,
    page_name,
    settings,
    site_address,
    site_map,
    text_of,
)
from search_names import index_of

ROOT = Path(__file__).resolve().parents[2]
MAX_PICTURE = 100_000
ASSETS = {".png", ".svg", ".jpg", ".css", ".js", ".woff2"}
WORKERS = min(4, os.cpu_count() or 1)

SHELL = Path(__file__).with_name("shell")
PLAIN = Path(__file__).with_name("preview_page.html")
LAYOUT = Path(__file__).with_name("preview_layout.css")
MEASURE = Path(__file__).with_name("preview_widths.html")
ACCESS = Path(__file__).with_name("preview_axe.html")
AXE = Path(__file__).with_name("axe") / "axe.min.js"  # axe-core 4.14.1
PANDOC_TEMPLATE = "$toc$\n<!--split-->\n$highlighting-css$\n<!--split-->\n$body$\n"


class Problems(list):
    "What is wrong, as `page: message` lines, in the order found."

    def add(self, page, message):
        self.append(f"{page}: {message}")


# ---------------------------------------------------------------- Quarto's shell


def quarto_shell(root=ROOT):
    "The folder with Quarto's themes and scripts; None, and why, without npm: in CI an error."
    try:
        return made_shell(root)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        said = f"needs npm: {error} {getattr(error, 'stderr', '')[-2000:]}"
        if os.environ.get("CI") == "true":
            sys.exit(f"The layout of Quarto {said}")
        print(f"Pages have a plain layout, that of Quarto {said}")
        return None


def made_shell(root):
    """Quarto's themes, compiled with ours, and its scripts: made by npm and sass, and kept in
    build/ as long as what they are made from is the same."""
    import yaml

    settings = yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))
    chosen = {"html": settings["format"]["html"], "navbar": settings["website"]["navbar"]}
    named = {x for theme in chosen["html"]["theme"].values() for x in theme}
    themes = [root / "nbs" / x for x in named if x.endswith(".scss")]
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode())
    for file in sorted([*SHELL.glob("*.*"), *(SHELL / "quarto").iterdir(), *themes]):
        digest.update(file.read_bytes())
    made = root / "build" / f"shell-{digest.hexdigest()[:16]}"
    if made.is_dir():
        return made
    made.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as tmp:
        work = Path(tmp) / "shell"
        shutil.copytree(SHELL, work, ignore=shutil.ignore_patterns("node_modules"))
        (work / "settings.json").write_text(json.dumps(chosen), encoding="utf-8")
        build = ["node", "build.mjs", root / "nbs", "settings.json", "out"]
        for args in (["npm", "ci"], build):
            subprocess.run(args, cwd=work, capture_output=True, text=True, check=True)
        with contextlib.suppress(OSError):  # another process was quicker
            (work / "out").rename(made)
    return made


# ---------------------------------------------------------------- the notebooks as nbdev hands
# them to Quarto


def copy_tree(dst):
    """Copy what git would carry (or, without git, everything that is not a build product) to
    `dst`."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        for name in filter(None, listed.stdout.split("\0")):
            source, target = ROOT / name, dst / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        return
    ignore = shutil.ignore_patterns(
        ".git",
        "_proc",
        "_docs",
        "_site",
        "build",
        "dist",
        "*.egg-info",
        "__pycache__",
        ".venv*",
        "venv",
        ".*_cache",
        ".ipynb_checkpoints",
    )
    shutil.copytree(ROOT, dst, symlinks=True, dirs_exist_ok=True, ignore=ignore)


def prepare(tree):
    "Run nbdev's processors over the copy; returns the folder with the processed notebooks."
    code = (
        "import warnings; warnings.filterwarnings('ignore', message='Found cells "
        "containing')\nfrom nbdev.serve import proc_nbs\nproc_nbs(force=True, "
        f"n_workers={WORKERS})"
    )
    env = (
        {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        | os.environ
        | {"PYTHONPATH": str(tree), "MPLBACKEND": "agg"}
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True
    )
    if done.returncode:
        where = "\n".join(
            line for line in done.stderr.splitlines() if "Error in notebook" in line
        )
        sys.exit(
            f"nbdev could not process the notebooks. {where}\n{done.stderr[:3000].rstrip()}"
        )
    return tree / "_proc"


# ---------------------------------------------------------------- one notebook -> pandoc
# markdown


def picture(png, where, name, opts, page, problems):
    "Write one output picture; returns the markdown that shows it."
    raw = base64.b64decode(text_of(png))
    (where / f"{name}.png").write_bytes(raw)
    label = f"#{opts['label']}" if opts.get("label", "").startswith("fig-") else ""
    alt = opts.get("fig-alt", "")
    if not alt:
        problems.add(page, f"picture {name} has no text for who cannot see it (#| fig-alt: …)")
    if label and not opts.get("fig-cap"):
        problems.add(page, f"{opts['label']} has a label but no fig-cap")
    width = int.from_bytes(raw[16:20], "big")  # as Quarto writes it
    return f'![{opts.get("fig-cap", "")}]({name}.png){{{label} alt="{alt}" width={width}}}\n'


def output_markdown(out, opts, where, name, page, problems):
    "One output of a code cell as markdown."
    if out["output_type"] == "error":
        problems.add(page, f"a cell ends in {out.get('ename')}: {out.get('evalue')}")
        return ""
    if out["output_type"] == "stream":
        if out.get("name") == "stderr":
            return ""
        text = text_of(out["text"])
        return (
            text
            if opts.get("output") == "asis"
            else f"::: {{.cell-output .cell-output-stdout}}\n{fence(text)}\n:::\n"
        )
    data = out.get("data", {})
    if "image/png" in data:
        return picture(data["image/png"], where, name, opts, page, problems)
    if "text/markdown" in data:
        return text_of(data["text/markdown"]) + "\n"
    if "text/html" in data:
        return fence(text_of(data["text/html"]), "{=html}") + "\n"
    if "text/plain" in data:
        return (
            "::: {.cell-output .cell-output-display}\n"
            f"{fence(text_of(data['text/plain']))}\n:::\n"
        )
    return ""


def cell_markdown(cell, number, where, stem, page, problems):
    "One processed cell as markdown."
    source = text_of(cell.get("source") or "")
    if cell["cell_type"] == "markdown":
        if "{{<" in source:
            problems.add(
                page, "a Quarto shortcode ({{< >}}), which this preview and GitHub do not show"
            )
        return source + "\n"
    if cell["cell_type"] != "code":
        return ""
    opts, code = directives(source)
    if opts.get("include") == "false":
        return ""
    parts = []
    if code and opts.get("echo") != "false":
        block = fence(code, "python") + "\n"
        if opts.get("code-fold") in ("true", "show"):
            is_open = " open" if opts["code-fold"] == "show" else ""
            summary = opts.get("code-summary", "Code")
            fold = f'<details class="code-fold"{is_open}><summary>{summary}</summary>'
            block = f"```{{=html}}\n{fold}\n```\n\n{block}\n```{{=html}}\n</details>\n```\n"
        parts.append(block)
    if opts.get("output") != "false":
        outs = cell.get("outputs", [])
        parts += [
            output_markdown(o, opts, where, f"{stem}-{number}-{i}", page, problems)
            for i, o in enumerate(outs)
        ]
    text = "\n".join(parts)
    if not code or opts.get("output") == "asis":
        return text
    return f":::::: {{.cell}}\n{text}\n::::::\n"


def notebook_markdown(path, page, site, problems):
    "A processed notebook as (front matter, pandoc markdown); its pictures lie beside its page."
    import yaml

    where, stem = (site / page).parent, Path(page).stem
    nb = json.loads(path.read_text(encoding="utf-8"))
    front, chunks = {}, []
    for i, cell in enumerate(nb["cells"]):
        source = text_of(cell.get("source") or "")
        if cell["cell_type"] == "raw" and source.strip().startswith("---"):
            front |= yaml.safe_load(source.strip().strip("-")) or {}
        else:
            chunks.append(cell_markdown(cell, i, where, stem, page, problems))
    return front, "\n\n".join(chunk for chunk in chunks if chunk.strip())


# ---------------------------------------------------------------- pandoc: numbering, citations,
# links

PANDOC_FORMAT = (
    "markdown-yaml_metadata_block+lists_without_preceding_blankline"
    "+autolink_bare_uris-implicit_header_references"
)


def pandoc(args, text, page, problems):
    "Run pandoc with warnings as errors."
    import pypandoc

    exe = pypandoc.get_pandoc_path()
    done = subprocess.run([exe, *args], input=text, capture_output=True, text=True)
    for line in done.stderr.splitlines():
        if line.strip():
            problems.add(page, f"pandoc: {line.strip()}")
    if done.returncode or done.stderr.strip():
        problems.add(page, "pandoc reports a warning or an error (above)")
    return done.stdout


def stringify(node):
    "The plain text of a piece of pandoc's tree."
    if isinstance(node, dict):
        if node.get("t") in ("Space", "SoftBreak", "LineBreak"):
            return " "
        return node["c"] if node.get("t") == "Str" else stringify(node.get("c", []))
    if isinstance(node, list):
        return "".join(map(stringify, node))
    return ""


class Shape:
    """Walks pandoc's tree: numbers figures, resolves @citations of them, rewrites notebook
    links."""

    def __init__(self, page, pages, own_site, problems):
        self.page, self.pages = page, pages
        self.own_site, self.problems = own_site, problems
        self.numbers = {}

    def caption(self, label, blocks):
        "Number a figure; put `Figure N:` in front of its caption's first paragraph."
        if label in self.numbers:
            self.problems.add(self.page, f"the label {label} is used twice")
        self.numbers[label] = len(self.numbers) + 1
        head = {"t": "Str", "c": f"Figure\u00a0{self.numbers[label]}:"}
        if blocks:
            blocks[0]["c"] = [head, {"t": "Space"}, *blocks[0]["c"]]

    def first(self, node):
        "First walk: number what carries a label."
        if isinstance(node, list):
            for item in node:
                self.first(item)
        elif isinstance(node, dict):
            kind, content = node.get("t"), node.get("c")
            if kind == "Figure" and content[0][0].startswith("fig-"):
                self.caption(content[0][0], content[1][1])
            if content is not None:
                self.first(content)

    def empty_sections(self, blocks):
        """A heading with nothing under it: its cells were exported private code, which the page
        hides."""
        blocks = [b for b in blocks if b["t"] not in ("HorizontalRule", "RawBlock")]
        for block, following in zip(blocks, [*blocks[1:], None]):
            if block["t"] == "Header" and (
                following is None
                or (following["t"] == "Header" and following["c"][0] <= block["c"][0])
            ):
                self.problems.add(
                    self.page,
                    f"the section '{stringify(block['c'][2])}' is empty (show its code with "
                    "`#| exports` or add prose)",
                )

    def second(self, node):
        "Second walk: citations and links."
        if isinstance(node, list):
            node[:] = [self.replace(item) for item in node]
            for item in node:
                self.second(item)
        elif isinstance(node, dict) and node.get("c") is not None:
            self.second(node["c"])

    def replace(self, item):
        if not isinstance(item, dict):
            return item
        if item.get("t") == "Cite":
            return self.cite(item)
        if item.get("t") == "Link":
            target = item["c"][2]
            target[0] = self.link(target[0])
        return item

    def cite(self, item):
        label = item["c"][0][0]["citationId"]
        if not label.startswith("fig-"):
            return {"t": "Span", "c": [["", [], []], item["c"][1]]}
        if label not in self.numbers:
            self.problems.add(self.page, f"@{label} is cited but not defined on this page")
            return {"t": "Str", "c": "?"}
        text = {"t": "Str", "c": f"Figure\u00a0{self.numbers[label]}"}
        return {"t": "Link", "c": [["", [], []], [text], [f"#{label}", ""]]}

    def link(self, url):
        """nbdev writes whole addresses of the published site and authors write names of
        notebooks, from the folder of theirs: both become pages here."""
        if url.startswith(self.own_site):
            return up(self.page) + url.removeprefix(self.own_site)
        parts = urlsplit(url)
        if parts.scheme or parts.netloc or not parts.path.endswith(".ipynb"):
            return url
        name = beneath(self.page, parts.path)
        if name not in self.pages:
            self.problems.add(self.page, f"a link to {url}, but nbs/ has no such notebook")
        return page_name(unquote(parts.path)) + (f"#{parts.fragment}" if parts.fragment else "")


# ---------------------------------------------------------------- pages


def beside(bars, page):
    "The sidebar that names a page; the first one for a page that none names."
    return next(
        (
            bar
            for bar in bars
            if any(page_name(href) == page for _, items in bar for _, href in items)
        ),
        bars[0],
    )


def up(page):
    "From a page to the folder of the site."
    return "../" * page.count("/")


def beneath(page, address):
    "What an address on a page names, from the folder of the site."
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(address)))


LINKS = {  # Quarto's classes of an entry of a list of pages, and of its text
    "nav": ("nav-link", "menu-text"),
    "sidebar": ("sidebar-item-text sidebar-link", "menu-text"),
    "page": ("pagination-link", "nav-page-text"),
}


def item_html(href, text, page, kind):
    "A link to a page in the bar, in a sidebar or at the end of a page."
    link, inner = LINKS[kind]
    active = " active" if page_name(href) == page else ""
    found = (
        f'<a href="{up(page)}{page_name(href)}" class="{link}{active}">'
        f'<span class="{inner}">{html.escape(text)}</span></a>'
    )
    return found if kind == "page" else f'<li class="{kind}-item">{found}</li>'


def side_html(sections, page):
    "A sidebar; of its sections the one of the page stands open."
    rows = []
    for i, (name, items) in enumerate(sections):
        rows_of_it = "\n".join(item_html(href, text, page, "sidebar") for text, href in items)
        if not name:
            rows.append(rows_of_it)
            continue
        shown = any(page_name(href) == page for _, href in items)
        fold = (
            f'data-bs-toggle="collapse" data-bs-target="#section-{i}" role="navigation" '
            f'aria-expanded="{str(shown).lower()}"'
        )
        rows.append(
            '<li class="sidebar-item sidebar-item-section"><div class="sidebar-item-container">'
            f'<a class="sidebar-item-text sidebar-link text-start" {fold}>'
            f'<span class="menu-text section">{html.escape(name)}</span></a>'
            f'<a class="sidebar-item-toggle text-start" {fold} aria-label="Toggle section">'
            '<i class="bi bi-chevron-right ms-2"></i></a></div>'
            f'<ul id="section-{i}" class="collapse list-unstyled sidebar-section depth1'
            f'{" show" if shown else ""}">{rows_of_it}</ul></li>'
        )
    return "\n".join(rows)


def crumbs_html(sections, page):
    "The section of a page and the page, each a link."
    crumbs = next(
        (
            [(name, items[0][1])] * bool(name) + [(text, href)]
            for name, items in sections
            for text, href in items
            if page_name(href) == page
        ),
        [],
    )
    return "".join(
        f'<li class="breadcrumb-item"><a href="{up(page)}{page_name(href)}">'
        f"{html.escape(text)}</a></li>"
        for text, href in crumbs
    )


def neighbours(sections, page):
    "Links to the page before and after, in reading order."
    order = [item for _, items in sections for item in items]
    pages = [page_name(href) for _, href in order]
    around = ["", *(item_html(href, text, page, "page") for text, href in order), ""]
    at = pages.index(page) if page in pages else -1
    before, after = (around[at], around[at + 2]) if at >= 0 else ("", "")
    return (
        f'<div class="nav-page nav-page-previous">{before}</div>'
        f'<div class="nav-page nav-page-next">{after}</div>'
    )


# What Quarto adds to pandoc's HTML, as (pattern, its replacement).
QUARTO = [
    (
        r'(<pre\s+class="sourceCode [^"]*)("><code.*?</code>)(</pre>)',
        r'\1 code-with-copy\2<button title="Copy to Clipboard" class="code-copy-button">'
        r'<i class="bi"></i></button>\3',
    ),
    (r"<figure(?= |>)", '<figure class="quarto-float quarto-float-fig figure"'),
    (
        r"<figcaption(?= |>)",
        '<figcaption class="quarto-float-caption-bottom quarto-float-caption quarto-float-fig"',
    ),
    (r"<img(?= )", '<img class="img-fluid figure-img"'),
    (r"<table(?=>)", '<table class="caption-top table"'),
    (
        r'<table([^>]*) class="dataframe([^"]*)"',
        r'<table\1 class="dataframe\2 caption-top table table-sm table-striped small"',
    ),
]
# as pandoc writes it
KATEX_HEAD = """<script src="{{up}}katex/katex.min.js"></script>
<script>document.addEventListener("DOMContentLoaded", function () {
 const macros = [];
 for (const x of document.querySelectorAll("span.math")) katex.render(x.firstChild.data, x, {
  displayMode: x.classList.contains("display"), throwOnError: false, macros, fleqn: false});
});</script>
<link rel="stylesheet" href="{{up}}katex/katex.min.css">
"""


def page_text(shell, values, body):
    "A page: Quarto's, or a plain one, with values in place of their names in double braces."
    text = (SHELL / "page.html" if shell else PLAIN).read_text(encoding="utf-8")
    if shell:
        before = (shell / "before-body.html").read_text(encoding="utf-8")
        toc = values["toc"].replace("<a href", '<a class="nav-link" href')
        values |= {"before": before, "toc": toc}
        for pattern, replacement in QUARTO:
            body = re.sub(pattern, replacement, body, flags=re.S)
    for key, value in ({"math": KATEX_HEAD} | values).items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text.replace("{{body}}", body)  # which may have braces of its own


def render(name, processed, site, navigation, pages, cfg, shell, problems):
    "One processed notebook to one page."
    page, path = page_name(name), processed / name
    (site / page).parent.mkdir(parents=True, exist_ok=True)
    top, sections = navigation[0], beside([*navigation[1].values()], page)
    front, markdown = notebook_markdown(path, page, site, problems)
    tree = json.loads(
        pandoc(["-f", PANDOC_FORMAT, "-t", "json"], markdown, page, problems)
        or '{"blocks": []}'
    )
    shape = Shape(page, pages, site_address(cfg), problems)
    shape.empty_sections(tree["blocks"])
    shape.first(tree["blocks"])
    shape.second(tree["blocks"])
    template = site / f".template-{page.replace('/', '-')}"
    template.write_text(PANDOC_TEMPLATE, encoding="utf-8")
    args = [
        "-f",
        "json",
        "-t",
        "html5",
        "--katex",
        "--standalone",
        "--section-divs",
        "--toc",
        "--toc-depth=3",
        f"--template={template}",
        "--metadata=title:x",
        "--fail-if-warnings",
    ]
    parts = pandoc(args, json.dumps(tree), page, problems).split("<!--split-->")
    template.unlink()
    toc, highlight, body = parts if len(parts) == 3 else ("", "", "".join(parts))
    args = ["-f", "markdown", "-t", "html5", "--katex", "--fail-if-warnings"]
    inline = pandoc(args, str(front.get("description", "")), page, problems)
    crumbs = crumbs_html(sections, page)
    values = {
        "title": html.escape(str(front.get("title", page))),
        "site": html.escape(cfg["title"]),
        "description": re.sub(r"^<p>|</p>\s*$", "", inline.strip()),
        "highlighting": highlight,
        "top": "".join(item_html(href, text, page, "nav") for text, href in top),
        "repository": cfg["git_url"],
        "sidebar": side_html(sections, page),
        "crumbs": crumbs,
        "title-crumbs": crumbs if crumbs.count("<li") > 1 else "",
        "toc": toc,
        "neighbours": neighbours(sections, page),
        "up": up(page),
    }
    text = page_text(shell, values, body)
    (site / page).write_text(finish(text, site_address(cfg), up(page)), encoding="utf-8")


# ---------------------------------------------------------------- checks


class PageReader(HTMLParser):
    "Collects ids, links, pictures and the text that a reader sees outside code and formulas."

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.ids = set()
        self.links, self.images, self.prose, self.code, self.stack = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get("id"):
            self.ids.add(attrs["id"])
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"] or "")
        if tag == "img":
            self.images.append(attrs.get("src") or "")
        if tag not in VOID:
            self.stack.append("math" if "math" in (attrs.get("class") or "").split() else tag)

    def handle_endtag(self, tag):
        if tag == "span" and self.stack[-1:] == ["math"]:  # KaTeX's source
            tag = "math"
        if tag in self.stack:
            while self.stack and self.stack.pop() != tag:
                pass

    def handle_data(self, data):
        inside = set(self.stack)
        if inside & {"style", "script", "annotation", "title"}:
            return
        if inside & {"pre", "code"}:
            self.code.append(data)
        elif "math" not in inside:
            self.prose.append(data)


LEAKS = [
    (r"\$\$", "an unrendered $$"),
    (r"\$[^\s$\d][^$\n]{0,80}\$", "an unrendered $formula$"),
    (r"\\(?:[a-zA-Z]{2,}|\(|\[)", "TeX outside a formula"),
    (r":::", "a ::: fence (needs blank lines around it, opened and closed in one cell)"),
    (r"\{#[\w-]+\}|\{\.[\w-]+", "an unread {#label} or {.class}"),
    (r"(?<![\w`])@(?:fig|eq|tbl|sec)-\w", "an unresolved @reference"),
    (r"(?<!\w)#\|", "a #| directive"),
    (r"\*\*\S", "unread ** emphasis"),
    (r"\]\([^)\s]+\)", "an unread [link](target)"),
    (r"<!--", "an HTML comment"),
]


def check_leaks(page, reader, problems):
    prose = "".join(reader.prose)
    for pattern, what in LEAKS:
        for found in list(re.finditer(pattern, prose))[:3]:
            near = " ".join(prose[max(0, found.start() - 30) : found.end() + 30].split())
            problems.add(page, f"{what}: …{near}…")
    for text in re.findall(r"^#\|.*$", "".join(reader.code), re.M)[:3]:
        problems.add(page, f"a directive shows in code: {text}")
    for text in re.findall(r"\[`[^`]+`\]\(http\S*", "".join(reader.code))[:3]:
        problems.add(page, f"Markdown shows in code: {text}")


def check_links(page, reader, readers, site, tree, absent, cfg, problems):
    """Links, anchors and pictures of one page. `absent` pages are reported once, with the
    sidebar."""
    blob = re.compile(
        r"^(?:https://colab\.research\.google\.com/github/|https://github\.com/)"
        + re.escape(f"{cfg['user']}/{cfg['repo']}")
        + rf"/blob/{re.escape(cfg['branch'])}/([^#?]+)"
    )
    for url in reader.links:
        inside = blob.match(url)
        if inside and not (tree / unquote(inside[1])).exists():
            problems.add(page, f"link to {url}, but the repository has no {inside[1]}")
        parts = urlsplit(url)
        if parts.scheme or parts.netloc:
            continue
        target = beneath(page, parts.path) if parts.path else page
        if target in absent:
            continue
        if target in readers:
            name = unquote(parts.fragment)
            # nbdev links `Class.method`; a method without a show_doc is found at its class
            owner = name.split(".")[0]
            if (
                name
                and name not in readers[target].ids
                and not ("." in name and owner in readers[target].ids)
            ):
                problems.add(page, f"link to {url}: {target} has no such anchor")
        elif not (site / target).is_file():
            problems.add(page, f"link to {url}: no such page")
    for src in reader.images:
        if urlsplit(src).scheme in ("http", "https", "data"):
            continue
        file = site / beneath(page, src)
        if not file.is_file():
            problems.add(page, f"missing picture {src}")
        elif file.stat().st_size > MAX_PICTURE:
            problems.add(
                page,
                f"picture {src} has {file.stat().st_size // 1000} kB, the limit is "
                f"{MAX_PICTURE // 1000}",
            )


def check(site, tree, sections, notebooks, cfg, problems):
    "Read the finished pages as a reader would."
    readers = {}
    for page in pages_of(site):
        readers[page] = PageReader()
        readers[page].feed((site / page).read_text(encoding="utf-8"))
    listed = [href for _, items in sections for _, href in items]
    absent = {page_name(name) for name in listed} - readers.keys()
    for page, reader in readers.items():
        check_leaks(page, reader, problems)
        check_links(page, reader, readers, site, tree, absent, cfg, problems)
        for message in page_problems(site, page):
            problems.add(page, message)
    for name in notebooks:
        if name not in listed:
            problems.add("_quarto.yml", f"the sidebar does not name {name}")
    for name in listed:
        if name not in notebooks:
            problems.add("_quarto.yml", f"the sidebar names {name}, which nbs/ does not have")


def address_problems(notebooks, processed):
    """What is wrong with addresses: two notebooks of one, or an alias, the address that a page
    had before, which another page has."""
    import yaml

    taken = {}
    for name in notebooks:
        page = page_name(name)
        cells = json.loads((processed / name).read_text(encoding="utf-8"))["cells"]
        front = text_of(cells[0].get("source") or "").strip() if cells else ""
        fields = yaml.safe_load(front.strip("-")) or {} if front.startswith("---") else {}
        for address in (page, *(x.lstrip("/") for x in fields.get("aliases", []))):
            if address in taken:
                yield f"{name} and {taken[address]} have one address, {address}"
            taken[address] = name


def check_equations(name, cells, problems):
    """The one scheme of a chapter's equations, which every renderer shows alike: each display
    ends in `\\tag{chapter.k}`, k counts from 1, and what text, code and docstrings cite as
    `equation (chapter.k)` exists. A page without a number counts `\\tag{k}`. Returns
    the numbers."""
    chapter = re.match(r"0*(\d+[a-z]*)_", Path(name).name)
    texts = [(text_of(c.get("source") or ""), c["cell_type"]) for c in cells]
    displays = [
        d
        for text, kind in texts
        if kind == "markdown"
        for d in re.findall(r"\$\$(.+?)\$\$", text, re.S)
    ]
    numbers = [
        found[1] if (found := re.search(r"\\tag\{([^{}]*)\}\s*$", d)) else None
        for d in displays
    ]
    want = (
        [f"{chapter[1]}.{k}" for k in range(1, len(displays) + 1)]
        if chapter
        else [str(k) for k in range(1, len(displays) + 1)]
    )
    for got, due, display in zip(numbers, want, displays):
        if got != due:
            problems.add(
                name,
                f"an equation has the number {got}, due is {due}: "
                f"{' '.join(display.split())[:60]}",
            )
    for text, _ in texts:
        for found in re.findall(r"[{@]#?eq-[\w-]+", text):
            problems.add(
                name,
                f"{found}: equations are numbered by \\tag{{chapter.k}} and cited as "
                "(chapter.k)",
            )
        for cited in re.finditer(
            r"\b[Ee]quations? (\([^()]+\)(?:(?:, | and | to )\([^()]+\))*)", text
        ):
            for number in re.findall(r"\(([^()]+)\)", cited[1]):
                if number not in numbers:
                    problems.add(name, f"equation ({number}) is cited and not there")
    return numbers


# ---------------------------------------------------------------- words

# Most words of prose on a shelf, that of a sidebar, and on all.
MOST_WORDS = {"book": 55_500, "all": 85_000}


def prose_words(markdown):
    "How many words a reader finds in prose: code, formulas and addresses are none."
    for pattern in (r"```.*?```", r"\$\$.*?\$\$", r"\$[^$\n]+\$", r"\]\([^)]*\)", r"<[^>]+>"):
        markdown = re.sub(pattern, " ", markdown, flags=re.S)
    return len(re.findall(r"\b[^\W\d_][\w'’-]*", markdown))


def shelf_words(tree):
    "{shelf: words of the prose of its notebooks}, and those of all shelves."
    found = {}
    for shelf, sections in site_map(tree)[1].items():
        cells = [
            cell
            for _, items in sections
            for _, name in items
            if (tree / "nbs" / name).is_file()
            for cell in json.loads((tree / "nbs" / name).read_text(encoding="utf-8"))["cells"]
            if cell["cell_type"] == "markdown"
        ]
        found[shelf] = sum(prose_words(text_of(cell["source"])) for cell in cells)
    return found | {"all": sum(found.values())}


def check_words(words, problems):
    for shelf, most in MOST_WORDS.items():
        if words[shelf] > most:
            problems.add(shelf, f"{words[shelf]:,} words of prose, the bound is {most:,}")


# ---------------------------------------------------------------- widths, in a browser

WIDTHS = (390, 1280)


def browser():
    "A Chromium on the PATH, or None."
    return next(
        (
            exe
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (exe := shutil.which(name))
        ),
        None,
    )


class Measured(SimpleHTTPRequestHandler):
    """Serves a folder, and takes from the page of measurements which page it reads now, and at
    the end what it has found."""

    def do_POST(self):
        said = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/reading":
            self.server.reading, self.server.since = said.decode(), time.monotonic()
        else:
            self.server.found = json.loads(said)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


def in_browser(site, harness, seconds, *options):
    """What a page of measurements posts when Chromium has run it beside the pages of a folder.
    Raises TimeoutError that names the page it was reading, if that took so many seconds, or if
    Chromium ended before."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Measured, directory=site))
    file = site / f".harness-{server.server_port}.html"  # of this run alone
    file.write_text(harness, encoding="utf-8")
    server.found, server.reading, server.since = None, "the first page", time.monotonic()
    Thread(target=server.serve_forever, daemon=True).start()
    # Chromium's helpers outlive its first process by a moment and still write to the profile
    # while it is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        args = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            f"--window-size={max(WIDTHS) + 40},900",
            *options,
        ]
        with subprocess.Popen(
            [browser(), *args, f"http://127.0.0.1:{server.server_port}/{file.name}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while server.found is None and process.poll() is None:
                if time.monotonic() > server.since + seconds:
                    break
                time.sleep(0.1)
            ended = process.poll() is not None
            process.terminate()
    server.shutdown()
    file.unlink()
    if server.found is None:
        why = "has ended" if ended else f"was not done after {seconds} s"
        raise TimeoutError(f"chromium {why} with {server.reading}")
    return server.found


def pages_of(site):
    "The pages in a folder and in folders of it, as addresses from there."
    return sorted(p.relative_to(site).as_posix() for p in site.rglob("[!.]*.html"))


# What people search for; the first page found must be one of the Manual.
SEARCHES = ("2 bits", "two bits", "vLLM", "perplexity", "Qwen3")


def check_widths(site, problems, seconds=60, searches=()):
    """Lay every page out at WIDTHS; what sticks out, overlaps, wraps or is cut is a problem,
    and a search whose first result is no page of the Manual, or a page that takes longer than
    so many seconds. Returns how many pages were measured."""
    pages = pages_of(site)
    text = MEASURE.read_text(encoding="utf-8").replace("PAGES", json.dumps(pages), 1)
    text = text.replace("SEARCHES", json.dumps(searches), 1)
    try:
        found = in_browser(site, text.replace("WIDTHS", json.dumps(WIDTHS), 1), seconds)
    except TimeoutError as error:
        problems.add("widths", str(error))
        return 0
    for page, width, message in found:
        problems.add(page, f"at {width} px {message}")
    return len(pages)


# Chromium's setting of the colour scheme that the system prefers
SCHEMES = {"light": 1, "dark": 0}


def check_access(site, problems, pages=None, seconds=240):
    """Run axe on pages with everything unfolded, light and dark, at the width of a phone and,
    as far as it is another there, at that of a laptop: the bar, the lists beside the text. A
    finding that is critical or serious is a problem, and so is a page that takes longer than so
    many seconds. Returns how many pages were read."""
    pages = pages_of(site) if pages is None else pages
    text = ACCESS.read_text(encoding="utf-8").replace("PAGES", json.dumps(pages), 1)
    text = text.replace("WIDTHS", json.dumps(WIDTHS), 1)
    copied = site / ".axe.min.js"
    shutil.copyfile(AXE, copied)

    def read_in(name):
        setting = f"--blink-settings=preferredColorScheme={SCHEMES[name]}"
        try:
            return in_browser(site, text.replace("SCHEME", name, 1), seconds, setting)
        except TimeoutError as error:
            return f"{error} ({name})"

    with ThreadPoolExecutor(len(SCHEMES)) as pool:  # each waits for a Chromium of its own
        answers = dict(zip(SCHEMES, pool.map(read_in, SCHEMES)))
    copied.unlink()
    for name, found in answers.items():
        if isinstance(found, str):
            problems.add("axe", found)
            return 0
        for page, width, rule, impact, count, where, message in found:
            problems.add(
                page,
                f"axe, {name}, {width} px: {rule} ({impact}, {count} times): {where}: "
                f"{message}",
            )
    return len(pages)


# ---------------------------------------------------------------- main


def glossary(tree):
    """nbs/glossary.js, made from the glossary of book.ipynb: words and their meaning, for
    site.js. Words in italics are left out."""
    cells = json.loads((tree / "nbs" / "book.ipynb").read_text(encoding="utf-8"))["cells"]
    (table,) = (
        text_of(c["source"]) for c in cells if text_of(c["source"]).startswith("## Glossary")
    )
    words = {}
    for names, _, meaning, _ in re.findall(
        r"^\| (?!word )([^|]+) \|([^|]*)\| ([^|]+) \|([^|]*)\|$", table, re.M
    ):
        words |= {
            name.strip(): meaning.strip()
            for name in names.split(",")
            if not name.strip().startswith("*")
        }
    return (
        "// Made from the glossary of book.ipynb by scripts/tools/preview_docs.py "
        "--glossary.\nwindow.tqGlossary = "
        + json.dumps(words, indent=1, ensure_ascii=False)
        + ";\n"
    )


def build(tree, site, problems, only=()):
    """The pages of the tree into `site`, all or of the notebooks in `only`; returns how many.
    Those of some are not checked as a whole."""
    cfg, navigation = settings(tree), site_map(tree)
    if (tree / "nbs" / "glossary.js").read_text(encoding="utf-8") != glossary(tree):
        problems.add(
            "glossary.js",
            "is not what the glossary of book.ipynb says: preview_docs.py --glossary writes it",
        )
    notebooks = [p.relative_to(tree / cfg["nbs_path"]).as_posix() for p in all_notebooks(tree)]
    for name in set(notebooks) - set(only or notebooks):
        (tree / cfg["nbs_path"] / name).unlink()
    with ThreadPoolExecutor() as pool:  # npm and sass work while nbdev does
        making = pool.submit(quarto_shell)
        processed = prepare(tree)
        shell = making.result()
    nbs = tree / cfg["nbs_path"]
    for name in only or notebooks:
        check_equations(
            name, json.loads((nbs / name).read_text(encoding="utf-8"))["cells"], problems
        )
    for problem in address_problems(only or notebooks, processed):
        problems.add("nbs", problem)
    site.mkdir(parents=True, exist_ok=True)
    for file in processed.rglob("*"):
        if file.is_file() and file.suffix in ASSETS:
            target = site / file.relative_to(processed)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
    shutil.copyfile(LAYOUT, site / "layout.css")
    if shell:
        shutil.copytree(shell, site / "shell", ignore=shutil.ignore_patterns("*.html"))
    with ThreadPoolExecutor(WORKERS) as pool:  # the work is pandoc's, in processes of its own
        found = [(name, Problems()) for name in only or notebooks]
        list(
            pool.map(
                lambda page: render(
                    page[0], processed, site, navigation, set(notebooks), cfg, shell, page[1]
                ),
                found,
            )
        )
    for _, more in found:
        problems += more
    index, missing = index_of(site, tree)
    (site / "search.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    if only:
        return len(only)
    for name in missing:
        problems.add("search", f"no section for the public name {name}")
    check(
        site,
        tree,
        [section for bar in navigation[1].values() for section in bar],
        notebooks,
        cfg,
        problems,
    )
    return len(notebooks)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="render to a temporary folder and only report"
    )
    parser.add_argument(
        "--glossary", action="store_true", help="write nbs/glossary.js, and no page"
    )
    parser.add_argument(
        "--only", action="append", metavar="NOTEBOOK", help="this notebook alone, from nbs/"
    )
    args = parser.parse_args(argv)
    if args.glossary:
        (ROOT / "nbs" / "glossary.js").write_text(glossary(ROOT), encoding="utf-8")
        return 0
    start, problems = time.perf_counter(), Problems()
    with tempfile.TemporaryDirectory() as tmp:
        tree, site = Path(tmp) / "tree", Path(tmp) / "site"
        copy_tree(tree)
        count = build(tree, site, problems, args.only)
        words = shelf_words(ROOT)
        check_words(words, problems)
        measured = None
        if browser():
            measured = check_widths(site, problems, searches=SEARCHES * (not args.only))
            check_access(site, problems)
        if not args.check:
            shutil.rmtree(ROOT / "_site", ignore_errors=True)
            shutil.copytree(site, ROOT / "_site")
    for line in problems:
        print(f"  {line}")
    print("words of prose: " + ", ".join(f"{k} {n:,}" for k, n in words.items()))
    where = "checked" if args.check else "written to _site"
    widths = (
        "widths not measured, there is no chromium"
        if measured is None
        else f"{measured} laid out at {' and '.join(map(str, WIDTHS))} px"
    )
    print(
        f"{count} pages {where} ({widths}) in {time.perf_counter() - start:.1f} s, "
        f"{len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
