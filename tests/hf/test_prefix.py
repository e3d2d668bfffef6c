"""generate() on sequences that share what they begin with, against the same on copies of it:
the tokens and the scores; what is asked of a cache besides, and what ends the sharing."""

import copy
import gc
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import tiny

from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.kernels import prefix

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
GEN = torch.Generator().manual_seed(0)
PROMPT, REST = (
    torch.randint(1, 60, (1, 600), generator=GEN),
    torch.randint(1, 60, (3, 7), generator=GEN),
)


def begun(model, shared, recipe="k3v3", ids=PROMPT, times=3, **how):
    "A cache that read one prompt, of which there are then several rows."
    cache = TurboQuantCache(model, recipe, **how)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.share(times) if shared else cache.batch_repeat_interleave(times)
    return cache


def tokens(model, cache, rest=REST, ids=PROMPT, mask=None, **how):
    rows = 1 if "num_beams" in how else len(rest) // len(ids)
    whole = torch.cat([ids.repeat_interleave(rows, 0), rest[: rows * len(ids)]], 1)
    how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None) | how
    torch.manual_seed(1)
    return model.generate(
        whole,
        attention_mask=torch.ones_like(whole) if mask is None else mask,
        past_key_values=cache,
        output_scores=True,
        return_dict_in_generate=True,
        **how,
    )


def alike(model, **how):
    "Tokens on shared rows are those on copies; the shared cache."
    making = {x: how.pop(x) for x in ("recipe", "graphs", "max_length", "times") if x in how}
    making |= {x: how[x] for x in ("ids",) if x in how}
    caches = [begun(model, shared, **making) for shared in (False, True)]
    assert {x.shared for x in caches[1].layers} == {512} and caches[0].layers[0].shared == 0
    want, got = (tokens(model, cache, **how) for cache in caches)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.scores, want.scores):
        seen = b.isfinite()
        assert torch.allclose(a[seen], b[seen], atol=2e-5, rtol=1e-4)
    return caches[1]


MASK = torch.ones(3, 607, dtype=torch.long)
MASK[0, 600:603] = MASK[2, 600:601] = 0
WAYS = {
    "greedy": {},
    "sampled": dict(do_sample=True, top_k=20),
    "beams": dict(num_beams=3),
    "all beams": dict(num_beams=3, num_return_sequences=3),
    "padding behind the prefix": dict(mask=MASK),
    "room for so many": dict(max_length=700),
    "two prompts": dict(
        ids=torch.randint(1, 60, (2, 600), generator=GEN), rest=torch.cat([REST, REST.flip(0)])
    ),
    "a fixed mean": dict(recipe="k4v3"),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_copies(way):
    "Kills: positions, masks or beams of another row, tokens that are counted from the rest on."
    alike(tiny("llama"), **WAYS[way])


@pytest.mark.parametrize("way", ["greedy", "sampled", "beams", "room for so many"])
def test_steps_are_replayed(way):
    """As a graph replays them. Kills: a length or a mask that counts the rest alone, a step on
    a processor's kernel that no graph holds."""
    cache = alike(tiny("llama"), graphs=Tape, **WAYS[way])
    r = cache.report()["graphs"]
    assert r["captured"] == 1 and r["replayed"] >= 9 and r["why_not"] == ""
    cache.runner.check()


def test_what_a_graph_reads_stays():
    """A tensor that only the recording holds is another's memory when a CUDA graph is replayed.
    Kills: what was computed before a capture and read in it."""
    model = tiny("llama")
    cache = begun(model, True, graphs=Tape)
    with torch.no_grad():
        for n in range(601, 605):
            mask = torch.ones(3, n, dtype=torch.long)
            model(REST[:, :1], attention_mask=mask, past_key_values=cache)
    assert cache.runner.replayed >= 2
    cache.runner.check()
    ((captured,),) = [cache.runner.held.values()]
    made, read = set(), []
    for _, args, kwargs, out in captured.graph.calls:
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        read += [x for x in flat if isinstance(x, torch.Tensor) and id(x) not in made]
        made |= {id(x) for x in torch.utils._pytree.tree_leaves(out)}
    storages = {x.untyped_storage()._cdata: weakref.ref(x) for x in read if x.numel()}
    assert len(storages) > 40
    captured.graph.calls, captured.graph.out = [], []
    del read, flat, args, kwargs, out
    gc.collect()
    gone = [ref for ref in storages.values() if ref() is None]
    assert not gone, len(gone)


def test_a_report_counts_once_what_is_held_once():
    model = tiny("llama")
    copies, shared = (begun(model, how) for how in (False, True))
    a, b = copies.report(), shared.report()
    held = sum(
        t.nbytes for x in shared.layers for s in (x.store, x.prefix.store) for t in rows(s)
    )
    assert sum(b["per_layer"]) == held and b["values"] == a["values"]
    assert b["nbytes"] < 0.75 * a["nbytes"] and b["tokens"] == a["tokens"] == 600
    assert b["shared"]["tokens"] == 512 and b["shared"]["times"] == 3
    assert "512 tokens of 3 rows are held once, in 2 layers" in str(b)
    assert a["shared"] == {
        "layers": 0,
        "why_not": ["copies of 1024 tokens are spared, 32768 would pay"],
    }


def rows(store):
    numbers = store.start, store.end, store.clock.position, store.flags
    held = [*numbers, *(t for part in store.parts for t in part.tensors.values())]
    return [t for t in held if t is not None]


def read(cache):
    """All that the first layer holds, whose states no attention has changed in their last bit;
    it goes on with copies."""
    cache.layers[0].unshare()
    return [*cache.layers[0].store.read()]


EDITS = {
    "a few tokens back": lambda c: c.crop(-3),
    "into the prefix": lambda c: c.crop(-200),
    "other rows": lambda c: c.batch_select_indices(torch.tensor([2, 0])),
    "rows by a mask": lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
    "another order": lambda c: c.reorder_cache(torch.tensor([1, 1, 0])),
    "twice as many": lambda c: c.batch_repeat_interleave(2),
    "away and back": lambda c: [f() for x in c.layers for f in (x.offload, x.prefetch)],
    "copied": lambda c: None,
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_leave_what_they_leave_of_copies(edit):
    model = tiny("llama")
    caches = [begun(model, how) for how in (False, True)]
    for cache in caches:
        with torch.no_grad():
            model(REST, past_key_values=cache)
    if edit == "copied":
        caches[1] = copy.deepcopy(caches[1])
        assert caches[1].layers[0].shared == 512
    for cache in caches:
        EDITS[edit](cache)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    new = REST[:1].expand(caches[0].layers[0].store.batch, -1)
    with torch.no_grad():
        a, b = (model(new, past_key_values=cache).logits for cache in caches)
    assert torch.allclose(a, b, atol=2e-5, rtol=1e-4)
    assert all(map(torch.equal, *map(read, caches)))


def test_beams_of_several_prompts_that_change_places_go_on_as_copies():
    model, ids = tiny("llama"), torch.randint(1, 60, (2, 600), generator=GEN)
    caches = [begun(model, how, ids=ids, times=2) for how in (False, True)]
    for order, still in (([1, 0, 2, 2], True), ([0, 2, 1, 3], False)):
        for cache in caches:
            cache.reorder_cache(torch.tensor(order))
        assert (caches[1].layers[0].shared > 0) is still
    assert all(map(torch.equal, *map(read, caches)))


def test_files_and_the_models_own_attention_see_whole_rows(tmp_path):
    model = tiny("llama")
    caches = [begun(model, how) for how in (False, True)]
    for i, cache in enumerate(caches):
        cache.save(tmp_path / str(i))
    a, b = (TurboQuantCache.load(tmp_path / str(i), model) for i in range(2))
    assert all(map(torch.equal, read(a), read(b))) and len(a.layers) == 2
    cache = begun(model, True)
    want, _ = cache.layers[0].prefix.joined(cache.layers[0].store).read()
    k, v = torch.randn(2, 3, want.shape[1], 1, want.shape[3])
    got, _ = cache.layers[0].update(k, v, on_codes=False)
    old = 600 - 16  # of which the ring has no exact copies now
    assert torch.equal(got[:, :, :old], want[:, :, :old]) and torch.equal(got[:, :, 600:], k)


NOT_SHARED = {
    "a sliding layer frees tokens": lambda: begun(tiny("mistral", sliding_window=64), True),
    "the model reads decoded keys": lambda: begun(tiny("llama"), True, attention="dense"),
}


@pytest.mark.parametrize("why", NOT_SHARED)
def test_what_cannot_be_shared_is_repeated_and_said(why):
    cache = NOT_SHARED[why]()
    assert cache.report()["shared"] == {"layers": 0, "why_not": [why]}
    assert cache.layers[0].store.batch == 3


def test_many_tokens_are_shared_by_themselves(monkeypatch):
    "By the rule, not by `share`; and a wrong count is refused."
    model = tiny("llama")
    assert begun(model, False).layers[0].shared == 0
    monkeypatch.setattr(prefix, "LEAST", 1024)
    cache = begun(model, False)
    assert cache.layers[0].shared == 512
    for times in (0, -1, 1.5):
        with pytest.raises((ValueError, TypeError), match="times"):
            begun(model, True, times=times)
