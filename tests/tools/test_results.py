"""Records of measurements: code that is not committed is refused and named, rows keep their
commit, and the files of this repository obey."""

import subprocess
from argparse import ArgumentParser

import pytest

from tests.helpers import ROOT, refuses
from turboquant_nb import results
from turboquant_nb.results import Tree

A, B, C = (x * 40 for x in "abc")
FIXED = ({"cmd": "none needed", "passed": True}, {"id": "none"}, {"id": "none", "n": 0}, [0])


@pytest.fixture(autouse=True)
def nobody_speaks(monkeypatch):
    monkeypatch.delenv("TURBOQUANT_COMMIT", raising=False)
    monkeypatch.delenv("TURBOQUANT_DIRTY", raising=False)


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A repository with a package, scripts, a notebook and a result, committed; `results` takes
    itself for a module of it."""
    for name in (
        "turboquant_nb/results.py",
        "turboquant_nb/configs/a.json",
        "scripts/x.py",
        "nbs/a.ipynb",
        "results/a/cpu.json",
        "tests/t.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    for args in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", tmp_path, *args], check=True)
    monkeypatch.setattr(results, "_HERE", str(tmp_path / "turboquant_nb"))
    return tmp_path


def head(repo):
    return subprocess.run(
        ["git", "-C", repo, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def example(commit=A, **more):
    return results.record("example", [{"bits": 3}], *FIXED, Tree(commit)) | more


@pytest.mark.parametrize(
    "name, known",
    [
        ("turboquant_nb/configs/a.json", True),
        ("scripts/x.py", True),
        ("nbs/a.ipynb", True),
        ("turboquant_nb/sub/new.py", False),
        ("turboquant_nb/configs/h200.json", False),
        ("scripts/new.py", False),
        ("numpy.py", False),
    ],
)
def test_what_can_change_a_number_is_dirty_and_named(repo, name, known):
    (repo / name).parent.mkdir(exist_ok=True)
    (repo / name).write_text("2")
    assert results.tree().changes == ((" M " if known else "?? ") + name,)
    record = results.record("example", [{"bits": 3}], *FIXED)
    with refuses(f"uncommitted changes .*{name}"):
        results.save(record, repo / "results" / "b.json")
    assert not (repo / "results" / "b.json").exists()
    if not known:  # mutant: git's tracked files alone, as this was counted before
        assert results._git("status", "--porcelain", "-uno") == ""


@pytest.mark.parametrize(
    "name",
    [
        "results/a/cpu.json",
        "results/new.json",
        "models/m.gguf",
        "notes/a.py",
        "turboquant_nb/x.pyc",
    ],
)
def test_what_cannot_is_not(repo, name):
    (repo / name).parent.mkdir(exist_ok=True)
    (repo / name).write_text("2")
    assert results.tree().changes == ()


def test_staged_moved_and_deleted_files_count(repo):
    subprocess.run(["git", "-C", repo, "mv", "scripts/x.py", "scripts/y.py"], check=True)
    (repo / "tests/t.py").unlink()
    found = results.tree().changes
    assert any("scripts/y.py" in x for x in found) and any(
        x.endswith("D tests/t.py") for x in found
    )


def test_a_script_saves_every_row_into_a_tracked_file(repo):
    "Of a clean tree, before and after."
    assert results.tree() == Tree(head(repo), ())
    for rows in ([{"bits": 3}], [{"bits": 3}, {"bits": 2}]):
        record = results.record("example", rows, *FIXED)
        assert record["dirty"] is False
        results.save(record, repo / "results/a/cpu.json")
    assert len(results.load(repo / "results/a/cpu.json")["rows"]) == 2


def parsed(argv):
    p = ArgumentParser()
    p.add_argument("--out")
    return results.parse(p, argv)


def test_a_script_refuses_at_its_start(repo, capsys):
    (repo / "scripts/x.py").write_text("2")
    with pytest.raises(SystemExit):
        parsed(["--out", "a.json"])
    assert "M scripts/x.py" in capsys.readouterr().err
    assert parsed([]).code is None
    a = parsed(["--out", str(repo / "a.json"), "--draft"])
    results.write(a, "example", [{"bits": 3}], *FIXED)
    assert "with uncommitted changes, a draft" in results.stamp(
        results.load(repo / "a.json", draft=True)
    )


def test_the_code_is_that_of_the_start(repo):
    a, old = parsed(["--out", str(repo / "a.json")]), head(repo)
    (repo / "scripts/x.py").write_text("2")
    subprocess.run(
        ["git", "-C", repo, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "y"],
        check=True,
    )
    (repo / "scripts/x.py").write_text("3")
    results.write(a, "example", [{"bits": 3}], *FIXED)
    said = results.load(repo / "a.json")
    assert said["commit"] == old != head(repo)


def test_nobody_speaks_where_git_does(repo, monkeypatch):
    "The environment hides no change of a tree with its history, and names no other commit."
    (repo / "scripts/x.py").write_text("2")
    monkeypatch.setenv("TURBOQUANT_COMMIT", A)
    monkeypatch.setenv("TURBOQUANT_DIRTY", "0")
    assert results.tree() == Tree(head(repo), (" M scripts/x.py",))


def test_a_copy_without_history(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_HERE", str(tmp_path))
    monkeypatch.setattr(results, "_git", lambda *a: None)
    with refuses("no commit"):
        results.tree()
    monkeypatch.setenv("TURBOQUANT_COMMIT", A)
    assert results.tree().changes  # nobody says that it is clean
    for said, clean in (("0", True), ("", True), ("1", False), ("M x", False)):
        monkeypatch.setenv("TURBOQUANT_DIRTY", said)
        assert (not results.tree().changes) == clean
    for short in ("1234567", A[:39], A + "a", A.upper()):
        monkeypatch.setenv("TURBOQUANT_COMMIT", short)
        with refuses("40 hex"):
            results.tree()


def test_rows_of_an_earlier_run_keep_their_commit(tmp_path):
    results.save(example(utc="2026-01-01T00:00:00Z"), tmp_path / "a.json")
    new = results.record(
        "example", [*results.earlier(tmp_path / "a.json"), {"bits": 2}], *FIXED, Tree(B)
    )
    results.save(new, tmp_path / "a.json")
    third = results.record(
        "example", [*results.earlier(tmp_path / "a.json"), {"bits": 1}], *FIXED, Tree(C)
    )
    assert [r["commit"] for r in third["rows"]] == [A, B, C] and third["commits"] == [A, B, C]
    assert third["rows"][0]["utc"] == "2026-01-01T00:00:00Z"
    assert "commits aaaaaaaa, bbbbbbbb, cccccccc, 2026-01-01 to " in results.stamp(third)
    assert "commit aaaaaaaa, 2026-01-01;" in results.stamp(third, third["rows"][:1])
    bare = [{k: v for k, v in r.items() if k != "commit"} for r in third["rows"]]
    with refuses("carries its commit"):  # others: page results
        results.check(third | {"rows": bare})


@pytest.mark.parametrize(
    "other", [{"machine": {"kind": "another"}}, {"versions": {"torch": "0.1"}}]
)
def test_rows_of_another_machine_or_torch_are_not_extended(tmp_path, other):
    results.save(example(**other), tmp_path / "a.json")
    with refuses("must have one"):
        results.earlier(tmp_path / "a.json")


def test_drafts_are_not_extended_or_joined(tmp_path):
    results.save(example(), tmp_path / "a.json")
    results.save(example(), tmp_path / "b.json", draft=True)
    with refuses("is a draft"):
        results.earlier(tmp_path / "b.json")
    with refuses("is a draft"):
        results.joined([tmp_path / "a.json", tmp_path / "b.json"])
    with refuses("is a draft"):
        results.check(results.joined([tmp_path / "b.json", tmp_path / "a.json"], draft=True))
    loose = results.record("example", [{"bits": 3}], *FIXED, Tree(B, (" M scripts/x.py",)))
    results.save(loose, tmp_path / "b.json", draft=True)
    with refuses("uncommitted"):
        results.check(results.joined([tmp_path / "a.json", tmp_path / "b.json"], draft=True))


@pytest.mark.parametrize(
    "other",
    [
        {"experiment": "b"},
        {"model": {"id": "b"}},
        {"data": {"id": "b"}},
        {"seeds": [1]},
        {"machine": {"kind": "b"}},
    ],
)
def test_parts_that_differ_in_more_than_rows_are_not_joined(tmp_path, other):
    results.save(example(), tmp_path / "a.json")
    results.save(example(B), tmp_path / "b.json")
    assert results.joined([tmp_path / "a.json", tmp_path / "b.json"])["commits"] == [A, B]
    results.save(example(**other), tmp_path / "b.json")
    with refuses("must have one"):
        results.joined([tmp_path / "a.json", tmp_path / "b.json"])


FILES = sorted((ROOT / "results").glob("*/*.json"))
DRAFTS = set()  # files to be measured again, which no page shows


@pytest.mark.skipif(not FILES, reason="results/ is not beside the tests")
def test_every_file_of_results_is_of_committed_code():
    drafts = set()
    for path in FILES:
        try:
            results.load(path)
        except ValueError:
            assert results.load(path, draft=True)["draft"], path
            drafts.add(str(path.relative_to(ROOT / "results")))
    assert drafts == DRAFTS


@pytest.mark.parametrize(
    "said, wanted",
    [
        ("scripts/eval/search.py", "scripts/eval/search.py"),
        ("/home/me/scripts/turboquant-nb/scripts/bench/run.py", "scripts/bench/run.py"),
        ("./scripts/tools/tune.py", "scripts/tools/tune.py"),
        ("x.py", "x.py"),
    ],
)
def test_a_command_names_its_script_from_the_root_of_the_repository(said, wanted):
    "The folder below scripts/ is part of the name; what lies above it belongs to one machine."
    assert (
        results._command([said, "decode", "--out=/tmp/a.json"])
        == f"python {wanted} decode --out=a.json"
    )
    words = ["--match=a=/b", "--at=/tmp/a=b", "/tmp/c"]  # the first is no path
    assert results._command([said, *words]) == f"python {wanted} --match=a=/b --at=a=b c"


def test_table_is_markdown_on_a_page_and_text_in_a_terminal():
    t = results.Table(("a|b", "n"), [("x", 1), ("longer |", 22.5)])
    assert (
        t._repr_markdown_() == "| a\\|b | n |\n| --- | --- |\n| x | 1 |\n| longer \\| | 22.5 |"
    )
    assert repr(t) == "a|b       n\nx         1\nlonger |  22.5"
