"""How each causal language model of transformers reads a coded cache: run.py architectures
--out FILE [--classes NAME ...]
[--after FILE].

Of each class of transformers' mapping of causal language models a random model of a few
thousand weights is made, and a cache for it. What the cache says when it is made (on codes,
decoded each step, refused) is held against what `generate()` then does: which attention served,
and whether the tokens are those of transformers' own cache where all are held exactly.

Gate: every class is answered when its cache is made, each answer is what happens, and all
tokens are equal."""

import dataclasses
import warnings

import torch
import transformers
from transformers.cache_utils import DynamicCache, LinearAttentionLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plan import Plan, earlier
from turboquant_nb.cli.plan import CacheSize, plain_bytes
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.quant.recipe import Recipe

CLASSES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
VOCAB = 61
EXACT = Recipe(sinks=0, recent=512)  # holds every token of these prompts exactly

# What is small, by the names that configurations have for it.
SMALL = dict(
    # widths and depths
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    sliding_window=12,
    attention_chunk_size=12,
    embedding_size=32,
    d_model=32,
    n_embd=32,
    n_inner=48,
    n_positions=256,
    n_layer=2,
    n_layers=2,
    num_layers=2,
    n_head=4,
    n_heads=4,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=256,
    ffn_dim=48,
    rotary_dim=4,
    word_embed_proj_dim=32,
    decoder_layers=2,
    decoder_ffn_dim=48,
    decoder_attention_heads=4,
    encoder_layers=2,
    encoder_ffn_dim=48,
    encoder_attention_heads=4,
    # special tokens: no text ends early
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    # experts
    num_local_experts=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_num_experts=4,
    moe_k=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    # latents, and what looks for tokens in them
    kv_lora_rank=8,
    q_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=6,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=64,
    # recurrent layers
    linear_num_value_heads=2,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    mamba_d_ssm=32,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_d_state=8,
    state_size=8,
    ssm_state_size=8,
    # embeddings of each layer
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=VOCAB,
    laurel_rank=4,
    altup_num_inputs=2,
)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8)
INKLING = dict(swa_head_dim=8, sliding_window_size=12, rel_extent=32)
LATENT = dict(num_key_value_heads=4)
BYTES = dict(vocab_size=260)
TWO = ["linear_attention", "hybrid"]

# What a class needs besides, by its name without the task.
BESIDES = {
    "AXK1": LATENT,
    "AXK2": LATENT,
    "BailingHybrid": LATENT,
    "Bamba": dict(MAMBA, attn_layer_indices=[1]),
    "BigBird": dict(attention_type="original_full"),
    "Blt": dict(
        BYTES,
        encoder_hash_byte_group_vocab=VOCAB,
        encoder_hash_byte_group_size=[3],
        patcher_config=BYTES,
        encoder_config=dict(BYTES, hidden_size_global=32),
        decoder_config=dict(BYTES, hidden_size_global=32),
    ),
    "CTRLLMHeadModel": dict(dff=48),
    "CohereCompass": dict(
        rope_parameters={"full_attention": dict(rope_type="default", rope_theta=1e4)}
    ),
    "CpmAnt": dict(
        dim_head=8, dim_ff=48, position_bias_num_buckets=32, prompt_types=4, prompt_length=4
    ),
    "Dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
    ),
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "DeepseekV32": LATENT,
    "DeepseekV4": dict(o_lora_rank=16, o_groups=2, num_key_value_heads=1),
    "Dots3Note": dict(
        num_key_value_heads=4,
        shared_experts_intermediate_size=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=8,
        swa_head_dim=12,
        swa_qk_nope_head_dim=8,
        swa_qk_rope_head_dim=4,
        swa_v_head_dim=6,
    ),
    "FalconH1": dict(mamba_n_heads=4, mamba_d_head=8, mamba_d_ssm=32),
    "GPTNeo": dict(attention_types=[[["global", "local"], 1]], window_size=12),
    "Gemma3n": dict(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "Gemma4": dict(global_head_dim=16),
    "Gemma4ForConditionalGeneration": dict(text_config=dict(global_head_dim=16)),
    "Gemma4Unified": dict(global_head_dim=16),
    "Gemma4UnifiedForConditionalGeneration": dict(
        text_config=dict(global_head_dim=16),
        vision_config=dict(mm_embed_dim=32, mm_posemb_size=8, output_proj_dims=32),
    ),
    "Glm4MoeLite": LATENT,
    "GlmMoeDsa": LATENT,
    "GotOcr2ForConditionalGeneration": dict(
        vision_config=dict(image_size=32, output_channels=8, mlp_dim=48, patch_size=8)
    ),
    "GraniteMoeHybrid": dict(MAMBA, layer_types=["linear_attention", "full_attention"]),
    "HYV4": LATENT,
    "Inkling": INKLING,
    "Inkling2": INKLING,
    "Jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1
    ),
    "KimiLinear": dict(LATENT, linear_head_dim=8, linear_num_heads=2),
    "Lfm2": dict(layer_types=["conv", "full_attention"]),
    "Lfm2Moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "LongcatFlash": dict(
        LATENT,
        head_dim=4,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "Mamba2": dict(num_heads=8, head_dim=8),
    "MiniCPM3": LATENT,
    "MiniMaxM3VL": dict(
        dense_intermediate_size=48, shared_intermediate_size=16, index_head_dim=8
    ),
    "Mllama": dict(cross_attention_layers=[1]),
    "Musicgen": dict(num_codebooks=1, audio_channels=1),
    "MusicgenMelody": dict(num_codebooks=1, audio_channels=1),
    "NemotronH": dict(
        mamba_num_heads=4, mamba_head_dim=8, n_groups=2, moe_shared_expert_intermediate_size=16
    ),
    "Phi4Multimodal": dict(
        vision_config=dict(image_size=32, crop_size=32),
        audio_config=dict(
            ext_pw_out_channel=32,
            depthwise_separable_out_channel=32,
            nemo_conv_channels=8,
            num_blocks=1,
        ),
    ),
    "ProphetNet": dict(
        num_encoder_layers=2, num_decoder_layers=2, num_decoder_attention_heads=4
    ),
    "Qwen4Exp": dict(
        hc_lowrank=4,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=64,
        indexer_compress_ratio=4,
        ngram_vocab_size_base=VOCAB,
        split_ngram_parts=1,
    ),
    "RecurrentGemma": dict(num_hidden_layers=3),
    "ReformerModelWithLMHead": dict(
        is_decoder=True,
        axial_pos_embds=False,
        attention_head_size=8,
        feed_forward_size=48,
        attn_layers=["local", "lsh"],
        num_buckets=4,
        local_attn_chunk_length=16,
        lsh_attn_chunk_length=16,
    ),
    "RoCBert": dict(
        pronunciation_embed_dim=8,
        pronunciation_vocab_size=VOCAB,
        shape_embed_dim=8,
        shape_vocab_size=VOCAB,
    ),
    "XLNetLMHeadModel": dict(d_inner=48),
    "Xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "Youtu": LATENT,
    "Zamba": dict(num_hidden_layers=6, layers_block_type=TWO * 3),
    "Zamba2": dict(
        num_hidden_layers=4, layers_block_type=TWO * 2, n_mamba_heads=4, adapter_rank=4
    ),
    "Zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
}
# Classes of which no small model can be made, and why.
NOT_MADE = {
    "Gemma3nForConditionalGeneration": "its pictures need the package timm; Gemma3nForCausalLM "
    "is the same model of text",
    "Gemma4AssistantForCausalLM": "it drafts for a Gemma 4, from whose cache it reads",
    "Gemma4UnifiedAssistantForCausalLM": "it drafts for a Gemma 4, from whose cache it reads",
}


def small_config(kind: type, besides: dict):
    "A configuration of this class for a model of a few thousand weights."
    fields = {x.name for x in dataclasses.fields(kind)}
    other = {new: old for new, old in kind.attribute_map.items() if old in fields}
    given = {k: x for k, x in SMALL.items() if k in fields or k in other}
    given = {k: x for k, x in given.items() if other.get(k) not in given}
    besides = dict(besides)
    for part, spec in getattr(kind, "sub_configs_defaults", {}).items():
        generic = spec.config_class.__name__ == "AutoConfig"
        of = CONFIG_MAPPING[spec.model_type] if generic else spec.config_class
        given[part] = small_config(of, besides.pop(part, {}))
    if place := {"layer_types", "layers_block_type"} & fields - set(besides):
        try:
            kinds = list(dict.fromkeys(kind().layer_types or ()))  # each kind of layer once
        except (AttributeError, TypeError):
            kinds = []
        if kinds:
            kinds *= 1 if len(kinds) > 1 else 2
            given[place.pop()] = kinds
            given["num_hidden_layers" if "num_hidden_layers" in given else "n_layer"] = len(
                kinds
            )
    return kind(**given | besides)


def small(name: str):
    "A random model of this class, with weights so large that its tokens depend on the context."
    kind = getattr(transformers, name)
    config = small_config(kind.config_class, BESIDES.get(name.removesuffix("ForCausalLM"), {}))
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    torch.manual_seed(0)
    model = kind._from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1 and p.is_floating_point():
                p.normal_(0, 0.15, generator=generator)
    return model


def tokens(model, held, n: int = 5):
    "What `generate()` writes with a cache."
    ids = torch.randint(2, VOCAB - 1, (2, 19), generator=torch.Generator().manual_seed(1))
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=held,
        max_new_tokens=n,
        use_cache=True,  # which MPT's configuration denies
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=1,  # Musicgen asks for this, and for the next
        num_return_sequences=1,
    )


def asked(model, recipe=EXACT) -> tuple:
    "(a cache, None where it is refused; what was said when it was made: an answer, a reason)."
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = TurboQuantCache(model, recipe)
    except ValueError as error:
        return None, "refused", str(error)
    said = [str(x.message) for x in said if "decoded" in str(x.message)]
    how, _, why = made.report()["reading"].partition(": ")
    if (how == "on codes") != (not said) or why not in "".join(said):
        raise AssertionError(f"the cache says {how!r} {why!r}, its warnings {said}")
    return made, how, why


def sizes(kind: type) -> dict:
    """What k3v3 codes of a token in one layer and what bf16 takes, in bytes, and the centre of
    keys, by the sizes that a configuration of this class has by itself. Empty where it has none
    with attention, or keys and values of sizes that it does not say in one place."""
    config = kind.config_class()
    if getattr(config, "is_encoder_decoder", False):
        config.is_encoder_decoder = False
    text = config.get_text_config(decoder=True)
    if hasattr(text, "is_decoder"):
        text.is_decoder = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = CacheSize(config, "k3v3", torch.bfloat16)
            parts = held.parts
    except (KeyError, ValueError):
        return {}
    count = len({x.index for x in held.layers})
    coded = sum(each for _, each, _ in parts) / held.tile / count
    plain = plain_bytes(config, 2, 1, 2) / 2 / count
    centres = ", ".join(dict.fromkeys(x.recipe.key.center for x in held.layers))
    return {"centre": centres, "bytes": round(coded, 1), "bf16": round(plain, 1)}


def tried(name: str) -> dict:
    """What a cache says when it is made for a model of this class, and what then happens.
    Raises AssertionError where the two differ."""
    row = {"class": name, "unit": "answer"}
    if name in NOT_MADE:
        return row | {"answer": "not tried", "why": NOT_MADE[name]}
    model = small(name)
    row["model_type"] = model.config.get_text_config(decoder=True).model_type
    held, answer, why = asked(model)
    row |= {"answer": answer, "why": why}
    if held is None:
        return row
    row |= {"layers": len(held.layers), "coded layers": len(held.info.coded)}
    row["states"] = sum(isinstance(x, LinearAttentionLayer) for x in held.layers)
    row |= sizes(type(model))
    want = tokens(model, DynamicCache(config=model.config))
    for attention in ("its own", "turboquant")[: 1 + (answer == "on codes")]:
        if attention == "turboquant":
            model.set_attn_implementation(attention)
            held, *_ = asked(model)
        got, served = tokens(model, held), held.report()["served"]
        steps = set(served) - {"prefill"}
        if answer == "on codes" and steps != {"codes"}:
            raise AssertionError(f"{name}: on codes was said, {served} came")
        if answer != "on codes" and steps != {"dense"}:
            raise AssertionError(f"{name}: {answer} was said, {served} came")
        if not torch.equal(got, want):
            raise AssertionError(f"{name}, {attention}: {got.tolist()}, not {want.tolist()}")
    return row | {"equal tokens": True}


def options(p):
    p.add_argument("--classes", nargs="+", default=CLASSES, metavar="NAME")
    p.add_argument("--after", help="rows of other classes are kept, of this earlier file")


def plan(a):
    rows = [tried(x) for x in a.classes]
    cmd = "each answer is what happens, all tokens equal those of DynamicCache"
    return Plan(
        "architectures",
        {"cmd": cmd, "passed": True},
        rows,
        before=[x for x in earlier(a) if x["class"] not in a.classes],
        model={"id": "random models, 2 to 6 layers of 32 channels"},
        data={"id": "random tokens, 2 prompts of 19", "n": 2},
    )
