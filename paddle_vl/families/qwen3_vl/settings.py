"""Settings of a run that trains a Qwen3-VL, beyond those of every run. Read without Paddle."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from paddle_vl.config.parallel_settings import ParallelConfig
from paddle_vl.config.schema import DataConfig, LoRAConfig, ModelConfig, RunConfig

# Named groups of parameters for model.freeze and train.part_learning_rates, as patterns over HF
# parameter names.
PARTS: dict[str, tuple[str, ...]] = {
    "vision": ("model.visual.patch_embed.*", "model.visual.pos_embed.*", "model.visual.blocks.*"),
    "mergers": ("model.visual.merger.*", "model.visual.deepstack_merger_list.*"),
    "language": ("model.language_model.*", "lm_head.*"),
}


class Qwen3VLModelConfig(ModelConfig):
    """The Qwen3-VL to train."""

    lora: LoRAConfig | None = None
    """train low-rank adapters only, on a frozen model.pretrained"""


class Qwen3VLDataConfig(DataConfig):
    """Conversations, their images and videos, and how samples become batches."""

    max_length: Annotated[int, Field(ge=2, le=1 << 22)] = 2048
    """longest sample, in tokens, visual ones included"""
    min_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """smallest image, in pixels; default: the processor's"""
    max_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """largest image, in pixels; default: the processor's"""
    video_fps: Annotated[float | None, Field(gt=0, le=1000)] = None
    """frames sampled per second of video; default: the processor's (Qwen3-VL: 2)"""
    video_min_frames: Annotated[int | None, Field(ge=2, le=1 << 20)] = None
    """fewest frames sampled from a video that has them; default: the processor's (Qwen3-VL: 4)"""
    video_max_frames: Annotated[int | None, Field(ge=2, le=1 << 20)] = None
    """most frames sampled from a video; default: the processor's (Qwen3-VL: 768)"""
    video_min_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """smallest video, in frames x height x width; default: the processor's"""
    video_max_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """largest video, in frames x height x width; default: the processor's"""
    packing: bool = False
    """pack several samples into a row of training data, each attending to itself only; evaluation
    has one sample per row"""
    packing_length: Annotated[int | None, Field(ge=2, le=1 << 22)] = None
    """longest packed row, in tokens; default: data.max_length"""
    max_vision_tokens_per_row: Annotated[int | None, Field(ge=1)] = None
    """most visual tokens in a packed row; default: no limit"""
    padding_side: Literal["right", "left"] = "right"
    """side on which shorter samples of a batch are padded"""
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=1 << 22)] = 1
    """pad batches to a multiple of this many tokens"""


class Qwen3VLParallelConfig(ParallelConfig):
    """Experts, and the message sizes of the pipeline."""

    ep_degree: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """expert-parallel degree: dp ranks that share the experts of a mixture-of-experts model"""
    pp_token_rows: Annotated[int | None, Field(ge=1)] = None
    """with static pp_shapes: token rows of a micro-batch, padding included, that messages have room
    for in all steps (a larger micro-batch is refused); default: each step's largest, or with
    pp_visual_rows what data.max_length and the batch size allow"""
    pp_visual_rows: Annotated[int | None, Field(ge=0)] = None
    """with static pp_shapes: visual token rows of a micro-batch that messages have room for in all
    steps; default: each step's most, or with pp_token_rows what data.max_vision_tokens_per_row and
    the batch size allow"""


class Qwen3VLRun(RunConfig):
    """All settings of a Qwen3-VL run."""

    family: ClassVar[str] = "Qwen3-VL"
    parts: ClassVar[dict[str, tuple[str, ...]]] = PARTS
    counts_tokens: ClassVar[bool] = True
    fixed_settings: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_settings,
        *("model.lora", "data.max_length", "data.min_pixels", "data.max_pixels"),
        *("data.packing", "data.packing_length", "data.max_vision_tokens_per_row"),
    )

    model: Qwen3VLModelConfig
    data: Qwen3VLDataConfig
    parallel: Qwen3VLParallelConfig = Qwen3VLParallelConfig()

    @property
    def trains_adapters(self) -> bool:
        return self.model.lora is not None

    @property
    def reserved_rows(self) -> tuple[int, int] | None:
        """parallel.pp_token_rows and pp_visual_rows; if one is not set, it follows from the bounds
        on the data."""
        tokens, visual = self.parallel.pp_token_rows, self.parallel.pp_visual_rows
        if tokens is None and visual is None:
            return None
        data, samples = self.data, self.train.per_device_train_batch_size
        if tokens is None:
            longest, multiple = data.packing_length or data.max_length, data.pad_to_multiple_of
            tokens = samples * -(-longest // multiple) * multiple
        if visual is None:
            per_row = data.max_vision_tokens_per_row
            visual = tokens if per_row is None else min(tokens, samples * per_row)
        return tokens, visual

    def problems(self) -> Iterator[str]:
        if not self.data.train:
            yield "data.train lists no file: name JSONL files of conversations"
        yield from self._packing_problems()
        yield from self._pixel_problems()
        yield from self._message_problems()
        if self.model.lora is not None and self.model.pretrained is None:
            yield (
                "model.lora trains adapters on a checkpoint, which is not saved with them, but "
                "model.pretrained is not set: set it, or remove model.lora to train all of "
                "model.config"
            )

    def _packing_problems(self) -> Iterator[str]:
        data = self.data
        longest = max(data.max_length, data.packing_length or 0)
        if data.pad_to_multiple_of > longest:
            yield (
                f"data.pad_to_multiple_of {data.pad_to_multiple_of} exceeds the longest row of "
                f"{longest} tokens (data.max_length, data.packing_length): every row would be "
                f"padded to {data.pad_to_multiple_of} tokens, "
                f"{data.pad_to_multiple_of / longest:.3g} times the memory and time"
            )
        if not data.packing:
            for name in ("packing_length", "max_vision_tokens_per_row"):
                if (value := getattr(data, name)) is not None:
                    yield f"data.{name} is {value} but data.packing is false: set data.packing=true"
            return
        if data.packing_length is not None and data.packing_length < data.max_length:
            yield (
                f"data.packing_length {data.packing_length} is below data.max_length "
                f"{data.max_length}: a sample of that length would fit no row; raise "
                "data.packing_length or lower data.max_length"
            )
        if data.padding_side == "left":
            yield (
                "data.padding_side is left but packed rows are padded on the right: set "
                "data.padding_side=right or data.packing=false"
            )

    def _pixel_problems(self) -> Iterator[str]:
        for name in ("{}_pixels", "video_{}_pixels", "video_{}_frames"):
            lowest, highest = name.format("min"), name.format("max")
            low, high = getattr(self.data, lowest), getattr(self.data, highest)
            if low is not None and high is not None and low > high:
                yield f"data.{lowest} {low} exceeds data.{highest} {high}"

    def _message_problems(self) -> Iterator[str]:
        parallel = self.parallel
        for name in ("pp_token_rows", "pp_visual_rows"):
            if (rows := getattr(parallel, name)) is None:
                continue
            if parallel.pp_degree == 1:
                yield (
                    f"parallel.{name} is {rows} but parallel.pp_degree is 1, so there are no "
                    f"messages between stages: remove parallel.{name}, or set pp_degree to 2 or "
                    "more"
                )
            elif parallel.pp_shapes == "dynamic":
                yield (
                    f"parallel.{name} is {rows} but parallel.pp_shapes is dynamic, where each "
                    f"message has its own size: remove parallel.{name}, or set pp_shapes to static"
                )
