"""A run of a vision-language family: see `paddle_vl.families.base.Family`."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from paddle_vl.batch.row_slices import own_indices
from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.config.data_sources import has_sources
from paddle_vl.config.families import EncoderShape, ModelShape
from paddle_vl.data.corpus.loader import CorpusLoader
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.loader import Packing, PrefetchLoader
from paddle_vl.data.packing import RowBudget
from paddle_vl.data.sample_lengths import sample_lengths
from paddle_vl.data.samples import Collator, SampleSource
from paddle_vl.families.base import BuiltModel, Family, RankInfo
from paddle_vl.families.flops import FlopCounter
from paddle_vl.families.vlm.answering.questions import PromptCollator
from paddle_vl.families.vlm.folders.processor_fit import (
    check_processor_fits,
    model_collator,
    model_config,
)
from paddle_vl.families.vlm.grpo.answers import SampledAnswers
from paddle_vl.families.vlm.grpo.rollouts import Rollouts
from paddle_vl.families.vlm.inputs.collate import (
    PackedCollator,
    PreparedCollator,
    SourcesCollator,
    VLCollator,
)
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.preference import PreferenceReader
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.prompts import PromptReader
from paddle_vl.families.vlm.modeling.flops import VLFlops
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.families.vlm.preference.answers import ComparedAnswers
from paddle_vl.families.vlm.settings import PARTS, VLRun, processor_folder
from paddle_vl.families.vlm.training.colocated import (
    ColocatedBatchAdapter,
    ColocatedStage,
    VisualEncoder,
)
from paddle_vl.families.vlm.training.objective import VLBatchAdapter, VLLoss, sliced
from paddle_vl.families.vlm.training.own_pixels import with_own_pixels
from paddle_vl.families.vlm.training.pipeline import VLStage, layer_costs
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.placement import Placement, RegionOps

Model = VLForConditionalGeneration


class VLRecipe(Family):
    """A run that trains a vision-language model on conversations or pretraining data.

    Attributes:
        model_class: of the family.
        counter_class: its FLOP counter, made of a configuration, the trained keys and the ranks of
            adapters by module.
    """

    model_class: ClassVar[type[VLForConditionalGeneration]]
    counter_class: ClassVar[Callable[[Any, Collection[str], dict[str, int]], FlopCounter]] = VLFlops
    config: VLRun
    parts: Mapping[str, Sequence[str]] = PARTS
    make_stage: Callable[[Any, range], Any] = VLStage
    item_encoder = VisualEncoder

    def __init__(self, config: VLRun, checkpoint: Path | None):
        self.config, self.checkpoint = config, checkpoint
        data = config.data
        folder = processor_folder(config)
        # Settings that replace the processor's own.
        limits = {
            "min_pixels": data.min_pixels,
            "max_pixels": data.max_pixels,
            "video_fps": data.video_fps,
            "video_min_frames": data.video_min_frames,
            "video_max_frames": data.video_max_frames,
            "video_min_pixels": data.video_min_pixels,
            "video_max_pixels": data.video_max_pixels,
            "video_markers": data.video_markers,
        }
        try:
            self.processor = VLProcessor.from_pretrained(
                folder,
                **limits,
                template_variables=data.chat_template_kwargs,
                earlier_reasoning=data.earlier_reasoning,
                template_date=data.template_date,
                model_type=self.model_class.model_type,
            )
        except ValueError as error:
            given = [f"data.{name} {value}" for name, value in limits.items() if value]
            if not given:
                raise
            raise ValueError(f"{folder} with {', '.join(given)}: {error}") from error
        if "pixels" in (data.checks or ()):
            self.processor = self.processor.refusing_shrunk()
        if self.processor.template.prints_date and data.template_date is None:
            raise ValueError(
                f"the chat template in {folder} prints today's date, so that a resumed run would "
                f"learn other texts: set data.template_date={datetime.now():%Y-%m-%d}"
            )
        self.pad_to_multiple_of = data.pad_to_multiple_of
        # Of several ranks one alone measures.
        measures = data.packing and config.parallel.num_processes == 1
        self.train_data = self._corpus(data.train) or self._dataset(data.train, measures)
        self._eval_corpus = self._corpus(data.eval)
        self.eval_data = self._eval_corpus.samples() if self._eval_corpus else None
        if data.eval and self._eval_corpus is None:
            self.eval_data = self._dataset(data.eval)
        source, described = self._weights, config.model.config
        if source is not None:
            self.model_config = self.model_class.config_class.from_pretrained(source)
        else:
            assert described is not None, "refused when the settings were read"
            self.model_config = model_config(
                self.model_class.config_class, described, self.processor
            )
        check_processor_fits(self.model_config, self.processor)
        # Set with the model.
        self._ops, self._has_tower = RegionOps(), True
        self._describe()
        if config.compares_answers:
            train_data = cast(ConversationData, self.train_data)
            self.answers = ComparedAnswers(config, self.model_config, train_data, self._dataset)
        elif config.learns_from_rewards:
            self.answers = SampledAnswers(config, self.model_config, self.train_data)
        if self.answers is not None:
            self.loss = self.answers.loss
            self.make_stage = self.answers.stages_of(self.make_stage)

    def _describe(self) -> None:
        """Set what depends on the model's configuration and the schedule alone."""
        self.shape, self.costs = model_shape(self.model_config), layer_costs(self.model_config)
        self.encoder_shape = encoder_shape(self.model_config)
        self.adapter_class: type[VLBatchAdapter] = VLBatchAdapter
        if self.config.parallel.schedule == "colocated":
            self.make_stage, self.adapter_class = ColocatedStage, ColocatedBatchAdapter
        self.loss: VLLoss = VLLoss()
        self.answers: ComparedAnswers | SampledAnswers | None = None

    @property
    def sample_kind(self) -> str:
        return "packed rows" if self.config.data.packing else "samples"

    def build_model(self, placement: Placement) -> BuiltModel:
        """See `Family`; with model.lora the adapters are attached."""
        self._ops, self._has_tower = placement.ops, placement.stage_layers.tower
        collator = model_collator(
            self.processor,
            padding_side=self.config.data.padding_side,
            pad_to_multiple_of=self.config.data.pad_to_multiple_of,
            num_parts=placement.ops.row_part.size,
            lists_real_rows=bool(self.shape.num_experts),
        )
        settings, source = self.config.model, self._weights
        if source is None:
            with default_dtype(settings.compute_dtype):
                model = self.model_class.from_config(
                    self.model_config, placement, materialize=False
                )
        else:
            model = self.model_class.from_pretrained(
                source, settings.compute_dtype, placement, materialize=False
            )
        if settings.lora is not None:
            if self.checkpoint is None:
                model.add_lora(settings.lora)
            else:
                model.load_adapter(self.checkpoint)
        own = model.generation_config or GenerationConfig()
        model.generation_config = own.with_ends_of(self.processor.generation_config)
        adapter = self.adapter_class()
        if self.answers is not None:
            adapter = self.answers.adapter(adapter)
        return BuiltModel(
            model,
            adapter,
            collator,
            partial(_save, model),
            self.processor.save_pretrained,
        )

    def trainable_names(self, model: Model) -> Iterable[str] | None:
        return model.adapter_names()

    def flop_counter(self, model: Model, trained: Collection[str]) -> FlopCounter:
        adapter = model.adapter
        ranks = {} if adapter is None else {m: size.r for m, size in adapter.sizes.items()}
        return type(self).counter_class(model.config, trained, ranks)

    def train_loader(self, collator: Collator, ranks: RankInfo) -> "PrefetchLoader | CorpusLoader":
        train = self.config.train
        if isinstance(self.train_data, Corpus):
            size = train.per_device_train_batch_size
            rows = cast(VLCollator, collator)
            shard = (size, ranks.data_rank, ranks.data_size)
            loader = self.train_data.train_loader(rows, *shard, self._prepared)
            self._divide(loader)
            return loader
        if self.samples_answers:
            answers = cast(SampledAnswers, self.answers)
            steps = answers.settings.steps_per_generation or train.gradient_accumulation_steps
            rows = train.per_device_train_batch_size * steps
            prompts: Any = answers.prompts
            return super().loader(
                *(prompts, list, ranks, rows // answers.settings.num_generations),
                num_epochs=None, shuffle=True, drop_last=True, seed=train.seed,
            )  # fmt: skip
        samples: Any = self.train_data
        packing, data = None, self.config.data
        if data.packing:
            budget = RowBudget(self.config.packed_length, data.max_vision_tokens_per_row)
            # Rank 0 measures and caches the lengths; the others read its file afterwards, or raise
            # the same error.
            if not ranks.is_main:
                ranks.wait()
            try:
                lengths = sample_lengths(samples, budget, data.num_workers)
            finally:
                if ranks.is_main:
                    ranks.wait()
            packing = Packing(lengths, budget)
        of_rows: Any = collator
        if self.answers is not None:
            of_rows = self.answers.collator(collator, is_packed=packing is not None)
        elif packing is not None:
            of_rows = PackedCollator(of_rows)
        names = () if self.answers is not None else tuple(samples.source_names)
        return self.loader(
            self.train_data,
            SourcesCollator(of_rows, names) if names else of_rows,
            ranks,
            train.per_device_train_batch_size,
            num_epochs=None,
            shuffle=True,
            drop_last=packing is None,
            packing=packing,
            seed=train.seed,
        )

    def loader(
        self, samples: SampleSource, collator: Collator, *shard: Any, **settings: Any
    ) -> PrefetchLoader:
        loader = super().loader(samples, self._prepared(collator), *shard, **settings)
        self._divide(loader)
        return loader

    def _prepared(self, collator: Any) -> PreparedCollator:
        vision = self.model_config.vision_config
        if self.answers is not None and not isinstance(collator, PromptCollator):
            return self.answers.prepared(collator, vision)
        return PreparedCollator(collator, vision)

    def _divide(self, loader: PrefetchLoader | CorpusLoader) -> None:
        """What of its lane's batches this rank takes."""
        # The colocated schedule divides the items of all micro-batches of a step.
        is_plain = self.config.parallel.schedule == "plain"
        loader.own_rows = self._own_rows(is_plain)

    def _own_rows(self, is_plain: bool) -> Callable[[Any], Any] | None:
        context, part, expert_part = self._ops.context, self._ops.row_part, self._ops.expert_part
        ops, vision = self._ops if self._has_tower else None, self.model_config.vision_config
        divides = is_plain and (self._ops.spreads_vision or not self._has_tower)
        factor = self.config.parallel.expert_capacity_factor
        if context.size == part.size == 1 and not divides and factor is None:
            return None

        def of_rank(batch: Any) -> Any:
            # Prompts are answered by every rank of a context-parallel group.
            is_prompt = "numbers" in batch
            if context.size > 1 and not is_prompt:
                batch = sliced(batch, context)
            if part.size > 1:
                batch = own_indices(batch, part, expert_part)
            if factor is not None and batch.real_row_indices is not None:
                rows = math.ceil(factor * len(batch.real_row_indices))
                batch = batch | {"expert_rows": rows}
            return with_own_pixels(batch, vision, ops) if divides and not is_prompt else batch

        return of_rank

    @property
    def samples_answers(self) -> bool:
        return isinstance(self.answers, SampledAnswers) and self.answers.prompts is not None

    @property
    def updates_per_batch(self) -> float:
        if not self.samples_answers:
            return super().updates_per_batch
        grpo, accumulation = self.config.grpo, self.config.train.gradient_accumulation_steps
        steps = grpo.steps_per_generation or accumulation
        return steps // accumulation * grpo.num_iterations

    def rollouts(self, model: Model, collator: Collator) -> Rollouts:
        """See `Family`."""
        answers = cast(SampledAnswers, self.answers)
        own_rows = self._own_rows(self.config.parallel.schedule == "plain")
        return answers.rollouts(model, self.processor, collator, own_rows)

    def eval_loaders(self, collator: Collator, ranks: RankInfo) -> Mapping[str, PrefetchLoader]:
        if self.answers is not None:
            own, groups = self.answers.collator(collator), self.answers.groups.items()
            return {name: self.loader(group, own, ranks) for name, group in groups}
        if self._eval_corpus is None:
            return super().eval_loaders(collator, ranks)
        corpus = self._eval_corpus
        return {each: self.loader(corpus.samples([each]), collator, ranks) for each in corpus.names}

    @property
    def _weights(self) -> str | Path | None:
        """Folder of the full weights; None for fresh ones. A checkpoint of adapters has none."""
        from_base = self.checkpoint is None or self.config.model.lora is not None
        return self.config.model.pretrained if from_base else self.checkpoint

    def _corpus(self, entries: Sequence[Any]) -> "Corpus | None":
        """The sources of a mix; None for plain files of conversations."""
        if not has_sources(entries):
            return None
        return Corpus.opened(entries, self.config.data, self.processor, self.config.train.seed)

    def _dataset(self, entries: Sequence[Any], measures: bool = False) -> ConversationData:
        config, data = self.config, self.config.data
        is_asked = entries is data.eval
        reader: Any = PreferenceReader if config.compares_answers else RowReader
        if config.learns_from_rewards:
            reader = partial(PromptReader, is_asked=is_asked)
        if is_asked:
            # Every row once, source by source; a strategy is for training.
            data = data.model_copy(update={"mix_strategy": "concat"})
        given = data, self.processor, config.train.seed, reader
        return open_conversations(entries, *given, measures)


def model_shape(config: Any) -> ModelShape:
    """Decoder sizes, checked against the degrees of parallelism."""
    text = config.text_config
    return ModelShape(
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        vocab_size=text.vocab_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=text.num_hidden_layers,
        moe_intermediate_size=getattr(text, "moe_intermediate_size", 0),
        num_experts=getattr(text, "num_experts", 0),
        shared_expert_intermediate_size=getattr(text, "shared_expert_intermediate_size", 0),
        linear_num_key_heads=getattr(text, "linear_num_key_heads", 0),
        table_rows=tuple(getattr(text, "table_rows", ())),
    )


def encoder_shape(config: Any) -> EncoderShape:
    """Sizes of the vision tower that its tensor parallelism divides."""
    vision = config.vision_config
    return EncoderShape(
        {
            "vision_config.num_heads": vision.num_heads,
            "vision_config.intermediate_size": vision.intermediate_size,
            "the mergers' width (hidden_size x spatial_merge_size^2)": vision.hidden_size
            * vision.spatial_merge_size**2,
        }
    )


def _save(model: Model, folder: Path, write: FileWriter, store: ParameterStore | None) -> None:
    save = model.save_pretrained if model.adapter is None else model.save_adapter
    save(folder, write=write, store=store)
