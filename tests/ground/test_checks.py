"""Validators over many kinds of values; every message names the argument, what was expected and
what came."""

from pathlib import Path

import numpy as np
import pytest
import torch

from turboquant_nb import checks
from tests.helpers import refuses


@pytest.mark.parametrize(
    "value",
    [0, 3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.uint8)],
)
def test_whole_takes_every_integer(value):
    out = checks.whole(value, "n", 0, 3)
    assert type(out) is int and out == int(value)


@pytest.mark.parametrize(
    "value, error",
    [
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (torch.tensor(1.0), TypeError),
        (torch.tensor([1, 2]), TypeError),
        (-1, ValueError),
        (np.int64(4), ValueError),
    ],
)
def test_whole_refuses(value, error):
    "Kills a range that is open at one end, and bool as an integer."
    with refuses("^n must be an integer from 0 to 3, got ", error):
        checks.whole(value, "n", 0, 3)


@pytest.mark.parametrize(
    "low, high, text",
    [
        (None, None, "an integer,"),
        (2, None, "an integer of at least 2,"),
        (None, 2, "an integer of at most 2,"),
        (-1, 2, "an integer from -1 to 2,"),
    ],
)
def test_the_range_is_said(low, high, text):
    with refuses(text, TypeError):
        checks.whole(None, "n", low, high)


@pytest.mark.parametrize(
    "value, more, error",
    [
        (0, dict(above=0), ValueError),
        (1.5, dict(above=0, high=1), ValueError),
        (-1e-9, dict(low=0), ValueError),
        (float("nan"), {}, ValueError),
        (float("inf"), dict(low=0), ValueError),
        ("1", {}, TypeError),
        (True, {}, TypeError),
    ],
)
def test_number_refuses(value, more, error):
    with refuses("^x must be a finite number.*, got ", error):
        checks.number(value, "x", **more)


def test_number_takes():
    assert (
        checks.number(1, "x", above=0, high=1) == 1.0
        and checks.number(np.float32(0.5), "x") == 0.5
        and checks.number(0, "x", 0) == 0.0
    )
    assert type(checks.number(torch.tensor(2.0), "x")) is float


def test_finite():
    """The sum overflows although every value is finite; kills a check of the sum alone, and one
    of the first value alone."""
    for x in (
        torch.full((4,), 3e38),
        torch.full((4000,), 65504.0, dtype=torch.float16),
        torch.zeros(0),
        torch.full((3,), 1e300, dtype=torch.float64),
    ):
        assert checks.finite(x, "x") is x
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for bad, text in ((torch.nan, "1 NaN and 0 Inf"), (-torch.inf, "0 NaN and 1 Inf")):
            x = torch.ones(6, dtype=kind)
            x[4] = bad
            with refuses(f"^x must be finite, got {text} of 6 values"):
                checks.finite(x.view(2, 3), "x")
    with refuses("0 NaN and 2 Inf"):  # they cancel to NaN in the sum
        checks.finite(torch.tensor([torch.inf, -torch.inf]), "x")


@pytest.mark.parametrize(
    "size, want, fits",
    [
        ((3, 4), (3, 4), True),
        ((3, 4), ("n", 4), True),
        ((3, 4), (..., 4), True),
        ((4,), (..., 4), True),
        ((2, 3, 4), (..., "n", 4), True),
        ((2, 3, 4), (..., "B", 3, "d"), True),
        ((), (), True),
        ((3, 4), ("n",), False),
        ((3, 4), ("n", "m", 4), False),
        ((), (..., 4), False),
        ((4,), (..., "n", 4), False),
        ((2, 3, 4), (..., 2, 4), False),
        ((0, 4), (0, 3), False),
    ],
)
def test_shape(size, want, fits):
    x = torch.zeros(size)
    if fits:
        assert checks.shape(x, "x", *want) is x
        return
    said = ", ".join("..." if n is ... else str(n) for n in want)
    with pytest.raises(ValueError) as info:
        checks.shape(x, "x", *want)
    assert str(info.value) == f"x must have shape [{said}], got {list(size)}"


def test_kinds_of_tensors():
    kinds = {
        torch.float16: "floats",
        torch.bfloat16: "floats",
        torch.float64: "floats",
        torch.uint8: "integers",
        torch.int64: "integers",
        torch.bool: None,
        torch.complex64: None,
    }
    for kind, right in kinds.items():
        x = torch.zeros(2, dtype=kind)
        for name in ("floats", "integers"):
            if name == right:
                assert getattr(checks, name)(x, "x") is x
                continue
            with refuses(f"^x must be a .*, got {kind}$", TypeError):
                getattr(checks, name)(x, "x")
        assert checks.dtype(x, "x", kind) is x
        with refuses(f"^x must be a int32 tensor, got {kind}$", TypeError):
            checks.dtype(x, "x", torch.int32)
    for check in (
        checks.floats,
        checks.integers,
        lambda x, name: checks.dtype(x, name, torch.bool),
    ):
        with refuses("^x must be a .*, got list$", TypeError):
            check([1.0], "x")


def test_within():
    codes = torch.tensor([[0, 7]], dtype=torch.uint8)
    assert (
        checks.within(codes, "codes", 0, 7) is codes
        and checks.within(codes[:0], "codes", 1, 2).numel() == 0
    )
    for low, high in ((1, 7), (0, 6)):
        with refuses(rf"codes must lie in {low}\.\.{high}, got 0\.\.7"):
            checks.within(codes, "codes", low, high)


def test_names_and_classes():
    assert checks.one_of("a", "kind", {"a": 1, "b": 2}) == "a"
    for bad in ("c", None, ["a"], 1):
        with refuses("^kind must be one of 'a', 'b', got "):
            checks.one_of(bad, "kind", ("a", "b"))
    assert checks.instance(True, "x", int) is True
    with refuses("^x must be a dict, got list$", TypeError):
        checks.instance([], "x", dict)
    with refuses("^x must be an Exception, got int$", TypeError):
        checks.instance(1, "x", Exception)


def test_device():
    x = torch.zeros(2)
    assert checks.device(x, "x", torch.device("cpu"), "the rotation") is x
    with refuses("^x must be on meta like the rotation, got cpu$"):
        checks.device(x, "x", torch.device("meta"), "the rotation")


def test_an_extra_is_installed_from_the_repository():
    "No index has the package yet; one function says so, for all that need an extra."
    address = "git+https://github.com/turboquant-nb/turboquant-nb"
    want = f'X is not installed: pip install "turboquant-nb[x] @ {address}"'
    assert checks.missing("X is not installed", "x") == want
    package = Path(checks.__file__).parent
    typed = [p.name for p in package.rglob("*.py") if "install turboquant-nb" in p.read_text()]
    typed += [p.name for p in package.rglob("*.py") if "turboquant-nb[" in p.read_text()]
    assert typed == ["checks.py"]
