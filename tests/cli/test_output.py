"""What is printed where: tables, progress, quiet; and files: checked before the work, written
whole or not at all."""

import io
import json
import os
import sys

import pytest
from transformers.utils import logging

from turboquant_nb import files
from turboquant_nb.cli import app as output
from turboquant_nb.cli.app import Stage, show_table
from turboquant_nb.evaluation import score as tasks
from tests.helpers import ONE_THREAD

from .conftest import refused

pytestmark = ONE_THREAD


SHORT = "--windows 2 --length 64 --quiet"


class Terminal(io.StringIO):
    isatty = lambda self: True


def test_tables_on_a_terminal_and_elsewhere(monkeypatch, capsys):
    rows = [["name", "bits"], ["k3v3", "3.25"], ["a[b]", "10"]]
    show_table(rows)
    show_table(rows, tabs=True)
    assert (
        capsys.readouterr().out
        == "name   bits\nk3v3   3.25\na[b]     10\nk3v3\t3.25\na[b]\t10\n"
    )
    monkeypatch.setattr(sys, "stdout", Terminal())
    show_table(rows, tabs=True)
    assert "│ a[b] │   10 │" in sys.stdout.getvalue() and "name" in sys.stdout.getvalue()


def test_progress_is_a_bar_on_a_terminal_alone(monkeypatch):
    for where, bar in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", where)
        with Stage("reading [x]", 2, True) as stage:
            stage.tick()
            stage.at(2, 2)
        assert (
            ("\x1b" in where.getvalue()) == bar
            and "reading [x]" in where.getvalue()
            and stage.left == 0
        )
        before = where.getvalue()
        with Stage("quiet", 2, False) as stage:
            stage.tick()
        assert where.getvalue() == before


def test_the_table_comes_before_the_picture(call, plain, tmp_path, monkeypatch):
    "A picture that cannot be drawn costs the picture and nothing else."

    def fail(*args):
        raise RuntimeError("no ink")

    monkeypatch.setattr(tasks, "plot", fail)
    monkeypatch.chdir(tmp_path)
    ask = f"eval attention --model {plain} --recipe k4v4 --out r.json --plot r.png {SHORT}"
    code, out, err = call(ask)
    assert (code, err) == (1, "turboquant eval: no ink\n")
    assert out.startswith("cache") and len(out.splitlines()) == 3
    assert os.listdir() == ["r.json"] and json.loads((tmp_path / "r.json").read_text())["rows"]


def test_a_picture_without_an_ending_is_a_png(call, plain, tmp_path):
    ask = f"eval attention --model {plain} --recipe k4v4 --plot {tmp_path / 'r'} {SHORT}"
    assert call(ask)[0] == 0 and os.listdir(tmp_path) == ["r.png"]
    assert (tmp_path / "r.png").read_bytes()[1:4] == b"PNG"


def test_files_are_written_whole_through_links_with_the_mode_of_the_umask(
    call, plain, tmp_path, monkeypatch
):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "r.json")
    mode = lambda *names: tmp_path.joinpath(*names).stat().st_mode & 0o777
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        for _ in range(2):  # a new file, then one that is there already
            ask = f"eval attention --model {plain} {SHORT} --recipe k4v4 --out link.json"
            assert call(ask)[0] == 0 and (tmp_path / "link.json").is_symlink()
            assert mode("there", "r.json") == 0o640
        assert call(f"calibrate --out c.st --model {plain} {SHORT}")[0] == 0
    finally:
        os.umask(before)
    assert mode("c.st") == 0o640 and sorted(os.listdir()) == ["c.st", "link.json", "there"]
    assert os.listdir("there") == ["r.json"]


@pytest.mark.parametrize(
    "error, code", [(KeyboardInterrupt(), 130), (RuntimeError("disk full"), 1)]
)
def test_what_stops_while_it_writes_leaves_nothing(
    call, plain, tmp_path, monkeypatch, error, code
):
    def stop(*args, **kwargs):
        raise error

    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(files.os, "replace", stop)
    monkeypatch.chdir(tmp_path)
    for line in ("eval attention --recipe k4v4 --out old", "calibrate --out old"):
        assert call(f"{line} --model {plain} {SHORT}")[0] == code
    assert os.listdir() == ["old"] and (tmp_path / "old").read_text() == "old"


def test_a_full_disk_is_seen_before_the_work(call, tiny, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.Path, "write_bytes", full)
    refused(
        call(f"calibrate --model /no/such/model --out {tmp_path / 'c.st'}"),
        "cannot be written (No space left on device)",
        code=1,
    )
    assert list(tmp_path.iterdir()) == []


def test_quiet_is_quiet_for_transformers_too(call, tiny, esm2, tmp_path):
    """Its bars are drawn on standard error wherever that is; they are back when the command
    ends."""
    for line in (
        f"calibrate --model {tiny} --out {tmp_path / 'c.st'} {SHORT}",
        f"variants --model {esm2 / 'model'} --fasta {esm2 / 'one.fasta'} --quiet",
    ):
        code, _, err = call(line)
        assert (code, err) == (0, "") and logging.is_progress_bar_enabled()
