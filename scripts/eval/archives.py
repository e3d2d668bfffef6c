"""Files that were changed on purpose, with the right digest (chapters 02 and 54): run.py
archives --out FILE [--files N] [--seed N].

Files of every kind that the package reads are written, and one to three changes are made in
each copy: fields dropped, renamed, of another type or out of range, also inside of recipes;
tensors dropped, added, swapped, of other shapes and types, with other numbers, NaN among them.
The digest is computed again. A loader may refuse (ValueError) or load; what it loads must be
what the file holds, sound by rules of this script, and usable; and it may not allocate more
than twice what the file holds, plus a megabyte. Gate: none of the files leads to anything
else."""

import copy
import json
import math
import random
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from plan import Plan
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.cache.store import KVStore
from turboquant_nb.calibration import fit, sensitivity
from turboquant_nb.cli import chat
from turboquant_nb.esm import transform
from turboquant_nb.files import read_file, write_file
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.quant import calibration
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.theory.transforms import HeadTransform, register_transform

FREQ = 0.1 ** torch.arange(8.0)
SLACK = 2**20  # bytes: what Python itself and small tables take


class Case(NamedTuple):
    "A kind of file: how one is written, loaded, written again, judged and used."

    name: str
    write: Callable  # (path)
    load: Callable  # (path) -> what was loaded
    again: Callable  # (what was loaded, path)
    judge: Callable  # (what was loaded) -> what is wrong with it, or ""
    use: Callable  # (what was loaded)


# --- what is written


def filled(recipe, n=45, d=16, dv=12, tile=8, ops=(), **more):
    "A store of random states; `ops` are calls of its methods."
    gen = torch.Generator().manual_seed(n)
    store = KVStore(recipe, 2, 2, d, dv, tile=tile, **more)
    k, v = (torch.randn(2, 2, n, size, generator=gen).to(store.dtype) for size in (d, dv))
    store.append(k, v)
    for name, kwargs in ops:
        getattr(store, name)(**kwargs)
    return store


def transformed():
    "A recipe whose keys have a transform for each head."
    gen = torch.Generator().manual_seed(0)
    w = torch.eye(16) + 0.1 * torch.randn(2, 16, 16, generator=gen)
    return Recipe(Spec(3, rotation=register_transform(HeadTransform.of(w)).name), Spec(3))


def paired():
    "A store whose keys have a pair scale of their prompt."
    gen = torch.Generator().manual_seed(0)
    recipe = Recipe(Spec(3, center="pre_rope", pair_scale="prompt"), Spec(3))
    store = KVStore(recipe, 2, 2, 16, 12, tile=8, inv_freq=FREQ)
    q, k, v = (torch.randn(2, n, 45, d, generator=gen) for n, d in ((4, 16), (2, 16), (2, 12)))
    store.wait(k, v)
    store.complete(q)
    return store


def write_store(store, path):
    write_file(path, *state_of(store), "store")


def read_store(path):
    return store_of(*read_file(path, "store", "store"))


STORES = {
    "k3v3": lambda: filled("k3v3"),
    "freed and cut": lambda: filled(
        "k4v4", ops=[("evict", dict(before=20)), ("crop", dict(tokens=3))]
    ),
    "ranges": lambda: filled("k2v2", ops=[("set_range", dict(end=torch.tensor([45, 40])))]),
    "truncated": lambda: filled(Recipe(Spec(3), Spec(4), 2, 5, decay=20)),
    "pre-RoPE": lambda: filled(Recipe(Spec(3, center="pre_rope"), Spec(3)), inv_freq=FREQ),
    "mean": lambda: filled(Recipe(Spec(3, center="prompt_mean"), Spec(2.5, scale="norm"))),
    "QJL": lambda: filled(Recipe(residual="prod"), dtype=torch.bfloat16),
    "trellis": lambda: filled(Recipe(Spec(2, codebook="trellis"), Spec(3)), dv=16),
    "transform": lambda: filled(transformed()),
    "pair scale": paired,
    "static": lambda: filled("k3v3", max_length=64, static=True),
    "long": lambda: filled("k3v3", 6000, 64, 64, tile=256),
    "empty": lambda: KVStore("k3v3", 1, 2, 16),
}


def unsound(store):
    "What no store has, or an empty text; by rules that no loader is asked for."
    held = store.length - store.offset
    rows = (store.batch, store.heads)
    if not 0 <= store.offset <= store.length or store.offset % store.tile or held < 0:
        return "offset"
    if not 0 <= store._recent_from <= store.length:
        return "recent"
    if store.start.shape != (store.batch,) or bool((store.start < 0).any()):
        return "start"
    if store.end is not None and not bool(
        ((store.end >= 0) & (store.end <= store.length)).all()
    ):
        return "end"
    for part in store.parts:
        if part.memory.truncated_tiles > math.ceil(held / store.tile):
            return "truncated"
        for name, t in part.tensors.items():
            if t.shape[:2] != rows or t.is_floating_point() and not bool(t.isfinite().all()):
                return name
        if (pair := part.tensors.get("pair")) is not None and not bool((pair > 0).all()):
            return "pair"
    return ""


def use_store(store):
    "Read it, and go on."
    if store.length:
        store.read()
    store.set_range(end=None)
    k = torch.randn(store.batch, store.heads, 3, store.key.q.d, dtype=store.dtype)
    v = torch.randn(store.batch, store.heads, 3, store.value.q.d, dtype=store.dtype)
    store.append(k, v)
    store.crop(2)
    store.read(max(store.offset, store.length - 2))


def use_cache(model, cache):
    "A step of the model."
    rows = cache.layers[0].store.batch
    with torch.no_grad():
        model(torch.ones(rows, 1, dtype=torch.long), past_key_values=cache)


def judge_cache(cache):
    found = [unsound(x.store) for x in cache.coded_layers]
    alike = {(x.store.batch, x.store.length, x.store.dtype) for x in cache.coded_layers}
    return next(filter(None, found), "" if len(alike) == 1 else "layers differ")


def models():
    "Two small models: full attention, and sliding windows."
    sizes = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    mistral = MistralForCausalLM(MistralConfig(**sizes, sliding_window=24)).eval()
    return llama, mistral


def read_cache(model, recipe, tokens=30):
    cache = TurboQuantCache(model, recipe)
    ids = torch.randint(1, 90, (2, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def protein_code():
    "A transform code of two layers with random transforms and tables."
    gen, sides, shape = torch.Generator().manual_seed(0), [], (2, 2, 8)
    for inv_freq in (FREQ[:4].clone(), None):
        bits = torch.randint(1, 5, shape, generator=gen).to(torch.uint8)
        into = torch.eye(8) + 0.1 * torch.randn(*shape, 8, generator=gen)
        levels = {
            b: torch.randn(n, 2**b, generator=gen)
            for b in (1, 2, 3, 4)
            if (n := int((bits == b).sum()))
        }
        levels = transform.join_levels(bits, levels)
        mean = torch.randn(*shape, generator=gen)
        sides.append(transform.SideCode(mean, into, into.inverse(), bits, levels, inv_freq))
    header = dict(
        model="m", fingerprint=[[0.5] * 8, [1.5] * 8], sequences=2, tokens=30, residues=26
    )
    hashes = transform.text_hashes(["MKV", "AA"])
    return transform.TransformCode(*sides, transform.RECIPES["water3"], header, hashes)


def conversation(model):
    "A conversation of one turn, whose words nobody needs."
    talk = chat.Conversation(model, None, lambda: TurboQuantCache(model, "k3v3"))
    talk.cache = read_cache(model, "k3v3")
    talk.ids = torch.randint(1, 90, (31,), generator=torch.Generator().manual_seed(0)).tolist()
    talk.messages = [dict(role="user", content="Why?"), dict(role="assistant", content="é")]
    return talk


def loaded_talk(talk, path):
    chat.load_conversation(talk, path)
    return talk


def judge_talk(talk):
    kinds = all(isinstance(m.get(n), str) for m in talk.messages for n in ("role", "content"))
    rest = len(talk.ids) > talk.cache.get_seq_length() and min(talk.ids) >= 0
    return judge_cache(talk.cache) or ("" if kinds and rest else "messages or ids")


def cases():
    "Every kind of file that the package reads."
    out = []
    for name, make in STORES.items():
        x = make()
        write = lambda path, x=x: write_store(x, path)
        out.append(Case(f"store, {name}", write, read_store, write_store, unsound, use_store))
    llama, mistral = models()
    for name, model, recipe in (
        ("full", llama, "k3v3"),
        ("sliding", mistral, Recipe(Spec(3), Spec(2), sinks=2, recent=4)),
        ("by layer", llama, [Recipe(Spec(b), Spec(2)) for b in (4, 2)]),
        ("pair scale", llama, Recipe(Spec(3, pair_scale="prompt"), Spec(3))),
    ):
        cache = read_cache(model, recipe)
        load = lambda path, m=model: TurboQuantCache.load(path, m)
        use = lambda x, m=model: use_cache(m, x)
        save = TurboQuantCache.save
        out.append(Case(f"cache, {name}", cache.save, load, save, judge_cache, use))
    ids = torch.randint(1, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    found = sensitivity.measure_sensitivity(llama, ids, fit.calibrate(llama, ids))
    save = calibration.save_calibration
    out.append(
        Case(
            "calibration",
            lambda path: save(found, path),
            calibration.load_calibration,
            save,
            lambda c: "" if len(c.transforms) in (0, len(c.header["gain"])) else "gain",
            lambda c: (repr(c), c.nbytes),
        )
    )
    code = protein_code()
    out.append(
        Case(
            "protein code",
            lambda path: transform.save_code(code, path),
            transform.load_code,
            transform.save_code,
            lambda c: "" if c.key.shape == c.value.shape else "sides",
            lambda c: [
                transform.code_states(s, torch.zeros(2, 1, 2, 3, 8), torch.arange(3)[None])
                for s in c.sides
                if c.key.shape == (2, 2, 8)
            ],
        )
    )
    talk = conversation(llama)
    out.append(
        Case(
            "conversation",
            lambda path: chat.save_conversation(talk, path),
            lambda path: loaded_talk(copy.copy(talk), path),
            chat.save_conversation,
            judge_talk,
            lambda t: use_cache(llama, t.cache),
        )
    )
    return out


# --- what is changed

ODD = (
    None,
    "",
    "x",
    True,
    0,
    1,
    -1,
    3,
    2**16,
    2**20,
    2**40,
    2**70,
    0.5,
    1e300,
    math.nan,
    [],
    {},
)


def places(x, at=()):
    "Paths to every field of a header; JSON in a text is looked into."
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def opened(x):
    "A header with its recipes as objects: texts of JSON become {'json': …}."
    if isinstance(x, dict):
        return {k: opened(v) for k, v in x.items()}
    if isinstance(x, list):
        return [opened(v) for v in x]
    if isinstance(x, str) and x.startswith("{"):
        return {"json": json.loads(x)}
    return x


def closed(x):
    if isinstance(x, dict):
        return (
            json.dumps(x["json"])
            if x.keys() == {"json"}
            else {k: closed(v) for k, v in x.items()}
        )
    return [closed(v) for v in x] if isinstance(x, list) else x


def changed_value(old, rng):
    "Another value, of the same kind or not."
    kind = rng.randrange(5)
    if type(old) is int and kind < 3:
        return rng.choice([old - 1, old + 1, 2 * old, -old, old + 4, old * 2**12, old + 8])
    if isinstance(old, list) and old and kind < 3:
        return rng.choice([old[:-1], [*old, old[-1]], old[::-1], [old], {"0": old[0]}])
    if isinstance(old, str) and kind == 0:
        return old[:-1] + "é"
    if kind == 1:
        deep = old
        for _ in range(rng.choice([1, 2, 500])):
            deep = [deep]
        return deep
    return copy.deepcopy(rng.choice(ODD))


def change_header(header, rng):
    "One change in place; what it was."
    *at, last = path = rng.choice([*places(header)])
    inside = header
    for key in at:
        inside = inside[key]
    what = rng.choice(["drop", "value", "value", "value", "rename"])
    if what == "value":
        inside[last] = changed_value(inside[last], rng)
    elif isinstance(inside, list) or what == "drop":
        del inside[last]
    else:
        inside[f"{last}s"] = inside.pop(last)
    return f"{what} {path}"


DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def reshaped(t, rng):
    "Another shape: of equal size, longer, shorter, with other dimensions."
    kind = rng.randrange(6)
    if kind == 0 or not t.ndim:
        return t.reshape(-1)
    i = rng.randrange(t.ndim)
    if kind == 1:
        return t.narrow(i, 0, t.shape[i] // 2)
    if kind == 2:
        return torch.cat([t, t.narrow(i, 0, min(1, t.shape[i]))], i)
    if kind == 3:
        return t[None]
    if kind == 4:
        return t.transpose(i, 0)
    return t.new_zeros(()) if rng.random() < 0.5 else t.narrow(i, 0, 0)


def other_numbers(t, rng):
    "Numbers that are not those, often none that could be."
    t = t.clone().reshape(-1)
    if not t.numel() or t.dtype == torch.bool:
        return ~t if t.dtype == torch.bool else t
    i = rng.randrange(t.numel())
    odd = (
        [math.nan, math.inf, -1.0, 0.0, 1e4, 0.3]
        if t.is_floating_point()
        else [-1, 0, 1, 2**33]
    )
    value = rng.choice(odd)
    if t.dtype == torch.uint8:
        value = rng.randrange(256)
        if rng.random() < 0.3:  # bytes of a number that is none
            t[i : i + 8] = 255
            return t
    if not t.is_floating_point():  # 2**33 does not fit some integers
        value = min(value, torch.iinfo(t.dtype).max)
    t[slice(None) if rng.random() < 0.3 else i] = value
    return t


def change_tensors(tensors, rng):
    "One change in place; what it was."
    name, what = (
        rng.choice([*tensors]),
        rng.choice(["drop", "dtype", "shape", "shape", "numbers"]),
    )
    t = tensors[name]
    if rng.random() < 0.2:
        what = rng.choice(["rename", "add", "swap"])
    if what == "drop":
        del tensors[name]
    elif what == "dtype":
        tensors[name] = t.to(rng.choice(DTYPES))
    elif what == "shape":
        tensors[name] = reshaped(t, rng)
    elif what == "numbers":
        tensors[name] = other_numbers(t, rng).reshape(t.shape)
    elif what == "rename":
        tensors[f"{name}0"] = tensors.pop(name)
    elif what == "add":
        tensors[rng.choice(["x", "map", "end", "0.x", "inv_freq", "99.start", "center"])] = t
    else:
        other = rng.choice([*tensors])
        tensors[name], tensors[other] = tensors[other], t
    return f"{what} {name}"


# --- what is found


def contents(path):
    "(tensors, header) of a file, its format included."
    with safe_open(path, "pt") as f:
        header = json.loads(f.metadata()["header"])
        return {k: f.get_tensor(k) for k in f.keys()}, header


class Original(NamedTuple):
    tensors: dict
    header: dict
    nbytes: int  # of the tensors that it stands for


def original(case, path):
    case.write(path)
    tensors, header = contents(path)
    return Original(tensors, header, sum(t.nbytes for t in tensors.values()))


def changed(found, rng):
    "(tensors, header, what was changed)."
    tensors, header = dict(found.tensors), opened(found.header)
    form = header.pop("format")
    del header["sha256"]
    said = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        both = [(change_header, header), (change_tensors, tensors)]
        change, x = rng.choice([pair for pair in both if pair[1]])
        said.append(change(x, rng))
    return tensors, closed(header), form, "; ".join(said)


def allocated(call):
    "(what a call gives or raises, bytes that were held at most while it ran)."
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        try:
            out = call()
        except Exception as error:
            out = error
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = most = 0
    events = [e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return out, most + python


def numbers_of(tensors, header):
    "Everything that a file holds, in one form."
    plain = {
        k: (str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1))
        for k, t in tensors.items()
    }
    return plain, {k: v for k, v in header.items() if k not in ("sha256", "format")}


def same_file(a, b):
    "What differs between what was changed and what was loaded and written again."
    (held, said), (mine, heads) = (numbers_of(*x) for x in (a, b))
    if held.keys() != mine.keys():
        return f"tensors {sorted(held.keys() ^ mine.keys())}"
    for name, (*kind, x) in held.items():
        *other, y = mine[name]
        if kind != other or not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            return f"tensor {name}"
    both = [k for k in heads if k in said and k not in ("recipe", "spec")]
    return next((f"field {k}" for k in both if json.dumps(heads[k]) != json.dumps(said[k])), "")


def judged(case, path, held):
    "What became of a changed file: (verdict, detail, bytes allocated at most)."
    out, most = allocated(lambda: case.load(path))
    if most > 2 * held + SLACK:
        return "allocated", f"{most:,} bytes for {held:,}", most
    if isinstance(out, ValueError):
        return "refused", str(out), most
    if isinstance(out, Exception):
        return "raised", f"{type(out).__name__}: {out}", most
    other = path.with_name("again")
    try:
        if why := case.judge(out):
            return "unsound", why, most
        case.again(out, other)
        if why := same_file(contents(path), contents(other)):
            return "unsound", why, most
        case.use(out)
    except Exception as error:
        return "unusable", f"{type(error).__name__}: {error}", most
    return "loaded", "", most


def fuzz(case, count, seed, folder):
    "One row: a kind of file."
    rng, path, began = random.Random(f"{seed} {case.name}"), folder / "file", time.monotonic()
    found, seen, bad, worst = original(case, path), Counter(), [], 0
    held = found.nbytes
    case.use(case.load(path))  # tables are made once
    for _ in range(count):
        try:
            tensors, header, form, said = changed(found, rng)
            write_file(path, tensors, header, form)
        except (RecursionError, ValueError):  # no file can say that
            seen["not written"] += 1
            continue
        mine = max(held, sum(t.nbytes for t in tensors.values()))
        verdict, why, most = judged(case, path, mine)
        seen[verdict] += 1
        worst = max(worst, most)
        if verdict not in ("refused", "loaded"):
            bad.append(f"{verdict}: {why} [{said}]")
    row = dict(kind=case.name, files=count, bytes=held, most_allocated=worst)
    row |= {k: seen[k] for k in ("refused", "loaded", "not written")} | dict(bad=bad[:20])
    return row | dict(seconds=round(time.monotonic() - began, 1), unit="files")


def options(p):
    p.add_argument("--files", type=int, default=10_000, help="changed files, of all kinds")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--kind", default="", help="kinds whose name holds this alone")


def rows(a):
    warnings.simplefilter("ignore")
    found = [x for x in cases() if a.kind in x.name]
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(found):
            count = a.files // len(found) + (i < a.files % len(found))
            yield fuzz(case, count, a.seed, Path(folder))


def gate(rows):
    cmd = (
        "no exception but ValueError, nothing unsound or unusable, at most twice the bytes held"
    )
    return {"cmd": cmd, "passed": not any(r["bad"] for r in rows), "bad": rows[-1]["bad"]}


def plan(a):
    data = {"id": "files changed on purpose", "n": a.files}
    return Plan("archives", gate, rows(a), data, seeds=[a.seed])
