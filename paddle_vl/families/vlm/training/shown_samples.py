"""Training samples made readable again: text with its loss, and the pictures that the model sees.

Shapes: L length, P patches, N frames.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.config.families import FamilyEntry
from paddle_vl.data.formats.grounding import boxes_in
from paddle_vl.data.formats.spotting import spotted_boxes
from paddle_vl.data.shown_sample import Run, ShownSample
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.inputs.image_processor import VisionProcessor
from paddle_vl.families.vlm.inputs.preference import sides_of
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.settings import VLRun

_MOST_FRAMES = 8


def shown_samples(
    family: FamilyEntry, config: VLRun, of_eval: bool, first: int, count: int
) -> Iterator[ShownSample]:
    """Samples of data.train, or of data.eval, from a number on."""
    recipe = family.recipe_class()(config, None)
    data: Any = recipe.eval_data if of_eval else recipe.train_data
    if isinstance(data, Corpus):
        data = data.samples()
    name = "data.eval" if of_eval else "data.train"
    if data is None:
        raise ValueError(f"{name} is not set: there is no sample to show")
    number = len(data)
    if first >= number:
        raise ValueError(f"{name} has {number} samples: there is no sample {first} (from 0)")
    for place in range(first, min(first + count, number)):
        for side, sample in sides_of(data[place]).items():
            where = f"{data.place(place)} {side}".rstrip()
            yield shown_sample(sample, recipe.processor, where)


def shown_sample(
    sample: Mapping[str, np.ndarray], processor: VLProcessor, place: str
) -> ShownSample:
    """What a sample of `VLProcessor.encode_sample` holds."""
    ids, labels = sample["input_ids"], sample["labels"]
    learned = labels != IGNORE_INDEX
    pictures: list[np.ndarray] = []
    for settings, pixels, grid in (
        (processor.image_processor, "pixel_values", "image_grid_thw"),
        (processor.video_processor, "pixel_values_videos", "video_grid_thw"),
    ):
        if grid not in sample:
            continue
        ends = sample[grid].prod(axis=1).cumsum()
        for thw, patches in zip(sample[grid], np.split(sample[pixels], ends[:-1]), strict=True):
            frames = unpatchify(patches, tuple(thw), settings)
            # Frames of a temporal patch; those of an image are the same one twice.
            frames = frames[:: settings.temporal_patch_size]
            pictures += list(frames[:: -(-len(frames) // _MOST_FRAMES)])
    runs = [
        Run(_text(ids[places], processor), bool(is_learned))
        for is_learned, places in _runs(learned)
    ]
    # What follows the end of an answer has no boxes.
    end = processor.end_tokens[0]
    answers = [run.text.partition(end)[0] for run in runs if run.is_learned]
    boxes = [box for answer in answers for box in spotted_boxes(answer) or boxes_in(answer)]
    return ShownSample(place, runs, len(ids), int(learned.sum()), pictures, boxes)


def unpatchify(
    patches: np.ndarray, grid_thw: tuple[int, ...], settings: VisionProcessor
) -> np.ndarray:
    """The frames that `patchify` has cut.

    Args:
        patches: `[P, C * temporal_patch_size * patch_size ** 2]` float32.

    Returns:
        `[N, H, W, C]` uint8.
    """
    t, h, w = map(int, grid_thw)
    patch, merge, of_time = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    channels = len(settings.image_mean)
    blocks = patches.reshape(
        t, h // merge, w // merge, merge, merge, channels, of_time, patch, patch
    )
    frames = blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(
        t * of_time, h * patch, w * patch, channels
    )
    values = (frames * np.array(settings.image_std) + np.array(settings.image_mean)) * 255
    return np.clip(values.round(), 0, 255).astype(np.uint8)


def _runs(learned_L: np.ndarray) -> list[tuple[bool, list[int]]]:
    """Places of consecutive tokens with the same answer."""
    grouped = groupby(range(len(learned_L)), key=lambda place: bool(learned_L[place]))
    return [(is_learned, list(places)) for is_learned, places in grouped]


def _text(ids_L: np.ndarray, processor: VLProcessor) -> str:
    """Text of ids; placeholders of one picture are counted."""
    pads = {processor.image_token_id, processor.video_token_id}
    pieces = []
    for pad, group in groupby(ids_L.tolist(), key=lambda each: each if each in pads else None):
        ids = list(group)
        if pad is None:
            pieces.append(processor.decode(ids, skip_special_tokens=False))
        else:
            name = processor.decode([pad], skip_special_tokens=False)
            pieces.append(name if len(ids) == 1 else f"{name} x {len(ids)}")
    return "".join(pieces)
