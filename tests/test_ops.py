"Dispatch: what serves, what refuses, and that the meaning does not depend on it."
import pytest
import torch

from turboquant_nb import attention, ops
from turboquant_nb.quantizer import Recipe, Spec
from turboquant_nb.store import KVStore

CUDA = torch.cuda.is_available()


def filled(device="cpu", **kwargs):
    g = torch.Generator().manual_seed(0)
    store = KVStore(Recipe(**kwargs), 2, 2, 64, device=device)
    store.append(*(torch.randn(2, 2, 300, 64, generator=g).to(device) for _ in range(2)))
    return store, torch.randn(2, 8, 3, 64, generator=g).to(device)


@pytest.mark.parametrize("call", [dict(), dict(window=50), dict(softcap=20.0), dict(causal=False), dict(scaling=0.3)])
def test_auto_is_the_reference_on_a_cpu(call):
    store, q = filled()
    got, want = ops.attend(q, store, **call), attention.attend(q, store, **call)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("call, why", [
    (dict(mask=torch.ones(2, 1, 3, 300, dtype=torch.bool)), "not masks"), (dict(first=7), "first position 0, not at 7"), (dict(causal=False), "causal"),
])
def test_a_named_backend_gives_its_reason(call, why):
    store, q = filled()
    assert not ops.explain(q, store, **call)["triton"][0]
    with pytest.raises(ValueError, match=why):
        ops.attend(q, store, backend="triton", **call)


@pytest.mark.skipif(CUDA, reason="a device could serve")
def test_without_a_device_the_reason_is_about_devices_or_triton():
    store, q = filled()
    served, why = ops.explain(q, store)["triton"]
    assert not served and ("Triton" in why or "CUDA" in why or "cpu" in why), why


def test_explain_lists_torch_last_and_always():
    store, q = filled()
    assert list(ops.explain(q, store)) == ["triton", "torch"] and ops.explain(q, store)["torch"] == (True, "")


@pytest.mark.parametrize("backend", ["cuda", "", None])
def test_unknown_names(backend):
    store, q = filled()
    with pytest.raises(ValueError, match="backend must be 'auto', 'triton', 'torch'"):
        ops.attend(q, store, backend=backend)
    with pytest.raises(ValueError, match="backend must be 'auto'"):
        ops.append(store, q[:, :2], q[:, :2], backend=backend)


@pytest.mark.parametrize("recipe", [dict(), dict(residual="prod"), dict(key=Spec(bits=2.5)), dict(decay=256)])
def test_append_leaves_the_state_of_the_store(recipe):
    (a, _), (b, _) = filled(**recipe), filled(**recipe)
    k, v = torch.randn(2, 2, 70, 64), torch.randn(2, 2, 70, 64)
    a.append(k, v)
    name = ops.append(b, k, v)
    assert name == "torch" and a.length == b.length
    for side in ("key", "value"):
        for n, t in getattr(a, side).tensors.items():
            assert torch.equal(t, getattr(b, side).tensors[n]), n


@pytest.mark.parametrize("recipe, why", [(dict(residual="prod"), "keys"), (dict(value=Spec(bits=2.5)), "values")])
def test_append_by_a_kernel_that_cannot(recipe, why):
    store, q = filled(**recipe)
    with pytest.raises(ValueError, match=f"cannot serve this store: .*{why}"):
        ops.append(store, q[:, :2], q[:, :2], backend="triton")
    assert store.length == 300


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_refused_append_changes_nothing(bad):
    store, q = filled()
    before = {n: t.clone() for n, t in store.key.tensors.items()}
    k = torch.full((2, 2, 5, 64), bad)
    with pytest.raises(ValueError):
        ops.append(store, k, k)
    assert store.length == 300 and all(torch.equal(t, before[n]) for n, t in store.key.tensors.items())


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("call", [dict(), dict(window=50), dict(softcap=20.0)])
def test_triton_agrees_on_a_gpu(call):
    store, q = filled("cuda", key=Spec(center="prompt"))
    assert ops.explain(q, store, **call)["triton"][0]
    got, want = ops.attend(q, store, backend="triton", **call), attention.attend(q, store, **call)
    assert (got[0] - want[0]).norm() <= 1e-3 * want[0].norm()
    assert (got[1] - want[1]).abs().max() < 1e-2
