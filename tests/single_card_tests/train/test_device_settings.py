"""Paddle's settings of a GPU: attention version, TF32, repeatability.

Guarantees: FlashAttention 3 where device and Paddle have it and nobody chose; a user's choice stays
and is refused where it cannot run; float32 products in full precision unless asked for; the flags
of a repeatable run; nothing on a CPU; a run makes the settings of its configuration.
"""

from pathlib import Path

import paddle
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.train import build
from paddle_vl.train import gpu_settings as flags
from paddle_vl.train.build import build_trainer
from paddle_vl.train.gpu_settings import Gpu, configure_gpu
from tests.single_card_tests.train.tiny_run import write_tiny_run

VERSION, CUDNN = "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic"


@pytest.fixture
def paddles(monkeypatch):
    """The flags and switches of a Paddle for GPUs."""
    found = {VERSION: 2, CUDNN: False, "FLAGS_embedding_deterministic": 0}
    monkeypatch.setattr(paddle, "get_flags", lambda name: {name: found[name]})
    monkeypatch.setattr(paddle, "set_flags", found.update)
    for name in ("cublas", "cudnn"):
        found[name] = True
        switch = lambda value, name=name: found.update({name: value})  # noqa: E731
        monkeypatch.setattr(paddle.base.core, f"set_{name}_switch", switch)
    return found


def machine(folder: Path, capability=(9, 0), libraries=("flashattnv3", "flashmaskv2")) -> Gpu:
    for name in libraries:
        (folder / f"lib{name}.so").touch()
    return Gpu(capability, folder)


def test_hopper_takes_flash_attention_3_and_full_precision(paddles, tmp_path):
    environment = {}
    told = configure_gpu(environment=environment, gpu=machine(tmp_path))
    assert told == (
        "GPU of compute capability 9.0: FlashAttention 3, float32 products in full precision"
    )
    assert paddles == {
        VERSION: 3, CUDNN: False, "FLAGS_embedding_deterministic": 0, "cublas": False,
        "cudnn": False,
    }  # fmt: skip
    assert environment == {}


@pytest.mark.parametrize(
    "given",
    [{"capability": (8, 0)}, {"libraries": ("flashattnv3",)}, {"capability": (10, 0)}],
)
def test_other_devices_and_builds_keep_version_2(paddles, tmp_path, given):
    assert "FlashAttention 2" in configure_gpu(environment={}, gpu=machine(tmp_path, **given))
    assert paddles[VERSION] == 2
    # A user who chose version 3 learns it before a kernel fails.
    paddles[VERSION] = 3
    with pytest.raises(ValueError, match=r"FLAGS_flash_attn_version is 3, .*: set it to 2"):
        configure_gpu(environment={VERSION: "3"}, gpu=machine(tmp_path, **given))


def test_a_users_version_stays(paddles, tmp_path):
    told = configure_gpu(environment={VERSION: "2"}, gpu=machine(tmp_path))
    assert "FlashAttention 2" in told
    assert paddles[VERSION] == 2


def test_a_repeatable_run_sets_all_that_it_needs(paddles, tmp_path):
    environment = {}
    told = configure_gpu(True, environment=environment, gpu=machine(tmp_path))
    assert told.endswith("repeatable kernels")
    assert (paddles[CUDNN], paddles["FLAGS_embedding_deterministic"]) == (True, 1)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    configure_gpu(True, environment=environment, gpu=machine(tmp_path))
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_tf32_is_turned_on_when_asked_for_unless_the_driver_forbids_it(paddles, tmp_path):
    told = configure_gpu(tf32=True, environment={}, gpu=machine(tmp_path))
    assert told.endswith("float32 products in TF32")
    assert paddles["cublas"] is paddles["cudnn"] is True
    with pytest.raises(ValueError, match="NVIDIA_TF32_OVERRIDE=0 is in the environment"):
        configure_gpu(tf32=True, environment={"NVIDIA_TF32_OVERRIDE": "0"}, gpu=machine(tmp_path))


def test_a_cpu_is_left_alone(paddles):
    before = dict(paddles)
    assert configure_gpu(True, True) is None
    assert paddles == before


def test_a_run_makes_its_settings_before_it_builds(tmp_path, monkeypatch):
    run_file, made = write_tiny_run(tmp_path / "data"), []

    def stop(*settings):
        made.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "configure_gpu", stop)
    overrides = [f"train.output_dir={tmp_path / 'out'}", "train.deterministic=true"]
    with pytest.raises(KeyboardInterrupt):
        build_trainer(load_run_config(run_file, overrides))
    assert made == [(True, False)]
    assert flags.REPEATABLE == {CUDNN: True, "FLAGS_embedding_deterministic": 1}
