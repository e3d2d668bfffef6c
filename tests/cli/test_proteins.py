"""turboquant variants, embed, contacts and fold-protein: numbers against the library's and
transformers' own, batches, codes and files."""

import csv
import json
import resource

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_weights, save_file
from transformers import EsmForMaskedLM
from transformers.utils import logging

from turboquant_nb.esm import (
    TurboEsm,
    fold,
    in_one_pass,
    lddt,
    load_esm,
    load_folding,
    random_folding,
    read_fasta,
    rmsd,
    tokens,
    variants,
)
from tests.helpers import ONE_THREAD

from .conftest import refused

pytestmark = ONE_THREAD


def test_a_code_is_fitted_and_variants_take_it(call, esm2, tmp_path):
    "`calibrate --fasta`, wherever that option stands."
    common, c, d = (
        f"--model {esm2 / 'model'} --device cpu",
        tmp_path / "c.st",
        tmp_path / "d.st",
    )
    fit = f"calibrate {common} --recipe water2 --held-out {esm2 / 'one.fasta'}"
    code, out, err = call(f"{fit} --out {c} --fasta {esm2 / 'many.fasta'}")
    assert code == 0 and out.startswith(f"{c}: ") and out.endswith(", 10 sequences\n")
    assert "bits per value" in out and "reading 10 sequences twice" in err
    code, out, err = call(f"{fit} --out {d} --fasta={esm2 / 'many.fasta'} --json --quiet")
    found = json.loads(out)
    assert (code, err) == (0, "") and found["sequences"] == 10 and found["bits_per_value"] > 2
    assert c.read_bytes() == d.read_bytes() and len(list(tmp_path.iterdir())) == 2
    ask = f"variants {common} --fasta {esm2 / 'one.fasta'} --code {c} --quiet"
    code, out, _ = call(ask)
    rows = [x.split("\t") for x in out.splitlines()]
    assert code == 0 and len(rows) == 19 * 14 and rows[0][0] == "mine"
    found = call.json(f"{ask} --json")
    assert (found["method"], found["code"]) == ("frozen", str(c))
    assert found["model"] == str(esm2 / "model")
    said = [[x["name"], x["mutation"], f"{x['score']:.4f}"] for x in found["variants"]]
    assert said == rows


@pytest.mark.parametrize("method", ["wildtype", "one-pass", "every"])
def test_methods_of_variants(call, esm2, tmp_path, method):
    (tmp_path / "m.txt").write_text("K2A\nT3G:A4L\n")
    code, out, _ = call(
        f"variants --fasta {esm2 / 'one.fasta'} --model {esm2 / 'model'} --method {method} "
        f"--mutations {tmp_path / 'm.txt'} --json --quiet"
    )
    found = json.loads(out)
    with TurboEsm(load_esm(esm2 / "model", device="cpu")) as turbo:
        want = variants(turbo, read_fasta(esm2 / "one.fasta"), ["K2A", "T3G:A4L"], method)
    assert code == 0 and found["method"] == method
    assert [(r["name"], r["mutation"]) for r in found["variants"]] == [w[:2] for w in want]
    assert [r["score"] for r in found["variants"]] == pytest.approx(
        [w[2] for w in want], abs=1e-4
    )


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
    ask = f"embed --model {esm2 / 'model'} --fasta {proteins} --batch {batch} --quiet"
    for out in ("p.npz", "r.safetensors --of residues", "p.csv"):
        assert call(f"{ask} --out {tmp_path}/{out}")[0] == 0
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


@pytest.mark.parametrize("kind", ["npz", "safetensors", "csv"])
def test_a_full_disk_names_the_file(call, esm2, proteins, tmp_path, kind):
    "safetensors had an error of its own, and no other named a file."
    out, limits = tmp_path / f"r.{kind}", resource.getrlimit(resource.RLIMIT_FSIZE)
    ask = f"contacts --model {esm2 / 'model'} --fasta {proteins} --out {out} --quiet"
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code, _, err = call(ask)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and f"File too large: '{out}'" in err and [*tmp_path.iterdir()] == []


def test_contacts_are_those_of_transformers(call, esm2, proteins, own, tmp_path):
    ask = f"contacts --model {esm2 / 'model'} --fasta {proteins} --quiet"
    code, out, _ = call(f"{ask} --above 0.5 --apart 4 --json --out {tmp_path / 'c.npz'}")
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
    assert call(f"{ask} --out {tmp_path / 'c.csv'}")[0] == 0
    heads, *lines = csv.reader((tmp_path / "c.csv").open())
    assert heads == ["name", "i", "j", "probability"]
    assert len(lines) == sum(len(x) * (len(x) - 1) // 2 for x in matrices.values())
    assert all(float(p) == matrices[n][int(i) - 1, int(j) - 1] for n, i, j, p in lines)
    text = call(f"{ask} --above 0 --apart 30")[1]
    assert text.splitlines()[0].split("\t")[0] == "a" and len(text.splitlines()) == 3 + 2 + 1


def test_a_code_changes_a_little(call, esm2, proteins, own, tmp_path):
    model, code = f"--model {esm2 / 'model'} --quiet", tmp_path / "c.st"
    fit = f"calibrate --fasta {esm2 / 'many.fasta'} {model} --recipe water4 --out {code}"
    assert call(fit)[0] == 0
    for line in ("embed --out p.npz", "contacts --out c.npz"):
        ask = line.replace("--out ", f"--out {tmp_path}/")
        assert call(f"{ask} {model} --fasta {proteins} --code {code}")[0] == 0
    for i, (name, (hidden, contacts)) in enumerate(own.items()):
        got, exact = np.load(tmp_path / "p.npz")["embeddings"][i], hidden.mean(0)
        assert (
            0.99 < got @ exact / np.linalg.norm(got) / np.linalg.norm(exact)
            and np.abs(got - exact).max() > 1e-5
        )
        assert 1e-7 < np.abs(np.load(tmp_path / "c.npz")[name] - contacts).max() < 0.1


def test_what_was_changed_is_said(call, esm2, tmp_path):
    "A line each, whatever is silenced; of what is no protein, the name and an error."
    path, out = tmp_path / "a.fasta", tmp_path / "a.npz"
    ask = f"embed --model {esm2 / 'model'} --fasta {path} --out {out} --quiet"
    path.write_text(f">a\nMJKV*\n>b\n{'MK' * 512}\n")
    code, _, err = call(ask)
    assert code == 0 and [x.partition(": ")[0] for x in err.splitlines()] == ["turboquant"] * 3
    for text in (
        "at the end of 1 of 2 sequences",
        "1 residues are read as X",
        "1,022 residues",
    ):
        assert text in err
    path.write_text(">one\nACGUACGUACGUACGUACGU\n")
    refused(call(ask), "the sequence 'one' must be a protein, got 20 letters")


def test_without_a_contact_head_it_refuses(call, esm2, proteins, tmp_path):
    weights = {
        k: v
        for k, v in load_weights(esm2 / "model" / "model.safetensors").items()
        if "contact_head" not in k
    }
    (tmp_path / "config.json").write_text((esm2 / "model" / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(
        call(f"contacts --fasta {proteins} --quiet", "--model", tmp_path), "no contact head"
    )


def test_a_protein_may_be_called_as_it_likes(call, esm2, tmp_path):
    """numpy.savez takes names as keywords: a protein called file was an error after all work
    was done, one called allow_pickle was left out."""
    names = ["file", "allow_pickle", "names", "sp|P12345|X/1-9", "ünd"]
    (tmp_path / "odd.fasta").write_text("".join(f">{name}\nMKTAYIAKQ\n" for name in names))
    ask = (
        f"embed --model {esm2 / 'model'} --fasta {tmp_path / 'odd.fasta'} --of residues --quiet"
    )
    for end in ("npz", "safetensors"):
        assert call(f"{ask} --out {tmp_path}/r.{end}")[0] == 0
    found, other = np.load(tmp_path / "r.npz"), load_file(tmp_path / "r.safetensors")
    assert sorted(found) == sorted(other) == sorted(names) and all(
        (found[n] == other[n]).all() for n in names
    )


@pytest.fixture(scope="module")
def esmfold(tmp_path_factory):
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("fold")
    random_folding().save_pretrained(folder)
    return folder


def test_a_structure_is_transformers_own_without_a_code(call, esmfold, tmp_path):
    ask = f"fold-protein MKTAYIAKQR --model {esmfold} --device cpu --quiet"
    code, out, err = call(f"{ask} --pdb {tmp_path / 'a.pdb'}")
    assert (code, err) == (0, "") and out.startswith("protein: 10 residues, confidence 0.")
    assert (tmp_path / "a.pdb").read_text() == load_folding(esmfold).infer_pdb("MKTAYIAKQR")
    found = call.json(f"{ask} --pdb {tmp_path / 'a.pdb'} --json")
    assert found["recipe"] is None and "rmsd" not in found["proteins"][0]
    assert found["proteins"][0]["nbytes"] == found["proteins"][0]["exact_nbytes"]


def test_structures_on_codes_and_how_far_they_are(call, esmfold, proteins, tmp_path):
    ask = f"fold-protein {proteins} --model {esmfold} --device cpu --recipe k3v3 --quiet"
    found = call.json(f"{ask} --pdb {tmp_path / 'out'} --json")
    sequences, model = read_fasta(proteins), load_folding(esmfold)
    assert [x["name"] for x in found["proteins"]] == list(sequences)
    assert len(list((tmp_path / "out").iterdir())) == len(sequences)
    for row in found["proteins"]:
        letters = sequences[row["name"]]
        exact, coded = (fold(TurboEsm(model, x), letters) for x in (None, in_one_pass("k3v3")))
        assert row["rmsd"] == rmsd(exact.trace, coded.trace) > 0
        assert row["lddt"] == lddt(exact.trace, coded.trace) < 1
        assert (tmp_path / "out" / f"{row['name']}.pdb").read_text() == coded.pdb
        assert row["length"] == len(letters) and row["nbytes"] != row["exact_nbytes"]
    refused(call(f"{ask} --pdb {tmp_path / 'out'}"), "it is not an empty folder")


def test_folding_is_refused_before_and_after_the_model(call, esm2, esmfold, tmp_path):
    ask = f"fold-protein MKT --device cpu --quiet --pdb {tmp_path / 'a.pdb'}"
    refused(
        call(f"{ask} --model {esm2 / 'model'}"),
        "no folding model; its configuration has no trunk",
    )
    (tmp_path / "two.fasta").write_text(">a/1\nMKT\n>A:1\nMKT\n")
    (tmp_path / "same.fasta").write_text(">a\nMKT\n>a\nMKT\n")
    for file, why in (("two", "give one name of a file"), ("same", "a")):
        ask = f"fold-protein {tmp_path / file}.fasta --model {esmfold} --pdb {tmp_path / 'x'}"
        refused(call(f"{ask} --quiet"), why)
    ask = f"fold-protein MK --model {esmfold} --device cpu --quiet --pdb {tmp_path / 'a.pdb'}"
    refused(call(f"{ask} --recipe k3v3"), "3 residues or more")
    assert not (tmp_path / "a.pdb").exists() and not (tmp_path / "x").exists()
    assert call(ask)[0] == 0  # nothing to compare
