"""Small LeRobot datasets with known values, in versions 2.0, 2.1 and 3.0.

Frame i of the whole dataset has the state (i, episode), the action (i + 0.5, -i), and a picture of
one grey level, `level(i)`.
"""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CAMERA = "observation.images.front"
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_PATHS = {
    "v3.0": ("data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", _VIDEO),
    "v2": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
}


def level(index: int) -> int:
    """Grey level of a frame."""
    return 20 + 9 * (index % 24)


def write_lerobot(
    root: Path,
    lengths: Sequence[int],
    version: str = "v3.0",
    *,
    fps: int = 10,
    episodes_per_file: int = 2,
    columns: Mapping[str, Sequence[Any]] | None = None,
    of_episodes: Mapping[str, Sequence[Any]] | None = None,
    timestamps: Sequence[float] | None = None,
    size: tuple[int, int] = (32, 48),
    gop: int = 100,
    **info: Any,
) -> Path:
    """Write a dataset with one camera, whose videos have long groups of pictures.

    Args:
        columns: further columns, a value per frame.
        of_episodes: further entries of episodes.
        timestamps: of all frames, instead of those at the rate.
        info: further entries of info.json.
    """
    is_whole = version == "v3.0"
    data_path, video_path = _PATHS["v3.0" if is_whole else "v2"]
    total, starts = sum(lengths), np.cumsum([0, *lengths])
    episode = np.repeat(np.arange(len(lengths)), lengths)
    frame = np.arange(total) - starts[episode]
    index = np.arange(total)
    table = {
        "observation.state": _vectors(np.stack([index, episode], axis=1)),
        "action": _vectors(np.stack([index + 0.5, -index], axis=1)),
        "timestamp": np.float32(frame / fps if timestamps is None else timestamps),
        "frame_index": frame,
        "episode_index": episode,
        "index": index,
        "task_index": episode % 2,
        **(columns or {}),
    }
    whole = pa.table(table)
    tasks = ["push", "pull"]
    rows = []
    for number, length in enumerate(lengths):
        group = number // episodes_per_file
        members = range(
            group * episodes_per_file, min((group + 1) * episodes_per_file, len(lengths))
        )
        members = members if is_whole else range(number, number + 1)
        place = {"chunk_index": group // 2, "file_index": group % 2}
        place |= {"episode_chunk": 0, "episode_index": number}
        first, last = int(starts[members[0]]), int(starts[members[-1] + 1])
        if number == members[0]:
            data = root / data_path.format(**place)
            data.parent.mkdir(parents=True, exist_ok=True)
            with pq.ParquetWriter(data, whole.schema) as writer:
                for each in members:
                    writer.write_table(whole.slice(int(starts[each]), lengths[each]))
            video = root / video_path.format(video_key=CAMERA, **place)
            write_levels(video, [level(i) for i in range(first, last)], fps, size, gop)
        row = {"episode_index": number, "tasks": [tasks[number % 2]], "length": length}
        row |= {name: values[number] for name, values in (of_episodes or {}).items()}
        if is_whole:
            offset = (int(starts[number]) - first) / fps
            row |= {
                "data/chunk_index": group // 2, "data/file_index": group % 2,
                "dataset_from_index": int(starts[number]),
                "dataset_to_index": int(starts[number + 1]),
                f"videos/{CAMERA}/chunk_index": group // 2,
                f"videos/{CAMERA}/file_index": group % 2,
                f"videos/{CAMERA}/from_timestamp": offset,
                f"videos/{CAMERA}/to_timestamp": offset + length / fps,
            }  # fmt: skip
        rows.append(row)
    meta = root / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True, exist_ok=True)
    if is_whole:
        pq.write_table(
            pa.Table.from_pylist(rows), meta / "episodes" / "chunk-000" / "file-000.parquet"
        )
        pq.write_table(pa.table({"task_index": [0, 1], "task": tasks}), meta / "tasks.parquet")
    else:
        _write_lines(meta / "episodes.jsonl", rows)
        named = [{"task_index": number, "task": task} for number, task in enumerate(tasks)]
        _write_lines(meta / "tasks.jsonl", named)
    features = {
        name: {"dtype": _dtype(whole[name]), "shape": [2] if _is_list(whole[name]) else [1]}
        for name in whole.column_names
    }
    features[CAMERA] = {"dtype": "video", "shape": [*size, 3], "info": {}}
    values = {"codebase_version": version, "fps": fps, "features": features, "chunks_size": 1000}
    values |= {"data_path": data_path, "video_path": video_path, "total_frames": total, **info}
    (meta / "info.json").write_text(json.dumps(values), encoding="utf-8")
    stats = {"observation.state": (index, episode), "action": (index + 0.5, -index)}
    measured = {name: _statistics(np.stack(columns, axis=1)) for name, columns in stats.items()}
    (meta / "stats.json").write_text(json.dumps(measured), encoding="utf-8")
    return root


def write_levels(
    path: Path,
    levels: Sequence[int],
    fps: int,
    size: tuple[int, int] = (32, 48),
    gop: int = 100,
    times: Sequence[float] | None = None,
) -> Path:
    """Write a video of grey frames in H.264 with B-frames, a key frame every `gop` frames.

    Args:
        times: of the frames in seconds, instead of those at the rate.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        options = {"g": str(gop), "bf": "2", "crf": "12", "sc_threshold": "0"}
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for number, each in enumerate(levels):
            pixels = np.full((*size, 3), each, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[number] * fps), Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _vectors(values: np.ndarray) -> pa.Array:
    flat = pa.array(values.astype(np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _statistics(values: np.ndarray) -> dict[str, list]:
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0)}
    return {name: each.tolist() for name, each in {**found, "std": values.std(0)}.items()}


def _is_list(column: Any) -> bool:
    return pa.types.is_fixed_size_list(column.type)


def _dtype(column: Any) -> str:
    if pa.types.is_list(column.type):
        return "language"
    kind = column.type.value_type if _is_list(column) else column.type
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
