"""Write a small data set of demonstrations, as an example of the format: JSONL, PNG, statistics."""

import argparse
from pathlib import Path

from paddle_vl.data.policy.sample import DemonstrationShapes
from paddle_vl.data.policy.statistics import demonstration_statistics, write_statistics
from paddle_vl.data.policy.synthetic import SyntheticDemonstrations
from paddle_vl.data.policy.write import write_demonstrations


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
    print(f"{given.num_samples} samples: {', '.join(map(str, files))}; {statistics}")


if __name__ == "__main__":
    main()
