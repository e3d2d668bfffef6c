"""Compile the encode kernel for GPUs that are not there, and print registers, spilled bytes and
shared memory of each variant as JSON lines; run by test_encode_kernel.py in a process of its
own, because the interpreter and the compiler exclude each other."""

import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import aot_decode

from turboquant_nb.kernels import encode, encode as encode_launch, encode as encode_short

NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def consts(d, dtype, bits, parts, center, capability, r, transform=False, chain=0, dv=None):
    "The constants of keys and of values."
    one = encode.RotationOperand(torch.empty(parts, d, d), 1.0, parts == 1)
    rotations = encode.RotationOperand(torch.empty(8, 1, d, d), 1.0) if transform else one, one
    means = (center, False)
    sides = zip((d, dv or d), bits, means, (r, 0), rotations)
    return [
        encode.CodingConstants.of(
            encode.CodedSide(size, dtype, b, "mse", torch.float16, mean, r, chain),
            rotation,
            capability >= 90,
        )
        for size, b, mean, r, rotation in sides
    ]


def compiled(f, constants, dtype, capability, options):
    "A kernel for pointers and numbers as `append` gives them."
    plain = not constants["KC"].ROPE
    of_side = dict.fromkeys(("X", "SINKS", "RING"), NAMES[dtype])
    of_side |= dict.fromkeys(("P0", "P1", "P2"), "*u8") | dict(W="*bf16", TAB="*fp32")
    of_side |= dict(SCALE="*fp16", factor="fp32")
    types = dict(
        MEAN="*fp32" if plain else "*bf16",
        START="*i64",
        COS_SIN="*fp16",
        POSITION="*i32",
        FLAG="*i32",
    )
    types |= {side + name: x for side in "KVkv" for name, x in of_side.items()}
    strides = [side + name for side in "kv" for name in ("sb", "sh", "sn")]
    return aot_decode.compiled(f, constants, capability, types, strides=strides, **options)


def build(
    capability=90,
    n=1000,
    d=128,
    bits=(3, 3),
    dtype=torch.bfloat16,
    parts=1,
    center=True,
    config=None,
    static=False,
    whole=True,
    r=0,
    transform=False,
    step=0,
    dv=None,
):
    """The compiled kernel as `append` asks for it: the short one up to 64 tokens, in steps
    for codes by windows."""
    chain = d if step else 0
    sides = consts(d, dtype, bits, parts, center, capability, r, transform, chain, dv)
    both = dict(zip(("KC", "VC"), sides))
    shared = both | {"R": 64, "STATIC": static, "WIDE": False}
    if n > 64:
        m, options = config or encode_launch._config(
            d, 64, parts, capability >= 90, dtype.itemsize, r
        )
        return compiled(
            encode.encode_kernel,
            shared | {"M": m, "ksd": 1, "vsd": 1, "WHOLE": whole},
            dtype,
            capability,
            options,
        )
    m, options = config or encode_launch.short_config(d, capability >= 90)
    more = {"M": m, "sinks": 4, "ring": 64, "STEP": step} | ({"n": 1} if n == 1 else {})
    return compiled(encode_short.short_kernel, shared | more, dtype, capability, options)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        case = json.loads(text)
        built = case | ({"dtype": getattr(torch, case["dtype"])} if "dtype" in case else {})
        made = build(**built)
        used = aot_decode.usage(made, case.get("capability", 90))
        order = re.findall(r"\b(ld|st)\.global", made.asm["ptx"])
        turns = sum(pair == ("st", "ld") for pair in zip(order, order[1:]))
        print(json.dumps(case | used | {"turns": turns}), flush=True)
