"""From files to batches: pictures, videos and packed rows per core, and how far loaders keep up.

    python tools/benchmarks/data_path.py [--against PYTHON]

Makes photographs (smooth noise with edges, JPEG), a video (H.264) and conversations. One core
decodes, resizes and cuts them into patches; `--against` names an interpreter with transformers,
whose image processor (PIL backend) takes the same files. Then loaders feed steps that take a tenth
of what this machine's step takes: a pause stands for a device, which leaves the cores alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from harness import ROOT, STEPS_ONLY, Table, make_data, overrides, parser, show
from paddle_vl.data.media_file import load_rgb
from paddle_vl.families.qwen3_vl.inputs.image_processor import ImageProcessor
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.qwen3_vl.inputs.tokenizer import CONTROL_TOKENS, train_bpe

SIZES = {"448 x 448": (448, 448), "1280 x 960": (1280, 960), "4000 x 3000": (4000, 3000)}
MAX_PIXELS, ROW_TOKENS, FASTER = 1280 * 28 * 28, 4096, 10
VIDEO_SECONDS, VIDEO_FPS, VIDEO_SIZE = 20, 30, (640, 360)
WORDS = [f"{a}{b}" for a in ("ba", "ko", "lin", "mer", "tos", "ve") for b in ("da", "pin", "rul")]
# Takes the decoded size as the package does, and times decoding and processing together.
HF = """
import json, sys, time
from PIL import Image
from transformers import Qwen2VLImageProcessor
folder, seconds, most = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
files = sys.argv[4:]
processor = Qwen2VLImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2,
    size={"shortest_edge": 65536, "longest_edge": most}, image_mean=[.5] * 3, image_std=[.5] * 3)
def once(file):
    return processor(images=[Image.open(file).convert("RGB")], return_tensors="np")
once(files[0])
begin, count = time.process_time(), 0
while time.process_time() - begin < seconds:
    once(files[count % len(files)])
    count += 1
print(json.dumps(count / (time.process_time() - begin)))
"""


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


def processor_of(max_pixels: int) -> Qwen3VLProcessor:
    images = ImageProcessor(
        min_pixels=65536, max_pixels=max_pixels, patch_size=16, temporal_patch_size=2,
        merge_size=2, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    return Qwen3VLProcessor(train_bpe([" ".join(WORDS)], 512, CONTROL_TOKENS), images)


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

        row = {
            "picture": name,
            "decoded": per_cpu_second(decode, options.seconds),
            "ready": per_cpu_second(process, options.seconds),
        }
        if options.against:
            command = [options.against, "-c", HF, str(work), str(options.seconds), str(MAX_PIXELS)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [*command, *map(str, files)], capture_output=True, text=True, check=True,
                env=environment,
            )  # fmt: skip
            row["hf"] = json.loads(done.stdout.splitlines()[-1])
        found.append(row)
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
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 20 + int(rng.exponential(120)))) for _ in range(2 * count)]
    records = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(texts[::2], texts[1::2], strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    processor_of(65536).save_pretrained(folder / "processor")
    return file


def measure_packing(work: Path, seconds: float) -> tuple[float, float]:
    """Tokens of packed conversations per CPU second, and how full the rows are."""
    trainer = trainer_of(
        ROOT / "configs/quickstart/digits.yaml",
        write_conversations(work / "conversations", 2000),
        **{"data.packing": "true", "data.packing_length": ROW_TOKENS, "data.max_length": 2048,
           "train.per_device_train_batch_size": 1, "data.num_workers": 0},
    )  # fmt: skip
    fill = []

    def one(_: int) -> float:
        tokens = float(next(trainer.data)["attention_mask"].sum())
        fill.append(tokens / ROW_TOKENS)
        return tokens

    rate = per_cpu_second(one, seconds)
    trainer.feed.close()
    return rate, float(np.mean(fill))


def trainer_of(config: Path, data: Path, **settings: Any) -> Any:
    """A trainer that writes nothing."""
    from paddle_vl.config.load import load_run_config
    from paddle_vl.train.build import build_trainer

    given = STEPS_ONLY | {
        "data.train": f"[{data}]",
        "data.eval": "[]",
        "data.processor": data.parent / "processor",
    }
    return build_trainer(load_run_config(config, overrides(given | settings)), writes=False)


def write_photograph_questions(work: Path) -> Path:
    """One photograph of 448 x 448 in each conversation, as many as a run would not keep in memory
    decoded."""
    folder = work / "questions"
    files = write_photographs(folder, 448, 448, 64)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(512):
            content = "<image>" + " ".join(WORDS[number % 9 : number % 9 + 6])
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "ko"},
            ]
            image = files[number % len(files)].name
            lines.write(json.dumps({"messages": messages, "images": [image]}) + "\n")
    processor_of(448 * 448).save_pretrained(folder / "processor")
    return folder / "train.jsonl"


def measure_loader(name: str, config: str, data: Path, **settings: Any) -> list[dict[str, Any]]:
    """Waits of steps that take a tenth of a real step's time, for several numbers of workers."""
    found, step_s = [], 0.0
    for workers in (0, 1, 2):
        trainer = trainer_of(ROOT / config, data, **settings, **{"data.num_workers": workers})
        if not step_s:
            trainer.train_one_step()
            begin = time.perf_counter()
            for _ in range(3):
                trainer.train_one_step()
            step_s = (time.perf_counter() - begin) / 3
        feed, waits, pause = trainer.feed, [], step_s / FASTER
        for _ in range(5):
            feed.next_step()
            time.sleep(pause)
        begin = time.perf_counter()
        while time.perf_counter() - begin < 4:
            waits.append(feed.next_step().data_wait_s)
            time.sleep(pause)
        feed.close()
        share = sum(waits) / (time.perf_counter() - begin)
        found.append({"run": name, "workers": workers, "step_ms": 1e3 * step_s,
                      "pause_ms": 1e3 * pause, "wait_ms": 1e3 * float(np.median(waits)),
                      "share": share})  # fmt: skip
    return found


def tables(found: dict[str, Any]) -> list[Table]:
    ratio = [["HF per CPU s", "this / HF"], []]["hf" not in found["pictures"][0]]
    pictures = [
        [row["picture"], f"{row['decoded']:.0f}", f"{row['ready']:.0f}"]
        + ([f"{row['hf']:.0f}", f"{row['ready'] / row['hf']:.2f}"] if ratio else [])
        for row in found["pictures"]
    ]
    rest = [
        [f"video {VIDEO_SIZE[0]} x {VIDEO_SIZE[1]}, two frames per second",
         f"{found['video']:.1f} s of video"],
        [f"conversations in rows of {ROW_TOKENS} tokens", f"{found['tokens']:,.0f} tokens"],
    ]  # fmt: skip
    loaders = [
        [f"{row['run']}, {row['workers']} workers", f"{row['step_ms']:.0f}",
         f"{row['pause_ms']:.1f}", f"{row['wait_ms']:.2f}", f"{100 * row['share']:.1f} %"]
        for row in found["loaders"]
    ]  # fmt: skip
    return [
        Table(
            "data path pictures",
            ["JPEG", "decoded per CPU s", "ready per CPU s", *ratio],
            pictures,
            "Ready: decoded, resized to at most a million pixels, normalized, cut into patches.",
        ),
        Table("data path rows", ["", "per CPU s"], rest, f"Rows are {found['fill']:.3f} full."),
        Table(
            "data path loader",
            ["run", "step here, ms", "step fed, ms", "wait per step, ms", "time lost"],
            loaders,
            "Medians; time lost is the sum of all waits. 0 workers: the training process prepares "
            "batches itself.",
        ),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=3.0, help="CPU seconds per figure")
    made.add_argument("--against", metavar="PYTHON", help="an interpreter with transformers")
    options = made.parse_args()
    from paddle_vl.compat import configure_cpu_runtime

    configure_cpu_runtime(2)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found: dict[str, Any] = {"pictures": measure_pictures(work, options)}
        found["video"] = measure_video(work, options.seconds)
        found["tokens"], found["fill"] = measure_packing(work, options.seconds)
        digits = make_data("qwen3_vl", work / "digits")
        found["loaders"] = measure_loader(
            "digits, 48 samples", "configs/quickstart/digits.yaml", digits
        )
        found["loaders"] += measure_loader(
            "photographs of 448 x 448, 8 samples",
            "configs/bench/qwen3_vl_step.yaml",
            write_photograph_questions(work),
            **{"data.min_pixels": "null", "data.max_pixels": "null",
               "train.per_device_train_batch_size": 8},
        )  # fmt: skip
    show(options, tables(found), found)


if __name__ == "__main__":
    sys.exit(main())
