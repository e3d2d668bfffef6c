"""A real vLLM engine with our backend; every call of every layer is compared with attention to the codes of the states that the layer was
given, coded anew. Prints one JSON object. Run by test_vllm.py, and by the gate of scripts/bench/serving.py, in a process of its own:
engine.py FOLDER [BLOCKS]. On a CPU our backend stands in the place of vLLM's own, in fp32; on a GPU it is chosen by its name, in bf16."""
import json
import os
import sys

import torch

CUDA = torch.cuda.is_available()
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
os.environ |= {} if CUDA else {"VLLM_CPU_KVCACHE_SPACE": "1", "TURBOQUANT_NB_VLLM_CPU": "1"}

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

CONFIG = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=16384,
              max_position_embeddings=4096, rms_norm_eps=1e-5, initializer_range=0.08, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)  # fmt: skip
seen = dict(calls=0, decodes=0, chunks=0, chunks_with_past=0, worst=0.0, preempted=0)


def model(folder):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).float().save_pretrained(folder)


def watch():
    "Keep the exact states of every slot, and compare each output with them."
    from turboquant_nb.quant.quantizer import decode
    from turboquant_nb.serving.vllm import Impl
    from vllm.v1.core.sched.scheduler import Scheduler

    store, forward, preempt = Impl.do_kv_cache_update, Impl.forward, Scheduler._preempt_request

    def kept(self, layer, key, value, kv_cache, slots):
        store(self, layer, key, value, kv_cache, slots)
        if not hasattr(self, "shadow"):
            self.shadow = [x.new_full((kv_cache.shape[0] * kv_cache.shape[2], *x.shape[1:]), torch.nan) for x in (key, value)]
        real = slots >= 0
        for mine, x in zip(self.shadow, (key, value)):
            mine[slots[real]] = x[: len(slots)][real]

    def compared(self, layer, query, key, value, kv_cache, meta, output, *rest, **more):
        forward(self, layer, query, key, value, kv_cache, meta, output, *rest, **more)
        if meta is None:
            return output
        step, n, group = meta.step, kv_cache.shape[2], self.num_heads // self.num_kv_heads
        starts, lengths = step.starts.tolist(), step.lengths.tolist()
        seen["calls"] += 1
        seen["decodes"] += step.decodes
        seen["chunks"] += len(step.chunks)
        seen["chunks_with_past"] += sum(c.past > 0 for c in step.chunks)
        for row, length, a, b in zip(step.table, lengths, starts, starts[1:]):
            if b <= a:
                continue
            t = torch.arange(length, device=query.device)
            slots, past = row[t // n].long() * n + t % n, length - (b - a)
            sides = []
            for x, q in zip(self.shadow, (self.layer.key, self.layer.value)):
                exact = x[slots].transpose(0, 1)  # [H, T, d]
                assert exact.isfinite().all(), "a token is read that was never stored"
                coded = decode(q, q.encode(exact[:, :past])) if past else exact[:, :0].float()
                sides.append(torch.cat([coded, exact[:, past:].float()], 1).double().repeat_interleave(group, 0))
            scores = query[a:b].view(b - a, self.num_heads, -1).transpose(0, 1).double() @ sides[0].mT * self.scale
            scores = scores.masked_fill(t > past + torch.arange(b - a, device=query.device)[:, None], -torch.inf)
            want = (scores.softmax(-1) @ sides[1]).transpose(0, 1)
            got = output[a:b].view(want.shape).double()
            seen["worst"] = max(seen["worst"], float((got - want).norm() / want.norm()))
        return output

    def counted(self, *args, **kwargs):
        seen["preempted"] += 1
        return preempt(self, *args, **kwargs)

    Impl.do_kv_cache_update, Impl.forward, Scheduler._preempt_request = kept, compared, counted


def engine(folder, blocks=None, **more):
    from vllm import LLM

    here = dict(dtype="bfloat16", attention_backend="CUSTOM", gpu_memory_utilization=0.1) if CUDA else dict(dtype="float32")
    options = dict(here, skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64,
                   block_size=64, enable_chunked_prefill=True, num_gpu_blocks_override=blocks,
                   additional_config={"turboquant_nb": {"recipe": "k3v3"}})  # fmt: skip
    return LLM(folder, **(options | more))


def main(folder, blocks):
    torch.set_num_threads(1)
    model(folder)
    from turboquant_nb.serving.vllm import register
    from vllm import SamplingParams

    register()
    watch()
    refused = {}
    cases = dict(recipe=dict(additional_config={"turboquant_nb": {"recipe": "k9v9"}}), nothing=dict(additional_config={}), dtype=dict(kv_cache_dtype="fp8"))
    for name, more in cases.items() if "refuse" in sys.argv else ():
        try:
            engine(folder, **more)
        except Exception as error:
            refused[name] = str(error)
    llm = engine(folder, blocks)
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 1000, (n,), generator=g).tolist() for n in (130, 75, 200)]
    prompts += [prompts[0] + prompts[1][:20], prompts[2][:150]]
    sampling, tokens, cached = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True), [], []
    for batch in (prompts[:3], prompts[3:]):
        for o in llm.generate([{"prompt_token_ids": x} for x in batch], sampling, use_tqdm=False):
            tokens.append(list(o.outputs[0].token_ids))
            cached.append(o.num_cached_tokens)
    long = SamplingParams(max_tokens=150, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompts[i][:60]} for i in (0, 1, 2)] + [{"prompt_token_ids": prompts[2][100:160]}], long, use_tqdm=False)
    if not CUDA:  # a prompt in one chunk is attended to exactly: the first token is the dense model's
        first = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([prompts[1][:40]])).logits[0, -1].argmax()
        short = llm.generate([{"prompt_token_ids": prompts[1][:40]}], SamplingParams(max_tokens=1, temperature=0, detokenize=False), use_tqdm=False)
        seen["first_token_equal"] = int(first) == short[0].outputs[0].token_ids[0]
    import vllm

    print("RESULT " + json.dumps(seen | dict(version=vllm.__version__, tokens=tokens, cached=cached, refused=refused)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
