"The planner of the home page computes what `turboquant plan` does."

import json
import random
import re

import preview_docs as preview
import pytest

from tests.helpers import ROOT, cells, source
from turboquant_nb import cli, preset

CELLS = cells("index")
(PAGE,) = (
    "".join(out["data"]["text/html"])
    for c in CELLS
    for out in c.get("outputs", [])
    if "tq-plan" in "".join(out.get("data", {}).get("text/html", ""))
)
DATA = json.loads(re.search(r'id="tq-plan-data">(.*?)</script>', PAGE, re.S)[1])


@pytest.fixture(scope="module")
def made():
    "What the cells of the planner define, from the package as it is."
    space = {"json": json, "preset": preset}  # of cells above
    for c in CELLS:
        code = source(c)
        if c["id"].startswith("91a0") and c["cell_type"] == "code":
            exec(compile(code, c["id"], "exec"), space)
    return space


def test_the_numbers_of_the_page_are_the_package_s(made):
    assert json.loads(json.dumps(made["data"])) == DATA
    assert {x["weights"] for x in DATA["models"].values()} >= {2 * 8030261248, 2 * 7615616512}


@pytest.mark.skipif(preview.browser() is None, reason="no chromium on the PATH")
def test_its_arithmetic_is_that_of_plan(made, tmp_path):
    plan, r = made["plan"], random.Random(0)
    sizes, cases, due = {}, [], []
    for model, config in made["CONFIGS"].items():
        for name in ("16 bits", *made["NAMES"]):
            sized = (
                None
                if name == "16 bits"
                else plan.CacheSize(config, preset(name), made["torch"].bfloat16)
            )
            plain = lambda n, b, c=config: plan.plain_bytes(c, n, b, 2)
            sizes[model, name] = (sized.bytes, sized.most) if sized else (plain, plain)
            for _ in range(1 if name == "16 bits" else 4):  # whose bytes are slowly counted
                gpu, n, b = (
                    r.choice(list(DATA["gpus"])),
                    r.randint(1, 1 << 20),
                    r.randint(1, 200),
                )
                cases.append((model, gpu, name, n, b))
    for model, gpu, name, n, b in cases:
        (held, most), room = (
            sizes[model, name],
            DATA["gpus"][gpu][0] - DATA["models"][model]["weights"] - 10**9,
        )
        due.append(
            [held(n, b), held(n, b) <= room, plan.largest(lambda x, f=most: f(x, b), room)]
        )
    (tmp_path / "planner.js").write_text((ROOT / "nbs" / "planner.js").read_text())
    harness = f"""<!DOCTYPE html><meta charset="utf-8"><script src="planner.js"></script><script>
const data = {json.dumps(DATA)}, cases = {json.dumps(cases)};
const found = cases.map(x => tqPlan.row(data, ...x)).map(x => [x.nbytes, x.fits, x.largest_context]);
fetch("/measured", {{method: "POST", body: JSON.stringify(found)}});
</script>"""
    assert preview.in_browser(tmp_path, harness, 60) == due
    assert len({x for _, x, _ in due}) == 2 and len({x for *_, x in due}) > 20


def test_its_command_says_the_same_of_a_shape(capsys):
    "The bytes on the page are those that the command prints for the same layers and heads."
    command = "plan --model 32x8x128 --context 32768 --batch 8 --gpu 80GB --weights 0GB --json"
    assert cli.main(command.split()) == 0
    said = {x["cache"]: x["nbytes"] for x in json.loads(capsys.readouterr().out)["caches"]}
    shown = dict(re.findall(r'<tr data-name="([^"]+)"><td>[^<]+</td><td>([\d.]+)<', PAGE))
    assert {name: f"{n / 1e9:.2f}" for name, n in said.items()} == shown
    assert "8 sequences of 32,768 tokens" in PAGE and str(said["k3v3"]) in PAGE


def test_without_scripts_a_table_shows():
    still = re.sub(r"<script.*?</script>", "", PAGE, flags=re.S)
    assert still.count("<tr data-name=") == 4 and 'data-k="controls" hidden' in still
