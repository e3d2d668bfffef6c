"""What stores and caches hold and give is what they held and gave at the commit that made the
goldens: planes to the bit, everything else within a distance that no code of another value
stays in. The states keep all numbers away from edges of their codes (make.py), so this holds
under every processor and number of threads."""

import json
from pathlib import Path

import pytest
import torch

from tests.golden import cases

GOLDENS = json.loads((Path(__file__).parent / "digests.json").read_text())
NEAR = 2e-5  # a code of another value moves a product by some 1e-3 of the norm


def is_near(found, golden, near):
    return len(found) == len(golden) and all(
        a == b if isinstance(a, str) else abs(a - b) <= near * max(1, abs(b))
        for a, b in zip(found, golden)
    )


def differences(found, golden, near=NEAR):
    "What a result has other than its golden."
    out = [name for name in ("planes", "bytes") if found[name] != golden[name]]
    held = found["held"], golden["held"]
    if [x[:2] for x in held[0]] != [x[:2] for x in held[1]] or not all(
        is_near(a, b, near) for a, b in zip(*held)
    ):
        out.append("held")
    if found["outputs"].keys() != golden["outputs"].keys():
        return [*out, "names of outputs"]
    return out + [
        name
        for name, x in found["outputs"].items()
        if not is_near(x, golden["outputs"][name], near)
    ]


def of(name):
    "(a case's function, its states)."
    golden = GOLDENS[name]
    run = (cases.CASES | cases.INTERPRETED)[name][0]
    return run, cases.states(name, golden["seed"], golden["again"])


def test_every_case_has_a_golden():
    assert GOLDENS.keys() == {*cases.CASES, *cases.INTERPRETED}


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_is_as_it_was(name):
    assert differences(cases.result(*of(name)), GOLDENS[name]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are compiled")
@pytest.mark.parametrize("name", cases.INTERPRETED)
def test_kernels_in_the_interpreter_are_as_they_were(name):
    assert differences(cases.result(*of(name)), GOLDENS[name]) == []


@pytest.mark.parametrize("name", ["k4v4, prefill", "k3v3, cache, steps", "qjl, prefill"])
def test_a_change_is_seen(name):
    "One key a hundredth larger, one number of it moved by a fifth, or another recipe's golden."
    run, s = of(name)
    t = s.shape[3] // 2
    s.k[0, 0, t] *= 1.01
    assert "held" in differences(cases.result(run, s), GOLDENS[name])
    run, s = of(name)
    s.v[0, 1, t, 3] += 0.2
    assert {"planes", "values"} <= {*differences(cases.result(run, s), GOLDENS[name])}
    run, s = of(name)
    other = differences(cases.result(run, s), GOLDENS["k4v3, prefill"])
    assert {"planes", "held"} <= {*other}
