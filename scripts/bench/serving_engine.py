"""One engine of vLLM with Llama-8B shapes and dummy weights, in a process of its own:
serving_engine.py [--profile FOLDER] KIND FOLDER GPUS MEMORY GIB SHAPE …; see serving.py. Prints
rows as JSON lines. It begins when a line comes on its standard input: what is imported before
that may be imported while another is measured."""

import json
import os
import re
import sys
import time

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import torch

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


SIZES = 1, 2, 4, 8, *range(16, 129, 16)  # tokens of a step that are replayed from a graph


def options(kind, largest, gpus, memory):
    """What differs between kinds: bf16, a kv_cache_dtype of vLLM, or a preset of ours with
    tokens of a block and exact recent and first tokens, as k3v3-64 or k3v3-128-r16-s4; with
    -even at its end without lists of work."""
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
    if found := re.fullmatch(OURS, kind):
        recipe, block, *exact = found.groups()[:4]
        given = {name: int(x or 0) for name, x in zip(("recent", "sinks"), exact)}
        return of | dict(
            attention_backend="CUSTOM",
            block_size=int(block),
            additional_config={"turboquant_nb": {"recipe": recipe} | given},
        )
    return of | (
        dict(attention_backend="FLASH_ATTN") if kind == "bf16" else dict(kv_cache_dtype=kind)
    )


OURS = r"(k\dv\d)-(\d+)(?:-r(\d+))?(?:-s(\d+))?(-even)?"


def evenly():
    "Equally many splits for each request, instead of a list of work."
    from turboquant_nb.serving.step import CodedAttention

    decode = CodedAttention._decode
    CodedAttention._decode = lambda self, *args, **more: decode(self, *args[:-1], None, **more)


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
        self.most = self.preempted = 0
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request

        def counted(*args, **kwargs):
            out = schedule(*args, **kwargs)
            self.most = max(self.most, len(self.scheduler.running))
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


# steps at each end of a run that are not of decoding alone: prompts that end, an engine that is
# one step ahead
EDGE = 6


def timed_steps(engine):
    "When each step of an engine ended; the caller clears the list."
    ends, step = [], engine.step

    def timed():
        out = step()
        ends.append(time.perf_counter())
        return out

    engine.step = timed
    return ends


def each_step(ends):
    """Milliseconds of a step that decodes, the mean of a run whose steps ended at these
    seconds. Raises ValueError for too few."""
    count = len(ends) - 2 * EDGE
    if count < 1:
        raise ValueError(
            f"a run must have more than {2 * EDGE} steps to be timed, got {len(ends)}: ask for "
            "more new tokens"
        )
    return (ends[-EDGE] - ends[EDGE]) / count * 1e3


def shape_of(text):
    """(what is measured, requests, tokens, new tokens); ragged: the first request has so many
    tokens, the others have 1,000."""
    what, _, sizes = text.rpartition(":")
    return what or "token", *map(int, (sizes.split("x") + ["1"])[:3])


def profiled(run, path):
    "Kernels and functions of Python of 32 steps, to a text file."
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        run(33)
    with open(path, "w") as f:
        print(
            p.key_averages().table(
                sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70
            ),
            file=f,
        )
        host = cProfile.Profile()
        host.runcall(run, 33)
        pstats.Stats(host, stream=f).sort_stats("tottime").print_stats(30)


def main(kind, folder, gpus, memory, gib, shapes, profile=None):
    from vllm import LLM, SamplingParams

    if found := re.fullmatch(OURS, kind):
        from turboquant_nb.serving.vllm import register

        register()
        if found[5]:
            evenly()
    if kind.startswith("turboquant_"):
        flash_3()
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(LLAMA_8B, f)
    print("READY", flush=True)
    if not sys.stdin.readline():  # who would have said begin is gone
        return
    began = time.time()
    llm = LLM(folder, **options(kind, max(b for _, b, _, _ in shapes), gpus, memory))
    cache = llm.llm_engine.vllm_config.cache_config
    row = lambda **x: print("ROW " + json.dumps(dict(kind=kind, gpus=gpus, **x)), flush=True)
    row(what="start", p50=time.time() - began, unit="s")
    pool = Pool(llm) if gpus == 1 else None  # of this process
    each = 1 / cache.block_size if pool is None else pool.blocks_per_token
    row(
        what="cache",
        p50=int(cache.num_gpu_blocks / each),
        unit="tokens",
        memory=memory,
        **({} if pool is None else dict(bytes_per_token=pool.bytes * each)),
    )
    gen, steps = torch.Generator().manual_seed(0), timed_steps(llm.llm_engine)
    for what, batch, tokens, new in shapes:
        prompts = []

        def run(n):
            begin = time.time()
            llm.generate(
                prompts,
                SamplingParams(max_tokens=n, temperature=0, detokenize=False, ignore_eos=True),
                use_tqdm=False,
            )
            return time.time() - begin

        def afresh(n=1):
            "With other prompts, of which the prefix cache has none."
            sizes = [tokens] + [1000 if what == "ragged" else tokens] * (batch - 1)
            prompts[:] = [
                {"prompt_token_ids": torch.randint(3, 31000, (n,), generator=gen).tolist()}
                for n in sizes
            ]
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
            times = sorted([afresh() for _ in range(4)][1:])
            row(
                what="first token",
                **of,
                p50=times[1],
                p20=times[0],
                p80=times[-1],
                unit="s",
                n=3,
            )
            continue
        if tokens <= 8192:
            afresh()  # what is made on first use
        row(what="first token", **of, p50=afresh(), unit="s", n=1)
        each = []
        for _ in range(5):
            steps.clear()
            run(new)
            each.append(each_step(steps))
        each.sort()
        row(what="token", **of, p50=each[2], p20=each[1], p80=each[3], unit="ms", n=5, new=new)
        if profile and (what, batch, tokens, new) == shapes[-1]:
            profiled(run, os.path.join(profile, f"{kind}.txt"))


if __name__ == "__main__":
    words, where = sys.argv[1:], None
    if words[0] == "--profile":
        where, words = words[1], words[2:]
    main(
        words[0],
        words[1],
        int(words[2]),
        float(words[3]),
        float(words[4]),
        [shape_of(s) for s in words[5:]],
        where,
    )
