#!/usr/bin/env python3
"""How many values could a decode step leave unread? sparse_values.py --model M --text FILE ...
--out FILE [--lengths N ...] [--queries N].

A step needs a value only as far as its weight goes. For the last queries at each length the
softmax weights on all earlier tokens are computed exactly, and blocks of tokens are counted
whose every weight is below a threshold: for one query, and for all queries that share keys and
values, which is what a kernel can skip, because they are read once for the group. `left_out` is
the weight that is left out, `error` the relative change of the output it causes (largest over
queries of a layer, mean over layers). One forward pass of each text serves all lengths, since
the model is causal. No codes are involved: weights are those of exact keys.

Gate: weights sum to one, and the output from them is that of the model's own attention."""

import argparse
import time

import torch
from recipes import add_options, opened

from turboquant_nb import results
from turboquant_nb.evaluation.pairs import attending, causal_mask

NAME = "turboquant_sparse_values"
BLOCKS, THRESHOLDS = (1, 64, 256), (1e-2, 1e-3, 1e-4, 1e-6)


def left_out(p, v, block, threshold, group):
    """What a step does not read: p [H, n, T] weights, v [Hk, T, d]. Of every query, or of all
    `group` queries of a KV head together: (share of blocks, weight left out [H, n], relative
    change of the output [H, n])."""
    H, n, T = p.shape
    pad = -T % block
    blocks = torch.nn.functional.pad(p, (0, pad)).view(H, n, -1, block)
    skip = blocks.amax(-1) < threshold  # [H, n, blocks]
    if group:
        skip = skip.view(-1, group, n, skip.shape[-1]).all(1).repeat_interleave(group, 0)
    lost = p * skip.repeat_interleave(block, -1)[..., :T]
    wide = v.repeat_interleave(H // len(v), 0)
    change = (lost @ wide).norm(dim=-1) / (p @ wide).norm(dim=-1)
    return float(skip.double().mean()), lost.sum(-1), change


class Watch:
    "An attention that does what the model does, and looks at the weights of some queries."

    def __init__(self, ends, queries):
        self.ends, self.queries, self.found, self.worst = ends, queries, [], 0.0

    def __call__(self, call):
        module, query, key, value, _, scaling, *_ = call
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        group = query.shape[1] // key.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        for end in self.ends:
            q, k, v = query[0, :, end - self.queries : end], key[0, :, :end], value[0, :, :end]
            scores = q @ k.repeat_interleave(group, 0).mT * scaling
            p = scores.masked_fill(
                ~causal_mask(self.queries, end, q.device)[0], -torch.inf
            ).softmax(-1)
            own = p @ v.repeat_interleave(group, 0)
            theirs = out[0, :, end - self.queries : end]
            self.worst = max(
                self.worst,
                float((own - theirs).norm() / theirs.norm()),
                float((p.sum(-1) - 1).abs().max()),
            )
            for block in BLOCKS:
                for threshold in THRESHOLDS:
                    for shared in (0, group):
                        share, weight, change = left_out(p, v, block, threshold, shared)
                        row = dict(
                            length=end,
                            layer=module.layer_idx,
                            block=block,
                            threshold=threshold,
                            shared=bool(shared),
                        )
                        self.found.append(
                            row
                            | dict(
                                share=share,
                                left_out=float(weight.mean()),
                                error=float(change.max()),
                            )
                        )
        return out


def summary(texts, length, block, threshold, shared):
    """Means over layers, then over texts with their standard error; the least and the most of a
    layer."""
    mine = [
        [
            r
            for r in found
            if (r["length"], r["block"], r["threshold"], r["shared"])
            == (length, block, threshold, shared)
        ]
        for found in texts
    ]
    by_text = lambda name: torch.tensor(
        [[r[name] for r in rows] for rows in mine], dtype=torch.float64
    )
    share = by_text("share")
    spread = lambda x: (
        float(x.mean(1).std() / len(texts) ** 0.5) if len(texts) > 1 else float("nan")
    )
    layers = share.mean(0)
    return dict(
        length=length,
        block=block,
        threshold=threshold,
        shared=shared,
        share=float(share.mean()),
        stderr=spread(share),
        share_of_layers=[round(x, 4) for x in layers.tolist()],
        left_out=float(by_text("left_out").mean()),
        error=float(by_text("error").mean()),
        largest_error=float(by_text("error").max()),
        texts=len(texts),
        unit="share of blocks",
    )


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(p)
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    p.add_argument("--queries", type=int, default=32)
    p.add_argument("--out", required=True)
    p.set_defaults(windows=3)
    a = results.parse(p)
    a.length = max(a.lengths)
    began = time.time()
    model, _, ids, _, origin = opened(a)
    texts, worst = [], 0.0
    for row in ids:
        if time.time() - began > a.seconds:
            raise SystemExit("out of time; what is measured is saved")
        watch = Watch(a.lengths, a.queries)
        with torch.inference_mode(), attending(model, NAME, watch):
            model(row[None], use_cache=False, logits_to_keep=1)
        texts.append(watch.found)
        worst = max(worst, watch.worst)
        gate = {
            "cmd": (
                "weights sum to one and give the output of the model's own attention, largest "
                "relative difference"
            ),
            "value": worst,
            "limit": 1e-4,
            "passed": worst < 1e-4,
        }
        print(
            f"text {len(texts)} of {len(ids)}, {time.time() - began:.0f} s, "
            f"{gate['value']:.1e}",
            flush=True,
        )
        if not gate["passed"]:
            raise SystemExit("the gate did not pass; nothing is saved")
        rows = [
            summary(texts, n, b, t, s)
            for n in a.lengths
            for b in BLOCKS
            for t in THRESHOLDS
            for s in (False, True)
        ]
        results.write(
            a, "sparse values", rows, gate, origin, {"id": a.data_id, "n": len(texts)}, [0]
        )


if __name__ == "__main__":
    main()
