"""Interface of a model family to the trainer, and what evaluations measure.

A family is a folder: model, NumPy-only `inputs/`, checkpoint map, pipeline stage, FLOP counter, a
recipe that implements `Family`, and what commands ask of it. An entry of
`paddle_vl.config.families` registers it. A family does not import the trainer or
`paddle_vl.parallel`: what it needs of them is passed in.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from paddle import Tensor

from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.config.families import EncoderShape, ModelShape
from paddle_vl.config.schema import RunConfig
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.data.samples import Collator, SampleSource
from paddle_vl.families.flops import FlopCounter
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.objective import BatchAdapter, Loss
from paddle_vl.nn.placement import Placement

# Relative cost of each decoder layer, of everything before them, and of everything after them.
LayerCosts = tuple[Sequence[float], float, float]
SaveModel = Callable[[Path, FileWriter, ParameterStore | None], None]


class RankInfo(Protocol):
    """A rank's place among the data-parallel ranks, see `paddle_vl.parallel.ranks`."""

    @property
    def is_main(self) -> bool: ...

    @property
    def data_rank(self) -> int: ...

    @property
    def data_size(self) -> int: ...

    def wait(self) -> None:
        """Barrier over all ranks."""


@dataclass(frozen=True)
class BuiltModel:
    """A model and what depends on it.

    Attributes:
        model: an `nn.Layer` of this rank's shards and layers. It has its `placement`; the lists
            `vision_blocks` and `decoder_layers`, this rank's units of activation recomputation and
            sharding; `tables`, its token embedding and head; `separate(weights)`, which replaces
            fused weights by one weight per linear, see `paddle_vl.nn.linear`; `materialize()`,
            which gives parameters their values one at a time, see `paddle_vl.checkpoint.reading`;
            and `whole_shapes()`, the unsharded shapes of the full model's parameters.
        adapter: see `BatchAdapter`.
        collator: makes its batches in loader workers.
        save: writes this rank's files of a model folder; all checkpoint ranks call it together.
            Weight files go to the writer; in training the values come from the store.
        save_extra_files: writes tokenizer and the like; one rank calls it.
        save_streamed: writes `final/` in place of `save`, without a copy of the weights in memory.
        measure: what evaluations measure besides the losses; None for nothing.
    """

    model: Any
    adapter: BatchAdapter
    collator: Collator
    save: SaveModel
    save_extra_files: Callable[[Path], None] = lambda folder: None
    save_streamed: SaveModel | None = None
    measure: "Measure | None" = None


class Measure(Protocol):
    """What an evaluation measures besides the losses, on the same batches.

    `begin` precedes the first batch. All ranks call `add` together, with idle batches too.
    `entries` makes names and values from the sums of all ranks.

    Attributes:
        sums: float64, over the batches so far.
        shown: JSON values of some samples, for the report.
    """

    sums: np.ndarray
    shown: list[dict[str, Any]]

    def begin(self) -> None: ...

    def add(self, batch: Any) -> None: ...

    def entries(self, sums: np.ndarray) -> dict[str, float]: ...


class MeanLosses(NamedTuple):
    """Losses over a dataset.

    Attributes:
        loss: weighted sum of the terms.
        terms: mean of each term, by name.
        counts: divisor of each term, by name; target tokens for a language model.
        by_source: a `MeanLosses` for each source of the evaluation data; empty without named ones.
        measured, shown: of a `Measure`; `measured` also has the scores of generated answers.
        answers: lines of predictions.jsonl, on rank 0.
    """

    loss: float
    terms: dict[str, float]
    counts: dict[str, int]
    # pdoc cannot resolve a NamedTuple's own name.
    by_source: Mapping[str, Any] = {}
    measured: Mapping[str, float] = {}
    shown: Sequence[Mapping[str, Any]] = ()
    answers: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class EvaluationOptions:
    """Arguments of `paddle-vl evaluate`.

    Attributes:
        files: JSONL files; none with a suite.
        max_length, max_new_tokens: longest sample and longest answer, in tokens.
        limit: use the first samples only.
        base: base model of an adapter folder, in place of the one that its files name.
        chat_template_kwargs: variables of the chat template.
        show, predictions: number of answers to print, and file for all of them.
        metrics: names; empty for exact answers.
        suite: description of a benchmark.
        json: file for the scores.
    """

    files: Sequence[str]
    batch_size: int
    max_length: int = 2048
    max_new_tokens: int = 64
    limit: int | None = None
    base: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    show: int | None = None
    predictions: Path | None = None
    metrics: Sequence[str] = ()
    suite: str | None = None
    json: Path | None = None

    def refuse_answer_options(self, owner: str) -> None:
        """Refuse options about answers, for a family that generates none.

        Raises:
            ValueError: one of them is set; the message begins with `owner`.
        """
        own = ("limit", "show", "predictions", "metrics", "suite", "json")
        names = ("base", "chat_template_kwargs", *own)
        if given := [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]:
            raise ValueError(f"{owner}, of which losses are printed: leave {', '.join(given)} out")


@dataclass(frozen=True)
class Evaluation:
    """A model folder with data to evaluate it on.

    Attributes:
        loader: every sample once; None for no losses.
        report: the text that `paddle-vl evaluate` prints, in pieces.
        measure: what is measured besides the losses; None for nothing.
    """

    model: Any
    loss: Loss
    adapter: BatchAdapter
    loader: PrefetchLoader | None
    report: Callable[[Any], Iterable[str]]
    measure: Measure | None = None


def losses_report(losses: MeanLosses) -> list[str]:
    """The loss, the mean of each term, and what was measured besides."""
    terms = losses.terms.items()
    return [
        f"loss: {losses.loss:.4f}",
        *(f"  {name}: {mean:.4f}  (mean of {losses.counts[name]} values)" for name, mean in terms),
        *(f"  {name}: {value:.4g}" for name, value in losses.measured.items()),
    ]


class Family(ABC):
    """A model family, made for one run: `recipe_class(config, checkpoint)`.

    Creating it reads configurations, opens the data and checks that they fit each other.

    Attributes:
        parts: named groups of parameters for model.freeze and other settings, as patterns over
            checkpoint keys.
        make_stage: makes a pipeline stage (`paddle_vl.parallel.pipeline.runner`) of a model and a
            range of its layers.
        model_config: configuration of the model.
        shape: decoder sizes, checked against the degrees of parallelism.
        costs: relative costs for dividing the layers over pipeline stages.
        item_encoder: makes a model's encoder under the colocated schedule, an `ItemEncoder` of
            `paddle_vl.parallel.colocated.encoder`; None without support.
        encoder_shape: sizes of that encoder; None without support.
        pad_to_multiple_of: divides the padded length of every batch; None if parallelism does not
            depend on it.
        fields: optional fields of the data and whether they are present, the same on all ranks.
        sample_kind: word for samples in messages.
        train_data, eval_data: samples; `eval_data` is None without evaluation data.
        loss: see `paddle_vl.nn.objective.Loss`.
        recompute: what the backward pass computes again; None for `train.recompute`.
        key_prefix: of checkpoint keys, before the model's own.
        answers: of a run whose loss compares answers, and needs passes before a step (see
            `paddle_vl.train.reference`): `reference_values(model)`, the reference's value of each
            trained parameter on this rank, one at a time, or None without a reference to compute;
            and `checksum()` of the reference's weights, which a resumed run must have too, called
            on one rank. None for other losses.
        samples_answers: whether the training data are prompts, which the model answers; then
            `rollouts(model, collator)` samples and scores them, see `paddle_vl.train.rollouts`.
    """

    config: RunConfig
    parts: Mapping[str, Sequence[str]]
    make_stage: Callable[[Any, range], Any]
    model_config: Any
    shape: ModelShape
    costs: LayerCosts
    item_encoder: Callable[[Any], Any] | None = None
    encoder_shape: EncoderShape | None = None
    pad_to_multiple_of: int | None = None
    fields: Mapping[str, bool] = {}
    sample_kind: str = "samples"
    train_data: Any
    eval_data: Any
    loss: Loss
    recompute: str | None = None
    key_prefix: str = ""
    answers: Any = None
    samples_answers: bool = False

    @abstractmethod
    def __init__(self, config: RunConfig, checkpoint: Path | None):
        """
        Args:
            checkpoint: to continue from; None for a new run.

        Raises:
            ValueError: settings or files that do not fit each other.
            RuntimeError: files are missing or damaged.
        """
        self.config = config

    @abstractmethod
    def build_model(self, placement: Placement) -> BuiltModel:
        """This rank's shards and layers; `model.materialize()` gives the parameters values."""

    def named_parameters(self, model: Any) -> list[tuple[str, Tensor]]:
        """This rank's parameters by checkpoint key; a fused one under the key of each linear."""
        return [(self.key_prefix + key, tensor) for key, tensor in model.hf_named_parameters()]

    def trainable_names(self, model: Any) -> Iterable[str] | None:
        """Checkpoint keys that may be trained; None for all."""
        return None

    @abstractmethod
    def flop_counter(self, model: Any, trained: Collection[str]) -> FlopCounter:
        """Counts floating point operations of batches.

        Args:
            trained: checkpoint keys of all trained parameters of the full model.
        """

    def train_loader(self, collator: Collator, ranks: RankInfo) -> PrefetchLoader:
        """Endless training batches of this rank, shuffled."""
        train = self.config.train
        size = train.per_device_train_batch_size
        return self.loader(
            *(self.train_data, collator, ranks, size),
            num_epochs=None, shuffle=True, drop_last=True, seed=train.seed,
        )  # fmt: skip

    @property
    def updates_per_batch(self) -> float:
        """Updates that a batch of `train_loader` makes."""
        return 1 / self.config.train.gradient_accumulation_steps

    def rollouts(self, model: Any, collator: Collator) -> Any:
        """See `samples_answers`."""
        raise NotImplementedError

    def eval_loaders(self, collator: Collator, ranks: RankInfo) -> Mapping[str, PrefetchLoader]:
        """This rank's batches of the evaluation data, every sample once, by source; under "" for
        data without named sources."""
        assert self.eval_data is not None, "asked for only where there is evaluation data"
        return {"": self.loader(self.eval_data, collator, ranks)}

    def loader(
        self,
        samples: SampleSource,
        collator: Collator,
        ranks: RankInfo,
        batch_size: int | None = None,
        **settings: Any,
    ) -> PrefetchLoader:
        """Batches of this rank's shard of the samples, with the run's workers: every sample once,
        for evaluation, where the settings of `PrefetchLoader` do not say otherwise."""
        of_evaluation = {"shuffle": False, "drop_last": False, "num_epochs": 1}
        return PrefetchLoader(
            samples,
            collator,
            batch_size or self.config.train.per_device_eval_batch_size,
            num_workers=self.config.data.num_workers,
            prefetch_batches=self.config.data.prefetch_batches,
            rank=ranks.data_rank,
            size=ranks.data_size,
            **(of_evaluation | settings),
        )
