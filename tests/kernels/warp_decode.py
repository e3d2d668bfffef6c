"""The decode kernel for tensor cores, compiled for sm_90 and run by `warp`. Prints, as JSON
lines, by how much it is off for each case, a JSON object of the command line. A process of its
own, without TRITON_INTERPRET: the interpreter and the compiler exclude each other."""

import inspect
import json
import re
import sys

import numpy as np
import torch

from tests.helpers import random_frame
from tests.kernels import warp
from tests.kernels.aot_decode import compiled
from triton.experimental.gluon._runtime import GluonASTSource

from turboquant_nb.cache.attention import Call
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.kernels import decode, decode_mma, launch
from turboquant_nb.kernels.encode import DeviceProperties, Launch

NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Emulated:
    "A launcher that compiles for a GPU and runs here."

    def __init__(self, kernel, changed):
        self.kernel, self.changed, self.named, self.steps = kernel, changed, None, 0
        self.parameters = inspect.signature(kernel.fn).parameters

    def __call__(self, grid, named, slots, **options):
        constant = [
            n
            for n, p in self.parameters.items()
            if "constexpr" in str(p.annotation) or named.get(n) is None
        ]
        self.named = named
        types, divisible, params, memory = {}, [], [], warp.Memory()
        for name in self.parameters:
            if name in constant:
                continue
            x = named[name]
            if isinstance(x, torch.Tensor):
                types[name] = "*" + NAMES[x.dtype]
                raw = x.detach().view(torch.uint8) if x.is_contiguous() else None
                assert raw is not None, f"{name} is not contiguous"
                params.append(memory.address(raw.reshape(-1).numpy()))
            elif isinstance(x, float):
                types[name] = "fp32"
                params.append(int(np.float32(x).view(np.uint32)))
            else:
                types[name] = "i32"
                params.append(int(x) & 0xFFFFFFFF)
                if x % 16 == 0 and name not in decode_mma._UNSPECIALIZED:
                    divisible.append(name)
        constants = {n: named.get(n) for n in constant}
        options = {k: v for k, v in options.items() if k != "launch_pdl"}
        kernel = compiled(
            self.kernel, constants, 90, types, GluonASTSource, divisible, **options
        )
        programs = grid if isinstance(grid, int) else grid[0]
        params += [0] * 4  # scratch memory that no kernel here uses
        text = self.changed(kernel.asm["ptx"])
        self.steps = warp.run(text, params, programs, memory, kernel.metadata.shared)
        return Launch(None, (programs, 1, 1), (), {}, slots)


def rotated(x, s, shared, rows, after=False):
    "As `decode.rotated_queries`, in PyTorch."
    plain = decode.plain_queries(x.q, s.heads, rows, 1.0)
    plain = plain if x.key_pair is None else plain / x.key_pair
    matrix = x.key_rotation
    matrix = matrix[None].expand(s.heads, -1, -1) if matrix.ndim == 2 else matrix
    return torch.einsum("bhrd,hed->bhre", plain, matrix.float()).contiguous(), None


@torch.no_grad()
def error(
    d=128,
    bits=(3, 3),
    group=4,
    heads=1,
    batch=1,
    tokens=600,
    center="fixed",
    codebook=None,
    splits=1,
    sliding=None,
    softcap=None,
    starts=None,
    recent=16,
    sinks=4,
    early=False,
    pair="frame",
):
    """(largest error of the output, of the log-sum-exp, instructions) of one call. early: with
    a kernel that does not wait for the last piece that was asked for."""
    late = lambda text: re.sub(
        r"(wait_group\s+)(\d+)", lambda m: f"{m[1]}{int(m[2]) + bool(int(m[2]))}", text
    )
    book = {"codebook": codebook} if codebook else {}
    recipe = Recipe(
        Spec(bits=bits[0], center=center, pair_scale=pair, **book),
        Spec(bits=bits[1], **book),
        sinks,
        recent,
    )
    inv = 10000.0 ** (-torch.arange(0, d, 2) / d)
    frame = random_frame(heads, d, d)
    store = KVStore(
        recipe,
        batch,
        heads,
        d,
        d,
        torch.bfloat16,
        torch.device("cpu"),
        inv_freq=inv,
        frame=frame,
    )
    if starts:
        store.set_range(start=torch.tensor(starts))
    g = torch.Generator().manual_seed(1)
    make = lambda *size: torch.randn(*size, generator=g).bfloat16()
    k, v = make(2, batch, heads, tokens, d)
    for i in range(0, tokens, 512):
        store.append(k[:, :, i : i + 512], v[:, :, i : i + 512])
    call = Call.of(
        make(batch, heads * group, 1, d), store, sliding_window=sliding, softcap=softcap
    ).into_frame()
    plan = launch.store_plan(store)
    assert not plan.why and not plan.why_mma, (plan.why, plan.why_mma)
    x = launch.store_operands(
        call, plan.tables, splits, plan.padded, portable=False, angles=plan.angles
    )
    kept = {}
    emulated = Emulated(decode_mma.fragments_kernel, late if early else str)
    decode_mma._mma_launcher = emulated
    decode_mma.rotated_queries = rotated
    decode_mma.device_properties = lambda device: DeviceProperties(4, 232448, (9, 0))
    decode_mma.combine = lambda x, s, shared, parts, fast, pdl: (
        kept.update(parts=parts, fast=fast, s=s) or (None, None, None)
    )
    decode_mma.mma_attention(x)
    parts, n = kept["parts"], emulated.named
    lse, out = parts.lse, parts.out  # [B * H * blocks, splits, Q], [..., d]
    seen = lse > -torch.inf
    top = lse.amax(1, keepdim=True)
    weight = torch.where(seen, (lse - top).exp2(), 0)
    total = weight.sum(1)
    got = torch.where(seen[..., None], out * weight[..., None], 0).sum(1) / total[..., None]
    if not kept["fast"]:
        got = got @ x.value_rotation.float()
    got = got.view(batch, heads, -1, d)[:, :, :group]
    got_lse = (top[:, 0] + total.log2()).view(batch, heads, -1)[:, :, :group]
    # by the codes, in fp64
    keys, values = (t.double() for t in store.read(framed=True))
    q = call.q.double().view(batch, heads, group, d) * n["scaling"]
    scores = (q if x.key_pair is None else q / x.key_pair.double()) @ keys.mT
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    at = torch.arange(tokens)
    edge = min(tokens - n["chunk"], max(n["recent_from"], tokens - n["recent"]))
    first = torch.tensor(starts or [0] * batch)[:, None] + n["sinks"]
    visible = (at >= first) & (at < max(edge, tokens - n["own"]))
    if sliding:
        visible &= at > tokens - 1 - sliding
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    want = scores.softmax(-1) @ values
    want_lse = scores.logsumexp(-1) / np.log(2)
    return (
        float((got - want).abs().max() / want.abs().max()),
        float((got_lse - want_lse).abs().max()),
        emulated.steps,
    )


if __name__ == "__main__":
    for text in sys.argv[1:]:
        case = json.loads(text)
        print(json.dumps({"case": case, "error": error(**case)}), flush=True)
