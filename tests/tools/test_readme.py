"""Our own README, audited: it is short, and every number that is measured is printed by a cell
that reads a file of results."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = json.loads((ROOT / "nbs" / "index.ipynb").read_text(encoding="utf-8"))
SEARCH = json.loads(
    (ROOT / "results" / "eval" / "h200-presets2.json").read_text(encoding="utf-8")
)

# Numbers that are no measurements: what each is. A measured number has no place here; it is
# printed by a cell.
SETTINGS = {
    "2": "bits from",
    "4": "bits to; exact sinks",
    "3.11": "the oldest Python",
    "3.1": "Llama's version",
    "8": "billions of weights of its shape",
    "135": "millions of weights of SmolLM2",
    "16": "recent tokens",
    "32": "windows",
    "512": "tokens read and scored",
    "2.0": "Apache",
}


def prose(text):
    "What a reader takes for a statement: no fenced or inline code, no addresses, no years."
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|arXiv \S+", "", text, flags=re.S)
    return re.sub(r"\b(?:19|20)\d\d\b", "", text)


def numbers(text):
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", prose(text))


def outputs():
    """What cells of the index print: held to the files of results by
    scripts/tools/test_notebooks.py."""
    for cell in INDEX["cells"]:
        for out in cell.get("outputs", []):
            for text in (out.get("text", ""), out.get("data", {}).get("text/markdown", "")):
                yield "".join(text)


def written(text):
    "The README without what cells print."
    for part in outputs():
        if part.strip():
            text = text.replace(part.strip(), "")
    return text


def unaccounted(text):
    return [x for x in numbers(written(text)) if x.rstrip(",") not in SETTINGS]


def test_it_is_short_and_holds_three_measured_rows():
    assert len(README.splitlines()) <= 120
    table = next(x for x in outputs() if "tokens per second" in x)
    assert len(table.strip().splitlines()) == 2 + 3 and table.strip() in README


def test_every_number_is_printed_by_a_cell_or_is_a_setting():
    assert unaccounted(README) == []
    assert (
        SEARCH["data"]["n"] == 32 and "512" not in SEARCH["data"]["id"]
    )  # the caption's windows


def test_a_typed_measurement_is_seen():
    typed = README + "\nPerplexity grows by 4.4 % in place of 6.8.\n"
    assert unaccounted(typed) == ["4.4", "6.8"]
    table = next(x for x in outputs() if "tokens per second" in x).strip()
    assert (
        unaccounted(README.replace(table, table.replace("34.6 GB", "35.1 GB"))) != []
    )  # no longer what the cell prints


def test_nothing_is_claimed_of_a_model_without_its_weights():
    "The 8B model has random weights: who reads its numbers reads that too."
    assert "random weights" in prose(README).replace("*", "")


def test_another_home_of_the_repository_is_seen(monkeypatch):
    "Owner and repository are those of settings.ini, wherever an address is written."
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check

    cfg = check.settings()
    own = f"https://github.com/{cfg['user']}/{cfg['repo']} https://{cfg['user']}.github.io/{cfg['repo']}/a.html"
    assert check.other_homes(own) == []
    assert check.other_homes(
        own + f" https://colab.research.google.com/github/someone/{cfg['repo']}/blob/main"
    ) == [f"someone/{cfg['repo']}"]
    assert check.other_homes(
        f"https://github.com/someone/{cfg['repo']}/x https://else.github.io/{cfg['repo']}/"
    ) == sorted({f"someone/{cfg['repo']}", f"else/{cfg['repo']}"})
