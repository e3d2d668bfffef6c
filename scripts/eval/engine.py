#!/usr/bin/env python3
"""A model in a real vLLM engine against TurboQuantCache with the same recipe: engine.py --model
FOLDER --out FILE [options of recipes.py]. Runs where vLLM is installed.

The engine writes tokens greedily, one request at a time; the model in transformers, with a
TurboQuantCache, is then given the same tokens, so that each step of both has the same past.
What is compared is each step's greedy token, and the log-probabilities of the engine's five
likeliest tokens. Beside them stands how far the same numbers are from the model on exact
states, which is what codes change; and how far the cache is from itself where the model's
embeddings are multiplied by 1 + 1e-6 noise, about what two programs' rounding differs by, four
times: a code that flips at an edge changes later states, and these flip others.

`TurboQuantCache` counts a token among its own recent ones, the engine keeps recent ones beside
it: `recent` of a row is the engine's, its cache has one more. Means of a calibration, which
TurboQuantCache does not have, are put in the place of the mean that it takes of a prompt.

Gate: an engine whose window is wider than the context gives the model's own log-probabilities
on exact states."""

import argparse
import os
import re
import tempfile
from contextlib import contextmanager
from dataclasses import replace

import torch

CUDA = torch.cuda.is_available()
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
os.environ |= {} if CUDA else {"VLLM_CPU_KVCACHE_SPACE": "1", "TURBOQUANT_NB_VLLM_CPU": "1"}

from recipes import add_options, opened
from transformers import DynamicCache

from turboquant_nb import TurboQuantCache, results
from turboquant_nb.cache.store import KVStore
from turboquant_nb.calibration.fit import calibrate
from turboquant_nb.quant.calibration import Calibration, save_calibration
from turboquant_nb.quant.quantizer import PRESETS, Recipe, Spec

CHUNK = 64
# name, transforms, means, the engine's recent tokens, first tokens, tokens of a step or None:
# the whole prompt; what the cache does otherwise
CASES = [
    ("codes alone", False, False, 0, 0, None, {}),
    ("recent", False, False, 16, 0, None, {}),
    ("recent and first", False, False, 16, 4, None, {}),
    ("with transforms", True, False, 16, 4, None, {}),
    ("with transforms and means", True, True, 16, 4, None, {}),
    ("codes alone, in chunks", False, False, 0, 0, CHUNK, {}),
    ("in chunks", True, True, 16, 4, CHUNK, {}),
    ("in chunks, the cache in one piece", True, True, 16, 4, CHUNK, dict(chunk=None)),
    ("the cache with one recent token less", True, True, 16, 4, None, dict(recent=16)),
]
TIE = 0.05  # nats between the two likeliest tokens, below which either may be first


def generated(a, folder, path, prompts, transforms, means, recent, sinks, chunk):
    "[(tokens, the five likeliest of each step with their log-probabilities)] of an engine."
    from vllm import LLM, SamplingParams

    given = dict(recipe=a.recipe, recent=recent, sinks=sinks) | (
        dict(calibration=str(path), means=means) if transforms or means else {}
    )
    here = (
        dict(dtype="bfloat16", attention_backend="CUSTOM", gpu_memory_utilization=0.3)
        if CUDA
        else dict(dtype="float32")
    )
    llm = LLM(
        folder,
        **here,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        max_num_batched_tokens=chunk or 2048,
        block_size=128,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        additional_config={"turboquant_nb": given},
    )
    how, out = (
        SamplingParams(
            max_tokens=a.new, temperature=0, detokenize=False, ignore_eos=True, logprobs=5
        ),
        [],
    )
    for prompt in prompts:
        found = llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0].outputs[0]
        ranks = [
            sorted(((t, x.logprob) for t, x in step.items()), key=lambda x: -x[1])[:5]
            for step in found.logprobs
        ]
        out.append((list(found.token_ids), ranks))
    return out


def followed(model, cache, prompt, tokens, chunk=None):
    """[n, V] log-probabilities of a model that reads a prompt, in chunks or at once, and then
    these tokens one by one."""
    x, rows = torch.tensor([prompt + tokens[:-1]], device=model.device), []
    cuts = [*range(0, len(prompt), chunk or len(prompt)), *range(len(prompt), x.shape[1] + 1)]
    with torch.no_grad():
        for begin, end in zip(cuts, cuts[1:]):
            logits = model(x[:, begin:end], past_key_values=cache, use_cache=True).logits[0, -1]
            if end >= len(prompt):
                rows.append(logits.float().log_softmax(-1))
    return torch.stack(rows)


def apart(rows, tokens, ranks):
    """(differences of the five likeliest tokens' log-probabilities, steps that have a clear
    first token, how many of these have another one)."""
    far, clear, other = [], 0, 0
    for row, token, ranked in zip(rows, tokens, ranks):
        ids, logs = zip(*ranked)
        far.append((row[list(ids)].cpu() - torch.tensor(logs)).abs())
        if logs[0] - logs[1] >= TIE:
            clear += 1
            other += int(row.argmax()) != token
    return torch.cat(far), clear, other


def numbers(found):
    "A row's numbers of several (differences, clear steps, other tokens)."
    steps = torch.stack([x[0].view(-1, 5).mean(1) for x in found]).mean(0)
    far = torch.cat([x[0] for x in found])
    return dict(
        steps=[float(f"{x:.3g}") for x in steps],
        mean=float(far.mean()),
        p50=float(far.median()),
        p80=float(far.quantile(0.8)),
        worst=float(far.max()),
        clear=sum(x[1] for x in found),
        other=sum(x[2] for x in found),
    )


@contextmanager
def shaken(model, seed):
    "With embeddings that are others by a millionth."
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(
            1
            + 1e-6
            * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).to(
                weight
            )
        )
    try:
        yield
    finally:
        weight.data.copy_(before)


def coded_cache(a, model, calibration, transforms, means, recent, sinks):
    "A cache with the engine's recipe; a calibration's means stand where it takes a prompt's."
    k, v = PRESETS[a.recipe]
    of = Calibration(calibration.transforms, calibration.header) if transforms else None
    recipe = Recipe(
        key=Spec(bits=k, center="prompt_mean" if means else "none"),
        value=Spec(bits=v),
        sinks=sinks,
        recent=recent,
    )
    layers = iter(calibration.centers)
    KVStore._first_mean = lambda self, side, x: next(layers)[None, :, None].to(
        x.device, torch.bfloat16
    )  # as the cache holds it
    return TurboQuantCache(model, recipe, calibration=of, backend="auto" if CUDA else "torch")


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(p)
    p.add_argument("--recipe", default="k3v3", choices=list(PRESETS))
    p.add_argument("--new", type=int, default=32, help="tokens that a prompt is continued by")
    p.add_argument("--match", default="", help="only cases that match this regular expression")
    p.add_argument("--out", required=True)
    p.set_defaults(windows=4, length=320)
    a = results.parse(p)
    import vllm

    from turboquant_nb.serving.vllm import register

    register()
    scored, a.windows = a.windows, a.windows + 4
    model, _, ids, _, origin = opened(a)
    model, prompts = model.to(torch.bfloat16) if CUDA else model, ids[:scored].tolist()
    more, rows = dict(vllm=vllm.__version__), []
    with tempfile.TemporaryDirectory() as folder:
        calibration, path = calibrate(model, ids[scored:]), f"{folder}/calibration.safetensors"
        calibration = replace(
            calibration, centers=[x.bfloat16().float() for x in calibration.centers]
        )  # for both
        save_calibration(calibration, path)
        dense = lambda tokens: [
            followed(model, DynamicCache(), prompt, x) for prompt, x in zip(prompts, tokens)
        ]
        model.set_attn_implementation("sdpa")
        found = generated(a, a.model, path, prompts, False, False, 1024, 0, None)
        off = numbers([apart(x, *y) for x, y in zip(dense([t for t, _ in found]), found)])
        gate = {
            "cmd": (
                f"an engine that reads all tokens exactly against the model: "
                f"{off['worst']:.1e} nats at most, "
                f"{off['other']} of {off['clear']} tokens other"
            ),
            "passed": off["worst"] < (0.3 if CUDA else 1e-3) and not off["other"],
        }
        print(gate, flush=True)
        if not gate["passed"]:
            raise SystemExit("the gate did not pass; nothing is measured")
        for name, transforms, means, recent, sinks, chunk, otherwise in CASES:
            if not re.search(a.match, name):
                continue
            found = generated(
                a, a.model, path, prompts, transforms, means, recent, sinks, chunk
            )
            how = dict(chunk=chunk, recent=recent + 1) | otherwise
            model.set_attn_implementation("turboquant")
            coded = lambda: [
                followed(
                    model,
                    coded_cache(a, model, calibration, transforms, means, how["recent"], sinks),
                    prompt,
                    t,
                    how["chunk"],
                )
                for prompt, (t, _) in zip(prompts, found)
            ]
            ours = coded()
            itself = []
            for seed in range(4):
                with shaken(model, seed):
                    for x, y, (t, ranks) in zip(ours, coded(), found):
                        itself.append(
                            apart(
                                x,
                                t,
                                [
                                    [(i, float(row[i])) for i, _ in ranked]
                                    for row, ranked in zip(y, ranks)
                                ],
                            )
                        )
            model.set_attn_implementation("sdpa")
            exact = dense([t for t, _ in found])
            rows.append(
                dict(
                    case=name,
                    recipe=a.recipe,
                    transforms=transforms,
                    means=means,
                    recent=recent,
                    first=sinks,
                    chunk=chunk,
                    cache=how,
                    n=sum(len(t) for t, _ in found),
                    unit="nats",
                    **numbers([apart(x, *y) for x, y in zip(ours, found)]),
                    itself=numbers(itself),
                    exact=numbers([apart(x, *y) for x, y in zip(exact, found)]),
                )
            )
            print(rows[-1], flush=True)
            results.write(
                a,
                "engine",
                rows,
                gate,
                origin,
                {"id": a.data_id, "n": scored},
                [],
                noise=off,
                **more,
            )


if __name__ == "__main__":
    main()
