"""A trellis code's symbols by the kernel against `Trellis.encode`, bit for bit, and its levels
by windows against `Code.levels`: in Triton's interpreter, on a GPU where there is one."""

from dataclasses import replace

import pytest
import torch

from tests.helpers import (
    DEVICE,
    ONE_THREAD,
    SLOW,
    ahead_of_time,
    covering_pairs,
    needs_gpu,
    needs_triton,
    refuses,
    seeded,
)
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.kernels import ops
from turboquant_nb.kernels.blocks import KernelBlocks
from turboquant_nb.kernels.viterbi import find_symbols
from turboquant_nb.quant import codes
from turboquant_nb.theory.trellis import TRELLISES

pytestmark = ONE_THREAD


def symbols(code, x, programs, block=32):
    "By the kernel, on the host; the sums beside them are those of the decoded vectors."
    levels = code.table.to(DEVICE)
    got, dot, square = find_symbols(
        code, x.to(DEVICE), levels, levels[code.index.to(DEVICE)], programs, block
    )
    decoded, x = code.decode(got.cpu()).double(), x.double()
    size = (x.abs() * decoded.abs()).sum(1)
    near = (dot.cpu() - (x * decoded).sum(1)).abs() <= 2**-20 * size
    assert bool((near | ~size.isfinite()).all())
    norm = decoded.square().sum(1)
    assert bool(((square.cpu() - norm).abs() <= 2**-20 * norm).all())  # sums in fp32
    return got.cpu()


def rows(count, n, seed=0):
    "Gaussian vectors with a zero vector, a constant one and an outlier among them."
    x = torch.randn(count, n, generator=seeded(seed))
    x[0], x[1], x[2, 3] = 0.0, 1.0, 1e4
    return x


@needs_triton
@pytest.mark.parametrize(
    "bits, ends", covering_pairs([*TRELLISES], [("zero", 8), ("tail", 16)]), ids=str
)
def test_symbols_are_those_of_pytorch(bits, ends):
    start, n = ends
    code, x = replace(TRELLISES[bits], start=start), rows(40, n)
    want = code.encode(x)
    assert torch.equal(symbols(code, x, programs=2), want)
    few = slice(0, 4)  # a warp for each
    assert torch.equal(symbols(code, x[few], programs=1, block=1), want[few])


@needs_triton
def test_the_block_is_no_part_of_the_result():
    code, x = TRELLISES[3], rows(40, 8, seed=1)
    assert torch.equal(symbols(code, x, 1), found := symbols(code, x, 3, block=64))
    seam = replace(code, start="tail"), rows(3, 24)  # not between two groups of eight
    assert torch.equal(symbols(*seam, 1, block=1), seam[0].encode(seam[1]))
    turned = x.t().contiguous().t()  # any strides
    assert torch.equal(symbols(code, turned, 1, block=64), found)


@needs_triton
def test_bad_values_and_bad_shapes():
    code = TRELLISES[2]
    x = torch.full((3, 8), float("nan"))
    x[1], x[2] = float("inf"), -float("inf")
    bounds = torch.tensor([[0.0], [1e4], [-1e4]]).expand(3, 8)
    for block in (1, 32):
        assert torch.equal(symbols(code, x, 1, block), code.encode(bounds))
    tables = code.table.to(DEVICE), code.table[code.index].to(DEVICE), 1
    assert [len(y) for y in find_symbols(code, x[:0].to(DEVICE), *tables)] == [0, 0, 0]
    for other, n in ((code, 12), (replace(code, segment=8), 16)):
        with refuses("whole vectors of a multiple of 8 channels"):
            find_symbols(other, torch.zeros(1, n, device=DEVICE), *tables)


@needs_gpu
def test_a_gpu_takes_the_kernel_by_itself(monkeypatch):
    calls = []
    monkeypatch.setitem(codes.KERNELS, "encode", lambda *a: calls.append(1) or find_symbols(*a))
    side = Spec(2, codebook="trellis")
    store, host = (KVStore(Recipe(side, side), 1, 2, 64, device=x) for x in ("cuda", "cpu"))
    x = torch.randn(2, 1, 2, 90, 64, generator=seeded(0))
    ops.append(store, *x.cuda())
    host.append(*x)
    assert len(calls) == 2
    differ = store.coded("key", 0, 90).codes.cpu() != host.coded("key", 0, 90).codes
    assert float(differ.any(-1).float().mean()) < 0.05  # rotations round in another order


@needs_triton
@pytest.mark.parametrize("bits, sizes", covering_pairs([1, 2, 3], [(64, 64), (80, 128)]))
def test_levels_by_windows(bits, sizes):
    d, tile = sizes
    side = Spec(bits, codebook="trellis")
    held = KVStore(Recipe(side, side, 0, 0), 2, 1, d, device=DEVICE, tile=tile)
    x = torch.randn(2, 2, 1, tile + 21, d, generator=seeded(0))
    held.append(*x.to(DEVICE))
    for name in ("key", "value"):
        got, scale = KernelBlocks().vectors(held, name, 5, tile + 20)
        coded = held.coded(name, 5, tile + 20)
        assert torch.equal(got, getattr(held, name).q.code.levels(coded.codes))
        assert torch.equal(scale, coded.scale.float())


LIMITS = [  # what `aot_viterbi` compiles, registers a thread, KB of shared memory
    (dict(kernel="prompt", bits=2, codebook="trellis"), 128, 0),
    (dict(kernel="prompt", bits=3, codebook="trellis"), 96, 0),
    (dict(kernel="step", bits=2, codebook="trellis"), 72, 0),
    (dict(kernel="step", bits=1, codebook="trellis"), 72, 0),
]
LIMITS = LIMITS if SLOW else LIMITS[::2]


@needs_triton
def test_compiled_ahead_of_time():
    rows = ahead_of_time(*(case for case, *_ in LIMITS), of="viterbi", by="kernels.aot")
    for used, (_, registers, shared) in zip(rows, LIMITS, strict=True):
        assert used["registers"] <= registers and not used["stack"], used
        assert used["shared"] <= shared * 1024, used
