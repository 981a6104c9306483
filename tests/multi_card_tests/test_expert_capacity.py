"""Training runs whose ranks exchange rows of experts with a capacity, beside exact sizes.

Guarantees, with padding and images: with a capacity every metric, parameter and moment is
bit-identical to that with exact sizes (which `one_device` and the routes compare with one device),

- where the capacity suffices, without a host read in any layer;
- where it does not, as steps are repeated, also after a resume. Evaluations have exact sizes.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.testing import record_host_reads
from tests.multi_card_tests.one_device import EP2, FULL, MP2, OVERLAPS
from tests.multi_card_tests.written_runs import EXPERTS as MOE
from tests.support.finished_runs import arrays_of, lasting, metrics_of
from tests.support.launch import launch
from tests.support.topology_runs import (
    DAMPED,
    PP,
    SHARDING,
    STAGE_3,
    batch_settings,
    continue_run,
    num_data_parts,
    train,
    write_mixed_run,
)

TOPOLOGIES = {
    "sharding2 ep2": (2, [*SHARDING, EP2, FULL, *OVERLAPS]),
    "sharding2 ep2 mp2 stage 3": (4, [*SHARDING, *MP2, EP2, STAGE_3, FULL]),
    "sharding2 ep2 pp2": (4, [*SHARDING, *PP, EP2]),
}
# All rows fit; only equal shares do.
FACTORS = {"exact": None, "room": 2.0, "overflow": 1.0}


def factor_of(name: str) -> list[str]:
    factor = FACTORS[name]
    return [] if factor is None else [f"parallel.expert_capacity_factor={factor}"]


def worker(run_file: str, output_dir: str, overrides: list[str]) -> dict[str, Counter]:
    """The runs, and host reads of each by file."""
    reads = {}
    for name in FACTORS:
        with record_host_reads() as places:
            train(run_file, f"{output_dir}/{name}", [*overrides, *factor_of(name)])
        reads[name] = Counter(place.partition(":")[0] for place in places)
    name = "overflow"
    own = [*overrides, *factor_of(name)]
    continue_run(run_file, f"{output_dir}/{name}", f"{output_dir}/resumed", own)
    return reads


NAMES = [
    next(iter(TOPOLOGIES)),
    *(pytest.param(n, marks=pytest.mark.heavy) for n in [*TOPOLOGIES][1:]),
]


@pytest.fixture(scope="module", params=NAMES)
def runs(request, tmp_path_factory) -> tuple[Path, list[dict[str, Counter]]]:
    num_ranks, topology = TOPOLOGIES[request.param]
    folder = tmp_path_factory.mktemp("runs")
    run_file = write_mixed_run(folder / "data", 24, MOE)
    common = [
        *(f"data.eval=[{run_file.with_name('test.jsonl')}]", "train.per_device_eval_batch_size=1"),
        *("train.save_steps=2", "train.eval_steps=2", *DAMPED),
    ]
    overrides = [*common, *topology, *batch_settings(num_data_parts(topology))]
    return folder, launch(
        worker, num_ranks, arguments=(str(run_file), str(folder), overrides), timeout=500
    )


def lines_of(folder: Path) -> tuple[list[dict], list[int]]:
    """The lines of a run, and the number of repeated steps in each of a step."""
    lines = lasting(metrics_of(folder))
    return lines, [line.pop("repeated_steps") for line in lines if "repeated_steps" in line]


@pytest.mark.parametrize(
    ("name", "wanted_repeated"), [("room", [0] * 4), ("overflow", [1] * 4), ("resumed", [1] * 2)]
)
def test_a_run_has_the_bits_of_exact_sizes(runs, name, wanted_repeated):
    folder, _ = runs
    lines, repeated = lines_of(folder / name)
    assert repeated == wanted_repeated
    wanted, _ = lines_of(folder / "exact")
    assert lines == wanted[-len(lines) :]
    arrays = arrays_of(folder / name / "checkpoint-4")
    for key, array in arrays_of(folder / "exact/checkpoint-4").items():
        np.testing.assert_array_equal(arrays[key], array, err_msg=key)


def test_only_exact_sizes_are_read(runs):
    for reads in runs[1]:
        of_exchange = {name: found["parallel/expert_parallel.py"] for name, found in reads.items()}
        # Of evaluations.
        assert 0 < of_exchange["room"] < of_exchange["overflow"] <= of_exchange["exact"]
