"""The interpreter that tests and notebooks run under finds every overflow of integers, and
leaves the language as it was."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import interpreter as quick
import triton.language as tl
from triton.runtime import interpreter

from tests.helpers import refuses

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU kernels are compiled"
)


@triton.jit
def _deep(x):
    return tl.sum(x * 2, 0)


@triton.jit
def _nested(x, out, N: tl.constexpr):
    tl.store(out + tl.program_id(0), _deep(tl.load(x + tl.arange(0, N))) + tl.program_id(0))


@triton.jit
def _arithmetic(x, y, out, OP: tl.constexpr):
    a, b = tl.load(x), tl.load(y)
    if OP == 0:
        tl.store(out, a + b)
    elif OP == 1:
        tl.store(out, a - b)
    else:
        tl.store(out, a * b)


def one(value, dtype):
    return torch.tensor([value], dtype=dtype)


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8, torch.int16, torch.int32))
@pytest.mark.parametrize("op", (0, 1, 2))
def test_what_overflows(dtype, op, gen):
    "Random pairs of every type, and those at its edges, against whole numbers of Python."
    info, found = torch.iinfo(dtype), set()
    pairs = torch.randint(info.min, info.max + 1, (20, 2), generator=gen)
    pairs[::2] //= max(2, int(info.max**0.5))  # whose results fit
    edges = [(info.max - 1, 1), (info.max, 1), (info.min, 1), (info.max // 2 + 1, 2)]
    for a, b in pairs.tolist() + edges:
        value, out = (a + b, a - b, a * b)[op], torch.zeros(1, dtype=dtype)
        found.add(fits := info.min <= value <= info.max)
        if fits:
            _arithmetic[(1,)](one(a, dtype), one(b, dtype), out, op)
            assert out.item() == value
        else:
            with refuses("overflow detected", Exception):
                _arithmetic[(1,)](one(a, dtype), one(b, dtype), out, op)
            wide = torch.zeros(1, dtype=torch.int64)  # 64 bits are not checked
            _arithmetic[(1,)](one(a, torch.int64), one(b, torch.int64), wide, op)
            assert wide.item() == value
    assert found == {True, False}


def test_a_launch_replaces_builtins_once_and_puts_them_back(monkeypatch):
    """Two programs call a device function each, which calls one of the language; the second
    look finds nothing to do."""
    before, looks, original = (
        {name: getattr(tl, name) for name in dir(tl)},
        [],
        interpreter._patch_builtin,
    )
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda *args: (looks.append(args[0]), original(*args))
    )
    x, out = torch.arange(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        looks.clear()
        _nested[(2,)](x, out, 8)
        assert (
            out.tolist() == [56, 57] and len(looks) <= 10
        )  # 4 for the launch, at most 6 for `tl.sum`, which knows other modules; not as many
        # for each call
    assert all(
        getattr(tl, name) is value
        for name, value in before.items()
        if callable(value) and getattr(value, "__module__", "") == "triton.language.core"
    )


def test_a_failed_launch_is_forgotten():
    with refuses("overflow", Exception):
        _arithmetic[(1,)](
            one(2**31 - 1, torch.int32), one(1, torch.int32), one(0, torch.int32), 0
        )
    x, out = torch.arange(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _nested[(1,)](x, out, 8)
    assert out.item() == 56


def test_types_are_numpys():
    kinds = [
        (tl.int1, bool),
        (tl.int32, np.int32),
        (tl.uint8, np.uint8),
        (tl.float32, np.float32),
        (tl.bfloat16, np.uint16),
        (tl.pointer_type(tl.float16), np.uint64),
    ]
    for _ in range(2):
        for kind, wanted in kinds:
            assert interpreter._get_np_dtype(kind) == np.dtype(wanted)
            assert interpreter._get_np_dtype(tl.block_type(kind, [4])) == np.dtype(wanted)


def test_twice_is_once():
    now = interpreter._patch_lang, interpreter._get_np_dtype
    quick.quicken()
    assert now == (interpreter._patch_lang, interpreter._get_np_dtype)
