"""Sizes of models that more than one bench takes, and what an engine must be told of them. It
imports nothing, since some benches are scripts of their own."""

GPT_OSS_20B = dict(
    num_local_experts=32, num_attention_heads=64, num_key_value_heads=8, head_dim=64
)

# five layers with a window and heads of 256 to one with heads of 512, whose values are the
# projection of its keys
GEMMA_4_31B = dict(
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_global_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    attention_k_eq_v=True,
    sliding_window=1024,
    hidden_size_per_layer_input=0,
)


def told_by_layer(sizes: dict) -> dict:
    """What vLLM 0.26 must be told of a model whose heads differ by layer, as newer releases of
    transformers keep that where it does not look; empty of other models."""
    names = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
    told = {name: sizes[name] for name in names if name in sizes}
    return told and told | dict(allow_global_per_layer_attribute_access=True)
