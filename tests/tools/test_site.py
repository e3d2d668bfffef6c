"""What the site's check finds in a browser: what sticks out of a page, stands open, does not
sort, or computes something else than Python."""

import json
import re
import shutil
from pathlib import Path

import finish_pages
import preview_docs as preview
import pytest
import search_names

from tests.helpers import ROOT, refuses

LONG = "\n".join(f"x{i} = {i}" for i in range(40))
TABLE = (
    "<table><thead><tr><th>name</th><th>µs</th></tr></thead><tbody>"
    + "".join(
        f"<tr><td>{n}</td><td>{v}</td></tr>"
        for n, v in (("b", "10"), ("a", "9"), ("c", "1,000"), ("d", "2"))
    )
    + "</tbody></table>"
)
GOOD = f"""<div class="sourceCode"><pre><code>def f(): pass\n{LONG}</code></pre></div>
<div class="cell-output"><pre><code>fine\nraised ValueError: as it must</code></pre></div>
<pre><code>{"wide " * 200}</code></pre>{TABLE}
<div class="tq-live" id="live" data-expect="2"><input type="range" min="1" max="9" value="2"></div>
<script>(() => {{ const b = document.getElementById("live"), f = () => b.dataset.value = b.firstElementChild.value; b.addEventListener("input", f); f(); }})()</script>
{"<p>Nothing.</p>" * 20}<p>Two tiles, and one tile more: a retiled roof is none, <code>tile</code> neither.</p><script>window.tqGlossary = {{"tile": "256 tokens", "none such": "nowhere"}}</script>"""
BAD = """<div style="width:1500px">too wide</div><div class="tq-live" id="live" data-expect="3" data-value="2"><input type="range" min="1" max="9" value="2"></div>
<pre style="white-space:pre-wrap">wraps</pre>"""


def page(body):
    return f"""<!DOCTYPE html><html><head><meta charset="utf-8"><link rel="stylesheet" href="layout.css"><link rel="stylesheet" href="styles.css"></head>
<body><div class="page"><main>{body}</main></div><script src="site.js"></script></body></html>"""


SCRIPT = '<script src="site.js"></script>'
needs_chromium = pytest.mark.skipif(preview.browser() is None, reason="no chromium on the PATH")


def plain_site(folder, **pages):
    "A folder with these pages in the plain layout."
    for path in (preview.LAYOUT, ROOT / "nbs" / "styles.css", ROOT / "nbs" / "site.js"):
        (folder / path.name).write_text(path.read_text())
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)


@needs_chromium
def test_a_browser_sees_what_is_wrong(tmp_path):
    term = '<dfn class="tq-term" data-name="tile" data-tip="256 tokens">tile</dfn>'
    unscripted = page(GOOD).replace(SCRIPT, "")
    plain_site(
        tmp_path, good=page(GOOD), bad=page(BAD), twice=page(GOOD + term), unscripted=unscripted
    )
    problems = preview.Problems()
    assert preview.check_widths(tmp_path, problems) == 4
    found = {
        name: [line for line in problems if line.startswith(name)]
        for name in ("good", "bad", "unscripted", "twice")
    }
    assert found["good"] == []
    for words in (
        "390 px sticks out to 15",
        "1280 px sticks out to 15",
        "computes 2, Python 3",
        "does not follow its control",
        "code that wraps",
    ):
        assert any(words in line for line in found["bad"]), (words, found["bad"])
    assert (
        len(found["twice"]) == 1
        and "a word explained twice, or not: tile, tile" in found["twice"][0]
    )
    for words in (
        "long source that stands open",
        "refusals that stand open",
        "no word of the glossary is explained",
    ):
        assert any(words in line for line in found["unscripted"]), words


@pytest.fixture(scope="session")
def shell():
    "Quarto's themes and scripts; without npm nothing of this can be seen (CI stops there)."
    return preview.quarto_shell() or pytest.skip("npm is missing")


def quarto_site(folder, shell):
    "A folder for pages in Quarto's shell."
    ignore = shutil.ignore_patterns("*.html")
    shutil.copytree(shell, folder / "shell", ignore=ignore)
    shutil.copytree(ROOT / "nbs" / "katex", folder / "katex")
    for name in ("styles.css", "site.js"):
        shutil.copyfile(ROOT / "nbs" / name, folder / name)


def quarto_page(shell, body, title="11 · A chapter", ours=True):
    "A page in Quarto's shell, with or without our own style sheet and script."
    names = "up description highlighting top repository sidebar crumbs title-crumbs toc"
    values = dict.fromkeys([*names.split(), "neighbours"], "")
    text = preview.page_text(shell, values | {"title": title, "site": "site"}, body)
    if not ours:
        text = re.sub(f'{SCRIPT}|<link rel="stylesheet" href="styles.css">', "", text)
    return text


TYPED = "turboquant generate --model ID_OR_PATH --recipe k3v3 --prompt 'Call me Ishmael.' " * 2
STAMP = "x86_64 CPU, torch 2.13.0+cpu, transformers 5.23.0, commit 2ca9d007; " * 3
DEFECTS = f"""<div class="sourceCode"><pre class="sourceCode bash"><code class="sourceCode bash"><span>{TYPED}</span></code></pre></div>
<div class="sourceCode"><pre class="sourceCode python"><code class="sourceCode python"><span>{"wide " * 60}</span></code></pre></div>
<section id="f" class="level3"><h3>f</h3><div class="sourceCode"><pre class="sourceCode python"><code class="sourceCode python"><span>def f()</span></code></pre></div>
<p><em>The first sentence. The second one ends</em> on another line.</p></section>
<div class="cell"><div class="cell-output cell-output-stdout"><pre><code>{STAMP}</code></pre></div></div>
<p><span class="math display">{" + ".join("abcdefghijklm" * 3)} = n \\tag{{11.1}}</span></p>
<table><thead><tr><th>change, in per cent of what it was</th><th>{"a long head " * 9}</th><th>{"another head " * 9}</th></tr></thead><tbody>
<tr><td>+2.2 ± 0.7</td><td>-1.5</td><td>{"text " * 60}</td></tr></tbody></table>
<figure><img src="wide.svg" alt="wide" width="1400"><figcaption>Its caption.</figcaption></figure>"""
EXAMPLE = (
    '<div class="sourceCode"><pre class="sourceCode python"><code class="sourceCode python">'
    + "".join(f"<span>x{i} = {i}\n</span>" for i in range(9))
    + "</code></pre></div>"
)
WIDE = '<svg xmlns="http://www.w3.org/2000/svg" width="1400" height="700"><rect width="9" height="9"/></svg>'


@needs_chromium
def test_a_browser_sees_what_is_cut_hidden_or_covered_in_quartos_shell(tmp_path, shell):
    quarto_site(tmp_path, shell)
    (tmp_path / "wide.svg").write_text(WIDE)
    (tmp_path / "a.html").write_text(quarto_page(shell, DEFECTS + EXAMPLE, "Guide"))
    (tmp_path / "b.html").write_text(quarto_page(shell, DEFECTS, "Guide", ours=False))
    folded = (
        EXAMPLE.replace(
            '<div class="sourceCode">', '<details class="tq-source"><div class="sourceCode">'
        )
        + "</details>"
    )
    (tmp_path / "c.html").write_text(quarto_page(shell, folded, "Guide"))
    scrolled = (  # the number behind the formula, at the end of what scrolls
        "<style>.katex-display { overflow-x: auto } "
        ".katex-display > .katex > .katex-html > .tag { position: static }</style>"
    )
    (tmp_path / "d.html").write_text(quarto_page(shell, scrolled + DEFECTS, ours=False))
    problems = preview.Problems()
    assert preview.check_widths(tmp_path, problems) == 4
    assert [x for x in problems if x.startswith("a.html")] == []
    for words in (
        "at 390 px a search without a name: aa-Autocomplete",
        "at 390 px a docstring half in italics",
        "at 1280 px a command that is cut",
        "at 1280 px a button lies on code",
        "at 1280 px an output that is cut",
        "at 390 px the number of an equation lies on it: (11.1)",
        "at 390 px a number that breaks: +2.2 ± 0.7",
        "at 1280 px a hyphen for a minus: -1.5",
        "at 390 px a figure too small to read: wide.svg",
    ):
        assert any(x.startswith(f"b.html: {words}") for x in problems), (words, problems)
    assert any("c.html: at 390 px an example to type that is folded" in x for x in problems)
    assert any(
        "d.html: at 390 px the number of an equation is cut: (11.1)" in x for x in problems
    )


@needs_chromium
def test_a_page_that_does_not_end_is_named(tmp_path):
    plain_site(tmp_path, a=page(GOOD), b=page("<script>for (;;);</script>"), c=page(GOOD))
    problems = preview.Problems()
    assert preview.check_widths(tmp_path, problems, seconds=6) == 0
    assert preview.check_access(tmp_path, problems, seconds=6) == 0
    said = "chromium was not done after 6 s with b.html"
    assert problems == [f"widths: {said}", f"axe: {said} (light)"]


@needs_chromium
def test_folds_that_open_at_once_are_looked_at_once(tmp_path):
    folds = "<details><summary>more</summary><pre>x</pre></details>" * 300
    plain_site(tmp_path, many=page(folds))
    harness = """<!DOCTYPE html><body><iframe src="many.html"></iframe><script>
      const frame = document.querySelector("iframe"), wait = ms => new Promise(x => setTimeout(x, ms));
      frame.onload = async () => {
        await wait(200);
        const doc = frame.contentDocument, all = doc.querySelectorAll.bind(doc);
        let looks = 0;
        doc.querySelectorAll = x => { looks += x.includes(".katex-display, div.sourceCode"); return all(x); };
        for (const x of all("details")) x.open = true;
        await wait(1000);
        fetch("/measured", {method: "POST", body: JSON.stringify(looks)});
      };
    </script>"""
    assert 1 <= preview.in_browser(tmp_path, harness, 60) <= 10


@needs_chromium
def test_a_browser_sees_a_bar_that_grows_in_the_dark(tmp_path, shell):
    quarto_site(tmp_path, shell)
    (tmp_path / "a.html").write_text(quarto_page(shell, "<p>text</p>"))
    problems = preview.Problems()
    preview.check_widths(tmp_path, problems)
    assert problems == []
    dark = tmp_path / "shell" / "bootstrap-dark.css"
    dark.write_text(dark.read_text() + "\n.navbar { padding: 1rem 0; }")
    preview.check_widths(tmp_path, problems)
    assert len(problems) == 2 and all("px after the dark switch" in x for x in problems)


@needs_chromium
def test_axe_sees_quartos_dark_page(tmp_path, shell):
    quarto_site(tmp_path, shell)
    body = (
        '<div class="tq-live"><select aria-label="model"><option>one</option></select></div>'
        "<figure><figcaption>said</figcaption></figure>"
    )
    (tmp_path / "a.html").write_text(quarto_page(shell, body))
    (tmp_path / "b.html").write_text(quarto_page(shell, body, ours=False))
    problems = preview.Problems()
    assert preview.check_access(tmp_path, problems) == 2
    assert [x for x in problems if x.startswith("a.html")] == []
    assert any("b.html: axe, light, 390 px: button-name (critical" in x for x in problems)
    # the darkly theme by itself, without our palette
    theme = tmp_path / "shell" / "bootstrap-dark.css"
    grey = "\nbody, select { background: #222; } .tq-live select { color: #000; }"
    theme.write_text(theme.read_text() + grey)
    problems.clear()
    preview.check_access(tmp_path, problems, ["b.html"])
    assert any("b.html: axe, dark, 390 px: color-contrast" in x for x in problems)


def test_without_npm_the_layout_is_plain_and_ci_stops(tmp_path, monkeypatch, capsys):
    (tmp_path / "nbs").mkdir()
    shutil.copyfile(ROOT / "_quarto.yml", tmp_path / "_quarto.yml")
    for theme in (ROOT / "nbs").glob("*.scss"):
        shutil.copyfile(theme, tmp_path / "nbs" / theme.name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "")
    assert preview.quarto_shell(tmp_path) is None
    said = capsys.readouterr().out
    assert said.startswith("Pages have a plain layout, that of Quarto needs npm: ")
    assert "No such file or directory: 'npm'" in said
    monkeypatch.setenv("CI", "true")
    with refuses("The layout of Quarto needs npm", SystemExit):
        preview.quarto_shell(tmp_path)
    assert list((tmp_path / "build").iterdir()) == []


def test_the_lock_names_no_host_to_fetch_from():
    lock = json.loads((preview.SHELL / "package-lock.json").read_text())["packages"]
    packages = {name: x for name, x in lock.items() if name}
    assert all("resolved" not in x and x["integrity"] for x in packages.values())
    wanted = json.loads((preview.SHELL / "package.json").read_text())["dependencies"]
    assert {n: packages[f"node_modules/{n}"]["version"] for n in wanted} == wanted


COLOURS = """<p style="color:#888;background:#fff">pale</p><img src="x.png">
<pre><code>WIDE</code></pre>""".replace("WIDE", "wide " * 200)


@needs_chromium
def test_a_long_page_is_a_list_of_its_sections_on_a_phone(tmp_path):
    "Unfolded it would have more screens than a page may have."
    part = "<p>A line of text.</p>" * 200
    long = page("".join(f'<h2 id="part-{i}">Part {i}</h2>{part}' for i in range(4)))
    later = (
        '<script>addEventListener("DOMContentLoaded", () => '
        'document.querySelectorAll("main p").forEach(x => x.style.height = "25em"))</script>'
    )
    few = "".join(f'<h2 id="part-{i}">Part {i}</h2>{part[:400]}' for i in range(4))
    grown = page(later + few)  # as formulas make a page grow
    plain_site(tmp_path, folded=long, open=long.replace(SCRIPT, ""), later=grown)
    problems = preview.Problems()
    assert preview.check_widths(tmp_path, problems) == 3
    assert [line.partition(":")[0] for line in problems] == ["open.html"]
    assert "screens of a phone, the bound is 20" in problems[0]


def test_figures_follow_a_dark_page():
    "Quarto's dark mode is a class of the body, the preview's the system's choice."
    styles = (ROOT / "nbs" / "styles.css").read_text()
    turned = r"[^}]*--tq-picture: ?invert\(1\) hue-rotate\(180deg\); --tq-over: ?screen"
    assert re.search(r"body\.quarto-dark \{" + turned, styles)
    assert re.search(
        r"prefers-color-scheme:dark\) \{ :root:root \{" + turned, preview.LAYOUT.read_text()
    )
    assert re.search(r"main img \{[^}]*var\(--tq-picture\)[^}]*var\(--tq-over\)", styles)


@needs_chromium
def test_axe_sees_who_cannot_see(tmp_path):
    head = '<!DOCTYPE html><html lang="en"><head><title>page</title>'
    code = "".join(
        f'<span class="{x}">{x} </span>' for x in "kw im dv st co fu op va pp er".split()
    )
    good = GOOD + f'<div class="sourceCode"><pre><code>{code}</code></pre></div>'
    titled = lambda body: page(body).replace("<!DOCTYPE html><html><head>", head)
    named = titled(good).replace('type="range"', 'type="range" aria-label="size"')
    plain_site(tmp_path, good=named, bad=titled(COLOURS).replace(SCRIPT, ""))
    problems = preview.Problems()
    assert preview.check_access(tmp_path, problems) == 2
    assert [x for x in problems if x.startswith("good")] == []
    for rule in (
        "light, 390 px: color-contrast",
        "dark, 390 px: color-contrast",
        "light, 390 px: image-alt (critical",
        "light, 390 px: scrollable-region-focusable",
    ):
        assert any(f"bad.html: axe, {rule}" in x for x in problems), (rule, problems)
    assert sorted(x.name for x in tmp_path.iterdir() if x.name.startswith(".")) == []


ADDRESS = "https://a.github.io/b/"
ASKS = f"""<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js" integrity="x"></script>
<script src="https://cdnjs.cloudflare.com/ajax/libs/jquery/3.5.1/jquery.min.js" data-relocate-top="true"></script>
<script type="application/javascript">define('jquery', [],function() {{return window.jQuery;}})</script>
<a href="https://colab.research.google.com/x"><img src="https://colab.research.google.com/assets/colab-badge.svg" alt="Open in Colab"></a>
<pre><code># as in [`f`]({ADDRESS}m.html#f), [`g`](https://else.where/g), [`_h`]({ADDRESS}m.html#_h)</code></pre><p>[`f`]({ADDRESS}m.html)</p>"""


def test_a_finished_page_asks_no_other_host(tmp_path):
    assert len([x for x in finish_pages.Loads(ASKS).found if x]) == 3
    done = finish_pages.finish(ASKS, ADDRESS, "../")
    assert done == (
        '<a href="https://colab.research.google.com/x">Open in Colab</a>\n<pre><code># as in '
        '<a href="../m.html#f">f</a>, <a href="https://else.where/g">g</a>, _h</code></pre>'
        f"<p>[`f`]({ADDRESS}m.html)</p>"
    )
    assert finish_pages.finish(done, ADDRESS, "../") == done
    to = '<a href="https://github.com/u/r/blob/main/scripts/tools/finish_pages.py#finish">'
    (line,) = re.findall(r"#L(\d+)", finish_pages.finish(to, ADDRESS))
    code = Path(finish_pages.__file__).read_text().splitlines()
    assert code[int(line) - 1].startswith("def finish(")
    numbered = to.replace("#finish", "#L3")
    assert finish_pages.finish(numbered, ADDRESS) == numbered
    (tmp_path / "x.css").write_text("@import 'https://a.b/c.css'; b { background: url(n.png) }")
    (tmp_path / "n.png").write_bytes(b"0" * 1000)
    (tmp_path / "x.html").write_text(
        '<link rel="canonical" href="https://ours.org"><style>a { b: url(//d.e/f) }</style><link rel="stylesheet" href="x.css">'
    )
    assert finish_pages.loads(tmp_path, "x.html") == (
        {"x.html", "x.css", "n.png"},
        {"https://a.b/c.css", "//d.e/f"},
    )
    assert len(list(finish_pages.page_problems(tmp_path, "x.html"))) == 2
    (tmp_path / "y.html").write_text('<img src="n.png"><img src="m.png">')
    assert list(finish_pages.page_problems(tmp_path, "y.html")) == []
    (tmp_path / "m.png").write_bytes(b"0" * finish_pages.MAX_PAGE)
    (found,) = finish_pages.page_problems(tmp_path, "y.html")
    assert "loads 601 KB, the limit is 600: m.png 600 KB" in found
    with refuses("has no pages", SystemExit):
        finish_pages.main([str(tmp_path / "nothing")])
    assert finish_pages.main([str(tmp_path)]) == 1  # x.html
    (tmp_path / "x.html").unlink()
    assert finish_pages.main([str(tmp_path)]) == 0


def test_words_of_prose_are_counted_and_bounded():
    text = (
        "Two words, `code` $x^2$ [link](a.html).\n```python\nnone of these\n```\n$$a + b$$ <br>"
    )
    assert preview.prose_words(text) == 4
    words, problems = preview.shelf_words(ROOT), preview.Problems()
    assert words["all"] == sum(words.values()) - words["all"] > words["book"] > 30_000
    preview.check_words(words | {"book": preview.MOST_WORDS["book"] + 1}, problems)
    assert len(problems) == 1 and problems[0].startswith("book: ")


def test_markdown_in_code_is_seen():
    reader, problems = preview.PageReader(), preview.Problems()
    reader.feed("<pre><code># see [`f`](https://a.b/c.html#f)</code></pre>")
    preview.check_leaks("x.html", reader, problems)
    assert len(problems) == 1 and "Markdown shows in code: [`f`](https://" in problems[0]


def test_the_glossary_of_the_site_is_that_of_the_book(tmp_path):
    text = preview.glossary(ROOT)
    assert text == (ROOT / "nbs" / "glossary.js").read_text(encoding="utf-8")
    assert (
        '"recent tokens": "the last and the first tokens' in text
        and '"sinks": "the last' in text
    )
    assert '"fold"' not in text and '"word"' not in text  # in italics; the head of the table


def test_links_lead_out_of_a_folder_and_into_one(tmp_path):
    names = {"10_a.ipynb", "reference/87a_b.ipynb", "measured/90_c.ipynb"}
    problems = preview.Problems()
    inside = preview.Shape("reference/b.html", names, ADDRESS, problems)
    assert inside.link("../measured/90_c.ipynb#x") == "../measured/c.html#x"
    assert inside.link(f"{ADDRESS}a.html#f") == "../a.html#f"
    outside = preview.Shape("a.html", names, ADDRESS, problems)
    assert outside.link("reference/87a_b.ipynb") == "reference/b.html"
    assert outside.link(f"{ADDRESS}reference/b.html") == "reference/b.html"
    assert problems == []
    inside.link("10_a.ipynb")  # from a folder, to what lies beside it
    assert problems == ["reference/b.html: a link to 10_a.ipynb, but nbs/ has no such notebook"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        front = "---\naliases: [/b.html]\n---" if "87a" in name else "# Title"
        (tmp_path / name).write_text(json.dumps({"cells": [md(front)]}))
    assert list(preview.address_problems(sorted(names), tmp_path)) == []
    (tmp_path / "20_b.ipynb").write_text(json.dumps({"cells": []}))
    (found,) = preview.address_problems(["20_b.ipynb", *names], tmp_path)
    assert found == "reference/87a_b.ipynb and 20_b.ipynb have one address, b.html"


def md(source, kind="markdown"):
    return {"cell_type": kind, "source": source}


def test_equations_have_one_scheme():
    problems = preview.Problems()
    good = [
        md("$$a=b \\tag{13.1}$$\nand $$\nc=d \\tag{13.2}\n$$"),
        md('"by equation (13.1), equations (13.1) and (13.2)"', "code"),
    ]
    assert (
        preview.check_equations("13_x.ipynb", good, problems) == ["13.1", "13.2"]
        and problems == []
    )
    for name, cells, words in (
        ("13_x.ipynb", [md("$$a=b$$")], "has the number None, due is 13.1"),
        ("13_x.ipynb", [md("$$a=b \\tag{1}$$")], "has the number 1, due is 13.1"),
        ("43b_x.ipynb", [md("$$a \\tag{43b.2}$$")], "due is 43b.1"),
        ("13_x.ipynb", [*good, md("$$a$$ {#eq-x}")], "{#eq-x: equations are numbered"),
        (
            "13_x.ipynb",
            [*good, md('"See @eq-gap."', "code")],
            "@eq-gap: equations are numbered",
        ),
        ("13_x.ipynb", [*good, md("Equation (3) says")], "equation (3) is cited and not there"),
        (
            "13_x.ipynb",
            [*good, md("by equations (13.1) and (13.3)")],
            "equation (13.3) is cited and not there",
        ),
        ("guide.ipynb", [md("$$a \\tag{13.1}$$")], "has the number 13.1, due is 1"),
    ):
        problems = preview.Problems()
        preview.check_equations(name, cells, problems)
        assert any(words in line for line in problems), (words, problems)


@pytest.fixture
def public_names(monkeypatch):
    "Read once."
    every = list(search_names.public_names())
    monkeypatch.setattr(search_names, "public_names", lambda *_: every)
    return every


def test_a_search_for_a_public_name_leads_to_its_section(tmp_path, public_names):
    names, every = search_names, public_names
    public = {name: (where, text) for name, where, text in every}
    assert public["TurboQuantCache"][0] == "reference/hf_cache.html#turboquantcache" and public[
        "TurboQuantCache.report"
    ][1].startswith("Bytes held")
    assert not any(part.startswith("_") for name in public for part in name.split("."))
    for name, where, _ in every:
        page, anchor = where.split("#")
        if name not in ("KVStore", "KVStore.append"):
            (tmp_path / page).parent.mkdir(exist_ok=True)
            with open(tmp_path / page, "a") as f:
                f.write(f'<h3 id="{anchor}"></h3>')
    found, missing = names.index_of(tmp_path)
    assert missing == ["KVStore (store.html#kvstore)"]
    by_name = {x["section"]: x for x in found}
    assert "KVStore.append" not in by_name
    held = by_name["TurboQuantCache"]
    assert held["href"] == held["objectID"] == "reference/hf_cache.html#turboquantcache"
    assert held["crumbs"] == ["Transformers", "hf.cache"] and held["rank"] == 2
    with refuses("no section for KVStore", SystemExit):
        names.main([str(tmp_path)])
    with refuses("has no pages; render the site first", SystemExit):
        names.main([str(tmp_path / "none")])


SECTIONS = """<h1>{title}</h1><p>What it is about.</p><div class="sourceCode"><pre><code>hidden = 1</code></pre></div>
<section id="one" class="level2"><h2>{head}</h2><p>{text} <span class="math inline">x^2</span></p><pre><code>printed</code></pre></section>"""


def test_the_index_holds_prose_and_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr(search_names, "public_names", lambda *_: ())
    texts = {}
    for page in ("guide.html", "store.html"):
        body = SECTIONS.format(title="Title", head="Head", text="Some text.")
        (tmp_path / page).write_text(f"<main>{body}</main>")
        index = search_names.index_of(tmp_path)[0]
        texts[page] = [
            (x["href"], x["section"], x["text"]) for x in index if x["href"].startswith(page)
        ]
    assert texts == {
        "guide.html": [
            ("guide.html", "", "What it is about."),
            ("guide.html#one", "Head", "Some text. printed"),  # the Manual's tables
        ],
        "store.html": [
            ("store.html", "", "What it is about."),
            ("store.html#one", "Head", "Some text."),
        ],
    }


@needs_chromium
def test_a_search_finds_the_manual_first(tmp_path, shell):
    "By Quarto's own functions and Fuse: the chapter has the words in its title and heading."
    quarto_site(tmp_path, shell)
    for page, title, text in (
        ("guide.html", "Guide", "What vLLM, perplexity, Qwen3, two bits and 2 bits do. " * 9),
        ("quantizer.html", "11 · 2 bits, two bits", "vLLM perplexity Qwen3"),
    ):
        body = SECTIONS.format(title="", head=title, text=text)
        (tmp_path / page).write_text(quarto_page(shell, body, title))
    index = search_names.index_of(tmp_path)[0]
    (tmp_path / "search.json").write_text(json.dumps(index))
    problems = preview.Problems()
    preview.check_widths(tmp_path, problems, searches=preview.SEARCHES)
    assert problems == []
    text = (tmp_path / "quantizer.html").read_text()  # the page that asks: Fuse's own order
    (tmp_path / "quantizer.html").write_text(
        text.replace("Fuse.prototype", "Other").replace(SCRIPT, "")
    )
    preview.check_widths(tmp_path, problems, searches=preview.SEARCHES)
    due = [x for x in problems if "a page of the Manual is due" in x]
    assert len(due) == len(preview.SEARCHES) and all(
        x.startswith("quantizer.html") for x in due
    )
