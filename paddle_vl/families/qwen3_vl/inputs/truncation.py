"""Samples longer than the limit: cut at the right, or refused where a cut would do harm."""

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.families.qwen3_vl.inputs.collate import IGNORED_LABEL


def truncate_sample(
    sample: dict[str, np.ndarray],
    max_length: int,
    *,
    image_token_id: int,
    video_token_id: int,
    merge_size: int,
) -> dict[str, np.ndarray]:
    """The sample cut to at most `max_length` tokens, with the pixels of what remains.

    Args:
        sample: from `Qwen3VLProcessor.encode_sample`.

    Raises:
        BadSampleError: the cut goes through an image or a video, or leaves no target.
    """
    length = len(sample["input_ids"])
    if length <= max_length:
        return sample
    ids, labels = sample["input_ids"][:max_length], sample["labels"][:max_length]
    if not (labels[1:] != IGNORED_LABEL).any():
        raise _too_long(length, max_length, "would cut away every token to learn from")
    cut = {**sample, "input_ids": ids, "labels": labels}
    for kind, token_id, pixels, grid in (
        ("image", image_token_id, "pixel_values", "image_grid_thw"),
        ("video", video_token_id, "pixel_values_videos", "video_grid_thw"),
    ):
        if grid not in sample:
            continue
        grid_thw = sample[grid]
        ends = (grid_thw.prod(axis=1) // merge_size**2).cumsum()
        kept_tokens = np.count_nonzero(ids == token_id)
        num_kept = int(np.searchsorted(ends, kept_tokens, side="right"))
        if kept_tokens not in (0, *ends):
            raise _too_long(length, max_length, f"would cut {kind} {num_kept + 1} in half")
        del cut[pixels], cut[grid]
        if num_kept:
            cut[grid] = grid_thw[:num_kept]
            cut[pixels] = sample[pixels][: int(cut[grid].prod(axis=1).sum())]
    return cut


def _too_long(length: int, max_length: int, harm: str) -> BadSampleError:
    return BadSampleError(
        "too_long",
        f"the sample has {length} tokens and data.max_length is {max_length}: cutting it there "
        f"{harm}; raise data.max_length, lower data.max_pixels (of videos data.video_max_pixels or "
        "data.video_fps), or shorten the sample",
    )
