"""turboquant web: two caches side by side, what is stored, two people at once; and the page
itself in Chromium, with gradio of this environment or of that which TURBOQUANT_NB_WEB names:
python -m venv --system-site-packages web && web/bin/pip install gradio selenium."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from turboquant_nb.cli import web
from turboquant_nb.cli.app import Usage
from turboquant_nb.cli.recipes import Changes, asked_caches
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.quant.recipe import PRESETS, preset

pytestmark = pytest.mark.usefixtures("one_thread")
PYTHON = os.environ.get("TURBOQUANT_NB_WEB", sys.executable)
PROMPTS = ("Call me Ishmael.", "Some years ago, never mind how long.")


@pytest.fixture
def both(tiny):
    return web.SideBySide(*load_model(tiny))


def last(both, *asked):
    return list(both.frames(*asked))[-1]


def test_a_shared_copy_shares_parameters_and_not_settings(both):
    one, two = both.models
    assert (
        one.config._attn_implementation == "sdpa"
        and two.config._attn_implementation == "turboquant"
    )
    assert {x.data_ptr() for x in one.parameters()} == {x.data_ptr() for x in two.parameters()}


def test_the_uncompressed_answer_is_that_of_generate(both):
    ids, _ = both.check(PROMPTS[0], "k3v3", 20)
    own = both.models[0].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
    )[0, ids.shape[1] :]
    frame = last(both, PROMPTS[0], "k3v3", 20)
    assert frame.texts[0] == both.tokenizer.decode(own, skip_special_tokens=True) and frame.done
    assert frame.cache.get_seq_length() == frame.prompt + frame.tokens[1] - 1


def test_frames_tell_what_is_held_now(both):
    frames = list(both.frames(PROMPTS[0], "k2v2", 5))
    assert [f.tokens for f in frames] == [(i, i) for i in range(1, 6)] and [
        f.done for f in frames
    ] == [False] * 4 + [True]
    d, heads, layers = 32, 1, 2
    assert [f.nbytes[0] for f in frames] == [
        2 * layers * heads * d * 4 * (frames[0].prompt + i) for i in range(5)
    ]
    rows = dict((r[0], r[1:]) for r in frames[-1].rows())
    assert (
        rows["bytes held"][1] == f"{frames[-1].nbytes[1]:,}"
        and f"first {frames[-1].same} of 5" in rows["answer"][1]
    )


def test_people_at_once_get_what_each_gets_alone(both):
    asked = [
        (p, r, n)
        for p, r, n in zip(PROMPTS * 2, ("k2v2", "k4v4", "k3v3", "k2v2"), (12, 9, 7, 11))
    ]
    alone, told = [last(both, *x).texts for x in asked], {}
    threads = [
        threading.Thread(target=lambda i=i: told.update({i: last(both, *asked[i]).texts}))
        for i in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [told[i] for i in range(4)] == alone


@pytest.mark.parametrize(
    "asked, words",
    [
        ((" \n", "k3v3", 5), "empty"),
        (("a", "k9v9", 5), "k9v9"),
        (("a", "k3v3", 0), "got 0"),
        (("a", "k3v3", 1025), "got 1025"),
        (("word " * 9000, "k3v3", 5), "reads 8,192"),
    ],
)
def test_what_cannot_be_asked(both, asked, words):
    with pytest.raises(Usage, match=words):
        next(both.frames(*asked))


@pytest.mark.parametrize("side", ["key", "value"])
def test_the_codes_that_are_shown_are_those_that_are_held(both, side):
    cache = last(both, "word " * 200, "k3v3", 3).cache
    codes, scales, exact, first = web.stored(cache, side, 1, 0, last=100)
    store = cache.coded_layers[1].store
    want = store.coded(side, store.length - 100, store.length)
    assert (
        first == store.length - 100
        and torch.equal(codes, want.codes[0, 0].T)
        and torch.equal(scales, want.scale[0, 0].float())
    )
    assert exact.tolist() == [False] * 84 + [True] * 16
    axes = web.picture(cache, side, 1, 0).axes
    codes, scales, exact, first = web.stored(cache, side, 1, 0)
    image, (line,), n = axes[0].images[0], axes[1].lines, store.length - first
    *_, whole, begin = web.stored(cache, side, 1, 0, last=store.length)
    sinks, recent = store.recipe.sinks, store.length - store.recipe.recent
    assert begin == 0 and sinks
    assert whole.tolist() == [not sinks <= i < recent for i in range(store.length)]
    assert (image.get_array() == codes.numpy()).all() and codes.shape == (32, n)
    assert tuple(image.get_extent()) == (first, store.length, 32, 0)
    middles = [first + i + 0.5 for i in range(n)]  # of the tokens, where codes have them
    assert line.get_xdata().tolist() == middles and line.get_ydata().tolist() == scales.tolist()
    grey = [(x.get_x(), x.get_width()) for x in axes[1].patches]
    assert grey == [(first + i, 1) for i in exact.nonzero().flatten().tolist()] and grey
    assert axes[1].get_xlim() == (first, store.length) and axes[1].get_ylim()[0] == 0
    assert axes[0].get_title().startswith(f"{side}s of layer 1, head 0: 3 bits a channel")
    for wrong in (dict(layer=2), dict(layer=-1), dict(head=1)):
        with pytest.raises(Usage, match="must be from 0"):
            web.stored(cache, side, **wrong)
    with pytest.raises(Usage, match="side must be key or value, got '__class__'"):
        web.stored(cache, "__class__")


def test_a_visitor_names_no_file_and_writes_no_recipe(both, tmp_path):
    """The field took whatever --recipe takes: a path was read, and its content was in the
    message."""
    for name, content in (
        ("secret.json", '{"key": {"password": "sesame"}, "value": {}}'),
        ("recipe.json", preset("k2v2").to_json()),
    ):
        (tmp_path / name).write_text(content)
        for typed in (str(tmp_path / name), content, f"[{content}]"):
            with pytest.raises(Usage, match="^recipe must be one of k4v4, .*; got '") as said:
                next(both.frames("a", typed, 5))
            assert typed in str(said.value) or repr(typed) in str(said.value)
            assert typed == content or "sesame" not in str(said.value).replace(typed, "")


def test_fields_change_what_is_offered_and_the_command_line_may_offer_more(tiny):
    mine = asked_caches([preset("k3v3").to_json()])
    both = web.SideBySide(*load_model(tiny), mine)
    assert list(both.offered) == ["recipe 1", *PRESETS]
    found = both.recipe("recipe 1", Changes(bits=2, recent=5))
    assert (found.key.bits, found.recent) == (2, 5) and both.recipe("k2v2").key.bits == 2
    for wrong, words in (
        (Changes(bits=9), "recipe: .*got 9"),
        (Changes(bits=3.7), "bits times d must be an integer"),
        (Changes(recent=10**14), "recent must be at most 8,192, got 100,000,000,000,000"),
        (Changes(sinks=-1), "sinks"),
    ):
        with pytest.raises(Usage, match=words):
            both.recipe("k3v3", wrong)


class Widget:
    "A field, a frame or a button where gradio's would be, and what a click on it does."

    def __init__(self, *given, **how):
        self.given, self.how, self.clicks = given, how, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def click(self, does, takes, gives, **how):
        self.clicks.append((does, takes, gives, how))
        return SimpleNamespace(success=lambda *then: self.clicks.append(then))


class Told(Exception):
    "gradio.Error"

    def __init__(self, message, print_exception):
        assert print_exception is False
        super().__init__(message)


@pytest.fixture
def page(both, monkeypatch):
    "The page's fields and buttons by their ids, without gradio."
    made = {}

    def widget(*given, **how):
        new = Widget(*given, **how)
        return made.setdefault(how.get("elem_id"), new) if "elem_id" in how else new

    kinds = "Blocks Markdown State Button Row Column Accordion Textbox Dataframe Radio Number "
    gradio = {kind: widget for kind in (kinds + "Plot Dropdown").split()}
    monkeypatch.setattr(web, "gradio", SimpleNamespace(Error=Told, **gradio))
    web.page(both, "tiny", runs=3)
    return SimpleNamespace(**made)


def test_what_a_page_begins_with(both, page):
    fields = [page.prompt, page.recipe, page.most, page.bits, page.sinks, page.recent]
    (_, takes, gives, how), (draw, *after) = page.ask.clicks
    assert takes == fields and how == {"concurrency_limit": 3, "concurrency_id": "model"}
    assert page.recipe.given == (list(both.offered),) and page.recipe.how["value"] == "k4v4"
    assert page.most.given == (64,) and {x.given for x in fields[3:]} == {(None,)}
    assert "whales" in page.prompt.how["value"] and page.side.how["value"] == "key"
    assert page.side.given == (["key", "value"],)
    assert page.layer.given == page.head.given == (0,)
    assert gives[:3] == [page.plain, page.coded, page.table] and gives[4] is page.progress
    held = gives[3]  # the codes, which are drawn when an answer is there, and when asked for
    assert after == [[held, page.side, page.layer, page.head], page.stored]
    assert page.draw.clicks == [(draw, *after, {})]


def test_a_click_answers_with_what_the_fields_say(both, page):
    answer = page.ask.clicks[0][0]
    for fields, changes in (
        ((None, "", None), Changes()),
        ((2, 0, 3.0), Changes(bits=2, sinks=0, recent=3)),
    ):
        want = list(both.frames(PROMPTS[0], "k3v3", 5, changes))
        found = list(answer(PROMPTS[0], "k3v3", 5, *fields))
        assert [x[:2] for x in found] == [x.texts for x in want]
        for got, frame in zip(found, want):
            own = frame.rows()  # speed differs, and bytes by tables that others made first
            assert (got[2][0], got[2][-1], len(got[2])) == (own[0], own[-1], len(own))
            assert got[4].split(";")[0] == frame.told().split(";")[0]
        store = found[-1][3].coded_layers[0].store
        assert store.recipe.key.bits == (3 if changes.bits is None else 2)
        assert (store.recipe.sinks, store.recipe.recent) == ((4, 16), (0, 3))[
            changes.sinks is not None
        ]
    *_, end = answer(PROMPTS[0], "k3v3", "", None, None, None)
    assert end[:2] == last(both, PROMPTS[0], "k3v3", 64).texts and end[4].startswith("Done")
    for fields, words in (
        (("", "k3v3", 5, None, None, None), "the prompt is empty"),
        (("a", "k3v3", "many", None, None, None), "tokens must be a number, got 'many'"),
        (("a", "k3v3", 5, "x", None, None), "bits must be a number, got 'x'"),
        (("a", "k3v3", 5, None, 1e400, None), "sinks must be a number, got inf"),
        (("a", "k3v3", 5, None, None, [1]), r"recent must be a number, got \[1\]"),
    ):
        with pytest.raises(Told, match=words):
            next(answer(*fields))


def test_a_click_draws_the_codes_of_a_head(both, page):
    draw, cache = page.draw.clicks[0][0], last(both, PROMPTS[0], "k3v3", 3).cache
    for fields, title in (
        (("key", "", None), "keys of layer 0, head 0"),
        (("value", 1, "0"), "values of layer 1, head 0"),
    ):
        (found,) = draw(cache, *fields)
        assert found.axes[0].get_title().startswith(title)
    for held, fields, words in (
        (None, ("key", 0, 0), "nothing stored yet"),
        (cache, ("key", 2, 0), "layer must be from 0 to 1, got 2"),
        (cache, ("key", 0, -1), "head must be from 0 to 0, got -1"),
        (cache, ("key", "x", 0), "layer must be a number, got 'x'"),
    ):
        with pytest.raises(Told, match=words):
            list(draw(held, *fields))


def test_what_a_moment_is_told_as():
    frame = web.Frame(("a", "b"), (5, 3), (4096, 1024), (2.0, 0.5), 2, 10, None, False, False)
    rows = {name: rest for name, *rest in frame.rows()}
    assert rows["tokens held"] == ["14", "14"] and rows["bytes held"] == ["4,096", "1,024"]
    assert rows["against uncompressed"] == ["1.00x", "4.00x smaller"]
    assert rows["tokens per second"] == ["2.0", "4.0"]
    assert rows["answer"] == ["5 tokens", "first 2 of 3 tokens the same"]
    bytes_told = "4,096 bytes uncompressed, 1,024 on codes."
    assert frame.told() == (
        f"Writing: the same for 2 of 3 tokens, then they part; {bytes_told}"
    )
    alike = replace(frame, tokens=(3, 3), same=3, done=True, nbytes=(1024, 1536))
    assert alike.told().startswith("Done: the same so far; 1,024 bytes")
    assert replace(alike, late=True).told().startswith("Time is over: the same so far")
    rows = {name: rest for name, *rest in replace(alike, seconds=(0.0, 0.0)).rows()}
    assert rows["against uncompressed"] == ["1.00x", "1.50x larger"]
    assert rows["tokens per second"] == ["", ""]
    even = replace(alike, nbytes=(1024, 1024), tokens=(1, 1), seconds=(1.0, 1.0))
    rows = {name: rest for name, *rest in even.rows()}
    assert rows["against uncompressed"][1] == "1.00x smaller"
    assert rows["tokens per second"] == ["", ""]  # reading the prompt is no step


def test_time_ends_an_answer(tiny, monkeypatch):
    both, now = web.SideBySide(*load_model(tiny), seconds=10.0), [0.0]
    monkeypatch.setattr(web.time, "monotonic", lambda: now[0])
    frames = both.frames(PROMPTS[0], "k3v3", 20)
    assert not next(frames).late
    now[0] = 10.0
    assert not next(frames).late
    now[0] = 10.1
    (end,) = frames
    assert end.late and end.done and end.tokens == (3, 3)


class Door:
    "Requests to `Limits` around an application that reads all of a body."

    def __init__(self, **how):
        self.door, self.bodies = web.Limits(self.app, **how), []
        self.waiting, self.go = 0, None

    async def app(self, scope, receive, send):
        if self.go is not None:
            self.waiting += 1
            await self.go.wait()
        part = await receive()
        while part["type"] == "http.request":
            self.bodies.append(part["body"])
            if not part.get("more_body"):
                break
            part = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, *parts, path="/", head=(), kind="http"):
        "Status, headers and text of an answer."
        left, told = list(parts) or [b""], []

        async def receive():
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def send(what):
            told.append(what)

        scope = {"type": kind, "path": path, "headers": list(head)}
        await self.door(scope, receive, send)
        text = b"".join(x.get("body", b"") for x in told)
        return told[0]["status"], dict(told[0]["headers"]), text


def test_the_door_lets_small_requests_in():
    door = Door(body=8)
    size = lambda n: [(b"content-length", n)]
    for head, path, status in (
        ([], "/", 200),
        (size(b"8"), "/", 200),
        (size(b"9"), "/", 413),
        (size(b"-1"), "/", 413),
        (size(b"x"), "/", 413),
        (size(b"9" * 30), "/", 413),
        (size(b"0"), "/gradio_api/upload", 413),
    ):
        got, heads, text = asyncio.run(door.ask(b"12345678", path=path, head=head))
        assert got == status, (head, path)
        if status == 413:
            assert heads[b"content-length"] == b"%d" % len(text) and b"64 kB at most" in text
    assert door.bodies == [b"12345678"] * 2 and door.door.open == 0
    door.bodies.clear()  # a body that says no length ends where it is too large
    asyncio.run(door.ask(b"1234", b"5678", b"9"))
    assert door.bodies == [b"1234", b"5678"]
    assert asyncio.run(door.ask(path="/upload", kind="websocket"))[0] == 200
    assert (web.Limits(None).body, web.Limits(None).requests) == (65_536, 256)


def test_the_door_holds_back_a_crowd():
    async def crowd():
        door = Door(requests=2)
        door.go = asyncio.Event()
        first = [asyncio.create_task(door.ask()) for _ in range(2)]
        while door.waiting < 2:
            await asyncio.sleep(0)
        status, _, text = await door.ask()
        assert (status, text, door.door.open) == (503, b"too many requests are open", 2)
        door.go.set()
        assert [x[0] for x in await asyncio.gather(*first)] == [200, 200]
        door.app = None
        assert (await door.ask())[0] == 200 and door.door.open == 0

    asyncio.run(crowd())


def test_without_gradio_it_says_how_to_get_it(call, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    code, out, err = call(f"web --model {tiny}")
    assert code == 1 and out == "" and err.count("\n") == 1 and "turboquant-nb[web]" in err


def test_a_port_that_is_taken(call, tiny, monkeypatch):
    import socket

    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(Blocks=None))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        code, out, err = call(f"web --model {tiny} --quiet", "--port", s.getsockname()[1])
    assert code == 1 and "cannot listen" in err and err.count("\n") == 1


def played(script, needs, *words):
    "What a script of this folder saw, run with the python that has gradio."
    found = subprocess.run([PYTHON, "-c", f"import {needs}"], capture_output=True)
    if found.returncode:
        pytest.skip(
            "gradio is not installed: TURBOQUANT_NB_WEB may name the python of an environment "
            "that has it and selenium"
        )
    paths = [str(Path(web.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name(script)), *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_attacker_gets_nothing(tiny, tmp_path):
    """Files by address and by field, uploads, large bodies, wrong fields, long answers and a
    crowd, against a running server; it then still serves, and ends at Ctrl-C."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"key": {"password": "sesame"}, "value": {}}')
    saw = played("attacker.py", "gradio", tiny, secret)
    told = json.dumps({k: v for k, v in saw.items() if k != "stderr"})  # that is the server's
    assert "sesame" not in json.dumps(saw) and "root:" not in told and "Traceback" not in told
    assert not saw["reachable"] and all(status >= 400 for status, _ in saw["files"]), saw[
        "files"
    ]
    assert saw["upload"] == [413] * 3 and 200 not in saw["large"], saw
    refused = [*saw["recipes"], *saw["fields"], *saw["drawing"]]
    assert all("event: error" in x or x.startswith(("4", "5")) for x in refused), refused
    assert "Time is over" in saw["long"] and saw["seconds"] < 30
    done, asked = saw["crowd"]
    assert 1 <= done <= 17 and asked == 40  # one runs, sixteen wait
    assert saw["alive"] and saw["after"] == 200 and saw["code"] == 130, saw["stderr"]


def test_an_address_that_others_reach_is_warned_of(call, tiny, monkeypatch):
    monkeypatch.setattr(web, "gradio", SimpleNamespace(Blocks=None, routes=None))
    never = SimpleNamespace(
        Event=lambda: SimpleNamespace(wait=lambda: None), Lock=threading.Lock
    )
    monkeypatch.setattr(web, "threading", never)
    shown = SimpleNamespace(close=lambda verbose: None)
    shown.queue = lambda max_size: SimpleNamespace(launch=lambda **how: asked.update(how))
    monkeypatch.setattr(web, "page", lambda *_: shown)
    monkeypatch.setattr(web, "starlette", SimpleNamespace(Middleware=lambda x: x))
    asked = {}
    for host, warned in (("127.0.0.1", False), ("0.0.0.0", True)):
        code, _, err = call(f"web --model {tiny} --port 0 --quiet --host {host}")
        assert (code, "there is no password" in err) == (0, warned), err
        assert asked["server_name"] == host and asked["app_kwargs"]["middleware"] == [
            web.Limits
        ]


def test_in_a_browser(both, tiny):
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no chromium, or not its driver, on the PATH")
    saw = played("browser.py", "gradio, selenium", tiny)
    assert (
        saw["title"] == "turboquant" and saw["code"] == 130 and "Traceback" not in saw["stderr"]
    ), saw
    assert (
        "nothing stored yet" in saw["nothing stored"]
        and "the prompt is empty" in saw["empty"]
        and "got 5000" in saw["too many"]
        and "layer must be from 0 to 1" in saw["no such layer"]
    )
    for name, prompt in zip(("one", "two"), PROMPTS):
        frame, seen = last(both, prompt, "k2v2", 24), saw[name]
        assert (seen["plain"], seen["coded"]) == frame.texts and seen["picture"][0] > 300
        assert (
            f"{frame.nbytes[1]:,} on codes" in seen["progress"]
            and f"{frame.nbytes[1]:,}" in seen["table"]
        )
