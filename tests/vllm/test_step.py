"Steps of an engine whose codes are by windows: kernels against the oracle, on equal codes."

import gc
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from turboquant_nb.cache.attention import Rule
from turboquant_nb.cache.pages import CellCodes, CellLayout, Exact, Recent, Requests
from turboquant_nb.cache.pages import attend_cells, sink_origins, token_positions
from turboquant_nb.kernels import cell_attention as work, cells
from turboquant_nb.quant.calibration import Calibration
from turboquant_nb import Recipe, Spec
from turboquant_nb.vllm import backend as vllm, pages as vllm_pages, step
from turboquant_nb.vllm.step import (
    CodedAttention,
    LayerMemory,
    ServingConfig,
    States,
    Step,
    mean_reasons,
    serving_recipe,
)
from turboquant_nb.testing import same
from turboquant_nb.theory.centre import shared_cos_sin
from turboquant_nb.theory.transforms import (
    HeadTransform,
    pair_scales,
    pair_transform,
    register_transform,
)

from tests.helpers import CUDA, DEVICE, needs_triton, random_frame, refuses, seeded
from tests.kernels.test_cells import search_by_pytorch

pytestmark = needs_triton
H, G, D = 1, 2, 64
# as a calibration has it, for each head of its own
PAIRS = pair_transform(pair_scales(*torch.rand(2, H, D, generator=seeded()).square(), D)).name
RECIPES = [
    (Spec(2, rotation=PAIRS, codebook="trellis"), Spec(2, codebook="trellis"), 64, True, D),
    (Spec(3, codebook="trellis"), Spec(2, codebook="trellis"), 64, False, 0),
    (Spec(3), Spec(3, codebook="trellis"), 128, True, 0),
    (Spec(3, rotation=PAIRS), Spec(3), 64, False, D // 2),
]


@pytest.mark.parametrize("key,value,n,learnt,rotary", RECIPES)
def test_a_step_by_windows(key, value, n, learnt, rotary, gen, monkeypatch):
    """Requests that decode, verify drafts, begin and go on with a chunk, around a centre, with
    first and recent tokens: kernels against the oracle; with a calibration's pair scale, with
    a centre that RoPE turns in some channels, and with a learnt logit in each head's softmax,
    too. The mutants read recent tokens from the block before, take another logit, and leave
    the centre as it is at position 0."""
    if not CUDA:
        monkeypatch.setattr(cells, "find_symbols", search_by_pytorch)
    sinks, window, block, past = 3, 5, 8, (n + 40, 2 * n + 9, 0, n + n // 2)
    config, news = ServingConfig(Recipe(key, value), recent=window, sinks=sinks), (1, 3, 20, 30)
    one, two = config.quantizers(D, D, DEVICE)
    center = 2 * torch.randn(H, D, generator=gen).to(DEVICE)
    turn = shared_cos_sin(0.8 ** torch.arange(rotary / 2), D, DEVICE) if rotary else None
    if rotary:
        turn.reach(512)
    codes = CellCodes(one, two, CellLayout.of(one, two, n), center, turn)
    logits = torch.tensor([1.0, 4.0], device=DEVICE) if learnt else None
    rule = Rule(D**-0.5, sinks=logits)
    layer = CodedAttention(codes, G * H, H, rule, kernels=True)
    if CUDA:
        layer.prepare(torch.float32, recent=window, sinks=sinks)
    assert bool(layer.plan.refuses("fragments")) != CUDA
    cache = codes.cell.empty(14, H, DEVICE).zero_()
    assert cache[0, 0].numel() == n * config.bytes_per_token(D)
    tables = torch.randperm(12, generator=gen).int().view(4, 3)
    rows = torch.randperm(400, generator=gen).int().view(4, 100)  # of recent tokens
    pages = torch.full((400, H, block + sinks, 2 * D), torch.nan, device=DEVICE)

    def positions(lengths, firsts):
        return torch.cat([torch.arange(a, a + m) for a, m in zip(firsts, lengths)]).to(DEVICE)

    def states(lengths, firsts):
        x = torch.randn(sum(lengths), (G + 2) * H, D, generator=gen).to(DEVICE)
        q, k, v = x.split([G * H, H, H], 1)
        return States(q, k + codes.center_at(positions(lengths, firsts)), v)

    def stored(lengths, firsts, x):
        "A step of so many new tokens of each request, after it was stored by the kernels."
        t = [torch.arange(a, a + m) for a, m in zip(firsts, lengths)]
        slots = torch.cat([r[i // n] * n + i % n for r, i in zip(tables, t)]).to(DEVICE)
        near = torch.cat([r[i // block] * block + i % block for r, i in zip(rows, t)])
        ends = torch.tensor([a + m for a, m in zip(firsts, lengths)], dtype=torch.int32)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        origins = sink_origins(rows, ends, starts, near, block, sinks).to(DEVICE)
        at = torch.full((len(slots),), -1, dtype=torch.int32, device=DEVICE)
        cells.locate_positions(ends.to(DEVICE), starts.to(DEVICE), at)
        same(at.long(), positions(lengths, firsts))
        same(token_positions(ends, starts).long(), positions(lengths, firsts).cpu())
        layer.store(cache, x.k, x.v, slots, at)
        layer.store_recent(pages, x.k, x.v, near.to(DEVICE), origins)
        host = ends.tolist(), starts.tolist()
        where = (y.to(DEVICE) for y in (tables, ends, starts))
        return Step.of(*where, 1, *host)

    stored(past, (0,) * 4, states(past, (0,) * 4))
    x = states(news, past)
    step = stored(news, past, x)
    memory = tuple(torch.full((n, H, D), torch.nan, device=DEVICE) for _ in range(2))
    recent = Recent(pages, rows.to(DEVICE), window, sinks)
    out = torch.full_like(x.q, torch.nan)
    space = work.Workspace(DEVICE)
    layer.attend(x, out, LayerMemory(cache, space, memory, recent), step)
    reads = Requests(step.table, step.lengths), step.starts

    def oracle(near, logits=logits, codes=codes):
        exact, plain = Exact(x.k, x.v, near), Rule(D**-0.5)
        found, lse = attend_cells(x.q, cache, codes, *reads, exact, plain)
        if logits is None:
            return found
        weight = lse.exp() / (lse.exp() + logits.exp())  # of all tokens together
        return found * weight[..., None]

    want = oracle(recent)
    assert (out - want).norm() < (1e-2 if CUDA else 1e-4) * want.norm()
    moved = oracle(Recent(pages, rows.roll(1, 1).to(DEVICE), window, sinks))
    assert not (moved - want).norm() < 3e-2 * want.norm()
    if learnt:
        other = oracle(recent, logits.flip(0))
        assert (other - want).norm() > 3e-2 * want.norm()
    if rotary:
        still = CellCodes(one, two, codes.cell, codes.center_at(torch.zeros(1).long())[0])
        other = oracle(recent, codes=still)
        assert (other - want).norm() > 3e-2 * want.norm()
        with refuses("needs the positions of 4 tokens, got none"):
            layer.store(cache, x.k[:4], x.v[:4], torch.arange(4, device=DEVICE))


@pytest.mark.parametrize("order", ((0, 2), (2, 0)))
def test_layers_of_one_table_read_first_tokens_of_their_own(order, gen):
    "One with a sliding window has none; what it asks for first is not what the other reads."
    table, ends, starts = torch.arange(8).int()[None], torch.tensor([60]), torch.tensor([0, 20])
    cache, k, v = torch.randn(8, H, 8 + 2, 2 * D, generator=gen), *torch.randn(2, 20, H, D)
    of = lambda: Step.of(table, ends, starts, 0, [60], [0, 20])
    layer, shared = object.__new__(CodedAttention), of()
    for sinks in order:
        recent = Recent(cache[:, :, : 8 + sinks], table, 16, sinks)
        read = lambda step: layer._exact(step.chunks, k, v, [0, 20], recent, step)
        keys, values, at = read(shared)
        assert len(keys) == sinks + 16 + 20 and at == [0, len(keys)]
        assert torch.equal(torch.cat(read(of())[:2]), torch.cat((keys, values)))


def test_rules_that_blocks_do_not_follow():
    "No order, and learnt logits of other heads than the queries', are refused at once."
    one, two = ServingConfig(Recipe(Spec(3), Spec(3))).quantizers(D, D, DEVICE)
    codes = CellCodes(one, two, CellLayout.of(one, two, 64), None)
    for rule, why in (
        (Rule(1.0, sinks=torch.zeros(2)), r"sinks must have shape \[4\], got \[2\]"),
    ):
        with refuses(why):
            CodedAttention(codes, 4, 2, rule)


def test_recipes_by_windows():
    "Two and three bits are held, at the bytes of a table; what kernels do not read is refused."
    for bits in (2, 3):
        side = Spec(bits, codebook="trellis")
        recipe = serving_recipe(Recipe(side, side))
        assert recipe.key.codebook == recipe.value.codebook == "trellis"
        table = ServingConfig(Recipe(Spec(bits), Spec(bits))).bytes_per_token(128)
        assert ServingConfig(recipe).bytes_per_token(128) == table == 32 * bits + 4
    good = Spec(2, codebook="trellis")
    for bad, why in (
        (Spec(1, codebook="trellis"), "value.codebook .* kernels read chains of 2 or 3 bits"),
        (Spec(2, codebook="trellis", scale_dtype="float32"), "value.scale_dtype must have 2"),
    ):
        with refuses(why):
            serving_recipe(Recipe(good, bad))
    key, value = ServingConfig(Recipe(good, good)).quantizers(80, 80, "cpu")
    with refuses("2 or 3 bits and 64 or 128 channels, got 2 and 80"):
        CellLayout.of(key, value, 64)


@pytest.mark.parametrize("causal,keys", ((True, (5, 40)), (True, (33, 0)), (False, (7, 20))))
def test_attention_of_wide_heads(causal, keys, gen):
    "PyTorch's fused attention, to what was before and to their own tokens, against `dense`."
    new = (5, 33) if causal else (4, 3)  # queries; keys: before them, or all there are
    total = [a + b for a, b in zip(keys, new)] if causal else keys
    starts = [[0, x, x + y] for x, y in (new, total)]
    q = torch.randn(sum(new), 6, 272, generator=gen)
    k, v = torch.randn(2, sum(total), 2, 272, generator=gen)
    seen = step.VisibleTokens(*starts, causal)
    want, got = (of(q, k, v, seen, 0.1) for of in (step.dense, vllm._wide_flash))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_pages_of_layers_of_several_sizes():
    """All have one size; a layer with fewer bytes a token has more tokens in them, as many as
    kernels read at once; where all layers are alike nothing is said."""
    pages = vllm.Pages(128, frozenset((3136, 1552, 388)))
    assert [pages.tokens_of(n) for n in (3136, 1552, 388)] == [128, 256, 256]
    assert pages.told(3136) == dict(block_size=128, page_size_padded=None)
    assert pages.told(1552) == dict(block_size=256, page_size_padded=128 * 3136)
    alike = vllm.Pages(704, frozenset((3136,)))
    assert alike.told(3136) == {} and alike.tokens_of(3136) == 704
    # blocks that the engine grew: the widest are split for kernels, others are not
    assert vllm.Pages(704, frozenset((3136, 1552))).tokens_of(1552) == 256


def test_an_engine_that_is_gone_is_not_kept(monkeypatch):
    "Its config holds its layers, and those its blocks; while they live, it is the one asked."
    said = SimpleNamespace(get_current_vllm_config_or_none=lambda: None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=said))
    monkeypatch.setitem(sys.modules, "vllm.config", said)
    impl = vllm.Impl.__new__(vllm.Impl)
    impl.engine = SimpleNamespace(layers=[impl])
    vllm_pages.made_by(impl)
    assert vllm_pages.engine_config() is impl.engine
    del impl
    gc.collect()
    with refuses("before it made a layer"):
        vllm_pages.engine_config()


@pytest.mark.parametrize("window", (None, 100))
def test_an_engine_is_prepared_for_its_own_pages(window, monkeypatch):
    """Those of a layer with a sliding window are cut for first tokens too, though it keeps
    none: kernels are compiled for the recent tokens of a page."""
    config, near = ServingConfig("k2v2"), []
    for name in ("append_cells", "join_piece", "past_cells", "locate_sinks"):
        monkeypatch.setattr(step, name, lambda *a, **k: None)
    monkeypatch.setattr(step, "append_recent", lambda pages, *a, **k: near.append(pages))
    monkeypatch.setattr(CodedAttention, "_decode", lambda *a, **k: None)
    monkeypatch.setattr(vllm, "CodedAttention", partial(CodedAttention, kernels=True))
    monkeypatch.setattr(vllm_pages.PageBackend, "pages", vllm_pages.Pages(128, frozenset()))
    impl = vllm.Impl.__new__(vllm.Impl)
    impl.config, impl.window, impl.firsts = config, window, 0 if window else config.sinks
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale = G * H, H, D, D**-0.5
    impl.softcap, impl.logits, impl.drafts, impl.requests = None, None, 0, 4
    impl.engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    impl._make("layer", torch.device("cpu"), torch.bfloat16, 64)
    own = config.recent_block(128, D, 2)
    assert near and {x.shape[2] - impl.firsts for x in near} == {own}
    assert own < step.recent_block(128 * config.bytes_per_token(D), 2 * D, 2)  # what else fits


def framed(heads=2, layers=2, **without):
    "A calibration that has frames alone, of keys with RoPE; `without` some of their parts."
    frames = [random_frame(heads, D, D, seed) for seed in range(layers)]
    rounded = (replace(x, pair=x.pair.bfloat16().float()) for x in frames)  # as they are found
    frames = (replace(x, **without) for x in rounded)
    return Calibration([], {"about": {"layers": layers, "head size": D}}, tuple(frames))


def test_what_a_recipe_takes_of_frames():
    """Each part that it does not name, or that `means` leaves out, is not used; a part that it
    names must be there."""
    of = lambda config: config.calibrated(1, slice(None), D, D, "cpu")
    for center in ("auto", "fixed", "none"):
        for scales in ("auto", "frame", "none"):
            spec = Spec(3, center=center, pair_scale=scales)
            for means in (True, False):
                config = ServingConfig(Recipe(spec, Spec(3)), calibration=framed(), means=means)
                key, _, found, turn = of(config)
                assert turn is None and not config.turns
                assert (found is not None) == (means and center != "none")
                assert key.rotation.per_head == (scales != "none")
    key, _, center, _ = of(ServingConfig(calibration=framed(pair=None)))
    assert not key.rotation.per_head and center is not None
    key, _, center, _ = of(ServingConfig(calibration=framed(fixed=None)))
    assert key.rotation.per_head and center is None, "nobody knows how the mean turns"
    known = framed(inv_freq=torch.rand(D // 2))
    for center, mean in (("auto", "mean"), ("pre_rope", "mean"), ("fixed", "fixed")):
        spec = Spec(3, center=center)
        _, _, found, turn = of(ServingConfig(Recipe(spec, Spec(3)), calibration=known))
        same(found, getattr(known.frames[1], mean))
        assert (turn is not None) == (mean == "mean")


def test_frames_that_a_recipe_asks_for_in_vain():
    centred, scaled = Spec(3, center="fixed"), Spec(3, pair_scale="frame")
    for key, more, why in (
        (Spec(3, center="pre_rope"), {}, "center='pre_rope' needs"),
        (Spec(3, center="pre_rope"), dict(calibration=framed()), "'mean' and 'inv_freq'"),
        (centred, dict(calibration=framed(fixed=None)), "center='fixed' needs"),
        (scaled, {}, "pair_scale='frame' needs a calibration whose frames have 'pair'"),
        (scaled, dict(calibration=framed(pair=None)), "pair_scale='frame' needs"),
    ):
        with refuses(why):
            ServingConfig(Recipe(key, Spec(3)), **more)


def test_a_transform_that_was_found_does_the_work_of_a_pair_scale():
    matrices = [HeadTransform.of(torch.eye(D) + torch.rand(2, D, D) / 50) for _ in range(2)]
    both = replace(framed(), transforms=[register_transform(m) for m in matrices])
    config = ServingConfig(calibration=both)
    key, _, center, _ = config.calibrated(1, slice(None), D, D, "cpu")
    same(key.rotation.matrix, both.transforms[1].matrix)
    same(center, both.frames[1].fixed)
    recipe = Recipe(Spec(3, pair_scale="frame"), Spec(3))
    with refuses("do the same work"):
        ServingConfig(recipe, calibration=both)


def test_keys_far_from_0_are_served_where_they_are_centred():
    qwen = SimpleNamespace(model_type="qwen2")
    bare = Recipe(Spec(3), Spec(3))
    for config, served in (
        (ServingConfig(), False),
        (ServingConfig(calibration=framed()), True),
        (ServingConfig(calibration=framed(fixed=None)), False),
        (ServingConfig(calibration=framed(fixed=None, inv_freq=torch.rand(8))), True),
        (ServingConfig(bare, calibration=framed()), False),
        (ServingConfig(means=False), True),
    ):
        reasons = mean_reasons(config, qwen)
        assert served == (reasons == []), (config, reasons)
        assert served or "keys lie far from 0" in reasons[0]
