"""Which parameters are trained: parts of the model and patterns over HF parameter names."""

import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from paddle import Tensor

from paddle_vl.config import patterns as config_patterns
from paddle_vl.config.patterns import PARTS
from paddle_vl.nn.linear import names_by_parameter

logger = logging.getLogger(__name__)
NamedParameters = list[tuple[str, Tensor]]


def matching_names(
    patterns: Sequence[str],
    names: Iterable[str],
    setting: str,
    parts: Mapping[str, Sequence[str]] = PARTS,
) -> set[str]:
    """The parameter names that at least one pattern, or part of the model, fits.

    Raises:
        ValueError: a pattern that fits no name, see `paddle_vl.config.patterns`.
    """
    return config_patterns.matching_names(patterns, names, setting, groups=parts)


def trained_names(
    names: Iterable[str],
    patterns: Sequence[str],
    trainable: Iterable[str] | None = None,
    parts: Mapping[str, Sequence[str]] = PARTS,
) -> set[str]:
    """The names that no pattern of model.freeze fits, of the trainable ones where these are given.

    Raises:
        ValueError: a pattern that fits nothing, or patterns that leave nothing to train.
    """
    names = set(names)
    trained = names if trainable is None else names & set(trainable)
    trained = trained - matching_names(patterns, names, "model.freeze", parts)
    if not trained:
        raise ValueError(f"model.freeze {list(patterns)} freezes every parameter: nothing to train")
    return trained


def treated_apart(
    parameters: NamedParameters, treatment: Callable[[str], Hashable]
) -> list[Tensor]:
    """The fused weights whose linears are not all treated alike: these have to be separated.

    Args:
        parameters: HF names and parameters.
        treatment: what a name stands for in training: whether it is trained, its rate, its decay.
    """
    return [
        parameter
        for parameter, names in names_by_parameter(parameters)
        if len({treatment(name) for name in names}) > 1
    ]


def freeze_parameters(
    parameters: NamedParameters,
    trained: Collection[str],
    whole_shapes: Mapping[str, Sequence[int]] | None = None,
) -> NamedParameters:
    """Take the parameters whose names are not among `trained` out of training; return the others.

    Args:
        parameters: HF names and parameters.
        whole_shapes: shapes of the whole model's parameters by name, where this process has some
            or parts of them only.

    Raises:
        ValueError: some of the linears of a fused weight are to be trained and others not.
    """
    if divided := treated_apart(parameters, trained.__contains__):
        ids = {id(weight) for weight in divided}
        names = [name for name, parameter in parameters if id(parameter) in ids]
        raise ValueError(
            f"{', '.join(names)}: some are trained and others frozen, but each of these shares its "
            "weight with others; separate them first: model.separate(treated_apart(..))"
        )
    if whole_shapes is None:
        whole_shapes = {name: parameter.shape for name, parameter in parameters}
    for name, parameter in parameters:
        parameter.stop_gradient = name not in trained
    sizes = {name: math.prod(shape) for name, shape in whole_shapes.items()}
    logger.info(
        "training %s of %s parameters in %d of %d tensors",
        f"{sum(sizes[name] for name in trained):,}",
        f"{sum(sizes.values()):,}",
        len(trained),
        len(sizes),
    )
    return [(name, parameter) for name, parameter in parameters if name in trained]
