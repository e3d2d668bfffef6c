"The page of public names answers for each of them: signature, code, chapter, example."

import ast
import importlib
import re
from pathlib import Path

import pytest

import turboquant_nb
from tests.helpers import cells, source
from turboquant_nb import _modidx, esm, hf
from turboquant_nb.vllm import step

CODE = [*map(source, cells("api", "code"))]
PROSE = "\n\n".join(map(source, cells("api", "markdown")))
EXAMPLES = "\n".join(s for s in CODE if "#|" not in s)


@pytest.fixture(scope="module")
def page():
    "What the cells that make the entries define, and the Markdown that they show."
    space, out = {}, []
    for text in CODE:
        if "#|" in text and "eval: false" not in text:
            *body, last = ast.parse(text).body
            exec(compile(ast.Module(body, []), "api", "exec"), space)
            if isinstance(last, ast.Expr):
                out.append(eval(compile(ast.Expression(last.value), "api", "eval"), space).data)
            else:
                exec(compile(ast.Module([last], []), "api", "exec"), space)
    return space, "\n".join(out)


def entry_of(text, name, module=""):
    "Two modules may have a name in common: the one that is imported from there counts."
    found = re.findall(rf"^### {name}\n(.*?)(?=^### |\Z)", text, re.M | re.S)
    if len(found) > 1:
        found = [x for x in found if f"from {module} import {name}\n" in x]
    assert len(found) == 1, (name, len(found))
    return found[0]


@pytest.mark.parametrize("module", [turboquant_nb, hf, esm, step], ids=lambda m: m.__name__)
def test_a_public_name_has_a_signature_its_code_and_its_chapter(page, module):
    for name in module.__all__:
        text = entry_of(page[1], name, module.__name__)
        (signature,) = re.findall(r"```python\n(.*?)\n```", text, re.S)
        assert re.match(
            rf"from turboquant_nb[.\w]* import {name}\n\n.*\b{name}\b", signature
        ), name
        (chapter, path, defined) = re.findall(
            r"^\[Chapter\]\(\S+/(\S+)\) · \[Code\]\(\S+/blob/main/(\S+)#(\w+)\)$", text, re.M
        )[0]
        assert defined == name
        code = (Path(turboquant_nb.__file__).parents[1] / path).read_text(encoding="utf-8")
        assert re.search(rf"^(class |def |(\w+, )*){name}\b", code, re.M), (name, path)
        assert chapter.partition("#")[0] in {
            where.partition("#")[0].rpartition("/")[2]
            for x in _modidx.d["syms"].values()
            for where, _ in x.values()
        }


def test_a_signature_is_the_code_s_with_its_comments(page):
    space = page[0]
    shown = "\n".join(space["header"](turboquant_nb.attend, "attend"))
    assert "q: Tensor,  # [B, Hq, n, d_key]" in shown and ") -> Answer:" in shown
    assert "call = " not in shown and '"""' not in shown
    fields = "\n".join(space["header"](turboquant_nb.Spec, "Spec"))
    assert "bits: int | float | tuple" in fields and "def " not in fields
    made = "\n".join(space["header"](turboquant_nb.KVStore, "KVStore"))
    assert made.startswith("class KVStore:\n    def __init__(\n") and "heads: int" in made


def test_errors_and_sources_stand_apart(page):
    assert "**Errors.** Raises ValueError for a name" in entry_of(page[1], "preset")
    assert "**Source.** Zandieh et al. 2025" in entry_of(page[1], "Quantizer")
    assert "<summary>" in entry_of(page[1], "KVStore") and "append(" in entry_of(
        page[1], "KVStore"
    )
    assert "<summary>" not in entry_of(page[1], "preset")


def test_every_name_of_the_package_s_root_is_used_in_an_example():
    assert {x for x in turboquant_nb.__all__ if not re.search(rf"\b{x}\b", EXAMPLES)} == set()


def test_the_index_by_task_leads_to_sections_and_entries(page):
    anchors = {
        re.sub(r"[^\w-]", "", x.lower().replace(" ", "-"))
        for x in re.findall(r"^##+ (.+)$", PROSE + "\n" + page[1], re.M)
    }
    asked = re.findall(r"\]\(#([\w-]+)\)", PROSE)
    assert len(asked) > 30 and set(asked) <= anchors
    sections = set(re.findall(r"^## (.+)$", PROSE, re.M))
    assert len(re.findall(r"^\| \[", PROSE, re.M)) == len(sections) - 1  # not the last one


def test_every_other_public_name_is_listed_once(page):
    text = page[1]
    for path, symbols in _modidx.d["syms"].items():
        for name in getattr(importlib.import_module(path), "__all__", ()):
            if f"{path}.{name}" in symbols:
                where = symbols[f"{path}.{name}"][0]
                entry, row = f"/{where}) · [Code]", f"<code>{name}</code>]("
                listed = [x for x in text.splitlines() if row in x and f"/{where})" in x]
                assert (entry in text) != bool(listed), (path, name)


@pytest.mark.parametrize("name", turboquant_nb._GONE)
def test_a_module_that_is_gone_says_what_to_use(name):
    known = {path.removeprefix("turboquant_nb.") for path in _modidx.d["syms"]}
    assert name not in known
    with pytest.raises(ModuleNotFoundError, match=f"{name} is gone; use .*"):
        importlib.import_module(f"turboquant_nb.{name}")
    named = re.findall(
        r"\b(?:cache(?=\.(?:store|attention))|cli|evaluation|hf|kernels|quant|vllm)\.\w+",
        turboquant_nb._GONE[name],
    )
    for use in named:
        importlib.import_module(f"turboquant_nb.{use}")
