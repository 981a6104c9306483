"""Demonstrations from LeRobot datasets: all their frames once, or a weighted mixture.

A mixture draws sample n of an epoch by seed, epoch and n: first a dataset by its weight, then one
of its frames. So a run continues with the same samples on any number of ranks.
"""

import copy
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.jsonl import BadSampleError, FileContent, OnBadSample
from paddle_vl.data.lerobot.metadata import INFO
from paddle_vl.data.lerobot.statistics import FeatureStatistics, has_recomputed, pooled
from paddle_vl.families.policy.demonstrations.dataset import check_history
from paddle_vl.families.policy.demonstrations.robot_dataset import RobotDataset
from paddle_vl.families.policy.demonstrations.sample import (
    OPTIONAL_FIELDS,
    Demonstration,
    DemonstrationShapes,
    DemonstrationSource,
    Stream,
    chosen_fields,
    finished_sample,
    sample_rng,
)
from paddle_vl.families.policy.normalize import demonstration_statistics
from paddle_vl.families.policy.robot_settings import DatasetMixtureConfig

logger = logging.getLogger(__name__)


class RobotDemonstrations(DemonstrationSource):
    """A source of demonstrations from LeRobot datasets.

    Attributes:
        mixture, datasets: the settings, and the datasets in their order.
        on_bad_sample: as of `DemonstrationsDataset`; episodes without a file are found on opening.
        weights: sums of the shares of the datasets up to each, of which samples are drawn; None to
            have every frame once.
        substitutes: whether prompts are replaced by the datasets' substitutions.
    """

    def __init__(
        self,
        mixture: DatasetMixtureConfig,
        shapes: DemonstrationShapes,
        fields: Sequence[str] | None,
        group_names: Sequence[str] | None = None,
        on_bad_sample: OnBadSample = "fail",
        *,
        seed: int = 0,
        groups: Mapping[str, str] | None = None,
    ):
        """Open the datasets.

        Args:
            fields: the optional fields of every sample; None for all that any dataset has.
            group_names: a policy's `dataset_names`; None for the groups of the datasets.
            seed: of all draws.
            groups: other groups than the robot type and control mode say, by dataset.
        """
        self.mixture, self.shapes = mixture, shapes
        datasets = [RobotDataset(config, mixture, shapes) for config in mixture.datasets]
        self.datasets = datasets
        self.seed, self.epoch, self.substitutes = seed, 0, False
        self.weights: np.ndarray | None = None
        self.on_bad_sample, self.skipped = on_bad_sample, Counter[str]()
        found = set().union(*(dataset.fields() for dataset in datasets))
        names = [n for n in OPTIONAL_FIELDS if n in found] if fields is None else fields
        self.fields = chosen_fields(names, self.shapes)
        named = [(groups or {}).get(each.config.label, each.group) for each in datasets]
        self.group_names = tuple(dict.fromkeys(named) if group_names is None else group_names)
        if len(self.group_names) == 1:
            named = [self.group_names[0]] * len(named)
        if unknown := sorted({*named} - {*self.group_names}):
            raise ValueError(
                f"the datasets are of the groups {unknown} (robot_type::control_mode), and the "
                f"policy's dataset_names are {list(self.group_names)}: set robot_type and "
                "control_mode of the datasets, or name their groups in data.groups"
            )
        self._groups = [self.group_names.index(name) for name in named]
        self.files = [each.data.root for each in datasets]
        sizes = [each.data.file_sizes() for each in datasets]
        self.contents = list(map(_content, datasets, sizes))
        self._numbers = list(map(self._usable, datasets, sizes))
        self._count()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def check_history(self) -> None:
        """Steps are those of the mixture's rate."""
        longest = [(each.config.label, each.longest_history) for each in self.datasets]
        check_history(self.shapes, longest, "episodes")

    def in_epoch(self, epoch: int) -> "RobotDemonstrations":
        view = copy.copy(self)
        view.epoch = epoch
        return view

    def parts(self) -> "tuple[RobotDemonstrations, RobotDemonstrations | None]":
        """What to train on, drawn by weight; and every frame that is kept to evaluate with, the
        same on every rank.

        Raises:
            ValueError: no dataset with a weight has a frame that can be read.
        """
        parts, mixture = (copy.copy(self), copy.copy(self)), self.mixture
        for part in parts:
            part._numbers = []
        for place, (dataset, numbers) in enumerate(zip(self.datasets, self._numbers, strict=True)):
            ratio = mixture.setting(dataset.config, "val_split_ratio")
            rng = sample_rng(self.seed, Stream.SPLIT, place)
            owners = dataset.data.owners()[numbers]
            units = numbers if mixture.val_split_by == "frame" else np.unique(owners)
            count = min(max(int(len(units) * ratio), 1 if ratio else 0), len(units) - 1)
            kept = rng.permutation(units)[:count]
            is_kept = np.isin(numbers if mixture.val_split_by == "frame" else owners, kept)
            parts[0]._numbers.append(numbers[~is_kept])
            parts[1]._numbers.append(numbers[is_kept])
        for part in parts:
            part._count()
        training, held_out = parts
        frames = np.diff(training._starts)
        weights = frames if mixture.weights is None else mixture.weights
        ends = np.cumsum(np.where(frames > 0, weights, 0))
        if not ends[-1]:
            raise ValueError(
                f"no frame is left to draw: of {', '.join(map(str, self.files))} "
                f"{frames.tolist()} frames can be read, and the weights are {mixture.weights}: "
                "fetch the datasets again, or change the weights"
            )
        training.weights = ends / ends[-1]
        training.substitutes = True
        held_out.substitutes = mixture.val_enable_prompt_substitution
        return training, held_out if len(held_out) else None

    def place(self, number: int) -> str:
        """`folder: episode, frame` of a sample."""
        dataset, frame, _ = self._located(number)
        return dataset.data.place(frame)

    def demonstration(
        self, number: int, *, with_history: bool = True, with_subgoals: bool = True
    ) -> Demonstration:
        dataset, frame, group = self._located(number)
        given = dataset.moment(
            frame,
            {name for name, is_there in self.fields.items() if is_there},
            sample_rng(self.seed, Stream.MOMENT, self.epoch, number),
            substitutes=self.substitutes,
            with_history=with_history,
            with_subgoals=with_subgoals,
        )
        return finished_sample(given | {"dataset_index": group}, self.shapes, self.fields)

    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        dataset, frame, group = self._located(number)
        with dataset.data.at_place(frame):
            return *dataset.motion(frame), group

    def statistics(self, needs_quantiles: bool) -> dict[str, dict[str, FeatureStatistics]]:
        """Statistics of each group by name, in the order of `dataset_index`: those of its datasets,
        pooled by their frames.

        Args:
            needs_quantiles: warn of quantiles that lerobot wrote, which are approximate.
        """
        members: dict[int, list[tuple[dict[str, FeatureStatistics], int]]] = {}
        for place, (dataset, group) in enumerate(zip(self.datasets, self._groups, strict=True)):
            found = dataset.statistics()
            if dataset.is_delta and self.shapes.chunk_size is not None:
                found["actions"] = demonstration_statistics(self._sampled(place))[""]["actions"]
            elif needs_quantiles and not has_recomputed(dataset.data.metadata):
                root = dataset.data.root
                logger.warning(
                    "quantiles of %s are those that lerobot wrote, which are approximate: compute "
                    "them with paddle-vl compute-stats %s", root, root,
                )  # fmt: skip
            frames = sum(episode.length for episode in dataset.data.metadata.episodes)
            members.setdefault(group, []).append((found, frames))
        if empty := [n for row, n in enumerate(self.group_names) if row not in members]:
            raise ValueError(
                f"the groups {empty} have no dataset, so no statistics: set data.statistics"
            )
        return {name: _of_group(members[row]) for row, name in enumerate(self.group_names)}

    def _sampled(self, place: int) -> "RobotDemonstrations":
        """Samples of one dataset, at most `delta_stats_max_rows`, evenly chosen."""
        part, numbers = copy.copy(self), self._numbers[place]
        count = min(self.mixture.delta_stats_max_rows or len(numbers), len(numbers))
        part.datasets, part._groups = [self.datasets[place]], [0]
        part.group_names, part.weights = ("",), None
        part._numbers = [numbers[np.linspace(0, len(numbers) - 1, count).astype(np.int64)]]
        part._count()
        return part

    @property
    def fingerprint(self) -> int:
        shares = () if self.weights is None else self.weights.tolist()
        numbers = [xxh3_64(numbers.tobytes()).intdigest() for numbers in self._numbers]
        hashes = [content[1:] for content in self.contents]
        # Datasets may lie elsewhere.
        moved = {"root", "repo_id", "revision"}
        # Without defaults, so that a new setting changes no fingerprint.
        settings = [
            each.config.model_dump(exclude=moved, exclude_defaults=True) for each in self.datasets
        ]
        mixture = self.mixture.model_dump(exclude={"datasets"}, exclude_defaults=True)
        text = repr((hashes, shares, numbers, settings, mixture, self.seed))
        return xxh3_64(text.encode()).intdigest()

    def _count(self) -> None:
        self._starts = np.cumsum([0, *(len(numbers) for numbers in self._numbers)])

    def _located(self, number: int) -> tuple[RobotDataset, int, int]:
        """Dataset, frame and group of a sample."""
        if self.weights is None:
            place = int(np.searchsorted(self._starts, number, side="right")) - 1
            frame = number - self._starts[place]
        else:
            rng = sample_rng(self.seed, Stream.MIXTURE, self.epoch, number)
            place = int(np.searchsorted(self.weights, rng.random(), side="right"))
            frame = rng.integers(len(self._numbers[place]))
        return self.datasets[place], int(self._numbers[place][frame]), self._groups[place]

    def _usable(self, dataset: RobotDataset, sizes: Mapping[str, int]) -> np.ndarray:
        """Numbers of the frames whose files exist."""
        absent = []
        for episode in dataset.data.episodes:
            if files := [file for file in sorted(episode.files) if not sizes[file]]:
                absent.append(episode.number)
                if self.on_bad_sample == "fail":
                    raise BadSampleError(
                        "missing_file",
                        f"there is no file {', '.join(files)}: fetch the dataset again, leave the "
                        "episode out (excluded_episodes), or set data.on_bad_sample to skip",
                        f"{dataset.data.root}: episode {episode.number}",
                    )
        is_absent = np.isin(dataset.data.owners(), absent)
        self.skipped["missing_file"] += int(is_absent.sum())
        self.skipped = +self.skipped
        return np.flatnonzero(~is_absent)


def _content(dataset: RobotDataset, sizes: Mapping[str, int]) -> FileContent:
    root, episodes = dataset.data.root, dataset.data.episodes
    described = xxh3_64((root / INFO).read_bytes() + repr(episodes).encode())
    files = xxh3_64(repr(sorted(sizes.items())).encode())
    return FileContent(str(root), described.hexdigest(), files.hexdigest())


def _of_group(
    members: Sequence[tuple[dict[str, FeatureStatistics], int]],
) -> dict[str, FeatureStatistics]:
    first, _ = members[0]
    if len(members) == 1:
        return first
    frames = [count for _, count in members]
    return {name: pooled([found[name] for found, _ in members], frames) for name in first}
