"""How every bench takes time: kernels by Triton's `do_bench`, whole steps by CUDA events;
quantiles said once.

`do_bench_cudagraph` leaves the L2 cache as it is, so a replayed kernel is timed by
`kernel_times(replayed(f))`, which empties it as for a launched one."""

import time

import torch

QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}


def quantiles(times):
    "20th, 50th and 80th percentile of some times, in their unit."
    found = torch.tensor(times, dtype=torch.float64).quantile(
        torch.tensor([*QUANTILES.values()], dtype=torch.float64)
    )
    return dict(zip(QUANTILES, found.tolist()))


def kernel_times(f, seconds=0.06):
    """Quantiles of one call in µs, the L2 cache emptied before each; about so many seconds of
    calls."""
    from triton.testing import do_bench

    times = do_bench(f, warmup=10, rep=int(1000 * seconds), quantiles=[*QUANTILES.values()])
    return {name: 1e3 * t for name, t in zip(QUANTILES, times)}


def replayed(f):
    "The same work as a replayed CUDA graph."
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made in the first calls is not recorded
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def both_launches(f, seconds):
    "Rows of a kernel launched from Python and replayed from a CUDA graph."
    for launch, wrap in (("eager", lambda f: f), ("graph", replayed)):
        yield {"launch": launch} | kernel_times(wrap(f), seconds)


def event_time(f):
    "Milliseconds of one call between two CUDA events."
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def append_times(append, stores, first=70, tokens=1):
    """µs of one of 20 appends of so many tokens in a CUDA graph, to static stores of `first`
    tokens and some more, each of which has appended so before."""
    graph, out, calls = torch.cuda.CUDAGraph(), [], 20
    with torch.cuda.graph(graph):
        for _ in range(calls):
            append()
    for _ in range(40):
        for store in stores:
            store.clock.position.fill_(first)
        out.append(event_time(graph.replay) * 1e3 / calls)
    for store in stores:
        store.sync()
        if store.length != (due := first + calls * tokens):
            raise SystemExit(f"{store.length} tokens after the replay, expected {due}")
    return out[10:]


def step_times(f, least=10, most=100, seconds=0.0, warm=3):
    """Quantiles in ms of a step that runs again and again, as decoding does (no cache is
    emptied): `least` calls, and up to `most` while `seconds` last."""
    for _ in range(warm):
        f()
    torch.cuda.synchronize()
    times, began = [], time.perf_counter()
    while len(times) < least or (time.perf_counter() - began < seconds and len(times) < most):
        times.append(event_time(f))
    return quantiles(times) | {"n": len(times), "unit": "ms"}
