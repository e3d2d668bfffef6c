"""Two processes that hold caches on GPUs: transfer_cuda.py FOLDER GROUP GPU GPU. Rank 0
sends to rank 1, is killed in the midst of it, and rank 1 says what it saw."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from turboquant_nb.cache.codec import KVStore
from turboquant_nb.cache.disk import state_of
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.transfer import receive, send, sending

SIZES = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=4, vocab_size=64)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)


def llama(device):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().bfloat16().to(device)


def on_host(states):
    return [({n: t.cpu() for n, t in tensors.items()}, h) for tensors, h in states]


def same(a, b):
    return len(a) == len(b) and all(
        h == g and t.keys() == u.keys() and all(torch.equal(t[k], u[k]) for k in t)
        for (t, h), (u, g) in zip(a, b)
    )


@torch.no_grad()
def main(rank, folder, group, gpus):
    device = torch.device("cuda", gpus[rank])
    torch.cuda.set_device(device)
    dist.init_process_group(group, f"file://{folder}/group", rank=rank, world_size=2)
    model, found, done = llama(device), {}, folder / "done"
    gen = torch.Generator(device).manual_seed(0)
    ids = torch.randint(64, (1, 700), generator=gen, device=device)
    cache = TurboQuantCache(model, "k3v3")
    store = KVStore("k3v2", 1, 2, 64, dtype=torch.bfloat16, device=device)
    store.append(*torch.randn(2, 1, 2, 300, 64, generator=gen, device=device).bfloat16())
    torch.cuda.synchronize()
    if rank == 0:
        with sending(cache, 1, patience=20) as link:
            model(ids, past_key_values=cache, logits_to_keep=1)
        found["way"] = link.way
        send(store, 1, patience=20)
        torch.save([on_host(cache.states()[0]), on_host([state_of(store)])], folder / "sent")
        (folder / "found-0").write_text(json.dumps(found))
        done.touch()
        with sending(TurboQuantCache(model, "k3v3"), 1):
            threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            time.sleep(30)
    got = receive(0, model, patience=20)
    again = receive(0, device=device, patience=20)
    while not done.exists():
        time.sleep(0.01)
    layers, single = torch.load(folder / "sent", weights_only=False)
    found["same"] = same(layers, on_host(got.states()[0]))
    found["store"] = same(single, on_host([state_of(again)]))
    found["on the GPU"] = all(x.store.device == device for x in got.coded_layers)
    more = model(ids[:, :3], past_key_values=got, logits_to_keep=1).logits
    found["goes on"] = bool(more.isfinite().all())
    began = time.monotonic()
    try:
        receive(0, model)
    except Exception as error:
        found["lost"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - began
    (folder / "found-1").write_text(json.dumps(found))
    os._exit(0)  # a group whose other half is gone does not end by itself


if __name__ == "__main__":
    folder, group, *gpus = sys.argv[1:]
    context, about = mp.get_context("spawn"), (Path(folder), group, [*map(int, gpus)])
    sides = [context.Process(target=main, args=(r, *about)) for r in range(2)]
    for side in sides:
        side.start()
    sides[1].join(90)
    for side in sides:
        side.kill()
        side.join()
    sys.exit(not (Path(folder) / "found-1").exists())
