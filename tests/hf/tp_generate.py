"""One rank of two: torchrun --nproc-per-node 2 tests/hf/tp_generate.py MODEL_FOLDER OUT. Run by
test_hf_system.py (gloo, CPU); on a machine with two GPUs the same command uses them, through
NCCL."""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

from turboquant_nb.hf import TurboQuantCache

WAYS = {"greedy": {}, "chunks": dict(prefill_chunk_size=128), "beams": dict(num_beams=2)}
HOW = dict(
    max_new_tokens=4,
    do_sample=False,
    pad_token_id=0,
    eos_token_id=None,
    output_logits=True,
    return_dict_in_generate=True,
)


def answers(model) -> dict:
    "What a model writes, in each way, and what its cache says."
    model.set_attn_implementation("turboquant")
    ids = torch.randint(1, 128, (2, 300), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    results = {}
    for name, options in WAYS.items():
        cache = TurboQuantCache(model, "k4v4")
        made = model.generate(ids, attention_mask=mask, past_key_values=cache, **HOW, **options)
        report = cache.report()
        results[name] = dict(
            tokens=made.sequences.cpu(),
            logits=torch.stack(made.logits).cpu(),
            heads=cache.layers[0].store.heads,
            served=report["served"],
            nbytes=report["nbytes"] - report["parts"]["tables"],
        )
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, out = sys.argv[1:]
    how = dict(dtype=torch.float32, tp_plan="auto")
    found = answers(AutoModelForCausalLM.from_pretrained(folder, **how))
    torch.save(found, f"{out}.{os.environ['RANK']}")
    # a rank that leaves while threads of the other's connections run is aborted now and then
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
