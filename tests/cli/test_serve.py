"""turboquant serve without vLLM: how much a cache holds, what vLLM is told, and what is
refused; a stub stands where vLLM would be started."""

import json
import os
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Gemma2Config, LlamaConfig, Qwen3NextConfig

from turboquant_nb.cli import serve
from turboquant_nb import load_calibration, preset
from turboquant_nb.quant.layers import LayerInfo
from turboquant_nb.vllm.step import ServingConfig
from tests.helpers import ONE_THREAD, refuses

from .conftest import refused

pytestmark = ONE_THREAD
LLAMA = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
SLIDES = Gemma2Config(num_hidden_layers=4, sliding_window=64)


def test_bytes_of_a_cache():
    """A token: 32 layers of 8 heads, 128 channels of keys and of values of 3 bits and a scale;
    a page of 128 tokens has room for 16 exact ones, of which 17 may lie in three pages."""
    k3v3 = ServingConfig("k3v3")
    found = serve.cache_size(LLAMA, k3v3)
    assert found["bytes_per_token"] == 32 * 8 * 2 * (128 * 3 // 8 + 2) == 25_600
    assert found["bytes_16_bit"] == 32 * 8 * 2 * 128 * 2
    assert found["times_16_bit"] == 5.12 and "most_tokens" not in found
    assert found["recent_bytes"] == 3 * 128 * 25_600
    assert found["chunk_bytes"] == 514 * 128 * 25_600  # 8,208 tokens in 513 pages or 514
    near = serve.cache_size(LLAMA, k3v3, chunk=2048)
    assert near["chunk_bytes"] == 130 * 128 * 25_600
    small = serve.cache_size(LLAMA, ServingConfig("k4v4"), block=64)
    assert small["recent_bytes"] == 4 * 64 * 33_792


def test_layers_of_several_sizes(monkeypatch):
    """Pages of one size: of a layer with heads of 512 channels and half the bytes 256 tokens.
    Layers with a window do not count beside others, but have exact tokens, too."""
    sizes = dict(coded=True, query_heads=32)
    near = LayerInfo(0, heads=16, key_size=256, value_size=256, sliding_window=1024, **sizes)
    far = LayerInfo(1, heads=4, key_size=512, value_size=512, **sizes)
    shown = SimpleNamespace(ModelInfo=lambda layers: SimpleNamespace(coded=layers))
    monkeypatch.setattr(serve, "hf", shown)
    k3v3, page = ServingConfig("k3v3"), 128 * 16 * 196
    found = serve.cache_size([near, near, far], k3v3)
    assert found["bytes_per_token"] == page // 256 == 1568
    assert found["bytes_16_bit"] == 4 * 512 * 4
    assert found["recent_bytes"] == page * sum(
        k3v3.recent_blocks(n, d, 2) for n, d in ((128, 256), (128, 256), (256, 512))
    )
    assert serve.cache_size([near, near], k3v3)["bytes_per_token"] == 2 * 16 * 196
    latent = LayerInfo(0, heads=4, key_size=48, value_size=32, latent=512, beside=16, **sizes)
    with refuses(r"does not serve multi-head latent attention \(MLA\)"):
        serve.cache_size([latent], k3v3)


def test_heads_are_not_cut_and_gpus_add_their_memory():
    k3v3 = ServingConfig("k3v3")
    one = serve.cache_size(LLAMA, k3v3)["bytes_per_token"]
    sizes = [serve.cache_size(LLAMA, k3v3, gpus=n)["bytes_per_token"] for n in (2, 8, 16)]
    assert sizes == [one, one, 2 * one]  # 8 heads on 16 GPUs: each twice
    for gpus in (1, 2):
        found = serve.cache_size(LLAMA, k3v3, gpus, memory=40e9, weights=16 * 10**9)
        room = 40e9 * gpus - 16e9 - found["chunk_bytes"]
        assert found["most_tokens"] == int(room // one) > 0
    tight = serve.cache_size(LLAMA, k3v3, memory=16e9 + 1, weights=16 * 10**9)
    assert tight["most_tokens"] == 0  # a chunk does not fit beside the weights
    words = "the weights, 16.0 GB, do not fit the 16.0 GB that vLLM may take"
    with refuses(words):
        serve.cache_size(LLAMA, k3v3, memory=16e9, weights=16 * 10**9)
    with refuses("the 20.0 GB that vLLM may take"):
        serve.cache_size(LLAMA, k3v3, 2, memory=10e9, weights=30 * 10**9)


def test_layers_with_a_sliding_window():
    "They hold no more than their window, and count only where there are no others."
    config, bare = SLIDES, ServingConfig("k3v3", recent=0, sinks=0)
    token = config.num_key_value_heads * bare.bytes_per_token(config.head_dim)
    assert serve.cache_size(config, bare)["bytes_per_token"] == 2 * token
    every = Gemma2Config(num_hidden_layers=4, layer_types=["sliding_attention"] * 4)
    assert serve.cache_size(every, bare)["bytes_per_token"] == 4 * token
    near = serve.cache_size(config, ServingConfig("k3v3"))  # all four have recent tokens
    pages = ServingConfig("k3v3").recent_blocks(128, config.head_dim, 2)
    assert near["recent_bytes"] == pages * 128 * 4 * token


def test_layers_that_hold_a_state():
    "They count for nothing: of four layers one has keys and values."
    config, bare = Qwen3NextConfig(num_hidden_layers=4), ServingConfig("k3v3", recent=0)
    token = config.num_key_value_heads * bare.bytes_per_token(config.head_dim)
    assert serve.cache_size(config, bare)["bytes_per_token"] == token


def test_options_among_words():
    words = ["--port", "8001", "-tp=2", "--gpu_memory_utilization", "0.5", "--port=8002"]
    said = lambda *names: serve.option_of(words, *names)
    assert said("--port") == "8002" and said("--seed") is None
    assert said("--tensor-parallel-size", "-tp") == "2"
    assert said("--gpu-memory-utilization") == "0.5"
    assert serve.option_of(["--port"], "--port") == ""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    "A stub where the command looks for vLLM; the command lines that it was started with."
    stub, began, about = tmp_path / "bin", [], "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
    for name, text in {
        "vllm-0.26.0.dist-info/METADATA": about.format("vllm", "0.26.0"),
        "stub-0.dist-info/METADATA": about.format("stub", 0),
        "stub-0.dist-info/entry_points.txt": (
            "[vllm.general_plugins]\nturboquant_nb = turboquant_nb.vllm.backend:register\n"
        ),
        "vllm": "#!/bin/sh\n",
    }.items():
        (stub / name).parent.mkdir(parents=True, exist_ok=True)
        (stub / name).write_text(text)
    (stub / "vllm").chmod(0o755)
    monkeypatch.syspath_prepend(stub)
    monkeypatch.setenv("PATH", f"{stub}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TURBOQUANT_NB_VLLM_CPU", "1")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(os, "execv", lambda program, line: began.append((program, line)))
    LLAMA.save_pretrained(tmp_path / "llama")
    SLIDES.save_pretrained(tmp_path / "slides")
    return began


def test_what_a_person_is_told_and_vllm_gets(call, vllm, tmp_path):
    model = str(tmp_path / "llama")
    code, out, err = call(f"serve {model} --dry-run -- --port 8001 --max-model-len 32768")
    assert (code, vllm) == (0, []) and err.count("\n") == 1
    assert err == (
        f"turboquant: {model} on vLLM 0.26.0: 25,600 bytes a token, 5.12 times as many tokens "
        "as 16-bit states; 16 recent tokens and 4 first ones exact, 9.8 MB for each request "
        "that decodes, 1,684.3 MB while a chunk of a prompt is read\n"
    )
    line = shlex.split(out)
    program, told = str(tmp_path / "bin" / "vllm"), {"recipe": "k3v3"}
    more = ["--port", "8001", "--max-model-len", "32768"]
    words = lambda told: [
        program,
        "serve",
        model,
        "--additional-config",
        json.dumps({"turboquant_nb": told}),
        *more,
    ]
    file = json.loads(line[4])["turboquant_nb"]["calibration"]
    assert file.endswith("-served.safetensors") and not Path(file).exists()
    assert line == words(told | {"calibration": file})
    # without weights there is no frame, and keys that need no mean are served without
    code, out, err = call(f"serve {model} --quiet -- --port 8001 --max-model-len 32768")
    assert (code, out, err) == (0, "", "") and vllm == [(program, words(told))]
    found = call.json(f"serve {model} --dry-run --json")
    assert found["command"] == line[:5] and found["vllm"] == "0.26.0"
    assert found["bytes_per_token"] == 25_600


def test_exact_tokens_are_those_of_the_recipe_or_asked_for(call, vllm, tmp_path):
    model, few = tmp_path / "llama", "; no recent tokens are kept exact, so that few bits lose"
    whole = call(f"serve {model} --dry-run", "--recipe", preset("k3v3").to_json())
    assert whole[2] == call(f"serve {model} --dry-run")[2]
    code, out, err = call(f"serve {model} --recent 0 --dry-run")
    assert code == 0 and few in err and '{"recipe": "k3v3", "recent": 0, "cal' in out
    code, out, err = call(f"serve {model} --recent 8 --sinks 0 --dry-run")
    assert "; 8 recent tokens exact, " in err and '"recent": 8, "sinks": 0, "cal' in out
    code, out, err = call(f"serve {tmp_path / 'slides'} --dry-run")
    assert code == 0 and "; 16 recent tokens and 4 first ones exact" in err, err
    assert out.count('"recent"') == 0


def test_sizes_among_vllms_options_count(call, vllm, tmp_path):
    ask = f"serve {tmp_path / 'llama'} --recipe k4v4 --dry-run --json --"
    found = call.json(f"{ask} --block-size 64 --max-num-batched-tokens 2048")
    want = serve.cache_size(LLAMA, ServingConfig("k4v4"), block=64, chunk=2048)
    assert {name: found[name] for name in want} == want
    found = call.json(f"{ask} -tp 16")
    assert found["bytes_per_token"] == 2 * want["bytes_per_token"]


def test_what_a_machine_lacks(call, vllm, tmp_path, monkeypatch):
    line = f"serve {tmp_path / 'llama'}"
    about = tmp_path / "bin" / "vllm-0.26.0.dist-info" / "METADATA"
    with monkeypatch.context() as m:
        m.setenv("VLLM_PLUGINS", "other")
        refused(call(line), "VLLM_PLUGINS='other' keeps vLLM from loading", code=1)
        m.setenv("VLLM_PLUGINS", "other,turboquant_nb")
        assert call(f"{line} --dry-run")[0] == 0
    with monkeypatch.context() as m:
        m.setenv("TURBOQUANT_NB_VLLM_CPU", "0")
        m.setattr("torch.cuda.is_available", lambda: False)
        refused(call(line), "no NVIDIA GPU is found here", code=1)
    about.write_text(about.read_text().replace("0.26.0", "0.25.9"))
    refused(call(line), "vLLM must be at least 0.26, got 0.25.9", code=1)
    about.write_text(about.read_text().replace("0.25.9", "1.2.0"))
    code, _, err = call(f"{line} --dry-run")
    assert code == 0 and "vLLM 1.2.0 is newer than 0.33, the last whose interface" in err
    about.unlink()
    about.parent.rmdir()
    refused(call(line), "vLLM is not installed in this environment", code=1)
    assert not vllm


def test_a_gpu_says_what_it_holds(call, vllm, tmp_path, monkeypatch):
    "A share of its memory, less the weights in the folder."
    from types import SimpleNamespace

    gpu = SimpleNamespace(name="card", major=8, minor=0, total_memory=40 * 10**9)
    monkeypatch.setenv("TURBOQUANT_NB_VLLM_CPU", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    model = tmp_path / "llama"
    assert "most_tokens" not in call.json(f"serve {model} --dry-run --json")
    for name, size in (("a", 3000), ("b", 5000)):
        (model / f"{name}.safetensors").write_bytes(bytes(size))
    code, out, err = call(f"serve {model} --dry-run")
    size = serve.cache_size(LLAMA, ServingConfig("k3v3"), memory=36e9, weights=8000)
    assert f"; room for at most {size['most_tokens']:,} tokens; 16 recent" in err
    assert "--attention-backend CUSTOM" in out
    half = "--dry-run --json -- --gpu-memory-utilization 0.5 -tp 2"
    found = call.json(f"serve {model} {half}")
    size = serve.cache_size(LLAMA, ServingConfig("k3v3"), 2, memory=20e9, weights=8000)
    assert found["most_tokens"] == size["most_tokens"]
    gpu.major, gpu.minor = 7, 5
    refused(call(f"serve {model}"), "card has compute capability 7.5; serving needs", code=1)


def test_the_frame_is_found_before_vllm_starts(call, vllm, plain, tmp_path, monkeypatch):
    """Once for these weights; a model whose keys need one is refused where it cannot be made,
    and other weights get another."""
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    told = lambda: json.loads(vllm[-1][1][4])["turboquant_nb"]["calibration"]
    code, out, err = call(f"serve {plain}")
    assert code == 0 and "reading a page of text" in err, err
    frame, first = load_calibration(told()), told()
    assert len(frame.frames) == 2 and frame.frames[0].pair is not None
    assert frame.header["text"] == "the text that ships with the package"
    run = lambda *_, **__: pytest.fail("the frame was made again")
    with monkeypatch.context() as m:
        m.setattr(serve.subprocess, "run", run)
        assert call(f"serve {plain}")[0] == 0 and told() == first
    copy = tmp_path / "copy"
    shutil.copytree(plain, copy)
    assert call(f"serve {copy}")[0] == 0 and told() != first
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    refused(
        call(f"serve {copy} --quiet"), "qwen2, whose keys lie far from 0, without the frames"
    )
