#!/usr/bin/env python3
"""nbdev_test, with the notebooks that take longest first; the options are those of nbdev_test.

nbdev_test starts notebooks by name. A long one near the end then runs alone while the other processes wait."""
import nbdev.test

LONGEST = "83_score 61_sensitivity 21_residual 60_calibrate 56_hf 51_cache 86_claims 80_models 84_tasks 62_fold 13_qjl 15_rates".split()
parallel = nbdev.test.parallel


def place(path):
    "Where a notebook comes in the order."
    return LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST)


def longest_first(f, files, **kwargs):
    "As fastcore's parallel, in another order; the results come in the order of `files`."
    order = sorted(range(len(files)), key=lambda i: place(files[i]))
    results = dict(zip(order, parallel(f, [files[i] for i in order], **kwargs)))
    return [results[i] for i in range(len(files))]


if __name__ == "__main__":
    nbdev.test.parallel = longest_first
    nbdev.test.nbdev_test()
