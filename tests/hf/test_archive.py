"""Caches on disk: the same bits again and the same tokens after them, room by request, and a
sentence for every file that is refused."""

import json
import math
import os
import random

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.helpers import QUIETLY, Largest, generate, given_frame, prompt, refuses, seeded, tiny
from turboquant_nb import Recipe, Spec, TurboQuantCache, files
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.hf.archive import FORMAT, read_states

SMALL = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
CONFIG = tiny(**SMALL).config
pytestmark = QUIETLY
RECIPES = {name: name for name in ("k4v4", "k3v3", "k2v2-trellis")} | {
    "fractions": Recipe(Spec(2.5), Spec(3.5)),
    "residual": Recipe(Spec(3, residual="qjl"), Spec(2), sinks=2, recent=5),
    "pair scale": Recipe(Spec(3, center="pre_rope", pair_scale="frame"), Spec(3)),
    "mean": Recipe(Spec(3, center="fixed"), Spec(4)),
    "bare": Recipe(Spec(4, rotation="identity"), Spec(4), sinks=0, recent=0),
}


def filled(**how):
    "A cache of nine tokens of two rows, the first padded."
    cache = TurboQuantCache(CONFIG, "k4v3", frame=given_frame(CONFIG), **how)
    ids = torch.ones(2, 9, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        tiny(**SMALL)(ids, attention_mask=mask, past_key_values=cache)
    return cache


def check_same(one, other):
    "Every tensor of every layer, and everything that is no tensor."
    for a, b in zip(one.coded_layers, other.coded_layers, strict=True):
        (t, h), (u, g) = state_of(a.store), state_of(b.store)
        assert (h, a.starts) == (g, b.starts) and t.keys() == u.keys()
        for name, x in t.items():
            assert x.dtype == u[name].dtype and torch.equal(x, u[name]), name


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back_bit_for_bit_and_says_the_same(name, tmp_path):
    model, tokens = tiny("llama", head_dim=16), 40
    model.set_attn_implementation("turboquant")
    inputs = prompt(2, tokens, padded=True)
    cache = TurboQuantCache(model, RECIPES[name])
    out, _ = generate(model, inputs, "turboquant", cache=cache, max_new_tokens=3)
    cache.save(tmp_path / "c")
    back = TurboQuantCache.load(tmp_path / "c", model)
    check_same(cache, back)
    back.save(tmp_path / "d")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, out.shape[1] - tokens)], 1)
    how = dict(attention_mask=mask, max_new_tokens=3, do_sample=False)
    said = [model.generate(out, past_key_values=x, **how) for x in (cache, back)]
    assert torch.equal(*said)
    check_same(cache, back)


@pytest.mark.parametrize(
    "family", ("falcon_h1", "qwen3_next", "lfm2", "deepseek_v3", "gpt_oss")
)
def test_states_beside_codes_shared_layers_and_latents_come_back(family, tmp_path):
    model = tiny(family)
    inputs = prompt(2, 30, padded=False)
    cache = TurboQuantCache(model, "k3v3")
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.save(tmp_path / "c")
        back = TurboQuantCache.load(tmp_path / "c", model)
        check_same(cache, back)
        for _ in range(3):
            step = inputs["input_ids"][:, :1]
            said = [model(step, past_key_values=x).logits for x in (cache, back)]
            assert torch.equal(*said)


@pytest.mark.parametrize("how", ({}, {"max_length": 40}, {"max_length": 40, "static": True}))
def test_a_cache_has_the_room_that_is_asked_for(how, tmp_path):
    cache, static = filled(**how), how.get("static", False)
    cache.save(tmp_path / "cache")
    for room in ({}, {"max_length": 600}):
        again = TurboQuantCache.load(tmp_path / "cache", CONFIG, **room)
        assert again.static == bool(static and room)
        assert again.max_length == room.get("max_length")
        for a, b in zip(cache.layers, again.layers):
            assert a.starts == b.starts and b.store.capacity == (768 if room else 256)
            for x, y in zip(a.store.read(), b.store.read()):
                assert torch.equal(x, y)
    with refuses("max_length is 5: 9 tokens are held"):
        TurboQuantCache.load(tmp_path / "cache", CONFIG, max_length=5)


def test_what_is_no_saved_cache_is_refused_in_a_sentence(tmp_path):
    "(Page hf_archive: a file that was changed or is of another model, and an empty cache.)"
    cache, path = filled(), tmp_path / "c"
    cache.save(path)
    whole = path.read_bytes()
    for data in (b"", whole[:-9], whole[:40]):
        path.write_bytes(data)
        with refuses("c is not a readable saved cache: truncated or of"):
            TurboQuantCache.load(path, CONFIG)
    files.write_file(path, {}, {}, "turboquant-nb calibration 2")
    with refuses(f"must have format '{FORMAT}', got 'turboquant-nb ca"):
        TurboQuantCache.load(path, CONFIG)
    path.write_bytes(whole)
    tensors, header = read_states(path)
    some = {k: v for k, v in tensors.items() if k != "1.key.scale"}
    for t, h, why in (
        (some, {}, "this: key.scale must be torch.float16 of shape .*, got nothing"),
        (tensors | {"9.start": tensors["0.start"]}, {}, "must hold tensors of its stores"),
        (tensors | {"0.more": tensors["0.start"]}, {}, "got also more"),
        (tensors, {"stores": header["stores"][:1]}, "must have 2 stores .*, got 1"),
        (tensors, {"recipe": Recipe(Spec(4)).to_json()}, "layer 0 does not fit"),
    ):
        with refuses(why):
            TurboQuantCache.from_states(t, header | h, CONFIG)
    with refuses("expected a file, got a folder"):
        TurboQuantCache.load(tmp_path, CONFIG)


@pytest.mark.parametrize("seed", range(32))
def test_a_file_with_other_numbers_and_a_right_digest_is_refused_or_sound(seed, tmp_path):
    "A number, a shape, a type or a field of the header is another one; the digest is right."
    path, g = tmp_path / "c", random.Random(seed)
    filled().save(path)
    tensors, header = read_states(path)
    name = g.choice([*tensors])
    t = tensors[name].clone()
    if (kind := seed % 4) == 0:
        odd = [math.nan, math.inf] if t.is_floating_point() else [0, 1, 99]
        t.view(-1)[g.randrange(t.numel())] = g.choice(odd)
    elif kind == 1:
        t = g.choice([t[None], t[:1], t.flatten()[:-1], t.transpose(0, -1)]).contiguous()
    elif kind == 2:
        t = t.to(g.choice([torch.bool, torch.int64, torch.float64]))
    else:
        place = g.choice([header, *header["stores"]])
        place[g.choice([*place])] = g.choice([None, "x", -1, 2**40, 2**70, 0.5, [], {}])
    files.write_file(path, tensors | {name: t}, header, FORMAT)
    try:
        back = TurboQuantCache.load(path, CONFIG)
    except ValueError:
        return
    for x in back.coded_layers:
        assert all(y.isfinite().all() for y in x.store.read()) and (x.store.start <= 9).all()


def test_a_save_that_breaks_off_leaves_the_old_file(tmp_path, monkeypatch):
    cache, path = filled(), tmp_path / "c"
    cache.save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with refuses("No space left", OSError):
        cache.save(path, {"more": 1})
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


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
    ],
)
def test_a_header_cannot_ask_for_more_memory_than_the_file_holds(name, value, why):
    "160 kB asked for 13 GB by `max_length`: loading allocates for the tokens that are there."
    tensors, header = state_of(filled().layers[0].store)
    if name == "recipe":
        value = json.dumps(json.loads(header["recipe"]) | value)
    size = sum(t.nbytes for t in tensors.values())
    with Largest() as made:
        if why:
            with refuses(why):
                store_of(tensors, header | {name: value})
        else:
            store = store_of(tensors, header | {name: value})
            assert store.max_length is None and store.nbytes <= size
    assert made.bytes <= 2 * size


@pytest.mark.parametrize("static", (False, True))
def test_a_sliding_layer_that_grows_gets_no_room_for_a_whole_text(static, tmp_path):
    "It frees what no query sees; where the device counts, every layer has room for all."
    config = tiny("gemma2", **SMALL).config
    how = dict(max_length=60, static=True) if static else {}
    cache = TurboQuantCache(config, "k4v3", frame=given_frame(config), **how)
    g = seeded()
    for i in range(2):
        cache.update(*(torch.randn(1, 1, 40, 16, generator=g) for _ in "kv"), i)
    cache.save(tmp_path / "cache")
    again = TurboQuantCache.load(tmp_path / "cache", config, max_length=70)
    assert {x.is_sliding for x in again.coded_layers} == {False, True}
    for x in again.coded_layers:
        assert x.store.max_length == (None if x.is_sliding and not static else 70)


def test_layers_of_different_lengths_are_refused(tmp_path):
    cache = filled()
    cache.layers[1].store.crop(1)
    cache.save(tmp_path / "c")
    with refuses("layer 1 does not fit: it has length 8, not 9"):
        TurboQuantCache.load(tmp_path / "c", CONFIG)


def test_a_chunk_that_flash_serves_is_no_reason_to_complain():
    "Of reasons the report says those of steps; a long chunk has its own way, which is fast."
    cache = filled()
    with torch.no_grad():
        tiny(**SMALL)(torch.ones(2, 40, dtype=torch.long), past_key_values=cache)
    report = cache.report()
    assert sum(x.backends["flash"] for x in cache.coded_layers) == 2
    assert not report["reasons"], report["reasons"]
