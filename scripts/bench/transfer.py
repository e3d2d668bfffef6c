"""A prompt read in one process, its cache ready in another: run.py transfer [--device cuda]
[--group cpu:gloo,cuda:nccl] --out FILE. Two processes over torch.distributed, on a CPU of one
thread each.

A row is what comes after the prompt is read: the time until the second process holds its cache.
"after" reads the whole prompt first and then sends, "during" sends each layer while the next is
read. "uncompressed" sends keys and values in bfloat16, layer by layer. `overlap` is the share
of the wait of "after" that "during" spares; `whole` is the time from the start of reading. All
rows take turns, so that what else the machine does comes to all.

On a GPU (--device cuda; --shape: a Llama of random weights in bf16 in place of --model) each
row has its `by`: "ipc", a handle of memory on the GPU that both share; "nccl", between two
GPUs, which the second process takes the second of; "host", records in host memory over gloo.
Uncompressed states go by the same ways. Gate: each cache is whole in the second process, and
digests of all tensors of the last are those of the first process's."""

import tempfile
import time
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.generate import LLAMA, TINY, make_model
from bench.timing import quantiles
from eval.windows import add_model, open_model
from plan import Plan

from turboquant_nb.evaluation.score import text_windows
from turboquant_nb.hf import TurboQuantCache, transfer
from turboquant_nb.hf.transfer import receive, send, sending
from transformers.cache_utils import DynamicCache


SHAPES = {"llama-8b": LLAMA, "tiny": TINY}
PATIENCE = 20


def options(p):
    add_model(p)
    p.add_argument("--tokens", type=int, nargs="+", default=[1024])
    p.add_argument("--cache", default="k3v3")
    p.add_argument("--repeat", type=int, default=7)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--shape", choices=SHAPES, help="random weights, and random tokens")
    p.add_argument("--group", default="gloo", help="backend of the group of processes")
    p.add_argument("--by", nargs="+", choices=("host", "ipc", "nccl"), default=["host"])


def ways(a):
    "(cache, way, tokens, by) of each row."
    for n in a.tokens:
        for by in a.by:
            for name, way in (
                ("uncompressed", "after"),
                (a.cache, "after"),
                (a.cache, "during"),
            ):
                yield name, way, n, by


def ready(model):
    "When all that was launched is done."
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sent_exact(x, by):
    "One tensor to rank 1."
    x = x.reshape(-1).view(torch.uint8)
    if by == "ipc":
        dist.send_object_list([transfer._shared(x)], 1, device="cpu")
        dist.recv(torch.empty(1), 1)
    else:
        dist.send(x.cpu() if by == "host" else x, 1)


def came_exact(like, by):
    "One tensor from rank 0."
    out = torch.empty_like(like, device="cpu" if by == "host" else like.device)
    if by == "ipc":
        said = [None]
        dist.recv_object_list(said, 0, device="cpu")
        out.copy_(transfer._opened(said[0], like.device).view(like.dtype).view(like.shape))
        torch.cuda.synchronize()
        dist.send(torch.zeros(1), 0)
        return out
    dist.recv(out.view(-1).view(torch.uint8), 0)
    return out.to(like.device)


def sender(model, ids, name, way, by):
    "What rank 0 does: (when the prompt was read, bytes sent, the cache)."
    if name == "uncompressed":
        cache, total = DynamicCache(config=model.config), 0
        model(ids, past_key_values=cache, logits_to_keep=1)
        read = ready(model)
        for layer in cache.layers:
            x = torch.stack([layer.keys, layer.values]).bfloat16()
            sent_exact(x, by)
            total += x.nbytes
        return read, total, None
    cache = TurboQuantCache(model, name)
    if way == "during":
        with sending(cache, 1, patience=PATIENCE) as link:
            model(ids, past_key_values=cache, logits_to_keep=1)
            read = ready(model)
        if link.way != by:
            raise SystemExit(f"codes must go by {by}, went by {link.way}")
        return read, link.nbytes, cache
    model(ids, past_key_values=cache, logits_to_keep=1)
    return ready(model), send(cache, 1, patience=PATIENCE), cache


def receiver(model, ids, name, way, by):
    "What rank 1 does: (whether all is there, the cache)."
    if name != "uncompressed":
        cache = receive(0, model, patience=PATIENCE)
        ready(model)
        return cache.get_seq_length() == ids.shape[1], cache
    c, cache = model.config, DynamicCache(config=model.config)
    d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    shape = 2, 1, c.num_key_value_heads, ids.shape[1], d
    like = torch.empty(shape, dtype=torch.bfloat16, device=model.device)
    for i in range(c.num_hidden_layers):
        cache.update(*came_exact(like, by).to(model.dtype), i)
    ready(model)
    return cache.get_seq_length() == ids.shape[1], None


def digest(cache):
    "Of all bytes of a cache of ours."
    h = sha256()
    for tensors, _ in cache.states()[0] if cache else ():
        for name in sorted(tensors):
            x = tensors[name].cpu().contiguous()
            h.update(x.view(-1).view(torch.uint8).numpy() if x.numel() else b"")
    return h.hexdigest()


def prompts(a, device):
    "(model, {tokens: ids})."
    if a.shape:
        model = make_model(SHAPES[a.shape])
        g = torch.Generator().manual_seed(0)
        most = model.config.vocab_size
        return model, {n: torch.randint(most, (1, n), generator=g).to(device) for n in a.tokens}
    model, tokenizer, _ = open_model(a)
    texts = {n: text_windows(tokenizer, None, 1, n).to(device) for n in a.tokens}
    return model.to(device), texts


def process(rank, a, folder):
    torch.set_num_threads(1)
    device = torch.device(a.device)
    if a.device == "cuda":
        device = torch.device("cuda", rank if "nccl" in a.by else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(a.group, f"file://{folder}/group", rank=rank, world_size=2)
    plain, chosen = dist.new_group(backend="gloo"), transfer._way
    model, ids = prompts(a, device)
    out, last, work = {}, {}, (sender, receiver)[rank]
    with torch.no_grad():
        for _ in range(a.repeat + 1):
            for name, way, n, by in ways(a):
                transfer._way = (lambda *_: "host") if by == "host" else chosen
                dist.barrier(plain)
                began = ready(model)
                *found, cache = work(model, ids[n], name, way, by)
                dist.barrier(plain)  # the second has it too
                key = name, way, n, by
                out.setdefault(key, []).append((began, found, time.perf_counter()))
                last[key] = cache
                del cache
    digests = {key: digest(cache) for key, cache in last.items()}
    torch.save((out, digests), Path(folder) / f"rank{rank}")
    dist.destroy_process_group()


def rows(found):
    "Times of rank 0; the first of each row warms up."
    waits = {}
    for about, times in found.items():
        waits[about] = quantiles([end - read for _, (read, _), end in times[1:]])
        row = dict(zip(("cache", "way", "tokens", "by"), about)) | waits[about]
        row["whole"] = quantiles([end - began for began, _, end in times[1:]])["p50"]
        if about[1] == "during":
            row["overlap"] = 1 - row["p50"] / waits[about[0], "after", *about[2:]]["p50"]
        yield row | dict(nbytes=times[0][1][1], n=len(times) - 1, unit="s")


def plan(a):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (a, folder), nprocs=2)
        ranks = (torch.load(Path(folder) / f"rank{r}", weights_only=False) for r in range(2))
        (sent, mine), (came, theirs) = ranks
    gate = {"cmd": "every cache was whole in the second process, the last ones bit for bit"}
    gate["passed"] = mine == theirs and all(ok for x in came.values() for _, (ok,), _ in x)
    if a.shape:
        origin, about = {"id": f"random weights, {a.shape}"}, "random tokens"
    else:
        *_, origin = open_model(a)
        about = "turboquant_nb sample text (Moby-Dick, ch. 1-3)"
    return Plan("transfer", gate, rows(sent), {"id": about, "n": a.repeat}, origin)
