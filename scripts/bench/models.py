"What an engine must be told of a model. It imports nothing, since tests take it, too."


def told_by_layer(sizes: dict) -> dict:
    """What vLLM 0.26 must be told of a model whose heads differ by layer, as newer releases of
    transformers keep that where it does not look; empty of other models."""
    names = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
    told = {name: sizes[name] for name in names if name in sizes}
    return told and told | dict(allow_global_per_layer_attribute_access=True)
