"""Learning rates of parts of the model: factors on the one schedule."""

from collections.abc import Iterable, Mapping, Sequence

from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.qwen3_vl.settings import PARTS
from paddle_vl.train.freeze import matching_names


def rate_factors(
    train: TrainConfig, trained: Iterable[str], parts: Mapping[str, Sequence[str]] = PARTS
) -> dict[str, float]:
    """By HF name the factor on the schedule's rate, of parameters that have another peak.

    Args:
        trained: names of all parameters that the run trains.

    Raises:
        ValueError: an entry of train.part_learning_rates that fits no trained parameter.
    """
    trained, factors = list(trained), {}
    setting = "train.part_learning_rates, among what is trained"
    for pattern, peak in train.part_learning_rates.items():
        names = matching_names([pattern], trained, setting, parts)
        factors |= dict.fromkeys(names, peak / train.learning_rate)
    return factors


def reported_rates(train: TrainConfig, rate: float) -> dict[str, float]:
    """What a metrics line says of the parts, where the schedule's rate is `rate`."""
    return {
        f"learning_rate/{pattern}": rate * peak / train.learning_rate
        for pattern, peak in train.part_learning_rates.items()
    }
