"""Caches on disk, plain and entropy coded: the same bits again, room by request, refusals."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.storage import load_compressed, save_compressed

CONFIG = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
)
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def filled(**how):
    "A cache of nine tokens of two rows, the first padded."
    cache, ids = TurboQuantCache(CONFIG, "k4v3", **how), torch.ones(2, 9, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


def save(cache, path, compressed):
    if not compressed:
        return cache.save(path)
    pytest.importorskip("constriction")
    save_compressed(cache, path)


def load(path, compressed, **how):
    return (load_compressed if compressed else TurboQuantCache.load)(path, CONFIG, **how)


@pytest.mark.parametrize("compressed", (False, True))
@pytest.mark.parametrize("how", ({}, {"max_length": 40}, {"max_length": 40, "static": True}))
def test_a_cache_comes_back_with_its_bits_and_the_room_that_is_asked_for(
    how, compressed, tmp_path
):
    cache, static = filled(**how), how.get("static", False)
    save(cache, tmp_path / "cache", compressed)
    for room in ({}, {"max_length": 600}):
        again = load(tmp_path / "cache", compressed, **room)
        assert again.static == bool(static and room) and again.max_length == room.get(
            "max_length"
        )
        for a, b in zip(cache.layers, again.layers):
            assert a.starts == b.starts and b.store.capacity == (768 if room else 256)
            for x, y in zip(a.store.read(), b.store.read()):
                assert torch.equal(x, y)
        if not (static and room):
            save(again, tmp_path / "again", compressed)
            third = load(tmp_path / "again", compressed)
            for a, b in zip(again.states()[0], third.states()[0]):
                assert a[1] == b[1] and all(torch.equal(x, b[0][n]) for n, x in a[0].items())
    with pytest.raises(ValueError, match="max_length is 5: 9 tokens are held"):
        load(tmp_path / "cache", compressed, max_length=5)


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("max_length", 10**9, ""),
        ("length", 10**9, "length must be"),
        ("offset", -(10**9), "offset must be"),
        ("batch", 10**6, "start must be .* of shape"),
        ("heads", 10**6, "must be .* of shape"),
        ("tile", 2**20, "must be .* of shape"),
        ("d", [2**12, 2**12], "must be .* of shape"),
        ("d", [10**6, 10**6], "d.0. must be"),
        ("recipe", {"recent": 10**7}, "must be .* of shape"),
        ("recipe", {"sinks": 10**7}, "must be .* of shape"),
        ("truncated", [10**9, 0], ""),
    ],
)
def test_a_header_cannot_ask_for_more_memory_than_the_file_holds(name, value, why):
    "160 kB asked for 13 GB by `max_length`: loading allocates for the tokens that are there."
    tensors, header = state_of(filled().layers[0].store)
    if name == "recipe":
        value = json.dumps(json.loads(header["recipe"]) | value)
    size = sum(t.nbytes for t in tensors.values())
    with Allocations() as made:
        if why:
            with pytest.raises(ValueError, match=why):
                store_of(tensors, header | {name: value})
        elif name == "max_length":
            store = store_of(tensors, header | {name: value})
            assert store.max_length is None and store.nbytes <= size
        else:
            with pytest.raises(ValueError):
                store_of(tensors, header | {name: value})
    assert made.largest <= 2 * size


class Allocations(TorchDispatchMode):
    "Bytes of the largest tensor that an operator made."

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.nbytes)
        return out


@pytest.mark.parametrize("static", (False, True))
def test_a_sliding_layer_that_grows_gets_no_room_for_a_whole_text(static, tmp_path):
    "It frees what no query sees; where the device counts, every layer has room for all."
    config = transformers.Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=16,
    )
    how = dict(max_length=60, static=True) if static else {}
    cache, g = TurboQuantCache(config, "k4v3", **how), torch.Generator().manual_seed(0)
    for i in range(2):
        cache.update(*(torch.randn(1, 1, 40, 16, generator=g) for _ in "kv"), i)
    cache.save(tmp_path / "cache")
    again = TurboQuantCache.load(tmp_path / "cache", config, max_length=70)
    assert {x.is_sliding for x in again.coded_layers} == {False, True}
    for x in again.coded_layers:
        assert x.store.max_length == (None if x.is_sliding and not static else 70)


def test_layers_of_different_lengths_are_refused():
    cache = filled()
    cache.layers[1].store.crop(1)
    states, header = cache.states()
    with pytest.raises(ValueError, match="layer 1 does not fit: it has length 8, not 9"):
        TurboQuantCache.from_states(states, header, CONFIG)


def test_a_chunk_that_flash_serves_is_no_reason_to_complain():
    "Of reasons the report says those of steps; a long chunk has its own way, which is fast."
    cache, model = filled(), transformers.LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        model(torch.ones(2, 40, dtype=torch.long), past_key_values=cache)
    report = cache.report()
    assert sum(x.backends["flash"] for x in cache.coded_layers) == 2
    assert not report["reasons"], report["reasons"]
