"""The random states of Python, NumPy and Paddle: seeding, and a JSON form that restores them."""

import random
from typing import Any

import numpy as np
import paddle


def seed_everything(seed: int) -> None:
    """Start all three generators from one seed."""
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)


def random_state() -> dict[str, Any]:
    """The three states, made of JSON types."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    devices = []
    for state in paddle.get_rng_state():
        device, seed, offset, engine = state.__getstate__()
        devices.append([device, seed, offset, bytes(engine).decode("ascii")])
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "paddle": devices,
    }


def restore_random_state(saved: dict[str, Any]) -> None:
    """Continue all three generators from what `random_state` returned.

    Raises:
        RuntimeError: the state comes from another number or kind of devices.
    """
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    current = paddle.get_rng_state()
    if len(current) != len(saved["paddle"]):
        raise RuntimeError(
            f"the checkpoint holds random states of {len(saved['paddle'])} device(s), this process "
            f"has {len(current)}: resume on the kind of device that it was trained on"
        )
    states = []
    for now, (device, seed, offset, engine) in zip(current, saved["paddle"], strict=True):
        state = type(now).__new__(type(now))
        state.__setstate__((device, seed, offset, list(engine.encode("ascii"))))
        states.append(state)
    paddle.set_rng_state(states)
