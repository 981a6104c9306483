"""Settings of a run of a vision-language family, beyond those of every run. Read without Paddle."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paddle_vl.config.data_sources import DataEntries, SourceConfig, has_sources
from paddle_vl.config.parallel_settings import ParallelConfig, ReservedRows
from paddle_vl.config.row_sources import RowFormat, RowSourceConfig, Strategy
from paddle_vl.config.schema import DataConfig, LoRAConfig, ModelConfig, RunConfig, TrainConfig
from paddle_vl.config.section import FilePath, OnlyWith, Section
from paddle_vl.families.vlm.grpo.endpoint_settings import RolloutConfig
from paddle_vl.families.vlm.grpo.settings import GRPOConfig
from paddle_vl.families.vlm.preference.settings import PreferenceConfig

# Named groups of parameters for model.freeze and train.part_learning_rates, as patterns over HF
# parameter names.
PARTS: dict[str, tuple[str, ...]] = {
    "vision": ("model.visual.patch_embed.*", "model.visual.pos_embed.*", "model.visual.blocks.*"),
    "mergers": ("model.visual.merger.*", "model.visual.deepstack_merger_list.*"),
    "language": ("model.language_model.*", "lm_head.*"),
}
_Packed = OnlyWith("data.packing", [True])
_ExpertParallel = OnlyWith("parallel.ep_degree", range(2, 1 << 20))
_Pipelined = OnlyWith("parallel.pp_degree", range(2, 1 << 20))
_Static = OnlyWith("parallel.pp_shapes", ["static"])


class VLModelConfig(ModelConfig):
    """The vision-language model to train."""

    lora: LoRAConfig | None = None
    """train low-rank adapters only, on a frozen model.pretrained"""


class VLDataConfig(DataConfig):
    """Conversations or a mix of sources, and how samples become batches."""

    train: DataEntries = Field(default=[])
    """conversations: files of any kind, data sets on a hub (hf://org/name) or names of
    data.dataset_info, with #500 or %50 behind them for some of the rows, or sources with settings
    of their own, see docs/data.md; or a pretraining mix, see docs/pretraining.md"""
    eval: DataEntries = Field(default=[])
    """data for the evaluation loss; entries as in data.train"""
    format: RowFormat | None = None
    """format of the rows of conversations; default: recognised from the first row of each file"""
    columns: dict[str, str] = Field(default={})
    """names of columns in the files and the keys that they stand for, {ask: query}; _ hides one"""
    dataset_info: FilePath | None = None
    """a dataset_info.json of LLaMA-Factory or ms-swift, whose names data.train and data.eval use"""
    mix_strategy: Strategy = "concat"
    """how rows of several sources of conversations follow one another before they are shuffled:
    one source after the other, or interleaved until the first, the last (others repeated) or each
    (every row once) is used up"""
    mask_history: bool = False
    """learn the last answer of each conversation only"""
    train_on_prompt: bool = False
    """learn all text of a conversation, not the answers alone"""
    boxes: Literal["json", "markers"] = "json"
    """how boxes of rows' objects are written: [x1, y1, x2, y2], or between <|box_start|> markers"""
    clip_boxes: bool = False
    """move boxes that are partly outside of their image to its edge, instead of refusing them"""
    special_tokens: list[Literal["box", "object_ref"]] = Field(default=[])
    """special tokens that texts of rows may contain: box, object_ref"""
    checks: list[Literal["tables", "spotting", "text", "pixels"]] | None = None
    """rows that are bad samples: a table whose OTSL is not rectangular, spotted lines without their
    eight location tokens from 0 to 1000, an answer without text, an image that data.max_pixels
    would shrink; null: the first three for conversations of a model with task prompts, else none"""
    html_tables: Literal["keep", "otsl"] = "keep"
    """write answers to a table's prompt that are HTML as OTSL"""
    earlier_reasoning: Literal["refuse", "drop", "split"] = "refuse"
    """where the chat template leaves reasoning of earlier answers out: refuse the row, drop the
    reasoning, or make a sample of each learned answer (reads all rows at the start)"""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """variables of the checkpoint's chat template, such as enable_thinking; a row's own win"""
    template_date: date | None = None
    """the day that a chat template shows which prints today's; needed for such templates, so that a
    resumed run learns the same"""
    allow_remote: bool = False
    """fetch images and videos of http(s) addresses, each once, into data.cache"""
    remote_hosts: list[str] = Field(default=[])
    """hosts that may be fetched from though their addresses are private"""
    remote_max_bytes: Annotated[int, Field(ge=1)] = 1 << 26
    """largest file that is fetched"""
    remote_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """longest time for one fetched file"""
    temperature: Annotated[float | None, Field(ge=1, le=1000)] = None
    """of sources without weights: draw documents of a source in proportion to its number of
    documents to the power of 1 / temperature; default: 1, every document equally often"""
    shuffle: Literal["documents", "shards"] = "documents"
    """order of a source's documents: any order, or for slow sequential stores a few shards (files)
    at a time, each copied once into data.cache and removed when it is used up"""
    shuffle_shards: Annotated[int, Field(ge=1, le=1 << 20)] = 8
    """with data.shuffle=shards (and for row groups of Parquet files): shards that are mixed with
    each other at a time"""
    cache: FilePath | None = None
    """folder for indexes of data files and local copies of shards; default: beside the data, and
    for data that cannot be written to the user's cache folder"""
    max_length: Annotated[int, Field(ge=2, le=1 << 22)] = 2048
    """longest sample, in tokens, visual ones included"""
    min_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """smallest image, in pixels; default: the processor's"""
    max_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """largest image, in pixels; default: the processor's"""
    video_fps: Annotated[float | None, Field(gt=0, le=1000)] = None
    """frames sampled per second of video, and those of lists of frames, of which all are taken;
    default: the processor's (Qwen3-VL: 2)"""
    video_min_frames: Annotated[int | None, Field(ge=2, le=1 << 20)] = None
    """fewest frames sampled from a video that has them; default: the processor's (Qwen3-VL: 4)"""
    video_max_frames: Annotated[int | None, Field(ge=2, le=1 << 20)] = None
    """most frames sampled from a video; default: the processor's (Qwen3-VL: 768)"""
    video_min_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """smallest video, in frames x height x width; default: the processor's"""
    video_max_pixels: Annotated[int | None, Field(ge=1, le=1 << 40)] = None
    """largest video, in frames x height x width; default: the processor's"""
    video_markers: Literal["inner", "both"] | None = None
    """what a vision start and end enclose: each pair of frames (inner), or also the whole video
    (both), as transformers writes from 5.10 on; default: the processor's, else Qwen3-VL's as
    published (inner), Qwen3.5's both"""
    packing: bool = False
    """pack several samples into a row of training data, each attending to itself only; evaluation
    has one sample per row"""
    packing_length: Annotated[int | None, Field(ge=2, le=1 << 22), _Packed] = None
    """longest packed row, in tokens; default: data.max_length"""
    max_vision_tokens_per_row: Annotated[int | None, Field(ge=1), _Packed] = None
    """most visual tokens in a packed row; default: no limit"""
    padding_side: Literal["right", "left"] = "right"
    """side on which shorter samples of a batch are padded"""
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=1 << 22)] = 1
    """pad batches to a multiple of this many tokens"""

    def names_a_file(self, entry: str) -> bool:
        is_name = self.dataset_info is not None or Path(entry).is_dir()
        return not is_name and not any(mark in entry for mark in ("#", "%", ",", "::", "://"))


class EvalConfig(Section):
    """Answers that the model generates to data.eval in an evaluation, and their scores."""

    metrics: Annotated[list[str], Field(min_length=1)] = Field(default=["exact_match"])
    """what answers are scored with, see docs/evaluation.md; an entry of data.eval may have its own
    metrics"""
    num_samples: Annotated[int | None, Field(ge=1)] = 64
    """samples that are asked, evenly over data.eval; null: all"""
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """longest answer, in tokens"""
    every: Annotated[int, Field(ge=1)] = 1
    """generate in every n-th evaluation, and in that of the last step; the others measure losses
    alone"""


class VLTrainConfig(TrainConfig):
    """What is learned, and the settings of every run."""

    eval: EvalConfig | None = None
    """generate answers in evaluations and score them, e.g. {metrics: [exact_match]}; {} for the
    defaults"""
    objective: Literal["sft", "preference", "grpo"] = "sft"
    """sft: the answers of conversations, or a pretraining mix; preference: which of two answers is
    better (DPO and others), or that single answers are good or bad (KTO), see the section
    preference; grpo: answers that the model samples, by their rewards, see the section grpo"""
    rollout: RolloutConfig | None = None
    """a server that samples the answers of objective grpo; default: the trained model itself"""


class VLParallelConfig(ParallelConfig):
    """Experts, and the message sizes of the pipeline."""

    ep_degree: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """expert-parallel degree: ranks that share the experts of a mixture-of-experts model, over
    sharding x mp, and over dp beyond"""
    expert_capacity_factor: Annotated[float | None, Field(ge=1), _ExpertParallel] = None
    """ranks of ep exchange rows in buffers with room for this many times an equal share, so that
    the host reads no sizes; a step that needs more is repeated with exact sizes, so that no row is
    dropped; at most ep_degree; null: exact sizes, which the host reads in every layer"""
    pp_token_rows: Annotated[int | None, Field(ge=1), _Pipelined, _Static] = None
    """with static pp_shapes: token rows of a micro-batch, padding included, that messages have room
    for in all steps (a larger micro-batch is refused); default: each step's largest, or with
    pp_visual_rows what data.max_length and the batch size allow"""
    pp_visual_rows: Annotated[int | None, Field(ge=0), _Pipelined, _Static] = None
    """with static pp_shapes: visual token rows of a micro-batch that messages have room for in all
    steps; default: each step's most, or with pp_token_rows what data.max_vision_tokens_per_row and
    the batch size allow"""


class VLRun(RunConfig):
    """All settings of a run of Qwen3-VL or Qwen3.5."""

    family: ClassVar[str] = "Qwen3-VL"
    parts: ClassVar[dict[str, tuple[str, ...]]] = PARTS
    has_colocated: ClassVar[bool] = True
    has_context_parallel: ClassVar[bool] = True
    counts_tokens: ClassVar[bool] = True
    fixed_settings: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_settings,
        *("model.lora", "data.max_length", "data.min_pixels", "data.max_pixels"),
        *("data.temperature", "data.shuffle", "data.shuffle_shards"),
        *("data.packing", "data.packing_length", "data.max_vision_tokens_per_row"),
        "train.objective",
        *(f"preference.{name}" for name in PreferenceConfig.model_fields),
        *(f"grpo.{name}" for name in GRPOConfig.model_fields),
    )

    model: VLModelConfig
    data: VLDataConfig
    parallel: VLParallelConfig = VLParallelConfig()
    train: VLTrainConfig
    preference: PreferenceConfig = PreferenceConfig()
    grpo: GRPOConfig = GRPOConfig()

    @property
    def compares_answers(self) -> bool:
        """Whether samples are pairs of answers, or rated ones."""
        return self.train.objective == "preference"

    @property
    def learns_from_rewards(self) -> bool:
        """Whether samples are answers of the model."""
        return self.train.objective == "grpo"

    def of_reference(self) -> "VLRun":
        """A run whose whole model is the reference that this run compares with.

        Raises:
            ValueError: it compares with none.
        """
        preference, model = self.preference, self.model
        if not (self.compares_answers and preference.has_reference):
            raise ValueError(
                f"train.objective is {self.train.objective} and preference.loss_type "
                f"{preference.loss_type} (reference_free {preference.reference_free}): only "
                "train.objective=preference compares with a reference, except for cpo, simpo, or, "
                "orpo and reference_free"
            )
        pretrained = preference.ref_model or model.pretrained
        processor = self.data.processor or model.pretrained
        own = {"ref_model": None, "precompute_ref_log_probs": False}
        changed = {"pretrained": pretrained, "lora": None, "freeze": []}
        return self.model_copy(
            update={
                "model": model.model_copy(update=changed),
                "data": self.data.model_copy(update={"processor": processor}),
                "preference": preference.model_copy(update=own),
            }
        )

    @property
    def reserved_rows(self) -> ReservedRows | None:
        """parallel.pp_token_rows and pp_visual_rows; if one is not set, it follows from the bounds
        on the data."""
        tokens, visual = self.parallel.pp_token_rows, self.parallel.pp_visual_rows
        if tokens is None and visual is None:
            return None
        data, samples = self.data, self.train.per_device_train_batch_size
        if tokens is None:
            longest = self.packed_length if data.packing else data.max_length
            multiple, rows = data.pad_to_multiple_of, samples
            rows *= 2 if self.has_pairs and not data.packing else 1
            tokens = rows * -(-longest // multiple) * multiple
        if visual is None:
            per_row = data.max_vision_tokens_per_row
            visual = tokens if per_row is None else min(tokens, samples * per_row)
        return ReservedRows(tokens, visual)

    @property
    def has_pairs(self) -> bool:
        """Whether a sample has two answers."""
        return self.compares_answers and not self.preference.is_unpaired

    @property
    def packed_length(self) -> int:
        """Tokens of a packed row; a pair takes twice data.max_length."""
        return self.data.packing_length or self.data.max_length * (2 if self.has_pairs else 1)

    def problems(self) -> Iterator[str]:
        yield from self._preference_problems()
        yield from self._grpo_problems()
        if self.train.eval is not None:
            if not self.data.eval:
                yield "train.eval is set but data.eval lists no file: name the questions' files"
            if self.compares_answers or has_sources(self.data.eval):
                yield (
                    "train.eval asks the questions of conversations, and data.eval has pairs of "
                    "answers or documents: remove train.eval, or give an entry of conversations "
                    "its metrics, which tell it from one of documents"
                )
        factor, ep = self.parallel.expert_capacity_factor, self.parallel.ep_degree
        if factor is not None and 1 < ep < factor:
            yield (
                f"parallel.expert_capacity_factor is {factor:g} but parallel.ep_degree is {ep}: "
                f"buffers of {ep} equal shares have room for all rows; set it to {ep} or less"
            )
        yield from self._slice_problems()
        if not self.data.train:
            yield "data.train lists no file: name JSONL files of conversations"
        yield from self._source_problems()
        if self.data.mask_history and self.data.train_on_prompt:
            yield "data.mask_history and data.train_on_prompt exclude each other: set one of them"
        yield from self._packing_problems()
        for name in ("{}_pixels", "video_{}_pixels", "video_{}_frames"):
            lowest, highest = name.format("min"), name.format("max")
            low, high = getattr(self.data, lowest), getattr(self.data, highest)
            if low is not None and high is not None and low > high:
                yield f"data.{lowest} {low} exceeds data.{highest} {high}"

    def _slice_problems(self) -> Iterator[str]:
        if (cp := self.parallel.cp_degree) == 1:
            return
        if self.compares_answers:
            yield (
                f"train.objective is preference with parallel.cp_degree {cp}: log-probabilities of "
                "an answer would lie on several ranks; set cp_degree=1"
            )
        if self.data.padding_side == "left":
            yield (
                f"data.padding_side is left with parallel.cp_degree {cp}: slices are cut for "
                "padding that no token sees, at the end; set data.padding_side=right"
            )

    def _preference_problems(self) -> Iterator[str]:
        preference, data = self.preference, self.data
        if not self.compares_answers:
            if preference != PreferenceConfig():
                yield (
                    f"preference has settings but train.objective is {self.train.objective}, which "
                    "does not read them: set train.objective=preference, or remove them"
                )
            return
        yield from preference.problems()
        for name in ("train_on_prompt", "mask_history", "format"):
            if value := getattr(data, name):
                yield (
                    f"data.{name} is {value}, but rows of preferences have forms of their own, and "
                    f"their answers alone are learned: remove data.{name}"
                )
        if has_sources([*data.train, *data.eval]) or data.earlier_reasoning == "split":
            yield (
                "train.objective is preference, for which data.train and data.eval name files of "
                "pairs or rated answers: no pretraining mix, and no data.earlier_reasoning=split"
            )
        if preference.has_reference:
            yield from self._reference_problems()
        elif preference.has_baseline:
            yield "preference.reference_free leaves kto nothing to compare with: remove it"
        yield from self._dropout_problems()
        sizes = {
            "per_device_train_batch_size": not data.packing,
            "per_device_eval_batch_size": True,
        }
        for name, is_read in sizes.items() if preference.has_baseline else ():
            if getattr(self.train, name) == 1 and is_read:
                yield (
                    f"train.{name} is 1, but kto compares each answer with another one's prompt of "
                    "its micro-batch: set it to 2 or more"
                )

    def _dropout_problems(self) -> Iterator[str]:
        lora = self.model.lora
        if lora is not None and lora.lora_dropout:
            yield (
                f"model.lora.lora_dropout is {lora.lora_dropout}, which would make "
                "log-probabilities differ from the reference's by chance: remove it"
            )

    def _grpo_problems(self) -> Iterator[str]:
        grpo, data, model, parallel = self.grpo, self.data, self.model, self.parallel
        if not self.learns_from_rewards:
            if grpo != GRPOConfig():
                yield (
                    f"grpo has settings but train.objective is {self.train.objective}, which does "
                    "not read them: set train.objective=grpo, or remove them"
                )
            if self.train.rollout is not None:
                yield (
                    f"train.rollout is set but train.objective is {self.train.objective}, which "
                    "samples no answers: set train.objective=grpo, or remove it"
                )
            return
        if self.train.rollout is not None:
            yield from self.train.rollout.problems(grpo)
        ranks = parallel.dp_degree * parallel.sharding_degree // parallel.cp_degree
        rows = self.train.per_device_train_batch_size * ranks
        accumulation = self.train.gradient_accumulation_steps
        yield from grpo.problems(rows, accumulation)
        own, group = self.train.per_device_train_batch_size * accumulation, grpo.num_generations
        if own % group:
            yield (
                f"an update has {own} answers of a data rank (train.per_device_train_batch_size x "
                f"train.gradient_accumulation_steps), which groups of grpo.num_generations {group} "
                f"do not fill: a rank samples whole groups; make it a multiple of {group}"
            )
        if grpo.loss_type == "real" and self.train.per_device_train_batch_size % group:
            yield (
                "grpo.loss_type is real, which compares the answers to a prompt, and a micro-batch "
                f"has {self.train.per_device_train_batch_size} of them "
                "(train.per_device_train_batch_size): make it a multiple of grpo.num_generations "
                f"{group}"
            )
        for name in ("packing", "train_on_prompt", "mask_history"):
            if getattr(data, name):
                yield (
                    f"data.{name} is set, but with train.objective grpo the answers that the model "
                    f"samples are learned, a row each: remove data.{name}"
                )
        if has_sources([*data.train, *data.eval]) or data.earlier_reasoning == "split":
            yield (
                "train.objective is grpo, for which data.train and data.eval name files of "
                "prompts: no pretraining mix, and no data.earlier_reasoning=split"
            )
        if data.html_tables != "keep":
            yield (
                f"data.html_tables is {data.html_tables}, but with train.objective grpo rewards "
                "compare with a row's 'solution' as it is: write it as the model is to, and remove "
                "data.html_tables"
            )
        if data.eval and self.train.eval is None:
            yield (
                "data.eval is set but train.eval is not, and prompts alone have no loss: set "
                "train.eval, with which the model is asked"
            )
        yield from self._dropout_problems()
        if parallel.cp_degree > 1 and grpo.top_entropy_quantile < 1:
            yield (
                f"grpo.top_entropy_quantile is {grpo.top_entropy_quantile} with parallel.cp_degree "
                f"{parallel.cp_degree}: tokens of an answer are on several ranks, which know no "
                "common quantile; set cp_degree=1"
            )
        if parallel.cp_degree > 1 and grpo.loss_type == "fipo":
            yield (
                f"grpo.loss_type is fipo with parallel.cp_degree {parallel.cp_degree}: it sums up "
                "the tokens behind each one, which are on several ranks; set cp_degree=1"
            )
        if parallel.schedule == "colocated":
            yield (
                "parallel.schedule is colocated with train.objective grpo: its encoder ranks take "
                "images of the next update while one runs, before they are known; use plain"
            )
        if parallel.sharding_gather_overlap:
            yield (
                "parallel.sharding_gather_overlap gathers parameters during the next update, but "
                "with train.objective grpo answers are sampled before it: remove it"
            )
        if not grpo.has_reference:
            return
        if model.pretrained is None:
            yield (
                f"grpo.beta is {grpo.beta}, for which the reference is the model that the run "
                "starts from, but model.pretrained is not set: set it, or grpo.beta=0"
            )
        if grpo.ref_model and (model.freeze or model.lora is not None):
            yield (
                "grpo.ref_model is set, but parts of the model are frozen (model.freeze, "
                "model.lora) and would have to be equal in both: remove it"
            )

    def _reference_problems(self) -> Iterator[str]:
        preference, model = self.preference, self.model
        if model.pretrained is None:
            yield (
                f"preference.loss_type {preference.loss_type} compares with a reference, the model "
                "that the run starts from, but model.pretrained is not set: set it, or "
                "preference.reference_free"
            )
        is_computed = not preference.precompute_ref_log_probs
        if preference.ref_model and is_computed and (model.freeze or model.lora is not None):
            yield (
                "preference.ref_model is set, but parts of the model are frozen (model.freeze, "
                "model.lora) and would have to be equal in both: use "
                "preference.precompute_ref_log_probs for another reference"
            )
        if self.parallel.sharding_gather_overlap and is_computed:
            yield (
                "parallel.sharding_gather_overlap gathers parameters while the reference needs its "
                "own: remove it, or use preference.precompute_ref_log_probs"
            )

    def _source_problems(self) -> Iterator[str]:
        data = self.data
        for setting in ("train", "eval"):
            entries = getattr(data, setting)
            rows = [i for i, each in enumerate(entries) if isinstance(each, RowSourceConfig)]
            if rows and has_sources(entries):
                yield (
                    f"data.{setting}[{rows[0]}] is a source of conversations for fine-tuning, by "
                    "its format or its settings, and others are sources of a pretraining mix: give "
                    "all of them a format of conversations, or none"
                )
        for setting, is_scored in (("train", False), ("eval", self.train.eval is not None)):
            for number, each in enumerate(getattr(data, setting)):
                if isinstance(each, RowSourceConfig) and each.metrics and not is_scored:
                    yield (
                        f"data.{setting}[{number}].metrics is set but no answers to these rows are "
                        "scored, those to data.eval are with train.eval: set it, or remove metrics"
                    )
        if not has_sources(data.train):
            plain = VLDataConfig.model_fields
            for name in ("temperature", "shuffle"):
                if (value := getattr(data, name)) != plain[name].default:
                    yield (
                        f"data.{name} is {value} but data.train has no sources, only paths: write "
                        f"entries {{path: ..., format: ...}}, or remove data.{name}"
                    )
        else:
            yield from self._mix_problems()
        for setting in ("train", "eval"):
            for number, source in enumerate(getattr(data, setting)):
                if not isinstance(source, SourceConfig):
                    continue
                if source.targets == "answers" and source.format != "messages":
                    yield (
                        f"data.{setting}[{number}].targets is answers but its format is "
                        f"{source.format}, which has no answers: choose all or after_image"
                    )

    def _mix_problems(self) -> Iterator[str]:
        data, train = self.data, self.train
        weights = [each.weight if isinstance(each, SourceConfig) else None for each in data.train]
        unweighted = [number for number, weight in enumerate(weights) if weight is None]
        if unweighted and len(unweighted) < len(weights):
            yield (
                f"data.train[{unweighted[0]}] has no weight and other sources have one: give all "
                "sources a weight (shares of tokens), or none"
            )
        elif data.temperature is not None and not unweighted:
            yield (
                f"data.temperature is {data.temperature} but the sources of data.train have "
                "weights: remove one of them"
            )
        if train.num_train_epochs is not None:
            yield (
                f"train.num_train_epochs is {train.num_train_epochs} but data.train is a mix of "
                "sources, whose length in tokens is known only when they are read: set "
                "train.max_steps or train.max_tokens instead"
            )

    def _packing_problems(self) -> Iterator[str]:
        data = self.data
        longest = max(data.max_length, data.packing_length or 0)
        of_sample = data.max_length * (2 if self.has_pairs else 1)
        if data.pad_to_multiple_of > longest:
            yield (
                f"data.pad_to_multiple_of {data.pad_to_multiple_of} exceeds the longest row of "
                f"{longest} tokens (data.max_length, data.packing_length): every row would be "
                f"padded to {data.pad_to_multiple_of} tokens, "
                f"{data.pad_to_multiple_of / longest:.3g} times the memory and time"
            )
        if not data.packing:
            return
        is_shorter = data.packing_length is not None and data.packing_length < of_sample
        # Documents of a mix of sources continue in another row.
        if is_shorter and not has_sources(data.train):
            yield (
                f"data.packing_length {data.packing_length} is below data.max_length "
                f"{data.max_length}{' of both answers' * self.has_pairs}: a sample of that length "
                "would fit no row; raise data.packing_length or lower data.max_length"
            )
        if data.padding_side == "left":
            yield (
                "data.padding_side is left but packed rows are padded on the right: set "
                "data.padding_side=right or data.packing=false"
            )


def processor_folder(config: VLRun) -> str:
    """The folder of the processor's files."""
    folder = config.data.processor or config.model.pretrained
    assert folder is not None, "refused when the settings were read"
    return folder
