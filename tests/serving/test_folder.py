"""Pages in a folder that engines share, without an engine: what a record is, what is a miss and
what is said of it, who writes and who removes. `test_vllm.py` has the engines."""

import errno
import json
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from turboquant_nb import files
from turboquant_nb.cache.codec import CODES, HEADER, Reader, Writer
from turboquant_nb.quant.calibration import Calibration
from turboquant_nb.serving import folder
from turboquant_nb.serving.folder import FORMAT, Records, seed_reason, weights_of
from turboquant_nb.serving.refusals import TIER, connector_reasons

ABOUT, N = dict(recipe="k3v3", weights="w", engine="vllm 1"), 3000
KEY, OTHER = bytes(range(36)), bytes(36)
PAGE = torch.randint(256, (N,), generator=torch.Generator().manual_seed(0)).numpy().tobytes()
PAGE = bytes(x % 256 for x in range(N - 8)) + PAGE[:8]


@pytest.fixture
def said(caplog):
    "What was said so far, oldest first."
    caplog.set_level(logging.WARNING, folder.__name__)
    return lambda: [x.getMessage() for x in caplog.records]


def read(records, key=KEY):
    "The page; None for a miss, which leaves what was there."
    back = bytearray(b"\x55" * N)
    if records.read(key, memoryview(back)):
        return bytes(back)
    assert back == b"\x55" * N
    return None


def place(records, key=KEY, data=None):
    path = Path(records.path(key))
    path.parent.mkdir(parents=True, exist_ok=True)
    if data is not None:
        path.write_bytes(data)
    return path


def test_a_record_comes_back_and_says_whose_it_is(tmp_path, said):
    records = Records(tmp_path, ABOUT, N)
    assert not records.has(KEY) and read(records) is None
    assert records.write(KEY, memoryview(PAGE)) and records.has(KEY) and read(records) == PAGE
    path = Path(records.path(KEY))
    assert path.stat().st_size == records.size(KEY) == records.size(OTHER)
    assert path.name == f"{KEY.hex()}.page" and path.parents[2] == tmp_path
    with open(path, "rb") as file:
        reader = Reader(file, path, path.stat().st_size, FORMAT)
        assert reader.header == dict(about=ABOUT, key=KEY.hex())
    assert json.loads((path.parents[1] / "about.json").read_text()) == ABOUT
    again = Records(str(tmp_path), dict(reversed(ABOUT.items())), N)  # another process
    assert again.has(KEY) and read(again) == PAGE
    assert len(said()) == 1 and "it is not there any more" in said()[0]  # before it was


def test_every_cut_and_every_changed_byte_is_a_miss(tmp_path, said):
    records = Records(tmp_path, ABOUT, N)
    records.write(KEY, PAGE)
    path = Path(records.path(KEY))
    good = path.read_bytes()
    for n in (*range(0, len(good), 37), len(good) - 1):
        path.write_bytes(good[:n])
        assert not records.has(KEY) and read(records) is None, n
    for i in (*range(0, 700, 3), *range(700, len(good), 31), *range(len(good) - 90, len(good))):
        path.write_bytes(bytes([*good[:i], good[i] ^ 0x41, *good[i + 1 :]]))
        assert records.has(KEY) and read(records) is None, i
    for bad in (good + b"\0", bytes(len(good)), good[::-1]):
        path.write_bytes(bad)
        assert read(records) is None
    path.write_bytes(good)
    assert read(records) == PAGE
    assert 0 < len(said()) < 12, said()  # of some hundreds


def test_reasons_are_said_once_with_a_file(tmp_path, said):
    records = Records(tmp_path, ABOUT, N)
    for key in (KEY, OTHER):
        records.write(key, PAGE)
        path = Path(records.path(key))
        path.write_bytes(path.read_bytes()[:-1])
        assert not records.has(key)
    (line,) = said()
    want = records.size(KEY)
    assert line == (
        f"turboquant_nb: {records.path(KEY)} is a miss: {want} bytes expected, {want - 1} "
        "found (said once)"
    )


def test_the_page_of_another_place(tmp_path, said):
    records = Records(tmp_path, ABOUT, N)
    records.write(KEY, PAGE)
    good = Path(records.path(KEY)).read_bytes()
    place(records, OTHER, good)
    assert read(records, OTHER) is None and "written with another key" in said()[-1]
    for name in ABOUT:
        another = Records(tmp_path, ABOUT | {name: "other"}, N)
        assert another.home != records.home and not another.has(KEY)
        assert "not for this engine: those in" in said()[-1]
        assert f"have another {name}" in said()[-1]
        place(another, KEY, good)
        assert read(another) is None and f"written with another {name} " in said()[-1] + " "
    wider = Records(tmp_path, ABOUT, N + 1)  # `about` says how many; if it did not:
    back = memoryview(bytearray(N + 1))
    assert not wider.read(KEY, back) and "a page of 3001 bytes expected, 3000" in said()[-1]


def test_a_folder_with_ones_own_pages_and_others_is_no_news(tmp_path, said):
    for recipe in ("k3v3", "k4v4", "k2v2"):
        Records(tmp_path, dict(recipe=recipe), N).write(KEY, PAGE)
    assert len(said()) == 2 and said()[1].count("have another recipe") == 2
    Records(tmp_path, dict(recipe="k4v4"), N)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/about.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/about.json").write_text("[1]")
    deep, pipe = tmp_path / "deep/about.json", tmp_path / "pipe/about.json"
    for path in (deep, pipe):
        path.parent.mkdir()
    deep.write_text("[" * 100_000)
    os.mkfifo(pipe)
    Records(tmp_path, dict(recipe="k4v4"), N)
    assert len(said()) == 2
    Records(tmp_path, dict(recipe="k1v1"), N)
    assert said()[2].count("have another recipe") == 3 and "in other" not in said()[2]


def test_whatever_a_stream_says_is_a_miss(tmp_path, said):
    "Streams with right checksums that are no pages."
    records = Records(tmp_path, ABOUT, N)

    def stream(*parts, header=None, end=True):
        path = place(records)
        with open(path, "wb") as file:
            writer = Writer(file, header or records.header(KEY) | {"format": FORMAT}, False)
            for kind, data in parts:
                writer.record(kind, [data])
            if end:
                writer.close()
        assert read(records) is None

    stream((CODES, PAGE), end=False)
    stream((CODES, PAGE), (CODES, PAGE))
    stream((CODES, PAGE[1:]))
    stream((HEADER, PAGE))
    stream()
    stream((CODES, PAGE), header=dict(format=FORMAT))
    stream((CODES, PAGE), header=dict(format=FORMAT, about=[1], key=KEY.hex()))
    stream((CODES, PAGE), header=dict(format=FORMAT, about=None, key=None))
    stream((CODES, PAGE), header=records.header(KEY) | dict(format="turboquant-nb pages 9"))
    for line in (
        "another key, recipe, weights, engine",
        "another recipe, weights, engine, about",
        "it has no end",
        "a page of 3000 bytes expected",
        "got 'turboquant-nb pages 9'",
    ):
        assert any(line in x for x in said()), (line, said())


def test_writers_at_once(tmp_path, said):
    "A reader sees the page or none, of whichever writer, never a part; nothing is left behind."
    writers = [Records(tmp_path, ABOUT, N) for _ in range(4)]
    reader, stop, seen, failed = Records(tmp_path, ABOUT, N), threading.Event(), set(), []

    def look():
        while not stop.is_set():
            if reader.has(KEY):
                seen.add(read(reader))

    def write(records, page):
        for _ in range(50):
            if not records.write(KEY, page):
                failed.append(page[:1])

    pages = [bytes([i]) * N for i in range(4)]
    threads = [threading.Thread(target=write, args=x) for x in zip(writers, pages)]
    looking = threading.Thread(target=look)
    for t in (looking, *threads):
        t.start()
    for t in threads:
        t.join()
    stop.set()
    looking.join()
    assert seen and seen <= {*pages} and read(reader) in pages and not failed
    assert not said() and {x.suffix for x in tmp_path.rglob("*.*")} == {".page", ".json"}


class NoRoom:
    "A file on a disk that is full after so many bytes."

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def fileno(self):
        return self.file.fileno()

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)


def test_a_full_disk(tmp_path, said, monkeypatch):
    records = Records(tmp_path, ABOUT, N)
    records.write(OTHER, PAGE)
    with monkeypatch.context() as m:
        full = lambda path, mode: (
            NoRoom(open(path, mode), 1000) if "x" in mode else open(path, mode)
        )
        m.setattr(files, "open", full, raising=False)
        for key in (KEY, bytes(35) + b"1", OTHER):
            assert not records.write(key, PAGE)
    assert len(said()) == 1 and "was not written: No space left on device" in said()[0]
    assert not [*tmp_path.rglob("*.part")] and not records.has(KEY)
    assert read(records, OTHER) == PAGE  # what was there stays
    assert records.write(KEY, PAGE) and read(records) == PAGE


def test_a_folder_that_went_is_not_made_anew(tmp_path, said):
    "It may be a file system that is not mounted any more."
    shared = tmp_path / "shared"
    shared.mkdir()
    records = Records(shared, ABOUT, N)
    shared.rmdir()
    assert not records.write(KEY, PAGE) and not shared.exists()
    assert "was not written: No such file or directory" in said()[0]
    for wrong in (shared, tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="path must be a folder that is there, got '"):
            Records(wrong, ABOUT, N)


def test_a_folder_in_the_place_of_a_page(tmp_path, said):
    records = Records(tmp_path, ABOUT, N)
    place(records).mkdir()
    assert not records.has(KEY) and read(records) is None and not records.write(KEY, PAGE)
    assert all("is a miss" in x or "was not written" in x for x in said())


def foreign_files(root, records) -> list:
    "Old files that look like pages and parts, in folders and behind links that no tier made."
    elsewhere = root.parent / f"{root.name} elsewhere"
    home, name = elsewhere / "home", place(records).name
    (home / name[:2]).mkdir(parents=True)
    (root / "book/ch").mkdir(parents=True)
    out = [root / "book/ch/one.page", root / "book/ch/two.part", home / name[:2] / name]
    out += [Path(records.home, "ab", name), place(records).with_name("mine.page")]
    out[3].parent.mkdir()
    (root / "linked").symlink_to(home)
    (Path(records.home) / "cd").symlink_to(home / name[:2])
    out.append(home / name[:2] / f"cd{name[2:]}")
    for path in out:
        path.touch()
        os.utime(path, (1, 1))
    return out


def test_room(tmp_path):
    "Pages of all kinds that were used longest ago go; nothing else does."
    other = Records(tmp_path, ABOUT | dict(recipe="k4v4"), N)
    for i in range(8):
        other.write(bytes(35) + bytes([i]), PAGE)
        os.utime(other.path(bytes(35) + bytes([i])), (i, i))
    foreign = place(other).with_name("notes.txt")
    foreign.write_text("mine")
    beside = lambda n: place(other).with_suffix(f".page.{n:08x}.part")
    old, new = beside(1), beside(2)
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (9, 9))
    theirs = foreign_files(tmp_path, other)
    records = Records(tmp_path, ABOUT, N, 32 * other.size(KEY))
    for i in range(100):
        key = bytes(34) + bytes([1, i])
        assert records.write(key, PAGE)
        os.utime(records.path(key), (1000 + i, 1000 + i))
        if records.has(bytes(34) + bytes([1, 0])):  # used again and again
            assert read(records, bytes(34) + bytes([1, 0])) == PAGE
        held = sum(x.stat().st_size for x in tmp_path.glob("*/*/*.page"))
        assert held <= 32 * other.size(KEY), i
    kept = [i for i in range(100) if records.has(bytes(34) + bytes([1, i]))]
    assert kept[0] == 0 and kept[1:] == [*range(kept[1], 100)] and len(kept) > 25, kept
    assert not any(other.has(bytes(35) + bytes([i])) for i in range(8))
    assert foreign.exists() and new.exists() and not old.exists()
    assert all(path.exists() for path in theirs), [x for x in theirs if not x.exists()]
    with pytest.raises(ValueError, match="max_bytes must be an integer of at least 48000"):
        Records(tmp_path, ABOUT, N, 47_999)


def test_weights_are_told_by_samples(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    data = torch.randint(256, (2**20,), generator=torch.Generator().manual_seed(1))
    data = bytes(data.to(torch.uint8).numpy())
    for path in (one, two):
        path.mkdir()
        (path / "config.json").write_text(path.name)
        (path / "model-1.safetensors").write_bytes(data)
        (path / "model-2.safetensors").write_bytes(data[:5000])
    assert weights_of(str(one)) == weights_of(str(two)) != weights_of("one")
    same = weights_of(str(one))
    for change in (
        lambda x: x[:-1],
        lambda x: bytes([x[0] ^ 1]) + x[1:],
        lambda x: x[:-1] + bytes([x[-1] ^ 1]),
        lambda x: x[: 2**19] + bytes(2**15) + x[2**19 + 2**15 :],  # a thirty-second of it
    ):
        (two / "model-1.safetensors").write_bytes(change(data))
        assert weights_of(str(two)) != same
    (two / "model-1.safetensors").write_bytes(data)
    assert weights_of(str(two)) == same
    (two / "model-2.safetensors").rename(two / "model-3.safetensors")
    assert weights_of(str(two)) != same
    empty = tmp_path / "empty"
    empty.mkdir()
    assert weights_of(str(empty), "r") == f"those of {empty}, revision r"
    hub = lambda name, file, revision: (
        str(one / file) if (name, revision) == ("a/b", "r") else None
    )
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", hub)
    monkeypatch.undo()
    assert weights_of("s3://a/b") == "those of s3://a/b, revision None"  # no name on the hub
    file = two / "model-3.safetensors"
    assert weights_of(str(file)) != weights_of(str(two)) and len(weights_of(str(file))) == 64
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", hub)
    assert weights_of("a/b", "r") == same and weights_of("a/b") == "those of a/b, revision None"


@dataclass
class Parallel:
    rank: int = 0
    tp_size: int = 1


@dataclass
class Model:
    name: str = "one"
    dtype: str = "uint8"


@dataclass
class Told:
    "As vLLM's OffloadingConfig."

    engine_id: str = "a"
    groups: tuple = (("layer0", 64), ("layer0.recent", 2))
    extra_config: dict = field(default_factory=dict)
    parallel: Parallel = field(default_factory=Parallel)
    model: Model = field(default_factory=Model)


def test_the_layout_of_pages():
    "What differs between engines that may share pages does not count, all else does."
    same = folder._layout_of(Told(), 4096)
    alike = Told("b", extra_config=dict(cpu=1), parallel=Parallel(rank=3), model=Model("two"))
    assert folder._layout_of(alike, 4096) == same
    for other in (
        Told(groups=()),
        Told(parallel=Parallel(tp_size=2)),
        Told(model=Model("one", "x")),
    ):
        assert folder._layout_of(other, 4096) != same
    assert folder._layout_of(Told(), 8192) != same


def engine_config(**changes):
    facts = dict(hidden_size=8, _name_or_path="/here", transformers_version="5") | changes.pop(
        "facts", {}
    )
    of = dict(
        model="m", revision=None, dtype=torch.bfloat16, quantization=None, max_model_len=100
    )
    of |= {name: changes.pop(name) for name in [*changes] if name in of}
    options = dict(recipe="k3v3", recent=8, sinks=2) | changes.pop("options", {})
    algorithm = changes.pop("algorithm", "sha256")
    return SimpleNamespace(
        additional_config=dict(turboquant_nb=options),
        model_config=SimpleNamespace(**of, hf_config=SimpleNamespace(to_dict=lambda: facts)),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        load_config=SimpleNamespace(load_format=changes.pop("load", "auto")),
    )


def test_whose_pages_they_are(monkeypatch):
    monkeypatch.setattr(folder, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    of = lambda layout=(1,), **changes: folder.about_of(
        engine_config(**changes), dict(x=layout)
    )
    same = of()
    json.dumps(same)
    differ = lambda other: [name for name in same if same[name] != other[name]]
    assert not differ(of(facts=dict(_name_or_path="/there", transformers_version="6")))
    assert not differ(of(max_model_len=200))  # unless angles depend on it:
    long = dict(rope_scaling=dict(type="longrope"))
    assert of(facts=long)["model"] != of(facts=long, max_model_len=200)["model"]
    for name, other in dict(
        recipe=dict(options=dict(recipe="k4v4")),
        frame=dict(options=dict(means=False)),
        model=dict(facts=dict(hidden_size=9)),
        weights=dict(model="n"),
        numbers=dict(dtype=torch.float16),
        hashes=dict(algorithm="xxhash"),
        pages=dict(layout=(2,)),
    ).items():
        assert differ(of(**other)) == [name]
    assert differ(of(options=dict(recent=9))) == differ(of(options=dict(sinks=1))) == ["recipe"]
    assert differ(of(options=dict(past_tokens=512))) == []
    assert (
        differ(of(quantization="fp8")) == ["numbers"] and of(load="dummy")["weights"] == "dummy"
    )
    about = {"layers": 1, "KV heads": 1, "head size": 4, "model type": "llama"}
    means = [
        Calibration([], dict(about=about), [torch.full((1, 4), x)]) for x in (1.0, 2.0, 1.0)
    ]
    found = [of(options=dict(calibration=x)) for x in means]
    assert found[0] == found[2] and differ(found[0]) == ["frame"]
    assert found[0]["frame"] != found[1]["frame"]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert differ(of()) == ["hashes"]
    monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.setattr(folder, "vllm", SimpleNamespace(__version__="0.33.0"))
    assert differ(of()) == ["engine"]


def test_hashes_that_begin_anywhere():
    assert "sha256 hashes of blocks with a random number: set PYTHONHASHSEED" in seed_reason(
        "sha256", False
    )
    assert seed_reason("xxhash", True) and not seed_reason("xxhash", True, "0")
    assert not seed_reason("sha256", True) and not seed_reason("sha256_cbor", False, "0")


def test_what_vllm_is_told(tmp_path):
    told = folder.transfer_config(tmp_path, 100, max_bytes=7)
    extra = told["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 100 and extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["secondary_tiers"] == [dict(type=TIER, path=str(tmp_path), max_bytes=7)]
    assert connector_reasons(SimpleNamespace(**told)) == []
    (reason,) = connector_reasons(SimpleNamespace(**told), object())
    assert reason.startswith("LoRA with the tier 'turboquant_nb': its pages do not tell")
    extra["secondary_tiers"] += [dict(type="fs", root_dir="/"), dict(type="p2p")]
    reasons = connector_reasons(SimpleNamespace(**told))
    assert [x.split(" of ")[0] for x in reasons] == ["the tier 'fs'", "the tier 'p2p'"]
    extra["spec_name"] = "OtherSpec"
    (reason,) = connector_reasons(SimpleNamespace(**told))
    assert reason.startswith("spec_name='OtherSpec'") and "by which recipe" in reason
    assert (
        folder.transfer_config(".")["kv_connector_extra_config"]["secondary_tiers"][0]["path"]
        == os.getcwd()
    )


@dataclass
class OldResult:
    "Of vLLM 0.26."

    job_id: int
    success: bool


@dataclass
class NewResult(OldResult):
    successful_keys: tuple | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@pytest.fixture(params=[OldResult, NewResult])
def tier(request, tmp_path, monkeypatch):
    "The tier over memory of 8 pages, without what vLLM gives it."
    asked = {}
    lookups = SimpleNamespace(lookup=lambda key, request: asked.get(key), shutdown=lambda: None)
    results = SimpleNamespace(HIT="hit", MISS="miss", RETRY="retry")
    monkeypatch.setattr(folder, "JobResult", request.param, raising=False)
    monkeypatch.setattr(folder, "LookupResult", results, raising=False)
    made = folder.FolderTier.__new__(folder.FolderTier)
    made.asked, made.memory = asked, bytearray(8 * N)
    made._open(Records(tmp_path, ABOUT, N), memoryview(made.memory), lookups, 3)
    yield made
    made.shutdown()


def job(tier, number, keys, at, what, name="chunk_ids"):
    getattr(tier, what)(SimpleNamespace(job_id=number, keys=keys, **{name: at}))
    tier.drain_jobs()
    return list(tier.get_finished_jobs())


def test_jobs(tier):
    "Pages go and come; one that does not arrive is a miss until it was written anew."
    keys = [bytes(35) + bytes([i]) for i in range(4)]
    for i in range(4):
        tier.memory[i * N : (i + 1) * N] = bytes([i + 1]) * N
    (done,) = job(tier, 7, keys, range(4), "submit_store", "block_ids")
    assert (done.job_id, done.success) == (7, True) and not tier.jobs
    (done,) = job(tier, 8, keys[::-1], range(4, 8), "submit_load")
    assert done.success and tier.memory[4 * N :] == b"".join(
        bytes([i]) * N for i in (4, 3, 2, 1)
    )
    if isinstance(done, NewResult):
        assert done.transfer_bytes == 4 * N and done.transfer_time > 0
        assert done.successful_keys is None
    for found, want in ((None, "retry"), (True, "hit"), (False, "miss")):
        tier.asked[keys[1]] = found
        assert tier.lookup(keys[1], None) == want
    path = Path(tier.records.path(keys[1]))
    good = path.read_bytes()
    path.write_bytes(good[:2000] + b"x" + good[2001:])
    tier.asked[keys[1]] = True
    (done,) = job(tier, 9, keys[:2], (6, 7), "submit_load")
    assert not done.success and tier.memory[6 * N : 7 * N] == bytes([1]) * N
    if isinstance(done, NewResult):
        assert done.successful_keys == keys[:1] and done.transfer_bytes == N
    assert tier.lookup(keys[1], None) == "miss"
    (done,) = job(tier, 10, keys[1:2], (1,), "submit_store")
    assert done.success and path.read_bytes() == good and tier.lookup(keys[1], None) == "hit"
    wrote = path.stat().st_mtime_ns
    assert job(tier, 11, keys, range(4), "submit_store")[0].success
    assert path.stat().st_mtime_ns == wrote  # it was there
    assert job(tier, 12, [], (), "submit_load")[0].success


def test_a_page_that_cannot_be_written(tier, monkeypatch):
    monkeypatch.setattr(Records, "write", lambda self, key, page: key != KEY)
    (done,) = job(tier, 1, [KEY, OTHER], (0, 1), "submit_store")
    assert not done.success and not tier.lost
    if isinstance(done, NewResult):
        assert done.successful_keys is None and done.transfer_bytes == N


def test_nothing_is_reported_before_it_is_over(tier, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(Records, "write", lambda self, key, page: go.wait(30))
    tier.submit_store(SimpleNamespace(job_id=1, keys=[KEY], chunk_ids=[0]))
    assert list(tier.get_finished_jobs()) == [] and 1 in tier.jobs
    go.set()
    tier.drain_jobs()
    assert [x.job_id for x in tier.get_finished_jobs()] == [1]
