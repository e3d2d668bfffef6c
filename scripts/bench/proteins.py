"""Memory and time of ESM-2 650M on compressed states, random weights: run.py proteins --out
FILE [--layers 33].

Times and bytes do not depend on the values of weights, except that codes of random transforms
are as good as any. Prefill is compared with the original model's; decode with the same model on
exact states in the same dtype; variants with passes over the whole protein, one per residue."""

from functools import partial

import torch
import torch.nn.functional as F
from bench.cases import CASES, DEVICE
from plan import Plan, earlier
from bench.timing import replayed, step_times
from transformers import EsmConfig, EsmForMaskedLM

from turboquant_nb.kernels import ops
from turboquant_nb.esm import MASK, RESIDUES, TurboEsm, fingerprint, masked_marginals, tokens
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.cache.store import KVStore
from turboquant_nb.esm.transform import RECIPES, SideCode, TransformCode, join_levels


def random_esm(layers, width=1280, heads=20, device=DEVICE):
    "ESM-2 of these shapes with random weights."
    config = EsmConfig(
        vocab_size=33,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        pad_token_id=1,
        mask_token_id=32,
        token_dropout=True,
        position_embedding_type="rotary",
        max_position_embeddings=1026,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return EsmForMaskedLM(config).eval()


def random_code(model, bits, spread=2, pre_rope=True, seed=0):
    """A code of the model's shape with random transforms and tables, `bits` on average, from
    bits - spread to bits + spread."""
    c, g = model.config, torch.Generator().manual_seed(seed)
    shape = c.num_hidden_layers, c.num_attention_heads, c.hidden_size // c.num_attention_heads

    def side(bits, pre_rope):
        n = shape[0] * shape[1] * shape[2]
        more = torch.randint(
            -min(spread, bits - 1), min(spread, bits - 1) + 1, (n // 2,), generator=g
        )
        flat = torch.cat([bits + more, bits - more])[torch.randperm(n, generator=g)].to(
            torch.uint8
        )
        into = torch.linalg.qr(torch.randn(*shape[:2], shape[2], shape[2], generator=g))[0]
        count = {b: int((flat == b).sum()) for b in flat.unique().tolist()}
        levels = {b: torch.randn(n, 2**b, generator=g).sort(1).values for b, n in count.items()}
        freq = model.esm.rotary_embeddings.inv_freq.float().cpu() if pre_rope else None
        return SideCode(
            torch.zeros(shape),
            into,
            into.transpose(-1, -2).contiguous(),
            flat.view(shape),
            join_levels(flat, levels),
            freq,
        )

    k, v = bits if isinstance(bits, tuple) else (bits, bits)
    header = {"fingerprint": fingerprint(model.esm)}
    return TransformCode(
        side(k, pre_rope),
        side(v, False),
        RECIPES["water3"],
        header,
        torch.zeros(1, dtype=torch.long),
    ).to(model.device)


def protein(n, seed=0):
    return "".join(
        RESIDUES[i]
        for i in torch.randint(
            0, 20, (n,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
    )


PLAIN = {
    f"plain {b} bits": Recipe(Spec(bits=b), Spec(bits=b), sinks=0, recent=0) for b in (4, 3, 2)
}


def codes(model):
    shapes = {"turboesm": random_code(model, (4, 3), 0, False)} | {
        f"water{b}": random_code(model, b) for b in (4, 3, 2)
    }
    return {"exact": None} | shapes | PLAIN | {"k3v3": "k3v3"}


def gate(model, use):
    """Prefill gives the model's bits; decode on exact states gives one masked pass; kernels and
    torch agree on one layer."""
    ids, mask = tokens([protein(60), protein(41, 1)], DEVICE)
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
    equal = []
    for code in use.values():
        with TurboEsm(model, code) as turbo:
            equal.append(torch.equal(turbo.prefill(ids, mask).logits, want))
            turbo.decode(ids[:, 1:2])
    x = torch.randn(3, 1, 20, 300, 64, device=DEVICE, dtype=torch.bfloat16)
    store = KVStore(
        PLAIN["plain 3 bits"], 1, heads=20, d_key=64, dtype=torch.bfloat16, device=DEVICE
    )
    ops.append(store, x[1], x[2])
    q = x[0][:, :, :1]
    k, v = (t.float() for t in store.read())
    far = (
        (
            ops.attend(q, store, scaling=0.125)[0].float()
            - F.scaled_dot_product_attention(q.float(), k, v, scale=0.125)
        )
        .abs()
        .max()
        .item()
    )
    return {
        "cmd": (
            "prefill bit-equal for every code; attention on 3-bit codes against dense "
            "attention on what they stand for <= 1e-2 (bf16)"
        ),
        "passed": all(equal) and far <= 1e-2,
        "worst": far,
    }


def memory(model, use, dtype, length=1024):
    ids, _ = tokens([protein(length - 2)], DEVICE)
    for name, code in use.items():
        with TurboEsm(model, code, max_length=length) as turbo:
            turbo.prefill(ids)
            r = turbo.report()
        fp32 = 8 * turbo.shape[0] * turbo.shape[1] * turbo.shape[2] * length
        yield dict(what="memory", name=name, fp32=fp32, **r)


def prefill(model, use, dtype):
    for t in CASES["proteins, prefill"]:
        ids, _ = tokens([protein(t - 2)], DEVICE)
        with torch.no_grad():
            base = step_times(partial(model, ids), 12)
        yield dict(what="prefill", name="original", dtype=dtype, tokens=t, **base)
        for name in ("exact", "turboesm", "water3", "plain 3 bits"):
            with TurboEsm(model, use[name]) as turbo:
                yield dict(
                    what="prefill",
                    name=name,
                    dtype=dtype,
                    tokens=t,
                    **step_times(partial(turbo.prefill, ids), 12),
                )


def decode(model, use, dtype):
    for t in CASES["proteins, decode"]:
        ids, _ = tokens([protein(t - 2)], DEVICE)
        for name in ("exact", "water3", "plain 3 bits"):
            with TurboEsm(model, use[name], max_length=1100) as turbo:
                turbo.prefill(ids)
                yield dict(
                    what="decode step",
                    name=name,
                    dtype=dtype,
                    tokens=t,
                    **step_times(partial(turbo.decode, ids[:, 1:2])),
                )


def attention(model, use, dtype):
    "One layer's decode attention, 20 heads of 64, replayed from graphs."
    for batch in (1, 16, 128):
        for t in (256, 1024):
            q = torch.randn(batch, 20, 1, 64, device=DEVICE, dtype=torch.bfloat16)
            k, v = torch.randn(2, batch, 20, t, 64, device=DEVICE, dtype=torch.bfloat16)
            dense = replayed(partial(F.scaled_dot_product_attention, q, k, v, scale=0.125))
            yield dict(
                what="attention",
                name="sdpa bf16",
                batch=batch,
                tokens=t,
                **step_times(dense, 12),
            )
            for name, recipe in PLAIN.items():
                store = KVStore(
                    recipe,
                    batch,
                    heads=20,
                    d_key=64,
                    dtype=torch.bfloat16,
                    device=DEVICE,
                    max_length=t,
                )
                ops.append(store, k, v)
                try:
                    f = replayed(partial(ops.attend, q, store, None, None, 0.125))
                except Exception as error:
                    yield dict(
                        what="attention",
                        name=name,
                        batch=batch,
                        tokens=t,
                        failed=f"{type(error).__name__}: {error}"[:200],
                    )
                    continue
                yield dict(
                    what="attention", name=name, batch=batch, tokens=t, **step_times(f, 12)
                )


def variants(model, use, dtype):
    for length in CASES["proteins, variants"]:
        s = protein(length)
        ids, _ = tokens([s], DEVICE)
        at = torch.arange(1, length + 1, device=DEVICE)
        size = min(length, max(1, 16384 // (length + 2)))
        batch = ids.repeat(size, 1)
        batch[torch.arange(size), at[:size]] = MASK
        with torch.no_grad():
            one = step_times(partial(model, batch), 3, warm=1)
        exact = {p: one[p] * length / size for p in ("p20", "p50", "p80")}
        yield dict(
            what="variants",
            name="exact passes",
            dtype=dtype,
            length=length,
            **exact,
            n=3,
            unit="ms",
            note=f"{size} of {length} passes timed",
        )
        for name in ("exact", "water3", "plain 3 bits"):
            with TurboEsm(model, use[name]) as turbo:
                time = step_times(partial(masked_marginals, turbo, s), 5, warm=2)
                yield dict(
                    what="variants",
                    name=f"frozen, {name}",
                    dtype=dtype,
                    length=length,
                    speed_up=exact["p50"] / time["p50"],
                    nbytes=turbo.report()["nbytes"],
                    **time,
                )


STEPS = {
    "memory": memory,
    "prefill": prefill,
    "variants": variants,
    "prefill bf16": prefill,
    "attention": attention,
    "decode": decode,
}


def options(p):
    p.add_argument("--layers", type=int, default=33)
    p.add_argument("--after", help="a file of this bench: its rows are kept, with their commit")
    p.add_argument(
        "--only", nargs="*", choices=[*STEPS], default=[*STEPS], help="what to measure"
    )


def rows(model, only):
    for dtype, steps in (
        ("float32", ("memory", "prefill")),
        ("bfloat16", ("variants", "prefill bf16", "attention", "decode")),
    ):
        model.to(getattr(torch, dtype))
        use = codes(model)
        for step in steps:
            for row in STEPS[step](model, use, dtype) if step in only else ():
                yield {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}


def plan(a):
    model = random_esm(a.layers)
    made = {"id": "ESM-2 650M shapes", "revision": "random weights, seed 0"}
    return Plan(
        "esm bench",
        gate(model, codes(model)),
        rows(model, a.only),
        {"id": "random proteins", "n": 1},
        made,
        before=earlier(a),
    )
