"""Where model, data and optimizer meet: a run's parts from its configuration."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import paddle

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig
from paddle_vl.config.validate import launch_problems
from paddle_vl.data.collate import VLCollator
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.data.processor import Qwen3VLProcessor
from paddle_vl.data.sft.dataset import MessagesDataset
from paddle_vl.models.checkpoint.adapter_files import folder_with
from paddle_vl.models.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.models.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.models.qwen3_vl.sizes import size_values
from paddle_vl.models.qwen3_vl.stage import Qwen3VLStage, layer_costs
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.parallel.agree import check_settings_agree
from paddle_vl.parallel.degrees import ModelShape
from paddle_vl.parallel.processes import FleetProcesses
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.topology import initialize
from paddle_vl.train.evaluate import Answer, FirstSamples, greedy_answers, mean_loss
from paddle_vl.train.freeze import freeze_parameters, trained_names
from paddle_vl.train.layout import Layout, parallel_degrees
from paddle_vl.train.optimizer import Optimizer, decayed_names
from paddle_vl.train.part_rates import rate_factors
from paddle_vl.train.processes import ONE_PROCESS
from paddle_vl.train.random_state import seed_everything
from paddle_vl.train.resume import changed_settings, checkpoint_to_resume, flatten
from paddle_vl.train.step import WholeModel
from paddle_vl.train.trainer import Trainer

logger = logging.getLogger(__name__)
_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


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
    model_form = _model_form(config, processor, checkpoint)
    layout = Layout(config, topology, model_shape(model_form), layer_costs(model_form))
    placement = layout.placement()
    model = _model(config, model_form, checkpoint, placement)
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
    share = {"rank": processes.data_rank, "size": processes.data_size}
    loader = PrefetchLoader(
        train_data,
        collator,
        config.train.per_device_train_batch_size,
        shuffle=True,
        drop_last=True,
        seed=config.train.seed,
        num_workers=config.data.num_workers,
        prefetch_batches=config.data.prefetch_batches,
        **share,
    )
    num_steps = _num_steps(config, len(loader))

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
        "%d samples, %d steps of %d x %d samples%s",
        len(train_data),
        num_steps,
        config.train.gradient_accumulation_steps,
        config.train.per_device_train_batch_size * processes.data_size,
        f", continuing {checkpoint}" if checkpoint else "",
    )
    return trainer


@dataclass
class Evaluation:
    """A model and the data to try it on."""

    model: Qwen3VLForConditionalGeneration
    processor: Qwen3VLProcessor
    dataset: MessagesDataset | FirstSamples
    loader: PrefetchLoader
    batch_size: int

    def loss(self) -> tuple[float, int]:
        """Mean loss per answer token and the number of those tokens."""
        return mean_loss(WholeModel(self.model), self.loader)

    def answers(self, max_new_tokens: int) -> list[Answer]:
        """A greedy answer to every assistant turn."""
        return greedy_answers(
            self.model,
            self.processor,
            self.dataset,
            batch_size=self.batch_size,
            max_new_tokens=max_new_tokens,
        )


def build_evaluation(
    folder: Path,
    files: Sequence[str],
    *,
    batch_size: int,
    max_length: int,
    limit: int | None = None,
    base: str | Path | None = None,
) -> Evaluation:
    """A model folder with its own processor, and data files, of which a bad sample is an error.

    Args:
        folder: of a model, or of adapters.
        limit: use the first samples only.
        base: the model to load adapters beside, instead of the one that their files name.

    Raises:
        ValueError, RuntimeError: the folder is not a model with its processor, or the data cannot
            be used.
    """
    processor = Qwen3VLProcessor.from_pretrained(folder_with("tokenizer.json", folder, base))
    dataset: MessagesDataset | FirstSamples = MessagesDataset(files, processor, max_length)
    if limit is not None:
        dataset = FirstSamples(dataset, limit)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, base=base)
    check_processor_fits(model.config, processor)
    collator = VLCollator(
        pad_token_id=processor.pad_token_id,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        spatial_merge_size=processor.image_processor.merge_size,
    )
    loader = PrefetchLoader(
        dataset, collator, batch_size, shuffle=False, drop_last=False, num_epochs=1
    )
    return Evaluation(model, processor, dataset, loader, batch_size)


def model_config(source: str | dict[str, Any], processor: Qwen3VLProcessor) -> Qwen3VLConfig:
    """The configuration of a new model, with token ids from the processor where it has none.

    Args:
        source: a config.json, the name of a published size, or the content of a config.json.

    Raises:
        ValueError: it is not a Qwen3-VL configuration, or its vocabulary is too small.
    """
    if isinstance(source, str) and not Path(source).is_file():
        try:
            values, name = size_values(source), f"model.config {source}"
        except ValueError as error:
            raise ValueError(f"model.config: there is no file {source}, and {error}") from error
    elif isinstance(source, str):
        try:
            values = json.loads(Path(source).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"model.config {source} is not valid JSON: {error}") from error
        name = source
    else:
        values, name = source, "model.config"
    ids = {key: getattr(processor, key) for key in _TOKEN_IDS}
    try:
        # Said before the token ids are found to lie outside of it.
        text = values.get("text_config", {})
        raise_problems(_vocabulary_problems(text.get("vocab_size"), processor))
        return Qwen3VLConfig.from_dict({**ids, **values})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_processor_fits(config: Qwen3VLConfig, processor: Qwen3VLProcessor) -> None:
    """Compare what model and processor must agree on.

    Raises:
        ValueError: every number that differs, with both values.
    """
    problems = [
        f"{key} is {getattr(config, key)} in the model and {getattr(processor, key)} in the "
        "tokenizer"
        for key in _TOKEN_IDS
        if getattr(config, key) != getattr(processor, key)
    ]
    problems += _vocabulary_problems(config.text_config.vocab_size, processor)
    vision = config.vision_config
    for kind, theirs in (
        ("image", processor.image_processor),
        ("video", processor.video_processor),
    ):
        for key, value in (
            ("patch_size", theirs.patch_size),
            ("temporal_patch_size", theirs.temporal_patch_size),
            ("spatial_merge_size", theirs.merge_size),
        ):
            if getattr(vision, key) != value:
                problems.append(
                    f"vision_config.{key} is {getattr(vision, key)} in the model and {value} in "
                    f"the {kind} processor"
                )
    if problems:
        raise ValueError(
            f"model and processor do not fit: {'; '.join(problems)}. Use the processor files that "
            "belong to the model (data.processor), or change model.config"
        )


def _vocabulary_problems(vocab_size: int | None, processor: Qwen3VLProcessor) -> list[str]:
    needed = processor.tokenizer.vocab_size
    if vocab_size is None or vocab_size >= needed:
        return []
    return [f"text_config.vocab_size is {vocab_size} but the tokenizer has {needed} tokens"]


def _model_form(
    config: RunConfig, processor: Qwen3VLProcessor, checkpoint: Path | None
) -> Qwen3VLConfig:
    """The configuration of the model to train, before anything of it is built."""
    source = _weights(config, checkpoint)
    form = (
        model_config(config.model.config, processor)
        if source is None
        else Qwen3VLConfig.from_pretrained(source)
    )
    check_processor_fits(form, processor)
    return form


def model_shape(form: Qwen3VLConfig) -> ModelShape:
    """The sizes that processes have to divide among themselves."""
    text = form.text_config
    return ModelShape(**{f.name: getattr(text, f.name, f.default) for f in fields(ModelShape)})


def _model(
    config: RunConfig,
    form: Qwen3VLConfig,
    checkpoint: Path | None,
    placement: SingleDevicePlacement,
) -> Qwen3VLForConditionalGeneration:
    dtype, source = config.model.compute_dtype, _weights(config, checkpoint)
    if source is None:
        with _default_dtype(dtype):
            return Qwen3VLForConditionalGeneration.from_config(form, placement)
    model = Qwen3VLForConditionalGeneration.from_pretrained(source, dtype, placement)
    if config.model.lora is None:
        return model
    if checkpoint is None:
        model.add_lora(config.model.lora)
    else:
        model.load_adapter(checkpoint)
    return model


def _weights(config: RunConfig, checkpoint: Path | None) -> str | Path | None:
    """The folder of the whole weights to start or continue from; checkpoints with adapters have
    none. None for fresh weights."""
    from_base = checkpoint is None or config.model.lora is not None
    return config.model.pretrained if from_base else checkpoint


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


def _num_steps(config: RunConfig, batches_per_epoch: int) -> int:
    train = config.train
    if train.max_steps is not None:
        return train.max_steps
    batches = train.num_train_epochs * batches_per_epoch
    num_steps = max(1, math.ceil(batches / train.gradient_accumulation_steps))
    if train.warmup_steps > num_steps:
        raise ValueError(
            f"train.warmup_steps {train.warmup_steps} exceeds the {num_steps} steps that "
            f"train.num_train_epochs {train.num_train_epochs} makes of this data"
        )
    return num_steps


@contextmanager
def _default_dtype(dtype: str) -> Iterator[None]:
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)
