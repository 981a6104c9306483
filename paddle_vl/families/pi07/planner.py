"""The high-level planner: from raw observations to a memory and the next subtask, as texts.

Batches are as for `paddle_vl.families.pi07.policy`, of one frame: `state` `[B, S]`, a camera's
image under its name `[B, 3, H, W]` in [0, 1], `prompt`, `past_memory` and metadata; to learn from
also `next_memory` and `response`.

Source: PI07HighLevelPlannerPolicy of OpenTau.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_vl.checkpoint.safetensors_io import FileWriter, write_file
from paddle_vl.families.pi07.config import CURRENT_CONFIG_VERSION
from paddle_vl.families.pi07.inputs.feature_statistics import Statistics
from paddle_vl.families.pi07.inputs.normalize import Normalizer
from paddle_vl.families.pi07.inputs.planner_inputs import EOS, PlannerInputs
from paddle_vl.families.pi07.inputs.prompt import PromptTokenizer, check_vocabulary
from paddle_vl.families.pi07.placed_policy import PlacedPolicy
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig
from paddle_vl.families.pi07.planner_model import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.policy_files import PolicyCheckpoint, takes_statistics, write_policy
from paddle_vl.families.pi07.prefix_layout import PLANNER_LABELS
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.placement import Placement

_BOS = "<bos>"
# The original's engine has these in every policy.
_UNUSED = ("*.da_head.*", "*.discrete_action_embedding.*")


class Plan(NamedTuple):
    """What the planner wrote, for every sample.

    Attributes:
        memory: what is to be remembered, the next `past_memory`.
        response: the next subtask, the low-level policy's `response`.
    """

    memory: list[str]
    response: list[str]


class PI07HighLevelPlanner(PlacedPolicy):
    """The planner's model with what stands between it and a robot.

    Attributes:
        model: `PI07HighLevelPlannerModel`.
        normalizers: by their names in a checkpoint; of the inputs only.
    """

    def __init__(
        self,
        config: PI07PlannerConfig,
        tokenizer: PromptTokenizer | str | Path,
        statistics: Sequence[Statistics] | None = None,
        placement: Placement | None = None,
    ):
        """Weights are fresh; a rank that holds parts is built with `from_config`.

        Args:
            tokenizer: the backbone's, or its file or folder.
            statistics: of each group of data, in the order of `config.dataset_names`.
            placement: what this process has of the model; None for all of it.

        Raises:
            ValueError: settings, statistics and tokenizer that do not fit each other.
            RuntimeError: the tokenizer's files are missing or damaged.
        """
        super().__init__()
        if not hasattr(tokenizer, "encode"):
            tokenizer = PromptTokenizer.from_pretrained(tokenizer)
            check_vocabulary(tokenizer, config.vlm_config)
        self.config, self.tokenizer = config, tokenizer
        labels = {label: tokenizer.encode(label) for label in PLANNER_LABELS}
        self.model = PI07HighLevelPlannerModel(config, labels, placement)
        self._make_normalizers(config.num_groups if statistics is None else len(statistics))
        if statistics is not None:
            self.normalizers["normalize_inputs"].set_statistics(statistics)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: PI07PlannerConfig | None = None,
        tokenizer: PromptTokenizer | str | Path | None = None,
        statistics: Sequence[Statistics] | None = None,
        dtype: str = "float32",
        fresh: Sequence[str] = (),
        ignore: Sequence[str] = (),
        placement: Placement | None = None,
        materialize: bool = True,
    ) -> "PI07HighLevelPlanner":
        """Load a planner's folder; arguments and errors as for `PI07LowLevelPolicy`."""
        folder = Path(path)
        config = PI07PlannerConfig.from_pretrained(folder) if config is None else config
        stored = PolicyCheckpoint(folder)
        takes = takes_statistics(config.skip_normalization_weights, stored, statistics)
        if config.config_version is None:
            # Checkpoints did not say before the convention changed.
            config = replace(config, config_version=0)
        try:
            with default_dtype(dtype), paddle.LazyGuard():
                planner = cls(config, tokenizer or folder / TOKENIZER_FILE, statistics, placement)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        if takes and config.dataset_names is None:
            planner._make_normalizers(stored.num_groups(planner.normalizers))
        stored.regroup(config, planner.normalizers if takes else {})
        stored.fill(planner.model, planner.normalizers, fresh, [*ignore, *_UNUSED], takes)
        if materialize:
            planner.model.materialize_all()
        planner.config = replace(config, skip_normalization_weights=False)
        planner.eval()
        return planner

    def save_pretrained(
        self,
        path: str | Path,
        write: FileWriter = write_file,
        store: ParameterStore | None = None,
    ) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizer into a folder.

        Where ranks hold parts, all of them call this together.

        Args:
            write: takes the files of weights.
            store: of the model in training, see `paddle_vl.checkpoint.writing`.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        version = self.config.config_version
        version = CURRENT_CONFIG_VERSION if version is None else version
        keeps = self.normalizers if self.config.save_normalization_stats else {}
        write_policy(folder, self.model, keeps, write, store)
        if not self.model.placement.checkpoint_ranks.is_first:
            return
        replace(self.config, config_version=version).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The losses of raw demonstrations: `CE` of memory and response; `MSE` is 0."""
        return self.model(self.training_inputs(batch))

    @property
    def inputs(self) -> PlannerInputs:
        """What makes the model's inputs of raw batches."""
        return PlannerInputs(self.config, self.tokenizer, self.normalizers["normalize_inputs"])

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """See `PlannerInputs.training_inputs`."""
        return self.inputs.training_inputs(batch)

    def observation_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """See `PlannerInputs.observation_inputs`."""
        return self.inputs.observation_inputs(batch)

    def plan(self, batch: Mapping[str, Any]) -> Plan:
        """Memory and subtask for raw observations, written greedily."""
        self.eval()
        eos_id = self.tokenizer.token_id(EOS)
        written = self.model.generate(
            self.observation_inputs(batch), self.tokenizer.token_id(_BOS), eos_id
        )
        return Plan(*([self._text(row, eos_id) for row in ids_BS] for ids_BS in written))

    def _text(self, ids: np.ndarray, eos_id: int) -> str:
        """What stands before the first EOS or padding, special tokens left out."""
        end = np.flatnonzero((ids == eos_id) | (ids == self.tokenizer.pad_id))
        return self.tokenizer.decode(ids[: end[0] if end.size else None])

    def _make_normalizers(self, num_groups: int) -> None:
        config = self.config
        if config.dataset_names and num_groups != config.num_groups:
            raise ValueError(
                f"there are statistics of {num_groups} groups, dataset_names has "
                f"{config.dataset_names}: name every group there, in the order of the statistics"
            )
        modes, version = config.normalization_mapping, config.normalization_version
        inputs = Normalizer(config.input_features, modes, version, num_groups)
        self.normalizers = {"normalize_inputs": inputs}
