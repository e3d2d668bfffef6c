"""Compile the kernels for latents for GPUs that are not there, and print what they need as JSON
lines; run by test_latents.py in a process of its own, because the interpreter and the compiler
exclude each other."""

import json
import sys
from pathlib import Path

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

sys.path.insert(0, str(Path(__file__).parent))
import aot_cells
import aot_decode

from turboquant_nb.cache.pages import CellLayout
from turboquant_nb.kernels import latent_fragments, latents
from turboquant_nb.kernels.decode_launch import padded_size

TYPES = aot_decode.TYPES | dict(BESIDE="*fp32", MR="*bf16", KSCALE="*fp16", VSCALE="*fp16")
TYPES |= dict(PAGES="*i32", WORK="*i32")


def build(kernel="fragments", capability=90, d=512, dr=64, bits=(3, 4), flags=False, cells=0):
    """One of the two kernels, as a step of latents of d channels asks for it: all or no flags,
    of a store, or of cells of so many tokens."""
    names = "HAS_START HAS_END HAS_LENGTH SLIDING CAPPED CENTRED CENTRED_R".split()
    constants = dict.fromkeys(names, flags)
    constants |= dict(KA=(), VA=(), PAGED=False, LISTED=False)
    if cells:
        places = CellLayout(*bits, d, dr, cells)
        both = [aot_cells.places(places, side) for side in ("key", "value")]
        constants |= dict(KA=both[0], VA=both[1], PAGED=True, LISTED=True, HAS_LENGTH=True)
    form, rows = latents.Form(16, 16, 8, 1, 1), (cells or 256) // 4
    if kernel == "fragments":
        form = latents.Form(fragments=True)
        constants["G"] = latent_fragments.fragment_layouts(d, rows, tuple(bits))
        fn, kind = latent_fragments._fragment_kernel, GluonASTSource
    else:
        fn, kind = latents._latent_kernel, ASTSource
        constants |= dict(D=d, DP=padded_size(d), HK=padded_size(d // 2), R=rows, BR=form.bytes)
        constants |= dict(DR=dr, DRP=padded_size(dr), HR=padded_size(dr // 2), Q=form.rows)
        constants |= dict(KB=bits[0], VB=bits[1], PARTS=1, ASM=True)
    options = dict(num_warps=form.warps, num_stages=form.stages)
    strides = (*aot_decode.STRIDES, "block_stride", "head_stride")
    return aot_decode.compiled(fn, constants, capability, TYPES, kind, strides, **options)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        case = json.loads(text)
        found = aot_decode.usage(build(**case), case["capability"])
        print(json.dumps(case | found), flush=True)
