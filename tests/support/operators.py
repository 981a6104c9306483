"""Records the calls of Paddle's operators that Python code makes, and the kernels they launch."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
from paddle import Tensor, _C_ops, profiler


class Call(NamedTuple):
    """A call of an operator: its positional arguments, and what it returned."""

    name: str
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]

    @property
    def new_elements(self) -> int:
        """Elements of its results that are no views of an argument."""
        taken = [_span(x) for x in self.arguments if isinstance(x, Tensor)]
        spans = [(x.size, _span(x)) for x in self.results if isinstance(x, Tensor)]
        return sum(
            size
            for size, (begin, _) in spans
            if not any(first <= begin < end for first, end in taken)
        )


def _span(x: Tensor) -> tuple[int, int]:
    begin = x.data_ptr()
    return begin, begin + max(x.size * x.element_size(), 1)


@contextmanager
def recorded_operators() -> Iterator[list[Call]]:
    """Collect calls in this block, but not those that an operator's stub makes."""
    calls: list[Call] = []
    is_inside = False

    def called(name: str, own: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return own(*arguments, **keywords)
        is_inside = True
        try:
            results = own(*arguments, **keywords)
        finally:
            is_inside = False
        as_tuple = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        calls.append(Call(name, arguments, as_tuple))
        return results

    with pytest.MonkeyPatch.context() as patch:
        for name, own in list(vars(_C_ops).items()):
            if callable(own) and not name.startswith("_"):
                patch.setattr(_C_ops, name, partial(called, name, own))
        yield calls


def launches(do: Callable[[], Any]) -> Counter[str]:
    """Kernels that Paddle launches, those of backward passes too, by their names."""
    names: Counter[str] = Counter()

    def count(node: Any) -> None:
        if str(node.type).endswith(".DygraphKernelLaunch"):
            names[node.name.removesuffix(" kernel launch")] += 1
        for child in node.children_node:
            count(child)

    with profiler.Profiler(
        targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None
    ) as recording:
        do()
    result = recording.profiler_result
    assert result is not None
    for root in result.get_data().values():
        count(root)
    return names
