"""One line of a JSONL file of demonstrations, parsed and checked.

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_vl.data.jsonl import BadSampleError, parse_object
from paddle_vl.data.media_file import MediaFolder, file_size
from paddle_vl.families.policy.demonstrations.sample import (
    NUMBER_TYPES,
    OPTIONAL_TEXTS,
    DemonstrationShapes,
)
from paddle_vl.families.policy.prompt import metadata_problem


@dataclass(frozen=True)
class Moment:
    """One parsed line; images are paths.

    Attributes:
        state: `[R, S]` float32, R frames that the policy reads, the current one last.
        history_length: steps of the line, read or not.
        actions: `[N, A]` float32, N real steps; None if no actions are needed.
        frames: R paths per camera that the line has.
        goals: the goal images that the line has, by name.
        words: the prompt, and the optional texts and numbers that the line has.
    """

    state: np.ndarray
    actions: np.ndarray | None
    frames: Mapping[str, list[str]]
    goals: Mapping[str, str]
    words: Mapping[str, Any]
    history_length: int


def parse_moment(line: bytes, folder: MediaFolder, shapes: DemonstrationShapes) -> Moment:
    """Parse one line of a JSONL file.

    Args:
        folder: the file's own, which relative paths start from.

    Raises:
        BadSampleError: names the fault.
    """
    # Non-finite numbers are refused below, with the name of their entry.
    record = parse_object(line, "'state', images, 'actions' and 'prompt'", finite=False)
    record = {name: value for name, value in record.items() if value is not None}
    _check_names(record, shapes)
    states = _rows(record, "state", shapes.state_dim)
    observed = shapes.observed(len(states))
    frames = {
        name: _paths(record, name, folder, len(states))[observed]
        for name in shapes.cameras
        if name in record
    }
    actions_NA = None
    if shapes.chunk_size is not None:
        assert shapes.action_dim is not None, "both are given, or neither"
        actions_NA = _rows(record, "actions", shapes.action_dim)[: shapes.chunk_size]
    goals = {
        goal: _paths(record, goal, folder, 1)[0] for goal in shapes.goals.values() if goal in record
    }
    words = {name: _text(record, name) for name in ("prompt", *OPTIONAL_TEXTS) if name in record}
    words |= {name: _number(record, name) for name in NUMBER_TYPES if name in record}
    return Moment(states[observed], actions_NA, frames, goals, words, len(states))


def file_sizes(moment: Moment, with_goals: bool) -> list[int]:
    """Sizes of the image files, in bytes.

    Raises:
        BadSampleError: names a file that does not exist.
    """
    paths = [path for of_camera in moment.frames.values() for path in of_camera]
    paths += list(moment.goals.values()) if with_goals else []
    return [file_size(path, "image") for path in paths]


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


def _rows(record: Mapping[str, Any], name: str, width: int) -> np.ndarray:
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
