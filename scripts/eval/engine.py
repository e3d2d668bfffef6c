"""A model in a real vLLM engine against TurboQuantCache with the same recipe: run.py engine
--model FOLDER --out FILE [options of recipes]. Runs where vLLM is installed.

The engine writes tokens greedily, one request at a time; the model in transformers, with a
TurboQuantCache, is then given the same tokens, so that each step of both has the same past.
What is compared is each step's greedy token, and the log-probabilities of the engine's five
likeliest tokens. Beside them stands how far the same numbers are from the model on exact
states, which is what codes change; and how far the cache is from itself where the model's
embeddings are multiplied by 1 + 1e-6 noise, about what two programs' rounding differs by, four
times: a code that flips at an edge changes later states, and these flip others.

`TurboQuantCache` counts a token among its own recent ones, the engine keeps recent ones beside
it: `recent` of a row is the engine's, its cache has one more. Both take the means after RoPE
of the same frames, since cells hold no other.

Gate: an engine whose window is wider than the context gives the model's own log-probabilities
on exact states."""

import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from eval.windows import Windows, add_match, add_options, matching
from plan import Plan, must_pass
from transformers import DynamicCache

from turboquant_nb import TurboQuantCache
from turboquant_nb.calibration.fit import calibrate
from turboquant_nb.quant.calibration import save_calibration
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import PRESETS, Recipe

CUDA = torch.cuda.is_available()
CHUNK = 64


class Case(NamedTuple):
    "An engine, and what the cache beside it does otherwise."

    transforms: bool = False
    means: bool = False
    recent: int = 16  # the engine's recent tokens
    first: int = 4
    chunk: int | None = None  # tokens of a step; None: the whole prompt
    otherwise: dict = {}


CASES = {
    "codes alone": Case(recent=0, first=0),
    "recent": Case(first=0),
    "recent and first": Case(),
    "with a frame": Case(means=True),
    "with transforms": Case(True),
    "with transforms and means": Case(True, True),
    "codes alone, in chunks": Case(recent=0, first=0, chunk=CHUNK),
    "in chunks": Case(True, True, chunk=CHUNK),
    "in chunks, the cache in one piece": Case(
        True, True, chunk=CHUNK, otherwise={"chunk": None}
    ),
    "the cache with one recent token less": Case(True, True, otherwise={"recent": 16}),
}
EXACT = Case(recent=1024, first=0)  # all tokens are recent ones
TIE = 0.05  # nats between the two likeliest tokens, below which either may be first


def generated(a, path, prompts, case):
    "[(tokens, the five likeliest of each step with their log-probabilities)] of an engine."
    from vllm import LLM, SamplingParams

    given = dict(recipe=a.recipe, recent=case.recent, sinks=case.first)
    if case.transforms or case.means:
        file = path / ("calibration" if case.transforms else "frame")
        given |= dict(calibration=str(file), means=case.means)
    here = (
        dict(dtype="bfloat16", attention_backend="CUSTOM", gpu_memory_utilization=0.3)
        if CUDA
        else dict(dtype="float32")
    )
    llm = LLM(
        a.model,
        **here,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        max_num_batched_tokens=case.chunk or 2048,
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


def coded_cache(a, model, calibration, case, recent):
    "A cache with the engine's recipe."
    k, v = PRESETS[a.recipe]
    of = calibration if case.transforms else None
    center = "fixed" if case.means else "none"
    scales = "frame" if case.means and not case.transforms else "none"
    key = Spec(bits=k, center=center, pair_scale=scales)
    recipe = Recipe(key, Spec(bits=v), case.first, recent)
    how = dict(frame=calibration, calibration=of, backend="auto" if CUDA else "torch")
    return TurboQuantCache(model, recipe, **how)


def options(p):
    add_options(p, windows=4, length=320)
    p.add_argument("--recipe", default="k3v3", choices=list(PRESETS))
    p.add_argument("--new", type=int, default=32, help="tokens that a prompt is continued by")
    add_match(p)


def likeliest(row, ranked):
    "What another row of log-probabilities says of the same tokens."
    return [(i, float(row[i])) for i, _ in ranked]


def compared(a, model, calibration, prompts, case, found):
    """(the cache's numbers, itself with shaken embeddings, exact states) of what an engine
    wrote."""
    how = dict(chunk=case.chunk, recent=case.recent + 1) | case.otherwise

    def coded():
        for prompt, (tokens, _) in zip(prompts, found):
            cache = coded_cache(a, model, calibration, case, how["recent"])
            yield followed(model, cache, prompt, tokens, how["chunk"])

    model.set_attn_implementation("turboquant")
    ours, itself = [*coded()], []
    for seed in range(4):
        with shaken(model, seed):
            for x, y, (tokens, ranks) in zip(ours, coded(), found):
                itself.append(apart(x, tokens, [*map(likeliest, y, ranks)]))
    return how, numbers([apart(x, *y) for x, y in zip(ours, found)]), numbers(itself)


def exactly(model, prompts, found):
    "The numbers of the model on exact states."
    model.set_attn_implementation("sdpa")
    rows = [
        followed(model, DynamicCache(), p, tokens) for p, (tokens, _) in zip(prompts, found)
    ]
    return numbers([apart(x, *y) for x, y in zip(rows, found)])


def rows(a, model, calibration, path, prompts):
    for name, case in matching(a, CASES).items():
        found = generated(a, path, prompts, case)
        how, ours, itself = compared(a, model, calibration, prompts, case, found)
        about = case._asdict()
        del about["otherwise"]
        yield dict(
            case=name,
            recipe=a.recipe,
            cache=how,
            n=sum(len(tokens) for tokens, _ in found),
            unit="nats",
            itself=itself,
            exact=exactly(model, prompts, found),
            **about,
            **ours,
        )


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
} | ({} if CUDA else {"VLLM_CPU_KVCACHE_SPACE": "1", "TURBOQUANT_NB_VLLM_CPU": "1"})


def plan(a):
    os.environ |= ENVIRONMENT  # before vLLM is imported, and only where it will be
    import vllm

    from turboquant_nb.vllm.backend import register

    register()
    scored, a.windows = a.windows, a.windows + 4
    w = Windows(a)
    model, prompts = w.model.to(torch.bfloat16) if CUDA else w.model, w.ids[:scored].tolist()
    calibration = calibrate(model, w.ids[scored:])
    rounded = lambda x: replace(x, fixed=x.fixed.bfloat16().float())  # as a cache holds it
    calibration = replace(calibration, frames=tuple(map(rounded, calibration.frames)))
    path = Path(tempfile.mkdtemp())
    save_calibration(calibration, path / "calibration")
    save_calibration(replace(calibration, transforms=[]), path / "frame")
    off = exactly(model, prompts, generated(a, path, prompts, EXACT))
    cmd = (
        f"an engine that reads all tokens exactly against the model: {off['worst']:.1e} nats "
        f"at most, {off['other']} of {off['clear']} tokens other"
    )
    gate = {"cmd": cmd, "passed": off["worst"] < (0.3 if CUDA else 1e-3) and not off["other"]}
    more = dict(noise=off, vllm=vllm.__version__)
    todo = rows(a, model, calibration, path, prompts)
    data = w.data | {"n": scored}
    return Plan("engine", must_pass(gate), todo, data, w.origin, seeds=[], more=more)
