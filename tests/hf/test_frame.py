"The frame of a model: codes of given states depend neither on the prompt nor on how it is cut."

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers import prompt, tiny
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.cache.store import KVStore
from turboquant_nb.calibration.fit import find_frame
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.pairs import pair_layers
from turboquant_nb.evaluation.score import OnePass, prefill
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.kernels import ops
from turboquant_nb.quant.calibration import LayerFrame, ModelFrame, load_frame, save_frame
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")
ROPE = 10000.0 ** (-torch.arange(0, 64, 2) / 64)


def recipe(center="pre_rope", pair="prompt", **more):
    return Recipe(Spec(3, center=center, pair_scale=pair, **more), Spec(3), sinks=2, recent=4)


def states(batch, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, 2, n, 64, generator=g) + 1


def given(seed=1):
    g = torch.Generator().manual_seed(seed)
    pair = (1 + torch.rand(2, 32, generator=g)).bfloat16().float().repeat(1, 2)
    return LayerFrame(torch.randn(2, 64, generator=g), pair, turns=True)


def store(batch=1, held=None, r=None, **more):
    r = r or recipe()
    rope = {"inv_freq": ROPE} if r.key.centre.rotates else {}
    return KVStore(r, batch, 2, 64, frame=held or given(), **rope, **more)


def codes(s, row=0):
    return [t[row] for p in s.parts for n, t in p.memory.tensors.items() if n != "recent"]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_codes_depend_on_states_and_positions_alone(static, backend):
    """One chunk, three, and beside another row: equal planes and scales. The mutant has a frame
    of each prompt's own."""
    k, v = states(1, 400)
    room = dict(max_length=512, static=static) if static else {}

    def appended(*cuts, batch=1, **more):
        s = store(batch, **room, **more)
        others = states(1, 400, seed=9)
        both = [torch.cat([y, x]) if batch == 2 else x for x, y in zip((k, v), others)]
        for a, b in zip((0, *cuts), (*cuts, 400)):
            ops.append(s, *(x[:, :, a:b] for x in both), backend=backend)
        return s

    want = codes(appended())
    for s, row in ((appended(100, 116), 0), (appended(batch=2), 1), (appended(1, 2), 0)):
        n = s.key.memory.tiles
        for x, y in zip(want, codes(s, row)):
            assert torch.equal(x[:, :2], y[:, :2]), (n, row)
    if not static:
        own = KVStore(recipe(pair="none"), 1, 2, 64, inv_freq=ROPE)
        other = KVStore(recipe(pair="none"), 1, 2, 64, inv_freq=ROPE)
        ops.append(own, k, v), ops.append(other, k[:, :, :100], v[:, :, :100])
        ops.append(other, k[:, :, 100:], v[:, :, 100:])
        assert not all(map(torch.equal, codes(own), codes(other)))


def test_a_given_frame_outlives_all_tokens():
    "Crops to nothing, copies, files: the next prompt has the same frame."
    k, v = states(1, 60)
    s = store()
    s.append(k, v)
    want = [x.clone() for x in codes(s)]
    s.crop(60)
    back = store_of(*state_of(s))
    for x in (s, back):
        assert x.key.given
        x.append(k, v)
        assert all(map(torch.equal, codes(x), want))
    free = KVStore(recipe(pair="none"), 1, 2, 64, inv_freq=ROPE)
    free.append(k, v), free.crop(60)
    assert not store_of(*state_of(free)).key.given and not free.key.mean.any()


def cache_of(model, frame, **more):
    r = recipe(center="auto", **more)
    return TurboQuantCache(model, r, frame=frame)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_a_model_reads_codes_of_its_frame(name, tmp_path):
    """Greedy tokens on codes are those of decoded states; no chunk waits; after a file, and
    after reset, the frame is the same. GPT-2 has no RoPE: a fixed mean."""
    model, inputs = tiny(name), prompt(2, 30)
    frame = find_frame(model, prompt(1, 64, seed=3, padded=False)["input_ids"])
    save_frame(frame, tmp_path / "f")
    frame = load_frame(tmp_path / "f")
    assert {x.turns for x in frame.layers} == {name != "gpt2"}
    tokens, how = [], dict(max_new_tokens=8, do_sample=False)
    for attention in ("turboquant", "sdpa"):
        model.set_attn_implementation(attention)
        cache = cache_of(model, frame)
        tokens.append(model.generate(**inputs, past_key_values=cache, **how))
        layer = cache.coded_layers[0]
        assert not layer.store.waiting and not any("pair" in x for x in layer.reasons)
        torch.testing.assert_close(
            layer.store.key.frame.pair[1, :, 0].float(), frame.layers[0].pair
        )
    assert torch.equal(*tokens)
    if name == "gpt2":  # the tests' configuration names KV heads that GPT-2 does not have
        return
    cache.save(tmp_path / "c")
    held = TurboQuantCache.load(tmp_path / "c", model)
    held.reset()
    again = model.generate(**inputs, past_key_values=held, **how)
    assert torch.equal(again, tokens[1])
    old, new = (x.coded_layers[0].store.key.frame for x in (cache, held))
    assert torch.equal(old.mean, new.mean) and torch.equal(old.pair, new.pair)


def test_a_first_chunk_with_drafts_and_a_static_cache():
    model, inputs = tiny("llama"), prompt(1, 24, padded=False)
    frame = find_frame(model, prompt(1, 64, seed=3, padded=False)["input_ids"])
    ids, how = inputs["input_ids"].repeat(1, 3), dict(max_new_tokens=10, do_sample=False)
    want = model.generate(ids, past_key_values=cache_of(model, frame), **how)
    drafts = dict(prompt_lookup_num_tokens=4)
    got = model.generate(ids, past_key_values=cache_of(model, frame), **drafts, **how)
    assert torch.equal(got, want)
    r = recipe(center="auto")
    static = TurboQuantCache(model, r, frame=frame, max_length=128, static=True)
    assert torch.equal(model.generate(ids, past_key_values=static, **how), want)


def test_one_pass_reads_codes_of_a_frame():
    """What `OnePass` meets is what a real cache codes; the prompts are not read again for their
    queries."""
    model, ids = tiny("llama"), prompt(2, 40, padded=False)["input_ids"]
    frame, r = find_frame(model, ids[:1]), recipe(center="auto")
    candidate = as_candidate(model, r, "pairs", dtype=None)
    start = prefill(model, ids[:, :20])
    for protocol in ("decode", "stress"):
        _, cache = OnePass(frame=frame).predict(model, ids, candidate, protocol, 20, start)
        real = TurboQuantCache(model, r, frame=frame)
        for i, x in pair_layers(cache).items():
            assert x.layer.store.key.given and x.queries is None
            real.update(x.keys, x.values, i)
            assert all(map(torch.equal, codes(x.layer.store), codes(real.layers[i].store)))


def test_what_is_no_frame_of_this_model_is_refused(tmp_path):
    model = tiny("llama")
    ids = prompt(1, 64, padded=False)["input_ids"]
    frame = find_frame(model, ids)
    half = ModelFrame(frame.layers[:1], frame.header)
    fixed = [replace(x, turns=False) for x in frame.layers]
    bare = [LayerFrame(x.mean, None, True) for x in frame.layers]
    for bad, why in (
        (find_frame(tiny("gpt2"), ids), "the frame is of another model: it has model type"),
        (half, "the frame has 1 layers, got 2 recipes"),
        (ModelFrame(tuple(fixed), frame.header), "a mean after RoPE in layer 0"),
    ):
        with pytest.raises(ValueError, match=why):
            cache_of(model, bad)
    with pytest.raises(TypeError, match="frame must be a ModelFrame, got str"):
        cache_of(model, "frame.safetensors")
    with pytest.raises(TypeError, match="frame must be a ModelFrame, got LayerFrame"):
        save_frame(frame.layers[0], tmp_path / "z")
    with pytest.raises(TypeError, match="frame must be a LayerFrame, got ModelFrame"):
        store(held=frame)
    cache = cache_of(model, ModelFrame(tuple(bare), frame.header))
    with pytest.raises(ValueError, match="the frame must have a pair"), torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"frame's mean must have shape"):
        store(held=LayerFrame(torch.zeros(3, 64), torch.ones(3, 64), True))
    for bad in (dict(mean=torch.full((2, 4), math.inf)), dict(pair=-torch.ones(2, 4))):
        with pytest.raises(ValueError, match="finite|above 0"):
            LayerFrame(**bad)
    with pytest.raises(ValueError, match="ids must be"):
        find_frame(model, ids[:, :3])
    (tmp_path / "x").write_bytes(b"no frame")
    save_frame(ModelFrame(frame.layers, {}), tmp_path / "y")
    for name, why in (("x", "is not a readable frame"), ("y", "about")):
        with pytest.raises(ValueError, match=why):
            load_frame(tmp_path / name)
