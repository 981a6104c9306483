"""The check of fleet's private names.

Guarantees: the names of the installed Paddle pass; a function that is missing or has other
parameters, and a missing attribute, are named with the version to install.
"""

import re

import pytest

from paddle_vl.parallel.sharding import fleet_buffers
from paddle_vl.parallel.sharding.fleet_buffers import DygraphShardingOptimizerV2, FusedCommBuffer


def test_functions_of_this_paddle_are_known():
    fleet_buffers.check_functions()


def test_another_function_is_named(monkeypatch):
    monkeypatch.delattr(DygraphShardingOptimizerV2, "_assign_slice_grad")
    monkeypatch.setattr(FusedCommBuffer, "add_grad", lambda self, parameter: None)
    with pytest.raises(RuntimeError) as raised:
        fleet_buffers.check_functions()
    message = str(raised.value)
    assert "DygraphShardingOptimizerV2._assign_slice_grad does not take ()" in message
    assert "FusedCommBuffer.add_grad does not take (param, use_comm)" in message
    assert re.search(r"Install paddlepaddle 3\.3\.1, or use parallel\.sharding_stage 2", message)


def test_a_missing_attribute_is_named():
    optimizer = DygraphShardingOptimizerV2.__new__(DygraphShardingOptimizerV2)
    vars(optimizer).update(_slice_params={}, comm_overlap=False, _comm_buffer_list=[])
    with pytest.raises(RuntimeError, match="V2 has no has_register_forward_hook"):
        fleet_buffers.check_attributes(optimizer)
