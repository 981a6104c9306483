"""A Qwen3-VL run: conversations, processor, model."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from paddle import Tensor, nn

from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.config.schema import RunConfig
from paddle_vl.data.loader import Packing, PrefetchLoader
from paddle_vl.data.packing import RowBudget
from paddle_vl.data.sample_lengths import sample_lengths
from paddle_vl.families.flops import FlopCounter
from paddle_vl.families.qwen3_vl.build_model import build_model, model_form, model_shape
from paddle_vl.families.qwen3_vl.flops import Qwen3VLFlops
from paddle_vl.families.qwen3_vl.inputs.collate import PackedCollator, VLCollator
from paddle_vl.families.qwen3_vl.inputs.dataset import MessagesDataset
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.qwen3_vl.pipeline import Qwen3VLStage, layer_costs
from paddle_vl.families.qwen3_vl.settings import PARTS
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.train.objective import LANGUAGE
from paddle_vl.train.processes import SingleProcess


class Qwen3VLRecipe:
    """What `paddle_vl.train.build` asks of a family, for Qwen3-VL.

    Attributes:
        shape, costs: of the decoder, see `paddle_vl.train.layout.Layout`.
        parts: words that stand for parameters in model.freeze, as patterns.
        objective: its losses.
        make_part: makes a part of a pipeline of a model and a range of layers.
        fields: optional fields that all batches have or none, the same on all processes.
        pad_to_multiple_of: padded length of every batch is a multiple of it; None if that is not
            asked for.
        train_data, eval_data: samples; no evaluation data is None.
    """

    parts: Mapping[str, Sequence[str]] = PARTS
    objective = LANGUAGE
    make_part = Qwen3VLStage
    # Every batch may have images or not: nothing is to be agreed on at the start.
    fields: Mapping[str, bool] = {}

    def __init__(self, config: RunConfig, checkpoint: Path | None):
        self.config, self.checkpoint = config, checkpoint
        data = config.data
        self.processor = Qwen3VLProcessor.from_pretrained(
            data.processor or config.model.pretrained,
            min_pixels=data.min_pixels,
            max_pixels=data.max_pixels,
            video_fps=data.video_fps,
            video_min_frames=data.video_min_frames,
            video_max_frames=data.video_max_frames,
            video_min_pixels=data.video_min_pixels,
            video_max_pixels=data.video_max_pixels,
        )
        self.pad_to_multiple_of = data.pad_to_multiple_of
        self.train_data = self._dataset(data.train)
        self.eval_data = self._dataset(data.eval) if data.eval else None
        self.form = model_form(config, self.processor, checkpoint)
        self.shape, self.costs = model_shape(self.form), layer_costs(self.form)

    def build_model(self, placement: SingleDevicePlacement) -> nn.Layer:
        """This process's part of the model, with the weights to start or continue from."""
        return build_model(self.config, self.form, self.checkpoint, placement)

    def named_parameters(self, model: Qwen3VLForConditionalGeneration) -> list[tuple[str, Tensor]]:
        return list(model.hf_named_parameters())

    def whole_shapes(self, model: Qwen3VLForConditionalGeneration) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters of the whole model, whatever this process has, by name."""
        return model.whole_shapes()

    def trainable_names(self, model: Qwen3VLForConditionalGeneration) -> Iterable[str] | None:
        """Names that may be trained; None for all."""
        return model.adapter_names()

    def flop_counter(
        self, model: Qwen3VLForConditionalGeneration, trained: Collection[str]
    ) -> FlopCounter:
        """Counts the operations of batches.

        Args:
            trained: names of the parameters that are trained, of the whole model.
        """
        adapter = model.adapter
        ranks = {} if adapter is None else dict.fromkeys(adapter.targets, adapter.config.r)
        return Qwen3VLFlops(model.config, trained, ranks)

    def save_model(
        self, model: Qwen3VLForConditionalGeneration, folder: Path, write: FileWriter
    ) -> None:
        """Write what this process has of the model; all that have some call it together.

        Args:
            write: takes the files of weights, which are in `folder`.
        """
        save = model.save_pretrained if model.adapter is None else model.save_adapter
        save(folder, write=write)

    def save_files(self, model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
        """Write what belongs beside a model; one process does."""
        self.processor.save_pretrained(folder)

    def train_loader(
        self, placement: SingleDevicePlacement, processes: SingleProcess
    ) -> PrefetchLoader:
        """Batches without end, this process's part of them."""
        packing = self._packing(processes)
        collator = self._collator(placement)
        return PrefetchLoader(
            self.train_data,
            collator if packing is None else PackedCollator(collator),
            self.config.train.per_device_train_batch_size,
            shuffle=True,
            drop_last=packing is None,
            packing=packing,
            seed=self.config.train.seed,
            num_workers=self.config.data.num_workers,
            prefetch_batches=self.config.data.prefetch_batches,
            rank=processes.data_rank,
            size=processes.data_size,
        )

    def eval_loader(
        self, placement: SingleDevicePlacement, processes: SingleProcess
    ) -> PrefetchLoader:
        """Every evaluation sample once, this process's part of them."""
        return PrefetchLoader(
            self.eval_data,
            self._collator(placement),
            self.config.train.per_device_eval_batch_size,
            shuffle=False,
            drop_last=False,
            num_epochs=1,
            num_workers=self.config.data.num_workers,
            prefetch_batches=self.config.data.prefetch_batches,
            rank=processes.data_rank,
            size=processes.data_size,
        )

    @property
    def recomputes(self) -> bool:
        """Whether layers run again in the backward pass."""
        return self.config.train.recompute == "full"

    @property
    def sample_kind(self) -> str:
        """What a batch is counted in."""
        return "packed rows" if self.config.data.packing else "samples"

    def _dataset(self, files: Sequence[str]) -> MessagesDataset:
        data = self.config.data
        return MessagesDataset(
            files,
            self.processor,
            data.max_length,
            data.on_bad_sample,
            allow_outside=data.allow_outside,
            max_line_bytes=data.max_line_bytes,
        )

    def _collator(self, placement: SingleDevicePlacement) -> VLCollator:
        processor = self.processor
        return VLCollator(
            pad_token_id=processor.pad_token_id,
            image_token_id=processor.image_token_id,
            video_token_id=processor.video_token_id,
            spatial_merge_size=processor.image_processor.merge_size,
            padding_side=self.config.data.padding_side,
            pad_to_multiple_of=self.config.data.pad_to_multiple_of,
            part=placement.row_part,
        )

    def _packing(self, processes: SingleProcess) -> Packing | None:
        data = self.config.data
        if not data.packing:
            return None
        budget = RowBudget(data.packing_length or data.max_length, data.max_vision_tokens_per_row)
        # The first process measures; the others then find what it wrote, or the same fault.
        if processes.is_main:
            try:
                lengths = sample_lengths(self.train_data, budget, data.num_workers)
            finally:
                processes.wait()
        else:
            processes.wait()
            lengths = sample_lengths(self.train_data, budget, data.num_workers)
        return Packing(lengths, budget)
