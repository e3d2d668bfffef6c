"""Which kernel serves which GPU, what compiles for one that is not there, and what plain
PyTorch needs of a device."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import ahead_of_time, random_frame
from turboquant_nb.cache.attention import Call, attend
from turboquant_nb.cache.store import KVStore
from turboquant_nb.kernels import encode, encode as encode_launch, launch, ops
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

NOTEBOOK = Path(__file__).parents[2] / "nbs" / "reference/kernels_launch.ipynb"
needs_triton = pytest.mark.skipif(
    launch.triton.language is None, reason="Triton is not installed"
)
pytestmark = pytest.mark.usefixtures("one_thread")


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


@needs_triton
@pytest.mark.parametrize("capability, fast", [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_the_kernel_that_a_gpu_gets(gpu, capability, fast):
    """From 8.0 on that for tensor cores; below it the portable one, by itself, with a reason;
    the one that is named does not fall back."""
    device, store = (
        gpu(capability),
        KVStore(Recipe(Spec(3), Spec(3)), 1, 2, 64, dtype=torch.float16),
    )
    if launch.gluon.language is None:
        pytest.skip(
            "needs Triton 3.6 for the kernel of tensor cores, of a GPU that is not here"
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


class NoDouble(TorchDispatchMode):
    "Apple's GPUs have no float64: no operator may take or give one."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            assert not isinstance(x, torch.Tensor) or x.dtype not in (
                torch.float64,
                torch.complex128,
            ), func
        return out


@pytest.mark.parametrize(
    "recipe, dtype",
    [
        ("k3v3", torch.float16),
        (Recipe(Spec(3, center="pre_rope"), Spec(2.5)), torch.bfloat16),
        (Recipe(residual="prod"), torch.float32),
        (Recipe(Spec(3, "haar", scale="unbiased"), Spec(4, codebook="uniform")), torch.float16),
    ],
)
def test_plain_pytorch_needs_no_float64(recipe, dtype):
    """Coding, reading and attention of a prompt and of steps, as on an Apple GPU; shared tables
    are made by a first store, on the CPU. The mutant: a state in float64."""

    def run():
        more = dict(inv_freq=0.5 ** torch.arange(1.0, 17.0), frame=random_frame(2, 32, 32))
        store = KVStore(recipe, 2, 2, 32, dtype=dtype, **more)
        for n in (600, 1, 1, 5):
            k, v = (
                torch.randn(2, 2, n, 32, generator=torch.Generator().manual_seed(n)).to(dtype)
                for _ in "kv"
            )
            store.append(k, v)
            q = torch.ones(2, 4, min(n, 20), 32, dtype=dtype)
            assert (
                attend(q, store)[0].isfinite().all()
                and attend(q, store, k, v)[0].isfinite().all()
            )
        store.crop(3), store.select([1, 0])
        return store.read()[0]

    run()
    with NoDouble():
        k = run()
        with pytest.raises(AssertionError, match="aten"):
            k.double()


def compiled(jobs):
    "{(kernel, capability): what came of it}, from one process that compiles."
    rows = ahead_of_time(*jobs, script="aot_targets.py")
    return {(x["kernel"], x["capability"]): x for x in rows}


def table():
    """{(kernel, capability): does it compile, and fit into the shared memory of a block?} of
    the page."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (text,) = [t for c in cells if "| compiles for |" in (t := "".join(c["source"]))]
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


@needs_triton
@pytest.mark.skipif(
    launch.gluon.language is None,
    reason="needs Triton 3.6 for the kernel of tensor cores, of a GPU that is not here",
)
def test_what_compiles_is_what_the_page_says():
    """All of it with TURBOQUANT_SLOW=1; what a T4 needs always, and the tensor-core kernel for
    each generation, which is not for a T4."""
    said = table()
    assert {t for _, t in said} == {75, 80, 86, 89, 90, 100, 120} and len(said) == 7 * len(
        {k for k, _ in said}
    )
    slow = bool(os.environ.get("TURBOQUANT_SLOW"))
    jobs = (
        list(said)
        if slow
        else [
            *((name, 75) for name in ("decode, portable", "join of parts")),
            *(("decode, tensor cores", target) for target in (75, 80, 89, 90, 100, 120)),
            ("search, step", 120),
        ]
    )
    for job, x in compiled(jobs).items():
        assert x.get("fits", False) == said[job], x
