"""Samples longer than the limit: cut at the right, or refused where a cut would do harm."""

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.collate import IGNORED_LABEL


def truncate_sample(
    sample: dict[str, np.ndarray], max_length: int, *, image_token_id: int, merge_size: int
) -> dict[str, np.ndarray]:
    """The sample cut to at most `max_length` tokens, with the pixels of the images that remain.

    Args:
        sample: from `Qwen3VLProcessor.encode_sample`.

    Raises:
        BadSampleError: the cut goes through the placeholders of an image, or leaves no target.
    """
    length = len(sample["input_ids"])
    if length <= max_length:
        return sample
    ids, labels = sample["input_ids"][:max_length], sample["labels"][:max_length]
    if not (labels[1:] != IGNORED_LABEL).any():
        raise _too_long(length, max_length, "would cut away every token to learn from")
    cut = {**sample, "input_ids": ids, "labels": labels}
    if "image_grid_thw" in sample:
        grid_thw = sample["image_grid_thw"]
        ends = (grid_thw.prod(axis=1) // merge_size**2).cumsum()
        kept_tokens = np.count_nonzero(ids == image_token_id)
        num_kept = int(np.searchsorted(ends, kept_tokens, side="right"))
        if kept_tokens not in (0, *ends):
            raise _too_long(length, max_length, f"would cut image {num_kept + 1} in half")
        del cut["pixel_values"], cut["image_grid_thw"]
        if num_kept:
            cut["image_grid_thw"] = grid_thw[:num_kept]
            num_patches = int(grid_thw[:num_kept].prod(axis=1).sum())
            cut["pixel_values"] = sample["pixel_values"][:num_patches]
    return cut


def _too_long(length: int, max_length: int, harm: str) -> BadSampleError:
    return BadSampleError(
        "too_long",
        f"the sample has {length} tokens and data.max_length is {max_length}: cutting it there "
        f"{harm}; raise data.max_length, lower data.max_pixels, or shorten the sample",
    )
