"The same numbers on a GPU as on the processor; skipped where there is none. Runs as a script too: python tests/test_cuda.py."
import torch

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # a machine that has a GPU but no pytest
    pytest = None

from turboquant_nb.attention import attend, dense_attention
from turboquant_nb.quantizer import Quantizer, Recipe, Spec, as_recipe, encode, preset
from turboquant_nb.rates import make_quantizer
from turboquant_nb.store import KVStore

DEVICE = "cuda"  # "cpu" executes the bodies below where there is no GPU

RICH = {  # what a side can be beyond one table of whole bits
    "prod": Recipe(residual="prod"),
    "qjl on both sides": Recipe(Spec(4, center="prompt", residual="qjl"), Spec(2, residual="qjl")),
    "sign": Recipe(residual="sign"),
    "rescale": Recipe(residual="rescale"),
    "2.5 bits": as_recipe("k3v3", 2.5),
    "a number per channel": Recipe(Spec((4, 1, 2, 3) * 16, center="prompt"), Spec(3.25)),
    "decay": Recipe(Spec(4, center="prompt"), Spec(3), decay=300),
    "decay of fractions": Recipe(Spec(3.5, center="prompt"), Spec(2.5), decay=300),
    "decay of signs": Recipe(Spec(4, residual="sign"), Spec((3, 2) * 32), decay=300),
}


def states(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_codes_agree_up_to_ties():
    "Rotations are summed in another order on a GPU, so a coordinate within rounding of an edge may fall on its other side."
    x = states(20_000, 128)
    for bits in (1, 2, 3, 4):
        here, there = Quantizer(Spec(bits=bits), 128), Quantizer(Spec(bits=bits), 128, "cuda")
        a, b = encode(here, x), encode(there, x.cuda())
        differ = a.codes != b.codes.cpu()
        assert differ.float().mean() < 1e-5
        torch.testing.assert_close(b.scale.cpu()[~differ.any(-1)], a.scale[~differ.any(-1)], rtol=1e-3, atol=0)


def test_attention_equals_dense_and_offload_keeps_bits():
    store = KVStore(preset("k3v3"), 2, 3, 64, device="cuda")
    store.set_range(start=torch.tensor([0, 5]))
    for n in (300, 1, 7):
        store.append(states(2, 3, n, 64).cuda(), states(2, 3, n, 64, seed=1).cuda())
    q = states(2, 6, 7, 64, seed=2).cuda()
    k, v = store.read()
    at = torch.arange(store.length - 7, store.length, device="cuda")[:, None]
    p = torch.arange(store.length, device="cuda")
    seen = (p <= at) & (p >= store.start[:, None, None, None])
    out, want = attend(q, store), dense_attention(q, k, v, mask=seen)
    torch.testing.assert_close(out[0], want[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(out[1], want[1], rtol=0, atol=2e-5)
    before = [t.clone() for t in store.key.tensors.values()]
    store.to("cpu")
    assert store.device.type == "cpu" and store.home.type == "cuda"
    store.to(store.home)
    assert all(torch.equal(a, b) for a, b in zip(before, store.key.tensors.values()))


def test_generate_on_codes_equals_dense():
    from transformers import LlamaConfig, LlamaForCausalLM

    from turboquant_nb.hf import TurboQuantCache

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, pad_token_id=0, **shape)).eval().cuda()
    ids = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(0)).cuda()
    outs = []
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model, "k4v4")
        outs.append(model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None))
    assert torch.equal(*outs)
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert cache.layers[0].store.device.type == "cuda"


def test_every_table_is_the_same_grid():
    "An fp32 step times int8, on either device: what kernels multiply."
    for spec in (*(Spec(b) for b in (1, 2, 3, 4)), Spec(3, residual="sign"), Spec(3, residual="qjl"), Spec(2.5), Spec((4, 1) * 32)):
        here, there = make_quantizer(spec, 64).codebook, make_quantizer(spec, 64, DEVICE).codebook
        pairs = zip(here.groups, there.groups) if hasattr(here, "groups") else [((here,), (there,))]
        for (*_, a), (*_, b) in pairs:
            assert b.levels.device.type == b.edges.device.type == b.int8().levels.device.type == torch.device(DEVICE).type
            assert torch.equal(b.levels, torch.tensor(b.int8().step, device=DEVICE) * b.int8().levels)
            for x, y in ((a.levels, b.levels), (a.edges, b.edges), (a.int8().levels, b.int8().levels)):
                assert torch.equal(x, y.cpu())


def test_residuals_and_fractions_code_alike():
    "Codes, scales and signs of 20,000 vectors; what differs lies within rounding of an edge, or of zero for a sign."
    x = states(20_000, 64)
    for name, recipe in RICH.items():
        a, b = (make_quantizer(recipe.key, 64, device).encode(x.to(device)) for device in ("cpu", DEVICE))
        differ = (a.codes != b.codes.cpu()).any(-1)
        assert differ.float().mean() < 1e-3, (name, float(differ.float().mean()))
        torch.testing.assert_close(b.scale.cpu()[~differ], a.scale[~differ], rtol=1e-3, atol=0)
        assert (a.signs is None) == (b.signs is None) == (recipe.key.residual != "qjl")
        if a.signs is not None:
            assert (a.signs != b.signs.cpu())[~differ].float().mean() < 1e-4, name
            torch.testing.assert_close(b.residual_norm.cpu()[~differ], a.residual_norm[~differ], rtol=2e-3, atol=0)


def test_rich_stores_read_and_attend_alike():
    "A store filled on the GPU, its copy on the processor: the same bits, and attention on both equals dense attention over what is read."
    for name, recipe in RICH.items():
        store = KVStore(recipe, 2, 3, 64, device=DEVICE)
        store.set_range(start=torch.tensor([0, 5]))
        for n in (700, 1, 7):  # with decay 300 the first tile has lost its last plane
            store.append(states(2, 3, n, 64, seed=n).to(DEVICE), states(2, 3, n, 64, seed=n + 1).to(DEVICE))
        assert store.nbytes == store.expected_nbytes(), name
        copy = KVStore.from_state(*store.state())
        assert copy.device.type == "cpu" and copy.parts() == store.parts(), name
        for a, b in zip(store.read(), copy.read()):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=2e-5)
        q = states(2, 6, 7, 64, seed=2)
        at, p = torch.arange(store.length - 7, store.length)[:, None], torch.arange(store.length)
        seen = (p <= at) & (p >= copy.start[:, None, None, None])
        want = dense_attention(q, *copy.read(), mask=seen)
        for got in (attend(q, copy), attend(q.to(DEVICE), store)):
            for a, b in zip(got, want):
                torch.testing.assert_close(a.cpu(), b, rtol=0, atol=2e-5)
        back = KVStore.from_state(*copy.state(), device=DEVICE)
        same = zip(back.state()[0].items(), store.state()[0].items())
        assert all(i == j and torch.equal(a.cpu(), b.cpu()) for (i, a), (j, b) in same), name


def test_decay_on_the_gpu():
    "Both sides lose a plane of whole tiles, and the memory comes back."
    for recipe, freed in ((Recipe(Spec(4), Spec(3), sinks=0, window=0), 2), (Recipe(Spec(2.5), Spec(3, residual="sign"), sinks=0, window=0), 1.5)):
        store = KVStore(recipe, 2, 3, 64, device=DEVICE)
        store.append(states(2, 3, 1000, 64).to(DEVICE), states(2, 3, 1000, 64, seed=1).to(DEVICE))
        before = store.nbytes
        store.decay(600)  # two tiles of 256
        assert before - store.nbytes == 2 * 3 * 512 * 64 * freed / 8 and store.nbytes == store.expected_nbytes()
        assert all(t.device.type == torch.device(DEVICE).type for side in (store.key, store.value) for t in side.tensors.values())


def test_generate_with_a_recipe_per_layer():
    from transformers import LlamaConfig, LlamaForCausalLM

    from turboquant_nb.hf import TurboQuantCache

    torch.manual_seed(0)
    shape = dict(hidden_size=256, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, pad_token_id=0, **shape)).eval().to(DEVICE)
    ids = torch.randint(1, 128, (2, 400), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    outs = []
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model, [RICH[name] for name in ("prod", "2.5 bits", "decay", "sign")])
        outs.append(model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None))
    assert torch.equal(*outs)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed", name)
