"""A budget: tokens are exact until memory is short, and no byte more is held than it allows.

TURBOQUANT_SLOW=1 makes five times as many random runs."""

import copy
import random
from functools import partial

import pytest
import torch

from tests.helpers import (
    DEVICE,
    GROUP,
    HEADS,
    QUIETLY,
    SLOW,
    covering_pairs,
    given_frame,
    needs_triton,
    prompt,
    random_frame,
    refuses,
    seeded,
    sliding_config,
    tiny,
)

transformers = pytest.importorskip("transformers")

from turboquant_nb.cache.attention import dense_attention
from turboquant_nb.cache.budget import Budget, Stand, TieredStore, ladder
from turboquant_nb.cache.store import KVStore, tables_of
from turboquant_nb.hf import TurboQuantCache, enable, disable, turboquant_attention
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.kernels import ops

pytestmark = QUIETLY
STANDS = (0, 256, 512, 768, 800)
# queries, window, where tiers end
KERNEL_CALLS = [(1, None, STANDS), (1, 600, STANDS), (1, 20, STANDS), (40, None, STANDS)]
KERNEL_CALLS += [(5, None, STANDS), (40, 300, STANDS), (40, None, (0, 256, 512, 784, 800))]
# bytes that let tokens of 2,401 pass through all tiers, and some be forgotten
TOLD = {"llama": 440_000, "qwen3": 450_000, "gemma3_text": 560_000, "cohere2": 320_000}
D, WINDOW, LAYERS = 16, 40, 4
SLIDES = ["full_attention", "sliding_attention", "full_attention", "full_attention"]


def held(cache) -> int:
    "Bytes of all storages that a cache keeps, and of its tables, which others share."
    found, tables = {}, {}
    for store in (x.store for x in cache.coded_layers if x.store):
        parts = [part for run in store.runs for part in run.parts]
        tensors = [t for part in parts for t in part.tensors.values()]
        for t in (*tensors, store.start, *(run.flags for run in store.runs)):
            if t is not None and t.numel():
                found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        tables |= {t.data_ptr(): t.nbytes for t in tables_of(store)}
    return sum(found.values()) + sum(tables.values())


class Run:
    "A cache under a budget, and what came to it."

    def __init__(self, rng, memory, **how):
        self.config, self.rng, self.g = (
            sliding_config(WINDOW, *SLIDES),
            rng,
            seeded(rng.randrange(10**6)),
        )
        frame, how = given_frame(self.config), dict(attention="codes") | how
        self.cache = TurboQuantCache(self.config, frame=frame, memory=memory, **how)
        self.batch, self.raw = rng.randint(1, 2), None

    @property
    def length(self):
        return self.cache.get_seq_length()

    def draw(self, heads, n):
        return torch.randn(self.batch, heads, n, D, generator=self.g) + 0.5

    def append(self, n):
        "Through all layers, whose attention is that of dense states over what is read."
        new = [(self.draw(HEADS, n), self.draw(HEADS, n)) for _ in range(LAYERS)]
        past = self.length
        for i, (layer, (k, v)) in enumerate(zip(self.cache.layers, new)):
            q, first = self.draw(HEADS * GROUP, n), layer.first
            handles = self.cache.update(k, v, i)
            got = [x.clone() for x in layer.store.read(first if past else None)]
            for x, y in zip(got, (k, v)) if past else ():  # its own tokens exactly
                x[:, :, x.shape[2] - n :] = y
            if isinstance(handles[0], torch.Tensor):
                for x, y in zip(handles, got if past else (k, v)):
                    assert torch.equal(x[:, :, -y.shape[2] :], y)
                continue
            if layer.is_sliding:
                first = max(first, layer.store.freed)
            out = turboquant_attention(None, q, *handles, None, 0.25)[0].transpose(1, 2)
            window = WINDOW if layer.is_sliding else None
            states = got if past else (k, v)
            want, _ = dense_attention(q, *states, 0.25, sliding_window=window)
            assert torch.allclose(out, want, atol=3e-5), (out - want).abs().max()
        join = lambda old, x: torch.cat([old, x], 2)
        old = self.raw or [(x[:, :, :0], y[:, :, :0]) for x, y in new]
        self.raw = [(join(a, x), join(b, y)) for (a, b), (x, y) in zip(old, new)]

    def each(self, f):
        if self.raw:
            self.raw = [tuple(map(f, pair)) for pair in self.raw]
            self.batch = len(self.raw[0][0])

    def check(self):
        "Bytes, and where each token stands: exact, or its 4 bits without their last planes."
        cache = self.cache
        assert held(cache) == cache.report()["nbytes"] <= cache.budget.memory
        for layer, states in zip(cache.coded_layers, self.raw or ()):
            store, (first, *ends, last) = layer.store, layer.store.ends
            assert last == states[0].shape[2] == layer.store.length
            assert len(store.runs) <= 3 and store.freed == first
            for x, y in zip(store.read(store.offset), states):
                assert torch.equal(x, y[:, :, store.offset :])
            finest = store.recipes[-1]
            how = (store.batch, HEADS, D, D)
            more = dict(frame=layer.frame, inv_freq=torch.tensor(layer.info.inv_freq))
            whole = KVStore(finest, *how, **more)
            whole.append(*(x[:, :, : store.offset] for x in states))
            for tier, run in store.tiers.items():
                assert run.length == ends[tier] and not run.capacity % store.tile
                assert run.capacity - (run.length - run.offset) < store.tile
                for side in ("key", "value"):
                    got, want = (x.coded(side, run.offset, run.length) for x in (run, whole))
                    lost = len(store.recipes) - 1 - tier
                    apart = (got.codes != want.codes >> lost).float().mean()
                    assert apart < 1e-4 and torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("seed", range(50 if SLOW else 10))
def test_no_byte_more_than_the_budget(seed):
    """Chunks, single tokens, crops, beams, other numbers of rows, copies and new prompts, at
    budgets that end anywhere between exact and the floor; what is refused changes nothing."""
    rng = random.Random(seed)
    run = Run(rng, rng.choice((250_000, 320_000, 420_000)), full=rng.choice(("error", "evict")))
    refused, moved = 0, set()
    for _ in range(25):
        what = rng.choice(("append",) * 6 + ("crop", "beams", "rows", "copy", "reset"))
        before = run.length, [x.store.ends for x in run.cache.coded_layers if x.store]
        try:
            if what == "append":
                run.append(rng.choice((1, 1, 2, 9, 40, 200, 300, 700)))
            elif not run.length:
                continue
            elif what == "crop":
                layer = run.cache.coded_layers[1]
                n = min(rng.choice((1, 5, 100, 400)), run.length - layer.store.freed - WINDOW)
                if n > 0 and run.length - n > max(
                    x.store.freed for x in run.cache.coded_layers
                ):
                    run.cache.crop(-n)
                    run.each(lambda x: x[:, :, : x.shape[2] - n])
            elif what == "beams":
                rows = torch.tensor([rng.randrange(run.batch) for _ in range(run.batch)])
                run.cache.reorder_cache(rows)
                run.each(lambda x: x[rows])
            elif what == "rows":
                more = rng.random() < 0.5 and run.batch < 3
                index = [0, *range(run.batch)] if more else [run.batch - 1]
                move = run.cache.reorder_cache if more else run.cache.batch_select_indices
                move(torch.tensor(index))
                run.each(lambda x: x[index])
            elif what == "copy":
                run.cache = copy.deepcopy(run.cache)
            elif rng.random() < 0.3:
                run.cache.reset()
                run.raw = None
        except ValueError as error:
            assert "Nothing was lost" in str(error)
            assert before == (
                run.length,
                [x.store.ends for x in run.cache.coded_layers if x.store],
            )
            refused += 1
            run.cache.recover()
            run.cache.reset()
            run.raw = None
        run.check()
        for x in run.cache.coded_layers if run.raw else ():
            moved |= set(x.store.tiers)
    assert moved or refused
    with pytest.raises(AssertionError):  # the mutant: a budget that is smaller
        run.append(1)
        run.cache.budget.memory = held(run.cache) - 1
        run.check()


@pytest.mark.parametrize(
    "name, attention",
    covering_pairs(("llama", "qwen2", "gemma3_text", "gpt_oss"), ("sdpa", "eager")),
)
def test_before_the_first_move_it_is_transformers_own(name, attention):
    "Bit for bit, padding and beams included. The mutant's budget lets tokens move."
    model = tiny(name, head_dim=16, max_position_embeddings=1024)
    model.set_attn_implementation(attention if name != "gpt_oss" else "eager")
    inputs = prompt(2, 600)
    how = dict(max_new_tokens=12, do_sample=False, output_logits=True)
    how |= dict(return_dict_in_generate=True)
    logits = lambda cache, **more: torch.stack(
        model.generate(**inputs, past_key_values=cache, **how, **more).logits
    )
    for more in (dict(num_beams=3), {}):
        want = logits(transformers.DynamicCache(config=model.config), **more)
        cache = TurboQuantCache(model, memory="1GB")
        assert torch.equal(logits(cache, **more), want)
        report = cache.report()
        assert {*report["budget"]["tokens"][0]} == {16} and not report["coded"]
    floor = sum(x.nbytes for x in cache.stands(2))
    cache = TurboQuantCache(model, memory=int(0.9 * floor), full="evict")
    assert not torch.equal(
        logits(cache), logits(transformers.DynamicCache(config=model.config))
    )


@pytest.mark.parametrize("name, memory", TOLD.items())
def test_attention_on_codes_and_on_what_they_decode_to_agree(name, memory):
    "The same tokens through both paths, with padding, while tokens move and are forgotten."
    model = tiny(name, head_dim=16, max_position_embeddings=4096)
    ids = prompt(2, 2401, padded=False)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :280] = 0
    bits, found, ends = [], [], (0, 500, 501, 900, 905, 1400, 1401, 2400, 2401)
    for attention in ("auto", "dense"):
        said, out = [], []
        how = dict(memory=memory, full="evict", on_tier=lambda *x: said.append(x))
        cache = TurboQuantCache(model, attention=attention, **how)
        with torch.no_grad():
            for a, b in zip(ends, ends[1:]):
                keep = dict(attention_mask=mask[:, :b], past_key_values=cache)
                out.append(model(ids[:, a:b], **keep).logits)
                assert held(cache) <= memory
        bits.append(said)
        found.append(torch.cat(out, 1)[mask.bool()])
    assert bits[0] == bits[1] and {x for x, _ in bits[0]} == {4, 3, 2}
    assert any(x.store.freed for x in cache.coded_layers if not x.is_sliding)
    assert torch.allclose(*found, atol=2e-3), (found[0] - found[1]).abs().max()


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize(
    "name, memory, tiers",
    [("llama", "1GB", set()), ("llama", 290_000, {4}), ("gemma2", 220_000, {4, 3, 2})],
)
def test_steps_are_captured_between_moves(name, memory, tiers, padded):
    """The tokens of eager steps, from graphs that are captured anew where tokens move or what
    is exact grows, for another prompt, too. Kills: a graph that goes on with tensors that
    moved, or counts what it does not hold; one that is captured in each step."""
    model = tiny(name, head_dim=16, max_position_embeddings=1024, sliding_window=4096)
    model.config.layer_types = ["full_attention"] * len(model.model.layers)
    how, outs = dict(memory=memory, full="evict", backend="torch"), []
    for graphs in (False, Tape):
        said, out = [], []
        cache = TurboQuantCache(model, graphs=graphs, on_tier=lambda *x: said.append(x), **how)
        for seed, n in enumerate((500, 30)):
            inputs = prompt(2, n, padded=padded, seed=seed)
            if padded:
                inputs["attention_mask"][1, : n // 2] = 0
            more = dict(past_key_values=cache, max_new_tokens=70, do_sample=False)
            out.append(model.generate(**inputs, **more))
            assert held(cache) <= cache.budget.memory
            if r := cache.report()["graphs"]:
                assert r["replayed"] >= 60 * (1 + seed) and r["captured"] <= 8 * (1 + seed), r
                assert not r["why_not"], r
            cache.reset()
        assert bool(r) == bool(graphs) and {x for x, _ in said} == tiers
        outs.append(torch.cat(out, 1))
    assert torch.equal(*outs)


@torch.no_grad()
def test_what_would_not_stay_exact_is_coded_as_it_comes():
    "Where `tokens=` says so; the newest are exact all the same. Fewer tokens change nothing."
    model = tiny("llama", head_dim=16, max_position_embeddings=2048)
    found = {}
    for tokens in (None, 300, 3000):
        cache, said = None, []
        cache = TurboQuantCache(
            model, memory="500kB", tokens=tokens, on_tier=lambda *x: said.append(x)
        )
        for n in (300, 1, 1):
            model(torch.ones(1, n, dtype=torch.long), past_key_values=cache)
        found[tokens] = said, cache.report()["budget"]["tokens"][0]
    assert found[None] == found[300] == ([], {16: 302})
    said, stand = found[3000]
    assert said == [(4, 300)] and 16 <= stand[16] < 64 and stand[4] + stand[16] == 302


@pytest.mark.parametrize("tokens", (1, 20, 31))
def test_few_tokens_that_fit_do_not_ask_for_codes(tokens):
    "Kills: what is too short to move taken for what does not stay exact."
    cache = TurboQuantCache(tiny("llama", head_dim=16), memory="1GB", tokens=tokens)
    assert not cache.budget.at_once


@torch.no_grad()
def test_what_is_not_captured_under_a_budget():
    """Drafts, beams, and sliding layers: the tokens are those of eager steps, and the report
    says why. Behind a crop steps are captured again."""
    how = dict(memory=200_000, backend="torch")
    for name, more, why in (
        ("llama", dict(num_beams=2), "rows moved"),
        ("llama", dict(prompt_lookup_num_tokens=3), "a budget's steps are of one token"),
        ("mistral", {}, "a sliding layer frees tokens"),
    ):
        model = tiny(name, head_dim=16, max_position_embeddings=1024)
        outs = []
        for graphs in (False, Tape):
            cache = TurboQuantCache(model, graphs=graphs, **how)
            ids = dict(input_ids=prompt(1, 40)["input_ids"].repeat(1, 8))
            more = more | dict(max_new_tokens=20, do_sample=False, past_key_values=cache)
            outs.append(model.generate(**ids, **more))
        assert torch.equal(*outs) and why in cache.report()["graphs"]["why_not"]
    model = tiny("llama", head_dim=16, max_position_embeddings=1024)
    caches = [TurboQuantCache(model, graphs=x, **how) for x in (False, Tape)]
    ids, logits = prompt(1, 420)["input_ids"], []
    for cache in caches:
        model(ids[:, :380], past_key_values=cache)
        step = lambda i, cache=cache: model(ids[:, i : i + 1], past_key_values=cache).logits
        out = [step(i) for i in range(380, 395)]
        cache.crop(-12)
        logits.append(torch.cat(out + [step(i) for i in range(383, 420)], 1))
    assert caches[1].runner.replayed > 30
    assert torch.allclose(*logits, atol=1e-4)


def test_it_is_full_where_it_said_and_goes_on_where_it_may_forget():
    model = tiny("llama", head_dim=16, max_position_embeddings=8192)
    said = []
    cache = TurboQuantCache(model, memory="600kB", on_tier=lambda *x: said.append(x))
    step = lambda: model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    with torch.no_grad():
        model(torch.ones(1, 1000, dtype=torch.long), past_key_values=cache)
        reach = cache.report()["budget"]["reach"]
        model(torch.ones(1, reach - 1001, dtype=torch.long), past_key_values=cache)
        step()
        with refuses(
            f"it holds {reach:,} tokens at the floor 'k2v2-scalar', .* Nothing was lost"
        ):
            step()
        assert cache.get_seq_length() == reach == cache.report()["budget"]["reach"]
        before = [x.store.read() for x in cache.coded_layers]
        with refuses("Nothing was lost"):
            step()
        for x, y in zip(before, (x.store.read() for x in cache.coded_layers)):
            assert all(map(torch.equal, x, y))
        cache.recover()
        cache.budget.full = "evict"
        for _ in range(300):
            step()
            assert held(cache) <= 600_000
        forgotten, found = cache.layers[0].store.freed, cache.report()["budget"]["reach"]
        assert cache.get_seq_length() - forgotten <= found <= reach < found + forgotten
        had = cache.get_seq_length() - forgotten
        with refuses(f"it holds {found:,} tokens at .* and 9,999 were to join {had:,}"):
            model(torch.ones(1, 9999, dtype=torch.long), past_key_values=cache)
        cache.recover()
    tokens = cache.report()["budget"]["tokens"]
    left = [cache.get_seq_length() - x.store.freed for x in cache.coded_layers]
    assert [sum(x.values()) for x in tokens] == left and min(left) > reach - 600
    assert said[0][0] == 4 and said[-1][0] == 2 and said[0][1] <= said[-1][1]
    assert "at the floor 'k2v2-scalar'" in str(cache.report())


def test_who_moves_first():
    """What is exact before what is coded, the first layer after all others, sliding ones below
    4 bits at the very end; and no tier that two others do not need."""
    numbers = dict(batch=1, heads=2, sizes=(64, 64), dtype=torch.float16)
    stands = [Stand.of(ladder(), window=2000 if i == 2 else None, **numbers) for i in range(4)]
    budget, seen = Budget("3MB"), []
    for n in range(319, 20_000, 256):  # what is exact takes most room at these
        try:
            now = budget.plan(stands, n)
        except ValueError:
            break
        assert budget.fits([x.nbytes for x in now], n)
        bits = [{budget.bits(i) for i in range(4) if x.ends[i + 1] > x.ends[i]} for x in now]
        assert all(len(x) <= 3 and 16 in x for x in bits)
        assert bits[1] >= {4} or not any(4 in x for x in bits) or min(map(min, bits)) < 4
        if min(bits[2]) < 4:  # the sliding one: all others are at the floor
            assert all(x.ends[3] - x.ends[1] < 512 for i, x in enumerate(now) if i != 2)
        low = lambda i: sum(1 for x in bits[i] if x < 16)
        assert low(0) <= low(1) or min(bits[0]) == min(bits[1])
        seen.append(min(map(min, bits)))
    assert seen == sorted(seen, reverse=True) and {*seen} == {16, 4, 3, 2}
    assert n > 4000


@pytest.mark.parametrize(
    "how, why",
    [
        (dict(memory="8 GigaBytes"), "memory must be bytes, or a number and a unit such as"),
        (dict(memory="8"), "such as 24GB or 80GiB, got '8'"),
        (dict(memory=0), "memory must be an integer of at least 1, got 0"),
        (dict(memory="0GB"), "memory must be an integer of at least 1, got 0"),
        (dict(memory=-5), "memory must be an integer of at least 1, got -5"),
        (dict(memory="-1GB"), "memory must be bytes, or a number and a unit"),
        (
            dict(memory=50_000),
            "holds 48 tokens at the floor 'k2v2-scalar', fewer than one block of 256",
        ),
        (dict(memory="1MB", tokens=10**6), "fewer than tokens = 1,000,000: give more"),
        (dict(memory="1MB", tokens=0), "tokens must be an integer of at least 1, got 0"),
        (
            dict(memory="1MB", floor="k1v1"),
            "floor must be one of 'k4v4', 'k3v3', 'k2v2-scalar' ",
        ),
        (dict(memory="1MB", floor="k2v2-trellis"), "planes of those of 4 bits, got"),
        (dict(memory="1MB", full="crash"), "full must be one of 'error', 'evict', got 'crash'"),
        (dict(memory="1MB", recipe="k3v3"), "memory= takes no recipe: .*; give floor="),
        (dict(memory="1MB", bits=3, budget=3.0), "takes no bits and no budget"),
        (dict(memory="1MB", static=True, max_length=512), "takes no max_length and no static"),
        (dict(floor="k3v3"), "belong to memory="),
        (dict(tokens=100), "belong to memory="),
    ],
)
def test_what_is_refused(how, why):
    with refuses(why):
        TurboQuantCache(tiny("llama", head_dim=16), **how)


def test_models_that_it_does_not_serve_and_files():
    with refuses("memory= must know keys and values, and layer 0 has"):
        TurboQuantCache(tiny("deepseek_v3"), memory="1GB")
    model = tiny("llama", head_dim=16)
    with refuses("memory must be an integer", TypeError):
        TurboQuantCache(model, memory=1.5e9)
    with refuses("on_tier must be a function of .bits, tokens., got int", TypeError):
        TurboQuantCache(model, memory="1GB", on_tier=3)
    cache = TurboQuantCache(model, memory="1GB")
    with torch.no_grad():
        model(torch.ones(1, 9, dtype=torch.long), past_key_values=cache)
    with refuses("several stores, which no file takes"):
        cache.save("/nonexistent/cache")
    store = cache.layers[0].store
    states = store.read()
    store.settle((0, 0, 0, 9, 9))
    with refuses("start cannot move any more: a budget has coded tokens"):
        store.set_range(start=4, k=states[0], v=states[1])


@torch.no_grad()
def test_more_rows_need_room():
    "By whichever name they come; what is refused changes nothing."
    model = tiny("llama", head_dim=16, max_position_embeddings=1024)
    cache = TurboQuantCache(model, memory=300_000)
    model(prompt(1, 700, padded=False)["input_ids"], past_key_values=cache)
    cache.batch_select_indices(torch.tensor([0, 0]))
    assert cache.report()["batch"] == 2 and held(cache) <= 300_000
    ends = [x.store.ends for x in cache.coded_layers]
    with refuses("Nothing was lost"):
        cache.batch_select_indices(torch.zeros(99, dtype=torch.long))
    assert ends == [x.store.ends for x in cache.coded_layers]


@torch.no_grad()
@pytest.mark.parametrize("memory", ("1GB", 300_000))
@pytest.mark.parametrize("before", (0, 700))
def test_a_pass_that_was_broken_off_is_refused_until_it_is_forgotten(memory, before):
    """While all is exact, too, when transformers' own masks would let the next pass go on with
    tokens that one layer has twice; and no token moves for a pass that is refused."""
    model = tiny("llama", head_dim=16, max_position_embeddings=1024)
    ids, logits = prompt(2, 850, padded=False)["input_ids"], []
    for broken in (False, True):
        cache = TurboQuantCache(model, memory=memory)
        if before:
            model(ids[:, :before], past_key_values=cache)
        if broken:
            hook = model.model.layers[1].register_forward_pre_hook(lambda *x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, before:], past_key_values=cache)
            hook.remove()
            with refuses("a forward pass was broken off"):
                model(ids[:, before:], past_key_values=cache)
            assert cache.recover() == before
        logits.append(model(ids[:, before:], past_key_values=cache).logits)
    assert torch.equal(*logits)


@torch.no_grad()
def test_codes_are_made_as_without_autocast():
    "A mask is asked for within it, and then tokens move. Kills: room that is made with it."
    model = tiny("llama", head_dim=16, max_position_embeddings=1024)
    # torch 2.13's flash attention of bfloat16 fails under ATEN_CPU_CAPABILITY=avx2
    model.set_attn_implementation("eager")
    ids, read = prompt(1, 400, padded=False)["input_ids"], []
    for around in (True, False):
        cache = TurboQuantCache(model, memory=100_000)
        with torch.autocast("cpu", torch.bfloat16):
            model(ids[:, :200], past_key_values=cache)
        exact = cache.layers[1].store.read()
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            cache.get_mask_sizes(200)
        assert cache.layers[1].store.tiers
        read.append((exact, cache.layers[1].store.read()))
    assert all(map(torch.equal, sum(read[0], ()), sum(read[1], ())))


def test_a_report_within_autocast():
    "The first to ask for angles while all is exact. Kills: a table grown by autocast's cat."
    theta = dict(rope_type="default", rope_theta=12_345.0)  # a table that no other test made
    model = tiny("llama", head_dim=16, rope_parameters=theta)
    model.set_attn_implementation("eager")
    default = enable(model, memory="1GB")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(**prompt(1, 20), max_new_tokens=3, do_sample=False)
    finally:
        disable(model)
    assert default.report["budget"]["tokens"] == [{16: 22}] * 2 and not default.report["coded"]


def test_it_is_the_default_of_a_model():
    model = tiny("llama", head_dim=16, max_position_embeddings=1024)
    default = enable(model, memory="300kB", floor="k3v3")
    try:
        model.generate(**prompt(1, 600), max_new_tokens=3, do_sample=False)
    finally:
        disable(model)
    assert default.report["budget"]["floor"] == "k3v3" and default.report["coded"]


@needs_triton
@pytest.mark.parametrize("n, window, ends", KERNEL_CALLS)
def test_kernels_read_every_store(n, window, ends, monkeypatch):
    """One query by the kernel of each store's codes and torch's attention to what is exact,
    long chunks and windows block by block over all: as dense attention to what is read. The
    mutant reads what came, all of it."""
    kind = dict(dtype=torch.float32, device=DEVICE)
    code = partial(ops.append, backend="triton", wait=None)
    coder = lambda store, k, v, names: code(store, k, v, names=names)
    store = TieredStore(ladder(), 2, 1, 32, **kind, frame=random_frame(1, 32), code=coder)
    store.set_range(start=torch.tensor([0, 300]))
    k, v = (torch.randn(2, 1, ends[-1], 32, generator=seeded(i)) for i in range(2))
    k, v = k.to(store.device), v.to(store.device)
    store.append(k, v)
    store.settle(ends)
    q = torch.randn(2, 4, n, 32, generator=seeded(2)).to(store.device)
    names = []
    for name in ("triton", "flash", "blocks", "torch"):
        run = ops.BACKENDS[name].run
        monkeypatch.setattr(
            ops.BACKENDS[name], "run", lambda x, f=run, name=name: names.append(name) or f(x)
        )
    new = k[:, :, -n:], v[:, :, -n:]
    how = dict(sliding_window=window, backend="triton", recent=None if n > 16 else n)
    got = ops.attend(q, store, *new, **how)
    assert names == (["flash"] if n > 1 or window else ["triton"] * 3 + ["flash"])
    states = [torch.cat([x[:, :, :-n], y], 2) for x, y in zip(store.read(), new)]
    places = torch.arange(ends[-1], device=store.device)
    at = places[-n:, None]
    past = ((places >= store.start[:, None])[:, None] & (places <= at))[:, None]
    mask = past & (places > at - (window or ends[-1] + 1))
    want, lse = dense_attention(q, *states, mask=mask)
    assert torch.allclose(got.out, want, atol=2e-3), (got.out - want).abs().max()
    assert torch.allclose(got.lse, lse, atol=2e-3), (got.lse - lse).abs().max()
    wrong, _ = dense_attention(q, k, v, mask=past)
    assert (wrong - want).abs().max() > 2e-2
