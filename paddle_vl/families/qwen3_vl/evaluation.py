"""A model folder and data files put together for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.qwen3_vl.build_model import check_processor_fits
from paddle_vl.families.qwen3_vl.inputs.collate import VLCollator
from paddle_vl.families.qwen3_vl.inputs.dataset import MessagesDataset
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.train.evaluate import Answer, FirstSamples, greedy_answers, mean_losses
from paddle_vl.train.step import WholeModel


@dataclass
class Evaluation:
    """A model and the data to try it on."""

    model: Qwen3VLForConditionalGeneration
    processor: Qwen3VLProcessor
    dataset: MessagesDataset | FirstSamples
    loader: PrefetchLoader
    batch_size: int

    def loss(self) -> tuple[float, int]:
        """Mean loss per answer token and the number of those tokens."""
        losses = mean_losses(WholeModel(self.model), self.loader)
        return losses.loss, losses.counts["loss"]

    def answers(self, max_new_tokens: int) -> list[Answer]:
        """A greedy answer to every assistant turn."""
        return greedy_answers(
            self.model,
            self.processor,
            self.dataset,
            batch_size=self.batch_size,
            max_new_tokens=max_new_tokens,
        )


def build_evaluation(
    folder: Path,
    files: Sequence[str],
    *,
    batch_size: int,
    max_length: int,
    limit: int | None = None,
    base: str | Path | None = None,
) -> Evaluation:
    """A model folder with its own processor, and data files, of which a bad sample is an error.

    Args:
        folder: of a model, or of adapters.
        limit: use the first samples only.
        base: the model to load adapters beside, instead of the one that their files name.

    Raises:
        ValueError, RuntimeError: the folder is not a model with its processor, or the data cannot
            be used.
    """
    processor = Qwen3VLProcessor.from_pretrained(folder_with("tokenizer.json", folder, base))
    dataset: MessagesDataset | FirstSamples = MessagesDataset(files, processor, max_length)
    if limit is not None:
        dataset = FirstSamples(dataset, limit)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, base=base)
    check_processor_fits(model.config, processor)
    collator = VLCollator(
        pad_token_id=processor.pad_token_id,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        spatial_merge_size=processor.image_processor.merge_size,
    )
    loader = PrefetchLoader(
        dataset, collator, batch_size, shuffle=False, drop_last=False, num_epochs=1
    )
    return Evaluation(model, processor, dataset, loader, batch_size)
