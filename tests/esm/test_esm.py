"ESM-2 on compressed keys and values: exactness, decoding, variant scores, files, refusals."

import argparse
import copy
import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
from transformers import EsmConfig, EsmForMaskedLM

from turboquant_nb import Recipe, Spec, esm as M
from turboquant_nb.esm import codes
from turboquant_nb.esm import (
    EOS,
    MASK,
    RESIDUES,
    TOKENS,
    TurboEsm,
    calibrate_esm,
    design,
    gather_statistics,
    load_esm,
    masked_marginals,
    mutated,
    pseudo_log_likelihood,
    pseudo_perplexity,
    random_esm,
    random_proteins,
    read_fasta,
    read_mutations,
    score_mutations,
    tokens,
    variants,
    variants_of,
)
from turboquant_nb.esm.checkpoints import batches
from turboquant_nb.esm.model import frame_proteins
from turboquant_nb.esm.mutations import MaskedRows, sampled
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.esm.transform import RECIPES, SideSpec
from tests.helpers import refuses, seeded


def tiny(d=16, heads=2, layers=2, seed=0, **more):
    return random_esm(layers, heads, d, seed, **more)


proteins = random_proteins


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def code(model):
    return calibrate_esm(model, proteins(24), "water4")


PLAIN = Recipe(Spec(bits=4), Spec(bits=4), sinks=0, recent=0)
FRAMED = Recipe(Spec(bits=4, center="pre_rope", pair_scale="frame"), Spec(bits=4), 1, 4)


# --- exactness of the wrapped model


def test_the_model_is_as_it_was_between_passes(model):
    """Weights stay where they are and modules what they are; two wrappers of one model take
    turns."""
    ids, _ = tokens(proteins(1))
    held = lambda: [(n, p.data_ptr()) for n, p in model.named_parameters()]
    kept = lambda: [type(m) for m in model.modules() if "forward" not in vars(m)]
    before, kinds = held(), [type(m) for m in model.modules()]
    with TurboEsm(model) as a, TurboEsm(model, PLAIN) as b:
        want = a.prefill(ids).hidden
        assert torch.equal(b.prefill(ids).hidden, want)
        first = a.decode(ids[:, :1]).hidden
        assert (b.decode(ids[:, :1]).hidden - first).abs().max() > 1e-3
        with pytest.raises(ZeroDivisionError):
            a.run(lambda *states: 1 / 0, ids)
        assert held() == before and kept() == kinds
        a.undo()
        assert a.past is None and b.past is not None


# --- decoding


@pytest.mark.parametrize("kind", ["exact", "code", "list", "framed"])
def test_ragged_batches_are_single_sequences(model, code, kind):
    kinds = {"exact": None, "code": code, "list": [PLAIN, "k4v4"], "framed": FRAMED}
    use = kinds[kind]
    seqs = proteins(3, 15, 40, seed=5)
    more = torch.randint(4, 24, (3, 4), generator=seeded(1))
    ids, mask = tokens(seqs)
    with TurboEsm(model, use) as t:
        t.prefill(ids, mask)
        batch = [t.decode(more[:, :3]).hidden, t.decode(more[:, 3:]).hidden]
        assert t.length.tolist() == [len(s) + 2 + 4 for s in seqs]
        for i, s in enumerate(seqs):
            t.prefill(tokens([s])[0])
            one = [t.decode(more[i : i + 1, :3]).hidden, t.decode(more[i : i + 1, 3:]).hidden]
            for a, b in zip(batch, one):
                torch.testing.assert_close(a[i : i + 1], b, rtol=2e-3, atol=2e-3)


def in_one_pass(t, ids, prefix, mask):
    """What a prefill of the first tokens and decoding of the others give, by masks: tokens
    behind the prefix see others as they are coded, and themselves exactly."""
    n = ids.shape[1]
    late = (torch.arange(n) >= prefix[:, None])[:, None, :, None]
    own = torch.eye(n, dtype=torch.bool)
    visible = (codes.prefix_visible(n, prefix) & mask.bool()[:, None])[:, None]

    def hook(layer, q, k, v, _):
        ck, cv = codes.recoded(t.code, layer, k, v)
        scores = torch.where(late & ~own, q @ ck.mT, q @ k.mT)
        p = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return k, v, torch.where(late, (p * ~own) @ cv + (p * own) @ v, p @ v)

    return t.run(hook, ids, mask).hidden


@pytest.mark.parametrize("kind", ["exact", "code", "outliers", "recipe"])
def test_prefill_and_decode_see_what_they_should(model, code, kind):
    seqs = proteins(3, 15, 40, seed=6)
    prefix = torch.tensor([(len(s) + 2) // 2 for s in seqs])
    ids, mask = tokens(seqs)
    kinds = {"exact": None, "code": code, "recipe": PLAIN}
    kinds["outliers"] = replace(code, recipe=replace(code.recipe, outliers=1e-3))
    with TurboEsm(model, kinds[kind]) as t:
        got = in_one_pass(t, ids, prefix, mask)
        for i, (s, n) in enumerate(zip(seqs, prefix.tolist())):
            one, _ = tokens([s])
            want = [t.prefill(one[:, :n]).hidden]
            want += [t.decode(one[:, j : j + 1]).hidden for j in range(n, one.shape[1])]
            real = got[i : i + 1, : one.shape[1]]
            torch.testing.assert_close(real, torch.cat(want, 1), rtol=2e-3, atol=2e-3)
    if kind == "code":
        with TurboEsm(model) as t:
            assert (in_one_pass(t, ids, prefix, mask) - got).abs().max() > 1e-3
    with TurboEsm(model, "k3v3") as t, refuses("without sinks"):
        t.contacts(ids)


def test_decode_with_masked_tokens(model):
    "ESM's correction for masked tokens goes on: the ratio of all tokens so far."
    ids, _ = tokens(proteins(1))
    ids[0, 3] = MASK
    with TurboEsm(model) as t:
        t.prefill(ids)
        new = torch.tensor([[MASK, 5]])
        x = t._embed(new, torch.tensor([2 / (ids.shape[1] + 2)]))
        assert not x[0, 0].any() and x.isfinite().all()
        e = model.esm.embeddings.word_embeddings.weight[5]
        torch.testing.assert_close(x[0, 1], e * 0.88 / (1 - 2 / (ids.shape[1] + 2)))
        assert t.decode(new).hidden.isfinite().all()
        assert t.masked.tolist() == [2]


def test_errors_and_rollback(model, code):
    ids, mask = tokens(proteins(2))
    for use in (None, code, PLAIN):
        with TurboEsm(model, use, max_length=ids.shape[1] + 2) as t:
            t.prefill(ids, mask)
            for _ in range(2):
                t.decode(ids[:, 1:2])
            held = t.report()["nbytes"]
            for bad, why in ((ids, "max_length"), (ids[:1], r"\[2, n\]")):
                with refuses(why):
                    t.decode(bad[:, 1:2])
            assert t.report()["nbytes"] == held and t.report()["tokens"] == ids.shape[1] + 2
            t.reset()
            t.prefill(ids, mask)
    with TurboEsm(model, max_length=4) as t, refuses("max_length is 4"):
        t.prefill(ids, mask)
    with TurboEsm(model) as t:
        hole = mask.clone()
        hole[0, 3] = 0
        for bad in (torch.zeros_like(mask), hole):
            with refuses("padding on the right"):
                t.prefill(ids, bad)
        with refuses(r"mask must have shape \["):
            t.prefill(ids, mask[:, 1:])
        with refuses("integers", TypeError):
            t.prefill(ids.float())


@pytest.mark.parametrize("kind", ["exact", "code", "recipe"])
def test_failed_decode_leaves_the_past(model, code, kind):
    use = {"exact": None, "code": code, "recipe": PLAIN}[kind]
    ids, _ = tokens(proteins(1))
    with TurboEsm(model, use) as t:
        t.prefill(ids)
        plain = t.decode(ids[:, 1:2]).hidden
        t.prefill(ids)
        last = model.esm.encoder.layer[-1].output
        last.forward = lambda *a: 1 / 0
        with pytest.raises(ZeroDivisionError):
            t.decode(ids[:, 2:3])
        del last.forward
        assert t.past.length == ids.shape[1]
        assert torch.equal(t.decode(ids[:, 1:2]).hidden, plain)


# --- the code


def test_statistics_are_of_what_the_model_computes(model):
    "The first sequences are read as the model reads them: all tokens see all."
    ids, _ = tokens(s := proteins(1))
    states = {}

    def hook(layer, q, k, v, _):
        states[layer] = k[0].double(), v[0].double()
        return k, v, None

    with TurboEsm(model) as t:
        found = gather_statistics(t, s)
        t.run(hook, ids)
    assert found.moments.tokens == ids.shape[1]
    for layer, pair in states.items():
        for kind, x in zip(("key", "value"), pair):
            torch.testing.assert_close(found.mean(kind)[layer], x.mean(1), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                found.mean_square(kind)[layer], x.mT @ x / x.shape[1], rtol=1e-4, atol=1e-5
            )


def test_a_past_of_codes_grows_by_an_eighth(model, code):
    "With no slack for a prefill, or all at once; what a past holds otherwise: test_folding.py."
    ids, mask = tokens(proteins(2))
    wide = sum(sum(s.widths) for s in code.sides)
    with TurboEsm(model, code, max_length=64) as t:
        t.prefill(ids, mask)
        assert t.report()["nbytes"] == 2 * 64 * wide + 2 * 8
    with TurboEsm(model, code) as t:
        t.prefill(ids, mask)
        assert t.report()["tables_nbytes"] == code.tables_nbytes
        need = ids.shape[1] + 1
        for more in (*[0] * (need // 8 + 1), need // 8 + 1):
            t.decode(ids[:, :1])
            room = need + more + (need + more) // 8
            assert t.report()["nbytes"] == 2 * room * wide + 2 * 8


@pytest.mark.parametrize(
    "name, start, block",  # numbers looked up at a time: a layer, or all
    [
        ("water3", [0, 5], 1),
        ("water3", [0, 0], 2**20),
        ("outliers", [0, 5], 2**20),
        ("mean", [0, 5], 1),
    ],
)
def test_attention_adds_no_mean_to_a_token(model, code, name, start, block, monkeypatch):
    """Scores with their mean apart, and values with theirs at the end, are attention on what
    the codes stand for; a chunk, a step, and rows."""
    monkeypatch.setattr(codes, "BLOCK", block)
    if name == "outliers":
        c = replace(code, recipe=replace(code.recipe, outliers=0.02))
    else:
        centred = replace(RECIPES["water3"], key=SideSpec(3.0, center="mean"))
        c = calibrate_esm(model, proteins(12), centred if name == "mean" else name)
    past, g = M.CodedPast(c, torch.tensor(start), None, torch.float32), seeded(1)
    layers, heads, d = c.key.shape
    shift = 3 * torch.randn(2, layers, 1, heads, 1, d, generator=g)
    x = torch.randn(2, layers, 2, heads, 40, d, generator=g) + shift
    for i in range(layers):
        past.take(i, *x[:, i])
    past.commit(40)
    assert bool(past.outliers) == (name == "outliers")
    attend = lambda *args: F.scaled_dot_product_attention(*args, scale=1.0)
    near = lambda a, b: float((a - b).abs().max() / b.abs().max()) < 2e-5
    for n in (1, 4):
        states = torch.randn(layers, 3, 2, heads, n, d, generator=g)
        for i, (q, k, v) in enumerate(states):
            held = past.states(i)
            whole = (torch.cat(pair, 2) for pair in zip(held, (k, v)))
            assert near(past.attend(i, q, k, v), attend(q, *whole, past.visible(n)))
            one, at = (t[:1] for t in (q, k, v)), torch.arange(n) + 30
            q, k, v = one  # rows of the second sequence
            got = past.select(1).rows(i, q, k, v, at)
            for r in range(n):
                own = [t[1:, :, start[1] :].clone() for t in held]
                for mine, new in zip(own, (k, v)):
                    mine[:, :, 30 + r - start[1]] = new[:, :, r]
                row = slice(r, r + 1)
                assert near(got[:, :, row], attend(q[:, :, row], *own))
        past.rollback()


@pytest.mark.parametrize("kind", ["exact", "code", "stores"])
def test_a_chunk_sees_itself_in_order(code, kind):
    """Unless it is told to see all of itself; what a chunk took and gave up changes neither."""
    layers, heads, d = code.key.shape
    in_stores = codes.FramedRecipe(PLAIN, None, code.key.inv_freq)
    use = {"exact": None, "code": code, "stores": [in_stores] * layers}[kind]
    past = codes.open_past(use, code.key.shape, torch.tensor([0, 2]), None, torch.float32)
    x = torch.randn(3, 2, heads, 12, d, generator=seeded(2))
    for i in range(layers):
        past.take(i, *x[1:])
    past.commit(12)
    for pair in zip(past.states(1), x[1:]):  # to which no code is fitted
        have, want = (t[1, :, 2:].flatten() for t in pair)
        assert F.cosine_similarity(have, want, dim=0) > (0.5 if kind == "code" else 0.99)
    held, said = past.nbytes(), []
    for more in ((), (True,), (False,)):  # causal, or not
        said.append(past.attend(0, *x[:, :, :, :4], *more))
        past.rollback()
        assert past.nbytes() == held
    assert torch.equal(*said[:2])
    far = (said[2] - said[0]).abs().amax((0, 1, 3))
    assert far[3] < 1e-5 and (far[:3] > 1e-2).all()  # the last sees all in any case


@pytest.mark.parametrize("layers, least", [(1, 1.0), (1, 1.99), (2, 2.0), (1, 0.5)])
def test_so_many_layers_are_looked_up(code, layers, least, monkeypatch):
    "As many as have `BLOCK` numbers, at least one; they serve the next layers."
    _, heads, d = code.key.shape
    past = M.CodedPast(code, torch.tensor([0, 0, 1]), None, torch.float32)
    for i in range(2):
        past.take(i, *torch.randn(2, 3, heads, 5, d))
    past.commit(5)
    monkeypatch.setattr(codes, "BLOCK", int(least * 3 * heads * d * 5))
    first, second = past.key.read(0, 5).clone(), past.key.found
    assert second[0] == 0 and second[1].shape == (3, layers, heads, d, 5)
    past.key.read(1, 5)
    assert (past.key.found is second) == (layers == 2)
    assert torch.equal(past.key.read(0, 5), first)


def test_outlier_tokens_are_kept(code):
    "Codes beside them are those of a past without; a sequence holds what it held among others."
    far = replace(code, recipe=replace(code.recipe, outliers=0.5))
    layers, heads, d = code.key.shape
    chunks = torch.randn(2, layers, 2, heads, 6, d, generator=seeded())
    chunks[1, 1, 0, :, 2] *= 300  # values of layer 1, sequence 0, slot 2
    chunks[0, 0, 1, :, 1] *= 300  # before sequence 1 starts: nobody's
    past, other = (
        M.CodedPast(c, torch.tensor([0, 3]), None, torch.float32) for c in (far, code)
    )
    for each in (past, other):
        for i in range(layers):
            each.take(i, *chunks[:, i])
        each.commit(6)
    ((layer, before, row, slot, k, v),) = past.outliers
    assert (layer, before, row.tolist(), slot.tolist()) == (1, 0, [0], [2])
    assert k.dtype == v.dtype == torch.float16
    rest = [i for i in range(6) if i != 2]
    assert torch.equal(past.states(1)[1][0, :, rest], other.states(1)[1][0, :, rest])
    for j in (0, 1):
        alone = past.select(j)
        assert [len(x.row) for x in alone.outliers] == [1 - j]
        for mine, both in zip(alone.states(1), past.states(1)):
            # how a product rounds may depend on how many sequences it has
            torch.testing.assert_close(mine, both[j : j + 1], rtol=1e-5, atol=1e-6)


def test_an_outlier_lies_where_its_sequence_has_it(code):
    "The mean that keys lose before RoPE is that of a position, which padding moves."
    far = replace(code, recipe=replace(code.recipe, outliers=0.5))
    layers, heads, d = code.key.shape
    past = M.CodedPast(far, torch.tensor([0, 3]), None, torch.float32)
    k, v = torch.randn(2, layers, 2, heads, 6, d, generator=seeded(3))
    k[0, 1, :, 4] *= 20
    for i in range(layers):
        past.take(i, k[i], v[i])
    past.commit(6)
    ((*_, row, slot, key, value),) = past.outliers
    assert (row.tolist(), slot.tolist()) == ([1], [4]) and key.dtype == torch.float16
    for states, kept in zip(past.states(0), (key, value)):
        torch.testing.assert_close(states[1, :, 4], kept[0].float(), rtol=0, atol=1e-3)


def test_refusals_of_wrappers_and_states(model, code):
    with refuses("finite"):
        codes.recoded(code, 1, torch.zeros(1, 2, 3, 16), torch.full((1, 2, 3, 16), math.inf))
    absolute = model.config.to_dict() | dict(position_embedding_type="absolute")
    with refuses("rotary"):
        TurboEsm(EsmForMaskedLM(EsmConfig(**absolute)))


# --- rows and variants


@pytest.mark.parametrize("kind", ["code", "recipe"])
def test_rows_of_one_sequence_of_a_batch(model, code, kind):
    use = {"code": code, "recipe": PLAIN}[kind]
    seqs = proteins(3, 15, 40, seed=5)
    ids, mask = tokens(seqs)
    with TurboEsm(model, use) as t:
        for i, s in enumerate(seqs):
            at = torch.tensor([1, len(s), 4])
            t.prefill(ids, mask)
            a, again = (
                t.rows(torch.tensor([MASK, 5, MASK]), at, sequence=j).hidden
                for j in (i, i - len(seqs))  # counted from the end
            )
            t.prefill(tokens([s])[0])
            b = t.rows(torch.tensor([MASK, 5, MASK]), at).hidden
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
            assert torch.equal(a, again)
        for bad in (1, -2):  # one sequence is left
            with refuses(f"one of 1, counted from 0, got {bad}"):
                t.rows(at, at, bad)
        for bad in (torch.tensor([-1]), torch.tensor([len(seqs[-1]) + 2])):
            with refuses("at must be from 0"):
                t.rows(torch.tensor([MASK]), bad)
        with refuses("one length"):
            t.rows(torch.tensor([MASK]), torch.tensor([1, 2]))


def test_exact_marginals(model):
    s = proteins(1)[0]
    with TurboEsm(model) as t:
        got = masked_marginals(t, s, "exact", block=8)
        every = masked_marginals(t, s, "every", passes=len(s))
        fewer = masked_marginals(t, s, "every", passes=3)
        frozen = masked_marginals(t, s)
    torch.testing.assert_close(every, got, rtol=1e-3, atol=1e-3)
    assert frozen.shape == got.shape == fewer.shape == (len(s), 20)
    wild = torch.tensor([RESIDUES.index(r) for r in s])
    assert not frozen[torch.arange(len(s)), wild].any()
    assert (frozen - got).abs().max() > 1e-3 and (fewer - got).abs().max() > 1e-3


def test_one_pass_over_a_protein(model, code):
    """A batch in parts gives what a whole one gives, token by masked token what a loop gives;
    scores of variants are differences; on a code the table is what `reread` gives. (Chapter 27:
    against forward passes.)"""
    a, b = proteins(2, 20, 30, seed=7)
    b = b[:17]
    other = lambda i, new: f"{a[i - 1]}{i}{new if a[i - 1] != new else 'A'}"
    both_at = f"{other(2, 'W')}:{other(5, 'K')}"
    with TurboEsm(model) as t:
        got = masked_marginals(t, a, "wildtype")
        both = pseudo_log_likelihood(t, [a, b, a])
        small = pseudo_log_likelihood(t, [a, b, a], at_most=1)
        ((_, _, change),) = variants(t, {"x": a}, [both_at], "one-pass")
        before, after = pseudo_log_likelihood(t, [a, mutated(a, both_at)])
        assert pseudo_log_likelihood(t, []).shape == (0,)
        mean = (-both[1:2] / len(b)).exp()
        # the model is fp32, and its sums are another batch's: exact on some processors alone
        torch.testing.assert_close(pseudo_perplexity(t, [b]), mean, rtol=1e-5, atol=0)
        slow = float(pseudo_log_likelihood(t, [b], "masked"))
    (ids, _), loop = tokens([b]), 0.0
    for i in range(1, len(b) + 1):
        hidden = ids.clone()
        hidden[0, i] = MASK
        with torch.no_grad():
            loop += float(model(hidden).logits[0, i].double().log_softmax(-1)[ids[0, i]])
    assert slow == pytest.approx(loop, abs=1e-3)
    assert torch.allclose(small, both, rtol=1e-4)
    assert change == pytest.approx(float(after - before), abs=2e-3)
    with TurboEsm(model, code) as t:
        ids, _ = tokens([a])
        want = t.reread(ids).logits[0, 1:-1].log_softmax(-1)
        want = want[:, [TOKENS.index(x) for x in RESIDUES]] - want.gather(1, ids[0, 1:-1, None])
        on_code = masked_marginals(t, a, "wildtype")
        assert (on_code - want).abs().max() < 1e-4 < (on_code - got).abs().max()
        for call in (
            lambda: masked_marginals(t, a, "every"),
            lambda: pseudo_log_likelihood(t, [a], "masked"),
            lambda: variants(t, {"x": a}, None, "exact"),
        ):
            with refuses("would not use the code"):
                call()


@pytest.mark.parametrize("at_most, rows", [(1, 1), (44, 2), (65, 2), (1000, 20)])
def test_so_many_masked_sequences_are_read_at_a_time(model, at_most, rows):
    "As many as have `at_most` tokens, at least one: 20 residues and two ends."
    s, read = "".join(proteins(1, 30, 31))[:20], []
    hook = model.esm.embeddings.word_embeddings.register_forward_pre_hook(
        lambda _, x: read.append(tuple(x[0].shape))
    )
    with TurboEsm(model) as t:
        pseudo_log_likelihood(t, [s], "masked", at_most=at_most)
        assert read == [(rows, 22)] * (20 // rows)
        read.clear()
        masked_marginals(t, s, "every", passes=3, block=4)  # 64 tokens: two sequences of three
        assert read == [(2, 22), (1, 22)]
    hook.remove()


def test_masked_rows_in_one_graph(model, code):
    """Captured on alanines, replayed on others in turns: the eager scores, bit for bit, by a
    graph that outlives the wrapper that it was captured under; and what cannot be captured is
    refused. (Chapter 27: without a code.)"""
    a, b = (s[:17] for s in proteins(2, 20, 30, seed=7))
    with TurboEsm(model, code) as t:
        graph = MaskedRows(t, 17, Tape)
    with TurboEsm(model, code) as t:
        want, held = {s: masked_marginals(t, s) for s in (a, b)}, t.past
        for s in (a, b, a):
            assert torch.equal(graph(s), want[s]) and not graph(s).requires_grad
        assert not torch.equal(graph(a), want[b]) and t.past is held
        with refuses("length must be"):
            MaskedRows(t, 0, Tape)
    broken = copy.deepcopy(model)
    with TurboEsm(broken, code) as t:
        graph = MaskedRows(t, 17, Tape)
        with torch.no_grad():
            broken.esm.encoder.layer[0].attention.self.key.bias[3] = math.nan
        with refuses("must be finite"):
            graph(a)
    outliers = replace(code, recipe=replace(code.recipe, outliers=0.1))
    for of, use, why in (
        (model, PLAIN, "stores decide"),
        (model, outliers, "are outliers"),
        (model.esm, None, "no language-model head"),
    ):
        with TurboEsm(of, use) as t, refuses(why):
            MaskedRows(t, 17, Tape)
    with TurboEsm(model, code, max_length=18) as t:
        with refuses("max_length is 18: cannot hold 19 tokens"):
            MaskedRows(t, 17, Tape)
        assert torch.equal(MaskedRows(t, 16, Tape)(a[:16]), masked_marginals(t, a[:16]))
        held = t.past
        with refuses("cannot hold 19 tokens"):
            t.prefill(tokens([a])[0])
        assert t.past is held  # a refusal changes nothing


def test_variants_capture_lengths_that_come_often(model, code):
    """Five proteins of one length and two of another, mixed: one graph; the scores and their
    order are those without."""
    found = proteins(7, 30, 40, seed=11)
    sequences = {f"p{i}": s[: 15 if i in (1, 4) else 20] for i, s in enumerate(found)}
    made, steps, seen = [], [], []

    class Noted(Tape):
        def capture(self, step, held):
            made.append(held[0].shape[1] - 2)
            return super().capture(step, held)

        def replay(self):
            steps.append(1)
            super().replay()

    class Failing(Tape):
        def capture(self, step, held):
            raise RuntimeError("no room")

    note = lambda done, total: seen.append((done, total))
    for use in (None, code):
        with TurboEsm(model, use) as t:
            want = variants(t, sequences, graphs=False)
            names = [r[0] for r in want]
            seen.clear()
            assert variants(t, sequences, graphs=Noted, progress=note) == want
            assert (made, len(steps)) == ([20], 5) and names == sorted(names)
            assert seen == [(i, 7) for i in range(1, 8)]
            one = "p2", f"{sequences['p2'][0]}1A"
            some = variants(t, sequences, {"p2": [one[1]]}, graphs=Noted)
            assert some == [r for r in want if r[:2] == one]
            why = "20 residues are scored without a graph: no room"
            with pytest.warns(UserWarning, match=why):
                assert variants(t, sequences, graphs=Failing) == want
        assert made == [20]
        made.clear(), steps.clear()
    # cannot be captured, and needs no graph: as without
    for use, how in ((PLAIN, ()), (None, (None, "wildtype"))):
        with TurboEsm(model, use) as t:
            plain = variants(t, sequences, *how, graphs=False)
            assert variants(t, sequences, *how, graphs=Noted) == plain and not made


# --- sequences that a model draws


def test_what_is_drawn_comes_from_the_seed_and_the_states(model):
    before, found = torch.get_rng_state(), []
    for use in (None, replace(PLAIN, key=Spec(bits=1))):
        with TurboEsm(model, use) as t:
            for method in ("gibbs", "left-to-right"):
                drawn = design(t, 3, 9, method)
                assert [len(x) for x in drawn] == [9] * 3
                assert set("".join(drawn)) <= set(RESIDUES)
                assert drawn == design(t, 3, 9, method) != design(t, 3, 9, method, seed=1)
                found.append(drawn)
            assert design(t, 3, 9) == found[-2] != design(t, 3, 9, sweeps=1)
            assert t.past is None
    assert found[0] != found[2] and found[1] != found[3]
    assert torch.equal(before, torch.get_rng_state())


def test_left_to_right_is_a_race_behind_what_is_written(model):
    "Exponential clocks of rate p: the first to ring is drawn."
    with TurboEsm(model) as t:
        found = design(t, 2, 9, "left-to-right", seed=3)
    g, written = seeded(3), ["", ""]
    columns = [TOKENS.index(x) for x in RESIDUES]
    for _ in range(9):
        ids = [[0, *(TOKENS.index(x) for x in w), MASK, EOS] for w in written]
        with torch.no_grad():
            p = model(torch.tensor(ids)).logits[:, -2, columns].softmax(-1)
        rings = torch.empty(2, 1, 20).exponential_(generator=g)[:, 0] / p
        written = [w + RESIDUES[i] for w, i in zip(written, rings.argmin(-1).tolist())]
    assert found == written


@pytest.mark.parametrize("length", [1, 7, 21])
def test_a_sweep_draws_every_position_once(length):
    seen, letters = [], torch.arange(4)

    def logits_of(ids):
        assert (ids[:, 0] == 7).all() and (ids[:, -1] == 8).all()
        seen.append(ids[:, 1:-1] == 9)
        return torch.zeros(*ids.shape, 10)

    ids = sampled(logits_of, (5, length), "gibbs", 3, (7, 8), 9, letters, 0)
    assert ids.shape == (5, length + 2) and int(ids[:, 1:-1].max()) < 4
    assert (torch.stack(seen).sum(0) == 3).all()
    assert max(int(x.sum(1).max()) for x in seen) == max(1, length // 8)
    assert (seen[0] != seen[len(seen) // 3]).any() or length == 1
    seen.clear()
    sampled(logits_of, (5, length), "left-to-right", 1, (7, 8), 9, letters, 0)
    assert [list(x[0].nonzero()[0]) for x in seen] == [[i] for i in range(length)]
    assert [x.shape[1] for x in seen] == list(range(1, length + 1))


@pytest.mark.parametrize(
    "words, how",
    [
        ("n must be an integer of at least 1, got 0", dict(n=0)),
        ("length must be an integer from 1 to 1022, got 1023", dict(length=1023)),
        ("sweeps must be an integer of at least 1, got 0", dict(sweeps=0)),
        ("method must be", dict(method="right-to-left")),
    ],
)
def test_refusals_of_design(model, words, how):
    with TurboEsm(model) as t, refuses(words):
        design(t, **dict(n=1, length=5) | how)
    with TurboEsm(model.esm) as t, refuses("no language-model head"):
        design(t, 1, 5)
    with TurboEsm(model, "k3v3") as t, refuses("without sinks"):
        design(t, 1, 5)
    with TurboEsm(model, max_length=6) as t, refuses("cannot hold 7"):
        design(t, 1, 5)


def test_mutations(model, tmp_path):
    s = "MKV" + proteins(1)[0]
    table = torch.randn(len(s), 20)
    score = lambda m: float(table[int(m[1:-1]) - 1, RESIDUES.index(m[-1])])
    got = score_mutations(table, s, ["M1A", "M1A:V3L", "k2r"])
    assert got == pytest.approx([score("M1A"), score("M1A") + score("V3L"), score("K2R")])
    fasta = tmp_path / "a.fasta"
    fasta.write_text(f">p1 a protein\n{s[:10].lower()}\n{s[10:]}*\n\n>p2\nACDEF\n")
    sequences = read_fasta(fasta)
    assert sequences == {"p1": s, "p2": "ACDEF"}
    with TurboEsm(model) as t:
        rows = variants(t, sequences)
        assert len(rows) == 19 * (len(s) + 5) and {r[0] for r in rows} == {"p1", "p2"}
        assert not any(m[0] == m[-1] for _, m, _ in rows)
        some = variants(t, sequences, {"p2": ["A1C", "C2D:F5A"]})
        find = {r[:2]: r[2] for r in rows}
        assert some[0] == ("p2", "A1C", find["p2", "A1C"])
        assert some[1][2] == pytest.approx(find["p2", "C2D"] + find["p2", "F5A"])
    plain, named = tmp_path / "m.txt", tmp_path / "n.txt"
    plain.write_text("# one a line\nA1C\n\nC2D:F5A\n")
    named.write_text("p2\tA1C\np2 C2D\np1 M1A\n")
    assert read_mutations(plain) == ["A1C", "C2D:F5A"]
    assert read_mutations(named) == {"p2": ["A1C", "C2D"], "p1": ["M1A"]}
    for bad in ("", "A1C\np1 A1C\n", "a b c\n"):
        plain.write_text(bad)
        with refuses("must hold"):
            read_mutations(plain)


def test_places_in_fasta_files(tmp_path):
    "Each mutant of a file is refused with its place; the place is that of the raw line."
    fasta = tmp_path / "a.fasta"
    for text, place in (
        (">a\nMKT-AY.IAK\n", r"line 2, column 4: .* of 'a', got '-'; take the gaps out"),
        (">a\nMKT\n>b\n  AY.I\n", r"line 4, column 5: .* of 'b', got '\.'; take the gaps out"),
        (">a\nMKTAY\nIA1K\n", "line 3, column 3: .* of 'a', got '1'$"),
        (">a\nMK T\n", "line 2, column 3: .* got ' '"),
        (">a\nMKT\u00e9\n", "line 2, column 4"),
        (">a\nMK*T\n", r"line 2, column 3: .* got '\*'; a stop ends a sequence"),
        (">a\nMKT*\nAYI\n", "line 3, column 1: .* got 'A'; a stop ends a sequence"),
        (">a\n*\n", "'a' is empty"),
        ("ACD\n", 'expected ">"'),
        ("", "no sequence"),
        (">a\nAC\n>a\nAC\n", "second"),
    ):
        fasta.write_text(text, encoding="utf-8")
        with refuses(place):
            read_fasta(fasta)
    fasta.write_text("\ufeff>a\nmkt\nay**\n>b\nJBX\n", encoding="utf-8")
    assert read_fasta(fasta) == {"a": "MKTAY", "b": "JBX"}
    fasta.write_bytes(b">a\nMK\xff\xfe")
    for read, want in (
        (read_fasta, "a FASTA file in UTF-8, got something else at byte 5"),
        (read_mutations, "lines of mutations in UTF-8, .* byte 5"),
    ):
        with refuses(want):
            read(fasta)


def test_variants_are_checked_without_a_model():
    sequences = {"p1": "MKV", "p2": "ACK"}
    assert variants_of(sequences, {"p2": ["A1C:C2D"]}) == {"p1": [], "p2": ["A1C:C2D"]}
    assert len(variants_of(sequences)["p1"]) == 3 * 19 and variants_of(
        {"x": "MKV"}, ["K2A"]
    ) == {"x": ["K2A"]}
    for bad, words in (
        (["K2A:K2G"], "p1: K2A:K2G must name each residue once, got K2 twice"),
        (["M1A", "A1C"], "p1: A1C does not fit"),
        (["K2Z"], "like A5G"),
        (["M0A"], "residues"),
    ):
        with refuses(words):
            variants_of(sequences, bad)
        with refuses(words):
            variants(None, sequences, bad)  # before anything is computed
    with refuses("K2 twice"):
        score_mutations(torch.zeros(3, 20), "MKV", ["K2A/V3A,k2G"])


def test_tokens():
    ids, mask = tokens(["LAG", "mxu"])
    assert ids.tolist() == [[0, 4, 5, 6, 2], [0, 20, 24, 26, 2]] and mask.all()
    ids, mask = tokens(["L", "LAG"])
    assert ids[0].tolist() == [0, 4, EOS, 1, 1] and mask[0].tolist() == [1, 1, 1, 0, 0]
    with pytest.raises(ValueError):
        tokens([])


RNA = "AUGGCUUGCAAUGGCUUGCAA"


@pytest.mark.parametrize(
    "letters, why",
    [
        ("MKT1AY2I", "sequences[1] must be residues, one of ABCDEFGHIJKLMNOPQRSTUVWXYZ each, "
         "got '1' at 4, '2' at 7"),
        ("MK-T.A Y*", "got '-' at 3, '.' at 5, ' ' at 7, '*' at 9"),
        ("?" * 1_005, "'?' at 5 and 1,000 more"),
        ("MK\N{LATIN SMALL LETTER DOTLESS I}", "at 3"),  # whose capital is I
        ("MK<mask>", "'<' at 3, '>' at 8"),
        (RNA, "sequences[1] must be a protein, got 21 letters that are all bases of RNA"),
        (RNA.replace("U", "t") + "NN", "all bases of DNA; translate it first"),
    ],
)  # fmt: skip
def test_what_no_protein_has_is_refused(letters, why):
    "It became <unk>, or a gap's own token, without a word."
    for read in (tokens, lambda x: next(batches(x))):
        with refuses(re.escape(why)):
            read(["MKV", letters])


def test_letters_with_a_meaning_are_read():
    "B, Z, X, U and O have tokens; proteins of few kinds of residues are proteins."
    for letters in ("BZXUO", RNA[:19], "ACGU" * 9 + "M", "AGAGAGAGAGAGAGAGAGAGAG", "A" * 50):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (row,) = tokens([letters])[0].tolist()
        assert [TOKENS[i] for i in row[1:-1]] == [*letters]


def test_leucine_or_isoleucine_is_read_as_any_and_said():
    "fair-esm's <unk> was in no sequence that the model was trained on; X was."
    said = "2 residues are read as X, 2 of [1], 4 of [1]"
    with pytest.warns(UserWarning, match=re.escape(said)):
        ids, _ = tokens(["MKV", "MJVj"])
    assert torch.equal(ids, tokens(["MKV", "MXVX"])[0])
    with pytest.warns(UserWarning, match=re.escape("1 residues are read as X, 1 of [2]")):
        (_, ids, _) = next(batches(["MKV", "MKVVV", "JK"], at_most=4))
    assert torch.equal(ids, tokens(["XK"])[0])


def test_more_residues_than_the_model_was_trained_on(model):
    with TurboEsm(model) as turbo:
        for length, how in ((1023, turbo.prefill), (1023, turbo.reread), (1022, None)):
            ids, _ = tokens(["MK" * 511 + "V" * (length - 1022)])
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                (how or turbo.prefill)(ids)
            assert [str(x.message) for x in said] == (
                ["a protein has more than the 1,022 residues that this model was trained on; "
                 "what it says of them is less certain"] if how else []
            )  # fmt: skip
        with pytest.warns(UserWarning, match="1,022 residues"):
            turbo.decode(torch.tensor([[20]]))


def test_the_stop_of_a_sequence_is_said(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_text(">a\nMKV*\n>b\nMKV\n>c\nMK\nV*\n")
    with pytest.warns(UserWarning, match="the stop . is left out at the end of 2 of 3 seq"):
        assert read_fasta(path) == dict.fromkeys("abc", "MKV")
    path.write_text(f">a\nMKV\n>b\n{RNA}\n")
    with refuses("a.fasta: the sequence 'b' must be a protein, got 21"):
        read_fasta(path)


# --- fair-esm


def test_fair_esm_checkpoint(tmp_path):
    fair = pytest.importorskip("esm")
    from esm.model.esm2 import ESM2

    layers, heads, dim = 3, 2, 48
    alphabet = fair.data.Alphabet.from_architecture("ESM-1b")
    theirs = ESM2(layers, dim, heads, alphabet).eval()
    for p in theirs.parameters():
        p.data += 0.1 * torch.randn_like(p)
    state = theirs.state_dict()
    regression = {n: state.pop(n) for n in list(state) if n.startswith("contact_head")}
    state = {
        f"encoder.{n}" if n.startswith("lm_head") else f"encoder.sentence_encoder.{n}": t
        for n, t in state.items()
    }
    config = argparse.Namespace(
        encoder_layers=layers,
        encoder_embed_dim=dim,
        encoder_attention_heads=heads,
        token_dropout=True,
    )
    torch.save({"model": state, "cfg": {"model": config}}, tmp_path / "a.pt")
    torch.save({"model": regression}, tmp_path / "a-contact-regression.pt")
    ours = load_esm(tmp_path / "a.pt")
    names, _, ids = alphabet.get_batch_converter()([("a", "MKTAYIAK"), ("b", "LAG<mask>VW")])[
        :3
    ]
    own, mask = tokens(["MKTAYIAK"])
    assert own[0].tolist() == ids[0].tolist() and list(alphabet.all_toks) == list(M.TOKENS)
    with torch.no_grad():
        want = theirs(ids, repr_layers=[layers], return_contacts=True)
        got = ours(ids, attention_mask=(ids != 1).long())
        ours.set_attn_implementation("eager")
        contacts = ours.predict_contacts(ids, (ids != 1).long())
    real = ids != 1
    torch.testing.assert_close(got.logits[real], want["logits"][real], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(
        contacts[0, :8, :8], want["contacts"][0, :8, :8], rtol=1e-3, atol=1e-4
    )
    gone = [n for n in state if ".layers.1.fc" in n or ".layers.1.final" in n]
    torch.save({"model": {n: t for n, t in state.items() if n not in gone}}, tmp_path / "c.pt")
    three = "missing .('[^',]+', ){2}'[^',]+'., unknown"
    with refuses(f"not an ESM-2 checkpoint; {three}"):
        load_esm(tmp_path / "c.pt")
    assert len(gone) > 3, "three are named of those that are missing"


# --- the package


def test_every_name_is_found_and_files_need_no_transformers():
    assert (
        {
            "TurboEsm",
            "tokens",
            "load_esm",
            "CodedPast",
            "calibrate_esm",
            "variants",
            "variants_of",
        }
        <= set(M.__all__)
        <= set(dir(M))
    )
    assert all(getattr(M, n) is not None for n in M.__all__) and callable(M.variants)
    with refuses("no attribute 'nothing'", AttributeError):
        M.nothing
    blocked = (
        "import sys; sys.modules['transformers'] = None\n"
        "from turboquant_nb import esm\nfrom turboquant_nb.esm import CodedPast, read_fasta\n"
        "for use in (lambda: esm.random_esm(), lambda: esm.TurboEsm):\n"
        "    try: use()\n"
        "    except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 2 and all('pip install "turboquant-nb[hf] @ git+' in x for x in said), (
        said
    )


def test_a_model_has_one_frame(monkeypatch):
    """Found by three proteins when a recipe first wants it; keys are coded around its mean, and
    a recipe without one runs no pass."""
    model, runs = random_esm(layers=2, seed=5), []
    with torch.no_grad():
        for layer in model.esm.encoder.layer:
            layer.attention.self.key.bias.add_(3.0)
    own = TurboEsm.run
    monkeypatch.setattr(TurboEsm, "run", lambda *x, **how: runs.append(1) or own(*x, **how))
    TurboEsm(model, PLAIN), TurboEsm(model)
    assert not runs
    turbo, other = TurboEsm(model, "k3v3"), TurboEsm(model, "k2v2")
    assert len(runs) == 3 and turbo.code[1].frame is other.code[1].frame
    recipe, frame = turbo.code[0].recipe, turbo.code[0].frame
    assert (recipe.key.center, recipe.key.pair_scale) == ("pre_rope", "frame")
    rows = []  # keys before RoPE are what the projection gives
    for letters in frame_proteins():
        hidden = model.esm.embeddings(M.tokens([letters])[0])
        first = model.esm.encoder.layer[0].attention
        with torch.no_grad():
            rows.append(first.self.key(first.LayerNorm(hidden))[0, 1:])
    plain = torch.cat(rows).mean(0).view_as(frame.mean)
    torch.testing.assert_close(frame.mean, plain, rtol=0, atol=1e-3)
