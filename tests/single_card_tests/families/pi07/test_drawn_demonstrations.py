"""Random draws per sample: drops of optional fields, the flow's draws, synthetic demonstrations.

Guarantees: draws of a sample are the same on every rank, in every batch and worker, and after
resuming; they differ between epochs and seeds, and evaluations repeat theirs; each drop equals
OpenTau's, has its probability and is independent of the others and of the flow's draws; dropped
images are not read; the response is dropped only where goals remain; times, delays and noise have
their distributions; actions of synthetic demonstrations need both state and colour.
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
    DROPPED_METADATA,
    NO_DROPS,
    OPTIONAL_FIELDS,
    DrawnDemonstrations,
    DropProbabilities,
    Drops,
    FlowDraws,
    Stream,
    collate_demonstrations,
    draw_drops,
    drop_fields,
    sample_rng,
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


NOTHING = Drops(False, False, False, frozenset())
TWELVE = SyntheticDemonstrations(12, SHAPES)
WHOLE = TWELVE[7]


def dropped(drops: Drops) -> dict:
    options = {"with_history": not drops.history, "with_subgoals": not drops.subgoal}
    return drop_fields(TWELVE.demonstration(7, **options), drops)


def changed(after: dict, sample: dict = WHOLE) -> set[str]:
    """Names of the entries that changed."""
    assert after.keys() == sample.keys()
    assert all(np.shape(after[name]) == np.shape(sample[name]) for name in sample)
    return {name for name in sample if not np.array_equal(after[name], sample[name])}


def test_history_leaves_the_current_frame_and_the_state():
    after = dropped(NOTHING._replace(history=True))
    assert changed(after) == {"camera0", "camera1", "obs_history_is_pad"}
    assert after["obs_history_is_pad"].all()
    for camera in SHAPES.cameras:
        assert not after[camera][:-1].any()
        np.testing.assert_array_equal(after[camera][-1], WHOLE[camera][-1])


def test_goals_go_for_all_cameras_and_keep_the_response():
    after = dropped(NOTHING._replace(subgoal=True, response=True))
    assert changed(after) == {"subgoal0", "subgoal1", "subgoal_is_pad"}
    assert after["subgoal_is_pad"]
    assert not after["subgoal0"].any()


def test_the_response_goes_only_where_goals_are():
    drops = NOTHING._replace(response=True)
    after = drop_fields(WHOLE, drops)
    assert changed(after) == {"response"}
    assert after["response"] == ""
    no_goals = {name: value for name, value in WHOLE.items() if "subgoal" not in name}
    assert changed(drop_fields(no_goals, drops), no_goals) == set()


@pytest.mark.parametrize("name", DROPPED_METADATA)
def test_metadata_becomes_absent(name):
    sample = dict(WHOLE) | {"speed": np.int64(30), "mistake": np.bool_(True)}
    after, flag = (
        drop_fields(sample, NOTHING._replace(metadata=frozenset([name]))),
        f"{name}_is_pad",
    )
    if isinstance(sample[name], str):
        assert changed(after, sample) == {name}
        assert after[name] == ""
    else:
        assert changed(after, sample) == {name, flag}
        assert (after[name], after[flag]) == (0, True)
        assert after[name].dtype == sample[name].dtype


def drawn(probabilities: DropProbabilities, count: int = 4000) -> list[Drops]:
    return [draw_drops(probabilities, sample_rng(1, Stream.DROPS, 0, n)) for n in range(count)]


def test_defaults_are_the_originals_and_frequencies_follow():
    found = drawn(DropProbabilities())
    near = {"abs": 0.03}
    assert np.mean([d.subgoal for d in found]) == pytest.approx(0.75, **near)
    assert np.mean([d.history for d in found]) == pytest.approx(0.3, **near)
    assert np.mean([d.response for d in found]) == pytest.approx(0.3, **near)
    alls = np.mean([len(d.metadata) == len(DROPPED_METADATA) for d in found])
    assert alls == pytest.approx(0.15, **near)
    for name in DROPPED_METADATA:
        share = np.mean([name in d.metadata for d in found])
        assert share == pytest.approx(0.15 + 0.85 * 0.05, **near)
    assert "fps" not in DROPPED_METADATA


def test_fields_of_the_metadata_are_dropped_independently():
    found = drawn(NO_DROPS.model_copy(update={"metadata_drop_each_prob": 0.5}))
    pairs = np.mean([{"speed", "quality"} <= d.metadata for d in found])
    assert pairs == pytest.approx(0.25, abs=0.03)


def test_a_probability_that_is_changed_leaves_other_decisions_alone():
    one, other = DropProbabilities(), DropProbabilities(metadata_drop_all_prob=1.0)
    for before, after in zip(drawn(one, 50), drawn(other, 50), strict=True):
        assert before[:3] == after[:3]
        assert after.metadata == set(DROPPED_METADATA)


def test_no_drops_is_the_sample_as_it_was():
    assert all(drops == NOTHING for drops in drawn(NO_DROPS, 50))
    assert same(drop_fields(WHOLE, NOTHING), WHOLE)


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_impossible_probabilities_are_refused(value):
    with pytest.raises(ValueError, match=f"(?s)response_drop_prob.*input_value={value}"):
        DropProbabilities(response_drop_prob=value)


def test_flow_draws_have_their_distributions():
    draws = FlowDraws(chunk_size=4, max_action_dim=6, max_delay=3)
    found = [draws.draw(sample_rng(2, Stream.FLOW, 0, number)) for number in range(4000)]
    times = np.sort([one["time"] for one in found])
    # The distribution function of Beta(1.5, 1) is x ** 1.5.
    ranks = (np.arange(4000) + 0.5) / 4000
    assert np.abs(((times - 0.001) / 0.999) ** 1.5 - ranks).max() < 0.03
    delays = np.bincount([one["delay"] for one in found])
    assert len(delays) == 4
    np.testing.assert_allclose(delays / 4000, 0.25, atol=0.03)
    noise = np.stack([one["noise"] for one in found])
    assert noise.shape == (4000, 4, 6)
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=0.08)
    np.testing.assert_allclose(noise.std(axis=0), 1, atol=0.08)
    assert [found[0][name].dtype.name for name in ("noise", "time", "delay")] == [
        "float32", "float32", "int64",
    ]  # fmt: skip


EPISODES = SyntheticDemonstrations(240, SHAPES)


def test_samples_follow_from_seed_and_number():
    again = SyntheticDemonstrations(300, SHAPES)
    other = SyntheticDemonstrations(240, SHAPES, seed=1)
    assert same(EPISODES[100], again[100])
    assert not np.array_equal(EPISODES[100]["state"], other[100]["state"])
    fingerprints = {source.fingerprint for source in (EPISODES, again, other)}
    assert len(fingerprints) == 3


def test_fields_are_there_as_configured_and_vary():
    batch = collate_demonstrations([EPISODES[number] for number in range(0, 240, 5)])
    for name in ("response", "past_memory", "next_memory", "speed", "quality", "mistake"):
        assert len(np.unique(batch[name])) > 1
    bare = SyntheticDemonstrations(1, SHAPES, fields=("speed",))[0]
    kept = {name for name in OPTIONAL_FIELDS if name in bare}
    assert kept == {"speed"}
    assert "subgoal0" not in bare


def least_squares_error(inputs: np.ndarray, outputs: np.ndarray) -> float:
    """Fraction of the outputs' variance that a linear fit to the inputs leaves unexplained."""
    inputs = np.column_stack([inputs, np.ones(len(inputs))])
    solution = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
    return float(
        ((outputs - inputs @ solution) ** 2).sum() / outputs.var(axis=0).sum() / len(outputs)
    )


def test_actions_follow_from_state_and_colour_together():
    samples = [EPISODES[number] for number in range(240)]
    states = np.stack([sample["state"][-1] for sample in samples])
    colours = np.stack([sample["camera0"][-1].max(axis=(1, 2)) for sample in samples])
    actions = np.stack([sample["actions"][0] for sample in samples])
    assert least_squares_error(np.column_stack([states, colours]), actions) < 1e-4
    assert least_squares_error(states, actions) > 0.01
    assert least_squares_error(colours, actions) > 0.1


def test_ends_of_episodes_are_filled_up():
    first, last = EPISODES[12], EPISODES[23]
    assert first["obs_history_is_pad"].tolist() == [True, True, False]
    assert not first["state"][:2].any()
    assert not first["camera0"][:2].any()
    assert not first["action_is_pad"].any()
    assert last["action_is_pad"].any()
    assert not last["action_is_pad"][0]
    assert not last["obs_history_is_pad"].any()


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"groups are \['arm'\]"):
        SyntheticDemonstrations(1, SHAPES, group_names=["arm"])


def test_batches_hold_what_samples_hold():
    samples = [EPISODES[number] for number in (3, 50)]
    batch = collate_demonstrations(samples)
    assert batch["prompt"] == [sample["prompt"] for sample in samples]
    assert batch["camera0"].shape == (2, 3, 3, 8, 8)
    assert (batch["speed"].dtype, batch["speed"].shape) == (np.int64, (2,))
    for row, sample in enumerate(samples):
        assert all(np.array_equal(batch[name][row], sample[name]) for name in sample)
