"""Bit planes: exact for every code at every position, and byte for byte what an independent
reading of the book's layout gives."""

import numpy as np
import pytest
import torch

from turboquant_nb.cache.packing import Layout, pack, unpack, write
from turboquant_nb.testing import same
from tests.helpers import ONE_THREAD, refuses

pytestmark = ONE_THREAD
TILES = (4, 8, 12, 64, 256)


def model_planes(codes, bits, along, tile):
    """The layout from the book's prose, in numpy and bit by bit: byte (t, j) serves tokens t,
    t+R, t+2R, t+3R of a tile, quarter i at bit 0, 4, 2, 6. Two most significant bits: the base
    plane. Every other bit: a plane of half as many channels, channel j below channel j +
    ceil(d/2)."""
    tokens, d = codes.shape
    tiles, rows, half = -(-tokens // tile), tile // 4, -(-d // 2)
    base_first = bits >= 2
    singles = bits - 2 if base_first else bits
    planes = ([np.zeros((tiles, rows, d), np.uint8)] if base_first else []) + [
        np.zeros((tiles, rows, half), np.uint8) for _ in range(singles)
    ]
    for token in range(tokens):
        at, rest = divmod(token, tile)
        slot = {0: 0, 1: 4, 2: 2, 3: 6}[rest // rows]
        t = rest % rows
        for j in range(d):
            bit = [
                int(codes[token, j]) >> (bits - 1 - i) & 1 for i in range(bits)
            ]  # most significant first
            if base_first:
                planes[0][at, t, j] |= (2 * bit[0] + bit[1]) << slot
                bit = bit[2:]
            for plane, one in zip(planes[base_first:], bit):
                plane[at, t, j % half] |= one << (slot + j // half)
    return [p if along == "channel" else p.transpose(0, 2, 1) for p in planes]


def random_codes(gen, bits, *shape):
    return torch.randint(0, 2**bits, shape, generator=gen, dtype=torch.uint8)


@pytest.mark.parametrize("along", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bytes_equal_an_independent_model(bits, along, gen):
    for trial in range(12):
        d, tile = 1 + int(torch.randint(0, 11, (), generator=gen)), TILES[trial % 4]
        tokens = 1 + int(torch.randint(0, 3 * tile, (), generator=gen))
        codes = random_codes(gen, bits, tokens, d)
        planes = pack(codes, Layout(bits, d, along, tile))
        want = model_planes(codes.numpy(), bits, along, tile)
        assert len(planes) == len(want)
        for got, ref in zip(planes, want):
            same(got, torch.from_numpy(np.ascontiguousarray(ref)))


@pytest.mark.parametrize("along", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_write_against_the_model(bits, along, gen):
    """Overwriting at random offsets: always the bytes of the model for the codes as they are
    now; neighbours untouched."""
    for tile in (4, 8, 16):
        d, room = 5, 4 * tile
        layout = Layout(bits, d, along, tile)
        now = random_codes(gen, bits, 2, room, d)
        planes = [p.clone() for p in pack(now, layout)]
        for _ in range(12):
            n = int(torch.randint(0, room + 1, (), generator=gen))
            first = int(torch.randint(0, room - n + 1, (), generator=gen))
            new = random_codes(gen, bits, 2, n, d)
            now[:, first : first + n] = new
            write(planes, layout, new, first)
            for row in range(2):
                for got, ref in zip(planes, model_planes(now[row].numpy(), bits, along, tile)):
                    same(got[row], torch.from_numpy(np.ascontiguousarray(ref)))


def test_non_contiguous_and_expanded_codes(gen):
    layout = Layout(3, 6, "token", 8)
    base = random_codes(gen, 3, 6, 20)
    same(unpack(pack(base.t(), layout), layout, 20), base.t().contiguous())
    wide = random_codes(gen, 3, 1, 20, 6).expand(4, -1, -1)
    same(unpack(pack(wide, layout), layout, 20), wide.contiguous())
    strided = random_codes(gen, 3, 40, 12)[::2, ::2]
    same(unpack(pack(strided, layout), layout, 20), strided.contiguous())


def test_empty_and_zero_tokens():
    layout = Layout(3, 4)
    planes = pack(torch.zeros(2, 0, 4, dtype=torch.uint8), layout)
    assert [tuple(p.shape) for p in planes] == [(2, 0, 64, 4), (2, 0, 64, 2)]
    assert unpack(planes, layout).shape == (2, 0, 4)
    full = [p.clone() for p in pack(torch.ones(1, 256, 4, dtype=torch.uint8), layout)]
    before = [p.clone() for p in full]
    write(full, layout, torch.zeros(1, 0, 4, dtype=torch.uint8), 256)
    for a, b in zip(full, before):
        same(a, b)
    assert (
        layout.tiles(0) == 0
        and layout.tiles(1) == 1
        and layout.tiles(256) == 1
        and layout.tiles(257) == 2
    )


@pytest.mark.parametrize(
    "kwargs, name",
    [
        (dict(bits=0, d=4), "bits"),
        (dict(bits=9, d=4), "bits"),
        (dict(bits=3, d=0), "d "),
        (dict(bits=3, d=4, tile=3), "at least 4"),
        (dict(bits=3, d=4, tile=5), "multiple of 4"),
        (dict(bits=3, d=4, along="row"), "along"),
    ],
)
def test_layout_refuses(kwargs, name):
    whole = all(type(v) is int for n, v in kwargs.items() if n != "along")
    with refuses(name, ValueError if whole else TypeError):
        Layout(**kwargs)


def test_pack_and_unpack_refuse():
    layout = Layout(3, 4)
    good = torch.zeros(5, 4, dtype=torch.uint8)
    planes = pack(good, layout)
    with refuses("plane 0", TypeError):
        unpack([p.int() for p in planes], layout)
    with refuses("plane 1"):
        unpack([planes[0], planes[0]], layout)
    for tokens in (-1, 257):
        with refuses("tokens"):
            unpack(planes, layout, tokens)


@pytest.mark.parametrize(
    "bad, error, name",
    [
        (lambda c: c.long(), TypeError, "codes"),
        (lambda c: c[..., :3], ValueError, "codes"),
        (lambda c: c + 8, ValueError, "codes"),
    ],
)
def test_write_refuses_before_it_writes(bad, error, name, gen):
    """A run before, over and after whole tiles: a bad code must be found before the first byte
    changes."""
    layout = Layout(3, 4, "channel", 8)
    planes = [p.clone() for p in pack(random_codes(gen, 3, 1, 32, 4), layout)]
    before = [p.clone() for p in planes]
    with refuses(name, error):
        write(planes, layout, bad(random_codes(gen, 3, 1, 21, 4)), 5)
    for a, b in zip(planes, before):
        same(a, b)


@pytest.mark.parametrize("first, n", [(-1, 2), (30, 3), (32, 1), (0, 33)])
def test_write_refuses_positions(first, n, gen):
    layout = Layout(2, 4, "channel", 8)
    planes = [p.clone() for p in pack(random_codes(gen, 2, 1, 32, 4), layout)]
    before = [p.clone() for p in planes]
    with refuses("planes hold 32 tokens, cannot write tokens"):
        write(planes, layout, random_codes(gen, 2, 1, n, 4), first)
    for a, b in zip(planes, before):
        same(a, b)
