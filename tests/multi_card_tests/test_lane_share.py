"""Ranks of a data lane decode each sample once.

Guarantees, for training, evaluation and its questions, over tensor-parallel ranks and stages, and
where an encoder serves several lanes: one rank of each lane decodes its samples, all ranks together
as many images as one device, and the other ranks map the bytes that the readers wrote; where ranks
encode different items, each hands those of its own to its device, and later stages none; ranks
of another machine read for themselves, with the same results; a bad sample ends all ranks with its
message.
"""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lane_share import LaneShare
from paddle_vl.families.vlm.inputs import image_processor
from paddle_vl.families.vlm.training.own_pixels import PIXELS
from paddle_vl.train import lanes
from paddle_vl.train.build import build_trainer
from paddle_vl.train.feeding.feed import BatchFeed
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.finished_runs import assert_equal_runs, assert_same_answers
from tests.support.launch import launch
from tests.support.topology_runs import CP, DAMPED, GLOBAL_BATCH, PP, SP, batch_settings

TOPOLOGIES = {
    "mp2 pp2": ["parallel.mp_degree=2", *PP, *SP],
    "cp2 mp2": ["parallel.mp_degree=2", *CP, *SP, "data.pad_to_multiple_of=4"],
    "dp2 pp2, an encoder of all ranks": [
        *("parallel.dp_degree=2", *PP, "parallel.schedule=colocated"),
        *("parallel.encoder.mp_degree=4", "model.config.vision_config.num_heads=4"),
        "model.config.vision_config.hidden_size=16",
    ],
}


class Counts(NamedTuple):
    """What a rank of a data lane has done: images decoded, bytes of pixels handed to its device in
    training, and bytes shared as a reader or not."""

    lane: int
    images: int
    pixels: int
    shared: Counter


def decode(
    run_file: str, output_dir: str, overrides: list[str], ranks_per_machine: int = 4
) -> Counts:
    """A training; ranks of different machines share no memory."""
    number = int(os.environ.get("PADDLE_TRAINER_ID", 0)) // ranks_per_machine
    lanes.machine = lambda: f"machine {number}"
    counts, bytes_of = Counter(), Counter()
    load_rgb, share_made = image_processor.load_rgb, LaneShare.made
    next_step = BatchFeed.next_step

    def taken(feed):
        fed = next_step(feed)
        for batch in fed.micro_batches:
            given = [batch[name] for name in (*PIXELS, "own_patches") if name in batch]
            counts["pixels"] += sum(4 * int(each.size) for each in given)
        return fed

    def counted(source):
        counts["images"] += 1
        return load_rgb(source)

    def made(share, *arguments):
        before = share.num_bytes
        try:
            return share_made(share, *arguments)
        finally:
            bytes_of[share.reader, share.reads] += share.num_bytes - before

    image_processor.load_rgb, LaneShare.made = counted, made
    BatchFeed.next_step = taken
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    trainer = build_trainer(config)
    trainer.run()
    return Counts(trainer.ranks.data_rank, counts["images"], counts["pixels"], bytes_of)


def settings(run_file: Path, num_lanes: int) -> list[str]:
    return [
        *batch_settings(num_lanes),
        *(f"data.eval=[{run_file.with_name('test.jsonl')}]", "train.eval={max_new_tokens: 2}"),
        *("train.eval_steps=2", "train.per_device_eval_batch_size=1", "train.save_steps=null"),
        "train.max_steps=2",
    ]


def launched(
    worker: Callable, ranks: int, run_file: Path, output_dir: Path, overrides: list[str], *more: int
) -> list[Any]:
    arguments = (str(run_file), str(output_dir), overrides, *more)
    return launch(worker, ranks, arguments=arguments, timeout=300)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_one_rank_of_each_lane_decodes_what_one_device_does(name, tmp_path):
    run_file, topology = write_tiny_run(tmp_path / "run", 24), TOPOLOGIES[name]
    num_lanes = 2 if "dp2" in name else 1
    overrides = [*settings(run_file, num_lanes), *topology]
    ranks = launched(decode, 4, run_file, tmp_path / "out", overrides)
    by_lane = [[each.images for each in ranks if each.lane == lane] for lane in range(num_lanes)]
    assert [sum(images > 0 for images in lane) for lane in by_lane] == [1] * num_lanes
    (one,) = launched(decode, 1, run_file, tmp_path / "one", settings(run_file, 1))
    assert sum(map(max, by_lane)) == one.images >= 2 * 2 * GLOBAL_BATCH
    pixels = [each.pixels for each in ranks]
    if "encoder" not in name:
        encoders = 2 if "pp2" in name else 4
        # Images are of one size, and as many as divide by the ranks.
        assert pixels == [one.pixels // encoders] * encoders + [0] * (4 - encoders)
    total = sum((each.shared for each in ranks), Counter())
    assert sum(reads for _, reads in total) == num_lanes
    takers = 4 // num_lanes if "encoder" not in name else 4
    for (reader, reads), num_bytes in total.items():
        assert not reads or total[reader, False] == (takers - 1) * num_bytes > 0


def test_each_machine_reads_for_itself(tmp_path):
    run_file = write_tiny_run(tmp_path / "run", 24)
    alone = [*settings(run_file, 1), *DAMPED, "train.save_steps=2"]
    overrides = [*alone, "parallel.mp_degree=2", *PP, *SP]
    ranks = launched(decode, 4, run_file, tmp_path / "out", overrides, 2)
    (one,) = launched(decode, 1, run_file, tmp_path / "one", alone)
    assert [each.images for each in ranks if each.images] == [one.images] * 2
    assert not any(each.pixels for each in ranks[2:])
    assert_equal_runs(tmp_path / "out", tmp_path / "one", "checkpoint-2")
    assert_same_answers(tmp_path / "out", tmp_path / "one")


def fails(run_file: str, output_dir: str, overrides: list[str], ranks_per_machine: int) -> str:
    with pytest.raises(BadSampleError) as caught:
        decode(run_file, output_dir, overrides, ranks_per_machine)
    return str(caught.value)


@pytest.mark.parametrize("ranks_per_machine", [4, 2])
def test_a_bad_sample_ends_all_ranks_with_its_message(tmp_path, ranks_per_machine):
    run_file = write_tiny_run(tmp_path / "run", 24)
    for image in run_file.parent.glob("**/*.png"):
        image.write_bytes(image.read_bytes()[:60])
    overrides = [*batch_settings(1), *TOPOLOGIES["mp2 pp2"]]
    messages = launched(fails, 4, run_file, tmp_path / "out", overrides, ranks_per_machine)
    assert len(set(messages)) == 1
    assert "train.jsonl:" in messages[0]
