"""A device that is not there: tensors that say they are on Apple's "mps" and lie in ordinary
memory. Under `apple()` each operator that reads or makes such a tensor is carried out if the
table of operators that torch brings (torchgen's `native_functions.yaml`) has a
kernel for MPS or composes it of others, and refused otherwise. So is what Metal does not know
(float64, complex numbers, float8, unsigned integers above 8 bits), a tensor of another device
among them, and NumPy. It shows that a path can run there, not what it computes there, nor how
fast."""

from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import torch
import yaml
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MPS, CPU = torch.device("mps"), torch.device("cpu")
UNKNOWN = {
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
# What attention of a processor is called where it was asked for by its common name.
COMMON = {"_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention"}


@cache
def table() -> dict:
    "Name of an operator with its overload -> its entry."
    import torchgen

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {x["func"].partition("(")[0]: x for x in entries}


def supported(name: str) -> bool:
    "Whether MPS has an operator, or it is composed of others; by its name without `aten::`."
    entry = table()[COMMON.get(name, name)]
    if made_by := entry.get("structured_delegate"):
        return supported(made_by)
    keys = {k.strip() for line in entry.get("dispatch", {}) for k in line.split(",")}
    return not keys or "MPS" in keys or any(k.startswith("Composite") for k in keys)


class Away(torch.Tensor):
    "A tensor that says it is on MPS; it lies in `here`."

    @staticmethod
    def __new__(cls, here):
        if here.dtype in UNKNOWN:
            raise TypeError(f"a tensor of {here.dtype} on mps, which Metal does not know")
        away = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, dtype=here.dtype, device=MPS
        )
        away.here = here
        return away

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func}: a tensor on mps outside of `apple()`")


class Checked(TorchDispatchMode):
    "Operators of tensors on MPS, in the memory where they lie."

    def __init__(self):
        super().__init__()
        self.used = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        name = ".".join(filter(None, (schema.name.partition("::")[2], schema.overload_name)))
        if func.namespace != "aten":
            raise NotImplementedError(f"{func} is no operator of torch")
        if not supported(name):
            raise NotImplementedError(f"aten::{name} has no kernel for MPS")
        out = func(*args, **kwargs or {})
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and x.dtype in UNKNOWN:
                raise TypeError(f"aten::{name} with {x.dtype}, which Metal does not know")
        self.used.add(name)
        return out


class Apple(TorchFunctionMode):
    "Functions of torch: what concerns MPS goes to `Checked`."

    def __init__(self, checked: Checked):
        super().__init__()
        self.checked = checked

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        away = [x for x in given if isinstance(x, Away)]
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return MPS if away else func(*args)
        if name in ("to", "cpu", "cuda"):
            return self.moved(func, args, kwargs)
        if name == "numpy" and away:
            raise TypeError("can't convert mps:0 device type tensor to numpy")
        device = kwargs.get("device")
        made = device is not None and torch.device(device) == MPS
        if not away and not made:
            return func(*args, **kwargs)
        stays = ("copy_", "__setitem__")  # between devices
        if away and name not in stays and any(x.ndim for x in given if type(x) is not Away):
            if name not in ("__getitem__",):
                told = ", ".join(f"{type(x).__name__} {list(x.shape)}" for x in given)
                raise RuntimeError(f"{name}: tensors on mps and on cpu meet: {told}")
        if device is not None:
            kwargs = kwargs | {"device": CPU}
        same = {id(x.here): x for x in away}
        on_host = made and name in (
            "tensor",
            "as_tensor",
        )  # numbers are sent when they have a dtype
        with nullcontext() if on_host else self.checked:
            out = func(*self.here(args), **self.here(kwargs))
        wrap = lambda x: same[id(x)] if id(x) in same else Away(x)
        return tree_map(lambda x: wrap(x) if type(x) is torch.Tensor else x, out)

    def here(self, x):
        "Where tensors lie; a slice between tensors is one between numbers."

        def one(x):
            if isinstance(x, slice):
                return slice(*map(one, (x.start, x.stop, x.step)))
            return x.here if isinstance(x, Away) else x

        return tree_map(one, x)

    def moved(self, func, args, kwargs):
        "x.to(...), x.cpu()."
        x, *rest = args
        to = [kwargs.get("device"), *rest] if func.__name__ == "to" else ["cpu"]
        to = next((d for d in map(device_of, to) if d is not None), x.device)
        wanted = lambda y: CPU if device_of(y) == MPS and not isinstance(y, Away) else y
        rest, kwargs = map(wanted, self.here(rest)), tree_map(wanted, self.here(kwargs))
        source = self.here(x)
        if to != MPS:
            return func(source, *rest, **kwargs)
        with self.checked:
            out = func(source, *rest, **kwargs)
        return x if isinstance(x, Away) and out is source else Away(out)


def device_of(x):
    "The device that an argument of `to` names, or None."
    if isinstance(x, torch.Tensor):
        return MPS if isinstance(x, Away) else x.device
    if isinstance(x, torch.device):
        return x
    return torch.device(x) if isinstance(x, str) else None


class Event:
    "A mark in the queue of work of a device; here all work is done when it is asked for."

    def __init__(self, device=None, **how):
        pass

    record = synchronize = lambda self, *args: None
    query = lambda self: True


@contextmanager
def apple():
    "Gives a set of names: the operators that were used on MPS."
    checked, event = Checked(), torch.Event
    torch.Event = Event
    try:
        with Apple(checked):
            yield checked.used
    finally:
        torch.Event = event


def send(model):
    "Move a model's parameters and buffers; under `apple()` it is then on MPS."
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    tensors[name] = Away(x.detach())
    return model
