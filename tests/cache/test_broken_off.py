"""Every update of a store leaves it as before or as after, whatever is raised in it: an error
is raised at lines of the package that an update runs, one at a time."""

import random
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch

import turboquant_nb
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.cache.store import crop_together, make_room, tail_with
from turboquant_nb.cache.attention import attend
from turboquant_nb.cache.clock import AppendOperands, _append_by_position
from turboquant_nb.cache.budget import TieredStore, ladder
from turboquant_nb.kernels import encode as kernel, ops
from tests.helpers import DEVICE, ONE_THREAD, SLOW, needs_triton, random_frame, refuses, seeded

pytestmark = ONE_THREAD
PACKAGE = str(Path(turboquant_nb.__file__).parent)
ERRORS = MemoryError, KeyboardInterrupt
B, H, D, TILE = 2, 2, 8, 8
FREQ = 1e4 ** -(torch.arange(D // 2) / (D // 2))


class Lines:
    "The lines of some files that run, and an error at one of them, counted from 0."

    def __init__(self, at: int = -1, error=None, files: str = PACKAGE):
        self.at, self.error, self.files, self.seen = at, error, files, []

    def __enter__(self):
        sys.settrace(self.called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        torch.set_grad_enabled(True)  # `with` itself can be broken off on its way out

    def called(self, frame, event, arg):
        # what a kernel raises is wrapped by the interpreter that called it
        by = "" if frame.f_back is None else frame.f_back.f_code.co_filename
        mine = frame.f_code.co_filename.startswith(self.files) and "/triton/" not in by
        return self.ran if mine else None

    def ran(self, frame, event, arg):
        if event == "line":
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.seen) == self.at + 1:
                raise self.error("broken off")
        return self.ran


def states(n: int, seed: int = 0, d: int = D) -> list:
    g = seeded(100 * seed + n)
    return [torch.randn(B, H, n, d, generator=g) + 1 for _ in "kv"]


def store(tokens: int, spec=None, **more):
    "A store that has so many tokens."
    kinds = dict(center="pre_rope", pair_scale="frame") if spec is None else spec
    settings = {x: more.pop(x) for x in ("static", "max_length", "dtype") if x in more}
    recipe = Recipe(Spec(3, **kinds), Spec(4), **dict(sinks=2, recent=5) | more)
    rope = dict(inv_freq=FREQ) if recipe.key.centre.rotates else {}
    more = dict(tile=TILE, frame=random_frame(H, D, D)) | settings | rope
    out = KVStore(recipe, B, H, D, **more)
    if tokens:
        out.append(*states(tokens))
    return out


def tiered(tokens: int, *ends):
    "A store under a budget, of which so many tokens have 2, 3 and 4 bits."
    more = dict(tile=TILE, frame=random_frame(H, D, D), inv_freq=FREQ)
    out = TieredStore(ladder(), B, H, D, **more)
    out.append(*states(tokens))
    if ends:
        out.settle((0, *ends, tokens))
    return out


fixed = partial(store, static=True, max_length=48)


def seen(one) -> list:
    "What is held: codes, scales, exact tokens, frames, ranges and numbers."
    one.sync()
    out = [x for side in ("key", "value") for x in one.exact(side)]
    for run in one.runs:
        if run.tiered:
            out += run.read(run.offset)
        for part in () if run.tiered else run.parts:
            codes = part.memory.read(0, run.length - run.offset)
            out += [*codes[:2], *(codes.residual or {}).values()]
            out += [x for x in part.frame if x is not None]
    out += [one.start]
    ends = [x for run in one.runs for x in (run.offset, run.length)]
    numbers = one.batch, *ends, *one.ranges.starts
    return [*out, torch.tensor(numbers)]


def later(one) -> list:
    "What attention gives after another token."
    new = (x[:1, : one.heads] for x in states(1, seed=7, d=one.key.q.d))
    one.append(*(x.expand(one.batch, -1, -1, -1).to(one.device) for x in new))
    q = torch.ones(one.batch, 2 * one.heads, 1, one.key.q.d, device=one.device) / 3
    return [*attend(q, one)]


def alike(a: list, b: list) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def chunk(n: int, seed: int = 0):
    "An update by so many tokens."
    return lambda one: one.append(*states(n, seed))


def token(one):
    assert ops.append(one, *states(1), backend="torch") == "torch"


def with_tail(make, n: int = 3):
    "A store after a chunk, and what the chunk left for a crop."
    one = make()
    one.tail = tail_with(one, *states(n))
    one.append(*states(n))
    return one


def by_position(one):
    _append_by_position(AppendOperands.of(one, *states(2)))


def moved(one):
    one.set_range(torch.tensor([0, 4]), *states(20))


def together(stores):
    assert crop_together(stores, 2, [x.tail for x in stores]) is not None


def chosen(one):
    one.select(torch.tensor([1, 0]))


aged = partial(tiered, 40, 8, 16, 24)
# what makes a store, or several; the update
UPDATES = {
    "a first chunk": (partial(store, 0), chunk(6)),
    "a first chunk, a fixed mean": (partial(store, 0, dict(center="fixed")), chunk(20)),
    "a chunk that needs room": (partial(store, 20), chunk(30)),
    "a chunk of an extra": (partial(store, 20, dict(residual="sign")), chunk(7)),
    "a token by torch": (partial(store, 16), chunk(1)),
    "a sink": (partial(store, 1), token),
    "a token": (partial(store, 13), token),
    "a token that needs room": (partial(store, 16), token),
    "a crop": (partial(store, 30), lambda one: one.crop(9)),
    "a crop to nothing": (partial(store, 30), lambda one: one.crop(30)),
    "a crop in the last chunk": (
        lambda: with_tail(partial(store, 20)),
        lambda one: one.crop(2, one.tail),
    ),
    "a crop of old tokens": (aged, lambda one: one.crop(30)),
    "crops of two stores": (
        lambda: [with_tail(partial(store, 20)) for _ in range(2)],
        together,
    ),
    "rows": (partial(store, 20), lambda one: one.select(torch.tensor([1, 1, 0]))),
    "starts of nothing": (
        partial(store, 0),
        lambda one: one.set_range(start=torch.tensor([0, 2])),
    ),
    "starts": (partial(store, 20), moved),
    "starts where all is exact": (partial(tiered, 20), moved),
    "room": (partial(store, 20), lambda one: make_room(one, 40)),
    "freed tiles": (aged, lambda one: one.evict(12)),
    "freed exact tiles": (aged, lambda one: one.evict(33)),
    "exact rows": (aged, lambda one: one.select(torch.tensor([1, 1, 0]))),
    "a chunk behind old tokens": (aged, chunk(13)),
    "a move": (partial(store, 20), lambda one: one.to("cpu")),
    "static: a first chunk": (partial(fixed, 0), chunk(9)),
    "static: a chunk": (partial(fixed, 20), chunk(9)),
    "static: a token": (partial(fixed, 20), token),
    "static: by position": (partial(fixed, 20), by_position),
    "static: a crop": (partial(fixed, 20), lambda one: one.crop(9)),
    "static: a crop in the last chunk": (
        lambda: with_tail(partial(fixed, 20)),
        lambda one: one.crop(2, one.tail),
    ),
    "static: crops of two stores": (
        lambda: [with_tail(partial(fixed, 20)) for _ in range(2)],
        together,
    ),
    "static: rows": (partial(fixed, 20), chosen),
    "static: starts": (partial(fixed, 20), moved),
}


def places(lines: list, name: str, most: int) -> list:
    """(line that runs, error) to break off at: all of them; or once at each line of the files
    that change stores and at a tenth of those that compute, at so many at most."""
    if SLOW:
        return [(i, error) for i in range(len(lines)) for error in ERRORS]
    draw, runs = random.Random(name), {}
    for i, line in enumerate(lines):
        runs.setdefault(line, []).append(i)
    some = [x for line, x in runs.items() if changes(*line) or draw.random() < 0.1]
    some = some if len(some) <= most else draw.sample(some, most)
    return [(draw.choice(x), draw.choice(ERRORS)) for x in some]


def changes(file: str, line: int) -> bool:
    "Whether a line may belong to a change of a store."
    compute = file.endswith(("packing.py", "attention.py"))
    return ("cache" in file or file.endswith("kernels/encode.py")) and not compute


def break_off(name: str, make, update, files: str = PACKAGE, most: int = 50) -> int:
    "Break an update off wherever it can be; the number of places."
    base = make()
    listed = lambda x: x if isinstance(x, list) else [x]
    fresh = lambda x: deepcopy(x, {id(one.recipe): one.recipe for one in listed(base)})
    look = lambda f, x: [f(fresh(one)) for one in listed(x)]
    for _ in range(2):  # the first one fills what is kept for all stores
        done = fresh(base)
        with Lines(files=files) as lines:
            update(done)
    ends = [[look(f, x) for f in (seen, later)] for x in (base, done)]
    found = places(lines.seen, name, most)
    for at, error in found:
        broken = fresh(base)
        with refuses("broken off", error), Lines(at, error, files) as lines:
            update(broken)
        where = f"{error.__name__} at {lines.seen[-1]}"
        assert not torch.is_inference_mode_enabled()
        now, then = (look(f, broken) for f in (seen, later))
        for i in range(len(now)):
            sides = [x for x in ends if alike(x[0][i], now[i])]
            assert sides, f"neither before nor after: {where}"
            assert any(alike(x[1][i], then[i]) for x in sides), f"no more tokens after {where}"
    return len(found)


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_is_before_or_after(name):
    assert break_off(name, *UPDATES[name]) > 5


@needs_triton
@pytest.mark.parametrize("static", (False, True))
def test_a_launched_append_is_before_or_after(static):
    "The kernel writes codes, ring and, where the device counts, the length."
    key = Spec(3, center="fixed", pair_scale="frame")
    recipe, frame = Recipe(key, Spec(4), sinks=2, recent=5), random_frame(1, 16)
    new = lambda n: (x[:1, :1].to(DEVICE) for x in states(n, d=16))

    def make():
        more = dict(static=True, max_length=80) if static else {}
        one = KVStore(recipe, 1, 1, 16, device=DEVICE, tile=64, frame=frame, **more)
        one.append(*new(20))
        return one

    update = lambda one: kernel.append(one, *new(1))
    assert break_off(f"static {static}", make, update, kernel.__file__, most=12) == 12
