"""Which parameters are trained: patterns over HF parameter names."""

import difflib
import fnmatch
import logging
import math
from collections.abc import Callable, Iterable, Sequence

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


def freeze_parameters(
    parameters: NamedParameters,
    patterns: Sequence[str],
    whole_shape: Callable[[Tensor], Sequence[int]] = lambda parameter: parameter.shape,
) -> NamedParameters:
    """Take the parameters that fit a pattern out of training, and return the others.

    Args:
        parameters: HF names and parameters of the whole model.
        whole_shape: shape of a parameter before ranks split it, for the count that is told.

    Raises:
        ValueError: a pattern that fits nothing, or patterns that leave nothing to train.
    """
    frozen = matching_names(patterns, (name for name, _ in parameters), "model.freeze")
    for name, parameter in parameters:
        parameter.stop_gradient = name in frozen
    trained = [(name, parameter) for name, parameter in parameters if name not in frozen]
    if not trained:
        raise ValueError(f"model.freeze {list(patterns)} freezes every parameter: nothing to train")
    total, training = (
        sum(math.prod(whole_shape(p)) for _, p in group) for group in (parameters, trained)
    )
    logger.info(
        "training %s of %s parameters in %d of %d tensors",
        f"{training:,}",
        f"{total:,}",
        len(trained),
        len(parameters),
    )
    return trained
