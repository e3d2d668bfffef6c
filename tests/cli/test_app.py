"""What all commands have in common: help, options, imports, exit codes and streams; and that a
command is a file."""

import inspect
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import typer

from turboquant_nb import cli
from turboquant_nb.cli import app as conventions
from turboquant_nb.cli import generate as answers
from turboquant_nb.quant.recipe import PRESETS
from tests.helpers import ONE_THREAD

from .conftest import PROGRAM, refused, shell

pytestmark = ONE_THREAD


def test_a_command_is_a_file(call, tmp_path, monkeypatch):
    "Nothing else is touched: it has its options, its ranges, its help, JSON and exit codes."
    (tmp_path / "whales.py").write_text(
        """
from turboquant_nb.cli.app import app, command, lazy, option, options
from turboquant_nb.cli.app import Output

slow = lazy("turboquant_nb.quant.recipe")


@options("Whales")
class Whales:
    names: list[str] = option(..., "Names.", metavar="NAME")
    times: int = option(1, "How often.", least=1)


@command(app, "whales", "Use it", "turboquant whales --names Moby Dick")
def whales(ask: Whales, output: Output) -> None:
    "Count whales."
    n = len(ask.names) * ask.times
    output.note(f"looking at {len(slow.PRESETS)} seas")
    output.result({"whales": n}, lambda: print(f"{n} whales"))
"""
    )
    monkeypatch.setattr(conventions.app, "registered_commands", [])
    monkeypatch.syspath_prepend(tmp_path.parent)
    cli.register(tmp_path.name, [str(tmp_path)])
    ask = "whales --names Moby Dick --times 3"
    said = f"turboquant: looking at {len(PRESETS)} seas\n"
    assert call(ask) == (0, "6 whales\n", said)
    assert call(f"{ask} --json --quiet") == (0, '{"whales": 6}\n', "")
    refused(call("whales --names a --times 0"), "whales: --times must be at least 1, got 0")
    code, out, _ = call("whales --help")
    assert code == 0 and all(x in out for x in ("--names", "NAME ...", "--times", "--quiet"))
    assert "Count whales." in call("--help")[1] and "turboquant whales" in out


SAID_AT_ONCE = (  # lines, exit code, and what is not loaded for them
    (["--help", "recipe --help"], 0, "torch transformers numpy scipy"),
    (["generate", "generate --file none", "generate --prompt="], 2, "torch transformers"),
    (
        # a wrong recipe in every command that takes one, also behind a right one
        [
            f"{line} k9v9"
            for line in (
                "generate --prompt x --recipe",
                "chat --recipe",
                "demo --recipes k3v3",
                "plan --model embedded --recipe k3v3",
                "eval ppl --recipe k3v3",
                "eval ppl --against dense",
                "serve nothing --recipe",
                "recipe",
                "web --recipe",
            )
        ],
        2,
        "torch transformers",
    ),
    (["generate --prompt x --device abacus"], 2, "transformers"),
)


def test_what_is_said_at_once_loads_nothing_heavy():
    "A slip of the finger is told before the seconds that importing torch takes."
    program = (
        "import sys; from turboquant_nb.cli import main\n"
        f"for lines, code, heavy in {SAID_AT_ONCE!r}:\n"
        "    codes = {main(line.split()) for line in lines}\n"
        "    if codes != {code} or set(heavy.split()) & set(sys.modules):\n"
        "        sys.exit(str((lines, codes, heavy)))"
    )
    done = shell(program=program)
    assert not done.returncode, done.stderr


def test_version_and_main_help(call):
    assert call("--version")[:2] == (0, f"turboquant {metadata.version('turboquant-nb')}\n")
    code, out, _ = call("--help")
    assert code == 0 and all(
        c in out for c in ("demo", "generate", "recipe", "TURBOQUANT_CACHE", "example:")
    )


@pytest.mark.parametrize("line", ["", "eval"])
def test_a_command_of_commands_alone_shows_its_help(call, line):
    code, out, err = call(line)
    assert (code, err) == (0, "") and out == call(f"{line} --help")[1]
    assert f"Usage: {f'turboquant {line}'.strip()} [OPTIONS] COMMAND" in out


def test_the_name_of_every_option_is_told_to_typer():
    "typer 0.27 would name an option that has a parser by its metavar: --BITS."
    for known in conventions.app.registered_commands:
        for x in list(inspect.signature(known.callback).parameters.values())[1:]:
            info = x.annotation.__metadata__[0]
            if isinstance(info, typer.models.OptionInfo):
                # typer keeps the first name as a default until it meets the annotation
                names = str(info.default), *(info.param_decls or ())
                assert any(name.startswith("--") for name in names), (known.name, x.name)


@pytest.mark.parametrize(
    "typed, want",
    [("80 GiB", 80 * 2**30), ("1.5kB", 1500), ("3mb", 3 * 10**6), ("1TiB", 2**40), ("7B", 7)],
)
def test_sizes_as_people_write_them(typed, want):
    assert conventions.size(typed) == want


def test_bytes_for_a_person():
    for n, want in (
        (999_999, "999,999 bytes"),
        (10**6, "1 MB"),
        (1_234_000, "1.23 MB"),
        (45_600_000_000, "45.6 GB"),
        (12_345 * 10**12, "12,345 TB"),
    ):
        assert conventions.in_words(n) == want


KNOWN = {
    "--recipe": conventions.Takes(True, True),
    "--bits": conventions.Takes(True),
    "--json": conventions.Takes(False),
}


@pytest.mark.parametrize(
    "typed, want",
    [
        ("--recipe a b --json c", "--recipe a --recipe b --json c"),
        ("--recipe a --recipe b", "--recipe a --recipe b"),
        ("--recipe=a b", "--recipe=a b"),
        ("--bits 3 4", "--bits 3 4"),
        ("--recipe a -- b", "--recipe a -- b"),
        ("--recipe 0 -1 -.5 - x", "--recipe 0 --recipe -1 --recipe -.5 --recipe - --recipe x"),
        ("--recipe a -q", "--recipe a -q"),
        ("--bits -1", "--bits -1"),
        ("--recipe a --bits=3 b", "--recipe a --bits=3 b"),
        ("", ""),
    ],
)
def test_several_values(typed, want):
    assert conventions.spread(typed.split(), KNOWN) == want.split()


def test_typer_is_not_asked_to_draw_errors():
    "From a shell, with colours forced: one line and no box."
    done = shell("demo", "--bogus", FORCE_COLOR="1", COLUMNS="60")
    refused((done.returncode, done.stdout, done.stderr))
    assert "\x1b" not in done.stderr and "│" not in done.stderr


COMPLETED = (
    ("turboquant rec", ["recipe"]),
    ("turboquant eval ", ["attention", "logits", "ppl"]),
    ("turboquant eval ppl --recipe k3v3 k4v4 --ag", ["--against"]),
    ("turboquant generate --attention s", ["sdpa"]),
    ("turboquant demo --recipes --js", ["--json"]),
)
COMPLETES = """
import io, json, os, sys
from contextlib import redirect_stdout
from turboquant_nb.cli import main
found = []
for line in json.loads(sys.argv[1]):
    at = str(len(line.split(" ")) - 1)
    os.environ |= dict(_TURBOQUANT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=at)
    with redirect_stdout(io.StringIO()) as out:
        assert main([]) == 0
    found.append(out.getvalue().split())
print(json.dumps(found))
sys.exit(sorted({"torch", "transformers", "numpy"} & set(sys.modules)) or 0)
"""


def test_completion_is_quick_and_needs_no_torch():
    "A shell asks; the answer loads nothing heavy, also behind an option of several values."
    done = shell(json.dumps([line for line, _ in COMPLETED]), program=COMPLETES)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [want for _, want in COMPLETED]


def test_failures_inside(call, tiny, monkeypatch):
    ask = f"generate --model {tiny} --prompt x --quiet"
    for err, code in (
        (KeyboardInterrupt(), 130),
        (RuntimeError("out of\nmemory"), 1),
        (ValueError("x"), 1),
        (MemoryError(), 1),
    ):

        def fail(*args, err=err):
            raise err

        monkeypatch.setattr(answers, "generated", fail)
        if code == 130:
            assert call(ask) == (130, "", "")
        else:
            refused(call(ask), str(err).replace("\n", " ") or "MemoryError", code=1)
    with pytest.raises(MemoryError):
        cli.main([*ask.split(), "--debug"])


def test_a_closed_pipe_is_quiet():
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdout.close()
    assert (child.stderr.read(), child.wait()) == ("", 1)


def test_a_pipe_that_closes_while_a_command_writes_is_quiet(tiny, forked):
    process, out, err = forked(f"generate --model {tiny} --prompt x --quiet --max-new-tokens 9")
    out.close()
    assert (err.read(), process.ends()) == (b"", 1)


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("recipe k3v3 >&-", 1, "turboquant: standard output is closed\n"),
        ("--version >&-", 1, "turboquant: standard output is closed\n"),
        ("--version >/dev/full", 1, "No space left"),
        ("recipe k9v9 2>&-", 2, ""),
    ],
)
def test_closed_and_full_streams(line, code, words):
    if "/dev/full" in line and not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {line}', sys.executable, PROGRAM],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == code
        and words in done.stderr
        and "Traceback" not in done.stderr
        and "Exception" not in done.stderr
    ), done
    assert (done.stdout == "") == (code != 0), done.stdout


def test_memory_that_is_not_there_is_said_in_a_sentence(call, tiny):
    "It was a line of torch's source and a number of 17 digits."
    refused(
        call(f"generate --model {tiny} --prompt x --quiet", "--recent", 10**14),
        "not enough memory: ",
        " TB were asked for at once",
        code=1,
    )
