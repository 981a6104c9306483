"""Where model, data and optimizer meet: a run's parts from its configuration."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import paddle

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig
from paddle_vl.config.validate import launch_problems
from paddle_vl.data.collate import PackedCollator, VLCollator
from paddle_vl.data.loader import Packing, PrefetchLoader
from paddle_vl.data.packing import RowBudget
from paddle_vl.data.processor import Qwen3VLProcessor
from paddle_vl.data.sample_lengths import sample_lengths
from paddle_vl.data.sft.dataset import MessagesDataset
from paddle_vl.models.qwen3_vl.stage import Qwen3VLStage, layer_costs
from paddle_vl.parallel.agree import check_settings_agree
from paddle_vl.parallel.processes import FleetProcesses
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.topology import initialize
from paddle_vl.train.build_model import build_model, model_form, model_shape
from paddle_vl.train.evaluate import mean_loss
from paddle_vl.train.freeze import freeze_parameters, trained_names
from paddle_vl.train.layout import Layout, parallel_degrees
from paddle_vl.train.optimizer import Optimizer, decayed_names
from paddle_vl.train.part_rates import rate_factors
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess
from paddle_vl.train.random_state import seed_everything
from paddle_vl.train.resume import changed_settings, checkpoint_to_resume, flatten
from paddle_vl.train.trainer import Trainer

logger = logging.getLogger(__name__)


def build_trainer(config: RunConfig) -> Trainer:
    """Everything a run needs, at its first step or where its checkpoint was written.

    Raises:
        ValueError, RuntimeError: what keeps the run from starting, see `paddle_vl.config.validate`
            and `paddle_vl.train.resume`; a tokenizer or image processor that does not fit the
            model; data that cannot be used.
    """
    raise_problems(launch_problems(config, paddle.get_device()))
    topology = initialize(parallel_degrees(config))
    several = topology.world_size > 1
    processes = FleetProcesses(topology) if several else ONE_PROCESS
    if several:
        check_settings_agree(flatten(config.model_dump()), topology.describe())
    if not processes.is_main:
        logging.getLogger("paddle_vl").setLevel(logging.WARNING)
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is not None:
        for change in changed_settings(checkpoint, config):
            logger.info("changed since %s: %s", checkpoint.name, change)
    seed_everything(config.train.seed)
    processor = Qwen3VLProcessor.from_pretrained(
        config.data.processor or config.model.pretrained,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        video_fps=config.data.video_fps,
        video_min_frames=config.data.video_min_frames,
        video_max_frames=config.data.video_max_frames,
        video_min_pixels=config.data.video_min_pixels,
        video_max_pixels=config.data.video_max_pixels,
    )
    train_data = _dataset(config, config.data.train, processor)
    eval_data = _dataset(config, config.data.eval, processor) if config.data.eval else None
    form = model_form(config, processor, checkpoint)
    layout = Layout(config, topology, model_shape(form), layer_costs(form))
    placement = layout.placement()
    model = build_model(config, form, checkpoint, placement)
    if config.train.recompute == "full":
        recompute_layers([*model.vision_blocks, *model.decoder_layers])
    whole_shapes = model.whole_shapes()
    trained = trained_names(whole_shapes, config.model.freeze, model.adapter_names())
    parameters = freeze_parameters(list(model.hf_named_parameters()), trained, whole_shapes)
    layout.prepare_training(model)
    optimizer = Optimizer(
        parameters,
        config.train,
        decayed_names(whole_shapes, config.train.weight_decay_exclude),
        placement,
        trained,
        rate_factors(config.train, trained),
    )
    runner = layout.runner(model, Qwen3VLStage, processes)
    collator = _collator(config, processor, placement.row_part)
    packing = _packing(config, train_data, processes)
    share = {"rank": processes.data_rank, "size": processes.data_size}
    loader = PrefetchLoader(
        train_data,
        collator if packing is None else PackedCollator(collator),
        config.train.per_device_train_batch_size,
        shuffle=True,
        drop_last=packing is None,
        packing=packing,
        seed=config.train.seed,
        num_workers=config.data.num_workers,
        prefetch_batches=config.data.prefetch_batches,
        **share,
    )
    num_steps = _num_steps(config, loader)

    def save_model(folder: Path) -> None:
        (model.save_pretrained if model.adapter is None else model.save_adapter)(folder)
        if processes.is_main:
            processor.save_pretrained(folder)

    def evaluate() -> float:
        with PrefetchLoader(
            eval_data,
            collator,
            config.train.per_device_eval_batch_size,
            shuffle=False,
            drop_last=False,
            num_epochs=1,
            num_workers=config.data.num_workers,
            prefetch_batches=config.data.prefetch_batches,
            **share,
        ) as batches:
            return mean_loss(runner, batches, processes)[0]

    trainer = Trainer(
        config,
        runner,
        optimizer,
        loader,
        num_steps,
        save_model,
        evaluate if eval_data else None,
        processes,
    )
    if checkpoint is not None:
        trainer.restore(checkpoint)
    logger.info(
        "%d samples, %d steps of %d x %d %s%s",
        len(train_data),
        num_steps,
        config.train.gradient_accumulation_steps,
        config.train.per_device_train_batch_size * processes.data_size,
        "samples" if packing is None else "packed rows",
        f", continuing {checkpoint}" if checkpoint else "",
    )
    return trainer


def _dataset(
    config: RunConfig, files: Sequence[str], processor: Qwen3VLProcessor
) -> MessagesDataset:
    return MessagesDataset(files, processor, config.data.max_length, config.data.on_bad_sample)


def _collator(config: RunConfig, processor: Qwen3VLProcessor, part: RowPart) -> VLCollator:
    return VLCollator(
        pad_token_id=processor.pad_token_id,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        spatial_merge_size=processor.image_processor.merge_size,
        padding_side=config.data.padding_side,
        pad_to_multiple_of=config.data.pad_to_multiple_of,
        part=part,
    )


def _packing(
    config: RunConfig, dataset: MessagesDataset, processes: SingleProcess
) -> Packing | None:
    data = config.data
    if not data.packing:
        return None
    budget = RowBudget(data.packing_length or data.max_length, data.max_vision_tokens_per_row)
    # The first process measures; the others then find what it wrote, or the same fault.
    if processes.is_main:
        try:
            lengths = sample_lengths(dataset, budget, data.num_workers)
        finally:
            processes.wait()
    else:
        processes.wait()
        lengths = sample_lengths(dataset, budget, data.num_workers)
    return Packing(lengths, budget)


def _num_steps(config: RunConfig, loader: PrefetchLoader) -> int:
    train = config.train
    if train.max_steps is not None:
        return train.max_steps
    batches = loader.batches_in(train.num_train_epochs)
    num_steps = max(1, math.ceil(batches / train.gradient_accumulation_steps))
    if train.warmup_steps > num_steps:
        raise ValueError(
            f"train.warmup_steps {train.warmup_steps} exceeds the {num_steps} steps that "
            f"train.num_train_epochs {train.num_train_epochs} makes of this data"
        )
    return num_steps
