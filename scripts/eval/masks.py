"""Which trellis codes are good? run.py masks --out FILE [--plan k,L,m …] [--seconds N] [--seed
N].

A trellis code keeps k bits a channel. The level of a channel is found from a window of L bits,
its own and those of the channels before it: bit j of the level's index is the parity of
`window & mask_j`, so a decoder computes it by XOR of shifted bit planes. For every triple
(k, L, m) of the plan, m masks are searched by mutation, each candidate with its 2^m levels
trained (Lloyd's two steps, levels antisymmetric) on a Gaussian source, hundreds of candidates a
launch. What is kept is the front of squared error against taps, the ones of all masks, since a
tap is a XOR in a kernel. Every row is measured again on fresh draws: segments of 32 and of 128
channels that start at zero, and tail-biting vectors of 64 and 128.

Sources: Marcellin and Fischer 1990 (trellis-coded quantisation), Tseng et al. 2024 (QTIP,
computed codes on a bit-shift trellis). Gate: the Triton encoder's paths cost what PyTorch's
do."""

import math
import time

import torch
import triton
import triton.language as tl

from turboquant_nb.theory.trellis import parity_index, viterbi
from plan import Plan

PLAN = [
    "1,7,2",
    "1,8,2",
    "1,8,3",
    "2,6,3",
    "2,7,3",
    "2,8,3",
    "2,8,4",
    "3,7,4",
    "3,8,4",
    "3,9,4",
]
SEGMENT = 32


@triton.jit
def _viterbi_kernel(
    X,
    LEVELS,
    BACK,
    OUT,
    K: tl.constexpr,
    S: tl.constexpr,
    LOGK: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Best path of BLOCK segments by one candidate's levels [K * S]; BACK holds for each state
    the k bits that leave the window. Ties go to the smallest of them."""
    candidate, part = tl.program_id(1), tl.program_id(0)
    v = part * BLOCK + tl.arange(0, BLOCK)
    s, h = tl.arange(0, S), tl.arange(0, K)
    levels = tl.load(LEVELS + candidate * K * S + h[:, None] * S + s[None, :])[None]
    program = candidate * tl.num_programs(0) + part
    back = BACK + program.to(tl.int64) * N * BLOCK * S
    out = OUT + candidate.to(tl.int64) * tl.num_programs(0) * BLOCK * N
    cost = tl.where(s[None, :] == 0, 0.0, 1e9) + tl.zeros((BLOCK, S), tl.float32)
    leaving = tl.reshape(h, (1, K, 1))
    rows = tl.arange(0, BLOCK)
    for t in range(N):
        x = tl.load(X + v * N + t)[:, None, None]
        c = tl.reshape(cost, (BLOCK, K, S // K, 1))
        c = tl.reshape(tl.broadcast_to(c, (BLOCK, K, S // K, K)), (BLOCK, K, S))
        away = x - levels
        c = c + away * away
        # costs are not negative, so their order is that of their bits; the last hold `leaving`
        packed = (c.to(tl.int32, bitcast=True) & ~(K - 1)) | leaving
        best = tl.min(packed, axis=1)
        tl.store(
            back + (t * BLOCK + rows[:, None]) * S + s[None, :], (best & (K - 1)).to(tl.int8)
        )
        cost = (best & ~(K - 1)).to(tl.float32, bitcast=True)
    state = tl.argmin(cost, axis=1)
    tl.debug_barrier()
    for i in range(N):
        t = N - 1 - i
        window = tl.load(back + (t * BLOCK + rows) * S + state).to(tl.int32) * S + state
        tl.store(out + v * N + t, window.to(tl.int16))
        state = window >> LOGK


def viterbi_all(x, levels, k):
    "Windows [C, M, n] of M segments x [M, n] by C candidates' levels [C, 2^L], from state 0."
    (count, windows), (m, n) = levels.shape, x.shape
    states, block = windows >> k, max(2, min(16, 4096 // windows))
    out = torch.empty(count, m, n, dtype=torch.int16, device=x.device)
    back = torch.empty(count * m * n * states, dtype=torch.int8, device=x.device)
    grid = m // block, count
    _viterbi_kernel[grid](x, levels, back, out, 1 << k, states, k, block, n, num_warps=4)
    return out


def train(x, masks, k, length, turns, levels=None):
    "(squared error of a channel [C], levels [C, 2^m]) after so many turns of Lloyd's steps."
    count, m = masks.shape
    size, index = 1 << m, parity_index(masks, length)
    if levels is None:
        p = (torch.arange(size, device=x.device) + 0.5) / size
        levels = (math.sqrt(2) * torch.erfinv(2 * p - 1)).expand(count, -1)
    for turn in range(turns):
        by_window = levels.gather(1, index).contiguous()
        windows = viterbi_all(x, by_window, k).long().flatten(1)
        error = (x.flatten() - by_window.gather(1, windows)).square().mean(1)
        if turn + 1 == turns:
            break
        at = index.gather(1, windows)
        total = torch.zeros(count, size, device=x.device)
        n = total.scatter_add(1, at, torch.ones_like(at, dtype=x.dtype))
        total = total.scatter_add(1, at, x.flatten().expand(count, -1))
        new = torch.where(n > 0, total / n.clamp(min=1), levels)
        levels = (new - new.flip(1)) / 2
    return error, levels


def taps(masks):
    "Ones of all masks of a candidate [C]."
    bits = torch.arange(16, device=masks.device)
    return ((masks[..., None] >> bits) & 1).sum((1, 2))


def usable(masks, k):
    "Candidates whose own k bits reach different levels from every history."
    newest = (masks[:, :, None] >> torch.arange(k, device=masks.device)) & 1  # [C, m, k]
    codes = (newest * (1 << torch.arange(masks.shape[1], device=masks.device))[:, None]).sum(1)
    every = torch.arange(1 << k, device=masks.device)
    reached = torch.zeros(len(masks), 1 << k, dtype=torch.long, device=masks.device)
    for bit in range(k):
        reached ^= torch.where((every >> bit & 1).bool(), codes[:, bit, None], 0)
    in_order = reached.sort(1).values
    return (in_order[:, 1:] != in_order[:, :-1]).all(1) & (masks > 0).all(1)


def search(k, length, m, seconds, seed, device, width=128, segments=2048):
    """The front (least error for each number of taps) as {taps: (error, masks)} after so many
    seconds of mutation, and how many candidates were tried."""
    gen = torch.Generator(device).manual_seed(seed)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=gen, device=device)
    x = torch.randn(segments, SEGMENT, generator=gen, device=device)
    front, tried, began = {}, 0, time.time()
    while time.time() - began < seconds:
        masks = draw(1 << length, width, m)
        if front:
            kept = torch.tensor([masks for _, masks in front.values()], device=device)
            parents = kept[draw(len(kept), width)]
            flips = torch.zeros_like(masks)
            for _ in range(3):
                flip = (1 << draw(length, width)) * draw(2, width)
                flips.scatter_(1, draw(m, width, 1), flip[:, None], reduce="add")
            inherit = draw(4, width) > 0
            masks = torch.where(inherit[:, None], parents ^ (flips % (1 << length)), masks)
        masks = masks[usable(masks, k)]
        if not len(masks):
            continue
        tried += len(masks)
        error, _ = train(x, masks, k, length, 6)
        for e, cost, row in zip(error.tolist(), taps(masks).tolist(), masks.tolist()):
            if e < front.get(cost, (9.0,))[0]:
                front[cost] = e, row
    best, out = 9.0, {}
    for cost in sorted(front):  # more taps only where they pay
        if front[cost][0] < best - 1e-4:
            best, out[cost] = front[cost][0], front[cost]
    return out, tried


def measured(k, length, masks, seed, device, n=2**18):
    "Levels trained longer, and errors on fresh draws: {name: (mean, standard error)}."
    gen = torch.Generator(device).manual_seed(seed + 1)
    fresh = lambda width: torch.randn(n // width, width, generator=gen, device=device)
    each = torch.tensor([masks], device=device)
    _, levels = train(fresh(SEGMENT), each, k, length, 25)
    index, out = parity_index(each, length)[0], {}
    for start, width in (("zero", SEGMENT), ("zero", 128), ("tail", 64), ("tail", 128)):
        error = viterbi(fresh(width), levels[0], index, k, start)[1]
        out[f"{start} {width}"] = error / width
    spread = lambda e: (round(float(e.mean()), 5), round(float(e.std() / len(e) ** 0.5), 5))
    return [round(v, 4) for v in levels[0].tolist()], {
        name: spread(e) for name, e in out.items()
    }


def gate(device):
    "Largest relative difference between the costs of the kernel's paths and of PyTorch's."
    gen, worst = torch.Generator(device).manual_seed(0), 0.0
    for k, length, m in ((1, 5, 2), (2, 6, 3), (3, 7, 4)):
        x = torch.randn(64, SEGMENT, generator=gen, device=device)
        masks = torch.randint(1, 1 << length, (3, m), generator=gen, device=device)
        levels = torch.randn(3, 1 << m, generator=gen, device=device)
        by_window = levels.gather(1, parity_index(masks, length)).contiguous()
        windows = viterbi_all(x, by_window, k).long()
        for row, found in zip(by_window, windows):
            cost = (x - row[found]).square().sum(1)
            best = viterbi(x, *row.unique(return_inverse=True), k)[1]
            worst = max(worst, float(((cost - best).abs() / best).max()))
    return worst


def options(p):
    p.add_argument("--plan", nargs="+", default=PLAN, metavar="k,L,m", help="what is searched")
    p.add_argument("--seconds", type=float, default=20, help="of search for each of the plan")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--width", type=int, default=128, help="candidates of one launch")
    p.add_argument("--segments", type=int, default=2048, help="segments that judge a candidate")
    p.add_argument("--fresh", type=int, default=2**18, help="draws that measure what is kept")


def rows(a, device):
    for k, length, m in (map(int, item.split(",")) for item in a.plan):
        front, tried = search(k, length, m, a.seconds, a.seed, device, a.width, a.segments)
        for cost, (_, masks) in front.items():
            levels, errors = measured(k, length, masks, a.seed, device, a.fresh)
            row = dict(bits=k, length=length, index_bits=m, masks=masks, taps=cost)
            for name, (mean, error) in errors.items():
                row |= {name: mean, f"{name} s.e.": error}
            yield row | dict(levels=levels, tried=tried, n=a.fresh, unit="mean squared error")


def plan(a):
    device = "cuda"  # `needs` of the list in run.py
    worst, limit = gate(device), 1e-4
    checked = dict(cmd="costs of the kernel's paths and of PyTorch's", value=worst, limit=limit)
    checked["passed"] = worst < limit
    data = {"id": "Gaussian", "n": a.fresh}
    return Plan("trellis masks", checked, rows(a, device), data, seeds=[a.seed])
