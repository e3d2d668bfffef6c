"""Every causal language model of transformers is answered when its cache is made: it reads
codes, gets them decoded in each step, or is refused. Then it does what was said, with the
tokens of transformers' own cache where every token is held exactly."""

from collections import Counter
from dataclasses import replace

import pytest

transformers = pytest.importorskip("transformers")

from eval import architectures
from tests.helpers import QUIETLY, ROOT, given_frame, refuses
from turboquant_nb import TurboQuantCache, results

pytestmark = QUIETLY
FILE = ROOT / "results" / "architectures" / "cpu.json"


@pytest.fixture(scope="module")
def table():
    "What the page of the manual shows, by class; empty where transformers is another."
    record = results.load(FILE)
    same = record["versions"]["transformers"] == transformers.__version__
    return {x["class"]: x for x in record["rows"]} if same else {}


@pytest.mark.parametrize("name", architectures.CLASSES)
def test_the_answer_is_what_happens(name, table):
    if name == "CohereCompassForCausalLM" and transformers.__version__.startswith("5.17."):
        pytest.skip("it cannot be made with small heads")
    row = architectures.tried(name)
    assert not table or row == {k: x for k, x in table[name].items() if k in row}
    if row["answer"] == "refused":
        assert row["why"].isascii() and len(row["why"]) > 40


def test_the_table_holds_every_class(table):
    assert not table or sorted(table) == architectures.CLASSES
    count = Counter(x["answer"] for x in table.values())
    assert not table or count["on codes"] >= 137 and count["not tried"] == 3


@pytest.mark.parametrize("name", ["Falcon", "Inkling"])
def test_a_budget_counts_the_heads_that_are_held(name):
    "One for all, others in layers that slide; what a config says wrongly is refused."
    model = architectures.small(f"{name}ForCausalLM")
    cache = TurboQuantCache(model, memory="1GB")
    architectures.tokens(model, cache)
    assert [x.store.heads for x in cache.coded_layers] == [
        x.info.heads for x in cache.coded_layers
    ]
    cache.reset()
    cache.coded_layers[0].info = replace(cache.coded_layers[0].info, heads=3)
    with refuses("memory= counts .heads, key size, value size. = .3, 8, 8. by the config in "):
        architectures.tokens(model, cache)


def test_scores_that_a_model_computes_itself_want_tensors():
    "Bloom always, GPT-2 where it reorders and upcasts: said once, and no kernel's attention."
    bloom, gpt2 = map(architectures.small, ("BloomForCausalLM", "GPT2LMHeadModel"))
    with pytest.warns(UserWarning, match="bloom gets all past tokens decoded.*BloomAttention"):
        TurboQuantCache(bloom)
    TurboQuantCache(gpt2, attention="codes")
    gpt2.config.reorder_and_upcast_attn = True
    with pytest.warns(UserWarning, match="gpt2 gets all past.*reorder_and_upcast_attn"):
        assert TurboQuantCache(gpt2).report()["reading"].startswith("decoded each step")
    gpt2.config._attn_implementation = "turboquant"
    with refuses("the 'turboquant' attention cannot serve gpt2"):
        TurboQuantCache(gpt2)


@pytest.mark.parametrize(
    "name", ["BertLMHeadModel", "RobertaForCausalLM", "BigBirdForCausalLM"]
)
def test_an_encoder_is_refused(name):
    "The same class, as it attends to later tokens too."
    config = architectures.small(name).config
    config.is_decoder = False
    for source in (config, getattr(transformers, name)(config)):
        with refuses("attends to later tokens too"):
            TurboQuantCache(source)


@pytest.mark.parametrize("name", ["GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_a_gemma_that_looks_both_ways_is_refused(name):
    "Whether the model is asked or its configuration."
    config = architectures.small(name).config
    TurboQuantCache(config, frame=given_frame(config))
    config.use_bidirectional_attention = True
    for source in (config, getattr(transformers, name)(config)):
        with refuses("attends to later tokens too.*bidirectional"):
            TurboQuantCache(source)


@pytest.mark.parametrize("name", ["ViT", "CLIPText", "CLIPVision", "Rwkv", "XLM"])
def test_a_model_without_attention_to_a_cache_is_refused(name):
    kind = getattr(transformers, f"{name}Config")
    with refuses("no layer that attends to a cache|cache of its own"):
        TurboQuantCache(architectures.small_config(kind, {}))
