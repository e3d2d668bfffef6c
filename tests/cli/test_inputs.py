"""Recipes, names, models and devices: what is refused before a model is loaded or downloaded,
and what a GGUF file says in its head."""

import json

import gguf
import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoModelForCausalLM, LlamaConfig

from turboquant_nb.cli import app as inputs, eval
from turboquant_nb.evaluation import candidates, models
from turboquant_nb.quant.recipe import PRESETS, preset
from tests.helpers import ONE_THREAD, refuses

from .conftest import SIZE, refused

pytestmark = ONE_THREAD


def test_names_known_without_torch_are_those_of_the_package():
    assert inputs.PRESETS == tuple(PRESETS) and eval.OTHERS == tuple(candidates.OTHERS)


def test_no_cuda(call, tiny):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    refused(call(f"demo --model {tiny} --device cuda --quiet"), "no CUDA device", code=1)


def test_the_embedded_model_cannot_be_fetched(call, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError(
            "the embedded model is not available: no network\nNothing was added. What you can "
            "do:\n  use another model:  --model PATH_OR_HUB_ID"
        )

    monkeypatch.setattr(models, "embedded_path", fail)
    code, out, err = call("demo --quiet")
    assert (code, out) == (1, "") and "Traceback" not in err
    assert "\n  use another model:  --model PATH_OR_HUB_ID" in err


def test_the_embedded_model_is_described_without_it():
    "SmolLM2-135M as it was published: its number of parameters holds all sizes together."
    config = inputs.read_config("embedded")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert (config.num_hidden_layers, *heads) == (30, 9, 3, 64)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (8192, True)
    assert config.rope_parameters == {"rope_theta": 1e5, "rope_type": "default"}


class Hub:
    "A hub with one repository, or none that can be asked."

    def __init__(self, monkeypatch, there="org/model", reached=True):
        self.asked = []

        def head(url, timeout):
            self.asked.append(url)
            if not reached:
                raise OSError("no route\nto the hub")
            if there not in url:
                raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)


@pytest.mark.parametrize(
    "command", ["generate --prompt x", "demo", "eval ppl", "calibrate --out new.st"]
)
def test_a_mistyped_model_is_refused_at_once(call, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    hub = Hub(monkeypatch)
    for name in ("smolm2", "org/smolm2"):
        refused(
            call(f"{command} --model {name}"),
            f"--model {name}: it is neither a file or folder here nor a repository on the hub",
            *["; did you mean smollm2?"] * (name == "smolm2"),
        )
    assert len(hub.asked) == 2 and all(
        x.endswith("config.json") for x in hub.asked
    )  # once each, with no second try
    refused(
        call(f"{command} --model ./smolm2"), "no such file or folder; did you mean smollm2?"
    )
    assert len(hub.asked) == 2
    Hub(monkeypatch, reached=False)
    refused(
        call(f"{command} --model org/model"),
        "the hub cannot be asked (no route to the hub)",
        code=1,
    )


def test_a_mistyped_calibration_is_asked_for_once(call, monkeypatch):
    """The model does not exist: a message about it would mean that the calibration was not
    looked at first."""
    hub = Hub(monkeypatch)
    ask = "generate --prompt x --model /no/such/model --calibration"
    refused(call(f"{ask} org/maps"), "nor a repository on the hub")
    assert len(hub.asked) == 1


def test_a_recipe_per_layer(call, tiny):
    rows = [json.loads(preset(n).to_json()) for n in ("k4v4", "k2v2")]
    ask = f"generate --model {tiny} --prompt x --max-new-tokens 3 --json --quiet --recipe"
    said = call.json(ask, json.dumps(rows), "--recent", 5)["cache"]["recipe"]
    assert [(r["key"]["bits"], r["recent"]) for r in map(json.loads, said)] == [(4, 5), (2, 5)]
    refused(call(ask, json.dumps(rows[:1])), "each of the 2 layers", "got a list of 1")


BAD_BITS = (
    ["generate --prompt x --bits 2.3"],
    ["eval ppl --bits 2.3"],
    ["demo", "--recipes", '{"key": {"bits": 2.3}, "value": {}}'],
)


def test_a_recipe_is_refused_before_the_embedded_model_is_downloaded(
    call, monkeypatch, tmp_path
):
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    for command in BAD_BITS:
        refused(call(*command), "recipe: bits times d must be an integer, got 2.3 at d = 64")
    rows = [json.loads(preset("k3v3").to_json())] * 29
    refused(
        call("generate --prompt x", "--recipe", json.dumps(rows)),
        "each of the 30 layers",
        "got a list of 29",
    )
    assert not (tmp_path / "cache").exists()


def write_gguf(path):
    "A GGUF file of a small Llama with a vocabulary and no weights: loading it fails."
    writer = gguf.GGUFWriter(path, "llama")
    words = [f"token {i}" for i in range(300)]
    for name, x in {
        "name": "small",
        "context_length": 512,
        "block_count": 2,
        "embedding_length": 128,
        "feed_forward_length": 64,
        "head_count": 4,
        "head_count_kv": 2,
        "rope_dimension_count": 32,
        "rope_freq_base": 1e5,
        "layer_norm_rms_eps": 1e-5,
        "token_list": words,
        "token_scores": [0.5] * 300,
        "token_types": [1] * 300,
    }.items():
        getattr(writer, f"add_{name}")(x)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.close()
    return path


def test_a_gguf_file_that_is_damaged_says_so(tmp_path):
    "Its configuration is read; a file that ends in its head is refused, not a stack trace."
    whole = write_gguf(tmp_path / "model.gguf").read_bytes()
    config = inputs.read_config(str(tmp_path / "model.gguf"))
    found = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    assert (*found, config.rope_parameters["rope_theta"]) == (2, 2, 32, 1e5)
    broken = tmp_path / "broken.gguf"
    for bad in (b"GGUX" + whole[4:], whole[:3], whole[:40], whole[:700]):
        broken.write_bytes(bad)
        with refuses("GGUF|damaged in its head"):
            inputs.read_config(str(broken))


def test_a_recipe_is_refused_before_a_model_of_the_hub_is_downloaded(
    call, monkeypatch, tmp_path
):
    "A cache of the hub that holds the configuration and no weights."
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(LlamaConfig(**SIZE).to_json_string())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    want = "recipe: bits times d must be an integer, got 3.7 at d = 32"
    refused(call("generate --prompt x --quiet --model org/model --bits 3.7"), want)


@pytest.mark.parametrize(
    "line",
    [
        "generate --prompt x",
        "demo",
        "eval ppl",
        "calibrate --out x.st",
        "chat",
        "variants --model x --fasta y",
    ],
)
def test_a_device_that_there_is_not_is_refused_first(call, monkeypatch, line):
    for name in ("turboquant_nb.cli.app.config_of", "turboquant_nb.cli.app.check_name"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("the model was looked at"))
    refused(call(f"{line} --device abacus"), "--device abacus: not a device of torch")


@pytest.mark.parametrize(
    "name, capability, hip, want",
    [
        ("cpu", None, None, "float32"),
        ("cuda", (7, 5), None, "float16"),
        ("cuda", (8, 0), None, "bfloat16"),
        ("cuda", (9, 0), None, "bfloat16"),
        ("cuda", (7, 5), "6.4", "bfloat16"),
        ("mps", None, None, "bfloat16"),
    ],
)
def test_the_usual_dtype_is_one_that_the_device_has(monkeypatch, name, capability, hip, want):
    "A T4 was given bfloat16, which it computes by detours."
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert inputs.usual_dtype(torch.device(name)) == want
