"""trainer_state.json with other contents than a run writes is refused by file, key and value."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_vl.train.trainer import Trainer
from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.single_card_tests.train.whole_runs import build

OTHERS = (None, "x", -1, 1.5, True, 1 << 60, -(10**400), [], {}, [[]], {"x": 1})
# May be missing (in checkpoints of earlier versions), have other values, or fewer entries. The
# fingerprint of the stream is of its contents too.
FREE = {
    ("tokens",), ("sources",), ("has_manifest",), ("owes_evaluation",), ("meter", "counted", "*"),
    ("meter", "skips", "*"), ("meter", "window", "*", "*"), ("data", "skipped"),
    ("meter", "sources"), ("meter", "sources", "names", "*"),
    ("meter", "sources", "values", "*", "*"),
    ("data", "stream", "contents"),
    ("data", "stream", "contents", "*"), ("data", "stream", "contents", "*", "*"),
}  # fmt: skip


def places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Paths of all keys, and of the first two entries of lists and of lanes."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    is_long = isinstance(value, list) or place == ("data", "lanes")
    for key in keys[:2] if is_long else keys:
        yield (*place, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*place, key))


def parent_of(place: tuple, state: Any) -> Any:
    for key in place[:-1]:
        state = state[key]
    return state


def forgeries(state: dict) -> Iterator[tuple[tuple, Any, dict]]:
    """Place, the value there before, and the whole of each forgery."""
    for place in places(state):
        was = parent_of(place, state)[place[-1]]
        is_closed = isinstance(was, dict) and "lanes" not in was
        added = [{**was, "unknown": 1}] if is_closed else []
        for value in [*OTHERS, *added]:
            forged = copy.deepcopy(state)
            parent_of(place, forged)[place[-1]] = value
            if forged != state:
                yield place, was, forged
        forged = copy.deepcopy(state)
        del parent_of(place, forged)[place[-1]]
        yield place, was, forged
    yield (), state, {**state, "unknown": 1}


@pytest.fixture(scope="module")
def trainer(request, tmp_path_factory) -> Trainer:
    folder = tmp_path_factory.mktemp("run")
    run_file = request.param(folder)
    build(run_file, folder / "out", "train.max_steps=2").run()
    resumed = build(run_file, folder / "out", "train.resume_from_checkpoint=auto")
    resumed._lock.release()
    return resumed


def outcome(trainer: Trainer, folder: Path) -> str | None:
    """The error of loading the state of a checkpoint; any other kind of error is the test's."""
    try:
        trainer.restore(folder)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("trainer", [write_tiny_run, write_corpus_run], indirect=True)
def test_other_contents_are_refused_by_name(trainer):
    file = trainer.output_dir / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    num_refused = 0
    is_mix = "lanes" in state["data"]
    for place, was, forged in forgeries(state):
        # Positions in a mix: see test_edited_corpora.
        if is_mix and place[:1] == ("data",) and place not in (("data",), ("data", "step")):
            continue
        file.write_text(json.dumps(forged))
        error = outcome(trainer, file.parent)
        if error is None:
            general = tuple("*" if str(key).isdigit() else key for key in place)
            assert general in FREE, (place, was, forged)
            continue
        num_refused += 1
        names = [key for key in (*place, "unknown") if isinstance(key, str) and not key.isdigit()]
        assert str(file) in error
        assert any(name in error for name in names), (place, was, error)
    assert num_refused > 100
    file.write_text(json.dumps(state))
    assert outcome(trainer, file.parent) is None
