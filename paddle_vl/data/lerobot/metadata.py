"""What the files in a LeRobot dataset's `meta` say: features, tasks, and where each episode lies.

Version 2.0 and 2.1 have a Parquet file per episode, and a video file per episode and camera;
version 3.0 puts several episodes into a file and writes their places into `meta/episodes`.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.data.corpus.table_shard import reading_table
from paddle_vl.data.jsonl import MAX_LINE_BYTES, BadSampleError, bounded_lines, parse_object
from paddle_vl.data.lerobot.language import SAY
from paddle_vl.files.text_file import read_json_object

INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
_REMEDY = "fetch or convert the dataset again"
# Columns of an episode that `Episode` has under other names; the rest is in `extra`.
_OWN = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")


class Feature(NamedTuple):
    """A column, or the frames of a camera.

    Attributes:
        dtype: of NumPy, or "string", "language", "image" (in Parquet) or "video" (in MP4 files).
        shape: of one frame's value; (height, width, channels) of images.
        info: how images are stored, such as the unit and the range of depth.
    """

    dtype: str
    shape: tuple[int, ...]
    info: Mapping[str, Any]

    @property
    def is_camera(self) -> bool:
        """Whether its values are images."""
        return self.dtype in ("image", "video")

    @property
    def is_depth(self) -> bool:
        """Whether its images are depth maps."""
        return bool(self.info.get("is_depth_map") or self.info.get("video.is_depth_map"))

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers or truth values."""
        return not self.is_camera and self.dtype not in ("string", "language")


class Episode(NamedTuple):
    """One episode and the places of its frames.

    Attributes:
        number: its `episode_index`.
        start: global `index` of its first frame.
        length: number of frames.
        tasks: the tasks that any of its frames has.
        file: its Parquet file, relative to the dataset's folder.
        first_row: row of its first frame in that file.
        videos: per camera the video file, and the seconds in it at which the episode starts.
        extra: further entries, such as OpenTau's `quality` and `segments`.
    """

    number: int
    start: int
    length: int
    tasks: tuple[str, ...]
    file: str
    first_row: int
    videos: Mapping[str, tuple[str, float]]
    extra: Mapping[str, Any]

    @property
    def files(self) -> set[str]:
        """All files that have its frames."""
        return {self.file, *(file for file, _ in self.videos.values())}


@dataclass(frozen=True)
class Metadata:
    """The content of `meta`, without statistics.

    Attributes:
        root: the dataset's folder.
        info: the content of info.json.
        tasks: by `task_index`.
        episodes: in the order of their numbers.
    """

    root: Path
    info: Mapping[str, Any]
    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    episodes: Sequence[Episode]

    @property
    def version(self) -> str:
        """`v2.0`, `v2.1` or `v3.0`."""
        return self.info["codebase_version"]

    @property
    def fps(self) -> float:
        """Frames per second as info.json declares them."""
        return float(self.info["fps"])

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """Schemas of the functions that tool calls name; lerobot's own if a dataset with language
        names none, and None without language."""
        has_language = any(feature.dtype == "language" for feature in self.features.values())
        return self.info.get("tools") or ([SAY] if has_language else None)

    @property
    def cameras(self) -> list[str]:
        """Features that are colour images, in the order of info.json."""
        return [name for name, f in self.features.items() if f.is_camera and not f.is_depth]


def read_metadata(root: str | Path) -> Metadata:
    """Read what a dataset's folder says about itself.

    Raises:
        RuntimeError: it is no dataset of a known version, or a file is missing or damaged.
    """
    root = Path(root)
    info = read_json_object(root / INFO, "a LeRobot dataset's information", _REMEDY)
    if (version := info.get("codebase_version")) not in VERSIONS:
        raise RuntimeError(
            f"{root / INFO} says codebase_version {version!r}; {', '.join(VERSIONS)} are read: "
            "convert the dataset with lerobot's scripts"
        )
    try:
        features = {name: _feature(value) for name, value in info["features"].items()}
        if not float(info["fps"]) > 0:
            raise ValueError(f"fps is {info['fps']}, and must be above 0")
        is_whole = version == "v3.0"
        tasks = dict(_tasks_of_table(root) if is_whole else _tasks_of_lines(root))
        videos = [name for name, feature in features.items() if feature.dtype == "video"]
        found = _whole_episodes if is_whole else _split_episodes
        episodes = sorted(found(root, info, videos))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RuntimeError(
            f"the files in {root / 'meta'} contradict version {version} "
            f"({type(error).__name__}: {error}): {_REMEDY}"
        ) from error
    if not episodes:
        raise RuntimeError(f"{root} has no episodes: {_REMEDY}")
    return Metadata(root, info, features, tasks, episodes)


def _feature(value: Mapping[str, Any]) -> Feature:
    info = value.get("info") or value.get("video_info") or {}
    return Feature(value["dtype"], tuple(int(size) for size in value["shape"]), info)


def _tasks_of_lines(root: Path) -> Iterator[tuple[int, str]]:
    for line in lines(root / "meta" / "tasks.jsonl"):
        yield int(line["task_index"]), line["task"]


def _tasks_of_table(root: Path) -> Iterator[tuple[int, str]]:
    table = _table(root / "meta" / "tasks.parquet", lambda name: True)
    rows = table.to_pylist()
    texts = [n for n in table.column_names if all(isinstance(row[n], str) for row in rows)]
    # lerobot takes pandas' index, which its versions name differently.
    index = (table.schema.pandas_metadata or {}).get("index_columns", ())
    found = [name for name in (*index, "task", "__index_level_0__") if name in texts]
    if not found and len(texts) != 1:
        raise ValueError(
            f"tasks.parquet has the columns of texts {', '.join(texts) or 'none'}: name that of "
            "the tasks 'task'"
        )
    for row in rows:
        yield int(row["task_index"]), row[(found or texts)[0]]


def _split_episodes(
    root: Path, info: Mapping[str, Any], videos: Sequence[str]
) -> Iterator[Episode]:
    """Episodes of version 2, whose global rows follow from their lengths."""
    start = 0
    listed = lines(root / "meta" / "episodes.jsonl")
    for line in sorted(listed, key=lambda line: line["episode_index"]):
        number, length = int(line["episode_index"]), int(line["length"])
        place = {"episode_chunk": number // info["chunks_size"], "episode_index": number}
        files = {name: (info["video_path"].format(**place, video_key=name), 0.0) for name in videos}
        extra = {name: value for name, value in line.items() if name not in _OWN}
        file = info["data_path"].format(**place)
        yield Episode(number, start, length, tuple(line["tasks"]), file, 0, files, extra)
        start += length


def _whole_episodes(
    root: Path, info: Mapping[str, Any], videos: Sequence[str]
) -> Iterator[Episode]:
    """Episodes of version 3, whose rows say where they lie."""

    def place(row: Mapping[str, Any], what: str) -> dict[str, int]:
        return {name: row[f"{what}/{name}"] for name in ("chunk_index", "file_index")}

    tables = sorted((root / "meta" / "episodes").glob("*/*.parquet"))
    if not tables:
        raise ValueError(f"there is no Parquet file in {root / 'meta' / 'episodes'}")
    rows = [
        row
        for table in tables
        for row in _table(table, lambda name: not name.startswith("stats/")).to_pylist()
    ]
    files = [info["data_path"].format(**place(row, "data")) for row in rows]
    for (file, first), row in zip(_data_places(root, rows, files), rows, strict=True):
        start, length = row["dataset_from_index"], int(row["length"])
        if row["dataset_to_index"] - start != length:
            raise ValueError(
                f"episode {row['episode_index']} has length {length}, but rows {start} to "
                f"{row['dataset_to_index']}"
            )
        places = {
            name: (
                info["video_path"].format(video_key=name, **place(row, f"videos/{name}")),
                float(row[f"videos/{name}/from_timestamp"]),
            )
            for name in videos
        }
        extra = {name: each for name, each in row.items() if "/" not in name and name not in _OWN}
        tasks = tuple(row["tasks"])
        yield Episode(row["episode_index"], start, length, tasks, file, first, places, extra)


def _data_places(
    root: Path, rows: Sequence[Mapping[str, Any]], named: Sequence[str]
) -> Iterator[tuple[str, int]]:
    """File and first row of every episode, from the files that the rows name.

    lerobot 0.4 converts version 2.1 so that the first episode of each further file is named as one
    of the file before. Its reader sees all files as one table, in the order of their paths; so does
    this where the named files cannot have what is said to be in them.
    """
    starts: dict[str, int] = {}
    said: Counter[str] = Counter()
    for file, row in zip(named, rows, strict=True):
        start = row["dataset_from_index"]
        starts[file] = min(start, starts.get(file, start))
        said[file] += row["length"]
    found = {}
    for path in sorted((root / "data").glob("*/*.parquet")):
        # A damaged file is refused when its episodes are read.
        with suppress(RuntimeError), _opened(path) as opened:
            found[path.relative_to(root).as_posix()] = opened.metadata.num_rows
    if found != said and sum(found.values()) == max(row["dataset_to_index"] for row in rows):
        paths, firsts = [*found], [0, *accumulate(found.values())]
        for row in rows:
            start = row["dataset_from_index"]
            number = bisect_right(firsts, start) - 1
            yield paths[number], start - firsts[number]
        return
    for file, row in zip(named, rows, strict=True):
        yield file, row["dataset_from_index"] - starts[file]


def lines(file: Path) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a file.

    Raises:
        RuntimeError: it does not exist, or a line is broken.
    """
    found = []
    # A line of statistics has several numbers per channel and feature.
    for number, _, line in bounded_lines(file, 64 * MAX_LINE_BYTES):
        try:
            found.append(parse_object(line, "an entry", finite=False))
        except BadSampleError as error:
            raise RuntimeError(f"{file}:{number}: {error.reason}") from error
    return found


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with (
        reading_table(file, f"{file} cannot be read", RuntimeError) as arrow,
        arrow.parquet.ParquetFile(file) as opened,
    ):
        yield opened


def _table(file: Path, is_wanted: Callable[[str], bool]) -> Any:
    """The wanted columns of a small table."""
    with _opened(file) as opened:
        return opened.read([name for name in opened.schema_arrow.names if is_wanted(name)])
