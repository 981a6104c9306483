"""Inputs that the programs of the policy and of the planner share."""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.static import InputSpec

from paddle_vl.families.pi07.engine_config import Gemma3Config


def spec(name: str, shape: Any, dtype: Any) -> InputSpec:
    """An input of a program, without a gradient: a program keeps what a backward pass needs."""
    return InputSpec(shape, dtype, name, stop_gradient=True)


# Texts of the inputs.
TEXTS = ("lang", "response", "metadata")
PLANNER_TEXTS = ("lang", "metadata")


def text_specs(texts: Sequence[str]) -> list[InputSpec]:
    """Token ids and masks of the texts, of any length from 1."""
    return [
        spec(f"{name}_{kind}", [None, None], dtype)
        for name in texts
        for kind, dtype in (("tokens", "int64"), ("masks", "bool"))
    ]


@paddle.jit.not_to_static
def text_fields(texts: Sequence[str], tensors: list[Tensor]) -> dict[str, Tensor]:
    """The entries of a batch for tensors in the order of `text_specs`."""
    names = [f"{name}_{kind}" for name in texts for kind in ("tokens", "masks")]
    return dict(zip(names, tensors, strict=True))


def group_specs(config: Any) -> list[InputSpec]:
    """Group of each sample, where groups have projections of their own."""
    is_grouped = config.per_group_projection and config.num_groups > 1
    return [spec("group_index", [None], "int64")] if is_grouped else []


def key_value_specs(backbone: Gemma3Config) -> list[InputSpec]:
    """Keys and values of each layer."""
    text = backbone.text_config
    shape = [None, None, text.num_key_value_heads, text.head_dim]
    return [
        spec(f"{kind}_{i}", shape, "float32")
        for i in range(text.num_hidden_layers)
        for kind in ("key", "value")
    ]


@paddle.jit.not_to_static
def flat(cache: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Keys and values in one list."""
    return [tensor for pair in cache for tensor in pair]


@paddle.jit.not_to_static
def pairs(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The reverse of `flat`."""
    return [(tensors[i], tensors[i + 1]) for i in range(0, len(tensors), 2)]
