"""What the tests of all commands share: small models with tokenizers, a command called in this
process, and how a refusal looks."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from turboquant_nb import cli
from turboquant_nb.evaluation.models import sample_text

SIZE = dict(
    vocab_size=400,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    initializer_range=0.1,
    bos_token_id=0,
    eos_token_id=1,
)


def save(folder, model, template=True):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [sample_text()[:20000]],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    if template:
        tokenizer.chat_template = (
            "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}{% if "
            "add_generation_prompt %}</s>{% endif %}"
        )
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    "A random Llama whose tokenizer has a chat template."
    torch.manual_seed(0)
    return save(
        tmp_path_factory.mktemp("tiny"),
        LlamaForCausalLM(LlamaConfig(**SIZE, max_position_embeddings=8192)),
    )


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    "A random Llama with a context of 128 tokens and no chat template."
    torch.manual_seed(1)
    return save(
        tmp_path_factory.mktemp("plain"),
        LlamaForCausalLM(LlamaConfig(**SIZE, max_position_embeddings=128)),
        template=False,
    )


@pytest.fixture
def call(capsys):
    "Run the command; returns (exit code, standard output, standard error)."

    def run(*argv):
        code = cli.main([str(a) for a in argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def refused(result, *words, code=2):
    "One line on standard error, nothing on standard output."
    got, out, err = result
    assert got == code and out == "" and err.count("\n") == 1 and "Traceback" not in err, result
    assert err.startswith("turboquant") and all(w in err for w in words), err


@pytest.fixture(scope="session")
def esm2(tmp_path_factory):
    "A random ESM-2, ten proteins, and another one."
    from transformers import EsmConfig, EsmForMaskedLM

    folder, g = tmp_path_factory.mktemp("esm"), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=33,
        pad_token_id=1,
        mask_token_id=32,
    )
    EsmForMaskedLM(
        EsmConfig(
            **sizes,
            position_embedding_type="rotary",
            token_dropout=True,
            emb_layer_norm_before=False,
        )
    ).eval().save_pretrained(folder / "model")
    draw = lambda: "".join(
        "LAGVSERTIDPKQNFYMHWC"[i] for i in torch.randint(0, 20, (30,), generator=g)
    )
    (folder / "many.fasta").write_text("".join(f">p{i}\n{draw()}\n" for i in range(10)))
    (folder / "one.fasta").write_text(">mine\nMKTAYIAKQRQISF\n")
    return folder
