"""Pixels to normalised patches, in the order the vision tower expects.

Source: the PIL backend of HF transformers' Qwen2-VL image processor: rescaling in float64 and a
cast to float32, then normalising in float32. An 8-bit image has 256 values per channel, so the
arithmetic is done once on those and every pixel is looked up.

Letters: R frames, H and W pixels, C = 3 channels, P patches, S = patch size, m = merge size.
"""

import numpy as np


def value_table(mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """`[C, 256]` float32: the normalised value of every 8-bit value, per channel."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean_C, std_C = (np.array(values, dtype=np.float32) for values in (mean, std))
    return (scaled[None] - mean_C[:, None]) / std_C[:, None]


def patchify(
    frames_RHWC: np.ndarray,
    table_CV: np.ndarray,
    *,
    patch_size: int,
    temporal_patch_size: int,
    merge_size: int,
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames into normalised patches in merge-block order.

    Patches are ordered (t, block row, block column, row in block, column in block); inside a patch
    values are ordered (channel, frame, y, x). A number of frames that `temporal_patch_size` does
    not divide is filled up by repeating the last one, so an image is one temporal patch.

    Args:
        frames_RHWC: uint8, H and W multiples of `patch_size * merge_size`.
        table_CV: from `value_table`.

    Returns:
        `[P, C * temporal_patch_size * patch_size ** 2]` float32 and the grid (t, h, w) in patches.

    Raises:
        ValueError: merge blocks do not tile the frames.
    """
    num_frames, height, width, channels = frames_RHWC.shape
    block = patch_size * merge_size
    if height % block or width % block or not height or not width:
        raise ValueError(
            f"frames of {width} x {height} pixels (width x height) are not tiled by blocks of "
            f"{block} pixels; resize them first, or leave do_resize on"
        )
    missing = -num_frames % temporal_patch_size
    if missing:
        last = frames_RHWC[-1:].repeat(missing, axis=0)
        frames_RHWC = np.concatenate([frames_RHWC, last])
    t, h, w = (
        len(frames_RHWC) // temporal_patch_size,
        height // patch_size,
        width // patch_size,
    )
    blocks = frames_RHWC.reshape(
        t, temporal_patch_size,
        h // merge_size, merge_size, patch_size,
        w // merge_size, merge_size, patch_size,
        channels,
    ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, channels, -1)  # fmt: skip
    patches = np.empty(blocks.shape, dtype=np.float32)
    for channel in range(channels):
        patches[:, channel] = table_CV[channel][blocks[:, channel]]
    return patches.reshape(t * h * w, -1), (t, h, w)
