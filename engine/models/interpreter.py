"""Triton's interpreter with what Liger-Kernel's kernels need, to run them on a CPU (``TRITON_INTERPRET=1``).

Triton 3.7's interpreter does not convert floats among a kernel's arguments, lacks libdevice, and computes on the bits
of bf16 as on integers. Here bf16 operations are computed in fp32 and rounded to the nearest even, as GPUs do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def complete_interpreter() -> None:
    """Complete the interpreter in this process, before kernels are imported. Idempotent."""
    if getattr(interpreter, "_weft_completed", False):
        return
    interpreter._weft_completed = True
    interpreter._implicit_cvt = _with_floats(interpreter._implicit_cvt)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    builder = interpreter.InterpreterBuilder
    builder.binary_op = _in_fp32(builder.binary_op)
    builder.cast_impl = _rounded(builder.cast_impl)
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, lambda self, source, to: self.cast_impl(source, to))
    builder.create_fp_to_fp = lambda self, source, to, rounding: self.cast_impl(source, to)


@cache
def _builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replace the interpreter's function, which examines all members again in every launch."""
    for name in _builtins_of(package):
        if tl.core.is_builtin(member := getattr(package, name)):  # otherwise an outer launch has replaced it
            interpreter._patch_attr(package, name, member, builder, scope)


def _remembered(numpy_type: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """Replace the interpreter's function, which makes a table of all types in every call."""
    known: dict[str, np.dtype] = {}

    def of(triton_type: Any) -> np.dtype:
        name = str(triton_type.scalar)
        if name not in known:
            known[name] = numpy_type(triton_type)
        return known[name]

    return of


def _with_floats(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert_any(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    return convert_any


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _in_fp32(compute: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, left: Any, right: Any, operation: Callable[..., np.ndarray]) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return compute(self, left, right, operation)
        output = operation(_widened(left.data), _widened(right.data))
        output = output if output.dtype == bool else _narrowed(output)
        return interpreter.TensorHandle(output, tl.bfloat16)

    return binary_op


def _rounded(cast: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        types = source.dtype.scalar, to.scalar
        if tl.bfloat16 not in types or types[0] == types[1]:
            return cast(self, source, to)
        values = _widened(source.data) if types[0] == tl.bfloat16 else source.data
        narrow = types[1] == tl.bfloat16
        data = _narrowed(values) if narrow else values.astype(interpreter._get_np_dtype(to))
        return interpreter.TensorHandle(data, to.scalar)

    return cast_impl
