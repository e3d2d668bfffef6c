#!/usr/bin/env python3
"""README.md from nbs/index.ipynb (what `nbdev_readme` does, without Quarto).

    scripts/tools/make_readme.py          write README.md and its pictures (nbs/index_files/)
    scripts/tools/make_readme.py --check  change nothing; exit 1 if they are not what the
    notebook gives

Markdown cells stay, code cells become fenced code with their outputs. Cells marked `#| hide`
and other directives are dropped; links to notebooks point to the site. Badges come from
settings.ini and the workflow of the tests: the site has none, since a page asks no other host.
A hidden cell that is labelled `dark` draws the picture before it for a dark page, where the
site turns colours."""

import argparse
import base64
import difflib
import html
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebooks import directives, fence, page_name, settings, text_of

ROOT = Path(__file__).resolve().parents[2]
PICTURES = "nbs/index_files"
WIDTH = 600  # of a picture, so that its text is as large as the page's
NOTICE = (
    "<!-- Generated from nbs/index.ipynb by scripts/tools/make_readme.py: edit the notebook. "
    "-->"
)


def links(text, site):
    "[x](04_codebook.ipynb#y) -> [x](site/codebook.html#y)."

    def page(match):
        return f"]({site}/{page_name(match[1])}{match[2] or ''})"

    return re.sub(r"\]\((?:\./)?([\w/-]+)\.ipynb(#[^)\s]*)?\)", page, text)


def markdown_cell(source, site):
    "A markdown cell as GitHub reads it."
    return links(source.strip(), site)


def badge(text, picture, address):
    return f"[![{text}]({picture})]({address})"


def badges(cfg, site):
    "Tests, versions of Python, licence, Colab and the site, on one line each."
    home, shield = (
        f"https://github.com/{cfg['user']}/{cfg['repo']}",
        "https://img.shields.io/badge",
    )
    tests = f"{home}/actions/workflows/test.yml"
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    pythons = json.loads(re.search(r"python: (\[.*\])", workflow)[1])
    colab = f"https://colab.research.google.com/github/{cfg['user']}/{cfg['repo']}/blob"
    licence = {"apache2": "Apache-2.0"}[cfg["license"]]
    return "\n".join(
        (
            badge("Tests", f"{tests}/badge.svg", tests),
            badge(
                f"Python {', '.join(pythons)}",
                f"{shield}/python-{'%20%7C%20'.join(pythons)}-blue",
                f"{home}/blob/{cfg['branch']}/settings.ini",
            ),
            badge(licence, f"{shield}/licence-{licence.replace('-', '--')}-blue", "LICENSE"),
            badge(
                "Open in Colab",
                "https://colab.research.google.com/assets/colab-badge.svg",
                f"{colab}/{cfg['branch']}/{cfg['nbs_path']}/guide.ipynb",
            ),
            badge("Documentation", f"{shield}/docs-guide%20and%20book-blue", f"{site}/"),
        )
    )


def shown(alt, path, dark):
    "A picture, and what a dark page shows in its place."
    image = f'<img alt="{html.escape(alt)}" src="{path}" width="{WIDTH}">'
    if not dark:
        return image
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return f"<picture>\n  {source}\n  {image}\n</picture>"


def dark_picture(nb, number, files):
    "The picture of the next cell, if that draws the one of cell `number` for a dark page."
    following = nb["cells"][number + 1] if number + 1 < len(nb["cells"]) else {}
    opts, _ = directives(text_of(following.get("source", "")))
    if opts.get("label") != "dark":
        return None
    (raw,) = (x["data"]["image/png"] for x in following["outputs"] if "data" in x)
    path = f"{PICTURES}/output-{number}-dark.png"
    files[path] = base64.b64decode(text_of(raw))
    return path


def output(out, opts, name, files, site, dark=None):
    "One output of a code cell; pictures go to `files`."
    if out["output_type"] == "stream":
        text = text_of(out["text"])
        if out.get("name") == "stderr" or not text.strip():
            return ""
        return text.strip() if opts.get("output") == "asis" else fence(text)
    data = out.get("data", {})
    if "image/png" in data:
        path = f"{PICTURES}/{name}.png"
        files[path] = base64.b64decode(text_of(data["image/png"]))
        picture = shown(opts.get("fig-alt") or opts.get("fig-cap", ""), path, dark)
        return picture + (f"\n\n*{opts['fig-cap']}*" if opts.get("fig-cap") else "")
    if "text/markdown" in data:
        return markdown_cell(text_of(data["text/markdown"]), site)
    if "text/html" in data:  # what moves in a page stays on the site
        return ""
    if "text/plain" in data:
        return fence(text_of(data["text/plain"]))
    return ""


def code_cell(cell, number, files, site, dark=None):
    opts, code = directives(text_of(cell["source"]))
    if {"hide", "default_exp"} & opts.keys() or opts.get("include") == "false":
        return []
    parts = [fence(code, "python")] if code and opts.get("echo") != "false" else []
    if opts.get("output") != "false":
        parts += [
            output(out, opts, f"output-{number}-{i}", files, site, dark)
            for i, out in enumerate(cell.get("outputs", []))
        ]
    return parts


def build():
    "(README.md, {picture path: bytes})."
    cfg = settings(ROOT)
    site = cfg["doc_host"].rstrip("/") + cfg["doc_baseurl"]
    index = ROOT / cfg["nbs_path"] / cfg["readme_nb"]
    if not index.is_file():
        sys.exit(f"there is no {index.relative_to(ROOT)}")
    nb = json.loads(index.read_text(encoding="utf-8"))
    parts, files = [NOTICE], {}
    for number, cell in enumerate(nb["cells"]):
        source = text_of(cell["source"])
        if cell["cell_type"] == "markdown":
            text = markdown_cell(source, site)
            title, found, rest = text.partition("\n") if number == 0 else (text, "", "")
            parts += [title, badges(cfg, site), rest.strip()] if found else [text]
        elif cell["cell_type"] == "code":
            dark = dark_picture(nb, number, files)
            parts += code_cell(cell, number, files, site, dark)
    return "\n\n".join(part for part in parts if part.strip()) + "\n", files


def differences(text, files):
    "What on disk is not what the notebook gives."
    path, out = ROOT / "README.md", []
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old != text:
        out += list(
            difflib.unified_diff(
                old.splitlines(),
                text.splitlines(),
                "README.md",
                "from nbs/index.ipynb",
                lineterm="",
                n=1,
            )
        )[:40]
    on_disk = {f"{PICTURES}/{p.name}": p.read_bytes() for p in (ROOT / PICTURES).glob("*")}
    out += [
        f"{name}: differs"
        for name in sorted(on_disk.keys() | files.keys())
        if on_disk.get(name) != files.get(name)
    ]
    return out


def write(text, files):
    (ROOT / "README.md").write_text(text, encoding="utf-8")
    for path in (ROOT / PICTURES).glob("*"):
        path.unlink()
    for name, raw in files.items():
        (ROOT / PICTURES).mkdir(exist_ok=True)
        (ROOT / name).write_bytes(raw)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 on a difference"
    )
    args = parser.parse_args(argv)
    text, files = build()
    if args.check:
        found = differences(text, files)
        print("\n".join(found) if found else "README.md is what nbs/index.ipynb gives")
        return 1 if found else 0
    write(text, files)
    print(f"README.md: {len(text.splitlines())} lines, {len(files)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
