"""Copies through pinned memory, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import paddle
import pytest

from paddle_vl.nn import transfer
from tests.single_card_tests.train.fake_device import FakeDevice


@contextmanager
def pinned_on_a_cpu() -> Iterator[None]:
    """Inside the block arrays are copied as to a GPU, where host memory stands for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_copies_to_gpu", lambda: True)
        patch.setattr(paddle, "CUDAPinnedPlace", paddle.CPUPlace)
        patch.setattr(paddle.device, "current_stream", lambda: FakeDevice().compute)
        yield
