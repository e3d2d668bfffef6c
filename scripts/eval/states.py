"""How near to the bound do more states come? run.py states --out FILE [--bits K …] [--states S
…] [--index-bits M].

For each number of states, masks are drawn at random, as many as `--candidates`; the levels of
each candidate are trained for a few turns on a Gaussian source, those of the best for more, and
its error is measured on fresh vectors of 128 channels with a zero start. A search as short as
this finds no best masks (`run.py masks` looks longer); it is the same for all, so that they can
be compared. Gate: windows of one channel's own bits are the scalar code."""

import torch

from plan import Plan

from turboquant_nb.theory.codebook import lloyd_max
from turboquant_nb.theory.trellis import parity_index, train_levels, viterbi


def options(p):
    p.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument(
        "--states", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024]
    )
    p.add_argument("--index-bits", type=int, default=4, help="levels are 2 to the power of it")
    p.add_argument("--candidates", type=int, default=64)
    p.add_argument("--vectors", type=int, default=1024, help="of 128 channels, fresh")
    p.add_argument("--seed", type=int, default=0)


def usable(masks, bits):
    "Whether every history leaves 2**bits levels to choose from."
    reached = parity_index(masks & ((1 << bits) - 1), bits)
    return len(set(reached.tolist())) == 1 << bits


def drawn(gen, bits, length, m):
    "Masks that can be used; each sees at least one bit."
    while True:
        masks = torch.randint(1, 1 << length, (m,), generator=gen)
        if usable(masks, bits):
            return tuple(masks.tolist())


def rows(a):
    for bits in a.bits:
        for states in a.states:
            length = bits + states.bit_length() - 1
            gen = torch.Generator().manual_seed(a.seed)
            few, more = (
                torch.randn(64, 128, generator=gen),
                torch.randn(512, 128, generator=gen),
            )
            fresh, tried = torch.randn(a.vectors, 128, generator=gen), []
            for _ in range(a.candidates):
                masks = drawn(gen, bits, length, a.index_bits)
                levels, errors = train_levels(few, masks, length, bits, 5)
                tried.append((errors[-1], masks, levels))
            _, masks, levels = min(tried, key=lambda x: x[0])
            levels, _ = train_levels(more, masks, length, bits, 6, levels)
            index = parity_index(torch.tensor(masks), length)
            error = viterbi(fresh, levels, index, bits)[1] / 128
            yield dict(
                bits=bits,
                length=length,
                states=states,
                masks=list(masks),
                levels=[round(v, 4) for v in levels.tolist()],
                error=float(error.mean()),
                stderr=float(error.std() / len(error) ** 0.5),
                n=error.numel(),
                unit="mean squared error",
            )


def gate(seed):
    "Windows whose masks see a channel's own bits alone: the errors of Lloyd and Max."
    x, code = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)), lloyd_max(2)
    index = parity_index(torch.tensor((1, 2)), 3)
    error = viterbi(x, code.levels, index, 2)[1]
    gap = (error - (x - code.decode(code.encode(x))).square().sum(1)).abs().max()
    limit = 64 * 2.0**-14  # costs are whole multiples of 2**-14
    cmd = (
        "a trellis of one symbol a window against the scalar code: largest difference of a cost"
    )
    return dict(cmd=cmd, value=float(gap), limit=limit, passed=bool(gap < limit))


def plan(a):
    data = {"id": "Gaussian", "n": a.vectors * 128}
    return Plan("trellis states", gate(a.seed), rows(a), data, seeds=[a.seed])
