"""`paddle-vl compute-stats`: statistics of a robot dataset from its frames."""

import argparse
from pathlib import Path

from paddle_vl.cli.table import Command, natural, switch, value


def compute_stats(options: argparse.Namespace) -> int:
    """Write the statistics."""
    from paddle_vl.data.lerobot.dataset import LeRobotDataset
    from paddle_vl.data.lerobot.statistics import (
        RECOMPUTED,
        recomputed_statistics,
        write_statistics,
    )

    dataset = LeRobotDataset(options.dataset, excluded_episodes=options.excluded_episodes)
    file = options.output or dataset.root / RECOMPUTED
    # Refused before the frames are read.
    if file.exists() and not options.overwrite:
        raise ValueError(f"{file} is there already: choose another --output, or add --overwrite")
    found = recomputed_statistics(dataset, not options.no_images, options.num_workers)
    write_statistics(found, file)
    print(f"statistics of {len(found)} features over {len(dataset)} frames are in {file}")
    return 0


COMPUTE_STATS = Command(
    compute_stats,
    "statistics of a LeRobot dataset from its frames",
    "Compute min, max, mean, std, count and the quantiles q01, q10, q50, q90 and q99 of every "
    "numeric feature and camera of a LeRobot dataset from all of its frames. Training reads the "
    "file, meta/recomputed_stats.json in the dataset, in place of what lerobot wrote, whose "
    "quantiles are none of the whole dataset, and whose standard deviations of images are wrong in "
    "version 0.4.4. The quantiles are exact; memory stays bounded.",
    "examples:\n  paddle-vl compute-stats datasets/pusht --num-workers 8\n"
    "  paddle-vl compute-stats datasets/pusht --output datasets/pusht/meta/stats.json --overwrite",
    [
        value("dataset", "DIR", "folder of the dataset, with meta/info.json", type=Path),
        value("--output", "FILE", "another file to write", type=Path),
        switch("--overwrite", "replace the file if it is there"),
        value("--excluded-episodes", "N", "numbers of episodes to leave out", type=natural,
              nargs="+", default=[]),
        switch("--no-images", "leave the cameras out, whose images take most of the time"),
        value("--num-workers", "N", "processes that decode images (default 0: this one)",
              type=natural, default=0),
    ],
)  # fmt: skip
