#!/usr/bin/env python3
"""Write the package from the notebooks: nbdev_export, where a chapter exports several modules.

A cell marked `#| export` goes to the module of `#| default_exp`, one marked
`#| export +wing.module` to that one. nbdev 2.4 appends such cells to a file that must be there,
and appends them again each time; here a module begins anew with its first cell, and its
docstring is the `>` line under the heading that this cell stands below. Where there is a plus,
`nbdev_export` itself stops: it finds no file of that name."""

import re

from execnb.nbio import mk_cell
from nbdev.config import add_init, get_config
from nbdev.doclinks import _build_modidx, nbglob
from nbdev.export import ExportModuleProc
from nbdev.maker import ModuleMaker
from nbdev.process import NBProcessor


class Several(ExportModuleProc):
    "Collects exported cells by module, and the heading that the first of each stands under."

    def begin(self):
        super().begin()
        self.heading = None

    def __call__(self, cell):
        super().__call__(cell)
        if cell.cell_type == "markdown" and re.match(r"##? .*\n\n> ", cell.source or ""):
            self.heading = "# " + cell.source.partition(" ")[2]

    def _exporti_(self, cell, exp_to=None):
        if exp_to and exp_to not in self.modules and self.heading:
            self.modules[exp_to].append(mk_cell(self.heading, "markdown"))
        super()._exporti_(cell, exp_to)


def export(path, begun):
    "Write the modules of one notebook; `begun` names those that have a file already."
    found, lib = Several(), get_config().lib_path
    NBProcessor(path, [found]).process()
    for key, cells in found.modules.items():
        if not any(cell.cell_type == "code" for cell in cells):
            continue
        name = found.default_exp if key == "#" else key.lstrip("+")
        maker = ModuleMaker(dest=lib, name=name, nb_path=path, is_new=name not in begun)
        begun.add(name)
        maker.make(cells, found.in_all[key], lib_path=lib)


if __name__ == "__main__":
    begun = set()
    for path in nbglob(as_path=True).sorted("name"):
        export(path, begun)
    add_init(get_config().lib_path)
    _build_modidx()
