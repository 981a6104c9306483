"""Events of a training step for Paddle's profiler, and the regions of its backward nodes.

Regions are layers, operations of `paddle_vl.nn.operations` and phases of a step. `mark` makes
events of operations and of functions in C, which are called through ctypes; layers are events by
themselves, and phases by `phase_clock`.

A node of the backward pass has no event that tells its region. `labelled` follows, in one step, the
graph from the outputs of every region to its inputs, and lists the nodes in the order in which
backward visits them.
"""

import ctypes
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Names of events.
STEP, OPERATION, PHASE, C_FUNCTION = "the step", "operation ", "phase ", "function "
# Backward nodes that add a gradient to its parameter: they belong to no region.
ACCUMULATION = "GradNodeAccumulation"


class Node(NamedTuple):
    """A node of the backward pass and the regions that made it, outermost first."""

    name: str
    regions: tuple[str, ...]


class _Labels:
    """The regions of a step's nodes, and the order in which backward visits them."""

    def __init__(self) -> None:
        self.path: list[str] = []
        self.order: list[Node] = []
        self._regions: dict[int, tuple[str, ...]] = {}

    def region(self, name: str, call: Callable[[], Any], given: Any) -> Any:
        """Call; nodes between the given tensors and the result get this region."""
        self.path.append(name)
        try:
            out = call()
            self._label(_nodes(out), {node.node_ptr() for node in _nodes(given)})
        finally:
            self.path.pop()
        return out

    def visits(self, loss: Any) -> None:
        """Add the nodes of the backward pass that is about to start, in Paddle's order.

        As Paddle's engine: a node is ready after all nodes that lead to it, and ready nodes wait in
        a queue.
        """
        (first,) = _nodes(loss)
        self._label([first], set())
        num_before: dict[int, int] = defaultdict(int)
        for node in _reachable([first], set()):
            for following in _following(node):
                num_before[following.node_ptr()] += 1
        ready = deque([first])
        while ready:
            node = ready.popleft()
            if ACCUMULATION not in node.name():
                self.order.append(Node(node.name(), self._regions[node.node_ptr()]))
            for following in _following(node):
                num_before[following.node_ptr()] -= 1
                if not num_before[following.node_ptr()]:
                    ready.append(following)

    def _label(self, last: Iterable[Any], inputs: set[int]) -> None:
        for node in _reachable(last, inputs):
            # Those of regions inside this one have theirs.
            self._regions.setdefault(node.node_ptr(), tuple(self.path))


_labels: _Labels | None = None


def _reachable(last: Iterable[Any], stop: Iterable[int]) -> Iterator[Any]:
    seen, waiting = set(stop), list(last)
    while waiting:
        node = waiting.pop()
        if node.node_ptr() not in seen:
            seen.add(node.node_ptr())
            yield node
            waiting += _following(node)


def _following(node: Any) -> list[Any]:
    return [following for following in node.next_functions if following is not None]


def _nodes(value: Any) -> list[Any]:
    """Nodes that made the tensors in nested containers and objects."""
    from paddle import Tensor, nn

    if isinstance(value, Tensor):
        return [] if value.stop_gradient or value.grad_fn is None else [value.grad_fn]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Layer) and not callable(value):
        value = list(vars(value).values())
    if isinstance(value, list | tuple):
        return [node for entry in value for node in _nodes(entry)]
    return []


def mark() -> None:
    """Make events of functions in C and of the package's operations, in this process."""
    from paddle.profiler import RecordEvent

    from paddle_vl.nn.operations import Operation

    plain, call = ctypes.CDLL.__getitem__, Operation.__call__

    def marked_function(library: ctypes.CDLL, name: Any) -> Any:
        kind: Any = type(plain(library, name))

        class Marked(kind):
            _flags_, _restype_ = kind._flags_, kind._restype_

            def __call__(self, *args: Any) -> Any:
                with RecordEvent(f"{C_FUNCTION}{name}"):
                    return super().__call__(*args)

        found = Marked((name, library))
        found.__name__ = name
        return found

    def marked_operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{OPERATION}{self.__name__}"
        with RecordEvent(name):
            return _in_region(name, lambda: call(self, *args, **kwargs), (args, kwargs))

    library_class: Any = ctypes.CDLL
    library_class.__getitem__, Operation.__call__ = marked_function, marked_operation


def _in_region(name: str, call: Callable[[], Any], given: Any) -> Any:
    return call() if _labels is None else _labels.region(name, call, given)


def labelled(step: Callable[[], Any]) -> list[Node]:
    """Run a step; returns the nodes of its backward pass in the order of their visits."""
    import paddle
    from paddle import Tensor, nn

    global _labels
    layer, backward = nn.Layer.__call__, Tensor.backward
    labels = _labels = _Labels()

    def layer_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = type(self).__name__
        return labels.region(name, lambda: layer(self, *args, **kwargs), (args, kwargs))

    def ordered_backward(self: Any, *args: Any, **kwargs: Any) -> None:
        with paddle.no_grad():
            labels.visits(self)
        backward(self, *args, **kwargs)

    nn.Layer.__call__, Tensor.backward = layer_call, ordered_backward
    try:
        step()
    finally:
        nn.Layer.__call__, Tensor.backward, _labels = layer, backward, None
    return labels.order


def phase_clock() -> Any:
    """A `PhaseClock` whose phases are events too."""
    from paddle.profiler import RecordEvent

    from paddle_vl.train.phases import PhaseClock

    class Clock(PhaseClock):
        @contextmanager
        def inside(self, name: Any) -> Iterator[None]:
            with RecordEvent(f"{PHASE}{name.value}"), super().inside(name):
                yield

    return Clock()


def traced(step: Callable[[], Any], file: Path) -> float:
    """Run a step in Paddle's profiler and write its trace; returns the step's seconds."""
    from paddle.profiler import Profiler, ProfilerTarget, RecordEvent

    # Without a handler the profiler writes a file of its own.
    with Profiler(targets=[ProfilerTarget.CPU], on_trace_ready=lambda _: None) as profiler:
        begin = time.perf_counter()
        with RecordEvent(STEP):
            step()
        seconds = time.perf_counter() - begin
    profiler.export(str(file), format="json")
    return seconds
