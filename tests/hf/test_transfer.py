"""Caches sent between real processes: bit for bit the same, whatever was read before; refusals
that both sides are told; a peer that is killed, and one that stops."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import prompt, tiny
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
    for group in ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"):
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


class Gone:
    "What NCCL gives where the peer never moves: neither an error nor an end."

    is_completed = staticmethod(lambda: False)


@pytest.mark.parametrize(
    "connects, starts, why",
    [
        (True, lambda *a, **k: Gone(), "nothing moved for 0.05 s"),
        (False, lambda *a, **k: Gone(), "nothing moved for 0.05 s"),
        (False, lambda *a, **k: threading.Event().wait(9), "NCCL did not connect"),
        (False, lambda *a, **k: int("a word"), None),
    ],
)
def test_what_waits_on_a_gpu_is_ended(connects, starts, why, monkeypatch):
    """NCCL's part of the group is aborted, else its kernels hold the GPU; also where it waits
    while it connects, which happens in a thread of its own. Other errors are not a loss."""
    aborted, device = [], torch.device("cuda", 1)
    part = SimpleNamespace(abort=lambda: aborted.append(True))
    link = object.__new__(transfer._Link)
    link.peer, link.wait, link.patience, link.joined = 1, 0, 0.05, connects
    link.group = SimpleNamespace(_get_backend={device: part}.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    x, began = SimpleNamespace(is_cuda=True, device=device), time.monotonic()
    with pytest.raises(ConnectionError if why else ValueError, match=why or "a word"):
        link._done(starts, x, 0.05)
    assert len(aborted) == bool(why) and time.monotonic() - began < 1


@pytest.mark.parametrize("kind", [ConnectionError, ValueError])
def test_a_pass_that_sending_broke_off_is_forgotten(kind, monkeypatch):
    "A peer that is lost, and one that refuses what came, before the pass is over."

    class Refused:
        link = None

        def add(self, tensors, state):
            raise kind("refused")

    monkeypatch.setattr(transfer, "_stream", lambda *a: nullcontext(Refused()))
    model = tiny("llama")
    cache = TurboQuantCache(model, "k3v3")
    with torch.no_grad():
        with pytest.raises(kind, match="refused"), sending(cache, 1):
            model(**prompt(1, 20), past_key_values=cache)
        assert [x.held for x in cache.coded_layers] == [0, 0]
        model(**prompt(1, 20), past_key_values=cache)
    assert [x.held for x in cache.coded_layers] == [20, 20]


def test_streams_with_one_peer_come_one_after_the_other():
    """What was broken off still tells so when the next begins. Kills: two threads that read one
    peer's frames, of which gloo ends the process."""
    seen, go = [], threading.Event()

    class Side(transfer._Side):
        def move(self):
            if self.name == "first":
                go.wait(9)
            seen.append(self.name)

    sides = [Side(SimpleNamespace(group="group", peer=x), "cpu") for x in (1, 1, 2)]
    for side, side.name in zip(sides, ("first", "second", "other")):
        side.start()
    sides[2].join(9), sides[1].join(0.1)
    assert seen == ["other"]
    go.set()
    for side in sides:
        side.join(9)
    assert seen == ["other", "first", "second"]


def test_refused_here(monkeypatch):
    "Before anything is sent."
    with pytest.raises(RuntimeError, match="init_process_group"):
        transfer.receive(0)
    with monkeypatch.context() as m:  # a group of NCCL alone
        m.setattr(transfer.dist, "is_initialized", lambda: True)
        m.setattr(transfer.dist, "get_world_size", lambda group: 2)
        m.setattr(transfer.dist, "get_rank", lambda group: 1)
        m.setattr(transfer.dist, "get_backend_config", lambda group: "cuda:nccl")
        with pytest.raises(ValueError, match="a backend of the CPU too.*got 'cuda:nccl'"):
            transfer.receive(0)
    with pytest.raises(TypeError, match="cache must be a TurboQuantCache"):
        send({}, 1)
    from transformers import LlamaConfig

    sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    cache = TurboQuantCache(LlamaConfig(**sizes))
    with pytest.raises(ValueError, match="made for a model that is there"), sending(cache, 1):
        torch.zeros(1)
