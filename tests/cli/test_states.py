"""turboquant embed and contacts: numbers against transformers' own, batches, codes, files and
bad input."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_weights, save_file
from transformers import EsmForMaskedLM

from turboquant_nb.cli import proteins as commands
from turboquant_nb.esm import read_fasta, tokens

from .conftest import refused

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def proteins(esm2):
    "Proteins of three lengths."
    (esm2 / "three.fasta").write_text(
        ">a one\nMKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ\n>b\nMKT\n>c\nGSHMLEDPVDAFKLMNQRST\n"
    )
    return esm2 / "three.fasta"


@pytest.fixture(scope="module")
def own(esm2, proteins):
    "Final states of residues and contacts by transformers, one protein at a time."
    model = EsmForMaskedLM.from_pretrained(esm2 / "model", attn_implementation="eager").eval()
    out = {}
    for name, letters in read_fasta(proteins).items():
        ids, mask = tokens([letters])
        with torch.no_grad():
            out[name] = (
                model.esm(ids, attention_mask=mask).last_hidden_state[0, 1:-1].numpy(),
                model.esm.predict_contacts(ids, mask)[0].numpy(),
            )
    return out


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_embeddings_are_those_of_transformers(call, esm2, proteins, own, tmp_path, batch):
    ask = ("embed", "--model", esm2 / "model", "--fasta", proteins, "--batch", batch, "--quiet")
    assert (
        call(*ask, "--out", tmp_path / "p.npz")[0]
        == call(*ask, "--out", tmp_path / "r.safetensors", "--of", "residues")[0]
        == call(*ask, "--out", tmp_path / "p.csv")[0]
        == 0
    )
    means, each = np.load(tmp_path / "p.npz"), load_file(tmp_path / "r.safetensors")
    lines = list(csv.reader((tmp_path / "p.csv").open()))[1:]
    assert means["names"].tolist() == list(own) == [x[0] for x in lines] and set(each) == set(
        own
    )
    for i, (name, (hidden, _)) in enumerate(own.items()):
        top = np.abs(hidden).max()  # another batch adds in another order
        assert (
            np.abs(each[name] - hidden).max() < 1e-5 * top
            and np.abs(means["embeddings"][i] - hidden.mean(0)).max() < 1e-5 * top
        )
        assert (np.array(lines[i][1:], np.float32) == means["embeddings"][i]).all()


def test_contacts_are_those_of_transformers(call, esm2, proteins, own, tmp_path):
    ask = ("contacts", "--model", esm2 / "model", "--fasta", proteins, "--quiet")
    code, out, _ = call(
        *ask, "--above", 0.5, "--apart", 4, "--json", "--out", tmp_path / "c.npz"
    )
    matrices, found = np.load(tmp_path / "c.npz"), json.loads(out)["contacts"]
    assert code == 0 and set(matrices) == set(own)
    for name, (_, want) in own.items():
        assert np.abs(matrices[name] - want).max() < 1e-5
        mine = {(r["i"], r["j"]): r["probability"] for r in found if r["name"] == name}
        x, L = matrices[name], len(want)
        assert mine == {
            (i + 1, j + 1): float(x[i, j])
            for i in range(L)
            for j in range(i + 4, L)
            if x[i, j] >= 0.5
        }
    assert call(*ask, "--out", tmp_path / "c.csv")[0] == 0
    assert len(list(csv.reader((tmp_path / "c.csv").open()))) == 1 + sum(
        len(x) * (len(x) - 1) // 2 for _, x in own.values()
    )
    text = call(*ask, "--above", 0, "--apart", 30)[1]
    assert text.splitlines()[0].split("\t")[0] == "a" and len(text.splitlines()) == 3 + 2 + 1


def test_a_code_changes_a_little(call, esm2, proteins, own, tmp_path):
    assert (
        call(
            "calibrate",
            "--fasta",
            esm2 / "many.fasta",
            "--model",
            esm2 / "model",
            "--recipe",
            "water4",
            "--out",
            tmp_path / "c.st",
            "--quiet",
        )[0]
        == 0
    )
    ask = (
        "--model",
        esm2 / "model",
        "--fasta",
        proteins,
        "--code",
        tmp_path / "c.st",
        "--quiet",
        "--out",
    )
    assert (
        call("embed", *ask, tmp_path / "p.npz")[0]
        == call("contacts", *ask, tmp_path / "c.npz")[0]
        == 0
    )
    for i, (name, (hidden, contacts)) in enumerate(own.items()):
        got, exact = np.load(tmp_path / "p.npz")["embeddings"][i], hidden.mean(0)
        assert (
            0.99 < got @ exact / np.linalg.norm(got) / np.linalg.norm(exact)
            and np.abs(got - exact).max() > 1e-5
        )
        assert 1e-7 < np.abs(np.load(tmp_path / "c.npz")[name] - contacts).max() < 0.1


def test_without_a_contact_head_it_refuses(call, esm2, proteins, tmp_path):
    weights = {
        k: v
        for k, v in load_weights(esm2 / "model" / "model.safetensors").items()
        if "contact_head" not in k
    }
    (tmp_path / "config.json").write_text((esm2 / "model" / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert commands.has_contact_head(str(esm2 / "model")) and not commands.has_contact_head(
        str(tmp_path)
    )
    refused(
        call("contacts", "--model", tmp_path, "--fasta", proteins, "--quiet"), "no contact head"
    )


@pytest.mark.parametrize(
    "argv, words",
    [
        (["embed"], ["--out"]),
        (["embed", "--out", "a.txt"], [".npz"]),
        (["embed", "--out", "none/a.npz"], ["no such folder"]),
        (["embed", "--out", "a.npz", "--batch", 0], ["--batch"]),
        (["embed", "--out", "a.csv", "--of", "residues"], ["one vector"]),
        (["embed", "--out", "a.npz", "--code", __file__], ["--code"]),
        (["contacts", "--above", 1.5], ["--above"]),
        (["contacts", "--apart", 0], ["--apart"]),
        (["contacts", "--out", "a.txt"], [".npz"]),
    ],
)
def test_bad_input(call, esm2, proteins, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    refused(call(*argv, "--model", esm2 / "model", "--fasta", proteins, "--quiet"), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_protein_may_be_called_as_it_likes(call, esm2, tmp_path):
    """numpy.savez takes names as keywords: a protein called file was an error after all work
    was done, one called allow_pickle was left out."""
    names = ["file", "allow_pickle", "names", "sp|P12345|X/1-9", "ünd"]
    (tmp_path / "odd.fasta").write_text("".join(f">{name}\nMKTAYIAKQ\n" for name in names))
    ask = (
        "embed",
        "--model",
        esm2 / "model",
        "--fasta",
        tmp_path / "odd.fasta",
        "--of",
        "residues",
        "--quiet",
    )
    assert [
        call(*ask, "--out", tmp_path / f"r.{end}")[0] for end in ("npz", "safetensors")
    ] == [0, 0]
    found, other = np.load(tmp_path / "r.npz"), load_file(tmp_path / "r.safetensors")
    assert sorted(found) == sorted(other) == sorted(names) and all(
        (found[n] == other[n]).all() for n in names
    )
