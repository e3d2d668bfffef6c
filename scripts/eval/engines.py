"""Perplexity in a real vLLM engine beside TurboQuantCache: run.py engines --out FILE
[--model M] [--text FOLDER] [--recipes R …]. Runs where vLLM is installed.

Both read windows in chunks of --chunk tokens: a chunk attends to codes of those before it and
to itself exactly. The engine has what `turboquant serve` finds by itself, the recipe and the
frame of these weights. Losses are of a window's second half. `engine` and `cache` are changes
of perplexity against exact states in percent, `apart` that of the engine against the cache,
paired, each with its standard error over windows.

Gate: an engine whose exact tokens reach over a window has the losses of the model; where both
round to bfloat16, its losses are as far from those in float32 as the model's, half more at
most."""

import os
import tempfile
from pathlib import Path

import torch
from eval.inputs import opened, options as given, windows
from plan import Plan
from transformers import DynamicCache

from turboquant_nb import TurboQuantCache
from turboquant_nb.evaluation.score import attending, paired, token_losses
from turboquant_nb.hf.frame import frame_of
from turboquant_nb.quant.calibration import save_calibration

CUDA = torch.cuda.is_available()
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
} | ({} if CUDA else {"VLLM_CPU_KVCACHE_SPACE": "1", "TURBOQUANT_NB_VLLM_CPU": "1"})
FAR = 1e-3  # nats of a token, on average, that float32 may be off


def options(p):
    given(p, after=False)
    p.add_argument("--windows", type=int, default=32)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--chunk", type=int, default=64)
    p.add_argument("--recipes", nargs="+", default=["k4v4", "k3v3", "k2v2"])


def in_engine(a, folder, ids, **settings):
    """Losses [n, length / 2] of an engine with these settings of ours, of the model and with
    the frame in a folder."""
    from vllm import LLM, SamplingParams

    # small, since one engine of the process follows another
    how = dict(attention_backend="CUSTOM", gpu_memory_utilization=0.15) if CUDA else {}
    frame = f"{folder}/frame.safetensors"
    llm = LLM(
        f"{folder}/model",
        **how,
        dtype="bfloat16" if CUDA else "float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=a.length + 1,
        max_num_seqs=1,
        max_num_batched_tokens=a.chunk,
        block_size=128,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        additional_config={"turboquant_nb": settings | {"calibration": frame}},
    )
    ask = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=0)
    losses, half = [], a.length // 2
    for row in ids.tolist():
        (found,) = llm.generate([{"prompt_token_ids": row}], ask, use_tqdm=False)
        each = zip(row[half:], found.prompt_logprobs[half:])
        losses.append([-step[token].logprob for token, step in each])
    return torch.tensor(losses, dtype=torch.float64)


@torch.no_grad()
def in_transformers(a, model, ids, make):
    "The same of a model with caches that `make` makes."
    losses, half = [], a.length // 2
    for row in ids.to(model.device):
        cache = make()
        logits = [
            model(part[None], past_key_values=cache).logits[0] for part in row.split(a.chunk)
        ]
        losses.append(token_losses(torch.cat(logits)[half - 1 : -1], row[half:]).cpu())
    return torch.stack(losses)


def rows(a, model, held, ids, exact):
    for recipe in a.recipes:
        ours = in_engine(a, held.name, ids, recipe=recipe)
        with attending(model):
            other = in_transformers(a, model, ids, lambda r=recipe: TurboQuantCache(model, r))
        pairs = dict(engine=(ours, exact), cache=(other, exact), apart=(ours, other))
        row = dict(recipe=recipe, chunk=a.chunk, n=ours.numel(), unit="%")
        for name, pair in pairs.items():
            row[name], row[f"{name}_stderr"] = paired(*pair)
        yield row | dict(p50=row["apart"], ppl=float(exact.mean().exp()))


def plan(a):
    os.environ |= ENVIRONMENT  # before vLLM is imported, and only where it will be
    import vllm

    from turboquant_nb.vllm.backend import register

    register()
    model, tokenizer, about = opened(a)
    held = tempfile.TemporaryDirectory()  # goes with the rows
    model.save_pretrained(Path(held.name) / "model")
    save_calibration(frame_of(model, tokenizer), Path(held.name) / "frame.safetensors")
    ids = windows(a.text, tokenizer, a.windows, a.length)
    new = lambda: DynamicCache(config=model.config)
    want = exact = in_transformers(a, model, ids, new)
    if CUDA:
        exact = in_transformers(a, model.bfloat16(), ids, new)
    some = in_engine(a, held.name, ids[:2], recipe=a.recipes[0], recent=a.length)
    off, far = (float((x[:2] - want[:2]).abs().mean()) for x in (exact, some))
    most = max(FAR, 1.5 * off)
    gate = dict(
        cmd=f"an engine that reads {a.length} tokens exactly: losses against float32's",
        value=far,
        most=most,
        passed=far < most,
    )
    more = dict(vllm=vllm.__version__)
    data = {"id": a.data_id, "n": a.windows}
    todo = rows(a, model, held, ids, exact)
    return Plan("engines", gate, todo, data, about, more=more)
