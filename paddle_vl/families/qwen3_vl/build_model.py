"""The model of a run: its configuration, whether it fits the processor, and its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import paddle

from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.qwen3_vl.sizes import size_values
from paddle_vl.files.checked_values import check_mapping
from paddle_vl.files.json_file import read_json_object
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.parallel.degrees import ModelShape

_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


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
        values, name = read_json_object(Path(source), "a model's configuration"), source
    else:
        values, name = source, "model.config"
    ids = {key: getattr(processor, key) for key in _TOKEN_IDS}
    try:
        # Said before the token ids are found to lie outside of it.
        text = check_mapping(values.get("text_config"), "text_config")
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


def _vocabulary_problems(vocab_size: Any, processor: Qwen3VLProcessor) -> list[str]:
    """None for what is no number: the configuration says so itself."""
    tokenizer = processor.tokenizer
    if type(vocab_size) is not int:
        return []
    if vocab_size < tokenizer.vocab_size:
        return [
            f"text_config.vocab_size is {vocab_size} but the tokenizer has {tokenizer.vocab_size} "
            "tokens"
        ]
    if vocab_size <= tokenizer.highest_id:
        return [
            f"text_config.vocab_size is {vocab_size} but the tokenizer ({tokenizer.name}) has the "
            f"id {tokenizer.highest_id}"
        ]
    return []


def model_form(
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


def build_model(
    config: RunConfig,
    form: Qwen3VLConfig,
    checkpoint: Path | None,
    placement: SingleDevicePlacement,
) -> Qwen3VLForConditionalGeneration:
    """This process's part of the model to train, without values: its `fill` gives each parameter
    what to start or continue from."""
    dtype, source = config.model.compute_dtype, _weights(config, checkpoint)
    if source is None:
        with default_dtype(dtype):
            return Qwen3VLForConditionalGeneration.from_config(form, placement, materialize=False)
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        source, dtype, placement, materialize=False
    )
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


@contextmanager
def default_dtype(dtype: str) -> Iterator[None]:
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)
