"""One line of a file of demonstrations, read and checked.

    {"state": [[0.1, 0.2], [0.1, 0.3]], "camera0": ["0/0.png", "0/1.png"], "prompt": "stack them",
     "actions": [[0.0, 1.0], ...], "subgoal0": "0/9.png", "response": "grasp the cube", "speed": 50}

Images are paths, relative to the file. Of an observation's frames, oldest first, there may be fewer
than the policy looks at, where the episode begins; of the actions fewer than a chunk, where it
ends. Of more frames the newest count, of more actions the first. Entries of one frame may leave the
outer list out. What a line does not have, or has as null, is absent; `dataset_index` is not
written, it follows from the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_vl.data.jsonl import BadSampleError, parse_object
from paddle_vl.data.media_file import MediaFolder, file_size
from paddle_vl.families.pi07.demonstrations.sample import (
    NUMBER_TYPES,
    OPTIONAL_TEXTS,
    DemonstrationShapes,
)
from paddle_vl.families.pi07.inputs.policy_metadata import metadata_problem


@dataclass(frozen=True)
class Moment:
    """What a line says; images are paths.

    Attributes:
        state: `[F, S]` float32, F frames, the current one last.
        actions: `[N, A]` float32, N steps; None where actions are not asked for.
        frames: F paths for each camera.
        goals: a path for each camera, by the goal's name; those that the line has.
        words: the prompt, and what the line has of texts and numbers.
    """

    state: np.ndarray
    actions: np.ndarray | None
    frames: Mapping[str, list[str]]
    goals: Mapping[str, str]
    words: Mapping[str, Any]


def parse_moment(line: bytes, folder: MediaFolder, shapes: DemonstrationShapes) -> Moment:
    """Parse one line of a JSONL file.

    Args:
        folder: the file's own, where relative paths start.

    Raises:
        BadSampleError: naming the fault.
    """
    # Numbers that are not finite are refused below, by the name of their entry.
    record = parse_object(line, "'state', images, 'actions' and 'prompt'", finite=False)
    record = {name: value for name, value in record.items() if value is not None}
    _check_names(record, shapes)
    state_FS, newest = _rows(record, "state", shapes.state_dim), slice(-shapes.n_obs_steps, None)
    frames = {name: _paths(record, name, folder, len(state_FS))[newest] for name in shapes.cameras}
    actions_NA = None
    if shapes.chunk_size is not None:
        actions_NA = _rows(record, "actions", shapes.action_dim)[: shapes.chunk_size]
    goals = {
        goal: _paths(record, goal, folder, 1)[0] for goal in shapes.goals.values() if goal in record
    }
    words = {name: _text(record, name) for name in ("prompt", *OPTIONAL_TEXTS) if name in record}
    words |= {name: _number(record, name) for name in NUMBER_TYPES if name in record}
    return Moment(state_FS[newest], actions_NA, frames, goals, words)


def file_sizes(moment: Moment, with_goals: bool) -> list[int]:
    """Bytes of the image files.

    Raises:
        BadSampleError: naming one that does not exist.
    """
    paths = [path for of_camera in moment.frames.values() for path in of_camera]
    paths += list(moment.goals.values()) if with_goals else []
    return [file_size(path, "image") for path in paths]


def _check_names(record: Mapping[str, Any], shapes: DemonstrationShapes) -> None:
    needed = ["state", *shapes.cameras, "prompt"]
    if shapes.chunk_size is not None:
        needed.append("actions")
    if missing := [name for name in needed if name not in record]:
        raise BadSampleError(
            "missing_key",
            f"the line has no {', '.join(map(repr, missing))}; it has {sorted(record)}",
        )
    known = {*needed, "actions", *OPTIONAL_TEXTS, *NUMBER_TYPES}
    unknown = [
        name
        for name in record
        # Cameras, and goals, that this run does not look at are no fault.
        if name not in known and not name.startswith(("camera", "subgoal"))
    ]
    if unknown:
        raise BadSampleError(
            "unknown_key",
            f"the line has {', '.join(map(repr, unknown))}, which nothing reads; entries are "
            f"{', '.join(sorted(known))}, cameras and subgoals",
        )


def _rows(record: Mapping[str, Any], name: str, width: int) -> np.ndarray:
    """The entry as `[1 or more, width]` float32."""
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


def _text(record: Mapping[str, Any], name: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        raise BadSampleError("bad_type", f"{name!r} is {str(text)[:80]}; a text is needed")
    return text


def _number(record: Mapping[str, Any], name: str) -> Any:
    value, kind = record[name], NUMBER_TYPES[name]
    is_truth = kind is np.bool_
    if type(value) is not (bool if is_truth else int):
        needed = "true or false" if is_truth else "a whole number"
        raise BadSampleError("bad_type", f"{name!r} is {str(value)[:80]!r}; {needed} is needed")
    if (problem := metadata_problem(name, value)) is not None:
        raise BadSampleError("out_of_range", problem)
    return value
