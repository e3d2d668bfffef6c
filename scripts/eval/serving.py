"""What a served cache gives up, and what a calibration takes back: run.py served --out FILE
--text FILE ... [options of recipes].

Two protocols. `steps`: every token of a window reads itself exactly and all before it as codes,
as an engine's decode steps do. `decode`: the first --prompt tokens come in one chunk, which
attends to itself exactly, and the others are steps; the loss is theirs. By turns: transforms
and means of a calibration (found on other windows), exact recent tokens, exact first tokens.
Beside them stands what `TurboQuantCache` does: the same with the mean of the prompt's own keys
before RoPE (of the whole window's, where there is no prompt). States are fp32, so nothing but
codes differs.

Gate: without codes the same attention gives the model's own losses, and with
`TurboQuantCache`'s recipe the losses of chapter 83's scorer with a cache of that recipe: on a
short piece of text, since codes at an edge flip with the order of sums, and a network carries
that on."""

import math
from functools import lru_cache

import torch
from eval.windows import Windows, add_options
from plan import Plan, must_pass

from turboquant_nb.theory.centre import prompt_mean, shared_cos_sin
from turboquant_nb.calibration.fit import calibrate
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.score import OnePass, score, token_losses
from turboquant_nb.hf import ModelInfo, turboquant_mask
from turboquant_nb.hf.hooks import register
from turboquant_nb.quant.mixed_precision import make_quantizer
from turboquant_nb.quant.quantizer import Spec, decode
from turboquant_nb.quant.recipe import PRESETS, Recipe
from turboquant_nb.theory.rope import apply_cos_sin

CASES = [  # transforms, mean, exact recent tokens, exact first tokens
    (False, "none", 0, 0),
    (True, "none", 0, 0),
    (False, "calibration", 0, 0),
    (True, "calibration", 0, 0),
    (False, "none", 16, 0),
    (False, "none", 0, 4),
    (False, "none", 16, 4),
    (True, "none", 16, 0),
    (False, "calibration", 16, 0),
    (True, "calibration", 16, 0),
    (True, "none", 16, 4),
    (False, "calibration", 16, 4),
    (True, "calibration", 16, 4),
]
CACHES = [
    (False, "pre_rope", 16, 4),
    (False, "pre_rope", 16, 0),
    (False, "pre_rope", 0, 0),
]  # of `TurboQuantCache`, which counts a step's own token among its recent ones, too
PIECE = 96, 64  # tokens of the gate, and of its prompt
how = {}  # what the attention below does


@lru_cache(maxsize=256)
def quantizer(bits, rotation, d, device):
    return make_quantizer(Spec(bits, rotation=rotation), d, device)


def mean_of(layer, key):
    """The mean that keys are coded less: of a calibration, or of the prompt's own keys before
    RoPE."""
    if how["mean"] == "calibration":
        return how["calibration"].centers[layer][:, None].to(key.device)
    if how["mean"] == "none":
        return 0.0
    rows = shared_cos_sin(how["frequencies"][layer], key.shape[3], key.device).reach(
        key.shape[2]
    )[: key.shape[2]]
    n = how["prompt"] or key.shape[2]
    return apply_cos_sin(
        prompt_mean(
            apply_cos_sin(key[:, :, :n].float(), rows[:n], inverse=True), how["first"]
        ).float(),
        rows,
    )


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    softcap=None,
    sliding_window=None,
    **_,
):
    """Exact scores and values for a token itself, recent and first ones and a prompt's own;
    codes for all others it sees."""
    layer, (b, heads, n, d) = module.layer_idx, key.shape
    q = query.view(b, heads, -1, n, d) * scaling
    scores, t = q @ key[:, :, None].mT, torch.arange(n, device=key.device)
    exact = torch.ones(n, n, dtype=torch.bool, device=key.device)
    values = value
    if how["bits"]:
        transform = (
            how["calibration"].transforms[layer].name if how["transforms"] else "hadamard"
        )
        k_side, v_side = (
            quantizer(bits, r, d, key.device)
            for bits, r in zip(how["bits"], (transform, "hadamard"))
        )
        mean = mean_of(layer, key)
        coded = decode(k_side, k_side.encode(key - mean)) + mean
        values = decode(v_side, v_side.encode(value))
        exact = (
            (t[:, None] - t <= how["recent"])
            | (t < how["first"])
            | (t[:, None] < how["prompt"])
        )
        scores = torch.where(exact, scores, q @ coded[:, :, None].mT)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    hidden = (t > t[:, None]) | (t <= t[:, None] - (sliding_window or n + 1))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    out = (weights * exact) @ value[:, :, None] + (weights * ~exact) @ values[:, :, None]
    return out.reshape(b, -1, n, d).transpose(1, 2).contiguous(), None


@torch.no_grad()
def losses(model, ids, prompt):
    "Mean loss of each window, of the tokens after the prompt."
    begin, out = max(1, prompt), []
    for x in ids:
        logits = model(x[None, :-1], use_cache=False, logits_to_keep=len(x) - begin).logits[0]
        out.append(token_losses(logits, x[begin:]).mean())
    return torch.stack(out).cpu()


def gate(model, ids, a, plain):
    "(losses of each window on exact states by protocol, what was compared)."
    how.update(bits=None)
    exact = {
        protocol: losses(model, ids, a.prompt if protocol == "decode" else 0)
        for protocol in plain
    }
    off = max(float((exact[protocol] - plain[protocol]).abs().max()) for protocol in plain)
    piece, prompt = ids[:1, : PIECE[0]], PIECE[1]
    bare = losses(model, piece, prompt)
    transforms, mean, recent, first = CACHES[0]
    how.update(
        bits=PRESETS[a.recipe],
        transforms=transforms,
        mean=mean,
        recent=recent,
        first=first,
        prompt=prompt,
    )
    ours, (k, v) = losses(model, piece, prompt), how["bits"]
    recipe = Recipe(Spec(bits=k, center=mean), Spec(bits=v), sinks=first, recent=recent + 1)
    model.set_attn_implementation("sdpa")
    theirs = score(
        model,
        piece,
        as_candidate(model, recipe, dtype=None),
        "decode",
        prompt,
        backend=OnePass(count=False),
    ).loss.mean(1)
    model.set_attn_implementation("served")
    apart, lost = float((ours - theirs).abs()), float((ours - bare).abs())
    cmd = (
        f"losses on exact states are the model's own to {off:.1e} nats; with codes those of "
        f"TurboQuantCache to {apart:.1e} (codes change {lost:.1e})"
    )
    return exact, {"cmd": cmd, "passed": off < 1e-3 and apart < 2e-3 + lost / 20}


def options(p):
    add_options(p, windows=4)
    p.add_argument("--recipe", default="k3v3", choices=list(PRESETS))
    p.add_argument(
        "--calibrate-windows",
        type=int,
        default=4,
        help="windows that the calibration reads, after those that are scored",
    )
    p.add_argument(
        "--few",
        action="store_true",
        help="only codes alone and with all that is exact, each with and without a calibration",
    )


def rows(a, w, ids, exact):
    todo = [(protocol, "TurboQuantCache", *x) for protocol in exact for x in CACHES]
    todo += [(protocol, "engine", *x) for x in CASES for protocol in exact]
    for protocol, by, *case in todo:
        few = case[2:] in ([0, 0], [16, 4]) and case[:2] != [True, "none"]
        if a.few and not few:
            continue
        given = dict(zip(("transforms", "mean", "recent", "first"), case))
        given["prompt"] = a.prompt if protocol == "decode" else 0
        how.update(given, bits=PRESETS[a.recipe])
        more = losses(w.model, ids, given["prompt"]) - exact[protocol]
        yield dict(
            protocol=protocol,
            by=by,
            recipe=a.recipe,
            percent=100 * (float(more.mean().exp()) - 1),
            stderr=100 * float(more.std()) / len(more) ** 0.5,
            ppl=float(exact[protocol].mean().exp()),
            more=[round(x, 6) for x in more.tolist()],
            n=len(more),
            tokens=a.length,
            unit="% of perplexity",
            **given,
        )


def plan(a):
    scored, a.windows = a.windows, a.windows + a.calibrate_windows
    w = Windows(a)
    ids, rest = w.ids[:scored], w.ids[scored:]
    plain = {"decode": losses(w.model, ids, a.prompt), "steps": losses(w.model, ids, 0)}
    on = lambda f: None if f is None else torch.tensor(f, device=ids.device)
    frequencies = [on(x.inv_freq) for x in ModelInfo(w.model).layers]
    how.update(calibration=calibrate(w.model, rest), frequencies=frequencies)
    register("served", attention, turboquant_mask)
    w.model.set_attn_implementation("served")
    exact, found = gate(w.model, ids, a, plain)
    data = w.data | {"n": scored}
    return Plan("served", must_pass(found), rows(a, w, ids, exact), data, w.origin, seeds=[])
