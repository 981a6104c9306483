"""Refusals of the gloo patches for Paddle.

Guarantees: an unknown Paddle version is refused before anything is patched, and a development build
for GPUs warned of; builds with an accelerator and other backends stay unpatched; every patch has a
reason.
"""

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


@pytest.mark.parametrize("version", ["3.2.9", "3.4.0", "0.0.0"])
def test_unknown_version_is_refused(monkeypatch, version):
    monkeypatch.setattr(paddle, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"paddlepaddle {version} runs here.*paddlepaddle 3\.3"):
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


def test_every_patch_says_why():
    for patch in gloo_fleet.PATCHES:
        assert patch.reason
