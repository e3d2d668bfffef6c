"""How many weights of the MLPs could a token leave on the disk? run.py sparse_weights --model M
--text FILE ... --out FILE [--shares S ...] [--ways W ...]
[--bits B ...].

A neuron of a gated MLP is a row of the gate and up projections and a column of the down
projection; what it adds to the output is its activation times that column. For each token and
layer the neurons that add least are left out: the share that is kept is read, the rest could
stay where it is. Three ways to know them:

- `oracle`: by the activations themselves, which are known when all is read: a bound;
- `predictor`: by a linear map of the layer's input, of rank --rank, fitted by ridge regression
  to the logarithm of what neurons add, on other windows; its own bytes are counted;
- `fixed`: those that add most on average there, the same for all tokens.

`bytes` is what a token reads of the MLPs, relative to fp16. `touched` is the share of neurons
that 32 tokens in a row need together: what a prompt, a batch or a draft reads. Beside them
`bits`: all weights of the MLPs rounded to so many bits in groups of 64 with an fp16 scale, by
the nearest level, which is the plainest way.

Gate: with all neurons kept the losses are those of the model, bit for bit."""

import math
from contextlib import ExitStack

import torch
from eval.windows import Windows, add_options
from plan import Plan, must_pass

from turboquant_nb.evaluation.score import paired, score

SPAN = 32  # tokens in a row
WAYS = "oracle", "predictor", "fixed"  # to know a token's neurons


def mlps_of(model):
    "Gated MLPs, by layer. SystemExit for a model that has none."
    found = [m for m in model.modules() if hasattr(m, "gate_proj") and hasattr(m, "down_proj")]
    if not found:
        raise SystemExit(f"{type(model).__name__} has no MLPs with gate_proj and down_proj")
    return found


def added(mlp, a):  # [..., neurons]
    "The length of what each neuron adds to the output."
    return a.abs() * mlp.down_proj.weight.norm(dim=0)


class Sparse:
    "The model while all but some neurons of each token are left out."

    def __init__(self, mlps, share, scores):
        self.mlps, self.share, self.scores = mlps, share, scores
        self.inputs, self.touched = {}, []

    def __enter__(self):
        self.stack = ExitStack()
        for mlp in self.mlps:
            for module, hook in ((mlp, self.look), (mlp.down_proj, self.drop(mlp))):
                self.stack.callback(module.register_forward_pre_hook(hook).remove)
        return self

    def __exit__(self, *exc):
        self.stack.close()

    def look(self, mlp, args):
        self.inputs[mlp] = args[0]

    def drop(self, mlp):
        def hook(module, args):
            a = args[0]
            keep = math.ceil(self.share * a.shape[-1])
            if keep == a.shape[-1]:
                return None
            places = self.scores(mlp, self.inputs[mlp], a).topk(keep, -1).indices
            kept = torch.zeros_like(a, dtype=torch.bool).scatter_(-1, places, True)
            rows = kept[:, : kept.shape[1] // SPAN * SPAN].unflatten(1, (-1, SPAN))
            if rows.numel():
                self.touched.append(float(rows.any(2).float().mean()))
            return (a * kept,)

        return hook


def oracle(mlp, x, a):
    return added(mlp, a)


class Fitted:
    "What is learnt from other windows: means, and a predictor of low rank."

    def __init__(self, model, mlps, ids, rank):
        self.sums, self.rank = {m: 0 for m in mlps}, rank
        self.products = {m: [0, 0] for m in mlps}
        sparse = Sparse(mlps, 1.0, None)
        sparse.drop = lambda mlp: (
            lambda module, args: self.add(mlp, sparse.inputs[mlp], args[0])
        )
        with torch.inference_mode(), sparse:
            for row in ids:
                model(row[None], use_cache=False, logits_to_keep=1)
        self.maps = {m: self.solve(*x) for m, x in self.products.items()}

    def add(self, mlp, x, a):
        x, y = x.flatten(0, 1), added(mlp, a).flatten(0, 1)
        self.sums[mlp] = self.sums[mlp] + y.sum(0)
        x = torch.nn.functional.pad(x, (0, 1), value=1.0).double()
        y = y.clamp(min=1e-8).log().double()
        xx, xy = self.products[mlp]
        self.products[mlp] = [xx + x.T @ x, xy + x.T @ y]

    def solve(self, xx, xy):
        "Ridge regression, then the best map of that rank for inputs of this covariance."
        xx = xx + 1e-3 * xx.diagonal().mean() * torch.eye(len(xx), device=xx.device).double()
        root = torch.linalg.cholesky(xx).mT
        whole = torch.linalg.solve(xx, xy)
        u, s, v = torch.linalg.svd(root @ whole, full_matrices=False)
        left = torch.linalg.solve_triangular(
            root, u[:, : self.rank] * s[: self.rank], upper=True
        )
        return left.float(), v[: self.rank].float()

    def predictor(self, mlp, x, a):
        left, right = self.maps[mlp]
        return torch.nn.functional.pad(x, (0, 1), value=1.0) @ left @ right

    def fixed(self, mlp, x, a):
        return self.sums[mlp].expand_as(a)

    def bytes(self, mlp):
        "Of the predictor, relative to the MLP's."
        n, d = mlp.gate_proj.weight.shape
        return self.rank * (d + 1 + n) / (3 * d * n)


def rounded(weight, bits):
    "The nearest of 2**bits - 1 levels around zero, in groups of 64 along a row."
    groups = weight.unflatten(1, (-1, 64)) if weight.shape[1] % 64 == 0 else weight[:, None]
    top = 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(-1, keepdim=True) / top).half().float().clamp(min=1e-8)
    return ((groups / scale).round().clamp(-top, top) * scale).reshape(weight.shape)


class Rounded:
    "The model while weights of its MLPs are rounded."

    def __init__(self, mlps, bits):
        names = "gate_proj", "up_proj", "down_proj"
        self.weights, self.bits = [getattr(m, n).weight for m in mlps for n in names], bits

    def __enter__(self):
        self.own = [w.data for w in self.weights]
        for w in self.weights:
            w.data = rounded(w.data, self.bits)

    def __exit__(self, *exc):
        for w, own in zip(self.weights, self.own):
            w.data = own


def options(p):
    add_options(p, windows=8)
    p.add_argument("--train", type=int, default=12, help="windows that are fitted to")
    p.add_argument("--rank", type=int, default=64)
    p.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    p.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    p.add_argument("--bits", type=int, nargs="+", default=[8, 6, 5, 4, 3])


def rows(a, w, mlps, fitted):
    known = dict(zip(WAYS, (oracle, fitted.predictor, fitted.fixed)))
    ways = {way: known[way] for way in a.ways}
    measure = lambda: score(w.model, w.ids, None, "decode", w.prompt, w.batch).loss

    def row(way, loss, **more):
        percent, stderr = paired(loss, w.plain.loss)
        about = dict(way=way, percent=percent, stderr=stderr, windows=len(loss))
        return about | more | dict(unit="% of perplexity")

    for share in a.shares:
        for way, scores in ways.items():
            with Sparse(mlps, share, scores) as sparse:
                loss = measure()
            extra = fitted.bytes(mlps[0]) if way == "predictor" else 0.0
            touched = sum(sparse.touched) / len(sparse.touched) if sparse.touched else None
            yield row(way, loss, share=share, bytes=share + extra, touched=touched)
    for bits in a.bits:
        with Rounded(mlps, bits):
            loss = measure()
        yield row("bits", loss, bits=bits, bytes=(bits + 16 / 64) / 16)


def plan(a):
    windows = a.windows
    a.windows = windows + a.train
    w = Windows(a)
    train, w.ids = w.ids[windows:], w.ids[:windows]
    w.data["n"] = len(w.ids)
    mlps = mlps_of(w.model)
    fitted = Fitted(w.model, mlps, train, a.rank)
    with Sparse(mlps, 1.0, oracle):
        kept = score(w.model, w.ids, None, "decode", w.prompt, w.batch).loss
    same = torch.equal(kept, w.plain.loss)
    gate = must_pass(
        {"cmd": "all neurons kept: the model's losses, bit for bit", "passed": same}
    )
    return Plan("sparse weights", gate, rows(a, w, mlps, fitted), w.data, w.origin)
