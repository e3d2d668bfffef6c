"""Folding on coded states: exact states change nothing, codes do, and both distances between
structures are what they say."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from turboquant_nb.esm import (
    TurboEsm,
    calibrate_esm,
    check_letters,
    fold,
    in_one_pass,
    lddt,
    random_folding,
    random_proteins,
    rmsd,
    tokens,
)
from tests.helpers import ONE_THREAD, refuses, seeded

pytestmark = ONE_THREAD
LETTERS = random_proteins(1, 24, 25, seed=5)[0]


@pytest.fixture(scope="module")
def model():
    return random_folding()


def test_exact_states_are_the_models_own(model):
    with torch.no_grad():
        own = model.infer(LETTERS)
    found = fold(TurboEsm(model), LETTERS.lower())
    assert found.pdb == model.output_to_pdb(own)[0] and found.letters == LETTERS
    assert torch.equal(found.there, own["atom37_atom_exists"][0] > 0)
    line = next(x for x in found.pdb.splitlines() if x.startswith("ATOM") and " CA " in x)
    at = torch.tensor([float(line[i : i + 8]) for i in (30, 38, 46)])
    torch.testing.assert_close(found.trace[0], at, atol=1e-3, rtol=0)


def test_every_pass_inside_is_on_codes_and_none_after_an_error(model):
    ids = torch.tensor([[0, 5, 6, 7, 8, 2]])
    plain = model.esm(ids).last_hidden_state
    turbo = TurboEsm(model.esm, in_one_pass("k3v3"))
    with turbo.on_codes():
        first, second = model.esm(ids).last_hidden_state, model.esm(ids).last_hidden_state
    assert torch.equal(first, second) and torch.equal(first, turbo.reread(ids).hidden)
    assert not torch.equal(first, plain) and not first.requires_grad
    with refuses("stop", RuntimeError), turbo.on_codes():
        raise RuntimeError("stop")
    with torch.no_grad():
        assert torch.equal(model.esm(ids).last_hidden_state, plain)


def test_the_head_of_a_folding_model_reads_its_trunk(model):
    assert TurboEsm(model).head is None
    turbo = TurboEsm(model, in_one_pass("k3v3"))
    assert turbo.prefill(torch.tensor([[0, 5, 6, 2]])).logits is None


def test_letters():
    assert check_letters("acx") == "ACX" and len(check_letters("A" * 1022)) == 1022
    for letters, why in (("ACU", "p1 must be .* got 'U' at 3"), ("A C", "got ' ' at 2")):
        with refuses(why):
            check_letters(letters, "p1")


def chain(n=30, seed=0):
    return torch.randn(n, 3, generator=seeded(seed)).cumsum(0) * 2


def test_superposition_by_hand():
    "A square drawn out along one axis."
    square = torch.tensor([[1.0, 1, 0], [1, -1, 0], [-1, 1, 0], [-1, -1, 0]])
    assert math.isclose(rmsd(square, square * torch.tensor([1.5, 1, 1])), 0.5, rel_tol=1e-6)


def test_distances_kept_by_hand():
    "Three residues on a line: of six distances two move by .75 Å, two by 3 Å, two not at all."
    x = torch.tensor([[0.0, 0, 0], [4, 0, 0], [10, 0, 0]])
    y = torch.tensor([[0.0, 0, 0], [4, 0, 0], [10.75, 0, 0]])
    assert lddt(x, y) == pytest.approx((1 / 3 + 1 + 1 + 1) / 4)
    assert lddt(x, x * 1.3) == pytest.approx((0 + 0 + 2 / 3 + 1) / 4)
    assert lddt(x, y, within=5) == 1
    with refuses("two residues within 3 Å, got none"):
        lddt(x, y, within=3)


@pytest.mark.parametrize("f", [rmsd, lddt])
def test_traces(f):
    x = chain()
    for a, b, why in (
        (x[:2], x[:2], "a must have shape .* L >= 3, got .2, 3"),
        (x, x[:5], "b must have shape"),
        (x[:, :2], x[:, :2], "a must have shape"),
        (x * torch.nan, x, "a must be finite"),
    ):
        with refuses(why):
            f(a, b)


def test_bytes_are_those_of_tensors_without_a_pass(model):
    calibrated = calibrate_esm(model.esm, random_proteins(12, seed=2), "water3")
    for code in (None, in_one_pass("k3v3"), in_one_pass("k2v2-trellis"), "k4v4", calibrated):
        for length in (1, 62, 63, 130):
            with TurboEsm(model.esm, code) as turbo:
                said = turbo.nbytes_of(length + 2)
                assert turbo.past is None
                turbo.prefill(tokens(["A" * length])[0])
                assert said == turbo.report()["nbytes"]
    recipe = replace(calibrated.recipe, outliers=0.01)  # then the sequence decides
    assert TurboEsm(model.esm, replace(calibrated, recipe=recipe)).nbytes_of(9) is None
    half = TurboEsm(model.esm, max_length=9)
    with refuses("cannot hold 10 tokens"):
        half.nbytes_of(10)
    with refuses("tokens must be an integer of at least 1"):
        half.nbytes_of(0)


def test_the_command_counts_outlier_tokens_by_a_pass(model):
    from turboquant_nb.cli.proteins import _held

    code = calibrate_esm(model.esm, random_proteins(12, seed=2), "water3")
    kept = replace(code, recipe=replace(code.recipe, outliers=1e-4))  # nearly all of them
    held = [_held(TurboEsm(model.esm, x), LETTERS) for x in (code, kept)]
    assert held[0] == TurboEsm(model.esm, code).nbytes_of(len(LETTERS) + 2) < held[1]
    with TurboEsm(model.esm, kept) as turbo:
        turbo.prefill(tokens([LETTERS])[0])
        assert held[1] == turbo.report()["nbytes"]
