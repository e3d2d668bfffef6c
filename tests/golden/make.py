#!/usr/bin/env python3
"""Goldens of the cases of cases.py: TRITON_INTERPRET=1 python -m tests.golden.make [NAME ...]
writes digests.json anew, or only the cases named. Made at commit 456dc67; run it again only
where a change of what is stored is meant, and say why in the commit.

Of each case it looks for states of which no number lies near an edge: moved by 5e-6 at random,
eight times, they must give the same planes. A token that does not is drawn again; where that is
not enough (what is exact hides its codes), the next seed is taken."""

import json
import sys
from pathlib import Path

from tests.golden import cases

FILE = Path(__file__).parent / "digests.json"
MOVED, TRIALS, ROUNDS = 5e-6, 8, 12


def unsteady(run, s):
    "(tokens [side, token] that read otherwise when moved, whether planes differ at all)."
    held, out, _ = run(s)
    digest, found, differ = cases.planes(held), set(), False
    for trial in range(TRIALS):
        moved_held, moved_out, _ = run(s.moved(MOVED, trial))
        differ |= cases.planes(moved_held) != digest
        for side, name in enumerate(("keys", "values")):
            change = (out[name] - moved_out[name]).abs().amax((0, 1, 3))
            found |= {(side, t) for t in (change > 3e-4).nonzero().flatten().tolist()}
    return found, differ or bool(found)


def steady_states(name):
    "(seed, tokens drawn again) of states that keep their planes."
    run, tokens = cases.CASES[name]
    for seed in range(50):
        times = {}
        for _ in range(ROUNDS):
            again = [[n, *where] for where, n in sorted(times.items())]
            found, differ = unsteady(run, cases.states(name, seed, again))
            if not differ:
                return seed, again
            if not found or len(found) > 20:
                break  # among exact tokens: another seed
            gone = 3 if "drafts" in name else 0  # read three places before where it is drawn
            for side, t in found:
                for at in {t, t + gone} & set(range(tokens)):
                    times[side, at] = times.get((side, at), 0) + 1
    raise SystemExit(f"{name}: no steady states found")


def main(names):
    goldens = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names or [*cases.CASES, *cases.INTERPRETED]:
        if name in cases.CASES:
            seed, again = steady_states(name)
            run = cases.CASES[name][0]
        else:
            run, twin = cases.INTERPRETED[name]
            seed, again = goldens[twin]["seed"], goldens[twin]["again"]
        found = cases.result(run, cases.states(name, seed, again))
        goldens[name] = {"seed": seed, "again": again} | found
        print(f"{name}: seed {seed}, {len(again)} tokens drawn again", flush=True)
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in goldens.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
