"""One engine of vLLM with a model's shapes and dummy weights, in a process of its own:
serving_engine.py [--model NAME] [--cache GIB] KIND FOLDER GPUS MEMORY GIB SHAPE …; see
serving.py. Prints rows as JSON lines. It starts the engine when a
line comes on its standard input, and measures when the next one comes: others may be imported
before the first, and started before the second, while none is measured."""

import argparse
import json
import os
import re
import sys
import time
from itertools import groupby
from pathlib import Path

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import torch

sys.path.append(str(Path(__file__).parents[1]))
from bench.models import told_by_layer

LLAMA_8B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    torch_dtype="bfloat16",
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
)


# every second layer has a window; experts in 4 bits, as published, all of whose weights are 0
GPT_OSS = dict(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_local_experts=32,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    sliding_window=128,
    num_experts_per_tok=4,
    vocab_size=201088,
    max_position_embeddings=131072,
    torch_dtype="bfloat16",
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    quantization_config={"quant_method": "mxfp4"},
)


# 12 of its 60 layers, which leave room for the cache: five with a window and heads of 256 to
# one with heads of 512, whose values are the projection of its keys
GEMMA_4 = dict(
    architectures=["Gemma4ForCausalLM"],
    model_type="gemma4_text",
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_global_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    attention_k_eq_v=True,
    sliding_window=1024,
    hidden_size_per_layer_input=0,
    num_hidden_layers=12,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
    vocab_size=262144,
    max_position_embeddings=131072,
    torch_dtype="bfloat16",
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)

MODELS = {"llama-8b": LLAMA_8B, "gpt-oss-20b": GPT_OSS, "gemma-4-31b": GEMMA_4}
OWN_CHOICE = ("gemma-4-31b",)  # vLLM has several backends for it, and picks

SIZES = 1, 2, 4, 8, *range(16, 129, 16)  # tokens of a step that are replayed from a graph


def recipe_of(name):
    "A preset's name; bits alone (k3v4) where no preset has them."
    from turboquant_nb.quant.recipe import PRESETS

    bits = re.fullmatch(r"k(\d)v(\d)", name)
    if name in PRESETS or not bits:
        return name
    return dict(zip(("key", "value"), (dict(bits=int(x)) for x in bits.groups())))


def options(kind, largest, gpus, memory, model="llama-8b", frames=None):
    """What differs between kinds: bf16, bf16-triton (by vLLM's kernel in Triton, for models
    whose kernel it picks itself), a kv_cache_dtype of vLLM, or a preset of ours with tokens
    of a block and exact recent and first tokens, as k3v3-64 or k3v3-128-r16-s4. Keys of
    dummy weights have no means; with -f behind it they have random frames, of a file."""
    of = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=33500,
        max_num_seqs=max(16, largest),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=memory,
        tensor_parallel_size=gpus,
        disable_log_stats=True,
        seed=0,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({n for n in SIZES if n < largest} | {largest}),
        },
    )
    if told := told_by_layer(MODELS[model]):
        of["hf_overrides"] = told
    if found := re.fullmatch(OURS, kind):
        recipe, block, *exact, framed = found.groups()
        given = {name: int(x or 0) for name, x in zip(("recent", "sinks"), exact)}
        given |= dict(calibration=str(frames)) if framed else dict(means=False)
        return of | dict(
            attention_backend="CUSTOM",
            block_size=int(block),
            additional_config={"turboquant_nb": {"recipe": recipe_of(recipe)} | given},
        )
    if not kind.startswith("bf16"):
        return of | dict(kv_cache_dtype=kind)
    if kind == "bf16-triton":
        return of | dict(attention_backend="TRITON_ATTN")
    return of | ({} if model in OWN_CHOICE else dict(attention_backend="FLASH_ATTN"))


OURS = r"(k\dv\d(?:-trellis)?)-(\d+)(?:-r(\d+))?(?:-s(\d+))?(-f)?"


def random_frames(folder):
    "A file of random frames of the model whose config lies in a folder."
    from bench.cases import frames
    from transformers import AutoConfig

    from turboquant_nb.quant.calibration import save_calibration

    path = Path(folder) / "frames.safetensors"
    save_calibration(frames(AutoConfig.from_pretrained(folder)), path)
    return path


def flash_3():
    """vLLM asks for FlashAttention 2 beside its own turboquant_ caches. A wheel has that for a
    Hopper GPU as PTX alone, which takes minutes to compile, and 3 is the faster one: they are
    measured with 3."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def created(self, *args, **kwargs):
        config = create(self, *args, **kwargs)
        config.attention_config.flash_attn_version = 3
        return config

    EngineArgs.create_engine_config = created


class Pool:
    """The blocks of an engine of this process: what of them is left to requests, and what
    becomes of these."""

    def __init__(self, llm):
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.blocks, config = (
            self.scheduler.kv_cache_manager.block_pool,
            self.scheduler.kv_cache_config,
        )
        self.bytes = (
            sum(t.size for t in config.kv_cache_tensors) / config.num_blocks
        )  # of a block, in all layers of a group
        specs = [g.kv_cache_spec for g in config.kv_cache_groups]
        self.blocks_per_token = sum(
            1 / spec.block_size
            for spec in specs
            if getattr(spec, "sliding_window", None) is None
        )  # of a token that stays
        self.most = self.preempted = self.tokens = 0
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request

        def counted(*args, **kwargs):
            out = schedule(*args, **kwargs)
            self.most = max(self.most, len(self.scheduler.running))
            self.tokens = out.total_num_scheduled_tokens
            return out

        def counted_preemption(*args, **kwargs):
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler.schedule, self.scheduler._preempt_request = counted, counted_preemption

    def leave(self, nbytes):
        """Take all blocks but those of so many bytes away; what gives them back. Raises
        ValueError where there are fewer."""
        spare = self.blocks.get_num_free_blocks() - int(nbytes // self.bytes)
        if spare < 0:
            raise ValueError(
                f"the cache has {self.blocks.get_num_free_blocks()} free blocks of "
                f"{self.bytes:,.0f} bytes, {nbytes:,} bytes are asked for"
            )
        taken = self.blocks.get_new_blocks(spare)
        self.most = self.preempted = 0
        return lambda: self.blocks.free_blocks(taken)


def spread(x, unit):
    "Of three times."
    p20, p50, p80 = sorted(x)
    return dict(p50=p50, p20=p20, p80=p80, unit=unit, n=3)


# steps at each end of a run that are not of decoding alone: prompts that end, an engine that is
# one step ahead
EDGE = 6


def timed_steps(engine, tokens):
    """(when it ended, tokens() then) of each step of an engine; the caller clears the list.
    tokens: those of the step that was planned last."""
    ends, step = [], engine.step

    def timed():
        out = step()
        ends.append((time.perf_counter(), tokens()))
        return out

    engine.step = timed
    return ends


def each_step(ends):
    """Milliseconds of a step that decodes, the mean of a run whose steps ended so. Raises
    ValueError for too few."""
    count = len(ends) - 2 * EDGE
    if count < 1:
        raise ValueError(
            f"a run must have more than {2 * EDGE} steps to be timed, got {len(ends)}: ask for "
            "more new tokens"
        )
    return (ends[-EDGE][0] - ends[EDGE][0]) / count * 1e3


def decode_alone(ends, requests):
    "The longest run of steps in which each of so many requests had one token."
    runs = [list(run) for alone, run in groupby(ends, lambda x: x[1] == requests) if alone]
    return max(runs, key=len, default=[])


def read_again(prompts, kept, block):
    """Why steps are not those of decoding alone: prompts that the prefix cache has not kept, of
    which so many tokens were; empty if all but their last blocks were."""
    least = sum(max(0, len(x) - 2 * block) for x in prompts)
    if kept >= least:
        return ""
    return f"prompts were read again: {kept:,} of at least {least:,} tokens were cached"


def shape_of(text):
    """(what is measured, requests, tokens, new tokens); ragged: the first request has so many
    tokens, the others have 1,000."""
    what, _, sizes = text.rpartition(":")
    return what or "token", *map(int, (sizes.split("x") + ["1"])[:3])


def main(kind, folder, gpus, memory, gib, shapes, model="llama-8b", cache_gib=None):
    from vllm import LLM, SamplingParams

    if re.fullmatch(OURS, kind):
        from turboquant_nb.vllm.backend import register

        register()
    if kind.startswith("turboquant_"):
        flash_3()
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(MODELS[model], f)
    print("READY", flush=True)
    if not sys.stdin.readline():  # who would have said begin is gone
        return
    began = time.time()
    framed = random_frames(folder) if kind.endswith("-f") else None
    more = options(kind, max(b for _, b, _, _ in shapes), gpus, memory, model, framed)
    if cache_gib is not None:
        more["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    llm = LLM(folder, **more)
    cache = llm.llm_engine.vllm_config.cache_config
    row = lambda **x: print("ROW " + json.dumps(dict(kind=kind, gpus=gpus, **x)), flush=True)
    row(what="start", p50=time.time() - began, unit="s")
    if not sys.stdin.readline():
        return
    pool = Pool(llm) if gpus == 1 else None  # of this process
    each = 1 / cache.block_size if pool is None else pool.blocks_per_token
    row(
        what="cache",
        p50=int(cache.num_gpu_blocks / each),
        unit="tokens",
        **(dict(memory=memory) if cache_gib is None else dict(gib=cache_gib)),
        **({} if pool is None else dict(bytes_per_token=pool.bytes * each)),
    )
    gen = torch.Generator().manual_seed(0)
    steps = timed_steps(llm.llm_engine, lambda: 0 if pool is None else pool.tokens)
    draw = lambda n: torch.randint(3, 31000, (n,), generator=gen).tolist()
    for what, batch, tokens, new in shapes:
        prompts = []

        def asked(prompts, new):
            "(seconds, tokens that were cached)"
            how = dict(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
            begin = time.time()
            outs = llm.generate(
                [{"prompt_token_ids": x} for x in prompts],
                SamplingParams(**how),
                use_tqdm=False,
            )
            return time.time() - begin, sum(o.num_cached_tokens or 0 for o in outs)

        def fresh():
            "Prompts of which the prefix cache has none."
            sizes = [tokens] + [1000 if what == "ragged" else tokens] * (batch - 1)
            return [draw(n) for n in sizes]

        def run(n):
            return asked(prompts, n)[0]

        def afresh(n=1):
            prompts[:] = fresh()
            return run(n)

        of = dict(batch=batch, tokens=tokens) | (dict(others=1000) if what == "ragged" else {})
        if what == "full":
            give_back = pool.leave(gib * 2**30)
            seconds = afresh(new)
            row(
                what="written",
                **of,
                new=new,
                p50=batch * new / seconds,
                seconds=seconds,
                unit="tokens/s",
                n=1,
                gib=gib,
                most=pool.most,
                preempted=pool.preempted,
            )
            give_back()
            continue
        if what == "first":
            times = [afresh() for _ in range(4)][1:]
            row(what="first token", **of, **spread(times, "s"))
            continue
        if tokens <= 8192:
            afresh()  # what is made on first use
        row(what="first token", **of, p50=afresh(), unit="s", n=1)
        each, again, block = [], {}, max(cache.block_size, 128)
        while len(each) < (3 if again else 5):  # a prompt that is read again takes its time
            steps.clear()
            kept = asked(prompts, new)[1]
            if why := read_again(prompts, kept, block):
                again = dict(why=why)
            each.append(each_step(decode_alone(steps, batch) if again else steps))
        each.sort()
        times = {f"p{q}": each[len(each) // 2 + i] for q, i in ((20, -1), (50, 0), (80, 1))}
        row(what="token", **of, **times, unit="ms", n=len(each), new=new, **again)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", choices=MODELS, default="llama-8b")
    p.add_argument("--cache", dest="cache_gib", type=float)
    for name, kind in dict(kind=str, folder=str, gpus=int, memory=float, gib=float).items():
        p.add_argument(name, type=kind)
    p.add_argument("shapes", nargs="+", type=shape_of)
    main(**vars(p.parse_args()))
