"Dispatch: what serves, what refuses, and that the meaning does not depend on it."

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from turboquant_nb import KVStore, Recipe, Spec, TurboQuantCache
from turboquant_nb.cache import attention
from turboquant_nb.cache.attention import Call
from turboquant_nb.cache.budget import TieredStore, ladder
from turboquant_nb.kernels import ops
from turboquant_nb.cache.store import tail_with
from tests.helpers import CUDA, DEVICE, attended_store, needs_triton, random_frame, seeded, tiny

ON_A_CPU = pytest.mark.skipif(CUDA, reason="the stores lie on a CPU here")
# who serves a step on a processor: the compiled kernel, where there is a compiler
ON_CPU = "torch" if ops.BACKENDS["cpu"].library.why else "cpu"


def filled(device="cpu", tiered=False, **kwargs):
    g = seeded()
    kind, recipe = (TieredStore, ladder()) if tiered else (KVStore, Recipe(**kwargs))
    store = kind(recipe, 2, 2, 64, device=device)
    store.append(*(torch.randn(2, 2, 300, 64, generator=g).to(device) for _ in range(2)))
    return store, torch.randn(2, 8, 3, 64, generator=g).to(device)


@pytest.mark.parametrize(
    "call, why",
    [
        (dict(mask=torch.ones(2, 1, 3, 300, dtype=torch.bool)), "not masks"),
        (dict(first=7), "first position 0, not at 7"),
        (dict(causal=False), "causal"),
    ],
)
def test_a_named_backend_gives_its_reason(call, why):
    store, q = filled()
    assert why in ops.explain(q, store, **call)["triton"]
    with pytest.raises(ValueError, match=why):
        ops.attend(q, store, backend="triton", **call)


def test_explain_lists_torch_last_and_always():
    store, q = filled()
    answers = ops.explain(q, store)
    assert [*answers] == ["triton", "flash", "cpu", "blocks", "torch"]
    assert not answers["torch"]
    assert CUDA or "Triton" in answers["triton"] or "cpu" in answers["triton"], answers


def test_unknown_names():
    store, q = filled()
    with pytest.raises(ValueError, match="backend must be 'auto', 'triton', 'flash', "):
        ops.attend(q, store, backend=None)


def test_append_by_a_kernel_that_cannot():
    store, q = filled(value=Spec(bits=2.5))
    with pytest.raises(ValueError, match="cannot serve this store: .*values"):
        ops.append(store, q[:, :2], q[:, :2], backend="triton")
    assert store.length == 300


def close(got, want, limit=1e-5):
    assert (got[0] - want[0]).abs().max() <= limit and (got[1] - want[1]).abs().max() <= limit


# --- long chunks
# -----------------------------------------------------------------------------------

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CHUNKS = [  # of a recipe, a call, where two sequences begin, dtype, tokens of a block
    ("plain", dict(sliding_window=400), (0, 0), F32, 128),
    ("plain", dict(sliding_window=120), (299, 310), BF16, 128),
    ("plain", dict(sliding_window=32), (0, 0), F32, 4096),
    ("mean", dict(sliding_window=20), (0, 130), F32, 128),
    ("qjl", dict(sliding_window=120), (0, 130), F32, 128),
    ("bits", dict(), (299, 310), F32, 128),
    ("exact", dict(sliding_window=20), (299, 310), F32, 128),
    ("exact", dict(scaling=0.3), (0, 0), F16, 4096),
    ("pre_rope", dict(), (299, 310), F32, 128),
    ("pre_rope", dict(sliding_window=400), (0, 130), F32, 128),
]
KINDS = {
    "plain": Recipe(),
    "mean": Recipe(key=Spec(center="fixed")),
    "qjl": Recipe(residual="prod"),
    "bits": Recipe(key=Spec(bits=2.5)),
    "exact": Recipe(sinks=3, recent=100),
    "pre_rope": Recipe(key=Spec(center="pre_rope")),
}


def around(kind):
    "A frame of keys, and frequencies of RoPE where a mean turns."
    if kind != "pre_rope":
        return dict(frame=random_frame(2, 64))
    return dict(frame=random_frame(2, 64, 64), inv_freq=1e4 ** -(torch.arange(32) / 32))


@pytest.mark.parametrize("kind, call, start, dtype, block", CHUNKS)
def test_long_chunks_are_the_reference(kind, call, start, dtype, block, monkeypatch):
    """Blocks joined by their log-sum-exps, over block borders, padding and window borders; rows
    that see nothing give 0 and -inf."""
    monkeypatch.setattr(ops, "BLOCK", 2 * 2 * 64 * block)
    g = seeded()
    new = lambda h, n: torch.randn(2, h, n, 64, generator=g).to(DEVICE, dtype)
    store = KVStore(KINDS[kind], 2, 2, 64, dtype=dtype, device=DEVICE, **around(kind))
    store.set_range(start=torch.tensor(start))
    store.append(new(2, 300) + 3, new(2, 300))
    k, v, q = new(2, 70), new(2, 70), new(8, 70)
    store.append(k, v)
    assert ops.select_backend(Call.of(q, store, k, v, **call)).backend == "flash"
    (out, lse), want = (
        ops.attend(q, store, k, v, **call),
        attention.attend(q, store, k, v, **call),
    )
    limit = {F32: 2e-5, F16: 4e-3, BF16: 2e-2}[dtype]
    assert out.dtype == dtype and lse.dtype == F32
    assert (out - want.out).abs().max() < limit * (1 + want.out.abs().max())
    assert torch.equal(lse.isinf(), want.lse.isinf())
    seen = ~lse.isinf()
    assert (lse - want.lse)[seen].abs().max() < max(1e-4, limit) and not out[~seen].any()


@pytest.mark.parametrize(
    "call, n, why",
    [
        (dict(), 16, "up to 16 tokens"),
        (dict(softcap=20.0), 20, "softcap"),
        (dict(causal=False), 20, "not masks"),
        (dict(mask=torch.ones(2, 1, 20, 320, dtype=torch.bool)), 20, "not masks"),
    ],
)
def test_what_long_chunks_refuse(call, n, why):
    store, _ = filled()
    q, k = torch.randn(2, 8, n, 64), torch.randn(2, 2, n, 64)
    store.append(k, k)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=f"'flash' cannot serve this call: .*{why}"),
    ):
        ops.attend(q, store, k, k, backend="flash", **call)
    with pytest.raises(ValueError, match="whole chunk"):
        ops.attend(torch.randn(2, 8, 20, 64), store, k[:, :, :9], k[:, :, :9], backend="flash")
    k.requires_grad_()
    with pytest.raises(ValueError, match="no gradient|up to 16"):
        ops.attend(q, store, k, k, backend="flash")


def test_an_answer_is_kept_and_given_up_when_it_no_longer_holds(monkeypatch):
    "Per store and question; a tile that moved on or a gradient is another question."
    store, q = filled(tiered=True)
    store.settle((0, 0, 0, 256, 300))
    asked, first = [], ops.BACKENDS["triton"]
    ask = lambda call: asked.append(call) or first.refuses(call)
    monkeypatch.setitem(ops.BACKENDS, "triton", SimpleNamespace(refuses=ask))
    for _ in range(5):
        ops.select_backend(Call.of(q, store))
    assert len(asked) == 1
    ops.select_backend(Call.of(q[:, :, :1], store))
    store.settle((0, 0, 256, 256, 300))
    ops.select_backend(Call.of(q, store))
    ops.select_backend(Call.of(q.clone().requires_grad_(), store))
    assert len(asked) == 4


@ON_A_CPU
@pytest.mark.parametrize(
    "change, served",
    [
        (dict(sliding_window=50, softcap=20.0), ON_CPU),
        (dict(causal=False), ON_CPU),
        (dict(first=7), "torch"),
        (dict(mask=torch.ones(2, 1, 1, 300, dtype=torch.bool)), "torch"),
    ],
)
def test_a_step_on_a_cpu_is_served_by_look_up_or_says_why_not(change, served):
    store, q = filled()
    q = q[:, :, :1]
    assert ops.select_backend(Call.of(q, store, **change)).backend == served
    got, want = ops.attend(q, store, **change), attention.attend(q, store, **change)
    assert torch.allclose(got[0], want[0], atol=1e-5) and torch.allclose(
        got[1], want[1], atol=1e-5
    )
    if served == "torch":
        assert torch.equal(got[0], want[0])
        with pytest.raises(
            ValueError,
            match=(
                "'cpu' cannot serve this call: the look-up knows ranges of positions, not masks"
            ),
        ):
            ops.attend(q, store, backend="cpu", **change)


def in_fp64(q, store, k, v, latent=False, starts=True):
    "Attention of the last queries to what a store holds, in fp64, and its log-sum-exp."
    keys, values = (x.double() for x in store.read())
    keys, values = (torch.cat([keys, values], -1), keys) if latent else (keys, values)
    for held, new in ((keys, k), (values, v)) if k is not None else ():
        held[:, :, -new.shape[2] :] = new
    n, length = q.shape[2], store.length
    at = torch.arange(length, device=q.device)
    last = at[-n:, None]
    seen = (at <= last).expand(store.batch, -1, -1)
    seen = seen & (at >= store.start[:, None, None]) if starts else seen
    groups = q.shape[1] // store.heads
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    scores = (q.double() @ keys.mT * q.shape[3] ** -0.5).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)  # of a query that sees nothing
    return weights @ values, scores.logsumexp(-1)


@torch.no_grad()
# queries, and whether their exact keys and values come along
@pytest.mark.parametrize(
    "latent, n, given",
    (
        (False, 1, False),
        (False, 1, True),
        (False, 5, True),
        (False, 40, True),
        (True, 1, False),
        (True, 40, True),
    ),
)
def test_every_backend_serves_starts_of_sequences_or_says_why_not(latent, n, given):
    """Sequences that begin with the store, late and within the last chunk, and one that is
    empty. Who takes no notice of starts is off by the size of what is right."""
    more = dict(H=1, dv=16, center="none") if latent else dict(d=32)
    starts = [0, 70, 100 - n // 2 - 1, 100]
    _, store, _ = attended_store(B=4, G=2, T=100, n=n, tile=64, start=starts, **more)
    g, chunk = seeded(), {}
    draw = lambda heads, d: torch.randn(4, heads, n, d, generator=g).to(store.device)
    q = draw(store.heads * 2, 48 if latent else 32)
    if given:
        chunk = dict(k=draw(store.heads, q.shape[3]), v=draw(store.heads, 32))
    states = chunk.get("k"), chunk.get("v"), latent
    want, lse = in_fp64(q, store, *states)
    far = lambda x: float((x.double() - want).norm() / want.norm())
    assert far(in_fp64(q, store, *states, starts=False)[0]) > 0.3
    served = set()
    for name in ("auto", *ops.BACKENDS):
        rule = dict(latent=latent, backend=name, **chunk)
        if name != "auto" and ops.BACKENDS[name].refuses(Call.of(q, store, **rule)):
            with pytest.raises(ValueError, match=f"'{name}' cannot serve"):
                ops.attend(q, store, **rule)
            continue
        got = ops.attend(q, store, **rule)
        served.add(name)
        assert far(got.out) < 1e-3, (name, far(got.out))
        assert torch.equal(got.lse.isneginf(), lse.isneginf()), name
        assert float((got.lse.double() - lse).nan_to_num(0, 0, 0).abs().max()) < 1e-3, name
    assert {"auto", "torch"} <= served


@ON_A_CPU
@pytest.mark.parametrize("n, window", ((1, None), (1, 40), (3, None), (3, 290), (3, 20)))
def test_several_stores_are_served_each_by_its_best(n, window):
    "The codes of each by its kernel, what is exact by torch's attention, where there is some."
    store, q = filled(tiered=True)
    q, rule = q[:, :, :n], dict(sliding_window=window)
    assert ops.select_backend(Call.of(q, store)).backend == "exact"
    close(ops.attend(q, store, **rule), attention.attend(q, store, **rule))
    store.settle((0, 0, 128, 256, 300))
    backend = ops.select_backend(Call.of(q, store, **rule)).backend
    assert backend == (ON_CPU if n == 1 and window is None else backend)
    close(ops.attend(q, store, **rule), attention.attend(q, store, **rule))


@ON_A_CPU
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_every_recipe_is_served_on_a_cpu(kind):
    "By look-up where a code has one table; fractions and signs by the reference."
    store = KVStore(KINDS[kind], 2, 2, 64, **around(kind))
    store.append(*torch.randn(2, 2, 2, 600, 64, generator=seeded()))
    q = torch.randn(2, 8, 1, 64, generator=seeded(1))
    served = "torch" if kind in ("qjl", "bits") else ON_CPU
    assert ops.select_backend(Call.of(q, store)).backend == served
    close(ops.attend(q, store), attention.attend(q, store))


@needs_triton
def test_drafts_are_one_call_of_the_kernel(monkeypatch):
    """Each query reads its own recent tokens exactly, in one call for all of them, more than 16
    as well. The mutant is one exact token more."""
    g, calls, n = seeded(1), [], 18
    store = KVStore(Recipe(recent=4), 1, 1, 64, device=DEVICE)
    store.append(*torch.randn(2, 1, 1, 40, 64, generator=g).to(store.device))
    q, k, v = (torch.randn(1, h, n, 64, generator=g).to(store.device) for h in (2, 1, 1))
    tail = tail_with(store, k, v)
    store.append(k, v)
    run = ops.launch.Triton.run
    counted = lambda self, call: calls.append(call) or run(self, call)
    monkeypatch.setattr(ops.launch.Triton, "run", counted)
    got = ops.attend(q, store, tail.key, tail.value, recent=4, backend="triton").out
    right, wrong = (
        attention.attend(q, store, tail.key, tail.value, recent=n).out for n in (4, 5)
    )
    error = lambda x: float((got - x).norm() / x.norm())
    assert len(calls) == 1 and error(right) <= 1e-3 and error(wrong) > 3e-3


class Dense(attention.Backend):
    "Plain attention in fp32 to what the store reads back; the new states exactly."

    name = "dense"

    def refuses(self, call):
        return "a mask is not served" if call.mask is not None else ""

    def run(self, call):
        attention.check_call(call)
        k, v = call.store.read()
        states = [call.store.key.into_frame(k.float()), v.float()]  # as the call's queries are
        for x, new in zip(states, (call.k, call.v)):
            if new is not None:
                x[:, :, x.shape[2] - new.shape[2] :] = new
        at = torch.arange(call.store.offset, call.store.length, device=call.q.device)[None]
        rule, n = call.rule, call.q.shape[2]
        seen = attention.visible(call.store, n, at, rule.causal, rule.sliding_window)
        more = dict(scaling=rule.scaling, softcap=rule.softcap, mask=seen)
        return attention.Answer(*attention.dense_attention(call.q, *states, **more))


@pytest.mark.parametrize("backend", ["dense", "torch"])
def test_a_backend_added_in_one_place_serves_a_whole_model(backend, monkeypatch):
    "A model generates with it, the report names it, and it gives what the reference gives."
    model = tiny()
    model.set_attn_implementation("turboquant")
    added = {"dense": Dense()} if backend == "dense" else {}
    taken = added | {"torch": ops.BACKENDS["torch"]}
    monkeypatch.setattr(ops, "BACKENDS", taken)
    cache = TurboQuantCache(model, "k4v4")
    ids = torch.arange(3, 43)[None]
    model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    report = cache.report()
    assert report["backends"] == {backend: 2 * 11} and report["served"]["codes"] == 22
    q, store = torch.randn(1, 4, 1, 8), cache.coded_layers[0].store
    close(ops.attend(q, store), attention.attend(q, store))


@pytest.mark.parametrize("missing", ["triton", "triton.experimental.gluon"])
def test_kernels_are_imported_without_triton(missing):
    """Every module of the folder, in a process that cannot import it; PyTorch attends, and who
    asks for a kernel is told how to install it."""
    code = f"""
import importlib, pkgutil, sys
class Missing:
    def find_spec(self, name, *rest):
        if name == {missing!r}: raise ImportError(name)
sys.meta_path.insert(0, Missing())
import torch
from turboquant_nb import KVStore, kernels
for x in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module('turboquant_nb.kernels.' + x.name)
store = KVStore('k3v3', 1, 1, 64)
store.append(*torch.randn(2, 1, 1, 20, 64))
q = torch.randn(1, 2, 1, 64)
kernels.ops.attend(q, store)
print(kernels.launch.refuses(kernels.ops.Call.of(q, store)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    told = 'Triton is not installed: pip install "turboquant-nb[triton] @ git+'
    assert done.stdout.startswith(told) == (missing == "triton"), done.stdout
