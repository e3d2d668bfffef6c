"""Files that were changed on purpose: the sample of all kinds runs with the other experiments
(`test_bench`); here, that the script sees what it is to see."""

import random
from types import SimpleNamespace

import pytest
import torch

from turboquant_nb.files import Saved

pytest.importorskip("transformers")
archives = pytest.importorskip("eval.archives")


@pytest.fixture
def one(tmp_path, monkeypatch):
    "Fuzz one kind of file with a loader of ours."
    monkeypatch.setattr(archives, "models", lambda: pytest.skip("stores alone"))

    def run(load, count=240):
        x = archives.STORES["k3v3"]()
        judge, use = archives.unsound, archives.use_store
        write = lambda path: archives.write_store(x, path)
        case = archives.Case("store", write, load, archives.write_store, judge, use)
        return archives.fuzz(case, count, 0, tmp_path)

    return run


def test_the_loaders_of_the_package_leave_nothing(one):
    row = one(archives.read_store)
    assert row["bad"] == [] and row["refused"] > 120 and row["loaded"] > 0


def test_numbers_that_are_not_looked_at_are_found(monkeypatch, tmp_path):
    "A mutant that reads tensors of any kind leaves NaN, which the script sees."
    with monkeypatch.context() as patched:
        patched.setattr(Saved, "tensor", lambda self, name, *_, **__: self[name])
        store = archives.STORES["k3v3"]()
        store.key.memory.tensors["scale"][0, 0, 0, 0] = torch.nan
        archives.write_store(store, tmp_path / "nan")
        assert archives.unsound(archives.read_store(tmp_path / "nan")) == "scale"
    with pytest.raises(ValueError, match="key.scale"):
        archives.read_store(tmp_path / "nan")


def test_what_is_allocated_is_counted(one):
    def load(path):
        torch.zeros(2**20)  # 4 MB
        return archives.read_store(path)

    gone = SimpleNamespace(n=0)

    def careless(path):
        gone.n += 1
        if gone.n == 5:  # bytes of Python count too
            bytearray(2**22)
        return archives.read_store(path)

    assert all(x.startswith("allocated") for x in one(load, 3)["bad"])
    assert [x.split(":")[0] for x in one(careless, 9)["bad"]] == ["allocated"]


def test_changes_are_of_every_kind(tmp_path):
    x = archives.STORES["k3v3"]()
    judge, use = archives.unsound, archives.use_store
    write = lambda path: archives.write_store(x, path)
    case = archives.Case("store", write, archives.read_store, archives.write_store, judge, use)
    found = archives.original(case, tmp_path / "x")
    rng, said = random.Random(0), ""
    for _ in range(300):
        try:
            said += archives.changed(found, rng)[3] + ";"
        except RecursionError:  # nests too deep for a file
            continue
    for what in ("drop (", "value (", "rename (", "'json', 'key'", "dtype ", "shape ", "swap "):
        assert what in said
    for what in ("add ", "numbers ", "_recent"):
        assert what in said
