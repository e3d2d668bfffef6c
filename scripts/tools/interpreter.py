"""Triton's interpreter, without work that it repeats: what the tests and the notebooks of this
repository run under.

Half of the time that a kernel takes there goes to three things: a call of a device function
looks for builtins of the language to replace, though the kernel's launch has replaced them all;
whether a sum or product of integers overflows is itself interpreted, in seven operations, and
the answer thrown away (the options say debug=False); and the table of NumPy's types is built
for each value. Here the first and the last are done once, and an overflow is found in one
operation and is an error. A GPU runs none of this."""

import functools
import os

import numpy as np

WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def patched_once(interpreter, tl):
    """interpreter._patch_lang that does nothing while a launch lasts that has replaced the same
    modules' builtins."""
    original, done = interpreter._patch_lang, set()

    @functools.cache
    def modules(fn):
        return frozenset(
            "tl" if x is tl else "core"
            for x in fn.__globals__.values()
            if x is tl or x is tl.core
        )

    def patch(fn):
        if modules(fn) and modules(fn) <= done:
            return interpreter._LangPatchScope()
        scope, outermost = original(fn), not done
        done.update(modules(fn))
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    return patch


def checked_overflow(semantic):
    """TritonSemantic.binary_op_sanitize_overflow_impl in one operation of NumPy; what overflows
    raises."""

    def check(lhs, rhs, binary_op):
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64 or not semantic.builder.options.sanitize_overflow:
            return
        assert kind == rhs.type.scalar and kind.is_int()
        wide = WIDE[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if wide.size and (
            wide.max() > kind.get_int_max_value() or wide.min() < kind.get_int_min_value()
        ):
            raise AssertionError(
                f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
            )

    return check


def quicken():
    "Change the interpreter of this process, if there is one; once."
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    semantic = interpreter.interpreter_semantic
    if "binary_op_sanitize_overflow_impl" in vars(semantic):
        return
    semantic.binary_op_sanitize_overflow_impl = checked_overflow(semantic)
    interpreter._patch_lang = patched_once(interpreter, tl)
    slow, known = interpreter._get_np_dtype, {}

    def np_dtype(kind):
        name = str(kind)
        if name not in known:
            known[name] = slow(kind)
        return known[name]

    interpreter._get_np_dtype = np_dtype
