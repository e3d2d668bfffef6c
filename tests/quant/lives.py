"""What every code and centre must carry: a tiny model, by every way of holding a cache."""

import torch

from tests.helpers import generate, prompt, tiny
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.graphs import Tape


def lives(recipe, tmp_path):
    "A tiny Llama generates on this recipe by every way of holding it; its last cache."
    model, inputs = tiny(hidden_size=128, head_dim=32), prompt(2, 20)
    new = lambda **how: TurboQuantCache(model, recipe, **how)
    run = lambda cache, **how: generate(model, inputs, "turboquant", cache=cache, **how)[0]
    want = run(kept := new())
    assert torch.equal(run(new(max_length=64, static=True)), want)  # in place
    assert torch.equal(run(captured := new(max_length=64, graphs=Tape)), want)
    assert captured.report()["graphs"]["replayed"] > 0
    kept.save(tmp_path / "cache")
    again = TurboQuantCache.load(tmp_path / "cache", model)
    for a, b in zip(again.layers, kept.layers):
        assert all(map(torch.equal, a.store.read(), b.store.read()))
    again.crop(-5)
    with torch.no_grad():
        model(want[:, -5:], past_key_values=again)
    for a, b in zip(again.layers, kept.layers):  # the last token was not fed yet
        assert a.store.length == b.store.length
    assert run(new(), num_beams=3).shape == want.shape
    assert (
        kept.report()["backends"].keys() <= {"torch", "flash"}
        or recipe.key.codebook == "sphere"
    )
    return kept
