#!/usr/bin/env python3
"""How long a context fits a GPU of 24 GB, tried and not computed: context.py --out FILE
[--shapes 14B 32B 70B] [--caches bf16 k4v4 ...] [--limit BYTES].

A model of each shape with random weights decodes under
`torch.cuda.set_per_process_memory_fraction`. Its layers are alike, so they share the weights of
one, in bfloat16; each has a cache of its own. What the other weights would take is held by a
block that nobody reads: for 14B and 32B it brings embeddings and head in bfloat16 and layers in
4.25 bits a weight (4 bits and a 16-bit scale for each 64) to their full size; a 70B does not
fit so, its layers wait in the CPU's memory, and one of them at a time is here, which is the
shared one. The cache gets random states (an uncompressed one the same for each token), then the
model reads the last `--chunk` tokens of a prompt and decodes four more. `tokens` is the most
that was held without running out of memory, in steps of 1,024 uncompressed and of 8,192 for
codes: PyTorch's allocator gives whole pages of 2 MiB, which a 2-bit plane of eight heads fills
with so many. `refused` is the least that ran out of it. The limit is 24 * 10^9 bytes of
PyTorch's allocator: a card of 24 GiB has 1.8 * 10^9 more, for CUDA itself and a screen.

Gate: no peak of a run that fits lies above the limit, logits are finite, and one step of tokens
more runs out of memory."""

import argparse
import gc
import time

import torch
import transformers

from turboquant_nb import results
from turboquant_nb.hf import TurboQuantCache

# as Qwen2.5 14B and 32B and Llama 3.1 70B have them: architecture, sizes, where the weights are
SHAPES = {
    "14B": (
        "Qwen2",
        dict(
            hidden_size=5120,
            intermediate_size=13824,
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=152064,
        ),
        "4.25 bits",
    ),
    "32B": (
        "Qwen2",
        dict(
            hidden_size=5120,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=152064,
        ),
        "4.25 bits",
    ),
    "70B": (
        "Llama",
        dict(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=128256,
        ),
        "offloaded",
    ),
}
BITS, NEW = 4.25, 4


def shared_model(architecture, sizes, device):
    """A causal model in bfloat16 whose layers share the random weights of the first, and the
    bytes of one layer."""
    config = getattr(transformers, f"{architecture}Config")(
        **sizes, tie_word_embeddings=False, max_position_embeddings=1 << 20
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(torch.bfloat16)
    inner = model.model
    for module in (inner.embed_tokens, inner.norm, model.lm_head, inner.layers[0]):
        module.to_empty(device=device)
        for p in module.parameters():
            torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.02)
    inner.rotary_emb = type(inner.rotary_emb)(config).to(device)
    for layer in inner.layers[1:]:
        for name, p in inner.layers[0].named_parameters():
            path, _, leaf = name.rpartition(".")
            layer.get_submodule(path)._parameters[leaf] = p
    return model.eval(), sum(p.nbytes for p in inner.layers[0].parameters())


def placed(model, one, where, device):
    "(bytes of weights on the device, the block that stands for those that are not here)."
    here = sum({id(p): p.nbytes for p in model.parameters()}.values())
    layers = len(model.model.layers)
    whole = (
        here if where == "offloaded" else max(here, here - one + int(layers * one * BITS / 16))
    )
    return whole, torch.empty(whole - here, dtype=torch.uint8, device=device)


def new_cache(model, name, tokens):
    "An empty cache for so many tokens."
    if name == "bf16":
        return transformers.DynamicCache(config=model.config)
    return TurboQuantCache(model, name, max_length=tokens, graphs=False)


@torch.no_grad()
def attempt(model, name, tokens, chunk, states):
    """Hold so many tokens and decode: bytes of the cache and at the peak, and whether logits
    are finite."""
    device, text = states.device, model.config
    torch.cuda.reset_peak_memory_stats()
    cache, filled = new_cache(model, name, tokens), tokens - chunk - NEW
    for first in range(0, filled, states.shape[2]):
        part = states[:, :, : min(states.shape[2], filled - first)]
        for i in range(text.num_hidden_layers):
            if name == "bf16":  # all at once, since an update copies what is there
                part = states[:, :, :1].expand(-1, -1, filled, -1)
            cache.update(part, part, i)
        if name == "bf16":
            break
    ids = torch.arange(chunk, device=device)[None] % text.vocab_size
    finite = True
    for one in ([ids] if chunk else []) + [ids.new_full((1, 1), 7) for _ in range(NEW)]:
        logits = model(one, past_key_values=cache, logits_to_keep=1).logits
        finite &= bool(logits.isfinite().all())
    if cache.get_seq_length() != tokens:
        raise RuntimeError(f"the cache holds {cache.get_seq_length()} tokens and not {tokens}")
    held = (
        sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        if name == "bf16"
        else cache.report()["nbytes"]
    )
    return dict(
        nbytes=held,
        peak=torch.cuda.max_memory_reserved(),
        allocated=torch.cuda.max_memory_allocated(),
        finite=finite,
    )


def tried(*args):
    "What `attempt` gives; None if it ran out of memory."
    try:
        return attempt(*args)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def most(fits, low, guess, step):
    """(the most that fits, the least that does not), `step` apart: `low` is known to fit,
    `guess` is tried first, and then what lies near it."""
    n, high, jump = max((low // step + 1) * step, guess // step * step), None, step
    while high is None or high - low > step:
        low, high = (n, high) if fits(n) else (low, n)
        n = (
            low + jump
            if high is None
            else max((low + high) // (2 * step) * step, high - jump, low + step)
        )
        jump *= 2
    return low, high


def longest(model, name, chunk, states, limit, step, probes=(4096, 12288)):
    """The most tokens that fit: two small tries say about how many, large ones find them. A
    dict for a row."""
    known = {}

    def fits(n):
        known[n] = tried(model, name, n, chunk, states)
        return known[n] is not None

    if all(map(fits, probes)):
        (n, one), (m, two) = known.items()
        guess = n + int(
            (limit - one["allocated"]) / (two["allocated"] - one["allocated"]) * (m - n)
        )
        low, refused = most(fits, m, guess, step)
    else:
        low, refused = most(fits, 0, step, step)
    return dict(tokens=low, refused=refused, tries=len(known)) | known.get(low, {})


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    p.add_argument("--caches", nargs="+", default=["bf16", "k4v4", "k3v3", "k2v2"])
    p.add_argument(
        "--chunk",
        type=int,
        nargs="+",
        default=[0, 512],
        help=(
            "tokens of the prompt that the model reads after the others were filled in; 0: it "
            "decodes only"
        ),
    )
    p.add_argument("--limit", type=float, default=24e9, help="bytes of PyTorch's allocator")
    p.add_argument(
        "--seconds", type=float, default=1e9, help="start nothing further after so long"
    )
    p.add_argument("--out", required=True)
    a = results.parse(p)
    began, device = time.monotonic(), torch.device("cuda")
    torch.manual_seed(0)
    torch.cuda.set_per_process_memory_fraction(
        a.limit / torch.cuda.get_device_properties(device).total_memory
    )
    rows, sound = [], True
    for shape in a.shapes:
        architecture, sizes, where = SHAPES[shape]
        model, one = shared_model(architecture, sizes, device)
        weights, block = placed(model, one, where, device)
        d = sizes["hidden_size"] // sizes["num_attention_heads"]
        states = torch.randn(
            1, sizes["num_key_value_heads"], 8192, d, dtype=torch.bfloat16, device=device
        )
        for chunk in a.chunk:
            for name in a.caches:
                if time.monotonic() - began > a.seconds:
                    raise SystemExit("out of time; what is measured is saved")
                model.set_attn_implementation("sdpa" if name == "bf16" else "turboquant")
                at = time.monotonic()
                step = 1024 if name == "bf16" else 8192
                found = longest(model, name, chunk, states, a.limit, step)
                sound &= (
                    found["tokens"] > 0
                    and found["finite"]
                    and found["peak"] <= a.limit
                    and found["refused"] - found["tokens"] <= step
                )
                row = dict(
                    model=shape,
                    cache=name,
                    weights_are=where,
                    weights=weights,
                    block=block.nbytes,
                    largest=one,
                    limit=a.limit,
                    chunk=chunk,
                    step=step,
                    layers=sizes["num_hidden_layers"],
                    seconds=time.monotonic() - at,
                    unit="tokens",
                )
                rows.append(row | found)
                print(rows[-1], flush=True)
                gate = {
                    "cmd": (
                        "peaks of what fits within the limit, finite logits, one step of "
                        "tokens more runs out of memory"
                    ),
                    "passed": sound,
                }
                if sound:
                    results.write(
                        a,
                        "longest context",
                        rows,
                        gate,
                        {
                            "id": (
                                "random weights in the shapes of Qwen2.5 14B and 32B and Llama "
                                "3.1 70B"
                            ),
                            "revision": "synthetic",
                        },
                        {"id": "normal states", "n": 1},
                        [0],
                    )
        del model, block, states
        gc.collect()
        torch.cuda.empty_cache()
    if not sound:
        raise SystemExit("the gate did not pass: the last file is of the rows before")


if __name__ == "__main__":
    main()
