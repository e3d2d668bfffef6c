"""generate() by captured steps, without a GPU: a `Tape` notes the operators of a step and runs
them again with the numbers that Python had then, as a CUDA graph does. The same tokens as eager
steps, one capture for all of them, and what cannot be captured says why. (test_cuda.py: the
same on a GPU.)"""

import copy
import functools
import gc
import inspect
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import (
    DEVICE,
    HYBRID,
    QUIETLY,
    SLIDING,
    Launches,
    covering_pairs,
    generate,
    host_calls,
    longer,
    prompt,
    refuses,
    texts,
    tiny,
)
from torch.utils._python_dispatch import TorchDispatchMode

from turboquant_nb.cache.clock import DeviceClock
from turboquant_nb import Recipe, Spec, TurboQuantCache
from turboquant_nb.hf import cache as edits
from types import SimpleNamespace

from turboquant_nb.hf import graphs as steps_in_graphs
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.kernels import encode
from turboquant_nb.hf.runner import StepRunner, settings_digest

pytestmark = QUIETLY


def pair(model, recipe="k4v4", **kwargs):
    "A cache whose steps are eager, one whose steps are captured."
    return TurboQuantCache(model, recipe, graphs=False, **kwargs), TurboQuantCache(
        model, recipe, graphs=Tape, **kwargs
    )


def kernel_kind(kernel, args, named):
    "What a kernel would be compiled for, but for the numbers that it reads when it runs."
    types = [x.dtype for x in args if isinstance(x, torch.Tensor)]
    rest = [x for x in args if not isinstance(x, (torch.Tensor, int, float))]
    return kernel.fn.__name__, repr(types), repr(rest), repr(named)


@pytest.mark.parametrize("steps", (False, Tape))
@pytest.mark.parametrize("recipe, padded", (("k3v3", False), ("k4v4", True)))
def test_a_first_call_launches_what_was_compiled_ahead(monkeypatch, recipe, padded, steps):
    """On a GPU kernels are asked for on a small store, all at once: those that the prompt and
    the steps behind it launch, no others and none of them left out."""
    pytest.importorskip("triton")
    asked, launched, real = [], [], encode.launch

    def launch(kernel, grid, *args, **named):
        asking = encode._ASKING.get() is not None
        (asked if asking else launched).append(kernel_kind(kernel, args, named))
        return None if asking else real(kernel, grid, *args, **named)

    @contextmanager
    def together(device):
        token = encode._ASKING.set([])
        try:
            yield True
        finally:
            encode._ASKING.reset(token)

    monkeypatch.setattr(encode, "launch", launch)
    monkeypatch.setattr(steps_in_graphs, "compiled_together", together)
    monkeypatch.setattr(steps_in_graphs, "_ASKED", set())
    encode.READY.clear()
    sizes = dict(head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    model, inputs = tiny(**sizes), prompt(2, 20, padded=padded)
    model = copy.deepcopy(model).to(DEVICE)
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    for _ in range(1 + (DEVICE == "cuda")):  # the second time all are ready, but for one
        cache = TurboQuantCache(model, recipe, backend="triton", graphs=steps)
        generate(model, inputs, "turboquant", cache=cache, max_new_tokens=3)
        steps_in_graphs._ASKED.clear()
        encode.READY.pop(next(iter(encode.READY), None), None)
    assert asked and set(asked) == set(launched)


def same_tokens(model, inputs, caches, **options):
    outs = [generate(model, inputs, "turboquant", cache=c, **options)[0] for c in caches]
    assert torch.equal(*outs), outs
    return outs[0]


@torch.no_grad()
def read(model, cache, text, first, counts, back=0, then=lambda: None):
    """Logits of passes of so many tokens behind the first ones, as they come where drafts are
    verified; of each pass some tokens are taken back, and `then` looks."""
    model.set_attn_implementation("turboquant")
    cache.activate_past_recording()
    model(text[:, :first], past_key_values=cache)
    said, at = [], first
    for n in counts:
        said.append(model(text[:, at : at + n], past_key_values=cache).logits)
        cache.crop(-back)
        at += n - back
        then()
    return said


@pytest.mark.parametrize(
    "name, options",
    [*zip(HYBRID, ({}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)))],
)
def test_recurrent_states_are_replayed(name, options):
    """Greedy, sampled, with beams, which move the states, and a second prompt after reset().
    Kills: states that go on twice where a step is compared, and those that a graph lost."""
    model = tiny(name)
    caches = pair(model, max_length=64)
    for seed in range(2):
        inputs = prompt(3, 20, seed=seed)
        same_tokens(model, inputs, caches, max_new_tokens=7, **options)
        r = caches[1].report()["graphs"]
        assert r["replayed"] >= 5 * (1 + seed) and not r["why_not"], r
        for c in caches:
            c.reset()


@pytest.mark.parametrize("name", HYBRID[:2])
@torch.no_grad()
def test_a_prompt_of_one_token_after_reset_is_no_step(name):
    """It begins recurrent states, steps go on with them. Kills: a graph captured there, of a
    kind that was compared before, which began them anew in each step."""
    model = tiny(name)
    caches = pair(model, max_length=64, static=True)
    for length in (20, 1):
        ids = prompt(1, length)["input_ids"]
        for _ in range(6):
            want, got = (model(ids, past_key_values=c, use_cache=True).logits for c in caches)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
            ids = want[:, -1:].argmax(-1)
        for c in caches:
            c.reset()
    r = caches[1].report()["graphs"]
    assert r["captured"] == 1 and r["replayed"] == 9 and not r["why_not"], r


def test_states_that_a_graph_does_not_leave_where_they_lay_are_seen(monkeypatch):
    "A layer that puts a new tensor in the place of its states: the eager step goes on."
    model, layer = tiny("qwen3_next"), transformers.cache_utils.LinearAttentionLayer

    def update(self, recurrent_states, state_idx=0, **kwargs):
        self.is_recurrent_states_initialized[state_idx] = True
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    monkeypatch.setattr(layer, "update_recurrent_state", update)
    caches = pair(model, max_length=64)
    same_tokens(model, prompt(2, 20), caches, max_new_tokens=9)
    r = caches[1].report()["graphs"]
    assert r["replayed"] == 0 and "differed from the eager one" in r["why_not"], r


@pytest.mark.parametrize("static", [False, True])
def test_a_second_turn_and_a_second_prompt(static):
    """In the same cache: a static one keeps its graph through reset(), the other captures again
    on its new tensors; nothing is compared twice."""
    model, how = tiny(), dict(max_new_tokens=6, disable_compile=True)
    caches = pair(model, max_length=64, static=static)
    for again in range(2):
        ids = texts(2, 12 + again, seed=again)
        out = same_tokens(model, dict(input_ids=ids), caches, **how)
        turn = torch.cat([out, texts(2, 5, seed=9)], 1)
        before = caches[1].runner.replayed
        said = dict(input_ids=turn, attention_mask=torch.ones_like(turn))
        same_tokens(model, said, caches, **how)
        r = caches[1].report()["graphs"]
        assert r["replayed"] == before + 5 and r["captured"] == (1 if static else 1 + again), r
        for c in caches:
            c.reset()
    assert not caches[1].is_compileable and caches[0].is_compileable == static


def test_a_cache_that_grows_records_again():
    "And where it grew the tokens are still those of eager steps."
    model = tiny("llama", num_hidden_layers=1)
    caches = pair(model)
    same_tokens(model, prompt(1, 185, padded=False), caches, max_new_tokens=80)
    r = caches[1].report()
    assert (
        r["graphs"]["captured"] == 2
        and r["graphs"]["replayed"] == 78
        and caches[1].layers[0].store.capacity > 256
    ), r["graphs"]
    assert "78 steps replayed, 2 graphs captured" in str(r)


def test_a_full_cache_refuses_and_is_as_before():
    model = tiny()
    _, cache = pair(model, max_length=24)
    with refuses("max_length is 24"):
        generate(model, prompt(2, 20), "turboquant", cache=cache, max_new_tokens=9)
    assert {x.held for x in cache.layers} == {24} and cache.report()["graphs"][
        "why_not"
    ] == "the cache is full"


def test_a_model_that_changes_is_captured_again():
    """Other weights in other tensors, or a switch in a module, between two prompts of a cache
    that keeps its graph. Kills: a graph that goes on with what the model was."""
    model = copy.deepcopy(tiny())
    layer = model.model.layers[0].mlp
    layer.scale, own = 1.0, layer.forward
    layer.forward = lambda x: own(x) * layer.scale
    caches, outs = pair(model, max_length=64, static=True), []
    for again in range(4):
        if again == 1:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
        if again == 2:
            layer.scale = -3.0
        outs.append(same_tokens(model, prompt(2, 20), caches, disable_compile=True))
        assert caches[1].runner.captured == (1, 2, 3, 3)[again]
        for c in caches:
            c.reset()
    assert (
        not torch.equal(outs[0], outs[1])
        and not torch.equal(outs[1], outs[2])
        and torch.equal(outs[2], outs[3])
    )


class NoReads(TorchDispatchMode):
    "Raises where the host asks for a number."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits"
        return func(*args, **(kwargs or {}))


def test_a_replay_reads_nothing(monkeypatch):
    """No number comes to the host in a replayed step. Kills: a look at the mask, the length or
    the flags in every step."""
    model, replay = tiny(), StepRunner._replay

    def counted(self, *args):
        self.replayed += (
            self.replayed % 16 == 15
        )  # every 16th looks at what went wrong, where that costs no waiting
        with NoReads():
            return replay(self, *args)

    monkeypatch.setattr(StepRunner, "_replay", counted)
    caches = pair(model, max_length=64)
    same_tokens(model, prompt(2, 20), caches)
    assert caches[1].runner.replayed > 4


def test_a_mask_unlike_the_prompts_is_reported():
    model = tiny()
    _, cache = pair(model, max_length=64)
    inputs = prompt(2, 20)
    out, _ = generate(model, inputs, "turboquant", cache=cache)
    mask = longer(inputs["attention_mask"], 8)
    call = dict(
        past_key_values=cache,
        position_ids=mask.sum(1, keepdim=True) - 1,
        use_cache=True,
        return_dict=True,
        logits_to_keep=1,
    )
    call |= (
        {} if "logits_to_keep" in cache.runner.held[1].kind.rest else {"logits_to_keep": None}
    )
    before = cache.runner.replayed
    with torch.no_grad():
        model(out[:, -1:], attention_mask=mask, **call)
    cache.check()
    assert cache.runner.replayed == before + 1
    mask = longer(mask, 1)
    mask[1, 15] = 0  # a hole
    with torch.no_grad():
        model(out[:, -1:], attention_mask=mask, **call)
    with refuses("an attention mask unlike the prompt's"):
        cache.check()


def spoiled(model, spoil):
    "The model with a `forward` that does something between its arguments and its own."
    new = copy.deepcopy(model)
    own = new.forward
    new.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **spoil(kwargs)))
    return new


def reading(kwargs):
    "A number of the device, as models take that leave experts out."
    return kwargs | dict(use_cache=bool(kwargs["input_ids"].max() >= 0))


def test_a_model_that_no_graph_can_hold_runs_eagerly():
    "The tokens stay those of eager steps. (Chapter 23: one whose first replay differs.)"
    model = spoiled(tiny(), reading)
    caches = pair(model, max_length=64)
    same_tokens(model, prompt(2, 20, padded=False), caches)
    r = caches[1].report()["graphs"]
    assert "capturing failed" in r["why_not"] and r["replayed"] == 0, r
    assert caches[1].report()["tokens"] == 27


@pytest.mark.parametrize(
    "name, padded",
    covering_pairs(
        ["mistral", "gemma2", "gemma3_text", "gpt2", "falcon", "gpt_oss", "smollm3", "mixtral"],
        [True, False],
    ),
)
def test_families(name, padded):
    "Families that differ: the tokens of eager steps, by replays or with a reason."
    model = tiny(name)
    caches = pair(model, max_length=64, static=name in SLIDING)
    inputs = prompt(2, 20, padded=padded)
    same_tokens(model, inputs, caches, max_new_tokens=6, disable_compile=True)
    r = caches[1].report()["graphs"]
    if name in ("mistral", "gemma3_text", "smollm3"):
        assert r["replayed"] >= 4, r
    assert r["replayed"] >= 4 or r["why_not"], r


@pytest.mark.parametrize(
    "recipe, name, why",
    [
        ("k4v4", "mistral", "a sliding layer frees tokens"),
        (Recipe(Spec(4, residual="qjl")), "llama", "QJL"),
    ],
)
def test_what_is_not_captured_says_why(recipe, name, why):
    model = tiny(name)
    caches = pair(model, recipe)
    same_tokens(model, prompt(2, 20), caches)
    r = caches[1].report()["graphs"]
    assert why in r["why_not"] and r["replayed"] == 0, r
    with refuses("graphs must be True, False or a class", TypeError):
        TurboQuantCache(model, graphs=3)


@pytest.mark.parametrize(
    "recipe, static",
    [("k3v3", False), (Recipe(recent=0), True), (Recipe(recent=3, sinks=0), False)],
)
def test_passes_with_drafts_are_replayed(recipe, static):
    """The same tokens as eager passes, one capture for each number of tokens, and after each
    rejection the recent tokens that it overwrote are exact again: the caches hold the same to
    the bit of a code. Kills: a length or a number of drafts in the recording, recent tokens of
    rejected drafts, a tail of the replay before."""
    model, how = tiny(), dict(padding=False, max_new_tokens=50, disable_compile=True)
    caches = pair(model, recipe, max_length=100, static=static)
    text = dict(input_ids=texts(1, 12).repeat(1, 3))
    out = same_tokens(model, text, caches, prompt_lookup_num_tokens=4, **how)
    r = caches[1].report()["graphs"]
    assert 1 <= r["captured"] <= 6 and r["replayed"] > 2 * r["captured"], r
    assert r["why_not"] == "", r
    plain = TurboQuantCache(model, recipe, graphs=False)
    assert torch.equal(out, generate(model, text, "turboquant", cache=plain, **how)[0])
    for a, b in zip(*(c.coded_layers for c in caches)):
        assert a.store.length == b.store.length
        for x, y in zip(a.store.read(), b.store.read()):
            # a code may flip; a token that is another's is five times as far
            assert (x - y).norm() <= 0.02 * y.norm()


CROPS = {  # (tokens of a pass, tokens taken back after it)
    "within the last chunk": ((20, 0), (4, 3), (4, 1), (4, 4), (4, 2), (2, 1), (4, 0), (4, 3)),
    "twice": ((20, 0), (9, 2), (0, 3), (0, 4), (4, 1), (4, 3), (0, 1), (4, 2)),
    "below the chunk, to the sinks": ((20, 0), (4, 2), (0, 5), (4, 1), (4, 3), (0, 14), (4, 2)),
    "to nothing": ((4, 1), (4, 3), (0, 4), (20, 1), (4, 2), (0, 21), (4, 1)),
    "into another tile": ((254, 0), (4, 1), (4, 3), (4, 2), (4, 4), (4, 3), (1, 0), (4, 2)),
}


@pytest.mark.parametrize(
    "steps, how", covering_pairs([*CROPS], ["eager", "graphs", "limited", "static", "sliding"])
)
def test_all_layers_are_cropped_together_as_one_by_one(steps, how, monkeypatch):
    """What is held, what the device counts, and the tail are those of a crop of each layer; so
    are the logits of what comes then. Kills: a slot of the ring that stays a rejected draft's,
    a count that the device does not get."""
    model = tiny("mistral" if how == "sliding" else "llama", num_hidden_layers=3)
    model.set_attn_implementation("turboquant")
    text = texts(1, 300)
    together, found = edits.crop_together, []
    notes = lambda *args: found.append(together(*args)) or found[-1]
    monkeypatch.setattr(edits, "crop_together", notes)
    recipe = Recipe(Spec(3), Spec(3), recent=6, sinks=3)
    more = {} if how in ("eager", "sliding", "graphs") else dict(max_length=300)
    more |= dict(static=how == "static", graphs=Tape if how in ("graphs", "limited") else False)
    caches, at = [TurboQuantCache(model, recipe, **more) for _ in "ab"], 0
    for cache in caches:
        cache.activate_past_recording()
    for n, back in CROPS[steps]:
        logits = []
        for cache in caches:
            with torch.no_grad():
                ids = text[:, at : at + n]
                logits.append(model(ids, past_key_values=cache).logits if n else None)
        assert not n or torch.equal(*logits)
        caches[0].crop(-back)
        for layer in caches[1].layers:
            layer.crop(-back)
        at += n - back
        for a, b in zip(*(c.coded_layers for c in caches)):
            assert a.held == b.held == at == int(a.store.clock.now(a.store))
            assert (a.tail is None) == (b.tail is None)
            if a.store is None:
                continue
            assert a.store._recent_from == b.store._recent_from
            if a.tail is not None:
                assert a.tail[:2] == b.tail[:2] and all(
                    map(torch.equal, a.tail[2:], b.tail[2:])
                )
            for x, y in zip(a.store.read(), b.store.read()):
                assert torch.equal(x, y)
            if a.store.clock.fixed:
                assert int(a.store.clock.position) == int(b.store.clock.position) == at
    some = any(x is not None for x in found)
    assert some if how != "sliding" else not found


@pytest.mark.parametrize("layers", [2, 6])
def test_a_crop_of_all_layers_is_few_launches(layers):
    """Where a graph counts on the device: the recent tokens that rejected drafts took from the
    ring, and the counts. The host calls few functions for a layer, and waits for nothing."""
    model, text = tiny("llama", num_hidden_layers=layers), prompt(1, 60, padded=False)
    model.set_attn_implementation("turboquant")
    cache, ids = TurboQuantCache(model, "k3v3", graphs=Tape), text["input_ids"]
    cache.activate_past_recording()
    with torch.no_grad():
        for a, z in ((0, 40), (40, 44), (44, 48), (48, 52)):
            model(ids[:, a:z], past_key_values=cache)
        assert cache.runner.replayed == 1
        with NoReads(), Launches() as launched:
            cache.crop(-2)
        assert launched.names == ["full_like", "_foreach_copy_", "_foreach_copy_"], (
            launched.names
        )
        one = torch.tensor(-1)  # as transformers brings it
        calls = host_calls(lambda: cache.crop(one))
        assert all(type(x.store.length) is int for x in cache.layers)
        for wrong in (-1.0, 1):  # refused as by each layer, and nothing is forgotten
            with pytest.raises((TypeError, ValueError)):
                cache.crop(wrong)
    assert calls <= 60 + 35 * layers, calls
    assert {x.held for x in cache.layers} == {49}


class Still(Tape):
    "A graph whose replay computes nothing: what is left is the host's part."

    def replay(self):
        pass


@pytest.mark.parametrize("n", [1, 4])
def test_what_a_replayed_pass_costs_the_host(n, monkeypatch):
    "Function calls from the model's call on: 217 once and 8 for a layer; nothing is awaited."
    monkeypatch.setattr(StepRunner, "_compared", lambda self, *args: self._replay(*args[-2:]))
    counts = []
    for layers in (2, 6):
        model, text = tiny("llama", num_hidden_layers=layers), prompt(1, 60, padded=False)
        model.set_attn_implementation("turboquant")
        cache, ids = TurboQuantCache(model, "k3v3", graphs=Still), text["input_ids"]
        cache.activate_past_recording()
        mask, at = torch.ones(1, 60, dtype=torch.long), 30
        with torch.no_grad():
            model(ids[:, :at], attention_mask=mask[:, :at], past_key_values=cache)
            for i in range(5):
                step = dict(input_ids=ids[:, at : at + n], attention_mask=mask[:, : at + n])
                step |= dict(past_key_values=cache, logits_to_keep=n, use_cache=True)
                replay = lambda step=step: model(**step)
                with NoReads() if i == 3 else nullcontext():
                    calls = host_calls(replay) if i == 4 else replay()
                at += n
        assert cache.runner.replayed == 3 and cache.get_seq_length() == at
        counts.append(calls)
    assert counts[1] - counts[0] <= 4 * 8 and counts[0] <= 260, counts


def test_slots_of_the_ring_are_computed_once_for_all_layers(monkeypatch):
    """In a captured pass with drafts, for each number of recent tokens; and each capture asks
    anew where the device stands."""
    ring, asked = DeviceClock.ring, []
    notes = lambda self, store: asked.append(self.by_device) or ring(self, store)
    monkeypatch.setattr(DeviceClock, "ring", notes)
    model = tiny("llama", num_hidden_layers=4)
    recipes = [Recipe(Spec(3), Spec(3), recent=n) for n in (7, 5, 7, 5)]
    text, said = texts(1, 90), []
    for graphs in (False, Tape):
        cache = TurboQuantCache(model, recipes, max_length=100, graphs=graphs)
        out = read(model, cache, text, 40, (4, 4, 4, 4, 5, 5, 5, 4, 5), back=2)
        said.append(torch.cat(out, 1))
    assert sum(asked) == 2 * 2 and cache.runner.captured == 2, asked
    assert (said[0] - said[1]).abs().max() < 1e-4 * said[0].abs().max()


def test_passes_of_changing_lengths_are_not_captured():
    """An assistant that drafts now 2, now 3 tokens would pay for graphs that are hardly
    replayed: a number of tokens is captured when it comes twice in a row."""
    model, text = tiny(), texts(1, 60)
    logits = []
    for graphs in (False, Tape):
        cache = TurboQuantCache(model, "k3v3", max_length=100, graphs=graphs)
        counts = []

        def look(cache=cache, counts=counts):
            counts.append(cache.runner.captured)
            if cache.runner.graphs and len(counts) == 4:
                assert "no two passes in a row" in cache.report()["graphs"]["why_not"]

        passes = 3, 4, 3, 4, 1, 3, 3, 4, 3, 3, 4, 4
        logits.append(read(model, cache, text, 20, passes, back=1, then=look))
    assert (
        counts == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
        and cache.runner.replayed == 2
        and cache.report()["graphs"]["why_not"] == ""
    )
    for a, b in zip(*logits):
        assert (a - b).norm() < 1e-4 * a.norm()


def test_a_graph_does_not_outlive_the_tensors_that_another_moved():
    """Passes of three tokens make the store grow; a token alone, captured before, comes after
    that. Kills: its graph, which replays on the tensors that were left."""
    model, text = tiny("llama", num_hidden_layers=1), texts(1, 290)
    logits = []
    for graphs in (False, Tape):
        cache = TurboQuantCache(model, "k3v3", graphs=graphs)
        logits.append(read(model, cache, text, 190, [1] * 4 + [3] * 22 + [1] * 3))
    assert cache.runner.captured == 4 and cache.layers[0].store.capacity > 256
    for a, b in zip(*logits):
        assert (a - b).norm() < 1e-4 * a.norm()


def test_a_chunk_that_makes_stores_grow_does_so_a_layer_at_a_time(monkeypatch):
    """What a layer held is gone before the next one grows, and the allocator is asked once.
    Kills: graphs that keep all of it until the step behind the chunk, twice the cache for that
    long."""
    cache = TurboQuantCache(model := tiny("llama"), "k3v3", graphs=Tape)
    text = texts(1, 800)
    read(model, cache, text, 190, [1] * 4)
    assert cache.runner.held
    held = [weakref.ref(x.store.key.memory.cells) for x in cache.coded_layers]
    left, update = [], TurboQuantCache.update

    def watched(*args, **kwargs):
        left.append([x() is not None for x in held])
        return update(*args, **kwargs)

    asked = []
    monkeypatch.setattr(TurboQuantCache, "update", watched)
    monkeypatch.setattr(edits, "_give_back", asked.append)
    with torch.no_grad():
        model(text[:, 194:], past_key_values=cache)
    assert left == [[True, True], [False, True]] and asked == [torch.device("cpu")]


@pytest.mark.parametrize("reserved, given", [(125, 0), (126, 1)])
def test_what_grew_is_given_back_where_it_is_a_quarter(reserved, given, monkeypatch):
    calls = []
    for name, value in (("memory_allocated", 100), ("memory_reserved", reserved)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    for device in ("cpu", "cuda"):
        edits._give_back(torch.device(device))
    assert len(calls) == given


def test_drafts_and_then_none_in_one_cache():
    """A turn with drafts, then one without: other graphs, the same tokens. Drafts on a past
    would read the conversation a second time (transformers' own cache does), and are
    refused."""
    model = tiny()
    caches = pair(model, "k3v3", max_length=100)
    ids = texts(1, 12).repeat(1, 2)
    said = lambda ids: dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    drafts = dict(prompt_lookup_num_tokens=3)
    for more in (drafts, {}):
        ids = same_tokens(model, said(ids), caches, max_new_tokens=12, **more)
        ids = torch.cat([ids, ids[:, :4]], 1)
    cache = caches[1]
    held = cache.get_seq_length()
    assert cache.report()["graphs"]["why_not"] == ""
    # the second: transformers 5.17 gives the mask
    why = f"does not go on from {held} tokens; with drafts|all [0-9]+ tokens of a conversation"
    with refuses(why):
        generate(model, said(ids), "turboquant", cache=cache, **drafts)
    assert cache.get_seq_length() == held


def test_copies_files_and_the_models_own_forward(tmp_path):
    """A copy captures for itself; a file knows nothing of graphs; with the last cache the
    model's own `forward` is back, also on a copy of the model that was made meanwhile."""
    model = copy.deepcopy(tiny())
    caches = pair(model)
    out = same_tokens(model, prompt(2, 20), caches)
    assert (
        "forward" in model.__dict__
        and list(model.__dict__["forward"].__signature__.parameters)
        == list(inspect.signature(type(model).forward).parameters)[1:]
    )
    other = copy.deepcopy(model)
    other.set_attn_implementation("turboquant")
    assert torch.equal(
        generate(other, prompt(2, 20), "turboquant", cache=TurboQuantCache(other, "k4v4"))[0],
        out,
    )
    caches += (copy.deepcopy(caches[1]),)
    caches[1].save(tmp_path / "c")
    caches += (TurboQuantCache.load(tmp_path / "c", model),)
    step = dict(input_ids=out[:, -1:], position_ids=torch.tensor([[27], [20]]), use_cache=True)
    with torch.no_grad():
        logits = [model(**step, past_key_values=c).logits for c in caches]
    assert all(torch.allclose(x, logits[0], atol=1e-5) for x in logits) and not caches[3].static
    assert {c.get_seq_length() for c in caches} == {28}
    del caches
    gc.collect()
    assert "forward" not in model.__dict__


# --- a step that is captured while a prompt is read


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_a_step_is_captured_while_the_prompt_is_read(static, padded, monkeypatch):
    """Of a kind that was compared before: then every step is a replay, tokens are those of
    eager steps, and a kept graph is not captured again."""
    model = tiny()
    more = dict(max_length=64, static=static)
    same_tokens(model, prompt(2, 20, padded=padded), pair(model, **more), max_new_tokens=6)
    monkeypatch.setattr(StepRunner, "_device_needs", lambda self, now: 1e9)
    early, capture = [], StepRunner._capture

    def noting(self, forward, captured, step):
        early.extend(["a prompt"] if step.ids.sum() == 0 else [])
        return capture(self, forward, captured, step)

    monkeypatch.setattr(StepRunner, "_capture", noting)
    caches = pair(model, **more)
    for again in range(2):
        inputs = prompt(2, 20 + again, padded=padded)
        same_tokens(model, inputs, caches, max_new_tokens=9)
        r = caches[1].report()["graphs"]
        assert early or (static and again)
        early.clear()
        assert r["replayed"] == 8 * (1 + again) and r["why_not"] == ""
        assert r["captured"] == (1 if static else 1 + again)
        for x in caches:
            x.reset()


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("static", [False, True])
def test_a_pass_with_drafts_is_captured_while_the_prompt_is_read(static, wrong, monkeypatch):
    """With as many drafts as the prompt had: the first pass behind it is captured, and of a
    kind that was compared before it is captured in the prompt. Drafts behind the prompt that
    are taken back leave the graph as it is."""
    model, text = copy.deepcopy(tiny()), texts(1, 60)
    model.set_attn_implementation("turboquant")
    monkeypatch.setattr(StepRunner, "_device_needs", lambda self, now: 1e9)
    said, more = {}, dict(max_length=100, static=True) if static else {}
    for name, graphs in (("eager", False), ("first", Tape), ("second", Tape)):
        cache = TurboQuantCache(model, "k3v3", graphs=graphs, **more)
        said[name], at, counts = [], 0, []
        cache.activate_past_recording()
        with torch.no_grad():
            for n in (20, 4, 4, 3, 4):
                step = dict(past_key_values=cache, logits_to_keep=min(n, 4))
                said[name].append(model(text[:, at : at + n], **step).logits)
                counts.append((cache.runner.captured, cache.runner.replayed))
                cache.crop(-wrong)
                at += n - wrong
        assert cache.get_seq_length() == at and not cache.runner.why
        assert (
            counts
            == dict(
                eager=[(0, 0)] * 5,
                first=[(0, 0), (1, 0), (1, 1), (1, 1), (1, 2)],
                second=[(1, 0), (1, 1), (1, 2), (1, 2), (1, 3)],
            )[name]
        )
    for name in ("first", "second"):
        for a, b in zip(said[name], said["eager"]):
            assert (a - b).norm() < 1e-4 * b.norm()


def test_no_step_is_captured_early_where_that_would_take_longer(monkeypatch):
    model = copy.deepcopy(tiny())  # a model knows what was compared
    same_tokens(model, prompt(2, 20), pair(model), max_new_tokens=6)
    (cache,) = pair(model)[1:]
    with torch.no_grad():
        monkeypatch.setattr(StepRunner, "_device_needs", lambda self, took: 1e-9)
        model(**prompt(2, 20), past_key_values=cache)
        assert cache.runner.captured == 0 and not cache.layers[0].store.clock.fixed
        other = pair(model)[1]
        monkeypatch.setattr(StepRunner, "_device_needs", lambda self, now: 1e9)
        model(**prompt(3, 20), past_key_values=other)  # of three rows none was compared
        assert other.runner.captured == 0


@pytest.mark.parametrize("chunk, tokens, captured", [(12, 40, 1), (180, 300, 2)])
def test_chunks_of_a_prompt_are_captured_early_once(chunk, tokens, captured, monkeypatch):
    "In vain where a later chunk makes the store grow: then not again, but at the first step."
    model = tiny()
    same_tokens(model, prompt(2, 40, padded=False), pair(model), max_new_tokens=6)
    monkeypatch.setattr(StepRunner, "_device_needs", lambda self, now: 1e9)
    inputs, caches = prompt(2, tokens, padded=False), pair(model)
    same_tokens(model, inputs, caches, max_new_tokens=6, prefill_chunk_size=chunk)
    assert (caches[1].runner.captured, caches[1].runner.replayed) == (captured, 5)


@pytest.mark.parametrize(
    "layers, done, took, needs", [(4, 1, 2, 6), (4, 0, 2, 8), (4, 4, 2, 0)]
)
def test_what_a_device_needs_is_counted_by_layers(layers, done, took, needs):
    class Event:
        def __init__(self, over):
            self.query = lambda: over

    cache = TurboQuantCache(tiny("llama", num_hidden_layers=layers), graphs=Tape)
    now = SimpleNamespace(seconds=took, unseen=[])
    assert cache.runner._device_needs(now) == 0  # nothing was read
    now.unseen = [(None, Event(i < done)) for i in range(layers)]
    assert cache.runner._device_needs(now) == needs
    now.unseen.pop()
    assert cache.runner._device_needs(now) == 0  # another way of coding: not known


@torch.no_grad()
def test_what_a_graph_has_of_a_model_is_looked_at_in_each_call(monkeypatch):
    """Each of these changes between two calls is seen, and taken back it is what it was; new
    values of weights are not. Sixteen functions are called for a module at most (129 when
    parameters, buffers and modules were walked through one by one and attributes spelt out)."""
    model = copy.deepcopy(tiny())
    mlp, norm, before = model.model.layers[1].mlp, model.model.norm, settings_digest(model)
    weights, rope = mlp.up_proj._parameters, model.model.rotary_emb._buffers
    own, new = weights["weight"], torch.nn.Parameter
    changes = [
        *[(vars(mlp), "active", x) for x in ("one", ["one", ("two", 2)], True, 1, 1.0)],
        (vars(norm), "training", True),
        (vars(mlp), "forward", mlp.up_proj.forward),
        (mlp._forward_hooks, 0, print),
        (mlp._forward_pre_hooks, 0, print),
        (mlp._modules, "adapter", torch.nn.Linear(2, 2, bias=False)),
        (mlp._modules, "act_fn", torch.nn.GELU()),
        (weights, "weight", new(own.clone())),
        (weights, "weight", new(own.half())),
        (rope, "inv_freq", rope["inv_freq"].clone()),
    ]
    seen = [before]
    for change in changes:
        with monkeypatch.context() as m:
            m.setitem(*change)
            seen.append(settings_digest(model))
        assert settings_digest(model) == before
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", kind):
            seen.append(settings_digest(model))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    seen.append(settings_digest(model))
    torch.set_float32_matmul_precision(precision)
    assert [seen.index(x) for x in seen] == [*range(len(seen))]
    mlp.active = ["one"]
    held = settings_digest(model)
    mlp.active.append("two")
    assert settings_digest(model) != held
    del mlp.active
    own.add_(1)
    assert settings_digest(model) == before
    model.model.loop = model.model.layers  # a module in two places
    assert isinstance(settings_digest(model), int)
    assert host_calls(lambda: settings_digest(model)) <= 16 * len([*model.modules()])
