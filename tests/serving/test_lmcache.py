"""Our serialiser in a real LMCache, on a CPU. LMCache wants other packages than the rest, so it
lives in an environment of its own, whose python TURBOQUANT_NB_LMCACHE names; `.ci/run` makes
it. What needs no LMCache is checked in any environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe, preset
from turboquant_nb.serving import lmcache
from turboquant_nb.serving.lmcache import ChunkCodec, chunk_recipe, kinds_of

HERE = Path(__file__).parent
PYTHON = os.environ.get("TURBOQUANT_NB_LMCACHE", sys.executable)
MISSING = (
    "LMCache is not installed: TURBOQUANT_NB_LMCACHE may name the python of an environment "
    "that has it"
)


def run(folder, part):
    package = str(Path(lmcache.__file__).parents[2])
    env = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": package, "OMP_NUM_THREADS": "1", "LMCACHE_LOG_LEVEL": "ERROR"}
    has = [PYTHON, "-c", "import lmcache.v1.distributed.serde"]
    tried = subprocess.run(has, capture_output=True, text=True, env=env)
    if tried.returncode:
        if "TURBOQUANT_NB_LMCACHE" in os.environ:
            why = tried.stderr.strip().rpartition("\n")[2]
            raise ImportError(f"{PYTHON} cannot import LMCache: {why}")
        pytest.skip(MISSING)
    line = [PYTHON, str(HERE / "lmcache_parts.py"), str(folder), part]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))[7:])


def test_disk(tmp_path):
    """Chunks of every form go to LMCache's disk tier and come back with a recipe's error;
    pages of codes, beside states, bit for bit; what was changed or written otherwise misses."""
    found = run(tmp_path, "disk")
    for name in ("split", "fused", "fused3", "fp8", "beside pages"):
        assert 0.025 < found[name] < 0.04, found
    assert found["pages"] == 0 and found["bytes"] < 4 * 256 * 200 + 4 * 256 * 256 * 2 / 4
    assert len(found["misses"]) == 8 and all(found["misses"].values()), found


def test_server(tmp_path):
    """Two chunks of an engine's blocks, stored by one server process, are loaded by another
    into other blocks; one that has another recipe finds nothing, and says why."""
    found = run(tmp_path, "process")
    assert found["tokens"] == 512 and 0.025 < found["error"] < 0.04, found
    assert len(found["files"]) == 2 and max(found["files"]) < 4 * 256 * 256 * 2 / 4
    assert found["another recipe"] == 0 and found["log"], found


RECIPES = {
    "k4v2": preset("k4v2"),
    "fractions": Recipe(Spec(2.5), Spec(3.5)),
    "qjl": Recipe(Spec(bits=3, residual="qjl"), Spec(bits=2)),
    "sign": Recipe(Spec(bits=3, residual="sign"), Spec(bits=4, center="prompt_mean")),
    "bare": Recipe(Spec(bits=4, rotation="identity"), Spec(bits=4, scale_dtype="float32")),
    "trellis": Recipe(Spec(bits=2, codebook="trellis"), Spec(bits=2, codebook="trellis")),
}


@pytest.mark.parametrize("name", RECIPES)
def test_size_is_known_before(name):
    "For every kind of recipe, number of tokens and type: the length that shapes tell."
    gen = torch.Generator().manual_seed(0)
    for more in ({}, {"rope_theta": 1e4}, {"inv_freq": (1.0, 0.1)}, {"first": 0}):
        codec = ChunkCodec(RECIPES[name], 32, **more)
        for tokens in (1, 3, 16, 100, 256, 600) if name != "trellis" else (16, 100):
            for dtype in (torch.bfloat16, torch.float8_e5m2):
                x = torch.randn(2, 2, tokens, 64, generator=gen).to(dtype)
                data, back = codec.encode([x]), torch.zeros_like(x)
                assert len(data) == codec.size(kinds_of([x]))
                codec.decode(data, [back])
                if not more.get("first", 4):
                    continue
                exact = x[:, :, :4].view(torch.uint8), back[:, :, :4].view(torch.uint8)
                assert torch.equal(*exact), "the first tokens are exact"


def test_every_cut_and_many_bits():
    "A chunk that is cut anywhere, or has one bit changed, is refused and fills nothing."
    codec, gen = ChunkCodec("k2v2", 16), torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 32, generator=gen).bfloat16()
    pages = torch.randint(256, (3, 5), generator=gen, dtype=torch.uint8)
    good, back = codec.encode([x, pages]), [torch.zeros_like(x), torch.zeros_like(pages)]
    bad = [good[:n] for n in range(len(good))] + [good + b"\0"]
    for at in range(0, len(good), 3):
        bad.append(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
    for data in bad:
        with pytest.raises(ValueError):
            codec.decode(data, back)
    assert not any(t.any() for t in back)
    codec.decode(good, back)
    assert torch.equal(back[1], pages)


def test_a_chunk_of_another_order_is_refused():
    "Stores that fit their own headers but not the tensors."
    codec, gen = ChunkCodec("k2v2", 16), torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 32, generator=gen).bfloat16()
    for other in (x[:1], x[:, :4], x.half(), x[..., :32].repeat(1, 1, 2)):
        with pytest.raises(ValueError, match="another tensors"):
            codec.decode(codec.encode([x]), [torch.zeros_like(other)])


def test_fp8_in_bytes():
    "vLLM keeps fp8 states as bytes: they are coded where the configuration says so."
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2, 256, 128, generator=gen).to(torch.float8_e4m3fn)
    codec = ChunkCodec("k4v4", 64, raw="float8_e4m3fn")
    data, back = codec.encode([x.view(torch.uint8)]), torch.zeros(2, 256, 128).byte()
    codec.decode(data, [back])
    error = (back.view(x.dtype).float() - x.float()).square().mean() / x.float().square().mean()
    assert len(data) < 0.65 * x.numel() and error < 0.02


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ChunkCodec("k3v3-trellis", 64), "without a pair scale"),
        (lambda: ChunkCodec(Recipe(Spec(4), Spec(3), decay=64), 64), "without decay"),
        (lambda: ChunkCodec("k3v3", 0), "head_size must be"),
        (lambda: ChunkCodec("k3v3", rope_theta=1e4), "head_size must be"),
        (lambda: ChunkCodec("k3v3", 64, first=-1), "first must be"),
        (lambda: ChunkCodec("k3v3", 64, raw="int8"), "raw must be"),
        (lambda: ChunkCodec("k3v3").encode([torch.zeros(1, 4, 8).half()]), "head_size must be"),
        (lambda: ChunkCodec("k3v3", 64).encode([torch.zeros(2, 2, 2, 2, 64)]), "a chunk must"),
        (lambda: ChunkCodec("k3v3", 64).encode([torch.zeros(2, 4, 64)]), "a chunk must be"),
        (lambda: ChunkCodec("k3v3", 8).encode([torch.zeros(1, 4, 16).double()]), "one of"),
        (lambda: ChunkCodec("k3v3", 8).encode([torch.full((1, 4, 16), torch.nan)]), "finite"),
    ],
)
def test_refused(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def test_chunk_recipe():
    "A pre-RoPE mean where RoPE is known, the chunk's own where it is not, none where none is."
    assert chunk_recipe("k3v3").key.center == "prompt_mean"
    assert chunk_recipe("k3v3", rope=True).key.center == "pre_rope"
    assert chunk_recipe("k3v3-fast", rope=True).key.center == "prompt_mean"
    bare = chunk_recipe(Recipe(Spec(3), Spec(3)), 2, True)
    assert (bare.key.center, bare.sinks, bare.recent) == ("none", 2, 0)


def test_without_lmcache():
    "Names can be read; `register` says what is missing."
    if lmcache.lmcache is None:
        with pytest.raises(ImportError, match="pip install lmcache"):
            lmcache.register()
    else:
        lmcache.register()
