"""Stores as streams: the same bits again by every way to write and to read, streams that were
cut, changed or are not yet whole, and sizes that are known before."""

import io
import json
import os
import random
import threading

import pytest
import torch

from tests.helpers import records_of, reseal
from tests.hf.test_archive import Allocations
from turboquant_nb.cache import codec, disk
from turboquant_nb.cache.codec import KVStore, Reader, Writer
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.testing import same

pytestmark = pytest.mark.usefixtures("one_thread")
FREQ = 0.1 ** torch.arange(8.0)
RECIPES = {
    "k3v3": Recipe(),
    "k4v1": Recipe(Spec(4), Spec(1), 0, 0),
    "mean": Recipe(Spec(3, center="prompt_mean"), Spec(2, center="prompt_mean"), 2, 5),
    "pre-RoPE": Recipe(Spec(2, center="pre_rope"), Spec(3, scale_dtype="float32")),
    "fraction": Recipe(Spec(2.5), Spec(3.5, scale="norm"), 1, 3),
    "QJL": Recipe(residual="prod"),
    "trellis": Recipe(Spec(2, codebook="trellis"), Spec(3, codebook="trellis")),
    "decay": Recipe(Spec(4), Spec(3), 2, 4, decay=20),
}


def filled(recipe="k3v3", n=45, d=16, dv=16, heads=2, tile=8, dtype=torch.float32, **more):
    g = torch.Generator().manual_seed(n)
    recipe = RECIPES.get(recipe, recipe)
    if recipe.key.center == "pre_rope":
        more["inv_freq"] = FREQ
    store = KVStore(recipe, 2, heads, d, dv, tile=tile, dtype=dtype, **more)
    store.append(*(torch.randn(2, heads, n, x, generator=g).to(dtype) for x in (d, dv)))
    return store


def written(stores, **how):
    file = io.BytesIO()
    writer = Writer(file, {}, **{"entropy": False} | how)
    for store in stores:
        writer.layer(*state_of(store))
    writer.close()
    return file.getvalue()


def reader_of(data):
    return Reader(io.BytesIO(data), size=len(data))


def equal(a, b):
    (t, h), (u, g) = state_of(a), state_of(b)
    assert h == g and t.keys() == u.keys()
    for name in t:
        same(u[name].contiguous(), t[name].contiguous(), allow_empty=True)


@pytest.mark.parametrize("coarse", (False, True))
@pytest.mark.parametrize("entropy", (False, True))
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_written_comes_back(name, entropy, coarse):
    if entropy:
        pytest.importorskip("constriction")
    for block, dtype, n in (
        (None, torch.float32, 45),
        (1, torch.bfloat16, 8),
        (2, torch.float16, 61),
    ):
        store = filled(name, n, dtype=dtype)
        data = written([store, store], entropy=entropy, coarse=coarse, block=block)
        for found in reader_of(data).layers():
            equal(store_of(*found), store)
        for i in (1, 0):
            equal(store_of(*reader_of(data).part(i)), store)


def test_an_empty_store_goes_on(tmp_path):
    store, full = KVStore(RECIPES["mean"], 2, 2, 16, tile=8), filled("mean")
    store.save(tmp_path / "x")
    again = KVStore.load(tmp_path / "x")
    equal(again, store)
    g = torch.Generator().manual_seed(45)
    again.append(*(torch.randn(2, 2, 45, 16, generator=g) for _ in "kv"))
    equal(again, full)


@pytest.mark.parametrize("d, dv", [(1, 3), (17, 33), (64, 128), (128, 64)])
def test_head_sizes_and_what_lies_behind_the_last_token(d, dv):
    pytest.importorskip("constriction")
    store = filled("k3v3", 30, d, dv, heads=3)
    store.crop(7)
    store.set_range(end=torch.tensor([20, 23]))
    for entropy in (False, True):
        (found,) = reader_of(written([store], entropy=entropy, coarse=True, block=1)).layers()
        equal(store_of(*found), store)


@pytest.mark.parametrize("name", ("k3v3", "decay", "pre-RoPE", "trellis", "QJL"))
def test_some_tokens_are_those_of_the_whole(name):
    store = filled(name, 61)
    if name == "k3v3":
        store.evict(17)  # two tiles
        store.set_range(end=torch.tensor([50, 60]))
    reader, held = (
        reader_of(written([store], coarse=True, block=2)),
        store.length - store.offset,
    )
    for first, last in ((0, held), (9, 20), (16, 17), (40, held), (8, 8)):
        some = store_of(*reader.part(0, first, last))
        a, b = some.offset, some.length
        assert a - store.offset == first // 8 * 8 and b - a >= last - first // 8 * 8
        inside = max(0, min(b, store.length - store.recipe.recent) - a)  # coded in both
        for x, y in zip(some.read(), store.read(a, b)):
            same(x[:, :, :inside], y[:, :, :inside], allow_empty=True)
        g = torch.Generator().manual_seed(0)
        some.set_range(end=None)
        some.append(*(torch.randn(2, 2, 3, 16, generator=g) for _ in "kv"))
        some.read()
    with pytest.raises(ValueError, match="last must be"):
        reader.part(0, 0, held + 1)
    with pytest.raises(ValueError, match="no record"):
        reader.part(3)


def test_coarse_is_the_coarser_code_and_is_refined():
    store = filled("k3v3", 61)
    data = written([store], coarse=True)
    reader = reader_of(data)
    (found,) = reader.layers(coarse=True)
    coarse = store_of(*found)
    whole = filled("k3v3", 61)
    whole.decay(61)
    same(coarse.read(0, 40)[0], whole.read(0, 40)[0])  # five whole tiles
    more = store_of(*found)
    more.append(*torch.zeros(2, 2, 2, 1, 16))
    with pytest.raises(ValueError, match="must hold the tokens that were read"):
        reader.refine([more])
    reader = reader_of(data)
    coarse = store_of(*reader.part(0, coarse=True))
    read = []
    seek = reader.file.seek
    reader.file.seek = lambda at: read.append(at) or seek(at)
    reader.refine([coarse])
    equal(coarse, store)
    assert len(read) == sum(kind == codec.PLANES for kind, *_ in reader.index)


def test_a_reader_has_a_layer_before_the_next_is_written():
    "Through a pipe: the writer waits for the reader."
    stores, (out, into) = [filled("k3v3"), filled("mean")], os.pipe()
    seen, go_on = [], threading.Event()

    def read():
        with os.fdopen(out, "rb", buffering=0) as file:
            for found in Reader(file).layers():
                seen.append(store_of(*found))
                go_on.set()

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(into, "wb", buffering=0) as file:
        writer = Writer(file, {}, entropy=False)
        for n, store in enumerate(stores, 1):
            writer.layer(*state_of(store))
            assert go_on.wait(20) and len(seen) == n
            go_on.clear()
        writer.close()
    thread.join()
    for a, b in zip(seen, stores):
        equal(a, b)


def test_a_file_that_is_being_written(tmp_path):
    path, store = tmp_path / "x", filled("k3v3")
    whole = written([store])
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated"):
        KVStore.load(path)
    with pytest.raises(ValueError, match="truncated: .* bytes expected, .* came"):
        with codec.opened(path, patience=0.05) as reader:
            [*reader.layers()]

    def finish():
        with open(path, "ab") as file:
            file.write(whole[len(whole) // 2 :])

    timer = threading.Timer(0.2, finish)
    timer.start()
    with codec.opened(path, patience=20) as reader:
        (found,) = reader.layers()
    timer.join()
    equal(store_of(*found), store)


@pytest.mark.parametrize("how", ({}, {"entropy": True}, {"coarse": True, "block": 2}))
def test_cut_at_every_byte_and_flipped_at_ten_thousand_places(how):
    if how.get("entropy"):
        pytest.importorskip("constriction")
    whole, rng = written([filled("mean", 20, 4, 4)], **how), random.Random(0)
    for n in range(len(whole)):
        with pytest.raises(ValueError):
            [*reader_of(whole[:n]).layers()]
    places = [*range(len(whole))] + [rng.randrange(len(whole)) for _ in range(10_000)]
    for at in places[:10_000]:
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        with pytest.raises(ValueError):
            [*reader_of(bytes(changed)).layers()]
    with pytest.raises(ValueError, match="the end must be"):
        [*reader_of(whole + b"x").layers()]


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda about: about["state"].update(heads=2**20), "nbytes must be"),
        (lambda about: about.update(nbytes=1), "nbytes must be"),
        (lambda about: about.update(angles=10**9), "angles must be"),
        (lambda about: about.update(block=10**6), "expected, got record"),
        (lambda about: about.update(state=0), "an earlier layer"),
        (lambda about: about.update(frame=["0" * 64] * 2), "the frame is not"),
        (lambda about: about.pop("coarse"), "coarse"),
        (lambda about: about["state"].update(recipe="{}"), "layer 0"),
        (lambda about: about["state"].update(batch=0), "batch must be an integer from 1 to"),
    ],
)
def test_a_state_that_says_something_else(change, why, tmp_path):
    path, store = tmp_path / "x", filled("mean")
    store.save(path, block=2)
    header, records = records_of(path)
    about = json.loads(records[0][4])
    change(about)
    records[0][4] = json.dumps(about).encode()
    reseal(path, header, records)
    with Allocations() as made, pytest.raises(ValueError, match=why):
        KVStore.load(path)
    assert made.largest <= 2 * path.stat().st_size


@pytest.mark.parametrize("entropy", (False, True))
def test_a_few_bytes_cannot_ask_for_many(entropy, tmp_path):
    "A state, all of whose numbers fit each other, and records without what it tells of."
    if entropy:
        pytest.importorskip("constriction")
    path = tmp_path / "x"
    filled("k3v3", 40).save(path, entropy=entropy)
    header, records = records_of(path)
    about = json.loads(records[0][4])
    about["state"]["batch"] = 2**20
    held = codec.described(codec.Saved(about["state"])).kinds.items()
    held = [(n, t, s) for n, (t, s) in held if n != "end"]
    about["nbytes"] = sum(torch.Size(s).numel() * t.itemsize for _, t, s in held)
    records[0][4] = json.dumps(about).encode()
    reseal(path, header, records)
    with Allocations() as made, pytest.raises(ValueError, match="cannot hold tensors of"):
        KVStore.load(path)
    assert made.largest <= 64 * path.stat().st_size


def test_records_in_another_order_missing_or_of_another_file(tmp_path):
    path = tmp_path / "x"
    filled("k3v3").save(path, block=2)
    header, records = records_of(path)
    for wrong in (records[1:], records[:1] + records[2:], records[:-1], records + records[-1:]):
        reseal(path, header, wrong)
        with pytest.raises(ValueError, match="expected"):
            KVStore.load(path)
    data = written([filled("k3v3")])
    other = io.BytesIO()
    writer = Writer(other, {"another": 1}, entropy=False)
    writer.layer(*state_of(filled("k3v3")))
    start = writer.index[1][4] - len(other.getvalue())
    mixed = data[: start + len(other.getvalue()) - 14] + other.getvalue()[start:]
    with pytest.raises(ValueError):
        [*reader_of(mixed).layers()]


def index_of(data: bytes) -> tuple:  # (where it begins, its entries)
    at = int.from_bytes(data[-8:], "little")
    return at, [[*x] for x in codec._ENTRY.iter_unpack(data[at + codec._HEAD.size : -12])]


def with_index(data: bytes, index: list) -> bytes:
    "A file with another index, and the checksum that belongs to it."
    at, out = index_of(data)[0], io.BytesIO()
    writer = Writer(io.BytesIO(), {}, entropy=False)
    writer.file, writer.seed = out, reader_of(data).seed
    writer.record(codec.END, [b"".join(codec._ENTRY.pack(*x) for x in index)])
    return data[:at] + out.getvalue() + data[-8:]


@pytest.mark.parametrize("value", (0, 1, 7, 255, 2**31, 2**63, 2**64 - 1))
def test_an_index_that_lies_is_named(value, tmp_path):
    "Whatever number of it is another one: a ValueError with the path, or the same store."
    path, store = tmp_path / "x", filled("mean")
    data = written([store], coarse=True, block=2)
    sizes = (1, 4, 4, 4, 8)  # bytes of the fields of an entry
    for entry in range(len(index_of(data)[1])):
        for field in (i for i, size in enumerate(sizes) if value < 256**size):
            _, index = index_of(data)
            index[entry][field] = value
            path.write_bytes(with_index(data, index))
            with codec.opened(path) as reader:
                try:
                    coarse = store_of(*reader.part(0, coarse=True))
                    reader.refine([coarse])
                except ValueError as error:
                    assert str(path) in str(error), (entry, field, value)
    path.write_bytes(data[:-8] + value.to_bytes(8, "little"))
    with codec.opened(path) as reader, pytest.raises(ValueError, match=str(path)):
        reader.part(0)


def test_a_plain_layer_has_no_forms_and_comes_in_its_own_records(tmp_path):
    path = tmp_path / "x"
    filled("k3v3").save(path, block=2)
    header, records = records_of(path)
    for at in (1, 2):  # the state, and the first block
        data = bytearray(records[at][4])
        data[0] = 1
        reseal(path, header, [*records[:at], [*records[at][:4], data], *records[at + 1 :]])
        with pytest.raises(ValueError, match="has the form 1 in a plain layer"):
            KVStore.load(path)
    beside = [codec.BUFFER, 0, 0, 0, bytes(8)]  # which only another process can send
    reseal(path, header, [records[0], beside])
    with pytest.raises(ValueError, match="expected, got record"):
        KVStore.load(path)


def test_numbers_that_no_store_holds_are_not_written():
    for recipe, name, wrong in (
        ("mean", "key.scale", torch.nan),
        ("fraction", "value.scale", -1.0),
        ("mean", "key.mean", torch.inf),
    ):
        tensors, state = state_of(filled(recipe))
        h = codec.described(codec.Saved(state))
        assert disk._sound(tensors, h.least)
        tensors[name].view(-1)[3] = wrong
        writer = Writer(io.BytesIO(), {}, entropy=False)
        with pytest.raises(ValueError, match=name):
            writer.layer(tensors, state)
        assert not disk._sound(tensors, h.least), "what a GPU's tensors are asked at once"


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path, old = tmp_path / "x", filled("k3v3")
    old.save(path)
    room, write = [3000], Writer._write

    def fills(self, x):
        room[0] -= len(x)
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        write(self, x)

    monkeypatch.setattr(Writer, "_write", fills)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        filled("mean").save(path)
    equal(KVStore.load(path), old)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_of_two_writers_each_leaves_a_whole_file(tmp_path):
    path, stores = tmp_path / "x", [filled("k3v3", n) for n in (20, 40)]
    found, stop = [], threading.Event()

    def write(store):
        while not stop.is_set():
            store.save(path)

    stores[0].save(path)
    threads = [threading.Thread(target=write, args=(x,)) for x in stores]
    for thread in threads:
        thread.start()
    for _ in range(40):
        found.append(KVStore.load(path).length)
    stop.set()
    for thread in threads:
        thread.join()
    assert set(found) <= {20, 40} and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_keys_of_prefixes():
    a = codec.prefix_keys([5] * 70, "recipe", 16)
    assert len(a) == 4 == len(set(a)) and all(len(x) == 32 for x in a)
    assert codec.prefix_keys(torch.tensor([5] * 33), "recipe", 16) == a[:2]
    other = codec.prefix_keys([5] * 20 + [6] * 50, "recipe", 16)
    assert other[0] == a[0] and not set(other[1:]) & set(a)
    assert not set(codec.prefix_keys([5] * 70, "another", 16)) & set(a)
    assert codec.prefix_keys([5] * 15, "recipe", 16) == []
