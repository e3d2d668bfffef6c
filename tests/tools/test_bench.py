"""What is measured: every experiment of scripts/run.py starts with its smallest case, a red
gate measures nothing, rows are saved as they come, parts are joined, quantiles are those of
numpy."""

import ast
import importlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from turboquant_nb import results
from turboquant_nb.vllm.step import ServingConfig

from tests.cli.conftest import SIZE, save
from tests.conftest import SCRIPTS

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

run = pytest.importorskip("run")
import plan
from bench import serving, serving_engine, timing

from tests.helpers import refuses, seeded


@pytest.fixture
def measured(tmp_path, monkeypatch, capsys):
    "Measure as a command does: words -> the file's record. The code counts as committed."
    code = results.Tree("0" * 40)
    monkeypatch.setattr(results, "tree", lambda: code)
    monkeypatch.setenv("TURBOQUANT_COMMIT", code.commit)  # of processes that it starts
    monkeypatch.chdir(SCRIPTS.parent)
    threads = torch.get_num_threads()

    def measure(*words):
        out = tmp_path / "out.json"
        argv = [*words, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "run.py"), *argv])
        run.main(argv)
        return results.load(out)

    yield measure
    torch.set_num_threads(threads)


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}


def test_every_experiment_is_named():
    found = {
        f"{folder}.{path.stem}"
        for folder in ("bench", "eval")
        for path in (SCRIPTS / folder).glob("*.py")
        if {"options", "plan"} <= functions(path)
    }
    assert found == {x.module for x in run.EXPERIMENTS.values()}


@pytest.mark.parametrize("name", run.EXPERIMENTS)
def test_every_experiment_says_what_it_measures(name, capsys):
    with pytest.raises(SystemExit) as done:
        run.main([name, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert f"run.py {name}" in text and "--draft" in text and "--join" in text


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    "A random Llama that reads ids of any text: the embedded model takes minutes."
    torch.manual_seed(0)
    config = LlamaConfig(**SIZE | dict(vocab_size=10_000), max_position_embeddings=2048)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[SIZE["vocab_size"] :] = 0  # it writes what the tokenizer reads
    return save(tmp_path_factory.mktemp("small"), model)


@pytest.mark.parametrize("name", [k for k, x in run.EXPERIMENTS.items() if x.smallest])
def test_every_experiment_starts(name, measured, monkeypatch, small_model):
    of_model = ["--model", small_model] if name in ("columns", "agents", "budget") else []
    if name == "chapters":  # of processes those of its gate alone
        chapters = importlib.import_module("eval.chapters")
        begun, gate = chapters.run, {"right", "wrong", "endless"}

        def ran(path, *a):
            passed, seconds, said = begun(path, *a) if path.stem in gate else (True, 1.0, "")
            return passed, seconds / 4, said  # the endless one ends soon

        monkeypatch.setattr(chapters, "run", ran)
        monkeypatch.setattr(chapters, "PROBE", "print('2.9 5.0')")
    found = measured(name, *run.EXPERIMENTS[name].smallest.split(), *of_model)
    assert found["rows"] and found["gate"]["passed"]
    assert not any("failed" in row for row in found["rows"])
    assert found["command"].startswith("python scripts/run.py") or not found["command"]


@pytest.mark.parametrize("name", [k for k, x in run.EXPERIMENTS.items() if x.needs])
def test_what_a_machine_lacks_is_said(name, measured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses(f"^{name} needs (an NVIDIA GPU|(cosmic_ray|vllm), which is not)", SystemExit):
        measured(name)


@pytest.fixture
def without_gpu(monkeypatch):
    "Import a bench whose clocks take one call and say one second; kernels are interpreted."
    times = lambda f, *a: (f(), {"p20": 1.0, "p50": 1.0, "p80": 1.0})[1]
    both = lambda f, *a: [{"launch": x} | times(f) for x in ("eager", "graph")]
    fakes = dict(kernel_times=times, both_launches=both, replayed=lambda f: f)
    fakes |= dict(event_time=lambda f: (f(), 1.0)[1])

    def load(name):
        module = importlib.import_module(f"bench.{name}")
        for fake, f in fakes.items():
            if hasattr(module, fake):
                monkeypatch.setattr(module, fake, f)
        return module

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if not timing.torch.cuda.is_available():
        pytest.importorskip("triton")
    return load


def test_appends_are_timed(without_gpu, monkeypatch):
    bench, held = without_gpu("decode_kernel"), []

    def clock(append, stores, first):
        append()
        held.extend(store.length - first for store in stores)
        return [1.0] * 30

    monkeypatch.setattr(bench, "append_times", clock)
    (row,) = bench.measure_appends(["k3v3"], bench.Shape(1, 2, 1, 16, 70))
    assert row["recipe"] == "k3v3" and row["p50"] == 1 and held == [1]


def test_attention_is_timed_by_method(without_gpu, monkeypatch):
    bench = without_gpu("decode_kernel")
    monkeypatch.setattr(bench, "fastest_dense", lambda *a: (lambda: None, (1, 2, 3, 4)))
    case = bench.Shape(1, 1, 2, 16, 70)
    rows = list(bench.measure(case, [(3, 3)], 0.1))
    methods = ["sdpa bf16", "triton bf16", "triton fp8", "codes", "codes, turning centre"]
    assert [r["method"] for r in rows] == [x for x in methods for _ in range(2)]
    assert rows[-1]["speedup"] == 1


@torch.no_grad()
def test_a_filled_cache_is_that_of_a_prompt(without_gpu, monkeypatch):
    bench = without_gpu("generate")
    model = bench.make_model(bench.TINY, torch.float32)
    prompt = torch.randint(256, (2, 40), generator=seeded(0))
    worst = bench.filling(model, prompt)
    assert len(worst) == 4 and max(worst.values()) < 1e-4
    put = bench.put
    monkeypatch.setattr(
        bench, "put", lambda cache, kind, i, at, k, v: put(cache, kind, i, at, k, 2 * v)
    )
    assert min(bench.filling(model, prompt).values()) > 1e-4


@pytest.fixture
def a(tmp_path):
    code = results.Tree("0" * 40)
    return SimpleNamespace(out=tmp_path / "r.json", draft=False, code=code, limit=None)


GREEN = {"cmd": "c", "passed": True}


def test_a_red_gate_measures_nothing(a, tmp_path):
    rows = (pytest.fail("measured") for _ in range(1))
    with refuses("nothing is measured", SystemExit):
        plan.carry_out(a, plan.Plan("x", {"cmd": "c", "passed": False}, rows))
    assert not list(tmp_path.iterdir())


def test_rows_are_saved_as_they_come(a):
    "The first row is in the file when the second is asked for, beside those of an earlier run."
    old = {"x": 0, "unit": "s", "commit": "1" * 40, "utc": "2026-01-01T00:00:00Z"}
    held = lambda: [r["x"] for r in results.load(a.out)["rows"]]

    def rows():
        yield {"x": 1, "unit": "s"}
        assert held() == [0, 1]
        yield {"x": 2, "unit": "s"}

    plan.carry_out(a, plan.Plan("x", GREEN, rows(), model={"id": "m"}, before=[old]))
    assert held() == [0, 1, 2]


def test_a_gate_of_rows_is_asked_after_each(a):
    "What a red row would have added is not in the file."
    gate = lambda rows: {"cmd": "c", "passed": rows[-1]["x"] < 2}
    rows = ({"x": i, "unit": "s"} for i in range(9))
    with refuses("nothing more is saved", SystemExit):
        plan.carry_out(a, plan.Plan("x", gate, rows))
    assert [r["x"] for r in results.load(a.out)["rows"]] == [0, 1]


def test_no_row_is_begun_when_the_time_is_over(a):
    a.limit = 1e-9
    rows = ({"x": i, "unit": "s"} for i in range(9))
    with refuses("out of time", SystemExit):
        plan.carry_out(a, plan.Plan("x", GREEN, rows))
    assert [r["x"] for r in results.load(a.out)["rows"]] == [0]


def test_parts_are_joined(a, tmp_path):
    "A row that both have by name stays once, as the first of them measured it."
    paths = []
    for i, name in enumerate("bc"):
        paths.append(tmp_path / f"{name}.json")
        rows = [
            {"cache": "uncompressed", "ppl": 5.0 + i, "unit": "x"},
            {"cache": name, "unit": "x"},
            {"cache": name, "unit": "x"},
        ]
        plan.carry_out(
            SimpleNamespace(**vars(a) | dict(out=paths[-1])), plan.Plan("x", GREEN, rows)
        )
    a.join = paths
    plan.join(a)
    found = results.load(a.out)
    assert [r["cache"] for r in found["rows"]] == ["uncompressed", "b", "b", "c", "c"]
    assert found["rows"][0]["ppl"] == 5.0 and len(found["joined"]) == 2


def test_times():
    x = torch.rand(37, dtype=torch.float64).tolist()
    assert [*timing.quantiles(x).values()] == pytest.approx(np.quantile(x, [0.2, 0.5, 0.8]))


def test_kinds_and_shapes_of_engines():
    exact = serving_engine.options("k2v2-trellis-64-r16-s4", 96, 1, 0.5)
    told = exact["additional_config"]["turboquant_nb"]
    assert told == {"recipe": "k2v2-trellis", "means": False, "recent": 16, "sinks": 4}
    assert exact["block_size"] == 64 and exact["max_num_seqs"] == 96
    assert exact["compilation_config"]["cudagraph_capture_sizes"][-1] == 96
    config = ServingConfig.of(told)
    assert config.bytes_per_token(128) == 68 and (config.recent, config.sinks) == (16, 4)
    assert serving_engine.options("fp8", 8, 1, 0.5)["kv_cache_dtype"] == "fp8"
    assert "kv_cache_dtype" not in serving_engine.options("bf16", 8, 1, 0.5)
    shapes = {
        "8x32000x48": ("token", 8, 32000, 48),
        "ragged:8x32000x48": ("ragged", 8, 32000, 48),
        "first:1x32000": ("first", 1, 32000, 1),
    }
    assert {x: serving_engine.shape_of(x) for x in shapes} == shapes


def test_steps_beside_prompts_that_are_read_again_are_no_steps():
    prompts = [[0] * 1000, [0] * 300, [0] * 20]
    assert not serving_engine.read_again(prompts, 744 + 44, 128)
    why = serving_engine.read_again(prompts, 700, 128)
    assert why == "prompts were read again: 700 of at least 788 tokens were cached"
    planned = [8192] * 4 + [2] * 9 + [8] + [3] * 20 + [2] * 12  # one request is there earlier
    steps = list(enumerate(planned))
    assert serving_engine.decode_alone(steps, 3) == steps[14:34]
    assert serving_engine.decode_alone(steps, 4) == []


def test_a_step_of_an_engine_is_timed_without_the_ends_of_a_run():
    ends = (
        [100.0 * i for i in range(7)]
        + [600 + 0.005 * i for i in range(1, 31)]
        + [700.0 + 50 * i for i in range(5)]
    )  # slow at both ends, 5 ms between
    ends = [(end, 8) for end in ends]
    assert serving_engine.each_step(ends) == pytest.approx(5)
    with refuses("more than 12 steps to be timed, got 12"):
        serving_engine.each_step(ends[:12])


HELD = dict(worst=0.004, calls=9, chunks_with_past=3, preempted=1, firsts=7)
KINDS = ["bf16", "k3v3-128", "k3v3-128-r16-s4"]


@pytest.mark.parametrize(
    "found, kinds, kept, said",
    [
        ({}, KINDS, 3, ""),
        (dict(firsts=dict(error="ended with 1")), KINDS, 2, "not passed: firsts"),
        (dict(firsts=HELD | dict(worst=0.1)), KINDS, 2, "not passed: firsts"),
        (dict(firsts=HELD | dict(firsts=0)), KINDS, 2, "not passed: firsts"),
        (dict(plain=HELD | dict(preempted=0)), KINDS, 1, "not passed: plain"),
        (dict(graphs=dict(decided=30, wrong=1)), KINDS, 1, "not passed: graphs"),
        (dict(graphs=dict(decided=0, wrong=0)), KINDS, 1, "not passed: graphs"),
        (dict(plain=dict(unfinished=90)), KINDS, 3, "not finished: plain"),
        (dict(trellis=HELD), ["k2v2-trellis-128"], 1, ""),
        # what a kind must have passed, not only where it was run
        ({}, ["bf16", "k2v2-trellis-128"], 1, "so not measured: k2v2-trellis-128"),
        ({}, ["k3v3-128", "bf16", "k3v3-128"], 3, ""),
    ],
)
def test_a_kind_of_engine_is_measured_only_where_its_parts_of_the_gate_pass(
    found, kinds, kept, said
):
    whole = dict(plain=HELD, firsts=HELD, graphs=dict(decided=30, wrong=0)) | found
    whole = {part: dict(x, passed=serving.holds(part, x)) for part, x in whole.items()}
    gate, measured = serving.verdict(whole, kinds)
    assert measured == kinds[:kept] and said in gate["cmd"]
    assert gate["passed"] == any(kind != "bf16" for kind in measured)


def test_a_kind_of_engine_has_the_gate_of_its_model():
    good, kinds = dict(HELD, learnt=3, sliding=2), ["bf16", "k3v3-128"]
    found = {part: dict(good, passed=True) for part in ("plain", "learnt")}
    asked = lambda **how: serving.verdict(found | how, kinds, model="gpt-oss-20b")[1]
    assert asked() == kinds
    assert asked(learnt=dict(good, passed=False)) == ["bf16"]
    assert serving.verdict({}, ["bf16"])[0]["passed"] and serving.gate([], 1) == {}, (
        "a kind that is not ours has no gate"
    )
    gate, kept = serving.verdict({}, kinds)
    assert kept == ["bf16"] and not gate["passed"], "ours have"


def test_engines_start_together_and_are_measured_alone(monkeypatch):
    log = []

    class Engine:
        def __init__(self, kind, a, gib):
            self.kind, self.gib, self.process = kind, gib, self

        def go_on(self):
            log.append(f"go {self.kind} {self.gib}")
            if self.kind == "late":
                raise BrokenPipeError

        def rows(self, seconds):
            log.append(f"measure {self.kind}")
            if self.kind == "late":
                raise BrokenPipeError
            yield dict(kind=self.kind, what="token")

        start = lambda self, seconds: None
        wait_ready = kill = wait = lambda self: None

    monkeypatch.setattr(serving, "Engine", Engine)
    a = SimpleNamespace(kinds=["bf16", "red", "k3v3-128", "late"], cache_gib=[4, 3, 2, 1])
    a.until, a.seconds, a.least, a.gpus, a.together = 10**6, 9, 0, 1, 2
    got = [*serving.rows(a, ["bf16", "k3v3-128", "late", "fp8"])]
    assert log == [
        "go bf16 4",
        "go k3v3-128 2",
        "measure bf16",
        "measure k3v3-128",
        "go late 1",
        "go fp8 None",
        "measure late",
        "measure fp8",
    ]
    found = {r["kind"]: r["what"] for r in got}
    assert found == dict.fromkeys(["bf16", "k3v3-128", "fp8"], "token") | {"late": "no token"}
    a.least = 10**7
    assert not [*serving.rows(a, ["bf16"])], "no time is left"


def test_a_gate_is_shared_by_runs_of_one_package(tmp_path, monkeypatch):
    ran = []
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
    with refuses("of another package", SystemExit):
        serving.shared_gate(tmp_path / "g", ["plain"], 1)


@pytest.mark.parametrize("name", run.CLOSED)
def test_a_closed_experiment_says_how_the_last_script_of_it_runs(name):
    argv = [*name.split(), "--out", "a b.json"]
    asked = f"{name} is closed.* {run.CLOSED[name][0]} .*PYTHONPATH=. python .*/run.py {name} "
    with refuses(asked + "--out 'a b", SystemExit):
        run.main(argv)
    assert name not in run.EXPERIMENTS


def test_the_last_commits_hold_the_closed_scripts():
    "Where the history is at hand: run.py of that commit names them."
    for commit, names in run.LAST.items():
        held = subprocess.run(
            ["git", "show", f"{commit}:scripts/run.py"], capture_output=True, text=True
        )
        if held.returncode:
            pytest.skip("no history here")
        assert all(f'"{name.partition(" ")[0]}": ' in held.stdout for name in names)
