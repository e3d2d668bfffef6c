"A real language model on a real text: perplexity. (Chapter 2: the tokens of both modes.)"

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
from transformers import DynamicCache

from tests.helpers import SLOW, cache_for
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.evaluation.models import load_model, sample_text
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

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


def greedy(model, ids, cache, n, padding=0, **options):
    """(tokens, logits) of n greedy steps behind so much padding, and how many of the tokens are
    not nearly tied."""
    before = torch.zeros(1, padding, dtype=torch.long)
    out = model.generate(
        torch.cat([before, ids], 1),
        attention_mask=torch.cat([before, torch.ones_like(ids)], 1),
        past_key_values=cache,
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    logits = torch.stack([x[0] for x in out.logits])
    top = logits.topk(2).values
    tied = (top[:, 0] - top[:, 1] < 0.04).nonzero()
    return out.sequences[0, -n:], logits, int(tied[0]) if len(tied) else n


@pytest.mark.parametrize("recipe", ["k2v2-scalar", "k3v3"] if SLOW else ["k2v2-scalar"])
def test_prompt_lookup_is_greedy_decoding(real, recipe):
    """Drafts from a prompt that says the same again: token for token those of plain greedy
    decoding on codes, and logits apart by rounding. A chunk multiplies matrices of another
    size, so a state may round otherwise and, rarely, get another code; tokens that are nearly
    tied are therefore left out, and what comes after one. Before, logits were apart by 1.2."""
    model, ids = real
    model.set_attn_implementation("turboquant")
    ids, steps = (ids[:, :80].repeat(1, 2), 40) if SLOW else (ids[:, :24].repeat(1, 5), 20)
    plain, logits, n = greedy(model, ids, TurboQuantCache(model, recipe), steps)
    cache = TurboQuantCache(model, recipe)
    lookup, other, _ = greedy(model, ids, cache, steps, prompt_lookup_num_tokens=6)
    assert cache.report()["served"]["codes"] < (steps - 2) * 30  # drafts were accepted
    apart = float((other[:n] - logits[:n]).abs().max())
    print(f"{recipe}: {n} tokens, logits apart by {apart:.1e}")
    assert n >= 8 and torch.equal(lookup[:n], plain[:n]) and apart < 0.02


def test_left_padding_is_the_run_without_it(real):
    """60 tokens of padding before 120 real ones, 3 tokens on codes: tokens and logits of the
    run without padding, apart by rounding (a code may flip, see above), far less than codes are
    from exact states. The model attends on codes, so sinks, the keys' mean and what is exact
    must count from the first real token."""
    model, ids = real
    model.set_attn_implementation("turboquant")
    recipe, ids = Recipe(Spec(2, center="fixed"), Spec(2), recent=16), ids[:, :120]
    padded, plain = (greedy(model, ids, TurboQuantCache(model, recipe), 3, x) for x in (60, 0))
    model.set_attn_implementation("sdpa")
    exact = greedy(model, ids, None, 3)
    first = (padded[1][0] - plain[1][0]).abs().max()  # of exact attention
    apart, coded = ((padded[1][1] - x[1][1]).abs().max() for x in (plain, exact))
    n = plain[2]
    print(f"logits apart by {first:.1e}, then {apart:.1e}; codes from exact states {coded:.2f}")
    assert n >= 2 and torch.equal(padded[0][:n], plain[0][:n])
    assert first < 1e-3 and apart < 0.02 < coded / 5
