"Compile the decode kernels for GPUs that are not there, and see what each needs there."

import os
import re
import subprocess
import tempfile

import triton
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from turboquant_nb.cache.memory import Memory
from turboquant_nb.kernels import blocks, decode, decode_mma
from turboquant_nb.quant.codes import find_code
from turboquant_nb.quant.quantizer import Spec

PTXAS = os.path.join(os.path.dirname(nvidia.__file__), "bin", "ptxas")
TYPES = dict(
    ROTATED="*fp32",
    RK_="*fp32",
    RV_="*fp32",
    MK="*bf16",
    PAIR="*bf16",
    TABLE="*i32",
    START="*i64",
    LENGTH="*i32",
    PAGES="*i32",
    WORK="*i32",
    BIAS="*fp32",
    reach="i32",
    COS_SIN="*fp16",
    NEAR="*fp16",
    FAR="*fp32",
    M="*bf16",
    factor="fp32",
    O="*fp32",
    LSE="*fp32",
    scaling="fp32",
    k_step="fp32",
    v_step="fp32",
    cap_at="fp32",
)
TYPES |= dict.fromkeys(("QUERY", "SK", "SV", "WK", "WV", "CK", "CV"), "*bf16")
TYPES |= dict.fromkeys(("CELLS", "KCELLS", "VCELLS"), "*u8")
TYPES |= dict.fromkeys(("SCALES", "KSCALES", "VSCALES"), "*fp16")
STRIDES = "bias_stride sb sh sn ckb ckh ckn cvb cvh cvn".split()
STRIDES += "cb ch ct kcb kch kct vcb vch vct".split()


def places(d, bits, along, page=256, codebook=None):
    "Where a store has the planes and scales of one side."
    code = find_code(Spec(bits, codebook=codebook) if codebook else Spec(bits), d)
    return Memory(code, along, page).places


def both_places(d, bits, page=256, codebook=None):
    "The same of keys and of values, as kernels take them."
    sides = zip(("KA", "VA"), bits, ("channel", "token"))
    return {name: places(d, b, along, page, codebook) for name, b, along in sides}


def compiled(
    fn, constants, capability=90, types=TYPES, kind=ASTSource, strides=STRIDES, **options
):
    """A kernel for a GPU, with every pointer aligned to 16 bytes and strides that are multiples
    of 16 elements, as torch allocates."""
    index = {name: (i,) for i, name in enumerate(fn.arg_names)}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in fn.arg_names
    }
    attrs = {
        index[n]: [["tt.divisibility", 16]]
        for n, t in signature.items()
        if t.startswith("*") or n in strides
    }
    source = kind(fn, signature, {index[n]: v for n, v in constants.items()}, attrs)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def chains_of(codebook, d, bits):
    "How levels of trellis codes of this name are read, of keys and of values."
    codes = [find_code(Spec(b, codebook=codebook), d) for b in bits]
    return [decode.chain_of(code.lut, b) for code, b in zip(codes, bits)]


def build(
    capability=90,
    d=128,
    bits=(3, 3),
    rows=4,
    sliding=False,
    capped=False,
    regs=None,
    page=256,
    paged=False,
    length=False,
    biased=False,
    per_head=False,
    fused=0,
    codebook=None,
    pair=True,
):
    """The decode kernel as `mma_attention` asks for it; fused: channels that a pre-RoPE mean
    rotates; codebook: of a trellis code; pair: whether keys have a pair scale."""
    chains = chains_of(codebook, d, bits) if codebook else [(), ()]
    sides = [decode_mma.FormSide(d, b, chain) for b, chain in zip(bits, chains)]
    form = decode_mma.decode_form(*sides, rows, page, fused)
    flags = dict(
        HAS_START=False,
        HAS_LENGTH=length,
        HAS_PAIR=pair and not paged,
        PAGED=paged,
        LISTED=False,
        FAST_K=not per_head and d in (64, 128, 256),
        FAST=d in (64, 128, 256),
        MEAN_K=not biased and not fused,
        BIASED=biased,
        FUSED=fused > 0,
        SLIDING=sliding,
        CAPPED=capped,
        PDL=capability >= 90,
        G=form,
        **both_places(d, bits, page, codebook),
    )
    options = dict(num_warps=1, **({"maxnreg": regs} if regs else {}))
    fn = decode_mma.fragments_kernel
    return compiled(fn, flags, capability, kind=GluonASTSource, **options)


def combine(capability=90, d=128, fast=True, together=1, each=16):
    "The combine kernel."
    types = TYPES | dict(
        OUT="*bf16" if fast else "*fp32",
        **dict.fromkeys(("OUT_PARTS", "LSE_PARTS", "REST"), "*fp32"),
    )
    padded = 1 << (d - 1).bit_length()
    constants = dict(
        D=d,
        DP=padded,
        DV=d,
        DVP=padded,
        Q=4,
        R=together,
        SB=16,
        EB=each,
        HAS_START=False,
        HAS_LENGTH=False,
        HAS_PAIR=together < 16,  # so many are an engine's alone, whose exact keys have none
        SLIDING=False,
        CAPPED=False,
        FAST=fast,
        PDL=capability >= 90,
        **decode._NO_BLOCKS,
    )
    options = dict(num_warps=4, **({"launch_pdl": True} if capability >= 90 else {}))
    return compiled(decode.combine_kernel, constants, capability, types, **options)


def portable(capability=90, d=128, bits=(3, 3), codebook=None):
    "The portable kernel; codebook: of a trellis code."
    chains = chains_of(codebook, d, bits) if codebook else ((), ())
    types = TYPES | dict.fromkeys(("SHIFT", "TABLE"), "*fp32")
    padded = 1 << (d - 1).bit_length()
    constants = dict(
        D=d,
        DP=padded,
        DV=d,
        DVP=padded,
        R=64,
        BR=16,
        KB=bits[0],
        VB=bits[1],
        Q=16,
        HAS_START=False,
        HAS_LENGTH=False,
        BIASED=False,
        SLIDING=False,
        CAPPED=False,
    )
    windows = (decode.window_chain(chain, d) for chain in chains)
    constants |= decode._NO_TABLE | dict(zip(("KX", "VX"), windows))
    constants |= both_places(d, bits, codebook=codebook)
    options = dict(num_warps=8 if d > 128 or codebook else 4, num_stages=1)
    return compiled(decode.portable_kernel, constants, capability, types, **options)


def pre_rope(capability=90, d=128, rotary=None, rotating=None):
    "The kernel of the bias of a pre-RoPE mean."
    half = (rotary or d) // 2
    pairs = rotating or half
    padded = max(16, 1 << (pairs - 1).bit_length())
    constants = dict(
        D=d,
        H2=half,
        ROTATING=pairs,
        HP=padded,
        REST=decode.padded_size(d - 2 * pairs) if d > 2 * pairs else 0,
        ROWS=32 if pairs <= 128 else 16,
        BT=128 if pairs <= 64 else 64 if pairs <= 128 else 32,
        HAS_START=True,
        HAS_LENGTH=False,
        HAS_PAIR=True,
        PDL=capability >= 90,
    )
    return compiled(decode._mean_bias_kernel, constants, capability, num_warps=4)


def transform(capability=90, d=128):
    "The kernel that multiplies queries by the matrices of their heads."
    types = TYPES | dict(ROTATION="*fp32", MORE="*fp32", OUT="*fp32")
    size, early = min(128, decode.padded_size(d)), capability >= 90
    constants = dict(D=d, SLICE=size, B=16, HAS_PAIR=True, ADD=False, AFTER=early)
    options = dict(num_warps=8, num_stages=1, **({"launch_pdl": True} if early else {}))
    return compiled(decode._rotate_kernel, constants, capability, types, **options)


def look_up(capability=90, d=128, bits=3, by_token=False, codebook=None, page=256, cell=None):
    """The kernel that looks symbols up; codebook: of a trellis code, whose windows it looks up;
    page: tokens of a tile; cell: where the planes are in an engine's blocks."""
    types = (
        TYPES
        | dict.fromkeys(("OUT", "TABLE"), "*fp16")
        | dict.fromkeys(("CHANNELS", "CHAIN", "PAGES"), "*i32")
        | dict.fromkeys(("oh", "ch"), "i64")
    )
    windows = find_code(Spec(bits, codebook=codebook), d).windows if codebook else None
    constants = dict(
        D=d,
        DP=decode.padded_size(d),
        R=page // 4,
        ROWS=16,
        BITS=bits,
        BY_TOKEN=by_token,
        RANGE=True,
        HELD=len(windows.channels) - 1 if codebook else 0,
        LAST=len(windows.levels) - 1 if codebook else 0,
        PAGED=cell is not None,
        A=cell or places(d, bits, "token" if by_token else "channel", page, codebook),
    )
    if cell is not None:
        types |= dict(OUT="*bf16", TABLE="*fp32")
    strides = "oh ot ch ct".split()
    fn = blocks._look_up_kernel
    warps = 8 if codebook or d > 256 else 4
    return compiled(fn, constants, capability, types, strides=strides, num_warps=warps)


def read(capability=90, d=128, bits=3, by_token=False, rotary=0, parts=1):
    "The kernel that decodes a block of the past."
    types = TYPES | dict(OUT="*bf16", MATRIX="*fp16", SINKS="*bf16", RECENT="*bf16")
    constants = dict(
        D=d,
        DP=decode.padded_size(d),
        HK=decode.padded_size(d // 2),
        R=64,
        BITS=bits,
        BY_TOKEN=by_token,
        H2=rotary // 2,
        HAS_MEAN=True,
        HAS_START=True,
        PARTS=parts,
        ASM=True,
        A=places(d, bits, "token" if by_token else "channel"),
    )
    return compiled(blocks._read_kernel, constants, capability, types, num_warps=4)


def join_piece(d=128):
    "The kernel that joins two pieces in place."
    types = TYPES | dict.fromkeys(("OUT", "MORE"), "*bf16") | {"MORE_LSE": "*fp32"}
    constants = dict(D=d, DP=decode.padded_size(d), ROWS=16)
    strides = "ot oh mt mh".split()
    return compiled(blocks._join_kernel, constants, types=types, strides=strides, num_warps=4)


def usage(built, capability=90):
    "Registers a thread, bytes of stack and of spills a thread, bytes of shared memory."
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(built.asm["ptx"])
        f.flush()
        said = subprocess.run(
            [
                PTXAS,
                "-v",
                f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}",
                f.name,
                "-o",
                os.devnull,
            ],
            capture_output=True,
            text=True,
        )
    text = said.stdout + said.stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
    return {
        "registers": int(re.search(r"Used (\d+) registers", text)[1]),
        "stack": int(re.search(r"(\d+) bytes stack", text)[1]),
        "spills": spills,
        "shared": built.metadata.shared,
    }
