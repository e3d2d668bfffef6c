"""README's first program runs as it stands there, and prints what stands under it; badges and
pictures are those of the repository."""

import json
import re

import pytest
import torch
from huggingface_hub import constants

from tests.helpers import ROOT, cells, source
from notebooks import settings, site_address
from turboquant_nb.evaluation.models import load_model

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM, PRINTED = re.search(
    r"^```python\n(.*?)^```\n\n```\n(.*?)^```", README, re.M | re.S
).groups()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """No hub but a folder in which transformers finds the embedded model under its name there,
    in the hub's dtype."""
    (name,) = re.findall(r'^name = "([^"]+)"', PROGRAM, re.M)
    commit = "0" * 40
    place = tmp_path / f"models--{name.replace('/', '--')}"
    folder = place / "snapshots" / commit
    folder.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    model, tokenizer = load_model("embedded", progress=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_the_program_prints_what_stands_under_it(hub, capsys):
    exec(compile(PROGRAM, "README", "exec"), {})
    assert capsys.readouterr().out == PRINTED


def test_the_guide_begins_with_the_same_program():
    "As a cell that runs on Colab, with the same lines under it."
    (cell,) = (c for c in cells("guide", "code") if PROGRAM.strip() in source(c))
    assert "".join(cell["outputs"][0]["text"]) == PRINTED


def test_badges_lead_to_what_is_there():
    "To this repository's workflow, licence, notebook and site, and to no index of packages."
    cfg = settings(ROOT)
    home, branch = f"github.com/{cfg['user']}/{cfg['repo']}", cfg["branch"]
    badges = dict(re.findall(r"^\[!\[([^\]]+)\]\([^)]+\)\]\(([^)]+)\)$", README, re.M))
    assert badges.pop("Tests") == f"https://{home}/actions/workflows/test.yml"
    assert badges.pop("Documentation") == site_address(cfg)
    for address in badges.values():
        path = re.sub(
            rf"^https://\S*github(?:\.com)?/{cfg['user']}/{cfg['repo']}/blob/{branch}/",
            "",
            address,
        )
        assert (ROOT / path).is_file(), address
    assert "pypi.org" not in README.lower()
    workflow = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    (pythons,) = (x.removeprefix("Python ") for x in badges if x.startswith("Python"))
    assert json.loads(re.search(r"python: (\[.*\])", workflow)[1]) == pythons.split(", ")


def test_the_figure_has_a_picture_for_either_ground():
    "Both are there, differ, and stand in one element, whose text says what they show."
    picture = re.search(r"<picture>.*?</picture>", README, re.S)[0]
    dark = re.search(
        r'<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">', picture
    )[1]
    light = re.search(r'<img alt="[^"]{100,}" src="([^"]+)" width="600">', picture)[1]
    one, other = ((ROOT / x).read_bytes() for x in (light, dark))
    assert one != other and all(x.startswith(b"\x89PNG") for x in (one, other))
    assert one[16:24] == other[16:24]  # width and height
