"""Preparation of camera frames and subgoal images for the vision tower.

A ValueError names images that are missing or do not fit, their values or shape, and the remedy.

Shapes: B batch, F frames of an observation, H x W pixels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.families.policy.features import PolicyFeature

_OVERSHOOT = 0.25


class Pictures(NamedTuple):
    """Per camera images `[B, F, 3, H, W]` (videos) or `[B, 3, H, W]` (subgoals), float32, and a
    mask `[B]` bool, True for real ones."""

    images: list[np.ndarray]
    masks: list[np.ndarray]


def cameras_of(features: Mapping[str, PolicyFeature]) -> list[str]:
    """Names of the image features."""
    return [name for name, feature in features.items() if feature.type == "VISUAL"]


def check_images(batch: Mapping[str, Any], cameras: Sequence[str]) -> None:
    """Refuse raw images of cameras and goals that are not floats from 0 to 1.

    Looks at every fourth row of pixels, a few percent of a batch's preparation. Interpolation may
    overshoot a little.
    """
    for name in [*cameras, *map(_goal_of, cameras)]:
        if name not in batch:
            continue
        images = np.asarray(batch[name])
        if not np.issubdtype(images.dtype, np.floating):
            raise ValueError(
                f"{name!r} holds {images.dtype}; images are floats from 0 to 1: divide by 255"
            )
        rows = images[..., ::4, :] if images.ndim > 1 else images
        low, high = (rows.min(), rows.max()) if rows.size else (0.0, 1.0)
        if not (low >= -_OVERSHOOT and high <= 1 + _OVERSHOOT):
            remedy = "divide by 255" if high > 1 + _OVERSHOOT else "scale them to that range"
            raise ValueError(
                f"{name!r} holds values from {low:g} to {high:g}; images are floats from 0 to 1: "
                f"{remedy}"
            )


def _goal_of(camera: str) -> str:
    return camera.replace("camera", "subgoal")


def prepare_videos(
    batch: Mapping[str, Any],
    cameras: Sequence[str],
    size: tuple[int, int],
    num_frames: int,
    empty_cameras: int = 0,
    history_is_pad_BF: np.ndarray | None = None,
) -> Pictures:
    """The frames of every camera, in [0, 1].

    Padded frames become black, except the current one. Cameras that a sample lacks become masked
    black images in their place; those that the batch lacks, at most `empty_cameras`, after the
    others.

    Args:
        batch: per camera `[B, F, 3, H, W]`, or `[B, 3, H, W]` if an observation is one frame;
            optionally `<camera>_is_pad` `[B]` bool, True for samples that lack the camera.
        num_frames: most frames of an observation.
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
        video = np.asarray(batch[name], dtype=np.float32)
        if video.ndim == 4 and num_frames == 1:
            video = video[:, None]
        if video.ndim != 5 or video.shape[2] != 3 or not 1 <= video.shape[1] <= num_frames:
            raise ValueError(
                f"{name!r} has shape {list(video.shape)}; n_obs_steps {num_frames} needs "
                f"[batch, 1 to {num_frames} frames, 3, height, width]"
                + (", which select_action makes of single frames" if num_frames > 1 else "")
            )
        if history_is_pad_BF is not None:
            if history_is_pad_BF.shape != video.shape[:2]:
                raise ValueError(
                    f"obs_history_is_pad has shape {list(history_is_pad_BF.shape)}, {name!r} has "
                    f"{list(video.shape[:2])} frames"
                )
            keep = ~history_is_pad_BF
            keep[:, -1] = True
            video = video * keep[:, :, None, None, None]
        mask_B = _has_image(batch, name, len(video))
        video = video if mask_B.all() else video * mask_B[:, None, None, None, None]
        pictures.images.append(letterbox(video, size))
        pictures.masks.append(mask_B)
    for _ in missing:
        pictures.images.append(np.zeros_like(pictures.images[0]))
        pictures.masks.append(np.zeros_like(pictures.masks[0]))
    return pictures


def prepare_subgoals(
    batch: Mapping[str, Any], cameras: Sequence[str], size: tuple[int, int], empty_cameras: int = 0
) -> Pictures:
    """Subgoal images in [-1, 1]; no images if the batch has none.

    The subgoal of `camera0` is `subgoal0`. Samples whose `subgoal_is_pad` is True, and all samples
    without that entry, get masked grey images, and so does a subgoal whose own `subgoal0_is_pad`
    is True.
    """
    names = [_goal_of(camera) for camera in cameras]
    present = [name for name in names if name in batch]
    pictures = Pictures([], [])
    if not present:
        return pictures
    count = len(batch[present[0]])
    is_pad = np.asarray(batch.get("subgoal_is_pad", np.ones(count)), dtype=bool)
    for name in present:
        image = np.asarray(batch[name], dtype=np.float32)
        if image.ndim != 4 or image.shape[1] != 3 or is_pad.shape != image.shape[:1]:
            raise ValueError(
                f"{name!r} has shape {list(image.shape)} and subgoal_is_pad "
                f"{list(is_pad.shape)}; [batch, 3, height, width] and [batch] are needed"
            )
        image = letterbox(image, size) * 2.0 - 1.0
        mask_B = ~is_pad & _has_image(batch, name, count)
        pictures.images.append(image * mask_B[:, None, None, None])
        pictures.masks.append(mask_B)
    for _ in range(min(len(names) - len(present), empty_cameras)):
        pictures.images.append(-np.ones_like(pictures.images[0]))
        pictures.masks.append(np.zeros_like(pictures.masks[0]))
    return pictures


def _has_image(batch: Mapping[str, Any], name: str, batch_size: int) -> np.ndarray:
    """`[B]` bool, False for samples whose `<name>_is_pad` is True."""
    is_pad_B = np.asarray(batch.get(f"{name}_is_pad", np.zeros(batch_size)), dtype=bool)
    if is_pad_B.shape != (batch_size,):
        raise ValueError(
            f"{name}_is_pad has shape {list(is_pad_B.shape)}, {name!r} has {batch_size} samples: "
            "one value for each is needed"
        )
    return ~is_pad_B


def letterbox(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scale images `[..., height, width]` float32 bilinearly, keeping their aspect ratio, and pad
    them with zeros at the top and left to a size (height, width).

    Scaled sides are rounded down to whole pixels. Images of the right size are returned unchanged.

    Source: `resize_with_pad` of OpenTau and openpi.
    """
    height, width = images.shape[-2:]
    if (height, width) == tuple(size):
        return images
    ratio = max(width / size[1], height / size[0])
    inner = int(height / ratio), int(width / ratio)
    if 0 in inner:
        raise ValueError(
            f"an image of {height} x {width} has no pixel left when it is fitted into "
            f"{size[0]} x {size[1]}"
        )
    scaled = _resized(_resized(images, inner[1], axis=-1), inner[0], axis=-2)
    boxed = np.zeros((*images.shape[:-2], *size), dtype=np.float32)
    boxed[..., size[0] - inner[0] :, size[1] - inner[1] :] = scaled
    return boxed


def _resized(images: np.ndarray, length: int, axis: int) -> np.ndarray:
    """Linear interpolation along one axis, pixel centres at halves, edge values repeated."""
    source = images.shape[axis]
    if length == source:
        return images
    position = (np.arange(length, dtype=np.float32) + 0.5) * np.float32(source / length) - 0.5
    position = np.maximum(position, np.float32(0))
    first = np.minimum(position.astype(np.int64), source - 1)
    second = np.minimum(first + 1, source - 1)
    share = (position - first).astype(np.float32)
    share = share if axis == -1 else share[:, None]
    low, high = np.take(images, first, axis=axis), np.take(images, second, axis=axis)
    return low * (1 - share) + high * share
