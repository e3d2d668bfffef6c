"""What an experiment is, and how it is carried out.

An experiment is a module: `options(p)` adds what it asks for, `plan(a)` runs its correctness
gate and says what comes. Its rows are measured one after the other and saved as they come; no
row is measured after a red gate, and nothing is saved under one."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from turboquant_nb import results

BEGAN = time.monotonic()


@dataclass
class Plan:
    "A gate, and rows to come."

    experiment: str  # as the result calls it
    gate: dict | Callable  # {"cmd", "passed"}; or that of the rows so far, asked after each
    rows: Iterable  # of dicts, measured when they are asked for
    data: dict = field(default_factory=lambda: {"id": "normal states", "n": 1})
    model: dict = field(default_factory=lambda: {"id": "none"})
    seeds: list = field(default_factory=lambda: [0])
    before: list = field(default_factory=list)  # rows of an earlier run
    more: dict = field(default_factory=dict)  # joins the head of the record


def seconds() -> float:
    "Since this process began to import."
    return time.monotonic() - BEGAN


def earlier(a) -> list:
    "Rows of the file that this run extends, with their commits."
    return results.earlier(a.after, a.draft) if a.after else []


def shown(row) -> dict:
    "A row for the eye: rounded, without what is long."
    short = lambda x: len(x) <= 8 or isinstance(x, str) and len(x) <= 80
    return {
        k: float(f"{v:.4g}") if isinstance(v, float) else v
        for k, v in row.items()
        if not isinstance(v, str | list | dict) or short(v)
    }


def must_pass(gate):
    "The gate, if it passed; SystemExit otherwise."
    if not gate["passed"]:
        raise SystemExit(f"the gate did not pass; nothing is measured: {gate}")
    return gate


def carry_out(a, plan):
    "Take the rows and save them as they come, until the time is over or the gate is red."
    fixed = not callable(plan.gate)
    if fixed:
        print(must_pass(plan.gate), f"{seconds():.0f} s", flush=True)
    rows, limit = [*plan.before], getattr(a, "limit", None)
    for row in plan.rows:
        rows.append(row)
        print(shown(row), f"{seconds():.0f} s", flush=True)
        gate = plan.gate if fixed else plan.gate(rows)
        if not gate["passed"]:
            raise SystemExit(f"the gate did not pass; nothing more is saved: {gate}")
        about = gate, plan.model, plan.data, plan.seeds
        results.write(a, plan.experiment, rows, *about, **plan.more)
        if limit and seconds() > limit:
            raise SystemExit("out of time; what is measured is saved")


def names_of(row) -> str:
    "What tells a row from others: names and counts; measured numbers and when may differ."
    measured, when = float | list | dict, {"commit", "utc"}
    told = ((k, v) for k, v in row.items() if not (k in when or isinstance(v, measured)))
    return repr(sorted(told))


def join(a):
    "One file of those that were measured in parts; a row that several have stays once."
    whole = results.joined(a.join, a.draft)
    rows, kept, seen = iter(whole["rows"]), [], set()
    for path in a.join:
        here = [(names_of(x), next(rows)) for x in results.load(path, a.draft)["rows"]]
        kept += [row for name, row in here if name not in seen]
        seen |= {name for name, _ in here}
    whole |= {"rows": kept, "commits": results.commits(whole | {"rows": kept})}
    results.save(whole, a.out, a.draft)
