"Compile the kernels of cells for GPUs that are not there."

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels import aot_decode

from turboquant_nb.kernels import decode, decode_mma
from turboquant_nb.kernels.cell_attention import _work_kernel
from turboquant_nb.kernels.cells import _recent_kernel, _sinks_kernel
from turboquant_nb.kernels.encode import (
    CallForm,
    CodedSide,
    CodingConstants,
    RotationOperand,
    row_kernel,
)
from turboquant_nb.theory.rotation import make_rotation

TYPES = aot_decode.TYPES | dict.fromkeys(
    ("ROTATED", "LEVELS", "PARTS", "LSE_PARTS", "REST", "KTAB", "VTAB", "MEAN", "CENTER"),
    "*fp32",
)
TYPES |= dict.fromkeys(("OUT", "KX", "VX", "KW", "VW", "K", "V", "NEAR"), "*bf16") | dict(
    LUT="*i32",
    TABLE="*i32",
    NEAR_TABLE="*i32",
    STARTS="*i32",
    ORIGINS="*i32",
    WORK="*i32",
    LOGITS="*bf16",
    SLOTS="*i64",
    kfactor="fp32",
    vfactor="fp32",
    factor="fp32",
)
STRIDES = "qt qh ot oh ckt ckh cvt cvh kt kh vt vh nb nh nt ksb ksh ksn vsb vsh vsn".split()


def places(c, side):
    return c.places[side == "value"]


def both_places(c):
    return dict(zip(("KA", "VA"), c.places))


def compiled(fn, constants, types=TYPES, kind=ASTSource, **options):
    "For a Hopper GPU, strides of the engine's tensors multiples of 16."
    strides = aot_decode.STRIDES + STRIDES
    return aot_decode.compiled(fn, constants, 90, types, kind, strides, **options)


def chains(c, codebook):
    "How levels of trellis codes of this name are read, of keys and of values."
    if codebook is None:
        return (), ()
    return tuple(aot_decode.chains_of(codebook, c.d_key, (c.key_bits, c.value_bits)))


def fragments(
    c,
    rows=4,
    sliding=False,
    capped=False,
    fast_k=True,
    listed=True,
    centred=False,
    codebook=None,
    regs=None,
    pair=False,
):
    fast = c.d_key == c.d_value and c.d_key in (64, 128, 256)
    sizes = (c.d_key, c.key_bits), (c.d_value, c.value_bits)
    sides = [decode_mma.FormSide(*size, x) for size, x in zip(sizes, chains(c, codebook))]
    form = decode_mma.decode_form(*sides, rows, c.tokens)
    flags = "HAS_START BIASED FUSED".split()
    constants = dict.fromkeys(flags, False) | dict(
        HAS_LENGTH=True,
        HAS_PAIR=pair,
        PAGED=True,
        FAST_K=fast and fast_k,
        FAST=fast,
        MEAN_K=centred,
        SLIDING=sliding,
        CAPPED=capped,
        LISTED=listed,
        PDL=True,
        G=form,
        **both_places(c),
    )
    types = TYPES | dict(MK="*fp32", PAIR="*fp32", NEAR="*i32", FAR="*i32", BIAS="*i32")
    types |= dict(START="*i32", each_length="constexpr", bias_stride="i32")
    constants |= dict(each_length=1)
    fn = decode_mma.fragments_kernel
    options = dict(num_warps=1, launch_pdl=True) | ({"maxnreg": regs} if regs else {})
    return compiled(fn, constants, types, GluonASTSource, **options)


def sizes(c):
    return dict(
        D=c.d_key,
        DP=decode.padded_size(c.d_key),
        DV=c.d_value,
        DVP=decode.padded_size(c.d_value),
    )


def windows(c, codebook):
    "The same as the portable kernel takes it."
    both = zip(chains(c, codebook), (c.d_key, c.d_value))
    return dict(zip(("KX", "VX"), (decode.window_chain(*x) for x in both)))


def portable(c, sliding=False, capped=False, listed=True, codebook=None):
    flags = dict.fromkeys(("HAS_START", "BIASED"), False)
    constants = decode._NO_TABLE | sizes(c) | flags
    constants |= both_places(c) | dict(
        R=c.tokens // 4,
        BR=16,
        KB=c.key_bits,
        VB=c.value_bits,
        Q=16,
        HAS_LENGTH=True,
        PAGED=True,
        SLIDING=sliding,
        CAPPED=capped,
        LISTED=listed,
    )
    constants |= windows(c, codebook)
    given = "PAGES page_stride WORK requests".split()
    constants = {name: x for name, x in constants.items() if name not in given}
    types = TYPES | dict.fromkeys(("SHIFT", "TABLE"), "*fp32")
    options = dict(num_warps=8 if codebook else 4, num_stages=1)
    return compiled(decode.portable_kernel, constants, types, **options)


def join(
    c,
    together=1,
    rotated=False,
    sliding=False,
    capped=False,
    recent=False,
    listed=True,
    learnt=False,
):
    constants = sizes(c) | dict(HAS_START=False)
    constants |= dict.fromkeys("SK WK SV WV".split())
    constants |= dict(
        Q=4,
        R=together,
        SB=max(2, min(16, 64 // together)),
        EB=max(1, 16 // together),
        N=16 if recent else 0,
        HAS_LENGTH=True,
        HAS_PAIR=False,
        FAST=not rotated,
        SLIDING=sliding,
        CAPPED=capped,
        LEARNT=learnt,
        LISTED=listed,
        BLOCKS=True,
        PDL=True,
        each_length=1,
    )
    types = TYPES | {"OUT_PARTS": "*fp32"}
    return compiled(decode.combine_kernel, constants, types, num_warps=4, launch_pdl=True)


def append(c, steps=4, centred=False, step=0):
    "step: 0 with tables, 1 or 2 of codes by windows."
    chain = max(c.d_key, c.d_value) if step else 0
    kc, vc = (
        CodingConstants.of(
            CodedSide(d, torch.bfloat16, b, "mse", torch.float16, mean, chain=chain),
            RotationOperand.of(make_rotation("hadamard", d).matrix),
        )
        for d, b, mean in ((c.d_key, c.key_bits, centred), (c.d_value, c.value_bits, False))
    )
    form = CallForm(c.tokens // 4, 16, False, PAGED=True, STEPS=steps, PDL=True)
    constants = both_places(c) | dict(KC=kc, VC=vc, F=form, STEP=step, each=1)
    of_side = dict.fromkeys(("SINKS", "RING"), "*u8")
    types = TYPES | {side + name: x for side in "KV" for name, x in of_side.items()}
    types |= dict.fromkeys(("START", "COS_SIN", "POSITION", "FLAG"), "*i64")
    options = dict(num_warps=8 if max(c.d_key, c.d_value) > 128 else 4, num_stages=2)
    return compiled(row_kernel, constants, types, **options)


def past(c, side="key", codebook=None):
    d, bits = (c.d_key, c.key_bits) if side == "key" else (c.d_value, c.value_bits)
    return aot_decode.look_up(90, d, bits, side == "value", codebook, c.tokens, places(c, side))


def recent(c, sinks=0):
    return compiled(
        _recent_kernel, sizes(c) | dict(N=16, S=sinks, PDL=True), num_warps=1, launch_pdl=True
    )


def sinks(c):
    return compiled(_sinks_kernel, dict(B=64, T=256, S=4), num_warps=1)


def work(c, sliding=False):
    return compiled(_work_kernel, dict(TILE=256, SLIDING=sliding, B=64, N=64), num_warps=1)
