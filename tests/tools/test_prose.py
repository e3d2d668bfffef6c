"""What the chapters say, held to what they show: a measured number in the prose of a page of
results or of theory is one that a cell of that page prints or asserts, a formula holds no word
that the site explains, and a name in backticks leads to the page that it means."""

import json
import re

import pytest
from nbdev.doclinks import _re_backticks

from tests.helpers import ROOT, cells, source
from turboquant_nb import _modidx

PAGES = {p.stem: p for p in sorted((ROOT / "nbs").rglob("*.ipynb"))}
CHECKED = (
    "02_ten_minutes 04_codebook 05_rotation 06_rope 07_qjl 08_transforms 09_rates "
    "11_quantizer 12_codes 13_calibration 24_sensitivity 30_own_code vllm_backend "
    "evaluation_models"
).split()
RESULTS = [x for x, path in PAGES.items() if x in CHECKED or path.parent.name == "measured"]
RESULTS = [x for x in RESULTS if x not in ("closed", "frames")]

# Numbers that no cell of the page shows, and whose they are.
ELSEWHERE = {
    "04_codebook": {"1.87", "4.4"},  # of two numbers of the table; a bound
    "07_qjl": {"3.2", "8.1", "2.75"},  # a lemma; of two formulas
    "08_transforms": {"7.4"},  # a section of a book
    "11_quantizer": {".125"},  # 16 bits of 128
    "12_codes": {"5.66", "2.625"},  # worked out
    "02_ten_minutes": {".03", "29%"},  # worked out: 64 numbers in 2,048; of two rows
    "evaluation_models": {"4.25"},  # a setting
    "vector_search": {".016", ".018"},  # a bound, of two rows
    "proteins": {".964", "2.07"},  # TurboESM's; of SCOPe
    "images": {"3.76", "2.1"},  # Molmo2's sizes; a version
    "choices": {"19.48", "13.60", "12.94"},  # the MLX reproduction's
    "sparse_values": {"22.8%"},  # TurboQuantDC's
    "retrieval": {"1.27"},  # worked out in the sentence
}
NUMBER = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+)(?:\s?(%))?")


def prose(text):
    "Without formulas, code, addresses and numbers of papers."
    text = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$]*\$", "", text, flags=re.S)
    text = re.sub(r"`[^`]*`|<code>.*?</code>|\]\([^)]*\)|arXiv \S+", "", text, flags=re.S)
    return re.sub(r"\(\d+[a-z]?\.\d+\)|\d{4}\.\d{5}", "", text)  # equations, papers


def measured(text):
    "Decimals and percentages, as they are written."
    found = (m.groups(default="") for m in NUMBER.finditer(prose(text)))
    return [x + percent for x, percent in found if "." in x or percent]


def numbers(text):
    found = re.findall(r"\d{1,3}(?:,\d{3})+|\d+\.?\d*(?:e-\d+)?|\.\d+", text)
    return {float(x.replace(",", "")) for x in found}


def shown(name):
    "All numbers that code cells of a page print, or hold outside of comments."
    text = []
    for c in cells(name, "code"):
        text.append(re.sub(r"#.*", "", source(c)))
        for out in c.get("outputs", []):
            text += out.get("text", []), out.get("data", {}).get("text/markdown", [])
    return numbers("\n".join("".join(x) for x in text))


def agrees(number, pool):
    """Rounded as the prose has it, some number of the pool is this one: as it is, or for a
    percentage as a share, or as what a share leaves."""
    value, percent = number.removesuffix("%").replace(",", ""), number.endswith("%")
    half = 0.5001 * 10 ** -len(value.partition(".")[2])
    ways = [lambda p: p]
    if percent:
        ways += [lambda p: 100 * p, lambda p: 100 * (1 - p), lambda p: 100 * (p - 1)]
        ways += [lambda p: 100 - p]
    return any(abs(abs(way(p)) - float(value)) <= half for p in pool for way in ways)


@pytest.mark.parametrize("name", RESULTS)
def test_a_number_in_prose_is_one_that_a_cell_shows(name):
    pool, known = shown(name), ELSEWHERE.get(name, set())
    said = [x for c in cells(name, "markdown") for x in measured(source(c))]
    assert [x for x in said if x not in known and not agrees(x, pool)] == []
    assert [x for x in known if x not in said or agrees(x, pool)] == []  # no exception too many


def test_no_word_of_the_glossary_stands_in_a_formula():
    "The site marks a word's first mention, and a formula that is cut in two stays raw TeX."
    script = (ROOT / "nbs/glossary.js").read_text(encoding="utf-8")
    words = json.loads(script[script.index("{") : script.rindex("}") + 1])
    word = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})s?(?![\w-])", re.I)
    broken = {
        (name, *word.findall(formula))
        for name in PAGES
        for c in cells(name, "markdown")
        for formula in re.findall(
            r"\$\$.*?\$\$", re.sub(r"```.*?```", "", source(c), flags=re.S), re.S
        )
        if word.search(formula)
    }
    assert broken == set()


# Names in backticks
# --------------------------------------------------------------------------------------

# nbdev links a name in backticks to the first module that has one of that name. What means
# something else stands in <code>, and generate() of transformers is `model.generate()`. These
# are common words that do mean the other page.
MEANT = {
    "book": {"plan", "embed", "contacts"},
    "12_codes": {"encode"},
    "kernels_launch": {"explain"},
    "24_sensitivity": {"calibrate"},
    "26_esm": {"sensitivity"},
    "leaderboard": {"preset"},
    "lecturer": {"commutes"},
}


def homes():
    "name -> pages of the modules that define it; the first is where nbdev leads."
    found = {}
    for module, names in _modidx.d["syms"].items():
        for full, (page, _) in names.items():
            found.setdefault(full.removeprefix(f"{module}."), []).append(
                page.partition("#")[0].rpartition("/")[2]
            )
    return found


def wrong_links(page, text, home):
    own = re.sub(r"^\d+[a-z]?_", "", page) + ".html"
    fence = False
    for line in text.split("\n"):
        fence ^= line.startswith("```")
        if fence or line.startswith(("```", "    ")):
            continue
        for name in _re_backticks.findall(line):
            to = home.get(name, [own])
            word = len(to) > 1 or to[0].startswith("cli_") or name.islower() and name.isalpha()
            if to[0] != own and word and name not in MEANT.get(page, ()):
                yield name


def test_a_name_in_backticks_leads_to_what_it_means():
    home = homes()
    assert list(wrong_links("generate", "calls of `generate()`", home)) == ["generate"]
    assert list(wrong_links("generate", "calls of `model.generate()`", home)) == []
    text = {x: "\n\n".join(map(source, cells(x, "markdown"))) for x in PAGES}
    for x in PAGES:  # what a cell shows as Markdown is linked, too
        shown = (o.get("data", {}) for c in cells(x, "code") for o in c.get("outputs", ()))
        text[x] += "\n\n".join("".join(data.get("text/markdown", "")) for data in shown)
    found = {
        (page, name)
        for page in PAGES
        if not page.startswith("cli_")  # a command's page speaks of commands
        for name in wrong_links(page, text[page], home)
    }
    assert found == set()
