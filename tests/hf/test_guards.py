"""What would go wrong without a word is refused: states of other weights, gradients that codes
would cut, prompts on a used cache whatever it was made from, codes that heads cannot have, and
adapters that come and go."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from transformers import DynamicCache

from turboquant_nb import Recipe, Spec, TurboQuantCache, enable, preset
from turboquant_nb.hf import attention
from turboquant_nb.hf.cache import _check_chains
from turboquant_nb.hf.model_info import ModelInfo, weights_of
from turboquant_nb.kernels import ops
from turboquant_nb.kernels.cpu import Library
from tests.helpers import QUIETLY, given_frame, prompt, refuses, tiny

pytestmark = QUIETLY
LORA = dict(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
HOW = dict(max_new_tokens=4, do_sample=False)
IDS = prompt(1, 40)["input_ids"]
NEXT = prompt(1, 3, seed=5)["input_ids"]


def alone(model):
    "A copy that no cache was made from: it has no hooks."
    new = copy.deepcopy(model)
    new._forward_pre_hooks.clear()
    new._forward_hooks.clear()
    return new


def filled(model, **how):
    cache = TurboQuantCache(model, **how)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return cache


@pytest.fixture
def file(tmp_path):
    "A saved cache of the tiny Llama."
    filled(tiny()).save(tmp_path / "a")
    return tmp_path / "a"


# ---------------------------------------------------------------------------------


def other():
    return tiny(seed=3)


def merged():
    "The same norms and biases: only two matrices of each layer are others."
    model = peft.get_peft_model(alone(tiny()), peft.LoraConfig(**LORA))
    return model.merge_and_unload().eval()


def adapted():
    return peft.get_peft_model(alone(tiny()), peft.LoraConfig(**LORA)).eval()


def half():
    return alone(tiny()).half()


def one_matrix():
    model = alone(tiny())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    return model


@pytest.mark.parametrize("make", (other, merged, adapted, half, one_matrix))
def test_a_file_is_refused_by_other_weights_and_both_are_named(file, make):
    model, config = make(), copy.deepcopy(tiny().config)
    mine, its = (weights_of(m)["digest"] for m in (tiny(), model))
    kind = "float16" if make is half else "float32"
    why = rf"\(float32, .*weights {mine}.*the model is .*\({kind}, .*weights {its}"
    refused = refuses(why)
    with refused:
        TurboQuantCache.load(file, model)
    cache = TurboQuantCache.load(file, config)  # no weights to compare: the first pass does it
    with refused, torch.no_grad():
        model(NEXT, past_key_values=cache)
    assert cache.get_seq_length() == 40
    with torch.no_grad():
        alone(tiny())(NEXT, past_key_values=cache)
    assert cache.get_seq_length() == 43


def test_adapters_that_are_switched_off_are_other_weights(tmp_path):
    model = adapted()
    filled(model).save(tmp_path / "a")
    assert TurboQuantCache.load(tmp_path / "a", model).get_seq_length() == 40
    refused = refuses("with adapter default .*; the model is llama .f")
    with refused, model.disable_adapter():
        TurboQuantCache.load(tmp_path / "a", model)


def test_a_file_without_a_digest_needs_a_config(tmp_path):
    model = alone(tiny())
    cache = filled(model)
    want, config = cache.weights, model.config
    assert want == weights_of(model)
    cache._model = lambda: None  # its model is gone
    cache.save(tmp_path / "a")
    with refuses("does not say whose weights its states are of"):
        TurboQuantCache.load(tmp_path / "a", model)
    assert TurboQuantCache.load(tmp_path / "a", config).get_seq_length() == 40


@pytest.mark.parametrize("where", ("disk", "both"))
def test_weights_that_lie_elsewhere_are_the_same(where, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, device = alone(tiny()), torch.device("cpu")
    want = weights_of(model)
    if where == "disk":
        model = accelerate.disk_offload(model, tmp_path, execution_device=device)
    else:
        parts = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
        places = dict.fromkeys(parts, "cpu") | {"model.layers.0": "cpu"}
        places["model.layers.1"] = "disk"
        how = dict(main_device="cpu", offload_dir=tmp_path)
        model = accelerate.dispatch_model(model, places, **how)
    away = [p.is_meta for p in model.parameters()]
    assert any(away) and weights_of(model) == want
    assert [p.is_meta for p in model.parameters()] == away  # nothing stays behind


@pytest.mark.parametrize("how", (dict(load_in_8bit=True), dict(load_in_4bit=True)))
def test_quantised_weights_have_a_digest(how, tmp_path):
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**how)
    for seed in (0, 1):
        tiny("llama", seed, hidden_size=64).save_pretrained(tmp_path / str(seed))
    load = lambda seed: transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / str(seed), quantization_config=config, device_map="cpu"
    )
    one, again, another = (weights_of(load(seed))["digest"] for seed in (0, 0, 1))
    assert one == again != another


# ---------------------------------------------------------------------------------


def test_the_first_chunk_passes_its_gradient_on_and_a_later_one_is_refused():
    model, grads = tiny(), []
    for cache in (TurboQuantCache(model), DynamicCache(config=model.config)):
        soft = model.get_input_embeddings()(IDS).detach().requires_grad_()
        out = model(inputs_embeds=soft, past_key_values=cache).logits.square().sum()
        grads += torch.autograd.grad(out, soft)
    assert torch.equal(*grads)
    cache = TurboQuantCache(model)
    model(inputs_embeds=soft, past_key_values=cache)
    with refuses("codes pass no gradient.*no_grad.*DynamicCache"):
        model(NEXT, past_key_values=cache)
    assert {x.held for x in cache.coded_layers} == {40}
    with torch.inference_mode():
        model(NEXT, past_key_values=cache)


@pytest.mark.parametrize("of_model", (True, False))
def test_gradient_checkpointing_is_refused(of_model):
    model = alone(tiny()).train()
    model.gradient_checkpointing_enable()
    how = {} if of_model else dict(frame=given_frame(model))
    cache = TurboQuantCache(model if of_model else model.config, **how)
    with refuses("gradient checkpointing takes every cache away"):
        model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 0


# ---------------------------------------------------------------------------------


def made_from(what, model):
    "A cache of the model, of its config, or of a model that was copied."
    how = dict(frame=given_frame(model)) if what == "config" else {}
    return TurboQuantCache(dict(model=model, config=model.config, copied=tiny())[what], **how)


@pytest.mark.parametrize("what", ("model", "config", "copied"))
def test_another_prompt_on_a_used_cache_is_refused(what):
    """43 tokens are held; of 30 others generate() would cut half. Also where the model that
    comes second is another object than the one that came first."""
    model = alone(tiny())
    cache, another = made_from(what, model), prompt(1, 30, seed=3)["input_ids"]
    model.generate(input_ids=IDS, past_key_values=cache, **HOW)
    for second in (model, alone(model)):
        with refuses("For another prompt make a new cache"):
            second.generate(input_ids=another, past_key_values=cache, **HOW)
        assert cache.get_seq_length() == 43


@pytest.mark.parametrize("what", ("model", "config", "copied"))
def test_a_pass_without_use_cache_is_refused(what):
    model = alone(tiny())
    with refuses("pass use_cache=True"):
        cache = made_from(what, model)
        model.generate(input_ids=IDS, past_key_values=cache, use_cache=False, **HOW)


@pytest.mark.parametrize("of", (lambda m: m, lambda m: m.config, lambda m: m.base_model.model))
def test_adapters_are_not_switched_within_a_text(of):
    model = adapted()
    cache = TurboQuantCache(of(model), frame=given_frame(tiny()))
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        refused = refuses(r"of adapters \['default'\], and \[\] take")
        with model.disable_adapter(), refused:
            model(NEXT, past_key_values=cache)
        assert cache.get_seq_length() == 40
        model(NEXT, past_key_values=cache)
        cache.reset()
        with model.disable_adapter():
            model(NEXT, past_key_values=cache)


# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", (None, "an/id", tiny().config, tiny().model))
def test_what_cannot_generate_is_no_model_to_enable(what):
    with refuses("must be one of transformers that generates, got", TypeError):
        enable(what)


def test_prefix_tuning_around_an_enabled_model_is_refused():
    base = alone(tiny())
    enable(base)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(base, config).eval()
    with refuses("PREFIX_TUNING puts a cache of its own"):
        model.generate(input_ids=IDS, **HOW)


@pytest.mark.parametrize(
    "setting", (dict(cache_implementation="static"), dict(use_cache=False))
)
def test_what_a_model_brings_as_its_settings_gives_way_and_what_a_call_asks_for_does_not(
    setting,
):
    model = alone(tiny())
    default = enable(model, "k3v3")
    want = model.generate(input_ids=IDS, **HOW)
    report = default.report
    for name, value in setting.items():
        setattr(model.generation_config, name, value)
    passed = copy.deepcopy(model.generation_config)  # as pipelines pass it
    for more in ({}, dict(generation_config=passed)):
        default.report = None
        assert torch.equal(model.generate(input_ids=IDS, **more, **HOW), want)
        assert default.report["nbytes"] == report["nbytes"]
    default.report = None
    model.generate(input_ids=IDS, **setting, **HOW)
    assert default.report is None


# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size, recipe", ((72, "k3v3-trellis"), (512, "k2v2")))
def test_codes_that_heads_cannot_have_are_refused_where_a_cache_is_made(size, recipe):
    model = tiny("llama", head_dim=size)
    with refuses(rf"d = {size}, in all layers: give these .* 'k3v3' or 'k2v2-scalar'"):
        TurboQuantCache(model, recipe)
    for scalar in ("k3v3", "k2v2-scalar"):
        TurboQuantCache(model, scalar)


@pytest.mark.parametrize("size, read", ((80, False), (128, True)))
def test_codes_that_no_kernel_reads_are_refused_on_a_gpu(size, read):
    "Unless PyTorch is asked for: it attends to them far slower than to what they stand for."
    info = ModelInfo(tiny("llama", head_dim=size))
    recipes = [preset("k2v2")] * len(info.coded)
    gpu = torch.device("cuda")
    for device, backend in ((torch.device("cpu"), "auto"), (None, "auto"), (gpu, "torch")):
        _check_chains(info, recipes, device, backend)
    if read:
        return _check_chains(info, recipes, gpu, "auto")
    for backend in ("auto", "triton"):
        why = f"layer 0: .* got 2 and {size}. Without a kernel .* 8 to 16 .* 'k2v2-scalar'"
        with refuses(why):
            _check_chains(info, recipes, gpu, backend)
    scalar = [preset("k2v2-scalar")] * len(info.coded)
    _check_chains(info, scalar, gpu, "auto")


def test_the_layers_that_cannot_are_named():
    "Gemma 4 has wide heads in its layers that see everything."
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=4,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=512,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=0,
    )
    with refuses(r"d = 512, in layers \[1, 3\]"):
        TurboQuantCache(config, "k3v3-trellis")
    TurboQuantCache(config, ["k3v3-trellis", "k3v3"] * 2, frame=given_frame(config))


@pytest.mark.parametrize("change", (dict(n_head=0), dict(num_key_value_heads=0)))
def test_a_model_without_heads_is_refused(change):
    kind = "Qwen3" if "n_head" not in change else "GPT2"
    with refuses("must have attention and KV heads, got"):
        TurboQuantCache(getattr(transformers, f"{kind}Config")(**change))


# ---------------------------------------------------------------------------------


def steps(recipe="k3v3", told=False, **how):
    "A cache after three steps, and what was said of it."
    model = tiny()
    if not told:
        attention._say_fallback.cache_clear()
    cache = TurboQuantCache(model, recipe, **how)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.generate(input_ids=IDS, past_key_values=cache, **HOW)
    return cache.report(), [str(x.message) for x in said if "are served" in str(x.message)]


def test_reasons_say_what_served_and_a_fallback_is_told_once(monkeypatch):
    if not ops.BACKENDS["cpu"].library.why:
        report, said = steps()
        assert set(report["backends"]) == {"cpu"}
        assert (report["reasons"], said) == ({}, [])
    report, said = steps(Recipe(Spec(4, residual="qjl"), Spec(3)))
    (why,) = report["reasons"]
    assert "sketch" in why and not said  # of the recipe, not of the machine
    report, said = steps(backend="torch")
    assert (set(report["reasons"]), said) == ({"backend='torch' was asked for"}, [])
    missing = Library(compiler="no-such-compiler")
    monkeypatch.setattr(ops.BACKENDS["cpu"], "library", missing)
    report, said = steps()
    assert set(report["reasons"]) == {missing.why}
    assert set(report["backends"]) == {"torch"}
    why = "no C++ compiler was found (looked for no-such-compiler)"
    assert said == [f"decoding steps are served by backend 'torch': {why}"]
    assert steps(told=True)[1] == []
