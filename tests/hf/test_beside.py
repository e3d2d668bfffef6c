"""Products of one tensor on a second stream: which run there, in which order streams wait, and
what is left alone. (test_cuda.py: streams of a GPU, bits of graphs.)"""

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
from tests.helpers import generate, prompt, tiny

from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf import beside as module
from turboquant_nb.hf.beside import Beside, SideStream, beside, side_products
from turboquant_nb.hf.graphs import CudaGraph, Tape

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Noting:
    "A side stream that notes what it is told and runs it at once."

    def __init__(self):
        self.notes = []

    def fork(self):
        self.notes.append("fork")
        return sum(x == "fork" for x in self.notes)

    def run(self, since, work, linear, x):
        self.notes.append((since, linear.out_features))
        return work(linear, x)


class Forked(Tape):
    "A tape with a side stream, which all of them share."

    stream = None

    def side(self):
        return Forked.stream


def test_order_of_forks_and_products():
    """Of each layer: the query's product forks, keys' and values' run since that fork; the
    output's product is another tensor's. Tokens are those of eager steps, the model is as
    before."""
    model, Forked.stream = tiny("llama", num_hidden_layers=3), Noting()
    outs = [
        generate(
            model, prompt(2, 20), "turboquant", cache=TurboQuantCache(model, "k3v3", graphs=g)
        )[0]
        for g in (False, Forked)
    ]
    assert torch.equal(*outs)
    rows = model.model.layers[0].self_attn.k_proj.out_features
    layer = lambda i: ["fork", (2 * i + 1, rows), (2 * i + 1, rows), "fork"]
    assert Forked.stream.notes == [x for i in range(3) for x in layer(i)]
    assert not any("forward" in vars(x) for x in model.modules() if type(x) is nn.Linear)


def test_products_with_a_norm_behind_them():
    "A norm reads keys before values are there: tokens are those of eager steps."
    model, Forked.stream = tiny("qwen3"), Noting()
    outs = [
        generate(
            model, prompt(2, 20), "turboquant", cache=TurboQuantCache(model, "k4v4", graphs=g)
        )[0]
        for g in (False, Forked)
    ]
    layers = model.config.num_hidden_layers
    assert torch.equal(*outs) and len(Forked.stream.notes) == 4 * layers


class Cuda:
    "What of torch.cuda a side stream calls: notes who waits for whom."

    def __init__(self):
        self.notes, self.now = [], "main"

    def current_stream(self, device):
        return self.Stream(device, self.now)

    def Stream(self, device, name="side"):
        notes = self.notes

        class One:
            record_event = lambda self: notes.append(f"{name} records") or f"event of {name}"
            wait_event = lambda self, event: notes.append(f"{name} waits for {event}")
            wait_stream = lambda self, other: notes.append(f"{name} waits for {other.name}")

        One.name = name
        return One()

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before


def test_streams_wait_for_each_other(monkeypatch):
    "The side for the fork, and the step for the side before anything else."
    cuda = Cuda()
    for name in ("current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(module, "_BESIDE", {})
    side = CudaGraph(torch.device("cpu")).side()
    assert isinstance(side, SideStream) and side.stream is SideStream(side.device).stream
    since = side.fork()
    assert side.run(since, lambda x: cuda.notes.append(f"{x} on {cuda.now}") or x, "work") == (
        "work"
    )
    assert cuda.notes == [
        "main records",
        "side waits for event of main",
        "work on side",
        "main waits for side",
    ]


def test_what_makes_a_fork():
    """Another tensor, and the same one after somebody wrote into it; states that count no
    versions and calls with names run as ever. What the side made is held till the next fork."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    side = Noting()
    way, x = Beside(side), torch.randn(1, 4)
    with torch.no_grad():
        way.product(one, x)
        out = way.product(two, x)
        assert torch.equal(out, two(x)) and way.made[0] is out and side.notes[-1] == (1, 4)
        x.add_(1)
        assert torch.equal(way.product(two, x), two(x))
        assert side.notes[-1] == "fork" and not way.made
        way.product(one, x.clone())
        assert side.notes.count("fork") == 3 and way.moved == 1
        assert torch.equal(way.product(one, input=x), one(x))
    with torch.inference_mode():
        y = torch.ones(1, 4)
        for linear in (one, two):
            assert torch.equal(way.product(linear, y), linear(y))
    assert side.notes.count("fork") == 3 and way.moved == 1


def test_what_is_left_alone():
    "Hooks, adapters, packed weights, compiled models, one joint product, MLPs."
    model = copy.deepcopy(tiny("llama", num_hidden_layers=2))
    attention = model.model.layers[0].self_attn
    names = lambda: {
        name for name, x in model.named_modules() if any(x is y for y in side_products(model))
    }
    every = names()
    first = "model.layers.0.self_attn."
    assert len(every) == 8 and all(".self_attn." in name for name in every)
    hook = attention.k_proj.register_forward_hook(lambda *args: None)
    assert every - names() == {f"{first}k_proj"}
    hook.remove()
    attention.v_proj.forward = lambda x: x
    assert every - names() == {f"{first}v_proj"}
    del attention.v_proj.forward
    plain = attention.q_proj

    class Adapter(nn.Linear):
        "Something else than a product."

    attention.q_proj = Adapter(8, 8)
    assert every - names() == {f"{first}q_proj"}
    attention.q_proj = plain
    weight = plain.weight
    plain.weight = nn.Parameter(weight.data.to(torch.int8), requires_grad=False)
    assert every - names() == {f"{first}q_proj"}
    plain.weight = weight
    for joint in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, joint, nn.Identity())
    assert names() == {name for name in every if ".1." in name}
    model.model.layers[1].compile()
    assert not names()


def test_a_pass_that_fails_leaves_the_model_as_it_was():
    model = tiny("llama")
    Forked.stream = Noting()
    with pytest.raises(RuntimeError, match="broke off"), beside(model, Forked()) as way:
        assert any("forward" in vars(x) for x in model.modules())
        assert way.side is Forked.stream
        raise RuntimeError("broke off")
    assert not any("forward" in vars(x) for x in model.modules() if type(x) is nn.Linear)
    with beside(model, Tape()) as way:
        assert way is None


def test_another_thread_stays_on_its_own_stream():
    "Kills: a pass that runs meanwhile, whose products became a part of this one's graph."
    one, two, side = nn.Linear(4, 4), nn.Linear(4, 4), Noting()
    way, x, outs = Beside(side), torch.randn(1, 4), []

    def work():
        with torch.no_grad():
            outs.extend(way.product(linear, x) for linear in (one, two))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert all(torch.equal(a, f(x)) for a, f in zip(outs, (one, two)))
    assert len(outs) == 2 and not side.notes and not way.moved


def test_a_product_of_two_attentions_is_left_as_it_was():
    model = copy.deepcopy(tiny("llama", num_hidden_layers=2))
    first, second = (x.self_attn for x in model.model.layers)
    second.k_proj, Forked.stream = first.k_proj, Noting()
    with beside(model, Forked()):
        assert "forward" in vars(first.k_proj)
    assert "forward" not in vars(first.k_proj)
