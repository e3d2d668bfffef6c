"Steps of an engine whose codes are by windows: kernels against the oracle, on equal codes."

from functools import partial

import pytest
import torch

from turboquant_nb.cache.attention import Rule
from turboquant_nb.cache.pages import CellCodes, CellLayout, Exact, Recent, Requests
from turboquant_nb.cache.pages import attend_cells, sink_origins
from turboquant_nb.kernels import cells, work
from turboquant_nb.kernels.decode import triton
from turboquant_nb.quant.quantizer import Recipe, Spec
from turboquant_nb.serving import step, vllm
from turboquant_nb.serving.step import (
    CodedAttention,
    LayerMemory,
    ServingConfig,
    States,
    Step,
    serving_recipe,
)
from turboquant_nb.theory.transforms import fit_pair_transform

from tests.kernels.test_cells import search_by_pytorch

pytestmark = pytest.mark.skipif(triton.language is None, reason="needs a GPU or Triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
H, G, D = 1, 2, 64
# as a calibration has it, for each head of its own
PAIRS = fit_pair_transform(
    *torch.rand(2, H, D, generator=torch.Generator().manual_seed(0)).square().diag_embed(), D
).name
RECIPES = [
    (
        Spec(2, rotation=PAIRS, codebook="trellis_fast"),
        Spec(2, codebook="trellis_fast"),
        64,
        False,
    ),
    (Spec(2, codebook="trellis"), Spec(2, codebook="trellis"), 64, True),
    (Spec(3, codebook="trellis_fast"), Spec(2, codebook="trellis"), 128, False),
    (Spec(3), Spec(3, codebook="trellis"), 256, True),
]


@pytest.mark.parametrize("key,value,n,learnt", RECIPES)
def test_a_step_by_windows(key, value, n, learnt, gen, monkeypatch):
    """Requests that decode, verify drafts, begin and go on with a chunk, around a centre, with
    first and recent tokens: kernels against the oracle; with a calibration's pair scale, and
    with a learnt logit in each head's softmax, too. The mutants read recent tokens from the
    block before, and take another logit."""
    if not CUDA:
        monkeypatch.setattr(cells, "find_symbols", search_by_pytorch)
    sinks, window, block, past = 3, 5, 8, (n + 40, 2 * n + 9, 0, n + n // 2)
    config, news = ServingConfig(Recipe(key, value), recent=window, sinks=sinks), (1, 3, 20, 30)
    one, two = config.quantizers(D, D, DEVICE)
    center = 2 * torch.randn(H, D, generator=gen).to(DEVICE)
    codes = CellCodes(one, two, CellLayout.of(one, two, n), center)
    logits = torch.tensor([1.0, 4.0], device=DEVICE) if learnt else None
    rule = Rule(D**-0.5, sinks=logits)
    layer = CodedAttention(codes, G * H, H, rule, kernels=True)
    if CUDA:
        layer.prepare(torch.float32, recent=window, sinks=sinks)
    assert layer.served_by == ("fragments" if CUDA else "portable")
    cache = codes.cell.empty(14, H, DEVICE).zero_()
    assert cache[0, 0].numel() == n * config.bytes_per_token(D)
    tables = torch.randperm(12, generator=gen).int().view(4, 3)
    rows = torch.randperm(400, generator=gen).int().view(4, 100)  # of recent tokens
    pages = torch.full((400, H, block + sinks, 2 * D), torch.nan, device=DEVICE)

    def states(lengths):
        x = torch.randn(sum(lengths), (G + 2) * H, D, generator=gen).to(DEVICE)
        q, k, v = x.split([G * H, H, H], 1)
        return States(q, k + center, v)

    def stored(lengths, firsts, x):
        "A step of so many new tokens of each request, after it was stored by the kernels."
        t = [torch.arange(a, a + m) for a, m in zip(firsts, lengths)]
        slots = torch.cat([r[i // n] * n + i % n for r, i in zip(tables, t)]).to(DEVICE)
        near = torch.cat([r[i // block] * block + i % block for r, i in zip(rows, t)])
        ends = torch.tensor([a + m for a, m in zip(firsts, lengths)], dtype=torch.int32)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        origins = sink_origins(rows, ends, starts, near, block, sinks).to(DEVICE)
        layer.store(cache, x.k, x.v, slots)
        layer.store_recent(pages, x.k, x.v, near.to(DEVICE), origins)
        host = ends.tolist(), starts.tolist()
        where = (y.to(DEVICE) for y in (tables, ends, starts))
        return Step.of(*where, 1, *host)

    stored(past, (0,) * 4, states(past))
    x = states(news)
    step = stored(news, past, x)
    memory = tuple(torch.full((n, H, D), torch.nan, device=DEVICE) for _ in range(2))
    recent = Recent(pages, rows.to(DEVICE), window, sinks)
    out = torch.full_like(x.q, torch.nan)
    space = work.Workspace(DEVICE)
    layer.attend(x, out, LayerMemory(cache, space, memory, recent), step)
    reads = Requests(step.table, step.lengths), step.starts

    def oracle(near, logits=logits):
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


def test_rules_that_blocks_do_not_follow():
    "No order, and learnt logits of other heads than the queries', are refused at once."
    one, two = ServingConfig(Recipe(Spec(3), Spec(3))).quantizers(D, D, DEVICE)
    codes = CellCodes(one, two, CellLayout.of(one, two, 64), None)
    for rule, why in (
        (Rule(1.0, causal=False), "in order"),
        (Rule(1.0, sinks=torch.zeros(2)), r"sinks must have shape \[4\], got \[2\]"),
    ):
        with pytest.raises(ValueError, match=why):
            CodedAttention(codes, 4, 2, rule)


def test_recipes_by_windows():
    "Two and three bits are held, at the bytes of a table; what kernels do not read is refused."
    for bits in (2, 3):
        for name in ("trellis", "trellis_fast"):
            side = Spec(bits, codebook=name)
            recipe = serving_recipe(Recipe(side, side))
            assert recipe.key.codebook == recipe.value.codebook == name
            table = ServingConfig(Recipe(Spec(bits), Spec(bits))).bytes_per_token(128)
            assert ServingConfig(recipe).bytes_per_token(128) == table == 32 * bits + 4
    good = Spec(2, codebook="trellis")
    for bad, why in (
        (Spec(1, codebook="trellis"), "value.codebook .* kernels read chains of 2 or 3 bits"),
        (Spec(2, codebook="trellis", scale_dtype="float32"), "value.scale_dtype must have 2"),
        (Spec(2, codebook="trellis", center="prompt_mean"), "value.center must be 'none'"),
    ):
        with pytest.raises(ValueError, match=why):
            serving_recipe(Recipe(good, bad))
    with pytest.raises(ValueError, match="keys cannot be served: .* channels, got 2 and 80"):
        ServingConfig(Recipe(good, good)).bytes_per_token(80)
    key, value = ServingConfig(Recipe(good, good)).quantizers(80, 80, "cpu")
    with pytest.raises(ValueError, match="2 or 3 bits and 64 or 128 channels, got 2 and 80"):
        CellLayout.of(key, value, 64)


@pytest.mark.parametrize("window", (None, 100))
def test_an_engine_is_prepared_for_its_own_pages(window, monkeypatch):
    """Those of a layer with a sliding window are cut for first tokens too, though it keeps
    none: kernels are compiled for the recent tokens of a page."""
    config, near = ServingConfig("k2v2"), []
    for name in ("append_cells", "join_past", "past_cells", "locate_sinks"):
        monkeypatch.setattr(step, name, lambda *a, **k: None)
    monkeypatch.setattr(step, "append_recent", lambda pages, *a, **k: near.append(pages))
    monkeypatch.setattr(CodedAttention, "_decode", lambda *a, **k: None)
    monkeypatch.setattr(vllm, "CodedAttention", partial(CodedAttention, kernels=True))
    monkeypatch.setattr(vllm.RecentBackend, "tokens", 128)
    impl = vllm.Impl.__new__(vllm.Impl)
    impl.config, impl.window, impl.firsts = config, window, 0 if window else config.sinks
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale = G * H, H, D, D**-0.5
    impl.softcap, impl.logits, impl.drafts, impl.requests = None, None, 0, 4
    impl._make("layer", torch.device("cpu"), torch.bfloat16, 64)
    own = config.recent_block(128, D, 2)
    assert near and {x.shape[2] - impl.firsts for x in near} == {own}
    assert own < step.recent_block(128 * config.bytes_per_token(D), 2 * D, 2)  # what else fits
