"""vLLM with codes in its blocks against vLLM with bf16 and fp8, Llama-8B shapes and dummy weights, one NVIDIA GPU: run.py serving --out FILE.

Gate: tests/serving/engine.py, a small model in a real engine on this GPU: chunks, prefix hits and preemption, every output of every layer
within 2e-2 of attention in fp64 to the codes of the states that the layer was given (bf16 in and out).

Then each kind in a process of its own: seconds to the first token of a batch (chunks of 8,192 tokens), and milliseconds a token from the
difference of generating 1 and 1 + n tokens with the prompts cached, graphs replayed; tokens that the cache holds at 85 % of the memory."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from plan import Plan

HERE = Path(__file__).parent


def process(*command, seconds):
    "Lines that a process of Python prints; they are shown where it fails."
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=seconds, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-6000:], sep="\n", flush=True)
        raise RuntimeError(f"{command[0]} ended with {done.returncode}")
    return done.stdout.splitlines()


def gate():
    with tempfile.TemporaryDirectory() as folder:
        lines = process(HERE.parents[1] / "tests/serving/engine.py", folder, 10, seconds=240)
    seen = json.loads(next(x for x in lines if x.startswith("RESULT "))[7:])
    passed = seen["worst"] < 2e-2 and min(seen["chunks_with_past"], seen["preempted"], sum(seen["cached"])) > 0
    return dict(cmd=f"tests/serving/engine.py: {seen['calls']} calls, worst {seen['worst']:.1e}, {seen['preempted']} preemptions, cached tokens {seen['cached']}", passed=passed, engine=seen)


def rows(a):
    for kind in a.kinds:
        try:
            with tempfile.TemporaryDirectory() as folder:
                for line in process(HERE / "serving_engine.py", kind, folder, *a.shapes, seconds=a.seconds):
                    if line.startswith("ROW "):
                        yield json.loads(line[4:])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{kind}: {error}", flush=True)


def options(p):
    p.add_argument("--kinds", nargs="+", default=["k3v3-64", "bf16", "fp8"], help="bf16, fp8 or other dtypes of vLLM's caches, k3v3-64: a preset with 64 tokens a block")
    p.add_argument("--shapes", nargs="+", default=["1x1024x64", "8x32000x48"], help="requests x tokens x new tokens")
    p.add_argument("--seconds", type=int, default=240, help="for one kind")


def plan(a):
    import vllm

    return Plan("serving", gate=gate(), rows=rows(a), model={"id": "Llama-8B shapes, dummy weights"}, data={"id": "random tokens", "n": 1}, more={"vllm": vllm.__version__})
