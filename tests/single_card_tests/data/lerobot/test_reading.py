"""Reading LeRobot datasets.

Guarantees: datasets that lerobot wrote give its values, bit for bit; frames of all versions and of
several files are found in any order, from long groups of pictures, with few files open and few
blocks in memory, in a worker too; episodes are chosen; what is wrong is refused with folder,
episode, frame, value and remedy.
"""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lerobot import tables, videos
from paddle_vl.data.lerobot.dataset import LeRobotDataset
from paddle_vl.data.lerobot.language import PERSISTENT, active_row
from paddle_vl.data.lerobot.metadata import read_metadata
from tests.support.recorded_lerobot import differences
from tests.support.robot_files import CAMERA, level, write_lerobot, write_levels

DATA = Path(__file__).parents[3] / "data" / "lerobot"
NAMES = ("v21_video", "v30_l06_depth", "v30_l06_language")
LENGTHS = (9, 5, 1, 12, 6)


@pytest.fixture(scope="module", params=["v2.0", "v3.0"])
def folder(request, tmp_path_factory) -> Path:
    return write_lerobot(tmp_path_factory.mktemp(request.param), LENGTHS, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_lerobot(name):
    expected = json.loads((DATA / f"{name}.expected.json").read_text(encoding="utf-8"))
    assert list(differences(DATA / name, expected)) == []


def test_a_value_that_differs_is_told():
    expected = json.loads((DATA / f"{NAMES[0]}.expected.json").read_text(encoding="utf-8"))
    expected["frames"][1]["action"][2] += 0.1
    (found,) = differences(DATA / NAMES[0], expected)
    assert found.startswith("frame 8: action is")


def assert_is_frame(item, index, episode) -> None:
    assert (item["index"], item["episode_index"]) == (index, episode)
    np.testing.assert_array_equal(item["observation.state"], [index, episode])
    np.testing.assert_array_equal(item["action"], [index + 0.5, -index])
    assert item["task"] == ("push", "pull")[episode % 2]
    assert abs(item[CAMERA].astype(int) - level(index)).max() <= 3


def test_frames_are_found_in_any_order_with_bounded_memory(folder, monkeypatch):
    for module, name, value in (
        (tables, "_BLOCK_BYTES", 100), (tables, "_MOST_BYTES", 1000), (tables, "_MOST_OPEN", 2),
        (videos, "_MOST_OPEN", 1), (videos, "_NEAR_FRAMES", 2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(tables, "_blocks", tables._Blocks())
    for used in (tables._files, videos._open):
        used.clear()
    dataset = LeRobotDataset(folder)
    owners = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    order = np.random.default_rng(0).permutation(len(dataset))
    for index in [*order, *range(len(dataset))]:
        assert_is_frame(dataset[int(index)], index, owners[index])
    held = tables._blocks
    assert held.size == sum(block.nbytes for block in held.kept.values()) <= 1000
    assert len(held.kept) >= 2
    assert (len(videos._open), len(tables._files)) == (1, 2)
    assert_is_frame(pickle.loads(pickle.dumps(dataset))[20], 20, 3)


def test_the_nearest_frame_is_found_within_any_tolerance(tmp_path):
    """As lerobot 0.4.4 takes it, in any order of reading; frames are 0.1 s apart."""
    dataset = LeRobotDataset(write_lerobot(tmp_path, (9, 5)), tolerance_s=0.25)
    for index in [*np.random.default_rng(0).permutation(14), *range(14), *range(13, -1, -1)]:
        assert_is_frame(dataset[int(index)], index, int(index >= 9))
    file, times = tmp_path / V3_VIDEO.replace("001", "000"), [1.36, 0.14, 0.16, 0.24, 0.06, 0.0]
    for asked in (times, *([time] for time in times)):
        nearest = [level(min(round(10 * time), 13)) for time in asked]
        found = [frame.mean() for frame in videos.read_frames(file, asked, 0.25)]
        np.testing.assert_allclose(found, nearest, atol=3)
    with pytest.raises(BadSampleError, match=r"set tolerance_s above the 0\.04 s that are missed$"):
        videos.read_frames(file, [1.34], 0.01)
    # Further than half a frame it would be another one.
    with pytest.raises(BadSampleError, match=r"nearest is at 1\.3\).*\(excluded_episodes\)$"):
        videos.read_frames(file, [1.36], 0.01)


def test_the_rounding_of_float32_is_no_contradiction(tmp_path):
    """36,000 frames at 30 per second last 1,200 s, whose float32 stamps are 0.12 ms apart. lerobot
    0.4.4 reads them, comparing in float32."""
    stamps = np.float32(np.arange(35_900, 36_000) / 30)
    assert abs(np.diff(stamps.astype(np.float64)) - 1 / 30).max() > 1e-4
    root = write_lerobot(tmp_path / "a", (100,), fps=30, timestamps=stamps)
    assert LeRobotDataset(root).window(50, {"index": [0.0]})["index"] == 50
    stamps[50] += 4e-4
    # Of stamps since 1970 float32 keeps minutes.
    for wrong, frame in ((stamps, 50), (np.float32(stamps + 1.7e9), 1)):
        root = write_lerobot(tmp_path / f"b{frame}", (100,), fps=30, timestamps=wrong)
        with pytest.raises(BadSampleError, match=f"frame {frame} of episode 0"):
            LeRobotDataset(root)[0]
    times = np.float32([0, 10_000.1, 10_000.2, 10_000.3])
    file = write_levels(tmp_path / "a.mp4", range(0, 160, 40), 10, times=times.tolist())
    assert abs(float(times[1]) - 10_000.1) > 3e-4
    for asked in (times[1:], times[[2]]):
        found = [frame.mean() for frame in videos.read_frames(file, asked.tolist(), 1e-4)]
        np.testing.assert_allclose(found, [40, 80, 120] if len(asked) > 1 else [80], atol=3)


EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def named_too_low(root: Path) -> None:
    """As lerobot 0.4.4 converts version 2.1: with the first episode of each further file."""
    rows = pq.read_table(root / EPISODES).to_pylist()
    keys = ("data/chunk_index", "data/file_index")
    places = [[row[key] for key in keys] for row in rows]
    for before, place, row in zip(places, places[1:], rows[1:], strict=False):
        if before != place:
            row.update(zip(keys, before, strict=True))
    pq.write_table(pa.Table.from_pylist(rows), root / EPISODES)


def numbered_one_higher(root: Path) -> None:
    """As it writes files for episodes that each reach the size of a file."""
    files = sorted((root / "data").glob("*/*.parquet"), reverse=True)
    for file, target in zip(
        files, [root / "data/chunk-001/file-001.parquet", *files], strict=False
    ):
        file.rename(target)


@pytest.mark.parametrize(
    ("spoil", "per_file"), [(named_too_low, 2), (named_too_low, 1), (numbered_one_higher, 2)]
)
def test_files_of_lerobots_converter_are_read_as_one_table(spoil, per_file, tmp_path):
    """lerobot 0.4.4 concatenates the files in the order of their paths when it reads."""
    root = write_lerobot(tmp_path, LENGTHS[: 2 * per_file + 1], episodes_per_file=per_file)
    right = [(each.file, each.first_row) for each in read_metadata(root).episodes]
    spoil(root)
    dataset = LeRobotDataset(root)
    if spoil is named_too_low:
        assert [(each.file, each.first_row) for each in dataset.episodes] == right
    assert all(dataset.file_sizes().values())
    for index in (0, 8, 9, 13, 14):
        assert_is_frame(dataset[index], index, np.searchsorted(np.cumsum(LENGTHS), index, "right"))


def test_a_row_group_is_read_in_blocks_and_not_kept(tmp_path, monkeypatch):
    """Converted datasets have a row group per file."""
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 1 << 18)
    monkeypatch.setattr(tables, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(tables, "_blocks", tables._Blocks())
    values = np.random.default_rng(0).bytes(16 << 20)
    rows = [values[start : start + 4096] for start in range(0, len(values), 4096)]
    file = tmp_path / "one.parquet"
    pq.write_table(pa.table({"a": rows}), file, data_page_size=1 << 16, write_batch_size=16)
    assert pq.read_metadata(file).num_row_groups == 1
    before = pa.total_allocated_bytes()
    for row in (len(rows) - 1, 0, 1000):
        assert tables.read_rows(file, ("a",), row, 1)["a"][0].as_py() == rows[row]
    assert pa.total_allocated_bytes() - before < 3 << 20


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    dataset = LeRobotDataset(write_lerobot(tmp_path, (4, 3)))
    assert_is_frame(dataset[5], 5, 1)
    write_lerobot(
        tmp_path, (4, 3), columns={"action": pa.array([[float(i), 0.0] for i in range(7)])}
    )
    assert dataset[5]["action"][0] == 5


def test_windows_are_clipped_to_the_episode_and_marked(folder):
    dataset = LeRobotDataset(folder)
    deltas = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.2, 0.0], CAMERA: [-0.1, 0.1]}
    window = dataset.window(13, deltas)
    np.testing.assert_array_equal(window["action"][:, 0], [13.5, 13.5, 13.5])
    assert window["action_is_pad"].tolist() == [False, True, True]
    np.testing.assert_array_equal(window["observation.state"][:, 0], [11, 13])
    assert abs(window[CAMERA].mean(axis=(1, 2, 3)) - [level(12), level(13)]).max() <= 3
    assert window[f"{CAMERA}_is_pad"].tolist() == [False, True]
    with pytest.raises(ValueError, match=r"0\.25 s is no multiple of 1/10 s"):
        dataset.window(0, {"action": [0.1, 0.25]})


def test_episodes_are_chosen(folder):
    dataset = LeRobotDataset(folder, episodes=[3, 0, 4], excluded_episodes=[0])
    assert [dataset[i]["index"] for i in (0, 11, 12)] == [15, 26, 27]
    assert dataset.place(12) == f"{folder}: episode 4, frame 0"
    for wrong, message in (({"episodes": [7]}, "no episodes \\[7\\]: it has 5, from 0 to 4"),
                           ({"excluded_episodes": range(5)}, "no episode is left")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            LeRobotDataset(folder, **wrong)


def test_language_rows_hold_from_their_time_on():
    dataset = LeRobotDataset(DATA / "v30_l06_language")
    rows = dataset[0][PERSISTENT]
    assert active_row(rows, "subtask", 0.2)["content"] == "move to the mark"
    assert active_row(rows, "subtask", 0.25)["content"].startswith("stop on the mark")
    assert active_row(rows, "motion", 0.0) is None
    assert dataset.metadata.tools[0]["function"]["name"] == "say"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


V3_DATA, V3_VIDEO = "data/chunk-000/file-001.parquet", f"videos/{CAMERA}/chunk-000/file-001.mp4"
BAD = {
    "cut Parquet": (lambda root: cut(root / V3_DATA), f"{V3_DATA} cannot be read.*fetch"),
    "cut video": (lambda root: cut(root / V3_VIDEO), f"{V3_VIDEO}: the file cannot be decoded"),
    "no Parquet": (lambda root: (root / V3_DATA).unlink(), f"there is no file .*{V3_DATA}"),
    "no video": (lambda root: (root / V3_VIDEO).unlink(), f"there is no file .*{V3_VIDEO}"),
    "no column": (
        lambda root: pq.write_table(
            pq.read_table(root / V3_DATA).drop_columns("action"), root / V3_DATA
        ),
        f"{V3_DATA} has no column action, which info.json lists",
    ),
    "other rows": (
        lambda root: shutil.copy(root / "data/chunk-000/file-000.parquet", root / V3_DATA),
        "has episode_index 0 in row 1, where frame 0 of episode 3 must be",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_broken_files_are_named(fault, tmp_path):
    root = write_lerobot(tmp_path, LENGTHS)
    spoil, message = BAD[fault]
    spoil(root)
    dataset = LeRobotDataset(root)
    assert_is_frame(dataset[3], 3, 0)
    with pytest.raises(BadSampleError, match=f"^{root}: episode 3, frame 5: .*({message})"):
        dataset[20]
    absent = [file for file, size in dataset.file_sizes().items() if not size]
    assert absent == {"no Parquet": [V3_DATA], "no video": [V3_VIDEO]}.get(fault, [])


def test_timestamps_must_follow_the_declared_or_the_stated_rate(tmp_path):
    # Written at 20 Hz, and declared as 10.
    stamps = [frame / 20 for length in (6, 4) for frame in range(length)]
    root = write_lerobot(tmp_path / "a", (6, 4), timestamps=stamps)
    with pytest.raises(BadSampleError, match=r"episode 1, frame 2: .*0\.05 s after the one before"):
        LeRobotDataset(root)[8]
    assert LeRobotDataset(root, fps=20).window(0, {"action": [0.05]})["action"][0, 0] == 1.5
    unchecked = LeRobotDataset(root, skip_timestamp_check=True)
    assert unchecked.window(9, {"action": [0.0]})["action"][0, 0] == 9.5
    # The timestamps follow a declared rate that is wrong.
    root = write_lerobot(tmp_path / "b", (6,))
    frames = LeRobotDataset(root, fps=20).window(1, {CAMERA: [0.05]})[CAMERA]
    assert abs(frames.mean() - level(2)) <= 3
    stamps[3] += 2e-4
    root = write_lerobot(tmp_path / "c", (6, 4), timestamps=np.multiply(stamps, 2))
    with pytest.raises(BadSampleError, match="frame 3 of episode 0"):
        LeRobotDataset(root)[0]
    assert LeRobotDataset(root, tolerance_s=1e-3).window(0, {"index": [0.1]})["index"] == 1


def test_a_video_without_the_wanted_frames_is_named(tmp_path):
    root = write_lerobot(tmp_path, (6, 4))
    file = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[1][f"videos/{CAMERA}/from_timestamp"] += 0.75
    pq.write_table(pa.Table.from_pylist(rows), file)
    dataset = LeRobotDataset(root)
    with pytest.raises(
        BadSampleError, match=r"no frame at 1\.35 s \(within 0\.0001 s; the nearest"
    ):
        dataset[6]
    assert_is_frame(dataset[5], 5, 0)


PANDAS = {"pandas": json.dumps({"index_columns": ["label"]})}


@pytest.mark.parametrize(
    ("columns", "metadata"),
    [
        ({"task": "tasks", "note": "notes"}, None),
        ({"note": "notes", "__index_level_0__": "tasks"}, None),
        ({"task": "notes", "label": "tasks"}, PANDAS),
        ({"what": "tasks", "success_rate": "numbers", "nothing": "nulls"}, None),
    ],
)
def test_further_columns_of_tasks_are_passed_over(columns, metadata, tmp_path):
    """lerobot 0.4.4 takes the index of pandas, and ignores other columns."""
    root = write_lerobot(tmp_path, (3,))
    values = {
        "tasks": ["push", "pull"],
        "notes": ["a", "b"],
        "numbers": [0.5, 1],
        "nulls": [None] * 2,
    }
    table = pa.table({n: values[kind] for n, kind in columns.items()} | {"task_index": [0, 1]})
    pq.write_table(table.replace_schema_metadata(metadata), root / "meta" / "tasks.parquet")
    assert read_metadata(root).tasks == {0: "push", 1: "pull"}
    table = table.drop_columns([*columns]).append_column("a", [values["notes"]])
    table = table.append_column("b", [values["notes"]])
    pq.write_table(table, root / "meta" / "tasks.parquet")
    with pytest.raises(RuntimeError, match="the columns of texts a, b: name that of the tasks"):
        read_metadata(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version 'v1.6'; v2.0, v2.1, v3.0 are read"),
        ({"fps": 0}, "fps is 0, and must be above 0"),
        ({"features": {"a": {}}}, "contradict version v3.0 .*dtype"),
    ],
)
def test_a_broken_description_is_named(change, message, tmp_path):
    root = write_lerobot(tmp_path, (3,))
    file = root / "meta" / "info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change), encoding="utf-8")
    with pytest.raises(RuntimeError, match=message):
        LeRobotDataset(root)
