"Norms and MLPs compiled in steps of one token: by Inductor, on every family, and undone."

import copy
import os
import shutil
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from turboquant_nb import TurboQuantCache
from turboquant_nb.hf.compiled import (
    CompiledSteps,
    StepChoice,
    StepLayer,
    StepPart,
    compile_steps,
)
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.hf.runner import StepRunner
from tests.helpers import refuses, texts, tiny

FAMILIES = "llama", "gemma3_text", "mixtral"  # norms of queries and keys; experts: only norms
# under ATEN_CPU_CAPABILITY=default Inductor (torch 2.13) writes at::vec without a header; parts
# then run as they are, with a warning
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="Inductor needs g++ and vectors",
)


def made(family="llama"):
    "A model that no other test has."
    return copy.deepcopy(tiny(family, seed=77))  # theirs may have a cache's forward


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


@needs_compiler
def test_inductor_gives_the_same_values():
    "To 1e-5 of the logits in float32; a prompt, which is not compiled, to the bit."
    model = made()
    ids = texts(2, 40)
    cache = lambda: DynamicCache(config=model.config)
    want = logits(model, ids, cache())
    steps = compile_steps(model)
    got = logits(model, ids, cache())
    assert not steps.refused, steps
    assert torch.equal(got[0], want[0])
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    steps.undo()
    assert torch.equal(logits(model, ids, cache()), want)


def test_training_hooks_and_other_forwards_are_left_alone():
    model = made()
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


# --- chosen by itself


@pytest.fixture
def chooses(monkeypatch):
    "A tape chooses as a GPU's graphs do, after three steps of two layers."
    monkeypatch.setattr(StepRunner, "chooses", True)
    monkeypatch.setattr(StepChoice, "seconds", 6.0)
    monkeypatch.setattr(StepChoice, "saved", 1.0)


def generated(model, new=12, rows=2, graphs=Tape):
    "Tokens and what the cache says of its graphs."
    ids = texts(rows, 40)
    cache = TurboQuantCache(model, "k3v3", graphs=graphs)
    more = dict(do_sample=False, max_new_tokens=new, eos_token_id=None)
    return model.generate(ids, past_key_values=cache, **more), cache.report()["graphs"]


def eagerly(model, new=12, rows=2):
    return generated(model, new, rows, graphs=False)[0]


@needs_compiler
def test_a_long_answer_is_compiled_on_the_way(chooses):
    "In one call, for its batch size alone; the model is as it was between steps and after."
    model, graphs = made(), torch._dynamo.utils.counters["stats"]
    before, want = graphs["unique_graphs"], eagerly(model, 24)
    got, report = generated(model, 24)
    choice = StepChoice.of(model)
    assert torch.equal(got, want) and report["captured"] == 2 and not report["why_not"]
    assert choice.due(2) == 3 and choice.sizes == {(2, 1)} and not choice.steps.refused
    assert (
        "are compiled, for batches of 2" in report["compiled"]
        and report["compiled"] in (report["line"])
    )
    assert not any("forward" in vars(x) for x in model.modules())
    seen = graphs["unique_graphs"]
    # before and after a layer's attention, RoPE, the last norm: all layers share them
    assert seen == before + 4
    assert torch.equal(generated(model, 24)[0], want)  # from the first step on
    short, report = generated(model, 3, rows=1)  # another batch size has not lost enough yet
    assert torch.equal(short, eagerly(model, 3, rows=1)) and choice.sizes == {(2, 1)}
    assert graphs["unique_graphs"] == seen
    other = copy.deepcopy(model)
    assert StepChoice.of(other) is not choice and not StepChoice.of(other).replayed
    assert torch.equal(generated(other, 24)[0], want)


def test_passes_with_drafts_are_compiled_for_each_number_of_tokens(chooses, monkeypatch):
    """After as many passes as pay for the compiler, in one call; other numbers of tokens run as
    they are, and their graphs stay. Kills: parts that stand for one token only."""
    monkeypatch.setattr(StepChoice, "options", dict(backend="eager"))
    model, seen = made(), []
    text = texts(1, 90)
    run = StepPart.run
    ran = lambda self, x, *args, **kwargs: seen.append(x.shape) or run(self, x, *args, **kwargs)
    monkeypatch.setattr(StepPart, "run", ran)
    monkeypatch.setattr(StepLayer, "run", ran)
    said = []
    for graphs in (False, Tape):
        cache, at = TurboQuantCache(model, "k3v3", max_length=200, graphs=graphs), 40
        cache.activate_past_recording()
        with torch.no_grad():
            model(text[:, :at], past_key_values=cache)
            logits = []
            for n in (*[4] * 5, *[1] * 7, 4, 4, 1, 4, 3, 4):
                logits.append(model(text[:, at : at + n], past_key_values=cache).logits)
                cache.crop(-(n // 2))
                at += n - n // 2
        said.append(torch.cat(logits, 1))
    assert (said[1] - said[0]).abs().max() < 1e-4 * said[0].abs().max()
    report, choice = cache.report()["graphs"], StepChoice.of(model)
    assert choice.sizes == {(1, 1), (1, 4)} and not choice.steps.refused
    assert "compiled, for batches of 1, 1 x 4 tokens" in report["compiled"]
    assert report["captured"] == 4 and not report["why_not"], report
    assert {x[2 if len(x) == 4 else 1] for x in seen} == {1, 4}
    assert not any("forward" in vars(x) for x in model.model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_compiled_around_their_attention(family):
    "Two graphs for all of them, whichever cache: sums too are in them. Not around experts."
    model, graphs = made(family), []
    ids = texts(2, 20)
    want = logits(model, ids, DynamicCache(config=model.config))

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    steps = compile_steps(model, backend=counting)
    assert len(steps.layers) == (0 if family == "mixtral" else 2)
    for make in (lambda: DynamicCache(config=model.config), lambda: TurboQuantCache(model)):
        seen = logits(model, ids, make())
        compiled = len(graphs)
        assert torch.equal(logits(model, ids, make()), seen) and len(graphs) == compiled
    assert torch.equal(logits(model, ids, DynamicCache(config=model.config)), want)
    assert not steps.refused and len(graphs) <= (12 if family == "gemma3_text" else 6)
    steps.undo()


@pytest.mark.parametrize("late", [0, 2])
def test_no_token_is_taken_twice_where_a_layer_fails(late):
    "The compiler breaks before the attention of a layer, or behind it: a token comes once."
    model, graphs = made(), []
    ids = texts(2, 20)
    want = logits(model, ids, TurboQuantCache(model, "k4v4"))

    def broken(graph, inputs):
        graphs.append(graph)
        if len(graphs) > late:
            raise RuntimeError("no such compiler")
        return graph.forward

    steps = CompiledSteps(model, True, backend=broken)
    cache = TurboQuantCache(model, "k4v4")
    with steps.standing(), pytest.warns(UserWarning, match="LlamaDecoderLayer runs as it is"):
        assert torch.equal(logits(model, ids, cache), want)
    assert cache.get_seq_length() == 23 and len(graphs) == 1 + late
    assert set(steps.refused) >= {"LlamaDecoderLayer"} and "no such compiler" in repr(steps)
    steps = CompiledSteps(model, True, backend="eager")
    full = TurboQuantCache(model, "k4v4", max_length=21)
    with steps.standing(), refuses("max_length is 21"):
        logits(model, ids, full)  # an error of the attention's is its own
    assert not steps.refused and full.get_seq_length() == 21


def test_parts_stand_in_the_model_while_somebody_needs_them():
    model = made()
    steps = CompiledSteps(model, backend="eager")
    stands = lambda: "forward" in vars(model.model.norm)
    assert not stands()
    taken = lambda: [n for n in range(1, 9) if steps.takes(n)]
    with steps.standing():
        with steps.standing(5):
            assert stands() and taken() == [1, 5]
            with steps.standing(5):
                pass
            assert taken() == [1, 5]
        assert stands() and taken() == [1]
    assert not stands()
    with steps.standing(3):
        assert stands() and taken() == [3]
    assert steps.put() and taken() == [1]  # as `compile_steps` leaves it


class Packed(nn.Linear):
    "Weights of another form."


def _adapted(model):
    model.model.layers[1].mlp.base_layer = nn.Linear(1, 1)


def _packed(model):
    model.model.layers[1].mlp.up_proj.__class__ = Packed


def _hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out)


def _quantised(model):
    model.hf_quantizer = SimpleNamespace(is_compileable=False)


def _bytes(model):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].mlp.register_parameter("scales", weight)


def _by_hand(model):
    compile_steps(model, backend="eager")


def _compiled(model):
    model.model.layers[0].mlp._compiled_call_impl = model.model.layers[0].mlp._call_impl


LEFT = {
    _adapted: "layers.1.mlp is an adapter",
    _packed: "layers.1.mlp.up_proj is a Packed",
    _hooked: "layers.1.mlp has hooks or a forward of its own",
    _quantised: "its weights are packed",
    _bytes: "layers.1.mlp.scales is packed",
    _by_hand: "has hooks or a forward of its own",
    _compiled: "the model is compiled already",
}


@pytest.mark.parametrize("change", LEFT)
def test_a_model_that_somebody_has_changed_is_left_alone(change, chooses):
    model = made()
    change(model)
    want = eagerly(model)
    got, report = generated(model)
    assert torch.equal(got, want) and LEFT[change] in report["compiled"], report["compiled"]
    assert StepChoice.of(model).steps is None and not StepChoice.of(model).sizes


def test_a_hook_that_comes_later_ends_it(chooses, monkeypatch):
    model = made()
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    assert "are compiled" in generated(model)[1]["compiled"]
    calls = []
    model.model.norm.register_forward_hook(lambda module, args, out: calls.append(1))
    assert "norm has hooks" in generated(model)[1]["compiled"] and calls


def test_a_broken_compiler_is_said_once_and_not_asked_again(chooses, monkeypatch):
    "generate() goes on with the parts as they are, whatever kind of error it was."
    model, asked = made(), []
    want = eagerly(model)

    def broken(own, **options):
        def compiled(*args, **kwargs):
            asked.append(own)
            raise OSError("no space left on device")

        return compiled

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match="cannot be compiled: OSError: no space left") as seen:
        got, report = generated(model)
    assert torch.equal(got, want) and not report["why_not"]
    assert len([x for x in seen if "cannot be compiled" in str(x.message)]) == 1
    assert len(asked) == 1 and "as they are: LlamaDecoderLayer: OSError" in report["compiled"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got, report = generated(model)
    assert torch.equal(got, want) and len(asked) == 1 and "OSError" in report["compiled"]


def test_an_error_of_the_part_itself_is_its_own(monkeypatch):
    model = made()
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    steps = compile_steps(model)
    with torch.no_grad(), refuses("size of tensor|must match|shape", RuntimeError):
        model.model.norm(torch.zeros(1, 1, 3))
    assert not steps.refused


def test_a_named_class_of_graphs_and_a_processor_choose_nothing():
    model = made()
    _, report = generated(model)
    assert report["compiled"] == "" and not StepChoice.of(model).replayed
    assert TurboQuantCache(model, "k3v3").report()["graphs"] == {}
