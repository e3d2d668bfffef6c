"""Which functions of the package a query and keys meet on the reference path: one more is one
more that a reader has to know."""

import sys
from pathlib import Path

import torch

import turboquant_nb
from turboquant_nb import KVStore, checks
from turboquant_nb.kernels import ops

PACKAGE = str(Path(turboquant_nb.__file__).parent)


def entered(call) -> set:
    "Names of the functions that a call enters; validators look and hand nothing on."
    names = set()

    def seen(frame, event, _value):
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGE) and code.co_filename != checks.__file__
        if event == "call" and ours and not code.co_name.startswith("<"):
            names.add(code.co_qualname)

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_no_way_becomes_longer():
    "Who needs a function more may have it, and says here what for."
    k, v, q = torch.randn(3, 1, 2, 300, 64)
    store = KVStore("k3v3", 1, 2, 64)
    store.append(k, v)
    token = [x[:, :, -1:] for x in (q, k, v)]
    append = lambda: store.append(*token[1:])
    attend = lambda: ops.attend(token[0], store, *token[1:], backend="torch")
    # of 68 `in_order` takes the place of three copies
    for call, most in ((append, 53), (attend, 68)):
        call()  # what is made on first use
        names = entered(call)
        assert len(names) <= most, sorted(names)
