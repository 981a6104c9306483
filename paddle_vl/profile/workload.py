"""What a profile trains on: the run's own data, or samples of the configured shapes made up for it.

Made-up samples of a policy are those of `data.synthetic_samples`: as many cameras as asked for,
and what is left out of them is drawn with the run's own probabilities. Those of Qwen3-VL are files
of conversations, read by the run's own processor and loader.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddle_vl.config.schema import RunConfig
from paddle_vl.families.qwen3_vl.inputs.tokenizer import TextTokenizer
from paddle_vl.profile.conversations import ConversationShapes, write_conversations

_POLICY_TYPE = "pi07_low_level"
_CAMERA_TYPE = "VISUAL"
# Batches of all processes in an epoch, so that order and collation are as with real data.
_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """What is trained on.

    Attributes:
        is_synthetic: samples are made up.
        cameras: of a policy, images in each conversation of Qwen3-VL; None for the configured
            number, one in a conversation.
        image_side, answer_tokens: of conversations, see `ConversationShapes`, whose defaults None
            takes.
    """

    is_synthetic: bool = False
    cameras: int | None = None
    image_side: int | None = None
    answer_tokens: int | None = None

    @property
    def source(self) -> str:
        return "synthetic" if self.is_synthetic else "the run's own"


def with_workload(config: RunConfig, workload: Workload, folder: Path) -> RunConfig:
    """The configuration with the workload's data.

    Args:
        folder: for files, where any are made.

    Raises:
        ValueError: the workload asks for what the run's own data or this model cannot give.
    """
    asked = [
        f"--{name.replace('_', '-')}"
        for name in ("cameras", "image_side", "answer_tokens")
        if getattr(workload, name) is not None
    ]
    if not workload.is_synthetic:
        if asked:
            raise ValueError(f"{asked[0]} shapes made-up samples: it needs --synthetic")
        return config
    values = config.model_dump()
    if is_policy(config):
        if unfit := [name for name in asked if name != "--cameras"]:
            raise ValueError(
                f"{unfit[0]} shapes made-up conversations; a policy's images and texts have the "
                "sizes of its configuration"
            )
        values["data"] |= {"train": [], "synthetic_samples": _num_samples(config)}
        if workload.cameras is not None:
            values["model"]["config"] = _with_cameras(config, workload.cameras)
        return RunConfig.model_validate(values)
    tokenizer = TextTokenizer.from_file(config.data.processor or config.model.pretrained)
    given = {
        "num_images": workload.cameras,
        "image_side": workload.image_side,
        "answer_tokens": workload.answer_tokens,
    }
    shapes = replace(
        ConversationShapes(), **{name: value for name, value in given.items() if value is not None}
    )
    file = write_conversations(folder / "data", shapes, _num_samples(config), tokenizer)
    values["data"]["train"] = [str(file)]
    return RunConfig.model_validate(values)


def is_policy(config: RunConfig) -> bool:
    """Whether the run's model is a policy, by its configuration."""
    return model_values(config).get("type") == _POLICY_TYPE


def model_values(config: RunConfig) -> dict[str, Any]:
    """The content of the model's config.json; nothing for a published size."""
    source = config.model.config
    if isinstance(source, dict):
        return source
    file = Path(config.model.pretrained) / "config.json" if source is None else Path(source)
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def _with_cameras(config: RunConfig, num_cameras: int) -> dict[str, Any]:
    """The policy's configuration with so many cameras like its first."""
    if config.model.config is None:
        raise ValueError(
            "--cameras changes the model's input_features: it needs model.config, not the weights "
            f"of model.pretrained {config.model.pretrained}"
        )
    values = model_values(config)
    features = values.get("input_features", {})
    cameras = [name for name, feature in features.items() if feature["type"] == _CAMERA_TYPE]
    if not cameras or num_cameras < 1:
        raise ValueError(
            f"--cameras {num_cameras}: the policy's input_features have {len(cameras)} cameras, "
            "and at least 1 is needed of both"
        )
    others = {name: feature for name, feature in features.items() if name not in cameras}
    seen = {f"camera{i}": features[cameras[0]] for i in range(num_cameras)}
    return values | {"input_features": {**seen, **others}}


def _num_samples(config: RunConfig) -> int:
    parallel, train = config.parallel, config.train
    parts = parallel.dp_degree * parallel.sharding_degree
    return _BATCHES * parts * train.per_device_train_batch_size
