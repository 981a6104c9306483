"""Refusals of the gloo patches for Paddle; nothing is patched by any of these tests."""

import paddle
import pytest

from paddle_vl.parallel import gloo_fleet
from paddle_vl.parallel.gloo_fleet.patch import check_version


@pytest.fixture(autouse=True)
def _untouched_paddle(monkeypatch):
    """Start unpatched on a CPU with gloo, and check that nothing is patched at the end."""
    monkeypatch.setattr(gloo_fleet, "_installed", False)
    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "gloo")
    before = patched_symbols()
    yield
    monkeypatch.undo()
    assert patched_symbols() == before


def patched_symbols() -> list:
    return [getattr(patch.find_owner(), patch.name, None) for patch in gloo_fleet.PATCHES]


def test_unknown_version_is_refused(monkeypatch):
    monkeypatch.setattr(paddle, "__version__", "3.2.9")
    with pytest.raises(RuntimeError, match=r"paddlepaddle 3.2.9 runs here.*paddlepaddle 3\.3"):
        gloo_fleet.install()


def test_other_versions_are_refused_on_gpus_and_a_development_build_is_warned_of(
    monkeypatch, caplog
):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle, "__version__", "3.4.0")
    with pytest.raises(RuntimeError, match=r"paddlepaddle 3\.4\.0 runs here.*install"):
        check_version()
    monkeypatch.setattr(paddle, "__version__", "0.0.0")
    check_version()
    assert "paddlepaddle 0.0.0 runs here" in caplog.text


@pytest.mark.parametrize(
    ("owner", "question", "answer"),
    [
        (paddle, "is_compiled_with_cuda", True),
        (paddle, "is_compiled_with_xpu", True),
        (paddle.device, "get_all_custom_device_type", ["npu"]),
    ],
)
def test_nothing_is_done_on_a_build_with_an_accelerator(monkeypatch, owner, question, answer):
    monkeypatch.setattr(owner, question, lambda: answer)
    assert gloo_fleet.install() is False


def test_nothing_is_done_with_another_backend(monkeypatch):
    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "nccl")
    assert gloo_fleet.install() is False
