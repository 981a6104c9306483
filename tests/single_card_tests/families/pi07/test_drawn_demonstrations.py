"""Random draws per sample in the loader's stream.

Guarantees: drops and draws of a sample are the same on every rank, in every batch and worker, and
after resuming; they differ between epochs and seeds; evaluations repeat theirs; drops do not change
the flow's draws and are independent of them; dropped images are not read; draws that do not fit the
data are refused; workers load no Paddle.
"""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.sample import (
    NO_DROPS,
    DrawnDemonstrations,
    DropProbabilities,
    FlowDraws,
    collate_demonstrations,
)
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from tests.single_card_tests.families.pi07.demonstration_builders import (
    SHAPES,
    line,
    same,
    save_image,
    write_lines,
)

SOURCE = SyntheticDemonstrations(24, SHAPES)
DATA = DrawnDemonstrations(SOURCE, DropProbabilities(), FlowDraws(4, 6, 2), seed=3)


def dropping(**probabilities: float) -> DropProbabilities:
    """Only these drops."""
    update = {f"{name}_drop_prob": value for name, value in probabilities.items()}
    return NO_DROPS.model_copy(update=update)


class Marked(DrawnDemonstrations):
    """Samples that record their number and whether their process has loaded Paddle."""

    def __getitem__(self, number: int) -> dict:
        is_loaded = np.bool_("paddle" in sys.modules)
        return super().__getitem__(number) | {"number": np.int64(number), "paddle": is_loaded}


MARKED = Marked(SOURCE, DATA.probabilities, DATA.flow, seed=3)


def stream(batch_size: int, num_batches: int, **options) -> list[dict]:
    settings = {"shuffle": True, "drop_last": True, "seed": 5} | options
    with PrefetchLoader(MARKED, collate_demonstrations, batch_size, **settings) as batches:
        return list(itertools.islice(batches, num_batches))


def by_number(batches: list[dict]) -> dict[int, dict]:
    """Samples of batches, keyed by number."""
    samples = {}
    for batch in batches:
        for row, number in enumerate(batch["number"].tolist()):
            samples[number] = {name: np.asarray(values)[row] for name, values in batch.items()}
    return samples


def test_a_sample_is_the_same_on_every_topology():
    whole = by_number(stream(8, 3))
    parts = [stream(2, 3, rank=rank, size=4) for rank in range(4)]
    split = by_number(list(itertools.chain(*parts)))
    assert sorted(whole) == sorted(split) == list(range(24))
    assert all(same(whole[number], split[number]) for number in whole)


def test_workers_and_resuming_change_nothing():
    expected = stream(4, 14)
    found = stream(4, 14, num_workers=2)
    assert not any(batch.pop("paddle").any() for batch in found)
    loaders = [
        PrefetchLoader(MARKED, collate_demonstrations, 4, shuffle=True, drop_last=True, seed=5)
        for _ in range(2)
    ]
    for _ in range(8):
        next(loaders[0])
    loaders[1].load_state_dict(loaders[0].state_dict())
    resumed = [next(loaders[1]) for _ in range(6)]
    for batch in (*expected, *resumed):
        batch.pop("paddle")
    assert all(map(same, found, expected))
    assert all(map(same, resumed, expected[8:]))


def test_every_epoch_and_seed_has_its_own_draws():
    samples = [DATA[0], DATA.in_epoch(1)[0], replace(DATA, seed=4)[0], DATA[1]]
    for one, other in itertools.combinations(samples, 2):
        assert not np.array_equal(one["noise"], other["noise"])
        assert one["time"] != other["time"]
    drops = [
        [bool(DATA.in_epoch(epoch)[n]["subgoal_is_pad"]) for n in range(24)] for epoch in range(2)
    ]
    assert drops[0] != drops[1]
    assert same(DATA.in_epoch(0)[5], DATA[5])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_asks_for_the_draws_of_the_epoch(num_workers):
    options = {"shuffle": False, "num_workers": num_workers}
    batches = stream(12, 4, **options)
    for epoch in range(2):
        expected = [DATA.in_epoch(epoch)[number]["noise"] for number in range(24)]
        found = np.concatenate([batch["noise"] for batch in batches[2 * epoch :][:2]])
        np.testing.assert_array_equal(found, expected)


def test_evaluation_has_the_same_draws_every_time():
    data = DrawnDemonstrations(SOURCE, flow=DATA.flow, seed=3)
    options = {"shuffle": False, "drop_last": False, "num_epochs": 1}
    with PrefetchLoader(data, collate_demonstrations, 5, **options) as batches:
        first, second = list(batches), list(batches)
    assert len(first) == 5
    assert all(map(same, first, second))
    assert not any(batch["subgoal_is_pad"].any() for batch in first)


def test_drops_do_not_move_the_draws_of_the_flow():
    plain, dropped = replace(DATA, probabilities=NO_DROPS), DATA
    for number in range(6):
        for name in ("noise", "time", "delay"):
            np.testing.assert_array_equal(plain[number][name], dropped[number][name])


def test_drops_and_times_are_independent():
    found = [DATA.in_epoch(epoch)[number] for epoch in range(10) for number in range(24)]
    dropped = [s["time"] for s in found if s["subgoal_is_pad"]]
    kept = [s["time"] for s in found if not s["subgoal_is_pad"]]
    assert min(kept) < np.median(dropped) < max(kept)


def test_images_that_are_dropped_are_not_read(tmp_path):
    save_image(tmp_path / "g.png")
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path, subgoal0="g.png", subgoal1="g.png"))
    source = DemonstrationsDataset([path], SHAPES, ["subgoal"])
    data = DrawnDemonstrations(source, dropping(history_state=1.0, subgoal=1.0))
    expected = data[0]
    for name in ("f0.png", "f1.png", "g.png"):
        (tmp_path / name).write_bytes(b"no image")
    assert same(data[0], expected)
    for drops in (dropping(subgoal=1.0), dropping(history_state=1.0)):
        with pytest.raises(BadSampleError, match=r"a\.jsonl:1: "):
            replace(data, probabilities=drops)[0]


def test_draws_that_do_not_fit_the_actions_are_refused():
    with pytest.raises(ValueError, match=r"5 steps of 6 values, .* shape \[4, 3\]"):
        DrawnDemonstrations(SOURCE, flow=FlowDraws(5, 6))
    with pytest.raises(ValueError, match="at most as many values"):
        DrawnDemonstrations(SOURCE, flow=FlowDraws(4, 2))
