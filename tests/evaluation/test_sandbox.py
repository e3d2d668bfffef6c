"""A program that a model wrote: what ends it, and that nothing of it is left."""

import os
import socket
import subprocess
import time

import pytest

from turboquant_nb.evaluation.sandbox import program_in, run_program


@pytest.mark.parametrize(
    "text, why",
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(60)", "time"),
        ("x = bytearray(1 << 34)", "memory"),
        ("x = [0]\nwhile True: x += x", "memory"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import os; os.system('sleep 60')", "PermissionError"),
        ("import subprocess; subprocess.run(['sleep', '60'])", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("open('x', 'w').write('x' * (1 << 24))", "OSError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "killed"),
        ("x = (", "SyntaxError"),
        ("assert False", "AssertionError"),
    ],
)
def test_what_ends_a_program(text, why):
    began, got = time.monotonic(), run_program(text, seconds=2)
    assert (got.passed, got.why) == (False, why) and time.monotonic() - began < 60


def test_a_program_writes_in_its_folder_and_nowhere_else(tmp_path):
    there = tmp_path / "x"
    there.write_text("kept")
    for line in (
        f"open({str(there)!r}, 'w')",
        f"import os; os.remove({str(there)!r})",
        f"import os; os.rename({str(there)!r}, 'x')",
        f"import os; os.open({str(tmp_path / 'y')!r}, os.O_CREAT | os.O_WRONLY)",
        f"import pathlib; pathlib.Path({str(tmp_path / 'z')!r}).mkdir()",
        f"import os; os.symlink({str(tmp_path)!r}, 'to'); open('to/y', 'w')",
    ):
        assert run_program(line).why == "PermissionError", line
    assert there.read_text() == "kept" and [x.name for x in tmp_path.iterdir()] == ["x"]
    assert run_program("open('a', 'w').write('b'); assert open('a').read() == 'b'").passed


def test_no_socket_reaches_a_listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        to = server.getsockname()
        got = run_program(f"import socket; socket.create_connection({to!r}, 1)")
        with pytest.raises(TimeoutError):
            server.accept()
    assert not got.passed and got.guards["network"] in ("empty namespace", "audit hook")


def test_nothing_is_inherited(monkeypatch):
    monkeypatch.setenv("TURBOQUANT_SECRET", "here")
    text = "import os, sys\nassert 'TURBOQUANT_SECRET' not in os.environ\n"
    text += "assert os.listdir() == [] and sys.argv == ['-c'] and sys.stdin.read() == ''\n"
    assert run_program(text).passed


def test_no_process_is_left(monkeypatch):
    "The group of the process is empty: signal 0 finds nobody in it."
    groups, popen = [], subprocess.Popen

    def started(*args, **how):
        process = popen(*args, **how)
        os.killpg(process.pid, 0)  # it is there
        groups.append(process.pid)
        return process

    monkeypatch.setattr("turboquant_nb.evaluation.sandbox.subprocess.Popen", started)
    assert run_program("import time\ntime.sleep(99)", seconds=1).why == "time"
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
    assert len(groups) == 1


def test_the_program_of_an_answer():
    assert program_in("Here:\n```py\nx\n```\nand\n```\ny\n```") == "x\n"
    assert program_in("```\nx\n") == "x\n" and program_in("def f(): 0") == "def f(): 0"
    assert program_in("```x = 1```") == "x = 1"
