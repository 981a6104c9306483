"""Video processor: settings in HF's files, and videos to patches, grids and timestamps.

Guarantees: sampled frames, grid and timestamps of a file equal those of a full decode with the
plain rules, read from disk or given as frames; settings are read from and written to HF's files,
and can be replaced one by one; unsupported settings are refused by name; several videos keep their
order; a bad one is named by number and file; every row of the golden size table and every golden
sampling; timestamp texts; an odd number of frames repeats the last one; of a list of frames all are
taken. Pixels may differ from HF's
by one 8-bit step, because HF resizes videos with torchvision and this package with PIL.

The oracle is the output of transformers 5.23.0 (tests/golden/qwen_vl/processor).
"""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.video_reader import FrameFiles, VideoFrames
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor, smart_resize
from paddle_vl.families.vlm.inputs.video_processor import (
    VideoProcessor,
    patch_timestamps,
    sample_frame_indices,
)
from paddle_vl.families.vlm.templates.encoding import timestamp_text
from tests.single_card_tests.data.video_files import decode_all, moving_frames, write_video

GOLDEN = Path(__file__).parents[3] / "golden" / "qwen_vl" / "processor"
TABLES = json.loads((GOLDEN / "processor.json").read_text())
HALF = [0.5, 0.5, 0.5]
PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": HALF,
           "image_std": HALF}  # fmt: skip
SETTINGS = {"size": {"shortest_edge": 64, "longest_edge": 12288}, **PATCHES}
IMAGES = ImageProcessor.from_dict(SETTINGS)
ONE_STEP = 2 / 255 + 1e-6


def processor(**settings) -> VideoProcessor:
    return VideoProcessor.from_dict({**SETTINGS, **settings})


def test_sampled_frames_of_a_file_become_patches_with_times(tmp_path):
    """25 frames at 10 fps last 2.5 s and give 5 frames at 2 fps; 5 is odd, so the last repeats."""
    path = write_video(tmp_path / "a.mp4", 25, fps=10)
    found = processor()([path])
    # 5 frames count as 4 of 32 x 48 pixels (round half to even), which fits the budget without
    # resizing.
    assert found.arrays["video_grid_thw"].tolist() == [[3, 8, 12]]
    assert found.timestamps == [[0.3, 1.5, 2.4]]
    taken = decode_all(path)[[0, 6, 12, 18, 24, 24]]
    values = found.arrays["pixel_values_videos"].reshape(3, 4, 6, 2, 2, 3, 2, 4, 4)
    pixels = values.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(6, 32, 48, 3)
    np.testing.assert_allclose(pixels, taken / 127.5 - 1, atol=1e-6)


def test_file_and_its_frames_in_memory_give_the_same(tmp_path):
    path = write_video(tmp_path / "a.mkv", 31, fps=15)
    from_file = processor()([path])
    from_frames = processor()([VideoFrames(decode_all(path), 15.0)])
    assert from_file.timestamps == from_frames.timestamps
    for key, value in from_file.arrays.items():
        np.testing.assert_array_equal(from_frames.arrays[key], value)


def pictures(count: int) -> FrameFiles:
    """Pictures of 8 x 8 pixels, of which each is one grey."""
    files = []
    for number in range(count):
        Image.new("L", (8, 8), number % 256).save(file := io.BytesIO(), "png")
        files.append(file.getvalue())
    return FrameFiles(tuple(files))


@pytest.mark.parametrize(("fps", "count", "texts"), [
    (2, 8, "0.2 1.2 2.2 3.2"),
    (1, 8, "0.5 2.5 4.5 6.5"),
    (4, 8, "0.1 0.6 1.1 1.6"),
    (2, 5, "0.2 1.2 2.0"),
    (2, 1, "0.0"),
])  # fmt: skip
def test_of_a_list_of_frames_all_are_taken_at_the_rate_of_the_run(fps, count, texts):
    """As ms-swift 4.6 (qwen-vl-utils 0.0.14) and LLaMA-Factory 0.9.5, which differ in the time of
    an odd last frame: 2.0 is LLaMA-Factory's and that of transformers 5.24, ms-swift has 2.2."""
    found = processor(fps=fps, min_frames=2, max_frames=4)([pictures(count)])
    (times,) = found.timestamps
    assert [timestamp_text(time) for time in times] == [f"<{t} seconds>" for t in texts.split()]
    patches = found.arrays["pixel_values_videos"].reshape(len(times), 4, 3, 2, -1)
    greys = (patches[:, 0, 0, :, 0].ravel() + 1) * 127.5
    assert greys.round().tolist() == [min(each, count - 1) for each in range(2 * len(times))]


def test_long_lists_of_frames_are_not_thinned_and_their_own_rate_wins():
    many = processor()([pictures(1000)], with_pixels=False)
    assert many.arrays["video_grid_thw"].tolist() == [[500, 2, 2]]
    own = FrameFiles(pictures(4).files, fps=1)
    assert processor()([own]).timestamps == [[0.5, 2.5]]
    with pytest.raises(BadSampleError, match="has 0 frame"):
        processor()([FrameFiles(())])


@pytest.mark.parametrize(
    ("settings", "num_patches", "first"),
    [
        ({}, 3, 0.25),
        ({"fps": 4.0}, 5, 0.1),
        ({"max_frames": 4}, 2, 0.4),
        ({"fps": 0.5}, 2, 0.4),
        ({"fps": 0.5, "min_frames": 2}, 1, 1.2),
    ],
)
def test_each_sampling_setting_acts(settings, num_patches, first):
    (times,) = processor(**settings)([VideoFrames(moving_frames(25), 10.0)]).timestamps
    assert len(times) == num_patches
    assert times[0] == pytest.approx(first, abs=0.06)


def test_pixel_budget_counts_all_frames():
    video = VideoFrames(moving_frames(8), 4.0)
    small = processor(size={"shortest_edge": 64, "longest_edge": 4 * 16 * 24})([video])
    assert small.arrays["video_grid_thw"].tolist() == [[2, 4, 6]]
    large = processor(size={"shortest_edge": 4 * 64 * 96, "longest_edge": 10**6})([video])
    assert large.arrays["video_grid_thw"].tolist() == [[2, 16, 24]]


def test_golden_frames_give_hf_grid_and_patches_up_to_one_step_of_resizing():
    golden = load_file(GOLDEN / "processor.safetensors")
    settings = {**TABLES["image"]["config"], "size": TABLES["video"]["size"]}
    frames = golden["video.rgb_uint8"]
    # The video has 2 fps and 2 fps are sampled: every frame is taken.
    found = VideoProcessor.from_dict(settings)([VideoFrames(frames, 2.0)])
    np.testing.assert_array_equal(found.arrays["video_grid_thw"], golden["video.video_grid_thw"])
    wanted = golden["video.pixel_values_videos"]
    difference = np.abs(found.arrays["pixel_values_videos"] - wanted)
    assert difference.max() <= ONE_STEP
    assert difference.mean() < 0.1 * ONE_STEP
    assert found.timestamps == [[0.25, 1.25, 2.0]]


def test_videos_keep_their_order():
    videos = [VideoFrames(moving_frames(n, 8, width), 2.0) for n, width in ((4, 16), (7, 8))]
    both = processor()(videos)
    assert both.arrays["video_grid_thw"].tolist() == [[2, 2, 4], [4, 2, 2]]
    apart = [processor()([video]) for video in videos]
    assert both.timestamps == [times for one in apart for times in one.timestamps]
    expected = np.concatenate([one.arrays["pixel_values_videos"] for one in apart])
    np.testing.assert_array_equal(both.arrays["pixel_values_videos"], expected)


def test_tokens_of_a_patch_follow_from_the_grid():
    grid_thw = np.array([[3, 8, 12], [1, 2, 2]])
    assert processor().tokens_per_patch(grid_thw).tolist() == [24, 1]


def test_bad_video_is_told_by_number_and_file(tmp_path):
    good, bad = VideoFrames(moving_frames(4), 2.0), tmp_path / "gone.mp4"
    with pytest.raises(BadSampleError, match=r"video 2 \(.*gone\.mp4\): there is no file"):
        processor()([good, bad])
    with pytest.raises(BadSampleError, match=r"^video 1: the video has 1 frame"):
        processor()([VideoFrames(moving_frames(1), 2.0)])
    thin = VideoFrames(moving_frames(4, 8, 4000), 2.0)
    with pytest.raises(BadSampleError, match="may be at most 200 times"):
        processor()([thin])


def test_settings_are_those_of_hf_files(tmp_path):
    """Published checkpoints state no sampling; it is in HF's class."""
    config = {**SETTINGS, "video_processor_type": "Qwen3VLVideoProcessor", "own": 1}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(config))
    found = VideoProcessor.from_pretrained(tmp_path, IMAGES)
    assert (found.fps, found.min_frames, found.max_frames) == (2, 4, 768)
    assert (found.min_pixels, found.max_pixels) == (64, 12288)
    found.save_pretrained(tmp_path / "copy")
    again = json.loads((tmp_path / "copy" / "video_preprocessor_config.json").read_text())
    assert again == {
        **config, "processor_class": "Qwen3VLProcessor", "fps": 2.0, "min_frames": 4,
        "max_frames": 768,
    }  # fmt: skip
    assert VideoProcessor.from_pretrained(tmp_path / "copy", IMAGES) == found


def test_nested_file_of_transformers_5_is_read(tmp_path):
    nested = {"image_processor": {}, "video_processor": {**SETTINGS, "fps": 1}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert VideoProcessor.from_pretrained(tmp_path, IMAGES) == processor(fps=1)


def test_folder_about_images_only_has_the_published_budget_and_the_patches_of_its_images(tmp_path):
    found = VideoProcessor.from_pretrained(tmp_path, IMAGES)
    assert found == processor(size={"shortest_edge": 4096, "longest_edge": 25165824})


def test_settings_are_replaced_one_by_one(tmp_path):
    processor(fps=1).save_pretrained(tmp_path)
    found = VideoProcessor.from_pretrained(tmp_path, IMAGES, max_frames=6, fps=None)
    assert found == processor(fps=1, max_frames=6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": None}, "lacks size.shortest_edge"),
        ({"do_sample_frames": False}, "do_sample_frames = False"),
        ({"do_resize": False}, "do_resize = False"),
        ({"num_frames": 8}, "num_frames = 8"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame = True"),
        ({"min_frames": 1}, "min_frames 1 and max_frames 768: 2 <= min_frames"),
        ({"min_frames": 8, "max_frames": 4}, "min_frames 8 and max_frames 4"),
        ({"video_markers": "outer"}, "video_markers.*'inner' or 'both'"),
        ({"size": {"shortest_edge": 9, "longest_edge": 4}}, "min_pixels 9 and max_pixels 4"),
    ],
)
def test_setting_that_cannot_be_honoured_is_refused_by_name(tmp_path, settings, message):
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text(json.dumps({**SETTINGS, **settings}))
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        VideoProcessor.from_pretrained(tmp_path, IMAGES)


def test_no_video_is_a_fault_of_the_caller():
    with pytest.raises(ValueError, match="no video given"):
        processor()([])


@pytest.mark.parametrize("row", TABLES["video_smart_resize"]["rows"], ids=str)
def test_smart_resize_of_a_video_gives_every_golden_size(row):
    frames, height, width, min_pixels, max_pixels, expected = row
    arguments = (height, width, 32, min_pixels, max_pixels, frames)
    if expected == "ValueError":
        with pytest.raises(ValueError, match=r"1 frame\(s\)"):
            smart_resize(*arguments)
    else:
        assert list(smart_resize(*arguments)) == expected


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
