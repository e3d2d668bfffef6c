"turboquant plan: bytes against real caches, what fits, and bad input."

import copy
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from turboquant_nb.cli import plan
from turboquant_nb.cache.memory import shared_quantizer
from turboquant_nb.cache.packing import TILE
from turboquant_nb.hf.layer import MARGIN
from turboquant_nb import Recipe, Spec, TurboQuantCache
from tests.helpers import ONE_THREAD

from .conftest import SIZE, refused

pytestmark = ONE_THREAD

SMALL = {k: v for k, v in SIZE.items() if k != "head_dim"} | dict(
    num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "sliding": MistralConfig(**SMALL, sliding_window=200),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=32, layer_types=LAYERS, sliding_window=260),
    "latents": DeepseekV2Config(
        **SMALL | dict(num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=None),
        **dict(qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20),
        **dict(first_k_dense_replace=3, n_routed_experts=4, moe_intermediate_size=16),
    ),
}
RECIPES = [
    "k4v4",
    "k2v2",
    Recipe(Spec(bits=4, residual="qjl"), Spec(bits=2.5), 1, 5),
    "k3v3",
    Recipe(Spec(bits=3, center="none"), Spec(bits=1, scale_dtype="float32"), 0, 0),
]


def model_of(kind):
    "A random model with a config of its own."
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind])).eval()


def held(kind, recipe, tokens, batch, **how):
    "Bytes of a real cache after a prompt and two steps, as its report counts them."
    model = model_of(kind)
    model.set_attn_implementation("turboquant")
    cache, ids = TurboQuantCache(model, recipe, **how), torch.randint(2, 400, (batch, tokens))
    with torch.no_grad():
        for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
            model(part, past_key_values=cache)
    return cache.report()["nbytes"]


@pytest.mark.parametrize(
    "kind, recipe", [*zip(["llama", "qwen2", "mistral", "latents", "latents"], RECIPES)]
)
def test_planned_bytes_are_those_of_a_cache(kind, recipe):
    for tokens, batch in ((20, 2), (257, 1)):
        assert plan.CacheSize(CONFIGS[kind], recipe, torch.float32).bytes(
            tokens, batch
        ) == held(kind, recipe, tokens, batch, max_length=tokens)


@pytest.mark.parametrize(
    "kind, dtype",
    [("llama", torch.bfloat16), ("sliding", torch.float32), ("gemma3", torch.bfloat16)],
)
def test_planned_bytes_are_those_of_a_report_with_windows_and_in_each_type(kind, dtype):
    """A cache that grows, a prompt at once; a step makes RoPE's angles, and is taken back. The
    last prompt is the shortest of which a window frees a tile."""
    # one that is older than 256 rotations has a rotation of its own, and newer ones another
    shared_quantizer.cache_clear()
    model = model_of(kind).to(dtype)
    window = getattr(CONFIGS[kind], "sliding_window", None) or 200
    for tokens, batch in ((20, 2), (257, 1), (window - 1 + MARGIN + TILE, 1)):
        planned = plan.CacheSize(CONFIGS[kind], "k3v3", dtype)
        cache = TurboQuantCache(model, "k3v3")
        # torch 2.13's flash attention of bfloat16 fails under ATEN_CPU_CAPABILITY=avx2
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            for n in (tokens, 1):
                model(torch.randint(2, 400, (batch, n)), past_key_values=cache)
        cache.crop(-1)
        assert planned.bytes(tokens, batch) == cache.report()["nbytes"]


@pytest.mark.parametrize("kind", ["sliding", "gemma3"])
def test_the_most_bytes_never_fall_and_are_met(kind):
    planned = plan.CacheSize(CONFIGS[kind], "k3v3", torch.float32)
    most = [planned.most(n) for n in range(900)]
    assert most == sorted(most)
    seen = 0
    for n, bound in enumerate(most):
        seen = max(seen, planned.bytes(n))
        assert seen == bound


def test_the_type_of_states_is_that_of_the_config_unless_weights_say_another(call, tmp_path):
    config = copy.deepcopy(CONFIGS["llama"])
    config.dtype = torch.float32
    config.save_pretrained(tmp_path)
    for more, dtype in (("", "float32"), ("--bits-of-weights 16", "bfloat16")):
        data = call.json(f"plan --model {tmp_path} --context 300 --json {more}")
        kind = getattr(torch, dtype)
        size = plan.CacheSize(config, "k4v4", kind).bytes(300)
        assert data["dtype"] == dtype and data["caches"][1]["nbytes"] == size
        assert data["weights"] == kind.itemsize * data["parameters"]


def test_a_recipe_that_does_not_fit_is_told_beside_the_others(call):
    ask = "plan --model 4x2x72 --context 300 --recipe k3v3"
    code, out, err = call(f"{ask} k2v2 --json")
    data = json.loads(out)
    assert (code, err) == (0, "") and [x["cache"] for x in data["caches"]] == [
        "16 bits",
        "k3v3",
    ]
    assert "got bits=2 and d = 72, in all layers" in data["refused"]["k2v2"]
    assert "k2v2 does not fit: codebook=" in call(f"{ask} k2v2")[1]
    code, _, err = call("plan --model 4x2x72 --recipe k2v2")
    assert code == 2 and "d = 72" in err and err.count("\n") == 1


def test_a_config_without_heads_is_refused(call, tmp_path):
    "(What a cache says of it: tests/hf/test_guards.py.)"
    said = dict(num_attention_heads="a size in its config is 0", num_key_value_heads="KV heads")
    for name, words in said.items():
        text = json.dumps(CONFIGS["llama"].to_dict() | {name: 0})
        (tmp_path / "config.json").write_text(text)
        refused(call(f"plan --model {tmp_path}"), words)


def test_a_table_is_counted_once_however_layers_come_and_go():
    "A layer that is let go of leaves its address to the next one's tables, or does not."
    sizes = SMALL | dict(num_hidden_layers=48, layer_types=LAYERS * 16, head_dim=256)
    config = Gemma3TextConfig(**sizes, sliding_window=260)
    found = {plan.CacheSize(config, "k4v4", torch.bfloat16).tables for _ in range(6)}
    assert len(found) == 1, found


def test_what_a_process_made_before_changes_no_count():
    "Keys and values share a rotation; in a long process they may hold two that are equal."
    from turboquant_nb.theory import rotation

    config = Gemma3TextConfig(**SMALL | dict(head_dim=64))  # a rotation of 16 KiB
    size = lambda name: plan.CacheSize(config, name, torch.bfloat16).tables
    kept = size("k4v3")
    for f in (x for x in vars(rotation).values() if hasattr(x, "cache_clear")):
        f.cache_clear()  # values of 3 bits are remembered elsewhere, with the old rotation
    other, again = size("k3v3"), size("k4v3")
    assert again == kept and abs(other - kept) < 2000, "a few levels more, no second rotation"


@pytest.mark.parametrize("kind", CONFIGS)
def test_uncompressed_bytes_are_those_of_a_dense_cache(kind):
    from transformers import DynamicCache

    model, ids = model_of(kind), torch.randint(2, 400, (2, 300))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert plan.plain_bytes(CONFIGS[kind], 300, 2, 4) == sum(
        x.keys.nbytes + x.values.nbytes for x in cache.layers
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_counted_without_weights(kind):
    assert plan.parameters_of(CONFIGS[kind]) == sum(
        p.numel() for p in model_of(kind).parameters()
    )


def test_the_largest_context_fits_and_no_more(call, tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    ask = f"plan --model {tmp_path} --gpu 3MB --reserve 0B --batch 2 --json --context"
    code, out, err = call(f"{ask} 100")
    data = json.loads(out)
    assert (
        (code, err) == (0, "")
        and data["parameters"] == plan.parameters_of(CONFIGS["llama"])
        and data["weights"] == 2 * data["parameters"]
    )
    for row in data["caches"]:
        for context, fits in (
            (row["largest_context"], True),
            (row["largest_context"] + 1, False),
        ):
            again = call.json(f"{ask} {context}")
            found = next(x for x in again["caches"] if x["cache"] == row["cache"])
            assert (
                found["fits"] is fits
                and (found["nbytes"] + data["weights"] <= 3_000_000) is fits
            )


def test_a_folder_with_a_config_alone_and_shapes(call, tmp_path, tiny):
    assert call.json(f"plan --model {tiny} --json")["model_context"] == 8192
    code, out, _ = call("plan --model 32x8x128 --context 1000 --recipe k3v3")
    assert code == 0 and "Weights: not known" in out and "largest context" not in out
    out = call("plan --model 32x8x128 --weights 16GB --gpu 24GB")[1]
    assert "16 GB, as given" in out and "largest context" in out
    assert f"{2 * 32 * 8 * 128 * 32768 * 2 / 1e9:.3g} GB" in out  # uncompressed, 16 bits
    config = plan._config_of(1, 1, 8)
    assert (
        max(config.bos_token_id, config.eos_token_id) < config.vocab_size
    )  # transformers would warn of it beside the table
