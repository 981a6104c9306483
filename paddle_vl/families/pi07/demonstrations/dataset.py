"""Demonstrations in JSONL files with images beside them; `moment` shows a line.

Opening a dataset reads every line once and checks all but the images themselves, which are decoded
when a sample is taken.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paddle_vl.data.jsonl import (
    MAX_LINE_BYTES,
    BadSampleError,
    LineIndex,
    OnBadSample,
    SamplesOfLines,
    sample_at,
)
from paddle_vl.data.media_file import MediaFolder, load_rgb
from paddle_vl.families.pi07.demonstrations.moment import Moment, file_sizes, parse_moment
from paddle_vl.families.pi07.demonstrations.sample import (
    Demonstration,
    DemonstrationShapes,
    chosen_fields,
    finished_sample,
)
from paddle_vl.families.pi07.inputs.letterbox import letterbox

# The name of the only group, where groups have none.
UNNAMED_GROUP = "all"

Files = Sequence[str | os.PathLike]


class DemonstrationsDataset(SamplesOfLines):
    """Demonstrations from one or several JSONL files, numbered in file order.

    Cheap to pickle: it holds positions of lines, not lines.

    Attributes:
        shapes, fields, group_names: see `DemonstrationSource`.
        on_bad_sample: "fail" raises at the first bad sample; "skip" leaves out the ones found when
            opening, and lets the loader pass over the ones found later.
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
            files: of one group of data, or of each group by its name.
            shapes: what the policy asks for.
            fields: the optional fields that samples have, whatever a line holds.
            group_names: in the order of `dataset_index`, a policy's `dataset_names`; None for the
                groups in the order of `files`.
            allow_outside: whether images may lie outside their data file's folder.
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
        self.on_bad_sample: OnBadSample = on_bad_sample
        named = [(Path(file), name) for name, of_group in groups.items() for file in of_group]
        self.files = [file for file, _ in named]
        self._groups = [self.group_names.index(name) for _, name in named]
        self._folders = [MediaFolder(file.parent, allow_outside) for file in self.files]
        self._lines = LineIndex(self.files, self._check_line, on_bad_sample, max_line_bytes)

    def __getitem__(self, number: int) -> Demonstration:
        """A whole sample; see `demonstration`."""
        return self.demonstration(number)

    def demonstration(
        self, number: int, *, with_history: bool = True, with_subgoals: bool = True
    ) -> Demonstration:
        """A sample; without history, frames but the current one are black and not read.

        Raises:
            BadSampleError: it cannot be used, as `file:line: reason`.
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

    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Real frames of the state, real steps of the actions, and the group; no images are read.

        Raises:
            BadSampleError: the file has changed since it was opened.
        """
        moment, group = self._moment(number)
        return moment.state, moment.actions, group

    def _moment(self, number: int) -> tuple[Moment, int]:
        line, file_number = self._lines.line(number)
        with sample_at(self.place(number)):
            moment = parse_moment(line, self._folders[file_number], self.shapes)
        return moment, self._groups[file_number]

    def _check_line(self, line: bytes, file_number: int) -> list[int]:
        """Check what needs no decoding: the sizes of the files that the line names."""
        moment = parse_moment(line, self._folders[file_number], self.shapes)
        return file_sizes(moment, self.fields["subgoal"])

    def _image(self, name: str, path: str) -> np.ndarray:
        """`[3, H, W]` float32 in [0, 1], fitted into the size that is asked for."""
        try:
            pixels_HW3 = np.asarray(load_rgb(path), dtype=np.float32) / np.float32(255)
        except BadSampleError as error:
            raise BadSampleError(error.kind, f"{name!r}, {path}: {error.reason}") from error
        try:
            return letterbox(pixels_HW3.transpose(2, 0, 1), self.shapes.image_size)
        except ValueError as error:
            raise BadSampleError("unreadable_image", f"{name!r}, {path}: {error}") from error


def _only_group(group_names: Sequence[str] | None) -> str:
    """The group that files without one belong to.

    Raises:
        ValueError: there are several to choose from.
    """
    if group_names is None:
        return UNNAMED_GROUP
    if len(group_names) != 1:
        raise ValueError(
            f"the groups are {list(group_names)}, and the files do not say theirs: give the files "
            "of each group by its name"
        )
    return group_names[0]
