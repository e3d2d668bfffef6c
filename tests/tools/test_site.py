"""What the site's check finds in a browser: what sticks out of a page, stands open, does not
sort, or computes something else than Python."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location(
    "preview_docs", ROOT / "scripts" / "tools" / "preview_docs.py"
)
preview = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preview)

import finish_pages  # beside preview_docs, which puts its folder on the path

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
<pre style="white-space:pre-wrap">wraps</pre><span class="equation" style="display:block;position:relative"><math><mi>x</mi></math><span class="number" style="position:absolute;left:0">(1)</span></span>"""


def page(body):
    return f"""<!DOCTYPE html><html><head><meta charset="utf-8"><link rel="stylesheet" href="layout.css"><link rel="stylesheet" href="styles.css"></head>
<body><div class="page"><main>{body}</main></div><script src="site.js"></script></body></html>"""


@pytest.mark.skipif(preview.browser() is None, reason="no chromium on the PATH")
def test_a_browser_sees_what_is_wrong(tmp_path):
    (tmp_path / "layout.css").write_text(preview.LAYOUT.read_text())
    for name in ("styles.css", "site.js"):
        (tmp_path / name).write_text((ROOT / "nbs" / name).read_text())
    (tmp_path / "good.html").write_text(page(GOOD))
    (tmp_path / "bad.html").write_text(page(BAD))
    (tmp_path / "twice.html").write_text(
        page(GOOD + '<dfn class="tq-term" data-name="tile" data-tip="256 tokens">tile</dfn>')
    )
    (tmp_path / "unscripted.html").write_text(
        page(GOOD).replace('<script src="site.js"></script>', "")
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
        "lies on its equation",
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


COLOURS = """<p style="color:#888;background:#fff">pale</p><img src="x.png">
<pre><code>WIDE</code></pre>""".replace("WIDE", "wide " * 200)


@pytest.mark.skipif(preview.browser() is None, reason="no chromium on the PATH")
def test_a_long_page_is_a_list_of_its_sections_on_a_phone(tmp_path):
    "Unfolded it would have more screens than a page may have."
    (tmp_path / "layout.css").write_text(preview.LAYOUT.read_text())
    for name in ("styles.css", "site.js"):
        (tmp_path / name).write_text((ROOT / "nbs" / name).read_text())
    part = "<p>A line of text.</p>" * 200
    long = page("".join(f'<h2 id="part-{i}">Part {i}</h2>{part}' for i in range(4)))
    (tmp_path / "folded.html").write_text(long)
    (tmp_path / "open.html").write_text(long.replace('<script src="site.js"></script>', ""))
    problems = preview.Problems()
    assert preview.check_widths(tmp_path, problems) == 2
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


@pytest.mark.skipif(preview.browser() is None, reason="no chromium on the PATH")
def test_axe_sees_who_cannot_see(tmp_path):
    (tmp_path / "layout.css").write_text(preview.LAYOUT.read_text())
    for name in ("styles.css", "site.js"):
        (tmp_path / name).write_text((ROOT / "nbs" / name).read_text())
    head = '<!DOCTYPE html><html lang="en"><head><title>page</title>'
    code = "".join(
        f'<span class="{x}">{x} </span>' for x in "kw im dv st co fu op va pp er".split()
    )
    good = GOOD + f'<div class="sourceCode"><pre><code>{code}</code></pre></div>'
    for name, body in (("good", good), ("bad", COLOURS)):
        text = page(body).replace("<!DOCTYPE html><html><head>", head)
        text = text.replace('type="range"', 'type="range" aria-label="size"')
        if name == "bad":
            text = text.replace('<script src="site.js"></script>', "")
        (tmp_path / f"{name}.html").write_text(text)
    problems = preview.Problems()
    assert preview.check_access(tmp_path, problems) == 2
    assert [x for x in problems if x.startswith("good")] == []
    for rule in (
        "light: color-contrast",
        "dark: color-contrast",
        "light: image-alt (critical",
        "light: scrollable-region-focusable",
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
    with pytest.raises(SystemExit, match="has no pages"):
        finish_pages.main([str(tmp_path / "nothing")])
    assert finish_pages.main([str(tmp_path)]) == 1  # x.html
    (tmp_path / "x.html").unlink()
    assert finish_pages.main([str(tmp_path)]) == 0


def test_words_of_prose_are_counted_and_bounded():
    text = (
        "Two words, `code` $x^2$ [link](a.html).\n```python\nnone of these\n```\n$$a + b$$ <br>"
    )
    assert preview.prose_words(text) == 4
    words = preview.shelf_words(ROOT)
    assert words["all"] == sum(words.values()) - words["all"] > words["book"] > 30_000
    problems = preview.Problems()
    preview.check_words(words, problems)
    assert problems == []
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
        ("guide.ipynb", [md("$$a \\tag{13.1}$$")], "has the number 13.1, due is None"),
    ):
        problems = preview.Problems()
        preview.check_equations(name, cells, problems)
        assert any(words in line for line in problems), (words, problems)


def test_a_search_for_a_public_name_leads_to_its_section(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "search_names", ROOT / "scripts" / "tools" / "search_names.py"
    )
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    every = list(names.public_names())
    public = {name: (where, text) for name, where, text in every}
    assert public["TurboQuantCache"][0] == "cache.html#turboquantcache" and public[
        "TurboQuantCache.report"
    ][1].startswith("Bytes held")
    assert not any(part.startswith("_") for name in public for part in name.split("."))
    for name, where, _ in every:
        page, anchor = where.split("#")
        if name not in ("KVStore", "KVStore.append"):
            (tmp_path / page).parent.mkdir(exist_ok=True)
            with open(tmp_path / page, "a") as f:
                f.write(f'<h3 id="{anchor}"></h3>')
    found, missing = names.entries(tmp_path)
    assert missing == ["KVStore (store.html#kvstore)"] and "KVStore.append" not in {
        x["section"] for x in found
    }
    index = [
        {
            "objectID": "cache.html",
            "href": "cache.html",
            "title": "51 The cache",
            "section": "",
            "text": "",
            "crumbs": ["Book"],
        },
        {
            "objectID": "cache.html#the-cache",
            "href": "cache.html#the-cache",
            "title": "51 The cache",
            "section": "The cache",
            "text": "",
        },
    ]
    once = names.add_names(index, found)
    assert names.add_names(once, found) == once and once[:2] == index
    (entry,) = (x for x in once if x["section"] == "TurboQuantCache")
    assert entry == {
        "objectID": "cache.html#turboquantcache",
        "href": "cache.html#turboquantcache",
        "title": "51 The cache",
        "section": "TurboQuantCache",
        "text": public["TurboQuantCache"][1],
        "crumbs": ["Book"],
    }
    with pytest.raises(SystemExit, match="search.json is not there"):
        names.main([str(tmp_path)])
    (tmp_path / "search.json").write_text("[]")
    with pytest.raises(SystemExit, match="no section for KVStore"):
        names.main([str(tmp_path)])
