"""Steps of Qwen3-VL under the colocated schedule; `one_device` has its runs.

Guarantees: one rank's value that is not finite skips the update of both parts on all ranks; a
frozen tower encodes the items of the next step, once; the bridge sends rows once to the data lane
that uses them, and each gradient once to the rank that needs it where that is one rank.
"""

from pathlib import Path
from typing import Any

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.train.build import build_trainer
from tests.multi_card_tests.one_device import COLOCATED, DP2, FAMILIES, PP
from tests.support.launch import launch


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return FAMILIES["towers"].write(tmp_path_factory.mktemp("run"))


def settings(run_file: Path, *topology: str) -> tuple[str, list[str]]:
    own = [f"train.output_dir={run_file.with_name('out')}", "train.warmup_steps=0"]
    return str(run_file), [*FAMILIES["towers"].on(run_file.parent, topology), *own]


def guarded(run_file: str, overrides: list[str]) -> dict[str, list[bool]]:
    """Whether each of three steps is good and changes weights or moments; the second has a NaN in
    the last rank's encoder."""
    trainer = build_trainer(load_run_config(run_file, overrides), writes=False)
    encoder, steps = trainer.runner.encoder, {"good": [], "changed": []}
    encode = encoder.encode

    def values() -> list[np.ndarray]:
        states = trainer.optimizer.state_tensors().values()
        return [tensor.numpy() for tensor in (*trainer.runner.model.parameters(), *states)]

    for number in range(3):
        is_hit = number == 1 and dist.get_rank() == dist.get_world_size() - 1
        encoder.encode = (lambda *given: encode(*given) * float("nan")) if is_hit else encode
        before = values()
        steps["good"].append(bool(trainer.train_one_step().is_good))
        steps["changed"].append(
            any(not np.array_equal(a, b) for a, b in zip(before, values(), strict=True))
        )
    trainer.feed.close()
    return steps


def test_a_value_that_is_not_finite_skips_the_update_of_both_parts(run_file):
    for steps in launch(guarded, 2, arguments=settings(run_file, COLOCATED, *PP)):
        assert steps == {"good": [True, False, True], "changed": [True, False, True]}


def bridged(run_file: str, overrides: list[str]) -> dict[str, Any]:
    """Rows that this rank encodes in each of two steps; of the first its data lane, the bytes of a
    row, and the collectives of the bridge."""
    trainer = build_trainer(load_run_config(run_file, overrides), writes=False)
    encoder, rows = trainer.runner.encoder, []
    encode, width = encoder.encode, sum(encoder.section_widths)

    def seen(*given: Any) -> Any:
        encoded = encode(*given)
        rows[-1] += encoded.shape[0]
        return encoded

    encoder.encode = seen
    with record_collectives() as recording:
        rows.append(0)
        trainer.train_one_step()
    calls = [
        (call.kind, call.num_bytes)
        for call in recording.calls
        if not call.is_message and call.shape[-1:] == (width,)
    ]
    rows.append(0)
    trainer.train_one_step()
    trainer.feed.close()
    return {"lane": trainer.ranks.data_rank, "rows": rows, "row": 4 * width, "calls": calls}


@pytest.mark.heavy
@pytest.mark.parametrize("encoder_mp", [1, 2, 4])
def test_the_bridge_sends_what_theory_says(run_file, encoder_mp):
    layout = (COLOCATED, *PP, *DP2, f"parallel.encoder.mp_degree={encoder_mp}")
    ranks = launch(bridged, 4, arguments=settings(run_file, *layout))
    sent = [found["calls"][0][1] for found in ranks]
    for found in ranks:
        rows, row = found["rows"][0], found["row"]
        if encoder_mp == 1:
            # Padded to the longest share of the ranks of a lane.
            longest = max(one["rows"][0] for one in ranks if one["lane"] == found["lane"])
            wanted = [("all_gather", longest * row), ("reduce_scatter", 2 * longest * row)]
        elif encoder_mp == 2:
            wanted = [("all_reduce", rows * row)]
        else:
            # Gradients of the rows of its own lane, and rows of the fuller lane.
            lanes = {one["lane"]: one["calls"][0][1] for one in ranks}
            assert sum(lanes.values()) == rows * row
            wanted = [("all_reduce", found["calls"][0][1]), ("all_gather", max(sent))]
        assert sorted(found["calls"]) == sorted(wanted)


@pytest.mark.heavy
@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_tower_encodes_the_next_step_too(run_file, frozen):
    """Steps have the same images in turn, of which a rank encodes about the same number."""
    run, overrides = settings(run_file, COLOCATED, *PP)
    overrides += ["model.freeze=[vision, mergers]"] * frozen
    for found in launch(bridged, 2, arguments=(run, overrides)):
        first, second = found["rows"]
        assert (first > 1.5 * second) == frozen
