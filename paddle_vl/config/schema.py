"""Every setting of a run, its type, default, unit and meaning.

The models are frozen and strict: no unknown key, no silent conversion. What several settings must
satisfy together is in `paddle_vl.config.validate`.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

from paddle_vl.config.data_settings import DataConfig
from paddle_vl.config.parallel_settings import ParallelConfig
from paddle_vl.config.section import Section


class LoRAConfig(Section):
    """Low-rank adapters beside linears, under PEFT's names. Modules are those of HF's model."""

    r: int = Field(8, ge=1, le=4096, description="rank of the adapters")
    lora_alpha: float = Field(
        8, gt=0, description="an adapter's product counts lora_alpha / r times (see use_rslora)"
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout of the adapters' input in training"
    )
    target_modules: str | list[str] = Field(
        min_length=1,
        description="linears that get an adapter: patterns (*, ?) over module names, which may fit "
        'the end of a name: "q_proj"; or "all-linear", every linear but the head',
    )
    exclude_modules: list[str] = Field(
        [], description="patterns, as of target_modules, of linears that get none"
    )
    use_rslora: bool = Field(False, description="lora_alpha / sqrt(r) in place of lora_alpha / r")
    modules_to_save: list[str] = Field(
        [],
        description="modules that are trained whole and saved with the adapters: patterns, as of "
        "target_modules, or parts (vision, mergers, language)",
    )

    @property
    def scaling(self) -> float:
        """The factor on an adapter's product."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


class ModelConfig(Section):
    """What is trained."""

    pretrained: str | None = Field(
        None, description="folder of an HF checkpoint to start from; either this or model.config"
    )
    config: str | dict[str, Any] | None = Field(
        None,
        description="a config.json, its content inline, or a published size (qwen3-vl-2b), to "
        "start from random weights; token ids that are left out are those of the tokenizer",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type of weights and activations; bfloat16 keeps float32 master weights in the "
        "optimizer and needs a GPU",
    )
    freeze: list[str] = Field(
        [],
        description="what is not trained: parts (vision, mergers, language), or patterns (*, ?) "
        'over HF parameter names, e.g. ["model.visual.blocks.*"]',
    )
    lora: LoRAConfig | None = Field(
        None, description="train low-rank adapters only, beside the frozen model.pretrained"
    )


class ProfileConfig(Section):
    """Steps to record with Paddle's profiler."""

    start: int = Field(10, ge=1, description="the first step that is recorded")
    steps: int = Field(5, ge=1, description="how many are")


class TrainConfig(Section):
    """How it is trained. A step is one optimizer update."""

    output_dir: str = Field(
        min_length=1, description="folder for checkpoints, metrics.jsonl, curve and final model"
    )
    max_steps: int | None = Field(
        None, ge=1, description="steps to train; either this or num_train_epochs"
    )
    num_train_epochs: float | None = Field(
        None, gt=0, description="passes over data.train, a fraction is allowed"
    )
    per_device_train_batch_size: int = Field(
        8, ge=1, le=1 << 16, description="samples per micro-batch, with data.packing rows of them"
    )
    per_device_eval_batch_size: int = Field(
        8, ge=1, le=1 << 16, description="samples per evaluation batch"
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, le=1 << 20, description="micro-batches per step"
    )
    loss_weighting: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None,
        description="policies: weights of the losses, MSE of the flow and CE of the tokens; 0 "
        "leaves one out, and what only it trains untrained; default 1 each",
    )
    learning_rate: float = Field(5e-5, ge=0, description="peak learning rate")
    part_learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="peak learning rates of what has another one: by part (vision, mergers, "
        "language) or pattern over HF parameter names; of several that fit, the last",
    )
    lr_scheduler_type: Literal["cosine", "constant", "cosine_decay_with_warmup"] = Field(
        "cosine",
        description="learning rate after warmup; cosine_decay_with_warmup is that of LeRobot and "
        "OpenTau, whose cosine counts the warmup's steps",
    )
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="with cosine_decay_with_warmup: the step at which the cosine ends; default: "
        "the last",
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear increase from 0")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="where the cosine ends, as a part of learning_rate"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    weight_decay_exclude: list[str] = Field(
        ["*norm*", "*.bias"],
        description="patterns over HF parameter names without weight decay; [] decays all",
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    adam_epsilon: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    max_grad_norm: float = Field(
        1.0, ge=0, description="global gradient norm above which gradients are scaled down; 0: off"
    )
    seed: int = Field(
        42, ge=0, lt=2**32, description="seed of initial weights, sample order and all randomness"
    )
    recompute: Literal["none", "full"] = Field(
        "none",
        description="full: every layer forgets its activations and runs again in the backward pass",
    )
    eval_steps: int | None = Field(
        None, ge=1, description="steps between evaluation losses; null: at the end only"
    )
    save_steps: int | None = Field(
        500, ge=1, description="steps between checkpoints; null: at the end only"
    )
    save_total_limit: int | None = Field(
        None,
        ge=1,
        description="checkpoints kept, the newest ones that read back as they were written; null: "
        "all",
    )
    async_save: bool = Field(
        True,
        description="write checkpoints while training goes on, from a copy in host memory of what "
        "this process writes, which is kept; false: no copy, and training waits",
    )
    verify_checkpoint: bool = Field(
        True,
        description="compare checksums of a checkpoint's files before continuing from it, and "
        "before older ones are deleted; false: compare sizes only",
    )
    stop_grace_s: float | None = Field(
        None,
        gt=0,
        description="seconds from a request to stop (Ctrl-C, SIGTERM, SIGHUP) to the end of the "
        "process, checkpoint or not: a little less than a batch system waits before SIGKILL; null: "
        "as long as the step and the checkpoint take. fleetrun's launcher kills after 30",
    )
    profile: ProfileConfig | None = Field(
        None,
        description="record a trace of some steps into output_dir/profile, e.g. {start: 10, "
        "steps: 5}",
    )
    max_nonfinite_steps: int = Field(
        10, ge=1, description="skipped updates (loss or gradient not finite) in a row that end it"
    )
    resume_from_checkpoint: str = Field(
        "none",
        min_length=1,
        description="none: a new run in an unused output_dir; auto: from output_dir's newest "
        "checkpoint that is not damaged or marked, or new when there is none; or the path of a "
        "checkpoint",
    )


class LoggingConfig(Section):
    """What is told on the way."""

    logging_steps: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")
    progress_bar: bool = Field(
        True, description="a bar on the terminal; without one, a line every logging_steps"
    )
    report_to: list[Literal["visualdl", "tensorboard"]] = Field(
        [], description="further writers, each needs its pip extra"
    )
    device_peak_tflops: float | None = Field(
        None,
        gt=0,
        description="what a device computes at most, in TFLOP/s, to report mfu against; default: "
        "known devices' own",
    )
    data_wait_warning_s: float = Field(
        30.0,
        gt=0,
        description="seconds that a batch may be waited for until it is said what it waits for",
    )


class RunConfig(Section):
    """One run."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    train: TrainConfig
    logging: LoggingConfig = Field(default_factory=LoggingConfig)


def setting_descriptions() -> dict[str, tuple[str, str]]:
    """`section.name` of every setting to its default ("required" if none) and its description."""
    described = {}
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    for section, settings in _with_inner_sections(sections).items():
        for name, field in settings.model_fields.items():
            default = "required" if field.is_required() else _shown_default(field)
            described[f"{section}.{name}"] = (default, field.description)
    return described


def _shown_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "its settings below" if isinstance(value, Section) else repr(value)


def _with_inner_sections(sections: dict[str, type[Section]]) -> dict[str, type[Section]]:
    """Sections by name, behind each those that it may have as a setting."""
    found = {}
    for name, section in sections.items():
        inner = {
            f"{name}.{setting}": kind
            for setting, field in section.model_fields.items()
            for kind in get_args(field.annotation) or (field.annotation,)
            if isinstance(kind, type) and issubclass(kind, Section)
        }
        found |= {name: section} | _with_inner_sections(inner)
    return found
