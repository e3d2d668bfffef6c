"""A prompt read in one process, its cache ready in another: run.py transfer --out FILE. Two
processes of one thread each, on a CPU, over torch.distributed (gloo).

A row is the time from a common start until the second process holds the cache: "after" reads
the whole prompt first and then sends, "during" sends each layer while the next is read.
"uncompressed" sends keys and values in bfloat16, layer after layer. "read
only" is the prompt alone. `overlap` is the share of the sending that reading hides."""

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
    p.add_argument("--tokens", type=int, nargs="+", default=[512, 1024])
    p.add_argument("--caches", nargs="+", default=["uncompressed", "k3v3"])
    p.add_argument("--repeat", type=int, default=5)


def sender(model, ids, name, way):
    "What rank 0 does between start and end: bytes sent."
    if name == "uncompressed":
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, logits_to_keep=1)
        if way == "read only":
            return 0
        total = 0
        for layer in cache.layers:
            x = torch.stack([layer.keys, layer.values]).bfloat16()
            dist.send(x.view(torch.uint8).contiguous(), 1)
            total += x.nbytes
        return total
    cache = TurboQuantCache(model, name)
    if way == "during":
        with sending(cache, 1, patience=20) as link:
            model(ids, past_key_values=cache, logits_to_keep=1)
        return link.nbytes
    model(ids, past_key_values=cache, logits_to_keep=1)
    return send(cache, 1, patience=20) if way == "after" else 0


def receiver(model, ids, name, way):
    "What rank 1 does: whether all is there."
    if way == "read only":
        return True
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
    out, work = [], (sender, receiver)[rank]
    with torch.no_grad():
        for n in a.tokens:
            ids = text_windows(tokenizer, None, 1, n)
            for name in a.caches:
                ways = ("read only", "after") + ("during",) * (name != "uncompressed")
                for way in ways:
                    times, size = [], 0
                    for i in range(a.repeat + 1):
                        dist.barrier()
                        began = time.perf_counter()
                        size = work(model, ids, name, way)
                        dist.barrier()  # the second has it too
                        times += [time.perf_counter() - began] * (i > 0)
                    out.append((dict(cache=name, way=way, tokens=n), times, size))
    torch.save(out, Path(folder) / f"rank{rank}")


def rows(found):
    "Times of rank 0, and what they hide."
    p50 = {(*about.values(),): quantiles(times)["p50"] for about, times, _ in found}
    for about, times, size in found:
        row = about | quantiles(times) | dict(n=len(times), unit="s", nbytes=size)
        name, way, n = about.values()
        if way == "during":
            alone, after = p50[name, "read only", n], p50[name, "after", n]
            row["overlap"] = (after - p50[name, way, n]) / (after - alone)
        yield row


def plan(a):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (a, folder), nprocs=2)
        sent, came = (torch.load(Path(folder) / f"rank{r}") for r in range(2))
    gate = {"cmd": "every cache was whole in the second process"}
    gate["passed"] = all(ok for _, _, ok in came)
    *_, origin = open_model(a)
    data = {"id": "turboquant_nb sample text (Moby-Dick, ch. 1-3)", "n": a.repeat}
    return Plan("transfer", gate, rows(sent), data, origin)
