"""Demonstrations in JSONL files with images beside them; `line.py` describes their lines."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paddle_vl.data.jsonl import (
    MAX_LINE_BYTES,
    BadSampleError,
    LineIndex,
    OnBadSample,
    bounded_lines,
    check_length,
    parse_object,
    sample_at,
)
from paddle_vl.data.media_file import MediaFolder, load_rgb
from paddle_vl.families.policy.demonstrations.line import Moment, file_sizes, parse_moment
from paddle_vl.families.policy.demonstrations.sample import (
    OPTIONAL_FIELDS,
    Demonstration,
    DemonstrationShapes,
    chosen_fields,
    finished_sample,
)
from paddle_vl.families.policy.images import letterbox

logger = logging.getLogger(__name__)
# Name of the only group of data, if groups have no names.
UNNAMED_GROUP = "all"

Files = Sequence[str | os.PathLike]


def present_fields(
    files: Files | Mapping[str, Files],
    shapes: DemonstrationShapes,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> list[str]:
    """The optional fields that any line of any file has; the same on every rank.

    Lines that are too long or not JSON objects are ignored here; opening the dataset reports them.

    Raises:
        RuntimeError: a file does not exist.
    """
    groups = files.values() if isinstance(files, Mapping) else [files]
    names: set[str] = set()
    for file in (file for group in groups for file in group):
        if not Path(file).is_file():
            raise RuntimeError(f"there is no data file {file}")
        for _, _, line in bounded_lines(Path(file), max_line_bytes):
            names |= _field_names(line, max_line_bytes)
    if names & set(shapes.goals.values()):
        names.add("subgoal")
    return [name for name in OPTIONAL_FIELDS if name in names]


def _field_names(line: bytes, max_line_bytes: int) -> set[str]:
    try:
        check_length(line, max_line_bytes)
        record = parse_object(line, "a demonstration", finite=False)
    except BadSampleError:
        return set()
    return {name for name, value in record.items() if value is not None}


class DemonstrationsDataset(LineIndex):
    """Demonstrations from one or several JSONL files, numbered in file order.

    Opening reads every line once and checks all but the images, which are decoded when a sample is
    read. Cheap to pickle: it keeps positions of lines, not lines.

    Attributes:
        shapes, fields, group_names: see `DemonstrationSource`.
        history_lengths: steps of the line of each file that has the most.
        on_bad_sample: "fail" raises at the first bad sample; "skip" leaves out bad samples found on
            opening, and lets the loader skip those found later.
    """

    def __init__(
        self,
        files: Files | Mapping[str, Files],
        shapes: DemonstrationShapes,
        fields: Sequence[str] = (),
        group_names: Sequence[str] | None = None,
        on_bad_sample: OnBadSample = "fail",
        *,
        allow_outside: bool = True,
        max_line_bytes: int = MAX_LINE_BYTES,
    ):
        """Open the files and check every line.

        Args:
            files: of one group of data, or of each group by name.
            shapes: of the samples.
            fields: the optional fields of every sample, whether or not its line has them.
            group_names: in the order of `dataset_index`, a policy's `dataset_names`; None for the
                order of `files`.
            allow_outside: images may lie outside their data file's folder.
            max_line_bytes: a longer line is a bad sample.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: unknown fields or groups; a file, or with "skip" the whole dataset, has no
                usable sample.
        """
        groups = files if isinstance(files, Mapping) else {_only_group(group_names): files}
        self.shapes, self.fields = shapes, chosen_fields(fields, shapes)
        self.group_names = tuple(groups if group_names is None else group_names)
        if unknown := [name for name in groups if name not in self.group_names]:
            raise ValueError(
                f"there are files of the groups {unknown}, but the groups are "
                f"{list(self.group_names)}: name every group of the data among them"
            )
        named = [(Path(file), name) for name, of_group in groups.items() for file in of_group]
        paths = [file for file, _ in named]
        self._groups = [self.group_names.index(name) for _, name in named]
        self._folders = [MediaFolder(file.parent, allow_outside) for file in paths]
        self.history_lengths = [0] * len(paths)
        super().__init__(paths, self._check_line, on_bad_sample, max_line_bytes)

    def __getitem__(self, number: int) -> Demonstration:
        """A complete sample, see `demonstration`."""
        return self.demonstration(number)

    def demonstration(
        self, number: int, *, with_history: bool = True, with_subgoals: bool = True
    ) -> Demonstration:
        """A sample. Without history, past frames are black and not read.

        Raises:
            BadSampleError: the sample cannot be used; says `file:line: reason`.
        """
        moment, group = self._moment(number)
        with sample_at(self.place(number)):
            given = dict(moment.words) | {"state": moment.state, "dataset_index": group}
            if moment.actions is not None:
                given["actions"] = moment.actions
            for camera, paths in moment.frames.items():
                paths = paths if with_history else paths[-1:]
                given[camera] = np.stack([self._image(camera, path) for path in paths])
            if self.fields["subgoal"] and with_subgoals:
                given |= {goal: self._image(goal, path) for goal, path in moment.goals.items()}
            return finished_sample(given, self.shapes, self.fields)

    def check_history(self) -> None:
        """Refuse an observation that no line can fill; warn of files without a line that can.

        Raises:
            ValueError: names the longest line and the steps that are needed.
        """
        shapes = self.shapes
        short = {
            str(file): length
            for file, length in zip(self.files, self.history_lengths, strict=True)
            if length < shapes.history_length
        }
        if not short:
            return
        needed = (
            f"n_obs_steps {shapes.n_obs_steps} with history_interval {shapes.history_interval} "
            f"needs lines with {shapes.history_length} consecutive steps"
        )
        found = ", ".join(f"at most {length} in {file}" for file, length in short.items())
        if len(short) < len(self.files):
            logger.warning("%s; there are %s, whose past is always padded", needed, found)
            return
        fits = (max(short.values()) - 1) // shapes.history_interval + 1
        raise ValueError(
            f"{needed}, and there are {found}: write more steps into the lines, or set "
            f"model.policy.n_obs_steps to at most {fits}"
        )

    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """State, actions and group of a sample, see `DemonstrationSource`; reads no images.

        Raises:
            BadSampleError: the file has changed since it was opened.
        """
        moment, group = self._moment(number)
        return moment.state, moment.actions, group

    def _moment(self, number: int) -> tuple[Moment, int]:
        line, file_number = self.line(number)
        with sample_at(self.place(number)):
            moment = parse_moment(line, self._folders[file_number], self.shapes)
        return moment, self._groups[file_number]

    def _check_line(self, line: bytes, file_number: int) -> list[int]:
        """Check a line without decoding images; returns the sizes of its files."""
        moment = parse_moment(line, self._folders[file_number], self.shapes)
        sizes = file_sizes(moment, self.fields["subgoal"])
        longest = max(self.history_lengths[file_number], moment.history_length)
        self.history_lengths[file_number] = longest
        return sizes

    def _image(self, name: str, path: str) -> np.ndarray:
        """`[3, H, W]` float32 in [0, 1], fitted into the image size."""
        try:
            pixels_HW3 = np.asarray(load_rgb(path), dtype=np.float32) / np.float32(255)
        except BadSampleError as error:
            raise BadSampleError(error.kind, f"{name!r}, {path}: {error.reason}") from error
        try:
            return letterbox(pixels_HW3.transpose(2, 0, 1), self.shapes.image_size)
        except ValueError as error:
            raise BadSampleError("unreadable_image", f"{name!r}, {path}: {error}") from error


def _only_group(group_names: Sequence[str] | None) -> str:
    """The group of files that do not name one.

    Raises:
        ValueError: there are several groups.
    """
    if group_names is None:
        return UNNAMED_GROUP
    if len(group_names) != 1:
        raise ValueError(
            f"the groups are {list(group_names)}, and the files do not say theirs: give the files "
            "of each group by its name"
        )
    return group_names[0]
