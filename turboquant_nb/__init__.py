import sys

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
    "find_frame": "hf.frame",
}
__all__ = list(_HOME)
# Modules that are gone, by what takes their place; nbs/measured/closed.ipynb says why.
_GONE = {
    "cache.append": "cache.store",
    "cache.codec": "cache.save and TurboQuantCache.load (hf.archive)",
    "cache.flat": "cache.save and TurboQuantCache.load (hf.archive)",
    "cache.gather": 'backend="cpu"',
    "cache.rows": "cache.save and TurboQuantCache.load (hf.archive)",
    "cache.token_coder": "kernels.ops.append",
    "calibration.small": "cache.save and TurboQuantCache.load (hf.archive)",
    "cli.bench": "scripts/run.py generate and decode_kernel",
    "cli.cache": "cache.save and TurboQuantCache.load (hf.archive)",
    "cli.chat": "cli.generate",
    "cli.inputs": "cli.app",
    "cli.long": "evaluation.harness",
    "cli.output": "cli.app",
    "cli.recipes": "cli.app",
    "cli.web": "cli.generate",
    "evaluation.long": "evaluation.harness",
    "evaluation.offload": "evaluation.models",
    "evaluation.pairs": "evaluation.score",
    "evaluation.questions": "evaluation.harness",
    "evaluation.ruler": "evaluation.harness",
    "evaluation.sandbox": "evaluation.harness",
    "evaluation.significance": "scipy.stats.binomtest on pairs of answers",
    "evaluation.tasks": "evaluation.score",
    "hf.beside": "nothing: a captured step has one stream",
    "hf.default": "hf.cache",
    "hf.deferred": "nothing: such models decode all past tokens in each step",
    "hf.edits": "hf.cache",
    "hf.heads": "a list with a recipe for each layer",
    "hf.kept": "one cache with max_length=, static=True, and cache.reset()",
    "hf.passes": "hf.hooks",
    "hf.report": "hf.cache",
    "hf.storage": "cache.save and TurboQuantCache.load (hf.archive)",
    "hf.transfer": "torch.distributed on the tensors of cache.disk.state_of",
    "kernels.append": "kernels.encode",
    "kernels.cpp": "kernels.cpu",
    "kernels.decode_launch": "kernels.decode",
    "kernels.encode_launch": "kernels.encode",
    "kernels.encode_short": "kernels.encode",
    "kernels.latent_cells": "nothing: vLLM's own cache holds latents",
    "kernels.latent_fragments": 'backend="blocks"',
    "kernels.latents": 'backend="blocks"',
    "kernels.launcher": "kernels.encode",
    "kernels.many_rows": "cache.batch_repeat_interleave, which makes copies",
    "kernels.mean": "hf.frame.find_frame",
    "kernels.past": "kernels.cell_attention",
    "kernels.prefix": "cache.batch_repeat_interleave, which makes copies",
    "kernels.query": "kernels.decode",
    "kernels.recent": "kernels.cells",
    "kernels.work": "kernels.cell_attention",
    "quant.layer_info": "quant.layers",
    "quant.mixed_precision": "quant.codes",
    "quant.residual": "quant.codes",
    "quant.trellis": "quant.codes",
    "serving": "vllm (step, pages and backend)",
}


class _Gone:
    "Asked last, for modules that nobody else found."

    @staticmethod
    def find_spec(name, path=None, target=None):
        "None, or ModuleNotFoundError with what to use instead."
        if use := _GONE.get(name.removeprefix(f"{__name__}.")):
            raise ModuleNotFoundError(f"{name} is gone; use {use}", name=name)
        return None


sys.meta_path.append(_Gone)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'turboquant_nb' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted({*globals(), *_HOME})
