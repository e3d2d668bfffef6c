"Compile the kernels that search symbols for GPUs that are not there."

from tests.kernels import aot_decode
from turboquant_nb.kernels import viterbi
from turboquant_nb.quant.codes import find_code
from turboquant_nb.quant.quantizer import Spec

TYPES = dict.fromkeys(("X", "LEVELS", "BY_WINDOW", "DOT", "SQUARE"), "*fp32")
TYPES |= dict(BACK="*i32", count="i32")


def compiled(kernel, out, constants, capability, warps):
    types = {n: TYPES.get(n, out) for n in kernel.arg_names}
    return aot_decode.compiled(kernel, constants, capability, types, num_warps=warps)


def prompt(bits, codebook, capability=90, d=128, block=32):
    "The kernel for many vectors of d channels."
    t = find_code(Spec(bits, codebook=codebook), d).trellis
    turns = 1 + (t.start == "tail")
    sizes = dict(N=d, MASKS=t.masks, S=t.states, BITS=bits, TURNS=turns, B=block)
    return compiled(viterbi._viterbi_kernel, "*i32", sizes, capability, block // 32)


def step(bits, codebook, capability=90, d=128):
    "The kernel for a few vectors of d channels."
    t = find_code(Spec(bits, codebook=codebook), d).trellis
    held, turns = -(-t.length // bits) - 1, 1 + (t.start == "tail")
    sizes = dict(N=d, NP=d, MASKS=t.masks, S=t.states, BITS=bits, HELD=held, TURNS=turns)
    return compiled(viterbi._few_kernel, "*u8", sizes, capability, 1)
