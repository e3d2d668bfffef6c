"""What codes of latents cost a model: run.py latent_loss --out FILE [--model M] [--ranks R ...]
[--bits B ...].

No model with latents can be had here. A layer becomes one by the singular value decomposition
of its key and value projections, stacked, each in units of its size: keys before RoPE and
values are U c of a latent c, exactly at full rank, of fewer channels by the largest singular
values. Tokens are coded before anything attends to them, all but the first four and without
their mean; RoPE stays where it is. `keys and values` codes each head's key before RoPE and its
value at as many bits instead.

`attention_error` is that of a layer's output on the model's own states, relative, the mean of
all layers; `percent` is what perplexity rises by with all layers coded. Gate: at full rank
without codes the losses are the model's."""

from contextlib import ExitStack

import torch
from eval.windows import Windows, add_options
from plan import Plan, must_pass

from turboquant_nb.evaluation.score import paired, score
from turboquant_nb.quant.quantizer import Quantizer, Spec, decode, encode

SINKS = 4  # first tokens that are exact


class Latent:
    "The key and value projections of a layer as a latent's: `rank` None for keys and values."

    def __init__(self, layer, rank, bits, head):
        self.k, self.v, self.head, self.rank = layer.k_proj, layer.v_proj, head, rank
        self.inputs, self.mean = None, 0.0
        if rank is not None:
            sides = [p.weight.detach().float() for p in (self.k, self.v)]
            size = torch.cat([w.norm().expand(len(w)) for w in sides])  # of keys, of values
            weights, self.size = torch.cat(sides) / size[:, None], size
            self.u = torch.linalg.svd(weights, full_matrices=False)[0][:, :rank]
            biases = [p.bias for p in (self.k, self.v)]
            if biases[0] is not None:
                self.mean = torch.cat(biases).detach()
        self.code = Quantizer(Spec(bits), head if rank is None else rank) if bits else None

    def coded(self, x):  # [B, n, ..., d]
        "Codes of all tokens but the first, without their mean."
        if self.code is None:
            return x
        late = x[:, SINKS:]
        mean = late.mean(1, keepdim=True)
        back = decode(self.code, encode(self.code, late - mean)) + mean
        return torch.cat([x[:, :SINKS], back], 1)

    def pair(self, module, x):
        "What this projection gives, from the latent of its input."
        both = torch.cat([p.weight @ x.mT for p in (self.k, self.v)], -2).mT
        if self.rank is None:
            both = both + self.bias()
            both = self.coded(both.unflatten(-1, (-1, self.head))).flatten(-2)
        else:
            both = self.coded(both / self.size @ self.u) @ self.u.mT * self.size + self.mean
        k, v = both.split([len(self.k.weight), len(self.v.weight)], -1)
        return k if module is self.k else v

    def bias(self):
        biases = [p.bias for p in (self.k, self.v)]
        return 0.0 if biases[0] is None else torch.cat(biases)


class Coded:
    "The model while layers have latents."

    def __init__(self, latents):
        self.latents = latents

    def __enter__(self):
        self.stack = ExitStack()
        for x in self.latents:
            hook = lambda module, args, out, x=x: x.pair(module, args[0])
            for module in (x.k, x.v):
                self.stack.callback(module.register_forward_hook(hook).remove)

    def __exit__(self, *exc):
        self.stack.close()


def attention_error(model, ids, layers, latents):
    "The mean of the layers' relative errors, each on the model's own states."
    errors, busy = [], []

    def look(x):
        def hook(module, args, kwargs, out):
            if busy:
                return
            busy.append(1)
            with Coded([x]):
                other = module(*args, **kwargs)[0]
            busy.clear()
            errors.append(float((other - out[0]).norm() / out[0].norm()))

        return hook

    with torch.inference_mode(), ExitStack() as stack:
        for layer, x in zip(layers, latents):
            hook = layer.register_forward_hook(look(x), with_kwargs=True)
            stack.callback(hook.remove)
        for row in ids:
            model(row[None], use_cache=False, logits_to_keep=1)
    return sum(errors) / len(errors)


def options(p):
    add_options(p, windows=4, length=512, prompt=64)
    p.add_argument("--ranks", type=float, nargs="+", default=[1.0, 0.75, 0.5], help="of full")
    p.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])


def losses(w):
    return score(w.model, w.ids, None, "decode", w.prompt, w.batch).loss


def rows(a, w, layers):
    head, full = layers[0].head_dim, 2 * len(layers[0].k_proj.weight)
    wanted = [(None, bits) for bits in a.bits]
    wanted += [(int(share * full) // 16 * 16, 0) for share in a.ranks if share < 1]
    wanted += [(int(share * full) // 16 * 16, bits) for share in a.ranks for bits in a.bits]
    for rank, bits in wanted:
        latents = [Latent(layer, rank, bits, head) for layer in layers]
        scales = full // head if rank is None else 1
        with Coded(latents):
            percent, stderr = paired(losses(w), w.plain.loss)
        yield dict(
            way="keys and values" if rank is None else "latent",
            rank=rank or full,
            full=full,
            bits=bits or 16,
            bytes_per_token=(rank or full) * (bits or 16) / 8 + (2 * scales if bits else 0),
            attention_error=attention_error(w.model, w.ids[:1], layers, latents),
            percent=percent,
            stderr=stderr,
            windows=len(w.ids),
            unit="% of perplexity",
        )


def plan(a):
    w = Windows(a)
    layers = [m for m in w.model.modules() if hasattr(m, "k_proj") and hasattr(m, "head_dim")]
    full, own = 2 * len(layers[0].k_proj.weight), w.plain.loss
    with Coded([Latent(layer, full, 0, layer.head_dim) for layer in layers]):
        gap = float((losses(w) - own).abs().max())
    text = "all channels, no codes: the model's losses, nats"
    gate = must_pass({"cmd": text, "value": gap, "passed": gap < 1e-3})
    return Plan("latent loss", gate, rows(a, w, layers), w.data, w.origin)
