"""Which parameters are trained and decayed, and their learning rates, by patterns over HF names.

A pattern may also be a named group of parameters, such as `vision`.
"""

import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from paddle import Tensor

from paddle_vl.config.patterns import matching_names
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.linear import names_by_parameter

logger = logging.getLogger(__name__)
NamedParameters = list[tuple[str, Tensor]]
# Named groups of parameters of a caller without a family.
NO_PARTS: Mapping[str, Sequence[str]] = {}


def trained_names(
    names: Iterable[str],
    patterns: Sequence[str],
    trainable: Iterable[str] | None = None,
    parts: Mapping[str, Sequence[str]] = NO_PARTS,
) -> set[str]:
    """The names that match no pattern of model.freeze.

    Args:
        names: of all parameters of the full model.
        trainable: names that may be trained; None for all.

    Raises:
        ValueError: a pattern matches nothing, or the patterns leave nothing to train.
    """
    names = set(names)
    trained = names if trainable is None else names & set(trainable)
    trained = trained - matching_names(patterns, names, "model.freeze", groups=parts)
    if not trained:
        raise ValueError(f"model.freeze {list(patterns)} freezes every parameter: nothing to train")
    return trained


def treated_apart(
    parameters: NamedParameters, treatment: Callable[[str], Hashable]
) -> list[Tensor]:
    """The fused weights whose linears are trained differently, and must be separated.

    Args:
        parameters: HF names and parameters.
        treatment: maps a name to whether it is trained, its learning rate and its weight decay.
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
    """Stop the gradients of the parameters whose names are not in `trained`; return the others.

    Args:
        parameters: HF names and parameters.
        whole_shapes: shapes of the full model's parameters by name, for the log; None if
            `parameters` are all of them, unsharded.

    Raises:
        ValueError: only some linears of a fused weight are to be trained.
    """
    if divided := treated_apart(parameters, trained.__contains__):
        ids = {id(weight) for weight in divided}
        names = [name for name, parameter in parameters if id(parameter) in ids]
        raise ValueError(
            f"{', '.join(names)}: some are trained and others frozen, but each of these shares its "
            "weight with others; separate them first: model.separate(treated_apart(..))"
        )
    for name, parameter in parameters:
        parameter.stop_gradient = name not in trained
    shapes = whole_shapes or {name: parameter.shape for name, parameter in parameters}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    logger.info(
        "training %s of %s parameters in %d of %d tensors",
        f"{sum(sizes[name] for name in trained):,}",
        f"{sum(sizes.values()):,}",
        len(trained),
        len(sizes),
    )
    return [(name, parameter) for name, parameter in parameters if name in trained]


def rate_factors(
    train: TrainConfig, trained: Iterable[str], parts: Mapping[str, Sequence[str]] = NO_PARTS
) -> dict[str, float]:
    """Factors on the schedule's learning rate by HF name, for parameters with a peak of their own.

    Args:
        trained: names of all parameters that the run trains.

    Raises:
        ValueError: an entry of train.part_learning_rates matches no trained parameter.
    """
    trained, factors = list(trained), {}
    setting = "train.part_learning_rates, among what is trained"
    for pattern, peak in train.part_learning_rates.items():
        names = matching_names([pattern], trained, setting, groups=parts)
        factors |= dict.fromkeys(names, peak / train.learning_rate)
    return factors


def reported_rates(train: TrainConfig, rate: float) -> dict[str, float]:
    """Entries of train.part_learning_rates for a metrics line, at the schedule's rate `rate`."""
    return {
        f"learning_rate/{pattern}": rate * peak / train.learning_rate
        for pattern, peak in train.part_learning_rates.items()
    }


def decayed_names(
    names: Iterable[str], exclude: list[str], parts: Mapping[str, Sequence[str]] = NO_PARTS
) -> set[str]:
    """Names of the parameters with weight decay.

    Args:
        names: of all parameters of the full model, frozen ones too.
        exclude: patterns of train.weight_decay_exclude.
    """
    names = set(names)
    return names - matching_names(exclude, names, "train.weight_decay_exclude", groups=parts)
