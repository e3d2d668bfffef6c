"""What surrounds a cache: tensor parallel ranks, weights that stream in, files of a hundred
thousand tokens, and the wrong model."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import cache_for, exact_recipe, generate, prompt, tiny
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.cache.disk import state_of
from turboquant_nb.testing import same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).with_name("tp_generate.py")


# --- tensor parallel
# -------------------------------------------------------------------------------


def run(folder, out, ranks):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    gpus = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    command = (
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            str(port),
        ]
        if ranks > 1
        else [sys.executable]
    )
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | gpus | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{out}.{r}") for r in range(ranks)]


def test_calibrating_with_offloaded_weights():
    "Weights that accelerate streams in give the transforms of resident ones."
    accelerate = pytest.importorskip("accelerate")
    from turboquant_nb.calibration.fit import calibrate

    ids = torch.randint(1, 50, (2, 40), generator=torch.Generator().manual_seed(0))
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
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (one,) = run(tmp_path / "model", tmp_path / "one", 1)
    ranks = run(tmp_path / "model", tmp_path / "two", 2)
    for name, want in one.items():
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


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_and_a_resident_cache(where, tmp_path):
    """accelerate streams each layer's weights in; the cache stays where it computes, and the
    tokens are the same."""
    accelerate = pytest.importorskip("accelerate")
    import copy

    model, inputs = tiny("llama"), prompt(2, 30)
    want, _ = generate(model, inputs, "turboquant", max_new_tokens=6)
    away = copy.deepcopy(model)
    if where == "disk":
        away = accelerate.disk_offload(
            away, str(tmp_path), execution_device=torch.device("cpu")
        )
    else:
        away = accelerate.cpu_offload(away, execution_device=torch.device("cpu"))
    assert all(p.device.type == "meta" for p in away.model.layers.parameters())
    got, cache = generate(away, inputs, "turboquant", max_new_tokens=6)
    assert torch.equal(got, want)
    assert all(x.store.device.type == "cpu" for x in cache.layers) and all(
        p.device.type == "meta" for p in away.model.layers.parameters()
    )


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


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("way", ["loaded", "dispatched"])
@pytest.mark.parametrize("where", MAPS)
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


# --- files
# -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_cache():
    "100,000 tokens in two layers, one of them padded."
    model = tiny("llama")
    cache = TurboQuantCache(model, "k3v3")
    cache.set_padding(torch.tensor([[0, 0, 1], [1, 1, 1]]))
    g = torch.Generator().manual_seed(0)
    for n in (60_000, 1, 39_999):
        for i in range(2):
            cache.layers[i]._append(
                torch.randn(2, 2, n, 8, generator=g),
                torch.randn(2, 2, n, 8, generator=g),
                n == 60_000,
            )
    return model, cache


def test_a_hundred_thousand_tokens_to_disk_and_back(long_cache, tmp_path):
    model, cache = long_cache
    assert cache.get_seq_length() == 100_000
    cache.save(tmp_path / "c")
    back = TurboQuantCache.load(tmp_path / "c", model)
    for a, b in zip(cache.layers, back.layers):
        assert a.starts == b.starts == (2, 0)
        one, two = state_of(a.store), state_of(b.store)
        assert one[1] == two[1] and one[0].keys() == two[0].keys()
        for name, t in one[0].items():
            same(two[0][name], t, allow_empty=True)
    size = (tmp_path / "c").stat().st_size
    assert size < 1.01 * cache.report()["nbytes"]
    back.save(tmp_path / "d")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()


# --- the wrong dtype, device
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
@pytest.mark.parametrize("other", [torch.bfloat16, "meta"])
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
        with pytest.raises(ValueError, match=text):
            away(ids.to(away.device), past_key_values=cache)
    assert cache.get_seq_length() == 9


def test_a_forward_pass_that_broke_off():
    """An error in the second layer: the next pass says so, and after `recover` it is as if
    nothing had been."""
    model, inputs = tiny(), prompt(1, 9, padded=False)
    model.set_attn_implementation("turboquant")
    cache, step = (
        TurboQuantCache(model, "k3v3"),
        prompt(1, 1, padded=False, seed=4)["input_ids"],
    )
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        broken = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(
            lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("simulated"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            model(step, past_key_values=cache)
        broken.remove()
        with pytest.raises(ValueError, match=r"cache.recover\(\)"):
            model(step, past_key_values=cache)
        assert cache.recover() == 9
        assert (
            model(step, past_key_values=cache).logits.isfinite().all()
            and cache.get_seq_length() == 10
        )
