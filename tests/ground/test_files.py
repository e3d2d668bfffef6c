"""Files of tensors and a header: there and back, and everything that is refused. What is
written into them is tested where it is made."""

import errno
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from turboquant_nb.files import (
    beside,
    cache_dir,
    digest,
    is_private,
    private_folder,
    read_file,
    temporary_folder,
    write_file,
)
from turboquant_nb.testing import same
from tests.helpers import refuses

KIND = "turboquant-nb test 2"
HEADER = {"n": 3, "text": "ü", "list": [1, None, {"a": 2.5}]}
TENSORS = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "half": torch.tensor([0.5, torch.nan], dtype=torch.float16),
    "brain": torch.tensor(1.5, dtype=torch.bfloat16),
    "turned": torch.arange(6.0).view(2, 3).T,
    "spread": torch.tensor([1, 2]).expand(3, 2),
    "empty": torch.empty(0, 4),
    "flag": torch.tensor([True, False]),
}


@pytest.fixture
def path(tmp_path):
    write_file(tmp_path / "x", TENSORS, HEADER, KIND)
    return tmp_path / "x"


def test_there_and_back(path):
    """Every dtype and layout, and the header as it was given; kills a header that keeps what
    the file adds."""
    before = dict(HEADER)
    tensors, header = read_file(path, KIND, "test")
    assert header == HEADER == before and tensors.keys() == TENSORS.keys()
    for name, t in TENSORS.items():
        same(tensors[name], t.contiguous(), allow_empty=True)
    again = path.with_name("again")
    write_file(again, tensors, header, KIND)
    assert again.read_bytes() == path.read_bytes()


def test_the_digest_sees_everything():
    "Header, name, dtype, shape and bytes; not the order. Kills a digest of the bytes alone."
    t = {"a": torch.zeros(4, dtype=torch.uint8), "b": torch.ones(2)}
    seen = {digest(t, {"x": 1})}
    others = [
        (t, {"x": 2}),
        ({"c": t["a"], "b": t["b"]}, {"x": 1}),
        (t | {"a": torch.zeros(2, 2, dtype=torch.uint8)}, {"x": 1}),
        (t | {"a": torch.zeros(1)}, {"x": 1}),
        (t | {"a": torch.zeros(4, dtype=torch.int8)}, {"x": 1}),
        (t | {"b": torch.tensor([1.0, -1.0])}, {"x": 1}),
        (t | {"none": torch.empty(0)}, {"x": 1}),
    ]
    for tensors, header in others:
        assert (d := digest(tensors, header)) not in seen
        seen.add(d)
    assert digest(dict(reversed(t.items())), {"x": 1}) in seen and digest(
        t, {"y": 2, "x": 1}
    ) == digest(t, {"x": 1, "y": 2})


def test_damage_is_refused(path):
    data = path.read_bytes()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        path.write_bytes(broken)
        with pytest.raises(ValueError):
            read_file(path, KIND, "test")
    for size in (0, 7, 8, 100, len(data) - 1):
        path.write_bytes(data[:size])
        with refuses("is not a readable test: truncated or of another kind"):
            read_file(path, KIND, "test")


def test_other_kinds_are_refused(path, tmp_path):
    with refuses("no such file", FileNotFoundError):
        read_file(tmp_path / "missing", KIND, "test")
    with refuses("is not a readable test"):
        read_file(tmp_path, KIND, "test")
    with refuses(f"must have format 'turboquant-nb test 3', got '{KIND}'"):
        read_file(path, "turboquant-nb test 3", "test")
    for metadata in (
        None,
        {"header": "{"},
        {"header": "[]"},
        {"header": '{"format": ["a"]}'},
        {"header": json.dumps({"format": KIND})},
    ):
        save_file({"a": torch.zeros(2)}, tmp_path / "y", metadata=metadata)
        with refuses("y"):
            read_file(tmp_path / "y", KIND, "test")


def test_a_full_disk_leaves_the_old_file(path):
    "An OSError that names the file, from whatever writes; a limit of the process is as full."
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old), limits[1]))
    try:
        with pytest.raises(OSError) as error:
            write_file(path, TENSORS | {"more": torch.zeros(10_000)}, {}, KIND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG and str(path) in str(error.value)
    assert path.read_bytes() == old and [x.name for x in path.parent.iterdir()] == ["x"]


def test_an_error_without_a_number_keeps_its_words(path):
    with refuses("^disk full$", OSError), beside(path):
        raise OSError("disk full")


def test_what_a_killed_writer_left_goes_with_the_next_write(path):
    "After an hour, and nothing else that looks like it."
    if not (child := os.fork()):
        with beside(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), 9)
    assert os.waitpid(child, 0)[1] == 9
    (left,) = path.parent.glob("*.part")
    assert left.read_bytes() == b"half"
    other = [path.with_name(x) for x in ("x.part", "x.mine.part", "y.0123abcd.part", "xx")]
    for each in (left, *other):
        each.touch()
        os.utime(each, (1, 1))
    os.utime(left, (time.time() - 60,) * 2)
    write_file(path, TENSORS, HEADER, KIND)
    assert left.exists(), "somebody may be writing it"
    os.utime(left, (time.time() - 4000,) * 2)
    write_file(path, TENSORS, HEADER, KIND)
    assert not left.exists() and all(x.exists() for x in other)
    assert read_file(path, KIND, "test")[1] == HEADER


def test_the_metadata_hold_format_and_digest(path):
    with safe_open(path, "pt") as f:
        header = json.loads(f.metadata()["header"])
    assert header["format"] == KIND and len(header["sha256"]) == 64 and header["n"] == 3


def test_the_header_of_another_file_may_be_written_again(path):
    "With the format and the digest that it had there; both are set anew."
    write_file(path, TENSORS, HEADER | {"format": "other", "sha256": "0" * 64}, KIND)
    assert read_file(path, KIND, "test")[1] == HEADER


def test_folders_are_named_as_such(path, tmp_path):
    """safetensors named a file of its own in a folder that is not there, Python two files of
    which one was ours, and the operating system a device that does not exist."""
    with refuses("no such folder: .*none$", FileNotFoundError):
        write_file(tmp_path / "none" / "x", TENSORS, HEADER, KIND)
    with refuses("expected a file to write, got the folder", IsADirectoryError):
        write_file(tmp_path, TENSORS, HEADER, KIND)
    with refuses("not a readable test: expected a file, got a folder"):
        read_file(tmp_path, KIND, "test")
    for f in (
        lambda: write_file(None, TENSORS, HEADER, KIND),
        lambda: read_file(None, KIND, "test"),
    ):
        with refuses("expected str, bytes or os.PathLike object, not NoneType", TypeError):
            f()
    assert [x.name for x in tmp_path.iterdir()] == ["x"]


def test_others_may_read_what_the_umask_allows(tmp_path):
    """safetensors makes files that only their owner can read; a file is as readable as any
    other that is made here."""
    (tmp_path / "usual").touch()
    write_file(tmp_path / "x", TENSORS, HEADER, KIND)
    mode = [(tmp_path / name).stat().st_mode & 0o777 for name in ("usual", "x")]
    assert mode[0] == mode[1], [oct(m) for m in mode]
    before = os.umask(0o077)
    try:
        write_file(tmp_path / "private", TENSORS, HEADER, KIND)
    finally:
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


# --- where downloads and compiled kernels are kept


HOME = Path.home().as_posix()


@pytest.mark.parametrize(
    "platform, env, want",
    [
        ("linux", dict(TURBOQUANT_CACHE="/a/b", XDG_CACHE_HOME="/x"), "/a/b"),
        ("linux", dict(TURBOQUANT_CACHE="", XDG_CACHE_HOME="/x"), "/x/turboquant-nb"),
        ("linux", dict(TURBOQUANT_CACHE="~/mine"), f"{HOME}/mine"),
        ("linux", {}, f"{HOME}/.cache/turboquant-nb"),
        ("darwin", {}, f"{HOME}/Library/Caches/turboquant-nb"),
        ("win32", {}, f"{HOME}/AppData/Local/turboquant-nb"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/turboquant-nb"),
    ],
)
def test_cache_dir(monkeypatch, platform, env, want):
    for key in ("TURBOQUANT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_dir().as_posix() == want


def test_a_user_without_a_home_has_a_folder_in_the_temporary_one(monkeypatch, tmp_path):
    "As in a container: no HOME, and a number of a user that has no entry."
    for key in ("TURBOQUANT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**30 + 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = cache_dir()
    assert found == cache_dir() == temporary_folder() and found.parent == tmp_path
    assert found.stat().st_mode & 0o777 == 0o700 and len([*tmp_path.iterdir()]) == 1
    found.chmod(0o777)
    with refuses("another user may have written to it: '.*nb-", PermissionError):
        cache_dir()


def test_a_folder_for_code_is_its_users_alone(monkeypatch, tmp_path):
    mine = private_folder(tmp_path / "deep" / "mine")
    assert mine.stat().st_mode & 0o777 == 0o700 and private_folder(mine) == mine
    for mode, private in ((0o755, True), (0o775, False), (0o757, False), (0o700, True)):
        mine.chmod(mode)
        assert is_private(mine) == private, oct(mode)
    monkeypatch.setattr(os, "geteuid", lambda: mine.stat().st_uid + 1)
    with refuses("another user may have written to it", PermissionError):
        private_folder(mine)
    (tmp_path / "file").touch()
    with refuses("file", OSError):
        private_folder(tmp_path / "file" / "x")
