"""One engine of vLLM with Llama-8B shapes and dummy weights, in a process of its own: serving_engine.py KIND FOLDER GPUS MEMORY SHAPE …; see serving.py. Prints rows as JSON lines."""
import json
import os
import re
import sys
import time

os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch  # noqa: E402

LLAMA_8B = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=32000, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
    torch_dtype="bfloat16", tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, hidden_act="silu",
)  # fmt: skip


def options(kind, largest, gpus, memory):
    "What differs between kinds: bf16, a kv_cache_dtype of vLLM, or a preset of ours with tokens of a block, as k3v3-64."
    of = dict(load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=33500, max_num_seqs=max(16, largest), max_num_batched_tokens=8192,
              gpu_memory_utilization=memory, tensor_parallel_size=gpus, disable_log_stats=True, seed=0,
              compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted({1, 8, 32, largest})})  # fmt: skip
    if found := re.fullmatch(r"(k\dv\d)-(\d+)", kind):
        return of | dict(attention_backend="CUSTOM", block_size=int(found[2]), additional_config={"turboquant_nb": {"recipe": found[1]}})
    return of | (dict(attention_backend="FLASH_ATTN") if kind == "bf16" else dict(kv_cache_dtype=kind))


def shape_of(text):
    "(whether all come at once, requests, tokens, new tokens)."
    full, _, sizes = text.rpartition(":")
    return bool(full), *map(int, sizes.split("x"))


def main(kind, folder, gpus, memory, shapes):
    from vllm import LLM, SamplingParams

    if re.match(r"k\dv\d", kind):
        from turboquant_nb.serving.vllm import register

        register()
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(LLAMA_8B, f)
    began = time.time()
    llm = LLM(folder, **options(kind, max(b for _, b, _, _ in shapes), gpus, memory))
    cache = llm.llm_engine.vllm_config.cache_config
    row = lambda **x: print("ROW " + json.dumps(dict(kind=kind, gpus=gpus, **x)), flush=True)  # noqa: E731
    row(what="start", p50=time.time() - began, unit="s")
    row(what="cache", p50=cache.num_gpu_blocks * cache.block_size, unit="tokens", block=cache.block_size, memory=memory)
    gen = torch.Generator().manual_seed(0)
    for full, batch, tokens, new in shapes:
        prompts = [{"prompt_token_ids": torch.randint(3, 31000, (tokens,), generator=gen).tolist()} for _ in range(batch)]

        def run(n):
            begin = time.time()
            llm.generate(prompts, SamplingParams(max_tokens=n, temperature=0, detokenize=False, ignore_eos=True), use_tqdm=False)  # noqa: B023
            return time.time() - begin

        llm.reset_prefix_cache()
        if full:
            seconds = run(new)
            row(what="written", batch=batch, tokens=tokens, new=new, p50=batch * new / seconds, seconds=seconds, unit="tokens/s", n=1)
            continue
        if tokens <= 8192:
            run(1)  # what is made on first use
            llm.reset_prefix_cache()
        row(what="first token", batch=batch, tokens=tokens, p50=run(1), unit="s", n=1)
        once, more = min(run(1), run(1)), [run(1 + new) for _ in range(3)]
        each = sorted((t - once) / new * 1e3 for t in more)
        row(what="token", batch=batch, tokens=tokens, p50=each[1], p20=each[0], p80=each[-1], unit="ms", n=3, new=new)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), [shape_of(s) for s in sys.argv[5:]])
