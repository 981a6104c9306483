"""Which parameters are trained and decayed, and their learning rates, by patterns over HF names.

A pattern may also be a named group of parameters, such as `vision`.
"""

import logging
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from paddle import Tensor

from paddle_vl.config.patterns import matching_names
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.linear import names_by_parameter

logger = logging.getLogger(__name__)
NamedParameters = list[tuple[str, Tensor]]
# The number of a layer in a parameter's name.
_LAYER = re.compile(r"\.(?:blocks|(?:\w+_)?layers)\.(\d+)\.")
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
    train: TrainConfig,
    trained: Collection[str],
    parts: Mapping[str, Sequence[str]] = NO_PARTS,
    names: Iterable[str] | None = None,
) -> dict[str, float]:
    """Factors on the schedule's learning rate by HF name, for parameters with a rate of their own.

    Layer decay is that of BEiT, https://arxiv.org/abs/2106.08254, whose head has the full rate.

    Args:
        trained: names of all parameters that the run trains.
        names: of all parameters of the full model; None if all are trained.

    Raises:
        ValueError: an entry of train.part_learning_rates or train.layer_decay matches no trained
            parameter, or one of layer_decay no layers.
    """
    factors, decayed = dict[str, float](), dict[str, float]()
    among = "among what is trained"
    for pattern, peak in train.part_learning_rates.items():
        setting = f"train.part_learning_rates, {among}"
        found = matching_names([pattern], trained, setting, groups=parts)
        factors |= dict.fromkeys(found, peak / train.learning_rate)
    names = list(trained if names is None else names)
    for pattern, decay in train.layer_decay.items():
        whole = matching_names([pattern], names, "train.layer_decay", groups=parts)
        layers = {name: int(found[1]) for name in whole if (found := _LAYER.search(name))}
        if not layers:
            raise ValueError(
                f"train.layer_decay: {pattern!r} matches no parameter of a layer, such as "
                f"blocks.0.* or layers.0.*, but {sorted(whole)[0]}: name a part with layers"
            )
        num_layers = 1 + max(layers.values())
        for name in matching_names([pattern], trained, f"train.layer_decay, {among}", groups=parts):
            outside = num_layers + 1 if "embed" in name else 0
            decayed[name] = decay ** (num_layers - layers[name] if name in layers else outside)
    return {
        name: factors.get(name, 1.0) * decayed.get(name, 1.0) for name in factors.keys() | decayed
    }


def frozen_steps(
    train: TrainConfig, trained: Collection[str], parts: Mapping[str, Sequence[str]] = NO_PARTS
) -> dict[str, int]:
    """Number of steps that parameters of train.unfreeze are frozen for, by HF name.

    Raises:
        ValueError: an entry matches no trained parameter, or nothing is trained at first.
    """
    steps: dict[str, int] = {}
    for entry in train.unfreeze:
        setting = "train.unfreeze, among what is trained"
        found = matching_names(entry.patterns, trained, setting, groups=parts)
        steps |= dict.fromkeys(found, entry.at)
    if steps and len(steps) == len(trained):
        raise ValueError(
            f"train.unfreeze freezes every trained parameter in the first {min(steps.values())} "
            "steps: leave something out that is trained from the beginning"
        )
    return steps


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
