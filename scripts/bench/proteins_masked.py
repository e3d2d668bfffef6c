"""All masked marginals of a protein by ESM-2 650M, random weights: passes one by one, passes in
batches, the frozen context eagerly and as one captured graph.

run.py proteins_masked --out FILE [--lengths N ...] [--layers 33] [--small]. `one by one` is a
pass of the whole protein for each residue, `in batches` the same with as many in a batch as
have 16,384 tokens; both are timed on some of the residues and scaled. `frozen` reads the
protein once and asks all masked rows in its context; `graph` replays that. `wildtype` is one
pass. Milliseconds include everything from a string to a table on the device. `speed_up` is
against passes in batches. `--small` is for trying the script without a GPU: two layers, a tape
in place of a graph, times that mean nothing.

Gate, in fp32: the graph, captured on other proteins, gives the eager scores to 1e-3 of the
largest, for exact states and codes; scores of another protein differ by a hundred times
that."""

import time
from functools import partial

import torch
from bench.cases import DEVICE
from plan import Plan
from bench.timing import clock_times, quantiles
from transformers import EsmConfig, EsmForMaskedLM

from turboquant_nb.esm import MASK, RESIDUES, TurboEsm, fingerprint, masked_marginals, tokens
from turboquant_nb.esm.mutations import MaskedRows
from turboquant_nb.esm.transform import RECIPES, SideCode, TransformCode, join_levels
from turboquant_nb.hf.graphs import CudaGraph, Tape


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


def codes(model):
    return {"exact": None} | {f"water{b}": random_code(model, b) for b in (3, 4, 2)}


def distance(model, code, graphs, length=60):
    """How far a replay is from the eager scores, and two proteins from each other, relative to
    the largest score."""
    a, b = protein(length, 1), protein(length, 2)
    with TurboEsm(model, code) as turbo:
        graph = MaskedRows(turbo, length, graphs)
        want = masked_marginals(turbo, a)
        far = [
            (graph(s) - masked_marginals(turbo, s)).abs().max() / want.abs().max()
            for s in (a, b, a)
        ]
        return max(map(float, far)), float(
            (masked_marginals(turbo, b) - want).abs().max() / want.abs().max()
        )


@torch.no_grad()
def rows(a, model, graphs, device):
    def ms(f, repeats, scale=1.0, warm=2):
        times = [1e3 * scale * t for t in clock_times(f, repeats, warm)]
        return quantiles(times) | {"n": repeats, "unit": "ms"}

    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    for length in a.lengths:
        s = protein(length)
        ids, _ = tokens([s], device)
        at = torch.arange(1, length + 1, device=device)

        def passes(size, ids=ids, at=at):
            batch = ids.repeat(size, 1)
            batch[torch.arange(size, device=device), at[:size]] = MASK
            return model(batch).logits

        one = ms(partial(passes, 1), 10, length)
        size = min(length, max(1, 16384 // (length + 2)))
        many = ms(partial(passes, size), 3, length / size, 1)
        base = dict(what="masked marginals", dtype=dtype, length=length, device=device)
        yield base | dict(
            name="one by one", code="exact", speed_up=many["p50"] / one["p50"], **one
        )
        yield base | dict(
            name="in batches",
            code="exact",
            speed_up=1.0,
            note=f"{size} of {length} passes in a batch",
            **many,
        )
        for name, code in codes(model).items():
            with TurboEsm(model, code) as turbo:
                if code is None:
                    wild = ms(partial(masked_marginals, turbo, s, "wildtype"), a.repeats)
                    yield base | dict(
                        name="wildtype", code=name, speed_up=many["p50"] / wild["p50"], **wild
                    )
                eager = ms(partial(masked_marginals, turbo, s), a.repeats)
                held = turbo.report()["nbytes"]
                yield base | dict(
                    name="frozen",
                    code=name,
                    speed_up=many["p50"] / eager["p50"],
                    nbytes=held,
                    **eager,
                )
                began = time.perf_counter()
                graph = MaskedRows(turbo, length, graphs)
                capture = time.perf_counter() - began
                replay = ms(partial(graph, s), 2 * a.repeats)
                far = float(
                    (graph(s) - masked_marginals(turbo, s)).abs().max()
                    / masked_marginals(turbo, s).abs().max()
                )
                yield base | dict(
                    name="graph",
                    code=name,
                    speed_up=many["p50"] / replay["p50"],
                    nbytes=held,
                    capture_ms=1e3 * capture,
                    to_eager=far,
                    **replay,
                )
                del graph


def options(p):
    p.add_argument("--lengths", type=int, nargs="+", default=[300, 1022, 100])
    p.add_argument("--layers", type=int, default=33)
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--small", action="store_true", help="try the script on a CPU")


def plan(a):
    if not a.small and not torch.cuda.is_available():
        raise SystemExit("proteins_masked needs an NVIDIA GPU; --small tries it without")
    device, graphs = ("cpu", Tape) if a.small else ("cuda", CudaGraph)
    model = random_esm(2, 64, 4, device) if a.small else random_esm(a.layers)
    found = {
        name: distance(model, code, graphs)
        for name, code in codes(model).items()
        if name in ("exact", "water3")
    }
    far, apart = max(x for x, _ in found.values()), min(x for _, x in found.values())
    print(found, flush=True)
    gate = {
        "cmd": (
            "fp32: a replayed graph gives the eager scores to 1e-3 of the largest, those of "
            "another protein differ by more than .1"
        ),
        "passed": far <= 1e-3 and apart > 0.1,
        "worst": far,
    }
    if device == "cuda":
        model.to(torch.bfloat16)
    return Plan(
        "esm masked",
        gate,
        rows(a, model, graphs, device),
        {"id": "random proteins", "n": 1},
        {"id": "ESM-2 650M shapes", "revision": "random weights, seed 0"},
    )
