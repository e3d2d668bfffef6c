"""The transformers cache: every decoder family that is quick to build, every way of generating,
and no silent wrong answer."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from turboquant_nb.cache.store import expected_nbytes
from turboquant_nb.hf import TurboQuantCache, TurboQuantLayer, layer_frequencies
from turboquant_nb.quant.calibration import Calibration, LayerFrame
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe, as_recipe
from turboquant_nb.theory import centre
from turboquant_nb.theory.rope import apply_rope
from tests.helpers import (
    BASE,
    FAMILIES,
    HYBRID,
    MODES,
    QUIETLY,
    SLIDING,
    Calls,
    cache_for,
    covering_pairs,
    exact_recipe,
    generate,
    given_frame,
    prompt,
    refuses,
    seeded,
    texts,
    three,
    tiny,
)

from eval import architectures

pytestmark = QUIETLY


def test_an_attention_that_cannot_be_is_refused_before_the_first_layer():
    """What changes keys after the cache needs them decoded; a model that is set to read codes
    after its cache was made hears that before anything is computed."""
    model = architectures.small("DiffLlamaForCausalLM")
    cache = TurboQuantCache(model)
    model.set_attn_implementation("turboquant")
    refused = refuses("cannot serve diffllama: .* changes what a cache")
    with torch.no_grad(), refused:
        model(prompt(1, 5)["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 0
    with refused:
        TurboQuantCache(model)


# ---------------------------------------------------------------------------------


# They differ in what a cache meets: windows, softcap, learnt logits, no RoPE or another one,
# scores of their own, latents, recurrent states. test_architectures.py has every class.
DIFFER = (
    "llama mistral gemma2 gemma3_text gpt2 gpt_neox opt falcon cohere2 gpt_oss smollm3 "
    "deepseek_v3 qwen3_next lfm2 falcon_h1"
).split()


def two(model):
    "Decoded states under the model's fastest attention, and codes."
    return three(model)[-2:]


@pytest.mark.parametrize(
    "name, padded",
    covering_pairs([n for n in DIFFER if n != "lfm2"], [False, True])
    + [("llama", True), ("gemma3_text", False)],
)
def test_logits_of_codes_equal_logits_of_dense(name, padded):
    """The two modes of one cache, chunk after chunk (also chunks longer than a sliding window,
    no chunk of a few drafts: dense attention has one tensor for all of its queries), to fp32
    rounding; with and without a mask."""
    model, inputs, out = tiny(name), prompt(2, 60, padded=padded), {}
    for attention in ("eager", "turboquant"):  # sdpa has no softcap in older transformers
        model.set_attn_implementation(attention)
        cache, logits, at = cache_for(model, "k3v3"), [], 0
        if padded:
            cache.set_padding(inputs["attention_mask"])
        for n in (9, 1, 20, 1, 17) if name not in HYBRID else (40, 1, 1):
            mask = dict(attention_mask=inputs["attention_mask"][:, : at + n]) if padded else {}
            position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, at : at + n]
            extra = {} if name == "opt" else dict(position_ids=position)
            ids = inputs["input_ids"][:, at : at + n]
            with torch.no_grad():
                logits.append(model(ids, past_key_values=cache, **mask, **extra).logits)
            at += n
        out[attention] = torch.cat(logits, 1)[inputs["attention_mask"][:, :at].bool()]
    a, b = out.values()
    assert float((a - b).abs().max()) < 2e-4 * float(a.abs().max())


WAYS = covering_pairs([*MODES], ["llama", "gemma3_text", "falcon_h1", "gpt_oss"])
WAYS += [("beams", "qwen3_next"), ("prefill in chunks", "gemma3_text")]


@pytest.mark.parametrize("mode, name", WAYS)
def test_ways_of_generating(mode, name):
    model, inputs = tiny(name), prompt(2, 36)
    if mode == "prefill in chunks" and name in HYBRID:
        pytest.skip("transformers feeds a recurrent layer chunk by chunk only for some models")
    own = None
    for recipe in (exact_recipe(), "k3v3"):
        results = [generate(model, inputs, a, recipe, **MODES[mode])[0] for a in two(model)]
        assert all(torch.equal(x, results[0]) for x in results[1:])
        if own is None and name not in HYBRID:  # the exact window: as transformers' own cache
            model.set_attn_implementation("eager")
            torch.manual_seed(7)
            own = model.generate(
                **inputs,
                max_new_tokens=8,
                **{"do_sample": False, **MODES[mode]},
                **(
                    {"past_key_values": DynamicCache(config=model.config)}
                    if mode == "prefill in chunks"
                    else {}
                ),
            )
            assert torch.equal(own, results[0])


STEPWISE = {
    "k2v2-scalar": "k2v2-scalar",
    "k3v3": "k3v3",
    "short window": Recipe(Spec(2), Spec(2), sinks=1, recent=3),
    "no window": Recipe(Spec(2), Spec(2), sinks=0, recent=0),
}


@pytest.mark.parametrize(
    "recipe, name", covering_pairs([*STEPWISE], ["llama", "mistral", "gemma3_text"])
)
def test_drafts_give_the_tokens_of_greedy_decoding(recipe, name):
    """Prompt lookup and assisted decoding on codes of two and three bits, of a random model in
    float64 whose tokens depend on every code: token for token those of plain greedy decoding,
    the first pass included, whose drafts come with the prompt."""
    model, assistant, recipe = doubled(name), tiny(name, seed=3), STEPWISE[recipe]
    model.set_attn_implementation("eager")
    twin = copy.deepcopy(model)
    ids = texts(1, 12).repeat(1, 3)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    plain, one = generate(model, inputs, "turboquant", recipe, max_new_tokens=20)
    for kwargs in (
        dict(prompt_lookup_num_tokens=12),
        dict(assistant_model=assistant),
        dict(assistant_model=twin),
    ):
        got, cache = generate(model, inputs, "turboquant", recipe, max_new_tokens=20, **kwargs)
        assert torch.equal(got, plain), kwargs
        for x, y in zip(cache.coded_layers, one.coded_layers):
            n = min(x.held, y.held)
            x.crop(n - x.held), y.crop(n - y.held)
            assert x.store.length == y.store.length


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_what_serves_is_chosen_once_with_learnt_logits_too(name):
    "A rule is made once for its numbers, so what was found for it is found again in each step."
    model = tiny(name)
    cache = TurboQuantCache(model, "k3v3")
    generate(model, prompt(2, 40), "turboquant", cache=cache, max_new_tokens=6)
    for layer in cache.coded_layers:
        assert len(layer.store.memo["choices"]) == 1


def test_a_config_cannot_tell_drafts_from_the_prompt():
    """A cache made from a config serves prompt lookup all the same; the one call that it would
    listen to is left alone."""
    model = tiny()
    cache = TurboQuantCache(model.config, "k3v3", frame=given_frame(model))
    inputs = dict(input_ids=texts(1, 12).repeat(1, 3))
    generate(model, inputs, "turboquant", cache=cache, prompt_lookup_num_tokens=4)
    generate(model, inputs, "turboquant", "k3v3", prompt_lookup_num_tokens=4)
    hooks = [hook.__name__ for hook in model._forward_pre_hooks.values()]
    assert hooks == ["_begin"]  # that of drafts is gone


# -------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "falcon_h1"])
def test_conversation_continues(name):
    """A turn of several tokens: what leaves the exact ones between its first and its last token
    is read as codes by the decoded past, and exactly by attention on codes."""
    model, inputs = tiny(name), prompt(2, 20)
    for recipe in ("k4v4", exact_recipe()):
        results = []
        for attention in two(model):
            out, cache = generate(model, inputs, attention, recipe)
            turn = torch.cat([out, texts(2, 5, seed=9)], 1)
            more = torch.ones(2, turn.shape[1] - 20, dtype=torch.long)
            mask = torch.cat([inputs["attention_mask"], more], 1)
            said = dict(input_ids=turn, attention_mask=mask)
            results.append(generate(model, said, attention, cache=cache)[0])
            assert cache.get_seq_length() == 40
        assert torch.equal(*results)
    model.set_attn_implementation("eager")
    whole = model.generate(
        input_ids=results[0][:, :33], attention_mask=mask, max_new_tokens=8, do_sample=False
    )
    assert torch.equal(whole, results[0])


@torch.no_grad()
def test_a_state_beside_codes_follows_them(tmp_path):
    """Rows, copies, files and a reset take a layer's recurrent state along; what would leave it
    behind is refused."""
    model, ids = tiny("falcon_h1"), texts(3, 30)
    model.set_attn_implementation("eager")
    cache, token = TurboQuantCache(model, "k3v3"), ids[:, :1]
    first = model(ids, past_key_values=cache).logits
    step = lambda c, rows=slice(None): model(token[rows], past_key_values=c).logits
    kept = {name: copy.deepcopy(cache) for name in ("rows", "mask", "twice", "order")}
    kept["rows"].batch_select_indices(torch.tensor([2, 0]))
    kept["mask"].batch_select_indices(torch.tensor([True, False, True]))
    kept["twice"].batch_repeat_interleave(2)
    kept["order"].reorder_cache(torch.tensor([1, 1, 0]))
    cache.save(tmp_path / "mixed")
    back = TurboQuantCache.load(tmp_path / "mixed", model)
    want = step(cache)
    assert torch.equal(step(back), want) and torch.equal(step(back), step(copy.deepcopy(cache)))
    rows = dict(rows=[2, 0], mask=[0, 2], twice=[0, 0, 1, 1, 2, 2], order=[1, 1, 0])
    for name, of in rows.items():
        torch.testing.assert_close(step(kept[name], of), want[of], atol=1e-5, rtol=1e-5)
    with refuses("does not track past states", RuntimeError):
        cache.crop(-1)
    assert not cache.is_croppable and cache.get_seq_length() == 31
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, first)
    torch.testing.assert_close(step(cache), want)


# ------------------------------------------------------------------


PRE_ROPE = Recipe(Spec(4, center="pre_rope"), Spec(4), 2, 5)


STILL = {
    "gpt2": "no rotary embedding",
    "opt": "no rotary embedding",
    "cohere2": "pairs the channels",
    "glm4": "pairs the channels",
    "deepseek_v3": "one that is still",
}


ROTATED = "llama gemma2 phi stablelm gpt_oss smollm3".split()


@pytest.mark.parametrize("name", [*STILL, *ROTATED])
def test_what_rope_rotates_by(name):
    """Rotated back by the frequencies that were found, keys are what their projection gave;
    where RoPE is another, the reason is said, and a mean before RoPE is refused."""
    model = tiny(name)
    config = model.config.get_text_config(decoder=True)
    found, why = layer_frequencies(config)
    assert len(found) == config.num_hidden_layers
    if name in STILL:
        assert STILL[name] in why and set(found) == {None}
        with refuses("center='pre_rope' needs RoPE in each of its layers"):
            TurboQuantCache(model, PRE_ROPE)
        return
    assert not why and sum(x is None for x in found) == (
        name == "smollm3"
    )  # whose second layer has no RoPE
    made, attention = {}, [m for n, m in model.named_modules() if n.endswith("self_attn")]
    hooks = [
        m.k_proj.register_forward_hook(lambda m, i, o, at=i: made.update({at: o}))
        for i, m in enumerate(attention)
    ]
    cache, inputs = (
        DynamicCache(config=config),
        prompt(2, 40 if name not in SLIDING else 11, padded=False),
    )
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    for i, freq in enumerate(found):
        k = cache.layers[i].keys
        plain = made[i].view(k.shape[0], k.shape[2], k.shape[1], -1).transpose(1, 2)
        if freq is not None:
            turn = dict(rotary_dim=2 * len(freq), inv_freq=freq)
            k = apply_rope(k, -torch.arange(k.shape[2]), **turn)
        size = k.norm() / plain.norm()  # YaRN stretches
        assert torch.allclose(k, plain * size, atol=2e-4 * float(k.abs().max())), i


AXES = {
    "Qwen2VLText": dict(mrope_section=[2, 1, 1]),
    "Qwen3_5Text": {},
    "Glm4vText": dict(mrope_section=[2, 1, 1]),
}


@pytest.mark.parametrize("name", AXES)
def test_multi_axis_rope_takes_the_mean_after_it(name):
    """Such a model gives three positions for a token of a video; a mean before RoPE that
    rotates by the place in the store would be wrong. Before, presets took it for Qwen-VL."""
    config = getattr(transformers, name + "Config")(
        **BASE,
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, **AXES[name]},
    )
    found, why = layer_frequencies(config)
    assert set(found) == {None} and "several positions" in why
    cache = TurboQuantCache(config, "k3v3", frame=given_frame(config))
    assert all(r.key.center == "fixed" for r in cache.recipes)
    with refuses("several positions of each token"):
        TurboQuantCache(config, PRE_ROPE)


SHARERS = "gemma3n_text", "gemma4_text"


@pytest.mark.parametrize("name", SHARERS)
def test_layers_that_take_anothers_keys(name):
    """By presets, whose mean of keys asks how the model rotates: Gemma 3n and 4 rotate one
    tensor at a time, and presets were refused with torch's error. Gemma 4 brings only the last
    queries to layers that take another's keys: they were taken for the first ones (of a sliding
    window silently)."""
    if not hasattr(transformers, FAMILIES[name][0] + "Config"):
        pytest.skip("not in this transformers")
    model = doubled(name)
    for padded in (True, False):
        inputs = prompt(2, 30, padded=padded)
        own = model.generate(
            **inputs,
            past_key_values=DynamicCache(config=model.config),
            max_new_tokens=8,
            do_sample=False,
        )
        for recipe in (exact_recipe(), "k2v2-scalar"):
            (want, _), (got, cache) = (
                generate(model, inputs, a, recipe) for a in ("sdpa", "turboquant")
            )
            assert torch.equal(want, got) and (recipe == "k2v2-scalar" or torch.equal(got, own))
        assert {x.key.center for x in cache.recipes} == {"pre_rope"}
        model.set_attn_implementation("sdpa")
    ids = texts(1, 12).repeat(1, 3)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    plain, drafted = (
        generate(model, inputs, "turboquant", "k2v2-scalar", max_new_tokens=15, **kwargs)[0]
        for kwargs in ({}, dict(prompt_lookup_num_tokens=4))
    )
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize(
    "kind, why",
    [
        ("internlm3", ""),
        ("hunyuan_vl", ""),
        ("gemma4", ""),
        (
            "deepseek_v4",
            "layers of kind 'heavily_compressed_attention', which cannot be served",
        ),
        (
            "unlimited_ocr",
            "layers of kind 'reference_sliding_attention', which cannot be served",
        ),
        ("resnet", "must be of a decoder, got resnet"),
    ],
)
def test_presets_ask_every_kind_of_model(kind, why):
    """A preset asks how keys are rotated: of each of these kinds the answer was torch's or
    Python's error. Now a cache, or one sentence."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    config = transformers.CONFIG_MAPPING[kind]()
    if not why:
        cache = TurboQuantCache(config, "k3v3", frame=given_frame(config))
        assert cache.recipes[0].key.center in ("fixed", "pre_rope")
        return
    with refuses(why):
        TurboQuantCache(config, "k3v3")


def test_what_no_pass_could_serve_is_said_first():
    """Bits that the heads cannot have are refused when the cache is made, float8 states before
    anything is allocated, rows to reorder before any layer has changed."""
    model = tiny()
    with refuses("bits must have length d = 8, got 1"):
        TurboQuantCache(model, bits=(3,))
    cache, eighth = TurboQuantCache(model), torch.zeros(1, 2, 5, 8).to(torch.float8_e4m3fn)
    with refuses("bfloat16, float32 or float64, got torch.float8_e4m3fn", TypeError):
        cache.update(eighth, eighth, 0)
    assert not cache.layers[0].is_initialized
    _, cache = generate(model, prompt(2, 20), "turboquant")
    with refuses("takes a negative number of tokens to remove, got 3"):
        cache.layers[0].crop(3)
    with refuses("times must be"):
        cache.batch_repeat_interleave(0)
    before = [x.clone() for x in cache.layers[0].store.read()]
    with refuses("lie in 0..1, got 0..2"):
        cache.reorder_cache(torch.tensor([0, 2]))
    with refuses("beam_idx must", TypeError):
        cache.reorder_cache(torch.tensor([0.0]))
    assert all(map(torch.equal, cache.layers[0].store.read(), before))


@pytest.mark.parametrize(
    "attention, extra",
    [
        ("eager", dict(prefill_chunk_size=7)),
        ("sdpa", {}),
        ("turboquant", dict(prefill_chunk_size=7)),
        ("turboquant", dict(num_beams=2)),
    ],
)
def test_a_mask_that_lacks_a_token_in_generate(attention, extra):
    """At the first turn and at the next, where `generate` cuts off by the mask's length what is
    held: one sentence, and what was held is held."""
    model, inputs = tiny(), prompt(2, 20)
    model.set_attn_implementation(attention)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    how = dict(max_new_tokens=3, do_sample=False, **extra)
    why = "attention_mask must be .*a column for each of .* tokens held and .* new ones, got "
    with refuses(f"{why}.*19"):
        model.generate(
            ids, attention_mask=mask[:, :-1], past_key_values=cache_for(model), **how
        )
    out, cache = generate(model, inputs, attention, max_new_tokens=4)
    turn = torch.cat([out, ids[:, :2]], 1)
    mask = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], 1)
    again = "; or .*, 26., where generate.. got all 26 tokens of a conversation again"
    again = "" if "prefill_chunk_size" in extra else again
    # transformers below 5.23 cuts the mask to a chunk's tokens before anything sees it
    why = f"a column for each of 23 tokens held and .* new ones{again}, got .*(25|2, 7)"
    with refuses(why):
        model.generate(turn, attention_mask=mask[:, :-1], past_key_values=cache, **how)
    assert cache.get_seq_length() == 23
    if not extra:
        more = model.generate(turn, attention_mask=mask, past_key_values=cache, **how)
        assert more.shape == (2, 29) and cache.get_seq_length() == 28


def test_positions_of_ones_own_are_served():
    """Only what `generate` leaves of a prompt is refused: positions that a caller chose, or a
    mask with holes, are the model's business, and the cache stores what comes."""
    model, ids = tiny(), texts(1, 20)
    for places, mask in (
        (torch.arange(5)[None], None),
        (torch.arange(40, 45)[None], None),
        (torch.arange(15, 20)[None], torch.ones(1, 25, dtype=torch.long)),
    ):
        said = []
        for attention in two(model):
            model.set_attn_implementation(attention)
            cache = cache_for(model, exact_recipe())
            how = dict(position_ids=places, attention_mask=mask)
            with torch.no_grad():
                model(ids, past_key_values=cache)
                said.append(model(ids[:, :5], past_key_values=cache, **how).logits)
            assert cache.get_seq_length() == 25
        assert torch.allclose(*said, atol=1e-4)
    assert [hook.__name__ for hook in model._forward_pre_hooks.values()] == ["_begin"]


def test_a_cache_is_not_pickled():
    "The error was Python's: cannot pickle 'weakref.ReferenceType' object."
    with refuses("not pickled: cache.save.path. writes it", TypeError):
        pickle.dumps(TurboQuantCache(tiny()))


def test_recipe_per_layer():
    layers = dict(layer_types=["linear_attention", "full_attention"] * 2)
    model = tiny("qwen3_next", num_hidden_layers=4, **layers)
    recipes = ["k4v4", Recipe(Spec(3), Spec(2.5), residual="rescale")]
    cache = TurboQuantCache(model, recipes)  # two of the four layers hold keys and values
    settled = [as_recipe(r).settled(x) for r, x in zip(recipes, cache.frame.frames)]
    assert settled[0].key.center == "pre_rope" and settled[0].key.pair_scale == "frame"
    assert [x.recipe for x in cache.coded_layers] == cache.recipes == cache.recipe == settled
    inputs = prompt(1, 20, padded=False)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
    report = cache.report()
    assert report["recipe"] == [r.to_json() for r in settled]
    assert cache.coded_layers[0].store.recipe == settled[0]
    assert report["per_layer"][0] != report["per_layer"][1]
    with refuses("one recipe for each of the 2 layers .* a list of 4"):
        TurboQuantCache(model, ["k3v3"] * 4)
    with refuses("recipe must be", TypeError):
        TurboQuantCache(model, ["k3v3", 3])
    with refuses("k9v9"):
        TurboQuantCache(model, ["k3v3", "k9v9"])
    same_for_all = TurboQuantCache(model, ("k4v4", "k4v4"), bits=2.5)
    assert same_for_all.recipe == as_recipe("k4v4", bits=2.5).settled(cache.frame.frames[0])


# ----------------------------------------------------


def walk(obj, seen=None):
    """All tensors that the cache reaches through attributes and containers, the model's
    configuration and its frame, which all caches share, left out."""
    seen = {} if seen is None else seen
    if id(obj) in seen or isinstance(
        obj, (str, bytes, int, float, type(None), type, torch.dtype, torch.device)
    ):
        return []
    seen[id(obj)] = obj
    if isinstance(obj, torch.Tensor):
        return [obj]
    if isinstance(obj, dict):
        items = list(obj.values())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        items = list(obj)
    elif (
        hasattr(obj, "__dict__")
        and not isinstance(obj, (transformers.PreTrainedConfig, Calibration, LayerFrame))
        and not callable(obj)
    ):
        items = list(vars(obj).values())
    else:
        return []
    return [t for x in items for t in walk(x, seen)]


def walk_bytes(cache):
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in walk(cache)
            if t.numel()
        }.values()
    )


@pytest.mark.parametrize(
    "name, attention",
    [("llama", "sdpa"), ("gemma3_text", "turboquant"), ("deepseek_v3", "turboquant")],
)
def test_report_counts_every_tensor(name, attention, monkeypatch):
    # a table of angles of its own, however long another living cache's is
    monkeypatch.setattr(centre, "_SHARED_COS_SIN", weakref.WeakValueDictionary())
    model = tiny(name)
    for batch, kwargs in ((2, dict(max_length=64)), (3, {})):
        model.set_attn_implementation(attention)
        inputs = prompt(batch, 30)
        cache = cache_for(model, "k3v3", **kwargs)
        assert str(cache.report()) == "TurboQuantCache: empty" and cache.report()["nbytes"] == 0
        cache.set_padding(inputs["attention_mask"])
        model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False)
        r, again = cache.report(), copy.deepcopy(cache)
        for other in (again, TurboQuantCache(model, "k3v3")):
            assert other.frame is cache.frame  # the model's, for all of its caches
        assert all(x.frame is y.frame for x, y in zip(again.layers, cache.layers))
        assert r["nbytes"] == walk_bytes(cache) == sum(r["parts"].values()), (
            r["parts"],
            walk_bytes(cache),
        )
        assert (
            r["tokens"] == 34
            and r["batch"] == batch
            and r["layers"] == 2
            and len(r["per_layer"]) == 2
        )
        assert (
            abs(r["bits_per_value"] - 8 * r["nbytes"] / r["values"]) < 1e-9
            and abs(r["ratio_fp32"] - 2 * r["ratio_fp16"]) < 1e-9
        )
        assert "bits per value" in str(r) and Recipe.from_json(r["recipe"]) == cache.recipe
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 7), value=1)
        with torch.no_grad():  # three drafts, whose exact states a crop would need
            model(mask.new_full((batch, 3), 5), attention_mask=mask, past_key_values=cache)
        assert all(x.tail for x in cache.coded_layers)
        assert cache.report()["nbytes"] == walk_bytes(cache)


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_a_cache_is_freed_with_its_last_name(attention):
    "No circle holds its codes until Python's collector comes by."
    model = tiny()
    gc.disable()
    try:
        _, cache = generate(model, prompt(1, 9, padded=False), attention)
        store = weakref.ref(cache.layers[0].store)
        del cache
        assert store() is None
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------


def doubled(name):
    """A model in float64: rounding is far below what moves a code, so padded and unpadded rows
    hold the same codes on every processor."""
    return copy.deepcopy(tiny(name)).double()


def loop(model, inputs, cache, steps=5):
    "A plain forward loop, greedy: (logits of every step, tokens)."
    ids, mask, out, new = inputs["input_ids"], inputs["attention_mask"], [], []
    for _ in range(steps):
        position = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            logits = model(
                ids, attention_mask=mask, position_ids=position, past_key_values=cache
            ).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        out.append(logits), new.append(ids)
    return torch.stack(out, 1), torch.cat(new, 1)


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gemma3_text", "gpt2", "falcon"]
)
def test_padding_is_learnt_under_any_attention(name):
    """Nobody calls set_padding: logits, tokens, sinks and codes of each row of a
    left-padded batch are those of the row alone. An earlier cache took padding for sinks."""
    inputs, double = prompt(2, 30), doubled(name)
    for attention in three(double):
        exact = attention != "eager"  # whose softmax makes NaN of float64 rows that see nothing
        model = double if exact else tiny(name)
        model.set_attn_implementation(attention)
        cache = cache_for(model, "k3v3")
        logits, tokens = loop(model, inputs, cache)
        by_generate, other = generate(
            model, inputs, attention, "k3v3", padding=False, max_new_tokens=5
        )
        assert torch.equal(by_generate[:, 30:], tokens) or not exact
        assert {x.starts for c in (cache, other) for x in c.coded_layers} == {(0, 7)}
        for row, n in enumerate((0, 7)):
            one = cache_for(model, "k3v3")
            alone, same_tokens = loop(
                model, {k: x[row : row + 1, n:] for k, x in inputs.items()}, one
            )
            # in float32 rounding may move a code, and later logits with it; prefill is exact
            steps = 5 if exact else 1
            gap = (logits[row] - alone[0])[:steps].abs().max()
            assert float(gap) < 1e-4 * float(alone.abs().max()), (attention, row)
            assert torch.equal(tokens[row], same_tokens[0]) or not exact
            for x, y in zip(cache.coded_layers, one.coded_layers):
                for a, b in zip(x.store.parts, y.store.parts):
                    assert torch.allclose(
                        a.tensors["sinks"][row], b.tensors["sinks"][0], atol=1e-4
                    ), "exact tokens are the row's first real ones"
                got, want = x.store.read(n)[0][row], y.store.read()[0][0]
                assert float((got - want).norm() / want.norm()) < 1e-2


def test_listening_leaves_masks_alone():
    """The mask functions of transformers give what they gave, for other caches and without one;
    one listener for each, however many caches are made."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    for _ in range(2):
        TurboQuantCache(tiny())
    heard = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert (
        heard.listens
        and heard.__wrapped__ is sdpa_mask
        and "turboquant" not in ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    )
    mask = prompt(3, 9)["attention_mask"].bool()
    args = dict(batch_size=3, q_length=9, kv_length=9, attention_mask=mask, device="cpu")
    assert torch.equal(heard(**args), sdpa_mask(**args))


def test_set_padding_refuses():
    model = tiny()
    cache, other = TurboQuantCache(model), TurboQuantCache(model)
    for bad in (torch.tensor([[1, 1, 0]]), torch.ones(3), [[1, 1]]):
        with refuses("attention_mask", (ValueError, TypeError)):
            cache.set_padding(bad)
    other.set_padding(torch.ones(2, 5))
    with torch.no_grad():
        model(**prompt(2, 5, padded=False), past_key_values=cache)
        with refuses("before the first token"):
            cache.set_padding(torch.ones(2, 5))
        with refuses("2 sequences.* 3"):
            model(prompt(3, 5)["input_ids"], past_key_values=other)
    assert other.get_seq_length() == 0 and not other.layers[0].is_initialized
    inputs, fresh = prompt(2, 5), TurboQuantCache(model)
    wide = inputs["attention_mask"].repeat(2, 1)
    with refuses(r"attention_mask must be \[2, 5\].* got \[4, 5\]"):
        model(inputs["input_ids"], attention_mask=wide, past_key_values=fresh)
    assert fresh.get_seq_length() == 0


def test_right_padding():
    "Training-style batches: masked tokens at the end must not be seen later."
    model, ids = tiny(), texts(2, 20)
    mask = torch.ones_like(ids)
    mask[1, 14:] = 0
    noise = ids.clone()
    noise[1, 14:] = 5
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    step = dict(attention_mask=longer, position_ids=torch.tensor([[20], [14]]))
    out = []
    for attention in three(model):
        model.set_attn_implementation(attention)
        for x in (ids, noise):
            cache = cache_for(model, Recipe(Spec(), Spec(), recent=0))
            with torch.no_grad():
                model(x, attention_mask=mask, past_key_values=cache)
                out.append(model(ids[:, :1], past_key_values=cache, **step).logits)
    for x in out[1:]:
        assert torch.allclose(x, out[0], atol=1e-4)


# ----------------------------------------------------------------------------------------


def test_four_dimensional_masks():
    "A tree of drafts: a 4-D mask, bool or 0/-inf, at prefill and later, one for all heads."
    model, ids = tiny(), texts(2, 20)
    g = seeded(2)
    causal = lambda n: torch.ones(n, n, dtype=torch.bool).tril()
    pre = causal(20) & ((torch.rand(20, 20, generator=g) < 0.7) | torch.eye(20).bool())
    post = torch.cat([torch.rand(4, 20, generator=g) < 0.7, causal(4)], 1)
    low, results = torch.finfo(torch.float32).min, []
    forms = {
        "bool": lambda m: m.expand(2, 1, *m.shape),
        "additive": lambda m: torch.zeros(2, 1, *m.shape).masked_fill(~m, low),
    }
    for attention, kind in (
        ("eager", "additive"),
        ("sdpa", "bool"),
        *[("turboquant", x) for x in forms],
    ):
        model.set_attn_implementation(attention)
        form, cache = forms[kind], cache_for(model, Recipe(Spec(4), Spec(4), sinks=2, recent=4))
        with torch.no_grad():
            a = model(ids, attention_mask=form(pre), past_key_values=cache).logits
            b = model(ids[:, :4], attention_mask=form(post), past_key_values=cache).logits
        results.append(torch.cat([a, b], 1))
        if attention == "turboquant":
            assert cache.report()["reasons"]["prefill: a mask was given"] == 2
    for x in results[1:]:
        assert torch.allclose(x, results[0], atol=2e-4), float((x - results[0]).abs().max())


def test_mask_that_hides_the_first_tokens_at_prefill_only():
    "What a mask hides in one call it may show in the next: nothing may be lost."
    model, ids = tiny(), texts(1, 12)
    pre = torch.ones(12, 12, dtype=torch.bool).tril()
    pre[:, :3] = False
    pre[:3, 11] = True  # rows 0-2 look elsewhere, so columns 0-2 are seen by no one
    results = []
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = cache_for(model, Recipe(Spec(bits=4), Spec(bits=4), sinks=0, recent=0))
        with torch.no_grad():
            model(ids, attention_mask=pre[None, None], past_key_values=cache)
            if attention == "turboquant":  # the mask says where the row begins
                layer = cache.coded_layers[0]
                assert layer.starts == (3,) == tuple(layer.store.start.tolist())
            seen = torch.ones(1, 1, 1, 13, dtype=torch.bool)
            step = model(ids[:, :1], attention_mask=seen, past_key_values=cache)
            results.append(step.logits)
    assert torch.allclose(*results, atol=2e-4), float((results[0] - results[1]).abs().max())


# -------------------------------------------------------------------------------------


def test_output_attentions():
    "Weights exist only where transformers computes them: none are invented."
    model, inputs = tiny(), prompt(1, 6, padded=False)
    model.set_attn_implementation("turboquant")
    with torch.no_grad():
        out = model(**inputs, past_key_values=TurboQuantCache(model), output_attentions=True)
    assert not out.attentions


def test_reset_and_another_batch_size():
    model = tiny()
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = cache_for(model, "k3v3")
        for batch, length in ((3, 30), (2, 12), (1, 20)):
            inputs = prompt(batch, length, padded=batch > 1)
            fresh, _ = generate(model, inputs, attention, "k3v3")
            cache.set_padding(inputs["attention_mask"])
            got, _ = generate(model, inputs, attention, cache=cache)
            assert torch.equal(got, fresh) and cache.report()["batch"] == batch
            assert cache.report()["served"]["prefill"] >= 2
            cache.reset()
            assert cache.get_seq_length() == 0 and cache.report()["nbytes"] == 0
        with torch.no_grad():
            model(**prompt(2, 8, padded=False), past_key_values=cache)
            before = [x.clone() for x in walk(cache)]
            with refuses("keys of layer 0"):
                model(prompt(3, 2)["input_ids"], past_key_values=cache)
        assert all(map(torch.equal, walk(cache), before)) and cache.get_seq_length() == 8


@pytest.mark.parametrize(
    "attention, change, word",
    [
        ("eager", dict(num_key_value_heads=4), "KV heads 2, not 4"),
        ("sdpa", dict(num_attention_heads=2), "query heads 4, not 2"),
        ("turboquant", dict(head_dim=16), "head size 8, not 16"),
        ("turboquant", dict(num_hidden_layers=1), "layers 2, not 1"),
        ("sdpa", dict(num_hidden_layers=3), "layers 2, not 3"),
        (
            "turboquant",
            dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
            "RoPE .*10000.* not .*500.0",
        ),
    ],
)
@torch.no_grad()
def test_another_models_cache_is_refused(attention, change, word):
    "What differs is said before anything is stored, by a cache that holds tokens too."
    right, model = tiny("llama"), tiny("llama", **change)
    for x in (right, model):
        x.set_attn_implementation(attention)
    cache, ids = TurboQuantCache(right), texts(2, 9)
    refused = f"built for another model: .*{word}"
    for held in (0, 9):
        if held:
            right(ids, past_key_values=cache)
        with refuses(refused):
            model(ids, past_key_values=cache)
        with refuses(refused):
            model.generate(**prompt(2, 12), past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == held and cache.layers[0].is_initialized == bool(held)


@pytest.mark.parametrize("attention, shape", [("sdpa", (0, 5)), ("turboquant", (2, 0))])
def test_a_pass_of_nothing_is_refused(attention, shape):
    """No sequence or no token, at first and later: said in words, where the model would say
    that it cannot reshape."""
    model = tiny("llama")
    model.set_attn_implementation(attention)
    cache, nothing = cache_for(model), torch.zeros(shape, dtype=torch.long)
    with torch.no_grad():
        for held in (0, 9):
            with refuses(
                f"at least one sequence and one token, got {shape[0]} sequences of "
                f"{shape[1]} tokens"
            ):
                model(nothing, past_key_values=cache)
            assert cache.get_seq_length() == held
            if not held:
                model(texts(2, 9), past_key_values=cache)


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_sliding_layers_free_tiles(attention):
    "A long run: the bytes of a sliding layer stop growing."
    model = tiny("mistral", num_hidden_layers=1, max_position_embeddings=4096)
    model.set_attn_implementation(attention)
    cache, sizes = cache_for(model, "k3v3"), []
    with torch.no_grad():
        for i in range(12):
            logits = model(texts(1, 200, seed=i), past_key_values=cache).logits
            sizes.append(
                sum(cache.report()["per_layer"])
            )  # the table of cosines and sines grows with the length
    assert (
        logits.isfinite().all()
        and cache.get_seq_length() == 2400
        and sizes[-1] <= max(sizes[:6])
    )
    layer = cache.layers[0]
    assert layer.store.offset > 1500 and layer.store.nbytes == expected_nbytes(layer.store)
    with refuses("cannot crop"):
        cache.crop(-700)
    cache.crop(-100)
    assert cache.get_seq_length() == 2300 and isinstance(layer, TurboQuantLayer)


def test_operations_of_a_step_in_each_layer():
    """On a processor: as many in each, and few more than a cache that is not
    compressed takes; what a pass asks once does not grow with layers."""
    ids, counts = texts(1, 300), {}
    for layers in (2, 4):
        model = tiny("llama", num_hidden_layers=layers)
        for name, make in (
            ("sdpa", lambda m: DynamicCache(config=m.config)),
            ("turboquant", lambda m: cache_for(m, "k3v3")),
        ):
            model.set_attn_implementation(name)
            cache = make(model)
            with torch.no_grad():
                for n in (300, 1, 1):
                    model(ids[:, :n], past_key_values=cache)
                with Calls() as seen:
                    model(ids[:, :1], past_key_values=cache)
            counts[name, layers] = seen.n
        report = cache.report()
        (served,) = report["backends"]
        assert served in ("cpu", "torch") and report["backends"][served] == 3 * layers
        assert report["coded"] == {"torch": layers, "kernel": 3 * layers} or served == "torch"
    each = {name: (counts[name, 4] - counts[name, 2]) / 2 for name in ("sdpa", "turboquant")}
    once = counts["turboquant", 4] - 4 * each["turboquant"]
    assert each["turboquant"] - each["sdpa"] <= 170, each
    assert once <= each["turboquant"], (once, counts)  # less than one layer more


def test_a_crop_needs_the_whole_window_before_the_new_end():
    "`length - n - window + 1`, not `length - n`: the token at the new end still looks back."
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    more = dict(sliding_window=100, max_position_embeddings=4096)
    model = tiny("mistral", num_hidden_layers=1, **heads, **more)
    cache = TurboQuantCache(model, "k3v3", attention="dense")
    for _ in range(30):
        cache.update(*torch.randn(2, 1, 1, 100, 16), 0)
    layer, store = cache.layers[0], cache.layers[0].store
    assert store.offset > 0
    lost = store.length - store.offset - 5  # five tokens are left: their windows are freed
    with refuses("a sliding layer keeps its window of 100"):
        layer.crop(-lost)
    n = store.length - store.offset - 99  # the new end sees exactly what is there
    layer.crop(-n)
    assert store.length - store.offset == 99


@torch.no_grad()
def test_a_crop_that_a_layer_refuses_leaves_all_as_they_were():
    "Also where layers that see everything come first, which could have forgotten."
    kinds = ["full_attention", "sliding_attention"]
    model = tiny("gemma3_text", head_dim=16, layer_types=kinds, max_position_embeddings=2048)
    cache = TurboQuantCache(model)
    model(torch.ones(1, 1200, dtype=torch.long), past_key_values=cache)
    model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    with refuses("a sliding layer keeps its window of 12"):
        cache.crop(-700)
    assert [x.length for x in cache.coded_layers] == [1201, 1201]
