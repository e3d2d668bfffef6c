"""What transformers' own generation tests (tests/generation of its repository) ask of a cache,
where no other test here asks it. With all tokens held exactly a case gives what `DynamicCache`
gives, or is refused in a sentence."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from tests.helpers import (
    QUIETLY,
    covering_pairs,
    exact_recipe,
    prompt,
    refuses,
    seeded,
    texts,
    tiny,
)
from tests.hf.test_way import on_codes, own, tokens
from turboquant_nb.hf import TurboQuantCache

pytestmark = QUIETLY


def ours(model, **settings):
    return TurboQuantCache(model, exact_recipe(), **settings)


def repeated():
    ids = texts(1, 12).repeat(1, 3)
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


OUTPUTS = {
    "greedy": {},
    "sampling": dict(do_sample=True, top_k=10),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "beam sampling": dict(num_beams=2, do_sample=True, top_k=10),
}


@pytest.mark.parametrize("way, name", covering_pairs([*OUTPUTS], ["llama", "gemma3_text"]))
def test_dict_outputs(name, way):
    "Tokens, scores, logits, hidden states, weights; and the cache is the one that was given."
    model, inputs = tiny(name), prompt(2, 20)
    model.set_attn_implementation("eager")
    what = ("scores", "logits", "hidden_states", "attentions")
    how = OUTPUTS[way] | {f"output_{x}": True for x in what}
    how |= dict(return_dict_in_generate=True)
    cache = ours(model)
    want, got = own(model, inputs, **how), tokens(model, inputs, cache, **how)
    assert type(got) is type(want) and got.past_key_values is cache
    assert torch.equal(got.sequences, want.sequences)
    for x in what:
        torch.testing.assert_close(getattr(got, x), getattr(want, x), rtol=1e-4, atol=1e-4)
    assert len(cache) == len(cache.layers) == model.config.num_hidden_layers
    assert cache.get_seq_length() == got.sequences.shape[1] - 1
    assert cache.report()["served"]["dense"]  # of weights that were asked for
    how |= dict(output_attentions=False)
    cache = ours(model)
    got = tokens(model, inputs, cache, **how)
    assert torch.equal(got.sequences, want.sequences) and on_codes(cache)
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-4, atol=1e-4)


def test_without_a_prompt():
    model = copy.deepcopy(tiny())
    model.generation_config.bos_token_id = 5
    assert torch.equal(tokens(model, {}, ours(model)), own(model, {}))


def drafter(way, model):
    "Arguments of `generate()` for drafts of one kind."
    if way == "lookup":
        return dict(prompt_lookup_num_tokens=2)
    if way == "early exit":
        return dict(assistant_early_exit=1)
    assistant = copy.deepcopy(model)
    if way == "random":
        assistant = copy.deepcopy(tiny(seed=3))
    assistant.generation_config.num_assistant_tokens = 2
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return dict(assistant_model=assistant)


@pytest.mark.parametrize(
    "way, name, keep",
    [
        ("random", "llama", 0),
        ("same", "gemma3_text", None),
        ("lookup", "gemma3_text", 0),
        ("early exit", "llama", None),
    ],
)
def test_drafts(name, way, keep):
    model, inputs, cache = tiny(name), repeated(), ours(tiny(name))
    how = {} if keep is None else dict(logits_to_keep=keep)
    want = own(model, inputs, output_scores=True, return_dict_in_generate=True)
    more = dict(output_scores=True, return_dict_in_generate=True, **drafter(way, model))
    got = tokens(model, inputs, cache, **more, **how)
    assert torch.equal(got.sequences, want.sequences) and got.past_key_values is cache
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-4, atol=1e-4)
    assert on_codes(cache)


def test_drafts_that_are_sampled():
    "The draws of both runs are the same, so the tokens are, as long as the logits agree."
    model, inputs = copy.deepcopy(tiny()), repeated()
    cache, how = ours(model), dict(do_sample=True, top_k=10, **drafter("random", model))
    assert torch.equal(tokens(model, inputs, cache, **how), own(model, inputs, **how))
    assert on_codes(cache)


@pytest.mark.parametrize("way", ["same", "lookup"])
def test_drafts_stop_at_the_end(way):
    "At a token that ends a text, and at a length; what was rejected is not held."
    model, inputs = tiny(), repeated()
    text = own(model, inputs)[0, inputs["input_ids"].shape[1] :].tolist()
    for stop in (dict(eos_token_id=text[3]), dict(max_new_tokens=5), dict(min_new_tokens=7)):
        cache, more = ours(model), drafter(way, model)
        want = own(model, inputs, **stop)
        assert torch.equal(tokens(model, inputs, cache, **stop, **more), want)
        assert want.shape[1] - 1 <= cache.get_seq_length() <= want.shape[1]


@pytest.mark.parametrize("name, beams", [("llama", 2), ("gemma3_text", 1)])
def test_embeddings(name, beams):
    "In place of a prompt, or beside it; others give other tokens."
    model, inputs = tiny(name), prompt(2, 20, padded=False)
    embed = model.get_input_embeddings()
    vectors = embed(inputs["input_ids"]).detach()
    other = torch.randn(vectors.shape, generator=seeded(1))
    mask = inputs["attention_mask"]
    for given in (vectors, other):
        for rest in ({}, dict(input_ids=inputs["input_ids"])):
            said = dict(inputs_embeds=given, attention_mask=mask, **rest)
            want = own(model, said, num_beams=beams)
            for how in ({}, dict(max_length=40, static=True)):
                cache = ours(model, **how)
                got = tokens(model, said, cache, num_beams=beams, disable_compile=True)
                assert torch.equal(got, want) and on_codes(cache)


def test_going_on_from_embeddings():
    model, inputs = tiny(), prompt(2, 20, padded=False)
    embed = lambda ids: model.get_input_embeddings()(ids).detach()
    for cache in (DynamicCache(config=model.config), ours(model)):
        said = dict(inputs_embeds=embed(inputs["input_ids"]))
        first = tokens(model, said, cache, max_new_tokens=3)
        text = torch.cat([inputs["input_ids"], first], 1)
        got = tokens(model, dict(inputs_embeds=embed(text)), cache, max_new_tokens=3)
        all_of_it = torch.cat([text, got], 1)
    want = own(model, inputs, max_new_tokens=6)
    assert torch.equal(all_of_it, want) and on_codes(cache)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
def test_a_recurrent_state_is_not_recovered(name):
    """Whether it lies in a layer of its own or beside codes: a pass that was broken off may
    have changed it. Until that is forgotten the next pass is refused, also where all coded
    layers are equally long; one that is refused before it wrote anything changes nothing. A
    prompt that was broken off begins anew."""
    model, inputs = tiny(name), prompt(2, 20, padded=False)

    def stop(module, args):
        raise RuntimeError("stop")

    for first in (True, False):
        cache = ours(model)
        with torch.no_grad():
            if not first:
                model(**inputs, past_key_values=cache)
                with refuses("attention_mask"):
                    step = dict(input_ids=inputs["input_ids"][:, :1])
                    model(**step, attention_mask=torch.ones(2, 5), past_key_values=cache)
                assert not cache.broken
            hook = model.model.layers[-1].register_forward_pre_hook(stop)
            given = inputs["input_ids"] if first else inputs["input_ids"][:, :1]
            with refuses("stop", RuntimeError):
                model(given, past_key_values=cache)
            hook.remove()
            with refuses("a forward pass was broken off"):
                model(given, past_key_values=cache)
        if first:
            assert cache.recover() == 0
        else:
            with refuses("recurrent state.*the whole text again"):
                cache.recover()
            cache.reset()
        assert torch.equal(tokens(model, inputs, cache), own(model, inputs))
