"""A prompt read in one process, its cache ready in another: run.py transfer --out FILE. Two
processes of one thread each, on a CPU, over torch.distributed (gloo).

A row is what comes after the prompt is read: the time until the second process holds its cache.
"after" reads the whole prompt first and then sends, "during" sends each layer while the next is
read. "uncompressed" sends keys and values in bfloat16, layer by layer. `overlap` is the share
of the wait of "after" that "during" spares; `whole` is the time from the start of reading. All
rows take turns, so that what else the machine does comes to all."""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.timing import quantiles
from eval.windows import add_model, open_model
from plan import Plan

from turboquant_nb.evaluation.score import text_windows
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.transfer import receive, send, sending
from transformers.cache_utils import DynamicCache


def options(p):
    add_model(p)
    p.add_argument("--tokens", type=int, nargs="+", default=[1024])
    p.add_argument("--cache", default="k3v3")
    p.add_argument("--repeat", type=int, default=7)


def ways(a):
    "(cache, way, tokens) of each row."
    for n in a.tokens:
        yield from (("uncompressed", "after", n), (a.cache, "after", n), (a.cache, "during", n))


def sender(model, ids, name, way):
    "What rank 0 does: (when the prompt was read, bytes sent)."
    if name == "uncompressed":
        cache, total = DynamicCache(config=model.config), 0
        model(ids, past_key_values=cache, logits_to_keep=1)
        read = time.perf_counter()
        for layer in cache.layers:
            x = torch.stack([layer.keys, layer.values]).bfloat16()
            dist.send(x.view(torch.uint8).contiguous(), 1)
            total += x.nbytes
        return read, total
    cache = TurboQuantCache(model, name)
    if way == "during":
        with sending(cache, 1, patience=20) as link:
            model(ids, past_key_values=cache, logits_to_keep=1)
            read = time.perf_counter()
        return read, link.nbytes
    model(ids, past_key_values=cache, logits_to_keep=1)
    return time.perf_counter(), send(cache, 1, patience=20)


def receiver(model, ids, name, way):
    "What rank 1 does: whether all is there."
    if name != "uncompressed":
        return receive(0, model, patience=20).get_seq_length() == ids.shape[1]
    c, cache = model.config, DynamicCache(config=model.config)
    d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    for i in range(c.num_hidden_layers):
        x = torch.empty(2, 1, c.num_key_value_heads, ids.shape[1], d, dtype=torch.bfloat16)
        dist.recv(x.view(torch.uint8), 0)
        cache.update(*x.float(), i)
    return cache.get_seq_length() == ids.shape[1]


def process(rank, a, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    model, tokenizer, _ = open_model(a)
    out, work = {}, (sender, receiver)[rank]
    with torch.no_grad():
        for _ in range(a.repeat + 1):
            for name, way, n in ways(a):
                ids = text_windows(tokenizer, None, 1, n)
                dist.barrier()
                began = time.perf_counter()
                found = work(model, ids, name, way)
                dist.barrier()  # the second has it too
                out.setdefault((name, way, n), []).append((began, found, time.perf_counter()))
    torch.save(out, Path(folder) / f"rank{rank}")


def rows(found):
    "Times of rank 0; the first of each row warms up."
    waits = {}
    for about, times in found.items():
        waits[about] = quantiles([end - read for _, (read, _), end in times[1:]])
        row = dict(zip(("cache", "way", "tokens"), about)) | waits[about]
        row["whole"] = quantiles([end - began for began, _, end in times[1:]])["p50"]
        if about[1] == "during":
            row["overlap"] = 1 - row["p50"] / waits[about[0], "after", about[2]]["p50"]
        yield row | dict(nbytes=times[0][1][1], n=len(times) - 1, unit="s")


def plan(a):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (a, folder), nprocs=2)
        sent, came = (torch.load(Path(folder) / f"rank{r}") for r in range(2))
    gate = {"cmd": "every cache was whole in the second process"}
    gate["passed"] = all(ok for x in came.values() for _, ok, _ in x)
    *_, origin = open_model(a)
    data = {"id": "turboquant_nb sample text (Moby-Dick, ch. 1-3)", "n": a.repeat}
    return Plan("transfer", gate, rows(sent), data, origin)
