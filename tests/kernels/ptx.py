"An interpreter of the PTX that kernels hand to Triton, for checks without a GPU."

import numpy as np


def run_ptx(text: str, inputs: list, outputs: int = 8) -> list:
    """Run generated PTX on uint32 arrays: the inputs $8, $9, … give the outputs $0 … $7, or as
    many as are said; lanes that hand words on are along the last axis. For checks without a
    GPU."""
    held = {f"${outputs + i}": np.asarray(w).astype(np.uint32) for i, w in enumerate(inputs)}
    value = lambda x: held[x] if x in held else np.uint32(int(x, 0))
    for line in text.replace("{", "").replace("}", "").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *args = [x.strip() for x in rest.split(",")]
        if name in ("mov.b32", "mov.u32", "add.u32"):
            held[to] = value(args[0]) if name == "mov.b32" else None  # this lane
            continue
        if name.startswith("shfl"):  # from the lane before, around the corner or not at all
            to, *seen = to.split("|")
            held[to] = np.roll(value(args[0]), 1, -1)
            if seen:
                held[seen[0]] = np.arange(held[to].shape[-1]) > 0
            continue
        a, b, *more = map(value, args)
        if name == "selp.b32":
            held[to] = np.where(more[0], a, b)
            continue
        if name == "prmt.b32":
            eight = [(x >> np.uint32(8 * i)) & np.uint32(255) for x in (a, b) for i in range(4)]
            out = np.uint32(0)
            for i in range(4):
                nibble = (more[0] >> np.uint32(4 * i)) & np.uint32(15)
                byte = sum(
                    np.where((nibble & 7) == j, x, np.uint32(0)) for j, x in enumerate(eight)
                )
                byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte).astype(
                    np.uint32
                )
                out = out | byte << np.uint32(8 * i)
        elif name == "lop3.b32":
            c, table = more
            out = np.uint32(0)
            for i in range(8):  # bit i of the table is the result for bits of a, b, c
                if int(table) >> i & 1:
                    parts = [x if i >> (2 - j) & 1 else ~x for j, x in enumerate((a, b, c))]
                    out = out | (parts[0] & parts[1] & parts[2])
        elif name == "sub.rn.f16x2":
            a, b = (np.ascontiguousarray(x).view(np.float16) for x in np.broadcast_arrays(a, b))
            out = (a - b).view(np.uint32)
        else:
            out = {"and.b32": a & b, "xor.b32": a ^ b, "shl.b32": a << b, "shr.b32": a >> b}[
                name.replace("u32", "b32")
            ]
        held[to] = out
    return [held.get(f"${i}") for i in range(outputs)]
