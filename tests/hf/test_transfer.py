"""Caches sent between real processes: bit for bit the same, whatever was read before; refusals
that both sides are told; a peer that is killed, and one that stops."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from turboquant_nb.hf import TurboQuantCache, transfer
from turboquant_nb.hf.transfer import send, sending


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    "What ranks 0 and 1 saw."
    folder = tmp_path_factory.mktemp("transfer")
    here, package = Path(__file__).parent, str(Path(transfer.__file__).parents[2])
    env = os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(here / "transfer_parts.py"), str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(2)]


def test_the_same_bits(found):
    "Of every kind of recipe, windows, a static cache and a store; and a model goes on with it."
    sender, receiver = found
    for name in ("k3v3", "trellis, pair scale", "by head"):
        assert receiver[name] and receiver[f"{name}, goes on"], receiver
        assert 30_000 < sender[f"{name}, bytes"] < 2 * 2 * 2 * 4 * 300 * 16 * 2
    assert sender["windows"] and sender["static"] and receiver["store"]


def test_buffers_go_beside_the_stream(found):
    "As those of a GPU do, here over gloo, in pieces; one that lacks a byte is refused."
    sender, receiver = found
    assert receiver["buffers"] and sender["buffers"] == "nothing", found
    assert "a buffer of" in receiver["wrong buffers, said"] and not receiver["wrong buffers"]
    assert receiver["wrong buffers, said"] in sender["wrong buffers"], found


def test_the_way_of_a_buffer():
    "The same GPU of a machine, another with NCCL, else the host."
    here, there = ({"host": "a", "gpu": x} for x in ("one", "two"))
    none, away = {"host": "a", "gpu": None}, {"host": "b", "gpu": "one"}
    way = transfer._way
    for group in ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl"):
        other = "nccl" if "nccl" in group else "host"
        assert way(here, here, group) == "ipc"
        assert way(here, there, group) == way(here, away, group) == other
        assert way(none, here, group) == way(here, none, group) == way(none, none, group)
        assert way(none, here, group) == "host"


def test_refusals_are_told(found):
    "What the receiver refuses the sender is told, and the other way round; both go on."
    sender, receiver = found
    assert "the model is a llama with 2 layers" in receiver["other model"]
    assert sender["refused"] == "ValueError: rank 1 refused it: " + receiver["other model"]
    assert "give the model it is for" in sender["no model"]
    assert "give the model it is for" in receiver["needs a model"]
    assert sender["broken"] == "KeyError: 'the prompt'"
    assert receiver["gave up"] == "ConnectionError: rank 0 gave up: " + sender["broken"]
    assert "each layer must get its last tokens in one pass" in sender["twice"]
    assert sender["twice"] in receiver["gave up twice"]


def test_lost_peers(found):
    """One that never comes, one that stops and one that is killed, each after a second: an
    error within another, and both sides send to each other after it."""
    sender, receiver = found
    assert sender["late"].startswith("ConnectionError: rank 1 was lost"), sender
    assert sender["lost"].startswith("ConnectionError: rank 3 was lost"), sender
    assert receiver["lost"].startswith("ConnectionError: rank 2 was lost"), receiver
    assert sender["seconds"] < 3.5 and receiver["seconds"] < 2.5, found
    assert sender["held"] == [64] * 4, "the pass that was broken off is taken back"
    assert sender["usable"] and receiver["usable"]
    assert sender["sent"] > 10_000 and receiver["received"] == 64


def test_refused_here():
    "Before anything is sent."
    with pytest.raises(RuntimeError, match="init_process_group"):
        transfer.receive(0)
    with pytest.raises(TypeError, match="cache must be a TurboQuantCache"):
        send({}, 1)
    from transformers import LlamaConfig

    sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    cache = TurboQuantCache(LlamaConfig(**sizes))
    with pytest.raises(ValueError, match="made for a model that is there"), sending(cache, 1):
        torch.zeros(1)
