"""Nearest neighbours from codes of equal size: run.py vectors (--embeddings FILE.npy | --gguf
FILE.gguf) [--threads N] [--repeat R] --out FILE.

Rows of the file, scaled to unit length, are split into a base and 1,000 queries; for a GGUF
file they are the different rows of its token table. Each method codes the base and answers
every query by inner product. Recall 1@k is the share of queries whose true nearest neighbour
(brute force on the fp32 rows) is among the first k answers. Methods: `CodedIndex` with scale
norm (the paper's MSE code), mse, unbiased and with residual qjl (prod, the paper's other code;
at one bit QJL alone), each with and without the base's mean as centre, and from faiss product
quantisation (PQ, and OPQ at one bit with --opq), RaBitQ and its own TurboQuant codes.

Gate: searching codes gives the scores of brute force on the decoded vectors, and our brute
force finds what faiss's exact index finds. All methods run with the same number of threads.
`cpu_s` is processor time (with one thread: what a quiet machine takes), `wall_s` the clock."""

import math
import statistics

import numpy as np
import torch
from plan import Plan
from bench.timing import Clock

from turboquant_nb.quant import residual
from turboquant_nb.theory import rotation
from turboquant_nb.theory.qjl import qjl_encode, sketch_matrix, unpack_signs
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.apps.search import CodedIndex, code_bytes, exact_search, recall

try:
    import faiss
except ImportError:  # run.py says so before anything is measured
    faiss = None

KS = (1, 2, 4, 8, 10, 16, 32, 64, 100)
PQ = {
    1: (8, 8),
    2: (4, 8),
    3: (2, 6),
    4: (2, 8),
}  # bits per channel: (channels per code, bits per code)
OURS = {
    "norm": lambda bits, seed: Spec(bits=bits, scale="norm", seed=seed),
    "mse": lambda bits, seed: Spec(bits=bits, seed=seed),
    "unbiased": lambda bits, seed: Spec(bits=bits, scale="unbiased", seed=seed),
    "unbiased, haar": lambda bits, seed: Spec(
        bits=bits, scale="unbiased", rotation="haar", seed=seed
    ),
    "prod": lambda bits, seed: Spec(bits=bits, residual="qjl", scale="norm", seed=seed),
}


def split(rows, queries, seed):
    "Unit rows as a base and held-out queries."
    x = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
    x /= torch.linalg.vector_norm(x, dim=1, keepdim=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order[queries:]], x[order[:queries]]


def token_table(path):
    "The different rows of a GGUF file's token embedding."
    from gguf import GGUFReader, dequantize

    tensor = next(t for t in GGUFReader(path).tensors if t.name == "token_embd.weight")
    table = dequantize(tensor.data, tensor.tensor_type)
    first = {row.tobytes(): i for i, row in reversed(list(enumerate(table)))}
    return table[sorted(first.values())], tensor.tensor_type.name


def gate(base, queries):
    """Search on codes against brute force on decoded vectors, and our brute force against
    faiss's."""
    part, worst = base[:3000], 0.0
    for spec in (
        Spec(bits=1),
        Spec(bits=2, scale="unbiased"),
        Spec(bits=3, residual="qjl"),
        Spec(bits=4),
    ):
        index = CodedIndex(base.shape[1], spec, part.mean(0)).add(part)
        scores, ids = index.search(queries[:200], 10)
        plain = queries[:200].double() @ index.decode().double().T
        best = plain.topk(10).values
        worst = max(
            worst,
            float((scores - best).abs().max()),
            float((plain.gather(1, ids) - best).abs().max()),
        )
    flat = faiss.IndexFlatIP(base.shape[1])
    flat.add(part.numpy())
    same = (
        exact_search(part, queries, 1)[1][:, 0].numpy()
        == flat.search(queries.numpy(), 1)[1][:, 0]
    ).mean()
    print(
        f"gate: largest score difference {worst:.2g}, same nearest neighbour as faiss for "
        f"{same:.4f} of the queries",
        flush=True,
    )
    return {
        "cmd": (
            "scores on codes equal brute force on decoded vectors to 1e-5; brute force agrees "
            "with faiss's IndexFlatIP"
        ),
        "passed": bool(worst < 1e-5 and same > 0.999),
    }


class Bench:
    def __init__(self, base, queries):
        self.base, self.queries = base, queries
        self.nearest = exact_search(base, queries, 1)[1][:, 0]

    def row(self, method, bits, code, shared, runs, **more):
        "runs: one (ids, indexing Clock, searching Clock) per repetition."
        found = {
            f"recall_1@{k}": statistics.mean(recall(ids, self.nearest, k) for ids, *_ in runs)
            for k in KS
        }
        spread = [recall(ids, self.nearest, 1) for ids, *_ in runs]
        times = {
            f"{what}_{kind}": statistics.median(getattr(r[1 + i], part) for r in runs)
            for i, what in enumerate(("index", "search"))
            for kind, part in (("cpu_s", "cpu"), ("wall_s", "wall"))
        }
        return dict(
            method=method,
            bits=bits,
            bytes_per_vector=code,
            shared_bytes=shared,
            recall_1_min=min(spread),
            recall_1_max=max(spread),
            n=len(runs),
            unit="share of queries; seconds",
            **found,
            **times,
            **more,
        )

    def ours(self, name, bits, center, repeat):
        runs, d = [], self.base.shape[1]
        for seed in range(repeat):
            # making the rotation is part of indexing, and so is the sketch
            rotation._seeded.cache_clear()
            residual._sketch.cache_clear()
            with Clock() as index_time:
                index = CodedIndex(
                    d,
                    OURS[name](bits, seed + 100 * bits),
                    self.base.mean(0) if center else None,
                ).add(self.base)
            with Clock() as search_time:
                ids = index.search(self.queries, max(KS))[1]
            runs.append((ids, index_time, search_time))
        held = index.parts()
        code = (held["planes"] + held["numbers"] + held["signs"]) / len(self.base)
        if abs(code - code_bytes(index.spec, d, center)) > 0.01:
            raise SystemExit(f"{code} bytes held, {code_bytes(index.spec, d, center)} expected")
        return self.row(name, bits, code, held["center"], runs, center=center)

    def qjl(self, center):
        """One bit per channel of the paper's unbiased method: no table is left, only signs and
        a norm."""
        base, d = self.base, self.base.shape[1]
        with Clock() as index_time:
            axis = (
                torch.nn.functional.normalize(base.mean(0), dim=0) if center else torch.zeros(d)
            )
            S, parts = sketch_matrix(d, d, seed=0), []
            for part in base.split(4096):
                along = part @ axis
                packed, norm = qjl_encode(part - along[:, None] * axis, S)
                parts.append((packed, norm.half(), along.half()))
        with Clock() as search_time:
            along, factor = self.queries @ axis, math.sqrt(math.pi / 2) / d
            sketched = (self.queries - along[:, None] * axis) @ S.T * factor
            scores = (
                (sketched @ (unpack_signs(p, d).float() * 2 - 1).T) * n.float()
                + along[:, None] * t.float()
                for p, n, t in parts
            )
            ids = torch.cat(list(scores), 1).topk(max(KS)).indices
        return self.row(
            "prod",
            1,
            parts[0][0].shape[1] + (4 if center else 2),
            4 * d if center else 0,
            [(ids, index_time, search_time)],
            center=center,
        )

    def faiss(self, method, bits, index, shared, code=None):
        base, queries = self.base.numpy(), self.queries.numpy()
        with Clock() as index_time:
            index.train(base)
            with Clock() as add_time:
                index.add(base)
        with Clock() as search_time:
            ids = torch.from_numpy(index.search(queries, max(KS))[1])
        inner = faiss.downcast_index(index.index) if hasattr(index, "chain") else index
        return self.row(
            method,
            bits,
            code or inner.code_size,
            shared,
            [(ids, index_time, search_time)],
            add_cpu_s=add_time.cpu,
        )

    def product(self, bits, points, opq=0):
        d, (sub, nbits) = self.base.shape[1], PQ[bits]
        index = faiss.IndexPQ(d, d // sub, nbits, faiss.METRIC_INNER_PRODUCT)
        index.pq.cp.min_points_per_centroid, index.pq.cp.max_points_per_centroid = (
            1,
            -(-points // 2**nbits),
        )
        shared, method = 4 * d * 2**nbits, "PQ"
        if opq:
            opq_rotation = faiss.OPQMatrix(d, d // sub)
            opq_rotation.niter, opq_rotation.pq = (
                opq,
                faiss.ProductQuantizer(d, d // sub, nbits),
            )
            opq_rotation.pq.cp.min_points_per_centroid = 1
            index, shared, method = (
                faiss.IndexPreTransform(opq_rotation, index),
                shared + 4 * d * d,
                "OPQ",
            )
        return self.faiss(method, bits, index, shared)

    def rotated(self, method, bits, index, shared=0):
        d = self.base.shape[1]
        return self.faiss(
            method,
            bits,
            faiss.IndexPreTransform(faiss.RandomRotationMatrix(d, d), index),
            shared,
        )


def options(p):
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--embeddings", help="a .npy file [n, d]")
    source.add_argument("--gguf", help="a model file with a token table")
    p.add_argument("--queries", type=int, default=1000)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--repeat", type=int, default=3, help="rotations for our rows")
    p.add_argument(
        "--points", type=int, default=65536, help="PQ trains on at most this many vectors"
    )
    p.add_argument(
        "--opq", type=int, default=0, help="iterations of OPQ at one bit; 0 leaves it out"
    )


def rows(a, bench):
    d = bench.base.shape[1]
    for bits in (1, 2, 3, 4):
        for center in (False, True):
            for name in OURS:
                wanted = bits > 1 if name == "prod" else bits == 1 if "haar" in name else True
                if wanted and (
                    not a.gguf or (center and name != "mse") or name == "unbiased"
                ):  # the table is large
                    yield bench.ours(name, bits, center, a.repeat)
        yield bench.rotated(
            "faiss RaBitQ", bits, faiss.IndexRaBitQ(d, faiss.METRIC_INNER_PRODUCT, bits), 4 * d
        )
        if not a.gguf:
            yield bench.rotated(
                "faiss TurboQuant",
                bits,
                faiss.IndexScalarQuantizer(
                    d,
                    getattr(faiss.ScalarQuantizer, f"QT_{bits}bit_tqmse"),
                    faiss.METRIC_INNER_PRODUCT,
                ),
            )
    for center in (False, True):
        yield bench.qjl(center)
    for bits in (1, 2, 3, 4):
        yield bench.product(bits, a.points)
    if a.opq:
        yield bench.product(1, a.points, a.opq)


def plan(a):
    torch.set_num_threads(a.threads)
    faiss.omp_set_num_threads(a.threads)
    model, kind = {"id": "none"}, "embeddings"
    if a.gguf:
        table, kind = token_table(a.gguf)
        model = {"id": a.gguf.rsplit("/", 1)[-1], "revision": None}
    base, queries = split(table if a.gguf else np.load(a.embeddings), a.queries, 0)
    base = base[: len(base) // 4 * 4]  # for which `code_bytes` is exact
    top = (exact := exact_search(base, queries, 2)[0])[:, 0]
    name = f"{(a.embeddings or a.gguf).rsplit('/', 1)[-1]} ({kind}, unit length)"
    data = {
        "id": name,
        "n": len(base),
        "queries": len(queries),
        "d": base.shape[1],
        "mean_length": float(base.mean(0).norm()),
        "median_best": float(top.median()),
        "median_gap": float((top - exact[:, 1]).median()),
    }
    more = dict(
        threads=a.threads, pq_training_vectors=min(a.points, len(base)), opq_iterations=a.opq
    )
    return Plan(
        "vector_search",
        gate(base, queries),
        rows(a, Bench(base, queries)),
        data,
        model,
        more=more,
    )
