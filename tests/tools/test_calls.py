"""How far a query and keys walk through the package, as scripts/tools/count_calls.py counts it:
a function more on the way to a score is one more that a reader has to know."""

import count_calls


def test_no_way_becomes_longer():
    "Who needs a function more may have it, and says here what for."
    # back in `attention` once more, to divide queries, which a backend may do itself instead
    most = {"a query, first call": (18, 9), "a query, again": (15, 8)}
    most |= dict.fromkeys(("keys, first call", "keys, again"), (26, 9))
    for what, walk in count_calls.counted("k3v3"):
        passes, comes_back = most[what]
        assert len(walk.path) <= passes and walk.back <= comes_back, (what, walk.path)
