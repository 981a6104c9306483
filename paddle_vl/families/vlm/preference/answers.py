"""What a run that compares answers has in place of a run of conversations."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from paddle import Tensor

from paddle_vl.config.families import FamilyEntry
from paddle_vl.data.samples import Collator
from paddle_vl.families.base import BuiltModel
from paddle_vl.families.vlm.inputs.collate import PreparedCollator, VLCollator
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.preference import PreferenceBatch, PreferenceCollator
from paddle_vl.families.vlm.preference.objective import (
    PreferenceAdapter,
    PreferenceLoss,
    PreferenceStage,
)
from paddle_vl.families.vlm.preference.reference import (
    PrecomputedReference,
    log_probs_of,
    values_in,
    weights_checksum,
)
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.families.vlm.training.objective import VLBatchAdapter
from paddle_vl.nn.placement import SingleDevicePlacement


class ComparedAnswers:
    """Loss, batches, evaluation groups and reference of a run.

    Attributes:
        groups: evaluation data by name, one for each entry of data.eval; under "" if there is one.

    Args:
        model_config: of the model.
        train_data: samples of `PreferenceReader`.
        open_data: opens entries of data.eval.

    Raises:
        ValueError: two groups have one name, or precomputed values are of other data.
        RuntimeError: the precomputed values are missing or damaged.
    """

    def __init__(
        self,
        config: VLRun,
        model_config: Any,
        train_data: ConversationData,
        open_data: Callable[[Sequence[Any]], ConversationData],
    ):
        self.config, self.settings = config, config.preference
        text = model_config.text_config
        aux_weight = text.router_aux_loss_coef if text.has_balance_loss(None) else None
        self.loss = PreferenceLoss(self.settings, aux_weight)
        groups = [open_data([entry]) for entry in config.data.eval]
        names = [group.files[0].stem if groups[1:] else "" for group in groups]
        self.groups = dict(zip(names, groups, strict=True))
        if len(self.groups) < len(groups):
            raise ValueError(f"files of data.eval have one name ({names}): rename one of them")
        every = [train_data, *groups]
        self.files = [PrecomputedReference(data, self.settings.ld_alpha) for data in every]
        self.is_precomputed = self.settings.has_reference and not self.loss.has_reference
        for file in self.files if self.is_precomputed else ():
            file.read()

    def adapter(self, inner: VLBatchAdapter) -> PreferenceAdapter:
        """The adapter of answers, from that of samples."""
        return PreferenceAdapter(inner, self.loss)

    def collator(self, collator: Collator, is_packed: bool = False) -> PreferenceCollator:
        """The collator of answers, from that of samples."""
        return PreferenceCollator(
            cast(VLCollator, collator),
            is_packed,
            not self.settings.is_unpaired,
            self.settings.has_baseline,
            self.settings.ld_alpha,
        )

    def prepared(self, collator: Collator, vision: Any) -> PreparedCollator:
        """Makes batches of such a collator complete."""
        return PreparedCollator(collator, vision, self.loss.divisors, PreferenceBatch)

    def stages_of(self, make_stage: Callable[[Any, range], Any]) -> Callable[[Any, range], Any]:
        """Makes pipeline stages of answers, from those of samples."""
        return lambda model, layers: PreferenceStage(make_stage(model, layers))

    @property
    def reference(self) -> Path:
        """The folder of the reference's weights."""
        folder = self.settings.ref_model or self.config.model.pretrained
        assert folder is not None, "refused when the settings were read"
        return Path(folder)

    def reference_values(self, model: Any) -> Iterator[tuple[Tensor, Tensor]] | None:
        """See `Family`."""
        return values_in(self.reference, model) if self.loss.has_reference else None

    def checksum(self) -> str | None:
        """See `Family`."""
        if not self.settings.has_reference:
            return None
        checksum = weights_checksum(self.reference)
        for file in self.files if self.is_precomputed else ():
            file.check_weights(checksum)
        return checksum

    def precompute(self, built: BuiltModel) -> list[Path]:
        """Write the log-probabilities under a model that is the reference; returns the files.

        Raises:
            ValueError: a file would be of two sets of data.
        """
        files = {file.path: file for file in self.files}
        for file in self.files:
            if files[file.path].described != file.described:
                raise ValueError(
                    "data.train and data.eval, or two entries of data.eval, begin with the same "
                    f"file but differ, and both would be written to {file.path}: copy or rename a "
                    "file"
                )
        checksum = weights_checksum(self.reference)
        built.model.materialize_all()
        built.model.eval()
        vision = built.model.config.vision_config
        collator = self.prepared(self.collator(built.collator), vision)
        size = self.config.train.per_device_eval_batch_size
        for file in files.values():
            file.write(log_probs_of(file.data, built, self.loss, collator, size), checksum)
        return list(files)


def precompute_reference(family: FamilyEntry, config: VLRun) -> list[Path]:
    """Write the log-probabilities of a run's reference beside its data; returns the files.

    Raises:
        ValueError: the run compares no answers with a reference.
    """
    recipe = family.recipe_class()(config.of_reference(), None)
    assert recipe.answers is not None, "a run without a reference is refused"
    return recipe.answers.precompute(recipe.build_model(SingleDevicePlacement()))
