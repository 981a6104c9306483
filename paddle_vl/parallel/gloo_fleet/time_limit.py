"""Sets the timeout of a gloo group.

Gloo's timeout is 30 seconds unless `gloo::Context::setTimeout` changes it. Paddle 3.3 neither calls
it nor has an option for it: a rank that is late by half a minute (deleting old checkpoints, a
stalled file system, a paused process) would end the run, also one on GPUs, whose collectives in
host memory are gloo's. Paddle's library exports all that is needed, so it is called by name:

- `CommContextManager` keeps the communicators of all groups by id;
- a `GlooCommContext` is a vtable, rank and size (two ints), and a pointer to its context;
- a `gloo::rendezvous::Context` begins with a vtable, rank and size too;
- every operation reads the context's timeout when it begins.
"""

import ctypes
import functools
from typing import Any, NoReturn

import paddle
from paddle.base import libpaddle

_MANAGER = "phi11distributed18CommContextManager"
_GET = f"_ZNK3{_MANAGER}3GetERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_MANAGERS_INSTANCE = f"_ZZN3{_MANAGER}11GetInstanceEvE8instance"
_VTABLE = "_ZTVN3phi11distributed15GlooCommContextE"
# Objects point behind the two header words of a vtable.
_VTABLE_HEADER = 16
_SET_TIMEOUT = "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"


class _String(ctypes.Structure):
    """A std::string for reading only: it does not own its characters."""

    _fields_ = (
        ("characters", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("_", ctypes.c_char * 16),
    )


class _Communicator(ctypes.Structure):
    _fields_ = (
        ("vtable", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
        ("context", ctypes.c_void_p),
    )


def set_group_timeout(group_id: int, rank: int, size: int, seconds: float) -> None:
    """Set how long operations of a gloo group that begin from now on wait for other ranks.

    Args:
        group_id: Paddle's id of the group.
        rank, size: this rank in the group; size of the group.

    Raises:
        RuntimeError: the objects of this Paddle are not laid out as expected.
    """
    (manager, vtable, get, set_timeout), name = check_library(), str(group_id).encode()
    communicator = _Communicator.from_address(get(manager, ctypes.byref(_String(name, len(name)))))
    if communicator.vtable != vtable:
        _refuse(f"the communicator of group {group_id} is not gloo's")
    context = _Communicator.from_address(communicator.context)
    if {(communicator.rank, communicator.size), (context.rank, context.size)} != {(rank, size)}:
        _refuse(
            f"the communicator of group {group_id} and its context do not begin with rank, size"
        )
    set_timeout(communicator.context, round(1000 * seconds))


@functools.cache
def check_library() -> tuple[int, int, Any, Any]:
    """Addresses and functions that `set_group_timeout` needs.

    Raises:
        RuntimeError: Paddle's library does not export them.
    """
    library = ctypes.CDLL(libpaddle.__file__)
    try:
        found = [getattr(library, name) for name in (_GET, _SET_TIMEOUT)]
        manager, vtable = (
            ctypes.addressof(ctypes.c_char.in_dll(library, name))
            for name in (_MANAGERS_INSTANCE, _VTABLE)
        )
    except (AttributeError, ValueError) as error:
        _refuse(str(error))
    get, set_timeout = found
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p] * 2
    set_timeout.restype, set_timeout.argtypes = None, [ctypes.c_void_p, ctypes.c_int64]
    return manager, vtable + _VTABLE_HEADER, get, set_timeout


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"paddlepaddle {paddle.__version__} keeps gloo's connections in another way than "
        f"parallel.timeout_s was written for: {what}. Install paddlepaddle 3.3.1, or adapt "
        "paddle_vl/parallel/gloo_fleet/time_limit.py."
    )
