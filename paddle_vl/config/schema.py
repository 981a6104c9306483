"""The settings that runs of all model families have: type, default, unit and meaning of each.

A family adds its own in a subclass of `RunConfig`, see `paddle_vl.config.families`. Rules between
settings are in `paddle_vl.config.validate`. One reads it beside a run
file, from top to bottom.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paddle_vl.config.guard_settings import Guards
from paddle_vl.config.parallel_settings import ParallelConfig, ReservedRows
from paddle_vl.config.section import FilePath, OnlyWith, Section

_Recomputed = OnlyWith("train.recompute", ["full", "act", "attention", "mlp"])
_WSD, _COSINE_DECAY = "warmup_stable_decay", "cosine_decay_with_warmup"
_SCHEDULE = "train.lr_scheduler_type"


class LoRAConfig(Section):
    """Low-rank adapters on linears, under PEFT's names. Module names are those of the checkpoint's
    parameters: HF's, or OpenTau's."""

    r: Annotated[int, Field(ge=1, le=4096)] = 8
    """rank of the adapters"""
    lora_alpha: Annotated[float, Field(gt=0)] = 8
    """an adapter's output is scaled by lora_alpha / r (see use_rslora)"""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout probability on the adapters' input in training"""
    target_modules: Annotated[str | list[str], Field(min_length=1)]
    """linears that get an adapter: patterns (*, ?) over module names, which may match the end of a
    name ("q_proj"), or parts of the model (vision, expert); or "all-linear", every linear but the
    head"""
    exclude_modules: list[str] = Field(default=[])
    """linears that get no adapter: patterns as in target_modules"""
    use_rslora: bool = False
    """scale by lora_alpha / sqrt(r) instead of lora_alpha / r"""
    use_dora: bool = False
    """DoRA: adapters change the directions of a weight's rows, and their lengths are trained too;
    each forward pass computes the norms of the adapted weights"""
    modules_to_save: list[str] = Field(default=[])
    """modules that are trained in full and saved with the adapters: patterns as in target_modules,
    or parts of the model (vision, mergers, language)"""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=4096)]] = Field(default={})
    """other ranks for some linears: patterns or parts as in target_modules, the last that matches
    (expert: 32)"""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """other lora_alpha for some linears, as in rank_pattern"""
    init_lora_weights: Literal["peft", "openpi"] = "peft"
    """initial values: peft, B zero and A uniform, which starts from the base model; openpi, both
    normal with a standard deviation of 0.01, which starts near it"""

    def scaling(self, r: int, alpha: float) -> float:
        """The factor on the output of an adapter of this rank and alpha."""
        return alpha / (r**0.5 if self.use_rslora else r)


class ModelConfig(Section):
    """The model to train."""

    pretrained: FilePath | None = None
    """folder of the HF checkpoint to start from, or its name on a hub (org/name); set this or
    model.config, or both for a policy with new weights on the backbone in this folder"""
    config: FilePath | dict[str, Any] | None = None
    """configuration of a model with random weights: path of a config.json, its content, or a
    published size (qwen3-vl-2b, paddleocr-vl-1.5); token ids that it leaves out are taken from the
    tokenizer"""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights and activations; bfloat16 adds float32 master weights to the optimizer state
    and needs a GPU"""
    freeze: list[str] = Field(default=[])
    """parameters that are not trained: parts of the model (listed per family below), or patterns
    (*, ?) over HF parameter names, e.g. ["model.visual.blocks.*"]"""


class DataConfig(Section):
    """Data files and how they are loaded."""

    train: list[FilePath] = Field(default=[])
    """JSONL files to train on (image and video paths are relative to their file); except for
    policies also the sources of a pretraining mix, {path, format, weight, name, targets,
    loss_weight, columns}, see docs/pretraining.md"""
    eval: list[FilePath] = Field(default=[])
    """data for the evaluation loss; entries as in data.train"""
    processor: FilePath | None = None
    """folder with tokenizer.json and the family's other processor files, or the name of a model on
    a hub; default: model.pretrained"""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """stop at a sample that cannot be used, or skip and count it"""
    allow_outside: bool = True
    """allow images and videos outside the folder of their data file (absolute paths, ../, symbolic
    links); false makes them bad samples, for untrusted data files"""
    max_line_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    """longest line of a data file, in bytes; a longer line is a bad sample and is not read into
    memory. In tables and archives the text of a row; its images may have 64 times as much, and a
    row group of Parquet 1024 times as much in memory"""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """worker processes that prepare samples, per data lane and machine; 0 prepares them in the
    training process of one of its ranks"""
    prefetch_batches: Annotated[int, Field(ge=1, le=1024)] = 2
    """batches prepared ahead of the training step"""
    pin_memory: bool = True
    """on a GPU, copy the next step's batches from pinned memory while the step runs"""

    @property
    def has_eval(self) -> bool:
        """Whether there is data for the evaluation loss."""
        return bool(self.eval)

    def names_a_file(self, entry: str) -> bool:
        """Whether an entry of `train` or `eval` can only be a file."""
        return True


class ProfileConfig(Section):
    """Steps to record with Paddle's profiler."""

    start: Annotated[int, Field(ge=1)] = 10
    """first recorded step"""
    steps: Annotated[int, Field(ge=1)] = 5
    """number of recorded steps"""


_EMA = "train.ema.schedule"


class EMAConfig(Section):
    """An exponential moving average of the trained weights, in float32."""

    schedule: Literal["constant", "warmup"] = "constant"
    """constant: the same decay in every step, as openpi; warmup: LeRobot's, which begins with 0 and
    is 1 - (1 + t / inv_gamma) ** -power after t further steps, at most 0.9999"""
    decay: Annotated[float, Field(gt=0, lt=1), OnlyWith(_EMA, ["constant"])] = 0.99
    """the average keeps this share of itself in a step"""
    inv_gamma: Annotated[float, Field(gt=0), OnlyWith(_EMA, ["warmup"])] = 1.0
    """steps in which the decay of warmup begins to rise"""
    power: Annotated[float, Field(gt=0), OnlyWith(_EMA, ["warmup"])] = 0.75
    """how fast it rises"""


class UnfreezeConfig(Section):
    """Parameters that are frozen at the beginning of a run."""

    at: Annotated[int, Field(ge=1)]
    """number of steps that they are frozen for; from the next one on they are trained, at the
    schedule's rate then and with fresh optimizer state"""
    patterns: Annotated[list[str], Field(min_length=1)]
    """parts of the model or patterns, as in model.freeze"""


class BestConfig(Section):
    """The best evaluation of a run, and when to stop waiting for a better one."""

    metric: Annotated[str, Field(min_length=1)]
    """a number of the evaluations as in metrics.jsonl, with or without eval_: loss, loss/SOURCE,
    exact_match, action_mae/0; the checkpoint of the best one is kept beyond save_total_limit"""
    mode: Literal["min", "max"]
    """whether lower or higher is better"""
    load_at_end: bool = False
    """final/ holds the best evaluation's model, from the first one on, not the last step's"""
    patience: Annotated[int | None, Field(ge=1)] = None
    """end the run after so many evaluations without a better one; null: never"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """improvement that patience asks for"""

    @property
    def key(self) -> str:
        """The metric's key in metrics.jsonl."""
        return self.metric if self.metric.startswith("eval_") else f"eval_{self.metric}"


class TrainConfig(Section):
    """The training loop, optimizer and checkpoints. A step is one optimizer update."""

    output_dir: FilePath
    """folder for checkpoints, metrics.jsonl, the loss curve and the final model"""
    max_steps: Annotated[int | None, Field(ge=1)] = None
    """steps to train; set this, num_train_epochs or max_tokens"""
    num_train_epochs: Annotated[float | None, Field(gt=0)] = None
    """passes over data.train, may be a fraction"""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """tokens to train on, over all ranks, visual ones included and padding not; the run ends with
    the step that reaches them, and its learning rate follows tokens instead of steps"""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    """samples per micro-batch on each data-parallel rank (packed rows with data.packing)"""
    per_device_eval_batch_size: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    """samples per evaluation batch on each data-parallel rank"""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """micro-batches per step"""
    learning_rate: Annotated[float, Field(ge=0)] = 5e-5
    """peak learning rate"""
    part_learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """other peak learning rates for some parameters, by part of the model (listed per family below)
    or pattern over HF parameter names; of several that match, the last"""
    layer_decay: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default={})
    """learning rates that fall from layer to layer towards the input, by part or pattern with
    layers, e.g. {vision: 0.9}: of N layers number i, from 0, is multiplied by decay ** (N - i),
    embeddings by decay ** (N + 1), all else by 1; of several entries that match, the last"""
    unfreeze: list[UnfreezeConfig] = Field(default=[])
    """parameters to freeze for some steps, e.g. [{at: 500, patterns: [language]}]; of several
    entries that match, the last"""
    lr_scheduler_type: Literal[
        "cosine", "constant", "warmup_stable_decay", "cosine_decay_with_warmup"
    ] = "cosine"
    """learning rate after warmup; warmup_stable_decay (WSD) is constant and falls in the last
    decay_ratio of the run; cosine_decay_with_warmup is the schedule of LeRobot and OpenTau, whose
    cosine counts the warmup steps"""
    decay_ratio: Annotated[float | None, Field(ge=0, le=1), OnlyWith(_SCHEDULE, [_WSD])] = None
    """share of the run, at its end, in which warmup_stable_decay falls; 0 for a run that a later
    one continues"""
    decay_type: Annotated[Literal["linear", "cosine", "1-sqrt"], OnlyWith(_SCHEDULE, [_WSD])] = (
        "cosine"
    )
    """how warmup_stable_decay falls"""
    decay_steps: Annotated[int | None, Field(ge=1), OnlyWith(_SCHEDULE, [_COSINE_DECAY])] = None
    """step at which the cosine of cosine_decay_with_warmup ends; default: the last"""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """steps of linear learning rate increase, starting at 0"""
    warmup_ratio: Annotated[
        float, Field(ge=0, le=1), OnlyWith(_SCHEDULE, ["cosine", "constant", _WSD])
    ] = 0.0
    """the same as a share of the run, in place of warmup_steps"""
    min_lr_ratio: Annotated[
        float, Field(ge=0, le=1), OnlyWith(_SCHEDULE, ["cosine", _WSD, _COSINE_DECAY])
    ] = 0.0
    """where the cosine or the decay ends, as a fraction of learning_rate"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay"""
    weight_decay_exclude: list[str] = Field(default=["*norm*", "*.bias"])
    """parameters without weight decay: patterns over HF parameter names; [] decays all"""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """decay rate of the first moment"""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """decay rate of the second moment"""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """added to the square root of the second moment"""
    ema: EMAConfig | None = None
    """average the trained weights over the steps, e.g. {decay: 0.99}; evaluations use the average
    and final/ holds it, while training goes on from the live weights, which checkpoints hold"""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """clip gradients to this global norm; 0 turns clipping off"""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """seed of initial weights, sample order and all randomness"""
    recompute: Literal["none", "act", "attention", "mlp", "full"] = "none"
    """activation recomputation, what each layer's backward pass computes again: act (activations
    and norms: no matrix product), attention or mlp (these too, and that part), full (the layer)"""
    recompute_num_layers: Annotated[int | None, Field(ge=1), _Recomputed] = None
    """recompute only so many of a rank's decoder layers, and as many blocks of its vision tower,
    the first ones; null: all"""
    kernels: Literal["fused", "uncompiled", "plain"] = "fused"
    """fused: this package's kernels and Paddle's fused ones; uncompiled: on a CPU without those in
    C; plain: Paddle's basic operators one by one, which round after each as the original models do:
    slower, with more memory, to compare"""
    deterministic: bool = False
    """on a GPU, the same bits in every run of the same settings on as many devices; slower, see
    docs/gpu.md; on a CPU they are the same anyway"""
    tf32: bool = False
    """on a GPU, compute matrix products of float32 in TF32, with 10 bits of mantissa; false as in
    the original models"""
    cpu_kernels: bool = True
    """on a CPU, kernels in C, compiled at first use where a compiler is found; false is the same as
    kernels=uncompiled, and the environment variable PADDLE_VL_CPU_KERNELS=0 turns them off too"""
    eval_steps: Annotated[int | None, Field(ge=1)] = None
    """steps between evaluations; null: at the end only"""
    best: BestConfig | None = None
    """keep the checkpoint of the best evaluation, e.g. {metric: loss, mode: min}, and maybe stop
    early"""
    guard: Guards = Field(default=[])
    """keep what the model can do: compare scores of each named source of data.eval with those
    before the first update, e.g. {metric: cer, max_drop: 0.05}, or a list of guards"""
    save_steps: Annotated[int | None, Field(ge=1)] = 500
    """steps between checkpoints; null: at the end only"""
    save_total_limit: Annotated[int | None, Field(ge=1)] = None
    """number of newest intact checkpoints to keep; null keeps all"""
    async_save: bool = True
    """write checkpoints in the background, from a copy in host memory of what this rank writes
    (allocated once); false: no copy, and training waits"""
    verify_checkpoint: bool = True
    """compare checksums of a checkpoint's files before resuming from it and before deleting older
    ones; false: compare sizes only"""
    stop_grace_s: Annotated[float | None, Field(gt=0)] = None
    """seconds from a request to stop (Ctrl-C, SIGTERM, SIGHUP) until the process ends, with or
    without a checkpoint: choose a little less than the batch system waits before SIGKILL
    (fleetrun's launcher waits 30); null: as long as the step and the checkpoint take"""
    profile: ProfileConfig | None = None
    """record a trace of some steps into output_dir/profile, e.g. {start: 10, steps: 5}"""
    max_nonfinite_steps: Annotated[int, Field(ge=1)] = 10
    """end the run after this many skipped updates in a row (loss or gradient not finite)"""
    resume_from_checkpoint: FilePath = "none"
    """none: start a new run in an unused output_dir; auto: resume from the newest intact checkpoint
    in output_dir, or start anew without one; or the path of a checkpoint"""


class LoggingConfig(Section):
    """What a run reports."""

    logging_steps: Annotated[int, Field(ge=1)] = 10
    """steps between lines of metrics.jsonl"""
    progress_bar: bool = True
    """show a progress bar; false prints a line every logging_steps"""
    report_to: list[Literal["visualdl", "tensorboard", "swanlab", "wandb", "csv"]] = Field(
        default=[]
    )
    """other programs to log to, each with its pip extra, and csv for metrics.csv; SWANLAB_MODE and
    WANDB_MODE=offline log into the run's folder"""
    device_peak_tflops: Annotated[float | None, Field(gt=0)] = None
    """peak throughput of a device in TFLOP/s, from which mfu is computed; default: the published
    value of known devices"""
    data_wait_warning_s: Annotated[float, Field(gt=0)] = 30.0
    """seconds of waiting for a batch after which a warning says what is waited for"""


class RunConfig(Section):
    """All settings of one run; the base of every family's settings.

    A family's subclass overrides sections with subclasses of theirs, adds sections of its own, and
    overrides the class attributes and methods below where they differ.

    Attributes:
        family: name of the family in messages and help.
        parts: named groups of parameters for settings, as patterns over parameter names.
        needs_processor: whether data.processor or model.pretrained must name a folder.
        has_colocated: whether parallel.schedule may be colocated.
        has_context_parallel: whether parallel.cp_degree may be above 1.
        counts_tokens: whether batches count their tokens, which train.max_tokens needs.
        backbones: model types of folders that model.pretrained may name beside model.config.
        fixed_settings: settings or sections that a resumed run must not change, because weights,
            optimizer state, data position or random state of the checkpoint depend on them.
    """

    family: ClassVar[str] = "a model family"
    parts: ClassVar[dict[str, tuple[str, ...]]] = {}
    needs_processor: ClassVar[bool] = True
    has_colocated: ClassVar[bool] = False
    has_context_parallel: ClassVar[bool] = False
    counts_tokens: ClassVar[bool] = False
    backbones: ClassVar[tuple[str, ...]] = ()
    fixed_settings: ClassVar[tuple[str, ...]] = (
        *("model.pretrained", "model.config", "model.compute_dtype", "model.freeze"),
        *("data.train", "data.processor", "data.on_bad_sample"),
        *("train.seed", "train.gradient_accumulation_steps", "train.ema"),
    )

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    logging: LoggingConfig = LoggingConfig()

    def problems(self) -> Iterator[str]:
        """Messages about the family's settings that contradict each other."""
        return iter(())

    @classmethod
    def backbone_name(cls, config: Any) -> str | None:
        """The hub's name of the backbone that `model.config` starts from by itself, if it does."""
        return None

    @property
    def input_files(self) -> dict[str, str]:
        """Files named by the family's settings, which must exist, by setting."""
        return {}

    @property
    def lora(self) -> LoRAConfig | None:
        """Settings of adapters, of a family that has them in `model.lora`."""
        return getattr(self.model, "lora", None)

    @property
    def trains_adapters(self) -> bool:
        """Whether only adapters are trained; the weights then come from model.pretrained."""
        return self.lora is not None

    @property
    def reserved_rows(self) -> ReservedRows | None:
        """Rows of static pipeline messages; None for the largest of each step."""
        return None
