"""Builds a run from its configuration: model, data, optimizer and trainer.

What trains a model, and what a run has around it, in the order in which they start.
"""

import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paddle
from xxhash import xxh3_64_hexdigest

from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.config.families import family_of_run
from paddle_vl.config.load import flatten, raise_problems
from paddle_vl.config.parallel_settings import CONNECTIONS
from paddle_vl.config.schema import RunConfig
from paddle_vl.config.validate import launch_problems, step_problems
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import BuiltModel, Family, MeanLosses, SaveModel
from paddle_vl.nn.dispatch import choose_kernels
from paddle_vl.nn.kernels import description
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.placement import Placement
from paddle_vl.parallel.agree import check_agree
from paddle_vl.parallel.colocated.runner import ColocatedRunner, PartsStore
from paddle_vl.parallel.fleet_strategy import missing_variables
from paddle_vl.parallel.ranks import ONE_RANK, FleetRanks, SingleRank
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.train.answers import Answering
from paddle_vl.train.checkpoint import finish_saves
from paddle_vl.train.colocated_optimizer import ColocatedOptimizer
from paddle_vl.train.evaluate import combined, mean_losses
from paddle_vl.train.feeding.feed import watched
from paddle_vl.train.freeze import (
    NamedParameters,
    decayed_names,
    freeze_parameters,
    frozen_steps,
    rate_factors,
    trained_names,
    treated_apart,
)
from paddle_vl.train.gpu_settings import configure_gpu
from paddle_vl.train.lanes import lane_loaders
from paddle_vl.train.layout import Layout, parallel_degrees
from paddle_vl.train.memory_needed import NeededMemory, check_memory
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.reference import ComparingRunner, Reference
from paddle_vl.train.reporting.device_peaks import device_peak
from paddle_vl.train.reporting.metrics import evaluation_keys
from paddle_vl.train.resume import changed_settings, check_pretrained, checkpoint_to_resume
from paddle_vl.train.rollouts import RolloutFeed
from paddle_vl.train.run_lock import RunLock
from paddle_vl.train.schedule import RunLength, seed_everything
from paddle_vl.train.server_sampling import ServerSampler
from paddle_vl.train.split_sampling import SplitSampler
from paddle_vl.train.step import Runner
from paddle_vl.train.trainer import Trainer

logger = logging.getLogger(__name__)


def build_trainer(config: RunConfig, writes: bool = True, updates: bool = True) -> Trainer:
    """The trainer of a run, at its first step or at the step of the checkpoint to resume from.

    It has the lock of the output folder until `Trainer.run` ends.

    Args:
        writes: whether the run writes its output folder and needs its lock; False for a profile.
        updates: see `paddle_vl.train.optimizer.Optimizer`.

    Raises:
        ValueError, RuntimeError: see `paddle_vl.config.validate`, `paddle_vl.train.run_lock` and
            `paddle_vl.train.resume`; a tokenizer or image processor that does not fit the model;
            data that cannot be used.
    """
    if writes:
        # First, since another run in this folder would explain any other problem with it.
        RunLock.check(Path(config.train.output_dir))
    raise_problems(launch_problems(config, paddle.get_device()))
    # Before a collective or a kernel has run.
    if told := configure_gpu(config.train.deterministic, config.train.tf32):
        logger.info("%s", told)
    topology, ranks = start_ranks(config)
    lock = _lock_output(config, ranks) if writes else None
    with ExitStack() as on_failure:
        if lock is not None:
            on_failure.callback(lock.release)
        trainer = _build(config, topology, ranks, lock, updates)
        on_failure.pop_all()
    return trainer


def start_ranks(config: RunConfig) -> tuple[Topology, SingleRank]:
    """Start this rank among those of the run, which all have its settings.

    Raises:
        ValueError: see `paddle_vl.parallel.topology.initialize`; or settings differ.
    """
    parallel = config.parallel
    topology = initialize(parallel_degrees(config), parallel.fleet, parallel.timeout_s)
    if topology.world_size == 1:
        return topology, ONE_RANK
    settings = flatten(config.model_dump(mode="json"))
    if parallel.mp_degree > 1:  # It decides on overlaps, and so on collectives.
        settings[CONNECTIONS] = os.environ.get(CONNECTIONS)
    check_agree(
        settings,
        topology.describe(),
        "do not have the same configuration",
        "Start all of them with the same file and the same overrides",
    )
    return topology, FleetRanks(topology)


def _lock_output(config: RunConfig, ranks: SingleRank) -> RunLock | None:
    """The lock of the output folder, on rank 0; None on others. All ranks raise its error."""
    lock, problem = None, None
    if ranks.is_main:
        try:
            lock = RunLock.acquire(Path(config.train.output_dir))
            finish_saves(Path(config.train.output_dir))
        except (RuntimeError, OSError) as error:
            problem = str(error)
    problem = ranks.gathered(problem)[0]
    if problem is not None:
        raise RuntimeError(problem)
    return lock


def _build(
    config: RunConfig,
    topology: Topology,
    ranks: SingleRank,
    lock: RunLock | None,
    updates: bool,
) -> Trainer:
    several = topology.world_size > 1
    if not ranks.is_main:
        logging.getLogger("paddle_vl").setLevel(logging.WARNING)
    checkpoint = checkpoint_to_resume(config, ranks)
    if checkpoint is not None:
        for change in changed_settings(checkpoint, config):
            logger.info("changed since %s: %s", checkpoint.name, change)
    if config.model.pretrained is not None and (checkpoint is None or config.trains_adapters):
        folder = Path(config.model.pretrained)
        check_pretrained(folder, config.train.verify_checkpoint, ranks)
    seed_everything(config.train.seed)
    is_uncompiled = config.train.kernels == "fused" and not config.train.cpu_kernels
    choose_kernels("uncompiled" if is_uncompiled else config.train.kernels)
    logger.info("%s", description(paddle.get_device().split(":")[0]))
    family = run_family(config, checkpoint)
    engine = build_engine(config, topology, ranks, family, updates)
    built, runner, store = engine.placed.built, engine.runner, engine.optimizer.store
    model = built.model
    make_loader = partial(family.train_loader, built.collator)
    loader = lane_loaders(lambda lane: {"": make_loader(lane)}, ranks, topology)[""]
    if several:
        stream = loader.state_dict().get("stream", {})
        # So that they continue or refuse a checkpoint together.
        check_agree(
            {name: xxh3_64_hexdigest(json.dumps(value).encode()) for name, value in stream.items()},
            topology.describe(),
            "do not read the same data",
            "Give all machines the same data files",
        )
    length = _length(config, loader, family.updates_per_batch)
    peak_flops = device_peak(config.model.compute_dtype, config.logging.device_peak_tflops)

    has_evaluation, eval_loaders = family.eval_data is not None, {}
    if has_evaluation:
        make_eval = partial(family.eval_loaders, built.collator)
        idle = partial(built.adapter.idle_batch, model)
        eval_loaders = lane_loaders(make_eval, ranks, topology, idle)

    answering = None
    entry, questions = family_of_run(config, checkpoint), None
    if has_evaluation and "questions" in entry.capabilities:
        questions = entry.ask("questions", family, model, built.collator)
    if questions is not None:
        rows = model.placement.ops.row_part.size
        answering = Answering(questions, runner, ranks, topology, config, rows)

    def save_with(save: SaveModel, folder: Path, write: FileWriter) -> None:
        save(folder, write, store)
        if ranks.is_main:
            built.save_extra_files(folder)

    def evaluate(received: Callable[[], int | None], asks: bool) -> MeanLosses | None:
        by_source = {}
        for name, loader_of_source in eval_loaders.items():
            with loader_of_source as batches:
                after_s = config.logging.data_wait_warning_s
                watched_batches = watched(batches, after_s, "the evaluation")
                losses = mean_losses(runner, watched_batches, ranks, received, built.measure)
            if losses is None:
                return None
            by_source[name] = losses
        losses = combined(by_source, family.loss)
        return losses if answering is None or not asks else answering(losses, received)

    feed, train = None, config.train
    count_flops = None if peak_flops is None else family.flop_counter(model, engine.placed.trained)
    if family.samples_answers:
        rollouts = family.rollouts(model, built.collator)
        parallel, sample = config.parallel, partial(rollouts.sampled, model)
        if rollouts.server is not None:
            sample = ServerSampler(rollouts, ranks, config.trains_adapters)
        # Layers that are whole on no rank, or gathered from several at every pass.
        elif model.placement.splits_parameters or parallel.sharding_stage == 3:
            sample = SplitSampler(rollouts, runner, ranks, model.placement.ops.row_part.size)
        feed = RolloutFeed(
            loader, rollouts, sample, runner,
            train.per_device_train_batch_size, train.gradient_accumulation_steps, length.steps,
            ranks, config.logging.data_wait_warning_s, count_flops,
        )  # fmt: skip
    trainer = Trainer(
        config,
        runner,
        engine.optimizer,
        loader,
        length,
        partial(save_with, built.save),
        evaluate if has_evaluation else None,
        ranks,
        peak_flops,
        count_flops,
        lock,
        built.save_streamed and partial(save_with, built.save_streamed),
        None if family.answers is None else _reference_checksum(family.answers, ranks),
        feed,
    )
    scores = answering.questions.names if answering else ()
    keys = evaluation_keys(family.loss, eval_loaders, built.measure, scores)
    if trainer.best is not None:
        trainer.best.check_metric(keys)
    if trainer.guard is not None:
        names = (getattr(entry, "name", None) for entry in config.data.eval)
        trainer.guard.check(keys, [name for name in names if name])
    if feed is None:
        loader.while_waiting = trainer.check_data_wait
    else:
        # Ranks leave together, between the answers to some prompts.
        feed.received = lambda: trainer.stop.received
        if isinstance(sample, ServerSampler):
            save = partial(
                trainer.writer.save_final, fill=trainer.save_model, streamed=trainer.save_streamed
            )
            sample.write = lambda folder, step: save(step, folder=folder)
            feed.before_generation = sample.hand_over
    if isinstance(engine.own_runner, ColocatedRunner):
        engine.own_runner.upcoming = trainer.feed.upcoming
    if checkpoint is not None:
        trainer.restore(checkpoint)
    logger.info(
        "%d samples, %s of %d x %d %s%s",
        len(family.train_data),
        f"{length.steps} steps" if length.steps else f"{length.tokens:,} tokens in steps",
        config.train.gradient_accumulation_steps,
        config.train.per_device_train_batch_size * ranks.data_size,
        family.sample_kind,
        f", continuing {checkpoint}" if checkpoint else "",
    )
    return trainer


class PlacedModel(NamedTuple):
    """This rank's part of a model without values, and what the run trains of it: this rank's
    `parameters`, and by keys of the full model what `paddle_vl.train.freeze` says of them."""

    built: BuiltModel
    parameters: NamedParameters
    trained: set[str]
    decayed: set[str]
    factors: Mapping[str, float]
    frozen: Mapping[str, int]


def placed_model(config: RunConfig, family: Family, placement: Placement) -> PlacedModel:
    """The model as the run has it; it raises ValueError for names that no parameter has."""
    built = family.build_model(placement)
    model = built.model
    for chain in (model.vision_blocks, model.decoder_layers):
        what = family.recompute or config.train.recompute
        recompute_layers(chain[: config.train.recompute_num_layers], what)
    whole, prefix = model.whole_shapes(), family.key_prefix
    full_shapes = {prefix + key: shape for key, shape in whole.items()}
    trainable = family.trainable_names(model)
    trained = trained_names(full_shapes, config.model.freeze, trainable, family.parts)
    decayed = decayed_names(full_shapes, config.train.weight_decay_exclude, family.parts)
    factors = rate_factors(config.train, trained, family.parts, full_shapes)
    frozen = frozen_steps(config.train, trained, family.parts)
    # Fused linears (q, k, v; gate, up) that are trained differently get separate weights.
    model.separate(
        treated_apart(
            family.named_parameters(model),
            lambda name: (name in trained, name in decayed, factors.get(name), frozen.get(name)),
        )
    )
    parameters = freeze_parameters(family.named_parameters(model), trained, full_shapes)
    return PlacedModel(built, parameters, trained, decayed, factors, frozen)


class TrainingEngine(NamedTuple):
    """What trains a model on this rank's batches; `own_runner` compares no answers."""

    layout: Layout
    placed: PlacedModel
    optimizer: Optimizer
    runner: Runner
    own_runner: Runner


def build_engine(
    config: RunConfig, topology: Topology, ranks: SingleRank, family: Family, updates: bool = True
) -> TrainingEngine:
    """The model with its values, its optimizer and its runner. Called by all ranks.

    Args:
        updates: see `build_trainer`.

    Raises:
        ValueError: the model contradicts the degrees or the settings, or does not fit into memory.
    """
    if topology.world_size > 1:
        # Ranks that shard parameters run the same layers for every field, filled or masked. Fields
        # are configured per data set, so they are checked once, not per step.
        check_agree(
            {name: True for name, is_there in family.fields.items() if is_there},
            topology.describe(),
            "do not have the same optional fields in their data",
            "Give all of them the same kinds of data; a field that a sample has nothing for is "
            "there all the same, and masked",
        )
        if (missing := missing_variables(topology.degrees)) is not None:
            logger.warning("%s", missing)
    sizes = family.shape, family.costs, family.pad_to_multiple_of, family.encoder_shape
    layout = Layout(config, topology, *sizes)
    placed = placed_model(config, family, layout.placement())
    built, parameters, trained, decayed, factors, frozen = placed
    model = built.model
    answers = family.answers
    reference_values = None if answers is None else answers.reference_values(model)
    if updates:  # Without them it counts moments that nobody has.
        copies = (config.train.ema is not None) + (reference_values is not None)
        check_memory(needed_memory(config, topology, model, copies))
    store = layout.parameter_store(model, has_reference=reference_values is not None)
    table = model.placement.parameter_table

    def make_optimizer(parameters: NamedParameters, store: ParameterStore) -> Optimizer:
        return Optimizer(
            parameters, config.train, decayed, store, table, trained, factors, updates, frozen
        )

    if isinstance(store, PartsStore):
        of_encoder = [entry for entry in parameters if table[entry[1]].is_encoder]
        of_language = [entry for entry in parameters if not table[entry[1]].is_encoder]
        parts = ((of_encoder, store.encoder), (of_language, store.language))
        optimizer = ColocatedOptimizer([make_optimizer(*part) for part in parts], store)
    else:
        optimizer = make_optimizer(parameters, store)
    runner = own_runner = layout.runner(
        model, family.make_stage, ranks, family.loss, built.adapter, family.item_encoder
    )
    if answers is not None:
        reference = None if reference_values is None else Reference(reference_values, store)
        runner = ComparingRunner(runner, reference, ranks)
    return TrainingEngine(layout, placed, optimizer, runner, own_runner)


def _reference_checksum(answers: Any, ranks: SingleRank) -> str | None:
    """See `Family`, from rank 0. All ranks raise its error."""
    found = problem = None
    try:
        found = answers.checksum() if ranks.is_main else None
    except (ValueError, RuntimeError, OSError) as error:
        problem = str(error)
    found, problem = ranks.gathered([found, problem])[0]
    if problem is not None:
        raise ValueError(problem)
    return found


def run_family(config: RunConfig, checkpoint: Path | None = None) -> Family:
    """The family that a run trains, with its data.

    Raises:
        ValueError: settings or data that the family refuses.
        RuntimeError: files are missing or damaged.
    """
    return family_of_run(config, checkpoint).recipe_class()(config, checkpoint)


def needed_memory(
    config: RunConfig, topology: Topology, model: Any, copies: int = 0
) -> NeededMemory:
    """What a rank needs for its parameters of a model, see `NeededMemory.of`."""
    of_encoder, by_group = [], defaultdict[Any, list[Any]](list)
    for parameter, spec in model.placement.parameter_table.with_specs(model.parameters()):
        group = topology.sharding_group_of(spec)
        (of_encoder if spec.is_encoder else by_group[group]).append(parameter)
    needed = partial(NeededMemory.of, parallel=config.parallel, copies=copies)
    total = needed(by_group.pop(topology.sharding_group, []))
    # Of experts that are not sharded like the rest, and of tables.
    for group, parameters in by_group.items():
        total += needed(parameters, shards=group.nranks)
    if topology.encoder is None:
        return total
    return total + needed(of_encoder, encoder_lanes=topology.encoder.grid.encoder_dp)


def _length(config: RunConfig, loader: PrefetchLoader, updates_per_batch: float) -> RunLength:
    train = config.train
    if train.max_tokens is not None:
        return RunLength(tokens=train.max_tokens)
    if train.max_steps is not None:
        return RunLength(train.max_steps)
    assert train.num_train_epochs is not None, "one of the three is set, see TrainConfig"
    batches = loader.batches_in(train.num_train_epochs)
    num_steps = max(1, math.ceil(batches * updates_per_batch))
    made = f"the {num_steps} steps that train.num_train_epochs {train.num_train_epochs} makes of"
    raise_problems(list(step_problems(train, num_steps, f"{made} this data")))
    return RunLength(num_steps)
