#!/usr/bin/env python3
"""What the package computes, against an older commit: goldens.py COMMIT [--device cuda].

Runs the same prompts through the package of COMMIT and through this one, each in a process of
its own on this machine, and compares decoded states, outputs, tokens and bytes bit for bit.
Digests are compared and never kept: the order of a sum, and with it a code, is the
processor's. A change that is meant to keep what the package computes shows it here."""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))
import processes

PROMPT, LONG = 300, 420  # tokens of a prompt; of one that more than one chunk reads
BATCH, VOCABULARY = 2, 128


def recipes() -> dict:
    "The recipes whose codes are kept, by name."
    from turboquant_nb import Recipe, Spec, preset

    def trellis(bits):
        spec = Spec(bits=bits, codebook="trellis")
        return Recipe(replace(spec, center="pre_rope"), spec, recent=64)

    def fixed_mean(bits, **how):
        return Recipe(Spec(bits=bits, center="fixed", **how), Spec(bits=bits))

    whole = {name: preset(name) for name in ("k4v4", "k3v3", "k2v2-scalar")}
    paired = replace(whole["k2v2-scalar"], key=Spec(bits=2, pair_scale="frame"))
    return whole | {
        "3 bits, mean after RoPE": fixed_mean(3),
        "2.5 bits": fixed_mean(2.5),
        "QJL": fixed_mean(3, residual="qjl"),
        "2 bits, trellis": trellis(2),
        "3 bits, trellis": trellis(3),
        "2 bits, pair scale": paired,
    }


def model_of(device):
    "A random Llama of two layers with heads of 64 channels, the same in every process."
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM(config).eval().to(device, dtype)


def digest(*tensors) -> str:
    "Sixteen hex digits of the bytes of tensors, their types and shapes."
    out = hashlib.sha256()
    for x in tensors:
        x = x.detach().cpu().contiguous()
        out.update(f"{x.dtype}{tuple(x.shape)}".encode())
        out.update(x.view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return out.hexdigest()[:16]


class Golden:
    "What one package computes with one recipe, backend and device."

    def __init__(self, model, recipe, backend):
        self.model, self.recipe, self.backend = model, recipe, backend
        gen = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, VOCABULARY, (BATCH, LONG + 64), generator=gen)
        self.ids = self.ids.to(model.device)

    def cache(self, **how):
        from turboquant_nb import TurboQuantCache

        return TurboQuantCache(self.model, self.recipe, backend=self.backend, **how)

    def part(self, cache, first, end):
        "Logits of one pass."
        return self.model(self.ids[:, first:end], past_key_values=cache).logits

    def read(self, *cuts) -> tuple:
        "A new cache, and logits of the passes between `cuts`."
        cache = self.cache()
        return cache, [self.part(cache, a, b) for a, b in zip((0, *cuts), cuts)]

    def computed(self, case) -> dict:
        """Digests of the decoded states of every layer, the bytes that are held, and what a
        case gives: logits, or tokens."""
        cache, found = getattr(self, case)()
        stores = [x.store for x in cache.coded_layers]
        held = {
            "states": [digest(*x.read()) for x in stores],
            "bytes": [x.nbytes for x in stores],
        }
        if isinstance(found, list):
            return held | {"logits": digest(*found)}
        return held | {"tokens": found.tolist()}

    # --- cases: (a cache, logits or tokens)

    def prefill(self):
        return self.read(PROMPT)

    def chunk(self):
        return self.read(200, PROMPT, LONG)

    def step(self):
        return self.read(*range(PROMPT, PROMPT + 40))

    def drafts(self):
        cache, logits = self.read(PROMPT, PROMPT + 1)
        cache.activate_past_recording()
        logits.append(self.part(cache, PROMPT + 1, PROMPT + 6))
        cache.crop(3)
        return cache, [*logits, self.part(cache, PROMPT + 3, PROMPT + 7)]

    def crop(self):
        cache, logits = self.read(PROMPT)
        cache.crop(50)
        return cache, [*logits, self.part(cache, PROMPT - 50, PROMPT + 9)]

    def generate(self, cache, padding=0, **how):
        ids = self.ids[:, :PROMPT]
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        how |= dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
        return cache, self.model.generate(
            ids, attention_mask=mask, past_key_values=cache, **how
        )

    def beams(self):
        return self.generate(self.cache(), num_beams=3)

    def padded(self):
        return self.generate(self.cache(), padding=70)

    def preallocated(self):
        return self.generate(self.cache(max_length=PROMPT + 40))

    def static(self):
        return self.generate(self.cache(max_length=PROMPT + 40, static=True))

    def saved(self):
        from turboquant_nb import TurboQuantCache

        cache, logits = self.read(PROMPT)
        with tempfile.TemporaryDirectory() as folder:
            cache.save(path := Path(folder) / "cache.bin")
            back = TurboQuantCache.load(path, self.model)
        return back, [*logits, self.part(back, PROMPT, PROMPT + 9)]

    def copied(self):
        cache, logits = self.read(PROMPT)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1], device=self.model.device))
        more = self.ids[:, PROMPT : PROMPT + 1].repeat_interleave(2, 0)[[3, 0, 1]]
        return cache, [*logits, self.model(more, past_key_values=cache).logits]


CASES = (
    "prefill", "chunk", "step", "drafts", "crop", "beams", "padded", "preallocated", "static",
    "saved", "copied",
)  # fmt: skip


@torch.no_grad()
def computed(device: str, backends: list, cases: list, names: list) -> dict:
    "{recipe, backend, case: digests} of the package that is first on the path."
    model, out = model_of(device), {}
    known = recipes()
    for name in names or known:
        for backend in backends:
            golden = Golden(model, known[name], backend)
            for case in cases:
                try:
                    found = golden.computed(case)
                except (ValueError, NotImplementedError) as error:
                    found = {"refused": str(error)}
                out[f"{name} · {backend} · {case}"] = found
    return out


def of_package(folder, args) -> dict:
    "What the package in a folder computes, in a process of its own."
    words = [str(HERE), "--write", "--device", args.device]
    words += ["--backends", *args.backends, "--cases", *args.cases]
    if args.recipes:
        words += ["--recipes", *args.recipes]
    return json.loads(processes.of_package(folder, *words)[-1])


def differences(old: dict, new: dict) -> list:
    "A line for each case that is not what it was."
    lines = []
    for case in sorted(old.keys() | new.keys()):
        a, b = old.get(case, {}), new.get(case, {})
        if "refused" in a and "refused" in b:
            continue
        lines += [
            f"{case}: {part} {a.get(part)} -> {b.get(part)}"[:300]
            for part in sorted(a.keys() | b.keys())
            if a.get(part) != b.get(part)
        ]
    return lines


def parser():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("commit", nargs="?", help="whose package is the older one, or its folder")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--backends", nargs="+", default=["auto", "torch"])
    p.add_argument(
        "--recipes", nargs="+", default=(), help="of `recipes`; all if none is named"
    )
    p.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    p.add_argument("--write", action="store_true", help="print what this package computes")
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    if args.write:
        print(json.dumps(computed(args.device, args.backends, args.cases, args.recipes)))
        return 0
    if not args.commit:
        raise SystemExit("name the commit, or the folder, of the older package")
    here = HERE.parents[2]
    with tempfile.TemporaryDirectory() as folder:
        older = Path(args.commit)
        if not (older / "turboquant_nb").is_dir():
            older = Path(folder) / "older"
            git = ["git", "-C", str(here), "archive", args.commit, "turboquant_nb"]
            older.mkdir()
            packed = subprocess.run(git, check=True, stdout=subprocess.PIPE).stdout
            subprocess.run(["tar", "-x", "-C", str(older)], input=packed, check=True)
        old, new = of_package(older, args), of_package(here, args)
    lines = differences(old, new)
    print(*lines, f"{len(new)} cases, {len(lines)} differences", sep="\n")
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
