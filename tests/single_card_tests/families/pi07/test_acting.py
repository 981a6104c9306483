"""State of an episode during inference: observation history and action queue.

Guarantees: frames are evenly spaced; frames from before the episode are zero and marked; the queue
returns a chunk in order, requests the next one in time, and begins it with the actions that are
still executing.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.acting import ActionQueue, ObservationHistory


def test_history_fills_up_with_evenly_spaced_frames():
    history = ObservationHistory(3, interval=2)
    seen = []
    for step in range(1, 7):
        batch = {"state": np.full((2, 1), step), "camera0": np.full((2, 3, 4, 4), step), "x": "y"}
        found = history.extended(batch, ["state", "camera0"])
        assert found["camera0"].shape == (2, 3, 3, 4, 4)
        assert found["x"] == "y"
        assert (found["camera0"][:, :, 0, 0, 0] == found["state"][..., 0]).all()
        assert (found["obs_history_is_pad"] == (found["state"][..., 0] == 0)).all()
        seen.append(found["state"][0, :, 0].tolist())
    assert seen == [[0, 0, 1], [0, 0, 2], [0, 1, 3], [0, 2, 4], [1, 3, 5], [2, 4, 6]]
    history.clear()
    assert (
        history.extended(batch, ["state"])["obs_history_is_pad"].tolist()
        == [[True] * 2 + [False]] * 2
    )


def test_history_of_one_frame_has_no_padding():
    found = ObservationHistory(1, 1).extended({"state": np.ones((1, 2))}, ["state"])
    assert found["state"].shape == (1, 1, 2)
    assert found["obs_history_is_pad"].tolist() == [[False]]


def test_history_refuses_another_batch_size():
    history = ObservationHistory(2, 1)
    history.extended({"state": np.ones((1, 2))}, ["state"])
    with pytest.raises(ValueError, match=r"\[2, 2\].*\[1, 2\] a step ago: call reset"):
        history.extended({"state": np.ones((2, 2))}, ["state"])


def chunk(start: int, length: int) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.float32).reshape(1, length, 1)


def test_queue_executes_part_of_a_chunk():
    queue = ActionQueue(horizon=2)
    assert queue.is_due
    assert queue.committed() is None
    queue.refill(chunk(0, 5), 0)
    assert [queue.pop().item(), queue.is_due, queue.pop().item(), queue.is_due] == [
        0,
        False,
        1,
        True,
    ]


def test_queue_begins_the_next_chunk_with_what_runs_on():
    queue = ActionQueue(horizon=4, max_delay=2)
    queue.refill(chunk(0, 4), 0)
    assert [queue.pop().item() for _ in range(2)] == [0, 1]
    assert queue.is_due
    assert queue.committed()[0, :, 0].tolist() == [2, 3]
    # Queued actions stay; they replace the chunk's first two.
    queue.refill(chunk(12, 4), 2)
    assert len(queue) == 4
    assert [queue.pop().item() for _ in range(4)] == [2, 3, 14, 15]
    queue.refill(chunk(6, 4), 0)
    queue.clear()
    assert len(queue) == 0
