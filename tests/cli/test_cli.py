"""The turboquant command: what goes to standard output and standard error, exit codes, and
every bad input."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from turboquant_nb import cli
from turboquant_nb.cli import app as conventions
from turboquant_nb.cli import demo as demos
from turboquant_nb.cli import generate as answers
from turboquant_nb.cli import inputs, output, plan
from turboquant_nb.cli.output import Stage, show_table
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.evaluation.models import load_model, sample_text
from turboquant_nb.quant.quantizer import PRESETS, Recipe, Spec, as_recipe, preset

from .conftest import SIZE, refused, save

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- help and usage


@pytest.mark.parametrize("command", ["demo", "generate", "recipe"])
def test_help_has_an_example(call, command):
    code, out, err = call(command, "--help")
    assert (
        code == 0
        and "example:" in out
        and f"turboquant {command}" in out.split("example:")[1]
        and err == ""
    )
    assert all(option in out for option in ("--json", "--quiet", "--debug"))


def test_version_and_main_help(call):
    assert call("--version")[:2] == (0, f"turboquant {metadata.version('turboquant-nb')}\n")
    code, out, _ = call("--help")
    assert code == 0 and all(c in out for c in ("demo", "generate", "recipe", "example:"))


@pytest.mark.parametrize("argv", ([], ["eval"]))
def test_a_command_of_commands_alone_shows_its_help(call, argv):
    code, out, err = call(*argv)
    assert (
        (code, err) == (0, "")
        and out == call(*argv, "--help")[1]
        and f"Usage: {' '.join(['turboquant', *argv])} [OPTIONS] COMMAND" in out
    )


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from turboquant_nb.cli import main; main(['--help']); heavy = {'torch', "
        "'transformers', 'scipy', 'numpy'} & set(sys.modules); sys.exit(str(heavy) if heavy "
        "else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "argv, options",
    [
        (["demo"], ["--new-tokens N", "--score-tokens N", "--calibration FILE_OR_HUB_ID"]),
        ([], ["--install-completion", "generate"]),
        (["eval", "ppl"], ["--windows N"]),
    ],
)
def test_help_of_a_narrow_terminal_names_every_option(argv, options):
    "At 40 columns panels showed --new-to… and --calibr…."
    code, env = (
        "import sys; from turboquant_nb.cli import main; sys.exit(main())",
        os.environ | {"COLUMNS": "40"},
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv, "--help"], capture_output=True, text=True, env=env
    )
    assert (
        done.returncode == 0
        and all(x in done.stdout for x in options)
        and not re.search("--[a-z-]*…", done.stdout)
    ), done.stdout
    assert "\n\nexample:" in done.stdout


def test_a_prompt_that_is_missing_is_said_at_once(tmp_path):
    "torch was imported before, which takes seconds."
    code = (
        "import sys; from turboquant_nb.cli import main; code = main(); sys.exit(9 if 'torch' "
        "in sys.modules else code)"
    )
    for argv in ([], ["--file", str(tmp_path / "none")], ["--prompt", " "]):
        done = subprocess.run(
            [sys.executable, "-c", code, "generate", *argv], capture_output=True, text=True
        )
        assert done.returncode == 2, (argv, done.stderr)


def test_memory_that_is_not_there_is_said_in_a_sentence(call, tiny):
    "It was a line of torch's source and a number of 17 digits."
    refused(
        call("generate", "--model", tiny, "--prompt", "x", "--recent", 10**14, "--quiet"),
        "not enough memory: ",
        " TB were asked for at once",
        code=1,
    )


@pytest.mark.parametrize(
    "argv, words",
    [
        (["dance"], ["dance"]),
        (["demo", "--bogus"], ["--bogus"]),
        (["generate", "--prompt"], ["--prompt"]),
        (["generate", "--prompt", "a", "--file", "b"], ["not allowed with"]),
        (["generate", "--prompt", "a", "-"], ["not allowed with"]),
        (
            ["generate", "--prompt", "a", "--bits", "three"],
            ["--bits", "a number from 1 to 4 such as 3 or 2.5, got 'three'"],
        ),
        (["generate", "--prompt", "a", "--attention", "flash"], ["flash"]),
        (["generate", "--prompt", "a", "--dtype", "int8"], ["int8"]),
        (["demo", "--recipes"], ["--recipes"]),
        (["recipe"], ["RECIPE"]),
    ],
)
def test_usage(call, argv, words):
    refused(call(*argv), *words)


def test_a_wrong_recipe_is_refused_before_torch_is_imported():
    """In every command that takes one, also behind a right one: a slip of the finger is said at
    once, not after the seconds that importing torch takes."""
    commands = [
        "generate --prompt x --recipe",
        "chat --recipe",
        "demo --recipes k3v3",
        "plan --model embedded --recipe k3v3",
        "eval ppl --recipe k3v3",
        "eval ppl --against dense",
        "bench --recipe k3v3",
        "serve nothing --recipe",
        "recipe",
        "web --recipe k3v3",
    ]
    code = (
        "import contextlib, io, sys; from turboquant_nb.cli import main\n"
        f"for line in {commands!r}:\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stderr(said):\n"
        "        code = main([*line.split(), 'k9v9'])\n"
        "    if code != 2 or 'recipe must be one of k4v4' not in said.getvalue() or \"got "
        "'k9v9'\" not in said.getvalue() or 'torch' in sys.modules:\n"
        "        sys.exit(f'{line}: {code} {said.getvalue()}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_names_known_without_torch_are_those_of_the_package():
    from turboquant_nb.cli.eval import OTHERS as OTHERS_HERE
    from turboquant_nb.evaluation.candidates import OTHERS

    assert inputs.PRESETS == tuple(PRESETS) and OTHERS_HERE == tuple(OTHERS)


# ---------------------------------------------------------------- recipe


@pytest.mark.parametrize("name", PRESETS)
def test_recipe_prints_what_can_be_passed_on(call, name):
    code, out, err = call("recipe", name)
    assert code == 0 and Recipe.from_json(out) == preset(name) and "bits per value" in err
    assert call("recipe", out.strip(), "--quiet") == (0, out, "")


def test_recipe_options_and_file(call, tmp_path):
    code, out, _ = call("recipe", "k4v2", "--bits", 3, "--sinks", 1, "--recent", 7)
    assert Recipe.from_json(out) == replace(as_recipe("k4v2", 3), sinks=1, recent=7)
    file = tmp_path / "mine.json"
    file.write_text(out)
    assert call("recipe", file)[1] == out
    got = json.loads(call("recipe", "k4v2", "--json")[1])
    assert (
        got["nominal_bits"] == 3
        and got["bits_with_scale"] == {"64": 3.25, "128": 3.125}
        and got["recipe"]["key"]["bits"] == 4
    )
    assert (
        plan.bits_per_value(Recipe(Spec(bits=2, scale_dtype="float32"), Spec(bits=3)), 16)
        == (2 + 2 + 3 + 1) / 2
    )
    with pytest.raises(ValueError, match="d must be"):
        plan.bits_per_value(preset("k3v3"), 0)


@pytest.mark.parametrize(
    "recipe, nominal, costs, words",
    [
        (
            as_recipe("k3v3", 2.5),
            2.5,
            {"64": 2.75, "128": 2.625},
            "2.5 bits per value nominal, with scale 2.75 at d = 64 and 2.625 at d = 128",
        ),
        (
            Recipe(residual="prod"),
            3,
            {"64": 3.375, "128": 3.1875},
            "3.375 at d = 64 and 3.1875 at d = 128",
        ),  # the keys' second number
        (Recipe(residual="sign"), 3, {"64": 3.25, "128": 3.125}, "3.25 at d = 64"),
        (
            Recipe(Spec((4, 2) * 8), Spec((1,) * 16)),
            2,
            {"16": 3.0},
            "2 bits per value nominal, with scale 3 at d = 16;",
        ),
        (as_recipe("k3v3", 2.3), 2.3, {}, "which neither d = 64 nor d = 128 allows"),
        (Recipe(Spec((4,) * 8), Spec((2,) * 4)), 3, {}, "nominal"),
    ],
)
def test_prices(call, recipe, nominal, costs, words):
    got = json.loads(call("recipe", recipe.to_json(), "--json")[1])
    assert got["nominal_bits"] == pytest.approx(nominal) and got[
        "bits_with_scale"
    ] == costs == plan.bits_by_head_size(recipe)
    assert words in call("recipe", recipe.to_json())[2]


@pytest.mark.parametrize("text, bits", [("3", 3), ("2.5", 2.5), ("3.0", 3), ("3.9", 3.9)])
def test_bits_option(call, text, bits):
    code, out, _ = call("recipe", "k4v2", "--bits", text)
    got = Recipe.from_json(out)
    assert code == 0 and got == as_recipe("k4v2", bits) and type(got.key.bits) is type(bits)


def test_price_is_what_is_stored():
    from turboquant_nb.quant.mixed_precision import make_quantizer

    for recipe in (
        as_recipe("k4v2", 2.5),
        Recipe(residual="prod"),
        Recipe(residual="sign"),
        Recipe(Spec((4, 2) * 16), Spec(1, scale_dtype="float32")),
    ):
        total = 0
        for spec in (recipe.key, recipe.value):
            q = make_quantizer(spec, 32)
            coded = q.encode(torch.ones(32))
            total += sum(q.channel_bits) + 8 * coded.scale.nbytes
            if coded.signs is not None:  # the last bit of each channel, and a second number
                total += coded.signs.numel() + 8 * coded.residual_norm.nbytes
        assert plan.bits_per_value(recipe, 32) == total / 64


@pytest.mark.parametrize(
    "text, words",
    [
        ("k9v9", ["k4v4", "'k9v9'"]),
        ("{", ["recipe: "]),
        ("{}", ["not a recipe", "key"]),
        ('{"key": {"bits": 0}, "value": {}}', ["bits", "got 0"]),
        ('{"key": {"beats": 3}, "value": {}}', ["beats"]),
        ('{"key": {}, "value": {}, "sinks": -1}', ["sinks", "-1"]),
        ("", ["must be one of"]),
        ("x" * 5000, ["recipe"]),
    ],
)
def test_bad_recipes(call, tiny, text, words):
    refused(call("recipe", text), *words)
    refused(call("generate", "--model", tiny, "--prompt", "x", "--recipe", text), *words)
    refused(call("demo", "--model", tiny, "--recipes", "k4v4", text), *words)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--bits", "9"], ["bits", "got 9"]),
        (["--bits", "4.5"], ["bits", "got 4.5"]),
        (["--bits", "nan"], ["bits", "got nan"]),
        (["--bits", "inf"], ["bits", "got inf"]),
        (["--sinks", "-1"], ["sinks", "-1"]),
        (["--recent", "-1"], ["recent", "-1"]),
    ],
)
def test_bad_recipe_options(call, argv, words):
    refused(call("recipe", "k3v3", *argv), *words)


def test_recipe_files_that_cannot_be_read(call, tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "list.json").write_text("[1]")
    refused(call("recipe", tmp_path / "bad.json"), "bad.json")
    refused(call("recipe", tmp_path / "list.json"), "not a recipe")
    refused(call("recipe", tmp_path), "must be one of")


# ---------------------------------------------------------------- generate


def test_generate_text_and_report(call, tiny):
    code, out, err = call(
        "generate", "--model", tiny, "--prompt", sample_text()[:600], "--max-new-tokens", 8
    )
    assert (
        code == 0
        and out.strip()
        and "bits per value" in err
        and "smaller than fp16" in err
        and "Traceback" not in err
    )
    again = call(
        "generate",
        "--model",
        tiny,
        "--prompt",
        sample_text()[:600],
        "--max-new-tokens",
        8,
        "--quiet",
    )
    assert again == (0, out, "")


def test_generate_is_what_the_library_does(call, tiny):
    model, tokenizer = load_model(tiny, progress=False)
    ids = tokenizer(sample_text()[:600], return_tensors="pt").input_ids
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=TurboQuantCache(model, "k4v4"),
            max_new_tokens=8,
            do_sample=False,
        )
        code, out, err = call(
            "generate",
            "--model",
            tiny,
            "--prompt",
            sample_text()[:600],
            "--no-chat",
            "--max-new-tokens",
            8,
            "--recipe",
            "k4v4",
            "--attention",
            attention,
            "--json",
        )
        assert ("faster: --attention turboquant" in err) == (attention == "sdpa") and err.count(
            "--attention sdpa gets"
        ) <= 1
        got = json.loads(out)
        assert code == 0 and got["text"] == tokenizer.decode(
            want[0, ids.shape[1] :], skip_special_tokens=True
        )
        assert (
            got["prompt_tokens"] == ids.shape[1]
            and got["cache"]["tokens"] == want.shape[1] - 1
            and got["cache"]["recipe"] == TurboQuantCache(model, "k4v4").recipe.to_json()
        )


def test_generate_json_is_all_of_stdout(call, tiny):
    code, out, err = call(
        "generate",
        "--model",
        tiny,
        "--prompt",
        "Call me",
        "--max-new-tokens",
        5,
        "--json",
        "--compare",
        "--quiet",
    )
    got = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert {
        "command",
        "version",
        "model",
        "dtype",
        "device",
        "threads",
        "attention",
        "prompt_tokens",
        "new_tokens",
        "text",
        "seconds",
        "cache",
        "compare",
    } == set(got)
    assert (
        got["new_tokens"] <= 5
        and got["compare"]["same_tokens"] <= got["compare"]["new_tokens"]
        and got["cache"]["nbytes"] > 0
    )


def test_generate_sources_agree(call, tiny, tmp_path, monkeypatch):
    text = "Call me Ishmael. Möwe und Wal."
    file = tmp_path / "p.txt"
    file.write_text(text, encoding="utf-8")
    options = [
        "generate",
        "--model",
        tiny,
        "--max-new-tokens",
        4,
        "--quiet",
        "--recipe",
        "k4v4",
    ]
    want = call(*options, "--prompt", text)
    assert want[0] == 0 and call(*options, "--file", file) == want
    for dash in (["-"], ["--file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert call(*options, *dash) == want


def test_generate_chat(call, tiny, plain):
    def tokens(model, *more):
        return json.loads(
            call(
                "generate",
                "--model",
                model,
                "--prompt",
                "Call me",
                "--max-new-tokens",
                1,
                "--json",
                *more,
            )[1]
        )["prompt_tokens"]

    assert tokens(tiny) == tokens(tiny, "--chat") == tokens(tiny, "--no-chat") + 2
    assert tokens(plain) == tokens(plain, "--no-chat")
    refused(
        call("generate", "--model", plain, "--prompt", "x", "--chat", "--quiet"),
        "no chat template",
    )


def test_generate_samples_by_seed_and_leaves_the_generator_alone(call, tiny):
    def text(*more):
        return json.loads(
            call(
                "generate",
                "--model",
                tiny,
                "--prompt",
                "Call me",
                "--max-new-tokens",
                12,
                "--json",
                "--sample",
                *more,
            )[1]
        )["text"]

    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    assert text("--seed", 1) == text("--seed", 1) != text("--seed", 2)
    assert torch.rand(1) == want
    assert text("--seed", 1, "--top-p", 1e-6) == text("--seed", 2, "--top-p", 1e-6)
    assert text("--seed", 1, "--temperature", 0.001) == text(
        "--seed", 2, "--temperature", 0.001
    )


def test_generate_reads_the_prompt_in_chunks(call, tiny, monkeypatch):
    """Tokens are those of a model that is given the chunks by hand; without the option it gets
    the prompt at once."""
    text, seen = "Call me Ishmael. Some years ago, never mind how long precisely.", []
    keep = LlamaForCausalLM.forward
    monkeypatch.setattr(
        LlamaForCausalLM,
        "forward",
        lambda self, input_ids=None, **kw: (
            seen.append(input_ids.shape[1]),
            keep(self, input_ids=input_ids, **kw),
        )[1],
    )
    found = json.loads(
        call(
            "generate",
            "--model",
            tiny,
            "--prompt",
            text,
            "--max-new-tokens",
            6,
            "--prefill-chunk",
            16,
            "--recipe",
            "k2v2",
            "--recent",
            0,
            "--json",
            "--quiet",
        )[1]
    )
    n = found["prompt_tokens"]
    assert seen[: -(-n // 16)] == [16] * (n // 16) + [n % 16] * (n % 16 > 0) and set(
        seen[-(-n // 16) :]
    ) == {1}
    monkeypatch.undo()
    model, tokenizer = load_model(tiny)
    model.set_attn_implementation("turboquant")
    ids, cache = (
        inputs.tokens_of(tokenizer, text),
        TurboQuantCache(model, replace(preset("k2v2"), recent=0)),
    )
    with torch.no_grad():
        for part in ids.split(16, 1):
            logits = model(part, past_key_values=cache).logits
        out = []
        while len(out) < 6:
            out.append(logits[:, -1:].argmax(-1))
            logits = model(out[-1], past_key_values=cache).logits
    assert tokenizer.decode(torch.cat(out, 1)[0], skip_special_tokens=True) == found["text"]
    refused(
        call("generate", "--model", tiny, "--prompt", text, "--prefill-chunk", 0),
        "--prefill-chunk must be at least 1, got 0",
    )


def test_generate_compare(call, tiny):
    code, out, err = call(
        "generate",
        "--model",
        tiny,
        "--prompt",
        sample_text()[:600],
        "--max-new-tokens",
        24,
        "--recipe",
        "k1v1",
        "--sinks",
        0,
        "--recent",
        0,
        "--compare",
        "--quiet",
    )
    assert code == 0 and "An uncompressed cache gives the same first" in out
    code, out, err = call(
        "generate",
        "--model",
        tiny,
        "--prompt",
        sample_text()[:600],
        "--max-new-tokens",
        24,
        "--recent",
        4096,
        "--compare",
        "--quiet",
    )
    assert code == 0 and "An uncompressed cache gives the same 24 tokens." in out


def test_generate_lengths(call, plain):
    long, fits = "whale " * 200, "whale " * 20
    refused(call("generate", "--model", plain, "--prompt", long, "--quiet"), "context is 128")
    refused(
        call("generate", "--model", plain, "--prompt", fits, "--max-length", 10, "--quiet"),
        "--max-length is 10",
    )
    n = json.loads(
        call("generate", "--model", plain, "--prompt", fits, "--max-new-tokens", 1, "--json")[1]
    )["prompt_tokens"]
    code, out, err = call(
        "generate", "--model", plain, "--prompt", fits, "--json", "--max-new-tokens", 500
    )
    assert (
        code == 0
        and json.loads(out)["new_tokens"] <= 128 - n
        and f"only {128 - n} tokens fit" in err
    )
    code, out, err = call(
        "generate",
        "--model",
        plain,
        "--prompt",
        fits,
        "--json",
        "--max-length",
        n + 3,
        "--quiet",
    )
    assert code == 0 and json.loads(out)["new_tokens"] <= 3 and err == ""


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], ["prompt is needed"]),
        (["--prompt", ""], ["empty"]),
        (["--prompt", " \n\t"], ["empty"]),
        (["hello"], ["hello", "--prompt"]),
        (["--prompt", "x", "--max-new-tokens", "0"], ["--max-new-tokens", "got 0"]),
        (["--prompt", "x", "--max-length", "0"], ["--max-length", "got 0"]),
        (["--prompt", "x", "--temperature", "1"], ["--sample"]),
        (["--prompt", "x", "--top-p", "1"], ["--sample"]),
        (["--prompt", "x", "--seed", "1"], ["--sample"]),
        (["--prompt", "x", "--sample", "--temperature", "0"], ["--temperature", "above 0"]),
        (["--prompt", "x", "--sample", "--temperature", "nan"], ["--temperature"]),
        (["--prompt", "x", "--sample", "--top-p", "1.5"], ["--top-p", "1.5"]),
        (["--prompt", "x", "--device", "abacus"], ["abacus"]),
        (["--prompt", "x", "--model", "/no/such/model"], ["/no/such/model"]),
        (["--prompt", "x", "--model", ""], ["--model"]),
        (["--prompt", "x", "--model", __file__], [".gguf"]),
        (["--file", "/no/such/file.txt"], ["/no/such/file.txt", "cannot be read"]),
        (["--file", os.path.dirname(__file__)], ["cannot be read"]),
    ],
)
def test_generate_bad_input(call, tiny, argv, words):
    model = [] if "--model" in argv else ["--model", tiny]
    refused(call("generate", *model, *argv, "--quiet"), *words)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", ["empty"]),
        (b"\n\n", ["empty"]),
        ("Möwe".encode("latin-1"), ["UTF-8", "byte 1"]),
        ("Wal".encode("utf-16"), ["UTF-8"]),
    ],
)
def test_generate_bad_files(call, tiny, tmp_path, monkeypatch, data, words):
    file = tmp_path / "in.txt"
    file.write_bytes(data)
    refused(call("generate", "--model", tiny, "--file", file), "in.txt", *words)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    refused(call("generate", "--model", tiny, "-"), "standard input", *words)


# ---------------------------------------------------------------- what could not be done


def test_a_broken_model_folder(call, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(
        call("generate", "--model", tmp_path, "--prompt", "x", "--quiet"),
        "could not be loaded",
        code=1,
    )
    (tmp_path / "empty").mkdir()
    refused(
        call("generate", "--model", tmp_path / "empty", "--prompt", "x", "--quiet"),
        "config.json",
    )


def test_failures_inside(call, tiny, monkeypatch):
    argv = ["generate", "--model", tiny, "--prompt", "x", "--quiet"]
    for err, code in (
        (KeyboardInterrupt(), 130),
        (RuntimeError("out of\nmemory"), 1),
        (ValueError("x"), 1),
        (MemoryError(), 1),
    ):

        def fail(*args, err=err):
            raise err

        monkeypatch.setattr(answers, "generated", fail)
        if code == 130:
            assert call(*argv) == (130, "", "")
        else:
            refused(call(*argv), str(err).replace("\n", " ") or "MemoryError", code=1)
    with pytest.raises(MemoryError):
        cli.main([*argv, "--debug"])


def test_no_cuda(call, tiny):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    refused(
        call("demo", "--model", tiny, "--device", "cuda", "--quiet"), "no CUDA device", code=1
    )


def test_the_embedded_model_cannot_be_fetched(call, monkeypatch):
    from turboquant_nb.evaluation import models as m

    def fail(*args, **kwargs):
        raise RuntimeError(
            "the embedded model is not available: no network\nNothing was added. What you can "
            "do:\n  use another model:  --model PATH_OR_HUB_ID"
        )

    monkeypatch.setattr(m, "embedded_path", fail)
    code, out, err = call("demo", "--quiet")
    assert (
        code == 1
        and out == ""
        and "\n  use another model:  --model PATH_OR_HUB_ID" in err
        and "Traceback" not in err
    )


def test_a_closed_pipe_is_quiet(tiny):
    code = (
        "from turboquant_nb.cli import main; import sys; sys.exit(main(['generate', '--model', "
        f"{tiny!r}, '--prompt', 'Call me', '--max-new-tokens', '64', '--quiet']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    child.stdout.close()
    assert (child.stderr.read(), child.wait()) == ("", 1)


# ---------------------------------------------------------------- demo

KEYS = {
    "cache",
    "recipe",
    "answer",
    "answer_tokens",
    "answer_same",
    "same_tokens",
    "of_tokens",
    "odds_where_parted",
    "top1_agreement",
    "perplexity",
    "perplexity_change",
    "perplexity_change_se",
    "tokens",
    "nbytes",
    "bits_per_value",
    "ratio_fp16",
    "ratio_fp32",
    "coding_seconds",
    "decode_seconds",
    "tokens_per_second",
}


@pytest.fixture(scope="session")
def demo(tiny):
    "The demonstration on the small model, as JSON."
    from contextlib import redirect_stderr, redirect_stdout

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = cli.main(
            [
                "demo",
                "--model",
                tiny,
                "--new-tokens",
                "12",
                "--score-tokens",
                "64",
                "--json",
                "--quiet",
            ]
        )
    assert code == 0 and err.getvalue() == "" and out.getvalue().count("\n") == 1
    return json.loads(out.getvalue())


def test_demo_json(demo):
    rows = demo["caches"]
    assert [r["cache"] for r in rows] == ["uncompressed", "k4v4", "k3v3", "k2v2"] and all(
        set(r) == KEYS for r in rows
    )
    assert (
        demo["prompt_tokens"] >= 2000
        and demo["prefix_tokens"] >= 2048
        and demo["scored_tokens"] == 64
    )
    first = rows[0]
    assert (
        first["recipe"] is None
        and first["answer_same"]
        and first["top1_agreement"] == 1
        and first["perplexity_change"] == 0
        and first["bits_per_value"] == 32
    )
    assert (
        first["nbytes"] == demo["prompt_tokens"] * 2 * 2 * 32 * 4
        and first["ratio_fp16"] == 0.5
        and first["ratio_fp32"] == 1
    )
    for r in rows[1:]:
        with_mean = preset(r["cache"])  # the model has RoPE
        with_mean = replace(with_mean, key=replace(with_mean.key, center="pre_rope"))
        assert (
            r["recipe"] == json.loads(with_mean.to_json())
            and r["tokens"] == demo["prompt_tokens"]
        )
        assert (
            1 <= r["same_tokens"] <= r["of_tokens"] == first["answer_tokens"]
            and (r["odds_where_parted"] is None) == r["answer_same"]
        )
        assert r["odds_where_parted"] is None or r["odds_where_parted"] >= 1
        assert abs(r["perplexity"] / first["perplexity"] - 1 - r["perplexity_change"]) < 1e-9
        assert abs(r["bits_per_value"] * r["ratio_fp16"] - 16) < 1e-9
    assert first["nbytes"] > max(r["nbytes"] for r in rows[1:])
    assert demo["seen"].endswith("positions of the book.")


def test_demo_numbers_are_those_of_the_library(demo, tiny):
    model, tokenizer = load_model(tiny, progress=False)
    question = demos.demo_question(tokenizer)
    ids, end = question.ids, question.end
    assert tokenizer.decode(ids[0, :end]).endswith(
        sample_text().split("CHAPTER 2.")[0].strip()[-40:]
    )
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model, "k3v3")
    with torch.no_grad():
        out = model(ids, past_key_values=cache, logits_to_keep=1)
    answer = [int(out.logits[0, -1].argmax())]
    assert cache.report()["nbytes"] == demo["caches"][2]["nbytes"]
    with torch.no_grad():
        while len(answer) < 12 and answer[-1] != 1:
            answer.append(
                int(
                    model(torch.tensor([answer[-1:]]), past_key_values=cache)
                    .logits[0, -1]
                    .argmax()
                )
            )
    assert (
        tokenizer.decode(answer, skip_special_tokens=True).strip()
        == demo["caches"][2]["answer"]
    )


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_fed_states_equal_a_prefill_through_the_cache(tiny, attention):
    model, tokenizer = load_model(tiny, progress=False)
    ids = tokenizer(sample_text()[:2500], return_tensors="pt").input_ids
    prompt = demos.read_once(model, ids)
    model.set_attn_implementation(attention)
    for name in ("k4v4", "k1v1"):
        through = TurboQuantCache(model, name)
        with torch.no_grad():
            logits = model(ids, past_key_values=through, logits_to_keep=1).logits
        fed = demos.filled(model, prompt, name)
        assert int(logits[0, -1].argmax()) == demos.first_token(prompt)
        for a, b in zip(fed.layers, through.layers):
            (x, h), (y, g) = a.store.state(), b.store.state()
            assert h == g and x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def test_demo_table(call, tiny):
    code, out, err = call(
        "demo",
        "--model",
        tiny,
        "--new-tokens",
        4,
        "--score-tokens",
        16,
        "--recipes",
        "k4v4",
        Recipe().to_json(),
    )
    assert code == 0 and "reading" in err and "answering, k4v4" in err
    lines = out.splitlines()
    head = next(
        i for i, line in enumerate(lines) if line.split()[:2] == ["uncompressed", "k4v4"]
    )
    table = {
        line[:24].strip(): line[24:].split()
        for line in lines[head + 1 : head + 1 + len(demos._LINES)]
    }
    assert lines[head].split() == ["uncompressed", "k4v4", "recipe", "2"] and set(table) == {
        name.strip() for name in demos._LINES
    }
    assert (
        len(table["bytes held"]) == len(table["perplexity"]) == 3
        and len(table["change"]) == 2
        and table["same next token"][0] == "100.0%"
    )
    assert (
        max(map(len, lines[head:])) < 96
        and "wall time" in " ".join(out.split())
        and " ".join(out.split()).endswith("positions of the book.")
    )


def test_demo_quick_leaves_what_was_typed(call, tiny):
    for typed, scored in ([], 16), (["--score-tokens", 20], 20):
        code, out, err = call("demo", "--model", tiny, "--quick", "--json", "--quiet", *typed)
        found = json.loads(out)
        assert (
            code == 0
            and found["scored_tokens"] == scored
            and [r["cache"] for r in found["caches"]] == ["uncompressed", "k3v3"]
        )


def test_demo_on_sliding_windows(call, tmp_path):
    torch.manual_seed(2)
    folder = save(
        tmp_path,
        MistralForCausalLM(
            MistralConfig(**SIZE, max_position_embeddings=8192, sliding_window=100)
        ),
    )
    code, out, err = call(
        "demo",
        "--model",
        folder,
        "--new-tokens",
        6,
        "--score-tokens",
        32,
        "--recipes",
        "k4v4",
        "--json",
        "--quiet",
    )
    assert code == 0, err
    assert json.loads(out)["caches"][1]["top1_agreement"] > 0.5


@pytest.mark.parametrize(
    "argv, words, code",
    [
        (["--new-tokens", "0"], ["--new-tokens"], 2),
        (["--score-tokens", "1"], ["--score-tokens"], 2),
        (["--score-tokens", "100000"], ["--score-tokens", "at most"], 2),
        (["--new-tokens", "100000"], ["context"], 1),
    ],
)
def test_demo_bad_input(call, tiny, argv, words, code):
    refused(call("demo", "--model", tiny, "--quiet", *argv), *words, code=code)


def test_demo_model_too_short(call, plain):
    refused(call("demo", "--model", plain, "--quiet"), "reads 128", code=1)


def test_seen():
    def row(name, same, nbytes, k=3):
        return dict(
            cache=name,
            answer_same=same,
            nbytes=nbytes,
            bits_per_value=3.0,
            ratio_fp16=5.0,
            top1_agreement=0.5,
            same_tokens=k,
            of_tokens=9,
            odds_where_parted=None if same else 1.25,
        )

    base = row("uncompressed", True, 100)
    assert demos.what_was_seen(
        [base, row("a", True, 50), row("b", True, 40), row("c", False, 30)], 7
    ).startswith("The smallest cache whose answer is unchanged is b. b holds 3.00 bits")
    assert (
        "; b keeps to it for 5 of 9 tokens, up to where the best token of the uncompressed "
        "cache is 1.25 times"
        in demos.what_was_seen(
            [base, row("a", False, 50, 5), row("b", False, 40, 5), row("c", False, 30, 4)], 7
        )
    )


def test_change_and_same_start():
    loss = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert demos.ppl_change(loss, loss) == demos.Change(0, 0)
    assert (
        answers.common_prefix([1, 2], [1, 2, 3]) == 2
        and answers.common_prefix([1], [2]) == 0
        and answers.common_prefix([], [1]) == 0
    )
    change = demos.ppl_change(loss + torch.tensor([0.1, 0.2, 0.3]), loss)
    rel, se = change.relative, change.stderr
    assert abs(rel - (torch.tensor(0.2).exp() - 1)) < 1e-6 and abs(se - 0.1 / 3**0.5) < 1e-6
    for bad in (loss[:1], loss[None]):
        with pytest.raises(ValueError, match="loss and reference"):
            demos.ppl_change(bad, bad)


SHORT = ["--windows", "2", "--length", "64", "--quiet"]


@pytest.mark.parametrize("measure", ["ppl", "logits", "attention"])
def test_eval_measures_windows(call, plain, tmp_path, measure):
    "Rows on standard output, the same rows with their origin in the file, a picture."
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    code, said, err = call(
        "eval",
        measure,
        "--model",
        plain,
        *SHORT,
        "--recipe",
        "k4v4",
        '{"key": {"bits": 2}, "value": {"bits": 1}, "sinks": 0, "recent": 0}',
        "--against",
        "dense",
        "--out",
        out,
        "--plot",
        picture,
    )
    assert code == 0 and err == ""
    record = json.loads(out.read_text())
    layers = measure == "attention"
    caches = ["k4v4", "recipe 2", "dense"]
    want = ["uncompressed"] * (measure == "ppl") + [
        x for x in caches for _ in range(1 + layers)
    ]
    assert [r["cache"] for r in record["rows"]] == want
    assert (
        record["gate"]["passed"]
        and record["data"]["n"] == 2
        and record["command"].startswith(f"turboquant eval {measure}")
    )
    assert len(said.splitlines()) == len(want) + 1 and picture.stat().st_size > 3000
    key = {"ppl": "percent", "logits": "kl", "attention": "error"}[measure]
    value = {(r["cache"], r.get("layer", 0)): abs(r[key]) for r in record["rows"]}
    assert value["dense", 0] < value["k4v4", 0] < value["recipe 2", 0]


def test_eval_needle_and_json(call, plain):
    code, said, _ = call(
        "eval",
        "needle",
        "--model",
        plain,
        "--lengths",
        "64",
        "--depths",
        "0",
        "1",
        "--trials",
        "2",
        "--recipe",
        "k4v4",
        "--quiet",
        "--json",
    )
    record = json.loads(said)
    assert code == 0 and record["experiment"] == "eval needle"
    assert [(r["cache"], r["depth"]) for r in record["rows"]] == [
        ("uncompressed", 0.0),
        ("uncompressed", 1.0),
        ("k4v4", 0.0),
        ("k4v4", 1.0),
    ]


def test_eval_takes_texts_and_a_recipe_per_layer(call, plain, tmp_path):
    for x in "ab":
        (tmp_path / x).write_text(f"{x} few words of text, over and over. " * 60)
    per_layer = json.dumps([json.loads(preset(n).to_json()) for n in ("k4v4", "k2v2")])
    code, said, err = call(
        "eval",
        "ppl",
        "--model",
        plain,
        *SHORT,
        "--text",
        tmp_path / "a",
        tmp_path / "b",
        "--recipe",
        per_layer,
        "--protocol",
        "stress",
        "--json",
    )
    record = json.loads(said)
    assert code == 0 and record["data"]["id"] == "a, b"
    assert record["rows"][1]["cache"] == "recipe 1" and len(record["rows"][1]["recipe"]) == 2


def test_eval_tells_its_progress_once(call, plain):
    _, _, err = call("eval", "ppl", "--model", plain, *SHORT[:-1], "--recipe", "k4v4")
    assert "turboquant: measuring 1 caches, ppl" in err


def test_eval_outside_a_repository_names_the_release(call, plain, monkeypatch):
    from turboquant_nb import results

    monkeypatch.setattr(results, "_git", lambda *a: None)
    monkeypatch.delenv("TURBOQUANT_COMMIT", raising=False)
    _, said, _ = call("eval", "ppl", "--model", plain, *SHORT, "--recipe", "k4v4", "--json")
    assert (
        json.loads(said)["commit"] == f"release {cli.version()}"
        and "TURBOQUANT_COMMIT" not in os.environ
    )


@pytest.mark.parametrize("dirty", [True, False])
def test_eval_of_uncommitted_code_is_marked_as_a_draft(
    call, plain, monkeypatch, tmp_path, dirty
):
    from turboquant_nb import results

    monkeypatch.setenv("TURBOQUANT_COMMIT", "0" * 40)
    monkeypatch.setenv("TURBOQUANT_DIRTY", str(int(dirty)))
    code, _, _ = call(
        "eval",
        "ppl",
        "--model",
        plain,
        *SHORT,
        "--recipe",
        "k4v4",
        "--out",
        tmp_path / "r.json",
    )
    assert (
        code == 0
        and results.load(tmp_path / "r.json", draft=dirty).get("draft", False) == dirty
    )


@pytest.mark.parametrize(
    "argv, says",
    [
        (("ppl", "--windows", "1"), "--windows must be at least 2"),
        (("ppl", "--length", "64", "--prompt", "60"), "--prompt from 16"),
        (("logits", "--recipe", "k9v9"), "--against also takes dense, fp8"),
        (("logits", "--recipe", "[{]"), "recipe: Expecting"),
        (
            ("ppl", "--recipe", "[3]"),
            "one JSON object for each layer, got a list of 1 with [3]",
        ),
        (("ppl", "--batch", "0"), "--batch must be at least 1, got 0"),
        (("ppl", "--out", "a.png", "--plot", "a.png"), "two files, got a.png for both"),
        (("ppl", "--recipe", "[]"), "got a list of 0"),
        (("attention", "--text", "missing.txt"), "missing.txt: No such file"),
        (("ppl", "--windows", "9999"), "it must be longer"),
        (("ppl", "--length", "256"), "this model reads 128 tokens; 256 were asked for"),
        (("needle", "--depths", "1.5"), "--depths from 0 to 1"),
        (("ppl", "--out", "no/such/folder/r.json"), "there is no such folder"),
    ],
)
def test_eval_says_what_is_wrong_in_one_line(call, plain, argv, says):
    short = ["--length", "64"] if "--length" not in argv and argv[0] != "needle" else []
    code, out, err = call("eval", *argv, *short, "--model", plain, "--quiet")
    assert code == 2 and out == "" and says in err and err.count("\n") == 1


def test_eval_of_a_cache_that_is_not_installed(call, plain, monkeypatch):
    from turboquant_nb.evaluation import candidates

    monkeypatch.setattr(candidates, "find_spec", lambda name: None)
    code, _, err = call("eval", "ppl", "--model", plain, *SHORT, "--against", "quanto4")
    assert code == 1 and "pip install optimum-quanto" in err


def test_protein_commands_end_like_the_others(call, tmp_path, monkeypatch):
    "A bad option and Ctrl-C end like those of the other commands."
    code, said, _ = call("--help")
    assert code == 0 and "calibrate" in said and "variants" in said
    code, said, _ = call("variants", "--help")
    assert code == 0 and "--fasta" in said
    refused(call("variants", "--nothing"), "--nothing")
    from turboquant_nb import esm

    def stop(path):
        assert path == "x"
        raise KeyboardInterrupt

    monkeypatch.setattr(esm, "read_fasta", stop)
    assert call("calibrate", "--fasta", "x", "--model", "m", "--out", tmp_path / "c.st") == (
        130,
        "",
        "",
    )
    assert list(tmp_path.iterdir()) == []


def test_calibrate_writes_maps_that_the_other_commands_take(call, plain, tmp_path):
    """One file for demo, generate and eval; what is missing or of another model is said in one
    line."""
    file = tmp_path / "maps.safetensors"
    code, out, err = call(
        "calibrate",
        "--model",
        plain,
        "--windows",
        2,
        "--length",
        64,
        "--out",
        file,
        "--json",
        "--quiet",
    )
    about = json.loads(out)
    assert (
        code == 0
        and err == ""
        and about["tokens"] == 2 * 60
        and len(about["gain"]) == about["about"]["layers"]
        and file.stat().st_size > 0
    )
    shared = ["--model", plain, "--quiet", "--calibration", file]
    code, out, _ = call(
        "eval", "ppl", *SHORT, *shared, "--recipe", "k3v3", "--against", "k3v3", "--json"
    )
    rows = json.loads(out)["rows"]
    names = [r["cache"] for r in rows]
    assert code == 0 and "k3v3 + transforms" in names and "k3v3" in names
    assert "map-" in json.dumps(
        rows[names.index("k3v3 + transforms")]["recipe"]
    ) and "map-" not in json.dumps(rows[names.index("k3v3")]["recipe"])
    code, out, _ = call("generate", "--prompt", "a b", "--max-new-tokens", 3, *shared, "--json")
    assert code == 0 and "map-" in json.dumps(json.loads(out)["cache"]["recipe"])
    for wrong, says in (
        (["--calibration", tmp_path / "none"], "no such file or folder"),
        (["--calibration", __file__], "is not a readable calibration"),
    ):
        code, out, err = call("generate", "--prompt", "a", "--model", plain, "--quiet", *wrong)
        assert code == 2 and out == "" and says in err and err.count("\n") == 1
    for argv, says in (
        (["--out", tmp_path / "no" / "f"], "there is no such folder"),
        (["--out", file, "--windows", 0], "--windows must be positive"),
        (["--out", file, "--length", 3], "ids must be"),
    ):
        code, out, err = call("calibrate", "--model", plain, "--quiet", *argv)
        assert code == 2 and out == "" and says in err and err.count("\n") == 1


def test_layers_are_measured_and_a_budget_is_spent(call, plain, tmp_path):
    "With key transforms and without; a budget needs layers that were measured."
    shared = ["--model", plain, "--quiet", "--json"]
    for more, maps in ((["--no-maps"], False), ([], True)):
        file = tmp_path / f"layers{maps}.safetensors"
        code, out, _ = call(
            "calibrate",
            *shared,
            "--windows",
            1,
            "--length",
            64,
            "--out",
            file,
            "--layers",
            *more,
        )
        about = json.loads(out)
        assert (
            code == 0 and about["losses"]["bits"] == [2, 3, 4] and bool(about["nbytes"]) == maps
        )
        assert (
            len(about["losses"]["key"])
            == len(about["losses"]["value"])
            == about["about"]["layers"]
        )
        with_file = [*shared, "--calibration", file, "--budget", 2.5]
        code, out, _ = call("generate", "--prompt", "a b", "--max-new-tokens", 3, *with_file)
        said = json.loads(out)["cache"]["recipe"]
        recipes = (
            [json.loads(x) for x in said] if isinstance(said, list) else [said]
        )  # one that all layers share
        bits = [r[side]["bits"] for r in recipes for side in ("key", "value")]
        assert (
            code == 0
            and sum(bits) == 2.5 * len(bits)
            and ("map-" in json.dumps(recipes)) == maps
        )
        code, out, _ = call("eval", "ppl", *SHORT, *with_file, "--recipe", "k2v2")
        names = [r["cache"] for r in json.loads(out)["rows"]]
        assert (
            code == 0
            and ("k2v2 + transforms at 2.5 bits" if maps else "k2v2 at 2.5 bits") in names
        )
    unmeasured = tmp_path / "maps.safetensors"
    assert (
        call("calibrate", *shared, "--windows", 1, "--length", 64, "--out", unmeasured)[0] == 0
    )
    for argv, says in (
        (["--budget", 2.5], "--budget needs --calibration"),
        (["--calibration", file, "--budget", 5], "budget must be from 2 to 4"),
        (
            ["--calibration", unmeasured, "--budget", 2.5],
            "a budget needs layers that were measured",
        ),
    ):
        code, out, err = call("generate", "--prompt", "a", "--model", plain, "--quiet", *argv)
        assert code == 2 and out == "" and says in err and err.count("\n") == 1
    code, out, err = call("calibrate", *shared, "--out", file, "--no-maps")
    assert code == 2 and out == "" and "--no-transforms leaves nothing to find" in err


@pytest.mark.parametrize("command", [["calibrate", "--out", "c.st"], ["fold", "--out", "new"]])
@pytest.mark.parametrize(
    "text, before",
    [
        ("Call me Ishmael.", True),
        ("Call me Ishmael. " * 60, True),
        ("Call me Ishmael. " * 60, False),
    ],
)
def test_a_short_text_is_refused_before_the_weights(
    call, plain, tmp_path, monkeypatch, command, text, before
):
    """By its bytes, by its tokens, and where the tokenizer cannot be read alone, once the model
    is there; in the same words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text(text)
    if before:
        monkeypatch.setattr(
            "turboquant_nb.cli.calibrate.load", lambda *_: pytest.fail("the weights were read")
        )
    else:
        monkeypatch.setattr("turboquant_nb.cli.calibrate.tokenizer_of", lambda _: None)
    length = 128 if len(text) < 100 else 100_000
    if len(text) > 100:
        monkeypatch.setattr(
            "turboquant_nb.cli.calibrate.config_of",
            lambda _: LlamaConfig(**SIZE, max_position_embeddings=100_000),
        )
        monkeypatch.setattr("turboquant_nb.cli.calibrate.context_length", lambda _: 100_000)
        length = len(text) - 1
    result = call(
        *command, "--model", plain, "--text", "short.txt", "--length", length, "--quiet"
    )
    refused(
        result, f"--text: a window of {length:,} tokens was asked for, and the text gives none"
    )
    assert {x.name for x in tmp_path.iterdir()} == {"short.txt"}


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "--prompt", "x"],
        ["demo"],
        ["eval", "ppl"],
        ["fold", "--out", "x"],
        ["calibrate", "--out", "x.st"],
        ["chat"],
        ["variants", "--model", "x", "--fasta", "y"],
    ],
)
def test_a_device_that_there_is_not_is_refused_first(call, monkeypatch, argv):
    for name in ("turboquant_nb.cli.inputs.config_of", "turboquant_nb.cli.inputs.check_name"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("the model was looked at"))
    refused(call(*argv, "--device", "abacus"), "--device abacus: not a device of torch")


def test_a_wrong_device_costs_no_import_of_transformers():
    code = (
        "import sys; from turboquant_nb.cli import main; c = main(['generate', '--prompt', "
        "'x', '--device', 'abacus']); sys.exit('transformers was imported' if 'transformers' "
        "in sys.modules else c)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "abacus" in done.stderr


# ---------------------------------------------------------------- the conventions of all
# commands

MODEL, SHARED = "--model --dtype --device", "--json --quiet -q --debug --help -h"
CHANGES = "--bits --sinks --recent --calibration --budget"
EVAL = f"--recipe --against {CHANGES} --batch --out --plot {MODEL} {SHARED}"
OPTIONS = {  # every option that a command line could have before there was typer
    "demo": (
        "--recipes --new-tokens --score-tokens --quick --calibration --budget --attention "
        f"{MODEL} {SHARED}"
    ),
    "generate": (
        f"- --prompt --file --recipe {CHANGES} --max-new-tokens --max-length --prefill-chunk "
        "--sample --temperature --top-p --seed --chat --no-chat --compare --attention "
        f"--offload --gpu-memory {MODEL} {SHARED}"
    ),
    "eval ppl": f"--text --windows --length --prompt --protocol {EVAL}",
    "eval logits": f"--text --windows --length --prompt --protocol {EVAL}",
    "eval attention": f"--text --windows --length --prompt {EVAL}",
    "eval needle": f"--lengths --depths --trials --seed {EVAL}",
    "fold": f"--out --text --windows --length {MODEL} {SHARED}",
    "calibrate": (
        "--out --text --windows --length --layers --no-transforms --no-maps --fasta --recipe "
        f"--held-out {MODEL} {SHARED}"
    ),
    "recipe": f"RECIPE --bits --sinks --recent {SHARED}",
    "variants": f"--fasta --mutations --code --method --model --device {SHARED}",
    "plan": (
        "--model --context --batch --gpu --weights --bits-of-weights --reserve --recipe "
        f"{SHARED}"
    ),
    "chat": (
        f"--recipe {CHANGES} --system --load --max-new-tokens --max-length --prefill-chunk "
        f"--sample --temperature --top-p --seed --chat --no-chat --attention {MODEL} {SHARED}"
    ),
    "bench": f"--recipe --tokens --new --rounds --only --threads --out --plot {MODEL} {SHARED}",
    "embed": f"--out --of --fasta --code --batch --model --device {SHARED}",
    "contacts": f"--above --apart --fasta --code --batch --out --model --device {SHARED}",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_there_and_shown(call, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = call(*command.split(), "--help")
    words = out.replace("│", " ").replace(",", " ").split()
    assert code == 0 and err == "" and set(OPTIONS[command].split()) <= set(words)
    assert f"turboquant {command}" in out.split("example:")[1]


def test_commands_are_listed_by_panel(call):
    out = call("-h")[1]
    places = [
        out.index(f" {word} ")
        for word in (
            "Use it",
            "demo",
            "generate",
            "Measure it",
            "eval",
            "Calibrate",
            "calibrate",
            "fold",
            "Proteins",
            "variants",
            "Recipes",
        )
    ]
    assert places == sorted(places) and all(
        x in out for x in ("--version", "--install-completion", "--show-completion")
    )


KNOWN = {
    "--recipe": conventions.Takes(True, True),
    "--bits": conventions.Takes(True),
    "--json": conventions.Takes(False),
}


@pytest.mark.parametrize(
    "typed, want",
    [
        ("--recipe a b --json c", "--recipe a --recipe b --json c"),
        ("--recipe a --recipe b", "--recipe a --recipe b"),
        ("--recipe=a b", "--recipe=a b"),
        ("--bits 3 4", "--bits 3 4"),
        ("--recipe a -- b", "--recipe a -- b"),
        ("--recipe 0 -1 -.5 - x", "--recipe 0 --recipe -1 --recipe -.5 --recipe - --recipe x"),
        ("--recipe a -q", "--recipe a -q"),
        ("--bits -1", "--bits -1"),
        ("--recipe a --bits=3 b", "--recipe a --bits=3 b"),
        ("", ""),
    ],
)
def test_several_values(typed, want):
    assert conventions.spread(typed.split(), KNOWN) == want.split()


@pytest.mark.parametrize(
    "argv, words",
    [
        (["generate", "--prompt", "--json"], ["--prompt", "got the option --json"]),
        (["fold", "--out"], ["--out", "got nothing"]),
        (["demo", "--new-tokens", "ten"], ["whole number", "'ten'"]),
        (["eval", "needle", "--depths", "0", "half"], ["expected a number", "'half'"]),
        (["recipe", "k3v3", "x"], ["unexpected extra argument", "x"]),
        (["eval", "ppl", "--protocol", "all"], ["'all'", "'decode', 'stress', 'chunk'"]),
        (["variants", "--fasta", "x"], ["--model"]),
        (["demo", "--quiet=yes"], ["--quiet"]),
    ],
)
def test_usage_says_what_came(call, argv, words):
    refused(call(*argv), *words, "--help")


def test_typer_is_not_asked_to_draw_errors(tiny):
    "From a shell, with colours forced: one line and no box."
    code = "import sys; from turboquant_nb.cli import main; sys.exit(main())"
    env = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "60"}
    for argv in (["dance"], ["recipe", "k9v9"], ["demo", "--bogus"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env
        )
        refused((done.returncode, done.stdout, done.stderr))
        assert "\x1b" not in done.stderr and "│" not in done.stderr


def test_completion_is_quick_and_needs_no_torch():
    "A shell asks; the answer loads nothing heavy, also behind an option of several values."
    code = (
        "import sys; from turboquant_nb.cli import main; code = main([]); heavy = {'torch', "
        "'transformers', 'numpy'} & set(sys.modules); sys.exit(code or sorted(heavy) or 0)"
    )
    for line, want in (
        ("turboquant rec", ["recipe"]),
        ("turboquant eval ", ["attention", "logits", "needle", "ppl"]),
        ("turboquant eval ppl --recipe k3v3 k4v4 --ag", ["--against"]),
        ("turboquant generate --attention s", ["sdpa"]),
        ("turboquant demo --recipes --js", ["--json"]),
    ):
        env = os.environ | {
            "_TURBOQUANT_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env
        )
        assert (done.returncode, done.stdout.split(), done.stderr) == (0, want, "")


def processor_seconds(code):
    "Time of the processor, which other programs do not change; the best of three."
    probe = f"import sys, time\n{code}\nprint(time.process_time(), file=sys.stderr)"
    runs = [
        subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
        for _ in range(3)
    ]
    return min(float(done.stderr.split()[-1]) for done in runs)


def test_help_answers_within_half_a_second():
    took = processor_seconds(
        "from turboquant_nb.cli import main; main(['--help'])"
    ) - processor_seconds("pass")
    assert took < 0.5


# ---------------------------------------------------------------- what is printed where


class Terminal(io.StringIO):
    isatty = lambda self: True


def test_tables_on_a_terminal_and_elsewhere(monkeypatch, capsys):
    rows = [["name", "bits"], ["k3v3", "3.25"], ["a[b]", "10"]]
    show_table(rows)
    show_table(rows, tabs=True)
    assert (
        capsys.readouterr().out
        == "name   bits\nk3v3   3.25\na[b]     10\nk3v3\t3.25\na[b]\t10\n"
    )
    monkeypatch.setattr(sys, "stdout", Terminal())
    show_table(rows, tabs=True)
    assert "│ a[b] │   10 │" in sys.stdout.getvalue() and "name" in sys.stdout.getvalue()


def test_progress_is_a_bar_on_a_terminal_alone(monkeypatch):
    for where, bar in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", where)
        with Stage("reading [x]", 2, True) as stage:
            stage.tick()
            stage.at(2, 2)
        assert (
            ("\x1b" in where.getvalue()) == bar
            and "reading [x]" in where.getvalue()
            and stage.left == 0
        )
        before = where.getvalue()
        with Stage("quiet", 2, False) as stage:
            stage.tick()
        assert where.getvalue() == before


def test_eval_on_a_terminal_draws_its_table(call, plain, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert cli.main(["eval", "attention", "--model", plain, *SHORT, "--recipe", "k4v4"]) == 0
    assert "│ k4v4  │     0 │" in sys.stdout.getvalue()


# ---------------------------------------------------------------- files

COMMANDS = {
    "eval": ["eval", "ppl", "--model", "/no/such/model"],
    "plot": ["eval", "ppl", "--model", "/no/such/model"],
    "calibrate": ["calibrate", "--model", "/no/such/model"],
    "fasta": ["calibrate", "--fasta", "none.fasta", "--model", "/no/such/model"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "target, words",
    [
        ("folder.png", "got a folder"),
        ("/dev/null", "got a device"),
        ("pipe.png", "got a device, a pipe"),
        ("no/r.png", "no such folder"),
        ("/proc/r.png", "cannot be written"),
        ("circle.png", "circle.png"),
    ],
)
def test_targets_are_refused_before_the_work(
    call, tmp_path, monkeypatch, command, target, words
):
    """The model does not exist: a message about it would mean that the target was not looked at
    first."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder.png")
    os.mkfifo("pipe.png")
    os.symlink("circle.png", "circle.png")
    if target == "/proc/r.png" and not os.path.isdir("/proc"):
        pytest.skip("there is no /proc")
    option = "--plot" if command == "plot" else "--out"
    refused(call(*COMMANDS[command], option, target), option, words)
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "circle.png",
        "folder.png",
        "pipe.png",
    ]


def test_an_unwritable_folder_is_refused(call, tmp_path, monkeypatch):
    def no(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(output.tempfile, "mkdtemp", no)
    for argv in (
        ["calibrate", "--out", tmp_path / "c.st"],
        ["fold", "--out", tmp_path / "a" / "b"],
        ["eval", "ppl", "--out", tmp_path / "r.json"],
    ):
        refused(call(*argv), "cannot be written (Permission denied)")


def test_a_picture_of_an_unknown_kind_is_refused_first(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(
        call("eval", "ppl", "--model", "/no/such/model", "--plot", "p.xyz"),
        "--plot p.xyz",
        ".png",
        "got 'p.xyz'",
    )


def test_the_table_comes_before_the_picture(call, plain, tmp_path, monkeypatch):
    "A picture that cannot be drawn costs the picture and nothing else."
    from turboquant_nb.evaluation import tasks

    def fail(*args):
        raise RuntimeError("no ink")

    monkeypatch.setattr(tasks, "plot", fail)
    code, out, err = call(
        "eval",
        "attention",
        "--model",
        plain,
        *SHORT,
        "--recipe",
        "k4v4",
        "--out",
        tmp_path / "r.json",
        "--plot",
        tmp_path / "r.png",
    )
    assert (
        code == 1
        and out.startswith("cache")
        and len(out.splitlines()) == 3
        and err == "turboquant eval: no ink\n"
    )
    assert [x.name for x in tmp_path.iterdir()] == ["r.json"] and json.loads(
        (tmp_path / "r.json").read_text()
    )["rows"]


def test_a_picture_without_an_ending_is_a_png(call, plain, tmp_path):
    assert (
        call(
            "eval",
            "attention",
            "--model",
            plain,
            *SHORT,
            "--recipe",
            "k4v4",
            "--plot",
            tmp_path / "r",
        )[0]
        == 0
    )
    assert (tmp_path / "r.png").read_bytes()[1:4] == b"PNG" and len(
        list(tmp_path.iterdir())
    ) == 1


def test_files_are_written_whole_through_links_with_the_mode_of_the_umask(
    call, plain, tmp_path
):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "r.json")
    ask = ["eval", "attention", "--model", plain, *SHORT, "--recipe", "k4v4"]
    before = os.umask(0o027)
    try:
        for _ in range(2):  # a new file, then one that is there already
            assert call(*ask, "--out", tmp_path / "link.json")[0] == 0
            assert (tmp_path / "link.json").is_symlink() and (
                tmp_path / "there" / "r.json"
            ).stat().st_mode & 0o777 == 0o640
        assert (
            call(
                "calibrate",
                "--model",
                plain,
                "--windows",
                1,
                "--length",
                64,
                "--quiet",
                "--out",
                tmp_path / "c.st",
            )[0]
            == 0
        )
        assert (tmp_path / "c.st").stat().st_mode & 0o777 == 0o640
        assert (
            call(
                "fold",
                "--model",
                plain,
                "--windows",
                1,
                "--length",
                64,
                "--quiet",
                "--out",
                tmp_path / "folded",
            )[0]
            == 0
        )
        assert {x.stat().st_mode & 0o777 for x in (tmp_path / "folded").iterdir()} == {0o640}
    finally:
        os.umask(before)
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "c.st",
        "folded",
        "link.json",
        "there",
    ] and [x.name for x in (tmp_path / "there").iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    "error, code", [(KeyboardInterrupt(), 130), (RuntimeError("disk full"), 1)]
)
def test_what_stops_while_it_writes_leaves_nothing(
    call, plain, tmp_path, monkeypatch, error, code
):
    from turboquant_nb import results
    from turboquant_nb.calibration import fold
    from turboquant_nb.quant import calibration

    def stop(*args, **kwargs):
        path = next(x for x in args if isinstance(x, os.PathLike))
        path.with_suffix(".part").write_text("half")
        raise error

    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(results, "save", stop)
    monkeypatch.setattr(calibration, "save_calibration", stop)
    monkeypatch.setattr(fold, "save_fold", stop)
    small = ["--windows", 2, "--length", 64, "--quiet", "--model", plain]
    assert (
        call("eval", "attention", *small, "--recipe", "k4v4", "--out", tmp_path / "old")[0]
        == code
    )
    assert call("calibrate", *small, "--out", tmp_path / "old")[0] == code
    assert call("fold", *small, "--out", tmp_path / "a" / "folded")[0] == code
    assert [x.name for x in tmp_path.iterdir()] == ["old"] and (
        tmp_path / "old"
    ).read_text() == "old"


def test_a_target_that_has_changed_is_not_replaced(tmp_path):
    path = output.target_file(str(tmp_path / "r.json"), "--out")
    with pytest.raises(OSError, match="it was not replaced"):
        with output.writing(path) as new:
            new.write_text("rows")
            os.mkfifo(path)
    assert [x.name for x in tmp_path.iterdir()] == ["r.json"] and not path.is_file()


def test_fold_writes_new_and_empty_folders(call, plain, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "a/new/one"):
        code, out, err = call(
            "fold",
            "--model",
            plain,
            "--windows",
            1,
            "--length",
            64,
            "--out",
            tmp_path / name,
            "--json",
            "--quiet",
        )
        about = json.loads(out)
        assert (
            code == 0
            and about["out"] == str(tmp_path / name)
            and {"moved", "channels", "tokens", "version"} <= set(about)
        )
        assert {"config.json", "model.safetensors", "fold.safetensors", "tokenizer.json"} <= {
            x.name for x in (tmp_path / name).iterdir()
        }
    refused(call("fold", "--out", tmp_path / "empty"), "it is not an empty folder")


# ---------------------------------------------------------------- proteins


def test_proteins(call, esm2, tmp_path):
    """A code is fitted by `calibrate --fasta`, wherever that option stands, and `variants`
    takes it."""
    common = ["--model", esm2 / "model", "--device", "cpu"]
    fit = ["calibrate", *common, "--recipe", "water2", "--held-out", esm2 / "one.fasta"]
    code, out, err = call(*fit, "--out", tmp_path / "c.st", "--fasta", esm2 / "many.fasta")
    assert (
        code == 0
        and out.startswith(f"{tmp_path / 'c.st'}: ")
        and "bits per value" in out
        and "10 sequences" in out
        and "reading 10 sequences twice" in err
    )
    code, out, err = call(
        *fit, "--out", tmp_path / "d.st", f"--fasta={esm2 / 'many.fasta'}", "--json", "--quiet"
    )
    assert (
        code == 0
        and json.loads(out)["sequences"] == 10
        and json.loads(out)["bits_per_value"] > 2
        and out.count("\n") == 1
    )
    assert (tmp_path / "c.st").read_bytes() == (tmp_path / "d.st").read_bytes() and len(
        list(tmp_path.iterdir())
    ) == 2
    ask = [
        "variants",
        *common,
        "--fasta",
        esm2 / "one.fasta",
        "--code",
        tmp_path / "c.st",
        "--quiet",
    ]
    code, out, _ = call(*ask)
    rows = [x.split("\t") for x in out.splitlines()]
    assert code == 0 and len(rows) == 19 * 14 and rows[0][0] == "mine"
    found = json.loads(call(*ask, "--json")[1])
    table = found["variants"]
    assert (found["method"], found["code"], found["model"]) == (
        "frozen",
        str(tmp_path / "c.st"),
        str(esm2 / "model"),
    )
    assert [(x["name"], x["mutation"], f"{x['score']:.4f}") for x in table] == [
        tuple(r) for r in rows
    ]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--fasta", "many.fasta"], ["--fasta needs --model"]),
        (["--recipe", "water2"], ["--recipe", "only with --fasta"]),
        (["--held-out", "one.fasta"], ["--held-out", "only with --fasta"]),
        (
            ["--fasta", "many.fasta", "--model", "model", "--text", "a.txt"],
            ["--text", "no meaning with --fasta"],
        ),
        (["--fasta", "many.fasta", "--model", "model", "--windows", "4"], ["--windows"]),
        (["--fasta", "many.fasta", "--model", "model", "--layers"], ["--layers"]),
        (["--fasta", "many.fasta", "--model", "model", "--dtype", "float16"], ["--dtype"]),
        (["--fasta", "none.fasta", "--model", "model"], ["none.fasta: No such file"]),
        (["--fasta", "one.fasta", "--model", "model", "--quiet"], ["at least 8"]),
        (
            [
                "--fasta",
                "many.fasta",
                "--model",
                "model",
                "--held-out",
                "many.fasta",
                "--quiet",
            ],
            ["is held out"],
        ),
        (
            ["--fasta", "many.fasta", "--model", "model", "--recipe", "water9", "--quiet"],
            ["water9"],
        ),
    ],
)
def test_calibrate_for_the_wrong_kind_of_model(call, esm2, tmp_path, monkeypatch, argv, words):
    from transformers.utils import logging

    monkeypatch.chdir(esm2)
    logging.disable_progress_bar()  # transformers' own bar for weights
    try:
        refused(call("calibrate", *argv, "--out", tmp_path / "c.st"), *words)
    finally:
        logging.enable_progress_bar()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["wildtype", "one-pass", "every"])
def test_methods_of_variants(call, esm2, tmp_path, method):
    from turboquant_nb.esm import TurboEsm, load_esm, read_fasta, variants

    (tmp_path / "m.txt").write_text("K2A\nT3G:A4L\n")
    ask = [
        "variants",
        "--fasta",
        esm2 / "one.fasta",
        "--model",
        esm2 / "model",
        "--mutations",
        tmp_path / "m.txt",
        "--method",
        method,
        "--json",
        "--quiet",
    ]
    code, out, _ = call(*ask)
    found = json.loads(out)
    with TurboEsm(load_esm(esm2 / "model", device="cpu")) as turbo:
        want = variants(turbo, read_fasta(esm2 / "one.fasta"), ["K2A", "T3G:A4L"], method)
    assert code == 0 and found["method"] == method
    assert [(r["name"], r["mutation"]) for r in found["variants"]] == [w[:2] for w in want]
    assert [r["score"] for r in found["variants"]] == pytest.approx(
        [w[2] for w in want], abs=1e-4
    )


@pytest.mark.parametrize(
    "files, words",
    [
        ({"fasta": ">a\nMKT-AY.IAK\n"}, ["--fasta", "line 2, column 4", "'-'"]),
        ({"fasta": b"\x1f\x8b\x08"}, ["--fasta", "UTF-8"]),
        ({"mutations": "K2A:K2G\n"}, ["--mutations", "K2 twice"]),
        ({"mutations": "K99A\n"}, ["--mutations", "14 residues"]),
        ({"mutations": b"\xff\n"}, ["--mutations", "UTF-8"]),
        ({"mutations": "other K2A\n"}, ["'other'"]),
        ({"code": "x"}, ["--code", "not a readable code"]),
    ],
)
def test_variants_reads_its_files_before_the_model(call, esm2, tmp_path, files, words):
    """The model does not exist: a message about it would mean that a file was not looked at
    first."""
    ask = {"fasta": esm2 / "one.fasta"}
    for name, content in files.items():
        ask[name] = tmp_path / name
        ask[name].write_bytes(content if isinstance(content, bytes) else content.encode())
    argv = [x for name, path in ask.items() for x in (f"--{name}", path)]
    refused(call("variants", "--model", "/no/such/model", *argv), *words)
    refused(
        call("variants", "--model", "/no/such/model", "--fasta", esm2 / "one.fasta"),
        "--model /no/such/model: there is no such file or folder",
    )


# ---------------------------------------------------------------- names that are mistyped


class Hub:
    "A hub with one repository, or none that can be asked."

    def __init__(self, monkeypatch, there="org/model", reached=True):
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.errors import RepositoryNotFoundError

        self.asked = []

        def head(url, timeout):
            self.asked.append(url)
            if not reached:
                raise OSError("no route\nto the hub")
            if there not in url:
                raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)


@pytest.mark.parametrize(
    "command",
    ["generate --prompt x", "demo", "eval ppl", "fold --out new", "calibrate --out new.st"],
)
def test_a_mistyped_model_is_refused_at_once(call, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    hub = Hub(monkeypatch)
    for name in ("smolm2", "org/smolm2"):
        refused(
            call(*command.split(), "--model", name),
            f"--model {name}: it is neither a file or folder here nor a repository on the hub",
            *["; did you mean smollm2?"] * (name == "smolm2"),
        )
    assert len(hub.asked) == 2 and all(
        x.endswith("config.json") for x in hub.asked
    )  # once each, with no second try
    refused(
        call(*command.split(), "--model", "./smolm2"),
        "no such file or folder; did you mean smollm2?",
    )
    assert len(hub.asked) == 2
    Hub(monkeypatch, reached=False)
    refused(
        call(*command.split(), "--model", "org/model"),
        "the hub cannot be asked (no route to the hub)",
        code=1,
    )


@pytest.mark.parametrize("command", ["generate --prompt x", "demo", "eval ppl"])
def test_a_mistyped_calibration_is_refused_before_the_model(
    call, monkeypatch, tmp_path, command
):
    """The model does not exist: a message about it would mean that the calibration was not
    looked at first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maps.safetensors").write_text("no calibration")
    hub = Hub(monkeypatch)
    ask = [*command.split(), "--model", "/no/such/model"]
    refused(
        call(*ask, "--calibration", "map.safetensors"),
        "--calibration map.safetensors: there is no such file or folder; did you mean "
        "maps.safetensors?",
    )
    refused(call(*ask, "--calibration", "."), "got a folder")
    refused(call(*ask, "--calibration", "maps.safetensors"), "is not a readable calibration")
    refused(call(*ask, "--budget", "3"), "--budget needs --calibration")
    assert hub.asked == []
    refused(call(*ask, "--calibration", "org/maps"), "nor a repository on the hub")
    assert len(hub.asked) == 1


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    "recipe, words",
    [
        (
            '{"key": {"rotaton": "haar"}, "value": {}}',
            ["Spec has no field 'rotaton'; did you mean 'rotation'?"],
        ),
        (
            '{"key": {}, "value": {}, "sink": 3}',
            ["Recipe has no field 'sink'; did you mean 'sinks'?"],
        ),
        ('{"key": {"xyzxyz": 3}, "value": {}}', ["'xyzxyz'; there are bits, rotation"]),
        ('{"key": 3, "value": {}}', ["key must be a JSON object, got 3"]),
        ("[]", ["got a list of 0"]),
        ('[{"key": {}, "value": {}}]', ["prints one"]),
    ],
)
def test_what_is_wrong_with_a_recipe(call, recipe, words):
    refused(call("recipe", recipe), *words)


def test_a_recipe_per_layer(call, tiny):
    rows = [json.loads(preset(n).to_json()) for n in ("k4v4", "k2v2")]
    ask = [
        "generate",
        "--model",
        tiny,
        "--prompt",
        "Call me",
        "--max-new-tokens",
        3,
        "--json",
        "--quiet",
        "--recipe",
    ]
    said = json.loads(call(*ask, json.dumps(rows), "--recent", 5)[1])["cache"]["recipe"]
    assert [(r["key"]["bits"], r["recent"]) for r in map(json.loads, said)] == [(4, 5), (2, 5)]
    refused(call(*ask, json.dumps(rows[:1])), "each of the 2 layers", "got a list of 1")


def test_a_fraction_of_bits_that_the_heads_cannot_have(call, tiny):
    """The command line is at fault, and the prompt is not read first; before, the first append
    failed with exit code 1. Nor are the weights, whose line on standard error would be a second
    one."""
    for command in (["generate", "--prompt", "x"], ["demo"], ["eval", "ppl"]):
        bits = (
            ["--bits", "3.7"]
            if command != ["demo"]
            else ["--recipes", json.dumps({"key": {"bits": 3.7}, "value": {}})]
        )
        refused(
            call(*command, "--model", tiny, *bits),
            "recipe: bits times d must be an integer, got 3.7 at d = 32",
        )
    assert (
        call(
            "generate",
            "--model",
            tiny,
            "--prompt",
            "x",
            "--bits",
            "2.5",
            "--max-new-tokens",
            1,
            "--quiet",
        )[0]
        == 0
    )


BAD_BITS = (
    ["generate", "--prompt", "x", "--bits", "2.3"],
    ["eval", "ppl", "--bits", "2.3"],
    ["demo", "--recipes", '{"key": {"bits": 2.3}, "value": {}}'],
)


def test_a_recipe_is_refused_before_the_embedded_model_is_downloaded(
    call, monkeypatch, tmp_path
):
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    for command in BAD_BITS:
        refused(call(*command), "recipe: bits times d must be an integer, got 2.3 at d = 64")
    rows = [json.loads(preset("k3v3").to_json())] * 29
    refused(
        call("generate", "--prompt", "x", "--recipe", json.dumps(rows)),
        "each of the 30 layers",
        "got a list of 29",
    )
    assert not (tmp_path / "cache").exists()


def write_gguf(path, **fields):
    "A GGUF file of a small Llama with a vocabulary and no weights: loading it fails."
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    (
        writer.add_name("small"),
        writer.add_context_length(512),
        writer.add_block_count(2),
        writer.add_embedding_length(128),
        writer.add_feed_forward_length(64),
    )
    (
        writer.add_head_count(4),
        writer.add_head_count_kv(2),
        writer.add_rope_dimension_count(32),
        writer.add_rope_freq_base(1e5),
        writer.add_layer_norm_rms_eps(1e-5),
    )
    (
        writer.add_token_list([f"token {i}" for i in range(300)]),
        writer.add_token_scores([0.5] * 300),
        writer.add_token_types([1] * 300),
    )
    for name, x in fields.items():
        (
            writer.add_array
            if isinstance(x, list)
            else writer.add_string
            if isinstance(x, str)
            else writer.add_bool
        )(name, x)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.close()
    return path


def test_a_recipe_is_refused_before_a_gguf_file_is_loaded(call, tmp_path):
    "The file has no weights: whoever loads it says something else."
    path = write_gguf(tmp_path / "model.gguf")
    for command in BAD_BITS:
        refused(
            call(*command, "--model", path),
            "recipe: bits times d must be an integer, got 2.3 at d = 32",
        )
    config = inputs.config_of(str(path))
    assert (
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        config.rope_parameters["rope_theta"],
    ) == (2, 2, 32, 1e5)
    code, _, err = call(
        "generate", "--prompt", "x", "--bits", "2.5", "--model", path, "--quiet"
    )
    assert code == 1 and "could not be loaded" in err and "Traceback" not in err


def test_the_head_of_a_gguf_file(tmp_path):
    """Fields of every kind but those of the tokenizer; a file that ends in its head, at any
    byte, is refused, and so is every other kind of file."""
    fields = {
        "tokenizer.x": ["a", "bc"],
        "llama.words": ["abc", "", "x" * 99],
        "llama.numbers": [1, 2, 3],
        "llama.flags": [True, False],
        "llama.text": "Möwe",
        "llama.flag": True,
    }
    whole = write_gguf(tmp_path / "model.gguf", **fields).read_bytes()
    import gguf

    (tmp_path / "head.gguf").write_bytes(inputs.gguf_head(tmp_path / "model.gguf"))
    read = {name: gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("model", "head")}
    values = {
        name: {
            k: f.contents()
            for k, f in r.fields.items()
            if not k.startswith(("GGUF.", "tokenizer."))
        }
        for name, r in read.items()
    }
    assert (
        values["head"] == values["model"]
        and values["head"]["llama.words"] == fields["llama.words"]
        and len(values["head"]) > 10
    )
    assert (
        not any(k.startswith("tokenizer.") for k in read["head"].fields)
        and not read["head"].tensors
    )
    broken = tmp_path / "broken.gguf"
    last = max(
        f.offset + sum(p.nbytes for p in f.parts)
        for k, f in read["model"].fields.items()
        if not k.startswith(("GGUF.", "tokenizer."))
    )
    for cut in range(0, last, 23):
        broken.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="the file ends inside its head"):
            inputs.gguf_head(broken)
        assert inputs.config_of(str(broken)) is None
    for change in (
        b"GGUX" + whole[4:],
        whole[:4] + bytes([1]) + whole[5:],
        whole[:24] + b"\xff" * 8 + whole[32:],
    ):
        broken.write_bytes(change)
        with pytest.raises(ValueError, match="GGUF|damaged|ends"):
            inputs.gguf_head(broken)


def test_a_recipe_is_refused_before_a_model_of_the_hub_is_downloaded(tmp_path):
    "A cache of the hub that holds the configuration and no weights."
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(LlamaConfig(**SIZE).to_json_string())
    ask = [
        sys.executable,
        "-c",
        "from turboquant_nb.cli import main; raise SystemExit(main())",
        "generate",
        "--prompt",
        "x",
        "--quiet",
        "--model",
        "org/model",
        "--bits",
        "3.7",
    ]
    done = subprocess.run(
        ask,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "HF_HOME": str(tmp_path),
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (
        2,
        "",
        1,
    ) and "recipe: bits times d must be an integer, got 3.7 at d = 32" in done.stderr, (
        done.stderr
    )


def test_a_text_that_is_not_utf8_is_named(call, tmp_path):
    (tmp_path / "good.txt").write_text("Wal")
    (tmp_path / "latin.txt").write_bytes("M\u00f6we".encode("latin-1"))
    for command in (
        ["eval", "ppl"],
        ["fold", "--out", tmp_path / "f"],
        ["calibrate", "--out", tmp_path / "c"],
    ):
        refused(
            call(
                *command,
                "--model",
                "/no/such/model",
                "--text",
                tmp_path / "good.txt",
                tmp_path / "latin.txt",
            ),
            f"--text {tmp_path / 'latin.txt'}: not UTF-8 text (byte 1)",
        )


def test_a_short_cache_is_told_to_be_larger_and_pays_where_it_says(call, tiny):
    code, out, err = call(
        "generate", "--model", tiny, "--prompt", "Name three whales.", "--max-new-tokens", 4
    )
    assert (
        code == 0
        and "smaller than fp16" not in err
        and "x larger than fp16: codes take whole tiles of 256 tokens" in err
    )
    model, _ = load_model(tiny, progress=False)
    for recipe in ("k3v3", "k4v4"):
        ratio = lambda n: filled_with(model, recipe, n).report()["ratio_fp16"]
        cache = filled_with(model, recipe, 16)
        pays, said = cache.report()["pays_from"], str(cache.report())
        assert (
            ratio(pays - 1) < 1 <= ratio(pays)
            and f"{1 / ratio(16):.2f}x larger than fp16" in said
            and f"from about {pays:,} tokens on" in said
        )
    assert str(TurboQuantCache(model).report()) == "TurboQuantCache: empty"
    said = str(filled_with(model, "k3v3", 1000).report())
    assert "larger" not in said and "x smaller than fp16" in said


def filled_with(model, recipe, n):
    cache = TurboQuantCache(model, recipe)
    for layer in range(2):
        cache.update(torch.randn(1, 1, n, 32), torch.randn(1, 1, n, 32), layer)
    return cache


def test_quiet_is_quiet_for_transformers_too(call, tiny, esm2, tmp_path):
    """Its bars are drawn on standard error wherever that is; they are back when the command
    ends."""
    from transformers.utils import logging

    small = ["--windows", 1, "--length", 64, "--quiet"]
    for argv in (
        ["fold", "--model", tiny, "--out", tmp_path / "f", *small],
        ["calibrate", "--model", tiny, "--out", tmp_path / "c.st", *small],
        ["variants", "--model", esm2 / "model", "--fasta", esm2 / "one.fasta", "--quiet"],
    ):
        code, _, err = call(*argv)
        assert (code, err) == (0, "") and logging.is_progress_bar_enabled()


@pytest.mark.parametrize(
    "shell, code, words",
    [
        ("recipe k3v3 >&-", 1, "turboquant: standard output is closed\n"),
        ("--version >&-", 1, "turboquant: standard output is closed\n"),
        ("recipe k3v3 >/dev/full", 1, "No space left"),
        ("recipe --help >/dev/full", 1, "No space left"),
        ("--version >/dev/full", 1, "No space left"),
        ("recipe k3v3 --quiet 2>&-", 0, ""),
        ("recipe k9v9 2>&-", 2, ""),
    ],
)
def test_closed_and_full_streams(shell, code, words):
    if "/dev/full" in shell and not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    program = "import sys; from turboquant_nb.cli import main; sys.exit(main())"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {shell}', sys.executable, program],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == code
        and words in done.stderr
        and "Traceback" not in done.stderr
        and "Exception" not in done.stderr
    ), done
    assert (done.stdout == "") == (code != 0), done.stdout


def test_a_prompt_without_tokens(call, tiny, monkeypatch):
    monkeypatch.setattr(answers, "tokens_of", lambda *a: torch.zeros(1, 0, dtype=torch.long))
    refused(
        call("generate", "--model", tiny, "--prompt", "x", "--quiet"),
        "the prompt has no tokens",
    )


def test_a_full_disk_is_seen_before_the_work(call, tiny, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    usage = output.shutil.disk_usage
    monkeypatch.setattr(
        output.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000)
    )
    refused(
        call(
            "fold",
            "--model",
            tiny,
            "--windows",
            1,
            "--length",
            64,
            "--quiet",
            "--out",
            tmp_path / "f",
        ),
        "bytes, and 1,000 are free there",
        code=1,
    )
    monkeypatch.setattr(output.Path, "write_bytes", full)
    refused(
        call("calibrate", "--model", "/no/such/model", "--out", tmp_path / "c.st"),
        "cannot be written (No space left on device)",
        code=1,
    )
    assert list(tmp_path.iterdir()) == []


def test_gradient_checkpointing_is_named(tiny):
    """transformers takes the cache away in training with checkpointing; the message about the
    missing cache says so."""
    model, _ = load_model(tiny, progress=False)
    model.set_attn_implementation("turboquant")
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(TypeError, match="gradient checkpointing takes every cache away"):
        model(
            torch.ones(1, 8, dtype=torch.long), past_key_values=TurboQuantCache(model, "k3v3")
        )


@pytest.mark.parametrize(
    "name, capability, hip, want",
    [
        ("cpu", None, None, "float32"),
        ("cuda", (7, 5), None, "float16"),
        ("cuda", (8, 0), None, "bfloat16"),
        ("cuda", (9, 0), None, "bfloat16"),
        ("cuda", (7, 5), "6.4", "bfloat16"),
        ("mps", None, None, "bfloat16"),
    ],
)
def test_the_usual_dtype_is_one_that_the_device_has(monkeypatch, name, capability, hip, want):
    "A T4 was given bfloat16, which it computes by detours."
    from turboquant_nb.cli import inputs

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert inputs.usual_dtype(torch.device(name)) == want
