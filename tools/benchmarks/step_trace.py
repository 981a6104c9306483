"""Where the time of a training step goes, by part, from a trace of Paddle's profiler.

Every event of the trace has its own time: its duration without the events inside it. That of a
kernel belongs to the first part of `PARTS` whose pattern matches its regions and its name,

    phase forward/LanguageModel/DecoderLayer/SelfAttention/operation apply_rotary/multiply

and to `UNCLASSIFIED` if there is none. All other own time is `REST`: Python, and Paddle's way from
a call to its kernels; but regions of `WHOLE` keep theirs. So the parts sum to the time of the step.

A kernel of the backward pass belongs to the regions whose forward pass made its node, see
`step_nodes`: every measured step must have the nodes of the labelled one, in the same order.
Functions in C count as kernels.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from step_nodes import ACCUMULATION, C_FUNCTION, OPERATION, PHASE, STEP, Node

UNCLASSIFIED, REST = "unclassified", "Python and dispatch"
# The first pattern that is found decides. These take everything inside them: Python too, since
# dropout may draw in NumPy.
WHOLE = {
    "data wait": r"^phase dataload_wait",
    "optimizer": r"^phase (gradient_sum|unscale_clip|optim_step|zero_grad_sched)",
    "dropout": r"/(RowDropout|operation dropout)(/|$)",
}
PARTS = {
    "dropout": r"/dropout(_grad)?$",
    "attention": r"/operation \w+_attention/",
    "rotary": r"/operation (apply_rotary|_rotated|rotate_half)/|/(sin|cos)$",
    "norms": r"/operation (\w+_norm|rms_quotient)/|/\w*Norm/(?!Linear/)",
    "activations": r"/operation (gelu|swiglu|geglu)/|/(silu|gelu|swiglu)(_grad)?$",
    "loss": r"/\w*cross_entropy\w*$",
    "linears": r"/operation (biased_linear|grouped_linear)/|/(matmul|addmm)(_grad)?$",
    "other operations": (
        r"/operation (split_columns|times_constant)/"
        r"|/(add|add_n|subtract|multiply|divide|scale|div_scale|sum|mean|maximum|square|sqrt|cumsum"
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
_KERNEL, _NODE = " kernel launch", "Global_"


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
        is_named = self.is_layer or self.name.startswith((OPERATION, PHASE))
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
        path = paths.get(id(event.parent)) if event.name != STEP else ()
        if path is not None:
            if event.region is not None:
                path = (*path, event.region)
            elif event.name.startswith(_NODE) and ACCUMULATION not in event.name:
                path = (*path, *_regions(event.name.removeprefix(_NODE), visits))
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
    for part, pattern in WHOLE.items():
        if re.search(pattern, regions):
            return part, name
    is_function = name.startswith(C_FUNCTION)
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
    milliseconds: dict[str, float] = {name: 0.0 for name in NAMES}
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
