"What surrounds a cache: tensor parallel ranks, weights that stream in, the wrong model."

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.hf.tp_generate import answers
from tests.helpers import QUIETLY, cache_for, exact_recipe, prompt, refuses, seeded, tiny
from turboquant_nb.hf import TurboQuantCache

pytestmark = QUIETLY
SCRIPT = Path(__file__).with_name("tp_generate.py")


# --- tensor parallel
# -------------------------------------------------------------------------------


def run(folder, out):
    "What each of two ranks answers."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    gpus = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    command = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(SCRIPT), str(folder), str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | gpus | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{out}.{r}") for r in range(2)]


def test_calibrating_with_offloaded_weights():
    "Weights that accelerate streams in give the transforms of resident ones."
    accelerate = pytest.importorskip("accelerate")
    from turboquant_nb.calibration.fit import calibrate

    ids = torch.randint(1, 50, (2, 40), generator=seeded())
    here = calibrate(tiny(), ids)
    away = calibrate(
        accelerate.cpu_offload(copy.deepcopy(tiny()), execution_device=torch.device("cpu")), ids
    )
    assert [m.name for m in here.transforms] == [m.name for m in away.transforms]


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun with gloo")
def test_two_ranks_equal_one(tmp_path):
    """transformers' own plan: each rank codes its half of the KV heads, in half the bytes;
    tokens are those of one rank, logits to rounding."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    ranks = run(tmp_path / "model", tmp_path / "two")
    model.to("cuda" if torch.cuda.device_count() >= 2 else "cpu")
    for name, want in answers(model).items():
        assert want["heads"] == 2
        for rank in ranks:
            got = rank[name]
            assert got["heads"] == 1 and got["served"] == want["served"]
            assert torch.equal(got["tokens"], want["tokens"]), name
            assert torch.allclose(got["logits"], want["logits"], atol=1e-4)
            assert (
                0.5 <= got["nbytes"] / want["nbytes"] < 0.51
            )  # ranges of the rows are on both


# --- weights that are elsewhere
# --------------------------------------------------------------------


MAPS = {
    "one device": {"": "cpu"},
    "a layer on disk": {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "cpu",
    },
    "all layers on disk": {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers": "disk",
        "model.norm": "disk",
        "lm_head": "cpu",
    },
}


@pytest.mark.parametrize(
    "where, way, mode",
    [
        ("one device", "dispatched", "no_grad"),
        ("a layer on disk", "loaded", "inference_mode"),
        ("all layers on disk", "dispatched", "inference_mode"),
        ("all layers on disk", "loaded", "no_grad"),
    ],
)
def test_device_maps(where, way, mode, tmp_path):
    """accelerate puts parts of a model on devices, or leaves them on disk until they run: the
    tokens are those of the model in one place."""
    accelerate = pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, DynamicCache

    model, inputs = tiny("llama"), prompt(2, 30)
    how = dict(max_new_tokens=6, do_sample=False)
    want = model.generate(**inputs, past_key_values=DynamicCache(config=model.config), **how)
    if way == "loaded":
        model.save_pretrained(tmp_path / "model")
        args = dict(device_map=MAPS[where], offload_folder=str(tmp_path / "away"))
        away = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **args).eval()
        away.generation_config = model.generation_config
    else:
        args = dict(offload_dir=str(tmp_path / "away"), main_device="cpu", force_hooks=True)
        away = accelerate.dispatch_model(copy.deepcopy(model), MAPS[where], **args)
    elsewhere = {p.device.type for p in away.model.layers.parameters()}
    assert ("meta" in elsewhere) == ("disk" in where)
    with getattr(torch, mode)():
        for _ in range(2):  # a cache for each call
            cache = TurboQuantCache(away, exact_recipe())
            got = away.generate(**inputs, past_key_values=cache, **how)
            assert torch.equal(got, want)
            served = cache.report()["served"]
            assert served["codes"] and "dense" not in served


# --- the wrong dtype, device
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("other, attention", [(torch.bfloat16, "sdpa"), ("meta", "turboquant")])
def test_states_of_another_kind_are_named(other, attention):
    "A cache that holds tokens refuses them before it stores one."
    model, away = tiny(), copy.deepcopy(tiny()).to(other)
    for x in (model, away):
        x.set_attn_implementation(attention)
    cache, ids = cache_for(model, "k3v3"), torch.ones(1, 1, dtype=torch.long)
    got = "bfloat16" if other == torch.bfloat16 else "float32"  # numbers that it does not have
    text = rf"this cache holds states of llama \(float32, .* the model is llama \({got}, "
    with torch.no_grad():
        model(**prompt(1, 9, padded=False), past_key_values=cache)
        with refuses(text):
            away(ids.to(away.device), past_key_values=cache)
    assert cache.get_seq_length() == 9
