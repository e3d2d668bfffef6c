"""turboquant chat: through a pipe and at a pseudo-terminal; what stays in the cache, on disk,
and after Ctrl-C."""

import io
import json
import os
import pty
import re
import select
import termios
import time
from contextlib import suppress

import pytest
import torch

from turboquant_nb.cli import generate as chat, main
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.hf import TurboQuantCache
from tests.helpers import ONE_THREAD, refuses

from .conftest import Forked, refused

pytestmark = ONE_THREAD


@pytest.fixture
def pipe(call, monkeypatch):
    "A conversation through standard input."

    def run(text, line):
        monkeypatch.setattr(
            "sys.stdin",
            io.TextIOWrapper(
                io.BytesIO(text.encode() if isinstance(text, str) else text), encoding="utf-8"
            ),
        )
        return call(f"chat --max-new-tokens 6 {line}")

    return run


@pytest.fixture
def talk(tiny):
    model, tokenizer = load_model(tiny)
    model.set_attn_implementation("turboquant")
    return chat.Conversation(model, tokenizer, lambda: TurboQuantCache(model, "k3v3"))


def test_answers_to_stdout_and_status_to_stderr(pipe, tiny):
    code, out, err = pipe("Call me Ishmael.\n\nWhy?\n", f"--model {tiny}")
    assert (
        code == 0 and len(re.findall(r"\d+ tokens in [\d,]+ bytes", err)) == 2 and out.strip()
    )
    assert pipe("Call me Ishmael.\n", f"--model {tiny} --quiet")[2] == ""


def test_json_tells_the_turns_and_nothing_else(pipe, tiny):
    code, out, _ = pipe(
        "Call me Ishmael.\n/status\n//help\n/quit\nnever said\n",
        f"--model {tiny} --json --system Briefly",
    )
    found = json.loads(out)
    assert (
        code == 0
        and [t["user"] for t in found["turns"]] == ["Call me Ishmael.", "/help"]
        and len(found["messages"]) == 4
    )
    assert found["cache"]["tokens"] > 30 and all(
        0 < t["new_tokens"] <= 6 for t in found["turns"]
    )


@pytest.mark.parametrize("templated", [True, False])
def test_nothing_is_read_twice_and_tokens_are_those_of_one_text(talk, templated):
    talk.chat, fed = templated, []
    hook = talk.model.model.register_forward_pre_hook(
        lambda m, a, k: fed.append(k["input_ids"][0].tolist()), with_kwargs=True
    )
    for text in ("Call me Ishmael.", "Some years ago.", "Never mind how long."):
        assert talk.turn(text, limit=5) == talk.messages[-1]["content"]
    hook.remove()
    assert sum(fed, []) == talk.ids[:-1]  # every token once, in order
    with torch.no_grad():  # the same tokens in one prompt: the cache holds the same positions
        assert talk.cache.get_seq_length() == len(talk.ids) - 1


def test_saved_and_loaded_it_is_the_same_file_and_goes_on_alike(talk, tmp_path):
    talk.turn("Call me Ishmael.", limit=40)
    chat.save_conversation(talk, tmp_path / "a")
    other = chat.Conversation(
        talk.model, talk.tokenizer, lambda: TurboQuantCache(talk.model, "k2v2")
    )
    other.turn("Something else.", limit=3)
    chat.load_conversation(other, tmp_path / "a")
    chat.save_conversation(other, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert talk.turn("Why?", limit=40) == other.turn("Why?", limit=40) and talk.ids == other.ids
    assert TurboQuantCache.load(tmp_path / "a", talk.model).get_seq_length() < len(talk.ids)
    with refuses("changed after"):
        data = bytearray((tmp_path / "a").read_bytes())
        data[-100] ^= 1
        (tmp_path / "c").write_bytes(data)
        chat.load_conversation(other, tmp_path / "c")
    assert other.ids == talk.ids  # as it was


class Broken:
    "A streamer that fails after some tokens."

    def __init__(self, after, error):
        self.left, self.error = after, error

    def put(self, _):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self):
        pass


@pytest.mark.parametrize(
    "turns, after, error",
    [
        (0, 0, KeyboardInterrupt()),
        (0, 3, MemoryError()),
        (1, 0, MemoryError()),
        (1, 1, KeyboardInterrupt()),
    ],
)
def test_a_broken_answer_leaves_a_conversation_that_goes_on(talk, error, after, turns):
    for _ in range(turns):
        talk.turn("Call me Ishmael.", limit=4)
    before = list(talk.ids)
    with pytest.raises(type(error)):
        talk.turn("Why?", limit=9, streamer=Broken(after, error))
    assert talk.ids[: len(before)] == before and len(talk.messages) == 2 * (turns + (after > 0))
    assert talk.cache.get_seq_length() == max(0, len(talk.ids) - 1)
    talk.turn("And then?", limit=4)
    assert talk.cache.get_seq_length() == len(talk.ids) - 1 and len(talk.messages) == 2 * (
        turns + (after > 0) + 1
    )


@pytest.mark.parametrize("turns", [0, 1])
def test_an_interrupt_within_a_pass_takes_back_what_some_layers_took(talk, turns):
    for _ in range(turns):
        talk.turn("Call me Ishmael.", limit=4)
    before = list(talk.ids), len(talk.messages)

    def stop(*_):
        raise KeyboardInterrupt

    hook = talk.model.model.layers[1].register_forward_pre_hook(
        stop
    )  # the first layer has taken the message
    with pytest.raises(KeyboardInterrupt):
        talk.turn("Why?", limit=9)
    hook.remove()
    assert (talk.ids, len(talk.messages)) == before and talk.cache.get_seq_length() == max(
        0, len(talk.ids) - 1
    )
    talk.turn("And then?", limit=4)
    assert talk.cache.get_seq_length() == len(talk.ids) - 1


def test_a_context_that_is_full_says_so(pipe, plain):
    code, out, err = pipe("word " * 300 + "\n", f"--model {plain} --quiet")
    assert code == 2 and "this model reads 128" in err and "/clear" in err


@pytest.mark.parametrize(
    "text, words",
    [
        ("/dance\n", "/dance: there is no such command; /help lists them"),
        ("/save\n", "/save needs a file"),
        ("/save none/x\n", "there is no such folder"),
        ("/save x\n", "nothing was said yet"),
        ("/load none\n", "no such file"),
        (b"M\xf6we\n", "not UTF-8 text (byte 1 of a line)"),
    ],
)
def test_bad_lines(pipe, tiny, tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    refused(pipe(text, f"--model {tiny} --quiet"), words)
    assert list(tmp_path.iterdir()) == []


class Terminal:
    "The program at a pseudo-terminal of 12 lines of 100 characters."

    def __init__(self, line):
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (12, 100))

        def before():
            os.login_tty(os.dup(slave))
            os.environ["TERM"] = "xterm"
            for name in ("COLUMNS", "LINES"):
                os.environ.pop(name, None)

        self.process = Forked(line, slave, slave, slave, before=before)
        self.process.start()
        os.close(slave)
        self.seen = ""

    def until(self, pattern, seconds=240):
        "Read until something new matches."
        end, start = time.monotonic() + seconds, len(self.seen)
        while not re.search(pattern, self.seen[start:]):
            assert time.monotonic() < end, (pattern, self.seen[start:])
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # the other side is closed
                    break
        return self.seen[start:]

    def type(self, text):
        os.write(self.master, text.encode())

    def ends(self, seconds=120):
        "Exit code; all that was written is read."
        self.until(r"(?!)", seconds) if self.process.is_alive() else None
        return self.process.ends(seconds)

    def stops(self):
        """Exit code after Ctrl-C at the prompt, pressed again after a warning, and when nothing
        happens for three seconds, as a person would.

        CPython's input() with readline writes the prompt and then waits in select(): a signal
        between the two is seen at the next key only (on a busy machine 3 of 3,000).
        """
        for _ in range(20):
            time.sleep(0.1)
            self.type("\x03")
            with suppress(AssertionError):
                warned = "again ends without it"
                if warned not in self.until(f"{warned}(?s:.*)> ", 3):
                    return self.process.ends(10)  # the other side is closed
        raise AssertionError(f"Ctrl-C does not end it: {self.seen[-400:]!r}")


@pytest.fixture
def terminal(tiny, tmp_path, monkeypatch):
    opened = []

    def start(options):
        opened.append(Terminal(f"chat --model {tiny} {options}"))
        return opened[-1]

    monkeypatch.chdir(tmp_path)
    yield start
    for x in opened:
        x.process.kill()
        os.close(x.master)


def test_at_a_terminal(terminal, tmp_path):
    t = terminal("--max-new-tokens 5")
    t.until("> ")
    t.type("Call me Ishmael.\n")
    t.until(r"\n\S+\s+turboquant: \d+ tokens in [\d,]+ bytes.*tokens/s")  # after the answer
    for typed, answer in (
        ("/dance\n", "there is no such command"),
        ("/save talk.st\n", r"saved 1 turn,"),
        ("/clear\n", "cleared"),
        ("/load talk.st\n", r"loaded 1 turn,"),
        ("/load no.st\n", "no such file"),
    ):
        t.type(typed)
        t.until(
            answer + r"(?s:.*)> "
        )  # an end of file that comes before the prompt is the line editor's to lose
    t.type("\x04")
    assert t.ends() == 0 and (tmp_path / "talk.st").is_file()


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_program(terminal, tmp_path):
    t = terminal("--max-new-tokens 7000")
    t.until("> ")
    t.type("Call me Ishmael.\n")
    time.sleep(3)  # its tokens are one long word, which is shown when it ends
    t.type("\x03")
    t.until("> ")
    t.type("/status\n")
    t.until(
        r"\d+ tokens in(?s:.*)> "
    )  # before the prompt it would stop what is being written, not the program
    assert t.stops() == 130 and "Traceback" not in t.seen and list(tmp_path.iterdir()) == []
    assert t.seen.count("again ends without it") == 1, "what was said would be lost"


@pytest.fixture
def typed(tiny, monkeypatch, capsys, tmp_path):
    """What a person types, line by line; an exception stands for a key. Gives exit code,
    standard output, and what was not typed any more; `more` are options."""

    class Typed(io.StringIO):
        isatty = lambda self: True

    def run(*keys, more=""):
        left = list(keys)

        def read(_):
            key = left.pop(0) if left else EOFError
            if isinstance(key, str):
                return key
            raise key

        monkeypatch.setattr("sys.stdin", Typed())
        monkeypatch.setattr("builtins.input", read)
        monkeypatch.chdir(tmp_path)
        return (
            main(f"chat --model {tiny} --max-new-tokens 5 {more}".split()),
            capsys.readouterr().out,
            left,
        )

    return run


def test_what_goes_wrong_in_a_turn_is_told_at_a_terminal(typed, monkeypatch):
    "A lack of memory ended the program, and with it the conversation."
    asked, turn = [], chat.Conversation.turn

    def fails_once(self, *args):
        asked.append(args[0])
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return turn(self, *args)

    monkeypatch.setattr(chat.Conversation, "turn", fails_once)
    code, out, _ = typed("Call me Ishmael.", "Why?", "/status")
    assert code == 0 and re.search(r"\d+ tokens in", out.split("CUDA out of memory.")[1])


def test_a_budget_that_is_full_is_told_at_a_terminal(typed):
    "It ended the program, and with it the conversation, which no file takes then."
    text = "Call me Ishmael. " * 40
    code, out, _ = typed(text, text, "/status", more="--memory 130KB")
    assert code == 0 and re.search(r"\d+ tokens in", out.split("bytes is full")[1]), out


def test_an_answer_that_was_stopped_is_told_as_far_as_it_came(typed, monkeypatch):
    """Stopped after two tokens, and before the first: there the answer before it was told
    again."""
    stops, turn = [None, 3, 0], chat.Conversation.turn

    def stopped(self, text, limit, streamer, how):
        after = stops.pop(0)
        if after is not None:
            streamer = Broken(after, KeyboardInterrupt())
        return turn(self, text, limit, streamer, how)

    monkeypatch.setattr(chat.Conversation, "turn", stopped)
    code, out, _ = typed("Call me Ishmael.", "Why?", "And then?", more="--json")
    found = json.loads(out)
    said = [x["content"] for x in found["messages"] if x["role"] == "assistant"]
    assert code == 0 and len(said) == 2 and said[0] != said[1] != ""
    assert [x["answer"] for x in found["turns"]] == [*said, ""]


def test_a_ctrl_c_that_would_lose_a_conversation_must_be_pressed_twice(typed):
    """An answer that was complete a moment before the key: the program ended, and the
    conversation with it. A line between two keys makes the second a first."""
    key, say = KeyboardInterrupt, "Call me Ishmael."
    code, out, left = typed(say, key, "/status", key, key, "/status")
    assert (
        code == 130
        and left == ["/status"]
        and out.count("Ctrl-C again ends without it") == 2
        and re.search(r"\d+ tokens in", out)
    )
    for before in (
        (),
        (say, "/save talk.st"),
        (say, "/save talk.st", "/clear", "/load talk.st"),
        (say, "/clear"),
    ):
        code, out, left = typed(*before, key, "/status")
        assert code == 130 and left == ["/status"] and "again ends" not in out, before
    code, out, left = typed(say, "/save talk.st", "Why?", key, "/quit")
    assert code == 0 and "again ends" in out and "saved 1 turn," in out
