"Goldens tell a package that computes something else from one that does not."

import json
import shutil
from pathlib import Path

import turboquant_nb

import goldens


def test_what_changed_is_seen_and_nothing_else(tmp_path, monkeypatch, capsys):
    """An older package that decodes a thousandth larger has other states; logits, which are
    read from the codes, and bytes are the same."""
    shutil.copytree(Path(turboquant_nb.__file__).parent, tmp_path / "turboquant_nb")
    path = tmp_path / "turboquant_nb" / "quant" / "quantizer.py"
    text, line = path.read_text(), "q.rotation.inverse(q.decode_rotated(coded))"
    assert line in text, f"{line} is not in quantizer.py: change this mutant with it"
    path.write_text(text.replace(line, f"1.001 * {line}"))
    only = "--backends torch --cases prefill --recipes k3v3".split()

    def here(folder, args):
        "The newer package is the one that is imported here."
        if Path(folder) == tmp_path:
            return apart(folder, args)
        return json.loads(json.dumps(goldens.computed("cpu", *map(list, named(args)))))

    apart, named = goldens.of_package, lambda a: (a.backends, a.cases, a.recipes)
    monkeypatch.setattr(goldens, "of_package", here)
    assert goldens.main([str(tmp_path), *only])
    changed, last = capsys.readouterr().out.splitlines()
    assert changed.startswith("k3v3 · torch · prefill: states [")
    assert last == "1 cases, 1 differences"


def test_a_refusal_of_both_is_no_difference():
    same = {"QJL": {"refused": "one reason"}}, {"QJL": {"refused": "another"}}
    assert goldens.differences(*same) == []
    lines = goldens.differences({"QJL": {"tokens": [1]}}, {"QJL": {"refused": "a reason"}})
    assert lines == ["QJL: refused None -> a reason", "QJL: tokens [1] -> None"]
