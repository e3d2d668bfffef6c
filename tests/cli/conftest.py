"""What the tests of all commands share: small models with tokenizers, a command called in this
process, and how a refusal looks."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3NextConfig,
)

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
    """Run a command line, further words as they are; (exit code, standard output, standard
    error). `call.json` gives what it prints as JSON."""

    def run(line, *more):
        code = cli.main([*line.split(), *map(str, more)])
        out = capsys.readouterr()
        return code, out.out, out.err

    run.json = lambda *words: json.loads(run(*words)[1])
    return run


def refused(result, *words, code=2):
    "One line on standard error, nothing on standard output."
    got, out, err = result
    assert got == code and out == "" and err.count("\n") == 1 and "Traceback" not in err, result
    assert err.startswith("turboquant") and all(w in err for w in words), err


PROGRAM = "import sys; from turboquant_nb.cli import main; sys.exit(main())"


def shell(*argv, program=PROGRAM, **env):
    "The program, or another one, in a process of its own; what subprocess.run gives."
    ask = [sys.executable, "-c", program, *map(str, argv)]
    return subprocess.run(ask, capture_output=True, text=True, env=os.environ | env)


class Forked(multiprocessing.get_context("fork").Process):
    """The program in a copy of this process, which has imported what takes seconds; it reads
    and writes three descriptors. `before` is called there first."""

    def __init__(self, line, *streams, before=lambda: None):
        super().__init__()
        self.line, self.streams, self.before = line, streams, before

    def run(self):
        self.before()
        for i, stream in enumerate(self.streams):
            os.dup2(stream, i)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
        code = cli.main(self.line.split())
        sys.stdout.flush()  # as at the end of Python
        sys.exit(code)

    def ends(self, seconds=120):
        "The exit code."
        self.join(seconds)
        return self.exitcode


@pytest.fixture
def forked():
    """Begin a command line whose standard output and error are pipes; the process, and files
    that read them, unbuffered."""
    begun, null = [], os.open(os.devnull, os.O_RDONLY)

    def begin(line):
        (out, into), (err, told) = os.pipe(), os.pipe()
        left = lambda: (os.close(out), os.close(err))
        begun.append(Forked(line, null, into, told, before=left))
        begun[-1].start()
        os.close(into), os.close(told)
        return begun[-1], *(open(x, "rb", buffering=0) for x in (out, err))

    yield begin
    os.close(null)
    for process in begun:
        process.kill()


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


@pytest.fixture(scope="session")
def scene(tmp_path_factory, tiny, plain, esm2):
    "A folder with everything that a command line can name rightly or wrongly."
    return build_scene(tmp_path_factory.mktemp("scene"), tiny=tiny, plain=plain, esm2=esm2)


def build_scene(folder, tiny, plain, esm2):
    "What `scene` is made of."
    models = {"tiny": tiny, "plain": plain, "esm2": esm2 / "model"}
    for name, there in models.items():
        (folder / name).symlink_to(there, target_is_directory=True)
    written = {
        "bad.json": b"\xff\xfe{",
        "blank.txt": b"\n\n",
        "c.csv": b"K2A\n",
        "dots.fasta": b">a\nMKT-AY.IAK\n",
        "latin.txt": "Wal und M\u00f6we".encode("latin-1"),
        "list.json": b"[1]",
        "many.fasta": (esm2 / "many.fasta").read_bytes(),
        "not.fasta": b"MKTAYIAK\n",
        "one.fasta": (esm2 / "one.fasta").read_bytes(),
        "other.txt": b"other K2A\n",
        "short.txt": b"Call me Ishmael.",
        "twice.txt": b"K2A:K2G\n",
        "wal.gguf": b"GGUF",
        "zip.fasta": b"\x1f\x8b\x08",
    }
    for name, content in written.items():
        (folder / name).write_bytes(content)
    sizes = dict(num_hidden_layers=4)
    (folder / "awq").mkdir()
    quantised = LlamaConfig(**SIZE).to_dict() | {"quantization_config": {"quant_method": "awq"}}
    (folder / "awq" / "config.json").write_text(json.dumps(quantised))
    Qwen3NextConfig(**sizes).save_pretrained(folder / "hybrid")
    Qwen2Config(**sizes).save_pretrained(folder / "qwen2")
    for kind in ("mamba", "nothing", "t5"):
        (folder / kind).mkdir()
        about = {"model_type": kind, "is_encoder_decoder": kind == "t5"}
        (folder / kind / "config.json").write_text(json.dumps(about))
    for name in ("broken", "empty", "void"):
        (folder / name).mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    (folder / "void" / "config.json").write_text("")
    os.mkfifo(folder / "pipe.png")
    (folder / "circle.png").symlink_to("circle.png")
    return folder
