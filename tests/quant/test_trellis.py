"""The trellis code as a choice of a recipe: a whole model, every processor, what is refused."""

import os
import subprocess
import sys

import pytest
import torch

from turboquant_nb.cache.store import expected_nbytes
from turboquant_nb.quant.codes import TrellisCode, make_quantizer
from turboquant_nb.quant.quantizer import Quantizer, Spec, decode, encode
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.theory.trellis import TRELLISES
from tests.helpers import QUIETLY, refuses, seeded

pytestmark = QUIETLY


@pytest.mark.parametrize("bits", [2, 3])
def test_a_whole_model(tmp_path, bits):
    pytest.importorskip("transformers")
    from tests.quant.lives import lives
    from turboquant_nb.vllm.step import serving_recipe

    side = Spec(bits, codebook="trellis")
    cache = lives(Recipe(side, side, sinks=1, recent=4), tmp_path)
    store = cache.layers[0].store
    assert isinstance(store.key.q.code, TrellisCode)
    assert store.nbytes == expected_nbytes(store)
    assert serving_recipe(Recipe(side, side)).key.codebook == "trellis"
    one = Spec(1, codebook="trellis")
    why = "key.codebook must be a table or windows that kernels read, got 'trellis': kernels"
    with refuses(why):
        serving_recipe(Recipe(one, side))


DIGEST = """
import hashlib, torch
from turboquant_nb.quant.codes import find_code
from turboquant_nb.quant.quantizer import Spec
u = (torch.arange(40 * 64) * 7919 % 4001 / 1000 - 2).view(40, 64)  # exact everywhere
for bits in (1, 2, 3):
    codes = find_code(Spec(bits, codebook="trellis"), 64).encode(u)
    print(hashlib.sha256(codes.numpy().tobytes()).hexdigest())
"""


def test_symbols_are_equal_on_every_processor(capsys):
    "As this one computes, and by torch's narrowest loops in two threads."
    exec(DIGEST, {})
    here = capsys.readouterr().out
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True
    )
    assert run.stdout == here and len(set(here.split())) == 3, run.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [16, 48, 80, 112, 256])
def test_head_sizes_and_dtypes(d, dtype):
    q = make_quantizer(Spec(2, codebook="trellis"), d)
    x = torch.randn(64, d, generator=seeded(d)).to(dtype)
    table = make_quantizer(Spec(2), d)
    loss = lambda q: float((x.float() - decode(q, encode(q, x))).square().sum())
    assert loss(q) < 0.9 * loss(table)


def test_odd_input():
    q = Quantizer(Spec(2, codebook="trellis"), 64)
    assert encode(q, torch.zeros(0, 64)).codes.shape == (0, 64)
    x = torch.ones(1, 64)
    assert float((decode(q, encode(q, x)) - x).norm() / x.norm()) < 0.5
    poisoned = q.code.encode(torch.full((1, 64), float("nan")))  # a captured step waits not
    assert int(poisoned.max()) < 4


@pytest.mark.parametrize("bits", (1, 2, 3))
def test_which_masks_and_which_start(bits):
    "Those of the theory chapter; a circle from 64 channels on."
    for d, start in ((48, "zero"), (64, "tail")):
        code = make_quantizer(Spec(bits, codebook="trellis"), d).code
        shipped = TRELLISES[bits]
        assert (code.trellis.masks, code.trellis.length) == (shipped.masks, shipped.length)
        assert code.trellis.start == start
