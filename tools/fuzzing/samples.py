"""Data: conversations, demonstrations and their statistics."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from fuzzing.media import write_video
from fuzzing.mutations import as_json, in_file, json_lines, of_json
from fuzzing.parser import Parser
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.sample import OPTIONAL_FIELDS, DemonstrationShapes
from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.families.policy.normalize import Normalizer, read_statistics
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import CONTROL_TOKENS, train_bpe

_TEXTS = ["user\n", "assistant\n", "system\n", "What is this?", "A cat on a mat.", "hello hello"]


def small_processor() -> VLProcessor:
    """A processor with patches of 4 pixels and 300 tokens."""
    images = ImageProcessor(64, 256, 4, 2, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return VLProcessor(train_bpe(_TEXTS, 300, CONTROL_TOKENS), images)


def write_image(file: Path, height: int = 16, width: int = 8) -> Path:
    """A small picture."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def conversations(folder: Path) -> Parser:
    """JSONL of messages, read into tokens; bad lines are skipped or end the run."""
    write_image(folder / "cat.png")
    write_video(folder / "clip.mp4", "mpeg4")
    user, answer = {"role": "user"}, {"role": "assistant", "content": "A cat."}
    image, video = {"type": "image", "image": "cat.png"}, {"type": "video", "path": "clip.mp4"}
    seeds: list[dict[str, Any]] = [
        {"messages": [user | {"content": "What is this?"}, answer]},
        {"messages": [user | {"content": "<image>What?"}, answer], "images": ["cat.png"]},
        {"messages": [user | {"content": "<video>"}, answer], "videos": ["clip.mp4"], "id": 1},
        {"messages": [user | {"content": [image, {"type": "text", "text": "What?"}]}, answer]},
        {"messages": [user | {"content": [video, image]}, answer], "system": "Be short."},
        {"messages": [{"role": "system", "content": "Be short."}, user | {"content": "Hi"},
                      answer | {"loss": False}, user | {"content": "And?"},
                      answer | {"loss": True}], "label": None},
        {"messages": [user | {"content": "Hi"}, answer, user | {"content": "No"}, answer],
         "label": [False, True]},
        {"messages": [user | {"content": "Hi"}, answer], "images_path": ["cat.png"],
         "history": [], "query": None, "mask": [], "enable_thinking": None},
    ]  # fmt: skip
    for name in ("fail", "skip"):
        (folder / f"{name}.jsonl").write_bytes(as_json(seeds[0]))
    processor = small_processor()

    def parse() -> None:
        for mode in ("fail", "skip"):
            dataset = MessagesDataset(
                [folder / f"{mode}.jsonl"], processor, 60, mode, allow_outside=False
            )
            for number in range(len(dataset)):
                try:
                    dataset.lengths(number)
                    dataset[number]
                    dataset.conversation(number).check_targets()
                except BadSampleError:
                    if mode == "fail":
                        raise

    one = st.fixed_dictionaries({"fail.jsonl": json_lines(seeds, 1)})
    many = st.fixed_dictionaries({"skip.jsonl": json_lines(seeds, 4)})
    return Parser(st.one_of(one, many), parse, (".jsonl",))


def demonstrations(folder: Path) -> Parser:
    """JSONL of demonstrations, read into samples."""
    for name in ("0.png", "1.png"):
        write_image(folder / name, 12, 12)
    full = {
        "state": [[0.1, 0.2], [0.3, 0.4]], "camera0": ["0.png", "1.png"], "prompt": "stack them",
        "actions": [[0.0, 1.0], [1.0, 0.0]], "subgoal0": "1.png", "response": "grasp", "speed": 50,
        "quality": 3, "mistake": False, "fps": 30, "robot_type": "arm", "control_mode": "joint",
        "past_memory": "a", "next_memory": "b",
    }  # fmt: skip
    short = {"state": [0.1, 0.2], "camera0": "0.png", "prompt": "go", "actions": [[0, 1]]}
    seeds = [full, short, full | {"subgoal0": None, "speed": None}]
    file = folder / "moments.jsonl"
    file.write_bytes(as_json(full))
    shapes = DemonstrationShapes(("camera0",), (8, 8), 2, 2, 3, 2)

    def parse() -> None:
        dataset = DemonstrationsDataset([file], shapes, OPTIONAL_FIELDS, allow_outside=False)
        for number in range(len(dataset)):
            dataset.motion(number)
            dataset[number]

    inputs = in_file("moments.jsonl", json_lines(seeds, 2))
    return Parser(inputs, parse, ("moments.jsonl",))


def statistics(folder: Path) -> Parser:
    """statistics.json, used to normalize values and back."""
    vector = {
        "mean": [0.0, 1.0], "std": [1.0, 0.5], "min": [-1.0, 0.0], "max": [1.0, 2.0],
        "q01": [-0.9, 0.1], "q99": [0.9, 1.9], "count": [10],
    }  # fmt: skip
    group = {"state": vector, "actions": vector}
    file = folder / "statistics.json"
    features = {
        "state": PolicyFeature("STATE", (2,)), "actions": PolicyFeature("ACTION", (2,))
    }  # fmt: skip
    batch = {name: np.ones((1, 3, 2), np.float32) for name in features}

    def parse() -> None:
        groups = list(read_statistics(file).values())
        for mode in ("MEAN_STD", "MIN_MAX", "QUANTILE"):
            modes = {"STATE": mode, "ACTION": mode}
            normalizer = Normalizer(features, modes, 1, len(groups))
            normalizer.set_statistics(groups)
            index_B = np.zeros(1, np.int64)
            normalizer.unnormalize(normalizer.normalize(batch, index_B), index_B)

    seeds = [{"arm": group}, {"arm": group, "other": group}]
    return of_json(file, seeds, parse, file.name, "the statistics")
