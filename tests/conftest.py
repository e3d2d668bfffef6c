"Shared fixtures: one thread for small tensors, seeded generators, and nothing left behind in torch's global state."
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter; it counts when Triton is imported, by whatever test


@pytest.fixture(autouse=True)
def _global_state():
    "A test may change the default dtype or the global seed; the next one must not see it."
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


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
