"""Compile the encode kernel for GPUs that are not there, and print registers, spilled bytes and shared memory of each variant as JSON
lines; run by test_encode_kernel.py in a process of its own, because the interpreter and the compiler exclude each other."""
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


def build(capability=90, n=1000, d=128, bits=(3, 3), dtype=torch.bfloat16, parts=1, center=True, config=None):
    "The compiled kernel as `_launch` asks for it."
    m, steps, options = config or kernel._config(n, d, 64, parts)
    x = torch.empty(1, 1, 1, d, dtype=dtype)
    turn = kernel.Turn(torch.empty(parts, d, d), 1.0)
    consts = []
    for b, mean in zip(bits, (torch.empty(1, 1, 1, d, dtype=torch.bfloat16) if center else None, None)):
        consts.append(kernel._constants(x, kernel.Target([], torch.empty(0, dtype=torch.float16), turn, None, mean=mean), b))
    constants = {"KC": consts[0], "VC": consts[1], "R": 64, "M": m, "STEPS": steps, "WIDE": False, "ksd": 1, "vsd": 1}
    types = {}
    for name in kernel._encode_kernel.arg_names:
        kind = name[1:]
        if name in constants:
            types[name] = "constexpr"
        elif kind in ("X", "W", "MEAN", "TAB", "SCALE") or name == "FLAG":
            types[name] = {"X": NAMES[dtype], "W": "*bf16", "MEAN": "*bf16", "TAB": "*fp32", "SCALE": "*fp16"}.get(kind, "*i32")
        else:
            types[name] = "*u8" if kind in ("P0", "P1", "P2") else "fp32" if kind == "factor" else "i32"
    index = {name: (i,) for i, name in enumerate(kernel._encode_kernel.arg_names)}
    aligned = [n for n, t in types.items() if t.startswith("*") or n[1:] in ("sb", "sh", "sn")]
    attrs = {index[n]: [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel._encode_kernel, types, {index[n]: v for n, v in constants.items()}, attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(compiled):
    "Registers a thread, bytes of stack a thread (spills), bytes of shared memory."
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        said = subprocess.run([TOOL, "-res-usage", f.name], capture_output=True, text=True)
    text = said.stdout + said.stderr
    return {"registers": int(re.search(r"REG:(\d+)", text)[1]), "stack": int(re.search(r"STACK:(\d+)", text)[1]), "shared": compiled.metadata.shared}


if __name__ == "__main__":
    for text in sys.argv[1:]:
        case = json.loads(text)
        built = case | ({"dtype": getattr(torch, case["dtype"])} if "dtype" in case else {})
        print(json.dumps(case | usage(build(**built))), flush=True)
