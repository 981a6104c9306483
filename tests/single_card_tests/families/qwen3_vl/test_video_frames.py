"""Video frames: sampling, timestamps, sizes and patches equal HF's tables.

Pinned: every row of the golden size table and every golden sampling; timestamp text; an odd number
of frames repeats the last one. Pixels may differ from HF's by one step of 8 bits, because HF's
video processor resizes with torchvision and this one with PIL.

The oracle is the output of transformers 5.23.0 (tests/golden/qwen_vl/processor).
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.families.qwen3_vl.inputs.image_processor import smart_resize_video
from paddle_vl.families.qwen3_vl.inputs.video_processor import (
    patch_timestamps,
    process_frames,
    sample_frame_indices,
    timestamp_text,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "qwen_vl" / "processor"
TABLES = json.loads((GOLDEN / "processor.json").read_text())
ONE_STEP = 2 / 255 + 1e-6


@pytest.mark.parametrize("row", TABLES["video_smart_resize"]["rows"], ids=str)
def test_smart_resize_video_gives_every_golden_size(row):
    frames, height, width, min_pixels, max_pixels, expected = row
    arguments = (frames, height, width, 32, min_pixels, max_pixels)
    if expected == "ValueError":
        with pytest.raises(ValueError, match=r"1 frame\(s\)"):
            smart_resize_video(*arguments)
    else:
        assert list(smart_resize_video(*arguments)) == expected


@pytest.mark.parametrize("case", TABLES["frame_sampling"], ids=lambda c: str(c["fps"]))
def test_frame_sampling_and_timestamps_equal_hf(case):
    indices = sample_frame_indices(
        case["total_num_frames"],
        case["fps"],
        target_fps=case["target_fps"],
        min_frames=case["min_frames"],
        max_frames=case["max_frames"],
    )
    assert indices.tolist() == case["indices"]
    times = patch_timestamps(indices, case["fps"])
    np.testing.assert_allclose(times, case["timestamps"], atol=1e-6)
    assert [timestamp_text(time) for time in times] == case["text"]


def test_video_patches_equal_hf_up_to_one_step_of_resizing():
    golden = load_file(GOLDEN / "processor.safetensors")
    settings = TABLES["image"]["config"]
    size = TABLES["video"]["size"]
    output = process_frames(
        golden["video.rgb_uint8"],
        len(golden["video.rgb_uint8"]),
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
        **{key: value for key, value in settings.items() if key != "size"},
    )
    np.testing.assert_array_equal(output["video_grid_thw"], golden["video.video_grid_thw"])
    difference = np.abs(output["pixel_values_videos"] - golden["video.pixel_values_videos"])
    assert difference.max() <= ONE_STEP
    assert difference.mean() < 0.1 * ONE_STEP
