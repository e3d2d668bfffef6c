"Cells of a block: many layouts, slots in every order, histories of blocks; the chapter explains what is checked here widely."
import pytest
import torch

from turboquant_nb.cache.pages import CellLayout, Recent, append_slots, attend_cells, leaders, read_cells, store_recent
from turboquant_nb.quant.quantizer import Quantizer, Spec


def pool(c, blocks, heads, gen, pad=48):
    raw = torch.randint(0, 256, (blocks, heads * c.nbytes + pad), dtype=torch.uint8, generator=gen)
    return raw, raw[:, : heads * c.nbytes].unflatten(1, (heads, c.tokens, c.bytes_per_token))


@pytest.mark.parametrize("n", (16, 32, 64, 128, 256))
@pytest.mark.parametrize("kb,vb", ((1, 2), (2, 4), (3, 3), (4, 1)))
def test_any_order(n, kb, vb, gen):
    "Tokens in a random order and in calls of random sizes are read back as they were coded; no other bit of the memory changes."
    key, value = Quantizer(Spec(kb), 32), Quantizer(Spec(vb), 48)
    c = CellLayout.of(key, value, n)
    raw, cache = pool(c, 6, 2, gen)
    slots = torch.randperm(6 * n, generator=gen)[: 3 * n]
    k, v = torch.randn(3 * n, 2, 32, generator=gen), torch.randn(3 * n, 2, 48, generator=gen)
    before = raw.clone()
    done = 0
    while done < len(slots):
        size = int(torch.randint(1, n + 2, (), generator=gen))
        append_slots(cache, c, key, value, k[done : done + size], v[done : done + size], slots[done : done + size])
        done += size
    for side, q, x in (("key", key, k), ("value", value, v)):
        want, layout = q.encode(x.transpose(0, 1)), getattr(c, side)
        codes, scale = torch.zeros(2, 6 * n, q.d, dtype=torch.uint8), torch.zeros(2, 6 * n, dtype=torch.float16)
        for block in range(6):
            coded = read_cells(cache, c, torch.tensor([block]), n)[("key", "value").index(side)]
            codes[:, block * n : block * n + n], scale[:, block * n : block * n + n] = coded.codes, coded.scale
        assert torch.equal(codes[:, slots], want.codes) and torch.equal(scale[:, slots], want.scale)
        for i in range(len(layout.plane_shapes)):  # bits of tokens that nobody wrote
            now, was = (c.views(m[:, : 2 * c.nbytes].unflatten(1, cache.shape[1:]))[f"{side} {i}"] for m in (raw, before))
            rows = (lambda p: p) if layout.along == "channel" else (lambda p: p.transpose(-1, -2))
            for t in set(range(6 * n)) - set(slots.tolist()):
                block, token = divmod(t, n)
                mask = 3 << (0, 4, 2, 6)[token // (n // 4)]
                assert torch.equal(rows(now)[block, :, token % (n // 4)] & mask, rows(was)[block, :, token % (n // 4)] & mask)
    assert torch.equal(raw[:, 2 * c.nbytes :], before[:, 2 * c.nbytes :])


@pytest.mark.parametrize("blocks,heads", ((1, 1), (5, 3)))
@pytest.mark.parametrize("bits,d,n", (((3, 3), 128, 64), ((4, 4), 64, 128), ((2, 1), 80, 16)))
def test_views_are_the_memory(blocks, heads, bits, d, n):
    "Parts of all cells, written one after another with the number of their part, fill the memory."
    c = CellLayout(*bits, d, d, n)
    cache = torch.full((blocks, heads, n, c.bytes_per_token), 255, dtype=torch.uint8)
    for i, (_, part) in enumerate(c.views(cache).items()):
        raw = part.view(torch.uint8) if part.dtype != torch.uint8 else part
        assert (raw == 255).all()
        raw.fill_(i)
    assert int(cache.max()) == len(c.parts()) - 1
    assert torch.bincount(cache.flatten().long()).tolist() == [p.nbytes * blocks * heads for p in c.parts()]


def test_refused():
    c = CellLayout(3, 3, 64, 64, 64)
    good = c.empty(2, 2)
    for bad, why in ((good[:, :, :32], "must have shape"), (good.float(), "must be a uint8 tensor"), (good.transpose(0, 1)[:, :, :, :], None),
                     (torch.empty(2, 2, 64, 64, dtype=torch.uint8), "must have shape"), (torch.empty(4 * 6464 + 8, dtype=torch.uint8)[8:].as_strided((2, 2, 64, 52), (6656, 3328, 52, 1)), "16-byte|multiple of 16")):  # fmt: skip
        if why is None:
            c.check(bad)  # heads and blocks may lie in any order
            continue
        with pytest.raises((TypeError, ValueError), match=why):
            c.check(bad)
    with pytest.raises(ValueError, match="k and v must be given together"):
        q = Quantizer(Spec(3), 64)
        attend_cells(torch.zeros(1, 2, 64), good, c, q, q, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), torch.tensor([0, 1]), k=torch.zeros(1, 2, 64))


def test_leaders_cover_each_byte_row_once(gen):
    "Runs of random lengths from random places: one leader for each byte row that a call touches."
    for _ in range(200):
        n = int(2 ** torch.randint(4, 9, (), generator=gen))
        slots, free = [], torch.randperm(50, generator=gen).tolist()
        for _ in range(int(torch.randint(1, 5, (), generator=gen))):
            first, count = int(torch.randint(0, 2 * n, (), generator=gen)), int(torch.randint(1, 4 * n, (), generator=gen))
            blocks = [free.pop() for _ in range(-(-(first + count) // n))]
            slots += [blocks[p // n] * n + p % n for p in range(first, first + count)] + [-1] * int(torch.randint(0, 3, (), generator=gen))
        slots = torch.tensor(slots)
        row = slots // n * (n // 4) + slots % (n // 4)
        led = row[leaders(slots, n)].sort().values
        assert torch.equal(led, row[slots >= 0].unique())


def test_each_token_is_read_once(gen):
    "Whatever the window, the past and the blocks: codes for the first tokens, exact states for the rest, whose older blocks are gone."
    for tokens in (1, 4, 16, 33):
        for past in (0, 1, 15, 16, 17, 40):
            for n in (1, 4, 16):
                table = torch.randperm(64, generator=gen)[: -(-past // n) + 1].int()[None]
                recent = Recent(torch.full((64, 1, n, 5), torch.nan), table, tokens)
                t = torch.arange(max(0, past - tokens), past)
                store_recent(recent.cache, t[:, None, None].expand(-1, 1, 2).float(), -t[:, None, None].expand(-1, 1, 3).float(), table[0][t // n].long() * n + t % n)
                k, v = recent.read(0, past, 2)
                assert k.shape[1:] == (1, 2) and v.shape[1:] == (1, 3) and torch.equal(k[:, 0, 0], t.float()) and torch.equal(v[:, 0, 2], -t.float())
                assert [*range(past - len(k)), *k[:, 0, 1].int().tolist()] == list(range(past))
    with pytest.raises(ValueError, match="slots must be below 64, got 64"):
        store_recent(torch.zeros(16, 1, 4, 5), torch.zeros(1, 1, 2), torch.zeros(1, 1, 3), torch.tensor([64]))
