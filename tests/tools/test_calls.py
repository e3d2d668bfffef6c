"""How far a query and keys walk through the package, as scripts/tools/count_calls.py counts it:
a function more on the way to a score is one more that a reader has to know."""

import count_calls


def test_no_way_becomes_longer():
    "Who needs a function more may have it, and says here what for."
    most = {"a query, first call": (19, 8), "a query, again": (15, 7)}
    most |= dict.fromkeys(("keys, first call", "keys, again"), (26, 9))
    for what, walk in count_calls.counted("k3v3"):
        passes, comes_back = most[what]
        assert len(walk.path) <= passes and walk.back <= comes_back, (what, walk.path)


def test_a_function_on_the_way_is_counted(monkeypatch):
    "One that hands the query on is seen, and one that only looks at something else is not."
    from turboquant_nb.cache.attention import Reference

    whole = dict(count_calls.counted("k3v3"))["a query, again"]
    assert "check_call" in whole.path and "_coded_blocks" in whole.entered
    assert "_coded_blocks" not in whole.path and "Reference.run" in whole.path
    run = Reference.run
    detour = lambda self, call: run(self, call)
    through = {}
    exec(  # a function of the package, as far as the script can tell
        compile(
            "def passes_on(self, call):\n    return run(self, call)",
            count_calls.PACKAGE,
            "exec",
        ),
        {"run": run},
        through,
    )
    monkeypatch.setattr(Reference, "run", through["passes_on"])
    more = dict(count_calls.counted("k3v3"))["a query, again"]
    assert len(more.path) == len(whole.path) + 1 and "passes_on" in more.path
    monkeypatch.setattr(Reference, "run", detour)  # not the package's
    assert dict(count_calls.counted("k3v3"))["a query, again"].path == whole.path
