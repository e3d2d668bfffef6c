from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.attention import Answer, Backend, Call, check_call
from ..cache.store import KVStore
from .blocks import _bytes, _table, _two_quarters, half_asm
from .decode import (
    CodeTables,
    Launcher,
    Parts,
    SplitRule,
    _add_splits,
    _exact_rows,
    _exact_where,
    _log_sum,
    _portable_cap,
    is_interpreted,
    last_dim_dense,
    padded_size,
)
from .launch import DRAFTS, device_reason, ranges_reason, shape_reason
from .query import rotated_queries

try:
    import triton
    import triton.language as tl
except ImportError:  # `refuses` says so
    triton = SimpleNamespace(jit=lambda f=None, **_: f or (lambda g: g), language=None)
    tl = SimpleNamespace(constexpr=None)


try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
except ImportError:  # no Triton, or one without Gluon: the portable kernel may still work
    gluon = SimpleNamespace(jit=lambda f=None, **_: f or (lambda g: g), language=None)
    gl = SimpleNamespace(constexpr=lambda x: x)

_ASM2, _ASM3, _ASM4 = (gl.constexpr(half_asm(bits)[0]) for bits in (2, 3, 4))
_PAIRS2, _PAIRS3, _PAIRS4 = (gl.constexpr(half_asm(bits, True)[0]) for bits in (2, 3, 4))
_IN2, _IN3, _IN4 = (gl.constexpr(half_asm(bits)[1]) for bits in (2, 3, 4))

@triton.jit
def _query_rows(X, j, D: tl.constexpr, HK: tl.constexpr):
    """Rotated queries of rows j in the order of a tile's channels (padded lower half, then
    upper): their largest numbers, and in units of these fp16 hi + lo/2048."""
    e = tl.arange(0, 2 * HK)
    c = e % HK
    at = X + j.to(tl.int64)[:, None] * D + (e // HK * (D // 2) + c)[None, :]
    x = tl.load(at, mask=(j >= 0)[:, None] & (c < D // 2)[None, :], other=0.0)
    top = tl.max(tl.abs(x), 1)
    top = tl.where(top > 0, top, 1.0)
    x = x / top[:, None]
    hi = x.to(tl.float16)
    return top, hi, ((x - hi.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def _mean_shift(q, M, D: tl.constexpr, DP: tl.constexpr, ok):
    "Products of plain queries, pointers to whose rows are given, with a mean."
    d = tl.arange(0, DP)
    x = tl.load(q[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    m = tl.load(M + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.sum(x.to(tl.float32) * m[None, :], 1)


@triton.jit
def _decoded(
    P0,
    P1,
    P2,
    tile,
    first,
    LUT,
    D: tl.constexpr,
    HK: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    ASM: tl.constexpr,
):
    """Levels of the tokens in BR byte rows of a tile, from row `first` on: fp16 [4 * BR,
    2 * HK], token quarter * BR + row."""
    HALF: tl.constexpr = D // 2
    r, c = first + tl.arange(0, BR), tl.arange(0, HK)
    if BY_TOKEN:
        base = c[:, None] * R + r[None, :]
        upper, bit, seen = HALF * R, base, (c < HALF)[:, None] & (r >= 0)[None, :]
    else:
        base = r[:, None] * D + c[None, :]
        bit = r[:, None] * HALF + c[None, :]
        upper, seen = HALF, (r >= 0)[:, None] & (c < HALF)[None, :]
    w = _bytes(P0, P1, P2, tile, base, upper, bit, seen, R * D, BITS, 2 * HK == D)
    t = _table(LUT)
    a0, a1, b0, b1 = _two_quarters(w, t, LUT, 0, BITS, ASM)
    a2, a3, b2, b3 = _two_quarters(w, t, LUT, 2, BITS, ASM)
    low = tl.join(tl.join(a0, a1), tl.join(a2, a3))  # [.., .., quarter % 2, quarter // 2]
    x = tl.join(low, tl.join(tl.join(b0, b1), tl.join(b2, b3)))
    x = tl.permute(x, (3, 2, 1, 4, 0) if BY_TOKEN else (3, 2, 0, 4, 1))
    return tl.reshape(x, (4 * BR, 2 * HK))


@triton.jit(
    do_not_specialize=[
        "splits",
        "length",
        "recent_from",
        "chunk",
        "own",
        "offset",
        "sliding_window",
    ]
)
def _latent_kernel(
    ROTATED,
    BESIDE,
    QUERY,
    sb,
    sh,
    sn,
    M,
    MR,
    K0,
    K1,
    K2,
    KSCALE,
    V0,
    V1,
    V2,
    VSCALE,
    TABLE,
    START,
    END,
    LENGTH,
    each_length,
    O,
    LSE,
    heads,
    group,
    n,
    blocks,
    splits,
    cap,
    length,
    offset,
    sinks,
    recent,
    recent_from,
    chunk,
    own,
    sliding_window,
    scaling,
    k_step,
    v_step,
    cap_at,
    D: tl.constexpr,
    DP: tl.constexpr,
    HK: tl.constexpr,
    DR: tl.constexpr,
    DRP: tl.constexpr,
    HR: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    KB: tl.constexpr,
    VB: tl.constexpr,
    Q: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    SLIDING: tl.constexpr,
    CAPPED: tl.constexpr,
    CENTRED: tl.constexpr,
    CENTRED_R: tl.constexpr,
    ASM: tl.constexpr,
):
    """Q query rows over one split of the coded latents: output in the basis of the codes and
    log2-sum-exp2."""
    U: tl.constexpr = R // BR
    pid = tl.program_id(0)
    split, base = pid % splits, pid // splits
    bh, block = base // blocks, base % blocks
    b, h = bh // heads, bh % heads
    if HAS_LENGTH:
        length = tl.load(LENGTH + b * each_length)
    j = block * Q + tl.arange(0, Q)
    at = length - n + j % n
    low, high = at * 0 + sinks, at + 1
    if HAS_START:
        low += tl.load(START + b).to(tl.int32)
    if HAS_END:
        high = tl.minimum(high, tl.load(END + b).to(tl.int32))
    low = tl.maximum(low, offset)
    if SLIDING:
        low = tl.maximum(low, at - sliding_window + 1)
    held = tl.minimum(length - chunk, tl.maximum(recent_from, length - recent))
    high = tl.minimum(high, tl.maximum(at + 1 - own, held))
    rows = bh * blocks * Q + j
    top, q0, q1 = _query_rows(ROTATED, rows, D, HK)
    top_r, r0, r1 = _query_rows(BESIDE, rows, DR, HR)
    top, top_r = top * (scaling * k_step), top_r * (scaling * v_step)
    shift = top * 0
    if CENTRED or CENTRED_R:
        ok = j < group * n
        plain = (
            QUERY
            + b.to(tl.int64) * sb
            + (h * group + j // n).to(tl.int64) * sh
            + (j % n).to(tl.int64) * sn
        )
        if CENTRED:
            shift += _mean_shift(plain, M + bh * D, D, DP, ok) * scaling
        if CENTRED_R:
            shift += _mean_shift(plain + D, MR + bh * DR, DR, DRP, ok) * scaling
    m = tl.full([Q], -1e30, tl.float32)
    total = tl.zeros([Q], tl.float32)
    acc = tl.zeros([Q, 2 * HK], tl.float32)
    unit = 0.0  # the largest scale so far: weights are rounded in units of it
    lowest, highest = tl.min(low, 0), tl.max(high, 0)
    first = (lowest - offset) // (4 * R)
    count = U * tl.maximum((highest - offset + 4 * R - 1) // (4 * R) - first, 0)
    begin, end = split * count // splits, (split + 1) * count // splits
    t = tl.arange(0, 4 * BR)
    for i in range(first * U + begin, first * U + end):
        tile, row = i // U, i % U * BR
        slot = bh.to(tl.int64) * cap + tile
        token = t // BR * R + row + t % BR
        pos = offset + tile * (4 * R) + token
        x = _decoded(K0, K1, K2, slot, row, TABLE, D, HK, R, BR, KB, False, ASM)
        y = _decoded(V0, V1, V2, slot, row, TABLE + 4, DR, HR, R, BR, VB, True, ASM)
        seen = (pos >= lowest) & (pos < highest)
        ks = tl.load(KSCALE + slot * (4 * R) + token, mask=seen, other=0.0).to(tl.float32)
        vs = tl.load(VSCALE + slot * (4 * R) + token, mask=seen, other=0.0).to(tl.float32)
        s, z = tl.dot(q0, tl.trans(x)), tl.dot(r0, tl.trans(y))
        if PARTS > 1:
            s += tl.dot(q1, tl.trans(x)) * (1 / 2048)
            z += tl.dot(r1, tl.trans(y)) * (1 / 2048)
        s = s * top[:, None] * ks[None, :] + z * top_r[:, None] * vs[None, :] + shift[:, None]
        if CAPPED:
            s = _portable_cap(s, cap_at)
        visible = (pos[None, :] >= low[:, None]) & (pos[None, :] < high[:, None])
        s = tl.where(visible, s * 1.4426950408889634, -1e30)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(visible, tl.exp2(s - new[:, None]), 0.0)
        wider = tl.maximum(unit, tl.max(tl.abs(ks), 0))
        safe = tl.where(wider > 0, wider, 1.0)
        w = tl.where(visible, p * (ks / safe)[None, :], 0.0)
        rescale = tl.exp2(m - new)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * (rescale * (unit / safe))[:, None]
        w0 = w.to(tl.float16)
        acc = tl.dot(w0, x, acc)
        if PARTS > 1:
            w1 = ((w - w0.to(tl.float32)) * 2048.0).to(tl.float16)
            acc += tl.dot(w1, x) * (1 / 2048)
        m, unit = new, wider
    some = tl.where(total != 0, total, 1.0)  # NaN counts as seen
    out = acc * (unit * k_step / some)[:, None]
    place = pid.to(tl.int64) * Q + tl.arange(0, Q)
    e = tl.arange(0, 2 * HK)
    c = e % HK
    to = O + place[:, None] * D + (e // HK * (D // 2) + c)[None, :]
    tl.store(to, out, mask=(place >= 0)[:, None] & (c < D // 2)[None, :])
    tl.store(LSE + place, tl.where(total != 0, m + tl.log2(some), float("-inf")))


# --- combine

@triton.jit
def _exact_latents(
    q,
    qr,
    b,
    h,
    bh,
    at,
    SK,
    WK,
    CK,
    ckb,
    ckh,
    ckn,
    SV,
    WV,
    CV,
    cvb,
    cvh,
    cvn,
    start,
    stop,
    length,
    sinks,
    recent,
    recent_from,
    chunk,
    own,
    offset,
    sliding_window,
    cap,
    D: tl.constexpr,
    DP: tl.constexpr,
    DR: tl.constexpr,
    DRP: tl.constexpr,
    EB: tl.constexpr,
    SLIDING: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attention of one query at position `at` [1] over the exact tokens, EB at a time: maximum
    and total [1], sum [1, DP]."""
    low = tl.maximum(start, offset) + at * 0
    if SLIDING:
        low = tl.maximum(low, at - sliding_window + 1)
    high = tl.minimum(at + 1, stop)
    since = tl.maximum(
        at + 1 - own, tl.minimum(length - chunk, tl.maximum(recent_from, length - recent))
    )  # what is older is read from codes, but for sinks
    m = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DP], tl.float32)
    ck = CK + b.to(tl.int64) * ckb + h.to(tl.int64) * ckh
    cv = CV + b.to(tl.int64) * cvb + h.to(tl.int64) * cvh
    for i0 in range(0, sinks + recent + chunk, EB):
        i = i0 + tl.arange(0, EB)
        pos, counts = _exact_where(i, start, sinks, recent, recent_from, chunk, length)
        k = _exact_rows(SK, WK, ck, bh, i, counts, sinks, recent, ckn, D, DP)
        r = _exact_rows(SV, WV, ck + D, bh, i, counts, sinks, recent, ckn, DR, DRP)
        v = _exact_rows(SK, WK, cv, bh, i, counts, sinks, recent, cvn, D, DP)
        seen = counts & (pos >= low) & (pos < high) & ((pos >= since) | (pos < start + sinks))
        s = tl.sum(q * k, 1) + tl.sum(qr * r, 1)
        if CAPPED:
            s = _portable_cap(s, cap)
        s = tl.where(seen, s * 1.4426950408889634, -1e30)
        new = tl.maximum(m, tl.max(s, 0))
        p = tl.where(seen, tl.exp2(s - new), 0.0)
        rescale = tl.exp2(m - new)
        acc = acc * rescale[:, None] + tl.sum(p[:, None] * v, 0)[None, :]
        total = total * rescale + tl.sum(p, 0)
        m = new
    return m, total, acc


@triton.jit(
    do_not_specialize=[
        "splits",
        "recent_from",
        "chunk",
        "own",
        "length",
        "offset",
        "sliding_window",
    ]
)
def _join_kernel(
    OUT_PARTS,
    LSE_PARTS,
    NEAR,
    FAR,
    SHARE,
    LSE,
    QUERY,
    sb,
    sh,
    sn,
    SK,
    WK,
    CK,
    ckb,
    ckh,
    ckn,
    SV,
    WV,
    CV,
    cvb,
    cvh,
    cvn,
    START,
    END,
    LENGTH,
    each_length,
    splits,
    heads,
    group,
    n,
    blocks,
    sinks,
    recent,
    recent_from,
    chunk,
    own,
    length,
    offset,
    sliding_window,
    scaling,
    cap_at,
    D: tl.constexpr,
    DP: tl.constexpr,
    DR: tl.constexpr,
    DRP: tl.constexpr,
    Q: tl.constexpr,
    SB: tl.constexpr,
    EB: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    SLIDING: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One query row: exact tokens, and all splits, weighted by their sums; which share of the
    weights the codes have."""
    rows = group * n
    bh, r = tl.program_id(0) // rows, tl.program_id(0) % rows + tl.arange(0, 1)
    b, h = bh // heads, bh % heads
    ok = r < rows
    e = tl.arange(0, DP)
    top = tl.full([1], float("-inf"), tl.float32)
    whole = tl.zeros([1], tl.float32)
    near = tl.zeros([1, DP], tl.float32)
    if EB > 0:
        start = 0
        if HAS_START:
            start = tl.load(START + b).to(tl.int32)
        if HAS_LENGTH:
            length = tl.load(LENGTH + b * each_length)
        stop = length
        if HAS_END:
            stop = tl.load(END + b).to(tl.int32)
        here = (
            QUERY
            + b.to(tl.int64) * sb
            + (h * group + r // n).to(tl.int64)[:, None] * sh
            + (r % n).to(tl.int64)[:, None] * sn
        )
        f = tl.arange(0, DRP)
        q = tl.load(here + e[None, :], mask=(e < D)[None, :], other=0.0)
        qr = tl.load(here + D + f[None, :], mask=(f < DR)[None, :], other=0.0)
        m, whole, near = _exact_latents(
            q=q.to(tl.float32) * scaling,
            qr=qr.to(tl.float32) * scaling,
            b=b,
            h=h,
            bh=bh.to(tl.int64),
            at=length - n + r % n,
            SK=SK,
            WK=WK,
            CK=CK,
            ckb=ckb,
            ckh=ckh,
            ckn=ckn,
            SV=SV,
            WV=WV,
            CV=CV,
            cvb=cvb,
            cvh=cvh,
            cvn=cvn,
            start=start,
            stop=stop,
            length=length,
            sinks=sinks,
            recent=recent,
            recent_from=recent_from,
            chunk=chunk,
            own=own,
            offset=offset,
            sliding_window=sliding_window,
            cap=cap_at,
            D=D,
            DP=DP,
            DR=DR,
            DRP=DRP,
            EB=EB,
            SLIDING=SLIDING,
            CAPPED=CAPPED,
        )
        top = tl.where(whole != 0, m, top)  # NaN counts as seen
    exact, before = whole, top
    first = (bh * blocks + r // Q).to(tl.int64) * splits
    top, whole, near, far = _add_splits(
        PARTS=OUT_PARTS,
        LSE_PARTS=LSE_PARTS,
        place0=first,
        used=splits,
        r=r,
        ok=ok,
        top=top,
        whole=whole,
        near=near,
        DV=D,
        DVP=DP,
        Q=Q,
        R=1,
        SB=SB,
    )
    norm, lse = _log_sum(top, whole)
    safe = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.where(before == float("-inf"), 0.0, exact * tl.exp2(before - safe))
    row = tl.program_id(0).to(tl.int64) + r * 0
    at = row[:, None] * D + e[None, :]
    mask = (e < D)[None, :]
    tl.store(NEAR + at, near / norm[:, None], mask=mask)
    tl.store(FAR + at, far / norm[:, None], mask=mask)
    tl.store(SHARE + row, (whole - kept) / norm)
    tl.store(LSE + row, lse)


@triton.jit
def _back_kernel(
    OUT,
    NEAR,
    FAR,
    SHARE,
    ROTATION,
    M,
    count,
    rows,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """OUT = NEAR + FAR times the rotation, and the mean as far as codes were weighted: ROWS of
    `count` query rows, COLS channels."""
    c, e = tl.program_id(1) * COLS + tl.arange(0, COLS), tl.arange(0, DP)
    at = ROTATION + e[None, :] * D + c[:, None]
    matrix = tl.load(at, mask=(c < D)[:, None] & (e < D)[None, :], other=0.0)
    for some in tl.static_range(0, ROWS, 4):
        r = tl.program_id(0) * ROWS + some + tl.arange(0, 4)
        ok, place = r < count, r.to(tl.int64)[:, None] * D
        far = tl.load(FAR + place + e[None, :], mask=ok[:, None] & (e < D)[None, :], other=0.0)
        out = tl.sum(far[:, None, :] * matrix[None, :, :], 2)
        here = ok[:, None] & (c < D)[None, :]
        out += tl.load(NEAR + place + c[None, :], mask=here, other=0.0)
        if CENTRED:
            mean = tl.load(M + (r // rows)[:, None] * D + c[None, :], mask=here, other=0.0)
            share = tl.load(SHARE + r, mask=ok, other=0.0)
            out += share[:, None] * mean.to(tl.float32)
        tl.store(OUT + place + c[None, :], out.to(OUT.dtype.element_ty), mask=here)


# --- host

class Form(NamedTuple):
    "How the kernel is compiled."

    rows: int  # queries of a program
    bytes: int  # byte rows of a tile that are decoded at once, of four tokens each
    warps: int
    stages: int
    programs: int  # of a multiprocessor
    fragments: bool = False  # by `_fragment_kernel`?


def form_of(rows: int, d: int, tile: int) -> Form:
    "What was fastest on an H100 for so many query rows of latents of d channels."
    return Form(16 if rows <= 16 else 64, min(16, tile // 4), 4 if rows <= 16 else 8, 1, 2)


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    "Multiprocessors of a GPU; the interpreter has none to fill."
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


_latent_launcher, _join_launcher = Launcher(_latent_kernel), Launcher(_join_kernel)
_back_launcher = Launcher(_back_kernel)
_fragment_launcher = None


def _side_reason(name: str, part) -> str:
    "Why the kernel cannot read the codes of one side; empty if it can."
    q = part.q
    if why := q.centre.refuses("kernels") or part.code.refuses("windows"):
        return f"{name}: {why}"
    if q.centre.rotates:
        return f"{name}: a mean before RoPE is added by PyTorch"
    if q.rotation.query_matrix is not q.rotation.matrix:
        return f"{name}: the transform must be one rotation for all heads"
    if q.d % 16 or not 16 <= q.d <= 512:
        return f"{name}: their size must be a multiple of 16 up to 512, got {q.d}"
    if part.code is not part.code.whole:
        return f"{name}: tiles that lost a plane (decay) are not supported"
    if q.code.lut.taps or not 2 <= q.code.channel_bits[0] <= 4:
        return f"{name}: codes must have 2 to 4 bits and one table for all channels"
    return ""


@lru_cache(maxsize=8)
def _capability_reason(device: torch.device) -> str:
    "Why the kernel cannot run on a device; empty if it can."
    if is_interpreted():
        return ""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"an NVIDIA GPU is needed, the store is on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "an NVIDIA GPU of compute capability 8.0 or newer is needed"
    return ""


def _store_reason(store: KVStore) -> str:
    "Why the kernel cannot read a store; empty if it can."
    names = ("latents", "rotary parts")
    if why := "; ".join(filter(None, map(_side_reason, names, store.parts))):
        return why
    if store.tile & (store.tile - 1) or not 64 <= store.tile <= 256:
        return f"tiles must have 64, 128 or 256 tokens, got {store.tile}"
    if not all(t.is_contiguous() for s in store.parts for t in s.tensors.values()):
        return "the store's tensors must be contiguous"
    return _capability_reason(store.device)


def refuses(call: Call) -> str:
    "Why `latent_attention` cannot serve a call; empty if it can."
    store = call.store
    if not call.rule.latent:
        return "keys and values are not latents"
    if torch.compiler.is_compiling():
        return "a compiler does not trace its launches"
    if why := ranges_reason(call):
        return why
    states = (call.q, call.k, call.v)
    most = 16 if call.recent is None else DRAFTS
    if why := shape_reason(call.q, store.heads, *states[1:], store.dtype, most, group=128):
        return why
    if store.memo.get("latents") is None:
        store.memo["latents"] = _store_reason(store)
    return store.memo["latents"]


def _tables(store: KVStore) -> CodeTables:
    "What the kernel must know of the quantizers of a store."
    if "latent tables" not in store.memo:
        both = (part.q.with_code(part.code) for part in store.parts)
        store.memo["latent tables"] = CodeTables.of(*both, store.device)
    return store.memo["latent tables"]


def _shared(call: Call, q: Tensor, chunk: int) -> dict:
    "Arguments that the kernels have in common, by their names."
    rule, store = call.rule, call.store
    d, dr = (part.q.d for part in store.parts)
    absent, position, (sb, sh, sn, _) = store.start, store.clock.position, q.stride()
    window, cap = rule.sliding_window, rule.softcap
    return dict(
        QUERY=q,
        sb=sb,
        sh=sh,
        sn=sn,
        START=store.start,
        END=absent if store.end is None else store.end,
        LENGTH=absent if position is None else position,
        each_length=0,
        heads=store.heads,
        group=q.shape[1] // store.heads,
        n=q.shape[2],
        sinks=store.recipe.sinks,
        recent=store.recipe.recent,
        recent_from=store._recent_from,
        chunk=chunk,
        own=2**30 if call.recent is None else call.recent,
        length=store.length,
        offset=store.offset,
        sliding_window=window or 0,
        scaling=float((d + dr) ** -0.5 if rule.scaling is None else rule.scaling),
        cap_at=float(cap or 1.0),
        D=d,
        DP=padded_size(d),
        DR=dr,
        DRP=padded_size(dr),
        HAS_START=store.clock.fixed or any(store.ranges.starts),
        HAS_END=store.end is not None,
        HAS_LENGTH=position is not None,
        SLIDING=window is not None,
        CAPPED=cap is not None,
    )


def _rotated(shared: dict, store: KVStore, q: Tensor, side, first: int, rows: int) -> Tensor:
    "Channels of queries from `first` on, in the basis of one side's codes."
    mine, d = q[..., first : first + side.q.d], side.q.d
    sizes = SimpleNamespace(batch=store.batch, heads=store.heads, d=d)
    named = shared | dict(QUERY=mine, D=d, DP=padded_size(d))
    operands = SimpleNamespace(q=mine, key_rotation=side.q.rotation.query_matrix)
    return rotated_queries(operands, sizes, named, rows)[0]


def _planes(names: str, part) -> dict:
    "A side's planes and scales, by their names."
    planes = part.memory.planes
    planes = dict(zip((f"{names}0", f"{names}1", f"{names}2"), [*planes, *planes[:1] * 2]))
    return planes | {f"{names}SCALE": part.tensors["scale"]}


def _coded_parts(call: Call, shared: dict, q: Tensor, form: Form, splits: int | None) -> Parts:
    "Attention to codes, split by split."
    store, (key, value) = call.store, call.store.parts
    b, h, n, tile = store.batch, store.heads, q.shape[2], store.tile
    d, dr, unit = key.q.d, value.q.d, 4 * form.bytes
    blocks = -(-shared["group"] * n // form.rows)
    held = None if store.clock.position is None else store.capacity
    visible = None if call.rule.sliding_window is None else call.rule.sliding_window + n + tile
    programs = form.programs * _processors(store.device)
    rule = SplitRule(b * h * blocks, programs, unit, held, visible, splits)
    splits = rule.splits(store.length - store.offset - shared["chunk"])
    shape = (b * h * blocks, splits, form.rows)
    parts = Parts(q.new_empty((*shape, d), dtype=torch.float32), None, blocks)
    parts = parts._replace(lse=q.new_empty(shape, dtype=torch.float32))
    tables, rows, fast = _tables(store), blocks * form.rows, form.fragments
    means = [part.mean for part in store.parts]
    named = (
        shared
        | _planes("K", key)
        | _planes("V", value)
        | dict(
            ROTATED=_rotated(shared, store, q, key, 0, rows),
            BESIDE=_rotated(shared, store, q, value, d, rows),
            M=tables.levels if means[0] is None else means[0],
            MR=tables.levels if means[1] is None else means[1],
            TABLE=tables.packed_lut,
            O=parts.out,
            LSE=parts.lse,
            blocks=blocks,
            splits=splits,
            cap=key.memory.tiles,
            k_step=tables.steps[0],
            v_step=tables.steps[1],
            CENTRED=means[0] is not None,
            CENTRED_R=means[1] is not None,
        )
    )
    bits = [part.q.code.channel_bits[0] for part in store.parts]
    if fast:
        named["G"] = fragments(d, tile // 4, *bits)
        options = dict(num_warps=4, **({"maxnreg": form.stages} if form.stages > 9 else {}))
        _fragment_launcher(b * h * blocks * splits, named, {}, **options)
        return parts
    named |= dict(
            HK=padded_size(d // 2),
            HR=padded_size(dr // 2),
            R=tile // 4,
            BR=form.bytes,
            KB=bits[0],
            VB=bits[1],
            Q=form.rows,
            PARTS=2 if store.dtype == torch.float32 else 1,
            ASM=not is_interpreted(),
        )
    options = dict(num_warps=form.warps, num_stages=form.stages)
    _latent_launcher(b * h * blocks * splits, named, {}, **options)
    return parts


def _joined(call: Call, shared: dict, q: Tensor, parts: Parts) -> Answer:
    "Splits and exact tokens, in the model's basis."
    store, (key, value), shape = call.store, call.store.parts, q.shape[:3]
    d, new = key.q.d, lambda *s: q.new_empty(s, dtype=torch.float32)
    near, far, share, lse = new(*shape, d), new(*shape, d), new(*shape), new(*shape)
    k, v = last_dim_dense(call.k), last_dim_dense(call.v)
    exact = dict(SK=key.tensors["sinks"], WK=key.tensors["recent"])
    exact |= dict(SV=value.tensors["sinks"], WV=value.tensors["recent"])
    exact |= dict(CK=exact["SK"] if k is None else k, CV=exact["SK"] if v is None else v)
    if len({x.dtype for x in exact.values()}) > 1:  # one pointer reads all of them
        exact = {name: x.float() for name, x in exact.items()}
    (ckb, ckh, ckn, _), (cvb, cvh, cvn, _) = exact["CK"].stride(), exact["CV"].stride()
    strides = dict(ckb=ckb, ckh=ckh, ckn=ckn, cvb=cvb, cvh=cvh, cvn=cvn)
    few = shared["sinks"] + shared["recent"] + shared["chunk"]
    splits, rows = parts.lse.shape[1:]
    named = (
        shared
        | exact
        | strides
        | dict(
            OUT_PARTS=parts.out,
            LSE_PARTS=parts.lse,
            NEAR=near,
            FAR=far,
            SHARE=share,
            LSE=lse,
            splits=splits,
            blocks=parts.blocks,
            Q=rows,
            SB=8 if splits <= 64 else 16,
            EB=8 if few else 0,
        )
    )
    _join_launcher(shape.numel(), named, {}, num_warps=4)
    out, mean = q.new_empty(*shape, d), key.mean
    rows = 16 if shape.numel() >= 64 else 4
    named = dict(
        OUT=out,
        NEAR=near,
        FAR=far,
        SHARE=share,
        ROTATION=key.q.rotation.matrix,
        M=share if mean is None else mean,
        count=shape.numel(),
        rows=shape[1] // store.heads * shape[2],
        D=d,
        DP=padded_size(d),
        ROWS=rows,
        COLS=16,
        CENTRED=mean is not None,
    )
    _back_launcher((-(-shape.numel() // rows), -(-d // 16), 1), named, {}, num_warps=4)
    return Answer(out, lse)


class Latents(Backend):
    "A kernel that attends to coded latents: a tile is decoded once for all heads."

    name, served, recorded = "latents", "kernel", True

    def __init__(self, form: Form | None = None, splits: int | None = None):
        self.form, self.splits = form, splits  # None: what suits the call

    def refuses(self, call: Call) -> str:
        return refuses(call) or device_reason(call.store, call.rule.backend == self.name)

    def run(self, call: Call) -> Answer:
        "Raises ValueError for shapes that do not fit and, with the reason, for what is refused."
        check_call(call)
        if why := refuses(call):
            raise ValueError(f"the kernel for latents cannot serve this: {why}")
        if call.q.device.type != "cuda":
            return self._run(call)
        with torch.cuda.device(call.q.device):
            return self._run(call)

    def _run(self, call: Call) -> Answer:
        store, q = call.store, last_dim_dense(call.q)
        rows = q.shape[1] // store.heads * q.shape[2]
        form = self.form or form_of(rows, store.key.q.d, store.tile)
        shared = _shared(call, q, 0 if call.k is None else call.k.shape[2])
        parts = _coded_parts(call, shared, q, form, self.splits)
        return _joined(call, shared, q, parts)
@gluon.jit
def _by_token(s0, s1, s2, s3, G: gl.constexpr):
    "Scores of four quarters [W, 16, (j, lane, s)] by token of a unit: quarter, then row."
    y = gl.reshape(gl.join(gl.join(s0, s1), gl.join(s2, s3)), [G.W, 16, 2, 4, 2, 2, 2])
    y = gl.reshape(gl.permute(y, [0, 1, 6, 5, 3, 4, 2]), [G.W, 16, 64])
    return gl.convert_layout(y, G.L3, assert_trivial=True)


@gluon.jit
def _weight_operand(w, G: gl.constexpr, mma: gl.constexpr):
    "Weights [16, tokens] as operand A of every warp, tokens as `_value_operand` orders them."
    W: gl.constexpr = G.W
    L3: gl.constexpr = G.L3
    every = gl.zeros([W, 16, 64], gl.float16, layout=L3)
    y, _ = gl.broadcast(w[None, :, :], every)
    y = gl.reshape(y, [G.W, 16, 2, 2, 4, 2, 2])  # pair, quarter of it, lane, s, j
    y = gl.reshape(gl.permute(y, [0, 1, 6, 5, 2, 4, 3]), [G.W, 16, 64])
    return gl.convert_layout(y, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def _four(c0, c1, p1, p2, t, BITS: gl.constexpr, PAIRS: gl.constexpr, shift: gl.constexpr):
    """What `half_asm` makes of bytes of the lower and the upper channels: of the pair of
    quarters whose bits begin at `shift`."""
    if BITS == 2:
        a2: gl.constexpr = _PAIRS2 if PAIRS else _ASM2
        return gl.inline_asm_elementwise(
            a2, _IN2, [c0, c1, shift, t[0]],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=4,
        )
    elif BITS == 3:
        a3: gl.constexpr = _PAIRS3 if PAIRS else _ASM3
        return gl.inline_asm_elementwise(
            a3, _IN3, [c0, c1, p1, shift, t[0], t[1]],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=4,
        )
    else:
        a4: gl.constexpr = _PAIRS4 if PAIRS else _ASM4
        return gl.inline_asm_elementwise(
            a4, _IN4, [c0, c1, p1, p2, shift, t[0], t[1], t[2], t[3]],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=4,
        )


@gluon.jit
def _lut(TABLE):
    "A table as `half_asm` takes it."
    t0, t1, t2, t3 = gl.load(TABLE), gl.load(TABLE + 1), gl.load(TABLE + 2), gl.load(TABLE + 3)
    z: gl.constexpr = -2139062144
    return t0 ^ z, t1 ^ z, t2 ^ z, t3 ^ z


@gluon.jit
def _plane_bytes(P0, P1, P2, base, upper, bit, tile, SIZE: gl.constexpr, BITS: gl.constexpr):
    "Bytes of a tile's planes: base plane of lower and upper channels, then planes of bits."
    here = P0 + tile * SIZE + base
    c0, c1 = gl.load(here), gl.load(here + upper)
    p1, p2 = c0, c0
    if BITS > 2:
        p1 = gl.load(P1 + tile * (SIZE // 2) + bit)
    if BITS > 3:
        p2 = gl.load(P2 + tile * (SIZE // 2) + bit)
    return c0, c1, p1, p2


@gluon.jit
def _key_operand(x, G: gl.constexpr, mma: gl.constexpr):
    "Levels [W, channels, rows] as operand B: [W, channels (step, half, lane, 2), (j, row)]."
    y = gl.reshape(x, [G.W, 4, G.CW // 16, 2, 2, 8, 2])
    y = gl.reshape(gl.permute(y, [0, 2, 3, 1, 4, 6, 5]), [G.W, G.CW, 16])
    return gl.convert_layout(y, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def _rotary_operand(low, up, G: gl.constexpr, mma: gl.constexpr):
    "Levels [W, 8, rows] of lower and of upper channels as operand B: [W, 16, (j, row)]."
    y = gl.reshape(gl.join(low, up), [G.W, 4, 2, 8, 2, 2])
    y = gl.reshape(gl.permute(y, [0, 5, 1, 2, 4, 3]), [G.W, 16, 16])
    return gl.convert_layout(y, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def _value_operand(a0, a1, b0, b1, G: gl.constexpr, mma: gl.constexpr):
    """Pairs of levels [W, rows, channels], of the first two and of the last two quarters, as
    operand B: [W, tokens (j, s, pair, lane, 2), channels (of a group, group)]."""
    y = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    y = gl.reshape(y, [G.W, 4, 2, 2, 8, G.CW // 32, 2, 2, 2, 2])
    y = gl.reshape(gl.permute(y, [0, 3, 2, 9, 1, 7, 5, 8, 6, 4]), [G.W, 64, G.CW])
    return gl.convert_layout(y, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def _query_operand(X, first, top, G: gl.constexpr, mma: gl.constexpr, half: gl.constexpr):
    "fp16 queries in units of `top` as operand A: [W, 16, channels], as `_key_operand` orders."
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w = gl.arange(0, G.W, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    k = gl.arange(0, G.CW, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    at = k // 2 % 4 * (G.CW // 4) + k // 16 * 4 + k // 8 % 2 * 2 + k % 2
    x = gl.load(X + (first + j) * G.D + half * (G.D // 2) + w * G.CW + at)
    t = gl.convert_layout(top, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    return (x / t).to(gl.float16)


@gluon.jit
def _rotary_query(X, first, top, G: gl.constexpr, mma: gl.constexpr):
    "The same of the rotary part: [W, 16, 16], as `_rotary_operand` orders."
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w = gl.arange(0, G.W, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    x = gl.load(X + (first + j) * 64 + k // 8 * 32 + w * 8 + k % 8)
    t = gl.convert_layout(top, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    return (x / t).to(gl.float16)


@gluon.jit
def _row_top(X, first, step, D: gl.constexpr, G: gl.constexpr):
    "Largest numbers of 16 rows, times a step."
    j = gl.arange(0, 16, layout=gl.SliceLayout(1, G.LR))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, G.LR))
    x = gl.load(X + (first + j)[:, None] * D + d[None, :])
    return gl.max(gl.abs(x), 1) * step


@gluon.jit
def _row_shift(q, M, D: gl.constexpr, ok, G: gl.constexpr):
    "Products of plain queries, pointers to whose rows are given, with a mean."
    d = gl.arange(0, D, layout=gl.SliceLayout(0, G.LR))
    x = gl.load(q[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    return gl.sum(x.to(gl.float32) * gl.load(M + d).to(gl.float32)[None, :], 1)


@gluon.jit(
    do_not_specialize=[
        "splits", "length", "recent_from", "chunk", "own", "offset", "sliding_window",
    ]
)
def _fragment_kernel(
    ROTATED, BESIDE, QUERY, sb, sh, sn, M, MR, K0, K1, K2, KSCALE, V0, V1, V2, VSCALE, TABLE,
    START, END, LENGTH, each_length, O, LSE, heads, group, n, blocks, splits, cap, length,
    offset, sinks, recent, recent_from, chunk, own, sliding_window, scaling, k_step, v_step,
    cap_at,
    HAS_START: gl.constexpr, HAS_END: gl.constexpr, HAS_LENGTH: gl.constexpr,
    SLIDING: gl.constexpr, CAPPED: gl.constexpr, CENTRED: gl.constexpr,
    CENTRED_R: gl.constexpr, G: gl.constexpr,
):
    """`_latent_kernel` for 16 query rows, latents of 256 or 512 channels and rotary parts of 64
    on tensor cores: each warp decodes a quarter of the channels, twice, straight into the
    operands of both products."""
    W: gl.constexpr = G.W
    D: gl.constexpr = G.D
    CW: gl.constexpr = G.CW
    R: gl.constexpr = G.R
    U: gl.constexpr = R // 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    L3: gl.constexpr = G.L3
    L2: gl.constexpr = gl.SliceLayout(0, L3)
    LH: gl.constexpr = gl.SliceLayout(1, L2)  # of heads
    LT: gl.constexpr = gl.SliceLayout(0, L2)  # of tokens
    LO: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, mma))
    pid = gl.program_id(0)
    split, base = pid % splits, pid // splits
    bh, block = base // blocks, base % blocks
    b, h = bh // heads, bh % heads
    if HAS_LENGTH:
        length = gl.load(LENGTH + b * each_length)
    j = block * 16 + gl.arange(0, 16, layout=LH)
    at = length - n + j % n
    low, high = at * 0 + sinks, at + 1
    if HAS_START:
        low += gl.load(START + b).to(gl.int32)
    if HAS_END:
        high = gl.minimum(high, gl.load(END + b).to(gl.int32))
    low = gl.maximum(low, offset)
    if SLIDING:
        low = gl.maximum(low, at - sliding_window + 1)
    held = gl.minimum(length - chunk, gl.maximum(recent_from, length - recent))
    high = gl.minimum(high, gl.maximum(at + 1 - own, held))
    rows = (bh * blocks + block) * 16
    top = gl.maximum(
        _row_top(ROTATED, rows, k_step, D, G), _row_top(BESIDE, rows, v_step, 64, G)
    )
    top = gl.where(top > 0, top, 1.0)  # queries are rounded in units of it
    shift = gl.convert_layout(top * 0, LH)
    if CENTRED or CENTRED_R:
        jr = block * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, G.LR))
        ok = jr < group * n
        plain = (
            QUERY
            + b.to(gl.int64) * sb
            + (h * group + jr // n).to(gl.int64) * sh
            + (jr % n).to(gl.int64) * sn
        )
        both = top * 0
        if CENTRED:
            both += _row_shift(plain, M + bh * D, D, ok, G)
        if CENTRED_R:
            both += _row_shift(plain + D, MR + bh * 64, 64, ok, G)
        shift = gl.convert_layout(both, LH) * (scaling * 1.4426950408889634)
    q0 = _query_operand(ROTATED, rows, top / k_step, G, mma, 0)
    q1 = _query_operand(ROTATED, rows, top / k_step, G, mma, 1)
    r0 = _rotary_query(BESIDE, rows, top / v_step, G, mma)
    factor = gl.convert_layout(top, LH) * (scaling * 1.4426950408889634)
    m = gl.full([16], -1e30, gl.float32, layout=LH)
    total = gl.zeros([16], gl.float32, layout=LH)
    acc0 = gl.zeros([W, 16, CW], gl.float32, layout=mma)
    acc1 = gl.zeros([W, 16, CW], gl.float32, layout=mma)
    none = gl.zeros([W, 16, 16], gl.float32, layout=mma)
    unit = 0.0  # the largest scale so far: weights are rounded in units of it
    lowest, highest = gl.min(low, 0), gl.max(high, 0)
    first = (lowest - offset) // (4 * R)
    count = U * gl.maximum((highest - offset + 4 * R - 1) // (4 * R) - first, 0)
    begin, end = split * count // splits, (split + 1) * count // splits
    # where bytes lie: keys [W, channels, rows], values [W, rows, channels], rotary parts
    kw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, G.LK)))[:, None, None]
    kc = gl.arange(0, CW, layout=gl.SliceLayout(0, gl.SliceLayout(2, G.LK)))[None, :, None]
    kr = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, G.LK)))[None, None, :]
    k_base, k_bit = kr * D + kw * CW + kc, kr * (D // 2) + kw * CW + kc
    vw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, G.LV)))[:, None, None]
    vr = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, G.LV)))[None, :, None]
    vc = gl.arange(0, CW, layout=gl.SliceLayout(0, gl.SliceLayout(1, G.LV)))[None, None, :]
    v_base, v_bit = vr * D + vw * CW + vc, vr * (D // 2) + vw * CW + vc
    rw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, G.LB)))[:, None, None]
    rc = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, G.LB)))[None, :, None]
    rr = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, G.LB)))[None, None, :]
    r_base = (rw * 8 + rc) * R + rr
    tables, table_r = _lut(TABLE), _lut(TABLE + 4)
    t = gl.arange(0, 64, layout=G.LS)
    t = t // 16 * R + t % 16
    for i in range(first * U + begin, first * U + end):
        tile, row = i // U, i % U * 16
        slot = bh.to(gl.int64) * cap + tile
        token = t + row
        pos = offset + tile * (4 * R) + token
        seen = (pos >= lowest) & (pos < highest)
        ks = gl.load(KSCALE + slot * (4 * R) + token, mask=seen, other=0.0).to(gl.float32)
        vs = gl.load(VSCALE + slot * (4 * R) + token, mask=seen, other=0.0).to(gl.float32)
        c0, c1, p1, p2 = _plane_bytes(
            K0, K1, K2, k_base + row * D, D // 2, k_bit + row * (D // 2), slot, R * D, G.KB
        )
        e0, e1, f1, f2 = _plane_bytes(
            V0, V1, V2, r_base + row, 32 * R, r_base + row, slot, R * 64, G.VB
        )
        a0, a1, b0, b1 = _four(c0, c1, p1, p2, tables, G.KB, False, 0)
        a2, a3, b2, b3 = _four(c0, c1, p1, p2, tables, G.KB, False, 2)
        s0 = mma_v2(
            q1, _key_operand(b0, G, mma), mma_v2(q0, _key_operand(a0, G, mma), none)
        )
        s1 = mma_v2(q1, _key_operand(b1, G, mma), mma_v2(q0, _key_operand(a1, G, mma), none))
        s2 = mma_v2(q1, _key_operand(b2, G, mma), mma_v2(q0, _key_operand(a2, G, mma), none))
        s3 = mma_v2(q1, _key_operand(b3, G, mma), mma_v2(q0, _key_operand(a3, G, mma), none))
        g0, g1, h0, h1 = _four(e0, e1, f1, f2, table_r, G.VB, False, 0)
        g2, g3, h2, h3 = _four(e0, e1, f1, f2, table_r, G.VB, False, 2)
        z0 = mma_v2(r0, _rotary_operand(g0, h0, G, mma), none)
        z1 = mma_v2(r0, _rotary_operand(g1, h1, G, mma), none)
        z2 = mma_v2(r0, _rotary_operand(g2, h2, G, mma), none)
        z3 = mma_v2(r0, _rotary_operand(g3, h3, G, mma), none)
        s, z = _by_token(s0, s1, s2, s3, G), _by_token(z0, z1, z2, z3, G)
        ks = gl.convert_layout(ks, LT)
        vs = gl.convert_layout(vs, LT)
        s = gl.sum(s * ks[None, :][None, :, :] + z * vs[None, :][None, :, :], 0)
        s = s * factor[:, None] + shift[:, None]
        if CAPPED:
            u = gl.exp2(gl.abs(s) * (-2.0 / cap_at))
            cut = (1.0 - u) / (1.0 + u) * gl.where(s < 0, -1.0, 1.0)
            s = cap_at * 1.4426950408889634 * cut + (s - s)
        pos = gl.convert_layout(pos, LT)
        visible = (pos[None, :] >= low[:, None]) & (pos[None, :] < high[:, None])
        s = gl.where(visible, s, -1e30)
        new = gl.maximum(m, gl.max(s, 1))
        p = gl.where(visible, gl.exp2(s - new[:, None]), 0.0)
        wider = gl.maximum(unit, gl.max(gl.where(ks == ks, gl.abs(ks), 0.0), 0))
        safe = gl.where(wider > 0, wider, 1.0)
        w = gl.where(visible, p * (ks / safe)[None, :], 0.0).to(gl.float16)
        rescale = gl.exp2(m - new)
        total = total * rescale + gl.sum(p, 1)
        m = new
        fade = gl.convert_layout(rescale * (unit / safe), LO)[None, :, None]
        unit = wider
        weights = _weight_operand(w, G, mma)
        c0, c1, p1, p2 = _plane_bytes(
            K0, K1, K2, v_base + row * D, D // 2, v_bit + row * (D // 2), slot, R * D, G.KB
        )
        a0, a1, b0, b1 = _four(c0, c1, p1, p2, tables, G.KB, True, 0)
        a2, a3, b2, b3 = _four(c0, c1, p1, p2, tables, G.KB, True, 2)
        acc0 = mma_v2(weights, _value_operand(a0, a1, a2, a3, G, mma), acc0 * fade)
        acc1 = mma_v2(weights, _value_operand(b0, b1, b2, b3, G, mma), acc1 * fade)
    some = gl.where(total != 0, total, 1.0)  # NaN counts as seen
    scale = gl.convert_layout(unit * k_step / some, LO)[None, :, None]
    place = pid.to(gl.int64) * 16
    ow = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    oj = gl.arange(0, 16, layout=LO)[None, :, None]
    oc = gl.arange(0, CW, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    to = O + (place + oj) * D + ow * CW + oc % 8 * (CW // 8) + oc // 8
    gl.store(to, acc0 * scale)
    gl.store(to + D // 2, acc1 * scale)
    lse = gl.where(total != 0, m + gl.log2(some), float("-inf"))
    gl.store(LSE + place + gl.arange(0, 16, layout=LH), lse)


class Fragments(NamedTuple):
    "How `_fragment_kernel` is compiled."

    W: int  # warps
    D: int
    CW: int  # lower channels of a warp, and as many upper ones
    R: int
    KB: int
    VB: int
    LK: object  # layouts of bytes: for scores, for sums of values, of rotary parts
    LV: object
    LB: object
    LS: object  # of tokens as their scales are loaded
    L3: object  # of scores
    LR: object  # of query rows


@lru_cache(maxsize=16)
def fragments(d: int, rows: int, key_bits: int, value_bits: int) -> Fragments:
    "Layouts for latents of d channels in tiles of so many byte rows."
    width = d // 8  # four warps have a quarter of the lower half each
    bits = lambda first, last: [1 << i for i in range(first.bit_length() - 1, last.bit_length() - 1)]
    linear = lambda regs, lanes, warps, *shape: gl.DistributedLinearLayout(
        regs, lanes, warps, [], [*shape]
    )
    warps = [[1, 0, 0], [2, 0, 0]]
    lane, group = width // 4, width // 8  # channels side by side of a lane
    channel, rows_of = lambda c: [0, c, 0], lambda r: [0, 0, r]
    return Fragments(
        W=4,
        D=d,
        CW=width,
        R=rows,
        KB=key_bits,
        VB=value_bits,
        LK=linear(
            [*map(channel, bits(1, lane)), rows_of(1)],
            [channel(lane), channel(2 * lane), rows_of(2), rows_of(4), rows_of(8)],
            warps, 4, width, 16,
        ),
        LV=linear(
            [*map(rows_of, bits(1, group)), channel(1), channel(2)],
            [channel(4), channel(8), *map(rows_of, bits(group, width))],
            warps, 4, 16, width,
        ),
        LB=linear(
            [rows_of(1), channel(1)],
            [channel(2), channel(4), rows_of(2), rows_of(4), rows_of(8)],
            warps, 4, 8, 16,
        ),
        LS=linear([[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], 64),
        L3=linear(
            [rows_of(1), rows_of(2), rows_of(16), rows_of(32), channel(8)],
            [rows_of(4), rows_of(8), channel(1), channel(2), channel(4)],
            warps, 4, 16, 64,
        ),
        LR=gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]),
    )


_fragment_launcher = Launcher(_fragment_kernel)
