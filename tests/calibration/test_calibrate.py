"""Head transforms and calibrations as a stranger would try them: every kind of decoder, files,
the hub without a network, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import (
    QUIETLY,
    generate,
    logits,
    longer,
    made,
    prompt,
    random_frame,
    refuses,
    seeded,
    texts,
    three,
    tiny,
)
from tests.hf.test_hf_vision import made as with_eyes
from turboquant_nb.calibration import fit as C
from turboquant_nb.theory import transforms as M
from turboquant_nb import (
    KVStore,
    Recipe,
    Spec,
    TurboQuantCache,
    calibrate,
    find_frame,
    load_calibration,
)
from turboquant_nb.calibration.fit import collect
from turboquant_nb.quant.calibration import save_calibration
from turboquant_nb.quant.recipe import as_recipe
from turboquant_nb.cache import memory
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.files import read_file, write_file
from huggingface_hub import constants
from turboquant_nb.testing import same

pytestmark = QUIETLY


def metric(transform):
    "What a transform weighs: W'W of each head."
    return transform.matrix.double().mT @ transform.matrix.double()


# --- one pass over every kind of decoder
# -----------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma3_text", "gpt_neox"])
def test_the_pass_sees_what_a_cache_codes_and_changes_nothing(name, monkeypatch):
    """Every layer; keys as the cache of this model centres them; the same model afterwards, bit
    for bit."""
    model, _ = made(name)
    ids, attention = texts(2, 40), model.config._attn_implementation
    before, queries, exact = logits(model, ids), [], C.exact_attention
    keep = lambda call: queries.append(call.query) or exact(call)
    monkeypatch.setattr(C, "exact_attention", keep)
    frame = find_frame(model, ids)
    rounded = [replace(x, mean=x.mean.bfloat16().float()) for x in frame.frames]
    frame = replace(frame, frames=tuple(rounded))  # as a cache holds it
    seen = collect(model, ids, frame=frame)
    assert model.config._attn_implementation == attention
    assert not any(m.training for m in model.modules())
    same(logits(model, ids), before)
    layers = [*range(model.config.num_hidden_layers)]
    assert seen.layers("key") == seen.layers("query") == layers and seen.tokens == 2 * 36
    recipe = Recipe(Spec(center="auto"), recent=64)  # the window holds all keys as they are
    cache = TurboQuantCache(model, recipe, frame=frame)
    assert {x.recipe.key.center for x in cache.layers} == {"pre_rope"}
    logits(model, ids, past_key_values=cache)
    # the first token is asked alone what a cache would hold
    queries = [q for q in queries if q.shape[2] == 40]
    for i, layer in enumerate(cache.layers):
        k = layer.store.read()[0] - layer.store.center("key", 0, 40).float()
        q = queries[i][:, :, 4:].reshape(2, k.shape[1], -1, k.shape[3])
        for kind, x in (("key", k[:, :, 4:]), ("query", q)):
            want = torch.einsum("bhnd,bhne->hde", x.double(), x.double())
            assert (seen.second[kind, i] - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("where", ["progress", "layer", "first token"])
def test_an_error_in_the_middle_leaves_the_model_as_it_was(where):
    model, _ = made("llama")
    model.set_attn_implementation("eager")
    ids, steps = texts(4), []
    before = logits(model, ids)

    def stop(*args):
        steps.append(args)
        if len(steps) == {"progress": 3, "layer": 2, "first token": 1}[where]:
            raise KeyboardInterrupt

    hook = (
        None if where == "progress" else model.model.layers[1].register_forward_pre_hook(stop)
    )
    with pytest.raises(KeyboardInterrupt):
        collect(model, ids, progress=stop if where == "progress" else None)
    if hook:
        hook.remove()
    assert model.config._attn_implementation == "eager"
    same(logits(model, ids), before)
    calls = []
    calibrate(model, ids, progress=lambda: calls.append(1))
    assert len(calls) == 4


def test_a_model_with_eyes_keeps_the_attention_of_each_part():
    model = copy.deepcopy(with_eyes("Gemma3")).float()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    named = lambda: [
        c._attn_implementation
        for c in (model.config, model.config.text_config, model.config.vision_config)
    ]
    before = named()
    found = calibrate(model, texts())
    assert named() == before and before[2] == "eager" and len(found.transforms) == 2
    assert (
        TurboQuantCache(model, calibration=found).recipes[0].key.rotation
        == found.transforms[0].name
    )


def test_latents_are_refused_before_reading():
    latents = tiny("deepseek_v3")
    with refuses("deepseek_v3 caches .* a token in layer 0 and attends to 4 x 12"):
        calibrate(latents, texts(), progress=lambda: pytest.fail("it began to read"))
    assert latents.config._attn_implementation != C.NAME


def test_what_shows_no_keys_is_refused_before_reading():
    "Attention of a model's own, and what is no model."
    gptj = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=61,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=8,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    if not gptj._can_set_attn_implementation():
        with refuses(r"gptj does not show its keys: the pass saw layers \[\] of \[0, 1\]"):
            calibrate(gptj, texts(), progress=lambda: pytest.fail("it began to read"))
    for bad in (3, None, torch.nn.Linear(2, 2)):
        with refuses("must be a transformers model", TypeError):
            calibrate(bad, texts())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model, found = made("llama")
    half = copy.deepcopy(model).to(dtype)
    own = calibrate(half, texts(4, 60, seed=3))
    for a, b in zip(own.transforms, found.transforms):
        assert (metric(a) - metric(b)).norm() < 0.1 * metric(b).norm()
    cache = with_transforms(half, own)
    generate(half, prompt(2, 20), "turboquant", cache=cache, padding=False, max_new_tokens=2)
    assert cache.layers[0].store.dtype == dtype


def test_autocast_and_other_default_dtypes():
    "Sums stay in fp32; a default dtype is not the model's."
    model, _ = made("llama")
    want = calibrate(model, texts())
    with torch.autocast("cpu", torch.bfloat16):
        cast = calibrate(model, texts())
    for a, b in zip(cast.transforms, want.transforms):
        assert (metric(a) - metric(b)).norm() < 0.05 * metric(b).norm()
    torch.set_default_dtype(torch.bfloat16)  # conftest.py puts it back
    again = calibrate(model, texts()).transforms
    assert [m.name for m in again] == [m.name for m in want.transforms]


# --- a cache with head transforms
# -----------------------------------------------------------------------------


def with_transforms(model, found, recipe="k4v4", mask=None, **kwargs):
    cache = TurboQuantCache(model, recipe, calibration=found, **kwargs)
    if mask is not None:
        cache.set_padding(mask)
    return cache


def test_maps_are_counted_once():
    "A report has their bytes among its tables; they are the same tensors in every cache."
    model, found = made("llama")
    model.set_attn_implementation("turboquant")
    bytes_of = []
    for c in (None, found, found):
        cache = TurboQuantCache(model, "k3v3", calibration=c)
        logits(model, texts(), past_key_values=cache)
        bytes_of.append(cache.report()["parts"]["tables"])
    assert (
        bytes_of[1] - bytes_of[0]
        == found.nbytes
        == sum(6 * 2 * 8 * 8 for _ in found.transforms)
        and bytes_of[2] == bytes_of[1]
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "gpt_neox"])
def test_every_attention_gives_the_same_tokens(name):
    "Left-padded, greedy; then a long chunk and a step."
    (model, found), inputs = made(name), prompt()
    mask, results, ends = inputs["attention_mask"], [], []
    full = longer(mask, 41)
    for attention in three(model)[-2:]:
        cache = with_transforms(model, found, mask=mask)
        results.append(generate(model, inputs, attention, cache=cache)[0])
        for x, m in zip(cache.coded_layers, found.transforms, strict=True):
            assert x.store.key.q.rotation.name == m.name
        cache = with_transforms(model, found, "k3v3", mask)
        for ids in (inputs["input_ids"], texts(3, 40, 4), texts(3, 1, 5)):
            seen = full[:, : cache.get_seq_length() + ids.shape[1]]
            said = logits(model, ids, attention_mask=seen, past_key_values=cache)
        ends.append(said)
    calls = cache.coded_layers[-1].calls
    assert calls["codes"] and (name == "gemma2" or calls["chunk"])
    assert torch.equal(*results)
    assert torch.allclose(*ends, atol=2e-4 * float(ends[0].abs().max()))


def test_recipes_and_what_a_calibration_refuses():
    model, found = made("llama")
    each = [
        replace(as_recipe("k4v4"), recent=3),
        replace(as_recipe("k2v2-scalar"), key=Spec(2.5)),
    ]
    got = TurboQuantCache(model, each, calibration=found).recipes
    assert [r.key.rotation for r in got] == [m.name for m in found.transforms]
    plain = [replace(r, key=replace(r.key, rotation="hadamard")) for r in got]
    want = [replace(r, key=replace(r.key, pair_scale="none")) for r in each]
    assert plain == [r.settled(x) for r, x in zip(want, found.frames)]
    assert {r.key.center for r in got} == {"pre_rope", "none"}  # the second asked for none
    assert Recipe.from_json(got[0].to_json()) == got[0] != got[1]
    with refuses("QJL"):
        TurboQuantCache(model, Recipe(residual="prod"), calibration=found)


def test_the_pair_scale_of_a_frame():
    """That of the moments that transforms are found from, one for both channels of a pair; a
    transform that was found does its work in its place."""
    model, _ = made("llama")
    ids = texts(4, 60)
    found = calibrate(model, ids)
    seen = collect(model, ids, frame=find_frame(model, ids))
    d = found.transforms[0].d
    for i, frame in enumerate(found.frames):
        m, c = (seen.mean_square(x, i).diagonal(dim1=1, dim2=2) for x in ("query", "key"))
        scales, wrong = M.pair_scales(m, c, d), M.pair_scales(c, m, d)
        assert scales.std() > 0.01 and torch.equal(scales[:, : d // 2], scales[:, d // 2 :])
        off = [(frame.pair / x - 1).abs().max() for x in (scales, wrong)]
        assert off[0] < 2**-7 < off[1]
    cache = TurboQuantCache(model, "k3v3", calibration=found)
    assert cache.recipes[0].key.rotation == found.transforms[0].name
    assert {x.key.pair_scale for x in cache.recipes} == {"none"}


# --- odd data
# --------------------------------------------------------------------------------------


def test_ids_that_are_no_windows():
    (model, _), ids = made("llama"), texts()
    with refuses("batch must be an integer of at least"):
        collect(model, ids, batch=0)
    with pytest.raises(IndexError):
        collect(model, ids + 1000)
    assert model.config._attn_implementation == "sdpa"
    want = calibrate(model, ids)
    again = calibrate(model, ids.to(torch.uint8), batch=1).transforms
    assert [m.name for m in again] == [m.name for m in want.transforms]
    assert (
        calibrate(model, ids[:, :6]).header["tokens"] == 4
        and calibrate(model, ids[:, :2], skip=0).header["tokens"] == 4
    )


def usable(found, model):
    "The transforms are well conditioned, and a cache with them answers."
    for m in found.transforms:
        assert float(torch.linalg.cond(m.matrix.double()).max()) < 1e4
        x = torch.randn(1, m.heads, 9, m.d)
        assert (m.inverse(m.apply(x)) - x).abs().max() < 1e-3
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model, Recipe(recent=0), calibration=found)
    logits(model, texts(), past_key_values=cache)
    assert logits(model, texts(2, 1), past_key_values=cache).isfinite().all()


def test_a_text_of_one_token():
    "Moments of rank one, and keys that the centre takes away."
    model, _ = made("llama")
    usable(calibrate(model, torch.full((2, 40), 7), shrink=0.0), copy.deepcopy(model))


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_states_that_are_not_finite(bad):
    model = copy.deepcopy(made("llama")[0])
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0] = bad
    with refuses("must be finite"):
        calibrate(model, texts())


# --- files
# -----------------------------------------------------------------------------------------


def test_calibrations_come_back_and_others_do_not(tmp_path):
    "Of another kind, or missing; of what is broken tests/ground/test_files.py has the rest."
    _, found = made("llama")
    path, bad = tmp_path / "c.safetensors", tmp_path / "bad"
    save_calibration(found, path)
    back = load_calibration(str(path))
    assert back.header == found.header and load_calibration(found) is found
    # one copy in a process
    assert all(a is b for a, b in zip(back.transforms, found.transforms, strict=True))
    for one, other in zip(back.frames, found.frames, strict=True):
        assert one.tensors.keys() == other.tensors.keys() == {"mean", "fixed", "pair"}
        assert all(torch.equal(x, other.tensors[name]) for name, x in one.tensors.items())
    assert found.frames[0].mean.shape == (2, 8)
    write_file(bad, {"x": torch.ones(1)}, {}, "turboquant-nb small 1")
    with refuses("must have format 'turboquant-nb calibration 3'"):
        load_calibration(bad)
    with refuses("is neither a file nor found on the hub", FileNotFoundError):
        load_calibration(tmp_path)


def filled(n=360, heads=2, d=16):
    """A store whose keys have a head transform and a mean before RoPE: two rows, one of them
    padded; a prompt, a chunk, single tokens. What attention to it gives: tests/kernels."""
    g = seeded(1)
    queries, keys = (x @ x.mT for x in torch.randn(2, heads, d, 2 * d, generator=g).double())
    key = Spec(2, center="pre_rope", rotation=M.fit_head_transform(queries, keys).name)
    more = dict(inv_freq=0.1 ** torch.arange(3), frame=random_frame(heads, d, 6))
    recipe = Recipe(key, Spec(4), sinks=3, recent=9)
    store = KVStore(recipe, 2, heads, d, dtype=torch.bfloat16, **more)
    store.set_range(start=torch.tensor([0, 5]))
    k, v = torch.randn(2, 2, heads, n, d, generator=g).bfloat16()
    for a, b in ((0, 200), (200, n - 12), *((t, t + 1) for t in range(n - 12, n))):
        store.append(k[:, :, a:b], v[:, :, a:b])
    return store


def after(stores):
    "What stores read and hold when five tokens more were coded."
    out = []
    for s in stores:
        wave = lambda d, s=s: torch.linspace(-3, 2, s.batch * s.heads * 5 * d).sin()
        new = (wave(x.q.d).view(s.batch, s.heads, 5, -1).to(s.dtype) for x in s.parts)
        s.append(*new)
        out += [*s.read(), *state_of(s)[0].values()]
    return out


def test_saved_states_bring_their_maps(tmp_path, monkeypatch):
    """A store and a static cache, read where nobody knows of their maps, as in a process that
    has files alone: every tensor, bit for bit, what they stand for, and what they code next."""
    model, found = made("llama")
    cache = with_transforms(model, found, "k4v3", max_length=280, static=True)
    how = dict(padding=False, disable_compile=True)
    generate(model, prompt(2, 260, padded=False), "turboquant", cache=cache, **how)
    store = filled()
    cache.save(tmp_path / "cache")
    write_file(tmp_path / "store", *state_of(store), "store")
    want = after([store, *(x.store for x in cache.layers)])
    monkeypatch.setattr(M, "_registered", {})
    memory.shared_quantizer.cache_clear(), memory._coder.cache_clear()
    for recipe in (store.recipe, cache.recipes[0]):
        with refuses("is not known here: load the calibration that it is of first"):
            KVStore(recipe, 1, 2, 16)
    again = store_of(*read_file(tmp_path / "store", "store", "store"))
    back = TurboQuantCache.load(tmp_path / "cache", model.config)
    got = after([again, *(x.store for x in back.layers)])
    for a, b in zip(want, got, strict=True):
        same(b, a.contiguous(), allow_empty=True)


def test_a_calibration_on_the_hub_without_a_network(tmp_path, monkeypatch):
    model, found = made("llama")
    repository, commit = tmp_path / "models--some-one--has-transforms", "0123456789" * 4
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    save_calibration(found, repository / "snapshots" / commit / "calibration.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = TurboQuantCache(model.config, calibration="some-one/has-transforms")
    assert cache.recipe[0].key.rotation == found.transforms[0].name
    for name in ("some-one/else", "nothing-at-all", "./no/such/file.safetensors"):
        with refuses(f"^{name} is neither a file nor found on the hub: ", FileNotFoundError):
            load_calibration(name)
