"""A warp that runs PTX without a GPU. Kernels of one warp a program, as Triton compiled them,
on tensors of the host: an instruction at a time, 32 lanes together. What cp.async copies
arrives when it is waited for and not before; until then its place holds nonsense. Branches must
be uniform: those of these kernels are."""

import re
from functools import lru_cache

import numpy as np

LANES = np.arange(32)
KINDS = dict(f16=np.float16, f32=np.float32, f64=np.float64)
KINDS |= {
    f"{s}{n}": getattr(np, f"{'u' * (s != 's')}int{n}") for s in "sub" for n in (8, 16, 32, 64)
}
BASE = 1 << 40  # of the first tensor's address


class Memory:
    "Tensors of the host by the addresses that a kernel gets."

    def __init__(self):
        self.bases, self.held = [], []

    def address(self, array) -> int:
        "Where a contiguous array of bytes lies from now on, from a multiple of 256."
        last = BASE if not self.bases else self.bases[-1] + len(self.held[-1])
        at = (last + 4095) // 256 * 256
        self.bases.append(at)
        self.held.append(array)
        return at

    def place(self, at: int, size: int) -> tuple:
        i = int(np.searchsorted(self.bases, at, "right")) - 1
        first = int(at) - self.bases[i] if i >= 0 else -1
        if first < 0 or first + size > len(self.held[i]):
            raise IndexError(f"{size} bytes at {first} of tensor {i}, outside of it")
        return self.held[i], first

    def load(self, at: int, size: int):
        held, first = self.place(at, size)
        return held[first : first + size]

    def store(self, at: int, data) -> None:
        held, first = self.place(at, len(data))
        held[first : first + len(data)] = data


@lru_cache(maxsize=8)
def parsed(text: str) -> tuple:
    "(instructions, where each label stands) of the one kernel of a module."
    body = text[text.index("{", text.index(".entry")) :]
    body = re.sub(r"//[^\n]*", "", body)
    code, labels = [], {}
    for line in re.split(r";|\n", body):
        for label in re.findall(r"^\s*(\$\w+):", line):
            labels[label] = len(code)
        line = re.sub(r"^\s*\$\w+:", "", line).strip()
        while line[:1] in ("{", "}") and not re.match(r"\{.*\}", line):
            line = line[1:].strip()
        line = (
            re.sub(r"^\}|\}$", "", line).strip() if line.count("{") != line.count("}") else line
        )
        if not line or line.startswith("."):
            continue
        found = re.match(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", line, re.S)
        negated, guard, name, rest = found.groups()
        found = re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*)", rest)
        operands = [x.strip() for x in found]
        code.append((guard and (guard, bool(negated)), name, operands))
    return code, labels


class Warp:
    "One program of a kernel."

    def __init__(self, text, params: list, program: int, memory: Memory, shared: int):
        self.code, self.labels = parsed(text)
        self.params, self.memory = params, memory
        self.shared = np.full(shared, 0xAB, np.uint8)
        self.special = {
            "%laneid": LANES,
            "%tid.x": LANES,
            "%ctaid.x": program,
            "global_smem": 0,
        }
        self.held, self.pending, self.group = {}, [], []

    def run(self) -> int:
        "The program, to its end; how many instructions that took."
        at = steps = 0
        while True:
            guard, name, operands = self.code[at]
            at, steps = at + 1, steps + 1
            active = None
            if guard:
                active = self.held[guard[0]] ^ guard[1]
                if not active.any():
                    continue
                active = None if active.all() else active
            family = name.split(".")[0]
            if family == "bra":
                if active is not None:
                    raise RuntimeError("a branch that some lanes take")
                at = self.labels[operands[0]]
                continue
            if family in ("ret", "exit"):
                return steps
            getattr(self, f"do_{family}")(name.split(".")[1:], operands, active)

    # --- operands

    def bits(self, text: str):
        "The raw bits of an operand, a lane each."
        if text in self.held:
            return self.held[text]
        if text in self.special:
            return np.broadcast_to(np.asarray(self.special[text], np.uint64), 32)
        if text.startswith("0f"):
            return np.full(32, int(text[2:], 16), np.uint64)
        return np.full(32, int(text.rstrip("U"), 0) & (2**64 - 1), np.uint64)

    def value(self, text: str, kind: str):
        if kind == "pred":
            return self.held[text]
        size = int(kind[1:])
        raw = np.ascontiguousarray(self.bits(text).astype(f"u{size // 8}"))
        return raw.view(KINDS[kind])

    def put(self, text: str, value, active=None) -> None:
        if value.dtype != bool:
            value = np.ascontiguousarray(value)
            value = value.view(f"u{value.dtype.itemsize}").astype(np.uint64)
        if active is not None and text in self.held:
            value = np.where(active, value, self.held[text])
        self.held[text] = value

    @staticmethod
    def many(text: str) -> list:
        "The registers of a vector, or the one that there is."
        return [x.strip() for x in text.strip("{}").split(",")]

    def at(self, text: str):
        "The addresses of a memory operand."
        name, _, offset = text.strip("[] ").partition("+")
        return self.bits(name.strip()).astype(np.int64) + int(offset.strip() or "0", 0)

    # --- numbers

    def do_mov(self, how, o, active):
        to, source = o
        if to.startswith("{"):  # the parts of a word
            raw, to = self.bits(source), self.many(to)
            size = int(how[-1][1:]) // len(to)
            for i, x in enumerate(to):
                part = (raw >> np.uint64(size * i)) & np.uint64(2**size - 1)
                self.put(x, part.astype(f"u{size // 8}"), active)
        elif source.startswith("{"):
            parts = [self.bits(x) for x in self.many(source)]
            size = int(how[-1][1:]) // len(parts)
            out = sum(x << np.uint64(size * i) for i, x in enumerate(parts))
            self.put(to, out.astype(np.uint64), active)
        elif how[-1] == "pred":
            value = self.held[source] if source in self.held else self.bits(source).astype(bool)
            self.put(to, value, active)
        else:
            self.put(to, self.value(source, how[-1]), active)

    def binary(self, f):
        def do(how, o, active):
            kind = how[-1]
            with np.errstate(all="ignore"):
                out = f(self.value(o[1], kind), self.value(o[2], kind))
            self.put(o[0], out if out.dtype == bool else out.astype(KINDS[kind]), active)

        return do

    def __getattr__(self, name):
        ways = dict(add=np.add, max=np.fmax, min=np.fmin)
        ways |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
        ways |= dict(div=divided, rem=lambda a, b: a - b * divided(a, b))
        if name.startswith("do_") and name[3:] in ways:
            return self.binary(ways[name[3:]])
        ways = dict(neg=np.negative, abs=np.abs, ex2=np.exp2, lg2=np.log2, rcp=np.reciprocal)
        ways["not"] = np.invert
        if name.startswith("do_") and name[3:] in ways:
            return self.unary(ways[name[3:]])
        raise AttributeError(name)

    def do_sub(self, how, o, active):
        if how[-1] != "f16x2":
            return self.binary(np.subtract)(how, o, active)
        a, b = (self.value(x, "u32").view(np.float16) for x in o[1:3])
        self.put(o[0], (a - b).view(np.uint32), active)

    def do_mul(self, how, o, active):
        kind = how[-1]
        a, b = (self.value(x, kind) for x in o[1:3])
        self.put(o[0], product(a, b, how), active)

    def do_mad(self, how, o, active):
        a, b = (self.value(x, how[-1]) for x in o[1:3])
        out = product(a, b, how)
        wide = how[-1][0] + str(8 * out.dtype.itemsize)
        with np.errstate(all="ignore"):
            self.put(o[0], out + self.value(o[3], wide), active)

    def do_fma(self, how, o, active):
        a, b, c = (self.value(x, "f32").astype(np.float64) for x in o[1:4])
        with np.errstate(all="ignore"):
            self.put(o[0], (a * b + c).astype(np.float32), active)

    def unary(self, f):
        def do(how, o, active):
            with np.errstate(all="ignore"):
                self.put(o[0], f(self.value(o[1], how[-1])), active)

        return do

    def do_shl(self, how, o, active):
        size = int(how[-1][1:])
        by = self.value(o[2], "u32")
        a = self.value(o[1], f"u{size}")
        out = np.where(by < size, a << np.minimum(by, size - 1).astype(a.dtype), 0)
        self.put(o[0], out.astype(a.dtype), active)

    def do_shr(self, how, o, active):
        kind = how[-1].replace("b", "u")
        a, by = self.value(o[1], kind), self.value(o[2], "u32")
        size = 8 * a.dtype.itemsize
        out = a >> np.minimum(by, size - 1).astype(a.dtype)
        self.put(
            o[0], out if kind[0] == "s" else np.where(by < size, out, 0).astype(a.dtype), active
        )

    def do_bfe(self, how, o, active):
        a = self.value(o[1], how[-1])
        first, size = (self.value(x, "u32") & 255 for x in o[2:4])
        up = (8 * a.dtype.itemsize - size - first).astype(a.dtype)
        out = (a << up) >> (up + first).astype(a.dtype)  # a signed field keeps its sign
        self.put(o[0], np.where(size > 0, out, 0).astype(a.dtype), active)

    def do_lop3(self, how, o, active):
        parts = [self.value(x, "u32") for x in o[1:4]]
        table, out = int(o[4].rstrip("U"), 0), np.zeros(32, np.uint32)
        for i in range(8):  # bit i of the table is the result for bits of a, b, c
            if table >> i & 1:
                a, b, c = (x if i >> (2 - j) & 1 else ~x for j, x in enumerate(parts))
                out |= a & b & c
        self.put(o[0], out, active)

    def do_prmt(self, how, o, active):
        a, b, chosen = (self.value(x, "u32") for x in o[1:4])
        eight = np.stack([(x >> np.uint32(8 * i)) & 255 for x in (a, b) for i in range(4)], 1)
        out = np.zeros(32, np.uint32)
        for i in range(4):
            nibble = (chosen >> np.uint32(4 * i)) & 15
            byte = eight[LANES, nibble & 7]
            byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
            out |= (byte << np.uint32(8 * i)).astype(np.uint32)
        self.put(o[0], out, active)

    def do_selp(self, how, o, active):
        kind = how[-1]
        a, b = (self.value(x, kind) for x in o[1:3])
        self.put(o[0], np.where(self.held[o[3]], a, b), active)

    def do_setp(self, how, o, active):
        a, b = (self.value(x, how[-1]) for x in o[1:3])
        same, less = a == b, a < b
        unordered = (a != a) | (b != b)
        out = dict(eq=same, ne=~same & ~unordered, lt=less, le=less | same, gt=a > b)
        out |= dict(ge=(a > b) | same, neu=~same, nan=unordered, equ=same | unordered)
        out |= dict(ltu=less | unordered, gtu=(a > b) | unordered)
        self.put(o[0], out[how[0]], active)

    def do_cvt(self, how, o, active):
        to, *source = o
        kinds = [x for x in how if re.fullmatch(r"[subf]f?\d+(x2)?", x) or x == "bf16"]
        new, old = kinds[-2:]
        if new == "f16x2":
            high, low = (self.value(x, "f32").astype(np.float16).view("u2") for x in source)
            return self.put(to, high.astype(np.uint32) << 16 | low.astype(np.uint32), active)
        if old == "bf16":
            x = (self.bits(source[0]).astype(np.uint32) << 16).view(np.float32)
        else:
            x = self.value(source[0], old)
        if new == "bf16":
            raw = x.astype(np.float32).view(np.uint32)
            return self.put(to, ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype("u2"), active)
        if old[0] == "f" and new[0] != "f":
            x = np.rint(x) if "rni" in how else np.trunc(x)
            limit = np.iinfo(KINDS[new])
            x = np.clip(np.nan_to_num(x.astype(np.float64)), limit.min, limit.max)
        with np.errstate(all="ignore"):
            self.put(to, x.astype(KINDS[new]), active)

    # --- lanes

    def do_shfl(self, how, o, active):
        to, seen = (o[0].split("|") + [None])[:2]
        x, by = self.bits(o[1]), self.bits(o[2]).astype(np.int64)
        if how[1] == "bfly":
            source = LANES ^ by
        elif how[1] == "up":
            source = LANES - by
        else:
            clamp = int(o[3], 0)
            first = (clamp >> 8) & 31
            source = (LANES & first) | (by & 31 & ~first)
        if how[1] == "up":
            first = (int(o[3], 0) >> 8) & 31
            inside = source >= (LANES & first)
            source = np.where(inside, source, LANES)
            if seen:
                self.put(seen, inside, active)
        self.put(to, x[source & 31], active)

    def do_bar(self, *_):
        pass

    do_griddepcontrol = do_fence = do_bar

    # --- memory

    def do_ld(self, how, o, active):
        if how[0] == "param":
            number = int(re.search(r"_param_(\d+)", o[1])[1])
            self.put(o[0], np.full(32, self.params[number], np.uint64), active)
            return
        to, size = self.many(o[0]), int(re.sub(r"\D", "", how[-1])) // 8
        at, out = self.at(o[1]), np.zeros((32, len(to), size), np.uint8)
        for lane in LANES if active is None else LANES[active]:
            n = len(to) * size
            raw = self.load(how[0], int(at[lane]), n)
            out[lane] = raw.reshape(len(to), size)
        for i, x in enumerate(to):
            self.put(x, np.ascontiguousarray(out[:, i]).view(f"u{size}")[:, 0], active)

    def load(self, space: str, at: int, n: int):
        if space == "global":
            return self.memory.load(at, n)
        if at % n or at < 0 or at + n > len(self.shared):
            raise IndexError(f"{n} bytes at {at} of {len(self.shared)} in shared memory")
        return self.shared[at : at + n]

    def do_st(self, how, o, active):
        source, size = self.many(o[1]), int(re.sub(r"\D", "", how[-1])) // 8
        raw = np.stack([self.bits(x).astype(f"u{size}") for x in source], 1)
        raw, at = raw.view(np.uint8).reshape(32, -1), self.at(o[0])
        for lane in LANES if active is None else LANES[active]:
            if how[0] == "global":
                self.memory.store(int(at[lane]), raw[lane])
            else:
                self.load("shared", int(at[lane]), raw.shape[1])[:] = raw[lane]

    def matrices(self, count: int, at):
        "The rows of 16 bytes of so many matrices, [count, 8] views."
        rows = [self.load("shared", int(a), 16) for a in at[: 8 * count]]
        return [rows[8 * i : 8 * i + 8] for i in range(count)]

    def do_ldmatrix(self, how, o, active):
        to = self.many(o[0])
        for x, rows in zip(to, self.matrices(len(to), self.at(o[1]))):
            pairs = np.stack(rows).view(np.uint16)  # [8, 8]
            if "trans" in how:
                pairs = np.ascontiguousarray(pairs.T)
            self.put(x, pairs.view(np.uint32).reshape(32), active)

    def do_stmatrix(self, how, o, active):
        source = self.many(o[1])
        for x, rows in zip(source, self.matrices(len(source), self.at(o[0]))):
            words = self.bits(x).astype(np.uint32).reshape(8, 4)
            pairs = words.view(np.uint16)
            pairs = pairs.T if "trans" in how else pairs
            for row, data in zip(rows, np.ascontiguousarray(pairs)):
                row[:] = data.view(np.uint8)

    def do_cp(self, how, o, active):
        what = how[1]
        if what == "commit_group":
            self.pending.append(self.group)
            self.group = []
        elif what == "wait_group":
            while len(self.pending) > int(o[0], 0):
                for to, data in self.pending.pop(0):
                    self.shared[to : to + len(data)] = data
        else:
            size, at, source = int(o[2], 0), self.at(o[0]), self.at(o[1])
            given = self.bits(o[3]) if len(o) > 3 else np.full(32, size)
            for lane in LANES if active is None else LANES[active]:
                data, n, to = np.zeros(size, np.uint8), int(given[lane]), int(at[lane])
                if n:
                    data[:n] = self.memory.load(int(source[lane]), n)
                self.load("shared", to, size)[:] = 0xAB
                self.group.append((to, data))

    # --- products

    def do_mma(self, how, o, active):
        a, b, c = ([self.bits(x).astype(np.uint32) for x in self.many(y)] for y in o[1:4])
        integers = "m16n8k32" in how
        width, kind = (4, np.int8) if integers else (2, np.float16)
        k, out = 8 * width, np.int64 if integers else np.float64
        A, B, C = np.zeros((16, k), out), np.zeros((k, 8), out), np.zeros((16, 8), out)
        row, column = LANES // 4, LANES % 4
        inside = column[:, None] * width + np.arange(width)
        elements = lambda x: np.ascontiguousarray(x).view(kind).reshape(32, width)
        for i, x in enumerate(a):
            A[(row + i % 2 * 8)[:, None], inside + i // 2 * 4 * width] = elements(x)
        for i, x in enumerate(b):
            B[inside + i * 4 * width, row[:, None]] = elements(x)
        kind = np.int32 if integers else np.float32
        for i, x in enumerate(c):
            C[row + i // 2 * 8, 2 * column + i % 2] = x.view(kind)
        with np.errstate(all="ignore"):
            C = A @ B + C
        if integers:
            C = np.clip(C, -(2**31), 2**31 - 1)
        for i, x in enumerate(self.many(o[0])):
            self.put(x, C[row + i // 2 * 8, 2 * column + i % 2].astype(kind), active)


def divided(a, b):
    "As a processor divides: integers towards zero."
    if a.dtype.kind == "f":
        return a / b
    return (np.trunc(a.astype(np.float64) / np.where(b == 0, 1, b))).astype(a.dtype)


def product(a, b, how):
    "The low half of a product, or all of it."
    if a.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return a * b
    if "wide" in how:
        wide = f"{a.dtype.kind}{2 * a.dtype.itemsize}"
        return a.astype(wide) * b.astype(wide)
    if "hi" in how:
        wide = f"{a.dtype.kind}{2 * a.dtype.itemsize}"
        return (a.astype(wide) * b.astype(wide) >> 8 * a.dtype.itemsize).astype(a.dtype)
    with np.errstate(all="ignore"):
        return a * b


def run(text: str, params: list, programs: int, memory: Memory, shared: int) -> int:
    "All programs of a kernel, one after the other; how many instructions they took."
    return sum(Warp(text, params, i, memory, shared).run() for i in range(programs))


def run_inline(text: str, inputs: list, outputs: int = 8) -> list:
    "The PTX of an expression on words of whole warps: inputs $8, $9, … give $0 … $7."
    shape = np.broadcast_shapes(*map(np.shape, inputs))
    lanes = [np.broadcast_to(x, shape).reshape(-1, 32).astype(np.uint64) for x in inputs]
    found = []
    for held in zip(*lanes):
        warp = Warp(f".entry {{{text} ret;}}", [], 0, Memory(), 0)
        warp.held = {f"${outputs + i}": x for i, x in enumerate(held)}
        warp.run()
        found.append([warp.held[f"${i}"] for i in range(outputs)])
    return [np.concatenate(x).astype(np.uint32).reshape(shape) for x in zip(*found)]
