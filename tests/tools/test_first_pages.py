"""The first pages, audited: README (made from nbs/index.ipynb) and the guide. README is short
and every measured number of it is printed by a cell that reads a file of results; every
measured sentence of the guide is put together here from those files."""

import importlib
import re
from bisect import bisect_left
from dataclasses import replace
from functools import cache

import check
import make_readme
import notebooks as notebook_tools
import pytest
import torch

from tests.helpers import ROOT, cells, source
from turboquant_nb import KVStore, Recipe, preset, results
from turboquant_nb.cli import app as inputs
from turboquant_nb.quant.calibration import LayerFrame
from turboquant_nb.quant.recipe import PRESETS

README = (ROOT / "README.md").read_text(encoding="utf-8")

# Numbers that are no measurements: what each is. A measured number has no place here; it is
# printed by a cell.
SETTINGS = {
    "2": "bits from",
    "4": "bits to",
    "3.11": "the oldest Python",
    "3.12": "a Python of the tests",
    "3.13": "a Python of the tests",
    "2.0": "Apache",
}


def prose(text):
    "What a reader takes for a statement: no fenced or inline code, no addresses, no years."
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[!/\w].*?>|arXiv \S+", "", text, flags=re.S)
    return re.sub(r"\b(?:19|20)\d\d\b", "", text)


def numbers(text):
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", prose(text))


def outputs():
    """What cells of the index print, as README shows it: held to the files of results by
    scripts/tools/test_notebooks.py."""
    site = notebook_tools.site_address(notebook_tools.settings(ROOT)).rstrip("/")
    for cell in cells("index"):
        for out in cell.get("outputs", []):
            for text in (out.get("text", ""), out.get("data", {}).get("text/markdown", "")):
                yield make_readme.markdown_cell("".join(text), site)


def written(text):
    "The README without what cells print."
    for part in outputs():
        if part.strip():
            text = text.replace(part.strip(), "")
    return text


def unaccounted(text):
    return [x for x in numbers(written(text)) if x.rstrip(",") not in SETTINGS]


def test_the_bars_are_what_the_files_say():
    "The cell that draws them is given numbers of results/, and none is typed in."
    code = [source(c) for c in cells("index", "code")]
    (load,) = (x for x in code if "FILES = {" in x)
    space = {"results": importlib.import_module("turboquant_nb.results")}
    load = load.replace('"../results/', f'"{ROOT}/results/').replace("#| hide", "")
    exec(compile(load, "index", "exec"), space)
    assert [f"{x / 1e9:.1f}" for x in space["held"].values()] == ["34.6", "9.0", "6.8"]
    (draw,) = (x for x in code if "def bars(" in x)
    drawn = draw[draw.index("panels = [") : draw.index("tall = [")]
    typed = {*numbers(re.sub(r"\{[^{}]*\}", "", drawn))}
    assert typed <= {"8", "32,768", "8,192", "8,192,", "48", "1.5"}, typed


def test_every_number_is_printed_by_a_cell_or_is_a_setting():
    assert unaccounted(README) == []


def test_another_home_of_the_repository_is_seen():
    "Owner and repository are those of settings.ini, wherever an address is written."
    cfg = check.settings()
    own = f"https://github.com/{cfg['user']}/{cfg['repo']} https://{cfg['user']}.github.io/{cfg['repo']}/a.html"
    assert check.other_homes(own) == []
    assert check.other_homes(
        own + f" https://colab.research.google.com/github/someone/{cfg['repo']}/blob/main"
    ) == [f"someone/{cfg['repo']}"]
    assert check.other_homes(
        f"https://github.com/someone/{cfg['repo']}/x https://else.github.io/{cfg['repo']}/"
    ) == sorted({f"someone/{cfg['repo']}", f"else/{cfg['repo']}"})


# The guide
# --------------------------------------------------------------------------------------


@cache
def rows(name):
    return results.load(ROOT / "results" / f"{name}.json")["rows"]


def one(file, **wanted):
    "The only row of a file with these entries."
    (found,) = (r for r in rows(file) if all(r.get(k) == v for k, v in wanted.items()))
    return found


def dominated():
    mine = {
        r["cache"]: r
        for file in ("eval/h200-presets", "presets/cpu")
        for r in rows(file)
        if r["protocol"] == "decode"
    }
    for bad, good in (("k4v2", "k4v3"), ("k3v2", "k3v3")):
        assert mine[bad]["bits"] > mine[good]["bits"]
        assert mine[bad]["percent"] > mine[good]["percent"]
    bad, good = mine["k3v2"], mine["k3v3"]
    yield (
        f"On SmolLM2 three bits of keys and two of values have {bad['bits']:.2f} stored bits "
        f"and {bad['percent']:+.2f} %, "
        f"`k3v3` has {good['bits']:.2f} and {good['percent']:+.2f} %"
    )


def trellis_takes_time():
    "Coding a token and attending, of one layer: a preset's trellis codes over scalar ones."
    gpu, cpu = {}, {}
    for bits in (2, 3):
        code, scalar = (
            sum(
                one("decode/trellis-h200", recipe=f"{bits} bits, {x}, pre_rope", path=path)[
                    "p50"
                ]
                for path in ("append, graph", "graph")
            )
            for x in ("trellis", "sphere")
        )
        gpu[bits] = code / scalar
        cpu[bits] = tuple(
            one("decode/trellis-cpu", recipe=f"{bits} bits{x}", path=path)["p50"]
            for x, path in (
                (", trellis", "look-up"),
                ("", "look-up"),
                (", trellis", "exact states"),
            )
        )
    slower = {bits: code / scalar for bits, (code, scalar, _) in cpu.items()}
    yield (
        f"a layer's step takes {gpu[3]:.1f} times that of `k3v3` on an H200, {slower[3]:.1f} "
        "times on a CPU"
    )
    yield f"{gpu[2]:.1f} times on an H200, {slower[2]:.1f} times on a CPU; measure it first"
    low, high = (f([x[0] for x in cpu.values()]) for f in (min, max))
    exact = [f"{x[2]:.1f}".lstrip("0") for x in cpu.values()]
    assert {round(x[1]) for x in cpu.values()} == {2}
    yield (
        f"{gpu[3]:.1f} to {gpu[2]:.1f} times the time of scalar codes on an H200 (8 × 32,768 "
        f"tokens), and on a CPU {low:.0f} to {high:.0f} ms in place of 2 (2,926 tokens, one "
        f"thread; exact states {exact[0]} to {exact[1]})"
    )


def newest_calls():
    shape = dict(batch=8, prompt=8192)
    new, compiled = (
        one("generate/kept-h200", mode=mode, **shape)["speedup"]
        for mode in ("graphs", "graphs, chosen")
    )
    yield (
        f"8 × 8,192 tokens are written at {new:.1f} times the pace of transformers' best cache "
        f"in that run by a new one, and at {compiled:.1f} times with compiled steps"
    )


def short_contexts():
    def codes_are_smaller(name, d, n):
        frame = LayerFrame(fixed=torch.zeros(1, d), pair=torch.ones(1, d))
        store = KVStore(preset(name), 1, 1, d, dtype=torch.float16, frame=frame)
        x = torch.zeros(1, 1, n, d, dtype=torch.float16)
        store.append(x, x)
        return store.nbytes <= 2 * x.nbytes

    lengths = range(32, 256)  # within one tile: codes stay as large as they are
    from_here = {
        (name, d): lengths[
            bisect_left(lengths, True, key=lambda n: codes_are_smaller(name, d, n))
        ]
        for name in PRESETS
        for d in (64, 128)
    }
    low, high = min(from_here.values()), max(from_here.values())
    assert KVStore(preset("k3v3"), 1, 1, 64).tile == 256
    yield "Memory is taken for 256 tokens at a time"
    yield (
        f"codes are allocated in tiles of 256 tokens; below {low} to {high} tokens, depending "
        "on "
        "preset and head size, a dense fp16 cache is smaller"
    )


def serving():
    bf16, fp8, ours = (
        [
            one("serving/caches-h200", kind=kind, what="token", batch=b, tokens=n, others=None)[
                "p50"
            ]
            for b, n in ((8, 32000), (1, 1024))
        ]
        for kind in ("bf16", "fp8", "k3v3-128-r16-s4")
    )
    many, few = (
        one("serving/vllm-h200", kind=kind, what="cache")["p50"]
        for kind in ("k3v3-128-r16-s4", "bf16")
    )
    assert round(many / few, 1) == 5.1
    yield (
        f"On an H200 a token of eight requests of 32,000 takes {ours[0] / bf16[0]:.2f} of "
        "bf16's "
        f"time and {ours[0] / fp8[0]:.2f} of fp8's, one of a short request "
        f"{ours[1] / bf16[1]:.2f} of bf16's, and five times as many tokens fit"
    )


def larger_than_the_gpu():
    cpu, disk = (one("offload/h200", where=where, cache="k3v3") for where in ("cpu", "disk"))
    whole = (cpu["resident"] + cpu["offloaded"]) / 1e9
    yield (
        f"an 8B of {whole:.0f} GB on a GPU limited to {cpu['limit'] / 1e9:.0f} GB wrote "
        f"{cpu['tokens_s']:.1f} tokens a second from the CPU's memory, "
        f"{disk['tokens_s']:.1f} from files".replace(" 0.", " .")
    )
    held = {
        (r["model"], r["cache"]): r for r in rows("offload/h200-context") if r["chunk"] == 512
    }
    assert all(r["limit"] == 24e9 for r in held.values())
    tokens = {k: f"{r['tokens']:,}" for k, r in held.items()}
    yield (
        f"a 14B in 4 bits holds {tokens['14B', 'bf16']} tokens uncompressed and "
        f"{tokens['14B', 'k3v3']} with `k3v3`, a 32B {tokens['32B', 'bf16']} and "
        f"{tokens['32B', 'k3v3']}, a 70B whose layers wait in the CPU's memory "
        f"{tokens['70B', 'bf16']} and {tokens['70B', 'k3v3']} (at some "
        f"{held['70B', 'k3v3']['seconds']:.0f} s a token)"
    )


def proteins():
    graph = one("esm/masked-h200", code="water3", name="graph", length=300)
    assert round(graph["speed_up"]) == 25
    yield (
        f"{graph['p50']:.0f} ms on codes for all variants of 300 residues by a model of 650M "
        "shapes, a 25th of a pass for each residue"
    )
    steps = [r for r in rows("esm/decode-cpu") if r["name"] == "water3" and r["n"] == 15]
    times = [r["p50"] / r["exact"] for r in steps]
    exact = {
        (r["model"], r["tokens"]): r["nbytes"]
        for r in rows("esm/decode-cpu")
        if r["name"] == "exact states"
    }
    assert all(0.09 < r["nbytes"] / exact[r["model"], r["tokens"]] < 0.11 for r in steps)
    yield (
        f"On a CPU a decode step on a calibrated code takes {min(times):.1f} to "
        f"{max(times):.1f} times one on exact states, and a tenth of its memory"
    )


def long_contexts():
    answers = [r for r in rows("answers/long-h200-qwen1.5b") if r["tokens"] in (4096, 32704)]
    right = {(r["cache"], r["task"]): r["right"] for r in answers if r["tokens"] == 32704}
    for cache_, exact in (("k4v4", 45), ("k3v3", 46)):
        assert right[cache_, "single"] + right[cache_, "keys"] == exact
    assert right["uncompressed", "single"] + right["uncompressed", "keys"] == 45
    assert right["k2v2-scalar", "keys"] == 0.8 * right["uncompressed", "keys"]
    three = [r for r in answers if r["cache"] == "k3v3"]
    assert [sum(r[k] for r in three) for k in ("n", "lost", "gained")] == [250, 10, 3]
    yield (
        "behind 32,704 tokens Qwen2.5-Coder 1.5B finds a number on `k4v4` and `k3v3` as often "
        "as "
        "on exact states, at 2 bits a fifth less among eight; of 250 answers at 4K and 32K "
        "`k3v3` loses ten and gains three"
    )


def questions():
    file = rows("long/questions-h100-qwen1.5b")
    exact = {r["task"]: r for r in file if r["cache"] == "uncompressed"}
    others = [r for r in file if r["cache"] not in ("uncompressed", "fp8")]
    assert {r["cache"] for r in others} == {"k4v4", "k3v3", "k2v2-trellis"}
    assert not any(r["p_holm"] < 0.05 for r in others)
    left = [r["right"] / exact[r["task"]]["right"] for r in file if r["cache"] == "fp8"]
    assert 0.245 < min(left) and max(left) <= 0.5
    asked = sum(r["n"] for r in exact.values())
    yield (
        f"On {asked:,} questions Qwen2.5-Coder 1.5B loses nothing "
        "significant at four, three and two bits, and half to three quarters of its right "
        "answers on fp8 without scales"
    )


def usual_trade():
    "As page 97b prints it, which is held to its files by scripts/tools/test_notebooks.py."
    shown = (o for c in cells("agreement", "code") for o in c["outputs"])
    told = "".join(x for o in shown for x in o.get("text", ""))
    said = r"^(\S+B): of (\S+) questions k3v3 changes \d+ and loses (-?\d+) net"
    found = re.findall(said, told, re.M)
    assert [model for model, *_ in found] == ["1.5B", "0.5B"]
    n = sum(int(n.replace(",", "")) for _, n, _ in found)
    yield f"{sum(int(net) for *_, net in found)} of {n:,} answers of two models, net"


def by_hand():
    ratios = (
        one("generate/h200", cache="turboquant", recipe="k3v3", **step)["tokens_s"]
        / one("generate/h200", cache="flash", **step)["tokens_s"]
        for step in (
            dict(batch=b, tokens=n, mode="graph") for b, n in ((1, 8192), (8, 8192), (8, 32768))
        )
    )
    first, second, third = (f"{x:.2f} times" for x in ratios)
    yield (
        f"in graphs recorded by hand codes make {first} the tokens per second of flash "
        f"attention on bf16 with one sequence of 8,192 tokens, {second} with eight, {third} "
        "with eight of 32,768"
    )


def speed():
    found = [r for r in rows("generate/cpu") if r["cache"] == "turboquant k3v3"]
    times = [f"{1 / r['speedup']:.2f}".lstrip("0") for r in found]
    assert [r["prompt"] for r in found] == [2926, 16384]
    yield (
        f"a token takes {times[0]} times as long as with an uncompressed cache at 2,926 "
        f"tokens and {times[1]} at 16,384"
    )
    gpu = {}
    for r in rows("decode/recipes-h200"):
        gpu.setdefault((r["batch"], r["heads"], r["tokens"]), {})[r["recipe"], r["path"]] = r[
            "p50"
        ]
    every = [(t, found, x, path) for found in gpu.values() for (x, path), t in found.items()]
    every = [row for row in every if row[2] not in ("k2v2-scalar", "k3v3", "k4v4")]
    bounds = {}
    for ours in ("graph", "kernel"):
        slow = [
            t / f["exact states", "exact states"] for t, f, _, path in every if path == ours
        ]
        bounds[ours] = f"{min(slow):.0f} to {max(slow):.0f}"
    gain = [f[x, "PyTorch"] / t for t, f, x, path in every if path in bounds]
    yield (
        f"{bounds['graph']} times as slow as bf16 in a recorded graph and {bounds['kernel']} "
        "times launched from Python, as a QJL residual always is; by PyTorch alone it takes "
        f"{min(gain):.0f} to {max(gain):.0f} times as long"
    )
    drafts = {
        (r["cache"], r["jumps"], r["drafts"]): r["token_ms"]
        for r in rows("generate/drafts-h200")
        if not r["mode"].endswith("chosen")
    }
    gains = [
        drafts[name, jumps, 0] / ms
        for (name, jumps, n), ms in drafts.items()
        if n and name == "turboquant k3v3"
    ]
    many = f"{min(gains):.1f} to {max(gains):.1f}"
    yield f"with prompt lookup {many} times the tokens of one by one"


def two_bits():
    for model in ("smollm2", "gemma3", "qwen0.5b", "qwen1.5b"):
        found = rows(f"trellis/pairs-{model}-h100")
        coded = {r["cache"]: r["percent"] for r in found if r["protocol"] == "stress"}
        assert coded["k2v2 trellis, pair scale"] < 0.5 * coded["k2v2-scalar"]
        bits = {r["cache"]: r["bits"] for r in found}
        for name, scalar in (("k2v2", "k2v2-scalar"), ("k3v3", "k3v3")):
            assert 0 < bits[f"{name} trellis, pair scale"] - bits[scalar] < 0.035
    yield "At 1,024 tokens both add at most .03 bits a value"
    yield (
        "Together they leave less than half of what two bits lose when everything is coded, on "
        "each of four models"
    )


MEASURED = (
    dominated,
    trellis_takes_time,
    newest_calls,
    two_bits,
    short_contexts,
    serving,
    larger_than_the_gpu,
    proteins,
    long_contexts,
    questions,
    usual_trade,
    by_hand,
    speed,
)


@cache
def sentences(made):
    return list(made())


GUIDE_TEXT = re.sub(r"\]\([^)]*\)", "]", "\n".join(map(source, cells("guide", "markdown"))))


@pytest.mark.parametrize("made", MEASURED, ids=lambda f: f.__name__)
def test_a_sentence_of_the_guide_is_what_the_files_say(made):
    for sentence in sentences(made):
        assert sentence in GUIDE_TEXT, sentence


def test_recipes_of_the_guide_are_recipes():
    "What it names can be asked for; of each preset that it names, here and in the help."
    for word in ("none", "sign", "prod", "rescale"):
        assert f'"{word}"' in GUIDE_TEXT and Recipe(residual=word).key
    assert {*re.findall(r"`(k\dv\d(?:-\w+)?)`", GUIDE_TEXT)} <= PRESETS.keys()
    assert ", ".join(PRESETS) in inputs.RECIPE
    for name, scalar in (("k2v2", "k2v2-scalar"), ("k3v3-trellis", "k3v3")):
        assert f"`{name}`" in GUIDE_TEXT
        small, table = preset(name), preset(scalar)
        key = replace(small.key, codebook="sphere")
        assert small.value.scale == ("unbiased" if name == "k2v2" else "mse")
        value = replace(small.value, codebook="sphere", scale="mse")
        assert replace(small, key=key, value=value) == table


def test_every_other_number_of_the_guide_is_a_name_or_a_setting():
    known = {
        "1": "bits; the best token; a ratio",
        "2": "bits, and names: ESM-2",
        "2.25": "bits of a budget",
        "2.5": "bits; Qwen's version",
        "3": "bits; Gemma's version",
        "3.1": "Llama's version",
        "4": "bits, and names: GLM-4V",
        "5": "of the best tokens",
        "5.17": "transformers from",
        "5.23": "transformers to",
        "8": "billions of weights",
        "12": "families, counted below",
        "14": "billions of weights",
        "16": "bits of a scale",
        "32": "billions of weights",
        "64": "a head size",
        "70": "billions of weights",
        "128": "thousand tokens, of a page; a head size",
        "1,024": "tokens of a window",
    }
    families = importlib.import_module("tests.hf.test_hf_vision")
    assert (len(families.FAMILIES), len(families.VIDEOS)) == (12, 5)
    text = GUIDE_TEXT
    for made in MEASURED:
        for sentence in sentences(made):
            text = text.replace(sentence, "")
    assert [x for x in numbers(text) if x.rstrip(",") not in known] == []


def test_serve_says_what_a_model_without_means_loses():
    "Perplexity on codes alone, without a calibration: of both models under both protocols."
    text = "".join(map(source, cells("serve")))
    plain = dict(mean="none", recent=0, first=0, transforms=False, recipe="k3v3")
    lost = {
        name: [
            one(f"served/{name}", protocol=x, **plain)["percent"] for x in ("decode", "steps")
        ]
        for name in ("qwen1.5b", "gemma3-270m")
    }
    times = [f"{1 + x / 100:.1f}" for x in lost["qwen1.5b"]]
    assert f"Qwen2.5-Coder 1.5B becomes {times[0]} to {times[1]} times as large" in text
    low, high = (f"{x:.0f}" for x in lost["gemma3-270m"])
    assert f"Gemma 3 270M rises by {low} to {high} %" in text
