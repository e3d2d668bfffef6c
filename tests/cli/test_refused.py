"""Every refusal of every command: refused.txt has a command line, its exit code, and the whole
of what it says, which is one line. Three dots stand for words of others."""

import os
import re
import shlex
from pathlib import Path

import pytest
from tests.helpers import ONE_THREAD

pytestmark = ONE_THREAD
REFUSED = re.findall(
    r"^\$ turboquant (.*)\n(\d) (.*)$",
    Path(__file__).with_name("refused.txt").read_text(),
    re.M,
)


@pytest.mark.parametrize("line, code, said", REFUSED)
def test_refused(call, scene, monkeypatch, line, code, said):
    "In a folder that has what the line names; nothing is written, nothing goes to stdout."
    monkeypatch.chdir(scene)
    before = sorted(os.listdir())
    got, out, err = call("", *shlex.split(line))
    want = ".*".join(map(re.escape, said.split("…")))
    assert (got, out) == (int(code), "") and re.fullmatch(f"{want}\n", err), err
    assert sorted(os.listdir()) == before


def test_every_command_refuses_something():
    commands = "calibrate chat contacts demo embed eval generate plan recipe serve"
    assert {line.split()[0] for line, _, _ in REFUSED} >= {*commands.split(), "variants", "web"}
