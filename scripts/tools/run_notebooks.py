#!/usr/bin/env python3
"""Execute notebooks in place and keep their outputs: run_notebooks.py [NB ...] (default: all of
nbs/ and its folders, in order).

`nbdev_test` runs notebooks but does not save what they print. Cells that it skips (`#| gpu`,
`#| slow`, `#| notest`, `#| eval: false`) keep the outputs they have, so outputs made on a GPU
survive a run on a CPU. Exit 1 if a cell fails."""

import base64
import io
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
root = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root), str(Path(__file__).resolve().parent)]
from notebooks import emptied, notebooks


def skipped(cell):
    """True for a cell that is not code or carries a directive under which `nbdev_test` does not
    run it."""
    if cell.cell_type != "code":
        return True
    head = [
        line.lstrip("#| ").strip() for line in cell.source.splitlines() if line.startswith("#|")
    ]
    return any(word in {"notest", "gpu", "slow", "eval: false"} for word in head)


def small(png):
    """A picture with 256 colours at most, in base64 as it came: plots need no more, and take a
    third of the bytes."""
    from PIL import Image

    picture, out = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    if picture.mode != "P":
        # by an octree, which knows transparency
        method = Image.Quantize.FASTOCTREE
        picture = picture.convert("RGBA").quantize(256, method, dither=Image.Dither.NONE)
    picture.save(out, "png", optimize=True)
    found = base64.b64encode(out.getvalue()).decode()
    return min(found, png, key=len)


def run(path):
    """Run one notebook in its own folder and write its outputs back. What it sets of
    matplotlib's style ends with it. A font that this machine lacks is nothing for a page."""
    import matplotlib
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    os.chdir(path.parent)  # as nbdev_test does: notebooks read ../results
    nb = read_nb(path)
    shell = CaptureShell(path)
    with matplotlib.rc_context():
        shell.run_all(nb, exc_stop=True, preproc=emptied(skipped))
    pictures = (o.get("data", {}) for cell in nb.cells for o in cell.get("outputs", ()))
    for data in pictures:
        if "image/png" in data:
            data["image/png"] = small(data["image/png"])
    write_nb(nb, path)


def main(names):
    paths = [Path(name).resolve() for name in names] or notebooks(root)
    for path in paths:
        print(path.name, flush=True)
        run(path)


if __name__ == "__main__":
    main(sys.argv[1:])
