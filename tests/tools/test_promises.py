"""What is promised of the whole core: defaults, what is compared by value, and tables that can
be used in any mode."""

import inspect

import torch

from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.theory import codebook, rates, rope
from turboquant_nb.theory import rotation as rotations
from turboquant_nb.theory.centre import CosSinCache
from turboquant_nb.theory.codebook import lloyd_max

DEFAULTS = """
codebook.partial_moments d=None
codebook.Codebook.encode check_finite=True
codebook.Codebook.decode dtype=torch.float32 check_range=True
codebook.lloyd_max d=None
codebook.high_rate_mse d=None
codebook.uniform d=None
codebook.from_levels d=None
codebook.lloyd_max_samples weights=None
rotation.haar seed=0
rotation.hadamard seed=0
rotation.make_rotation seed=0 matrix=None
rope.rope_frequencies theta=10000.0
rope.rope_angles theta=10000.0 inv_freq=None
rope.plane_channels pairing='half'
rope.plane_matrix pairing='half'
rope.apply_rope theta=10000.0 pairing='half' rotary_dim=None inv_freq=None scale=1.0
rope.apply_cos_sin inverse=False
rope.commutant_part pairing='half' theta=10000.0 rotary_dim=None inv_freq=None
rope.commutes pairing='half' theta=10000.0 rotary_dim=None inv_freq=None
recipe.as_recipe recipe=None bits=None
quantizer.Quantizer.__init__ device='cpu' rotation=None codebook=None
quantizer.Quantizer.encode mean=None name='x'
quantizer.encode mean=None name='x' block=None
quantizer.decode mean=None dtype=torch.float32
quantizer.decided mean=None
recipe.Recipe.__init__ sinks=4 recent=16 residual=None
quantizer.Spec.__init__ bits=3 rotation='hadamard' seed=0 scale='mse' codebook='sphere'
    center='none' scale_dtype='float16' residual='none' pair_scale='none'
qjl.sketch_matrix kind='gaussian' seed=0
qjl.qjl_variance kind='gaussian'
residual.sign_codebook d=None base=None
residual.sketched_code codebook=None kind='gaussian'
residual.SketchedCode.levels check_range=False
residual.SketchedCode.decode check_range=False
rates.MixedCodebook.encode check_finite=True
rates.MixedCodebook.decode dtype=torch.float32 check_range=True
rates.MixedCodebook.__init__ std=None
rates.mixture_mse d=None
rates.allocate_bits bits=None sizes=None exact=False
rates.allocate_channels lo=0 hi=6
rates.truncate planes=1 keep=1
packing.Layout.__init__ along='channel' tile=256
packing.unpack tokens=None
memory.Part.__init__ tile=256 device='cpu'
memory.Part.allocate sinks=0 recent=0 dtype=torch.float32 tiles=0 blank=None
exact.Ranges.__init__ starts=None
store.KVStore.__init__ d_value=None dtype=torch.float32 device='cpu' max_length=None
    tile=256 static=False inv_freq=None tokens=0 frame=None
store.KVStore.append names=('k',·'v')
store.KVStore.read first=None last=None framed=False
store.KVStore.set_range k=None v=None
store.tail_with names=('k',·'v')
store.KVStore.crop tail=None
attention.Rule.__init__ scaling=None sliding_window=None softcap=None causal=True
    backend='auto' sinks=None latent=False
attention.Call.of k=None v=None mask=None first=None recent=None bias=None
attention.attend k=None v=None block=1024
attention.dense_attention scaling=None mask=None rows=256 bias=None
"""


def core_modules():
    from turboquant_nb.cache import attention, exact, memory, packing, store
    from turboquant_nb.quant import codes as residual, quantizer, recipe
    from turboquant_nb.theory import qjl

    return dict(
        codebook=codebook,
        rotation=rotations,
        rope=rope,
        quantizer=quantizer,
        recipe=recipe,
        qjl=qjl,
        residual=residual,
        rates=rates,
        packing=packing,
        exact=exact,
        memory=memory,
        store=store,
        attention=attention,
    )


def test_defaults_are_part_of_what_is_promised():
    """A default that changes changes what everybody's code does who left it out; this is the
    list."""
    for line in DEFAULTS.replace("\n    ", " ").strip().splitlines():
        name, *fields = line.split()
        where, *path = name.split(".")
        f = core_modules()[where]
        for part in path:
            f = inspect.getattr_static(f, part) if inspect.isclass(f) else getattr(f, part)
        f = getattr(f, "__wrapped__", f)
        found = {
            p.name: p.default
            for p in inspect.signature(f).parameters.values()
            if p.default is not p.empty
        }
        assert [f"{k}={v!r}" for k, v in found.items() if not isinstance(v, Spec)] == [
            x.replace("·", " ") for x in fields
        ], name


def test_what_is_compared_by_value_and_what_cannot_be_changed():
    """Dataclasses are frozen; those that hold tensors are equal to themselves only, the others
    by value."""
    by_value = {"Spec", "Recipe", "Layout"}
    for module in core_modules().values():
        for name, cls in vars(module).items():
            if (
                inspect.isclass(cls)
                and not name.startswith("_")
                and cls.__module__ == module.__name__
                and (params := getattr(cls, "__dataclass_params__", None))
            ):
                assert params.frozen and params.eq == (name in by_value), name


def test_shared_tables_can_be_used_in_any_mode():
    """What is made once and kept must not be an inference tensor, whoever asks first: autograd
    and in-place writes would fail for all others."""
    from turboquant_nb.cache.memory import _slots, shared_quantizer
    from turboquant_nb.theory.qjl import sketch_matrix

    slots = _slots.__wrapped__
    with torch.inference_mode():
        cos_sin = CosSinCache(torch.ones(2).clone())
        cos_sin.reach(3)
        book = lloyd_max(3, 77)
        made = [cos_sin.table, slots(torch.device("cpu")), sketch_matrix(3, 7, "gaussian", 77)]
        for b in (book, book.to_int8_grid(), codebook.lloyd_max_samples(torch.arange(9.0), 2)):
            made += [b.levels, b.edges, b.int8().levels]
        made += [
            rotations.make_rotation(kind, 44, 77).matrix for kind in ("haar", "hadamard")
        ] + [rotations.hadamard_matrix.__wrapped__(44)]
        q = shared_quantizer(Spec(3, seed=77), 44, torch.device("cpu"))
        made += [q.rotation.matrix, q.codebook.levels, *q.code.coarser.tables]
    assert not any(t.is_inference() for t in made)
