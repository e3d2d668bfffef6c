"""turboquant web: two caches side by side, what is stored, two people at once; and the page
itself in Chromium, with gradio of this environment or of that which TURBOQUANT_NB_WEB names:
python -m venv --system-site-packages web && web/bin/pip install gradio selenium."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from turboquant_nb.cli import web
from turboquant_nb.cli.app import Usage
from turboquant_nb.cli.inputs import Changes, asked_caches
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.quant.quantizer import PRESETS, preset

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
