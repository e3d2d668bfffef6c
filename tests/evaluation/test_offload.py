"Models whose layers wait elsewhere: what stays, the same tokens, and what is refused."

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from turboquant_nb.evaluation.models import load_offloaded, place
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.graphs import Tape
from tests.helpers import refuses

from ..cli.conftest import SIZE, save

SHAPE = SIZE | dict(num_hidden_layers=4, max_position_embeddings=512)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    torch.manual_seed(3)
    return save(
        tmp_path_factory.mktemp("offload"),
        LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=request.param)),
    )


def generated(model, cache, chunk=None):
    ids = torch.arange(2, 130)[None]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        prefill_chunk_size=chunk,
    )


def test_what_stays_is_what_was_allowed(folder):
    "To the byte; of the dtype that is asked for. (Its page: rooms between, and refusals.)"
    model = LlamaForCausalLM.from_pretrained(folder)
    none = place(model, "cpu", "disk")
    for layers in range(5):
        room = none.resident + layers * none.largest
        for n, given in ((layers, room), (layers - 1, room - 1)):
            if n < 0:
                continue
            p = place(model, "cpu", "disk", given)
            assert p.resident == none.resident + n * none.largest
            where = [p.device_map[f"model.layers.{i}"] for i in range(4)]
            assert where == ["cpu"] * n + ["disk"] * (4 - n)
    with torch.device("meta"):
        half = place(LlamaForCausalLM(model.config), "cuda:1", "cpu", None, torch.bfloat16)
    # the frequencies of RoPE stay float32
    assert abs(half.offloaded - none.offloaded / 2) < 0.01 * none.offloaded
    assert half.device_map["model.layers.0"] == "cpu"
    assert half.device_map["model.norm"] == "cuda:1"


def test_another_dtype(folder):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    away, _, placed = load_offloaded(folder, "disk", dtype=torch.bfloat16)
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert torch.equal(away(ids).logits, model(ids).logits) and away.dtype == torch.bfloat16


def test_steps_of_such_a_model_are_not_recorded(folder):
    "A replay would read memory that holds something else by then."
    away, _, _ = load_offloaded(folder, "disk")
    away.set_attn_implementation("turboquant")
    cache = TurboQuantCache(away, "k3v3", max_length=160, graphs=Tape)
    generated(away, cache)
    said = cache.report()["graphs"]
    assert said["captured"] == 0 and "offloaded" in said["why_not"]


def test_a_checkpoint_of_another_kind(tmp_path):
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=32)
    )
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path)
    with refuses("could not be read as safetensors"):
        load_offloaded(tmp_path, "disk")


def test_generate_from_the_disk(folder, capsys):
    from turboquant_nb import cli

    ask = [
        "generate",
        "--model",
        folder,
        "--no-chat",
        "--prompt",
        "Call me Ishmael. Some years ago",
        "--max-new-tokens",
        "8",
        "--json",
    ]
    found = []
    for more in ([], ["--offload", "disk"], ["--offload", "disk", "--gpu-memory", "1GB"]):
        assert cli.main([*ask, *more]) == 0
        out, err = capsys.readouterr()
        found.append(json.loads(out))
    assert (
        found[0]["text"] == found[1]["text"] == found[2]["text"] and "offload" not in found[0]
    )
    assert (
        found[1]["offload"]["to"] == "disk"
        and found[1]["offload"]["offloaded"] > 0 == found[2]["offload"]["offloaded"]
    )


@pytest.mark.parametrize("fraction, want", [(1.0, 34e9), (0.5, 30e9), (0.15, 2e9)])
def test_room_is_within_the_limit_of_the_process(monkeypatch, fraction, want):
    """It was four fifths of what the GPU has free, and more than the process may take where a
    limit is set."""
    from turboquant_nb.evaluation import models as offload

    for name, x in dict(
        mem_get_info=(int(30e9), int(80e9)),
        memory_allocated=int(10e9),
        memory_reserved=int(14e9),
        get_per_process_memory_fraction=fraction,
    ).items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, lambda device, x=x: x)
    assert offload._free("cuda") == want
