"""Write a small data set of demonstrations, as an example of the format: JSONL, PNG, statistics.

Beside it, in `processor/`, tokenizers made for it, for a policy with weights of its own.
"""

import argparse
from pathlib import Path

import numpy as np

from demonstration_files import write_demonstrations
from paddle_vl.families.pi07.demonstrations.sample import DemonstrationShapes
from paddle_vl.families.pi07.demonstrations.statistics import (
    demonstration_statistics,
    write_statistics,
)
from paddle_vl.families.pi07.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.pi07.inputs.discrete_actions import ActionTokenizer
from paddle_vl.families.pi07.inputs.prompt import PromptTokenizer

# What every policy's prefix has between the words of the data.
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
    """Tokenizers of the prompts and of the actions, these normalised by their extremes."""
    samples = [source.demonstration(number) for number in range(len(source))]
    texts = {sample[name] for sample in samples for name in ("prompt", "response")}
    (folder / "action_tokenizer").mkdir(parents=True, exist_ok=True)
    PromptTokenizer.fit(sorted(texts) + _FIXED_TEXTS, vocab_size).save_pretrained(folder)
    chunks = np.stack([sample["actions"] for sample in samples])
    low, high = chunks.min(axis=(0, 1)), chunks.max(axis=(0, 1))
    normalized = (chunks - low) / (high - low) * 2 - 1
    ActionTokenizer.fit(normalized, vocab_size=action_vocab_size).save_pretrained(
        folder / "action_tokenizer"
    )


if __name__ == "__main__":
    main()
