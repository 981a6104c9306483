"""Recommendations of a matrix.

Guarantees: the fastest cell below the memory share is chosen, and a faster one above it is named;
every number of cameras gets its own recommendation; without a limit memory does not matter; the
report says if none fits or none ran.
"""

import pytest

from paddle_vl.profile.matrix_report import recommendations
from tests.single_card_tests.profile.measures import cell

CELLS = [
    cell("stage2", 4, 20.0, 2.0),
    cell("stage2", 8, 25.0, 3.0),
    cell("stage2", 16, 27.0, 3.9),
    cell("stage2", 32, status="oom"),
    cell("stage3", 8, 15.0, 2.5),
    cell("dp", 2, status="failed"),
]


def test_the_fastest_cell_below_the_share_is_recommended_with_reasons():
    (found,) = recommendations(CELLS, limit_gb=4.0, memory_share=0.85)
    assert found.cell is CELLS[1]
    assert "25.00 samples/s with 3.00 GB, 75 % of the limit" in found.reason
    assert "batch 16 makes 27.00, but takes 3.90 GB, above 85 %" in found.reason


def test_a_larger_share_allows_the_faster_cell():
    (found,) = recommendations(CELLS, limit_gb=4.0, memory_share=1.0)
    assert found.cell is CELLS[2]
    assert "but takes" not in found.reason


def test_without_a_limit_memory_does_not_matter():
    (found,) = recommendations(CELLS, limit_gb=None, memory_share=0.85)
    assert found.cell is CELLS[2]
    assert "limit" not in found.reason


def test_cameras_are_a_task_of_their_own():
    cells = [*CELLS, cell("stage3", 4, 3.0, cameras=4)]
    one, four = recommendations(cells, 4.0, 0.85)
    assert (one.cameras, four.cameras) == (1, 4)
    assert four.cell is cells[-1]


def test_where_no_cell_fits_it_says_what_the_smallest_takes():
    (found,) = recommendations(CELLS[:3], limit_gb=2.0, memory_share=0.85)
    assert found.cell is None
    assert "none of the 3 cells that ran stays below 85 % of 2 GB" in found.reason
    assert "batch 4, takes 2.00 GB" in found.reason
    (found,) = recommendations(CELLS[3:4], limit_gb=2.0, memory_share=0.85)
    assert found.reason == "none of the 1 cells ran"


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_a_senseless_share_is_refused(share):
    with pytest.raises(ValueError, match="memory share"):
        recommendations(CELLS, 4.0, share)
