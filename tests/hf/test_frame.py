"""The frame of a model: found once, kept, and the same for every prompt, so that codes of given
states depend on nothing but their positions."""

import copy
import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import (
    DROP,
    QUIETLY,
    VOCAB,
    generate,
    given_frame,
    logits,
    prompt,
    refuses,
    seeded,
    tiny,
)
from tests.hf.test_hf import SHARERS
from tests.hf.test_hf_vision import made as with_eyes
from turboquant_nb.files import write_file
from turboquant_nb import Recipe, Spec, TurboQuantCache, enable, find_frame, load_calibration
from turboquant_nb.hf import frame as F
from turboquant_nb.hf.frame import DRAWN, TEXT, frame_of
from turboquant_nb.quant.calibration import Calibration, LayerFrame, save_calibration
from turboquant_nb.theory.rope import apply_rope
from turboquant_nb.theory.transforms import pair_scales

pytestmark = QUIETLY


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    "Where frames are kept: an empty folder for each test."
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "frames"


class Letters:
    "A tokenizer: a letter is a token."

    def __call__(self, text, truncation=False):
        return SimpleNamespace(input_ids=[2 + ord(x) % (VOCAB - 2) for x in text])


def fresh(name="llama", **changes):
    "A model object that nobody has seen, of the same weights each time."
    if name == "gpt2":  # which has as many KV heads as heads
        changes["num_key_value_heads"] = DROP
    return copy.deepcopy(tiny(name, **changes))


def passes(model):
    "A list that grows by the tokens of each pass."
    seen = []
    keep = lambda module, args: seen.append(args[0].numel())
    model.get_input_embeddings().register_forward_pre_hook(keep)
    return seen


def same_frames(one, other):
    "Whether all numbers of two calibrations' frames are equal."
    pairs = zip(one.frames, other.frames, strict=True)
    alike = lambda a, b: (
        a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())
    )
    return all(alike(a.tensors, b.tensors) for a, b in pairs)


def random_ids(rows, n, seed=0):
    return torch.randint(2, VOCAB, (rows, n), generator=seeded(seed))


# --- found once, and kept


def test_the_numbers_are_those_of_the_keys_and_queries():
    "By hand, from one window at a time: means without the first tokens, scales of the rest."
    model, ids = fresh(), random_ids(3, 40)
    frame, info = find_frame(model, ids).frames, TurboQuantCache(model).info
    keys, queries = ([[] for _ in info.layers] for _ in "kq")
    for m in model.modules():
        if type(getattr(m, "layer_idx", None)) is int:
            take = lambda to: lambda module, args, out: to.append(out[:, 4:])
            m.k_proj.register_forward_hook(take(keys[m.layer_idx]))
            m.q_proj.register_forward_hook(take(queries[m.layer_idx]))
    for row in ids:
        logits(model, row[None])
    for x, k, q, layer in zip(frame, keys, queries, info.layers):
        k, q = (torch.cat(y).unflatten(-1, (-1, 8)) for y in (k, q))  # [rows, tokens, heads, 8]
        mean = k.mean((0, 1))
        torch.testing.assert_close(x.mean, mean, atol=1e-3, rtol=1e-2)  # fp16 angles
        turned = lambda y: apply_rope(y.transpose(1, 2), torch.arange(4, 40), inv_freq=rope)
        rope = torch.tensor(layer.inv_freq)
        torch.testing.assert_close(x.fixed, turned(k).mean((0, 2)), atol=1e-4, rtol=1e-4)
        energy = turned(q).unflatten(1, (2, 2)).square().mean((0, 2, 3))
        rest = turned(k - mean).square().mean((0, 2))
        torch.testing.assert_close(x.pair, pair_scales(energy, rest, 8), atol=0, rtol=1e-2)
        assert x.pair.std() > 0.05 and torch.equal(x.pair[:, :4], x.pair[:, 4:])


@pytest.mark.parametrize("what", ["weights", "dtype", "RoPE"])
def test_a_frame_of_others_is_not_taken(what):
    "Other weights, other numbers of the same, and the same read by another RoPE."
    first, model = fresh(), fresh(seed=1) if what == "weights" else fresh()
    TurboQuantCache(first)
    if what == "dtype":
        model = model.half()
    elif what == "RoPE":
        model.config.rope_parameters = dict(rope_type="default", rope_theta=77.0)
        model = type(model)(model.config).eval()
        model.load_state_dict(first.state_dict())
    seen = passes(model)
    found = TurboQuantCache(model).frame
    assert seen and not same_frames(found, frame_of(first))


@pytest.mark.parametrize("damage", ["cut", "other", "of other layers", "of another text"])
def test_a_damaged_file_is_found_again(damage, folder):
    TurboQuantCache(fresh())
    (file,) = folder.iterdir()
    whole, held = file.read_bytes(), load_calibration(file)
    if damage == "cut":
        file.write_bytes(whole[:-9])
    elif damage == "other":
        write_file(file, {}, {}, "turboquant-nb small 1")
    elif damage == "of other layers":
        save_calibration(replace(held, frames=held.frames[:1]), file)
    else:
        save_calibration(replace(held, header=held.header | {"text": "mine"}), file)
    model = fresh()
    seen = passes(model)
    found = TurboQuantCache(model).frame
    assert seen and same_frames(found, held) and file.read_bytes() == whole


def test_nothing_can_be_written(tmp_path, monkeypatch):
    "A folder that cannot be made, or is read-only: found again in each process, silently."
    (tmp_path / "file").write_text("no folder")
    closed = tmp_path / "closed"
    closed.mkdir()
    os.chmod(closed, 0o500)
    for where in (tmp_path / "file" / "below", closed):
        monkeypatch.setenv("TURBOQUANT_CACHE", str(where))
        for _ in range(2):
            model = fresh()
            seen = passes(model)
            assert [TurboQuantCache(model).frame is frame_of(model) for _ in "12"] == [1, 1]
            assert len(seen) == 1 or where == closed  # root may write where nobody may
    os.chmod(closed, 0o700)


def test_a_tokenizer_makes_it_of_text(folder):
    """Drawn ids until there is a tokenizer, which is said once; then the text, which is
    remembered and kept beside it."""
    model = fresh()
    model.config._name_or_path = "some-one/model"
    with pytest.warns(UserWarning, match="no tokenizer lies beside the model.*tokenizer="):
        drawn = TurboQuantCache(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TurboQuantCache(model).frame is drawn.frame
        text = TurboQuantCache(model, tokenizer=Letters())
        assert text.report()["frame"] == TEXT and drawn.report()["frame"] == DRAWN
        assert TurboQuantCache(model).frame is text.frame
        twin = fresh()
        seen = passes(twin)
        assert same_frames(TurboQuantCache(twin).frame, text.frame) and not seen
    assert not same_frames(drawn.frame, text.frame)
    assert sorted(x.name[17:] for x in folder.iterdir()) == [
        "drawn.safetensors",
        "text.safetensors",
    ]
    other = fresh(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a model from nowhere can have no tokenizer
        assert TurboQuantCache(other).report()["frame"] == DRAWN
    F.remember_tokenizer(other, Letters())
    assert TurboQuantCache(other).report()["frame"] == TEXT
    third = fresh(seed=2)
    F.remember_tokenizer(third, lambda text, truncation: SimpleNamespace(input_ids=[99] * 600))
    assert TurboQuantCache(third).report()["frame"] == DRAWN  # it is of another model
    told = find_frame(other, random_ids(2, 50))
    assert TurboQuantCache(other, frame=told).report()["frame"] == "given"


def test_ids_of_text_and_drawn_ones(monkeypatch):
    model = fresh()
    ids = F.text_ids(model, Letters())
    assert ids.shape == (4, 248) and len(F.frame_texts()) == 4  # nearly all that it reads
    assert F.text_ids(model, Letters(), ["some words"] * 2).shape == (2, 10)
    assert all(len(set(row.tolist())) > 15 for row in ids)
    drawn = F.drawn_ids(model)
    assert drawn.shape == (4, 248) and torch.equal(drawn, F.drawn_ids(model))
    with torch.device("meta"):  # a default device is not theirs
        assert torch.equal(F.drawn_ids(model), drawn)
    count = torch.bincount(drawn.flatten(), minlength=VOCAB).double() / drawn.numel()
    want = 1 / torch.arange(1, VOCAB + 1).double()
    assert (count - want / want.sum()).abs().max() < 0.03 and len(count) == VOCAB
    monkeypatch.setattr(F, "longest_context", lambda config: None)
    assert F.drawn_ids(model).shape == (4, 512)


# --- adapters


def test_adapters_have_frames_of_their_own():
    "One for each set that takes part; a cache that lives keeps the one that it began with."
    peft = pytest.importorskip("peft")
    how = dict(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(fresh(), peft.LoraConfig(**how)).eval()
    adapted = TurboQuantCache(model)
    with model.disable_adapter():
        plain = TurboQuantCache(model)
        assert not same_frames(plain.frame, adapted.frame)
        assert TurboQuantCache(model).frame is plain.frame
    assert TurboQuantCache(model).frame is adapted.frame
    assert same_frames(plain.frame, frame_of(fresh()))
    ids = random_ids(1, 30)
    logits(model, ids, past_key_values=adapted)
    held = [x.store.key.frame.mean.clone() for x in adapted.layers]
    adapted.reset()
    with model.disable_adapter():
        logits(model, ids, past_key_values=adapted)
    assert all(torch.equal(x.store.key.frame.mean, y) for x, y in zip(adapted.layers, held))


# --- what is refused


def test_a_config_alone_is_refused_with_the_reason():
    model = fresh()
    why = "a config alone has no frame, which this recipe's keys are coded in: give the model"
    for recipe in (None, "k2v2-scalar", Recipe(Spec(3, center="fixed"))):
        with refuses(why):
            TurboQuantCache(model.config, recipe)
    bare = TurboQuantCache(model.config, Recipe(Spec(), Spec()))
    given = TurboQuantCache(model.config, frame=find_frame(model))
    assert bare.report()["frame"] == "none" and given.recipes[0].key.center == "pre_rope"


def test_what_is_no_frame_of_this_model_is_refused(tmp_path):
    "One sentence each, and where that can be when the cache is made."
    model, path = fresh(), tmp_path / "f"
    good, x = find_frame(model), random_ids(1, 20)
    wide = given_frame(tiny("llama", num_key_value_heads=4))
    some = lambda *of: Calibration([], good.header, of)
    for bad, why in (
        (
            find_frame(tiny("gpt2")),
            "is of another model: it has model type 'gpt2', not 'llama'",
        ),
        (some(*good.frames[:1]), "the frame has 1 layers, the model 2 with keys"),
        (some(), "frame must hold frames, got a calibration without any"),
    ):
        with refuses(why):
            TurboQuantCache(model, frame=bad)
        with refuses(why):
            TurboQuantCache(model, frame=bad, recipe="k2v2-scalar")
    write_file(path, {}, {}, "turboquant-nb small 1")
    with refuses("must have format 'turboquant-nb calibration"):
        TurboQuantCache(model, frame=path)
    with refuses("is neither a file nor found on the hub", FileNotFoundError):
        TurboQuantCache(model, frame=tmp_path / "none.safetensors")
    with refuses("must be a file, a hub id or a Calibration, got LayerF", TypeError):
        TurboQuantCache(model, frame=good.frames[0])
    cache = TurboQuantCache(model, frame=some(*wide.frames))
    for _ in range(2):
        with refuses(r"frame's mean must have shape \[2, 8\], got \[4"):
            logits(model, x, past_key_values=cache)
        cache.recover()
    halves = [replace(f, pair=None) for f in good.frames]
    assert TurboQuantCache(model, frame=some(*halves)).recipes[0].key.pair_scale == "none"
    asked = Recipe(Spec(3, center="auto", pair_scale="frame"))
    with refuses("pair_scale='frame' needs a frame with 'pair'"):
        logits(model, x, past_key_values=TurboQuantCache(model, asked, frame=some(*halves)))
    for bad, why in (
        (dict(mean=torch.full((2, 8), torch.nan)), "mean must be finite"),
        (dict(pair=torch.zeros(2, 8)), "pair must lie from 1/16 to 16"),
        (dict(mean=torch.ones(2, 8), pair=torch.ones(2, 4)), "must have one shape"),
    ):
        with refuses(why):
            LayerFrame(**bad)


def test_texts_and_ids_that_give_no_frame_are_refused():
    model = fresh()
    many = SimpleNamespace(input_ids=[VOCAB + 3] * 600)
    with refuses(f"tokenizer is of another model: it gives id {VOCAB + 3}"):
        TurboQuantCache(model, tokenizer=lambda text, truncation: many)
    with refuses("each text must have at least 6 tokens, got 0"):
        F.text_ids(model, Letters(), [""])
    with refuses("each text must have at least 6 tokens, got 0"):
        F.text_ids(model, Letters(), [])
    with refuses("ids must be .* at least 6 tokens"):
        find_frame(model, random_ids(2, 5))
    with refuses("ids must be a tensor", TypeError):
        find_frame(model, [[1, 2]])
    with refuses("skip must be"):
        find_frame(model, random_ids(2, 9), skip=-1)
    model.lm_head.weight.data[:] = torch.inf  # which no key is made of
    find_frame(model)
    model.model.layers[1].self_attn.k_proj.weight.data[:] = torch.inf
    with refuses("llama could not .*frame= must give one.*finite"):
        TurboQuantCache(model)


def test_a_model_that_reads_no_ids_needs_a_frame():
    "What its decoder makes of ids is an error; nothing of it stays, and a frame helps."
    model = fresh()
    model.get_decoder().forward = lambda inputs_embeds, **more: 1 / 0
    with refuses("llama could not read token ids .* frame= must give"):
        TurboQuantCache(model)
    assert TurboQuantCache(model, frame=given_frame(model)).report()["frame"] == "given"


# --- several at once, and broken off


def test_two_threads_find_one():
    model, found, errors = fresh(), [], []
    seen, ready = passes(model), threading.Barrier(4)

    def work():
        try:
            ready.wait()
            found.append(TurboQuantCache(model).frame)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [x.start() for x in threads], [x.join() for x in threads]
    assert not errors and len(seen) == 1 and all(x is found[0] for x in found)


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_a_search_that_is_broken_off_leaves_the_model_as_it_was(attention, folder):
    "Training, hooks, attention, what is remembered and what is kept; the next cache finds it."
    model = fresh()
    model.set_attn_implementation(attention)
    model.train(), model.model.layers[0].mlp.eval()  # a part has a mode of its own
    asked = transformers.AttentionInterface.get_interface.asked

    def look():
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        modes = [m.training for m in model.modules()], torch.is_grad_enabled()
        return modes, hooks, dict(asked), model.config._attn_implementation, set(vars(model))

    before, layer = look(), model.model.layers[1]

    def stop(*_):
        raise KeyboardInterrupt

    hook = layer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        TurboQuantCache(model)
    hook.remove()
    assert look() == before and not any(F._KEPT.get(model, {}).values())
    assert not folder.exists()
    found = TurboQuantCache(model).frame
    modes, hooks, *rest = look()
    assert (modes, rest) == (before[0], list(before[2:]))
    assert same_frames(found, frame_of(fresh()))


# --- the first use


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_the_first_use_is_inside_generate(mode, half):
    """By `enable`, whose first call of `generate` makes the cache, in any mode of gradients and
    under autocast; what is found is a plain tensor, of use in every other mode."""
    model, inputs = fresh(), prompt(2, 20)
    default = enable(model)
    F._KEPT.pop(model)  # as if the model had none yet
    for file in Path(os.environ["TURBOQUANT_CACHE"]).rglob("*.safetensors"):
        file.unlink()
    seen = passes(model)
    with mode(), torch.autocast("cpu", half, enabled=half is not None):
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert seen[0] == 4 * 248 and out.shape == (2, 24) and default.report["frame"] == DRAWN
    frame = frame_of(model)
    tensors = [x for f in frame.frames for x in f.tensors.values()]
    assert not any(x.is_inference() or x.requires_grad for x in tensors)
    assert {x.dtype for x in tensors} == {torch.float32}
    plain = frame_of(fresh(), None) if half is None else None
    assert plain is None or same_frames(frame, plain)
    again = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert half is not None or torch.equal(again, out)


def test_a_model_on_the_turboquant_attention_reads_by_its_own():
    "Of one that knows SDPA, and of Gemma 2, whose cap only eager attention has."
    for name in ("llama", "gemma2"):
        found = []
        for attention in ("eager", "turboquant"):
            model = fresh(name, seed=3)
            model.set_attn_implementation(attention)
            found.append(find_frame(model))
            assert model.config._attn_implementation == attention
        for one, other in zip(*(x.frames for x in found)):
            for n, x in one.tensors.items():
                torch.testing.assert_close(x, other.tensors[n], atol=1e-4, rtol=1e-2)


# --- kinds of models


def test_sliding_and_full_layers_turn_by_frequencies_of_their_own():
    model = fresh("gemma3_text")
    cache = TurboQuantCache(model)
    one, other = (x.inv_freq for x in cache.info.layers)
    assert one != other and {x.recipe.key.center for x in cache.layers} == {"pre_rope"}
    ids = random_ids(2, 40)
    frame = find_frame(model, ids, skip=0).frames
    held = transformers.DynamicCache()  # that frees nothing
    with torch.no_grad():
        model(ids, past_key_values=held)
    for x, layer, freq in zip(frame, held.layers, (one, other)):
        turn = lambda k, f: apply_rope(k, -torch.arange(40), inv_freq=torch.tensor(f))
        mean = lambda f: turn(layer.keys, f).mean((0, 2))
        torch.testing.assert_close(x.mean, mean(freq), atol=2e-3, rtol=1e-2)
        wrong = one if freq is other else other
        assert (x.mean - mean(wrong)).abs().max() > 0.05


@pytest.mark.parametrize("name", SHARERS)
def test_keys_that_several_layers_read_are_scaled_for_all_of_their_queries(name):
    model = fresh(name)
    frame = find_frame(model)
    assert len(frame.frames) == 2 and all(x.pair is not None for x in frame.frames)
    with torch.no_grad():  # the last layer reads the keys of the second
        attention = model.get_decoder().layers[3].self_attn
        scale = torch.linspace(0.1, 8, attention.q_proj.weight.shape[0])[:, None]
        attention.q_proj.weight.mul_(scale)
        attention.q_norm = torch.nn.Identity()
    changed = find_frame(model)
    first, second = zip(frame.frames, changed.frames)
    assert torch.equal(first[0].pair, first[1].pair)
    assert torch.equal(second[0].mean, second[1].mean)
    assert not torch.equal(second[0].pair, second[1].pair)


def test_a_model_without_rope_has_a_mean_that_stands_still():
    model = fresh("gpt2")
    frame = find_frame(model).frames
    assert all(x.tensors.keys() == {"fixed", "pair"} and x.center == "fixed" for x in frame)
    assert {r.key.center for r in TurboQuantCache(model).recipes} == {"fixed"}
    assert all(len(set(x.pair.flatten().tolist())) > 8 for x in frame)  # each channel its own


def test_latents_have_empty_frames():
    model = fresh("deepseek_v3")
    frame = find_frame(model)
    assert [x.tensors for x in frame.frames] == [{}, {}]
    cache = TurboQuantCache(model, frame=frame)
    assert cache.frame is None and {r.wants_frame for r in cache.recipes} == {False}


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
def test_layers_without_keys_have_none(name):
    model = fresh(name)
    cache = TurboQuantCache(model)
    assert len(cache.frame.frames) == len(cache.coded_layers)
    assert (len(cache.layers) > len(cache.coded_layers)) == (name != "falcon_h1")
    for x, frame in zip(cache.coded_layers, cache.frame.frames):
        assert x.frame is frame and frame.pair is not None and frame.fixed.shape == (2, 8)
    out = model.generate(**prompt(2, 20), past_key_values=cache, max_new_tokens=2)
    assert out.shape == (2, 22)


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Gemma3", "Llava"])
def test_a_model_with_eyes_reads_text(name):
    "By its language model alone; its pictures come later, at positions of their own."
    model = copy.deepcopy(with_eyes(name))
    seen = []
    for m in model.modules():
        if "Vision" in type(m).__name__:
            m.register_forward_pre_hook(lambda *_: seen.append(1))
    cache = TurboQuantCache(model)
    center = "fixed" if name.startswith("Qwen") else "pre_rope"
    assert not seen and {r.key.center for r in cache.recipes} == {center}
    assert all(x.pair is not None for x in cache.frame.frames)


# --- files


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_saved_cache_carries_its_frame(name, tmp_path):
    """Read back with a model that has none, or with its config: no pass, the same next tokens,
    the same frame after reset, and where it came from."""
    model, inputs = fresh(name), prompt(2, 40, padded=False)
    _, cache = generate(model, inputs, "turboquant", "k3v3", max_new_tokens=6)
    cache.save(tmp_path / "c")
    twin, ids = fresh(name), inputs["input_ids"][:, :3]
    seen = passes(twin)
    loaded = TurboQuantCache.load(tmp_path / "c", twin)
    assert not seen and loaded.report()["frame"] == cache.report()["frame"] == DRAWN
    others = [loaded, copy.deepcopy(cache), TurboQuantCache.load(tmp_path / "c", model.config)]
    want = logits(model, ids, past_key_values=cache)
    for other in others:
        assert (logits(model, ids, past_key_values=other) - want).abs().max() < 1e-5
        for x, y in zip(other.coded_layers, cache.coded_layers):
            assert torch.equal(x.store.key.frame.pair, y.store.key.frame.pair)
        other.reset()
        logits(model, ids, past_key_values=other)
        for x, y in zip(other.coded_layers, cache.coded_layers):
            assert torch.equal(x.store.key.frame.mean, y.store.key.frame.mean)
            assert torch.equal(x.store.key.frame.pair, y.store.key.frame.pair)
    given = TurboQuantCache(model, "k3v3", frame=given_frame(model))
    generate(model, inputs, "turboquant", cache=given, max_new_tokens=2)
    given.save(tmp_path / "d")
    again = TurboQuantCache.load(tmp_path / "d", model.config)
    assert again.report()["frame"] == given.report()["frame"] == "given"
