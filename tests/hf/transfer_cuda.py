"""One of four processes that hold caches on GPUs: transfer_cuda.py FOLDER GROUP GPU RANK. 0
sends to 1; then 1 receives from 2, which is killed, and 0 sends to 3, which stops, each at the
second buffer of a GPU; then 0 sends to 1 again. No kernel is compiled."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from turboquant_nb.cache.codec import KVStore
from turboquant_nb.cache.disk import state_of
from turboquant_nb.hf import TurboQuantCache, transfer
from turboquant_nb.hf.transfer import receive, send, sending

SIZES = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=4, vocab_size=64)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)
PAIRS = (0, 1), (1, 2), (0, 3)
LEAVES = {2: signal.SIGKILL, 3: signal.SIGSTOP}


def llama(device):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().bfloat16().to(device)


def new(model):
    "Coded and attended to by PyTorch: kernels take longer to compile than all of this."
    return TurboQuantCache(model, "k3v3", backend="torch")


def on_host(states):
    return [({n: t.cpu() for n, t in tensors.items()}, h) for tensors, h in states]


def same(a, b):
    return len(a) == len(b) and all(
        h == g and t.keys() == u.keys() and all(torch.equal(t[k], u[k]) for k in t)
        for (t, h), (u, g) in zip(a, b)
    )


def pair(rank, folder, group, model, ids, found):
    "0 sends a cache and a store to 1."
    device, done = ids.device, folder / "done"
    if rank == 0:
        gen = torch.Generator(device).manual_seed(0)
        cache = new(model)
        store = KVStore("k3v2", 1, 2, 64, dtype=torch.bfloat16, device=device)
        store.append(*torch.randn(2, 1, 2, 300, 64, generator=gen, device=device).bfloat16())
        with sending(cache, 1, group, patience=20) as link:
            model(ids, past_key_values=cache, logits_to_keep=1)
        found["way"] = link.way
        send(store, 1, group, patience=20)
        torch.save([on_host(cache.states()[0]), on_host([state_of(store)])], folder / "sent")
        done.touch()
        return
    got = receive(0, model, group, patience=20)
    again = receive(0, group=group, device=device, patience=20)
    while not done.exists():
        time.sleep(0.01)
    layers, single = torch.load(folder / "sent", weights_only=False)
    found["same"] = same(layers, on_host(got.states()[0]))
    found["store"] = same(single, on_host([state_of(again)]))
    found["on the GPU"] = all(x.store.device == device for x in got.coded_layers)
    for layer in got.layers:
        layer.backend = "torch"
    more = model(ids[:, :3], past_key_values=got, logits_to_keep=1).logits
    found["goes on"] = bool(more.isfinite().all())


def leaving(rank, folder):
    "This process is gone when it has begun to move its second buffer of a GPU."
    link, moved = transfer._Link, []
    done, put, get = link._done, link.put, link.get

    def last():
        moved.append(time.monotonic())
        if len(moved) == 2:
            (folder / f"left-{rank}").write_text(str(moved[-1]))
            os.kill(os.getpid(), LEAVES[rank])

    def _done(self, move, x, seconds):  # by NCCL: the other side waits for it
        if x.is_cuda:
            last()
        return done(self, move, x, seconds)

    def putting(self, kind, *more):
        put(self, kind, *more)
        if kind == transfer._HANDLE:
            last()

    def getting(self, *more):
        frame = get(self, *more)
        if frame[0] == transfer._HANDLE:
            last()
        return frame

    link._done, link.put, link.get = _done, putting, getting


def loses(rank, folder, groups, model, ids, found):
    "What 0 and 1 see of peers that leave, and what they can do then."
    cache, peer = new(model), 3 - rank
    try:
        if rank == 0:
            model(ids, past_key_values=cache, logits_to_keep=1)
            send(cache, 1, groups[0, 3])
        else:
            receive(1, model, groups[1, 2])
    except Exception as error:
        found["lost"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - float((folder / f"left-{peer}").read_text())
    cache = new(model)
    answer = model.generate(ids[:, :5], past_key_values=cache, max_length=8)
    torch.cuda.synchronize()  # nothing on this GPU waits for the peer
    found["usable after"] = time.monotonic() - float((folder / f"left-{peer}").read_text())
    found["usable"] = answer.shape == (1, 8)
    for group in (groups[0, 1], dist.new_group([0, 1], use_local_synchronization=True)):
        if rank == 0:
            send(cache, 1, group, patience=20)
        else:
            cache = receive(0, model, group, patience=20)
    found["held"] = cache.get_seq_length()


@torch.no_grad()
def main(folder, group, gpu, rank):
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    dist.init_process_group(group, f"file://{folder}/group", rank=rank, world_size=4)
    groups, plain = {p: dist.new_group(list(p)) for p in PAIRS}, dist.new_group(backend="gloo")
    model, found = llama(device), {}
    ids = torch.randint(64, (1, 700), generator=torch.Generator().manual_seed(0)).to(device)
    if rank < 2:
        pair(rank, folder, groups[0, 1], model, ids, found)
    dist.barrier(plain)
    if rank < 2:
        loses(rank, folder, groups, model, ids, found)
        (folder / f"found-{rank}").write_text(json.dumps(found))
    else:
        leaving(rank, folder)
    if rank == 2:
        cache = new(model)
        with sending(cache, 0, groups[1, 2], patience=20):
            model(ids, past_key_values=cache, logits_to_keep=1)
    if rank == 3:
        receive(0, model, groups[0, 3], patience=20)
    os._exit(0)  # groups whose other half is gone do not end by themselves


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
