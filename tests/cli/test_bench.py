"""turboquant bench: rows, the gate, turns, files and bad input; no test asks how fast anything
is."""

import json

import pytest
import torch

from turboquant_nb import results
from turboquant_nb.cache.store import KVStore
from turboquant_nb.cli import bench

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = "--tokens 64 300 --recipe k3v3 --new 2 --rounds 2"


def test_rows_record_picture_and_table(call, tiny, tmp_path):
    out, picture = tmp_path / "b.json", tmp_path / "b.png"
    code, text, err = call(f"bench --model {tiny} --out {out} --plot {picture} {QUICK}")
    assert (
        code == 0
        and err.count("\n") == 2
        and picture.stat().st_size > 5000
        and "gate passed" in text
    )
    found = results.check(json.loads(out.read_text()), "bench", draft=True)
    rows = {(r["what"], r["cache"], r["tokens"]): r for r in found["rows"]}
    assert set(rows) == {
        (w, c, n)
        for w in ("attention", "generate")
        for c in ("uncompressed", "k3v3")
        for n in (64, 300)
    }
    assert (
        all(0 < r["p20"] <= r["p50"] <= r["p80"] and r["n"] == 2 for r in rows.values())
        and found["gate"]["passed"]
    )
    assert rows["attention", "uncompressed", 300]["nbytes"] == 2 * 300 * 32 * 4
    held = 300 - 1 + 3 * 2  # a prompt but its last token, and three calls of two tokens
    assert rows["generate", "uncompressed", 300]["nbytes"] == 2 * 2 * held * 32 * 4
    assert (
        rows["attention", "k3v3", 300]["served"] in ("cpu", "gather", "triton")
        and rows["generate", "k3v3", 64]["served"]
    )


def test_only_one_kind_and_json(call, tiny):
    code, text, err = call(f"bench --model {tiny} --only attention --json --quiet {QUICK}")
    assert (
        code == 0
        and err == ""
        and {r["what"] for r in json.loads(text)["rows"]} == {"attention"}
    )


def test_a_red_gate_times_nothing(call, tiny, monkeypatch):
    "The mutant: what is read back is a percent off."
    read = KVStore.read
    monkeypatch.setattr(
        KVStore, "read", lambda self, *a: tuple(1.01 * x for x in read(self, *a))
    )
    monkeypatch.setattr(
        bench, "in_turns", lambda *a, **k: pytest.fail("timed after a red gate")
    )
    code, out, err = call(f"bench --model {tiny} --quiet {QUICK}")
    assert code == 1 and out == "" and "nothing is timed" in err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["k4v4", "k2v2"])
def test_the_gate_passes_on_other_shapes(name, dtype):
    from transformers import LlamaConfig

    from turboquant_nb.hf import TurboQuantCache

    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        hidden_size=1024,
    )
    layer = TurboQuantCache(config, name).coded_layers[0]
    found = bench.gate(bench.Shapes(8, 2, 128, dtype, torch.device("cpu")), layer, tokens=300)
    assert found["passed"] and found["value"] < found["limit"] < (
        0.6 if dtype is torch.bfloat16 else 1e-4
    )


def test_a_past_has_all_of_its_tokens():
    "Also where it is drawn in parts."
    from transformers import LlamaConfig

    from turboquant_nb.hf import TurboQuantCache

    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=32
    )
    layer = TurboQuantCache(config, "k4v4").coded_layers[0]
    shapes = bench.Shapes(1, 1, 32, torch.float32, torch.device("cpu"))
    store = bench.filled_store(shapes, layer, 8200)
    assert store.length == 8200 and (store.heads, store.recipe) == (1, layer.recipe)
    near = lambda a, b: float((a - b).square().mean() / b.square().mean()) < 0.02
    for i, x in enumerate(store.read()):
        for first, last in ((0, 4096), (4096, 8192), (8192, 8200)):
            assert near(x[:, :, first:last], shapes.draw(last - first, 1, 2 * first + i))


def test_turns_leave_the_first_round_out():
    seen, now = [], [0.0]

    def call(name, seconds):
        def run():
            seen.append(name)
            now[0] += seconds

        return run

    found = bench.in_turns({"a": call("a", 1.0), "b": call("b", 5.0)}, 3, clock=lambda: now[0])
    assert seen == list("abababab") and found == {"a": [1.0] * 3, "b": [5.0] * 3}
