"""Compile every kernel of 40 to 45 for a GPU of each generation that is not there, and print
what came of it as JSON lines; run by test_targets.py in a process of its own, because the
interpreter and the compiler exclude each other."""

import json
import os
import sys

import torch

from tests.kernels import aot_decode, aot_encode, aot_viterbi

SHARED = {
    75: 64,
    80: 163,
    86: 99,
    89: 99,
    90: 227,
    100: 227,
    120: 99,
}  # KiB of shared memory that a block may have; CUDA C++ Programming Guide, capabilities
HALF = {75: "fp16"}  # what 16-bit floats a GPU multiplies; bf16 from 8.0 on


def pointers(capability):
    "The types of states and queries: fp16 on a GPU without bf16."
    old = dict(aot_decode.TYPES)
    if capability in HALF:
        aot_decode.TYPES.update({name: "*fp16" for name, x in old.items() if x == "*bf16"})
    return old


KERNELS = {
    "decode, tensor cores": lambda c: aot_decode.build(c),
    "decode, tensor cores, pre-RoPE mean": lambda c: aot_decode.build(c, fused=128),
    "decode, portable": lambda c: aot_decode.portable(c),
    "decode, portable, d = 256, 4 bits": lambda c: aot_decode.portable(c, 256, (4, 4)),
    "look-up of a block": lambda c: aot_decode.look_up(c),
    "join of parts": lambda c: aot_decode.combine(c),
    "pre-RoPE mean": lambda c: aot_decode.pre_rope(c),
    "transform": lambda c: aot_decode.transform(c),
    "encode, prompt": lambda c: aot_encode.build(
        c, dtype=torch.float16 if c in HALF else torch.bfloat16, parts=1
    ),
    "encode, step": lambda c: aot_encode.build(
        c, n=1, dtype=torch.float16 if c in HALF else torch.bfloat16
    ),
    "search, prompt": lambda c: aot_viterbi.prompt(2, "trellis", c),
    "search, step": lambda c: aot_viterbi.step(2, "trellis", c),
}


def tried(name, capability):
    """What came of one kernel on one GPU: its machine code in bytes and its shared memory, or
    the error."""
    old = pointers(capability)
    try:
        built = KERNELS[name](capability)
        return {
            "bytes": len(built.asm["cubin"]),
            "shared": built.metadata.shared,
            "fits": built.metadata.shared <= SHARED[capability] * 1024,
        }
    except Exception as error:
        return {
            "error": (
                f"{type(error).__name__}: "
                f"{str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
            )
        }
    finally:
        aot_decode.TYPES.update(old)


def alone(name, capability):
    "`tried` in a child: LLVM ends its process where a GPU lacks an instruction."
    out, into = os.pipe()
    if not (child := os.fork()):
        os.write(into, json.dumps(tried(name, capability)).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as f:
        said = f.read()
    _, status = os.waitpid(child, 0)
    return (
        json.loads(said)
        if said
        else {
            "error": f"the compiler ended with signal {os.WTERMSIG(status)}"
            if os.WIFSIGNALED(status)
            else f"the compiler ended with code {os.WEXITSTATUS(status)}"
        }
    )


if __name__ == "__main__":
    for text in sys.argv[1:]:
        name, capability = json.loads(text)
        print(
            json.dumps({"kernel": name, "capability": capability} | alone(name, capability)),
            flush=True,
        )
