"""Settings of a GPU: attention version, TF32, repeatability, allocator, and peak FLOP/s."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import paddle
import pytest
from PIL import Image

from paddle_vl.cli import commands
from paddle_vl.config.load import load_run_config
from paddle_vl.train import build
from paddle_vl.train import gpu_settings as flags
from paddle_vl.train.allocator import STRATEGY, VIRTUAL, allocator_flags, configure_allocator
from paddle_vl.train.build import build_trainer
from paddle_vl.train.gpu_settings import Gpu, configure_gpu
from paddle_vl.train.reporting.device_peaks import device_peak, known_peak
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.forked import ROOT

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
    before = dict(paddles)
    told = configure_gpu(environment=environment, gpu=machine(tmp_path))
    assert told == (
        "GPU of compute capability 9.0: FlashAttention 3, float32 products in full precision"
    )
    assert paddles == before | {VERSION: 3, "cublas": False, "cudnn": False}
    assert environment == {}
    # A user's version stays.
    paddles[VERSION] = 2
    told = configure_gpu(environment={VERSION: "2"}, gpu=machine(tmp_path))
    assert "FlashAttention 2" in told
    assert paddles[VERSION] == 2


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


@pytest.fixture(autouse=True)
def flags_as_paddle_has_them():
    kept = allocator_flags()
    paddle.set_flags({STRATEGY: "auto_growth", VIRTUAL: False})
    yield
    paddle.set_flags(kept)


def test_an_unset_flag_gets_its_default():
    told = configure_allocator({})
    assert paddle.get_flags(VIRTUAL) == {VIRTUAL: True}
    assert told == f"Paddle's allocator: {STRATEGY}=auto_growth, {VIRTUAL}=True"


@pytest.mark.parametrize(
    ("environment", "flag", "value"),
    [
        ({VIRTUAL: "0"}, VIRTUAL, False),
        ({STRATEGY: "naive_best_fit"}, STRATEGY, "naive_best_fit"),
        ({}, "FLAGS_use_auto_growth_v2", True),
    ],
)
def test_what_the_user_has_chosen_stays(environment, flag, value):
    paddle.set_flags({flag: value})
    told = configure_allocator(environment)
    assert paddle.get_flags([flag, VIRTUAL]) == {VIRTUAL: False, flag: value}
    assert f"{VIRTUAL}=False (you set {flag})" in told


def test_a_run_on_a_gpu_tells_the_flags(monkeypatch, caplog):
    monkeypatch.setattr(commands, "configure_runtime", lambda: None)
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    with caplog.at_level("INFO"):
        commands.configure_training_runtime()
    assert f"{STRATEGY}=auto_growth" in caplog.text


def test_a_run_on_a_cpu_says_nothing_of_flags_and_threads(tmp_path):
    run_file = write_tiny_run(tmp_path / "run")
    started = [sys.executable, "-m", "paddle_vl", "train", str(run_file), "train.max_steps=1"]
    done = subprocess.run(
        started,
        cwd=ROOT,
        env=os.environ | {VIRTUAL: "0", "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "always"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for word in ("FLAGS", "OMP", "Warning", "WARNING"):
        assert word not in done.stderr
    out = tmp_path / "run" / "out"
    (start,) = json.loads((out / "run.json").read_text())["starts"]
    found = start["allocator"]
    assert (found[STRATEGY], found[VIRTUAL]) == ("auto_growth", False)
    # The recorded command starts the same run again.
    assert start["command"] == started
    with Image.open(out / "loss.png") as curve:
        assert curve.size == (1280, 800)


# Of a data sheet, of variants that have their own, and None of others with similar names.
BFLOAT16 = {
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H20-3e": 148,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A10G": None,
    "Tesla T4": None,
}


@pytest.mark.parametrize(("name", "tera"), BFLOAT16.items())
def test_a_device_is_known_by_its_name(name, tera):
    assert known_peak(name, "bfloat16") == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype", "is_on", "override", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "float32", False, None, 19.5),
        ("NVIDIA A100-SXM4-80GB", "float32", True, None, 156),
        ("Tesla T4", "float32", True, None, 8.1),
        ("NVIDIA A100-SXM4-80GB", "float32", True, "0", 19.5),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", True, "0", 312),
    ],
)
def test_float32_is_tf32_if_that_is_on(monkeypatch, name, dtype, is_on, override, tera):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    monkeypatch.setattr(paddle.base.core, "get_cublas_switch", lambda: is_on)
    assert known_peak(name, dtype) == tera * 1e12


def test_a_setting_holds_and_the_cpu_is_silent(caplog):
    caplog.set_level(logging.INFO)
    assert device_peak("bfloat16", setting=2.5) == 2.5e12
    assert device_peak("bfloat16") is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "peak", "lines"), [("NVIDIA H20", 148e12, 0), ("Some GPU", None, 1)]
)
def test_an_unknown_gpu_is_told_with_the_setting(name, peak, lines, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(paddle.device.cuda, "get_device_name", lambda: name)
    assert device_peak("bfloat16") == peak
    assert len(caplog.records) == lines
    assert all(name in r.message and "device_peak_tflops" in r.message for r in caplog.records)
