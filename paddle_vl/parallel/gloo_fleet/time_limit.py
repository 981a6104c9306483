"""Sets the timeout of a gloo group.

Gloo's timeout is 30 seconds unless `gloo::Context::setTimeout` changes it. Paddle 3.3 neither calls
it nor has an option for it: a rank that is late by half a minute (deleting old checkpoints, a
stalled file system, a paused process) would end the run. Paddle's shared libraries export all that
is needed, so it is called by name through ctypes:

- `CommContextManager` keeps the communicators of all groups by id; `Has` and `Get` look one up;
- a `GlooCommContext` is a vtable, rank and size (two ints), and a shared pointer to its context;
- a `gloo::rendezvous::Context` is a vtable, rank and size, and more;
- `getTimeout` and `setTimeout` are methods of the context, whose value every operation reads when
  it begins. Nothing is written to memory directly.

Every step is checked before the call: both vtables are those that the libraries export, rank and
size are the group's, and the timeout is gloo's 30 seconds. Memory is read through /proc/self/mem,
where a wrong address gives an error instead of a crash.
"""

import ctypes
import functools
import os
import struct
from typing import Any, NamedTuple, NoReturn

import paddle
from paddle.base import libpaddle

_GLOO_MS = 30_000
_WORD = 8
# Words of a GlooCommContext: vtable, rank and size, and two of the shared pointer.
_COMMUNICATOR_WORDS = 4
_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_MANAGER = "phi11distributed18CommContextManager"
_SYMBOLS = {
    "manager": f"_ZZN3{_MANAGER}11GetInstanceEvE8instance",
    # Its first byte is 1 after the manager has been constructed.
    "guard": f"_ZGVZN3{_MANAGER}11GetInstanceEvE8instance",
    "has": f"_ZNK3{_MANAGER}3HasERK{_STRING}",
    "get": f"_ZNK3{_MANAGER}3GetERK{_STRING}",
    "communicator": "_ZTVN3phi11distributed15GlooCommContextE",
    "context": "_ZTVN4gloo10rendezvous7ContextE",
    "limit": "_ZNK4gloo7Context10getTimeoutEv",
    "set_limit": "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE",
}


class _String(ctypes.Structure):
    """A std::string for reading only: it does not own its characters."""

    _fields_ = (
        ("characters", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("capacity", ctypes.c_size_t),
        ("unused", ctypes.c_size_t),
    )

    @classmethod
    def of(cls, text: str) -> "_String":
        characters = text.encode()
        return cls(characters, len(characters), len(characters), 0)


class _Library(NamedTuple):
    """Addresses and functions of Paddle's shared libraries, by the names of `_SYMBOLS`."""

    manager: int
    guard: int
    has: Any
    get: Any
    communicator: int
    context: int
    limit: Any
    set_limit: Any


def set_group_timeout(group_id: int, rank: int, size: int, seconds: float) -> None:
    """Set how long operations of a gloo group that begin from now on wait for other ranks.

    Args:
        group_id: Paddle's id of the group.
        rank, size: this rank in the group; size of the group.

    Raises:
        RuntimeError: the objects of this Paddle are not laid out as expected.
    """
    library, own = check_library(), (rank, size)
    name = _String.of(str(group_id))
    is_made = _words(library.guard, 1)[0] & 0xFF
    if not is_made or not library.has(library.manager, ctypes.byref(name)):
        _refuse(f"it has no communicator of group {group_id}")
    communicator = library.get(library.manager, ctypes.byref(name))
    if not communicator or _words(communicator, 1)[0] != library.communicator:
        _refuse(f"the communicator of group {group_id} is not gloo's")
    if _two_ints(communicator) != own:
        _refuse(f"the communicator of group {group_id} does not begin with rank and size")
    pointers = _words(communicator, _COMMUNICATOR_WORDS)[2:]
    contexts = [each for each in pointers if _is_object(each, library.context)]
    if len(contexts) != 1 or _two_ints(contexts[0]) != own:
        _refuse(f"the context of group {group_id} is not where it is expected")
    (context,) = contexts
    if (found := library.limit(context)) != _GLOO_MS:
        _refuse(f"the limit of group {group_id} is {found} ms instead of {_GLOO_MS}")
    wanted = round(1000 * seconds)
    library.set_limit(context, wanted)
    if (found := library.limit(context)) != wanted:
        _refuse(f"the limit of group {group_id} is {found} ms after it was set to {wanted}")


@functools.cache
def check_library() -> _Library:
    """The symbols that `set_group_timeout` needs.

    Raises:
        RuntimeError: Paddle's libraries do not export them.
    """
    library, found = ctypes.CDLL(libpaddle.__file__), {}
    for name, symbol in _SYMBOLS.items():
        try:
            found[name] = getattr(library, symbol)
        except AttributeError:
            _refuse(f"its libraries export no {symbol}")
    found["has"].restype, found["has"].argtypes = ctypes.c_bool, [ctypes.c_void_p] * 2
    found["get"].restype, found["get"].argtypes = ctypes.c_void_p, [ctypes.c_void_p] * 2
    found["limit"].restype, found["limit"].argtypes = ctypes.c_int64, [ctypes.c_void_p]
    found["set_limit"].restype = None
    found["set_limit"].argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for name in ("manager", "guard", "communicator", "context"):
        found[name] = ctypes.cast(found[name], ctypes.c_void_p).value
    for name in ("communicator", "context"):
        # Objects point behind the two header words of a vtable.
        found[name] += 2 * _WORD
    return _Library(**found)


def _is_object(address: int, vtable: int) -> bool:
    try:
        return _words(address, 1)[0] == vtable
    except (OSError, OverflowError, struct.error):
        return False


def _two_ints(address: int) -> tuple[int, int]:
    """The two ints behind the vtable pointer of an object."""
    return struct.unpack("2i", struct.pack("Q", _words(address, 2)[1]))


def _words(address: int, count: int) -> tuple[int, ...]:
    """Raises OSError, OverflowError or struct.error for an invalid address."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        return struct.unpack(f"{count}Q", os.pread(memory.fileno(), count * _WORD, address))


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"paddlepaddle {paddle.__version__} keeps gloo's connections in another way than "
        f"parallel.timeout_s was written for: {what}. Install paddlepaddle 3.3.1, or adapt "
        "paddle_vl/parallel/gloo_fleet/time_limit.py."
    )
