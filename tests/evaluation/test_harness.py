"""lm-evaluation-harness on codes: what is scored, what is written, and the command."""

import importlib
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from tests.cli.conftest import SIZE, save
from turboquant_nb import Recipe, Spec, TurboQuantCache
from tests.helpers import refuses

lm_eval = pytest.importorskip("lm_eval")
harness = importlib.import_module("turboquant_nb.evaluation.harness")
TaskManager = importlib.import_module("lm_eval.tasks").TaskManager
Harness, HFLM = harness.Harness, harness.HFLM

BARE = Recipe(Spec(bits=2), Spec(bits=2), sinks=1, recent=0)
TASK = Path(__file__).parent / "harness"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZE, max_position_embeddings=256))
    return save(tmp_path_factory.mktemp("tiny"), llama, template=False)


@pytest.fixture
def make(tiny):
    "A model of the harness, on the processor."
    how = dict(device="cpu", dtype="float32", batch_size=4)
    return lambda cls=Harness, **more: cls(tiny, **how | more)


class Request:
    "As the harness asks."

    task_name = None

    def __init__(self, *args):
        self.args = args


TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no "
TEXT += "money in my purse, and nothing particular to interest me on shore, I thought I would"
ASKED = [Request(TEXT, x) for x in (" sail", " sail about a little and see", " x")]
ASKED += [Request(TEXT[:80], " about the watery part of the world")]


@torch.no_grad()
def by_steps(lm, recipe, request):
    "Token by token on a cache of one sequence, whose answer stays exact; (score, greedy)."
    context, answer = lm._encode_pair(*request.args)
    cache = TurboQuantCache(lm.model, recipe)
    lm.model(torch.tensor([context[:-1]]), past_key_values=cache)
    total, greedy = 0.0, True
    for token, true in zip(context[-1:] + answer, answer):
        logits = lm.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
        total += float(logits.log_softmax(-1)[true])
        greedy &= int(logits.argmax()) == true
    return total, greedy


def test_scores_are_those_of_steps_on_codes_and_not_those_of_the_uncompressed_model(make):
    recipe, asked = Recipe(Spec(bits=2), Spec(bits=2), 1, 16), [ASKED[0], ASKED[2]]
    lm = make(recipe=recipe)
    want = [by_steps(lm, recipe, x) for x in asked]
    got, exact = lm.loglikelihood(asked), make(HFLM).loglikelihood(asked)
    for (a, x), (b, y), (c, _) in zip(got, want, exact):
        assert a == pytest.approx(b, abs=1e-4) and x == y
        assert abs(a - c) > 1e-2  # an uncompressed forward pass would say this


@pytest.mark.parametrize("chunk", [128, 3])
def test_answers_that_share_a_context_are_scored_as_alone(make, chunk):
    "Padding on the right is not seen, nor are neighbours; a chunk meets itself exactly."
    together = make(recipe=BARE, chunk=chunk).loglikelihood(ASKED)
    alone = make(recipe=BARE, chunk=chunk, batch_size=1).loglikelihood(ASKED)
    assert [y for _, y in together] == [y for _, y in alone]
    assert [x for x, _ in together] == pytest.approx([x for x, _ in alone], abs=1e-4)


def test_a_text_is_read_in_chunks_that_meet_codes(make):
    asked = [Request(TEXT * 2)]
    exact = make(HFLM).loglikelihood_rolling(asked)[0]
    whole = make(recipe=BARE, chunk=256).loglikelihood_rolling(asked)[0]
    parts = make(recipe=BARE, chunk=32).loglikelihood_rolling(asked)[0]
    assert whole == pytest.approx(exact, rel=1e-5)  # one chunk meets no code
    assert abs(parts - exact) > 1e-3 * abs(exact)


def test_answers_are_written_on_codes_in_padded_batches_too(make):
    how = dict(until=["\n"], max_gen_toks=8)
    asked = [Request(TEXT, how), Request(TEXT[:100], how)]
    recipe = Recipe(Spec(bits=4), Spec(bits=4), sinks=1, recent=0)
    lm = make(recipe=recipe)
    together = lm.generate_until(asked)
    assert lm.coded.report["bits_per_value"] < 16
    assert together == [make(recipe=recipe).generate_until([x])[0] for x in asked]
    assert len(together[0]) > 0


def test_the_command_knows_the_model_and_a_task_beside_it(tiny, tmp_path, monkeypatch):
    shutil.copytree(TASK, tmp_path / "task")
    monkeypatch.chdir(tmp_path / "task")
    few = partial(TaskManager, include_defaults=False)  # reading all tasks takes long
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    ask = f"lm_eval --model turboquant --model_args pretrained={tiny},recipe=k3v3,chunk=64 "
    ask += "--tasks letters --include_path . --device cpu --batch_size 4 --output_path out"
    monkeypatch.setattr(sys, "argv", [*ask.split(), "--log_samples"])
    harness.cli_evaluate()
    (samples,) = (tmp_path / "task/out").rglob("samples_letters_*.jsonl")
    assert samples.read_text().count("\n") == 4
    tasks = dict(tasks=["letters"], task_manager=few(include_path="."))
    args = dict(pretrained=tiny, recipe=dict(key=dict(bits=2), value=dict(bits=2)))
    found = lm_eval.simple_evaluate("turboquant", args, device="cpu", batch_size=2, **tasks)
    assert 0 <= found["results"]["letters"]["acc,none"] <= 1


def test_what_cannot_be_measured_is_refused(make):
    with refuses("recipe", (ValueError, TypeError)):
        make(recipe=dict(key=1))  # others: page evaluation_harness
    with refuses("an answer must fit the model: the model reads 256"):
        make()._loglikelihood_tokens([(None, [1], [1] * 300)], disable_tqdm=True)


def test_an_encoder_with_a_decoder_is_refused(make, tmp_path):
    size = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=400)
    model = T5ForConditionalGeneration(T5Config(**size))
    with refuses("decoder"):
        make(cls=lambda tiny, **how: Harness(model, tokenizer=tiny, **how))
