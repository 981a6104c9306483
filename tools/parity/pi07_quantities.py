"""Intermediate values of pi07 under their golden names, and their comparison."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddle_vl.families.pi07.decoder import (
    block_mask,
    prefix_positions,
    suffix_positions,
)
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.prefix import Prefix
from paddle_vl.families.pi07.vision import VideoEncoder
from paddle_vl.nn.attention_masks import KeyMask
from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase
from parity.recording import Recording

RTOL, ATOL = 1e-4, 1e-5
BFLOAT16, BFLOAT16_GRADIENT = 2e-2, 6e-2
_ALL_ROUNDING = 1e-6


class Comparison:
    """Compares values of a case and records which were compared."""

    def __init__(self, case: GoldenCase, report: CaseReport):
        self.case, self.report = case, report
        self.compared: set[str] = set()

    def check(self, group: str, values: Mapping[str, Any]) -> None:
        """Compare the named values that the case has."""
        for name, found in values.items():
            if name in self.case.tensors:
                self.compared.add(name)
                self.value(group, name, found, self.case.tensors[name])

    def value(self, group: str, name: str, found: Any, wanted: np.ndarray) -> None:
        """Compare one value."""
        found = np.asarray(found)
        if wanted.dtype.kind in "bi":
            self.report.exact(group, name, found, wanted)
        elif group == "grads" and np.abs(wanted).max() < _ALL_ROUNDING:
            self.report.absolute(group, name, found, wanted, _ALL_ROUNDING)
        elif self.case.is_bfloat16 and group == "grads":
            # Relative to the tensor's norm; for a key bias, whose gradient is all rounding, to that
            # of the query bias.
            like = self.case.tensors.get(name.replace("k_proj.bias", "q_proj.bias"), wanted)
            away = np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(like)
            self.report.absolute(group, name, away, 0.0, BFLOAT16_GRADIENT)
        elif self.case.is_bfloat16:
            self.report.relative(group, name, found, wanted, BFLOAT16)
        elif group == "grads":
            self.report.relative(group, name, found, wanted, RTOL)
        else:
            self.report.near(group, name, found, wanted, RTOL, ATOL)

    def all_compared(self, start: str = "out.") -> None:
        """Fail for every value of the case with this prefix that was not compared."""
        for name in sorted(set(self.case.tensors) - self.compared):
            if name.startswith(start):
                self.report.fail("coverage", name, "the case has it and it was not compared")


def recorded(model: PI07LowLevelFlowMatching) -> Recording:
    """Records the layers of a complete model."""
    layers: dict[str, Any] = {
        "tokens": video_encoder(model).projector,
        "prefix": model.prefix,
        "suffix": model.suffix,
        "decoder": model.decoder,
        "velocity": model.action_out_proj,
        "logits": model.da_head,
    }
    return Recording(layers | {f"layer{i}": layer for i, layer in enumerate(model.decoder.layers)})


def video_encoder(model: PI07LowLevelFlowMatching) -> VideoEncoder:
    """The video encoder of a complete model."""
    assert model.prefix is not None, "a full model has all layers"
    return model.prefix.video_encoder


def array(x) -> np.ndarray:
    """A tensor as an array; half precision becomes float32."""
    return (x.astype("float32") if x.dtype in (paddle.bfloat16, paddle.float16) else x).numpy()


def samples_of(rows, size: int) -> np.ndarray:
    """Token rows `[B * L, D]` of B = `size` samples, reshaped to `[B, L, D]`."""
    return array(rows).reshape(size, -1, rows.shape[-1])


def prefix_quantities(prefix: Prefix, tokens, num_cams: int) -> dict[str, np.ndarray]:
    """Camera tokens, embedded prefix, its masks and positions."""
    # Goal images follow the camera images in one pass.
    cameras = np.split(array(tokens)[: num_cams * prefix.embs.shape[0]], num_cams)
    return {f"out.video{i}.embs": camera for i, camera in enumerate(cameras)} | {
        "out.embed_prefix.embs": array(prefix.embs),
        "out.embed_prefix.pad_masks": array(prefix.pad_masks),
        "out.embed_prefix.att_masks": array(prefix.att_masks),
        "out.prefix.att_2d_mask": array(block_mask(prefix.pad_masks, prefix.att_masks)),
        "out.prefix.position_ids": array(prefix_positions(prefix.pad_masks)),
    }


def suffix_quantities(prefix: Prefix, num_steps: int) -> dict[str, np.ndarray]:
    """Masks and positions of an action chunk after a prefix; names without their prefix."""
    seen = prefix.pad_masks[:, : prefix.num_seen]
    pad = paddle.ones([seen.shape[0], num_steps], dtype="bool")
    # A chunk is one block.
    marks = np.zeros([seen.shape[0], num_steps], dtype=bool)
    marks[:, 0] = True
    mask = KeyMask(paddle.concat([seen, pad], axis=1), num_steps)
    return {
        "pad_masks": array(pad),
        "att_masks": marks,
        "att_2d_mask": array(mask.visible_BLS),
        "position_ids": array(suffix_positions(seen, num_steps)),
    }


def cache_quantities(cache, num_seen: int) -> dict[str, np.ndarray]:
    """Keys and values that the expert sees."""
    return {
        f"out.kv.layer{i}.{name}": array(x[:, :num_seen])
        for i, pair in enumerate(cache)
        for name, x in zip(("key", "value"), pair, strict=True)
    }
