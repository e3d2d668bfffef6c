"""Weights as people load them: in 8 and 4 bits by other packages, and with adapters. The cache
sees the states that come out, so a cache that holds all tokens exactly changes no token."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from turboquant_nb import Recipe, Spec, TurboQuantCache
from tests.helpers import refuses, seeded

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = Recipe(Spec(3), Spec(3), recent=512)
HOW = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
IDS = torch.arange(80).reshape(2, 40) * 7 % 255 + 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "A tiny Llama's folder."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    transformers.LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    return folder


def load(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **more).eval()


def bitsandbytes(**how):
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**how)


def int8():
    "torchao's; it is not installed: each process that imports transformers would show it."
    name = "torchao.quantization"
    found = pytest.importorskip(name, reason="torchao is not installed")
    return found.Int8WeightOnlyConfig()


def quantized(config):
    return lambda folder: load(folder, quantization_config=config(), device_map="cpu")


def adapted(config, finish=lambda m: m):
    return lambda folder: finish(peft.get_peft_model(load(folder), config)).eval()


def tiny_config(**more):
    return transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        **more,
    )


def gguf(folder):
    "A file of llama.cpp's, matrices in 8 bits; transformers decodes them as it loads."
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kinds, model = gguf.GGMLQuantizationType, load(folder)
    w = gguf.GGUFWriter(str(folder / "tiny.gguf"), "llama")
    w.add_name("tiny")
    w.add_block_count(2)
    w.add_context_length(2048)
    w.add_embedding_length(128)
    w.add_feed_forward_length(256)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(32)
    w.add_vocab_size(256)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, x in model.state_dict().items():
        to = names.get_name(name.removesuffix(".weight")) + ".weight"
        kind = kinds.Q8_0 if x.ndim == 2 else kinds.F32
        w.add_tensor(to, gguf.quants.quantize(x.numpy(), kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return load(folder, gguf_file="tiny.gguf")


def packed(kind, backend, group=32):
    "Linear layers of numbers of 4 bits, drawn at random, in the format of GPTQ or of AWQ."

    def make(folder):
        pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
        from safetensors.torch import save_file

        how = dict(quant_method=kind, bits=4, group_size=group, backend=backend)
        more = dict(desc_act=False, sym=True), dict(zero_point=True, version="gemm")
        config = tiny_config(quantization_config=how | more[kind == "awq"], dtype="float16")
        g, out = seeded(), {}
        whole = dict(dtype=torch.int32, generator=g)
        for name, x in load(folder).half().state_dict().items():
            if "_proj.weight" not in name:
                out[name] = x
                continue
            base, (rows, cols) = name.removesuffix("weight"), x.shape
            shape = (cols, rows // 8) if kind == "awq" else (cols // 8, rows)
            zeros = torch.full((cols // group, rows // 8), 0x77777777, dtype=torch.int32)
            out[base + "qweight"] = torch.randint(-(2**31), 2**31 - 1, shape, **whole)
            out[base + "qzeros"] = zeros
            out[base + "scales"] = torch.full((cols // group, rows), 0.01).half()
            if kind == "gptq":
                out[base + "g_idx"] = (torch.arange(cols) // group).int()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder / kind)
        save_file(out, str(folder / kind / "model.safetensors"), metadata={"format": "pt"})
        return load(folder / kind, device_map="cpu", dtype=torch.float16)

    return make


LORA = peft.LoraConfig(
    r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
)
WAYS = {
    "bitsandbytes, 8 bits": quantized(lambda: bitsandbytes(load_in_8bit=True)),
    "bitsandbytes, 4 bits": quantized(lambda: bitsandbytes(load_in_4bit=True)),
    "torchao, int8": quantized(lambda: transformers.TorchAoConfig(quant_type=int8())),
    "GGUF, 8 bits": gguf,
    "GPTQ, 4 bits": packed("gptq", "gptq_torch"),
    "AWQ, 4 bits": packed("awq", "torch_awq"),
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
    with refuses("PREFIX_TUNING puts a cache of its own"):
        TurboQuantCache(model, "k3v3")
    TurboQuantCache(model.get_base_model(), "k3v3")
