"""Bfloat16 on Paddle's CPU build, whose kernels for it are missing: computed wide, then rounded.

    with emulated_bfloat16():
        model = Qwen3VLForConditionalGeneration(config)  # built under default_dtype("bfloat16")
        model(**batch)["loss"].backward()

Inside the block every operator that takes bfloat16 tensors computes in float32 from their values
and rounds its results to bfloat16, forward and backward. This is what a GPU's kernels do, which
accumulate in float32 and round once; so the model's own code runs in its own dtypes, with rounding
where it would be on a GPU. The order of the terms of a sum differs from kernel to kernel.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor, _C_ops

# These work on bfloat16 as they are: they copy, fill, or have the result's dtype as an argument.
_KEPT = {
    "assign", "assign_", "assign_out_", "assign_value_", "cast", "cast_", "copy_to", "empty_like",
    "full_", "full_like", "memcpy", "ones_like", "zeros_like",
}  # fmt: skip
# With a float32 tensor beside a bfloat16 one, the result of these is float32 (type promotion).
_PROMOTING = ("add", "subtract", "multiply", "divide", "where", "maximum", "minimum", "pow")
_METHODS = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__pow__", "__matmul__", "__neg__",
)  # fmt: skip


@contextmanager
def emulated_bfloat16() -> Iterator[None]:
    """Inside the block bfloat16 works on a CPU; not in threads side by side, nor in traced code."""
    tensor_type: Any = Tensor
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        replaced.append((owner, name, original))
        in_place = name.endswith("_") and not name.startswith("_")
        setattr(owner, name, _rounded(original, _plain_name(name), in_place))

    for name in dir(_C_ops):
        if name not in _KEPT and not name.startswith("_") and callable(getattr(_C_ops, name)):
            replace(_C_ops, name)
    for name in _METHODS:
        replace(tensor_type, name)
    try:
        yield
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


def _plain_name(name: str) -> str:
    """`add` for `add_` and `__radd__`."""
    name = name.strip("_")
    names = {"truediv": "divide", "mul": "multiply", "sub": "subtract", "pow": "pow", "add": "add"}
    for short in names:
        if name in (short, f"r{short}"):
            return names[short]
    return name


def _rounded(operator: Callable[..., Any], name: str, in_place: bool) -> Callable[..., Any]:
    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        if all(x.dtype != paddle.bfloat16 for x in tensors):
            return operator(*args, **kwargs)
        target = kwargs.pop("out", None)
        if in_place:
            target, args = args[0], (args[0].astype("float32"), *args[1:])
        result = operator(*_mapped(args, _widen), **_mapped(kwargs, _widen))
        if target is not None:
            if not isinstance(result, Tensor):
                raise TypeError(f"{name} changes several tensors in place; it is not emulated")
            paddle.assign(result.astype(target.dtype), target)
            return target
        if name in _PROMOTING and any(x.dtype == paddle.float32 and x.ndim for x in tensors):
            return result
        return _mapped(result, _round)

    return call


def _widen(x: Tensor) -> Tensor:
    return x.astype("float32") if x.dtype == paddle.bfloat16 else x


def _round(x: Tensor) -> Tensor:
    return x.astype("bfloat16") if x.dtype == paddle.float32 else x


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of lists, tuples and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
