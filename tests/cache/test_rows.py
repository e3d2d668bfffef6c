"Rows of bytes by tables that the data pay for."

import numpy as np
import pytest

from turboquant_nb.cache import rows


def test_a_table_gives_every_symbol_a_weight_of_two_bytes():
    "A symbol that is all there is has the largest weight, one that never comes has 1."
    weights = rows._tables(np.array([[5, 0], [1, 1], [0, 0]]))
    assert weights.dtype == np.dtype("<u2")
    assert weights.tolist() == [[65535, 1], [32768, 32768], [1, 1]]


def test_rows_are_squeezed_only_where_that_saves_bytes():
    "To the byte: as much room as it takes is too little, one more is enough."
    g = np.random.default_rng(0)
    for n in (1, 3, 40):
        x = (g.geometric(0.5, (n, 600)).clip(1, 9) + 3).astype(np.uint8)
        data = rows.squeeze(x, x.size)
        assert len(data) < x.size and np.array_equal(rows.expand(data, *x.shape), x)
        assert rows.squeeze(x, len(data)) is None
        assert rows.squeeze(x, len(data) + 1) == data
    noise = g.integers(0, 256, (4, 50), dtype=np.uint8)
    assert rows.squeeze(noise, noise.size) is None


def test_squeezed_rows_that_were_cut_are_refused():
    "Wherever the cut is: in the head, the tables, their numbers, the lengths or a stream."
    x = np.repeat(np.arange(8, dtype=np.uint8), 8)[:, None].repeat(600, 1)
    data = rows.squeeze(x, x.size)
    assert data[2] > 0, "several tables, so that rows name theirs"
    for end in range(len(data)):
        with pytest.raises(ValueError):
            rows.expand(data[:end], *x.shape)
