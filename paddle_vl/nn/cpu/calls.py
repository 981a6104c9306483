"""Calls of the compiled kernels, which `load` compiles and loads.

A module of kernels gets the library by `library()`; those that take part in a graph are `PyLayer`s
that `run` calls.
"""

import ctypes
import re
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

_library: Any = None


def load() -> bool:
    """Compile and load the library, once: whether it was not there yet.

    Raises:
        CompilerError: see `compiler.load_kernels`.
    """
    global _library
    if _library is not None:
        return False
    from paddle_vl.nn.cpu import compiler

    library = compiler.load_kernels()
    source = compiler.SOURCE.read_text(encoding="utf-8")
    for name, arguments in re.findall(r"^void (\w+)\(([^)]*)\) \{", source, re.MULTILINE):
        given = [one.split() for one in arguments.split(",")]
        getattr(library, name).argtypes = [
            _Data if "*" in "".join(one) else _TYPES[one[0]] for one in given
        ]
    _library = library
    return True


class _Data:
    """A pointer argument: the data of a tensor or an array, an address, or NULL for None."""

    @classmethod
    def from_param(cls, x: Any) -> ctypes.c_void_p:
        if isinstance(x, np.ndarray):
            return ctypes.c_void_p(x.ctypes.data)
        return ctypes.c_void_p(x if x is None or isinstance(x, int) else x.data_ptr())


_TYPES = {"i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float,
          "uint64_t": ctypes.c_uint64}  # fmt: skip


def library() -> Any:
    """The loaded kernels."""
    return _library


def num_threads() -> int:
    """Threads of a kernel."""
    return _library.omp_get_max_threads()


class _NoGraph:
    """In place of a PyLayer's context where no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


def has_graph(ctx: Any) -> bool:
    """Whether a backward pass may follow a `PyLayer`'s forward of this context."""
    return not isinstance(ctx, _NoGraph)


def run(function: type[PyLayer], *args: Any, **kwargs: Any) -> Any:
    """`function.apply`; without its cost, most of an answer's step, where no graph is recorded."""
    if paddle.is_grad_enabled():
        return function.apply(*args, **kwargs)
    context: Any = _NoGraph()
    return function.forward(context, *args, **kwargs)
