#!/usr/bin/env python3
"The command that older results and scripts name: `scripts/run.py` with the same words."

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "run.py"), run_name="__main__")
