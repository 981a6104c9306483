"""Checkpoint rules that families with gated DeltaNet layers share, and the layouts of their
experts.

The hub's files stack the experts, `[E, 2 I, D]` and `[E, D, I]`, each `[out, in]` like a linear;
transformers 5.x writes a tensor per expert and projection. Both are read, the first is written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_vl.checkpoint.reading import ReadableTensor
from paddle_vl.checkpoint.rules import Rule, Same
from paddle_vl.families.vlm.folders.checkpoint_map import model_rules
from paddle_vl.families.vlm.modeling.delta_config import DeltaConfig, DeltaExpertsText

# Keys of multi-token prediction begin so: the model keeps and writes them without reading them.
KEPT = "mtp."
# Endings of keys of which the bfloat16 files of Qwen3.5 have float32; those of 3.6 have bfloat16.
PRECISE = (".linear_attn.A_log", ".linear_attn.norm.weight")


class ExpertWeights(Same):
    """Matrices of experts are `[E, out, in]` in the checkpoint and `[E, in, out]` here."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1])

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored.swapaxes(1, 2))

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.swapaxes(1, 2))


def delta_rules(config: DeltaConfig, decoder: Iterable[Rule] = ()) -> tuple[Rule, ...]:
    """`model_rules` of such a model."""
    ours, theirs = "language_model", "model.language_model"
    return model_rules(
        config,
        (
            Rule(f"{ours}.*.experts.gate_up_proj", f"{theirs}.*.experts.gate_up_proj", _EXPERTS),
            Rule(f"{ours}.*.experts.down_proj", f"{theirs}.*.experts.down_proj", _EXPERTS),
            Rule(f"{ours}.*.conv1d.weight", f"{theirs}.*.conv1d.weight", Same()),
            Rule(f"{ours}.*.decay.A_log", f"{theirs}.*.A_log", Same()),
            Rule(f"{ours}.*.decay.dt_bias", f"{theirs}.*.dt_bias", Same()),
            *decoder,
        ),
    )


_EXPERTS = ExpertWeights()


@dataclass(frozen=True)
class StackedExperts:
    """The matrices of all experts of a layer, each of one tensor or of several above each other.

    Args:
        parts: tensors `[out, in]` of every expert.
    """

    parts: tuple[tuple[ReadableTensor, ...], ...]

    @property
    def dtype(self) -> str:
        return self.parts[0][0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    def narrowed(self, first: int, last: int) -> "StackedExperts":
        """Experts `first` to `last`."""
        return StackedExperts(self.parts[first:last])

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        return np.stack(
            [
                np.concatenate([part.read(must_be_finite=must_be_finite) for part in parts])
                for parts in self.parts
            ]
        )


def with_stacked_experts(stored: Mapping[str, Any], config: DeltaConfig) -> dict[str, Any]:
    """A checkpoint's tensors, with the experts of each layer stacked.

    Layers of which tensors are missing or of different shapes are left unchanged, and so are
    stacks: their shapes are compared with the model's, and the transpose of Qwen3-VL's files does
    not fit.
    """
    text, stored = config.text_config, dict(stored)
    if not isinstance(text, DeltaExpertsText):
        return stored
    for layer in range(text.num_hidden_layers):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        experts = [f"{prefix}{number}." for number in range(text.num_experts)]
        for target, names in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            keys = [[f"{expert}{name}.weight" for name in names] for expert in experts]
            flat = [key for of_expert in keys for key in of_expert]
            if not all(key in stored for key in flat):
                continue
            if len({(stored[key].shape, stored[key].dtype) for key in flat}) == 1:
                parts = tuple(tuple(stored.pop(key) for key in of_expert) for of_expert in keys)
                stored[prefix + target] = StackedExperts(parts)
    return stored
