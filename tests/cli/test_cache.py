"""turboquant cache: a stored prefix is gone on from as if it had just been read; files that are
no such files are refused in a line."""

import json

import pytest

from turboquant_nb.cache.codec import KVStore
from tests.cli.conftest import shell
from turboquant_nb.evaluation.models import sample_text

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = sample_text()[:600]


@pytest.fixture
def stored(call, tiny, tmp_path):
    pytest.importorskip("constriction")
    path = tmp_path / "a.tq"
    code, out, _ = call(f"cache save --model {tiny} --json --out {path} --prompt", TEXT)
    assert code == 0
    return path, json.loads(out)


def test_what_follows_is_what_generate_writes_on_both(call, tiny, stored):
    path, about = stored
    assert about["nbytes"] == path.stat().st_size and about["ratio"] > 0
    how = f"--model {tiny} --max-new-tokens 8 --json --prompt"
    got = json.loads(call(f"cache load {path} {how}", " And then")[1])
    whole = json.loads(call(f"generate --no-chat {how}", TEXT + " And then")[1])
    assert got["prefix_tokens"] + got["prompt_tokens"] == whole["prompt_tokens"]
    assert got["prefix_tokens"] == about["tokens"] and len(got["text"]) > 0
    alone = shell("cache", "load", path, *how.split(), " And then")  # nothing is imported yet
    assert not alone.returncode and json.loads(alone.stdout)["text"] == got["text"], alone


def test_info_and_convert_keep_every_bit(call, tiny, stored, tmp_path):
    path, about = stored
    found = json.loads(call(f"cache info {path} --json")[1])
    assert found["layers"] == 2 and found["tokens"] == about["tokens"]
    assert sum(found["sizes"].values()) < found["nbytes"] == about["nbytes"]
    assert call(f"cache convert {path} --out {tmp_path / 'b'} --raw --coarse")[0] == 0
    assert (tmp_path / "b").stat().st_size > path.stat().st_size
    assert "last planes" in call(f"cache info {tmp_path / 'b'}")[1]
    assert call(f"cache convert {tmp_path / 'b'} --out {tmp_path / 'b'}")[0] == 0
    assert (tmp_path / "b").read_bytes() == path.read_bytes()


def test_what_is_refused(call, tiny, stored, tmp_path):
    path, _ = stored
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    (tmp_path / "changed").write_bytes(data)
    (tmp_path / "cut").write_bytes(data[:-900])
    KVStore("k3v3", 1, 1, 8).save(tmp_path / "store")
    load = f"--model {tiny} --prompt x"
    for line, why in (
        (f"cache info {tmp_path / 'none'}", "there is no such file"),
        (f"cache info {tmp_path / 'changed'}", "a checksum does not match"),
        (f"cache convert {tmp_path / 'cut'} --out {tmp_path / 'x'}", "truncated"),
        (f"cache load {tmp_path / 'cut'} {load}", "truncated"),
        (f"cache load {tmp_path / 'store'} {load}", "must hold 'prefix'"),
        (f"cache save --model {tiny} --out {tmp_path / 'x'}", "a prompt is needed"),
    ):
        code, _, err = call(line)
        assert code in (1, 2) and why in err and "Traceback" not in err, (line, err)
    assert not (tmp_path / "x").exists()
