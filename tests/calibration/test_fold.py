"""Scales of keys folded into the weights: the best ones, no bit of the model changed, smaller
errors of scores, and refusals."""

import pytest
import torch
import transformers

from tests.helpers import DATA
from turboquant_nb.cli import main
from turboquant_nb.calibration.fold import (
    Fold,
    fit_fold,
    fold,
    load_fold,
    save_fold,
    unfold,
    write_folded,
)
from turboquant_nb.quant.quantizer import Quantizer, Spec, decode, encode

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = {  # name: (config, what it has besides)
    "llama": ("LlamaConfig", {}),
    "bias": ("Qwen2Config", {}),
    "sliding": ("MistralConfig", dict(sliding_window=8)),
    "softcap": ("Gemma2Config", dict(query_pre_attn_scalar=16)),
    "one head": ("LlamaConfig", dict(num_attention_heads=1, num_key_value_heads=1)),
    "partial": (
        "StableLmConfig",
        dict(partial_rotary_factor=0.5, num_key_value_heads=4, head_dim=8),
    ),
}


def made(name, dtype=torch.float32, **more):
    kind, own = CONFIGS.get(name, (name, {}))
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL | own | more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    g = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "k_proj" in name or "q_proj" in name:  # channels of unequal size, and biases
            p.data = (
                torch.randn(p.shape, generator=g)
                * 0.3
                * torch.randn(len(p), generator=g).exp2().view(-1, *[1] * (p.ndim - 1))
            )
    return model.to(dtype)


def tokens(n=3, length=40, seed=0):
    return torch.randint(3, 64, (n, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_bit_changes(name, dtype):
    model, ids = made(name, dtype), tokens()
    found = fit_fold(model, tokens(seed=1))
    before, weights = logits(model, ids), {n: p.clone() for n, p in model.named_parameters()}
    assert any((s != 1).any() for s in found.scales)
    fold(model, found)
    assert torch.equal(logits(model, ids), before)
    changed = {
        n.split(".")[-2] for n, p in model.named_parameters() if not torch.equal(p, weights[n])
    }
    assert changed == {"q_proj", "k_proj"}
    assert unfold(model) is found and all(
        torch.equal(p, weights[n]) for n, p in model.named_parameters()
    )


def test_scores_of_coded_keys_err_less():
    """Keys and queries of a layer before and after, coded with 3 bits: the ratio is that of the
    costs."""
    model, ids = made("llama", num_key_value_heads=4), tokens(8, 60)
    attention, d = model.model.layers[0].self_attn, 16
    x = torch.randn(4000, 32, generator=torch.Generator().manual_seed(2))
    found = fit_fold(model, ids)

    def errors():
        with torch.no_grad():
            q, k = (
                f(x).view(-1, 4, d).transpose(0, 1)
                for f in (attention.q_proj, attention.k_proj)
            )
        k = k - k.mean(1, keepdim=True)
        code = Quantizer(Spec(3), d)
        e = decode(code, encode(code, k)) - k
        return (q[:, :300] @ e.mT).square().mean((1, 2))

    before = errors()
    fold(model, found)
    assert (errors() < before).all() and errors().sum() < 0.8 * before.sum()


@pytest.mark.parametrize(
    "name,why",
    [
        ("Qwen3Config", "normalises"),
        ("Phi3Config", "q_proj"),
        ("GPTNeoXConfig", "cannot be folded|self_attn|RoPE"),
    ],
)
def test_models_that_cannot_be_folded(name, why):
    with pytest.raises(ValueError, match=why):
        fit_fold(made(name), tokens())


def test_refusals_change_nothing(tmp_path):
    model = made("llama")
    found = fit_fold(model, tokens())
    weights = {n: p.clone() for n, p in model.named_parameters()}
    same = lambda m, w=weights: all(torch.equal(p, w[n]) for n, p in m.named_parameters())
    with pytest.raises(ValueError, match="not folded"):
        unfold(model)
    with pytest.raises(ValueError, match="the fold is of llama"):
        fold(made("bias"), found)
    with pytest.raises(ValueError, match="the fold is of llama"):
        fold(made("llama", num_hidden_layers=3), found)
    half = made("llama", torch.float16)
    before = {n: p.clone() for n, p in half.named_parameters()}
    with pytest.raises(ValueError, match="not exact in float16"):
        fold(half, Fold([s * 2.0**-12 for s in found.scales], found.header))
    assert same(half, before) and same(model)
    with pytest.raises(ValueError, match="ids must be"):
        fit_fold(model, tokens()[0])
    fold(model, found)
    with pytest.raises(ValueError, match="folded already"):
        fit_fold(model, tokens())
    assert not [h for m in model.modules() for h in m._forward_hooks]


def test_a_changed_file_is_refused(tmp_path):
    found, path = fit_fold(made("bias"), tokens()), tmp_path / "a.fold"
    save_fold(found, path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="changed after it was written"):
        load_fold(path)
    found.scales[1][0, 0] = 3.0
    save_fold(found, path)
    with pytest.raises(ValueError, match="layer0001 must hold powers of two"):
        load_fold(path)


def test_a_checkpoint(tmp_path):
    model, ids = made("bias"), tokens()
    before = logits(model, ids)
    write_folded(model, None, tokens(seed=2), tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded, ids), before)
    assert load_fold(tmp_path / "out" / "fold.safetensors").header["tokens"] == 3 * 36


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--windows", "0"], "--windows"),
        (["--length", "-1"], "--length"),
        (["--text", "none.txt"], "none.txt"),
        ([], "--out"),
    ],
)
def test_the_command_refuses(argv, words, tmp_path, capsys):
    out = [] if words == "--out" else ["--out", str(tmp_path / "x")]
    assert main(["fold", *out, *argv]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not (tmp_path / "x").exists()


def test_a_decoder_without_layers_says_so(monkeypatch):
    model = made("llama")
    monkeypatch.setattr(type(model), "get_decoder", lambda self: torch.nn.Identity())
    with pytest.raises(ValueError, match="llama cannot be folded: its decoder has no `layers`"):
        fit_fold(model, tokens())


def test_a_fold_written_before_the_rebuilding_is_read():
    """By the code of then: channel c of head h in layer i is scaled by 2 ** ((h + c + i) % 5 -
    2)."""
    found = load_fold(DATA / "fold.safetensors")
    want = [
        [[2.0 ** ((h + c + i) % 5 - 2) for c in range(8)] for h in range(2)] for i in range(2)
    ]
    assert (
        torch.equal(torch.stack(found.scales), torch.tensor(want))
        and found.header["tokens"] == 512
    )
