"""Checkpoint rules of Qwen3.5, see `paddle_vl.families.vlm.folders.delta_map`."""

from paddle_vl.families.vlm.folders.delta_map import KEPT, PRECISE
from paddle_vl.families.vlm.folders.delta_map import delta_rules as checkpoint_rules
from paddle_vl.families.vlm.folders.delta_map import with_stacked_experts as tensors_as_here

__all__ = ["KEPT", "PRECISE", "checkpoint_rules", "tensors_as_here"]
