"""Cold equals warm: the same tokens, codes and, where nothing else is computed, bits, however a
prompt comes to a cache. The matrix is that of `scripts/eval/arrivals.py`, on a small random
model in float64, so that rounding moves no code across an edge on any processor."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
arrivals = pytest.importorskip("eval.arrivals")

from tests.helpers import QUIETLY, tiny
from tests.helpers import texts as ids_of

pytestmark = QUIETLY
CACHES = "uncompressed", "k4v4", "k3v3", "k2v2"
CODED = CACHES[1:]
TOKENS, CHUNKS, NEW = 140, (1, 16, 64), 3
SMALL = dict(head_dim=16, max_position_embeddings=512)
CHUNKED = "in two chunks", "in the second turn", *(f"in chunks of {x}" for x in CHUNKS)
# ways whose tokens attend to the same codes and exact states
ALIKE = (
    ("whole", "in row 3 of a padded batch"),
    ("in two chunks", "behind a shared prefix"),
    ("in chunks of 1", "in chunks of 16"),
)


@pytest.fixture(scope="module")
def model():
    return copy.deepcopy(tiny(**SMALL)).double()


@pytest.fixture(scope="module")
def rows(model):
    "{(cache, what it is measured by, way): what differs}, on one prompt."
    ids, other = ids_of(1, TOKENS), ids_of(1, TOKENS + 64, seed=5)
    found = {}
    for name in CACHES:
        for row in arrivals.matrix(model, name, ids, other, CHUNKS, NEW):
            found[name, row["against"], row["way"]] = row
    return found


@pytest.mark.parametrize("way", ("whole again", "from a file", "after a reset"))
@pytest.mark.parametrize("name", CODED)
def test_what_computes_the_same_gives_the_same_bits(rows, name, way):
    row = rows[name, "whole", way]
    assert row["same_bits"] and row["all_layers"] == 1


@pytest.mark.parametrize("one, way", ALIKE)
@pytest.mark.parametrize("name", CODED)
def test_what_attends_alike_gives_the_same_codes(rows, name, one, way):
    "Matrices of other sizes are multiplied, so logits are apart by rounding."
    row = rows[name, one, way]
    assert row["all_layers"] == 1 and row["agreed"] == row["of"] == NEW + 1
    assert row["largest"] < 1e-4


@pytest.mark.parametrize("name", CODED)
def test_the_codes_of_given_states_are_the_same_in_every_way(rows, name):
    "Those of the first layer, whose states do not depend on what attention reads."
    found = [r for (cache, *_), r in rows.items() if cache == name]
    assert len(found) == 12 and all(r["first_layer"] == 1 for r in found)


@pytest.mark.parametrize("way", CHUNKED)
def test_what_later_chunks_read_is_coded(rows, way):
    """A whole prompt attends to exact states, a later chunk to codes of what came before it:
    the second layer's states are others, by less the more bits there are. Uncompressed they
    are the same."""
    kl = [rows[name, "whole", way]["kl"] for name in ("k4v4", "k3v3")]
    assert 1e-6 < kl[0] < kl[1] < 1
    assert all(rows[name, "whole", way]["all_layers"] < 0.99 for name in CODED)
    assert rows["uncompressed", "whole", way]["largest"] < 1e-9


@torch.no_grad()
def test_a_prefix_with_one_other_token_is_seen(model):
    "A mutant of the matrix: the share of equal numbers falls, and tokens part."
    ids, make = ids_of(1, TOKENS), lambda: arrivals.TurboQuantCache(model, "k3v3")
    wrong = ids.clone()
    wrong[0, 20] = (wrong[0, 20] + 1) % 50 + 2
    kept = []
    for prompt in (ids, wrong):
        here = arrivals.read(model, make(), prompt)
        logits, _ = arrivals.go_on(model, here, NEW, ids_of(1, NEW)[0])
        kept.append(dict(logits=logits, states=arrivals.coded_states(here, TOKENS + NEW)))
    row = arrivals.compare(*kept)
    assert row["first_layer"] < 1 and not row["same_bits"] and row["largest"] > 1e-2
