"""Demonstrations in JSONL files with images beside them.

A line is one moment of an episode:

    {"state": [[0.1, 0.2], [0.1, 0.3]], "camera0": ["0/0.png", "0/1.png"], "prompt": "stack them",
     "actions": [[0.0, 1.0], ...], "subgoal0": "0/9.png", "response": "grasp the cube", "speed": 50}

Image paths are relative to the file. States and frames are those of consecutive steps in order of
time, the current one last. Of these the policy reads every `history_interval`-th, counted back from
the current one, `n_obs_steps` in all. A line may reach less far back (at the start of an episode)
or have fewer actions than a chunk (at its end); of more actions the first are used. A line may lack
up to `empty_cameras` cameras. An entry of one frame may omit the outer list. A missing or null
entry is absent. The file determines the group of data, so a line has no `dataset_index`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paddle_vl.data.jsonl import (
    MAX_LINE_BYTES,
    BadSampleError,
    LineIndex,
    OnBadSample,
    parse_object,
    sample_at,
)
from paddle_vl.data.media_file import MediaFolder, file_size, load_rgb
from paddle_vl.families.policy.demonstrations.sample import (
    NUMBER_TYPES,
    OPTIONAL_FIELDS,
    OPTIONAL_TEXTS,
    Demonstration,
    DemonstrationShapes,
    DemonstrationSource,
    chosen_fields,
    finished_sample,
)
from paddle_vl.families.policy.images import letterbox
from paddle_vl.families.policy.model_inputs import metadata_problem

logger = logging.getLogger(__name__)
# Name of the only group of data, if groups have no names.
UNNAMED_GROUP = "all"

Files = Sequence[str | os.PathLike]


class DemonstrationsDataset(LineIndex, DemonstrationSource):
    """Demonstrations from one or several JSONL files, numbered in file order.

    Opening reads every line once and checks all but the images, which are decoded when a sample is
    read. Cheap to pickle: it keeps positions of lines, not lines.

    Attributes:
        history_lengths: steps of the line of each file that has the most.
        on_bad_sample: "fail" raises at the first bad sample; "skip" leaves out bad samples found on
            opening, and lets the loader skip those found later.
    """

    def __init__(
        self,
        files: Files | Mapping[str, Files],
        shapes: DemonstrationShapes,
        fields: Sequence[str] | None = (),
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
            fields: the optional fields of every sample, whether or not its line has them; None for
                those that any line has.
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
        if isinstance(files, Mapping):
            groups = files
        elif group_names is None or len(group_names) == 1:
            groups = {group_names[0] if group_names else UNNAMED_GROUP: files}
        else:
            raise ValueError(
                f"the groups are {list(group_names)}, and the files do not say theirs: give the "
                "files of each group by its name"
            )
        self.shapes, self._found = shapes, set[str]()
        every = dict.fromkeys(OPTIONAL_FIELDS, True)
        self.fields = every if fields is None else chosen_fields(fields, shapes)
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
        if fields is None:
            self.fields = chosen_fields([n for n in OPTIONAL_FIELDS if n in self._found], shapes)

    def demonstration(
        self, number: int, *, with_history: bool = True, with_subgoals: bool = True
    ) -> Demonstration:
        given, group = self._moment(number)
        given["dataset_index"] = group
        with sample_at(self.place(number)):
            for camera in [name for name in self.shapes.cameras if name in given]:
                paths = given[camera] if with_history else given[camera][-1:]
                given[camera] = np.stack([self._image(camera, path) for path in paths])
            for goal in _goals(given, self.shapes):
                path = given.pop(goal)
                if self.fields["subgoal"] and with_subgoals:
                    given[goal] = self._image(goal, path)
            return finished_sample(given, self.shapes, self.fields)

    def check_history(self) -> None:
        lengths = zip(map(str, self.files), self.history_lengths, strict=True)
        check_history(self.shapes, [*lengths], "lines")

    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        moment, group = self._moment(number)
        return moment["state"], moment.get("actions"), group

    def _moment(self, number: int) -> tuple[dict[str, Any], int]:
        line, file_number = self.line(number)
        with sample_at(self.place(number)):
            moment = parse_moment(line, self._folders[file_number], self.shapes)
        return moment, self._groups[file_number]

    def _check_line(self, line: bytes, file_number: int) -> list[int]:
        """Check a line without decoding images; returns the sizes of its files."""
        moment = parse_moment(line, self._folders[file_number], self.shapes)
        goals = _goals(moment, self.shapes)
        paths = [path for camera in self.shapes.cameras for path in moment.get(camera, ())]
        paths += [moment[goal] for goal in goals if self.fields["subgoal"]]
        sizes = [file_size(path, "image") for path in paths]
        self._found |= {*moment, *(["subgoal"] if goals else [])}
        longest = max(self.history_lengths[file_number], moment["history_length"])
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


def check_history(
    shapes: DemonstrationShapes,
    longest: Sequence[tuple[str, int]],
    form: Literal["lines", "episodes"],
) -> None:
    """Refuse an observation that no line or episode can fill; warn of files without one that can.

    Args:
        longest: per file its name and the steps of its longest one.
    """
    short = [(file, length) for file, length in longest if length < shapes.history_length]
    if not short:
        return
    needed = (
        f"n_obs_steps {shapes.n_obs_steps} with history_interval {shapes.history_interval} "
        f"needs {form} with {shapes.history_length} consecutive steps"
    )
    found = ", ".join(f"at most {length} in {file}" for file, length in short)
    if len(short) < len(longest):
        logger.warning("%s; there are %s, whose past is always padded", needed, found)
        return
    fits = (max(length for _, length in short) - 1) // shapes.history_interval + 1
    longer = "write more steps into the lines" if form == "lines" else "add longer episodes"
    raise ValueError(
        f"{needed}, and there are {found}: {longer}, or set model.policy.n_obs_steps to at most "
        f"{fits}"
    )


def parse_moment(line: bytes, folder: MediaFolder, shapes: DemonstrationShapes) -> dict[str, Any]:
    """The entries of a line that the policy reads, as `finished_sample` takes them, but its images
    are paths, relative ones in the folder; and its steps, read or not, as `history_length`."""
    # Non-finite numbers are refused below, with the name of their entry.
    record = parse_object(line, "'state', images, 'actions' and 'prompt'", finite=False)
    record = {name: value for name, value in record.items() if value is not None}
    _check_names(record, shapes)
    states = number_rows(record, "state", shapes.state_dim)
    observed = shapes.observed(len(states))
    given: dict[str, Any] = {"state": states[observed], "history_length": len(states)}
    for name in shapes.cameras:
        if name in record:
            given[name] = _paths(record, name, folder, len(states))[observed]
    if shapes.chunk_size is not None:
        assert shapes.action_dim is not None, "both are given, or neither"
        given["actions"] = number_rows(record, "actions", shapes.action_dim)[: shapes.chunk_size]
    given |= {goal: _paths(record, goal, folder, 1)[0] for goal in _goals(record, shapes)}
    texts = ("prompt", *OPTIONAL_TEXTS)
    given |= {name: text_entry(record, name) for name in texts if name in record}
    return given | {name: number_entry(record, name) for name in NUMBER_TYPES if name in record}


def _goals(given: Mapping[str, Any], shapes: DemonstrationShapes) -> list[str]:
    """The goal images among entries."""
    return [goal for camera, goal in shapes.goals.items() if goal in given and goal != camera]


def _check_names(record: Mapping[str, Any], shapes: DemonstrationShapes) -> None:
    lacking = [name for name in shapes.cameras if name not in record]
    too_many = len(lacking) > min(shapes.empty_cameras, len(shapes.cameras) - 1)
    needed = ["state", *(lacking if too_many else ()), "prompt"]
    if shapes.chunk_size is not None:
        needed.append("actions")
    if missing := [name for name in needed if name not in record]:
        reason = f"the line has no {', '.join(map(repr, missing))}; it has {sorted(record)}"
        if too_many:
            reason += (
                f". It lacks {len(lacking)} of the policy's {len(shapes.cameras)} cameras, and "
                f"empty_cameras allows {shapes.empty_cameras}, but never all: add their images, or "
                "set model.policy.empty_cameras"
            )
        raise BadSampleError("missing_key", reason)
    known = {*needed, *shapes.cameras, "actions", *OPTIONAL_TEXTS, *NUMBER_TYPES}
    unknown = [
        name
        for name in record
        # A line may have cameras and goals that this policy does not read.
        if name not in known
        and (name.endswith("_is_pad") or not name.startswith(("camera", "subgoal")))
    ]
    if unknown:
        raise BadSampleError(
            "unknown_key",
            f"the line has {', '.join(map(repr, unknown))}, which nothing reads; entries are "
            f"{', '.join(sorted(known))}, cameras and subgoals",
        )


def number_rows(record: Mapping[str, Any], name: str, width: int) -> np.ndarray:
    """An entry as `[1 or more, width]` float32."""
    try:
        given = np.asarray(record[name])
    except ValueError as error:
        raise BadSampleError(
            "bad_shape", f"{name!r} has rows of several lengths: {error}"
        ) from error
    if given.dtype.kind not in "iuf":
        raise BadSampleError(
            "bad_type", f"{name!r} is {str(record[name])[:80]}; numbers are needed"
        )
    values = given[None] if given.ndim == 1 else given
    if values.ndim != 2 or values.shape[1] != width or not len(values):
        raise BadSampleError(
            "bad_shape",
            f"{name!r} has shape {list(values.shape)}; [1 or more, {width}] is needed",
        )
    largest = np.finfo(np.float32).max
    if not (np.abs(values) <= largest).all():
        raise BadSampleError("not_finite", f"{name!r} holds NaN, or values beyond {largest:.3g}")
    return values.astype(np.float32)


def _paths(record: Mapping[str, Any], name: str, folder: MediaFolder, count: int) -> list[str]:
    given = record[name]
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(path, str) and path for path in given):
        raise BadSampleError("bad_type", f"{name!r} is {str(given)[:80]}; paths are needed")
    if len(given) != count:
        what = "1 is needed" if name.startswith("subgoal") else f"'state' has {count} frames"
        raise BadSampleError("bad_shape", f"{name!r} has {len(given)} images; {what}")
    return [folder.path(path, repr(name)) for path in given]


def text_entry(record: Mapping[str, Any], name: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        raise BadSampleError("bad_type", f"{name!r} is {str(text)[:80]}; a text is needed")
    return text


def number_entry(record: Mapping[str, Any], name: str) -> Any:
    value, kind = record[name], NUMBER_TYPES.get(name)
    is_truth = kind is np.bool_
    if type(value) is not (bool if is_truth else int):
        needed = "true or false" if is_truth else "a whole number"
        raise BadSampleError("bad_type", f"{name!r} is {str(value)[:80]!r}; {needed} is needed")
    if (problem := metadata_problem(name, value)) is not None:
        raise BadSampleError("out_of_range", problem)
    return value
