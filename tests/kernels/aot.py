"""What kernels need that are compiled for GPUs that are not there: python -m tests.kernels.aot
NAME … prints JSON lines of names as tests/golden/kernels.json has them. A process of its own,
without TRITON_INTERPRET: the interpreter and the compiler exclude each other."""

import json
import re
import sys

from tests.golden.kernels import compiled
from tests.kernels.aot_decode import usage

for name in sys.argv[1:]:
    case, built = json.loads(name.partition(" ")[2]), compiled(name)
    ptx = built.asm["ptx"]
    order = re.findall(r"\b(ld|st)\.global", ptx)
    case["turns"] = sum(pair == ("st", "ld") for pair in zip(order, order[1:]))
    case["copies of 16 bytes"] = ptx.count("cp.async.cg.shared.global")
    print(json.dumps(case | usage(built, case.get("capability", 90))), flush=True)
