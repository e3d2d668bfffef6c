"""The benches' runner: every bench is named and complete, a red gate measures nothing, rows are
saved as they come, quantiles are those of numpy."""

import argparse
import ast
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="scripts/ is not beside the tests")
OURS = ("cases", "plan", "run", "timing", "serving", "serving_engine")


@pytest.fixture
def bench(monkeypatch):
    "Import a module of scripts/bench as a run does, and forget it afterwards."
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in OURS:
        sys.modules.pop(name, None)


def functions(path):
    return {
        x.name
        for x in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(x, ast.FunctionDef)
    }


def test_every_bench_is_named_and_complete(bench):
    found = {path.stem for path in BENCH.glob("*.py") if "plan" in functions(path)}
    assert found == {*bench("run").BENCHES}
    assert all("options" in functions(BENCH / f"{name}.py") for name in found)


def test_shapes_have_names(bench):
    cases = bench("cases")
    assert all(
        isinstance(c, cases.Shape) and c.d in (64, 80, 112, 128, 256) and c.tokens >= 1024
        for c in cases.CASES["decode_kernel"]
    )
    assert set(cases.CASES["decode_kernel, quick"]) < set(cases.CASES["decode_kernel"])
    assert set(cases.CASES["generate, quick"]) < set(cases.CASES["generate"])


def arguments(tmp_path, monkeypatch):
    from turboquant_nb import results

    monkeypatch.setenv("TURBOQUANT_COMMIT", "0" * 40)
    monkeypatch.setenv("TURBOQUANT_DIRTY", "0")
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    return results, results.parse(p, ["--out", str(tmp_path / "r.json")])


def test_a_red_gate_measures_nothing(bench, tmp_path, monkeypatch):
    _, a = arguments(tmp_path, monkeypatch)
    rows = (pytest.fail("measured") for _ in range(1))
    with pytest.raises(SystemExit, match="nothing is measured"):
        bench("run").measure(a, bench("plan").Plan("x", {"cmd": "c", "passed": False}, rows))
    assert not list(tmp_path.iterdir())


def test_rows_are_saved_as_they_come(bench, tmp_path, monkeypatch):
    "The first row is in the file when the second is asked for, beside those of an earlier run."
    results, a = arguments(tmp_path, monkeypatch)
    old = {"x": 0, "unit": "s", "commit": "1" * 40, "utc": "2026-01-01T00:00:00Z"}

    def rows():
        yield {"x": 1, "unit": "s"}
        assert [r["x"] for r in results.load(tmp_path / "r.json")["rows"]] == [0, 1]
        yield {"x": 2, "unit": "s"}

    bench("run").measure(
        a,
        bench("plan").Plan(
            "x", {"cmd": "c", "passed": True}, rows(), model={"id": "m"}, before=[old]
        ),
    )
    assert [r["x"] for r in results.load(tmp_path / "r.json")["rows"]] == [0, 1, 2]


def test_times(bench):
    timing = bench("timing")
    x = torch.rand(37, dtype=torch.float64).tolist()
    assert [*timing.quantiles(x).values()] == pytest.approx(np.quantile(x, [0.2, 0.5, 0.8]))
    calls = []
    assert len(timing.host_times(lambda: calls.append(1), 5, 3)) == 3 and len(calls) == 15
    assert len(timing.clock_times(lambda: calls.append(1), 4)) == 4 and len(calls) == 20


def test_kinds_and_shapes_of_engines(bench):
    engine = bench("serving_engine")
    assert (
        engine.options("k3v3-128", 8, 1, 0.5)["additional_config"]
        == {"turboquant_nb": {"recipe": "k3v3", "recent": 0, "sinks": 0}}
        == engine.options("k3v3-128-even", 8, 1, 0.5)["additional_config"]
    )
    exact = engine.options("k4v3-64-r16-s4", 96, 1, 0.5)
    assert (
        exact["additional_config"]
        == {"turboquant_nb": {"recipe": "k4v3", "recent": 16, "sinks": 4}}
        and exact["block_size"] == 64
    )
    assert (
        exact["max_num_seqs"]
        == 96
        == exact["compilation_config"]["cudagraph_capture_sizes"][-1]
    )
    assert engine.options("fp8", 8, 1, 0.5)[
        "kv_cache_dtype"
    ] == "fp8" and "kv_cache_dtype" not in engine.options("bf16", 8, 1, 0.5)
    assert [
        engine.shape_of(x)
        for x in ("8x32000x48", "ragged:8x32000x48", "first:1x32000", "full:80x8192x512")
    ] == [
        ("token", 8, 32000, 48),
        ("ragged", 8, 32000, 48),
        ("first", 1, 32000, 1),
        ("full", 80, 8192, 512),
    ]


def test_a_step_of_an_engine_is_timed_without_the_ends_of_a_run(bench):
    engine = bench("serving_engine")
    ends = (
        [100.0 * i for i in range(7)]
        + [600 + 0.005 * i for i in range(1, 31)]
        + [700.0 + 50 * i for i in range(5)]
    )  # slow at both ends, 5 ms between
    assert engine.each_step(ends) == pytest.approx(5)
    with pytest.raises(ValueError, match="more than 12 steps to be timed, got 12"):
        engine.each_step(ends[:12])
    fake = type("Engine", (), {"step": lambda self: "out"})()
    timed = engine.timed_steps(fake)
    assert (
        [fake.step(), fake.step()] == ["out", "out"]
        and len(timed) == 2
        and timed[0] <= timed[1]
    )


def test_a_kind_of_engine_is_measured_only_where_its_parts_of_the_gate_pass(bench):
    serving = bench("serving")
    kinds = ["bf16", "k3v3-128", "k3v3-128-r16-s4"]
    good = dict(worst=0.004, calls=9, chunks_with_past=3, preempted=1, firsts=7)
    found = lambda **more: {
        part: dict(x, passed=serving.holds(part, x))
        for part, x in (
            dict(plain=good, firsts=good, graphs=dict(decided=30, wrong=0)) | more
        ).items()
    }
    assert (
        serving.verdict(found(), kinds)[1] == kinds
        and serving.verdict(found(), kinds)[0]["passed"]
    )
    for bad in (dict(error="ended with 1"), good | dict(worst=0.1), good | dict(firsts=0)):
        gate, kept = serving.verdict(found(firsts=bad), kinds)
        assert (
            kept == kinds[:2]
            and gate["passed"]
            and "firsts" in gate["cmd"].partition("not passed")[2]
        )
    for part, bad in (
        ("plain", good | dict(preempted=0)),
        ("graphs", dict(decided=30, wrong=1)),
        ("graphs", dict(decided=0, wrong=0)),
    ):
        gate, kept = serving.verdict(found(**{part: bad}), kinds)
        assert kept == ["bf16"] and not gate["passed"]
    late = serving.verdict(found(plain=dict(unfinished=90)), kinds)
    assert (
        late[1] == kinds
        and "not finished: plain" in late[0]["cmd"]
        and serving.verdict(dict(plain=dict(unfinished=90, passed=False)), kinds)[1] == ["bf16"]
    )
    assert serving.verdict({}, ["bf16"])[0]["passed"] and serving.gate([], 1) == {}, (
        "a kind that is not ours has no gate"
    )
    assert (
        serving.verdict({}, kinds)[1] == ["bf16"]
        and not serving.verdict({}, kinds)[0]["passed"]
    ), "ours have"


def test_a_gate_is_shared_by_runs_of_one_package(bench, tmp_path, monkeypatch):
    serving, ran = bench("serving"), []
    monkeypatch.setattr(
        serving,
        "gate",
        lambda parts, seconds: (
            ran.append(list(parts)) or {part: dict(passed=True) for part in parts}
        ),
    )
    assert set(serving.shared_gate(tmp_path / "g", ["plain"], 1)) == {"plain"} and set(
        serving.shared_gate(tmp_path / "g", ["plain", "graphs"], 1)
    ) == {"plain", "graphs"}
    assert ran == [["plain"], ["graphs"]]
    monkeypatch.setattr(serving, "package", lambda: "another")
    with pytest.raises(SystemExit, match="of another package"):
        serving.shared_gate(tmp_path / "g", ["plain"], 1)
