#!/usr/bin/env python3
"""nbdev_test, with the notebooks that take longest first; the options are those of nbdev_test.

nbdev_test starts notebooks by name. A long one near the end then runs alone while the other processes wait."""
import nbdev.test

LONGEST = "19c_score 24_allocate 06_residual 23_calibrate 14f_hf 14b_cache 80_claims 17_models 19d_tasks 20_fold 05_qjl 07_rates".split()
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
