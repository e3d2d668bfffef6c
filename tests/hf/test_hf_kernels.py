"""What generate() reaches: masks that are not made, kernels that serve (in Triton's interpreter
where there is no GPU), and reasons where they do not."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from tests.helpers import (
    CUDA,
    DEVICE,
    MODES,
    QUIETLY,
    Calls,
    Largest,
    Launches,
    cache_for,
    covering_pairs,
    exact_recipe,
    generate,
    host_calls,
    interpreted,
    logits,
    needs_triton,
    prompt,
    refuses,
    seeded,
    texts,
    tiny,
)
from turboquant_nb.kernels import ops
from turboquant_nb import Recipe, Spec, TurboQuantCache
from turboquant_nb.hf import attention as hf_attention

pytestmark = QUIETLY


@pytest.fixture
def no_masks(monkeypatch):
    "Making a mask is an error."

    def made(*args, **kwargs):
        raise AssertionError("a mask was made")

    monkeypatch.setattr(hf_attention, "sdpa_mask", made)


# --- masks
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, name", covering_pairs([*MODES], ["llama", "gemma3_text", "gpt_oss"])
)
def test_no_mask_in_any_way_of_generating(mode, name, no_masks):
    "Causal order, left padding and sliding windows are ranges; drafts, too."
    model, inputs = tiny(name), prompt(2, 30)
    how = dict(max_new_tokens=4, padding=False)
    _, cache = generate(model, inputs, "turboquant", "k3v3", **how, **MODES[mode])
    assert all(x.store.start.tolist() == list(x.starts) for x in cache.coded_layers)
    if mode == "beams":
        text = dict(input_ids=texts(1, 12).repeat(1, 3))
        generate(model, text, "turboquant", "k3v3", **how, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_with_holes_goes_to_pytorch_and_says_so(padded):
    "Whether the prompt's padding is known to be none, or some that the mask must be like."
    model, inputs, out = tiny(), prompt(2, 30, padded=padded), []
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    mask[0, 20] = 0
    passes = (ids, mask), (ids[:, :1], torch.nn.functional.pad(mask, (0, 1), value=1))
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = DynamicCache(config=model.config)
        if attention == "turboquant":
            cache = cache_for(model, exact_recipe())
        with torch.no_grad():
            for new, seen in passes:
                out.append(model(new, past_key_values=cache, attention_mask=seen).logits)
    r = cache.report()
    assert r["served"] == {"prefill": 2, "codes": 2}
    assert r["reasons"] == {
        "prefill: an attention mask with holes": 2,
        "an attention mask unlike the prompt's": 2,
    }
    for (_, seen), a, b in zip(passes, out[:2], out[2:]):
        real = seen[:, -a.shape[1] :].bool()
        assert torch.allclose(a[real], b[real], atol=1e-4)


# --- kernels
# ---------------------------------------------------------------------------------------

SIZES = "layer_types", "num_hidden_layers"
SMALL = dict(head_dim=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
WAYS = {
    "window of 12": ("mistral", dict(max_new_tokens=2)),
    "drafts": ("llama", dict(max_new_tokens=4, prompt_lookup_num_tokens=3)),
    "beams": ("llama", dict(max_new_tokens=2, num_beams=2)),
    "softcap": ("gemma2", dict(max_new_tokens=2, layer_types=["full_attention"])),
    "hybrid": (
        "qwen3_next",
        dict(
            max_new_tokens=2,
            layer_types=["full_attention", "linear_attention"],
            num_hidden_layers=2,
        ),
    ),
    "chunks": ("llama", dict(max_new_tokens=2, prefill_chunk_size=5)),
    "second turn": ("llama", dict(max_new_tokens=2)),
}


def kernel_cache(model, recipe="k4v4"):
    return TurboQuantCache(model, recipe, backend="triton")


@needs_triton
@pytest.mark.parametrize("way", WAYS)
def test_kernels_serve_generate(way):
    """Left-padded batches decode on kernels alone, from coding to attention, and give the
    tokens of PyTorch's attention on codes. Without a GPU this is the portable kernel in
    Triton's interpreter, which only `backend="triton"` reaches."""
    name, kwargs = WAYS[way]
    sizes = SMALL | {k: x for k, x in kwargs.items() if k in SIZES}
    kwargs = {k: x for k, x in kwargs.items() if k not in SIZES}
    batch = 1 if way == "drafts" else 2
    inputs = prompt(batch, 10, padded=batch > 1)
    model = tiny(name, **sizes).to(DEVICE)
    try:
        inputs = {k: x.to(model.device) for k, x in inputs.items()}
        outs, served = [], []
        for backend in ("torch", "triton"):
            cache = TurboQuantCache(model, "k4v4", backend=backend)
            out = generate(model, inputs, "turboquant", cache=cache, **kwargs)[0]
            if way == "second turn":
                mask = torch.cat([inputs["attention_mask"], torch.ones_like(out[:, 10:])], 1)
                said = dict(input_ids=out, attention_mask=mask)
                out = generate(model, said, "turboquant", cache=cache, **kwargs)[0]
            outs.append(out)
            served.append(cache.report())
        assert torch.equal(*outs)
        a, b = served
        assert set(a["served"]) == {"prefill", "codes"}
        assert set(b["served"]) == {"prefill", "kernel"}
        assert a["coded"] == {"torch": sum(a["served"].values())}
        assert b["coded"] == {"kernel": sum(b["served"].values())}
        if CUDA:
            assert b["reasons"] == {}
        else:
            assert set(a["reasons"]) == {"backend='torch' was asked for"}
            (why,) = b["reasons"]  # the interpreter has no tensor cores
            assert why.startswith("by the portable kernel: ")
            assert b["reasons"][why] == b["served"]["kernel"]
    finally:
        model.to("cpu")


def test_auto_never_takes_the_interpreter():
    model = tiny(**SMALL)
    _, cache = generate(model, prompt(1, 5), "turboquant", max_new_tokens=2)
    assert CUDA or (
        cache.report()["served"] == {"prefill": 1, "codes": 1}
        and cache.report()["coded"]["torch"] == (1 if ops.CPU.library.why == "" else 2)
    )


def test_demanding_kernels_raises_before_anything_is_stored():
    "(Which recipes and sizes kernels refuse: tests/kernels.)"
    model = tiny(**SMALL)
    model.set_attn_implementation("turboquant")
    cache = kernel_cache(model, Recipe(Spec(2.5), Spec(3)))
    with refuses("'triton' cannot serve this store: .*bits must be one integer"):
        logits(model, texts(1, 5), past_key_values=cache)
    assert cache.get_seq_length() == 0 and cache.report()["nbytes"] == 0


def test_demanding_kernels_without_a_gpu_or_interpreter(monkeypatch):
    if CUDA:
        pytest.skip("there is one")
    monkeypatch.setattr(ops.launch, "is_interpreted", lambda: False)
    model = tiny(**SMALL)
    with refuses(
        "'triton' cannot serve this store: an NVIDIA GPU is needed, the store is on cpu"
    ):
        generate(model, prompt(1, 5), "turboquant", cache=kernel_cache(model))


@pytest.mark.parametrize("backend", ["flash", None])
def test_unknown_backends(backend):
    with refuses("backend must be 'auto', 'triton' or 'torch'"):
        TurboQuantCache(tiny(), backend=backend)


# --- long chunks
# -----------------------------------------------------------------------------------


def chunks_alike(model, inputs):
    """Prompts in two chunks: the logits of dense decoding are those on codes, and padding is
    learnt. The cache on codes."""
    outs = []
    for attention in ("eager", "turboquant"):
        cache = cache_for(model, "k4v4")
        model.set_attn_implementation(attention)
        outs.append(
            model.generate(
                **inputs,
                past_key_values=cache,
                prefill_chunk_size=45,
                max_new_tokens=4,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        )
    for a, b in zip(outs[0].logits, outs[1].logits):
        assert float((a - b).abs().max()) < 2e-4 * float(a.abs().max())
    return cache


@pytest.mark.parametrize(
    "name, padded",
    covering_pairs(
        ["llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "smollm3", "cohere2"],
        [True, False],
    ),
)
def test_chunked_prefill(name, padded, no_masks):
    """transformers' prefill_chunk_size: the logits of dense decoding of the same codes, and
    flat memory: no block of the past is larger than ops.BLOCK."""
    model = tiny(name, max_position_embeddings=512)
    cache = chunks_alike(model, prompt(2, 90, padded=padded))
    served = cache.report()["served"]
    layers = len(cache.coded_layers)
    slow = model.config.model_type == "gemma2"  # softcap
    assert (
        served["prefill"] == layers and served.get("codes" if slow else "chunk", 0) >= layers
    )  # 45 and 45: a rest of up to 16 would be served as single steps, which dense attention
    # cannot do


def test_a_chunk_that_is_all_padding(no_masks):
    "The first chunk of a row is padding alone: where its tokens start is learnt from the next."
    model, inputs = tiny("gemma3_text", max_position_embeddings=512), prompt(3, 90)
    inputs["attention_mask"][2, :50] = 0
    cache = chunks_alike(model, inputs)
    assert cache.layers[0].starts == (0, 7, 50) == tuple(cache.layers[1].store.start.tolist())


@needs_triton
def test_a_step_makes_nothing_as_large_as_the_past():
    """Of decoding after 500 tokens: on kernels no tensor is a third of one layer's dense keys;
    the dense path makes one."""
    model = tiny(**SMALL | dict(head_dim=64), max_position_embeddings=1100).to(DEVICE)
    try:
        ids, most = texts(1, 500).to(model.device), {}
        for attention in ("turboquant", "sdpa"):
            model.set_attn_implementation(attention)
            cache = (
                kernel_cache(model) if attention == "turboquant" else cache_for(model, "k4v4")
            )
            with torch.no_grad():
                model(ids, past_key_values=cache)
                model(
                    ids[:, :1], past_key_values=cache
                )  # what grows does so by an eighth, and seldom
                with Largest() as seen:
                    for i in range(2):
                        model(ids[:, i : i + 1], past_key_values=cache)
            most[attention] = seen.bytes
        dense = 500 * 64 * 4
        assert most["turboquant"] < dense / 3 and most["sdpa"] >= dense, most
    finally:
        model.to("cpu")


@needs_triton
@pytest.mark.parametrize("bad, n", [(float("nan"), 1), (float("inf"), 20), (1e30, 20)])
def test_what_a_kernel_took_is_told_later(bad, n):
    "Nothing waits in the pass that took it; a pass or two later, or `check`, says which layer."
    model = tiny(**SMALL | dict(num_hidden_layers=2)).to(DEVICE)
    try:
        model.set_attn_implementation("turboquant")
        cache, inputs = (kernel_cache(model), texts(1, 9).to(model.device))
        with torch.no_grad():
            model(inputs, past_key_values=cache)
            x = torch.zeros(1, 1, n, 16, device=model.device)
            cache.update(x, x, 0)
            cache.update(torch.full_like(x, bad), x, 1)
            twin = copy.deepcopy(cache)
            with refuses("layer 1: keys that were (not finite|too large)"):
                twin.check()
            twin.check()  # once
            with refuses("layer 1: keys that were (not finite|too large)"):
                for _ in range(3):
                    model(inputs[:, :1], past_key_values=cache)
                    if CUDA:
                        torch.cuda.synchronize()
    finally:
        model.to("cpu")


@needs_triton
@pytest.mark.parametrize("bad, static, drafts", [(float("nan"), False, 3), (1e30, True, 0)])
def test_a_prompt_is_looked_at_once_and_refused_whole(bad, static, drafts, monkeypatch):
    """Of a first chunk no layer waits, with drafts behind it or without: one look at the flags
    of all when the pass ends. States that no kernel can code leave the cache empty, and the
    next prompt finds it as if new."""
    from turboquant_nb.kernels import encode as append

    monkeypatch.setattr(append, "_code_and_wait", lambda *a: pytest.fail("a layer waits"))
    model = copy.deepcopy(tiny(**SMALL | dict(num_hidden_layers=2)))  # whose weights change
    model.to(DEVICE)
    ids = texts(1, 30).to(model.device)
    weight = model.model.layers[1].self_attn.k_proj.weight
    model.set_attn_implementation("turboquant")
    more = dict(max_length=128, static=True, graphs=False) if static else {}
    cache, twin = (TurboQuantCache(model, "k4v4", backend="triton", **more) for _ in range(2))

    def read(cache):
        if drafts:
            cache.activate_past_recording()
        with torch.no_grad():
            return model(ids, past_key_values=cache, logits_to_keep=1 + drafts).logits

    with torch.no_grad():
        want, good = read(twin), weight[0, 0].clone()
        assert twin.running is None
        weight[0, 0] = bad
        with refuses("layer 1: keys .*; the cache is empty again"):
            read(cache)
        weight[0, 0] = good
        assert cache.get_seq_length() == 0
        assert torch.equal(read(cache), want)
        cache.check()
        for a, b in zip(cache.layers, twin.layers):
            for x, y in zip(a.store.read(), b.store.read()):
                assert torch.equal(x, y)


@pytest.mark.parametrize("length", [1500, 3000])
def test_memory_of_a_chunk_does_not_grow_with_the_past(length, monkeypatch):
    """The largest tensor made while a chunk attends, past 1,500 or 3,000 tokens, in blocks of
    1,024."""
    from turboquant_nb.cache.store import KVStore

    monkeypatch.setattr(ops, "BLOCK", 2 * 16 * 1024)
    g = seeded()
    store = KVStore(Recipe(), 1, 2, 16)
    store.append(*(torch.randn(1, 2, length, 16, generator=g) for _ in range(2)))
    k, v = (torch.randn(1, 2, 64, 16, generator=g) for _ in range(2))
    store.append(k, v)
    q = torch.randn(1, 4, 64, 16, generator=g)
    held = max(t.nbytes for s in (store.key, store.value) for t in s.tensors.values())
    assert ops.select_backend(ops.Call.of(q, store, k, v)).backend == "flash"
    with Largest() as seen:
        ops.attend(q, store, k, v)
    block = 2 * ops.BLOCK * 4  # twice, for a table's index in int64 or two pieces at once
    assert seen.bytes <= max(block, held), (seen.bytes, block)


# --- what an eager step costs the host
# ---------------------------------------------------------------


class Silent:
    "A compiled kernel that does nothing, and is counted."

    def __init__(self, made, name):
        self.made, self.name, self.__name__ = made, name, name

    def __getitem__(self, grid):
        return lambda *args, **options: self.made.append(self.name) or self


@pytest.fixture
def silent(monkeypatch):
    "Names of launches, which do nothing: what is left is the host's part, on any machine."
    from turboquant_nb.kernels import decode_mma, encode, launch

    made = []

    def note(self, grid, named, slots, **options):
        grid, args, name = (
            grid if isinstance(grid, tuple) else (grid, 1, 1),
            self.ordered(named),
            self.kernel.__name__,
        )
        return encode.Launch({grid: Silent(made, name)[grid]}, grid, args, self.places, slots)

    monkeypatch.setattr(encode.Launcher, "__call__", note)
    monkeypatch.setattr(encode._row_launcher, "kernel", Silent(made, "append"))
    monkeypatch.setattr(
        launch, "_device_reason", lambda device, portable: "portable" if portable else ""
    )
    monkeypatch.setattr(launch, "is_current", lambda device: True)
    monkeypatch.setattr(launch, "run_kernel", decode_mma.mma_attention)
    hopper = encode.DeviceProperties(132, 232448, (9, 0))
    monkeypatch.setattr(decode_mma, "device_properties", lambda _: hopper)
    encode.shared_plan.cache_clear()  # plans keep the kernels that were compiled for them
    yield made
    encode.shared_plan.cache_clear()


class Found(Silent):
    "A kernel that is searched for, and does nothing."

    def __getitem__(self, grid):
        searched = f"search {self.name}"
        return lambda *args, **options: (
            self.made.append(searched) or Silent(self.made, self.name)
        )


@interpreted
@pytest.mark.parametrize(
    "tokens, launches", [(512, ["tile_kernel"]), (700, ["tile_kernel", "row_kernel"])]
)
def test_what_a_first_chunk_costs_the_host(tokens, launches, monkeypatch):
    """In the second layer Triton searches for nothing. Coding takes 470 function calls (642
    when each layer made its tensors one by one), and PyTorch fills memory twice: all that is
    new together, and the flags (13 times)."""
    from turboquant_nb.kernels import encode

    made, monkey = [], monkeypatch.setattr
    monkey(encode, "READY", {})
    for of in (encode._tile_launcher, encode._row_launcher):
        monkey(of, "kernel", Found(made, of.kernel.__name__))
    model = tiny(**SMALL | dict(head_dim=64, num_hidden_layers=3), max_position_embeddings=1100)
    model.set_attn_implementation("turboquant")
    k = torch.randn(1, model.config.num_key_value_heads, tokens, 64)
    # a layer's frame is placed once, by the first cache of a model
    TurboQuantCache(model, "k3v3", backend="torch").update(k, k, 1)
    cache = TurboQuantCache(model, "k3v3", backend="triton", graphs=False)
    with torch.no_grad():
        assert cache.take(hooked=True)
        cache.update(k, k, 0)
        assert made[0].startswith("search")
        made.clear()
        calls = host_calls(lambda: cache.update(k, k, 1))
        assert made == launches, made
        with Launches() as operations:
            cache.update(k, k, 2)
    fills = sum(
        operations.names.count(name)
        for name in ("_foreach_zero_", "zeros", "new_zeros", "fill_")
    )
    assert calls <= 470 and fills <= 2, (calls, operations.names)
    assert all(x.store.length == tokens and x.coded["kernel"] for x in cache.layers)


@interpreted
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_what_a_layer_costs_the_host(scaled, static, silent):
    """Append and attention of one token in one layer: three launches, three operations, and 138
    function calls at most, 147 where the device counts, two of which make an append whole that
    is broken off; transformers' own cache and SDPA need 25 and as many launches. A pair scale
    takes two operations more, and two views of the query."""
    pytest.importorskip("triton.experimental.gluon")
    model = tiny(**SMALL | dict(head_dim=64, num_hidden_layers=2), max_position_embeddings=1100)
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(
        model,
        Recipe() if scaled else Recipe(Spec(center="auto")),
        backend="triton",
        graphs=False,
        **dict(max_length=700, static=True) if static else {},
    )
    module, ids = model.model.layers[1].self_attn, texts(1, 300)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        k = torch.randn(1, model.config.num_key_value_heads, 1, 64)
        q = torch.randn(1, model.config.num_attention_heads, 1, 64)

        def layer(i):
            return hf_attention.turboquant_attention(
                module, q, *cache.update(k, k, i), None, 0.1
            )

        for _ in range(3):
            layer(0), layer(1)
        layer(0)
        silent.clear()
        calls = host_calls(lambda: layer(1))
        assert sorted(silent) == ["append", "combine_kernel", "fragments_kernel"], silent
        layer(0)
        with Calls() as operations:
            layer(1)
        most = (147 if static else 138) + 20 * scaled
        assert operations.n <= 3 + 4 * scaled and calls <= most, (operations.n, calls)
    assert cache.layers[1].backends == {"triton": 5} and (
        static or cache.layers[1].store.length == 305
    )  # a kernel that does nothing counts nothing
