"Norms and MLPs compiled in steps of one token: by Inductor, on every family, and undone."

import copy
import os
import shutil
import sys

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turboquant_nb import TurboQuantCache
from turboquant_nb.hf.compiled import compile_steps, step_parts, step_rotations

SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
    max_position_embeddings=512,
)
FAMILIES = {
    # three norms and MLPs of each layer, the last norm
    "llama": (LlamaForCausalLM, LlamaConfig, {}, 2 * 3 + 1),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}, 2 * 5 + 1),  # norms of queries and keys
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {}, 2 * 7 + 1),
    # experts are chosen by what a token holds: only norms
    "mixtral": (MixtralForCausalLM, MixtralConfig, dict(num_local_experts=2), 2 * 2 + 1),
}
# under ATEN_CPU_CAPABILITY=default Inductor (torch 2.13) writes at::vec without a header; parts
# then run as they are, with a warning
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="Inductor needs g++ and vectors",
)


def made(family):
    "A model whose tokens depend on what it reads."
    model, config, more, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = model(config(**SIZES, **more)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15)
    return model


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def logits(model, ids, cache):
    "Of a prompt and of three steps after it."
    with torch.no_grad():
        out = [model(ids, past_key_values=cache).logits[:, -1]]
        for i in range(3):
            out.append(model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_found_by_what_they_are(family):
    model = made(family)
    parts = step_parts(model)
    assert len(parts) == FAMILIES[family][3]
    assert not any("attn" in x.rpartition(".")[0] for x in parts if not x.endswith("norm"))
    assert not any(type(x) is nn.Linear for x in parts.values())
    assert [type(x).__name__[-9:] for x in step_rotations(model).values()] == ["Attention"] * 2


@needs_compiler
@pytest.mark.parametrize("coded", [False, True])
def test_inductor_gives_the_same_values(coded):
    "To 1e-5 of the logits in float32; a prompt, which is not compiled, to the bit."
    model = made("llama")
    ids = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    cache = lambda: (
        TurboQuantCache(model, "k4v4") if coded else DynamicCache(config=model.config)
    )
    want = logits(model, ids, cache())
    steps = compile_steps(model)
    got = logits(model, ids, cache())
    assert not steps.refused, steps
    assert torch.equal(got[0], want[0])
    # a code that falls to the other side of an edge moves a logit by more than rounding does
    assert (got - want).abs().max() <= (1e-2 if coded else 1e-5) * want.abs().max()
    steps.undo()
    assert torch.equal(logits(model, ids, cache()), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_steps(family):
    "Followed by Dynamo and run as it is: equal values."
    model = made(family)
    ids = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    want = logits(model, ids, DynamicCache(config=model.config))
    steps = compile_steps(model, backend="eager")
    assert torch.equal(logits(model, ids, DynamicCache(config=model.config)), want)
    assert not steps.refused and "as it is" not in repr(steps)


def test_what_cannot_be_compiled_is_said_once_and_runs():
    def broken(graph, inputs):
        raise RuntimeError("no such compiler")

    model = made("llama")
    ids = torch.randint(1, 128, (1, 8), generator=torch.Generator().manual_seed(0))
    want = logits(model, ids, DynamicCache(config=model.config))
    steps = compile_steps(model, backend=broken)
    with pytest.warns(UserWarning, match="runs as it is, since it cannot be compiled") as seen:
        got = logits(model, ids, DynamicCache(config=model.config))
    assert torch.equal(got, want) and len(seen) == 3  # a norm, an MLP, RoPE
    assert set(steps.refused) == {"LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"}
    assert "no such compiler" in repr(steps)


def test_training_hooks_and_other_forwards_are_left_alone():
    model = made("llama")
    compiled = []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model.model.norm.register_forward_hook(lambda module, args, out: out)
    model.model.layers[0].mlp.forward = model.model.layers[1].mlp.forward
    steps = compile_steps(model, backend=counting)
    assert len(steps.parts) == 7 - 2
    model(
        torch.ones(1, 1, dtype=torch.long)
    ).logits.sum().backward()  # gradients: a training step
    assert not compiled
    with torch.inference_mode():
        model(torch.ones(1, 1, dtype=torch.long))
    assert compiled
    attention = model.model.layers[0].self_attn
    module = sys.modules[type(attention).__module__]
    assert (
        "forward" in vars(attention)
        and "turboquant_nb" not in module.apply_rotary_pos_emb.__module__
    )
    other = copy.deepcopy(model)
    assert other.model.layers[0].self_attn.forward.__func__ is type(attention).forward
    assert other.model.layers[1].mlp.forward.__self__ is other.model.layers[1].mlp
    steps.undo()
    steps.undo()  # a second time does nothing
    assert "forward" not in vars(model.model.layers[1].mlp) | vars(attention)


@needs_compiler
def test_a_graph_replays_compiled_steps():
    "Captured and compared as any step: the parts run compiled in both."
    from turboquant_nb.hf.graphs import Tape

    model = made("llama")
    ids = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    greedy = dict(do_sample=False, max_new_tokens=12, eos_token_id=None)
    steps = compile_steps(model)
    eager = model.generate(
        ids, past_key_values=TurboQuantCache(model, "k3v3", graphs=False), **greedy
    )
    cache = TurboQuantCache(model, "k3v3", graphs=Tape)
    assert torch.equal(model.generate(ids, past_key_values=cache, **greedy), eager)
    report = cache.report()["graphs"]
    assert report["replayed"] > 5 and not report["why_not"] and not steps.refused
