"""Write a small data set of synthetic demonstrations, an example of the format.

Writes JSONL files with PNG images, statistics, and `processor/` with tokenizers trained on the
data, for a policy that is trained from scratch.
"""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.families.policy.demonstrations.sample import (
    NUMBER_TYPES,
    OPTIONAL_TEXTS,
    Demonstration,
    DemonstrationShapes,
    DemonstrationSource,
)
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.policy.normalize import (
    demonstration_statistics,
    write_statistics,
)
from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer

# Fixed texts in every policy's prefix.
_FIXED_TEXTS = ["Task: , State: , Subtask: , Metadata: Speed: Quality: Mistake: Subgoal: Action: "]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where to write")
    parser.add_argument("--num-samples", type=int, default=96)
    parser.add_argument("--num-cameras", type=int, default=2)
    parser.add_argument("--image-size", type=int, nargs=2, default=(56, 56), help="height width")
    parser.add_argument("--state-dim", type=int, default=4)
    parser.add_argument("--action-dim", type=int, default=4)
    parser.add_argument("--n-obs-steps", type=int, default=2)
    parser.add_argument("--chunk-size", type=int, default=8)
    parser.add_argument("--groups", nargs="+", default=["arm::joint"], metavar="ROBOT::MODE")
    parser.add_argument("--vocab-size", type=int, default=320, help="of the prompts")
    parser.add_argument("--action-vocab-size", type=int, default=256, help="of discrete actions")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shapes = DemonstrationShapes(
        cameras=tuple(f"camera{index}" for index in range(given.num_cameras)),
        image_size=tuple(given.image_size),
        state_dim=given.state_dim,
        n_obs_steps=given.n_obs_steps,
        chunk_size=given.chunk_size,
        action_dim=given.action_dim,
    )
    source = SyntheticDemonstrations(
        given.num_samples, shapes, seed=given.seed, group_names=given.groups
    )
    files = write_demonstrations(source, given.directory)
    statistics = given.directory / "statistics.json"
    write_statistics(statistics, demonstration_statistics(source))
    processor = given.directory / "processor"
    write_processor(source, processor, given.vocab_size, given.action_vocab_size)
    print(f"{given.num_samples} samples: {', '.join(map(str, files))}; {statistics}; {processor}")


def write_processor(
    source: SyntheticDemonstrations, folder: Path, vocab_size: int, action_vocab_size: int
) -> None:
    """Train and write the tokenizers of a source, see `fit_tokenizers`."""
    samples = [source.demonstration(number) for number in range(len(source))]
    texts = {sample[name] for sample in samples for name in ("prompt", "response")}
    chunks = np.stack([sample["actions"] for sample in samples])
    fit_tokenizers(texts, chunks, folder, vocab_size, action_vocab_size)


def fit_tokenizers(
    texts: Iterable[str],
    chunks_NCA: np.ndarray,
    folder: Path,
    vocab_size: int,
    action_vocab_size: int,
) -> None:
    """Train and write the tokenizers of prompts and of actions (normalized to [-1, 1])."""
    (folder / "action_tokenizer").mkdir(parents=True, exist_ok=True)
    PromptTokenizer.fit(sorted(texts) + _FIXED_TEXTS, vocab_size).save_pretrained(folder)
    low, high = chunks_NCA.min(axis=(0, 1)), chunks_NCA.max(axis=(0, 1))
    # A value that never changes is 0 after normalization.
    is_constant = high == low
    normalized = (chunks_NCA - low) / np.where(is_constant, 1, high - low) * 2 - ~is_constant
    ActionTokenizer.fit(normalized, vocab_size=action_vocab_size).save_pretrained(
        folder / "action_tokenizer"
    )


def write_demonstrations(source: DemonstrationSource, directory: str | Path) -> list[Path]:
    """Write all samples of a source as lines that `DemonstrationsDataset` reads, with PNG images.

    Leaves out padding and absent fields. Texts, numbers and images with 8 bits per channel are
    exact.

    Returns:
        One JSONL file per group that has samples, in the order of the groups.
    """
    directory = Path(directory)
    lines: dict[int, list[str]] = {}
    for number in range(len(source)):
        sample = source.demonstration(number)
        folder = directory / "images" / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        record = _record(sample, source.shapes, folder, directory)
        lines.setdefault(int(sample["dataset_index"]), []).append(json.dumps(record))
    files = []
    for group in sorted(lines):
        name = source.group_names[group].replace("::", "-")
        files.append(directory / f"{name}.jsonl")
        files[-1].write_text("\n".join(lines[group]) + "\n", encoding="utf-8")
    return files


def _record(
    sample: Demonstration, shapes: DemonstrationShapes, folder: Path, directory: Path
) -> dict[str, Any]:
    is_real = ~sample["obs_history_is_pad"]
    record: dict[str, Any] = {
        "prompt": sample["prompt"],
        "state": sample["state"][is_real].tolist(),
    }
    for camera in shapes.cameras:
        if sample.get(f"{camera}_is_pad", False):
            continue
        frames = sample[camera][is_real]
        paths = [folder / f"{camera}_{index}.png" for index in range(len(frames))]
        record[camera] = [_saved(*pair, directory) for pair in zip(frames, paths, strict=True)]
    if "actions" in sample:
        record["actions"] = sample["actions"][~sample["action_is_pad"]].tolist()
    record |= {name: sample[name] for name in OPTIONAL_TEXTS if sample.get(name)}
    for name in NUMBER_TYPES:
        if name in sample and not sample[f"{name}_is_pad"]:
            record[name] = sample[name].item()
    if "subgoal_is_pad" in sample and not sample["subgoal_is_pad"]:
        for goal in shapes.goals.values():
            if sample.get(f"{goal}_is_pad", False):
                continue
            record[goal] = _saved(sample[goal], folder / f"{goal}.png", directory)
    return record


def _saved(image_3HW: np.ndarray, path: Path, directory: Path) -> str:
    pixels = np.rint(image_3HW.transpose(1, 2, 0) * 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return os.path.relpath(path, directory)


if __name__ == "__main__":
    main()
