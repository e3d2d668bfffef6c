"""turboquant generate: what the library writes on the same cache, from every source of a
prompt."""

import io
import json
import sys
from functools import wraps

import pytest
import torch
from transformers import LlamaForCausalLM

from turboquant_nb.cli import generate as answers
from turboquant_nb.evaluation.models import load_model, sample_text
from turboquant_nb.hf import TurboQuantCache
from tests.helpers import ONE_THREAD

from .conftest import refused

pytestmark = ONE_THREAD


def test_generate_is_what_the_library_does(call, tiny):
    model, tokenizer = load_model(tiny, progress=False)
    ids = tokenizer(sample_text()[:600], return_tensors="pt").input_ids
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=TurboQuantCache(model, "k4v4"),
            max_new_tokens=8,
            do_sample=False,
        )
        code, out, err = call(
            f"generate --model {tiny} --no-chat --max-new-tokens 8 --recipe k4v4 --json "
            f"--attention {attention} --prompt",
            sample_text()[:600],
        )
        assert ("faster: --attention turboquant" in err) == (attention == "sdpa") and err.count(
            "--attention sdpa gets"
        ) <= 1
        got = json.loads(out)
        assert code == 0 and got["text"] == tokenizer.decode(
            want[0, ids.shape[1] :], skip_special_tokens=True
        )
        assert (
            got["prompt_tokens"] == ids.shape[1]
            and got["cache"]["tokens"] == want.shape[1] - 1
            and got["cache"]["recipe"] == TurboQuantCache(model, "k4v4").recipe.to_json()
        )


def test_generate_json_is_all_of_stdout(call, tiny):
    code, out, err = call(
        f"generate --model {tiny} --max-new-tokens 5 --json --compare --quiet",
        "--prompt",
        "Call me",
    )
    got = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    keys = "command version model dtype device threads attention prompt_tokens new_tokens text"
    assert set(got) == {*keys.split(), "seconds", "cache", "compare"}
    assert (
        got["new_tokens"] <= 5
        and got["compare"]["same_tokens"] <= got["compare"]["new_tokens"]
        and got["cache"]["nbytes"] > 0
    )


def test_generate_sources_agree(call, tiny, tmp_path, monkeypatch):
    text = "Call me Ishmael. Möwe und Wal."
    file = tmp_path / "p.txt"
    file.write_text(text, encoding="utf-8")
    ask = f"generate --model {tiny} --max-new-tokens 4 --quiet --recipe k4v4"
    want = call(f"{ask} --prompt", text)
    assert want[0] == 0 and call(f"{ask} --file {file}") == want
    for dash in ("-", "--file -"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert call(f"{ask} {dash}") == want


def test_generate_chat(call, tiny, plain):
    def tokens(line):
        ask = f"generate --max-new-tokens 1 --json --prompt Call --model {line}"
        return call.json(ask)["prompt_tokens"]

    assert tokens(tiny) == tokens(f"{tiny} --chat") == tokens(f"{tiny} --no-chat") + 2
    assert tokens(plain) == tokens(f"{plain} --no-chat")


def test_generate_samples_by_seed_and_leaves_the_generator_alone(call, tiny):
    def text(seed, more=""):
        ask = f"generate --model {tiny} --max-new-tokens 12 --json --sample --prompt Call"
        return call.json(f"{ask} --seed {seed} {more}")["text"]

    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    assert text(1) == text(1) != text(2) and torch.rand(1) == want
    for sure in ("--top-p 1e-6", "--temperature 0.001"):
        assert text(1, sure) == text(2, sure)


def test_generate_reads_the_prompt_in_chunks(call, tiny, monkeypatch):
    "What a cache makes of chunks is tested in tests/hf."
    text, seen = "Call me Ishmael. Some years ago, never mind how long precisely.", []
    keep = LlamaForCausalLM.forward

    @wraps(keep)  # a cache asks what it takes
    def forward(self, input_ids=None, **kw):
        seen.append(input_ids.shape[1])
        return keep(self, input_ids=input_ids, **kw)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    found = call.json(
        f"generate --model {tiny} --max-new-tokens 6 --prefill-chunk 16 --recipe k2v2 "
        "--recent 0 --json --quiet --prompt",
        text,
    )
    n = found["prompt_tokens"]
    assert seen[: -(-n // 16)] == [16] * (n // 16) + [n % 16] * (n % 16 > 0) and set(
        seen[-(-n // 16) :]
    ) == {1}
    assert found["new_tokens"] == 6


def test_generate_compare(call, tiny):
    for cache, said in (
        ("--recipe k1v1 --sinks 0 --recent 0", "the same first"),
        ("--recent 4096", "the same 24 tokens."),
    ):
        ask = f"generate --model {tiny} --max-new-tokens 24 --compare --quiet {cache} --prompt"
        code, out, _ = call(ask, sample_text()[:600])
        assert code == 0 and f"An uncompressed cache gives {said}" in out


def test_generate_lengths(call, plain):
    long, fits = "whale " * 200, "whale " * 20
    ask = lambda more, prompt: call(f"generate --model {plain} {more} --prompt", prompt)
    refused(ask("--quiet", long), "context is 128")
    refused(ask("--max-length 10 --quiet", fits), "--max-length is 10")
    n = json.loads(ask("--max-new-tokens 1 --json", fits)[1])["prompt_tokens"]
    code, out, err = ask("--json --max-new-tokens 500", fits)
    assert code == 0 and json.loads(out)["new_tokens"] <= 128 - n
    assert f"only {128 - n} tokens fit" in err
    code, out, err = ask(f"--json --quiet --max-length {n + 3}", fits)
    assert (code, err) == (0, "") and json.loads(out)["new_tokens"] <= 3


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "the prompt is empty (standard input)"),
        ("M\u00f6we".encode("latin-1"), "standard input is not UTF-8 text (byte 1)"),
        ("Wal".encode("utf-16"), "standard input is not UTF-8 text"),
    ],
)
def test_bad_standard_input(call, tiny, monkeypatch, data, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    refused(call(f"generate --model {tiny} -"), words)


def test_a_prompt_without_tokens(call, tiny, monkeypatch):
    monkeypatch.setattr(answers, "tokens_of", lambda *a: torch.zeros(1, 0, dtype=torch.long))
    refused(call(f"generate --model {tiny} --prompt x --quiet"), "the prompt has no tokens")


def test_a_short_cache_is_told_to_be_larger_and_pays_where_it_says(call, tiny):
    code, _, err = call(f"generate --model {tiny} --max-new-tokens 4 --prompt Whales")
    assert code == 0 and "smaller than fp16" not in err
    assert "x larger than fp16: codes take whole tiles of 256 tokens" in err
    model, _ = load_model(tiny, progress=False)
    ratio = lambda n: filled_with(model, "k3v3", n).report()["ratio_fp16"]
    short = filled_with(model, "k3v3", 16).report()
    pays = short["pays_from"]
    assert ratio(pays - 1) < 1 <= ratio(pays) and f"from about {pays:,} tokens" in str(short)
    assert str(TurboQuantCache(model).report()) == "TurboQuantCache: empty"
    assert "x smaller than fp16" in str(filled_with(model, "k3v3", 1000).report())


def filled_with(model, recipe, n):
    cache = TurboQuantCache(model, recipe)
    for layer in range(2):
        cache.update(torch.randn(1, 1, n, 32), torch.randn(1, 1, n, 32), layer)
    return cache
