"""Camera frames and subgoal images as the tower takes them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.families.pi07.inputs.letterbox import letterbox

logger = logging.getLogger(__name__)


class Pictures(NamedTuple):
    """Images of every camera, and which samples have them.

    Attributes:
        images: by camera `[B, T, 3, H, W]` of videos, `[B, 3, H, W]` of subgoals, float32.
        masks: by camera `[B]` bool, True where the image is real.
    """

    images: list[np.ndarray]
    masks: list[np.ndarray]


def prepare_videos(
    batch: Mapping[str, Any],
    cameras: Sequence[str],
    size: tuple[int, int],
    num_frames: int,
    empty_cameras: int = 0,
    history_is_pad_BT: np.ndarray | None = None,
) -> Pictures:
    """The frames of every camera, in [0, 1].

    Padded frames become black, the current one never. Cameras that the batch lacks stand behind
    the others as black images that are masked, as many as `empty_cameras` allows.

    Args:
        batch: by camera `[B, T, 3, H, W]`, or `[B, 3, H, W]` where an observation is one frame.
        num_frames: the most frames of an observation.

    Raises:
        ValueError: no camera is there, or frames of another shape.
    """
    present = [name for name in cameras if name in batch]
    if not present:
        raise ValueError(
            f"the batch has none of the cameras {list(cameras)} of input_features; its entries are "
            f"{sorted(batch)}"
        )
    if len(missing := [name for name in cameras if name not in batch]) > empty_cameras:
        raise ValueError(
            f"the batch lacks the cameras {missing}, but empty_cameras is {empty_cameras}: add "
            "them, or raise empty_cameras"
        )
    pictures = Pictures([], [])
    for name in present:
        video = _in_unit_range(batch[name], name)
        if video.ndim == 4 and num_frames == 1:
            video = video[:, None]
        if video.ndim != 5 or video.shape[2] != 3 or not 1 <= video.shape[1] <= num_frames:
            raise ValueError(
                f"{name!r} has shape {list(video.shape)}; n_obs_steps {num_frames} needs "
                f"[batch, 1 to {num_frames} frames, 3, height, width]"
                + (", which select_action makes of single frames" if num_frames > 1 else "")
            )
        if history_is_pad_BT is not None:
            if history_is_pad_BT.shape != video.shape[:2]:
                raise ValueError(
                    f"obs_history_is_pad has shape {list(history_is_pad_BT.shape)}, {name!r} has "
                    f"{list(video.shape[:2])} frames"
                )
            keep = ~history_is_pad_BT
            keep[:, -1] = True
            video = video * keep[:, :, None, None, None]
        pictures.images.append(letterbox(video, size))
        pictures.masks.append(np.ones(len(video), dtype=bool))
    for _ in missing:
        pictures.images.append(np.zeros_like(pictures.images[0]))
        pictures.masks.append(np.zeros_like(pictures.masks[0]))
    return pictures


def prepare_subgoals(
    batch: Mapping[str, Any], cameras: Sequence[str], size: tuple[int, int], empty_cameras: int = 0
) -> Pictures:
    """Subgoal images in [-1, 1]; empty where the batch has none.

    `camera0` has its subgoal under `subgoal0`. A sample whose `subgoal_is_pad` is True, or all
    where the batch does not say, has grey images that are masked.

    Raises:
        ValueError: images of another shape.
    """
    names = [name.replace("camera", "subgoal") for name in cameras]
    present = [name for name in names if name in batch]
    pictures = Pictures([], [])
    if not present:
        return pictures
    count = len(batch[present[0]])
    is_pad = np.asarray(batch.get("subgoal_is_pad", np.ones(count)), dtype=bool)
    for name in present:
        image = _in_unit_range(batch[name], name)
        if image.ndim != 4 or image.shape[1] != 3 or is_pad.shape != image.shape[:1]:
            raise ValueError(
                f"{name!r} has shape {list(image.shape)} and subgoal_is_pad "
                f"{list(is_pad.shape)}; [batch, 3, height, width] and [batch] are needed"
            )
        image = letterbox(image, size) * 2.0 - 1.0
        pictures.images.append(image * ~is_pad[:, None, None, None])
        pictures.masks.append(~is_pad)
    for _ in range(min(len(names) - len(present), empty_cameras)):
        pictures.images.append(-np.ones_like(pictures.images[0]))
        pictures.masks.append(np.zeros_like(pictures.masks[0]))
    return pictures


def _in_unit_range(images: Any, name: str) -> np.ndarray:
    images = np.asarray(images)
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(
            f"{name!r} holds {images.dtype}; images are floats from 0 to 1: divide by 255"
        )
    return images.astype(np.float32, copy=False)
