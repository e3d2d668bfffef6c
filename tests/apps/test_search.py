"""The coded index: equal to brute force on what the codes stand for, for every spec, size,
order of arrival and file; honest bytes; clear errors."""

import math
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from turboquant_nb.quant.quantizer import Spec, decode
from turboquant_nb.quant.mixed_precision import make_quantizer
from turboquant_nb.apps.search import FORMAT, CodedIndex, code_bytes, exact_search, recall
from turboquant_nb.files import read_file, write_file
from turboquant_nb.testing import raises, same

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = [
    *(Spec(bits=b, scale=s) for b in (1, 2, 3, 4) for s in ("norm", "mse", "unbiased")),
    Spec(bits=2, residual="qjl", scale="norm"),
    Spec(bits=3, residual="qjl", scale_dtype="float32"),
    Spec(bits=4, residual="qjl", scale_dtype="bfloat16"),
    Spec(bits=2, residual="sign"),
    Spec(bits=4, residual="sign", scale="unbiased"),
    Spec(bits=3, rotation="haar", seed=7),
    Spec(bits=3, rotation="identity", codebook="gaussian"),
    Spec(bits=4, codebook="uniform"),
]
name = lambda s: f"{s.bits}-{s.scale}-{s.residual}-{s.rotation}-{s.codebook}-{s.scale_dtype}"


def data(gen, n, d, m=7):
    return torch.randn(n, d, generator=gen) + 0.5, torch.randn(m, d, generator=gen)


def agrees(index, queries, k):
    "Scores of the search are those of brute force on the decoded vectors, in fp64."
    scores, ids = index.search(queries, k)
    every = queries.double() @ index.decode().double().T
    best = every.topk(k).values
    size = float(every.abs().max()) + 1e-30
    assert scores.shape == ids.shape == (len(queries), k)
    assert scores.dtype == torch.float32 and ids.dtype == torch.int64
    assert float((scores - best).abs().max()) < 1e-5 * size
    assert float((every.gather(1, ids) - best).abs().max()) < 1e-5 * size


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_search_is_brute_force_on_decoded_vectors(spec, center, gen):
    x, q = data(gen, 301, 24)
    agrees(CodedIndex(24, spec, x.mean(0) if center else None).add(x), q, 9)


def test_that_check_can_fail(gen):
    x, q = data(gen, 301, 24)
    index = CodedIndex(24, Spec(bits=3), x.mean(0)).add(x)
    decoded = index.decode()
    index.decode = lambda: decoded + 0.05 * x.mean(0)
    with pytest.raises(AssertionError):
        agrees(index, q, 9)


@pytest.mark.parametrize("d", [2, 3, 5, 8, 31, 100, 127, 256])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17])
def test_any_size(d, n, gen):
    x, q = data(gen, n, d)
    for spec in (Spec(bits=1), Spec(bits=3, residual="qjl"), Spec(bits=4)):
        index = CodedIndex(d, spec, x[0]).add(x)
        assert len(index) == n
        agrees(index, q, n)


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_codes_are_those_of_the_quantizer(spec, gen):
    x, _ = data(gen, 50, 40)
    quantizer = make_quantizer(spec, 40)
    same(CodedIndex(40, spec).add(x).decode(), decode(quantizer, quantizer.encode(x)))


@pytest.mark.parametrize("spec", SPECS, ids=name)
@pytest.mark.parametrize("center", [False, True])
def test_bytes(spec, center, gen, tmp_path):
    x, _ = data(gen, 64, 48)
    index = CodedIndex(48, spec, x.mean(0) if center else None).add(x)
    parts, each = index.parts(), 64 * code_bytes(spec, 48, center)
    assert parts["planes"] + parts["signs"] + parts["numbers"] == each
    assert parts["center"] == (48 * 4 if center else 0) and parts["tables"] >= 48 * 48 * 4
    index.save(tmp_path / "a")
    tensors, _ = read_file(tmp_path / "a", FORMAT, "index")
    assert sum(x.nbytes for x in tensors.values()) == index.nbytes == each + parts["center"]


def test_bytes_of_the_named_size():
    assert [code_bytes(Spec(bits=b), 1536) for b in (1, 2, 3, 4)] == [194, 386, 578, 770]
    assert code_bytes(Spec(bits=2, residual="qjl"), 1536, True) == 2 * 192 + 6
    assert code_bytes(Spec(bits=2, scale_dtype="float32"), 1536) == 388


@pytest.mark.parametrize("spec", SPECS, ids=name)
@pytest.mark.parametrize("center", [False, True])
def test_file(spec, center, gen, tmp_path):
    x, q = data(gen, 77, 20)
    index = CodedIndex(20, spec, x.mean(0) if center else None)
    index.block = 32
    index.add(x).save(tmp_path / "a.safetensors")
    again = CodedIndex.load(tmp_path / "a.safetensors")
    again.block = 32
    assert again.spec == spec and len(again) == 77
    same(again.decode(), index.decode())
    for a, b in zip(again.search(q, 5), index.search(q, 5)):
        same(a, b)
    same(again.add(x[:9]).decode(), index.add(x[:9]).decode())


def test_a_file_cannot_ask_for_tables_without_end(tmp_path):
    "They have d x d numbers: a file of few bytes says at most d = 4,096."
    path = tmp_path / "d.safetensors"
    about = {"d": 4097, "spec": asdict(Spec(bits=2)), "blocks": 0}
    write_file(path, {"x": torch.zeros(2)}, about, FORMAT)
    with raises(ValueError, "d must be an integer from 2 to 4096, got 4097"):
        CodedIndex.load(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    save_file({"x": torch.zeros(2)}, str(path))
    with raises(ValueError, "c.safetensors must have format"):
        CodedIndex.load(path)
    CodedIndex(8).add(torch.eye(8)).save(path)
    for wrong in (path.read_bytes()[:-9], b""):
        path.write_bytes(wrong)
        with raises(ValueError, "c.safetensors is not a readable index"):
            CodedIndex.load(path)
    with raises(FileNotFoundError):
        CodedIndex.load(tmp_path / "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype, gen):
    x, q = data(gen, 90, 32)
    x, q = x.to(dtype), q.to(dtype)
    for center in (None, x.mean(0)):
        index = CodedIndex(32, Spec(bits=4), center).add(x)
        same(
            index.decode(),
            CodedIndex(32, Spec(bits=4), None if center is None else center.float())
            .add(x.float())
            .decode(),
        )
        agrees(index, q.float(), 3)


def test_the_part_along_the_centre_is_exact(gen):
    x, _ = data(gen, 200, 64)
    mean = x.mean(0) * 20
    index = CodedIndex(64, Spec(bits=1, scale_dtype="float32"), mean).add(x)
    assert float(((index.decode() - x) @ mean).abs().max()) < 1e-3 * float(mean.norm())
    assert float(
        ((CodedIndex(64, Spec(bits=1)).add(x).decode() - x) @ mean).abs().max()
    ) > 0.1 * float(mean.norm())


def test_equal_scores_are_all_found():
    index = CodedIndex(8, Spec(bits=2)).add(torch.ones(6, 8))
    scores, ids = index.search(torch.ones(1, 8), 6)
    assert sorted(ids[0].tolist()) == list(range(6)) and float(scores.max() - scores.min()) == 0


def test_exact_search(gen):
    x, q = data(gen, 333, 12)
    scores, ids = exact_search(x, q, 20, block=50)
    want = (q @ x.T).topk(20)
    assert torch.allclose(scores, want.values, atol=1e-5)
    same(ids, want.indices)
    same(
        exact_search(x, q, 333, block=7)[1].sort(1).values,
        torch.arange(333).expand(7, -1).contiguous(),
    )


def test_recall_by_hand():
    ids = torch.tensor([[4, 7, 2], [1, 0, 3], [5, 6, 8]])
    nearest = torch.tensor([7, 1, 9])
    assert [recall(ids, nearest, k) for k in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert math.isclose(recall(ids, ids[:, 0], 1), 1)


def test_queries_of_no_row(gen):
    x, _ = data(gen, 30, 8)
    scores, ids = CodedIndex(8).add(x).search(torch.zeros(0, 8), 3)
    assert scores.shape == ids.shape == (0, 3)


def test_adding_nothing(gen):
    x, _ = data(gen, 30, 8)
    index = CodedIndex(8).add(x)
    assert len(index.add(x[:0])) == 30
    assert CodedIndex(8).decode().shape == (0, 8)


def test_bad_arguments(gen):
    x, q = data(gen, 30, 8)
    index = CodedIndex(8, Spec(bits=3), x.mean(0)).add(x)
    with raises(TypeError, "spec must be a Spec, got int"):
        CodedIndex(8, 3)
    for center, what in ((torch.ones(9), "[n, 8]"), (torch.full((8,), torch.nan), "finite")):
        with raises(ValueError, what):
            CodedIndex(8, Spec(), center)
    with raises(TypeError, "center must be a floating-point tensor"):
        CodedIndex(8, Spec(), [1.0] * 8)
    with raises(ValueError, "x must have shape [n, 8], got [8]"):
        index.add(x[0])
    with raises(TypeError, "x must be a floating-point tensor"):
        index.add(torch.ones(2, 8, dtype=torch.long))
    with raises(ValueError, "queries must have shape [n, 8]"):
        index.search(q[:, :3])
    with raises(ValueError, "k must be an integer from 1 to 30"):
        index.search(q, 0)
    with raises(ValueError, "holds no vectors"):
        CodedIndex(8).search(q, 1)
    with raises(ValueError, "k must be an integer from 1 to 3"):
        recall(torch.zeros(2, 3), torch.zeros(2), 4)
    with raises(ValueError, "ids must be [m, K]"):
        recall(torch.zeros(2, 3), torch.zeros(3), 1)
    with raises(ValueError, "base must have shape"):
        exact_search(torch.zeros(3), q)


def test_a_failed_add_changes_nothing(gen):
    x, q = data(gen, 30, 8)
    index = CodedIndex(8, Spec(bits=3), x.mean(0))
    index.block = 8
    index.add(x[:10])
    before = index.decode()
    bad = x.clone()
    bad[25, 3] = torch.inf
    with raises(ValueError, "x must be finite"):
        index.add(bad)
    huge = x.clone()
    huge[25] *= 1e7  # finite, but its scale does not fit fp16: found in the fourth block
    with raises(ValueError, "scale_dtype='bfloat16'"):
        index.add(huge)
    same(index.decode(), before)
    agrees(index, q, 10)
