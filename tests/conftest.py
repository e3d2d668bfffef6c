"""Shared fixtures: one thread for small tensors, seeded generators, and nothing left behind in
torch's global state."""

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        # kernels run in Triton's interpreter; it counts when Triton is imported, by whatever
        # test
        "1"
    )

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path[:0] = [str(SCRIPTS / "tools"), str(SCRIPTS)]
import interpreter

interpreter.quicken()


# Files that take longest, which several processes (pytest-xdist, one file each at a time) begin
# with: no long file is left for the end.
LONGEST = (
    "encode_kernel decode_kernel cells hf hf_graphs store cpu hf_model hf_kernels ops way "
    "broken_off compiled architectures viterbi readme esm vision hf_static golden hf_system "
    "targets blocks apple calibrate bench codebook"
).split()


def pytest_terminal_summary(terminalreporter):
    "How long each of the slowest files took: what LONGEST should hold."
    seconds = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                file = report.nodeid.partition("::")[0]
                seconds[file] = seconds.get(file, 0) + report.duration
    longest = sorted(seconds.items(), key=lambda x: -x[1])[:20]
    terminalreporter.write_line(
        "files: " + ", ".join(f"{file.removeprefix('tests/')} {s:.0f} s" for file, s in longest)
    )


def pytest_collection_modifyitems(items):
    "The longest files first; within a file the order stays."
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


# A test that never runs checks nothing. Where everything of [dev] is installed (CI=true) a test
# may be skipped for want of a GPU, or because what it asks does not exist for its parameter, or
# for want of vLLM, which has an environment of its own; another optional package that is
# missing there is an error, and so is a new reason.
MAY_SKIP = re.compile(
    "GPU|CUDA|no chromium|(torchao|gptqmodel|gguf|vLLM) is not installed|"
    "TURBOQUANT_SLOW|only for some models|not in this "
    "transformers|not a model here|own cache does not work there|no history here"
)


def _not_in_ci(report):
    "A skipped report becomes a failed one, unless its reason is among those above."
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = (
            report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        )
        if not MAY_SKIP.search(reason):
            report.outcome, report.longrepr = (
                "failed",
                "skipped in CI for a reason that is not among MAY_SKIP of conftest.py: "
                f"{reason}",
            )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    _not_in_ci((yield).get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    _not_in_ci((yield).get_result())


@pytest.fixture(autouse=True)
def _global_state():
    "A test may change the default dtype or the global seed; the next one must not see it."
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard():
    """A shell's background jobs ignore Ctrl-C, and so would the programs that tests start and
    interrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one_thread():
    "Small tensors: one thread is faster than two, and several test processes do not fight."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gen():
    "A generator with a fixed seed."
    return torch.Generator().manual_seed(1234)


def _extents(args):
    "Where each tensor among a kernel's arguments begins and ends, by address."
    for x in args:
        if isinstance(x, tuple):
            yield from _extents(x)
        elif hasattr(x, "data_ptr") and x.numel():
            reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
            yield x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


@pytest.fixture(autouse=True, scope="session")
def _accesses_stay_inside():
    """In Triton's interpreter, a kernel that reads or writes beside the tensors it was given
    fails: what memcheck says on a GPU."""
    try:
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
    except ImportError:
        yield
        return
    inside = [np.zeros(0, np.uint64)] * 2
    builder, executor, patch = InterpreterBuilder, GridExecutor, pytest.MonkeyPatch()
    prepare, load, store = (
        executor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def check(what, ptrs, mask):
        at = ptrs.data[mask.data.astype(bool)].astype(np.uint64)
        i = np.maximum(np.searchsorted(inside[0], at, "right"), 1) - 1
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        beside = (at < inside[0][i]) | (at + np.uint64(size) > inside[1][i])
        if beside.any():
            raise IndexError(
                f"{what} of {int(beside.sum())} of {at.size} elements beside every tensor of "
                "the call"
            )

    def prepared(self, *args):
        out = prepare(self, *args)
        extents = np.array(sorted(_extents([*out[0], *out[1].values()])), np.uint64).reshape(
            -1, 2
        )
        inside[:] = extents[:, 0], np.maximum.accumulate(extents[:, 1])
        return out

    def checked_load(self, ptrs, mask, *rest):
        check("load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self, ptrs, value, mask, *rest):
        check("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    patch.setattr(executor, "_init_args_hst", prepared)
    patch.setattr(builder, "create_masked_load", checked_load)
    patch.setattr(builder, "create_masked_store", checked_store)
    yield
    patch.undo()
