"""The page of models: every class that was tried stands in its table under the name that people
use, and the field above it finds them however they are spelt."""

import json
import re

import preview_docs as preview
import pytest

from tests.helpers import ROOT, cells

(PAGE,) = (
    html
    for c in cells("architectures")
    for out in c.get("outputs", [])
    if "tq-models" in (html := "".join(out.get("data", {}).get("text/html", "")))
)
ROWS = [
    [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
    for row in re.findall(r"<tr>(<td.*?)</tr>", PAGE)
]


def test_every_class_stands_there_with_its_answer():
    record = json.loads((ROOT / "results/architectures/cpu.json").read_text(encoding="utf-8"))
    told = {name: answer for _, _, answer, name in ROWS}
    assert told.keys() == {x["class"] for x in record["rows"]} and len(told) == len(ROWS)
    for x in record["rows"]:
        assert told[x["class"]].startswith(x["answer"])
        assert ("hybrid" in told[x["class"]]) == bool(x.get("states"))


def test_without_scripts_all_rows_show_and_no_field():
    assert 'data-k="search" hidden' in PAGE and "<tr hidden" not in PAGE
    assert '<label for="tq-models-field">' in PAGE and 'id="tq-models-field"' in PAGE


TYPED = {
    "": None,  # all
    "qwen3": {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"},
    "Llama 3.1": {"LlamaForCausalLM"},
    "GPT OSS": {"GptOssForCausalLM"},
    "gemma-4": {"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"},
    "phi4": {"Phi3ForCausalLM", "Phi4MultimodalForCausalLM"},
    "Glm4MoeForCausalLM": {"Glm4MoeForCausalLM"},
    "no such model": set(),
}


@pytest.mark.skipif(preview.browser() is None, reason="no chromium on the PATH")
def test_the_field_filters_as_one_types(tmp_path):
    (tmp_path / "models.js").write_text((ROOT / "nbs" / "models.js").read_text())
    harness = f"""<!DOCTYPE html><meta charset="utf-8">{PAGE}<script>
const box = document.getElementById("tq-models"), field = box.querySelector("input"), found = {{}};
for (const typed of {json.dumps([*TYPED])}) {{
  field.value = typed;
  field.dispatchEvent(new Event("input", {{bubbles: true}}));
  const shown = [...box.querySelectorAll("tbody tr")].filter(row => row.getClientRects().length);
  found[typed] = [shown.map(row => row.cells[row.cells.length - 1].textContent), box.querySelector("[role=status]").textContent];
}}
fetch("/measured", {{method: "POST", body: JSON.stringify([field.getClientRects().length, found])}});
</script>"""
    field_shows, found = preview.in_browser(tmp_path, harness, 60)
    assert field_shows
    everything = {name for *_, name in ROWS}
    for typed, due in TYPED.items():
        shown, count = found[typed]
        if due is None:
            assert {*shown} == everything and count == f"{len(ROWS)} of {len(ROWS)}"
        elif due:
            assert due <= {*shown} and len(shown) < 8, typed
            assert count == f"{len(shown)} of {len(ROWS)}"
        else:
            assert not shown and count.startswith("none")
