"""Recorded experts as a LeRobot dataset.

Guarantees: tables, types and statistics are LeRobot 3.0's; seeds are recorded and never those of
evaluations; failures are left out; noise disturbs what is executed, not what is recorded.
"""

import io
import json

import numpy as np
import pytest
from PIL import Image

from make_metaworld_demos import DatasetWriter, chunks_of, record
from paddle_vl.simulation.environment import FIRST_UNSEEN_SEED
from tests.single_card_tests.simulation.standin import PointRobot

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def recordings():
    return list(record(PointRobot(), 3, 7, 0.0))


@pytest.fixture(scope="module")
def written(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "demos"
    writer = DatasetWriter(folder, 28)
    for number, recording in enumerate(recordings):
        writer.add(recording._replace(prompt=f"task {number % 2}"))
    writer.finish({"tasks": ["point"]})
    return folder


def test_frames_are_those_of_the_episodes(written, recordings):
    file = pq.ParquetFile(written / "data/chunk-000/file-000.parquet")
    assert file.num_row_groups == 3
    columns = file.read().to_pydict()
    lengths = [len(recording.images) for recording in recordings]
    assert columns["episode_index"] == np.repeat([0, 1, 2], lengths).tolist()
    assert columns["task_index"] == np.repeat([0, 1, 0], lengths).tolist()
    assert columns["index"] == list(range(sum(lengths)))
    places = np.concatenate([np.arange(length) for length in lengths])
    assert columns["frame_index"] == places.tolist()
    assert columns["timestamp"] == (places / 20).astype(np.float32).tolist()
    for name, values in (("observation.state", "states"), ("action", "actions")):
        assert str(file.schema_arrow.field(name).type) == "fixed_size_list<element: float>[4]"
        given = np.concatenate([getattr(recording, values) for recording in recordings])
        assert np.array_equal(columns[name], given)
    images = [image for recording in recordings for image in recording.images]
    for stored, image in zip(columns["observation.image"], images, strict=True):
        assert np.array_equal(Image.open(io.BytesIO(stored["bytes"])), image)


def test_the_folder_meta_describes_them(written, recordings):
    info = json.loads((written / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert info["fps"] == 20
    assert (info["total_episodes"], info["total_tasks"], info["splits"]) == (3, 2, {"train": "0:3"})
    assert info["features"]["observation.image"]["shape"] == [28, 28, 3]
    tasks = pq.read_table(written / "meta/tasks.parquet")
    assert tasks.to_pydict() == {"task_index": [0, 1], "task": ["task 0", "task 1"]}
    assert tasks.to_pandas().index.name == "task"
    rows = pq.read_table(written / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    lengths = [len(recording.images) for recording in recordings]
    assert [row["length"] for row in rows] == lengths
    assert [row["dataset_from_index"] for row in rows] == [0, lengths[0], sum(lengths[:2])]
    assert json.loads((written / "meta/metaworld.json").read_text())["seeds"] == [7, 8, 9]


def test_statistics_are_those_of_all_values(written, recordings):
    stats = json.loads((written / "meta/stats.json").read_text())
    actions = np.concatenate([recording.actions for recording in recordings]).astype(np.float64)
    found = {name: np.array(value) for name, value in stats["action"].items()}
    assert np.allclose(found["std"], actions.std(axis=0), rtol=1e-12)
    assert np.allclose(found["q99"], np.quantile(actions, 0.99, axis=0), rtol=1e-12)
    assert found["count"].tolist() == [len(actions)]
    pixels = np.concatenate([recording.images for recording in recordings]).reshape(-1, 3) / 255
    image = {name: np.array(value) for name, value in stats["observation.image"].items()}
    assert image["mean"].shape == (3, 1, 1)
    assert image["count"].tolist() == [len(actions)]
    assert np.allclose(image["mean"].ravel(), pixels.mean(axis=0), rtol=1e-9)
    assert np.allclose(image["std"].ravel(), pixels.std(axis=0), rtol=1e-9)
    assert np.array_equal(image["max"].ravel(), pixels.max(axis=0))
    assert np.array_equal(image["q99"].ravel(), np.quantile(pixels, 0.99, axis=0))
    rows = pq.read_table(written / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert np.array_equal(rows[1]["stats/action/max"], recordings[1].actions.max(axis=0))


def test_noise_disturbs_what_is_executed_not_what_is_recorded(recordings):
    noisy = next(record(PointRobot(), 1, 7, 0.5))
    quiet = recordings[0]
    assert np.array_equal(noisy.states[0], quiet.states[0])
    assert np.array_equal(noisy.actions[0], quiet.actions[0])
    assert not np.array_equal(noisy.states[1], quiet.states[1])
    # The gripper's value is not disturbed.
    assert noisy.states[1][3] == quiet.states[1][3]


def test_failures_are_left_out_and_seeds_of_evaluations_refused():
    class Clumsy(PointRobot):
        def reset(self, seed):
            self.fails = seed % 2 == 0
            return super().reset(seed)

        def expert_action(self):
            return super().expert_action() * (not self.fails)

    assert [one.seed for one in record(Clumsy(), 2, 10, 0.0)] == [11, 13]
    with pytest.raises(ValueError, match=f"seeds from {FIRST_UNSEEN_SEED} on are for evaluations"):
        list(record(PointRobot(), 3, FIRST_UNSEEN_SEED - 2, 0.0))


def test_a_chunk_repeats_the_last_action_behind_the_end():
    found = chunks_of(np.array([[1.0], [2.0], [3.0]]), 2)
    assert [chunk.ravel().tolist() for chunk in found] == [[1, 2], [2, 3], [3, 3]]
