"""Checks that a model's configuration and a processor agree: token ids, vocabulary, patches."""

import os
from pathlib import Path
from typing import Any, TypeVar

from paddle_vl.config.load import raise_problems
from paddle_vl.families.vlm.inputs.collate import VLCollator
from paddle_vl.families.vlm.inputs.processor import NO_TOKEN, VLProcessor
from paddle_vl.families.vlm.modeling.config import TOKEN_IDS, VLConfig
from paddle_vl.files.stored_settings import check_mapping
from paddle_vl.files.text_file import read_json_object

Config = TypeVar("Config", bound=VLConfig)


def model_config(
    config_class: type[Config], source: str | dict[str, Any], processor: VLProcessor
) -> Config:
    """The configuration of a new model; token ids that it lacks come from the processor.

    Args:
        config_class: of the family.
        source: a config.json, the name of a published size, or the content of a config.json.

    Raises:
        ValueError: it is no configuration of the family, or its vocabulary is too small.
    """
    if isinstance(source, str) and not os.path.isfile(source):
        try:
            values, name = config_class.named(source).to_dict(), f"model.config {source}"
        except ValueError as error:
            raise ValueError(f"model.config: there is no file {source}, and {error}") from error
    elif isinstance(source, str):
        values, name = read_json_object(Path(source), "a model's configuration"), source
    else:
        values, name = source, "model.config"
    ids = {key: getattr(processor, key) for key in TOKEN_IDS}
    ids = {key: token_id for key, token_id in ids.items() if token_id != NO_TOKEN}
    try:
        # First, as a small vocabulary also makes the configuration refuse the token ids.
        text = check_mapping(values.get("text_config"), "text_config")
        size = text.get("vocab_size", values.get("vocab_size"))
        raise_problems(_vocabulary_problems(size, processor))
        return config_class.from_dict({**ids, **values})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_processor_fits(config: VLConfig, processor: VLProcessor) -> None:
    """Check that model and processor agree.

    Raises:
        ValueError: every number that differs, with both values.
    """
    problems = [
        f"{key} is {getattr(config, key)} in the model and {getattr(processor, key)} in the "
        "tokenizer"
        for key in TOKEN_IDS
        if getattr(config, key) != getattr(processor, key)
        and (processor.media_tokens.video or key != "video_token_id")
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


def model_collator(processor: VLProcessor, **settings: Any) -> VLCollator:
    """The collator for a processor's samples.

    Args:
        settings: other settings of `VLCollator`.
    """
    return VLCollator(
        pad_token_id=processor.pad_token_id,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        spatial_merge_size=processor.image_processor.merge_size,
        **settings,
    )


def _vocabulary_problems(vocab_size: Any, processor: VLProcessor) -> list[str]:
    """Problems of the vocabulary size; none for a non-integer, which the configuration refuses."""
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
