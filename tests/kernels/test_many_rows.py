"""The kernel for many query rows of one token against attention on the same codes: in Triton's
interpreter, on a GPU where there is one; and what it takes of GPUs that are not there."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from turboquant_nb.cache.attention import Call, attend
from turboquant_nb.kernels import launch, many_rows
from tests.helpers import ahead_of_time, attended_store, covering_pairs

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(many_rows.triton.language is None, reason="needs Triton")
ROPE = dict(center="pre_rope")
CASES = [
    dict(H=2, G=20),
    dict(H=1, G=33, d=64, **ROPE),
    dict(G=17, H=2, kb=2, vb=4, d=48, **ROPE),
    dict(G=20, H=1, kb=4, vb=2, d=80, dv=48, tile=64, rotary=32, **ROPE),
    dict(G=18, H=1, start=[0, 280], vcenter="prompt_mean", **ROPE),
    dict(G=20, H=1, start=[3, 290], center="none", sinks=0),
    dict(G=40, B=1, T=600, tile=128, win=0, **ROPE),
    dict(G=20, B=1, H=1, T=21),
    dict(G=70, B=1, H=1, rot="transform"),
    dict(G=20, B=1, rot="haar", scale_dtype="float32", table="uniform"),
]


def asked(case, dtype=torch.float16, **rule):
    "A call, and attention to the same codes in fp32."
    q, store, _ = attended_store(**dict(dtype=dtype) | case)
    return Call.of(q, store, backend="many", **rule), attend(q.float(), store, **rule)


@needs_triton
@pytest.mark.parametrize(
    "case, rule",
    covering_pairs(CASES, [dict(), dict(softcap=5.0), dict(scaling=0.3)]),
    ids=str,
)
@torch.no_grad()
def test_output_and_log_sum_are_those_of_the_reference(case, rule):
    """In fp16, whose rounding both have: 1e-3 of the norm. Kills: recent tokens that count
    twice, sinks or padding that count as codes, a half of the channels or a quarter of a tile
    in another's place, the mean at another position, a scale or a maximum left out."""
    call, want = asked(case, **rule)
    got = many_rows.Many().run(call)
    assert got.out.dtype == torch.float16 and got.out.shape == want.out.shape
    assert float((got.out.float() - want.out).norm()) <= 1e-3 * float(want.out.norm())
    top = max(1.0, float(want.lse.abs().max()))
    assert float((got.lse - want.lse).abs().max()) <= 2e-3 * top


@needs_triton
@torch.no_grad()
def test_large_scales_and_states_that_cannot_be_coded():
    """Values a thousand times as large, whose sums no fp16 holds, do as well; a scale of NaN
    gives NaN, not another number."""
    call, _ = asked(dict(G=20, H=1, B=1, sinks=0, win=0, dtype=torch.bfloat16))
    call.store.value.tensors["scale"].mul_(1000)
    got, want = many_rows.Many().run(call).out.float(), attend(call.q.float(), call.store).out
    assert float((got - want).norm()) <= 4e-3 * float(want.norm())
    call.store.value.tensors["scale"].flatten(2)[:, :, 100] = torch.nan
    assert many_rows.Many().run(call).out.isnan().all()


REFUSED = [
    (dict(G=16), {}, "more than 16 query heads"),
    (dict(G=20, n=2), {}, "one query token"),
    (dict(G=20, dtype=torch.float32), {}, "queries are multiplied in 16 bits"),
    (dict(G=20, static=True), {}, "lengths from the host"),
    (dict(G=20, end=[200, 260]), {}, "no ends"),
    (dict(G=20), dict(sliding_window=50), "all codes of a store"),
    (dict(G=20, tile=32), {}, "tiles of 64 to 256"),
    (dict(G=20, kb=1), {}, "2 to 4 bits"),
    (dict(G=20, m=1), {}, "all codes of a store"),
]


@needs_triton
@pytest.mark.parametrize("case, rule, why", REFUSED, ids=str)
@torch.no_grad()
def test_what_it_cannot_serve_it_refuses_with_the_reason(case, rule, why):
    q, store, chunk = attended_store(**dict(dtype=torch.float16) | case)
    call = Call.of(q, store, **{x: chunk.get(x) for x in ("k", "v")}, backend="many", **rule)
    with pytest.raises(ValueError, match=why):
        many_rows.Many().run(call)


@needs_triton
def test_forms_fit_the_shared_memory_that_there_is():
    for rows in (17, 40, 70, 128, 300):
        for half in (16, 32, 64, 128):
            for room in (99 << 10, 163 << 10, 227 << 10):
                form = many_rows.form_of(rows, 256, half, half, room)
                assert form.shared(half, half) <= room and form.Q >= 32


@needs_triton
@pytest.mark.skipif(
    launch.gluon.language is None,
    reason="needs Triton 3.6 for the kernel of tensor cores, of a GPU that is not here",
)
def test_compiled_for_hopper_it_keeps_what_it_needs_in_registers():
    "As at 32 sequences over one prefix: 128 rows, d 128, 3 bits, with a mean before RoPE or not."
    wide, plain, ampere, ada = ahead_of_time(
        {}, dict(pairs=0), dict(capability=80), dict(capability=89), script="aot_many.py"
    )
    for used, room in ((wide, 227), (plain, 227), (ampere, 163), (ada, 99)):
        assert used["shared"] == used["said"] <= room << 10, used
        assert used["spills"] <= 256 and used["stack"] <= 64, used
