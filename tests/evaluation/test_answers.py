"The scripts that judge answers and count planted keys: judges, limits, intervals, theory."
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "eval"
pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="scripts/ is not beside the tests")


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))  # answers.py imports its neighbours
    try:
        def load(name):
            spec = importlib.util.spec_from_file_location(f"eval_{name}", SCRIPTS / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        yield load
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def answers(script):
    return script("answers")


@pytest.fixture(scope="module")
def retrieval(script):
    return script("retrieval")


@pytest.mark.parametrize("text, right", [
    ("```python\ndef f(a, b):\n    return a + b\n```", True), ("def f(a, b):\n    return a + b", True), ("```\ndef f(a, b):\n    return a + b", True), ("def f(a, b):\n    return a - b", False),
    ("f = 3", False), ("This is how one adds.", False), ("def f(a, b):\n    while True:\n        pass", False), ("x = bytearray(1 << 30)\ndef f(a, b):\n    return a + b", False),
    ("open('/tmp/x' if False else 'big', 'wb').write(b'0' * (1 << 22))\ndef f(a, b):\n    return a + b", False), ("import os\nos._exit(3)", False), ("raise SystemExit(1)", False),
])
def test_code_is_run_with_limits(answers, text, right):
    assert answers.runs(text, "f(2, 3) == 5", seconds=1) is right


def test_written_functions_can_be_right(answers):
    "Every check of the list holds for some function: an item that cannot be solved would count as lost everywhere."
    solved = ["a + b", "max(a, b)", "x * x", "n % 2 == 0", "s[::-1]", "sum(c in 'aeiou' for c in s)", "sum(x)", "1 if n == 0 else n * f(n - 1)", "x[-1]", "sorted(x)[::-1]", "abs(x)", "s == s[::-1]", "len(s.split())",
              "c * 9 / 5 + 32", "max(x)", "[y for y in x if y % 2 == 0]"]
    names = ["a, b", "a, b", "x", "n", "s", "s", "x", "n", "x", "x", "x", "s", "s", "c", "x", "x"]
    for (ask, check), body, args in zip(answers.FUNCTIONS, solved, names, strict=True):
        space = {}
        exec(f"def f({args}):\n    return {body}", space)
        assert eval(check, space), ask
        exec(f"def f({args}):\n    return None", space)
        with pytest.raises(TypeError) if "list(" in check or "abs(" in check else pytest.raises(AssertionError):
            assert eval(check, space)


@pytest.mark.parametrize("text, right", [
    ('{"name": "Anna", "age": 31, "city": "Oslo"}', True), ('Sure:\n```json\n{"name": "Anna", "age": "31", "city": "Oslo"}\n```', True), ('{"name": "Anna", "age": 31}', False),
    ('{"name": "Anna", "age": 31, "city": "Oslo", "x": 1}', False), ("{'name': 'Anna'}", False), ("no object", False), ("[1]", False),
])
def test_objects(answers, text, right):
    assert answers.holds(text, dict(name="Anna", age=31, city="Oslo")) is right


def test_judges(answers):
    g = torch.Generator().manual_seed(0)
    (ask, judge), = answers.sums(1, g)
    a, b = (int(x) for x in ask.removeprefix("What is ").split("?")[0].split(" + "))
    assert judge(f"{a} + {b} = {a + b}.") and not judge(f"{a + b + 1}") and not judge("none")
    ((fact, _), judge), = answers.facts(1, g)
    code = fact.split()[-1].rstrip(".")
    assert len(code) == 5 and judge(f"It is {code}.") and judge(f"{code[:2]},{code[2:]}") and not judge(code[:4])


@pytest.mark.parametrize("right, n, low, high", [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055)])
def test_wilson(answers, right, n, low, high):
    "Values from Newcombe's and Brown's tables of the interval without continuity correction."
    assert answers.wilson(right, n) == pytest.approx((low, high), abs=1e-4)


def test_theory_of_planted_keys(retrieval):
    for s, n in ((4.0, 1000), (2.0, 10)):
        p = 0.5 * math.erfc(-s / math.sqrt(2))
        assert retrieval.found_by_theory(s, n, "exact", 0) == pytest.approx(p**n, rel=1e-9)
        assert retrieval.found_by_theory(s, n, "mse", 4) < p**n
        order = [retrieval.found_by_theory(s, n, kind, b) for kind, b in (("mse", 4), ("qjl", 4), ("qjl", 3), ("qjl", 2))]
        assert order == sorted(order, reverse=True)
    assert retrieval.normal_mean(lambda z: z * z) == pytest.approx(1, abs=1e-9)
    # one other token: the difference of two scores is normal, so the probability has a closed form
    D = retrieval.scalar_codebook("sphere", 2, 128).to_int8_grid().mse
    want = torch.special.ndtr(torch.tensor(math.sqrt(1 - D) * 1.5 / math.sqrt(1 + D), dtype=torch.float64))
    assert retrieval.found_by_theory(1.5, 1, "mse", 2) == pytest.approx(float(want), abs=1e-9)


def test_counts_are_those_of_theory(retrieval):
    "Small enough to be quick: every count within 5 standard deviations of a binomial; the mutant, a code of one bit less, is out."
    import argparse

    a = argparse.Namespace(lengths=[256, 2048], strengths=[3.0, 4.0], trials=1000, seed=1)
    rows = list(retrieval.planted(a))
    assert len(rows) == 7 * 2 * 5 * 2 and retrieval.exact_gate(rows)["passed"]
    far = lambda r, p: abs(r["found"] - r["n"] * p) / max(1, math.sqrt(r["n"] * p * (1 - p)))
    assert max(far(r, r["theory"]) for r in rows) < 5
    wrong = [far(r, retrieval.found_by_theory(r["strength"], r["length"] - 1, "mse", 1)) for r in rows if (r["kind"], r["bits"], r["strength"], r["length"]) == ("mse", 2, 3.0, 256)]
    assert min(wrong) > 5
