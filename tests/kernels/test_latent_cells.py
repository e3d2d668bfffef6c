"""The kernels for latents on an engine's blocks against the oracle in fp64: in the interpreter,
or on a GPU with operands in registers too."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from turboquant_nb.cache.attention import Rule
from turboquant_nb.cache.pages import Exact, Recent, Requests, append_slots, attend_cells
from turboquant_nb.kernels import latent_cells
from turboquant_nb.kernels.cell_attention import Launching, Room, decode_cells
from turboquant_nb.kernels.cells import CellPlan, append_cells
from turboquant_nb.kernels.decode import triton
from turboquant_nb.kernels.latent_cells import decode_latents, latent_reason
from turboquant_nb.kernels.latents import Form
from turboquant_nb.kernels.past import past_cells
from turboquant_nb.kernels.work import Workspace
from turboquant_nb.quant.quantizer import Quantizer, Spec

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(triton.language is None, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def made(
    gen, d=48, dr=16, bits=(3, 4), n=64, m=1, heads=4, lengths=(130, 0, 70, 64), dtype=None
):
    "A pool of cells full of random bits with the codes of requests, queries and own states."
    dtype = dtype or torch.float32
    plan = CellPlan(*(Quantizer(Spec(b), x, DEVICE) for b, x in zip(bits, (d, dr))), n)
    need = [-(-x // n) for x in lengths]
    raw = (sum(need) + 1, plan.cell.nbytes + 64)  # blocks at a padded distance
    raw = torch.randint(0, 256, raw, dtype=torch.uint8, generator=gen).to(DEVICE)
    cache = raw[:, : plan.cell.nbytes].unflatten(1, (1, n, plan.cell.bytes_per_token))
    order = torch.randperm(sum(need), generator=gen).split(need)
    table = torch.full((len(lengths), max(need) + 2), 10**6, dtype=torch.int32)
    for row, blocks, length in zip(table, order, lengths):
        row[: len(blocks)] = blocks
        t = torch.arange(length)
        states = (torch.randn(length, 1, x, generator=gen).to(DEVICE) for x in (d, dr))
        append_slots(cache, plan, *states, (row[t // n].long() * n + t % n).to(DEVICE))
    q = torch.randn(len(lengths) * m, heads, d + dr, generator=gen).to(DEVICE, dtype)
    own = [
        torch.randn(len(lengths) * m, 1, x, generator=gen).to(DEVICE, dtype) for x in (d, dr)
    ]
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return plan, cache, Requests(table.to(DEVICE), lengths), q, own


def check(plan, cache, requests, q, exact=None, rule=None, **how):
    """Against the oracle on states in fp32, with a workspace full of NaN: at most three times
    the error of the oracle on states as they are (Triton's interpreter cuts to bf16), and one
    rounding to fp16; who sees nothing gets 0 and -inf. Returns the kernel's output."""
    rule = rule or Rule(scaling=0.15, latent=True)
    starts = torch.arange(len(requests.lengths) + 1) * (len(q) // len(requests.lengths))
    states = exact and exact._replace(k=exact.k.float(), v=exact.v.float())
    want, want_lse = attend_cells(q.float(), cache, plan, requests, starts, states, rule)
    theirs = attend_cells(q, cache, plan, requests, starts, exact, rule)[0].float()
    seen, half = want_lse > -torch.inf, CUDA or q.dtype != torch.float32
    limit = 3 * float((theirs - want).norm()) + (5e-4 if half else 1e-5) * float(want.norm())
    space = Workspace(DEVICE, 10**6)
    space.memory.fill_(torch.nan)
    how = Launching(**how)
    got, lse = decode_latents(q, cache, plan, requests, exact, rule, Room(workspace=space), how)
    assert torch.equal(lse > -torch.inf, seen) and (got[~seen] == 0).all()
    if seen.any():
        assert (got.float() - want)[seen].norm() <= limit
        assert (lse - want_lse)[seen].abs().max() < (3e-3 if half else 1e-4)
    return got


CASES = {
    "heads of one token": (dict(), {}),
    "20 heads": (dict(heads=20), {}),
    "128 heads": (dict(heads=128, lengths=(70,)), {}),
    "512 and 64 channels": (dict(d=512, dr=64, lengths=(100, 3), heads=3), {}),
    "256 and 64, bf16": (dict(d=256, dr=64, lengths=(70,), dtype=torch.bfloat16), {}),
    "fp16": (dict(dtype=torch.float16), {}),
    "512 and 64, bf16, a list of drafts": (
        dict(d=512, dr=64, n=128, m=2, heads=16, lengths=(300, 70), dtype=torch.bfloat16),
        dict(splits=3),
    ),
    "other bits": (dict(bits=(2, 3)), {}),
    "more bits": (dict(bits=(4, 2), d=80), {}),
    "blocks of 128": (dict(n=128, lengths=(300, 1)), {}),
    "blocks of 256": (dict(n=256, lengths=(300,)), {}),
    "drafts": (dict(m=4, lengths=(130, 9, 70)), {}),
    "16 tokens": (dict(m=16, heads=2, lengths=(130, 16)), {}),
    "many splits": (dict(), dict(splits=9)),
    "one split": (dict(), dict(splits=1)),
    "a list": (dict(lengths=(600, 3, 0, 40)), dict(splits=5)),
    "a list of drafts": (dict(m=3, n=128, lengths=(300, 90, 8)), dict(splits=7)),
    "nobody": (dict(lengths=(0, 0)), {}),
}


@pytest.mark.parametrize("own", (True, False), ids=("exact step", "codes alone"))
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name, own, gen):
    of, how = CASES[name]
    if "list" in name:
        how = how | dict(work={})
    *held, own_states = made(gen, **of)
    check(*held, Exact(*own_states) if own else None, **how)


@pytest.mark.parametrize("rule", (dict(sliding_window=40), dict(softcap=2.0)), ids=str)
@pytest.mark.parametrize("work", (None, {}), ids=("splits", "list"))
def test_window_and_cap(rule, work, gen):
    *held, own = made(gen, m=3, lengths=(300, 90, 8))
    check(*held, Exact(*own), Rule(scaling=0.15, latent=True, **rule), work=work)


@pytest.mark.parametrize(
    "m,tokens,sinks,work", ((1, 16, 0, None), (1, 9, 4, {}), (3, 100, 2, {}), (2, 5, 70, None))
)
def test_recent_and_first_tokens(m, tokens, sinks, work, gen):
    "Exact tokens before the step's, and first ones, of which a block may be full."
    plan, cache, requests, q, own = made(gen, m=m, lengths=(190, 64, 3, 150))
    block, longest = 4, max(requests.lengths.tolist())
    rows = torch.randperm(4 * 60, generator=gen).view(4, 60).int()
    states = torch.full((4 * 60, 1, block + sinks, 64), torch.nan)
    for row, length in zip(rows, requests.lengths.tolist()):
        all_states = torch.randn(longest, 64, generator=gen)
        for t in range(max(0, length - m - tokens), length - m):
            states[int(row[t // block]), 0, t % block] = all_states[t]
        last = int(row[max(0, length - m - 1) // block])
        states[last, 0, block:] = all_states[:sinks]
    near = Recent(states.to(DEVICE, q.dtype), rows.to(DEVICE), tokens, sinks)
    got = check(plan, cache, requests, q, Exact(*own, near), work=work)
    rule = Rule(scaling=0.15, latent=True)
    without = decode_latents(q, cache, plan, requests, Exact(*own), rule)[0]
    assert (got - without)[:m].norm() > 1e-2 * got[:m].norm()  # they are read


def test_a_kernel_that_decodes_less_at_once(gen, monkeypatch):
    "Where shared memory is small, a block is taken in more pieces, with a list of work too."
    form = Form(16, 4, 8, 1, 1)
    monkeypatch.setattr(latent_cells, "form_of", lambda *sizes: form)
    *held, own = made(gen, n=128, lengths=(300, 140))
    for work in (None, {}):
        check(*held, Exact(*own), work=work)


def test_memory_of_the_caller(gen):
    "Rows at another distance, and what stands between them stays."
    plan, cache, requests, q, own = made(gen)
    rule = Rule(scaling=0.15, latent=True)
    want, lse = decode_latents(q, cache, plan, requests, Exact(*own), rule)
    wide = torch.full((len(q), 6, 64), torch.nan, device=DEVICE)
    room = Room(wide[:, 1:5, :48], torch.empty_like(lse))
    got, _ = decode_latents(q, cache, plan, requests, Exact(*own), rule, room)
    assert got.data_ptr() == wide[:, 1:5].data_ptr() and torch.equal(got, want)
    assert torch.equal(room.lse, lse) and wide[:, [0, 5]].isnan().all()
    assert wide[..., 48:].isnan().all()


def test_a_wrong_scale_shows(gen):
    "The mutant: scales of rotary parts a tenth larger."
    plan, cache, requests, q, own = made(gen)
    rule = Rule(scaling=0.15, latent=True)
    want = decode_latents(q, cache, plan, requests, Exact(*own), rule)[0]
    plan.views(cache)["value scale"].mul_(1.1)
    other = decode_latents(q, cache, plan, requests, Exact(*own), rule)[0]
    assert (other - want).norm() > 1e-3 * want.norm()


def test_append_and_past(gen):
    "Sides of two sizes: appended as by the oracle, and read as a past."
    plan, _, requests, _, _ = made(gen, d=512, dr=64, lengths=(70,))
    caches = [plan.cell.empty(2, 1, DEVICE).zero_() for _ in range(2)]
    states = [torch.randn(70, 1, d, generator=gen).to(DEVICE) for d in (512, 64)]
    slots = torch.arange(70, device=DEVICE)
    for cache, append in zip(caches, (append_slots, append_cells)):
        append(cache, plan, *states, slots)
    table = torch.arange(2, dtype=torch.int32, device=DEVICE)
    one, two = (plan.read(cache, table, 70) for cache in caches)
    for x, y in zip(one, two):  # a sum in another order may move a value over an edge
        assert (x - y).norm() <= 1e-2 * x.norm()
    out = [torch.full((70, 1, d), torch.nan, device=DEVICE) for d in (512, 64)]
    past_cells(caches[0], plan, table, 70, *out)
    for x, got, q in zip(one, out, (plan.key, plan.value)):
        back = q.rotation.inverse(got)[:, 0]
        assert (back - x[0]).norm() <= 1e-5 * x.norm()


def test_refused(gen):
    plan, cache, requests, q, own = made(gen)
    with pytest.raises(ValueError, match="rule is not latent"):
        decode_latents(q, cache, plan, requests, rule=Rule())
    with pytest.raises(ValueError, match="latent rule are read by another kernel"):
        decode_cells(q, cache, plan, requests, rule=Rule(latent=True))
    with pytest.raises(ValueError, match=r"q must have shape .*, 64\]"):
        decode_latents(q[..., :48], cache, plan, requests)
    with pytest.raises(ValueError, match="1 to 128 query heads"):
        decode_latents(q.repeat(1, 33, 1), cache, plan, requests)
    small = made(gen, n=32, lengths=(9,))[0]
    assert "64, 128 or 256 tokens, got 32" in latent_reason(small)
    few = made(gen, bits=(1, 3), lengths=(9,))[0]
    assert "latents: codes must have 2 to 4 bits" in latent_reason(few)
    centred = CellPlan(plan.key, plan.value, 64, torch.zeros(1, 48, device=DEVICE))
    assert "a centre" in latent_reason(centred)
