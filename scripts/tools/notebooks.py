"What the tools know of notebooks: their fields, directives and pages."

import re
from configparser import ConfigParser
from pathlib import Path, PurePosixPath

VOID = {"img", "br", "hr", "meta", "link", "input", "col", "wbr"}  # tags without an end


def settings(root):
    "settings.ini as a dict."
    config = ConfigParser(delimiters=["="])
    config.read(root / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def site_address(cfg):
    "Where the published site lives, with a slash at the end."
    return (cfg["doc_host"] + cfg["doc_baseurl"]).rstrip("/") + "/"


def text_of(value):
    "Notebook fields are a string or a list of lines."
    return value if isinstance(value, str) else "".join(value)


def emptied(skip):
    """`preproc` of execnb, which leaves what a cell printed once where it prints nothing now: a
    cell that is not skipped loses it before it is run."""

    def before(cell):
        if not (skipped := skip(cell)):
            cell.outputs = []
        return skipped

    return before


def directives(source):
    "({directive: value} of `#| directive: value` lines, the rest of the cell)."
    found, lines = {}, []
    for line in source.splitlines():
        match = re.match(r"^#\|\s*([\w.-]+)\s*:?\s*(.*)$", line)
        if match:
            found[match[1]] = match[2].strip().strip("\"'")
        else:
            lines.append(line)
    return found, "\n".join(lines).strip("\n")


def fence(text, attributes=""):
    "A fenced block whose fence is longer than any fence inside."
    ticks = "`" * max([3] + [len(m[0]) + 1 for m in re.finditer(r"^`{3,}", text, re.M)])
    return f"{ticks}{attributes}\n{text.strip(chr(10))}\n{ticks}"


def notebooks(root):
    """The notebooks of nbs/ and of the folders in it, as paths, in the order of their names:
    chapters first."""
    nbs = Path(root) / settings(root)["nbs_path"]
    found = (p for p in nbs.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return sorted(found, key=lambda path: (path.name, path))


def page_name(path):
    "04_codebook.ipynb -> codebook.html, as nbdev does."
    path = PurePosixPath(path)
    name = re.sub(r"^\d+[a-zA-Z0-9]*_", "", path.stem) + ".html"
    return path.with_name(name).as_posix()


def site_map(root):
    """The hand-written navigation of _quarto.yml: the bar [(text, notebook)] and the shelves,
    {id: [(section, [(text, notebook)])]}."""
    import yaml

    website = yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    shelves = {
        bar["id"]: [
            (x.get("section", ""), [(y["text"], y["href"]) for y in x.get("contents", [x])])
            for x in bar["contents"]
        ]
        for bar in website["sidebar"]
    }
    return [(item["text"], item["href"]) for item in website["navbar"]["left"]], shelves
