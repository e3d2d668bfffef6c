"""Steps of a layer of latents without an engine: kernels against the oracle, on equal codes,
and what is refused."""

import pytest
import torch

from turboquant_nb.cache.attention import Rule
from turboquant_nb.cache.pages import CellCodes, CellLayout, Exact, Recent, Requests
from turboquant_nb.cache.pages import attend_cells, sink_origins
from turboquant_nb.hf.latents import Expansion
from turboquant_nb.kernels import work
from turboquant_nb.kernels.decode import triton
from turboquant_nb.quant.quantizer import Quantizer, Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.serving.step import LayerMemory, ServingConfig, States, Step
from turboquant_nb.serving.vllm_latents import CodedLatents, latent_reasons
from turboquant_nb.serving.vllm_latents import layer_kind_reasons

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HEADS, NOPE, D_HEAD, D, DR = 4, 24, 40, 64, 16
needs_triton = pytest.mark.skipif(triton.language is None, reason="needs a GPU or Triton")


def layer(gen, n=64, kernels=True, bits=(3, 4)):
    "A layer of latents, and its projections."
    up = [torch.randn(HEADS, d, D, generator=gen).to(DEVICE) / D**0.5 for d in (NOPE, D_HEAD)]
    up = Expansion(*up)
    key, value = (Quantizer(Spec(b), d, DEVICE) for b, d in zip(bits, (D, DR)))
    codes = CellCodes(key, value, CellLayout.of(key, value, n))
    return CodedLatents(codes, Rule(0.2, latent=True), lambda: up, kernels), up


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("n,window,sinks", ((64, 5, 3), (128, 0, 0)))
def test_a_step_of_latents(n, window, sinks, gen):
    """Requests that decode, verify drafts, begin and go on with a chunk, whose past comes in
    pieces of 64 tokens, with recent and first tokens: kernels against the oracle on absorbed
    queries. The mutant reads recent tokens from the block before."""
    made, up = layer(gen, n)
    made.prepare(torch.float32, recent=window, sinks=sinks)
    codes, block = made.codes, 8
    past, news = (n + 40, 2 * n + 9, 0, n + n // 2), (1, 3, 20, 30)
    cache = codes.cell.empty(14, 1, DEVICE).zero_()
    tables = torch.randperm(12, generator=gen).int().view(4, 3)
    rows = torch.randperm(400, generator=gen).int().view(4, 100)  # of recent tokens
    pages = torch.full((400, 1, block + sinks, D + DR), torch.nan, device=DEVICE)

    def states(lengths):
        sizes = (HEADS, NOPE + DR), (1, D), (1, DR)
        return States(*(torch.randn(sum(lengths), *s, generator=gen).to(DEVICE) for s in sizes))

    def stored(lengths, firsts, x):
        "A step of so many new tokens of each request, after it was stored."
        t = [torch.arange(a, a + m) for a, m in zip(firsts, lengths)]
        slots = torch.cat([r[i // n] * n + i % n for r, i in zip(tables, t)]).to(DEVICE)
        near = torch.cat([r[i // block] * block + i % block for r, i in zip(rows, t)])
        ends = torch.tensor([a + m for a, m in zip(firsts, lengths)], dtype=torch.int32)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        made.store(cache, x.k, x.v, slots)
        if window:
            origins = sink_origins(rows, ends, starts, near, block, sinks).to(DEVICE)
            made.store_recent(pages, x.k, x.v, near.to(DEVICE), origins)
        where = (y.to(DEVICE) for y in (tables, ends, starts))
        return Step.of(*where, 1, ends.tolist(), starts.tolist())

    stored(past, (0,) * 4, states(past))
    x = states(news)
    step = stored(news, past, x)
    assert len(step.groups) == 1 and len(step.chunks) == 2 and step.decodes == 1
    recent = Recent(pages, rows.to(DEVICE), window, sinks) if window else None
    room = tuple(torch.full((n, 1, d), torch.nan, device=DEVICE) for d in (D, DR))
    memory = LayerMemory(cache, work.Workspace(DEVICE), room, recent)
    out = torch.full((sum(news), HEADS, D_HEAD), torch.nan, device=DEVICE)
    made.attend(x, out, memory, step)

    def oracle(near):
        reads = Requests(step.table, step.lengths), step.starts, Exact(x.k, x.v, near)
        q = up.query(x.q.transpose(0, 1)[None])[0].transpose(0, 1)
        sums = attend_cells(q, cache, codes, *reads, made.rule)[0]
        return up.output(sums.transpose(0, 1)[None])[0].transpose(0, 1)

    want = oracle(recent)
    assert (out - want).norm() < (1e-2 if CUDA else 1e-4) * want.norm()
    if window:
        moved = oracle(Recent(pages, rows.roll(1, 1).to(DEVICE), window, sinks))
        assert not (moved - want).norm() < 3e-2 * want.norm()


def test_who_reads_latents(gen):
    "The oracle where no kernel is asked for; kernels say what they do not read."
    assert layer(gen, kernels=False)[0].plan is None
    if triton.language is not None:
        assert layer(gen)[0].plan is not None
        with pytest.raises(ValueError, match="no kernel reads these latents: rotary parts: co"):
            layer(gen, bits=(3, 1))


def test_reasons():
    "What latents are refused for, all of it at once."
    config = ServingConfig(Recipe(Spec(3), Spec(4)))
    assert latent_reasons(config) == []
    found = latent_reasons(config, object(), object(), 128)
    assert found[0] == "latents with a KV connector" and "sparse attention" in found[1]
    assert found[2:] == ["latents with a sliding window"]
    assert layer_kind_reasons("MLAAttention", {}) == []
    asked = dict(attn_backend=object(), non_causal_multi_token_decode=True)
    assert len(layer_kind_reasons("OtherMLAAttention", asked)) == 3


def test_bytes_of_latents_and_room_for_exact_ones():
    "228 bytes a token at 3 and 4 bits; 64 of a page have room for 8 exact ones in 16 bits."
    config = ServingConfig(Recipe(Spec(3), Spec(4)), recent=16, sinks=4)
    assert config.bytes_per_token(512, 64) == 228
    assert (
        config.recent_block(64, 512, 2, 64)
        == 8
        == 1 << ((228 * 64) // 1152 - 4).bit_length() - 1
    )
    assert config.recent_blocks(64, 512, 2, d_value=64) == -(-17 // 8) + 1
