"""Where the time of a training step goes, by part, from a trace of Paddle's profiler.

Every event of the trace has its own time: its duration without the events inside it. That of a
kernel belongs to the first part of `PARTS` whose pattern matches its regions and its name,

    phase forward/LanguageModel/DecoderLayer/SelfAttention/operation apply_rotary/multiply

and to `UNCLASSIFIED` if there is none. All other own time is `REST`: Python, and Paddle's way from
a call to its kernels. So the parts sum to the time of the step.

Regions are layers (Paddle's own events), phases of the step, and operations of
`paddle_vl.nn.operations`. A kernel of the backward pass belongs to the region whose forward pass
made its node: one step, which is not measured, follows the graph from the outputs of every region
to its inputs, and records the order in which backward visits the nodes. Every measured step must
have the same nodes in the same order.

Functions in C that are called through ctypes count as kernels. `mark` makes events of them and of
the operations; it is called before anything loads a library.
"""

import ctypes
import json
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

UNCLASSIFIED, REST = "unclassified", "Python and dispatch"
# The first pattern that is found decides. Phases take everything inside them.
PHASES = {
    "data wait": r"^phase dataload_wait",
    "optimizer": r"^phase (gradient_sum|unscale_clip|optim_step|zero_grad_sched)",
}
PARTS = {
    "dropout": r"/dropout(_grad)?$|/RowDropout/",
    "attention": r"/operation \w+_attention/",
    "rotary": r"/operation (apply_rotary|_rotated|rotate_half)/|/(sin|cos)$",
    "norms": r"/operation (\w+_norm|rms_quotient)/|/\w*Norm/(?!Linear/)",
    "activations": r"/operation (gelu|swiglu|geglu)/|/(silu|gelu|swiglu)(_grad)?$",
    "loss": r"/\w*cross_entropy\w*$",
    "linears": r"/operation (biased_linear|grouped_linear)/|/(matmul|addmm)(_grad)?$",
    "other operations": (
        r"/(add|add_n|subtract|multiply|divide|scale|div_scale|sum|mean|maximum|square|sqrt|cumsum"
        r"|clip|pool2d|concat|split|split_with_num|stack|unbind|slice|strided_slice|set_value|"
        r"set_value_with_tensor|transpose|reshape|squeeze|unsqueeze|expand|tile|gather|gather_nd"
        r"|index_select|scatter|index_add|index_put|where|masked_fill|assign|cast|copy|contiguous"
        r"|embedding|full|full_like|empty|empty_like|pad|arange|(not_)?equal|(less|greater)_\w+"
        r"|logical_\w+|bitwise_\w+|remainder|any|all|arange_tensor|flatten)(_grad)?_?$"
    ),
}
# In the order of tables and plots.
NAMES = (
    "linears", "attention", "rotary", "norms", "activations", "dropout", "loss", "optimizer",
    "data wait", "other operations", UNCLASSIFIED, REST,
)  # fmt: skip
_KERNEL, _C_FUNCTION, _STEP = " kernel launch", "function ", "the step"
# Backward nodes that add a gradient to its parameter: they belong to no region.
_ACCUMULATION = "GradNodeAccumulation"


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
            if _ACCUMULATION not in node.name():
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
                with RecordEvent(f"{_C_FUNCTION}{name}"):
                    return super().__call__(*args)

        found = Marked((name, library))
        found.__name__ = name
        return found

    def marked_operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"operation {self.__name__}"
        with RecordEvent(name):
            return _in_region(name, lambda: call(self, *args, **kwargs), (args, kwargs))

    ctypes.CDLL.__getitem__, Operation.__call__ = marked_function, marked_operation


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
            with RecordEvent(f"phase {name.value}"), super().inside(name):
                yield

    return Clock()


def traced(step: Callable[[], Any], file: Path) -> float:
    """Run a step in Paddle's profiler and write its trace; returns the step's seconds."""
    from paddle.profiler import Profiler, ProfilerTarget, RecordEvent

    # Without a handler the profiler writes a file of its own.
    with Profiler(targets=[ProfilerTarget.CPU], on_trace_ready=lambda _: None) as profiler:
        begin = time.perf_counter()
        with RecordEvent(_STEP):
            step()
        seconds = time.perf_counter() - begin
    profiler.export(str(file), format="json")
    return seconds


class Event:
    """An event of the main thread: Python's and C++'s events are one sequence.

    Attributes:
        begin, end: microseconds.
        own: microseconds outside the events inside it.
    """

    def __init__(self, record: dict[str, Any]):
        self.name = re.sub(r"\[[^\[]*\]$", "", record["name"])
        self.begin, self.end = (
            float(record["args"][key].split()[0]) for key in ("start_time", "end_time")
        )
        self.own = self.end - self.begin
        self.is_layer = record["cat"] == "Forward"
        self.parent: Event | None = None

    @property
    def region(self) -> str | None:
        """The region that it begins."""
        is_named = self.is_layer or self.name.startswith(("operation ", "phase "))
        return self.name if is_named else None


def nested(records: Sequence[dict[str, Any]]) -> list[Event]:
    """The events of the main thread in their order, with parents and own times."""
    main = {
        record["tid"]
        for record in records
        if record.get("name") == "thread_name" and "MainThread" in record["args"]["name"]
    }
    events = [
        Event(record) for record in records
        if record.get("ph") == "X" and record["tid"] in main and record["cat"] != "ProfileStep"
    ]  # fmt: skip
    events.sort(key=lambda event: (event.begin, -event.end))
    open_events: list[Event] = []
    for event in events:
        while open_events and open_events[-1].end <= event.begin:
            open_events.pop()
        if open_events:
            event.parent = open_events[-1]
            event.parent.own -= event.end - event.begin
        open_events.append(event)
    return events


class Share(NamedTuple):
    """An event's own time in the step.

    Attributes:
        kernel: its name behind its regions, as the patterns of `PARTS` see it.
    """

    part: str
    kernel: str
    ms: float


def shares(events: Sequence[Event], nodes: Sequence[Node]) -> Iterator[Share]:
    """The own times of all events in the step.

    Args:
        nodes: of the labelled step.

    Raises:
        ValueError: the backward pass has other nodes.
    """
    visits = iter(nodes)
    paths: dict[int, tuple[str, ...] | None] = {}
    for event in events:
        # None is outside the step.
        path = paths.get(id(event.parent)) if event.name != _STEP else ()
        if path is not None:
            if event.region is not None:
                path = (*path, event.region)
            elif event.name.startswith("Global_") and _ACCUMULATION not in event.name:
                path = (*path, *_regions(event.name.removeprefix("Global_"), visits))
            yield Share(*part_of(path, event.name), event.own / 1e3)
        paths[id(event)] = path
    if (node := next(visits, None)) is not None:
        raise ValueError(f"backward does not visit {node}, which the labelled step visited")


def _regions(name: str, visits: Iterator[Node]) -> tuple[str, ...]:
    node = next(visits, None)
    if node is None or node.name != name:
        raise ValueError(f"backward visits {name} where the labelled step visited {node}")
    return node.regions


def part_of(path: Sequence[str], name: str) -> tuple[str, str]:
    """The part of an event's own time, and the kernel as the patterns see it."""
    regions = "/".join(path)
    for part, pattern in PHASES.items():
        if re.search(pattern, regions):
            return part, name
    is_function = name.startswith(_C_FUNCTION)
    if not (is_function or name.endswith(_KERNEL)):
        return REST, name
    kernel = f"/{regions}/{name.removesuffix(_KERNEL)}"
    matching = (part for part, pattern in PARTS.items() if re.search(pattern, kernel))
    return next(matching, UNCLASSIFIED), kernel


def read(file: Path, nodes: Sequence[Node]) -> list[Share]:
    """`shares` of a trace's file."""
    records = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return list(shares(nested(records), nodes))


def sums(found: Iterable[Share]) -> dict[str, float]:
    """Milliseconds of every part."""
    milliseconds = dict.fromkeys(NAMES, 0.0)
    for share in found:
        milliseconds[share.part] += share.ms
    return milliseconds


def unclassified(found: Iterable[Share]) -> dict[str, float]:
    """Milliseconds of the kernels that no pattern matches."""
    milliseconds: dict[str, float] = defaultdict(float)
    for share in found:
        if share.part == UNCLASSIFIED:
            milliseconds[share.kernel] += share.ms
    return dict(milliseconds)
