"""vLLM with codes in its blocks against vLLM with bf16 and fp8, a model's shapes and dummy
weights, one NVIDIA GPU: run.py serving --out FILE.

Gate: parts of tests/vllm/engine.py, small models in real engines on this GPU: chunks, prefix
hits, preemption, drafts, a calibration's means and transforms, sliding windows, exact recent
and first tokens, 200 random requests; every output of every layer within 2e-2 of attention in
fp64 to the codes of the states that the layer was given (bf16 in and out), tokens of replayed
graphs those of the engine without, near ties aside, also of unequal requests by lists of work,
which alone have the same tokens. A kind is not measured where a part that concerns it does not
pass.

Then each kind in a process of its own: seconds to the first token of a batch (chunks of 8,192
tokens), milliseconds of a step that decodes, the mean of a run's with the prompts cached,
graphs replayed, and the median of five runs; tokens that the cache holds in a share of the
memory; tokens written per second by more requests than fit at once into equally many bytes of
blocks, whatever the kind."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from plan import Plan
from tools.processes import ended

from turboquant_nb.results import tree

HERE = Path(__file__).parent


PARTS = (
    "plain",
    "firsts",
    "graphs",
    "graphs_drafts",
    "graphs_firsts",
    "graphs_ragged",
    "graphs_trellis",
)  # of tests/vllm/engine.py
WANTED = {  # what a part must have met
    part: tuple(met.split())
    for part, met in dict(
        plain="chunks_with_past preempted",
        drafts="drafted centred",
        random="preempted hits cancelled",
        hybrid="sliding",
        firsts="firsts chunks_with_past",
        firsts_few="firsts preempted",
        firsts_short="firsts grouped",
        drafts_recent="recent",
        drafts_firsts="firsts centred",
        recent="recent",
        trellis="firsts chunks_with_past",
        exact="decided recent",
        exact_windows="decided recent sliding",
        exact_learnt="decided recent learnt",
        learnt="learnt sliding firsts",
        random_firsts="firsts preempted hits cancelled",
        sizes="firsts recent",
        exact_sizes="decided recent",
    ).items()
}
NAMES = {
    "llama-8b": "Llama-8B",
    "gpt-oss-20b": "gpt-oss-20b",
    "gemma-4-31b": "Gemma 4 31B (12 of 60 layers)",
}
OF_MODEL = {  # parts of the gate without which ours is not measured with these shapes
    "gpt-oss-20b": {"learnt"},
    "gemma-4-31b": {"sizes"},
}
began = time.monotonic()


def holds(part, found):
    "Whether what a part of the gate found is right, and is what it is there for."
    if "error" in found or "unfinished" in found:
        return False
    if part.startswith("graphs"):
        return found["decided"] > 20 and not found["wrong"] and found.get("listed", 1) > 0
    return (
        found["worst"] < 2e-2
        and all(found.get(name, 0) > 0 for name in WANTED.get(part, ()))
        and not found.get("wrong")
    )


def gate(parts, seconds):
    "These parts at once, each an engine of its own."
    if not parts:
        return {}
    script, found = HERE.parents[1] / "tests/vllm/engine.py", {}
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(parts)) as pool:

        def run(part):
            return ended([sys.executable, script, f"{folder}/{part}", part], seconds, env=env)

        for part, (status, said) in zip(parts, pool.map(run, parts)):
            if status is None:
                found[part] = dict(unfinished=seconds)
            elif status:
                found[part] = dict(error=f"{script.name} ended with {status}")
                print(said[-9000:], flush=True)
            else:
                line = next(x for x in said.splitlines() if x.startswith("RESULT "))
                found[part] = json.loads(line.removeprefix("RESULT "))
            print(part, json.dumps(found[part]), flush=True)
    return {
        part: x | dict(passed=holds(part, x), commit=tree().commit) for part, x in found.items()
    }


def needed(kind, model="llama-8b"):
    """Parts of the gate without which a kind is not measured, where they were run; and those
    that must have been."""
    if not re.match(r"k\dv\d-", kind):
        return set(), set()
    some, must = set("plain drafts hybrid random".split()), set()
    some |= set("graphs graphs_drafts graphs_ragged".split())
    if "-r" in kind:
        some |= {x for x in WANTED if "firsts" in x or "recent" in x} | {"graphs_firsts"}
    if "trellis" in kind:
        some, must = some | {"graphs_trellis"}, {"trellis"}
    must |= OF_MODEL.get(model, set())
    return some | must, must


def verdict(found, kinds, model="llama-8b"):
    """(the gate of a record, kinds that it lets pass): some of what a kind needs has passed,
    and nothing of it is wrong. A part that did not finish says neither."""
    late = {part for part, x in found.items() if "unfinished" in x}
    red = {part for part, x in found.items() if not x["passed"]} - late
    green = {part for part, x in found.items() if x["passed"]}
    needs = {kind: needed(kind, model) for kind in kinds}
    good = {
        kind
        for kind, (some, must) in needs.items()
        if not some or some & green and must <= green and not red & some
    }
    kept = [kind for kind in kinds if kind in good]  # one may be named twice
    calls = sum(x.get("calls", 0) for x in found.values())
    worst = max((found[x]["worst"] for x in green if found[x].get("calls")), default=0.0)
    commits = {x["commit"][:8] for x in found.values() if x.get("commit")}
    earlier = sorted(commits - {tree().commit[:8]}) if commits else []
    cmd = (
        f"tests/vllm/engine.py {' '.join(found) or '(no part: no kind of ours)'}: {calls} "
        f"calls, worst {worst:.1e}"
    )
    cmd += (
        f"; parts found at {', '.join(earlier)}, whose package is the same" if earlier else ""
    )
    cmd += f"; not finished: {' '.join(sorted(late))}" if late else ""
    cmd += f"; not passed: {' '.join(sorted(red))}" if red else ""
    lost = [kind for kind in kinds if kind not in kept]
    cmd += f"; so not measured: {' '.join(lost)}" if lost else ""
    return dict(
        cmd=cmd,
        passed=bool(kept) and (kept == list(kinds) or any(needs[kind][0] for kind in kept)),
        engine=found,
    ), kept


def package():
    "A digest of the package's code."
    folder, found = HERE.parents[1] / "turboquant_nb", hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def shared_gate(path, parts, seconds):
    """What the gate found that a file has, of the same code of the package; parts that it lacks
    are run and written there."""
    path, before = Path(path), {}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["package"] != package():
            raise SystemExit(
                f"{path} is of another package: its gate says nothing about this one"
            )
        before = found["gate"]
    found = before | gate([part for part in parts if part not in before], seconds)
    path.write_text(json.dumps(dict(package=package(), gate=found)), encoding="utf-8")
    return found


class Engine:
    "A process of serving_engine.py, which imports what it needs and waits to be told to begin."

    def __init__(self, kind, a, cache_gib=None):
        self.kind = kind
        self.folder, self.log = tempfile.TemporaryDirectory(), tempfile.TemporaryFile("w+")
        given = [] if cache_gib is None else ["--cache", cache_gib]
        given += ["--model", a.model, kind, self.folder.name, a.gpus, a.memory, a.gib]
        command = [sys.executable, HERE / "serving_engine.py", *given, *a.shapes]
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={"PYTHONHASHSEED": "0"} | os.environ | {"PYTHONUNBUFFERED": "1"},
        )

    def wait_ready(self):
        "Until it has imported what it needs, or has ended."
        for line in self.process.stdout:
            if line == "READY\n":
                break

    def go_on(self):
        "To the start of the engine, then to what is measured."
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self, seconds):
        "Rows as they come, of so many seconds; then it is ended."
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith("ROW "):
                    yield json.loads(line[4:])
        finally:
            timer.cancel()

    def start(self, seconds):
        "Its first row, that of its start; None where it fails, or takes longer."
        with closing(self.said(seconds)) as rows:
            return next(rows, None)

    def rows(self, seconds):
        "Its other rows as they come; what it said last is shown where it fails."
        try:
            self.go_on()
            yield from self.said(seconds)
        finally:
            self.end()

    def end(self):
        if self.process.poll() is None:
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if code := self.process.wait():
            self.log.seek(0)
            print(
                f"{self.kind} ended with {code}", self.log.read()[-5000:], sep="\n", flush=True
            )


def rows(a, kinds):
    left = lambda: a.until - (time.monotonic() - began)
    sizes = dict(zip(a.kinds, a.cache_gib or []))
    engines = [Engine(kind, a, sizes.get(kind)) for kind in kinds]
    try:
        for engine in engines:
            engine.wait_ready()  # so that none imports while another is measured
        for i, engine in enumerate(engines):
            if left() < a.least:
                print(f"no time is left for {kinds[i:]}", flush=True)
                break
            tokens, limit = 0, min(a.seconds, left())
            try:
                if i % a.together == 0:
                    group = engines[i : i + a.together]
                    for each in group:
                        with suppress(OSError):  # it has ended, and says so when its turn comes
                            each.go_on()
                    started = {each: each.start(min(a.seconds, left())) for each in group}
                if started[engine]:
                    yield started[engine]
                for row in engine.rows(min(a.seconds, left())):
                    tokens += row["what"] in ("token", "first token", "written")
                    yield row
            except OSError as error:
                print(f"{engine.kind}: {error}", flush=True)
            if not tokens:
                yield dict(kind=engine.kind, gpus=a.gpus, what="no token", p50=limit, unit="s")
            print(f"{time.monotonic() - began:.0f} s", flush=True)
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.wait()


def options(p):
    p.add_argument(
        "--kinds",
        nargs="*",
        default=["k3v3-128", "bf16", "fp8"],
        help=(
            "bf16, bf16-triton, fp8 or other dtypes of vLLM's caches; k3v3-128: a preset with "
            "128 tokens a block; k3v3-128-r16-s4: with exact recent and first tokens; "
            "-f behind it: and with random frames, whose mean RoPE turns"
        ),
    )
    p.add_argument(
        "--model",
        choices=NAMES,
        default="llama-8b",
        help=(
            "whose shapes; gpt-oss-20b: learnt logits, windows in every second layer, experts "
            "in 4 bits; gemma-4-31b: heads of 256 and 512"
        ),
    )
    p.add_argument(
        "--shapes",
        nargs="+",
        default=["1x1024x64", "8x32000x48", "first:1x32000", "full:96x8192x512"],
        help=(
            "requests x tokens x new tokens: first token and time of a token; ragged: all but "
            "one of the requests have 1,000 tokens; first: first token alone; full: all at "
            "once in --gib of blocks, written tokens per second"
        ),
    )
    p.add_argument(
        "--gpus", type=int, default=1, help="tensor parallelism; full: goes with 1 alone"
    )
    p.add_argument(
        "--memory",
        type=float,
        default=0.4,
        help=(
            "share of the GPU's memory that an engine takes; 0.4 of an H200 holds 8 x 32,000 "
            "tokens in bf16 and few more"
        ),
    )
    p.add_argument(
        "--gib",
        type=float,
        default=16,
        help="GiB of blocks that are left to full:, whatever the kind",
    )
    p.add_argument(
        "--together",
        type=int,
        default=1,
        help="engines that are started at once; each is measured alone, while others wait",
    )
    p.add_argument(
        "--cache-gib",
        nargs="*",
        type=float,
        help="GiB of blocks of each kind, instead of what --memory leaves",
    )
    p.add_argument(
        "--least", type=int, default=45, help="seconds left without which no kind is measured"
    )
    p.add_argument(
        "--parts",
        nargs="*",
        default=PARTS,
        choices=sorted({*WANTED, *PARTS}),
        help=(
            "of the gate, which kinds of ours need; one is not measured if a part that "
            "concerns it does not pass. hybrid needs flash attention that was built for "
            "windows and soft caps"
        ),
    )
    p.add_argument(
        "--gate",
        metavar="FILE",
        help=(
            "take what the gate found in several runs of one code from this file, which the "
            "first one writes"
        ),
    )
    p.add_argument("--seconds", type=int, default=240, help="for one kind, and for the gate")
    p.add_argument(
        "--until",
        type=int,
        default=10**6,
        help="seconds from the start after which nothing is measured",
    )


def plan(a):
    import vllm

    found = shared_gate(a.gate, a.parts, a.seconds) if a.gate else gate(a.parts, a.seconds)
    checked, kinds = verdict(found, a.kinds, a.model)
    return Plan(
        "serving",
        gate=checked,
        rows=rows(a, kinds),
        model={"id": f"{NAMES[a.model]} shapes, dummy weights"},
        data={"id": "random tokens", "n": 1},
        more={"vllm": vllm.__version__},
    )
