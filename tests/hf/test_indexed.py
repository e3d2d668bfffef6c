"""Layers that attend to tokens which they select by keys of their own (DeepSeek V3.2): those
keys are codes too, and a step reads the codes of what was selected alone."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from eval import architectures
from tests.helpers import exact_recipe, prompt
from turboquant_nb.cache import attention
from turboquant_nb.cache.store import KVStore
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.latents import IndexKeys
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

NAMES = ["DeepseekV32", "GlmMoeDsa", "HYV4", "AXK2", "Dots3Note"]
GREEDY = dict(max_new_tokens=8, do_sample=False)
WAYS = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "chunks": dict(prefill_chunk_size=11),
    "drafts": dict(prompt_lookup_num_tokens=3),
}
RECIPE = Recipe(Spec(3), Spec(4), sinks=2, recent=5)


def small(name, monkeypatch, **changes):
    "A random model whose layers select eight tokens."
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"not in this transformers: {name}")
    for key, x in dict(index_topk=8, **changes).items():
        monkeypatch.setitem(architectures.SMALL, key, x)
    return architectures.small(f"{name}ForCausalLM")


def steps(model, cache, inputs, sizes=(40, 1, 1, 17, 1), every=False):
    "Logits of the last token of each chunk, or of every token."
    out, at = [], 0
    for n in sizes:
        rows = dict(
            input_ids=inputs["input_ids"][:, at : at + n],
            attention_mask=inputs["attention_mask"][:, : at + n],
        )
        with torch.no_grad():
            out.append(model(**rows, past_key_values=cache).logits)
        at += n
    return torch.cat(out, 1) if every else torch.stack([x[:, -1] for x in out])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_with_all_tokens_exact_transformers_tokens_come(name, way, monkeypatch):
    model = small(name, monkeypatch)
    inputs = prompt(1 if way == "drafts" else 2, 30, padded=way != "drafts")
    how = dict(GREEDY, pad_token_id=0, eos_token_id=None, **WAYS[way])
    own = model.generate(**inputs, **how)
    kinds = ("eager", "sdpa", "turboquant") if model._supports_sdpa else ("eager", "turboquant")
    for kind in kinds:
        model.set_attn_implementation(kind)
        cache = TurboQuantCache(model, exact_recipe())
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **how), own)
        assert set(cache.report()["served"]) == {"prefill", "codes"}


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_codes_are_those_of_the_models_own_attention(name, monkeypatch):
    """To fp32 rounding, as the same codes decoded: what is selected is equal then. Of up to 16
    tokens dense ones would see each other exactly."""
    model, inputs = small(name, monkeypatch), prompt(2, 60)
    codes, dense = (
        steps(model, TurboQuantCache(model, RECIPE, attention=x), inputs)
        for x in ("codes", "dense")
    )
    assert float((codes - dense).abs().max() / dense.abs().max()) < 1e-4
    wrong = TurboQuantCache(model, RECIPE, attention="codes")
    for layer in wrong.coded_layers:  # the mutant: nothing but the first tokens is selected
        if isinstance(layer, IndexKeys):
            monkeypatch.setattr(layer, "take", lambda k, of=layer: forgotten(of, k))
    apart = (steps(model, wrong, inputs) - dense).abs().max() / dense.abs().max()
    assert float(apart) > 1e-2


def forgotten(layer, keys):
    "What an index would be that remembers nothing but its newest keys."
    held = IndexKeys.take(layer, keys)
    return torch.cat([0 * held[:, : -keys.shape[1]], keys], 1)


def test_a_step_reads_what_was_selected_alone(monkeypatch):
    model, inputs, read = small("DeepseekV32", monkeypatch), prompt(1, 60, padded=False), []
    own = attention.Blocks.at

    def at(self, store, side, positions):
        read.append(positions.shape[1])
        return own(self, store, side, positions)

    monkeypatch.setattr(attention.Blocks, "at", at)
    whole = lambda *args: pytest.fail("a block of codes was read")
    cache = TurboQuantCache(model, Recipe(Spec(3), Spec(4), sinks=0, recent=0))
    steps(model, cache, inputs, (50,))
    monkeypatch.setattr(attention.Blocks, "vectors", whole)
    rows = {x: y[:, 50:51] if x == "input_ids" else y[:, :51] for x, y in inputs.items()}
    with torch.no_grad():
        model(**rows, past_key_values=cache)
    assert len(read) == 2 * len(model.model.layers) and set(read) <= {7, 8}, read


def test_index_keys_are_codes_and_counted(monkeypatch):
    "Of 128 channels 68 bytes, of 256; the newest token exactly."
    model = small("DeepseekV32", monkeypatch, index_head_dim=128)
    cache, inputs = TurboQuantCache(model, Recipe(sinks=0, recent=0)), prompt(1, 512)
    steps(model, cache, inputs, (512,))
    layer = cache.layers[0]
    index = layer.groups[1].store
    assert index.nbytes == 512 * 68 + 2 * 2 * 64 + 8, index.nbytes  # means, a start
    per_layer = cache.report()["per_layer"]
    assert per_layer[0] == layer.groups[0].store.nbytes + index.nbytes
    keys = torch.randn(1, 1, 128)
    held = layer.update_indexer(keys)
    assert held.shape == (1, 513, 128) and torch.equal(held[:, -1:], keys)
    again = layer.update_indexer(torch.randn(1, 1, 128))
    assert 0 < float((again[:, 512] - keys[:, 0]).norm() / keys.norm()) < 0.2


def test_layers_that_select_as_the_one_before(monkeypatch):
    "They keep no keys of an index."
    types = ["full", "shared", "full"]
    model = small("GlmMoeDsa", monkeypatch)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.indexer_types = 3, types
    config.layer_types, config.mlp_layer_types = config.layer_types[:1] * 3, ["dense"] * 3
    torch.manual_seed(0)
    model = transformers.GlmMoeDsaForCausalLM(config).eval()
    inputs = prompt(2, 30)
    cache = TurboQuantCache(model, exact_recipe())
    assert [len(x) for x in cache.groups] == [2, 1, 2]
    how = dict(GREEDY, pad_token_id=0, eos_token_id=None)
    own = model.generate(**inputs, **how)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **how), own)
    with pytest.raises(ValueError, match="layer 1 of this cache keeps no keys of an index"):
        cache.update_indexer(torch.randn(2, 1, 8), 1)


def test_a_copy_a_file_and_a_crop_go_on_alike(monkeypatch, tmp_path):
    model, inputs = small("DeepseekV32", monkeypatch), prompt(2, 60)
    cache, more = TurboQuantCache(model, RECIPE), TurboQuantCache(model, RECIPE)
    steps(model, cache, inputs, (40, 1))
    cache.save(tmp_path / "cache.safetensors")
    others = [copy.deepcopy(cache), TurboQuantCache.load(tmp_path / "cache.safetensors", model)]
    more.activate_past_recording()
    steps(model, more, inputs, (40, 1, 6))
    more.crop(-6)
    assert {x.held for x in more.coded_layers} == {41}
    rows = dict(attention_mask=inputs["attention_mask"][:, :42])
    rows["input_ids"] = inputs["input_ids"][:, 41:42]
    with torch.no_grad():
        want = model(**rows, past_key_values=cache).logits
        for other in (*others, more):
            assert torch.equal(model(**rows, past_key_values=other).logits, want)
    with pytest.raises(ValueError, match="is of a deepseek_v32 with 2 layers, the model is a"):
        TurboQuantCache.load(tmp_path / "cache.safetensors", small("DeepseekV3", monkeypatch))


def test_drafts_behind_a_prompt_are_not_in_its_mean(monkeypatch):
    model, keys = small("DeepseekV32", monkeypatch), torch.randn(2, 23, 8)
    means = []
    for n in (20, 23):
        cache = TurboQuantCache(model, RECIPE)
        cache.layers[0].groups[1].drafts = n - 20
        assert torch.equal(cache.update_indexer(keys[:, :n], 0), keys[:, :n])
        means.append(cache.layers[0].groups[1].store.key.mean)
    assert means[0].any() and torch.equal(*means)


def test_a_refused_key_names_the_index_and_autocast_leaves_codes_alone(monkeypatch):
    model, keys = small("DeepseekV32", monkeypatch), torch.randn(1, 20, 8)
    caches = [TurboQuantCache(model, RECIPE) for _ in range(2)]
    caches[0].update_indexer(keys, 0)
    with torch.autocast("cpu", torch.bfloat16):
        caches[1].update_indexer(keys, 0)
    a, b = (x.layers[0].groups[1].store.read()[0] for x in caches)
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="keys of the index of layer 1"):
        caches[0].update_indexer(keys * torch.nan, 1)


def test_rows_change_places_together(monkeypatch):
    model, inputs = small("DeepseekV32", monkeypatch), prompt(3, 40)
    cache = TurboQuantCache(model, RECIPE)
    steps(model, cache, inputs, (38, 1))
    before = [x.store.read() for x in cache.coded_layers]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    for layer, states in zip(cache.coded_layers, before):
        for a, b in zip(layer.store.read(), states):
            assert torch.equal(a, b[[2, 0, 1]])
    cache.batch_repeat_interleave(2)
    assert {x.store.batch for x in cache.coded_layers} == {6}
    cache.reset()
    assert cache.get_seq_length() == 0


def test_what_is_refused(monkeypatch):
    model = small("DeepseekV32", monkeypatch)
    with pytest.raises(ValueError, match="layer 0 selects tokens by an index; static=True"):
        TurboQuantCache(model, max_length=64, static=True)
    odd = copy.deepcopy(model.config)
    odd.index_head_dim = 9
    with pytest.raises(ValueError, match="keys of an index have halves, got 9"):
        TurboQuantCache(odd)
    cache = TurboQuantCache(model)
    with pytest.raises(ValueError, match=r"index of layer 0 must be \[sequences, tokens, 8\]"):
        cache.update_indexer(torch.randn(1, 3, 6), 0)
    with pytest.raises(ValueError, match="looks into the layers of transformers' own cache"):
        TurboQuantCache(small("Qwen4Exp", monkeypatch))


@pytest.mark.parametrize("latent", (False, True))
@pytest.mark.parametrize("recipe", (RECIPE, Recipe(Spec(2), Spec((4,) * 5 + (1,) * 11), 0, 0)))
def test_few_tokens_of_a_mask_are_gathered(latent, recipe):
    "What blocks give, with padding and rows that see fewer; a row that sees nothing gives 0."
    g = torch.Generator().manual_seed(0)
    key, value = (
        Spec(x.bits, center="prompt_mean") for x in (recipe.key, recipe.value)
    )  # no mean that RoPE rotates
    store = KVStore(Recipe(key, value, recipe.sinks, recipe.recent), 3, 2, 32, 16)
    store.set_range(start=torch.tensor([0, 3, 0]))
    store.append(*(torch.randn(3, 2, 600, d, generator=g) for d in (32, 16)))
    q = torch.randn(3, 4, 1, 48 if latent else 32, generator=g)
    mask = (
        torch.rand(3, 1, 1, 600, generator=g)
        < torch.tensor([0.1, 0.02, 0])[:, None, None, None]
    )
    found = []

    class Watched(attention.Blocks):
        def at(self, store, side, positions):
            found.append(positions.shape)
            return super().at(store, side, positions)

    ask = lambda q, mask: attention.Reference(blocks=Watched()).run(
        attention.Call.of(q, store, mask=mask, latent=latent)
    )
    got = ask(q, mask)
    assert found == [(3, int(mask.sum(-1).max()))] * 2, "of keys and of values"
    twice = ask(q.repeat(1, 1, 2, 1), mask.repeat(1, 1, 2, 1))
    assert len(found) == 2, "two queries read all blocks"
    torch.testing.assert_close(got.out, twice.out[:, :, :1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.lse, twice.lse[:, :, :1], rtol=1e-5, atol=1e-6)
    assert not got.out[2].any() and torch.isinf(got.lse[2]).all()
    few = store.key.memory.read_at(torch.tensor([[599, 0, 256], [3, 300, 301], [7, 7, 7]]))
    for row, at in enumerate([[599, 0, 256], [3, 300, 301], [7, 7, 7]]):
        whole = store.coded("key", 0, 600)
        assert torch.equal(few.codes[row], whole.codes[row][:, at])
        assert torch.equal(few.scale[row], whole.scale[row][:, at])


def test_a_file_of_an_index_in_another_dtype(monkeypatch, tmp_path):
    "Dots 3 computes its keys in fp32 where the model is in bf16."
    model, inputs = small("Dots3Note", monkeypatch).bfloat16(), prompt(2, 40)
    cache = TurboQuantCache(model, RECIPE)
    steps(model, cache, inputs, (38, 1))
    kinds = {(isinstance(x, IndexKeys), x.store.dtype) for x in cache.coded_layers}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
    cache.save(tmp_path / "cache.safetensors")
    other = TurboQuantCache.load(tmp_path / "cache.safetensors", model)
    rows = inputs | {"input_ids": inputs["input_ids"][:, 39:]}
    with torch.no_grad():
        want, got = (model(**rows, past_key_values=x).logits for x in (cache, other))
    assert torch.equal(got, want)


def test_a_short_chunk_is_its_tokens_one_by_one(monkeypatch):
    "Where all tokens are selected; a chunk that read its own tokens exactly would be 0.08 off."
    model, inputs = small("DeepseekV32", monkeypatch), prompt(2, 40)
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 64
    rows = []
    for sizes in ((30, 1, 1, 1, 1), (30, 4)):
        cache = TurboQuantCache(model, RECIPE)
        rows.append(steps(model, cache, inputs, sizes, every=True)[:, 30:])
    assert float((rows[0] - rows[1]).abs().max()) < 1e-4
