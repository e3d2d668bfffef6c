"""Evaluation: one pass against steps over recipes and models, what stress reads, bits, other
caches, bad input."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turboquant_nb.evaluation import score as pairs
from turboquant_nb.evaluation.candidates import OTHERS, as_candidate, held_bytes
from turboquant_nb.evaluation.score import (
    PAIR,
    OnePass,
    Pair,
    PairLayer,
    attention_error,
    gap_limit,
    kept_tokens,
    mixed_attention,
    next_token,
    one_pass_gap,
    pair_attention,
    perplexity,
    plot,
    prefill,
    score,
    table,
    text_windows,
)
from turboquant_nb.hf.hooks import AttentionCall
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.cache.store import tables_of
from tests.helpers import ONE_THREAD, refuses, seeded

pytestmark = ONE_THREAD
SIZE = dict(
    vocab_size=120,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.2,
)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SIZE)).eval()


def tokens(n=2, length=60, seed=0):
    return torch.randint(0, 120, (n, length), generator=seeded(seed))


RECIPES = {
    "plain": Recipe(Spec(bits=3), Spec(bits=3), 0, 0),
    "window": Recipe(Spec(bits=2, center="fixed"), Spec(bits=2), 1, 7),
    "fractional": Recipe(Spec(bits=2.5, center="fixed"), Spec(bits=1), 2, 3),
    "all exact": Recipe(Spec(bits=1), Spec(bits=1), 0, 100),
    "residual": Recipe(Spec(bits=3, residual="sign"), Spec(bits=2), 4, 1),
}


def test_a_softcap_is_not_lost():
    """SDPA has none: with transformers 5.17 Gemma 2 would be scored without it, with 5.23 not
    at all."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(2)
    kinds = ["sliding_attention", "full_attention"]
    model = Gemma2ForCausalLM(
        Gemma2Config(
            num_hidden_layers=2,
            sliding_window=8,
            layer_types=kinds,
            attn_logit_softcapping=1.0,
            **SIZE,
        )
    ).eval()
    for name in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(name)
        except ValueError:  # as newer transformers answer
            continue
        got = score(model, tokens(), None, "decode", 40).loss
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(
            model(tokens()).logits[:, 39:-1].flatten(0, 1),
            tokens()[:, 40:].flatten(),
            reduction="none",
        ).view(2, -1)
    assert (got - want).abs().max() < 1e-4
    assert one_pass_gap(model, tokens(), RECIPES["window"], 40) < gap_limit(
        model, RECIPES["window"]
    )


def test_everything_exact_is_uncompressed(llama):
    "Losses of two runs may part where a code flips; where nothing is coded they may not."
    ids, candidate = tokens(), as_candidate(llama, RECIPES["all exact"], dtype=None)
    plain = score(llama, ids, None, "decode", 40).loss
    for backend in ("auto", "steps"):
        got = score(llama, ids, candidate, "decode", 40, backend=backend).loss
        assert got.shape == (2, 20) and (got - plain).abs().max() < 1e-4
    assert (score(llama, ids, candidate, "stress", 40).loss - plain).abs().max() > 0.05


def test_recipes_per_layer(llama):
    many = [RECIPES["window"], RECIPES["plain"], RECIPES["fractional"]]
    assert one_pass_gap(llama, tokens(), many, 40) < gap_limit(llama, many)
    assert one_pass_gap(llama, tokens(), many, 40, against=many[::-1]) > 50 * gap_limit(
        llama, many
    )


@pytest.mark.parametrize("protocol", ["decode", "stress", "chunk"])
def test_dense_in_the_models_dtype_changes_nothing(llama, protocol):
    ids, candidate = tokens(), as_candidate(llama, "dense", dtype=None)
    plain = score(llama, ids, None, "decode", 40)
    got = score(llama, ids, candidate, protocol, 40, distributions=True)
    assert (
        (got.loss - plain.loss).abs().max() < 1e-4
        and got.same.all()
        and got.kl.abs().max() < 1e-5
    )


@pytest.mark.parametrize("protocol", ["decode", "stress"])
def test_fp8_is_float8(llama, protocol):
    "The same losses as a model whose keys and values are rounded by hand."
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, k, v, layer, *args, **kwargs):
            return super().update(
                *(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v)), layer
            )

    ids = tokens()
    a = score(llama, ids, as_candidate(llama, "fp8", dtype=None), protocol, 40)
    b = score(
        llama,
        ids,
        as_candidate(llama, lambda: Rounded(config=llama.config), "hand", None),
        protocol,
        40,
    )
    assert (a.loss - b.loss).abs().mean() < 1e-4 and a.bits == 8


@pytest.mark.parametrize("name, dims", (("fp8-tensor", (0, 1, 2, 3)), ("fp8-head", (2, 3))))
def test_fp8_with_scales(name, dims):
    """Each first chunk sets its own, by which its largest number is the largest of float8; what
    comes later and is larger is cut off there."""
    first, later = (torch.randn(2, 2, 2, n, 16, generator=seeded(n)) for n in (9, 3))
    first[:, 0, 1] *= 1e4  # far beyond 448
    later[0, 1, 0, 0] *= 1e4
    cache = OTHERS[name].make(None)
    cache.update(*first, 0)
    for x, got in zip(torch.cat([first, later], 3), cache.update(*later, 0)):
        scale = x[:, :, :9].abs().amax(dims, keepdim=True) / 448
        want = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(got, want) and (got != x.clamp(-448, 448)).any()


def test_bits_are_those_of_the_tensors(llama):
    ids = tokens(3, 300)
    r = Recipe(Spec(bits=3), Spec(bits=2), 2, 16)
    got = score(llama, ids, as_candidate(llama, r), "decode", 200).bits
    store = KVStore(r, 1, 2, 32, dtype=torch.bfloat16)
    for n in (200, 99):
        store.append(*torch.randn(2, 1, 2, n, 32).bfloat16())
    shared = sum(
        {t.data_ptr(): t.nbytes for t in tables_of(store)}.values()
    )  # by all layers, K and V
    want = 8 * (3 * store.nbytes + shared) / (3 * 2 * 2 * 32 * 299)
    assert math.isclose(got, want, rel_tol=1e-9)
    assert score(llama, ids, as_candidate(llama, "dense"), "decode", 200).bits == 16


def test_held_bytes():
    x, y = torch.zeros(10), torch.zeros(6, dtype=torch.int8)
    box = {"a": [x, (x, y)], "b": x[:10], 3: None, "model": torch.nn.Linear(3, 3), "f": len}
    assert held_bytes(box) == 46
    assert held_bytes([x, x[5:]]) == 40  # a view counts with the tensor that it is of
    assert held_bytes(torch.zeros(0)) == 0


class Words:
    "A tokenizer of letters, with or without a first token."

    def __init__(self, head=()):
        self.head = list(head)

    def __call__(self, text, add_special_tokens=True, return_tensors=None):
        ids = self.head * add_special_tokens + [ord(c) % 120 for c in text]
        return type("Ids", (), {"input_ids": torch.tensor([ids]) if return_tensors else ids})


def test_windows_alternate_between_texts_and_start_with_the_first_token():
    a, b = "a" * 30, "b" * 12
    got = text_windows(Words([7]), [a, b], length=11)
    assert got.shape == (4, 11) and (got[:, 0] == 7).all()
    assert [int(r[1]) for r in got] == [ord("a"), ord("b"), ord("a"), ord("a")]
    with refuses("the text must give 4 or more windows of 12 tokens, it gives"):
        text_windows(Words(), [a, b], 4, 12)


def test_rows_of_all_measures(llama, tmp_path):
    ids, cut = tokens(), ["k4v4", "fp8"]
    seen = []
    rows = list(perplexity(llama, ids, cut, "decode", 40, tick=lambda: seen.append(1)))
    assert [r["cache"] for r in rows] == ["uncompressed", "k4v4", "fp8"] and len(seen) == 3
    assert set(rows[2]["against"]) == {"uncompressed", "k4v4"}
    kl = list(next_token(llama, ids, cut, prompt=40))
    layers = list(attention_error(llama, ids, ["k4v4"], 40))
    assert len(kl) == 2 and [r["layer"] for r in layers] == [0, 1, 2]
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    for measure in (rows, kl, layers):
        json.dumps(measure)
        lines = table(measure).splitlines()
        assert len(lines) == len(measure) + 1 and len({len(x) for x in lines}) == 1
        ax = Figure().subplots()
        plot(measure, ax)
        assert ax.get_xlabel() and ax.get_legend().get_texts()
    stress = [r | {"protocol": "stress"} for r in rows]  # a page calls it what chapter 28 does
    ax = Figure().subplots()
    plot(stress, ax)
    assert [x.get_text() for x in ax.get_legend().get_texts()] == ["all-quantised"]


def test_the_error_of_a_layers_error_is_that_of_a_sample(llama):
    "Of three windows: the deviation with two degrees of freedom, over the root of three."
    ids, rows = tokens(3), lambda ids: list(attention_error(llama, ids, ["k2v2-scalar"], 40))
    each = [rows(one) for one in ids.split(1)]
    for i, row in enumerate(rows(ids)):
        errors = [one[i]["error"] for one in each]
        mean = sum(errors) / 3
        variance = sum((x - mean) ** 2 for x in errors) / 2
        assert row["stderr"] == pytest.approx(math.sqrt(variance / 3), rel=1e-6) and variance
        assert math.isnan(each[0][i]["stderr"])


def test_tokens_that_keep_the_highest_score():
    """Counted by hand: the first query's best key changes its place to the second, then to the
    sixth; hidden tokens do not count."""
    key, all_seen = torch.eye(8)[None, None], torch.ones(3, 8, dtype=torch.bool)
    query = torch.tensor([[8, 7, 6, 5, 4, 3, 2, 1]] * 3, dtype=torch.float32)[None, None]
    kept = lambda q, coded, seen=all_seen: tuple(kept_tokens(q, key, coded, seen).values())
    assert kept_tokens(query, key, key, all_seen) == dict(top1=1.0, top5=1.0)
    coded = key.clone()
    coded[0, 0, 0, 0] = 6.5 / 8  # second of eight
    assert kept(query, coded) == (0, 1)
    coded[0, 0, 0, 0] = 2.5 / 8  # sixth
    assert kept(query, coded) == (0, 0)
    assert kept(query[:, :, :1], coded, torch.tensor([[True] * 5 + [False] * 3])) == (0, 1)
    early = kept_tokens(
        query, key[:, :, :3], key[:, :, :3]
    )  # causal: query t sees t + 1 tokens
    assert early == dict(top1=1.0, top5=1.0)
    # two query heads share a key head; their shares are averaged
    two = torch.cat([query, 9 - query], 1)
    assert kept(two, coded) == (0.5, 0.5)


def test_another_pages_attention_under_the_same_name_is_not_taken(llama):
    """A page that exports its own version and the installed module run in one process;
    registering at import would let the last one win."""
    from transformers.modeling_utils import AttentionInterface

    r, want = (
        RECIPES["window"],
        score(llama, tokens(), as_candidate(llama, RECIPES["window"]), "decode", 40).loss,
    )
    AttentionInterface.register(
        PAIR, lambda *args, **kwargs: pytest.fail("this is the other page's")
    )
    assert torch.equal(score(llama, tokens(), as_candidate(llama, r), "decode", 40).loss, want)
    assert one_pass_gap(llama, tokens(), r, 40) < gap_limit(llama, r)


class ExactLayer(PairLayer):
    "A layer whose codes lose nothing."

    def append(self, k, v):
        pass

    def decoded(self):
        return [self.keys, self.values]


def test_the_backend_that_is_given_is_the_one_that_reads(llama):
    "A backend whose codes lose nothing gives the uncompressed loss."
    ids, candidate = (
        tokens(),
        as_candidate(llama, Recipe(Spec(bits=1), Spec(bits=1), 0, 0), dtype=None),
    )
    plain = score(llama, ids, None, "stress", 40)
    exact = score(llama, ids, candidate, "stress", 40, backend=OnePass(ExactLayer))
    coded = score(llama, ids, candidate, "stress", 40)
    assert (
        (exact.loss - plain.loss).abs().max()
        < 1e-4
        < 0.1
        < (coded.loss - plain.loss).abs().max()
    )
    assert exact.bits == coded.bits > 1
    assert (plain.backend, exact.backend, coded.backend) == ("none", "one_pass", "one_pass")


def test_a_prefill_fills_a_cache_to_any_length(llama):
    ids = tokens(1, 50)
    read, short = prefill(llama, ids), prefill(llama, ids[:, :30])
    dense = as_candidate(llama, "dense", dtype=None)
    a, b = read.fill(dense.new(), 30), short.fill(dense.new())
    for x, y in zip(a.layers, b.layers):
        assert x.keys.shape == y.keys.shape and (x.keys - y.keys).abs().max() < 1e-5
    assert read.logits.shape == (1, 1, 120)


def test_a_prompt_that_was_read_is_not_read_again(llama):
    """One pass goes on from states that were kept: it reads the rest alone, and says what it
    says without them."""
    ids, fed = tokens(1, 50), []
    plain = Recipe(Spec(bits=3), Spec(bits=3), 0, 0)
    for recipe in ("k3v3", plain):
        candidate = as_candidate(llama, recipe, dtype=None)
        want, _ = OnePass().predict(llama, ids, candidate, "decode", 30, None)
        start = prefill(llama, ids[:, :30])
        hook = llama.model.embed_tokens.register_forward_pre_hook(
            lambda _, x: fed.append(x[0].shape[1])
        )
        got, _ = OnePass().predict(llama, ids, candidate, "decode", 30, start)
        hook.remove()
        assert fed == [19] and (got - want).abs().max() < 1e-4
        fed.clear()


def test_pairs_are_attended_as_a_dense_softmax_over_what_each_token_is():
    """By a loop over queries: exact where `exact` says so, decoded elsewhere, a sink's logit
    beside them, scores capped. Mutants: a sum along queries, an exact value for coded ones."""
    g = seeded()
    b, heads, kv, n, length, d = 2, 4, 2, 3, 5, 8
    q = torch.randn(b, heads, n, d, generator=g)
    key, value = (Pair(*torch.randn(2, b, kv, length, d, generator=g)) for _ in range(2))
    exact = torch.rand(n, length, generator=g) < 0.5
    visible = torch.rand(n, length, generator=g) < 0.8
    visible[:, 0] = True
    sinks = torch.randn(heads, generator=g)
    for s_aux, softcap in ((None, None), (sinks, 3.0)):
        out = mixed_attention(q, key, value, exact, visible, 0.3, softcap, s_aux)
        assert out.shape == (b, n, heads, d)
        for r, h, i in ((0, 0, 0), (1, 3, 2), (0, 2, 1)):
            pick = lambda p: torch.where(
                exact[i, :, None], p.exact[r, h // 2], p.coded[r, h // 2]
            )
            s = pick(key) @ q[r, h, i] * 0.3
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            s = s.masked_fill(~visible[i], -torch.inf)
            more = sinks[h : h + 1] if s_aux is not None else sinks[:0]
            weights = torch.cat([s, more]).softmax(0)[:length]
            torch.testing.assert_close(
                out[r, i, h], weights @ pick(value), rtol=1e-5, atol=1e-6
            )


def test_pairs_of_a_long_text_are_attended_in_parts(monkeypatch):
    "As all at once, with a mask of its own for each row and with none; never more scores held."
    g = seeded()
    b, heads, kv, n, length, d = 6, 4, 2, 7, 9, 8
    most, sizes = 3 * 4 * heads * length, []
    q = torch.randn(b, heads, n, d, generator=g)
    key, value = (Pair(*torch.randn(2, b, kv, length, d, generator=g), 1, 2) for _ in range(2))
    mask = torch.rand(b, 1, n, length, generator=g) < 0.8
    mask[..., 0] = True

    def counted(query, *args):
        sizes.append(query[..., 0].numel() * length)
        return mixed_attention(query, *args)

    for seen in (mask, None):
        call = AttentionCall(None, q, key, value, seen)
        whole = pair_attention(call)
        with monkeypatch.context() as m:
            m.setattr(pairs, "SCORES", most)
            m.setattr(pairs, "mixed_attention", counted)
            torch.testing.assert_close(pair_attention(call), whole, rtol=1e-5, atol=1e-6)
    assert max(sizes) == most and len(sizes) == 2 * 2 * 3


def test_the_limit_of_a_gap_is_that_of_its_equation(llama):
    "Two roundings of the scale and four of the model's dtype; the widest of all layers counts."
    half = 2 * torch.finfo(torch.float16).eps + 4 * torch.finfo(torch.float32).eps
    assert gap_limit(llama, "k3v3") == half
    full = Recipe(*(Spec(4, scale_dtype="float32"),) * 2)
    assert gap_limit(llama, full) == 6 * torch.finfo(torch.float32).eps
