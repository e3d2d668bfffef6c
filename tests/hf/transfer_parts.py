"""Four processes for test_transfer.py: transfer_parts.py FOLDER. Ranks 0 and 1 send to each
other; 2 is killed while it sends, 3 stops while it receives. One import serves all, by fork."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from turboquant_nb.cache.codec import KVStore
from turboquant_nb.cache.disk import state_of
from turboquant_nb.hf import TurboQuantCache, transfer
from turboquant_nb.quant.mixed_precision import HeadRecipe
from turboquant_nb.quant.recipe import preset

# of peers that are there: on a busy machine one may be silent for more than a second
send, sending, receive = (
    partial(f, patience=20) for f in (transfer.send, transfer.sending, transfer.receive)
)
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=64)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)


def llama(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | more)).eval()


def windowed():
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = SIZES | dict(head_dim=16, sliding_window=64, layer_types=kinds)
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()


def ids(n, seed=0):
    return torch.randint(64, (1, n), generator=torch.Generator().manual_seed(seed))


def same(a, b):
    "Every tensor and number of two caches' layers."
    return len(a) == len(b) and all(
        h == g and t.keys() == u.keys() and all(torch.equal(t[k], u[k]) for k in t)
        for (t, h), (u, g) in zip(a, b)
    )


RECIPES = {
    "k3v3": lambda: "k3v3",
    "trellis, pair scale": lambda: "k2v2-trellis",
    "by head": lambda: HeadRecipe((preset("k4v4"), preset("k3v3"))),
}


def pair(rank, folder, found):
    "What 0 and 1 do together."
    model = llama()
    for name, make in RECIPES.items():
        cache = TurboQuantCache(model, make())
        if rank == 0:
            model(ids(20), past_key_values=cache)  # a first chunk, before
            with sending(cache, 1) as link:
                model(ids(280, 1), past_key_values=cache)
            torch.save(cache.states(), folder / "sent")
            found[f"{name}, bytes"] = link.nbytes
            dist.barrier(PAIR)
        else:
            got = receive(0, model)
            dist.barrier(PAIR)
            sent, header = torch.load(folder / "sent", weights_only=False)
            mine, about = got.states()
            found[name] = same(sent, mine) and header == about
            found[f"{name}, goes on"] = bool(
                model(ids(3, 2), past_key_values=got).logits.isfinite().all()
            )
    sliding, fixed = windowed(), dict(max_length=400, static=True)
    for name, other, more, room in (
        ("windows", sliding, {}, {}),
        ("static", model, fixed, dict(max_length=500)),
    ):
        cache = TurboQuantCache(other, "k3v3", **more)
        if rank == 1:  # the other direction
            with sending(cache, 0):
                other(ids(300), past_key_values=cache, logits_to_keep=1)
            torch.save(cache.states()[0], folder / "sent")
            dist.barrier(PAIR)
        else:
            got = receive(1, other, **room)
            dist.barrier(PAIR)
            found[name] = same(torch.load(folder / "sent", weights_only=False), got.states()[0])
    chosen, most = transfer._way, transfer._MOST
    transfer._way, transfer._MOST = lambda *_: "nccl", 10_000  # tensors, several of a layer
    for name in ("buffers", "wrong buffers"):
        cache = TurboQuantCache(model, "k3v3")
        if rank == 0:
            if name != "buffers":
                transfer._Sender.beside = lambda self, x, to=transfer._Sender.beside: to(
                    self, x[1:]
                )
            model(ids(300), past_key_values=cache)
            found[name] = said(lambda c=cache: send(c, 1))
            torch.save(cache.states()[0], folder / "sent")
            dist.barrier(PAIR)
        else:
            got = []
            found[f"{name}, said"] = said(lambda g=got: g.append(receive(0, model)))
            dist.barrier(PAIR)
            sent = torch.load(folder / "sent", weights_only=False)
            found[name] = bool(got) and same(sent, got[0].states()[0])
    transfer._way, transfer._MOST = chosen, most
    store = KVStore("k3v2", 2, 2, 16)
    gen = torch.Generator().manual_seed(0)
    store.append(*torch.randn(2, 2, 2, 300, 16, generator=gen))
    if rank == 0:
        send(store, 1)
    else:
        found["store"] = same([state_of(store)], [state_of(receive(0))])
    cache = TurboQuantCache(model, "k3v3")
    if rank == 0:  # refusals and mistakes: both sides say why, and go on
        model(ids(64), past_key_values=cache)
        found["refused"] = said(lambda: send(cache, 1))
        found["no model"] = said(lambda: send(cache, 1))

        def broken():
            with sending(TurboQuantCache(model, "k3v3"), 1):
                raise KeyError("the prompt")

        def twice():
            new = TurboQuantCache(model, "k3v3")
            with sending(new, 1):
                model(ids(64), past_key_values=new)
                model(ids(64), past_key_values=new)

        found["broken"], found["twice"] = said(broken), said(twice)
        found["late"] = said(lambda: send(cache, 1, LATE, wait=0.3))
        dist.barrier(PAIR)
    else:
        found["other model"] = said(lambda: receive(0, llama(num_hidden_layers=2)))
        found["needs a model"] = said(lambda: receive(0))
        found["gave up"] = said(lambda: receive(0, model))
        found["gave up twice"] = said(lambda: receive(0, model))
        dist.barrier(PAIR)


def said(run):
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def lost(rank, folder, found):
    "0 sends to 3, which stops; 1 receives from 2, which is killed. Then 0 sends to 1."
    model = llama()
    dist.barrier()
    if rank == 3:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        transfer.receive(0, model)
    if rank == 2:
        with transfer.sending(TurboQuantCache(model, "k3v3"), 1):
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
    cache = TurboQuantCache(model, "k3v3")
    began = time.monotonic()

    def to_stopped():
        model(ids(64), past_key_values=cache)
        with transfer.sending(cache, 3):
            time.sleep(2.7)
            model(ids(32), past_key_values=cache)  # which its first layer breaks off

    found["lost"] = said(to_stopped if rank == 0 else lambda: transfer.receive(2, model))
    found["seconds"] = time.monotonic() - began
    found["held"] = [x.held for x in cache.coded_layers]
    group = dist.new_group([0, 1], use_local_synchronization=True)
    new = model.generate(ids(5), past_key_values=TurboQuantCache(model, "k3v3"), max_length=8)
    found["usable"] = new.shape == (1, 8)
    if rank == 0:
        found["sent"] = send(cache, 1, group)
    else:
        found["received"] = receive(0, model, group).get_seq_length()


def main(rank, folder):
    global PAIR, LATE
    torch.set_num_threads(1)
    where = f"file://{folder}/group"
    dist.init_process_group("gloo", where, rank=rank, world_size=4)
    PAIR, LATE, found = dist.new_group([0, 1]), dist.new_group([0, 1]), {}
    with torch.no_grad():
        if rank < 2:
            pair(rank, folder, found)
        lost(rank, folder, found)
    (folder / f"found-{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    pids = []
    for rank in range(4):
        if not (pid := os.fork()):
            code = 1
            try:
                main(rank, where)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids[:2]]
    for pid in pids[2:]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.exit(any(codes))
