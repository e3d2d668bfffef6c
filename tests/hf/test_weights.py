"""Weights as people load them: in 8 and 4 bits by other packages, and with adapters. The cache
sees the states that come out, so a cache that holds all tokens exactly changes no token."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.quant.quantizer import Recipe, Spec

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = Recipe(Spec(3), Spec(3), recent=512)
HOW = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
IDS = torch.arange(80).reshape(2, 40) * 7 % 255 + 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "A tiny Llama's folder."
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **more).eval()


def int8():
    "torchao's; it is not installed: each process that imports transformers would show it."
    name = "torchao.quantization"
    found = pytest.importorskip(name, reason="torchao is not installed")
    return found.Int8WeightOnlyConfig()


def quantized(config):
    return lambda folder: load(folder, quantization_config=config(), device_map="cpu")


def adapted(config, finish=lambda m: m):
    return lambda folder: finish(peft.get_peft_model(load(folder), config)).eval()


LORA = peft.LoraConfig(
    r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
)
WAYS = {
    "bitsandbytes, 8 bits": quantized(
        lambda: transformers.BitsAndBytesConfig(load_in_8bit=True)
    ),
    "bitsandbytes, 4 bits": quantized(
        lambda: transformers.BitsAndBytesConfig(load_in_4bit=True)
    ),
    "torchao, int8": quantized(lambda: transformers.TorchAoConfig(quant_type=int8())),
    "LoRA": adapted(LORA),
    "LoRA, merged": adapted(LORA, lambda m: m.merge_and_unload()),
    "prompt tuning": adapted(
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers_own_cache(saved, way):
    model = WAYS[way](saved)
    want = model.generate(IDS, **HOW)
    model.set_attn_implementation("turboquant")
    exact, coded = TurboQuantCache(model, EXACT), TurboQuantCache(model, "k3v3")
    assert torch.equal(model.generate(IDS, past_key_values=exact, **HOW), want)
    model.generate(IDS, past_key_values=coded, **HOW)
    assert coded.report()["served"]["codes"] == 2 * 7


def test_a_prefix_of_states_is_refused_at_once(saved):
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = adapted(config)(saved)
    with pytest.raises(ValueError, match="PREFIX_TUNING puts a cache of its own"):
        TurboQuantCache(model, "k3v3")
    TurboQuantCache(model.get_base_model(), "k3v3")
