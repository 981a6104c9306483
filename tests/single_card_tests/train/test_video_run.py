"""Training on video files, from JSONL records to weights, and questions about them."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from paddle_vl.cli.main import main
from paddle_vl.families.vlm.answering.chat import Chat
from tests.single_card_tests.data.video_files import write_video
from tests.single_card_tests.train.batches import assert_same_bits
from tests.single_card_tests.train.tiny_run import write_records, write_tiny_run
from tests.single_card_tests.train.whole_runs import build, metrics_of

SMALL = [
    "data.video_min_frames=2", "data.video_min_pixels=512", "data.video_max_pixels=2048",
    "data.video_fps=2.5", "data.video_max_frames=6", "data.max_length=512", "train.warmup_steps=0",
    "data.video_markers=both",
]  # fmt: skip


def record(content: str, **media) -> dict:
    answer = {"role": "assistant", "content": "red"}
    return {"messages": [{"role": "user", "content": content}, answer], **media}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """Two samples with 6 and 5 frames at the run's 2.5 frames per second."""
    folder = tmp_path_factory.mktemp("video")
    run_file = write_tiny_run(folder, num_samples=2)
    write_video(folder / "a.mp4", 25, fps=10, size=(16, 24), codec="mpeg4")
    write_video(folder / "b.mkv", 12, fps=6, size=(16, 16))
    picture = {"images": ["images/0.png"]}
    write_records(
        folder / "train.jsonl",
        [
            record("<video>Which <image>colour?", videos=["a.mp4"], **picture),
            record("<image>Which <video>colour?", videos=["b.mkv"], **picture),
        ],
    )
    return run_file


def train(run_file: Path, output_dir: Path, *overrides: str):
    assert build(run_file, output_dir, "train.max_steps=2", *SMALL, *overrides).run() is None
    return load_file(output_dir / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(run_file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    train(run_file, folder)
    return folder


def test_workers_that_decode_give_the_same_weights_and_settings_are_saved(
    run_file, trained, tmp_path
):
    found = train(run_file, tmp_path, "data.num_workers=2")
    assert_same_bits(found, load_file(trained / "final" / "model.safetensors"))
    first, second = (line["loss"] for line in metrics_of(trained))
    assert second < first
    saved = json.loads((trained / "final" / "video_preprocessor_config.json").read_text())
    assert saved["size"] == {"shortest_edge": 512, "longest_edge": 2048}
    assert (saved["fps"], saved["min_frames"], saved["max_frames"]) == (2.5, 2, 6)
    assert saved["video_markers"] == "both"


def test_bad_video_stops_the_run_or_is_skipped_and_counted(run_file, trained, tmp_path, capsys):
    whole = (run_file.parent / "a.mp4").read_bytes()
    (run_file.parent / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    data = run_file.with_name("bad.jsonl")
    records = [json.loads(line) for line in run_file.with_name("train.jsonl").open()]
    write_records(data, [*records, record("<video>Which?", videos=["cut.mp4"])])
    common = ["train", str(run_file), f"data.train=[{data}]", "train.max_steps=2", *SMALL]
    for workers in (0, 1):
        settings = [
            f"train.output_dir={tmp_path / f'fail{workers}'}",
            f"data.num_workers={workers}",
        ]
        assert main([*common, *settings]) == 1
        error = capsys.readouterr().err
        place = f"error: {data}:3: video 1 ({run_file.parent / 'cut.mp4'}): the file cannot be"
        assert place in error
        assert "Traceback" not in error
    skipping = ["data.on_bad_sample=skip", f"train.output_dir={tmp_path / 'skip'}"]
    assert main([*common, *skipping]) == 0
    assert metrics_of(tmp_path / "skip")[-1]["skipped_samples"] > 0


def test_generate_answers_about_videos_and_images_in_the_order_given(
    trained, run_file, capsys, monkeypatch
):
    folder = run_file.parent
    media = {"image": str(folder / "images" / "0.png"), "video": str(folder / "b.mkv")}
    common = ["generate", "--model", str(trained), "--max-new-tokens", "4"]
    asked = []
    plain = Chat.stream

    def recorded(self, messages, images, videos, **settings):
        asked.append((messages[0]["content"], images, videos))
        return plain(self, messages, images, videos, **settings)

    monkeypatch.setattr(Chat, "stream", recorded)
    for kinds in (["video"], ["image", "video"], ["video", "image", "video"]):
        files = [part for kind in kinds for part in (f"--{kind}", media[kind])]
        for prompt in ("Which colour?", "Which " + "".join(f"<{kind}>" for kind in kinds)):
            assert main([*common, *files, "--prompt", prompt]) == 0
        lists = [[media[kind]] * kinds.count(kind) for kind in media]
        tags = "".join(f"<{kind}>" for kind in kinds)
        assert asked[-2:] == [(f"{tags}Which colour?", *lists), (f"Which {tags}", *lists)]
    capsys.readouterr()
    assert main([*common, "--video", media["video"], "--prompt", "<video><video>?"]) == 1
    assert "2 video place(s)" in capsys.readouterr().err
    assert main([*common, "--video", "gone.mp4", "--prompt", "What?"]) == 1
    assert "there is no file gone.mp4" in capsys.readouterr().err
