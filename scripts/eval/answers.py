"""How many answers stay right on a coded cache? run.py answers --out FILE [--model M]
[--tasks T ...] [--items N ...] [--length L ...] [--match RE] [--budget B].

Four short tasks whose answers a program can judge: sums of two numbers, a number that stands in
the text and is asked for at its end, an object in JSON that must hold what a sentence says, and
a Python function that is run against checks in a process of its own. Long ones after RULER
(Hsieh et al. 2024, arXiv 2404.06654), in words of our own and with a book as the haystack: a
number among none (`single`) or seven others (`keys`), three numbers of one name (`values`), the
numbers of three names (`queries`), the variables that get one number through a chain of
assignments (`variables`), the three most frequent words of a list (`words`), and others of
`evaluation.ruler`. Every question stands behind a piece of a book, cut so that all prompts of a
task have the same length: then a task is one batch, and the answer is not among the last tokens
that a recipe keeps exact. A prompt is read once and exactly; each cache gets its states except
the last token's, so that every token of an answer, the first one too, is chosen by attention on
codes. Decoding is greedy. Rows hold counts with Wilson's interval at 95 %, how many answers a
cache loses and gains beside the uncompressed one, as `share` the mean share of what was asked
for that an answer has, which is RULER's score, and where one number is asked for its depths in
the text, which are spread evenly.

`--budget` adds a cache of so many bits per value at every length, everything counted: the most
bits, in halves, that four first and 16 recent exact tokens leave. `--after` takes the rows of
a run that was cut off and asks the rest.

Gate: in float32 the last token's logits on an uncompressed cache that was filled in this way
are those of one forward pass."""

import json
import re
import time
from dataclasses import replace
from fractions import Fraction
from itertools import product

import torch
from eval.windows import add_limit, add_match, add_model, open_model
from plan import Plan, earlier, must_pass

from turboquant_nb.cli.plan import CacheSize
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.ruler import NAMES, RULER, Question, mentions, prompts
from turboquant_nb.evaluation.sandbox import program_in, run_program
from turboquant_nb.evaluation.score import Prefill, prefill
from turboquant_nb.evaluation.significance import wilson
from turboquant_nb.hf import ModelInfo, TurboQuantCache
from turboquant_nb.quant.recipe import as_recipe

CITIES = (
    "Oslo Lima Cairo Paris Tokyo Quito Delhi Rome Kyiv Accra Dublin Madrid Vienna Athens "
    "Prague Lisbon"
).split()
FUNCTIONS = (  # what is asked for, and what must hold; `f` is what the model wrote
    ("returns the sum of two numbers a and b", "f(2, 3) == 5 and f(-4, 1) == -3"),
    ("returns the larger of two numbers a and b", "f(2, 3) == 3 and f(7, -1) == 7"),
    ("returns the square of a number x", "f(5) == 25 and f(-3) == 9"),
    ("returns True if the integer n is even, else False", "f(4) is True and f(7) is False"),
    ("returns a string s reversed", "f('abc') == 'cba' and f('') == ''"),
    (
        "returns the number of vowels (a, e, i, o, u) in a lowercase string s",
        "f('banana') == 3 and f('xyz') == 0",
    ),
    ("returns the sum of all numbers in a list x", "f([1, 2, 3]) == 6 and f([]) == 0"),
    ("returns the factorial of a non-negative integer n", "f(0) == 1 and f(5) == 120"),
    ("returns the last element of a list x", "f([1, 2, 9]) == 9 and f(['a']) == 'a'"),
    ("returns a list x sorted from largest to smallest", "list(f([2, 9, 4])) == [9, 4, 2]"),
    ("returns the absolute value of a number x", "f(-3) == 3 and f(4) == 4"),
    (
        "returns True if a string s is a palindrome, else False",
        "f('anna') is True and f('hugo') is False",
    ),
    (
        "returns how many words a string s has, words being separated by spaces",
        "f('one two three') == 3",
    ),
    (
        "returns a temperature given in Celsius c as Fahrenheit",
        "abs(f(100) - 212) < 1e-6 and abs(f(0) - 32) < 1e-6",
    ),
    ("returns the largest number of a list x", "f([3, 8, 1]) == 8 and f([-2, -5]) == -2"),
    (
        "returns a list of the even numbers of a list x, in their order",
        "list(f([1, 2, 3, 4])) == [2, 4]",
    ),
)


def sums(n, g):
    "Sums."
    for _ in range(n):
        a, b = (int(torch.randint(11, 90, (1,), generator=g)) for _ in range(2))
        yield Question(
            f"What is {a} + {b}? Answer with the number only.",
            lambda text, want=a + b: (
                re.findall(r"-?\d+", text.replace(",", ""))[-1:] == [str(want)]
            ),
        )


def facts(n, g):
    "A number after a third of the text."
    for i in range(n):
        code, name = int(torch.randint(10000, 100000, (1,), generator=g)), NAMES[i % len(NAMES)]
        ask = f"What is the pass number of {name}? Answer with the number only."
        yield Question(
            ask,
            mentions([code]),
            ((Fraction(1, 3), f"The pass number of {name} is {code}."),),
            depth=Fraction(1, 3),
        )


def objects(n, g):
    "Objects in JSON."
    for i in range(n):
        name, city, age = (
            NAMES[i % len(NAMES)],
            CITIES[(5 * i) % len(CITIES)],
            int(torch.randint(20, 80, (1,), generator=g)),
        )
        ask = (
            f"{name} is {age} years old and lives in {city}. Write this as one JSON object "
            "with "
            'the keys "name", "age" and "city", and nothing else.'
        )
        yield Question(
            ask, lambda text, want=dict(name=name, age=age, city=city): holds(text, want)
        )


def holds(text, want):
    "Whether the first object in a text is JSON, and says this."
    found = re.search(r"\{.*?\}", text, re.S)
    try:
        got = json.loads(found[0]) if found else None
    except json.JSONDecodeError:
        return False
    return isinstance(got, dict) and {k: str(v) for k, v in got.items()} == {
        k: str(v) for k, v in want.items()
    }


def functions(n, _g):
    "Functions in Python."
    for ask, check in FUNCTIONS[:n]:
        yield Question(
            f"Write a Python function f that {ask}. Write only the code.",
            lambda text, check=check: runs(text, check),
        )


def runs(text, check, seconds=5):
    "Whether what a model wrote defines an f for which `check` holds."
    return run_program(f"{program_in(text)}\n\nassert {check}\n", seconds).passed


SHORT = {
    "arithmetic": (sums, 12),
    "recall": (facts, 16),
    "json": (objects, 48),
    "code": (functions, 96),
}  # questions, most tokens of an answer
TASKS = SHORT | RULER


def budgeted(model, budget, tokens, room, batch, dtype):
    """Recipes with the most bits, in halves, whose cache with `room` for so many tokens takes
    at most `budget` bits for each value of `tokens`, with all that it holds."""
    own = TurboQuantCache(model, "k3v3").recipes
    numbers = sum(x.heads * (x.key_size + x.value_size) for x in ModelInfo(model).layers)
    entries = numbers * tokens * batch
    for bits in (4, 3.5, 3, 2.5, 2, 1.5, 1):
        recipes = [as_recipe(r, bits) for r in own]
        if 8 * CacheSize(model.config, recipes, dtype).bytes(room, batch) <= budget * entries:
            return recipes
    raise SystemExit(f"no cache of {tokens:,} tokens holds {budget:g} bits per value or less")


def caches(model, budget=None, *shape):
    """(name, recipe): presets as this model gets them, what a budget buys for a `shape` as
    `budgeted` takes it, and codes around the same mean with nothing exact but four tokens."""
    presets = {name: as_candidate(model, name).recipe for name in ("k4v4", "k3v3", "k2v2")}
    yield from {"uncompressed": None, **presets}.items()
    if budget is not None:
        yield f"{budget:g} bits in all", budgeted(model, budget, *shape)
    for bits in (4, 3, 2.5, 2, 1.5, 1):
        yield (
            f"{bits} bits, no recent tokens",
            [
                replace(as_recipe(r, bits), recent=0)
                for r in TurboQuantCache(model, "k3v3").recipes
            ],
        )


def read(model, ids, most=1 << 18):
    """`prefill` of some prompts at a time, at most so many tokens, so that a long batch does
    not need the room of all its passes at once."""
    parts = [prefill(model, x) for x in ids.split(max(1, most // ids.shape[1]))]
    states = (
        {
            i: tuple(torch.cat([p.states[i][j] for p in parts]) for j in (0, 1))
            for i in parts[0].states
        }
        if parts[1:]
        else parts[0].states
    )
    return Prefill(states, torch.cat([p.logits for p in parts]))


@torch.no_grad()
def answers(model, ids, cache, most, ends):
    "Greedy answers [n, most] of a cache that holds all tokens but the last."
    out, now, open_ = [], ids[:, -1:], torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(most):
        now = (
            model(now, past_key_values=cache, use_cache=True, logits_to_keep=1)
            .logits[:, -1]
            .argmax(-1, keepdim=True)
        )
        out.append(now)
        open_ &= ~torch.isin(now[:, 0], ends)
        if not open_.any():
            break
    return torch.cat(out, 1)


@torch.no_grad()
def filled_gate(model, ids, cache):
    "Whether an uncompressed cache that was filled gives the logits of one pass."
    want = model(ids[:2], use_cache=False, logits_to_keep=1).logits[:, -1]
    got = model(ids[:, -1:], past_key_values=cache, logits_to_keep=1).logits[:2, -1]
    value = float((got - want).norm() / want.norm())
    return {
        "cmd": "last logits on a filled uncompressed cache against one pass, relative",
        "value": value,
        "limit": 1e-3,
        "passed": value < 1e-3,
    }


def cast(model, dtype):
    "Weights to another dtype; frequencies of RoPE stay as they are."
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def options(p):
    add_model(p)
    p.add_argument(
        "--tasks",
        nargs="+",
        default=list(SHORT),
        choices=TASKS,
        help="the four short ones unless others are named",
    )
    p.add_argument(
        "--items",
        type=int,
        nargs="+",
        default=[16],
        help="questions of a task, at most 16 of code; several: for each length",
    )
    p.add_argument("--length", type=int, nargs="+", default=[256], help="tokens of a prompt")
    add_match(p)
    p.add_argument("--budget", type=float, help="also a cache of so many bits per value in all")
    p.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of weights and states, after the gate",
    )
    p.add_argument(
        "--after",
        "--resume",
        help="a file of this script that was cut off: its rows are taken as they are",
    )
    add_limit(p)


class Exam:
    "A model that is asked, and what it answered before."

    def __init__(self, a):
        self.model, self.tokenizer, self.origin = open_model(a)
        own = self.model.generation_config.eos_token_id
        own = own if isinstance(own, list) else [own]
        self.ends = torch.tensor([self.tokenizer.eos_token_id, *own], device=self.model.device)
        self.dtype, self.before = getattr(torch, a.dtype), earlier(a)
        self.known = {(r["task"], r["tokens"], r["cache"], r["n"]): r for r in self.before}

    def prompts(self, questions, length):
        return prompts(self.tokenizer, questions, length).to(self.model.device)

    def gate(self, ids):
        "On the first questions; then weights get their dtype."
        few = ids[:2, -4096:]  # scores of a whole pass take 4 bytes a head and pair of tokens
        cache = prefill(self.model, few[:, :-1]).fill(exact_cache(self.model))
        gate = must_pass(filled_gate(self.model, few, cache))
        cast(self.model, self.dtype)
        return gate

    def texts(self, ids, start, recipe, most):
        "(answers, report) of one cache."
        room = ids.shape[1] + most
        new = exact_cache(self.model)
        if recipe:
            new = TurboQuantCache(self.model, recipe, max_length=room, graphs=False)
        cache = start.fill(new)
        self.model.set_attn_implementation("turboquant" if recipe else "sdpa")
        out = answers(self.model, ids, cache, most, self.ends).tolist()
        self.model.set_attn_implementation("sdpa")
        ends = self.ends.tolist()
        cut = [
            row[: next((i for i, t in enumerate(row) if t in ends), len(row))] for row in out
        ]
        bits = 8.0 * self.model.dtype.itemsize
        report = cache.report() if recipe else dict(bits_per_value=bits, recipe=None)
        return [self.tokenizer.decode(x, skip_special_tokens=True) for x in cut], report


def exact_cache(model):
    return as_candidate(model, "dense", dtype=None).new()


def judged(questions, texts, exact):
    "Counts of some answers beside the uncompressed cache's, which are right where `exact` is."
    shares = [float(q.judge(text)) for q, text in zip(questions, texts)]
    right = [x == 1 for x in shares]
    low, high = wilson(sum(right), len(texts))
    pairs = list(zip(right, exact or right))
    row = dict(
        right=sum(right),
        n=len(texts),
        low=low,
        high=high,
        lost=sum(b and not x for x, b in pairs),
        gained=sum(x and not b for x, b in pairs),
        share=sum(shares) / len(shares),
        first_answer=texts[0][:120],
        each="".join(map(str, map(int, right))),
        unit="answers",
    )
    depths = [q.depth for q in questions]
    return row | ({"depths": [*map(float, depths)]} if depths[0] is not None else {})


def asked(a, exam, task, length, questions):
    "Rows of one task at one length."
    most = TASKS[task][1]
    shape = length, length + most, len(questions), exam.dtype
    wanted = {
        name: r
        for name, r in caches(exam.model, a.budget, *shape)
        if r is None or re.search(a.match, name) or "in all" in name
    }
    old = {name: exam.known.get((task, length, name, len(questions))) for name in wanted}
    if all(old.values()):
        return
    ids = exam.prompts(questions, length)
    start, exact = read(exam.model, ids[:, :-1]), None
    for name, recipe in wanted.items():
        row, at = old[name], time.time()
        if not row:
            texts, report = exam.texts(ids, start, recipe, most)
            row = judged(questions, texts, exact)
            row |= dict(task=task, cache=name, tokens=length, dtype=a.dtype)
            row |= dict(bits=report["bits_per_value"], recipe=report["recipe"])
            yield row | dict(seconds=round(time.time() - at, 2))
        exact = exact or [x == "1" for x in row["each"]]


def plan(a):
    if len(a.items) not in (1, len(a.length)):
        raise SystemExit(
            f"--items must be one number or one for each length, got {len(a.items)} for "
            f"{len(a.length)}"
        )
    exam, items = Exam(a), a.items * len(a.length) if len(a.items) == 1 else a.items
    draw = lambda task, n: list(TASKS[task][0](n, torch.Generator().manual_seed(0)))
    jobs = list(product(zip(a.length, items), a.tasks))
    (length, n), task = jobs[0]
    gate = exam.gate(exam.prompts(draw(task, n), length))
    rows = (
        row for (length, n), task in jobs for row in asked(a, exam, task, length, draw(task, n))
    )
    data = {"id": "questions of this script behind pieces of Moby-Dick", "n": max(a.items)}
    return Plan("answers", gate, rows, data, exam.origin, before=exam.before)
