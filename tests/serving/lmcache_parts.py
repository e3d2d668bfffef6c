"""Parts of test_lmcache.py that run LMCache itself: lmcache_parts.py FOLDER PART prints RESULT
and a JSON object."""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

LAYERS, HEADS, D = 4, 2, 64


def tier(folder, **options):
    "A tier's entry in LMCache's configuration."
    return {
        "type": "plugin",
        "module_path": "turboquant_nb.serving.lmcache",
        "class_name": "Tier",
        "adapter_params": {"type": "fs", "base_path": str(folder)},
        "serde": {"type": "turboquant_nb"} | options,
    }


def error(a, b):
    "Squares of the difference over those of `a`."
    a, b = a.float(), b.float()
    return float((a - b).square().sum() / a.square().sum())


class Memory:
    "LMCache's memory and a tier."

    def __init__(self, folder, **options):
        spec = json.dumps(tier(folder, **options))
        l2 = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec]))
        l1 = L1ManagerConfig(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name=""))
        self.manager = StorageManager(StorageManagerConfig(l1, EvictionConfig("LRU"), l2))

    def store(self, tensors, folder, files):
        "Write a chunk and wait until the tier has it; its key and layout."
        layout = MemoryLayoutDesc([x.shape for x in tensors], [x.dtype for x in tensors])
        key = ObjectKey(os.urandom(16), "m", ObjectKey.ComputeKVRank(1, 0, 1, 0))
        held = self.manager.reserve_write([key], layout)[key]
        for i, x in enumerate(tensors):
            held.get_tensor(i).copy_(x)
        self.manager.finish_write([key])
        for _ in range(300):
            if len(list(Path(folder).glob("*.data"))) == files:
                break
            time.sleep(0.05)
        time.sleep(0.1)  # the controller lets go of it
        assert self.manager.delete_l1_keys([key]) == (1, 0)
        return key, layout

    def load(self, key, layout):
        "What comes back from the tier; None: a miss."
        task = self.manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys([key], 0, layout)])
        )
        self.manager.wait_prefetch_status(task, 20)
        if not self.manager.query_prefetch_status(task).l2_hit_count:
            return None
        with self.manager.read_prefetched_results([key]) as (held,):
            out = [held.get_tensor(i).clone() for i in range(len(layout.shapes))]
        self.manager.finish_read_prefetched([key])
        return out


def disk(folder):
    "Chunks of every form leave memory for the disk and come back; what is wrong there misses."
    gen, found = torch.Generator().manual_seed(0), {}
    memory, files = Memory(folder, recipe="k3v3", head_size=D), 0
    forms = {
        "split": ([2, LAYERS, 256, HEADS * D], torch.bfloat16),
        "fused": ([1, LAYERS, 256, HEADS * 2 * D], torch.float16),
        "fused3": ([LAYERS, 256, HEADS * 2 * D], torch.bfloat16),
        "fp8": ([LAYERS, 256, HEADS * 2 * D], torch.float8_e4m3fn),
    }
    for name, (shape, dtype) in forms.items():
        x = torch.randn(shape, generator=gen).to(dtype)
        files += 1
        key, layout = memory.store([x], folder, files)
        found[name] = error(x, memory.load(key, layout)[0])
    pages = torch.randint(256, (LAYERS, 256, 200), generator=gen, dtype=torch.uint8)
    x = torch.randn(LAYERS, 256, HEADS * 2 * D, generator=gen).bfloat16()
    key, layout = memory.store([pages, x], folder, files + 1)
    back = memory.load(key, layout)
    found["pages"] = float(not torch.equal(back[0], pages))
    found["beside pages"] = error(x, back[1])
    path = max(Path(folder).glob("*.data"), key=lambda p: p.stat().st_mtime_ns)
    found["bytes"] = path.stat().st_size
    good = path.read_bytes()
    memory.manager.delete_l1_keys([key])
    misses = {}
    for at in (9, len(good) // 2, len(good) - 20):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        misses[f"bit at {at}"] = memory.load(key, layout) is None
    path.write_bytes(good[: len(good) // 2])
    misses["truncated"] = memory.load(key, layout) is None
    path.write_bytes(good)
    for name, options in {
        "recipe": dict(recipe="k3v2", head_size=D),
        "first": dict(recipe="k3v3", head_size=D, first=0),
        "head_size": dict(recipe="k3v3", head_size=D // 2),
    }.items():
        other = Memory(folder, **options)
        misses[name] = other.load(key, layout) is None
        other.manager.close()
    again = memory.load(key, layout)
    misses["none"] = again is not None and torch.equal(again[1], back[1])
    memory.manager.close()
    return found | {"misses": misses}


@contextmanager
def server(folder, **options):
    "A process of LMCache with an empty memory; its address."
    ports = []
    for _ in range(3):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    port, http, metrics = ports
    words = ["server", "--host", "127.0.0.1", "--port", port, "--http-port", http]
    words += ["--l1-size-gb", "0.1", "--no-l1-use-lazy", "--supported-transfer-mode"]
    words += ["engine_driven", "--shm-name", "", "--eviction-policy", "LRU"]
    words += ["--prometheus-port", metrics, "--l2-adapter", json.dumps(tier(folder, **options))]
    start = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    line = [sys.executable, "-c", start, *map(str, words)]
    log = Path(folder) / f"log-{port}"
    with open(log, "w") as out, subprocess.Popen(line, stdout=out, stderr=out) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()[-3000:]
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", http)) == 0:
                        break
                time.sleep(0.1)
            yield f"tcp://127.0.0.1:{port}", log
        finally:
            process.terminate()


class Worker:
    "An engine's side: blocks of 64 tokens, a scheduler that looks up and a worker that copies."

    def __init__(self, url, caches):
        self.context, one = zmq.Context(), ParallelStrategy(False, 1, 0, 1, 1, 1)
        how = dict(mq_timeout=20.0)
        self.scheduler = LMCacheMPSchedulerAdapter([url], self.context, "m", 64, one, **how)
        self.worker = LMCacheMPWorkerAdapter(url, self.context, "m", 64, one, **how)
        self.worker.register_kv_caches(caches, layout_hints={"kv_layout": "HND"})

    def finished(self, futures):
        for _ in range(400):
            self.worker.get_finished(set())
            if not futures:
                return
            time.sleep(0.05)
        raise TimeoutError("LMCache did not answer")

    def store(self, ids, blocks):
        op = LoadStoreOp(ids, [blocks], 0, len(ids))
        self.worker.submit_store_request("a", op, None)
        self.finished(self.worker.store_futures)

    def load(self, ids, blocks):
        "How many tokens were found, and copied to blocks."
        self.scheduler.maybe_submit_lookup_request("b", ids)
        for _ in range(400):
            if (n := self.scheduler.check_lookup_result("b")) is not None:
                break
            time.sleep(0.05)
        if n:
            self.worker.submit_retrieve_request("b", LoadStoreOp(ids, [blocks], 0, n), None)
            self.finished(self.worker.retrieve_futures)
        self.scheduler.end_session("b")
        return n

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()
        self.context.destroy(linger=0)


def process(folder):
    """An engine stores two chunks by a server. Another server finds them on disk and fills
    other blocks; a third with another recipe finds nothing."""
    gen = torch.Generator().manual_seed(0)
    options = dict(recipe="k3v3", head_size=D, rope_theta=1e4)
    names, ids = [f"layer.{i}" for i in range(LAYERS)], list(range(100, 612))
    new = lambda: {n: torch.zeros(24, HEADS, 64, 2 * D).bfloat16() for n in names}
    caches, found = new(), {}
    for x in caches.values():
        x[1:9] = torch.randn(8, HEADS, 64, 2 * D, generator=gen)
    with server(folder, **options) as (url, log):
        engine = Worker(url, caches)
        engine.store(ids, [*range(1, 9)])
        for _ in range(200):
            if len(list(Path(folder).glob("*.data"))) == 2:
                break
            time.sleep(0.05)
        engine.close()
    found["files"] = [p.stat().st_size for p in Path(folder).glob("*.data")]
    for name, more in {"tokens": {}, "another recipe": {"recipe": "k4v2"}}.items():
        back = new()
        with server(folder, **options | more) as (url, log):
            engine = Worker(url, back)
            found[name] = engine.load(ids, [*range(11, 19)])
            engine.close()
            found["log"] = "was written with another recipe" in log.read_text()
        if name == "tokens":
            found["error"] = max(error(caches[n][1:9], back[n][11:19]) for n in names)
    return found


if __name__ == "__main__":
    where, part = sys.argv[1:]
    print("RESULT", json.dumps(globals()[part](where)))
    sys.stdout.flush()
    os._exit(0)  # threads of LMCache may wait for one another
