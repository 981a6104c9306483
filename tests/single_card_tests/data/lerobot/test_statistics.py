"""Statistics of LeRobot datasets.

Guarantees: computed ones are NumPy's over all frames, quantiles included, with one process or
several, of images and depth too; a file is never replaced unless asked; datasets are read with the
computed ones where there are any; numbers that are not finite are refused with their place.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.cli.main import main
from paddle_vl.data.lerobot import statistics as module
from paddle_vl.data.lerobot.dataset import LeRobotDataset
from paddle_vl.data.lerobot.metadata import read_metadata
from paddle_vl.data.lerobot.statistics import (
    QUANTILES,
    has_recomputed,
    image_statistics,
    recomputed_statistics,
    statistics,
    stored_statistics,
)
from tests.support.robot_files import CAMERA, write_lerobot

DATA = Path(__file__).parents[3] / "data" / "lerobot"


def of_numpy(values, axis, scale=1.0) -> dict[str, np.ndarray]:
    values = values.astype(np.float64) * scale
    found = {"min": values.min(axis), "max": values.max(axis), "mean": values.mean(axis)}
    found["std"] = values.std(axis)
    return found | {stat: np.quantile(values, share, axis) for stat, share in QUANTILES.items()}


def assert_equal(found, wanted, shape, count) -> None:
    assert found["count"].tolist() == [count]
    for stat, values in wanted.items():
        assert found[stat].shape == tuple(shape), stat
        np.testing.assert_allclose(found[stat].ravel(), np.ravel(values), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_statistics_are_those_of_all_frames(num_workers, monkeypatch):
    monkeypatch.setattr(module, "_FRAMES_AT_ONCE", 4)
    dataset = LeRobotDataset(DATA / "v30_l06_depth")
    items = [dataset[number] for number in range(len(dataset))]
    found = recomputed_statistics(dataset, num_workers=num_workers)
    for name in ("observation.state", "action", "timestamp", "index"):
        values = np.stack([item[name] for item in items])
        # Quantiles are selected, not computed from sums.
        for stat, share in QUANTILES.items():
            wanted = np.quantile(values.astype(np.float64), share, axis=0)
            np.testing.assert_array_equal(found[name][stat].ravel(), np.ravel(wanted))
        assert_equal(found[name], of_numpy(values, 0), dataset.features[name].shape, 24)
    camera = "observation.images.front"
    images = np.stack([item[camera] for item in items])
    assert_equal(found[camera], of_numpy(images, (0, 1, 2), 1 / 255), (3, 1, 1), 24)
    for camera, scale in (("observation.images.depth", 1e-3), ("observation.images.depth_mm", 1)):
        images = np.stack([item[camera] for item in items])
        assert_equal(found[camera], of_numpy(images, None, scale), (1, 1, 1), 24)
    assert "note" not in found


def test_quantiles_of_images_lie_between_levels():
    """Which are 0, 0, 2 and 3 times 0.5."""
    found = image_statistics(np.array([[2, 0, 1, 1]]), np.arange(4) / 2, 1)
    wanted = of_numpy(np.array([0, 0, 1, 1.5]), 0)
    assert_equal(found, wanted, (1, 1, 1), 1)


def test_signs_and_equal_values_are_ordered(tmp_path):
    values = np.random.default_rng(1).choice([-2.5, -0.0, 0.0, 1e-30, -1e30, 7.0], 40)
    root = write_lerobot(tmp_path, (25, 15), columns={"next.reward": values.astype(np.float32)})
    found = recomputed_statistics(LeRobotDataset(root), with_images=False)
    for stat, share in QUANTILES.items():
        wanted = np.quantile(values.astype(np.float32).astype(np.float64), share)
        assert found["next.reward"][stat].tolist() == [wanted]
    assert CAMERA not in found


def test_computed_statistics_take_precedence_and_are_not_replaced(tmp_path, capsys):
    root = tmp_path / "data"
    shutil.copytree(DATA / "v21_video", root)
    metadata = read_metadata(root)
    stored = stored_statistics(metadata)
    assert statistics(metadata).keys() == stored.keys()
    assert "q01" not in stored["action"]
    command = ["compute-stats", str(root), "--no-images"]
    assert main(command) == 0
    assert has_recomputed(metadata)
    found = statistics(metadata)
    assert found["action"]["q01"][0] == -1.0
    np.testing.assert_allclose(found["action"]["mean"], stored["action"]["mean"], rtol=1e-5)
    np.testing.assert_equal(found[CAMERA], stored[CAMERA])
    assert main(command) == 1
    assert (
        "recomputed_stats.json is there already: choose another --output" in capsys.readouterr().err
    )
    assert main([*command, "--overwrite"]) == 0
    assert main([*command, "--output", str(tmp_path / "stats.json")]) == 0
    assert (tmp_path / "stats.json").read_text() == (root / module.RECOMPUTED).read_text()


def test_statistics_of_depth_have_all_digits_of_lerobots(tmp_path):
    """lerobot 0.6.1 multiplies by 1 / 1000, and leaves alone what has no unit."""
    shutil.copytree(DATA / "v30_l06_depth" / "meta", tmp_path / "meta")
    name, info, stats = (
        "observation.images.depth_mm",
        *(tmp_path / "meta" / file for file in ("info.json", "stats.json")),
    )
    values = json.loads(stats.read_text())
    values[name]["mean"] = [[[2680.4594168526787]]]
    stats.write_text(json.dumps(values))
    assert stored_statistics(read_metadata(tmp_path), "m")[name]["mean"] == 2.680459416852679
    assert stored_statistics(read_metadata(tmp_path), "mm")[name]["mean"] == 2680.4594168526787
    info.write_text(info.read_text().replace('"depth_unit"', '"unit"'))
    assert stored_statistics(read_metadata(tmp_path), "m")[name]["mean"] == 2680.4594168526787


def test_damaged_statistics_are_named_and_missing_ones_are_none(tmp_path):
    shutil.copytree(DATA / "v21_video" / "meta", tmp_path / "meta")
    metadata, file = read_metadata(tmp_path), tmp_path / module.STATS_OF_EPISODES
    file.write_text(file.read_text().replace('"count"', '"counts"', 1))
    with pytest.raises(RuntimeError, match="episodes_stats.jsonl has no statistics .*'count'"):
        statistics(metadata)
    file.unlink()
    assert statistics(metadata) == {}
    (tmp_path / module.RECOMPUTED).write_text('{"action": 3}')
    with pytest.raises(
        RuntimeError, match="recomputed_stats.json has no statistics .*compute-stats"
    ):
        statistics(metadata)


def test_numbers_that_are_not_finite_are_named(tmp_path):
    rewards = np.array([0, 1, 2, np.nan], np.float32)
    root = write_lerobot(tmp_path, (2, 2), columns={"next.reward": rewards})
    with pytest.raises(
        ValueError, match="frame 1: 'next.reward' holds nan: correct it, or.*excluded"
    ):
        recomputed_statistics(LeRobotDataset(root), with_images=False)
