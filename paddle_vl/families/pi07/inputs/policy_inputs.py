"""Raw demonstrations and observations to the low-level model's inputs, on the host.

It needs no model and no Paddle, so that worker processes can do it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.inputs.discrete_actions import ActionTokenizer
from paddle_vl.families.pi07.inputs.groups import group_index
from paddle_vl.families.pi07.inputs.model_inputs import (
    as_arrays,
    observation_inputs,
    target_inputs,
    warn_of_outliers,
)
from paddle_vl.families.pi07.inputs.normalize import Normalizer
from paddle_vl.families.pi07.inputs.prompt import PromptTokenizer


class Observed(NamedTuple):
    """An observation on its way into the model.

    Attributes:
        inputs: the model's.
        batch: the raw batch with its state normalised.
        group_index: `[B]` int64, the row of the statistics of each sample.
    """

    inputs: dict[str, Any]
    batch: dict[str, Any]
    group_index: np.ndarray


class PolicyInputs:
    """What stands between raw batches and the model: normalisation, texts, images, action tokens.

    Args:
        action_tokenizer: None where nothing is learned.
        normalizers: a policy's, by name.
    """

    def __init__(
        self,
        config: PI07Config,
        tokenizer: PromptTokenizer,
        action_tokenizer: ActionTokenizer | None,
        normalizers: Mapping[str, Normalizer],
    ):
        self.config, self.tokenizer = config, tokenizer
        self.action_tokenizer, self.normalizers = action_tokenizer, normalizers

    def observed(self, batch: dict[str, Any]) -> Observed:
        """The model's inputs of a raw observation.

        Args:
            batch: arrays and texts, see `paddle_vl.families.pi07.policy`.

        Raises:
            ValueError: what is missing or does not fit, named.
        """
        if "state" not in batch:
            raise ValueError(f"the batch has no 'state'; its entries are {sorted(batch)}")
        normalizer = self.normalizers["normalize_inputs"]
        group_B = group_index(batch, len(batch["state"]), self.config, normalizer.num_groups)
        normalized = normalizer.normalize(batch, group_B)
        inputs = observation_inputs(normalized, self.config, self.tokenizer)
        return Observed(inputs | {"group_index": group_B}, normalized, group_B)

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs for raw demonstrations, as arrays.

        Raises:
            ValueError: what is missing or does not fit, named.
        """
        batch = as_arrays(batch)
        if "actions" not in batch:
            raise ValueError(f"the batch has no 'actions'; its entries are {sorted(batch)}")
        inputs, normalized, group_B = self.observed(batch)
        discrete = self.normalizers["normalize_discrete_actions"].normalize(batch, group_B)
        normalized = self.normalizers["normalize_targets"].normalize(normalized, group_B)
        warn_of_outliers(normalized, self.config.warn_outlier_threshold)
        return inputs | target_inputs(
            normalized, discrete["actions"], self.config, self.action_tokenizer
        )
