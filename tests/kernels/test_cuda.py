"""The same numbers on a GPU as on the processor; skipped where there is none. Runs as a script
too: python tests/kernels/test_cuda.py."""

from dataclasses import replace
from functools import partial

import torch

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # a machine that has a GPU but no pytest
    pytest = None

from turboquant_nb.cache.attention import attend, dense_attention
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.quant.calibration import LayerFrame
from turboquant_nb.quant.codes import make_quantizer
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe, as_recipe, preset
from turboquant_nb.cache.budget import coarser
from turboquant_nb.cache.store import KVStore, bytes_by_kind, expected_nbytes

DEVICE = "cuda"  # "cpu" executes the bodies below where there is no GPU

RICH = {  # what a side can be
    "1 bit": Recipe(Spec(1), Spec(2)),
    "k3v3": preset("k3v3"),
    "trellis": Recipe(Spec(2, codebook="trellis"), Spec(3, codebook="trellis")),
    "prod": Recipe(residual="prod"),
    "qjl on both sides": Recipe(
        Spec(4, center="fixed", residual="qjl"), Spec(2, residual="qjl")
    ),
    "sign": Recipe(residual="sign"),
    "rescale": Recipe(residual="rescale"),
    "2.5 bits": as_recipe("k3v3", 2.5),
    "a number per channel": Recipe(Spec((4, 1, 2, 3) * 16, center="fixed"), Spec(3.25)),
    "coarser": coarser(Recipe(Spec(4, center="fixed"), Spec(4))),
}


def states(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_frame(heads, d, rotary=0):
    "Means, and a pair scale that is alike in both channels of a RoPE pair."
    mean, fixed, pair = states(3, heads, d, seed=d)
    pair[:, rotary // 2 : rotary] = pair[:, : rotary // 2]
    return LayerFrame(mean if rotary else None, fixed, (pair / 2).exp2())


def test_residuals_and_fractions_code_alike():
    """Codes, scales and signs of 20,000 vectors; what differs lies within rounding of an edge,
    or of zero for a sign."""
    x = states(20_000, 64)
    for name, recipe in RICH.items():
        a, b = (
            make_quantizer(recipe.key, 64, device).encode(x.to(device))
            for device in ("cpu", DEVICE)
        )
        differ = (a.codes != b.codes.cpu()).any(-1)
        assert differ.float().mean() < 1e-3, (name, float(differ.float().mean()))
        torch.testing.assert_close(b.scale.cpu()[~differ], a.scale[~differ], rtol=1e-3, atol=0)
        assert (a.residual is None) == (b.residual is None) == (recipe.key.residual != "qjl")
        if a.residual:
            (signs, norm), other = (
                (a.residual[n] for n in ("signs", "residual_norm")),
                b.residual,
            )
            assert (signs != other["signs"].cpu())[~differ].float().mean() < 1e-4, name
            torch.testing.assert_close(
                other["residual_norm"].cpu()[~differ], norm[~differ], rtol=2e-3, atol=0
            )


def test_rich_stores_read_and_attend_alike():
    """A store filled on the GPU, its copy on the processor: the same bits, and attention on
    both equals dense attention over what is read."""
    for name, recipe in RICH.items():
        store = KVStore(recipe, 2, 3, 64, device=DEVICE, frame=random_frame(3, 64))
        store.set_range(start=torch.tensor([0, 5]))
        for n in (700, 1, 7):
            store.append(
                states(2, 3, n, 64, seed=n).to(DEVICE),
                states(2, 3, n, 64, seed=n + 1).to(DEVICE),
            )
        assert store.nbytes == expected_nbytes(store), name
        copy = store_of(*state_of(store))
        assert copy.device.type == "cpu" and bytes_by_kind(copy) == bytes_by_kind(store), name
        for a, b in zip(store.read(), copy.read()):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=2e-5)
        q = states(2, 6, 7, 64, seed=2)
        at, p = (
            torch.arange(store.length - 7, store.length)[:, None],
            torch.arange(store.length),
        )
        seen = (p <= at) & (p >= copy.start[:, None, None, None])
        want = dense_attention(q, *copy.read(), mask=seen)
        for got in (attend(q, copy), attend(q.to(DEVICE), store)):
            for a, b in zip(got, want):
                torch.testing.assert_close(a.cpu(), b, rtol=0, atol=2e-5)
        back = store_of(*state_of(copy), device=DEVICE)
        held = state_of(store)[0]
        for i, t in state_of(back)[0].items():
            assert t.device.type == DEVICE and torch.equal(t.cpu(), held[i].cpu()), (name, i)
        store.to("cpu")
        assert store.device.type == "cpu" and store.home.type == DEVICE
        store.to(store.home)
        for i, t in state_of(store)[0].items():
            assert torch.equal(t, held[i]), (name, i)


# --- generate() on kernels
# -------------------------------------------------------------------------


def llama(dtype=torch.float32, layers=3, sliding=False, **sizes):
    "A random model with weights large enough that its tokens depend on the context."
    import transformers

    import turboquant_nb.hf  # noqa: F401

    shape = (
        dict(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            max_position_embeddings=200_000,
        )
        | sizes
    )
    if sliding:
        shape |= dict(
            sliding_window=100,
            query_pre_attn_scalar=64,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"][:layers],
        )
    make = (
        ("Gemma3TextConfig", "Gemma3ForCausalLM")
        if sliding
        else ("LlamaConfig", "LlamaForCausalLM")
    )
    torch.manual_seed(0)
    model = (
        getattr(transformers, make[1])(getattr(transformers, make[0])(**shape))
        .eval()
        .to(DEVICE, dtype)
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.08)
    model.set_attn_implementation("turboquant")
    return model


def prompts(batch=3, length=300, padded=True):
    ids = torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        for row, n in enumerate((0, 7, 130)[:batch]):
            ids[row, :n], mask[row, :n] = 0, 0
    return dict(input_ids=ids.to(DEVICE), attention_mask=mask.to(DEVICE))


def served_by_kernels(cache, chunks=0):
    r = cache.report()
    served = set(r["served"]) | ({"kernel"} if r["graphs"].get("replayed") else set())
    assert (
        served - {"chunk"} == {"prefill", "kernel"} and r["served"].get("chunk", 0) == chunks
    ), r["served"]
    assert r["reasons"] == {} and set(r["coded"]) == {"kernel"}, (r["reasons"], r["coded"])
    return True


def test_every_way_of_generating_runs_on_kernels():
    """No mask, no PyTorch on codes, nothing dense: the counts say so; and the tokens that
    PyTorch's attention on codes gives."""
    from turboquant_nb.hf import TurboQuantCache

    ways = {
        "greedy": {},
        "beams": dict(num_beams=3),
        "sampling": dict(do_sample=True, top_k=5, num_return_sequences=2),
        "chunks": dict(prefill_chunk_size=128),
    }
    for sliding in (False, True):
        model, inputs = llama(sliding=sliding), prompts()
        for recipe in ("k4v4", "k3v3", "k4v3"):
            for name, way in ways.items():
                outs = []
                for backend in ("triton", "torch"):
                    cache = TurboQuantCache(model, recipe, backend=backend)
                    torch.manual_seed(1)
                    outs.append(
                        model.generate(
                            **inputs,
                            past_key_values=cache,
                            max_new_tokens=10,
                            **{"do_sample": False, **way},
                        )
                    )
                    if backend == "triton":
                        served_by_kernels(cache, 2 * 3 if name == "chunks" else 0)
                agree = (
                    (outs[0] == outs[1])[:, 300:].float().mean()
                )  # near ties may fall to the other side
                print(sliding, recipe, name, float(agree))
                assert agree > 0.7, (sliding, recipe, name, outs)
        auto = TurboQuantCache(model)
        model.generate(**inputs, past_key_values=auto, max_new_tokens=3, do_sample=False)
        served_by_kernels(auto)


def test_drafts_run_on_kernels():
    import copy

    from turboquant_nb.hf import TurboQuantCache

    for sliding in (False, True):
        model = llama(sliding=sliding)
        twin = copy.deepcopy(model)
        twin.set_attn_implementation("sdpa")
        ids = prompts(1, 40, padded=False)["input_ids"].repeat(1, 4)
        assisted = (
            [] if sliding else [dict(assistant_model=twin)]
        )  # transformers 5.17 fails with a sliding assistant
        for way in (dict(prompt_lookup_num_tokens=5), *assisted):
            caches = [
                TurboQuantCache(model, "k4v4", backend="triton", graphs=graphs)
                for graphs in (True, False)
            ]
            outs = [
                model.generate(
                    ids, past_key_values=cache, max_new_tokens=40, do_sample=False, **way
                )
                for cache in caches
            ]
            assert torch.equal(*outs)
            graphs = caches[0].report()["graphs"]
            assert (
                sliding or graphs["replayed"] > graphs["captured"] > 0 and not graphs["why_not"]
            ), graphs  # a sliding layer frees tokens
            for cache in caches:
                served_by_kernels(cache)


def test_passes_with_drafts_are_captured_early():
    """Of a long prompt whose drafts are right for a while: tokens, recent tokens and lengths
    are those of eager passes, whether the first pass is captured behind the prompt or while it
    is read."""
    from turboquant_nb.hf import TurboQuantCache

    model = llama(torch.bfloat16, layers=12)
    ids = prompts(1, 250, padded=False)["input_ids"].repeat(1, 16)
    for again, limit in enumerate((None, None, 5000, 5000)):
        caches = [
            TurboQuantCache(model, "k3v3", max_length=limit, graphs=graphs)
            for graphs in (False, True)
        ]
        more = dict(max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5)
        outs = [model.generate(ids, past_key_values=c, **more) for c in caches]
        assert torch.equal(*outs)
        graphs = caches[1].report()["graphs"]
        print(again, graphs["line"], dict(caches[1].report()["served"]), flush=True)
        assert graphs["replayed"] > 0 and not graphs["why_not"], graphs
        for a, b in zip(*(c.layers for c in caches)):
            assert a.held == b.held
            (x, at), (y, there) = a.store.exact("key"), b.store.exact("key")
            assert torch.equal(at, there)
            held = (at >= 0)[:, None, :, None]  # what a refused draft leaves is read by nobody
            x, y = x.where(held, 0), y.where(held, 0)
            if limit is None:
                assert torch.equal(x, y), (again, a.index)
            else:
                # a graph cuts its work by the room that was asked for, an eager pass by the
                # length: sums in another order, of which bf16 keeps 8 bits
                torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-6)
        for c in caches:
            served_by_kernels(c)
            c.check()
        del a, b, c, caches


def test_logits_of_kernels_are_those_of_pytorch():
    """Teacher-forced: prompt, drafts of 5, single tokens, a long chunk, single tokens again;
    fp32 and bf16, with and without a sliding window."""
    from turboquant_nb.hf import TurboQuantCache

    for sliding in (False, True):
        for dtype, limit in ((torch.float32, 5e-3), (torch.bfloat16, 5e-2)):
            model, inputs = llama(dtype, sliding=sliding), prompts(3, 600)
            caches = [TurboQuantCache(model, "k4v4", backend=b) for b in ("triton", "torch")]
            at = 0
            for n in (270, 5, 1, 1, 100, 1, 16, 1):
                mask = inputs["attention_mask"][:, : at + n]
                position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, at : at + n]
                call = dict(
                    input_ids=inputs["input_ids"][:, at : at + n],
                    attention_mask=mask,
                    position_ids=position,
                )
                with torch.no_grad():
                    a, b = (
                        model(**call, past_key_values=c).logits[mask[:, -n:].bool()].float()
                        for c in caches
                    )
                error = float((a - b).norm() / b.norm())
                assert error < limit, (sliding, dtype, n, error)
                at += n
            served_by_kernels(caches[0], 3)


def fill(cache, model, batch, tokens, step=16384):
    "Random states in place of a prompt."
    from turboquant_nb.hf.hooks import Pass

    c = model.config
    g = torch.Generator(DEVICE).manual_seed(0)
    for i in range(c.num_hidden_layers):
        for a in range(0, tokens, step):
            n = min(step, tokens - a)
            x = torch.randn(
                2,
                batch,
                c.num_key_value_heads,
                n,
                c.head_dim,
                generator=g,
                device=DEVICE,
                dtype=model.dtype,
            )
            cache.layers[i]._append(x[0], x[1], a == 0, Pass(hooked=False))
            del x


def peak_of(f):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_no_dense_copy_of_the_past_is_made(monkeypatch):
    """Decode steps after 100,000 tokens: what is allocated beside the cache is a small part of
    one layer's dense keys; a long chunk takes as much after 16,384 tokens as after 98,304. A
    pre-RoPE mean takes one float32 more for each row of queries (a multiple of 4 for each KV
    head) and each position of the cache."""
    monkeypatch.setattr(
        "turboquant_nb.kernels.ops.BLOCK", 2 * 2 * 64 * 2048
    )  # blocks of 2,048 tokens, as of a larger model
    model = llama(torch.bfloat16, layers=2)
    plain = preset("k3v3")
    for recipe, biases in (
        (replace(plain, key=replace(plain.key, center="fixed")), 0),
        ("k3v3", 4 * (2 * 2 * 4) * 100_096),
    ):
        check_peaks(model, recipe, biases)


def check_peaks(model, recipe, biases):
    from turboquant_nb.hf import TurboQuantCache

    peaks = {}
    for tokens in (16384, 98304):
        cache = TurboQuantCache(model, recipe, max_length=100_000, backend="triton")
        fill(cache, model, 2, tokens)
        ids = prompts(2, 500, padded=False)["input_ids"]
        run = lambda n, c=cache: model(ids[:, :n], past_key_values=c)
        with torch.no_grad():
            run(1)
            run(300)
            peaks[tokens] = peak_of(lambda: run(1)), peak_of(lambda: run(300))
        assert (
            set(cache.report()["served"]) == {"kernel", "chunk"}
            and cache.report()["reasons"] == {}
        )
        dense = 2 * 2 * tokens * 64 * 2  # keys of one layer in bf16
        print(tokens, peaks[tokens], dense)
    assert peaks[98304][0] < dense / 10 + biases and peaks[98304][1] <= 1.1 * peaks[16384][1]
    assert not biases or cache.layers[0].store.recipe.key.center == "pre_rope"


def graph_of(model, cache, batch):
    """A decode step as a CUDA graph: (graph, token ids in, positions in, logits out). Fill the
    cache again before it is replayed: the steps that warm up take exact copies of the
    window."""
    ids, at = (torch.zeros(batch, 1, dtype=torch.long, device=DEVICE) for _ in range(2))
    held, side = cache.layers[0].held, torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(2):
            model(ids, position_ids=at, past_key_values=cache)
    torch.cuda.current_stream().wait_stream(side)
    cache.crop(held - cache.layers[0].held)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        logits = model(ids, position_ids=at, past_key_values=cache).logits
    assert cache.layers[0].held == held
    return graph, ids, at, logits


def test_cuda_graphs():
    """Captured once, replayed over tile borders and for a second, padded prompt: the logits of
    eager steps on a static cache to the bit, and of a cache that grows but for the order of
    sums."""
    from turboquant_nb.hf import TurboQuantCache

    for sliding in (False, True):
        model, graph = llama(sliding=sliding), None
        cache, twin = (
            TurboQuantCache(model, "k4v4", max_length=600, static=True) for _ in range(2)
        )
        grows, tokens = (
            TurboQuantCache(model, "k4v4"),
            prompts(2, 20, padded=False)["input_ids"].flip(1),
        )
        for turn in range(2):
            inputs = prompts(2, 250, padded=turn == 1)
            real = inputs["attention_mask"].sum(1, keepdim=True)
            with torch.no_grad():
                if graph is None:
                    model(**inputs, past_key_values=cache)
                    graph, ids, at, logits = graph_of(model, cache, 2)
                for c in (cache, twin, grows):
                    c.reset()
                    model(**inputs, past_key_values=c)
            for i in range(20):
                ids.copy_(tokens[:, i : i + 1])
                at.copy_(real + i)
                with torch.no_grad():
                    exact, want = (
                        model(ids, position_ids=at, past_key_values=c).logits
                        for c in (twin, grows)
                    )
                graph.replay()
                error = float((logits - want).norm() / want.norm())
                assert torch.equal(logits, exact) and error < 1e-2, (sliding, turn, i, error)
            assert cache.layers[0].held == grows.layers[0].held
        assert cache.report()["captured_by"] == {
            "coding": [("triton", "")],
            "attention": [("triton", "")],
        }


def test_generate_compiles_a_static_cache():
    """transformers compiles the decode step of a static cache by itself on a GPU, where no
    graphs are replayed."""
    from turboquant_nb.hf import TurboQuantCache

    model, inputs = llama(layers=2), prompts(2, 100)
    outs = []
    for make in (
        lambda: TurboQuantCache(model, "k4v4"),
        lambda: TurboQuantCache(model, "k4v4", max_length=200, static=True, graphs=False),
    ):
        cache = make()
        outs.append(
            model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
        )
    assert cache.layers[0].calls == {"prefill": 1} and cache.report()["tokens"] == 111
    assert (outs[0] == outs[1]).float().mean() > 0.95, outs


def same_tokens(model, inputs, make, **options):
    "generate() under two caches, one after the other: the tokens are the same; the caches."
    caches, outs = [make(graphs=False), make()], []
    for cache in caches:
        torch.manual_seed(3)
        outs.append(
            model.generate(
                **inputs,
                past_key_values=cache,
                **dict(do_sample=False, max_new_tokens=24) | options,
            )
        )
    assert torch.equal(*outs), (options, outs)
    return caches


def test_generate_replays_its_steps():
    """Greedy, sampled, padded, beams, a second turn and a second prompt in the same cache, over
    the border of a tile: tokens of replayed steps are those of eager ones on equally long
    tensors, one graph serves them all, and a cache that grows records again where it grew."""

    from turboquant_nb.hf import TurboQuantCache

    model = llama(torch.bfloat16, layers=12)
    make = partial(TurboQuantCache, model, "k3v3", max_length=600)
    for padded in (False, True):
        inputs = prompts(3, 250, padded=padded)
        for options in (
            dict(),
            dict(do_sample=True),
            dict(num_beams=3),
            dict(do_sample=True, num_return_sequences=2),
        ):
            caches = same_tokens(model, inputs, make, **options)
            r = caches[1].report()["graphs"]
            assert (
                r["captured"] == 1
                and r["replayed"] >= 21
                and r["seconds"] < 3
                and not r["why_not"]
            ), r
            assert set(caches[1].report()["captured_by"]["attention"]) == {("triton", "")}
    for again in range(2):  # the same tensors, from the start
        for c in caches:
            c.reset()
        outs = []
        for c in caches:
            ids = prompts(6, 40 + again, padded=False)["input_ids"]
            for turn in range(2):
                ids = model.generate(
                    torch.cat([ids, ids[:, : 5 * turn]], 1),
                    past_key_values=c,
                    max_new_tokens=12,
                    do_sample=False,
                )
            outs.append(ids)
        assert torch.equal(*outs)
    fixed = TurboQuantCache(model, "k3v3", max_length=600, static=True)
    for again in range(2):
        fixed.reset()
        got = model.generate(
            **prompts(3, 250), past_key_values=fixed, max_new_tokens=24, do_sample=False
        )
        want = model.generate(
            **prompts(3, 250),
            past_key_values=make(graphs=False),
            max_new_tokens=24,
            do_sample=False,
        )
        assert torch.equal(got, want) and fixed.report()["graphs"]["captured"] == 1
    grows = TurboQuantCache(model, "k3v3")
    model.generate(
        **prompts(2, 250), past_key_values=grows, max_new_tokens=900, do_sample=False
    )
    r = grows.report()
    assert (
        r["tokens"] == 1149 and r["graphs"]["captured"] == 2 and r["graphs"]["replayed"] > 890
    ), r["graphs"]
    grows.check()
    del caches, fixed, grows, c
    import gc

    gc.collect()
    assert "forward" not in model.__dict__


def replayed_by(model, attention, why=""):
    "Steps of a model are replayed, coded by the kernel and attended to by this one."

    from turboquant_nb.hf import TurboQuantCache

    make = partial(TurboQuantCache, model, "k3v3", max_length=600)
    r = same_tokens(model, prompts(2, 250), make)[1].report()
    assert r["graphs"]["replayed"] >= 21 and not r["graphs"]["why_not"], r["graphs"]
    want = {"coding": [("triton", "")], "attention": [(attention, why)]}
    assert r["captured_by"] == want and list(r["reasons"]) == [why] * bool(why), r


def test_steps_of_wide_heads_are_replayed():
    sizes = dict(head_dim=512, num_attention_heads=8, num_key_value_heads=1)
    replayed_by(llama(torch.bfloat16, layers=4, **sizes), "triton")


def test_steps_of_latents_are_replayed():
    import transformers

    config = transformers.Mistral4Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        first_k_dense_replace=3,  # no experts
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        head_dim=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Mistral4ForCausalLM(config).eval().to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.08)
    why = "the kernel multiplies queries with keys of one side, latents have two"
    replayed_by(model, "blocks", why)


def test_a_replayed_step_waits_for_nothing_and_is_faster():
    """The runner's share of a step has no wait for the device; and the whole generate() with
    graphs takes less time than without."""
    import time

    from turboquant_nb.hf import TurboQuantCache

    model = llama(torch.bfloat16, layers=12)
    inputs, took = prompts(2, 300), {}
    for graphs in (True, False):
        cache = TurboQuantCache(model, "k3v3", max_length=600, static=True, graphs=graphs)
        options = dict(past_key_values=cache, do_sample=False, disable_compile=True)
        model.generate(**inputs, max_new_tokens=8, **options)
        cache.reset()
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(**inputs, max_new_tokens=100, **options)
        torch.cuda.synchronize()
        took[graphs] = time.perf_counter() - began
        if graphs:
            mask = torch.ones(2, int(cache.layers[0].held) + 1, dtype=torch.long, device=DEVICE)
            mask[1, :7] = 0
            ids, at = inputs["input_ids"][:, :1], mask.sum(1, keepdim=True) - 1
            before = cache.runner.replayed
            torch.cuda.set_sync_debug_mode("error")
            try:
                with torch.no_grad():
                    model(
                        ids,
                        attention_mask=mask,
                        position_ids=at,
                        past_key_values=cache,
                        use_cache=True,
                        return_dict=True,
                        logits_to_keep=1,
                    )
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert cache.runner.replayed == before + 1, cache.report()["graphs"]
    print("seconds with and without graphs", took)
    assert took[True] < 0.7 * took[False], took


def test_steps_are_replayed_whatever_attention_is_set():
    from turboquant_nb.hf import TurboQuantCache

    model, inputs, out = llama(), prompts(2, 60), {}
    for attention in ("turboquant", "sdpa", "eager"):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model, "k4v4")
        out[attention] = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False
        )
        report = cache.report()
        assert report["graphs"]["replayed"] and "dense" not in report["served"], report
        assert model.config._attn_implementation == attention
    assert torch.equal(out["sdpa"], out["turboquant"])
    assert torch.equal(out["eager"], out["turboquant"])


def test_weights_on_the_processor_and_the_cache_on_the_gpu():
    import copy

    import accelerate

    from turboquant_nb.hf import TurboQuantCache

    model, inputs = llama(), prompts(2, 60)
    options = dict(max_new_tokens=6, do_sample=False)
    want = model.generate(**inputs, past_key_values=TurboQuantCache(model, "k4v4"), **options)
    away = accelerate.cpu_offload(
        copy.deepcopy(model).cpu(), execution_device=torch.device(DEVICE)
    )
    cache = TurboQuantCache(away, "k4v4")
    got = away.generate(**inputs, past_key_values=cache, **options)
    assert (
        torch.equal(got, want)
        and served_by_kernels(cache)
        and cache.layers[0].store.device.type == "cuda"
    )
    assert all(p.device.type == "meta" for p in away.model.layers.parameters())


def test_slots_of_a_ring_are_each_streams_own():
    "A stream does not wait for what another one makes, so it reads what it made itself."
    from turboquant_nb.cache.exact import ring_slots

    here = ring_slots(3, 5, 4, torch.device("cuda", 0))
    with torch.cuda.stream(torch.cuda.Stream(0)):
        there = ring_slots(3, 5, 4, torch.device("cuda", 0))
    torch.cuda.synchronize()  # else this stream would read before that one has written
    assert here is ring_slots(3, 5, 4, torch.device("cuda", 0)) and here is not there
    assert here.tolist() == there.tolist() == [3, 0, 1, 2, 3]


def test_a_store_on_another_gpu_than_the_current_one():
    """A model over several GPUs: the first chunk, short appends, drafts, chunks and their
    repeats run where the states are, not on PyTorch's current GPU."""
    if torch.cuda.device_count() < 2:
        import pytest

        pytest.skip("needs two GPUs")
    from turboquant_nb.kernels import ops

    x, y = states(2, 2, 2, 300, 128).bfloat16(), states(1, 8, 300, 128, seed=1).bfloat16()
    want = []
    for device in ("cuda:0", "cuda:1"):
        k, v, q = x[0].to(device), x[1].to(device), y.expand(2, -1, -1, -1).to(device)
        store, got = (
            KVStore(
                preset("k3v3"),
                2,
                2,
                128,
                dtype=torch.bfloat16,
                device=device,
                inv_freq=10000.0 ** (-torch.arange(0, 128, 2) / 128),
                frame=random_frame(2, 128, 128),
            ),
            [],
        )
        for a, b in ((0, 256), (256, 257), (257, 258), (258, 259), (259, 299)):
            chunk = k[:, :, a:b], v[:, :, a:b]
            assert ops.append(store, *chunk, backend="triton") == "triton"
            if a:
                got += [t.cpu() for t in ops.attend(q[:, :, a:b], store, *chunk)]
        assert torch.cuda.current_device() == 0
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_budget():
    """Before the first move logits are those of transformers' own cache, bit for bit without
    graphs; then kernels serve single tokens, drafts and long chunks of all tiers as attention
    to what they read as, single tokens in graphs too, and no more is held than the budget
    allows."""
    import transformers

    from turboquant_nb.hf import TurboQuantCache

    model = llama(torch.float32, layers=4)
    model.set_attn_implementation("sdpa")
    inputs, memory = prompts(2, 2600), 3_400_000
    ids, mask = inputs.values()
    mask = torch.ones_like(mask)
    mask[1, :130] = 0
    ends, out = [0, 1500, 1501, 1506, 1507, 2000, *range(2001, 2050), 2600], {}
    for name, how in {
        "dynamic": None,
        "exact": dict(memory="1GB", graphs=False),
        "replayed": dict(memory="1GB"),
        "codes": dict(memory=memory, backend="triton"),
        "eager": dict(memory=memory, backend="triton", graphs=False),
        "read": dict(memory=memory, attention="dense"),
    }.items():
        cache = transformers.DynamicCache(config=model.config)
        if how:
            cache = TurboQuantCache(model, **how)
        logits, most = [], 0
        with torch.no_grad():
            for a, b in zip(ends, ends[1:]):
                keep = dict(attention_mask=mask[:, :b], past_key_values=cache)
                logits.append(model(ids[:, a:b], **keep).logits)
                if name in ("codes", "eager"):
                    most = max(most, cache.report()["nbytes"])
        out[name] = torch.cat(logits, 1)[mask.bool()]
        if name in ("codes", "replayed"):
            graphs = cache.report()["graphs"]
            assert graphs["replayed"] > 35 and not graphs["why_not"], graphs
        if name in ("codes", "eager"):
            report = cache.report()
            assert most <= memory and set(report["coded"]) == {"kernel"}, report["coded"]
            assert (
                {"kernel", "chunk"}
                <= {*report["served"]}
                <= {"prefill", "kernel", "chunk", "dense", "exact"}
            )
            assert {16, 2} <= {*report["budget"]["tokens"][1]}, report["budget"]
    assert torch.equal(out["dynamic"], out["exact"])
    apart = lambda x, y: float((out[x] - out[y]).norm() / out[y].norm())
    assert apart("replayed", "exact") < 1e-4, apart("replayed", "exact")
    for name in ("codes", "eager"):
        assert apart(name, "read") < apart(name, "exact") / 10, (name, apart(name, "read"))


def test_not_finite_and_out_of_memory():
    """A state that is not finite is told at the latest by `check`; memory that runs out in the
    first chunk leaves the cache empty."""
    from turboquant_nb.hf import TurboQuantCache

    model, inputs = llama(torch.bfloat16), prompts(1, 50, padded=False)
    cache = TurboQuantCache(model, "k3v3")
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    bad = torch.full((1, 2, 1, 64), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    try:
        cache.update(bad, bad, 0)
        cache.check()
    except ValueError as error:
        assert "finite" in str(error) or "NaN" in str(error)
    else:
        raise AssertionError("NaN was not told")
    huge = torch.empty(1, device=DEVICE, dtype=torch.bfloat16).expand(1, 2, 1 << 31, 64)
    cache = TurboQuantCache(model, "k3v3")
    try:
        cache.update(huge, huge, 0)
    except (torch.OutOfMemoryError, RuntimeError, ValueError):
        assert cache.get_seq_length() == 0 and cache.report()["nbytes"] == 0
    torch.cuda.empty_cache()


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed", name)
