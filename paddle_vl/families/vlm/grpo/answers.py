"""What a run that learns from rewards has in place of a run of conversations."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from paddle import Tensor

from paddle_vl.data.samples import Collator
from paddle_vl.families.vlm.answering.groups import GroupBatches
from paddle_vl.families.vlm.grpo.endpoint import RolloutServer
from paddle_vl.families.vlm.grpo.objective import RolloutAdapter, RolloutLoss, RolloutStage
from paddle_vl.families.vlm.grpo.rollouts import Rollouts
from paddle_vl.families.vlm.inputs.collate import PreparedCollator, VLCollator
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.prompts import Prompts
from paddle_vl.families.vlm.inputs.rollouts import RolloutBatch, RolloutCollator
from paddle_vl.families.vlm.preference.reference import values_in, weights_checksum
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.families.vlm.training.objective import VLBatchAdapter


class SampledAnswers:
    """Loss, batches and reference of a run.

    Attributes:
        prompts: that the model answers; None for answers that are given.
        groups: evaluation data whose losses are computed: none, as a loss says nothing here.

    Args:
        model_config: of the model.
        train_data: conversations of a `PromptReader`, or answers.
    """

    def __init__(self, config: VLRun, model_config: Any, train_data: Any):
        self.config, self.settings = config, config.grpo
        self.prompts: Prompts | None = None
        if isinstance(train_data, ConversationData):
            self.prompts = Prompts(train_data, self.settings.max_completion_length)
            self.prompts.check_room()
            self.prompts.check_reasoning(self.settings.patterns)
        text = model_config.text_config
        aux_weight = text.router_aux_loss_coef if text.has_balance_loss(None) else None
        self.loss, self.groups = RolloutLoss(self.settings, aux_weight), {}

    def adapter(self, inner: VLBatchAdapter) -> RolloutAdapter:
        """The adapter of rollouts, from that of samples."""
        return RolloutAdapter(inner, self.loss)

    def is_learned(self, by_model_C: np.ndarray, is_truncated: bool) -> np.ndarray:
        """`[C]` bool, which tokens of an answer are learned.

        Args:
            by_model_C: `[C]`, 0 where a tool or a user wrote.
            is_truncated: whether the answer was cut at the longest length, as the engine's finish
                reason says.
        """
        is_left_out = is_truncated and self.settings.mask_truncated_completions
        return (by_model_C != 0) & (not is_left_out)

    def collator(self, collator: Collator, is_packed: bool = False) -> RolloutCollator:
        """The collator of rollouts, from that of samples; packing is refused."""
        return RolloutCollator(
            cast(VLCollator, collator),
            temperature=self.settings.temperature,
            max_completion_length=self.settings.max_completion_length,
        )

    def rollouts(
        self,
        model: Any,
        processor: VLProcessor,
        collator: Collator,
        own_rows: Callable[[Any], Any] | None,
    ) -> Rollouts:
        """What samples and scores answers to the prompts.

        Args:
            collator: of samples.
            own_rows: makes of a data lane's batch this rank's; None where they do not differ.
        """
        assert self.prompts is not None, "asked for where there are prompts"
        ends, seed = model.generation_config.eos_token_ids, self.config.train.seed
        vision, longest = model.config.vision_config, self.settings.max_completion_length
        of_lane = self.prepared(self.collator(collator), vision)

        def collate(rows: Sequence[Any]) -> Any:
            return of_lane(rows) if own_rows is None else own_rows(of_lane(rows))

        batches = GroupBatches(
            model, processor, cast(VLCollator, collator), longest, ends, own_rows=own_rows,
            vision=vision,
        )  # fmt: skip
        server, asked = None, self.config.train.rollout
        if asked is not None:
            at_once = self.settings.max_num_seqs // self.settings.num_generations
            folder = Path(asked.sync_folder or self.config.train.output_dir, "rollout_weights")
            variables = self.config.data.chat_template_kwargs
            server = RolloutServer(asked, processor, variables, at_once, folder.absolute())
        return Rollouts(
            self.settings, self.prompts, processor, ends, collate, batches, seed, server=server
        )

    def prepared(self, collator: Collator, vision: Any) -> PreparedCollator:
        """Makes batches of such a collator complete."""
        return PreparedCollator(collator, vision, self.loss.divisors, RolloutBatch)

    def stages_of(self, make_stage: Callable[[Any, range], Any]) -> Callable[[Any, range], Any]:
        """Makes pipeline stages of rollouts, from those of samples."""
        return lambda model, layers: RolloutStage(make_stage(model, layers), self.settings)

    @property
    def reference(self) -> Path:
        """The folder of the reference's weights."""
        folder = self.settings.ref_model or self.config.model.pretrained
        assert folder is not None, "refused when the settings were read"
        return Path(folder)

    def reference_values(self, model: Any) -> Iterator[tuple[Tensor, Tensor]] | None:
        """See `Family`."""
        return values_in(self.reference, model) if self.settings.has_reference else None

    def checksum(self) -> str | None:
        """See `Family`."""
        return weights_checksum(self.reference) if self.settings.has_reference else None
