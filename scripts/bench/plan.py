"""What a bench gives the runner."""

from dataclasses import dataclass, field
from typing import Iterable


@dataclass
class Plan:
    "A gate, and rows to come."

    experiment: str  # as the result calls it
    gate: dict  # {"cmd", "passed"}
    rows: Iterable  # of dicts, measured when they are asked for
    data: dict = field(default_factory=lambda: {"id": "normal states", "n": 1})
    model: dict = field(default_factory=lambda: {"id": "none"})
    seeds: list = field(default_factory=lambda: [0])
    before: list = field(default_factory=list)  # rows of an earlier run
    more: dict = field(default_factory=dict)  # joins the head of the record
