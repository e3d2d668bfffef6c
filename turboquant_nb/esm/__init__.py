"""ESM-2 on compressed keys and values. Written by hand: names are imported on first use, so
that files and letters need no transformers."""

_HOME = {
    "checkpoints": [
        "TOKENS",
        "RESIDUES",
        "CLS",
        "PAD",
        "EOS",
        "UNK",
        "MASK",
        "tokens",
        "read_fasta",
        "load_esm",
        "random_esm",
        "random_proteins",
    ],
    "codes": ["Past", "CodedPast", "StorePast"],
    "model": ["EsmOutput", "fingerprint", "TurboEsm"],
    "calibration": ["gather_statistics", "fit_esm", "calibrate_esm"],
    "folding": [
        "Structure",
        "check_letters",
        "fold",
        "in_one_pass",
        "lddt",
        "load_folding",
        "random_folding",
        "rmsd",
    ],
    "mutations": [
        "design",
        "masked_marginals",
        "pseudo_log_likelihood",
        "pseudo_perplexity",
        "score_mutations",
        "mutated",
        "variants_of",
        "variants",
        "read_mutations",
    ],
}
_HOME = {name: module for module, names in _HOME.items() for name in names}
__all__ = [name for name in _HOME if not name.startswith("_")]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
