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
import math
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
BINARY = {"add": 0x1FFF0, "mul": 0x1FFF1, "sub": 0x1FFF5}
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


class _Object:
    """An object of the library, destroyed with its owner, but not when the process ends.

    Args:
        create, destroy: names of functions without their prefix.
        args: of `create`.
    """

    def __init__(self, create: str, destroy: str, *args: Any):
        self.handle = c_void_p()
        _library().call(create, byref(self.handle), *(getattr(arg, "handle", arg) for arg in args))
        let_go = getattr(_library().functions, f"dnnl_{destroy}")
        weakref.finalize(self, let_go, self.handle).atexit = False


def _tensor(shape: Sequence[int], dtype: int = _FLOAT32) -> _Object:
    """Description of a contiguous tensor of this shape."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    numbers = c_int64 * len(shape)
    return _Object(
        "memory_desc_create_with_strides", "memory_desc_destroy", len(shape), numbers(*shape),
        dtype, numbers(*strides),
    )  # fmt: skip


def _attributes(step: str, *args: Any) -> _Object:
    """Attributes of a primitive with one more step behind it, which the function `step` appends."""
    steps = _Object("post_ops_create", "post_ops_destroy")
    _library().call(f"post_ops_append_{step}", steps.handle, *args)
    attributes = _Object("primitive_attr_create", "primitive_attr_destroy")
    _library().call("primitive_attr_set_post_ops", attributes.handle, steps.handle)
    return attributes


def _recipe(function: str, *args: Any) -> _Object:
    """A primitive descriptor, by the function that makes it."""
    return _Object(f"{function}_primitive_desc_create", "primitive_desc_destroy", *args)


class Primitive:
    """An operation on tensors of fixed shapes; called with the addresses of its tensors."""

    def __init__(self, recipe: _Object, arguments: dict[int, _Object]):
        library, self._lock = _library(), threading.Lock()
        self._primitive = _Object("primitive_create", "primitive_destroy", recipe)
        self._memories = [
            _Object("memory_create", "memory_destroy", tensor, library.engine, None)
            for tensor in arguments.values()
        ]
        self._handles = [memory.handle for memory in self._memories]
        self._arguments = (_Argument * len(arguments))(*map(_Argument, arguments, self._handles))
        self._set = library.functions.dnnl_memory_set_data_handle
        self._execute = library.functions.dnnl_primitive_execute
        self._handle, self._stream = self._primitive.handle, library.stream

    def __call__(self, *addresses: int) -> None:
        """Run it; the tensors must outlive the call.

        Raises:
            OneDNNError: it cannot run.
        """
        # The memories keep the addresses, so two Python threads take turns.
        with self._lock:
            for memory, address in zip(self._handles, addresses, strict=True):
                self._set(memory, c_void_p(address))
            status = self._execute(self._handle, self._stream, len(self._handles), self._arguments)
        if status:
            raise OneDNNError(_failure("primitive_execute", status))


@lru_cache(maxsize=256)
def eltwise(name: str, size: int, gradient: bool = False) -> Primitive:
    """Of `src` and `dst`; the gradient of `src`, `grad_dst` and `grad_src`, which may be that."""
    engine, src, scale_and_shift = _library().engine, _tensor([size]), (c_float(1.0), c_float(0.0))
    recipe = _recipe(
        "eltwise_forward", engine, _FORWARD_TRAINING, ELTWISE[name], src, src, *scale_and_shift,
        None,
    )  # fmt: skip
    if not gradient:
        return Primitive(recipe, {_SRC: src, _DST: src})
    recipe = _recipe(
        "eltwise_backward", engine, ELTWISE[name], src, src, src, *scale_and_shift, recipe, None
    )
    return Primitive(recipe, {_SRC: src, _DIFF_DST: src, _DIFF_SRC: src})


@lru_cache(maxsize=256)
def layer_norm(rows: int, channels: int, epsilon: float, gradient: bool = False) -> Primitive:
    """Of `src`, `dst`, `mean [N]`, `variance [N]`, `scale [C]` and `shift [C]`; the gradient of
    these, of `grad_dst` instead of `dst`, and of `grad_src`, `grad_scale` and `grad_shift`."""
    engine, src, row = _library().engine, _tensor([rows, channels]), _tensor([rows])
    channel, settings = _tensor([channels]), (c_float(epsilon), _SCALE_AND_SHIFT)
    recipe = _recipe(
        "layer_normalization_forward", engine, _FORWARD_TRAINING, src, src, row, *settings, None
    )
    kept = {_MEAN: row, _VARIANCE: row, _SCALE: channel, _SHIFT: channel}
    if not gradient:
        return Primitive(recipe, {_SRC: src, _DST: src, **kept})
    recipe = _recipe(
        "layer_normalization_backward", engine, _BACKWARD, src, src, src, row, *settings, recipe,
        None,
    )  # fmt: skip
    found = {_DIFF_SRC: src, _DIFF_SCALE: channel, _DIFF_SHIFT: channel}
    return Primitive(recipe, {_SRC: src, _DIFF_DST: src, **kept, **found})


@lru_cache(maxsize=128)
def softmax(rows: int, columns: int) -> Primitive:
    """Of `src` and `dst`, over the columns."""
    engine, src = _library().engine, _tensor([rows, columns])
    recipe = _recipe("softmax_forward", engine, _FORWARD_TRAINING, _SOFTMAX, src, src, 1, None)
    return Primitive(recipe, {_SRC: src, _DST: src})


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
    src, given, attributes = _tensor(shape), _tensor(other), None
    arguments = {_SRC: src, _SRC_1: given, _DST: src}
    if then is not None:
        attributes = _attributes("binary", BINARY[then], src.handle)
        arguments[_POST_OPERATION | _SRC_1] = src
    recipe = _recipe("binary", _library().engine, BINARY[name], src, given, src, attributes)
    return Primitive(recipe, arguments)


@lru_cache(maxsize=128)
def times_bytes(size: int, factor: float) -> Primitive:
    """Of `src`, bytes and `dst`: the product of all three."""
    src, given = _tensor([size]), _tensor([size], dtype=_BYTE)
    attributes = _attributes("eltwise", ELTWISE["linear"], c_float(factor), c_float(0.0))
    recipe = _recipe("binary", _library().engine, BINARY["mul"], src, given, src, attributes)
    return Primitive(recipe, {_SRC: src, _SRC_1: given, _DST: src})


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the library can be called; why not is logged once."""
    try:
        _library()
    except OneDNNError as error:
        _log.info("oneDNN is not called: %s", error)
        return False
    return True
