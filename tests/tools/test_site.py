"What the site's check finds in a browser: what sticks out of a page, stands open, does not sort, or computes something else than Python."
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("preview_docs", ROOT / "scripts" / "tools" / "preview_docs.py")
preview = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preview)

LONG = "\n".join(f"x{i} = {i}" for i in range(40))
TABLE = "<table><thead><tr><th>name</th><th>µs</th></tr></thead><tbody>" + "".join(f"<tr><td>{n}</td><td>{v}</td></tr>" for n, v in (("b", "10"), ("a", "9"), ("c", "1,000"), ("d", "2"))) + "</tbody></table>"
GOOD = f"""<div class="sourceCode"><pre><code>def f(): pass\n{LONG}</code></pre></div>
<div class="cell-output"><pre><code>fine\nraised ValueError: as it must</code></pre></div>
<pre><code>{"wide " * 200}</code></pre>{TABLE}
<div class="tq-live" id="live" data-expect="2"><input type="range" min="1" max="9" value="2"></div>
<script>(() => {{ const b = document.getElementById("live"), f = () => b.dataset.value = b.firstElementChild.value; b.addEventListener("input", f); f(); }})()</script>"""
BAD = """<div style="width:1500px">too wide</div><div class="tq-live" id="live" data-expect="3" data-value="2"><input type="range" min="1" max="9" value="2"></div>
<pre style="white-space:pre-wrap">wraps</pre><span class="equation" style="display:block;position:relative"><math><mi>x</mi></math><span class="number" style="position:absolute;left:0">(1)</span></span>"""


def page(body):
    return f"""<!DOCTYPE html><html><head><meta charset="utf-8"><link rel="stylesheet" href="layout.css"><link rel="stylesheet" href="styles.css"></head>
<body><div class="page"><main>{body}</main></div><script src="site.js"></script></body></html>"""


@pytest.mark.skipif(preview.browser() is None, reason="no chromium on the PATH")
def test_a_browser_sees_what_is_wrong(tmp_path):
    (tmp_path / "layout.css").write_text(preview.LAYOUT_CSS)
    for name in ("styles.css", "site.js"):
        (tmp_path / name).write_text((ROOT / "nbs" / name).read_text())
    (tmp_path / "good.html").write_text(page(GOOD))
    (tmp_path / "bad.html").write_text(page(BAD))
    (tmp_path / "unscripted.html").write_text(page(GOOD).replace('<script src="site.js"></script>', ""))
    problems = preview.Problems()
    assert preview.check_widths(tmp_path, problems) == 3
    found = {name: [line for line in problems if line.startswith(name)] for name in ("good", "bad", "unscripted")}
    assert found["good"] == []
    for words in ("390 px sticks out to 15", "1280 px sticks out to 15", "computes 2, Python 3", "does not follow its control", "code that wraps", "lies on its equation"):
        assert any(words in line for line in found["bad"]), (words, found["bad"])
    for words in ("long source that stands open", "refusals that stand open"):
        assert any(words in line for line in found["unscripted"]), words
