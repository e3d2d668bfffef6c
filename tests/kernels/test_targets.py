"""Which kernel serves which GPU, what compiles for one that is not there, and what plain
PyTorch needs of a device."""

import re

import pytest
import torch

from tests.helpers import (
    ONE_THREAD,
    SLOW,
    ahead_of_time,
    cells,
    needs_gluon,
    needs_triton,
    source,
)
from turboquant_nb.cache.attention import Call
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.kernels import encode, encode as encode_launch, launch, ops

pytestmark = ONE_THREAD


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes the chooser see a GPU of a compute capability, or of AMD: what it
    asks are properties of the device."""

    def see(capability=(9, 0), hip=None):
        launch._device_reason.cache_clear(), encode.device_refuses.cache_clear()
        monkeypatch.setattr(launch, "is_interpreted", lambda: False)
        monkeypatch.setattr(encode, "is_interpreted", lambda: False)
        found = encode.DeviceProperties(132, 232448, capability if hip is None else ())
        found = dict(cuda=found, cpu=encode.DeviceProperties())
        for module in (launch, encode, encode_launch):
            monkeypatch.setattr(module, "device_properties", lambda x: found[x.type])
        monkeypatch.setattr(torch.version, "hip", hip)
        return torch.device("cuda")

    yield see
    launch._device_reason.cache_clear(), encode.device_refuses.cache_clear()


def test_where_no_kernel_can_run_the_reason_is_that_of_the_one_that_was_asked_for(gpu):
    "Of the portable one the device alone, of whichever serves that for tensor cores first."
    gpu()  # and no interpreter
    store = KVStore(Recipe(Spec(1), Spec(3)), 1, 2, 64, dtype=torch.float16)
    plan, device = launch.store_plan(store), torch.device("cpu")
    absent = "an NVIDIA GPU is needed, the store is on cpu"
    assert launch.select_kernel(plan, device, "portable") == (True, absent)
    why = "codes must have 2 to 4 bits"
    assert launch.select_kernel(plan, device, "auto") == (True, why)
    assert launch.select_kernel(plan, device, "fragments") == (False, why)


@needs_gluon
@pytest.mark.parametrize("capability, fast", [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_the_kernel_that_a_gpu_gets(gpu, capability, fast):
    """From 8.0 on that for tensor cores; below it the portable one, by itself, with a reason;
    the one that is named does not fall back."""
    device, store = (
        gpu(capability),
        KVStore(Recipe(Spec(3), Spec(3)), 1, 2, 64, dtype=torch.float16),
    )
    plan, why = (
        launch.store_plan(store),
        "tensor cores with asynchronous copies need compute capability 8.0",
    )
    assert launch.select_kernel(plan, device, "auto") == (
        not fast,
        "",
    ) and launch.select_kernel(plan, device, "portable") == (True, "")
    assert launch.select_kernel(plan, device, "fragments") == (False, "" if fast else why)
    slow = "" if fast else "bf16 tensor cores need compute capability 8.0"
    assert encode_launch.refuses(store.recipe, 64, dtype=torch.float16, device=device) == slow
    store.device = device  # asking reads nothing else of it
    assert launch.why_portable(store) == ("" if fast else why)
    q = torch.zeros(1, 4, 1, 64, dtype=torch.float16)
    assert not ops.explain(q, store)["triton"]
    choice = ops.select_backend(Call.of(q, store))
    assert choice == ("triton", "" if fast else f"by the portable kernel: {why}")
    assert ops.select_coder(store) == ("triton" if fast else "torch", slow)


@needs_triton
def test_wide_heads_are_coded_and_attended_to_by_kernels(gpu):
    for d in (256, 272, 512):
        store = KVStore(Recipe(Spec(3), Spec(3)), 1, 2, d, dtype=torch.float16)
        launch.store_plan(store)  # tables lie where the store does
        store.device = gpu()
        assert ops.select_coder(store) == ("triton", "")
        q = torch.zeros(1, 4, 1, d, dtype=torch.float16)
        assert ops.select_backend(Call.of(q, store)) == ("triton", "")


@needs_triton
def test_codes_that_tensor_cores_do_not_read(gpu):
    "One bit: the portable kernel on every GPU, and said so."
    device, store = gpu(), KVStore("k1v1", 1, 1, 64)
    launch.store_plan(store)  # tables lie where the store does
    store.device = device
    assert ops.select_backend(Call.of(torch.zeros(1, 1, 1, 64), store)) == (
        "triton",
        "by the portable kernel: codes must have 2 to 4 bits",
    )


@needs_triton
def test_amd_gets_pytorch(gpu):
    "No kernel has run there: `auto` takes none, whoever names one may try the portable one."
    device, store = gpu(hip="7.0"), KVStore("k3v3", 1, 1, 64)
    launch.store_plan(store)
    store.device = device
    q = torch.zeros(1, 1, 1, 64)
    why = "no kernel has run on ROCm yet; backend='triton' tries the portable one"
    assert ops.explain(q, store)["triton"] == why
    assert ops.select_coder(store).backend == "torch"
    assert ops.select_backend(Call.of(q, store)).backend in ("cpu", "torch")
    assert not ops.explain(q, store, backend="triton")["triton"] and launch.select_kernel(
        launch.store_plan(store), device, "auto"
    ) == (True, "")


def compiled(jobs):
    "{(kernel, capability): what came of it}, from one process that compiles."
    rows = ahead_of_time(*jobs, by="kernels.aot_targets")
    return {(x["kernel"], x["capability"]): x for x in rows}


def table():
    """{(kernel, capability): does it compile, and fit into the shared memory of a block?} of
    the page."""
    (text,) = [t for t in map(source, cells("kernels_launch")) if "| compiles for |" in t]
    rows = [
        [x.strip() for x in line.strip("| ").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    columns = [[int(n) for n in re.findall(r"sm_(\d+)", x)] for x in rows[0][1:]]
    return {
        (name, target): answer == "yes"
        for name, *answers in rows[2:]
        for targets, answer in zip(columns, answers, strict=True)
        for target in targets
    }


@needs_gluon
def test_what_compiles_is_what_the_page_says():
    """All of it with TURBOQUANT_SLOW=1; what a T4 needs always, and the tensor-core kernel for
    each generation, which is not for a T4."""
    said = table()
    assert {t for _, t in said} == {75, 80, 86, 89, 90, 100, 120} and len(said) == 7 * len(
        {k for k, _ in said}
    )
    jobs = (
        list(said)
        if SLOW
        else [
            *((name, 75) for name in ("decode, portable", "join of parts")),
            *(("decode, tensor cores", target) for target in (75, 80, 89, 90, 100, 120)),
            ("search, step", 120),
        ]
    )
    for job, x in compiled(jobs).items():
        assert x.get("fits", False) == said[job], x
