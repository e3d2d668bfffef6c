"""turboquant demo: its numbers are those of the library, and its words those of its numbers."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import pytest
import torch

from turboquant_nb import Recipe, TurboQuantCache, cli, preset
from turboquant_nb.cache.disk import state_of
from turboquant_nb.cli import demo as demos
from turboquant_nb.cli.generate import common_prefix
from turboquant_nb.evaluation.models import load_model, sample_text
from tests.helpers import ONE_THREAD, refuses


pytestmark = ONE_THREAD


KEYS = set(
    "cache recipe answer answer_tokens answer_same same_tokens of_tokens odds_where_parted "
    "top1_agreement perplexity perplexity_change perplexity_change_se tokens nbytes "
    "bits_per_value ratio_fp16 ratio_fp32 coding_seconds decode_seconds "
    "tokens_per_second".split()
)


@pytest.fixture(scope="session")
def demo(tiny):
    "The demonstration on the small model, as JSON."
    ask = f"demo --model {tiny} --new-tokens 12 --score-tokens 64 --json --quiet"
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = cli.main(ask.split())
    assert code == 0 and err.getvalue() == "" and out.getvalue().count("\n") == 1
    return json.loads(out.getvalue())


def test_demo_json(demo):
    rows = demo["caches"]
    assert [r["cache"] for r in rows] == ["uncompressed", "k4v4", "k3v3", "k2v2"]
    assert all(set(r) == KEYS for r in rows)
    assert demo["prefix_tokens"] >= 2048 and demo["scored_tokens"] == 64
    first = rows[0]
    assert first["recipe"] is None and first["answer_same"] and first["bits_per_value"] == 32
    assert first["top1_agreement"] == 1 and first["perplexity_change"] == 0
    assert first["nbytes"] == demo["prompt_tokens"] * 2 * 2 * 32 * 4
    for r in rows[1:]:
        framed = preset(r["cache"])  # the model has RoPE
        key = replace(framed.key, center="pre_rope", pair_scale="frame")
        assert (
            r["recipe"] == json.loads(replace(framed, key=key).to_json())
            and r["tokens"] == demo["prompt_tokens"]
        )
        assert 1 <= r["same_tokens"] <= r["of_tokens"] == first["answer_tokens"]
        assert (r["odds_where_parted"] is None) == r["answer_same"]
        assert r["answer_same"] or r["odds_where_parted"] >= 1
        assert abs(r["perplexity"] / first["perplexity"] - 1 - r["perplexity_change"]) < 1e-9
        assert abs(r["bits_per_value"] * r["ratio_fp16"] - 16) < 1e-9


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_fed_states_equal_a_prefill_through_the_cache(tiny, attention):
    model, tokenizer = load_model(tiny, progress=False)
    ids = tokenizer(sample_text()[:2500], return_tensors="pt").input_ids
    prompt = demos.read_once(model, ids)
    model.set_attn_implementation(attention)
    for name in ("k4v4", "k1v1"):
        through = TurboQuantCache(model, name)
        with torch.no_grad():
            logits = model(ids, past_key_values=through, logits_to_keep=1).logits
        fed = demos.filled(model, prompt, name)
        assert int(logits[0, -1].argmax()) == demos.first_token(prompt)
        for a, b in zip(fed.layers, through.layers):
            (x, h), (y, g) = state_of(a.store), state_of(b.store)
            assert h == g and x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def test_demo_table(call, tiny):
    ask = f"demo --model {tiny} --new-tokens 4 --score-tokens 16 --recipes k4v4"
    code, out, err = call(ask, Recipe().to_json())
    assert code == 0 and "reading" in err and "answering, k4v4" in err
    lines = out.splitlines()
    heads = ["uncompressed", "k4v4", "recipe", "2"]
    head = next(i for i, line in enumerate(lines) if line.split() == heads)
    shown = lines[head + 1 : head + 1 + len(demos._LINES)]
    table = {line[:24].strip(): line[24:].split() for line in shown}
    assert set(table) == {name.strip() for name in demos._LINES}
    assert len(table["bytes held"]) == 3 and len(table["change"]) == 2
    assert table["same next token"][0] == "100.0%" and max(map(len, lines[head:])) < 96


def test_demo_quick_leaves_what_was_typed(call, tiny):
    code, out, _ = call(f"demo --model {tiny} --quick --json --quiet --score-tokens 20")
    found = json.loads(out)
    assert code == 0 and found["scored_tokens"] == 20
    assert [r["cache"] for r in found["caches"]] == ["uncompressed", "k3v3"]


def test_seen():
    def row(name, same, nbytes, k=3):
        return dict(
            cache=name,
            answer_same=same,
            nbytes=nbytes,
            bits_per_value=3.0,
            ratio_fp16=5.0,
            top1_agreement=0.5,
            same_tokens=k,
            of_tokens=9,
            odds_where_parted=None if same else 1.25,
        )

    base = row("uncompressed", True, 100)
    assert demos.what_was_seen(
        [base, row("a", True, 50), row("b", True, 40), row("c", False, 30)], 7
    ).startswith(
        "2 of 3 compressed caches wrote the same 3 tokens as the uncompressed one; the "
        "smallest of them is b. b holds 3.00 bits"
    )
    assert (
        "; b keeps to it for 5 of 9 tokens, up to where the best token of the uncompressed "
        "cache is 1.25 times"
        in demos.what_was_seen(
            [base, row("a", False, 50, 5), row("b", False, 40, 5), row("c", False, 30, 4)], 7
        )
    )


def test_change_and_same_start():
    loss = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert demos.ppl_change(loss, loss) == (0, 0)
    assert common_prefix([1, 2], [1, 2, 3]) == 2 and common_prefix([1], [2]) == 0
    rel, se = demos.ppl_change(loss + torch.tensor([0.1, 0.2, 0.3]), loss)
    assert abs(rel - (torch.tensor(0.2).exp() - 1)) < 1e-6 and abs(se - 0.1 / 3**0.5) < 1e-6
    with refuses("at least|n >= 2"):
        demos.ppl_change(loss[:1], loss[:1])
