"""vLLM with codes in its blocks against vLLM with bf16 and fp8, Llama-8B shapes and dummy weights, one NVIDIA GPU: run.py serving --out FILE.

Gate: tests/serving/engine.py, small models in real engines on this GPU: chunks, prefix hits, preemption, drafts, a calibration's means and
transforms, sliding windows, 200 random requests; every output of every layer within 2e-2 of attention in fp64 to the codes of the states that
the layer was given (bf16 in and out), tokens of replayed graphs those of the engine without, up to the first near tie.

Then each kind in a process of its own: seconds to the first token of a batch (chunks of 8,192 tokens), milliseconds a token from the
difference of generating 1 and 1 + n tokens with the prompts cached, graphs replayed; tokens that the cache holds in a share of the memory;
and tokens written per second by more requests than a bf16 cache of that size holds."""
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plan import Plan

from turboquant_nb.results import tree

HERE = Path(__file__).parent


def process(*command, seconds):
    "Lines that a process of Python prints; they are shown where it fails."
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=seconds, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-6000:], sep="\n", flush=True)
        raise RuntimeError(f"{command[0]} ended with {done.returncode}")
    return done.stdout.splitlines()


PARTS = "plain", "drafts", "hybrid", "random", "graphs"  # of tests/serving/engine.py


def gate(parts, seconds):
    "These parts at once, each an engine of its own."
    tests, folder, found = HERE.parents[1] / "tests/serving/engine.py", tempfile.TemporaryDirectory(), {}
    with ThreadPoolExecutor(len(parts)) as pool:
        running = {part: pool.submit(process, tests, f"{folder.name}/{part}", part, seconds=seconds) for part in parts}
    for part, future in running.items():
        try:
            found[part] = json.loads(next(x for x in future.result() if x.startswith("RESULT "))[7:])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found[part] = dict(error=str(error)[:300], worst=float("inf"))
    print(json.dumps(found), flush=True)
    wanted = dict(plain=("chunks_with_past", "preempted"), drafts=("drafted", "centred"), random=("preempted", "hits", "cancelled"), hybrid=("sliding",))
    passed = all(x["worst"] < 2e-2 and all(x.get(name, 0) > 0 for name in wanted.get(part, ())) for part, x in found.items())
    passed = passed and all(decided > 5 and not wrong for decided, wrong in found.get("graphs", {}).get("graphs", {}).values())
    calls, worst = sum(x.get("calls", 0) for x in found.values()), max(x["worst"] for x in found.values())
    return dict(cmd=f"tests/serving/engine.py {' '.join(parts)}: {calls} calls, worst {worst:.1e}", passed=passed, engine=found)


def shared_gate(path, parts, seconds):
    "The gate that a file has, of this very commit; run and written there if there is none."
    here, path = tree(), Path(path)
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["commit"], found["changes"]) != (here.commit, here.changes):
            raise SystemExit(f"{path} is of commit {found['commit']}, this is {here.commit}: its gate says nothing about it")
        return found["gate"]
    found = gate(parts, seconds)
    path.write_text(json.dumps(dict(commit=here.commit, changes=here.changes, gate=found)), encoding="utf-8")
    return found


def rows(a):
    for kind in a.kinds:
        try:
            with tempfile.TemporaryDirectory() as folder:
                for line in process(HERE / "serving_engine.py", kind, folder, a.gpus, a.memory, *a.shapes, seconds=a.seconds):
                    if line.startswith("ROW "):
                        yield json.loads(line[4:])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{kind}: {error}", flush=True)


def options(p):
    p.add_argument("--kinds", nargs="*", default=["k3v3-128", "bf16", "fp8"], help="bf16, fp8 or other dtypes of vLLM's caches, k3v3-128: a preset with 128 tokens a block")
    p.add_argument("--shapes", nargs="+", default=["1x1024x64", "8x32000x48", "full:64x8192x512"], help="requests x tokens x new tokens; full: all at once, written tokens per second")
    p.add_argument("--gpus", type=int, default=1, help="tensor parallelism")
    p.add_argument("--memory", type=float, default=0.4, help="share of the GPU's memory that an engine takes; 0.4 of an H200 holds 8 x 32,000 tokens in bf16 and few more")
    p.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="of the gate; hybrid needs flash attention that was built for windows and soft caps")
    p.add_argument("--gate", metavar="FILE", help="take the gate of several runs of one commit from this file, which the first one writes")
    p.add_argument("--seconds", type=int, default=240, help="for one kind")


def plan(a):
    import vllm

    return Plan("serving", gate=shared_gate(a.gate, a.parts, a.seconds) if a.gate else gate(a.parts, a.seconds), rows=rows(a), model={"id": "Llama-8B shapes, dummy weights"}, data={"id": "random tokens", "n": 1}, more={"vllm": vllm.__version__})
