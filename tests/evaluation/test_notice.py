"The estimates and the statistics of scripts/eval/notice.py."

from types import SimpleNamespace

import pytest
import torch

from turboquant_nb.evaluation.pairs import Pair
from turboquant_nb.hf.hooks import AttentionCall

notice = pytest.importorskip("eval.notice")
ASKED = SimpleNamespace(caches=["k2v2", "k3v2", "k2v3", "k3v3", "k4v2"], draws=60, recent=16)


def call_of(noise):
    "A layer whose coded keys are off by `noise` in the direction of one query."
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=g)
    q, k, v = draw(2, 4, 6, 8), draw(2, 2, 20, 8), draw(2, 2, 20, 8)
    pairs = Pair(k, k + noise * draw(2, 2, 20, 8), 2, 3), Pair(v, v, 2, 3)
    rest = dict.fromkeys(AttentionCall._fields[6:])
    return AttentionCall(None, q, *pairs, None, 0.5, **rest), q, k


def test_exact_pairs_have_no_error_and_a_score_error_is_its_variance():
    steps = [1, 4]
    assert all(float(x.abs().max()) < 1e-9 for x in notice.errors(call_of(0.0)[0], steps, 8))
    call, q, k = call_of(0.3)
    code, score, output, tail = notice.errors(call, steps, 8)
    assert output.shape == tail.shape == (2, 2) and (output > 0).all() and (tail > 0).all()
    want = []
    for head in range(4):
        for i in steps:
            seen = 20 - 6 + i + 1
            near = torch.arange(seen)
            kept = (near < 2) | (near > seen - 1 - 3)
            a = 0.5 * k[0, head // 2, :seen] @ q[0, head, i]
            b = 0.5 * call.key.coded[0, head // 2, :seen] @ q[0, head, i]
            gap, p = torch.where(kept, a, b) - a, a.softmax(0)
            want.append((p * gap.square()).sum() - (p * gap).sum().square())
    torch.testing.assert_close(score[0], torch.stack(want).mean())
    noise = (call.key.coded - k).square().sum((1, 2, 3)) / k.square().sum((1, 2, 3))
    torch.testing.assert_close(code, noise / 2)


def test_rank_correlation():
    x = torch.tensor([3.0, 1.0, 2.0, 5.0])
    assert notice.rank_correlation(x, x.exp()) == pytest.approx(1)
    assert notice.rank_correlation(x, -x) == pytest.approx(-1)
    assert notice.rank_correlation(x, torch.ones(4)) == 0
    tied = torch.tensor([1.0, 1.0, 2.0, 3.0])  # ranks .5 .5 2 3 against 2 0 1 3
    assert notice.rank_correlation(tied, x) == pytest.approx(3 / (4.5 * 5) ** 0.5)


def made(spread, honest):
    "Damage 4^-bits of prompts that differ `spread` times, and an estimate that knows or not."
    found = {}
    for t, name in enumerate(("wiki", "code", "gsm8k")):
        size = torch.tensor([1.0, spread] * 8) * (t + 1)
        sign = size / (t + 1) if honest else torch.tensor([0.0, 0.0, 1.0, 1.0] * 4)
        about = {e: sign.tolist() for e in notice.ESTIMATES}
        about |= dict(changed=[1] * 16, tokens=[10] * 16)
        bits = dict(k2v2=2, k3v2=2.5, k2v3=2.5, k3v3=3, k4v2=3)
        found[name] = {c: about | dict(kl=(size * 4.0**-b).tolist()) for c, b in bits.items()}
    return found


def against(found, other, scale="texts alike", low="k2v2"):
    g = torch.Generator().manual_seed(0)
    kept = lambda r: (r["against"], r["scale"], r["low_recipe"]) == (other, scale, low)
    rows = filter(kept, notice.policies(ASKED, found, g))
    return {(r["estimate"], r["rule"], r["to"]): r for r in rows}


@pytest.mark.parametrize("spread, pays", [(1.5, False), (8.0, True)])
def test_noticing_pays_where_damage_differs_more_than_twice(spread, pays):
    for r in against(made(spread, True), "k3v2").values():
        assert r["share"] == 0.5 and r["bits"] == 2.5
        assert r["contrast"] == pytest.approx(spread, rel=1e-5)
        want = (2 + spread / 2) / (1 + spread)  # a half bit less for some, more for others
        assert r["ratio"] == pytest.approx(want, rel=1e-5) and (r["ratio"] < 1) == pays


def test_an_estimate_that_knows_nothing_is_a_lot_and_an_oracle_is_not():
    found = against(made(8.0, False), "lot")
    assert found["score", "half of all", "k3v3"]["ratio"] == pytest.approx(1, rel=1e-5)
    assert found["oracle", "half of all", "k3v3"]["ratio"] < 0.75


def test_texts_that_differ_are_told_apart_in_nats_alone():
    "An estimate that knows the text and not the prompt gains where texts do not count alike."
    found = made(1.0, True)
    for t, name in enumerate(("wiki", "code", "gsm8k")):
        for x in found[name].values():
            x |= {e: [float(t)] * 16 for e in notice.ESTIMATES}
            x["kl"] = [v * (1 + 9 * (name == "gsm8k")) for v in x["kl"]]
    rule = "score", "threshold of the first text", "k3v3"  # the median of wiki: raises all
    assert against(found, "lot")[rule]["share"] == 1
    for x in found["wiki"].values():
        x["score"] = [1.0] * 16
    alike, nats = (against(found, "lot", scale)[rule] for scale in ("texts alike", "nats"))
    assert alike["share"] == nats["share"] == 0.5
    assert alike["ratio"] == pytest.approx(1, rel=1e-5) and nats["ratio"] < 0.6
    later = against(found, "lot", "nats", "k3v2")[rule]
    assert later["bits"] == 2.75 and 0.6 < later["ratio"] < 0.9


def test_what_allocation_is_worth():
    x = torch.tensor([1.0, 4.0], dtype=torch.float64)
    assert float(notice.bits_gained(x, 0)) == pytest.approx(0.5 * torch.tensor(1.25).log2())
    assert float(notice.bits_gained(torch.full((3,), 2.0), 0)) == 0


def test_texts_are_joined_whole_and_named():
    class Words:
        bos = 0

        def __call__(self, text, **how):
            return SimpleNamespace(input_ids=[len(x) for x in text.split()])

    ids, names = notice.joined(Words(), [(str(i), "a bb ccc") for i in range(9)], 2, 5)
    assert ids.shape == (2, 5) and names == [["0", "1"], ["2", "3"]]
