"A real language model on a real text: agreement of the two modes, bits per value, perplexity."
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
from transformers import DynamicCache  # noqa: E402

from conftest import SLOW  # noqa: E402
from turboquant_nb.hf import TurboQuantCache  # noqa: E402
from turboquant_nb.models import load_model, sample_text  # noqa: E402

PREFILL, SCORE, WINDOWS = 512, 512, 8 if SLOW else 4
TOKENS = 100 if SLOW else 40  # of greedy decoding


@pytest.fixture(scope="module")
def real():
    "(model, tokens of the text [1, n])"
    try:
        model, tokenizer = load_model(progress=False)
    except RuntimeError as error:
        if "not available" not in str(error):
            raise
        pytest.skip(f"the embedded model cannot be fetched here: {str(error).splitlines()[0]}")
    model.requires_grad_(False)
    return model, tokenizer(sample_text(), return_tensors="pt")["input_ids"]


@pytest.fixture(scope="module")
def windows(real):
    """For each of 4 or 8 windows: tokens [1, 1024], exact states of the first 512 in every layer, and the negative log-likelihood of the last 512 in fp32. One forward gives both: a state
    never depends on later tokens. The 8 windows together are the first 8,192 tokens of the text."""
    model, ids = real
    model.set_attn_implementation("sdpa")
    out = []
    for i in range(WINDOWS):
        part = ids[:, i * (PREFILL + SCORE) : (i + 1) * (PREFILL + SCORE)]
        assert part.shape[1] == PREFILL + SCORE
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            logits = model(part, past_key_values=cache, logits_to_keep=SCORE + 1).logits[:, :-1]
        states = [(x.keys[:, :, :PREFILL].clone(), x.values[:, :, :PREFILL].clone()) for x in cache.layers]
        out.append((part, states, nll(logits, part)))
    return out


def nll(logits, part):
    return torch.nn.functional.cross_entropy(logits[0].float(), part[0, PREFILL:]).item()


def perplexity(model, windows, recipe, attention="sdpa"):
    """exp of the mean negative log-likelihood: 512 tokens coded (from exact states, as in `generate`), 512 scored in one chunk after them. Both modes give the same to fp32
    rounding (test_hf.py); the dense one is cheaper for a chunk of 512."""
    model.set_attn_implementation(attention)
    total = 0.0
    for part, states, _ in windows:
        cache = TurboQuantCache(model, recipe)
        for i, (k, v) in enumerate(states):
            cache.update(k, v, i)
        with torch.no_grad():
            # one token earlier, so that the first scored token has its prediction
            cache.crop(-1)
            logits = model(part[:, PREFILL - 1 : -1], past_key_values=cache).logits
        total += nll(logits, part)
    return math.exp(total / len(windows))


def test_perplexity_of_k4v4_is_within_two_percent(real, windows):
    exact = math.exp(sum(w[2] for w in windows) / WINDOWS)
    coded = perplexity(real[0], windows, "k4v4")
    print(f"perplexity of {WINDOWS} windows: fp32 {exact:.3f}, k4v4 {coded:.3f} ({100 * (coded / exact - 1):+.2f} %)")
    assert 5 < exact < 60 and abs(coded / exact - 1) < 0.02


def test_bits_per_value_of_real_tokens(real, windows):
    "2,048 real tokens in each of 30 layers, everything counted; the table of turns is .09 bits of so small a model."
    model, recipes = real[0], {"k3v3": 3.7, "k4v4": 4.7}
    for recipe, limit in recipes.items():
        cache = TurboQuantCache(model, recipe)
        for _, states, _ in windows[:4]:
            for i, (k, v) in enumerate(states):
                cache.update(k, v, i)
        r = cache.report()
        print(f"{recipe}: {r['bits_per_value']:.3f} bits per value, {r['ratio_fp16']:.2f}x of fp16")
        assert r["tokens"] == 2048 and r["layers"] == 30 and r["values"] == 2048 * 30 * 3 * 128
        assert int(recipe[1]) < r["bits_per_value"] <= limit
        assert r["nbytes"] == sum(r["per_layer"]) + r["parts"]["tables"] and abs(r["bits_per_value"] - 8 * r["nbytes"] / r["values"]) < 1e-9


def test_greedy_on_codes_equals_greedy_dense(real):
    "40 or 100 tokens from the same 3-bit cache: attention on codes and attention on decoded states choose the same tokens."
    model, ids = real
    out = []
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model, "k3v3")
        tokens = model.generate(ids[:, :200], attention_mask=torch.ones(1, 200, dtype=torch.long), past_key_values=cache, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        assert cache.get_seq_length() == 199 + TOKENS and cache.report()["served"] == {"prefill": 30, "dense" if attention == "sdpa" else "codes": (TOKENS - 1) * 30}
        out.append(tokens)
    assert out[0].shape == (1, 200 + TOKENS) and torch.equal(*out)
    assert len(set(out[0][0, 200:].tolist())) > 8  # not a loop of one token
