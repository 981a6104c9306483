"""From files to batches: pictures, videos and packed rows per core.

    python tools/benchmarks/data_path.py

Makes photographs (smooth noise with edges, JPEG), a video (H.264) and conversations. One core
decodes, resizes and cuts them into patches.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from harness import ROOT, Result, Table, data_settings, overrides, parser, run
from paddle_vl.data.media_file import load_rgb
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import train_bpe
from paddle_vl.families.vlm.templates.built_in import CONTROL_TOKENS

SIZES = {"448 x 448": (448, 448), "1280 x 960": (1280, 960), "4000 x 3000": (4000, 3000)}
MAX_PIXELS, ROW_TOKENS = 1280 * 28 * 28, 4096
VIDEO_SECONDS, VIDEO_FPS, VIDEO_SIZE = 20, 30, (640, 360)
WORDS = [f"{a}{b}" for a in ("ba", "ko", "lin", "mer", "tos", "ve") for b in ("da", "pin", "rul")]


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Smooth regions, edges and grain, so that JPEG has as much to do as with a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 64, width // 64, 3), dtype=np.uint8))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    edges = coarse.resize((width, height), Image.Resampling.NEAREST)
    image = Image.blend(image, edges.filter(ImageFilter.GaussianBlur(1)), 0.4)
    grain = rng.normal(0, 6, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def write_photographs(folder: Path, width: int, height: int, count: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number:03}.jpg" for number in range(count)]
    for number, file in enumerate(files):
        photograph(width, height, number).save(file, quality=90)
    return files


def write_video(file: Path) -> None:
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=VIDEO_FPS)
        stream.width, stream.height = VIDEO_SIZE
        stream.pix_fmt = "yuv420p"
        still = np.asarray(photograph(VIDEO_SIZE[0] + 640, VIDEO_SIZE[1], 0))
        for number in range(VIDEO_SECONDS * VIDEO_FPS):
            view = np.ascontiguousarray(still[:, number : number + VIDEO_SIZE[0]])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(view, format="rgb24")))
        container.mux(stream.encode(None))


def processor_of(max_pixels: int) -> VLProcessor:
    images = ImageProcessor(
        min_pixels=65536, max_pixels=max_pixels, patch_size=16, temporal_patch_size=2,
        merge_size=2, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    return VLProcessor(train_bpe([" ".join(WORDS)], 512, CONTROL_TOKENS), images)


def per_cpu_second(run: Callable[[int], float], seconds: float) -> float:
    """Units per CPU second; `run` takes a number and returns the units that it made."""
    run(0)
    begin, units, number = time.process_time(), 0.0, 0
    while time.process_time() - begin < seconds:
        units += run(number)
        number += 1
    return units / (time.process_time() - begin)


def measure_pictures(work: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    images, found = processor_of(MAX_PIXELS).image_processor, []
    for name, (width, height) in SIZES.items():
        files = write_photographs(work / name.replace(" ", ""), width, height, 8)

        def decode(number: int, files=files) -> float:
            load_rgb(files[number % 8])
            return 1.0

        def process(number: int, files=files) -> float:
            images([files[number % 8]])
            return 1.0

        decoded, ready = (per_cpu_second(run, options.seconds) for run in (decode, process))
        found.append({"picture": name, "decoded": decoded, "ready": ready})
    return found


def measure_video(work: Path, seconds: float) -> float:
    """Seconds of video per CPU second, two frames of each."""
    write_video(work / "video.mp4")
    videos = processor_of(MAX_PIXELS).video_processor

    def process(_: int) -> float:
        videos([work / "video.mp4"])
        return float(VIDEO_SECONDS)

    return per_cpu_second(process, seconds)


def write_conversations(folder: Path, count: int) -> Path:
    """Conversations of text, and a processor; returns the folder."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 20 + int(rng.exponential(120)))) for _ in range(2 * count)]
    records = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(texts[::2], texts[1::2], strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    processor_of(65536).save_pretrained(folder / "processor")
    return folder


def measure_packing(work: Path, seconds: float) -> tuple[float, float]:
    """Tokens of packed conversations per CPU second, and how full the rows are."""
    from paddle_vl.config.load import load_run_config
    from paddle_vl.train.build import build_trainer

    settings = data_settings("qwen3_vl", write_conversations(work / "conversations", 2000)) | {
        "data.packing": "true", "data.packing_length": ROW_TOKENS, "data.max_length": 2048,
        "train.per_device_train_batch_size": 1, "data.num_workers": 0,
    }  # fmt: skip
    config = load_run_config(ROOT / "configs/quickstart/digits.yaml", overrides(settings))
    trainer = build_trainer(config, writes=False)
    fill = []

    def one(_: int) -> float:
        tokens = float(next(trainer.data)["attention_mask"].sum())
        fill.append(tokens / ROW_TOKENS)
        return tokens

    rate = per_cpu_second(one, seconds)
    trainer.feed.close()
    return rate, float(np.mean(fill))


def tables(found: dict[str, Any]) -> list[Table]:
    pictures = [
        [row["picture"], f"{row['decoded']:.0f}", f"{row['ready']:.0f}"]
        for row in found["pictures"]
    ]
    rest = [
        [f"video {VIDEO_SIZE[0]} x {VIDEO_SIZE[1]}, two frames per second",
         f"{found['video']:.1f} s of video"],
        [f"conversations in rows of {ROW_TOKENS} tokens", f"{found['tokens']:,.0f} tokens"],
    ]  # fmt: skip
    return [
        Table(
            "data path pictures",
            ["JPEG", "decoded per CPU s", "ready per CPU s"],
            pictures,
            "Ready: decoded, resized to at most a million pixels, normalized, cut into patches.",
        ),
        Table("data path rows", ["", "per CPU s"], rest, f"Rows are {found['fill']:.3f} full."),
    ]


def compare(options: argparse.Namespace, work: Path) -> Result:
    from paddle_vl.compat import configure_cpu_runtime

    configure_cpu_runtime(2)
    found: dict[str, Any] = {"pictures": measure_pictures(work, options)}
    found["video"] = measure_video(work, options.seconds)
    found["tokens"], found["fill"] = measure_packing(work, options.seconds)
    return Result(tables(found), found)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=3.0, help="CPU seconds per figure")
    sys.exit(run(made, compare))
