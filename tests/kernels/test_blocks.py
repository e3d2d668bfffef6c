"""Blocks of the past by the kernel against `KVStore.read`, and pieces of attention joined in
place: in Triton's interpreter, on a GPU where there is one."""

import numpy as np
import pytest
import torch

from turboquant_nb.cache import attention
from turboquant_nb.cache.packing import Layout, pack
from turboquant_nb.kernels import blocks, launch, ops
from turboquant_nb.kernels.decode import pack_lut
from turboquant_nb.theory.codebook import lloyd_max, uniform
from tests.kernels.warp import run_inline
from tests.helpers import (
    DEVICE,
    ONE_THREAD,
    ahead_of_time,
    attended_store,
    needs_gluon,
    needs_gpu,
    needs_triton,
    refuses,
    seeded,
)

pytestmark = ONE_THREAD
ULP = {
    torch.float32: 2**-20,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
}  # fp32: of the largest; else of the number: two roundings to nearest
CASES = [  # what `setup` is given, first and last position
    (dict(), 0, 290),
    (dict(center="pre_rope", start=[0, 37], H=2), 0, 290),
    (dict(kb=4, vb=2, d=80, dv=48, tile=64, center="pre_rope", rotary=32, B=1), 70, 285),
    (dict(rot="transform", H=2, win=100, B=1), 130, 280),
    (dict(rot="haar", sinks=0, win=0, kb=2, vb=4), 3, 5),
    (dict(residual="sign", center="none"), 128, 256),
    (dict(T=700, evict=300, center="pre_rope", tile=128, B=1), 256, 650),
    (dict(dtype=torch.float16, B=1), 0, 290),
    (dict(scale_dtype="float32", table="uniform", B=1), 200, 300),
]


def setup(**case):
    "A store with one KV head and one query head, unless the case says otherwise."
    return attended_store(**(dict(H=1, G=1) | case))


def differs(got, want):
    "The largest difference as a multiple of what rounding may do."
    bound = ULP[want.dtype] * (
        want.float().abs().max()
        if want.dtype == torch.float32
        else want.float().abs().clamp(min=1e-3)
    )
    return float(((got.float() - want.float()).abs() / bound).max())


@needs_triton
@pytest.mark.parametrize("case,first,last", CASES)
def test_a_block_is_what_the_store_reads(case, first, last):
    _, store, _ = setup(**(dict(H=1, G=1) | case))
    got = blocks.read_block(store, launch.store_plan(store).tables, first, last)
    for x, want in zip(got, store.read(first, last)):
        assert x.shape == want.shape and x.dtype == want.dtype and differs(x, want) <= 1, case
    if first < 100:
        wrong = store.read(first + 1, last + 1)
        assert differs(got[0], wrong[0]) > 100  # the mutant: the next range


@needs_triton
def test_what_is_not_written_is_not_read():
    "Scales and planes beyond the length may hold anything."
    _, store, _ = setup(H=1, B=1, T=70, center="pre_rope")
    want = store.read(0, 70)
    for side in store.parts:
        side.memory.tensors["scale"][:, :, :, 70:] = float("nan")
    for x, y in zip(blocks.read_block(store, launch.store_plan(store).tables, 0, 70), want):
        assert differs(x, y) <= 1


@needs_triton
@pytest.mark.parametrize(
    "case,why",
    (
        (dict(kb=1), "2 to 4 bits"),
        (dict(tile=512, T=600), "64 to 256 tokens"),
        (dict(dtype=torch.float64), "at most 32 bits"),
    ),
)
def test_refusals(case, why):
    _, store, _ = setup(**(dict(B=1, H=1) | case))
    tables = launch.store_plan(store).tables
    assert why in blocks.refuses(store, tables)
    with refuses(why):
        blocks.read_block(store, tables, 0, 9)


@needs_triton
def test_more_refusals():
    _, store, _ = setup(B=1, H=1)
    tables = launch.store_plan(store).tables
    assert "one table" in blocks.refuses(store, None)
    for first, last in ((-1, 5), (5, 5), (0, 301)):
        with refuses("positions must lie in"):
            blocks.read_block(store, tables, first, last)
    store.key.memory.hold(store.key.memory.cells.mT.contiguous().mT)
    assert "contiguous" in blocks.refuses(store, tables)


@needs_triton
@pytest.mark.parametrize("d, dtype", ((16, torch.float32), (80, torch.float16)))
def test_pieces_join(d, dtype):
    """A piece in any dtype joins another, each with strides of its own, and times a factor: NaN
    stays in its row, a row of which one piece saw nothing is the other's, whatever that one
    holds there, and one that saw nothing stays 0."""
    g = seeded(0)
    one, two = torch.randn(2, 3, 3, 2 * d, generator=g)[..., :d].to(DEVICE)
    two = two.transpose(0, 1)  # heads lie before tokens
    lse, other = (4 * torch.randn(2, 3, 3, generator=g)).to(DEVICE)
    lse = lse.T
    one[0, 2], lse[0, 1], lse[0, 2], other[0, 2] = 0, -torch.inf, -torch.inf, -torch.inf
    other[1, 0], other[2, 2] = -torch.inf, torch.nan
    whole = torch.logaddexp(lse, other)
    want = (lse - whole).exp()[..., None] * one + (other - whole).exp()[..., None] * two
    two = two.to(dtype) / 2
    two[1, 0] = torch.nan
    blocks.join_piece(one, lse, two, other, factor=2.0)
    seen = torch.ones(3, 3, dtype=torch.bool)
    seen[0, 2] = seen[2, 2] = False
    assert (one - want)[seen].abs().max() < (1e-5 if dtype == torch.float32 else 2e-3)
    assert (lse - whole)[seen].abs().max() < 1e-5
    assert not one[0, 2].any() and lse[0, 2] == -torch.inf
    assert one[2, 2].isnan().all() and lse[2, 2].isnan()
    for wrong in ((one.mT, lse, one.mT, lse), (one, lse[:2], two, other), (one[0], lse[0]) * 2):
        with refuses("pieces must be .* side by side"):
            blocks.join_piece(*wrong)


@needs_gpu
@pytest.mark.parametrize(
    "case,options",
    (
        (dict(), {}),
        (dict(center="pre_rope", start=[0, 400]), {}),
        (dict(), dict(sliding_window=700)),
        (dict(kb=4, vb=2, d=80), {}),
        (dict(dtype=torch.float32), {}),
    ),
)
def test_gpu_chunks(case, options):
    "A chunk of 300 tokens by blocks of 512, decoded by the kernel, against attention on codes."
    q, store, chunk = setup(
        **(dict(T=2300, n=300, m=300, d=128, G=4, center="fixed", dtype=torch.bfloat16) | case)
    )
    size, ops.BLOCK = ops.BLOCK, 512 * 2 * 2 * q.shape[3]
    try:
        got, lse = ops.attend(q, store, **chunk, **options, backend="flash")
    finally:
        ops.BLOCK = size
    want, want_lse = attention.attend(q.float(), store, **chunk, **options)
    assert (got.float() - want).norm() <= 1e-2 * want.norm() and (lse - want_lse)[
        want_lse.isfinite()
    ].abs().max() < 2e-2


@needs_gpu
def test_gpu_long_chunks_by_cudnn(monkeypatch):
    """Where cuDNN serves the pieces, the answer is that of torch's flash kernel, to the
    rounding of bf16."""
    q, store, chunk = setup(B=1, T=5000, n=704, m=704, d=128, G=4, dtype=torch.bfloat16)
    want, want_lse = ops.attend(q, store, **chunk, backend="flash")
    monkeypatch.setattr(ops, "_PAYS", 1e8)
    rows = q.reshape(store.batch, store.heads, -1, 128)
    assert ops._by_cudnn(rows, 4096) == (
        torch.cuda.get_device_capability()[0] == 9
    ) and not ops._by_cudnn(rows[:, :, 1:], 4096)
    got, lse = ops.attend(q, store, **chunk, backend="flash")
    assert (got.float() - want.float()).norm() <= 6e-3 * want.float().norm() and (
        lse - want_lse
    ).abs().max() < 1e-4


@needs_gluon
def test_compiled_ahead_of_time():
    "For Hopper and Ampere: hardly a register is spilled."
    cases = [
        dict(kernel="read", by_token=True, d=80, bits=4, parts=2),
        dict(kernel="read", bits=2, rotary=128, capability=80),
        dict(kernel="join_piece"),
        dict(kernel="look_up", bits=2, by_token=True, codebook="trellis"),
        dict(kernel="look_up", bits=1, codebook="trellis"),
    ]
    rows = ahead_of_time(*cases, of="decode", by="kernels.aot")
    assert len(rows) == len(cases)
    for row in rows:
        assert row["shared"] <= 160 * 1024 and row["spills"] <= 160, row


def levels_by_ptx(codes, levels, flip=0x80808080):
    "fp16 levels of a tile [256, d] by the generated PTX."
    bits, half = len(levels).bit_length() - 1, codes.shape[1] // 2
    planes = [p[0] for p in pack(codes, Layout(bits, codes.shape[1], "channel"))]
    inputs = [
        x.contiguous().numpy().view(np.uint32)
        for x in (planes[0][:, :half], planes[0][:, half:], *planes[1:])
    ]
    table = [
        np.uint32((w & 0xFFFFFFFF) ^ flip)
        for w in pack_lut(levels)[: {2: 1, 3: 2, 4: 4}[bits]]
        for _ in range(4)
    ]
    out = []
    for shift in (0, 2):
        words = run_inline(blocks.half_asm(bits)[0], inputs + [np.uint32(shift)] * 4 + table)
        # half, quarter, pairs of bytes
        halves = [w.view(np.float16).reshape(64, -1, 2) for w in words]
        out += [
            np.concatenate(
                [
                    np.stack(halves[4 * h + 2 * q : 4 * h + 2 * q + 2], 2).reshape(64, half)
                    for h in (0, 1)
                ],
                1,
            )
            for q in (0, 1)
        ]
    return torch.from_numpy(np.concatenate(out))


def test_ptx_gives_the_levels_of_a_table():
    "Kills: a table whose bytes are not flipped."
    g = seeded()
    for book in (f(b) for b in (2, 3, 4) for f in (lloyd_max, uniform)):
        levels = book.to_int8_grid().int8().levels
        codes = torch.randint(0, 2**book.bits, (256, 64), dtype=torch.uint8, generator=g)
        assert torch.equal(levels_by_ptx(codes, levels), levels[codes.int()].half())
    mutant = levels_by_ptx(codes, levels, flip=0)
    assert not torch.equal(mutant, levels[codes.int()].half())
