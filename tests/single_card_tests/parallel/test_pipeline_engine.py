"""What is private to fleet's engine is known before it is used."""

from types import SimpleNamespace

import pytest

from paddle_vl.parallel.pipeline.engine import _check


def test_another_engine_is_refused_with_what_it_lacks():
    with pytest.raises(RuntimeError) as refusal:
        _check(SimpleNamespace(callbacks=None, accumulate_steps=1))
    message = str(refusal.value)
    assert "SimpleNamespace._broadcast_final_loss" in message
    assert "install paddlepaddle 3.3.1" in message
    assert "callbacks" not in message
