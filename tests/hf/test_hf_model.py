"A real language model on a real text: perplexity. (Chapter 2: the tokens of both modes.)"

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
from transformers import DynamicCache

from tests.helpers import SLOW, cache_for
from turboquant_nb.evaluation.models import load_model, sample_text

PREFILL, SCORE, WINDOWS = (512, 512, 8) if SLOW else (256, 256, 2)


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
    """For each of 2 or 8 windows: tokens [1, 512 or 1024], their exact states in every layer,
    and the negative log-likelihood of the second half in fp32. One forward gives both: a state
    never depends on later tokens. The 8 windows together are the first 8,192 tokens of the
    text."""
    model, ids = real
    model.set_attn_implementation("sdpa")
    out = []
    for i in range(WINDOWS):
        part = ids[:, i * (PREFILL + SCORE) : (i + 1) * (PREFILL + SCORE)]
        assert part.shape[1] == PREFILL + SCORE
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            logits = model(part, past_key_values=cache, logits_to_keep=SCORE + 1).logits[:, :-1]
        states = [(x.keys, x.values) for x in cache.layers]
        out.append((part, states, nll(logits, part)))
    return out


def nll(logits, part):
    return torch.nn.functional.cross_entropy(logits[0].float(), part[0, PREFILL:]).item()


def perplexity(model, windows, recipe, attention="sdpa"):
    """exp of the mean negative log-likelihood: half of a window coded (from exact states, as in
    `generate`), the rest scored in one chunk after it. Both modes give the same to fp32
    rounding (test_hf.py); the dense one is cheaper for a long chunk."""
    model.set_attn_implementation(attention)
    total = 0.0
    for part, states, _ in windows:
        cache = cache_for(model, recipe)
        for i, (k, v) in enumerate(states):
            cache.update(k[:, :, :PREFILL], v[:, :, :PREFILL], i)
        with torch.no_grad():
            # one token earlier, so that the first scored token has its prediction
            cache.crop(-1)
            logits = model(part[:, PREFILL - 1 : -1], past_key_values=cache).logits
        total += nll(logits, part)
    return math.exp(total / len(windows))


def test_perplexity_of_k4v4_is_within_two_percent(real, windows):
    exact = math.exp(sum(w[2] for w in windows) / WINDOWS)
    coded = perplexity(real[0], windows, "k4v4")
    print(
        f"perplexity of {WINDOWS} windows: fp32 {exact:.3f}, k4v4 {coded:.3f} "
        f"({100 * (coded / exact - 1):+.2f} %)"
    )
    assert 5 < exact < 120 and abs(coded / exact - 1) < 0.02
