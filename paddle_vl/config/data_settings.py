"""Settings of the data that a run is trained on."""

from typing import Literal

from pydantic import Field

from paddle_vl.config.section import Section


class DropConfig(Section):
    """How often what is left out of a demonstration in training, under OpenTau's names."""

    history_state_drop_prob: float = Field(0.3, ge=0, le=1, description="the past frames")
    subgoal_drop_prob: float = Field(0.75, ge=0, le=1, description="the goal images, all of them")
    response_drop_prob: float = Field(
        0.3, ge=0, le=1, description="the response, of samples that keep their goal images"
    )
    metadata_drop_all_prob: float = Field(0.15, ge=0, le=1, description="all metadata but fps")
    metadata_drop_each_prob: float = Field(
        0.05, ge=0, le=1, description="each of the metadata, where not all are left out"
    )


class DataConfig(Section):
    """What it is trained on."""

    train: list[str] = Field(
        [],
        description="JSONL files of conversations, for a policy of demonstrations; image and video "
        "paths relative to the file",
    )
    eval: list[str] = Field([], description="JSONL files for the evaluation loss")
    processor: str | None = Field(
        None,
        description="folder with tokenizer.json, preprocessor_config.json and, for videos, "
        "video_preprocessor_config.json, of a policy tokenizer.json and action_tokenizer/; default "
        "model.pretrained",
    )
    synthetic_samples: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="policies: train on so many made-up demonstrations in place of data.train",
    )
    groups: dict[str, str] = Field(
        {},
        description="policies: the group of data (robot::control mode) of each file of data.train "
        "and data.eval, for statistics of their own",
    )
    fields: list[str] | None = Field(
        None,
        description="policies: the optional fields that samples have (response, subgoal, speed, "
        "...), the same on every rank; default: those that any line of data.train has",
    )
    statistics: str | None = Field(
        None,
        description="policies: a JSON file with the statistics that normalise states and actions; "
        "default: the checkpoint's, of a new policy those of data.train",
    )
    drops: DropConfig = Field(
        default_factory=DropConfig,
        description="policies: how often optional fields are left out of a training sample",
    )
    max_length: int = Field(
        2048, ge=2, le=1 << 22, description="longest sample, in tokens, visual ones too"
    )
    on_bad_sample: Literal["fail", "skip"] = Field(
        "fail", description="stop at a sample that cannot be used, or skip and count it"
    )
    allow_outside: bool = Field(
        True,
        description="whether images and videos may lie outside the folder of their data file, by "
        "absolute paths, ../ or symbolic links; false refuses such samples, for data files of "
        "others",
    )
    max_line_bytes: int = Field(
        1 << 20,
        ge=1024,
        description="longest line of a data file; a longer one is a bad sample, refused before it "
        "is read into memory",
    )
    min_pixels: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="smallest image area, in pixels; default: the processor's",
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="largest image area, in pixels; default: the processor's",
    )
    video_fps: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="frames to take per second of video; default: the processor's, of Qwen3-VL 2",
    )
    video_min_frames: int | None = Field(
        None,
        ge=2,
        le=1 << 20,
        description="fewest frames to take of a video that has them; default: the processor's, 4",
    )
    video_max_frames: int | None = Field(
        None,
        ge=2,
        le=1 << 20,
        description="most frames to take of a video; default: the processor's, 768",
    )
    video_min_pixels: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="smallest size of a video, in frames x height x width; default: the "
        "processor's",
    )
    video_max_pixels: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="largest size of a video, in frames x height x width; default: the processor's",
    )
    packing: bool = Field(
        False,
        description="several samples in a row of training data, each attending to itself only; "
        "evaluation keeps one a row",
    )
    packing_length: int | None = Field(
        None,
        ge=2,
        le=1 << 22,
        description="tokens of a packed row at most; default: data.max_length",
    )
    max_vision_tokens_per_row: int | None = Field(
        None,
        ge=1,
        description="tokens of images and videos in a packed row at most; default: all may be",
    )
    padding_side: Literal["right", "left"] = Field(
        "right", description="where shorter samples of a batch are filled up"
    )
    pad_to_multiple_of: int = Field(
        1, ge=1, le=1 << 22, description="padded length is a multiple of this many tokens"
    )
    num_workers: int = Field(
        0,
        ge=0,
        le=1024,
        description="processes that prepare samples; 0 prepares them in the training one",
    )
    prefetch_batches: int = Field(
        2, ge=1, le=1024, description="batches prepared ahead of the training step"
    )
    pin_memory: bool = Field(
        True, description="on a GPU, copy the next step's batches beside the running step"
    )
