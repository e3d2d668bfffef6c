"""The fused encode kernel: in Triton's interpreter against the PyTorch path, and compiled ahead
of time. Skipped without Triton."""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from tests.helpers import (
    DEVICE,
    ONE_THREAD,
    SLOW,
    ahead_of_time,
    covering_pairs,
    needs_gpu,
    random_frame,
    refuses,
    seeded,
)
from turboquant_nb.cache.clock import AppendOperands
from turboquant_nb.cache.store import KVStore, append_by_host, row_tensors, tables_of
from turboquant_nb.kernels import encode
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from turboquant_nb.kernels import viterbi  # noqa: F401 (importing registers its kernels)
from turboquant_nb.quant.quantizer import Spec, decode
from turboquant_nb.quant.recipe import Recipe, preset
from turboquant_nb.testing import same

NEAR = (
    1e-5 if DEVICE == "cpu" else 2e-5
)  # rounding of a coordinate over its unit; edges nearer than this may go either way
pytestmark = ONE_THREAD


def states(b, h, n, d, dtype=torch.bfloat16, seed=0, shift=0.0):
    gen = seeded(seed)
    mean = torch.randn(b, h, 1, d, generator=gen) * shift
    return (
        (
            torch.randn(b, h, n, d, generator=gen)
            * torch.rand(b, h, n, 1, generator=gen).exp2()
            + mean
        )
        .to(dtype)
        .to(DEVICE)
    )


def near_edges(side, x, mean):
    "Entries of rotated states within rounding of an edge."
    x = x.double() - (0 if mean is None else mean.double())
    y = x @ side.q.rotation.matrix.double().mT
    u = y / (y.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30))
    book = getattr(side.q.codebook, "book", side.q.codebook)
    return ((u.unsqueeze(-1) - book.edges.double()).abs() < NEAR).any(-1)


def agree(fused, plain, chunks, ties=3e-3):
    """Same planes and scales in both stores, but for ties; `chunks` are the k and v that were
    appended."""
    for name, i in (("key", 0), ("value", 1)):
        a, b = getattr(fused, name), getattr(plain, name)
        x = torch.cat([c[i] for c in chunks], 2)[:, :, plain.offset :]
        near = near_edges(b, x, plain.center(name, plain.offset, plain.length))
        assert near.float().mean() < ties
        one, two = (
            fused.coded(name, fused.offset, fused.length),
            plain.coded(name, plain.offset, plain.length),
        )
        differ = one.codes != two.codes
        assert not (differ & ~near).any() and differ.sum() <= 2 + 1e-4 * differ.numel()
        assert one.scale.dtype == two.scale.dtype
        torch.testing.assert_close(
            one.scale,
            two.scale,
            rtol=2e-3 if differ.any() else max(2e-6, 1.01 * torch.finfo(one.scale.dtype).eps),
            atol=0,
        )
        assert a.memory.fields == b.memory.fields and set(a.tensors) == set(b.tensors)
        assert a.memory.cells.is_contiguous() and b.memory.cells.is_contiguous()
        held = b.memory.tensors | {n: t for n, t in b.tensors.items() if n != "cells"}
        for n, t in held.items():
            u = (a.memory.tensors | a.tensors)[n]
            assert u.shape == t.shape and u.dtype == t.dtype, n
            if n.startswith("plane") and not differ.any():
                assert torch.equal(u, t), n
            elif n in ("mean", "sinks", "recent"):
                assert torch.equal(u, t), n
    assert fused.length == plain.length


def plain_append(store, k, v):
    "PyTorch's append."
    append_by_host(store, k, v, ("k", "v"))


def frame_for(heads, d, freq=None):
    "A frame of keys with these frequencies of RoPE."
    return random_frame(heads, d, 0 if freq is None else 2 * len(freq), seed=2)


def both(recipe, chunks, dtype=torch.bfloat16, ties=3e-3, **kwargs):
    (b, h, _, dk), dv = chunks[0][0].shape, chunks[0][1].shape[3]
    kwargs["frame"] = frame_for(h, dk, kwargs.get("inv_freq"))
    fused, plain = (
        KVStore(recipe, b, h, dk, dv, dtype, device=DEVICE, **kwargs) for _ in range(2)
    )
    for k, v in chunks:
        encode.append(fused, k, v)
        plain_append(plain, k, v)
    agree(fused, plain, chunks, ties)
    return fused, plain


def chunks(lengths, b=1, h=2, dk=32, dv=None, dtype=torch.bfloat16, shift=0.5):
    return [
        (states(b, h, n, dk, dtype, 2 * i, shift), states(b, h, n, dv or dk, dtype, 2 * i + 1))
        for i, n in enumerate(lengths)
    ]


MEAN = "fixed"
CODES = [  # of keys and of values, head sizes, dtype, tile
    (Spec(1, center=MEAN), Spec(3), (32, 32), torch.bfloat16, 256),
    (Spec(2, "haar", center=MEAN), Spec(4, "haar"), (32, 48), torch.float16, 16),
    (Spec(3, "identity", center=MEAN), Spec(1, "identity"), (96, 64), torch.float32, 64),
    (Spec(4, scale="norm", scale_dtype="bfloat16"), Spec(2), (16, 128), torch.bfloat16, 100),
    (Spec(3, "haar", center=MEAN), Spec(2, "haar"), (128, 80), torch.bfloat16, 64),
    (Spec(3, codebook="uniform"), Spec(4, residual="sign"), (112, 240), torch.bfloat16, 64),
    (Spec(4, scale="unbiased"), Spec(3, scale_dtype="float32"), (256, 16), torch.float32, 64),
]


@pytest.mark.parametrize("key, value, sizes, dtype, tile", CODES)
def test_codes(key, value, sizes, dtype, tile):
    "Whole and partial tiles of every kind of code, and a token."
    both(Recipe(key, value), chunks((70, 1), 1, 2, *sizes, dtype=dtype), dtype, tile=tile)


@pytest.mark.parametrize(
    "lengths, tile",
    (((1, 1, 1), 256), ((62, 5, 188, 2, 300), 256), ((256, 256), 256), ((600,), 64)),
)
def test_positions(lengths, tile):
    """One token at every class of position, runs over a quarter and over tiles, whole tiles,
    several of one program."""
    both(Recipe(Spec(center="fixed"), Spec(bits=2)), chunks(lengths), tile=tile)


def test_latents():
    """512 channels beside 64: a first chunk, its end, and steps. The mutant leaves out the last
    slice of 32 channels."""
    recipe = Recipe(Spec(center="fixed"), Spec(bits=4), sinks=2, recent=3)
    parts = chunks((20, 1, 5), h=1, dk=512, dv=64)
    haar = Recipe(Spec(rotation="haar"), Spec(bits=4), 2, 3)
    short = chunks((20, 1), h=1, dk=400, dv=64, dtype=torch.float32)
    both(haar, short, torch.float32, tile=64)
    fused, _ = both(recipe, parts, tile=64)
    more = dict(device=DEVICE, tile=64, frame=frame_for(1, 512))
    wrong = KVStore(recipe, 1, 1, 512, 64, torch.bfloat16, **more)
    cut = [(k * (torch.arange(512, device=k.device) < 480), v) for k, v in parts]
    for k, v in cut:
        encode.append(wrong, k, v)
    with pytest.raises(AssertionError):
        agree(wrong, fused, parts)


def pre_rope(d, r, base=100.0):
    "A recipe with a mean before RoPE, and frequencies of r of d channels."
    return Recipe(Spec(center="pre_rope"), Spec(bits=4)), base ** (
        -torch.arange(r // 2) / (r // 2)
    )


@pytest.mark.parametrize(
    "d, r, dtype, lengths",
    (
        (32, 32, torch.bfloat16, (150, 66)),
        (64, 32, torch.float16, (70, 1, 5)),
        (80, 80, torch.float32, (70, 1)),
        (128, 128, torch.bfloat16, (140,)),
        (256, 256, torch.bfloat16, (66, 1)),
        (256, 128, torch.float32, (20, 3)),
        (512, 512, torch.bfloat16, (20, 1)),
    ),
)
def test_pre_rope_mean(d, r, dtype, lengths):
    "First chunks of whole and of partly new tiles, short appends, and left padding."
    recipe, freq = pre_rope(d, r)
    parts = chunks(lengths, b=2, h=1, dk=d, dtype=dtype, shift=2.0)
    fused, plain = (
        KVStore(
            recipe,
            2,
            1,
            d,
            d,
            dtype,
            device=DEVICE,
            tile=64,
            inv_freq=freq,
            frame=frame_for(1, d, freq),
        )
        for _ in range(2)
    )
    for store, add in ((fused, encode.append), (plain, plain_append)):
        store.set_range(start=torch.tensor([0, 9]))
        for k, v in parts:
            add(store, k, v)
    agree(fused, plain, parts)
    assert torch.equal(fused.rope_table, plain.rope_table) and fused.key.mean.abs().max() > 0.5


def test_pre_rope_mean_of_fewer_rows_than_a_program_has():
    """One sequence, three heads: a short append has rows to spare, which must not look for a
    centre (conftest.py sees it)."""
    recipe, freq = pre_rope(64, 64)
    both(recipe, chunks((20, 1, 2), h=3, dk=64), inv_freq=freq)


def test_pre_rope_mean_with_another_rotation():
    recipe, freq = pre_rope(64, 64)
    haar = replace(recipe, key=replace(recipe.key, rotation="haar"))
    both(haar, chunks((70, 3), dk=64, shift=2.0), inv_freq=freq)


@pytest.mark.parametrize(
    "n, dtype", covering_pairs((1, 64, 100), (torch.bfloat16, torch.float16, torch.float32))
)
def test_a_prompt_has_its_codes_whoever_codes_it_and_beside_what(n, dtype):
    """Alone, and padded in a batch of four, one code, bit for bit, of PyTorch and of the
    kernel, whether the host or the device knows the padding. What both code is alike; a scale
    or a code may lie between two numbers, see `decided`."""
    recipe, freq = pre_rope(32, 32)
    prompt = [states(1, 1, n, 32, dtype, seed, 2.0) for seed in (n, n + 1)]
    kind = dict(
        dtype=dtype, device=DEVICE, tile=64, inv_freq=freq, frame=frame_for(1, 32, freq)
    )

    def coded(add, rows, pad, **more):
        row, store = rows // 2, KVStore(recipe, rows, 1, 32, **kind, **more)
        start = torch.full((rows,), pad // 2)
        start[row] = pad
        store.set_range(start=start)
        batch = [states(rows, 1, pad + n, 32, dtype, seed, 1.0) for seed in (5, 6)]
        for x, own in zip(batch, prompt):
            x[row, :, pad:] = own[0]
        add(store, *batch)
        found = [store.coded(x, pad, pad + n) for x in ("key", "value")]
        return [(x.codes[row], x.scale[row]) for x in found]

    static = lambda n: dict(static=True, max_length=n)
    each = []
    for add, fixed in ((encode.append, False), (encode.append, True), (plain_append, False)):
        alone = coded(add, 1, 0, **static(n) if fixed else {})
        beside = coded(add, 4, 37, **static(n + 37) if fixed else {})
        for one, two in zip(alone, beside):
            same(one[0], two[0])
            same(one[1], two[1])
        each.append(alone)
    for found in each[1:]:
        for (a, s), (b, t) in zip(each[0], found):
            assert (a != b).float().mean() < 1e-3
            torch.testing.assert_close(s, t, rtol=2e-3, atol=0)


def transformed(heads, d, **kwargs):
    "A recipe whose keys have a matrix of their own in each head, none of them a rotation."
    u, v = torch.linalg.qr(torch.randn(2, heads, d, d, generator=seeded(d)))[0]
    name = register_transform(HeadTransform.of(u * torch.linspace(0.3, 2, d) @ v)).name
    return Recipe(Spec(rotation=name, **kwargs), Spec(bits=2))


@pytest.mark.parametrize(
    "dtype, center",
    covering_pairs(
        (torch.bfloat16, torch.float16, torch.float32), ("none", "fixed", "pre_rope")
    ),
)
def test_head_transforms(dtype, center):
    "Whole and partly new tiles, short appends of fewer and of more rows than a program has."
    freq = {"inv_freq": pre_rope(64, 64)[1]} if center == "pre_rope" else {}
    both(
        transformed(3, 64, center=center),
        chunks((40, 1, 18, 5, 70), b=2, h=3, dk=64, dtype=dtype, shift=2.0),
        dtype,
        tile=64,
        **freq,
    )


@pytest.mark.parametrize("d", (16, 80, 256))
def test_maps_of_other_sizes(d):
    both(transformed(2, d, center="fixed", bits=4), chunks((70, 2), dk=d), ties=2e-2)


def test_maps_of_a_static_store():
    "Appends that a device places, as in a captured step."
    recipe, parts = transformed(2, 32, center="fixed"), chunks((70, 1, 1), b=2)
    fused, plain = both(recipe, parts, max_length=100, static=True)
    assert int(fused.clock.position) == int(plain.clock.position) == 72
    with refuses("a transform of 2 heads cannot serve 3"):
        KVStore(recipe, 1, 3, 32, frame=frame_for(3, 32))


def codes_apart(fused, plain):
    "Share of codes of two stores that differ."
    held = [
        torch.cat([s.coded(x, s.offset, s.length).codes for x in ("key", "value")])
        for s in (fused, plain)
    ]
    return float((held[0] != held[1]).float().mean())


def test_pre_rope_mean_after_evict_crop_and_growth():
    """Positions go on where tiles were freed, and the table of cosines and sines grows on the
    way."""
    recipe, freq = pre_rope(32, 32)
    parts = chunks((100, 60, 1, 1), h=1, shift=2.0)
    fused, plain = both(recipe, parts, tile=16, inv_freq=freq)
    for store in (fused, plain):
        store.evict(70)
        store.crop(3)
    assert plain.offset == 64
    for k, v in chunks((1, 40, 2), h=1, shift=2.0):
        encode.append(fused, k, v)
        plain.append(k, v)
    assert codes_apart(fused, plain) < 1e-3
    right = plain.read()[0].float()[:, :, -20:-16]
    assert (fused.read()[0].float()[:, :, -20:-16] - right).abs().max() < 0.05
    fused.start.add_(20)  # the mutant: rotated by twenty positions too few
    assert (fused.read()[0].float()[:, :, -20:-16] - right).abs().max() > 0.5


def captured(store, k, v):
    "What a captured step runs."
    encode._append_at(*AppendOperands.of(store, k, v))


@pytest.mark.parametrize(
    "lengths, center, rotation",
    (
        ((20, 1, 50), "pre_rope", "hadamard"),
        ((1, 1, 64, 1), "none", "hadamard"),
        ((3, 60, 66), "fixed", "haar"),
    ),
)
def test_where_the_device_counts(lengths, center, rotation):
    "Static stores, eager and as a captured step does it, hold what a plain store holds."
    recipe = Recipe(Spec(3, rotation, center=center), Spec(4, rotation))
    freq = pre_rope(32, 32)[1]
    parts = chunks(lengths, b=2, shift=1.0)
    make = lambda static: KVStore(
        recipe,
        2,
        2,
        32,
        dtype=torch.bfloat16,
        device=DEVICE,
        tile=64,
        max_length=200,
        static=static,
        inv_freq=freq,
        frame=frame_for(2, 32, freq),
    )
    plain = make(False)
    plain.set_range(start=torch.tensor([0, 3]))
    for k, v in parts:
        plain_append(plain, k, v)
    torch._dynamo.reset()
    compiled = (
        [torch.compile(encode.append, fullgraph=True, backend="eager")]
        if center == "pre_rope"
        else []
    )
    for add in (encode.append, captured, *compiled):
        store = make(True)
        places = [
            t.data_ptr() for t in (*row_tensors(store), store.clock.position, *tables_of(store))
        ]
        store.set_range(start=torch.tensor([0, 3]))
        for k, v in parts:
            add(store, k, v)
        assert store.sync() == int(store.clock.position) == plain.length
        assert places == [
            t.data_ptr() for t in (*row_tensors(store), store.clock.position, *tables_of(store))
        ]
        agree(store, plain, parts)


@pytest.mark.parametrize("center", ("fixed", "pre_rope"))
def test_a_step_makes_room_and_stays_short(center, monkeypatch):
    """A token that begins a tile, and needs cosines that are not there: tiles are added, and it
    is taken as every other. Where memory runs out nothing has changed."""
    recipe, freq = Recipe(Spec(center=center), Spec(bits=4)), pre_rope(32, 32)[1]
    more = dict(dtype=torch.bfloat16, device=DEVICE, tile=64, inv_freq=freq)
    more["frame"] = frame_for(2, 32, freq)
    store, plain = (KVStore(recipe, 1, 2, 32, **more) for _ in range(2))
    first, *steps = parts = chunks((64, 1, 2), b=1, shift=1.0)
    encode.append(store, *first)
    encode.append(plain, *first)
    assert store.capacity == 64
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise torch.OutOfMemoryError("full")

        patch.setattr(encode, "_make_room", full)
        with pytest.raises(torch.OutOfMemoryError):
            encode.append(store, *steps[0])
    assert store.length == store.capacity == 64
    with monkeypatch.context() as patch:
        patch.setattr(encode, "append_by_host", lambda *args: pytest.fail("the long way"))
        for k, v in steps:
            encode.append(store, k, v)
    for k, v in steps:
        plain_append(plain, k, v)
    assert store.capacity > 64
    agree(store, plain, parts)


@needs_gpu
@pytest.mark.parametrize("center", ("fixed", "pre_rope"))
def test_cuda_graph(center):
    "A replayed graph appends where the device counts, short and long."
    recipe, freq = Recipe(Spec(center=center), Spec(bits=4)), pre_rope(128, 128)[1]
    make = lambda static: KVStore(
        recipe,
        2,
        2,
        128,
        dtype=torch.bfloat16,
        device=DEVICE,
        max_length=2000,
        static=static,
        inv_freq=freq,
        frame=frame_for(2, 128, freq),
    )
    store, plain = make(True), make(False)
    first, *parts = chunks((100, 1, 1, 1, 70, 70, 70, 300, 300), b=2, dk=128, shift=1.0)
    encode.append(store, *first)
    for n in (1, 70, 300):  # a captured step can compile nothing
        k, v = next(p for p in parts if p[0].shape[2] == n)
        encode.append(store, k, v)
        captured(store, k, v)
        store.crop(2 * n)
        here, graph = (k.clone(), v.clone()), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            encode.append(store, *here)
        for part in (p for p in parts if p[0].shape[2] == n):
            for x, y in zip(here, part):
                x.copy_(y)
            graph.replay()
        assert store.sync() == int(store.clock.position)
    for k, v in (first, *parts):
        plain_append(plain, k, v)
    agree(store, plain, [first, *parts])


def test_a_captured_step_that_does_not_fit():
    "No code is written, the last token becomes NaN, and `sync` says so once."
    freq = pre_rope(32, 32)[1]
    store = KVStore(
        Recipe(Spec(center="pre_rope"), Spec()),
        1,
        2,
        32,
        dtype=torch.bfloat16,
        device=DEVICE,
        max_length=104,
        static=True,
        inv_freq=freq,
        frame=frame_for(2, 32, freq),
    )
    x = states(1, 2, 100, 32)
    encode.append(store, x, x)
    captured(store, x[:, :, :3], x[:, :, :3])
    held = [t for part in store.parts for t in (*part.memory.planes, part.exact.sinks)]
    before = [t.clone() for t in held]
    for n in (3, 70):
        captured(store, x[:, :, :n], x[:, :, :n])
    assert len(held) > 2 and all(map(torch.equal, held, before))
    assert (
        int(store.clock.position) == 103
        and store.key.memory.numbers("scale", 102, 103).isnan().all()
    )
    with refuses("more tokens than max_length"):
        store.sync()
    assert store.sync() == 103
    store.crop(2)
    captured(store, x[:, :, :3], x[:, :, :3])
    assert store.sync() == 104 and not store.read()[0].isnan().any()


CHAIN = "trellis"
WINDOWS = [  # of keys and values: bits, name; head size, centre of keys, scale, tokens, static
    ((2, CHAIN), (2, CHAIN), 32, "pre_rope", "mse", 1, False),
    ((3, "sphere"), (2, CHAIN), 64, "fixed", "mse", 1, True),
    ((3, CHAIN), (4, "sphere"), 16, "none", "unbiased", 2, False),
    ((1, CHAIN), (1, CHAIN), 80, "none", "norm", 1, False),
    ((3, CHAIN), (3, CHAIN), 16, "none", "mse", 2, True),
]


@pytest.mark.parametrize("key, value, d, center, scale, n, static", WINDOWS)
def test_codes_by_windows(key, value, d, center, scale, n, static):
    """Short appends in three launches, repeated ones too: what PyTorch codes, but for vectors
    with two strings of symbols at one distance; exact copies bit for bit."""
    freq = 1e4 ** (-torch.arange(0, d, 2) / d) if center == "pre_rope" else None
    spec = lambda side, centre: Spec(side[0], codebook=side[1], center=centre, scale=scale)
    recipe = Recipe(spec(key, center), spec(value, "none"), sinks=1, recent=4)
    room = dict(max_length=256, static=True) if static else {}
    kind = dict(device=DEVICE, tile=64, inv_freq=freq, frame=frame_for(1, d, freq))
    fused, plain = (KVStore(recipe, 2, 1, d, **kind, **more) for more in (room, {}))
    first, *parts = chunks((63, n, n), b=2, h=1, dk=d, dtype=torch.float32)
    for i, (k, v) in enumerate((first, *parts)):
        (captured if static and i else encode.append)(fused, k, v)
        plain_append(plain, k, v)
    x = [torch.cat(side, 2) for side in zip(first, *parts)]
    assert fused.sync() == plain.length == fused.length
    for name, states_of in zip(("key", "value"), x):
        a, b = (getattr(store, name) for store in (fused, plain))
        one, two = (store.coded(name, 0, plain.length) for store in (fused, plain))
        differ = (one.codes != two.codes).any(-1)
        assert float(differ.float().mean()) < (0.05 if DEVICE == "cuda" else 0.01)
        mean = plain.center(name, 0, plain.length)
        error = [
            (states_of - decode(b.q, c, mean)).square().sum(-1).double() for c in (one, two)
        ]
        assert float((error[0] / error[1] - 1).abs().max()) < 2e-3
        torch.testing.assert_close(one.scale[~differ], two.scale[~differ], rtol=2e-3, atol=0)
        for t in ("sinks", "recent"):
            assert torch.equal(a.tensors[t], b.tensors[t])


def test_states_that_codes_by_windows_cannot_hold():
    "Flags go up as with tables; zeros have scale zero."
    side = Spec(2, codebook=CHAIN)
    make = lambda: KVStore(
        Recipe(side, side), 1, 1, 16, device=DEVICE, tile=64, max_length=20, static=True
    )
    for bad in (float("nan"), float("inf"), 1e30):
        store = make()
        encode.append(store, *torch.randn(2, 1, 1, 9, 16, device=DEVICE))
        x = torch.zeros(1, 1, 1, 16, device=DEVICE)
        encode.append(store, x, x)
        assert store.sync() == 10 and not store.coded("key", 9, 10).scale.any()
        encode.append(store, x, x.clone().fill_(bad))
        with refuses("v"):
            store.sync()


def test_strides():
    "Transposed, sliced and reversed views are read in place."
    a = states(2, 70, 3, 64)
    k, v = a.transpose(1, 2)[..., ::2], torch.cat([a, a], -1)[..., 7:39].transpose(1, 2)
    assert not k.is_contiguous() and k.stride(-1) == 2
    both(preset("k3v3"), [(k, v)])
    wide = states(1, 2, 8, 32).expand(3, 2, 8, 32)
    both(preset("k3v3"), [(wide, wide)])


def test_evict_crop():
    "Writes after a crop over codes of before."
    fused, plain = both(Recipe(Spec(bits=3), Spec(bits=4)), chunks((150, 100, 5)), tile=64)
    for store in (fused, plain):
        store.crop(30)
        store.evict(100)
    for k, v in chunks((1, 50), shift=0):
        encode.append(fused, k, v)
        plain.append(k, v)
    assert codes_apart(fused, plain) < 1e-4


def test_zero_vectors_and_outliers():
    x = states(1, 2, 70, 64)
    x[:, :, 3] = 0  # one token, all of its coordinates on the middle edge
    x[:, :, 5, 7] = 3000
    x[:, :, 6] = 0
    x[:, :, 6, 2] = 1
    both(preset("k3v3"), [(x, x)], ties=0.05)


BAD = (
    (float("nan"), "finite"),
    (float("inf"), "finite"),
    (1e5, "needs a scale"),
    (3e38, "overflows"),
)


@pytest.mark.parametrize("n,wait", ((8, True), (70, None)))
def test_refused_states_leave_the_store(n, wait):
    x = states(1, 2, n, 32, torch.float32)
    store = KVStore(preset("k3v3"), 1, 2, 32, device=DEVICE)
    encode.append(store, x, x)
    before = [t.clone() for t in store.read()]
    for i, (bad, said) in enumerate(BAD):
        y = x.clone()
        y[0, 1, 3] = bad
        with refuses(said):
            encode.append(store, *((x, y) if i % 2 else (y, x)), wait=wait)
        assert store.length == n and all(
            torch.equal(a, b) for a, b in zip(before, store.read())
        )


@pytest.mark.parametrize(
    "n, wait, side, bad",
    (
        (8, None, 0, torch.inf),
        (8, False, 1, torch.nan),
        (70, False, 0, 1e5),
        (300, False, 1, 3e38),
    ),
)
def test_states_taken_without_waiting(n, wait, side, bad):
    """A short append, and a long one that may not wait, takes what it is given; attention to it
    is NaN, and `sync` raises once. What is right is coded as ever."""
    x = states(1, 2, n, 32, torch.float32)
    store, waits = (KVStore(preset("k3v3"), 1, 2, 32, device=DEVICE) for _ in range(2))
    for s in (store, waits):
        encode.append(s, x[:, :, :8], x[:, :, :8])
    encode.append(waits, x, x, wait=True)
    y = x.clone()
    y[0, 1, 3] = bad
    encode.append(store, *((y, x) if side == 0 else (x, y)), wait=wait)
    scale = store.parts[side].memory.numbers("scale", 0, n + 8)
    assert store.length == n + 8 and scale.isnan().nonzero().tolist() == [[0, 1, 11]]
    right = waits.parts[side].memory.numbers("scale", 0, n + 8)
    assert torch.equal(scale[~scale.isnan()], right[~scale.isnan()])
    with refuses(("keys", "values")[side] + " that were"):
        store.sync()
    assert store.sync() == n + 8


def test_a_first_chunk_is_looked_at():
    "Nothing is taken before its values are known. With wait=False whoever asked for it looks."
    x, store = (
        states(1, 2, 70, 32, torch.float32),
        KVStore(preset("k3v3"), 1, 2, 32, device=DEVICE),
    )
    y = x.clone()
    y[0, 1, 3] = float("nan")
    with refuses("k must be finite"):
        encode.append(store, y, x)
    assert store.length == 0
    encode.append(store, y, x, wait=False)
    with refuses("keys that were not finite"):
        store.sync()


def test_flags_without_checks():
    "The low-level call does not look at values; it says afterwards what was wrong, and where."
    store = KVStore(Recipe(Spec(), Spec(), 0, 0), 1, 2, 32, device=DEVICE, max_length=256)
    x = states(1, 2, 8, 32, torch.float32)
    call = lambda k, v: encode.encode_append(store, k, v, 0).tolist()
    y, z = x.clone(), x.clone()
    y[0, 0, 0, 0], z[0, 0, 0, 0] = float("nan"), 3e6
    assert call(x, x) == [0, 0, 0, 0]
    assert call(y, x) == [1, 1, 0, 0]
    assert call(x, z) == [0, 0, 0, 1]


def guarded(count):
    "So many flags that are down, in the middle of memory that nobody may write to."
    memory = torch.full((512 + count,), 7, dtype=torch.int32, device=DEVICE)
    return memory, memory[256 : 256 + count].zero_()


@pytest.mark.parametrize("way", ("whole tiles", "parts of tiles", "short"))
def test_flags_go_up_and_nothing_beside_them(way):
    "Every row is bad: each raises the two flags of its side, and writes nowhere else."
    store = KVStore(Recipe(Spec(), Spec(), 0, 0), 1, 2, 32, device=DEVICE, max_length=512)
    memory, flags = guarded(6)
    n = {"whole tiles": 256, "parts of tiles": 200, "short": 16}[way]
    good, bad = states(1, 2, n, 32, torch.float32), torch.full((1, 2, n, 32), torch.nan)
    if way == "short":
        encode.append(store, good, good)
        store.flags = flags
        encode.append(store, bad.to(DEVICE), bad.to(DEVICE))
    else:
        first = 0 if n == 256 else 100
        encode.encode_append(store, bad.to(DEVICE), bad.to(DEVICE), first, flags=flags[:4])
    assert flags.tolist() == [1, 1, 1, 1, 0, 0]
    assert (memory[:256] == 7).all() and (memory[262:] == 7).all()


def test_refusals():
    for recipe, args, why in (
        (preset("k3v3"), (528,), "up to 512"),
        (Recipe(value=Spec(bits=(3,) * 64)), (64,), "values: bits must be one integer"),
        (preset("k3v3"), (64, None, torch.float64), "dtype"),
        (preset("k3v3"), (64, None, torch.bfloat16, DEVICE, 70000), "65535"),
    ):
        reason = encode.refuses(recipe, *args)
        assert why in reason
    assert not encode.refuses("k3v3", 64, device=DEVICE)


def test_bad_arguments():
    "What chapter 18 does not show."
    make = lambda recipe, **more: KVStore(
        recipe, 1, 2, 32, device=DEVICE, dtype=torch.bfloat16, **more
    )
    store, x = make("k3v3", max_length=256), states(1, 2, 4, 32)
    with refuses("equally many tokens, got 4 and 3"):
        encode.encode_append(store, x, x[:, :, :3], 0)
    with refuses("tokens must lie in .0, 256., got -1"):
        encode.encode_append(store, x, x, -1)
    recipe, freq = pre_rope(32, 32)
    more = dict(max_length=512, inv_freq=freq, frame=frame_for(2, 32, freq))
    odd = make(replace(recipe, sinks=0, recent=0), **more)
    odd.cos_sin.table = odd.cos_sin.table[:256]
    with refuses("for 304 positions; got 256"):
        encode.encode_append(odd, x, x, 300)
    with refuses("cannot serve"):
        encode.append(make(Recipe(residual="prod")), x, x)


# (what is compiled, most registers a thread, most bytes of spills a thread, most kB of shared
# memory)
LIMITS = [  # (others, to the register: tests/golden/kernels.json)
    ({"capability": 80}, 168, 320, 64),
    ({"capability": 80, "d": 256}, 255, 256, 99),
    ({"capability": 80, "r": 128}, 255, 64, 99),
    ({"capability": 80, "n": 1}, 168, 0, 48),
    ({"capability": 90, "n": 1, "d": 256}, 168, 64, 99),
    ({"capability": 90, "n": 1, "d": 512, "dv": 64, "bits": [3, 4]}, 255, 0, 48),
    ({"capability": 90, "d": 512, "dv": 64, "bits": [3, 4], "whole": False}, 255, 0, 48),
    ({"capability": 90, "d": 512, "r": 512, "whole": False}, 255, 0, 48),
    ({"capability": 80, "d": 512, "r": 512, "parts": 3, "n": 1}, 255, 64, 99),
    ({"capability": 90, "n": 1, "r": 128}, 168, 0, 48),
    ({"capability": 90, "n": 1, "bits": [2, 2], "step": 1}, 168, 0, 48),
    ({"capability": 90, "r": 128, "transform": True}, 168, 0, 99),
    ({"capability": 90, "n": 1, "bits": [3, 3], "step": 2, "static": True}, 168, 0, 8),
]
LIMITS = LIMITS if SLOW else LIMITS[::3]


class Noted:
    "A kernel that is compiled and launched in thought: what it is given."

    def __init__(self):
        self.given = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.given.append(args) or self


def test_addresses_are_those_of_the_tensors(monkeypatch):
    """What a compiled kernel is given is what Triton was given the first time, tensors as
    addresses."""
    store = KVStore("k4v3", 2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    encode.append(store, *states(2, 2, 10, 64).chunk(2, 2))
    x, noted, launcher = states(2, 2, 1, 64), Noted(), encode._row_launcher
    monkeypatch.setattr(launcher, "kernel", noted)
    encode.shared_plan.cache_clear()
    store.changed()
    for _ in range(2):
        encode.append(store, x, x)
        store.length -= 1
    encode.shared_plan.cache_clear()  # it keeps what was compiled
    first, again = (dict(zip(launcher.places, args)) for args in noted.given)
    for name, a in first.items():
        assert again[name] == (a.data_ptr() if isinstance(a, torch.Tensor) else a), name
    for side, one in (("K", store.key), ("V", store.value)):
        for name, tensor in (("CELLS", "cells"), ("RING", "recent")):
            assert first[side + name] is one.tensors[tensor], name
        assert first[side + "SCALES"] is one.memory.scales


@pytest.fixture(scope="module")
def compiled():
    "What each variant uses, from one process that compiles."
    return ahead_of_time(*(case for case, *_ in LIMITS), of="encode", by="kernels.aot")


@pytest.mark.parametrize(
    "i",
    range(len(LIMITS)),
    ids=[" ".join(f"{k}={v}" for k, v in case.items()) for case, *_ in LIMITS],
)
def test_compiled_ahead_of_time(compiled, i):
    case, registers, stack, shared = LIMITS[i]
    used = compiled[i]
    assert case.items() <= used.items()
    assert (
        used["registers"] <= registers
        and used["stack"] <= stack
        and used["shared"] <= shared * 1024
    ), used


def test_a_short_append_reads_before_it_writes(compiled):
    """What a program waits for is memory, so it asks for all at once: a read after a write is
    found once, where the other side's part of the kernel begins. The mutants: long appends, of
    which some read in between."""
    short = [x for x in compiled if x.get("n", 1000) <= 64 and x.get("step", 0) == 0]
    assert short and all(x["turns"] == 1 for x in short), short
    assert any(x["turns"] > 1 for x in compiled), compiled


@triton.jit
def _product_kernel(X, W0, W1, W2, OUT, XP: tl.constexpr, WP: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros((16, 16), tl.float32)
    tl.store(
        OUT + i,
        encode._add_product(
            acc, tl.load(X + i), tl.load(W0 + i), tl.load(W1 + i), tl.load(W2 + i), XP, WP, WIDE
        ),
    )


def test_a_product_in_parts_has_all_its_terms():
    """x (w0 + w1 + w2) with x in three parts: dropping a product of the first two parts of x is
    seen, since the parts of w are alike in size."""
    g = seeded(0)
    w = [y.bfloat16() for y in torch.randn(3, 16, 16, generator=g).to(DEVICE)]
    whole = torch.randint(32, 64, (3, 16, 16), generator=g).double().to(DEVICE)
    a = [
        part * 2.0**-power for part, power in zip(whole, (5, 14, 22))
    ]  # rounding and cutting x to 16 bits give the first, of the rest the second
    x, (w0, w1, w2) = sum(a).float(), [y.double() for y in w]
    for XP, WP, want in (
        (1, 1, a[0] @ w0),
        (3, 1, (a[0] + a[1] + a[2]) @ w0),
        (3, 3, a[0] @ (w0 + w1 + w2) + a[1] @ (w0 + w1) + a[2] @ w0),
    ):
        out = torch.full((16, 16), torch.nan, device=DEVICE)
        _product_kernel[(1,)](x, *w, out, XP, WP, DEVICE == "cpu")
        assert (out - want).abs().max() < 1e-3


@pytest.mark.parametrize("scale", ("norm", "mse", "unbiased"))
def test_a_vector_of_zeros_has_scale_zero_in_the_kernel(scale):
    "`power / dot` is 0 / 0 there; the PyTorch path gives 0."
    recipe = Recipe(Spec(3, scale=scale), Spec(2, scale=scale), sinks=0, recent=0)
    store = KVStore(recipe, 1, 1, 32, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(1, 1, 5, 32, generator=seeded(0)).bfloat16().to(DEVICE)
    x[:, :, 2] = 0
    encode.append(store, x, x)
    store.sync()
    for name in ("key", "value"):
        scales = store.coded(name, 0, 5).scale.flatten()
        assert scales[2] == 0 and scales.isfinite().all() and (scales[[0, 1, 3, 4]] > 0).all()
