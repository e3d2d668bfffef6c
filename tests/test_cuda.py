"The same numbers on a GPU as on the processor; skipped where there is none. Runs as a script too: python tests/test_cuda.py."
import torch

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # a machine that has a GPU but no pytest
    pytest = None

from turboquant_nb.attention import attend, dense_attention
from turboquant_nb.quantizer import Quantizer, Spec, encode, preset
from turboquant_nb.store import KVStore


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


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed", name)
