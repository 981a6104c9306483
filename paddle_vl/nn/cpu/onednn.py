"""oneDNN from Paddle's CPU wheel, called through its C API: vector code in all threads, also where
Paddle's own kernels have neither.

Paddle's wheel contains the library (`libdnnl`), linked to the same OpenMP runtime as the rest of
it, but eager operations do not use it. A `Primitive` is an operation on tensors of fixed shapes and
is made once. Its tensors are given by their addresses; all are contiguous float32, unless a
function says otherwise.

Names and numbers are those of `dnnl_types.h`, which do not change within a major version.
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import paddle

_log = logging.getLogger(__name__)

# Of Paddle's wheel; the number is the major version.
_FILE = "libdnnl.so.3"
_CPU, _IN_ORDER, _FLOAT32, _BYTE = 1, 1, 3, 6
_FORWARD_TRAINING, _BACKWARD = 64, 128
_SCALE_AND_SHIFT = 0x2 | 0x4
ELTWISE = {"linear": 0x26, "gelu_tanh": 0x2B, "swish": 0x2C, "gelu_erf": 0x31}
BINARY = {"add": 0x1FFF0, "mul": 0x1FFF1}
_SOFTMAX = 0x30000

# Arguments of primitives.
_SRC, _SRC_1, _DST = 1, 2, 17
_MEAN, _VARIANCE, _SCALE, _SHIFT = 49, 50, 51, 52
_DIFF_SRC, _DIFF_DST, _DIFF_SCALE, _DIFF_SHIFT = 129, 145, 255, 256
_POST_OPERATION = 32768


class OneDNNError(RuntimeError):
    """The library is not there, or refused a call."""


class _Argument(ctypes.Structure):
    _fields_ = [("index", c_int), ("memory", c_void_p)]


class _Library:
    """The functions, with a CPU engine and a stream, both for the life of the process."""

    def __init__(self) -> None:
        if paddle.is_compiled_with_cuda():
            raise OneDNNError("it is for Paddle's CPU build")
        file = Path(paddle.__file__).parent / "libs" / _FILE
        try:
            self.functions = ctypes.CDLL(str(file))
        except OSError as error:
            raise OneDNNError(f"Paddle's {_FILE} cannot be loaded: {error}") from error
        self.engine, self.stream = c_void_p(), c_void_p()
        self.call("engine_create", byref(self.engine), _CPU, c_size_t(0))
        self.call("stream_create", byref(self.stream), self.engine, _IN_ORDER)

    def call(self, name: str, *args: Any) -> None:
        """Call `dnnl_<name>`.

        Raises:
            OneDNNError: it returns another status than success.
        """
        status = getattr(self.functions, f"dnnl_{name}")(*args)
        if status:
            raise OneDNNError(_failure(name, status))


def _failure(name: str, status: int) -> str:
    return f"dnnl_{name} returned status {status}; train.kernels=plain runs without oneDNN"


@lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()


def _let_go(owner: Any, destroy: Any, handle: c_void_p) -> None:
    """Destroy the handle with its owner, but not when the process ends."""
    weakref.finalize(owner, destroy, handle).atexit = False


class _Descriptor:
    """A tensor's shape and strides; contiguous without strides."""

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int] | None = None, dtype: int = _FLOAT32
    ):
        self.handle, numbers = c_void_p(), c_int64 * len(shape)
        if strides is None:
            strides = [1] * len(shape)
            for axis in range(len(shape) - 2, -1, -1):
                strides[axis] = strides[axis + 1] * shape[axis + 1]
        _library().call(
            "memory_desc_create_with_strides", byref(self.handle), len(shape), numbers(*shape),
            dtype, numbers(*strides),
        )  # fmt: skip
        _let_go(self, _library().functions.dnnl_memory_desc_destroy, self.handle)


class _Attributes:
    """Of a primitive with one more step behind it.

    Args:
        step: the function that appends it.
    """

    def __init__(self, step: str, *args: Any):
        library = _library()
        self.handle, steps = c_void_p(), c_void_p()
        library.call("post_ops_create", byref(steps))
        _let_go(self, library.functions.dnnl_post_ops_destroy, steps)
        library.call(f"post_ops_append_{step}", steps, *args)
        library.call("primitive_attr_create", byref(self.handle))
        _let_go(self, library.functions.dnnl_primitive_attr_destroy, self.handle)
        library.call("primitive_attr_set_post_ops", self.handle, steps)


class _Recipe:
    """A primitive descriptor, by the function that makes it."""

    def __init__(self, function: str, *args: Any):
        self.handle = c_void_p()
        given = [getattr(arg, "handle", arg) for arg in args]
        _library().call(f"{function}_primitive_desc_create", byref(self.handle), *given)
        _let_go(self, _library().functions.dnnl_primitive_desc_destroy, self.handle)


class Primitive:
    """An operation on tensors of fixed shapes; called with the addresses of its tensors."""

    def __init__(self, recipe: _Recipe, arguments: dict[int, _Descriptor]):
        library = _library()
        self._handle, self._lock = c_void_p(), threading.Lock()
        library.call("primitive_create", byref(self._handle), recipe.handle)
        functions = library.functions
        _let_go(self, functions.dnnl_primitive_destroy, self._handle)
        self._memories = []
        for descriptor in arguments.values():
            memory = c_void_p()
            library.call("memory_create", byref(memory), descriptor.handle, library.engine, None)
            _let_go(self, functions.dnnl_memory_destroy, memory)
            self._memories.append(memory)
        of_indices = map(_Argument, arguments, self._memories)
        self._arguments = (_Argument * len(arguments))(*of_indices)
        self._set, self._execute = (
            functions.dnnl_memory_set_data_handle,
            functions.dnnl_primitive_execute,
        )
        self._stream = library.stream

    def __call__(self, *addresses: int) -> None:
        """Run it; the tensors must outlive the call.

        Raises:
            OneDNNError: it cannot run.
        """
        # The memories keep the addresses, so two Python threads take turns.
        with self._lock:
            for memory, address in zip(self._memories, addresses, strict=True):
                self._set(memory, c_void_p(address))
            status = self._execute(self._handle, self._stream, len(self._memories), self._arguments)
        if status:
            raise OneDNNError(_failure("primitive_execute", status))


@lru_cache(maxsize=128)
def eltwise(name: str, size: int) -> Primitive:
    """Of `src` and `dst`."""
    src = _Descriptor([size])
    return Primitive(_eltwise_recipe(name, src), {_SRC: src, _DST: src})


@lru_cache(maxsize=128)
def eltwise_gradient(name: str, size: int) -> Primitive:
    """Of `src`, `grad_dst` and `grad_src`, which may be `grad_dst`."""
    src = _Descriptor([size])
    recipe = _Recipe(
        "eltwise_backward", _library().engine, ELTWISE[name], src, src, src, c_float(1.0),
        c_float(0.0), _eltwise_recipe(name, src), None,
    )  # fmt: skip
    return Primitive(recipe, {_SRC: src, _DIFF_DST: src, _DIFF_SRC: src})


def _eltwise_recipe(name: str, src: _Descriptor) -> _Recipe:
    return _Recipe(
        "eltwise_forward", _library().engine, _FORWARD_TRAINING, ELTWISE[name], src, src,
        c_float(1.0), c_float(0.0), None,
    )  # fmt: skip


@lru_cache(maxsize=128)
def layer_norm(rows: int, channels: int, epsilon: float) -> Primitive:
    """Of `src`, `dst`, `mean [N]`, `variance [N]`, `scale [C]` and `shift [C]`."""
    src, row, channel = map(_Descriptor, ([rows, channels], [rows], [channels]))
    return Primitive(
        _layer_norm_recipe(src, row, epsilon),
        {_SRC: src, _DST: src, _MEAN: row, _VARIANCE: row, _SCALE: channel, _SHIFT: channel},
    )


@lru_cache(maxsize=128)
def layer_norm_gradient(rows: int, channels: int, epsilon: float) -> Primitive:
    """Of `src`, `grad_dst`, `mean`, `variance`, `scale`, `shift`, `grad_src`, `grad_scale` and
    `grad_shift`."""
    src, row, channel = map(_Descriptor, ([rows, channels], [rows], [channels]))
    recipe = _Recipe(
        "layer_normalization_backward", _library().engine, _BACKWARD, src, src, src, row,
        c_float(epsilon), _SCALE_AND_SHIFT, _layer_norm_recipe(src, row, epsilon), None,
    )  # fmt: skip
    arguments = {
        _SRC: src, _DIFF_DST: src, _MEAN: row, _VARIANCE: row, _SCALE: channel, _SHIFT: channel,
        _DIFF_SRC: src, _DIFF_SCALE: channel, _DIFF_SHIFT: channel,
    }  # fmt: skip
    return Primitive(recipe, arguments)


def _layer_norm_recipe(src: _Descriptor, row: _Descriptor, epsilon: float) -> _Recipe:
    return _Recipe(
        "layer_normalization_forward", _library().engine, _FORWARD_TRAINING, src, src, row,
        c_float(epsilon), _SCALE_AND_SHIFT, None,
    )  # fmt: skip


@lru_cache(maxsize=128)
def softmax(rows: int, columns: int) -> Primitive:
    """Of `src` and `dst`, over the columns."""
    src = _Descriptor([rows, columns])
    return Primitive(_softmax_recipe(src), {_SRC: src, _DST: src})


@lru_cache(maxsize=128)
def softmax_gradient(rows: int, columns: int) -> Primitive:
    """Of `dst`, `grad_dst` and `grad_src`, which may be `grad_dst`."""
    dst = _Descriptor([rows, columns])
    recipe = _Recipe(
        "softmax_backward", _library().engine, _SOFTMAX, dst, dst, dst, 1, _softmax_recipe(dst),
        None,
    )  # fmt: skip
    return Primitive(recipe, {_DST: dst, _DIFF_DST: dst, _DIFF_SRC: dst})


def _softmax_recipe(src: _Descriptor) -> _Recipe:
    return _Recipe(
        "softmax_forward", _library().engine, _FORWARD_TRAINING, _SOFTMAX, src, src, 1, None
    )


@lru_cache(maxsize=128)
def binary(
    name: str, shape: tuple[int, ...], other: tuple[int, ...], then: str | None = None
) -> Primitive:
    """Of `src`, `other` and `dst`, which may be `src`.

    Args:
        other: the shape of `other`, 1 in dims along which it is repeated.
        then: what is done with the result and a fourth tensor of the shape of `src`, which may be
            `dst`.
    """
    src, given, attributes = _Descriptor(shape), _Descriptor(other), None
    arguments = {_SRC: src, _SRC_1: given, _DST: src}
    if then is not None:
        attributes = _Attributes("binary", BINARY[then], src.handle)
        arguments[_POST_OPERATION | _SRC_1] = src
    recipe = _Recipe("binary", _library().engine, BINARY[name], src, given, src, attributes)
    return Primitive(recipe, arguments)


@lru_cache(maxsize=128)
def times_bytes(size: int, factor: float) -> Primitive:
    """Of `src`, bytes and `dst`: the product of all three."""
    src, given = _Descriptor([size]), _Descriptor([size], dtype=_BYTE)
    attributes = _Attributes("eltwise", ELTWISE["linear"], c_float(factor), c_float(0.0))
    recipe = _Recipe("binary", _library().engine, BINARY["mul"], src, given, src, attributes)
    return Primitive(recipe, {_SRC: src, _SRC_1: given, _DST: src})


@lru_cache(maxsize=128)
def copy(rows: int, columns: int, src_stride: int, dst_stride: int) -> Primitive:
    """Of `src` and `dst`, rows of `columns` numbers that begin every stride."""
    src = _Descriptor([rows, columns], [src_stride, 1])
    dst = _Descriptor([rows, columns], [dst_stride, 1])
    engine = _library().engine
    return Primitive(_Recipe("reorder", src, engine, dst, engine, None), {_SRC: src, _DST: dst})


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the library can be called; why not is logged once."""
    try:
        _library()
    except OneDNNError as error:
        _log.info("oneDNN is not called: %s", error)
        return False
    return True
