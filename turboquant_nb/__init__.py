__version__ = "0.1.0"
# Written by hand: names are imported on first use, so that `import turboquant_nb` needs no
# extra.
_HOME = {
    "TurboQuantCache": "hf",
    "enable": "hf",
    "disable": "hf",
    "compile_steps": "hf",
    "Recipe": "quant.recipe",
    "Spec": "quant.quantizer",
    "preset": "quant.recipe",
    "KVStore": "cache.store",
    "attend": "kernels.ops",  # the one that chooses a backend
    "load_calibration": "quant.calibration",
    "calibrate": "calibration.fit",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'turboquant_nb' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted({*globals(), *_HOME})
