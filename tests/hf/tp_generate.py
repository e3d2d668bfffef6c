"""One rank of two: torchrun --nproc-per-node 2 tests/hf/tp_generate.py MODEL_FOLDER OUT.
Without torchrun, the whole model. Run by test_hf_system.py (gloo, CPU); on a machine with two
GPUs the same command uses them, through NCCL."""

import os
import sys

import torch

torch.set_num_threads(1)
from transformers import AutoModelForCausalLM

from turboquant_nb.hf import TurboQuantCache

folder, out = sys.argv[1:3]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
plan = dict(tp_plan="auto") if world > 1 else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan)
if world == 1 and torch.cuda.is_available():
    model.cuda()
model.set_attn_implementation("turboquant")
ids = torch.randint(1, 128, (2, 300), generator=torch.Generator().manual_seed(0)).to(
    model.device
)
mask = torch.ones_like(ids)
mask[0, :5] = 0
results = {}
for name, options in {
    "greedy": {},
    "chunks": dict(prefill_chunk_size=128),
    "beams": dict(num_beams=2),
}.items():
    cache = TurboQuantCache(model, "k4v4")
    options = (
        dict(
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        | options
    )
    made = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    report = cache.report()
    results[name] = dict(
        tokens=made.sequences.cpu(),
        logits=torch.stack(made.logits).cpu(),
        heads=cache.layers[0].store.heads,
        served=report["served"],
        nbytes=report["nbytes"] - report["parts"]["tables"],
    )
torch.save(results, f"{out}.{rank}")
if (
    world > 1
):  # a rank that leaves while threads of the other's connections run is aborted now and then
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
