"""Compile the kernels that search symbols for GPUs that are not there, and print registers,
spilled bytes and shared memory of each variant as JSON lines; run by test_viterbi.py in a
process of its own, because the interpreter and the compiler exclude each other."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import aot_decode

from turboquant_nb.kernels import viterbi
from turboquant_nb.quant.codes import find_code
from turboquant_nb.quant.quantizer import Spec

TYPES = dict.fromkeys(("X", "LEVELS", "BY_WINDOW", "DOT", "SQUARE"), "*fp32")
TYPES |= dict(BACK="*i32", count="i32")


def compiled(kernel, out, constants, capability, warps):
    types = {n: TYPES.get(n, out) for n in kernel.arg_names}
    return aot_decode.compiled(kernel, constants, capability, types, num_warps=warps)


def build(kernel, bits, codebook, capability=90, d=128, block=32):
    "The kernel for a code of d channels."
    code = find_code(Spec(bits, codebook=codebook), d)
    t, circular = code.trellis, code.trellis.start == "tail"
    if kernel == "viterbi":
        sizes = dict(N=d, MASKS=t.masks, S=t.states, BITS=bits, TURNS=1 + circular, B=block)
        return compiled(viterbi._viterbi_kernel, "*i32", sizes, capability, block // 32)
    held, turns = -(-t.length // bits) - 1, 1 + circular
    sizes = dict(N=d, NP=d, MASKS=t.masks, S=t.states, BITS=bits, HELD=held, TURNS=turns)
    return compiled(viterbi._few_kernel, "*u8", sizes, capability, 1)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        case = json.loads(text)
        print(
            json.dumps(case | aot_decode.usage(build(**case), case.get("capability", 90))),
            flush=True,
        )
