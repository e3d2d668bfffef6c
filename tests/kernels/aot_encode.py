"Compile the encode kernel for GPUs that are not there."

import torch

from tests.kernels import aot_decode
from turboquant_nb.kernels import encode

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
    of_side |= dict(CELLS="*u8", SCALES="*fp16")
    of_side |= dict(W="*bf16", TAB="*fp32", factor="fp32")
    types = dict(
        MEAN="*fp32" if plain else "*bf16",
        START="*i64",
        COS_SIN="*fp16",
        POSITION="*i32",
        FLAG="*i32",
        SLOTS="*i32",
    )
    types |= {side + name: x for side in "KVkv" for name, x in of_side.items()}
    strides = [side + name for side in "kv" for name in ("sb", "sh", "sn", "cb", "ch", "ct")]
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
    """The compiled kernel as `append` asks for it: by rows up to 64 tokens, in steps for codes
    by windows, and after whole tiles."""
    chain = d if step else 0
    sides = consts(d, dtype, bits, parts, center, capability, r, transform, chain, dv)
    both = dict(zip(("KC", "VC"), sides))
    alongs = ("KA", "channel"), ("VA", "token")
    both |= {
        name: aot_decode.places(c.D, c.BITS, along) for c, (name, along) in zip(sides, alongs)
    }
    large, more = capability >= 90, {"each": 1} if n == 1 else {}
    form = encode.CallForm(64, 16, False, static)
    long = encode._config(d, 64, parts, large, dtype.itemsize, r)
    has_whole = parts == 1 and not any(c.SLICED for c in sides)
    if not has_whole:
        m, options = long
        long = min(m, 32), options
    if n > 64 and whole and has_whole:
        m, options = config or long
        form = both | {"F": form._replace(M=m)}
        return compiled(encode.tile_kernel, form, dtype, capability, options)
    m, options = config or (encode.short_config(d, large) if n <= 64 or has_whole else long)
    of_length = dict(sinks=4, ring=64) if n <= 64 else dict(STEPS=4, SKIP=has_whole)
    form = form._replace(M=m, **of_length)
    more |= {"F": form, "STEP": step}
    return compiled(encode.row_kernel, both | more, dtype, capability, options)
