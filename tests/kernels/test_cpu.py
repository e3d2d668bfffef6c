"""The compiled kernel of processors against attention on codes, as compiled for this processor,
for one with AVX2 and for any: random recipes, shapes, ranges, crops, evictions."""

import ctypes
import itertools
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.helpers import random_frame, refuses, seeded
from turboquant_nb.cache import attention
from turboquant_nb.cache.attention import Call
from turboquant_nb.cache.clock import flags_of
from turboquant_nb.cache.disk import state_of
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.kernels import ops
from turboquant_nb.kernels.cpu import Cpu, Library
from turboquant_nb.quant import codes
from turboquant_nb.quant.codes import find_code
from turboquant_nb.quant.quantizer import decided
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from turboquant_nb.theory.trellis import TRELLISES, Trellis


FREQ = 100.0 ** (-torch.arange(8) / 8)
INFO = Path("/proc/cpuinfo")
FLAGS = set(INFO.read_text().split()) if INFO.exists() else set()
NEEDS = {"": set(), "-march=haswell": {"avx2", "fma", "f16c"}, "-march=x86-64": {"sse2"}}
KERNELS = {target: Cpu(Library(target)) for target, needs in NEEDS.items() if needs <= FLAGS}


def close(got, want, limit=2e-5):
    """Outputs relative to the largest, log-sum-exps as they are; infinite ones in the same
    places."""
    hidden = want[1].isinf()
    assert torch.equal(got[1].isinf(), hidden) and not got[0][hidden].any()
    assert got[0].dtype == want[0].dtype and got[0].shape == want[0].shape
    assert (got[0] - want[0]).abs().max() <= limit * want[0].abs().max() and (
        (got[1] - want[1])[~hidden].abs() <= limit
    ).all()


@pytest.fixture(params=KERNELS, ids=lambda target: target or "native")
def kernel(request):
    found = KERNELS[request.param]
    if found.library.why:
        pytest.skip(found.library.why)
    return found


def serve(kernel, q, store, *chunk, **options):
    """What the kernel answers, the same by one thread and by two. PyTorch rotates queries and
    outputs, by the threads that it has."""
    call, answers = Call.of(q, store, *chunk, **options), []
    assert kernel.refuses(call) == ""
    for n in (1, 2):
        with patch.object(torch, "get_num_threads", lambda n=n: n):
            answers.append(kernel.run(call.into_frame().divided()))
    for a, b in zip(*answers):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return answers[0]


TARGETS = [*KERNELS]
in_turn = pytest.mark.parametrize(
    "kernel, seed", [(TARGETS[i % len(TARGETS)], i) for i in range(24)], indirect=["kernel"]
)


@in_turn
def test_random_steps_are_attention_on_codes(seed, kernel):
    """A random store grows, forgets and is attended to; each time the kernel must give what
    attention on codes gives. Inputs are widened alike, so that of half precision what differs
    is the rounding of the output."""
    g, r = seeded(seed), random.Random(seed)
    dk, dv, heads = r.choice((16, 17, 40, 64, 128)), r.choice((16, 31, 64)), r.choice((1, 3))
    groups, batch = r.choice((1, 2, 3, 5, 7, 13)), r.choice((1, 2, 3))
    dtype, limit = r.choice(
        ((torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2))
    )
    key = Spec(
        r.randint(1, 4),
        center=r.choice(("none", "fixed", "pre_rope")),
        codebook=r.choice(("sphere", "uniform")),
        scale_dtype=r.choice(("float16", "bfloat16", "float32")),
    )
    value = Spec(r.randint(1, 4), rotation=r.choice(("hadamard", "haar")))
    recipe = Recipe(key, value, sinks=r.choice((0, 4)), recent=r.choice((0, 1, 16)))
    tile, window = r.choice((64, 128, 256)), r.choice((None, 3, 90, 300))
    more = dict(tile=tile, inv_freq=FREQ, frame=random_frame(heads, dk, 2 * len(FREQ), seed))
    store = KVStore(recipe, batch, heads, dk, dv, dtype, **more)
    store.set_range(start=torch.tensor([r.choice((0, 0, 5, 130)) for _ in range(batch)]))
    new = lambda h, n, d, mean: (torch.randn(batch, h, n, d, generator=g) + mean).to(dtype)
    options = dict(
        sliding_window=window, softcap=r.choice((None, 5.0)), scaling=r.choice((None, 0.2))
    )
    for n in (r.choice((1, 70, 400, 1300)), 1, 1, r.randint(2, 40), 1, 1):
        k, v, q = new(heads, n, dk, 1), new(heads, n, dv, -1), new(heads * groups, 1, dk, 0)
        store.append(k, v)
        # added to scores: of all rows and heads, or of each
        each = r.choice((1, batch)), r.choice((1, heads * groups))
        bias = torch.randn(*each, 1, store.length - store.offset, generator=g)
        for chunk in ((), (k[:, :, -1:], v[:, :, -1:].float()), (k, v)):
            more = options | dict(bias=r.choice((None, bias)))
            want = attention.attend(q, store, *chunk, **more)
            close(serve(kernel, q, store, *chunk, **more), want, limit)
        if n > 1:
            store.crop(r.randint(1, n - 1))
            close(
                serve(kernel, q, store, **options), attention.attend(q, store, **options), limit
            )
        if window:
            store.evict(store.length - window - 1)


@pytest.mark.parametrize("bits, d", ((2, 64), (3, 128)))
def test_windows_give_the_attention_of_the_reference(bits, d, kernel):
    g = seeded(bits)
    recipe = Recipe(
        Spec(bits, codebook="trellis", center="pre_rope"), Spec(2, codebook="trellis")
    )
    freq = 1e4 ** (-torch.arange(d // 2) / (d // 2))
    store = KVStore(recipe, 2, 2, d, inv_freq=freq, frame=random_frame(2, d, d))
    store.set_range(start=torch.tensor([0, 9]))
    store.append(*torch.randn(2, 2, 2, 300, d, generator=g) + 0.3)
    q = torch.randn(2, 8, 1, d, generator=g)
    close(serve(kernel, q, store), attention.attend(q, store))


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_search_finds_the_symbols_of_the_reference(bits, kernel):
    x = torch.randn(43, 128, generator=seeded(bits))
    x[3], x[4, 2], x[5] = 0.0, 1e4, -1e9  # ties everywhere, values that no level is near to
    for start, n in itertools.product(("zero", "tail"), (16, 33, 128)):
        trellis = replace(TRELLISES[bits], start=start)
        rows = x[:, :n]
        want = trellis.encode(rows)
        for threads in (1, 2):
            with patch.object(torch, "get_num_threads", lambda threads=threads: threads):
                assert torch.equal(kernel.library.search(trellis, rows), want)
        other = replace(trellis, levels=trellis.levels[::-1])
        assert not torch.equal(kernel.library.search(other, rows), want)
    poisoned = torch.full((1, 16), float("nan"))
    assert torch.equal(
        kernel.library.search(trellis, poisoned), trellis.encode(torch.zeros(1, 16))
    )
    with refuses("2\\*\\*bits states or more"):
        kernel.library.search(Trellis(4, 6, (3,), (-1.0, 1.0)), rows)


def test_a_code_by_windows_is_searched_without_a_compiler_too(monkeypatch):
    code, x = find_code(Spec(2, codebook="trellis"), 64), torch.randn(5, 64)
    found = code.encode(x)
    monkeypatch.setitem(codes.KERNELS, "cpu", Library(compiler="no-such-compiler"))
    assert torch.equal(code.encode(x), found)
    monkeypatch.setitem(codes.KERNELS, "cpu", SimpleNamespace(why="", search=lambda t, x: -x))
    assert not torch.equal(code.encode(x), found)


def test_a_transform_for_each_head(kernel):
    g = seeded()
    transform = register_transform(
        HeadTransform.of(torch.randn(3, 64, 64, generator=g) + 20 * torch.eye(64))
    )
    store = KVStore(Recipe(Spec(3, rotation=transform.name), Spec(3)), 1, 3, 64)
    store.append(*torch.randn(2, 1, 3, 300, 64, generator=g))
    q = torch.randn(1, 6, 1, 64, generator=g)
    close(serve(kernel, q, store), attention.attend(q, store))


def outcome(answer):
    "What is NaN, what is infinite, and the rest."
    return [torch.nan_to_num(x.float(), 1e6, 2e6, 3e6) for x in answer]


def test_what_is_not_finite_is_as_in_the_reference(kernel):
    "In queries, an exact token, a scale that is seen; one that is hidden says nothing."
    g = seeded()
    for bad in (float("nan"), float("inf"), -float("inf")):
        for where in ("query", "exact", "scale", "hidden"):
            store = KVStore(Recipe(Spec(3), Spec(3), recent=4), 1, 2, 64)
            store.append(*torch.randn(2, 1, 2, 300, 64, generator=g))
            q = torch.randn(1, 4, 1, 64, generator=g)
            if where == "query":
                q[0, 1, 0, 3] = bad
            elif where == "exact":
                store.key.exact.recent[0, 1, 1, 5] = bad
            else:
                at = (0, 100) if where == "scale" else (1, 255)
                for side in store.parts:
                    side.memory.tensors["scale"][0, 1, at[0], at[1]] = bad
            got, want = serve(kernel, q, store), attention.attend(q, store)
            for a, b in zip(outcome(got), outcome(want)):
                assert (a - b).abs().max() <= 2e-5 * max(1, b.abs().max()), (bad, where)
            assert where != "hidden" or bool(got[0].isfinite().all())


def test_nothing_is_seen(kernel):
    "An empty store, and a sequence of padding alone."
    store = KVStore(Recipe(), 2, 1, 64)
    store.set_range(start=torch.tensor([0, 40]))
    k = torch.randn(2, 1, 40, 64)
    store.append(k, k)
    q = torch.randn(2, 2, 1, 64)
    got = serve(kernel, q, store)
    assert not got[0][1].any() and got[1][1].eq(-torch.inf).all() and got[0][0].any()
    close(got, attention.attend(q, store))


def test_it_serves_by_itself_and_says_why_it_does_not(monkeypatch, kernel):
    "By itself; without a compiler PyTorch attends and codes, with the reason."
    store = KVStore("k3v3", 1, 2, 64, inv_freq=FREQ, frame=random_frame(2, 64, 2 * len(FREQ)))
    store.append(*torch.randn(2, 1, 2, 300, 64))
    q = torch.randn(1, 4, 1, 64)
    assert ops.select_backend(Call.of(q, store)).backend == "cpu"
    bare = Cpu(Library(compiler="no-such-compiler"))
    monkeypatch.setitem(ops.BACKENDS, "cpu", bare)
    monkeypatch.setattr(ops, "CPU", bare)
    store.memo.clear()
    assert ops.select_backend(Call.of(q, store)) == (
        "torch",
        "no C++ compiler was found (looked for no-such-compiler)",
    )
    with refuses("'cpu' cannot serve this call: no C.. compiler"):
        ops.attend(q, store, backend="cpu")
    assert bare.library.lacks(bare.library.why) and not bare.library.lacks("another")
    assert ops.append(store, *torch.randn(2, 1, 2, 1, 64)) == "torch" and store.length == 301


def test_reasons(kernel):
    q = torch.randn(1, 4, 1, 64)
    for options, n, why in (
        (dict(dtype=torch.float64), 1, "32 or 16 bits"),
        (dict(tile=32), 1, "a multiple of 64 tokens, got 32"),
        (dict(), 2, "one query a sequence"),
        (dict(static=True, max_length=512), 1, "static"),
    ):
        store = KVStore(Recipe(), 1, 2, 64, **options)
        store.append(*torch.randn(2, 1, 2, 300, 64).to(store.dtype))
        x = q.to(store.dtype).expand(-1, -1, n, -1)
        assert why in kernel.refuses(Call.of(x, store))


def test_a_source_that_does_not_compile(tmp_path, monkeypatch):
    "The compiler's error is the reason; what is compiled once is found again."
    from turboquant_nb.kernels import cpu

    monkeypatch.setattr(cpu, "SOURCE", EMPTY)
    first = Library(folder=tmp_path)
    if first.why:
        pytest.skip(first.why)
    (file,) = tmp_path.iterdir()
    run = cpu.subprocess.run
    monkeypatch.setattr(cpu.subprocess, "run", None)
    assert Library(folder=tmp_path).why == "" and [*tmp_path.iterdir()] == [file]
    monkeypatch.setattr(cpu.subprocess, "run", run)
    monkeypatch.setattr(cpu, "SOURCE", "#error not this one\n")
    assert "not this one" in Library(folder=tmp_path).why
    assert [*tmp_path.iterdir()] == [file]


def test_a_compiler_that_fails_without_a_word(tmp_path):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    why = Library(compiler=str(silent), folder=tmp_path).why
    assert why == f"{silent} could not compile the kernel: it ended with code 3"


# compiles at once
EMPTY = """
extern "C" void attend(void *) {}
extern "C" void search() {}
extern "C" long long code(void *, void *) { return 0; }
"""
PLANTED = """
#include <cstdio>
#include <cstdlib>
extern "C" void attend(void *) {}
extern "C" void search() {}
extern "C" long long code(void *, void *) { return 0; }
__attribute__((constructor)) static void ran() { std::fclose(std::fopen(PLACE, "w")); }
"""


@pytest.mark.parametrize("of", ["file", "folder"])
def test_code_that_another_user_may_have_written_is_not_loaded(tmp_path, monkeypatch, of):
    "A file in one's own folder is made anew; in a folder of others nothing is kept or loaded."
    monkeypatch.setattr("turboquant_nb.kernels.cpu.SOURCE", EMPTY)
    kept, ran = tmp_path / "kept", tmp_path / "ran"
    kept.mkdir(mode=0o700)
    first = Library(folder=kept)
    if first.why:
        pytest.skip(first.why)
    (file,) = kept.iterdir()
    kept.chmod(0o777 if of == "folder" else 0o700)
    source, compiler = tmp_path / "planted.cpp", which("c++") or which("g++")
    source.write_text(PLANTED.replace("PLACE", f'"{ran}"'))
    subprocess.run([compiler, "-fPIC", "-shared", source, "-o", file], check=True)
    file.chmod(0o777 if of == "file" else 0o700)
    why = Library(folder=kept).why
    assert not ran.exists(), "code of others ran"
    if of == "file":
        assert why == "" and file.stat().st_mode & 0o777 == 0o700
    else:
        assert "another user may have written to it" in why and str(kept) in why
        assert "the environment variable TURBOQUANT_CACHE names another folder" in why
    ctypes.CDLL(str(shutil.copy(file, tmp_path / "copy.so")))
    assert ran.exists() == (of == "folder"), "the planted file would have run"


NO_HOME = """
import resource, sys
from turboquant_nb.kernels import cpu
if sys.argv[1] == "full":  # no file may be longer: as full as a disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
else:
    cpu.SOURCE = sys.argv[2]
print(cpu.Library().why)
"""


@pytest.mark.parametrize("way", ["no home", "full"])
def test_an_unfriendly_machine(tmp_path, way):
    """Where no home can be written the kernel is kept in the temporary folder, compiled once;
    where no folder takes it, the reason names one and the variable."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    gone = ("HOME", "XDG_CACHE_HOME", "TURBOQUANT_CACHE")
    env = {n: x for n, x in os.environ.items() if n not in gone} | {"TMPDIR": str(temporary)}
    home = "/dev/null" if way == "no home" else str(tmp_path / "home")
    env |= {"HOME": home}
    made = []
    for _ in range(1 if way == "full" else 2):
        run = [sys.executable, "-c", NO_HOME, way, EMPTY]
        done = subprocess.run(run, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.append({x: x.stat().st_mtime_ns for x in temporary.glob("turboquant-nb-*/*.so")})
    if "no C++ compiler" in done.stdout:
        pytest.skip(done.stdout)
    if way == "full":
        assert "File too large" in done.stdout and f"{home}/.cache/turboquant-nb" in done.stdout
        assert "TURBOQUANT_CACHE" in done.stdout and made == [{}]
        return
    assert done.stdout.strip() == "" and made[0] == made[1] and len(made[0]) == 1
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_scales_of_hidden_tokens_say_nothing(kernel):
    "Kernels write NaN for what they refuse; a step that does not see it reads around it."
    store = KVStore(Recipe(recent=0, sinks=0), 1, 1, 64)
    store.append(*torch.randn(2, 1, 1, 300, 64))
    q, options = torch.randn(1, 2, 1, 64), dict(sliding_window=100)
    want = attention.attend(q, store, **options)
    flags_of(store)
    for side in store.parts:
        side.memory.tensors["scale"][0, 0, 0, :200] = float("nan")
    close(serve(kernel, q, store, **options), want)


# --- a token is coded


def check_newest(mine, want, states):
    "The newest token as the quantizer codes it, but for codes that the order of sums decides."
    last, sure = want.length - 1, []
    assert mine.length == want.length and mine._recent_from == want._recent_from
    for side, x in zip(("key", "value"), states):
        q, (a, b) = getattr(want, side).q, (s.coded(side, last, last + 1) for s in (mine, want))
        if q.rotation.per_head:
            sure.append((a.codes == b.codes).float().mean().item())
        else:
            known = decided(q, x, want.center(side, last, last + 1))
            assert torch.equal(a.codes[known], b.codes[known])
            sure.append(known.float().mean().item())
        step = torch.finfo(q.scale_dtype).eps + q.d * 2.0**-23  # of sums of d numbers
        alike = (a.codes == b.codes).all(-1)
        torch.testing.assert_close(a.scale[alike], b.scale[alike], rtol=step, atol=0)
        (m, at), (w, there) = mine.exact(side), want.exact(side)
        newest = at == last  # after a crop older ones are decoded, by scales that may differ
        assert torch.equal(at, there)
        assert torch.equal(m.transpose(1, 2)[newest], w.transpose(1, 2)[newest])
    assert min(sure) > 0.9, sure


@in_turn
def test_one_token_has_the_codes_of_the_quantizer(seed, kernel):
    """Random recipes, shapes, paddings, crops; sinks that come one by one; over borders of
    quarters and tiles; where the host counts and where the device does."""
    g, r = seeded(seed), random.Random(seed)
    dk, heads, batch = r.choice((16, 17, 40, 64, 128)), r.choice((1, 3)), r.choice((1, 2, 3))
    dv, dtype = r.choice((dk, 31)), r.choice((torch.float32, torch.float16, torch.bfloat16))
    kinds = dict(
        codebook=r.choice(("sphere", "uniform")),
        scale=r.choice(("mse", "norm", "unbiased")),
        scale_dtype=r.choice(("float16", "bfloat16", "float32")),
    )
    key = Spec(r.randint(1, 4), center=r.choice(("none", "fixed", "pre_rope")), **kinds)
    value = Spec(r.randint(1, 4), rotation=r.choice(("hadamard", "haar", "identity")), **kinds)
    if seed % 4 == 3:
        transform = HeadTransform.of(
            torch.randn(heads, dk, dk, generator=g) + 8 * torch.eye(dk)
        )
        key = replace(key, rotation=register_transform(transform).name)
    recipe = Recipe(key, value, sinks=r.choice((0, 4)), recent=r.choice((0, 1, 16)))
    how = dict(static=True, max_length=600) if seed % 2 else {}
    how["frame"] = random_frame(heads, dk, 2 * len(FREQ), seed)
    more = dict(dtype=dtype, tile=r.choice((16, 64, 256)), inv_freq=FREQ, **how)
    mine, want = (KVStore(recipe, batch, heads, dk, dv, **more) for _ in range(2))
    start = torch.tensor([r.choice((0, 0, 5, 13)) for _ in range(batch)])
    for store in (mine, want):
        store.set_range(start=start)
    for n in (r.randint(1, 14), *[1] * 30, r.randint(2, 40), *[1] * 30):
        states = [
            (torch.randn(batch, heads, n, d, generator=g) + 1).to(dtype) for d in (dk, dv)
        ]
        did = n == 1 and mine.length > 0
        assert kernel.append(mine, *states) == did
        for store in (want,) if did else (mine, want):
            store.append(*states)
        if did:
            check_newest(mine, want, states)
        if r.random() < 0.1:
            for store in (mine, want):
                store.crop(min(3, store.length - 2))
    assert mine.nbytes == want.nbytes


def test_codes_by_two_threads_are_those_of_one(kernel):
    frame = random_frame(5, 64, 2 * len(FREQ))
    stores = [KVStore("k3v3", 9, 5, 64, inv_freq=FREQ, frame=frame) for _ in range(2)]
    chunk, token = torch.randn(2, 9, 5, 70, 64), torch.randn(2, 9, 5, 1, 64)
    for n, store in enumerate(stores, 1):
        store.append(*chunk)
        with patch.object(torch, "get_num_threads", lambda n=n: n):
            assert kernel.append(store, *token)
    for a, b in zip(*(state_of(store)[0].values() for store in stores)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda k: k[0, 0, 0].fill_(torch.nan),
        lambda k: k[0, 1].fill_(torch.inf),
        lambda k: k.mul_(1e30),
        lambda k: k[0].zero_(),
        lambda k: k.mul_(2.0**20),
    ],
)
@pytest.mark.parametrize("side", (0, 1))
def test_what_the_quantizer_must_look_at_changes_nothing(spoil, side, kernel):
    store = KVStore(Recipe(Spec(3, center="none"), Spec(3)), 1, 2, 64)
    store.append(*torch.randn(2, 1, 2, 70, 64))
    before = {name: t.clone() for name, t in state_of(store)[0].items()}
    states = list(torch.randn(2, 1, 2, 1, 64))
    spoil(states[side])
    assert not kernel.append(store, *states) and store.length == 70
    for name, t in state_of(store)[0].items():
        assert torch.equal(t, before[name]), name


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(Spec(2.5), Spec(3)),
        Recipe(residual="prod").settled(),
        Recipe(Spec(2, codebook="trellis"), Spec(3)),
    ],
)
def test_other_codes_are_made_by_the_quantizer(recipe, kernel):
    store = KVStore(recipe, 1, 2, 64, tile=16)
    store.append(*torch.randn(2, 1, 2, 60, 64))
    token = torch.randn(2, 1, 2, 1, 64)
    assert not kernel.append(store, *token) and store.length == 60
    assert ops.append(store, *token) == "torch" and store.length == 61
    plain = KVStore(Recipe(), 1, 2, 64)
    plain.append(*torch.randn(2, 1, 2, 60, 64))
    for odd in (token[..., :63], token.double(), token.repeat(1, 2, 1, 1, 1)):
        assert not kernel.append(plain, *odd) and plain.length == 60
    assert ops.append(plain, *token, backend="torch") == "torch"  # it is what was asked for
    assert ops.append(plain, *token) == "cpu" and plain.length == 62
