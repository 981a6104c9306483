"""The layout of a model over ranks, as far as one rank can test it.

Guarantees: the size of pipeline messages comes from the settings, else from the data's limits;
there is none if neither is set, or for a policy.
"""

import pytest

from paddle_vl.families.pi07.settings import PI07Run
from paddle_vl.families.vlm.settings import VLRun


def make_config(data: dict, **parallel) -> VLRun:
    return VLRun.model_validate(
        {
            "model": {"config": "none"},
            "data": {"train": ["none"], "processor": "none", "max_length": 100} | data,
            "parallel": {"pp_degree": 2} | parallel,
            "train": {"output_dir": "none", "per_device_train_batch_size": 3},
        }
    )


PACKED = {"packing": True, "packing_length": 200, "max_vision_tokens_per_row": 20}


@pytest.mark.parametrize(
    ("data", "parallel", "tokens", "visual"),
    [
        ({}, {"pp_token_rows": 50}, 50, 50),
        ({}, {"pp_token_rows": 50, "pp_visual_rows": 7}, 50, 7),
        ({"pad_to_multiple_of": 8}, {"pp_visual_rows": 0}, 3 * 104, 0),
        (PACKED, {"pp_visual_rows": 9}, 3 * 200, 9),
        (PACKED, {"pp_token_rows": 500}, 500, 3 * 20),
    ],
)
def test_bounds_of_the_data_complete_what_is_reserved(data, parallel, tokens, visual):
    assert make_config(data, **parallel).reserved_rows == (tokens, visual)


def test_nothing_is_reserved_that_is_not_asked_for():
    assert make_config(PACKED).reserved_rows is None


def test_a_policy_reserves_no_rows():
    config = PI07Run.model_validate(
        {
            "model": {"config": "none"},
            "data": {"train": ["none"], "processor": "none"},
            "train": {"output_dir": "none"},
        }
    )
    assert config.reserved_rows is None
