"""Settings shared by all tests."""

import gc
import os
import sys
from pathlib import Path

import paddle
import pytest
from hypothesis import settings

from paddle_vl.compat import amd_instruction_set
from paddle_vl.nn.dispatch import choose_kernels, chosen_kernels, set_compiled
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.forked import without_loss_curves
from tests.support.gpu_stubs.installed import gpu_stubs
from tests.support.implementations import take_compiled

# Read by Paddle's matrix library at its first product; without it tests run several times longer
# on AMD processors.
if (instructions := amd_instruction_set()) is not None:
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", instructions)


# `--hypothesis-profile long`: property tests with other and more inputs.
settings.register_profile("long", max_examples=1000, deadline=None, database=None, print_blob=True)

# Every process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What was imported lives to the end, and no collection has to visit it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor what outlives the tests of a file."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


without_loss_curves()


@pytest.fixture(autouse=True, scope="session")
def _gpu_stubs():
    """`use_kernels("gpu")` runs on a CPU, by the contracts of Paddle's GPU kernels."""
    with gpu_stubs():
        yield


# Tests have the kernels of a command.
take_compiled()


@pytest.fixture(autouse=True)
def _keep_process_settings():
    """Commands choose kernels for the whole process; a test must not."""
    kept, kernels = paddle.get_flags("FLAGS_use_stride_kernel"), chosen_kernels()
    yield
    paddle.set_flags(kept)
    choose_kernels(kernels)
    take_compiled()


@pytest.fixture
def uncompiled():
    """The kernels that a machine without a compiler has."""
    set_compiled(False)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """The settings of a tiny run of Qwen3-VL on disk, which no test changes."""
    return write_tiny_run(tmp_path_factory.mktemp("run"))
