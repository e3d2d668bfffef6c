"""A real vLLM engine with our backend. After every call of every layer the stored codes are
compared with those of the states that the layer was given, coded anew, and its output with
attention to the stored codes (on a GPU every fourth call that only decodes). Prints one JSON
object. Run by test_vllm.py, and by the gate of scripts/bench/serving.py, in a process of its
own: engine.py FOLDER PART …, with the parts plain, refuse, recent, firsts, firsts_few,
firsts_short, at_once, trellis, exact, exact_windows, exact_learnt, exact_sizes, exact_states,
exact_shared, learnt, sizes, shared, states, offload, offload_codes, offload_cut, drafts,
drafts_recent, drafts_firsts, hybrid, random, random_firsts, parallel, dense, graphs,
graphs_drafts, graphs_firsts, graphs_ragged, graphs_trellis, each of which is a function here.
On a CPU our backend stands in the place of vLLM's own, in fp32; on a GPU it is chosen by its
name, in bf16."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

CUDA = torch.cuda.is_available()
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
os.environ |= {} if CUDA else {"VLLM_CPU_KVCACHE_SPACE": "1", "TURBOQUANT_NB_VLLM_CPU": "1"}

import transformers

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from bench.models import told_by_layer
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, LlamaForCausalLM

SIZES = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=16384,
    max_position_embeddings=4096,
    initializer_range=0.08,
    bos_token_id=1,
    eos_token_id=2,
)
COUNTS = (
    "all calls decodes grouped chunks chunks_with_past drafted sliding learnt shared split "
    "centred turned preempted recent firsts followed at_edge miscoded"
)
seen = dict.fromkeys(COUNTS.split(), 0) | dict(worst=0.0)
preempted = set()  # identifiers of requests


def saved(folder, config, louder=4, change=lambda model: None):
    "A random model of a configuration, whose logits are so much larger: few near ties."
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    change(model)
    model.lm_head.weight.data *= louder
    model.save_pretrained(folder)
    return str(folder)


def llama(folder):
    return saved(folder, LlamaConfig(**SIZES, tie_word_embeddings=False))


def gemma(folder):
    "Layers with a sliding window and without, and a soft cap."
    config = Gemma2Config(
        **SIZES | dict(num_hidden_layers=4),
        sliding_window=100,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=None,
        query_pre_attn_scalar=64,
    )
    return saved(folder, config, 1)


def gpt_oss(folder):
    "A learnt logit in each head's softmax, experts, every second layer with a window."
    sizes = SIZES | dict(num_hidden_layers=4, intermediate_size=128, initializer_range=0.2)
    config = transformers.GptOssConfig(
        **sizes,
        sliding_window=100,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )

    def learn(model):
        for layer in model.model.layers:
            layer.self_attn.sinks.data.uniform_(0, 4)

    return saved(folder, config, change=learn)


def gemma_4(folder, layers=5, shared=0):
    """Heads of 256 channels in layers with a window, of 512 in the others, which have fewer of
    them, and values that are their keys' projection. The last layers read the caches of
    others."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    wide = dict(head_dim=512, num_key_value_heads=1)
    sizes = SIZES | dict(head_dim=256, num_attention_heads=4, num_key_value_heads=4)
    config = transformers.Gemma4TextConfig(
        **sizes | dict(num_hidden_layers=layers),
        layer_types=kinds[1 : layers + 1],
        per_layer_config={i: wide for i in range(1, layers, 3)},
        attention_k_eq_v=not shared,
        num_kv_shared_layers=shared,
        tie_word_embeddings=False,
        sliding_window=100,
        hidden_size_per_layer_input=0,
        pad_token_id=0,
    )
    return saved(folder, config, 4 + 2 * shared)


def deepseek(folder):
    "Latents of 512 channels and rotary parts of 64, which all heads share."
    sizes = SIZES | dict(num_attention_heads=4, num_key_value_heads=4)
    del sizes["head_dim"]
    latents = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    more = dict(q_lora_rank=None, first_k_dense_replace=3)
    return saved(folder, transformers.DeepseekV2Config(**sizes, **latents, **more))


def nemotron_h(folder):
    "Layers that hold a state of one size (Mamba 2), and layers with attention."
    sizes = SIZES | dict(initializer_range=0.2)
    del sizes["num_hidden_layers"]
    config = transformers.NemotronHConfig(
        **sizes,
        layers_block_type=["mamba", "attention", "mamba", "mlp", "attention", "mamba"],
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=2,
        use_mamba_kernels=False,
    )
    return saved(folder, config)


def calibration(folder, path):
    "Means and transforms of the small model's keys on random tokens."
    from turboquant_nb.calibration.fit import calibrate
    from turboquant_nb.quant.calibration import save_calibration

    ids = torch.randint(3, 1000, (2, 256), generator=torch.Generator().manual_seed(5))
    save_calibration(calibrate(LlamaForCausalLM.from_pretrained(folder).float(), ids), path)
    return str(path)


def check_codes(q, stored, exact, shift):
    """Count codes and scales that are not those of the states, and those that differ where a
    sum in another order may decide."""
    from turboquant_nb.quant.quantizer import decided, decode

    x = (exact - shift).float()
    anew = q.encode(x)
    if q.code.windows:  # two paths may be as good: vectors may not be farther than the best is
        far, best = ((decode(q, y) - x).norm(dim=-1) for y in (stored, anew))
        seen["miscoded"] += int((far > best * 1.01).sum())
        return
    other = stored.codes != anew.codes
    if other.any():
        heads = (
            [SimpleNamespace(per_head=False, matrix=m) for m in q.rotation.matrix]
            if q.rotation.per_head
            else [q.rotation] * len(x)
        )
        sure = torch.stack(
            [
                decided(SimpleNamespace(rotation=r, code=q.code, d=q.d), y)
                for r, y in zip(heads, x)
            ]
        )
        seen["miscoded"] += int((other & sure).sum())
        seen["at_edge"] += int((other & ~sure).sum())
    apart = (stored.scale.float() / anew.scale.float() - 1).abs()[
        ~other.any(-1)
    ]  # scales of two bytes: one rounding
    seen["miscoded"] += int(
        (apart > 2.0 ** (-10 if stored.scale.dtype == torch.float16 else -7)).sum()
    )


def watch():
    "Keep the exact states of every slot, and compare each output with them."
    from turboquant_nb.cache.pages import read_cells
    from turboquant_nb.quant.quantizer import Coded, decode
    from turboquant_nb.vllm import pages as ours
    from turboquant_nb.vllm.backend import Impl
    from vllm.v1.core.sched.scheduler import Scheduler

    def origins(table, lengths, starts, slots, block, sinks, find=ours.sink_origins):
        "Count first tokens that come from another request of the step."
        found, ends = find(table, lengths, starts, slots, block, sinks), starts.tolist()
        for a, b in zip(ends, ends[1:]):
            own = found[a:b]
            seen["followed"] += int(((own >= 0) & ((own < a) | (own >= b))).sum())
        return found

    ours.sink_origins = origins
    store, forward, preempt = Impl.do_kv_cache_update, Impl.forward, Scheduler._preempt_request

    def kept(self, layer, key, value, kv_cache, slots):
        store(self, layer, key, value, kv_cache, slots)
        if getattr(self, "shadow_of", None) != (kv_cache.data_ptr(), kv_cache.shape):
            self.shadow = [
                x.new_full((kv_cache.shape[0] * kv_cache.shape[2], *x.shape[1:]), torch.nan)
                for x in (key, value)
            ]
            self.shadow_of = kv_cache.data_ptr(), kv_cache.shape
        real = slots >= 0
        for mine, x in zip(self.shadow, (key, value)):
            mine[slots[real]] = x[: len(slots)][real]

    def compared(self, layer, query, key, value, kv_cache, meta, output, *rest, **more):
        forward(self, layer, query, key, value, kv_cache, meta, output, *rest, **more)
        if meta is None:
            return output
        step, n, group = meta.step, kv_cache.shape[2], self.num_heads // self.num_kv_heads
        seen["shared"] += self.shared is not None
        layers = ours.engine_config().compilation_config.static_forward_context
        shadow = (layers[self.shared].impl if self.shared else self).shadow
        seen["all"] += 1
        if (
            CUDA and seen["all"] % 4 and not step.chunks and not step.groups
        ):  # each comparison waits for the device many times
            return output
        codes, center = self.layer.codes, self.layer.codes.center
        starts, lengths = step.starts.tolist(), step.lengths.tolist()
        seen["calls"] += 1
        seen["decodes"] += step.decodes
        seen["drafted"] += step.decodes * (step.each > 1)
        seen["grouped"] += sum(len(g.requests) for g in step.groups)
        seen["chunks"] += len(step.chunks)
        seen["chunks_with_past"] += sum(c.past > 0 for c in step.chunks)
        seen["sliding"] += self.window is not None
        seen["centred"] += center is not None
        seen["turned"] += codes.cos_sin is not None
        seen["learnt"] += self.logits is not None
        seen["split"] += (ours.PageBackend.pages.tokens if ours.PageBackend.pages else n) > n
        window, sinks, (key, value) = (
            self.config.recent,
            self.firsts,
            (codes.key, codes.value),
        )
        seen["recent"] += window > 0
        for row, length, a, b in zip(step.table, lengths, starts, starts[1:]):
            if b <= a:
                continue
            first = (
                0 if self.window is None else max(0, length - (b - a) - self.window + 1)
            )  # what no query sees may be gone
            t = torch.arange(first, length, device=query.device)
            slots, past = (
                row[t // n].long() * n + t % n,
                max(0, length - (b - a) - window - first),
            )  # tokens whose codes are read
            held = read_cells(kv_cache, codes, row, first + past)
            sides = []
            shift = torch.zeros((), device=query.device)
            if center is not None and past:
                shift = codes.center_at(t[:past]).transpose(0, 1)
            for x, q, stored in zip(shadow, (key, value), held):
                exact = x[slots].transpose(0, 1)  # [H, T, d]
                assert exact.isfinite().all(), "a token is read that was never stored"
                if past:
                    stored = Coded(stored.codes[:, first:], stored.scale[:, first:])
                    check_codes(q, stored, exact[:, :past], shift)
                coded = decode(q, stored) + shift if past else exact[:, :0].float()
                coded[:, :sinks] = exact[:, : min(sinks, past)].float()
                sides.append(torch.cat([coded, exact[:, past:].float()], 1).double())
                shift = torch.zeros_like(shift)  # values have none
            seen["firsts"] += min(sinks, past)
            sides = [x.repeat_interleave(group, 0) for x in sides]
            scores = (
                query[a:b].view(b - a, self.num_heads, -1).transpose(0, 1).double()
                @ sides[0].mT
                * self.scale
            )
            scores = (
                scores
                if self.softcap is None
                else self.softcap * (scores / self.softcap).tanh()
            )
            place = length - (b - a) + torch.arange(b - a, device=query.device)[:, None]
            hidden = (t > place) | (t <= place - (self.window or length + 1))
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.logits is not None:  # one more score, of nothing
                more = self.logits.double()[:, None, None].expand(-1, b - a, 1)
                scores = torch.cat([scores, more], -1)
            weights = scores.softmax(-1)[..., : len(t)]
            want = (weights @ sides[1]).transpose(0, 1)
            got = output[a:b].view(want.shape).double()
            seen["worst"] = max(seen["worst"], float((got - want).norm() / want.norm()))
        return output

    def counted(self, request, *args, **kwargs):
        seen["preempted"] += 1
        preempted.add(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Impl.do_kv_cache_update, Impl.forward, Scheduler._preempt_request = kept, compared, counted


def by_layer(folder):
    "What an engine must be told of a model whose heads differ by layer."
    import vllm

    config = json.loads((Path(folder) / "config.json").read_text())
    wide = next(iter(config.get("per_layer_config", {}).values()), {})
    if not wide or int(vllm.__version__.split(".")[1]) >= 32:
        return {}
    heads = dict(global_head_dim=512, num_global_key_value_heads=wide["num_key_value_heads"])
    heads["attention_k_eq_v"] = config["attention_k_eq_v"]
    return dict(hf_overrides=told_by_layer(heads))


def engine(folder, blocks=64, of=None, **more):
    from vllm import LLM

    here = (
        dict(
            dtype="bfloat16",
            attention_backend="CUSTOM",
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=1 << 30,
        )
        if CUDA
        else dict(dtype="float32")
    )
    options = dict(
        here,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=64,
        enable_chunked_prefill=True,
        num_gpu_blocks_override=blocks,
        additional_config={
            "turboquant_nb": {"recipe": "k3v3", "recent": 0, "sinks": 0} | (of or {})
        },
    )
    return LLM(folder, **(options | by_layer(folder) | more))


def sampled(tokens, **more):
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **more
    )


def generate(llm, prompts, params):
    return llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)


def random_prompts(*lengths, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 1000, (n,), generator=g).tolist() for n in lengths]


def served(llm, *batches, new=12):
    """Batches of prompts, one after the other: the tokens that each gets, and how many of its
    own were known."""
    outs = [o for batch in batches for o in generate(llm, batch, sampled(new))]
    tokens = [list(o.outputs[0].token_ids) for o in outs]
    return dict(tokens=tokens, cached=[o.num_cached_tokens for o in outs])


def ranked(llm, prompts, new=40):
    "(tokens, the two likeliest of each step) of each prompt."
    outs = generate(llm, prompts, sampled(new, logprobs=2))
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outs]


FIRSTS = dict(recent=24, sinks=4)
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)


def replayed(*sizes):
    "What an engine is told that replays steps of so many tokens from graphs."
    how = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    how["cudagraph_capture_sizes"] = [*sizes]
    return dict(enforce_eager=False, compilation_config=how)


def plain(folder):
    """Three requests in chunks of 64, two that begin with blocks of others, four in too few
    blocks."""
    llm, prompts = engine(llama(folder / "llama"), 10), random_prompts(130, 75, 200)
    known = [prompts[0] + prompts[1][:20], prompts[2][:150]]
    found = served(llm, prompts, known)
    some = [*(p[:60] for p in prompts), prompts[2][100:160]]
    generate(llm, some, sampled(80 if CUDA else 150))
    if (
        not CUDA
    ):  # a prompt in one chunk is attended to exactly: the first token is the dense model's
        one = prompts[1][:40]
        logits = LlamaForCausalLM.from_pretrained(folder / "llama")(torch.tensor([one])).logits
        first = served(llm, [one], new=1)["tokens"]
        found["first_token_equal"] = first == [[int(logits[0, -1].argmax())]]
    return found


def recent(folder):
    """Requests in chunks, one that begins with blocks of another, whose last 24 tokens are read
    exactly."""
    llm = engine(llama(folder / "llama"), 50, of=dict(recent=24))
    prompts = random_prompts(130, 75, 200)
    found = served(llm, prompts, [prompts[0] + prompts[1][:20], prompts[2][:150]])
    served(llm, [*(p[:60] for p in prompts), prompts[2][100:160]], new=150)
    return found


def firsts(folder):
    """The same with 4 exact first tokens in the pages of recent ones, of which each has two.
    Prompts of one step begin with blocks of one another, two requests deep; prompts of 1 to 5
    tokens."""
    llm = engine(llama(folder / "llama"), 300, FIRSTS, max_num_batched_tokens=512)
    a, b, c = random_prompts(130, 75, 200)
    together = [a[:70], a[:64] + b[:70], a[:64] + b[:64] + c[:20], a[:64] + b[:64] + c[:1]]
    short = [a[:n] for n in (1, 2, 3, 5)]
    return served(llm, together, [a, b, c], [a + b[:20], c[:150]], short)


def trellis(folder):
    "Codes of a trellis, 24 recent and 4 first tokens, in chunks, with a prefix hit."
    of = dict(FIRSTS, recipe="k2v2-trellis")
    llm = engine(llama(folder / "llama"), 300, of, block_size=128)
    one, other = random_prompts(200, 75)
    return served(llm, [one, other], [one + other[:20]])


def firsts_few(folder):
    """The same in too few blocks: short prompts are let in, whose windows grow. Steps of 16
    tokens, so that who comes back does in chunks."""
    llm = engine(llama(folder / "llama"), 38, FIRSTS, max_num_batched_tokens=16)
    a, b, c = random_prompts(130, 75, 200)
    return served(llm, [a[:12], b[:8], c[:20], c[100:105]], new=150)


def at_once(folder):
    """As many requests as the engine says that its pool holds, and half as many again: how many
    ran at once, each with its whole prompt, and how many were thrown out. None has written all
    its tokens before the last prompt is read."""
    length, new, found = 512, 160, []
    room = dict(max_num_batched_tokens=128, max_num_seqs=64)
    llm = engine(llama(folder / "llama"), 500, FIRSTS, **room)
    said = llm.llm_engine.vllm_config.cache_config
    most = int(said.kv_cache_max_concurrency)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for n in (most, most * 3 // 2):
        out, whole = seen["preempted"], 0
        for i, prompt in enumerate(random_prompts(*[length - new] * n, seed=n)):
            llm.llm_engine.add_request(f"{n}-{i}", {"prompt_token_ids": prompt}, sampled(new))
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            full = [r for r in scheduler.running if r.num_computed_tokens >= length - new]
            whole = max(whole, len(full))
        found.append(dict(requests=n, whole=whole, preempted=seen["preempted"] - out))
    return dict(said=said.kv_cache_max_concurrency, tokens=said.kv_cache_size_tokens, ran=found)


def firsts_short(folder):
    "Prompts that come three tokens a step, fewer than the 4 first tokens."
    of, each = dict(recent=2, sinks=4), dict(long_prefill_token_threshold=3)
    llm = engine(llama(folder / "llama"), 200, of, **each)
    return served(llm, random_prompts(50, 2, 4, 30), new=20)


def in_transformers(path, prompts):
    "The tokens of the dense model."
    model = AutoModelForCausalLM.from_pretrained(path).float()
    how = dict(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [model.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in prompts]


def dense(path, prompts=None):
    """The tokens of an engine without our backend, in a process of its own; this is what that
    one runs, too."""
    if prompts is None:
        prompts = json.loads((Path(path) / "prompts.json").read_text())
        own = dict(attention_backend="TRITON_ATTN" if by_layer(path) else None) if CUDA else {}
        llm = engine(str(path), 400, additional_config={}, **own)
        return served(llm, prompts, new=40)
    (Path(path) / "prompts.json").write_text(json.dumps(prompts))
    line = [sys.executable, __file__, path, "dense"]
    without = os.environ | {"VLLM_PLUGINS": ""}
    done = subprocess.run(line, capture_output=True, text=True, env=without)
    assert not done.returncode, done.stderr[-3000:]
    found = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    return json.loads(found[7:])["tokens"]


def exact(folder, make=llama, other=None, blocks=400):
    """All tokens are read exactly: the tokens of another that is dense. On a GPU that is an
    engine, which rounds as ours does."""
    other = other or (dense if CUDA else in_transformers)
    path, prompts = make(folder / make.__name__), random_prompts(130, 75, 200)
    ours = ranked(engine(path, blocks, of=dict(recent=512, means=False)), prompts)
    theirs = [(tokens, ranks) for tokens, (_, ranks) in zip(other(path, prompts), ours)]
    decided, wrong = compare(ours, theirs)
    return dict(decided=decided, wrong=wrong)


def exact_windows(folder):
    "The same beside layers with a sliding window, and a soft cap."
    return exact(folder, gemma)


def exact_sizes(folder):
    "The same where layers have heads of two sizes, and of two numbers."
    return exact(folder, gemma_4, blocks=2000)


def gemma_4_shared(folder):
    "The same where the last three of eight layers read the caches of others."
    return gemma_4(folder, 8, 3)


def exact_shared(folder):
    "The same where layers read the caches of others."
    return exact(folder, gemma_4_shared, blocks=2000)


def exact_learnt(folder):
    "The same with learnt logits in the softmax, and sliding windows."
    return exact(folder, gpt_oss)


def exact_states(folder):
    """The same beside layers that hold a state instead of keys and values, against the engine
    without us: its own Mamba 2 rounds otherwise than that of transformers."""
    return exact(folder, nemotron_h, dense)


def states(folder):
    "Codes beside such layers, in blocks that the engine grew, with recent and first tokens."
    llm = engine(nemotron_h(folder / "nemotron_h"), 100, FIRSTS)
    return served(llm, random_prompts(300, 130, 40), new=30)


def in_turns(llm):
    "Three prompts in chunks, then one that begins with blocks of another."
    prompts = random_prompts(300, 130, 40)
    return served(llm, prompts, [prompts[1] + prompts[0][:70]], new=30)


def sizes(folder, make=gemma_4):
    """Codes, 24 recent and 4 first tokens where layers have heads of two sizes and numbers, in
    pages of one size: of twice as many tokens in those with fewer bytes."""
    from turboquant_nb.vllm import pages as ours

    found = in_turns(engine(make(folder / "gemma_4"), 600, FIRSTS))
    pages = ours.PageBackend.pages
    return found | dict(pages={n: pages.tokens_of(n) for n in sorted(pages.sizes)})


def shared(folder):
    "The same where layers read the caches of others."
    return sizes(folder, gemma_4_shared)


def learnt(folder):
    "Codes with learnt logits, 24 recent and 4 first tokens, in chunks, with a prefix hit."
    return in_turns(engine(gpt_oss(folder / "gpt_oss"), 1000, dict(FIRSTS, means=False)))


def copying(cut=lambda page: page):
    """On a CPU vLLM has no worker that copies: this one copies as its worker for GPUs does, of
    each page the bytes that the engine says are in use; `cut` may say fewer. On a GPU that
    worker is counted. Returns the bytes that were copied, by direction."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    moved = dict(out=0, back=0)
    if CUDA:
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Copier

        finished = Copier.get_finished

        def counted(self):
            done = finished(self)
            moved["out" if self.gpu_to_cpu else "back"] += sum(x.transfer_size for x in done)
            return done

        Copier.get_finished = counted
        return moved

    class Copies(OffloadingWorker):
        def __init__(self, spec, caches):
            assert spec.blocks_per_chunk == 1
            self.groups, self.done = caches.group_data_refs, []
            self.pages = [x.tensor for x in caches.tensors]
            chunks = spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks  # 0.26
            if hasattr(spec, "secondary_tier_configs"):  # memory that the tiers see
                self.host = shared_memory(spec, chunks, [x.shape[1] for x in self.pages])
                return
            self.host = [
                torch.full((chunks, x.shape[1]), 85, dtype=x.dtype) for x in self.pages
            ]

        def copy(self, job, engine, here, there, what):
            "Pages of a group by numbers, of all its layers."
            first = 0
            for refs, n in zip(self.groups, engine.group_sizes):
                at, to = (torch.as_tensor(x[first : first + n]).long() for x in (here, there))
                first += n
                for ref in refs:
                    page, host = self.pages[ref.tensor_idx], self.host[ref.tensor_idx]
                    used = cut(ref.page_size_bytes)
                    moved[what] += n * used
                    if what == "out":
                        host[to, :used] = page[at, :used]
                    else:
                        page[at, :used] = host[to, :used]
            self.done.append(TransferResult(job, True))
            return True

        def submit_store(self, job_id, src_spec, dst_spec):
            return self.copy(job_id, src_spec, src_spec.block_ids, dst_spec.block_ids, "out")

        def submit_load(self, job_id, src_spec, dst_spec):
            return self.copy(job_id, dst_spec, dst_spec.block_ids, src_spec.block_ids, "back")

        def get_finished(self):
            done, self.done = self.done, []
            return done

        def wait(self, job_ids):
            "A copy is over when it was submitted."

    CPUOffloadingSpec.get_worker = lambda self, caches: Copies(self, caches)
    return moved


def shared_memory(spec, chunks, sizes):
    "A worker's pages in the memory of the host, as vLLM's own worker takes it."
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    names = ("num_chunks", "kv_bytes_per_chunk")
    if not hasattr(spec, "num_chunks"):  # 0.26
        names = ("num_blocks", "kv_bytes_per_block")
    room = dict(zip(names, (chunks, spec.kv_bytes_per_chunk)))
    page = spec.cpu_page_size_per_worker
    import torch.distributed as processes

    rank = processes.get_rank() if processes.is_initialized() else 0
    region = SharedOffloadRegion(spec.config.engine_id, rank=rank, cpu_page_size=page, **room)
    view = getattr(region, "create_next_worker_view", None) or region.create_next_view
    return [view(n) for n in sizes]


def offloading(connector="OffloadingConnector", **more):
    "What the engine is told of a connector."
    return dict(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config=dict(cpu_bytes_to_use=1 << 27) | more,
    )


def offload_cut(folder):
    "The mutant: the last eighth of each page stays behind."
    return offload(folder, cut=lambda page: page * 7 // 8)


def offload_codes(folder):
    "The same where nothing but codes is kept."
    return offload(folder, dict(recent=0, sinks=0))


def forget(llm):
    "Empty an engine's prefix cache, as soon as what goes to the host is there."
    for _ in range(200):
        if llm.reset_prefix_cache():
            return
        generate(llm, [[5, 6, 7]], sampled(2))  # a step, in which the engine looks after copies
        time.sleep(0.01)
    raise AssertionError("blocks of the prefix cache are still in use")


def offload(folder, of=None, cut=lambda page: page):
    """Prefixes that left the engine's memory come back from the host's: the same tokens and
    log-probabilities, to the last bit, as with prefixes that stayed. On a GPU, which copies
    while it computes, steps have other requests, so there up to the first near tie."""
    moved, path = copying(cut), llama(folder / "llama")
    llm = engine(path, 1000, FIRSTS if of is None else of, kv_transfer_config=offloading())
    lengths = 130, 200, 330, *(range(140, 340, 20) if CUDA else ())
    prompts, found, cached = random_prompts(*lengths), [], []
    for turn in range(3):  # computed, from the engine's memory, from the host's
        if turn == 2:
            forget(llm)
            moved["back"] = 0
        outs = generate(llm, prompts, sampled(20, logprobs=2))
        cached.append([o.num_cached_tokens for o in outs])
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outs])
    assert moved["back"], "nothing came back"
    said = [
        [[list(t), [sorted(x.logprob for x in r.values()) for r in ranks]] for t, ranks in turn]
        for turn in found
    ]
    decided, wrong = compare(found[2], found[1])
    return dict(
        cached=cached, equal=said[1] == said[2], moved=moved, decided=decided, wrong=wrong
    )


def refuse(folder):
    "What an engine says that is asked for what is not served."
    path, refused = llama(folder / "llama"), {}
    other = calibration(path, folder / "other.safetensors")
    few = SIZES | dict(num_hidden_layers=2)
    saved(folder / "short", LlamaConfig(**few))
    saved(folder / "bias", LlamaConfig(**few, attention_bias=True))
    cases = dict(
        recipe=dict(of=dict(recipe="k9v9")),
        bias=dict(folder=str(folder / "bias")),
        nothing=dict(additional_config={}),
        dtype=dict(kv_cache_dtype="fp8"),
        option=dict(of=dict(bits=3)),
        calibration=dict(folder=str(folder / "short"), of=dict(calibration=other)),
        alone=dict(of=dict(sinks=4)),
        room=dict(of=dict(recent=16, sinks=6)),
        manager=dict(of=dict(recent=16), disable_hybrid_kv_cache_manager=True),
        connector=dict(kv_transfer_config=offloading("ExampleConnector")),
        spec=dict(kv_transfer_config=offloading(spec_name="OtherSpec", spec_module_path="x")),
        tier=dict(
            kv_transfer_config=offloading(
                spec_name="TieringOffloadingSpec", secondary_tiers=[dict(type="example")]
            )
        ),
        latents=dict(folder=deepseek(folder / "deepseek")),
        drafts=dict(
            speculative_config=dict(
                method="ngram", num_speculative_tokens=16, prompt_lookup_max=3
            )
        ),
    )
    for name, more in cases.items():
        try:
            engine(more.pop("folder", path), **more)
        except Exception as error:
            refused[name] = str(error)
    return dict(refused=refused)


def drafts(folder, tokens=0, sinks=0):
    """Prompts that repeat themselves, an engine that drafts what followed the last time, keys
    by a calibration."""
    path = llama(folder / "llama")
    of = dict(calibration=calibration(path, folder / "c.safetensors"))
    of |= dict(recent=tokens, sinks=sinks)
    llm = engine(path, 200 if tokens else 64, of, speculative_config=NGRAM)
    a, b = random_prompts(20, 30)
    # so long that greedy tokens come to repeat themselves, whatever the processor
    return served(llm, [a * 7, b * 5, a + b + a], new=150)


def drafts_recent(folder):
    "The same with 24 exact tokens before each step."
    return drafts(folder, 24)


def drafts_firsts(folder):
    "The same with 4 exact first tokens, too, and the calibration's means."
    return drafts(folder, 24, 4)


def hybrid(folder):
    """Two kinds of layers, each with blocks of its own: those of a sliding window are freed
    while requests go on."""
    return served(engine(gemma(folder / "gemma")), random_prompts(300, 130, 40), new=30)


def random(folder, requests=200, blocks=14, of=None):
    """Requests of mixed lengths that come at random, begin like others, are cancelled, and do
    not fit all at once; then each alone. The tokens that were no near ties must be the same:
    codes at an edge, and the order of sums, decide ties. A token sees those of its own chunk
    exactly, so all chunks have the same ends: 16 tokens a step for each of 8 requests. One that
    was thrown out comes back in other chunks."""
    from vllm.v1.core.sched.scheduler import Scheduler

    g = torch.Generator().manual_seed(3)
    if hasattr(
        Scheduler, "get_request_counts"
    ):  # of 0.32, which lets a request that has nobody beside it take longer chunks
        counts = Scheduler.get_request_counts
        Scheduler.get_request_counts = lambda self: (counts(self)[0] + 2, counts(self)[1])
    llm = engine(
        llama(folder / "llama"),
        blocks,
        of,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=16,
    )
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    heads, work = random_prompts(*(draw(64, 200) for _ in range(6)), seed=4), []
    for i in range(requests):
        own = random_prompts(draw(1, 150), seed=100 + i)[0]
        head = heads[draw(0, 6)] if draw(0, 3) else []
        work.append(
            dict(
                prompt=head + own,
                new=draw(1, 12),
                at=draw(0, 2 * requests),
                cancel=draw(0, 10) == 0,
            )
        )
    core, found, cancelled, hits, step = llm.llm_engine, {}, set(), 0, 0
    waiting = sorted(range(requests), key=lambda i: work[i]["at"])
    while waiting or core.has_unfinished_requests():
        while waiting and work[waiting[0]]["at"] <= step:
            i = waiting.pop(0)
            core.add_request(
                str(i),
                {"prompt_token_ids": work[i]["prompt"]},
                sampled(work[i]["new"], logprobs=2),
            )
        for o in core.step():
            if o.finished:
                found[int(o.request_id.split("-")[0])] = o.outputs[0]
                hits += (o.num_cached_tokens or 0) > 0
        for i in range(requests):
            if (
                work[i]["cancel"]
                and i not in cancelled
                and i not in found
                and i not in waiting
                and step > work[i]["at"] + 1
            ):
                core.abort_request([str(i)])
                cancelled.add(i)
        step += 1
    pairs, moved = [], {int(x.split("-")[0]) for x in preempted}
    for i in sorted(set(found) - cancelled - moved)[: 60 if CUDA else requests]:
        llm.reset_prefix_cache()
        both = found[i].token_ids, found[i].logprobs
        pairs.append([both, *ranked(llm, [work[i]["prompt"]], work[i]["new"])])
    decided, wrong = compare(*zip(*pairs))
    return dict(
        finished=len(found),
        cancelled=len(cancelled - set(found)),
        hits=hits,
        steps=step,
        moved=len(moved),
        alone=len(pairs),
        decided=decided,
        wrong=wrong,
    )


def random_firsts(folder):
    "The same with 16 exact recent and 4 exact first tokens."
    return random(folder, 200, 110, dict(recent=16, sinks=4))


def in_workers(folder, function):
    "Have the processes of an engine call a function of this file, as vLLM finds plugins."
    (folder / "plugin/engine_test-0.dist-info").mkdir(parents=True)
    (folder / "plugin/engine_test-0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: engine-test\nVersion: 0\n"
    )
    (folder / "plugin/engine_test-0.dist-info/entry_points.txt").write_text(
        f"[vllm.general_plugins]\nengine_test = engine:{function}\n"
    )
    sys.path.append(str(folder / "plugin"))  # which processes of ours get
    os.environ |= {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def parallel(folder):
    """Two processes with one KV head each, against one with both: keys by a calibration, recent
    and first tokens exact. The processes find `in_worker` as vLLM finds plugins; what they
    compare they say by failing."""
    in_workers(folder, "in_worker")
    os.environ["ENGINE_TEST_FOUND"] = str(folder / "found")
    path, prompts, out = llama(folder / "llama"), random_prompts(130, 75, 200, 20), []
    of = dict(FIRSTS, calibration=calibration(path, folder / "c.safetensors"))
    for ranks in (2, 1):
        more = dict(distributed_executor_backend="mp") if ranks > 1 else {}
        llm = engine(path, 200, of, tensor_parallel_size=ranks, **more)
        out.append(ranked(llm, prompts))
        here = (
            seen["calls"] if ranks > 1 else 0
        )  # calls of this process, of which there are none
        del llm
    decided, wrong = compare(*out)
    workers = [json.loads(x.read_text()) for x in folder.glob("found*")]
    return dict(decided=decided, wrong=wrong, here=here, workers=workers)


def in_worker():
    "What a process of two does first: compare each call, and write what it has seen."
    if multiprocessing.parent_process() is None:
        return
    from turboquant_nb.vllm.backend import Impl, register

    torch.set_num_threads(1)
    register()
    watch()
    compared = Impl.forward

    def written(self, *args, **kwargs):
        out = compared(self, *args, **kwargs)
        Path(f"{os.environ['ENGINE_TEST_FOUND']}-{os.getpid()}").write_text(
            json.dumps(seen | dict(heads=self.num_kv_heads))
        )
        return out

    Impl.forward = written


def graphs(folder, of=None, speculative=None):
    "On a GPU: steps that decode, replayed from graphs, against the same engine without graphs."
    assert not seen["calls"], "what is replayed cannot be watched: its part is run alone"
    path, (a, b), out = llama(folder / "llama"), random_prompts(20, 30), []
    prompts = [a * 7, b * 5, a + b + a, b[:7], *random_prompts(*range(3, 135, 3), seed=6)]
    room = dict(max_num_seqs=16, max_num_batched_tokens=2048)
    for how in (dict(), replayed(4, 8, 16, 64)):
        llm = engine(path, 1000, of, speculative_config=speculative, **room, **how)
        replays = count_replays()
        out.append(ranked(llm, prompts, 24))
        del llm
    decided, wrong = compare(
        out[1], out[0], 1
    )  # a prompt's step, whose token is the first one, is not replayed
    return dict(decided=decided, wrong=wrong, replays=len(replays))


def count_replays():
    "A list that grows with each graph that is replayed."
    replay, found = torch.cuda.CUDAGraph.replay, []
    torch.cuda.CUDAGraph.replay = lambda self: (found.append(1), replay(self))[1]
    return found


def graphs_drafts(folder):
    "The same with drafts."
    return graphs(folder, speculative=NGRAM)


def graphs_firsts(folder):
    "The same with 24 exact recent and 4 exact first tokens."
    return graphs(folder, FIRSTS)


def graphs_trellis(folder):
    "The same with codes of a trellis."
    return graphs(folder, dict(FIRSTS, recipe="k2v2-trellis"))


def graphs_ragged(folder):
    """Unequal requests: replayed, with lists of work, against the engine without graphs,
    without lists, and each request alone."""
    assert not seen["calls"], "what is replayed cannot be watched: its part is run alone"
    from turboquant_nb.kernels import cell_attention
    from turboquant_nb.vllm.step import CodedAttention

    decode, make, made, out = CodedAttention._decode, cell_attention.list_work, [], []
    cell_attention.list_work = lambda *args, **more: (made.append(1), make(*args, **more))[1]
    path, prompts = (
        llama(folder / "llama"),
        random_prompts(3000, 40, 1000, 7, 300, 60, 20, 130, seed=6),
    )
    how = dict(
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    found = lambda llm, prompts: ranked(llm, prompts, 24)
    for listed, more in ((True, replayed(4, 8, 16) if CUDA else {}), (False, {})):
        CodedAttention._decode = (
            decode
            if listed
            else lambda self, *args, **kwargs: decode(self, *args[:-1], None, **kwargs)
        )
        llm = engine(path, 1000, **how, **more)
        replays, lists = count_replays() if CUDA and listed else [1], len(made)
        out.append(found(llm, prompts))
        if listed:
            listings, count = len(made), len(replays)
        else:
            assert len(made) == lists, "a list was made"
            out += [[x for prompt in prompts for x in found(llm, [prompt])]]
        del llm
    pairs = [compare(out[0], x, 1) for x in out[1:]]
    return dict(
        decided=sum(x for x, _ in pairs),
        wrong=sum(x for _, x in pairs),
        replays=count,
        listed=listings,
    )


def compare(some, others, first=0):
    """(tokens from one on whose choice was no near tie, how many of the sequences differ in
    one). A near tie that two sequences decide alike is not counted; behind one that they decide
    otherwise nothing can be compared."""
    decided, wrong = 0, 0
    for (tokens, _), (other, ranks) in zip(some, others):
        for i, (a, b, ranked) in enumerate(zip(tokens, other, ranks)):
            best, second = sorted((x.logprob for x in ranked.values()), reverse=True)[:2]
            near = best - second < TIE
            decided += i >= first and not near
            wrong += a != b and not near
            if a != b:
                break
    return decided, wrong


TIE = 0.5 if CUDA else 0.1  # nats between the two likeliest tokens


def main(folder, parts):
    torch.set_num_threads(1)
    import vllm
    from turboquant_nb.vllm.backend import register

    if parts[0] != "dense":
        register()
    if not parts[0].startswith(
        ("graphs", "dense", "offload", "at_once")
    ):  # what is replayed cannot be watched
        watch()
    found = {}
    for part in parts:
        found |= globals()[part](Path(folder))
    print("RESULT " + json.dumps(seen | dict(version=vllm.__version__) | found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["plain"])
