"""Which parameters are trained: patterns over HF parameter names."""

import difflib
import fnmatch
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from paddle import Tensor

logger = logging.getLogger(__name__)
NamedParameters = list[tuple[str, Tensor]]


def matching_names(patterns: Sequence[str], names: Iterable[str], setting: str) -> set[str]:
    """The names that at least one pattern (`*`, `?`, case counts) fits.

    Args:
        setting: where the patterns come from, for the message.

    Raises:
        ValueError: a pattern that fits no name, with the nearest names.
    """
    names = list(names)
    matched: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not fitting:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"{setting}: the pattern {pattern!r} fits none of {len(names)} parameters; the "
                f"nearest are {', '.join(near)}"
            )
        matched |= fitting
    return matched


def trained_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names that no pattern of model.freeze fits."""
    names = set(names)
    return names - matching_names(patterns, names, "model.freeze")


def freeze_parameters(
    parameters: NamedParameters,
    patterns: Sequence[str],
    whole_shapes: Mapping[str, Sequence[int]] | None = None,
) -> NamedParameters:
    """Take the parameters that fit a pattern out of training, and return the others.

    Args:
        parameters: HF names and parameters.
        whole_shapes: shapes of the whole model's parameters by name, where this process has some
            or parts of them only.

    Raises:
        ValueError: a pattern that fits nothing, or patterns that leave nothing to train.
    """
    if whole_shapes is None:
        whole_shapes = {name: parameter.shape for name, parameter in parameters}
    frozen = matching_names(patterns, whole_shapes, "model.freeze")
    for name, parameter in parameters:
        parameter.stop_gradient = name in frozen
    sizes = {name: math.prod(shape) for name, shape in whole_shapes.items()}
    trained = [size for name, size in sizes.items() if name not in frozen]
    if not trained:
        raise ValueError(f"model.freeze {list(patterns)} freezes every parameter: nothing to train")
    logger.info(
        "training %s of %s parameters in %d of %d tensors",
        f"{sum(trained):,}",
        f"{sum(sizes.values()):,}",
        len(trained),
        len(sizes),
    )
    return [(name, parameter) for name, parameter in parameters if name not in frozen]
