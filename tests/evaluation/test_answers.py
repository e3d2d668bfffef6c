"The scripts that judge answers and count planted keys: judges, limits, intervals, theory."

import math
import re
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turboquant_nb.evaluation.models import load_model, sample_text
from turboquant_nb.evaluation.ruler import message
from turboquant_nb.hf import TurboQuantCache

answers = pytest.importorskip("eval.answers")
retrieval = pytest.importorskip("eval.retrieval")


@pytest.mark.parametrize(
    "text, right",
    [
        ("```python\ndef f(a, b):\n    return a + b\n```", True),
        ("def f(a, b):\n    return a + b", True),
        ("```\ndef f(a, b):\n    return a + b", True),
        ("def f(a, b):\n    return a - b", False),
        ("f = 3", False),
        ("This is how one adds.", False),
        ("def f(a, b):\n    while True:\n        pass", False),
        ("x = bytearray(1 << 30)\ndef f(a, b):\n    return a + b", False),
        (
            "open('/tmp/x' if False else 'big', 'wb').write(b'0' * (1 << 22))\ndef f(a, "
            "b):\n    return a + b",
            False,
        ),
        ("import os\nos._exit(3)", False),
        ("raise SystemExit(1)", False),
    ],
)
def test_code_is_run_with_limits(text, right):
    assert answers.runs(text, "f(2, 3) == 5", seconds=1) is right


def test_written_functions_can_be_right():
    """Every check of the list holds for some function: an item that cannot be solved would
    count as lost everywhere."""
    solved = [
        "a + b",
        "max(a, b)",
        "x * x",
        "n % 2 == 0",
        "s[::-1]",
        "sum(c in 'aeiou' for c in s)",
        "sum(x)",
        "1 if n == 0 else n * f(n - 1)",
        "x[-1]",
        "sorted(x)[::-1]",
        "abs(x)",
        "s == s[::-1]",
        "len(s.split())",
        "c * 9 / 5 + 32",
        "max(x)",
        "[y for y in x if y % 2 == 0]",
    ]
    names = [
        "a, b",
        "a, b",
        "x",
        "n",
        "s",
        "s",
        "x",
        "n",
        "x",
        "x",
        "x",
        "s",
        "s",
        "c",
        "x",
        "x",
    ]
    for (ask, check), body, args in zip(answers.FUNCTIONS, solved, names, strict=True):
        space = {}
        exec(f"def f({args}):\n    return {body}", space)
        assert eval(check, space), ask
        exec(f"def f({args}):\n    return None", space)
        with (
            pytest.raises(TypeError)
            if "list(" in check or "abs(" in check
            else pytest.raises(AssertionError)
        ):
            assert eval(check, space)


@pytest.mark.parametrize(
    "text, right",
    [
        ('{"name": "Anna", "age": 31, "city": "Oslo"}', True),
        ('Sure:\n```json\n{"name": "Anna", "age": "31", "city": "Oslo"}\n```', True),
        ('{"name": "Anna", "age": 31}', False),
        ('{"name": "Anna", "age": 31, "city": "Oslo", "x": 1}', False),
        ("{'name': 'Anna'}", False),
        ("no object", False),
        ("[1]", False),
    ],
)
def test_objects(text, right):
    assert answers.holds(text, dict(name="Anna", age=31, city="Oslo")) is right


def test_judges():
    g = torch.Generator().manual_seed(0)
    (question,) = answers.sums(1, g)
    a, b = (int(x) for x in question.ask.removeprefix("What is ").split("?")[0].split(" + "))
    assert (
        question.judge(f"{a} + {b} = {a + b}.")
        and not question.judge(f"{a + b + 1}")
        and not question.judge("none")
    )
    (question,) = answers.facts(1, g)
    ((place, fact),) = question.facts
    code = fact.split()[-1].rstrip(".")
    assert place * 3 == 1 and len(code) == 5
    assert [
        question.judge(text)
        for text in (f"It is {code}.", f"{code[:2]},{code[2:]}", code[:4], f"1{code}", "")
    ] == [1, 1, 0, 0, 0]


def test_what_an_answer_mentions():
    judge = answers.mentions(["12345", 67890, "stone"])
    assert (
        judge("12345,67890 and Stone") == 1
        and judge("12,345; 67890.") == 2 / 3
        and judge("stones, 123456") == 0
    )


@pytest.mark.parametrize(
    "task, wanted",
    [("single", 1), ("keys", 1), ("values", 3), ("queries", 3), ("variables", 4), ("words", 3)],
)
def test_long_questions_can_be_answered_from_their_text(task, wanted):
    """What is asked for stands in the text once or follows from it, its sentences are in order,
    and an answer of one part gets one part of the score."""
    ask, _ = answers.TASKS[task]
    questions = list(ask(6, torch.Generator().manual_seed(1)))
    assert len({q.ask + str(q.facts) + str(q.filler) for q in questions}) == 6
    for q in questions:
        told = [fact for _, fact in q.facts]
        assert [p for p, _ in q.facts] == sorted({p for p, _ in q.facts}) and len(
            set(told)
        ) == len(told)
        if task == "words":
            count = Counter(q.filler)
            answer = [w for w, _ in count.most_common(3)]
            assert min(count[w] for w in answer) > 5 * max(
                n for w, n in count.items() if w not in answer
            )
        elif task == "variables":
            value = dict(
                fact.removeprefix("VAR ").rstrip(".").replace("VAR ", "").split(" = ")
                for fact in told
            )
            follow = lambda name, value=value: (
                name if name not in value else follow(value[name])
            )
            number = q.ask.split(", directly")[0].split()[-1]
            answer = [name for name in value if follow(name) == number]
            assert len(value) == 2 * len(answer)
            assigned = [fact.split()[1] for fact in told]
            assert all(
                assigned.index(name) > assigned.index(of)
                for name, of in value.items()
                if of in value
            )
        else:
            names = q.ask.split(" of ")[1].split("?")[0].replace(" and ", ", ").split(", ")
            answer = [
                fact.split()[-1].rstrip(".")
                for fact in told
                if fact.split(" is ")[0].split()[-1] in names
            ]
        assert (
            len(answer) == wanted
            and q.judge(", ".join(answer)) == 1
            and q.judge(f"They are {answer[-1]}.") == pytest.approx(1 / wanted)
        )
        assert q.judge("I do not know.") == 0


def test_facts_stand_where_they_should():
    """In a prompt the sentences keep their places among the words of the text, and all prompts
    of a task have one length."""
    _, tokenizer = load_model()
    questions = list(answers.TASKS["queries"][0](3, torch.Generator().manual_seed(0)))
    rows = answers.prompts(tokenizer, questions, 300)
    assert rows.shape == (3, 300)
    for row, q in zip(rows, questions):
        text, _, ask = (
            tokenizer.decode(row).rpartition("<|im_start|>user\n")[2].rpartition("\n\n")
        )
        assert ask.startswith(q.ask)
        pieces = re.split("|".join(re.escape(fact) for _, fact in q.facts), text)
        words = [len(x.replace(" .", "").split()) for x in pieces]
        assert [sum(words[: i + 1]) for i in range(len(q.facts))] == [
            int(place * sum(words)) for place, _ in q.facts
        ]
    with pytest.raises(ValueError, match="cannot be brought to 60 tokens"):
        answers.prompts(tokenizer, questions, 60)


@pytest.mark.parametrize("task, length", [("single", 700), ("words", 300), ("json", 256)])
def test_prompts_hold_as_many_words_as_fit(task, length):
    """Found from a guess for all at once; it is what trying every number of words one after
    another finds."""
    _, tokenizer = load_model()
    questions = list(answers.TASKS[task][0](3, torch.Generator().manual_seed(2)))
    rows = answers.prompts(tokenizer, questions, length)
    book = sample_text().split()
    for i, (row, q) in enumerate(zip(rows, questions)):
        size = lambda n, q=q, own=q.filler or book[37 * i :]: len(
            tokenizer.apply_chat_template(
                message(own[:n], 0, q), add_generation_prompt=True, return_dict=False
            )
        )
        most = max(n for n in range(length) if size(n) <= length)
        text = tokenizer.decode(row).rpartition("<|im_start|>user\n")[2].rpartition("\n\n")[0]
        told = sum(len(fact.split()) for _, fact in q.facts)
        assert len(row) == length and len(text.replace(" .", "").split()) == most + told


@pytest.mark.parametrize("task", ["single", "keys"])
def test_one_number_is_asked_for_at_even_depths(task):
    questions = list(answers.TASKS[task][0](25, torch.Generator().manual_seed(0)))
    assert [float(q.depth) for q in questions] == [
        pytest.approx((2 + 93 * i // 24) / 100) for i in range(25)
    ]
    for q in questions:
        who = q.ask.split(" of ")[1].split("?")[0]
        assert [place for place, fact in q.facts if f" of {who} " in fact] == [q.depth]
    assert all(
        q.depth is None
        for q in answers.TASKS["queries"][0](3, torch.Generator().manual_seed(0))
    )


@pytest.mark.parametrize("budget", [4.0, 5.0])
def test_a_budget_buys_the_most_bits(budget):
    "Counted on a real cache that holds these tokens; half a bit more would not fit."
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
        )
    ).eval()
    ids, sizes, recipes = (
        torch.arange(2 * 960).reshape(2, 960) % 100,
        [],
        answers.budgeted(model, budget, 960, 960, 2, torch.float32),
    )
    bits = recipes[0].key.bits
    for each in (bits, bits + 0.5):
        each = int(each) if each == int(each) else each
        cache = TurboQuantCache(
            model,
            [answers.as_recipe(r, each) for r in TurboQuantCache(model, "k3v3").recipes],
            max_length=960,
        )
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
        sizes.append(cache.report()["bits_per_value"])
    assert sizes[0] <= budget < sizes[1] and len(recipes) == 3
    assert (
        answers.budgeted(model, budget, 960, 1280, 2, torch.float32)[0].key.bits < bits
    )  # room that is not used counts
    with pytest.raises(SystemExit, match="holds 1 bits"):
        answers.budgeted(model, 1, 960, 960, 2, torch.float32)


def test_weights_are_cast_and_frequencies_are_not():
    model, _ = load_model()
    before = model.model.rotary_emb.inv_freq.clone()
    answers.cast(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and torch.equal(
        model.model.rotary_emb.inv_freq, before
    )


def test_caches_are_what_a_user_gets():
    """By its name a preset has the centre that suits the model; so have the codes without
    recent tokens."""
    model, _ = load_model()
    found = dict(answers.caches(model))
    assert found["uncompressed"] is None
    for name in ("k4v4", "k3v3", "k2v2"):
        assert (
            found[name] == TurboQuantCache(model, name).recipe
            and found[name].key.center == "pre_rope"
        )
    layers = found["2.5 bits, no recent tokens"]
    assert len(layers) == 30 and {
        (r.key.bits, r.value.bits, r.key.center, r.recent, r.sinks) for r in layers
    } == {(2.5, 2.5, "pre_rope", 0, 4)}


@pytest.mark.parametrize(
    "right, n, low, high",
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
    ],
)
def test_wilson(right, n, low, high):
    "Values from Newcombe's and Brown's tables of the interval without continuity correction."
    assert answers.wilson(right, n) == pytest.approx((low, high), abs=1e-4)


def test_theory_of_planted_keys():
    for s, n in ((4.0, 1000), (2.0, 10)):
        p = 0.5 * math.erfc(-s / math.sqrt(2))
        assert retrieval.found_by_theory(s, n, "exact", 0) == pytest.approx(p**n, rel=1e-9)
        assert retrieval.found_by_theory(s, n, "mse", 4) < p**n
        order = [
            retrieval.found_by_theory(s, n, kind, b)
            for kind, b in (("mse", 4), ("qjl", 4), ("qjl", 3), ("qjl", 2))
        ]
        assert order == sorted(order, reverse=True)
    assert retrieval.normal_mean(lambda z: z * z) == pytest.approx(1, abs=1e-9)
    # one other token: the difference of two scores is normal, so the probability has a closed
    # form
    D = retrieval.scalar_codebook("sphere", 2, 128).to_int8_grid().mse
    want = torch.special.ndtr(
        torch.tensor(math.sqrt(1 - D) * 1.5 / math.sqrt(1 + D), dtype=torch.float64)
    )
    assert retrieval.found_by_theory(1.5, 1, "mse", 2) == pytest.approx(float(want), abs=1e-9)


def test_counts_are_those_of_theory():
    """Small enough to be quick: every count within 5 standard deviations of a binomial; the
    mutant, a code of one bit less, is out."""
    import argparse

    a = argparse.Namespace(lengths=[256, 2048], strengths=[3.0, 4.0], trials=1000, seed=1)
    rows = list(retrieval.planted(a))
    assert len(rows) == 7 * 2 * 5 * 2 and retrieval.exact_gate(rows)["passed"]
    far = lambda r, p: abs(r["found"] - r["n"] * p) / max(1, math.sqrt(r["n"] * p * (1 - p)))
    assert max(far(r, r["theory"]) for r in rows) < 5
    wrong = [
        far(r, retrieval.found_by_theory(r["strength"], r["length"] - 1, "mse", 1))
        for r in rows
        if (r["kind"], r["bits"], r["strength"], r["length"]) == ("mse", 2, 3.0, 256)
    ]
    assert min(wrong) > 5


def test_prompts_read_some_at_a_time_have_the_same_states():
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                vocab_size=100,
            )
        )
        .eval()
        .double()
    )
    ids, calls = torch.randint(0, 100, (5, 12), generator=torch.Generator().manual_seed(0)), []
    model.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    whole, parts = answers.read(model, ids), answers.read(model, ids, most=25)
    assert calls == [5, 2, 2, 1] and whole.states.keys() == parts.states.keys()
    for a, b in [
        (whole.logits, parts.logits),
        *(pair for i in whole.states for pair in zip(whole.states[i], parts.states[i])),
    ]:
        assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)
