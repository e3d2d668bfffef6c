"""The canary: silent on healthy caches in every way of generating, loud about faults in any
recipe, and rare."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.helpers import MODES, generate, prompt, tiny
from turboquant_nb.kernels import ops
from turboquant_nb.hf import CanaryError, TurboQuantCache, Watch
from turboquant_nb.quant.quantizer import Recipe, Spec

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
RECIPES = {
    "three bits": Recipe(sinks=2, recent=5),
    "two bits": Recipe(Spec(2, center="prompt_mean"), Spec(2), sinks=0, recent=0),
    "pre-RoPE mean": Recipe(Spec(3, center="pre_rope"), Spec(3), sinks=2, recent=5),
    "signs": Recipe(Spec(3, residual="sign"), Spec(3, residual="sign"), sinks=1, recent=3),
    "qjl": Recipe(Spec(3, residual="qjl"), Spec(4), sinks=1, recent=7),
    "fractions": Recipe(Spec(2.5), Spec(3.25), sinks=3, recent=5),
    "decay": Recipe(Spec(4), Spec(3), sinks=2, recent=4, decay=300),
    "trellis": Recipe(Spec(2, codebook="trellis"), Spec(3, codebook="trellis_fast"), 1, 3),
}
ALL = Watch(rate=1, tail=12, action="raise")  # every layer, at every step that it can


def flip_byte(side, at):
    "The byte of the first plane that holds a bit of token `at`."
    old, x = [p.clone() for p in side.memory.planes], side.memory.read(at, at + 1)
    side.memory.write(x._replace(codes=x.codes ^ 1), at)
    for plane, was in zip(side.memory.planes, old):
        changed = (plane != was).flatten().nonzero()
        plane.copy_(was)
        if len(changed):
            plane.view(-1)[changed[0]] ^= 0xFF
            return


def scale_off(side, at):
    side.tensors["scale"].flatten(2)[:, 0, at] *= 1.5


def scale_nan(side, at):
    side.tensors["scale"].flatten(2)[:, 0, at] = torch.nan


def another_place(side, at):
    side.memory.write(side.memory.read(at - 1, at), at)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("mode", MODES)
def test_healthy_caches_are_silent(name, mode):
    """Padded batches, beams, sampling, chunks: no alarm, the fault is rounding, and the tokens
    are those of a cache that nobody watches."""
    model, inputs = tiny(name), prompt(2, 36)
    cache = TurboQuantCache(model, Recipe(sinks=2, recent=5), watch=ALL)
    got, _ = generate(
        model, inputs, "turboquant", cache=cache, max_new_tokens=20, **MODES[mode]
    )
    assert torch.equal(
        got,
        generate(
            model,
            inputs,
            "turboquant",
            Recipe(sinks=2, recent=5),
            max_new_tokens=20,
            **MODES[mode],
        )[0],
    )
    seen = cache.report()["watch"]
    assert seen["alarms"] == 0 and seen["worst_fault"] < 1e-4
    assert seen["checks"] or "beam" in mode, (
        "beams take others' rows at every step, so a tail never fills"
    )


def test_drafts_and_crops_are_silent():
    model, ids = tiny(), prompt(1, 12, padded=False)["input_ids"].repeat(1, 3)
    cache = TurboQuantCache(
        model, Recipe(sinks=2, recent=5), watch=Watch(rate=1, tail=3, action="raise")
    )
    generate(
        model,
        dict(input_ids=ids),
        "turboquant",
        cache=cache,
        max_new_tokens=40,
        prompt_lookup_num_tokens=3,
    )
    assert (
        cache.report()["watch"]["checks"] > 5 and cache.report()["watch"]["worst_fault"] < 1e-4
    )


@pytest.mark.parametrize("which", sorted(RECIPES))
@pytest.mark.parametrize("fault", [flip_byte, scale_off, scale_nan, another_place])
def test_faults_are_found(which, fault):
    """In keys and in values of one layer, in every recipe; without the fault the same step is
    silent."""
    model, recipe = tiny(head_dim=16 if which == "trellis" else 8), RECIPES[which]
    model.set_attn_implementation("turboquant")
    ids = prompt(2, 40, padded=False)["input_ids"]
    cache = TurboQuantCache(model, recipe, watch=ALL)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for name in ("key", "value"):
            good, bad = copy.deepcopy(cache), copy.deepcopy(cache)
            fault(getattr(bad.layers[1].store, name), 33)
            model(ids[:, :1], past_key_values=good)
            assert len(good.canary.checks) == 2
            with pytest.raises(CanaryError, match="layer 1 at 41 tokens"):
                model(ids[:, :1], past_key_values=bad)


def test_a_path_that_reads_the_wrong_place(monkeypatch):
    """The codes are right, attention reads values one token too late: only its output says so.
    A warning unless an error was asked for."""
    model, serve = tiny(), ops.attend
    model.set_attn_implementation("turboquant")
    ids = prompt(1, 40, padded=False)["input_ids"]

    def late(q, store, *args, **options):
        store = copy.deepcopy(store)
        for name, t in store.value.tensors.items():
            if name.startswith("plane") or name == "scale":
                t.copy_(t.roll(1, 3))
        return serve(q, store, *args, **options)

    cache = TurboQuantCache(model, Recipe(sinks=2, recent=2), watch=Watch(rate=1, tail=12))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            model(ids[:, :1], past_key_values=cache)
        monkeypatch.setattr(ops, "attend", late)
        with pytest.warns(RuntimeWarning, match="off by .* besides coding"):
            model(ids[:, :1], past_key_values=cache)
    assert cache.report()["watch"]["alarms"] >= 1 and "alarms" in str(cache.report())


def test_an_error_limit():
    model = tiny()
    cache = TurboQuantCache(
        model,
        Recipe(Spec(2), Spec(2), recent=2),
        watch=Watch(rate=1, tail=12, max_error=1e-3, action="raise"),
    )
    with pytest.raises(CanaryError, match="coding moves attention by"):
        generate(model, prompt(1, 30), "turboquant", cache=cache)


@pytest.mark.parametrize("rate, layers", [(1 / 100, 4), (1 / 500, 4), (1 / 20, 2)])
def test_the_rate_is_kept(rate, layers):
    """Checks per layer step, over 200 steps, are at most the rate and not far below; every
    layer has its turn; exact tails are counted in the report."""
    model = tiny(num_hidden_layers=layers)
    cache = TurboQuantCache(
        model, Recipe(sinks=1, recent=4), watch=Watch(rate=rate, tail=8, action="raise")
    )
    generate(model, prompt(1, 30, padded=False), "turboquant", cache=cache, max_new_tokens=201)
    checks = cache.report()["watch"]["over_time"]
    assert 0.5 * rate * 200 * layers - 2 <= len(checks) <= rate * 200 * layers + 1
    if len(checks) >= 4 * layers:
        assert {x["layer"] for x in checks} == set(range(layers))
    assert [x["tokens"] for x in checks] == sorted(x["tokens"] for x in checks)
    parts = cache.report()["parts"]
    assert parts["canary"] == sum(2 * 2 * 8 * 4 * x.tokens for x in cache.canary.kept.values())


def test_half_precision_is_silent():
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(tiny()).to(dtype)
        cache = TurboQuantCache(model, "k3v3", watch=Watch(rate=1, tail=12, action="raise"))
        generate(
            model, prompt(2, 40), "turboquant", cache=cache, padding=False, max_new_tokens=20
        )
        assert cache.report()["watch"]["checks"] and cache.report()["watch"]["alarms"] == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_canary_that_sees_nothing_says_so(attention):
    """Dense attention brings it no query: one warning for the whole run, and no report of a
    health that nobody looked at."""
    cache = TurboQuantCache(tiny(), "k3v3", watch=1 / 2, attention="dense")
    with pytest.warns(
        RuntimeWarning, match="checks nothing where the past is decoded: attention='dense'"
    ) as said:
        generate(tiny(), prompt(2, 40), attention, cache=cache, padding=False, max_new_tokens=6)
    assert (
        len([x for x in said if "canary" in str(x.message)]) == 1
        and cache.report()["watch"]["checks"] == 0
    )


def test_refusals():
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="rate must be"):
            TurboQuantCache(tiny(), watch=bad)
    for bad in ("often", True):
        with pytest.raises(
            TypeError, match="rate must be a finite number above 0 and at most 1, got"
        ):
            TurboQuantCache(tiny(), watch=bad)
    for bad in (
        dict(tail=0),
        dict(limit=0),
        dict(max_error=-1),
        dict(max_error=0),
        dict(limit=float("nan")),
        dict(action="shout"),
    ):
        with pytest.raises(ValueError, match="must be"):
            Watch(**bad)
    with pytest.raises(ValueError, match="static cache"):
        TurboQuantCache(tiny(), watch=0.01, static=True, max_length=40)
    assert TurboQuantCache(tiny()).report()["watch"] is None
