"""Compile the kernel for many query rows for GPUs that are not there, in each form that it has,
and print registers, spilled bytes and shared memory as JSON lines; run by test_many_rows.py in a
process of its own, because the interpreter and the compiler exclude each other."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import aot_decode

from turboquant_nb.kernels import many_rows

TYPES = aot_decode.TYPES | dict(
    QUERY="*fp16", WEIGHTS="*fp16", UNIT="*fp32", SHIFT="*fp32", MV="*fp32"
)
ROOM = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KiB, as in aot_targets


def build(capability=90, d=128, rows=128, bits=(3, 3), pairs=64, tile=256):
    "The kernel as `many_attention` asks for it, of a mean before RoPE with so many pairs."
    half = max(16, 1 << (d // 2 - 1).bit_length())
    form = many_rows.form_of(rows, tile, half, pairs, ROOM.get(capability, 64) * 1024)
    constants = dict(D=d, HK=half, DV=d, HV=half, R=tile // 4, BR=form.BR, Q=form.Q)
    constants |= dict(zip(("KB", "VB"), bits)) | dict(H2=pairs, HP=pairs)
    constants |= dict(HAS_START=False, CAPPED=False, ASM=True)
    options = dict(num_warps=form.warps, num_stages=1)
    return aot_decode.compiled(
        many_rows._many_kernel, constants, capability, TYPES, **options
    ), form.shared(half, pairs)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        how = json.loads(text)
        built, said = build(**how)
        used = aot_decode.usage(built, how.get("capability", 90))
        print(json.dumps(how | used | {"said": said}), flush=True)
