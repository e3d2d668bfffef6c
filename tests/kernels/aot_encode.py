"""Compile the encode kernel for GPUs that are not there, and print registers, spilled bytes and
shared memory of each variant as JSON lines; run by test_encode_kernel.py in a process of its
own, because the interpreter and the compiler exclude each other."""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from turboquant_nb.kernels import encode as kernel

NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TOOL = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")


def consts(d, dtype, bits, parts, center, capability, r, transform=False, chain=0, dv=None):
    "The constants of keys and of values."
    one = kernel.RotationOperand(torch.empty(parts, d, d), 1.0, parts == 1)
    rotations = kernel.RotationOperand(torch.empty(8, 1, d, d), 1.0) if transform else one, one
    means = (torch.bfloat16 if center else None, None)
    sides = zip((d, dv or d), bits, means, (r, 0), rotations)
    return [
        kernel.CodingConstants.of(
            kernel.CodedSide(size, dtype, b, "mse", torch.float16, mean, r, chain),
            rotation,
            capability >= 90,
        )
        for size, b, mean, r, rotation in sides
    ]


def compiled(f, constants, dtype, capability, options):
    "A kernel for pointers and numbers as `append` gives them."
    types = {}
    for name in f.arg_names:
        kind = name[1:]
        if name in constants:
            types[name] = "constexpr"
        elif name in ("START", "POSITION", "FLAG", "COS_SIN") or kind in (
            "X",
            "W",
            "MEAN",
            "TAB",
            "SCALE",
            "SINKS",
            "RING",
        ):
            of_mean = (
                "*fp32" if f is kernel._encode_kernel and not constants["KC"].ROPE else "*bf16"
            )
            types[name] = {
                "X": NAMES[dtype],
                "SINKS": NAMES[dtype],
                "RING": NAMES[dtype],
                "W": "*bf16",
                "MEAN": of_mean,
                "TAB": "*fp32",
                "SCALE": "*fp16",
                "TART": "*i64",
                "OS_SIN": "*fp16",
            }.get(kind, "*i32")
        else:
            types[name] = (
                "*u8" if kind in ("P0", "P1", "P2") else "fp32" if kind == "factor" else "i32"
            )
    index = {name: (i,) for i, name in enumerate(f.arg_names)}
    aligned = [
        n
        for n, t in types.items()
        if t.startswith("*") or n[1:] in ("sb", "sh", "sn") and n not in constants
    ]
    source = ASTSource(
        f,
        types,
        {index[n]: v for n, v in constants.items()},
        {index[n]: [["tt.divisibility", 16]] for n in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


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
        m, options = config or kernel._config(d, 64, parts, capability >= 90, dtype.itemsize, r)
        return compiled(
            kernel._encode_kernel,
            shared | {"M": m, "ksd": 1, "vsd": 1, "WHOLE": whole},
            dtype,
            capability,
            options,
        )
    m, options = config or kernel._short_config(d, capability >= 90)
    more = {"M": m, "sinks": 4, "ring": 64, "STEP": step} | ({"n": 1} if n == 1 else {})
    return compiled(kernel._short_kernel, shared | more, dtype, capability, options)


def usage(compiled):
    "Registers a thread, bytes of stack a thread (spills), bytes of shared memory."
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        said = subprocess.run([TOOL, "-res-usage", f.name], capture_output=True, text=True)
    text = said.stdout + said.stderr
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "stack": int(re.search(r"STACK:(\d+)", text)[1]),
        "shared": compiled.metadata.shared,
    }


if __name__ == "__main__":
    for text in sys.argv[1:]:
        case = json.loads(text)
        built = case | ({"dtype": getattr(torch, case["dtype"])} if "dtype" in case else {})
        print(json.dumps(case | usage(build(**built))), flush=True)
