"""What kernels need of a multiprocessor is what they needed: registers, stack, spilled bytes
and shared memory, compiled ahead of time for sm_90 by the Triton of constraints.txt. Fewer is
welcome and recorded by `python -m tests.golden.kernels --write`; more needs a reason."""

import json

import pytest

from tests.golden import kernels
from tests.helpers import SLOW, ahead_of_time

GOLDENS = json.loads(kernels.FILE.read_text())
USUAL = ['decode {"bits": [3, 3]}', "encode {}", 'decode {"kernel": "combine"}']


@pytest.fixture(scope="module")
def today():
    "case -> what it needs now; all cases with TURBOQUANT_SLOW, without it the usual ones."
    return {case.pop("case"): case for case in ahead_of_time(*([] if SLOW else USUAL))}


def test_kernels_need_what_they_needed(today):
    changed = [
        f"{name}: {what} {GOLDENS[name][what]} -> {now[what]}"
        for name, now in today.items()
        for what in now
        if now[what] != GOLDENS[name][what]
    ]
    assert changed == []
    assert today.keys() == (GOLDENS.keys() if SLOW else {*USUAL})
