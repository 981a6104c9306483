"""Peak FLOP/s of devices.

Guarantees: CUDA's device names map to the dense figure of the data sheet, variants to their own;
partial devices, other devices with similar names, and dtypes without matrix units are unknown;
float32 means TF32 unless switched off; the setting overrides the table; an unknown GPU is logged
once.
"""

import logging

import paddle
import pytest

from paddle_vl.train.reporting.device_peaks import device_peak, known_peak

BFLOAT16 = {
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H800": 989.5,
    "NVIDIA H20": 148,
    "NVIDIA H20-3e": 148,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA L20": 119.5,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA GeForce RTX 3090 Ti": 80,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA B200": 2250,
}


@pytest.mark.parametrize(("name", "tera"), BFLOAT16.items())
def test_a_device_is_known_by_its_name(name, tera):
    assert known_peak(name, "bfloat16") == tera * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10G",
        "NVIDIA GeForce GTX 1080",
        "Tesla V100-SXM2-32GB",
        "Tesla T4",
    ],
)
def test_others_are_not_known(name):
    assert known_peak(name, "bfloat16") is None


def test_float32_is_tf32_if_that_is_on(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(paddle.base.core, "get_cublas_switch", lambda: False)
    assert known_peak("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    monkeypatch.setattr(paddle.base.core, "get_cublas_switch", lambda: True)
    assert known_peak("NVIDIA A100-SXM4-80GB", "float32") == 156e12
    assert known_peak("Tesla T4", "float32") == 8.1e12
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert known_peak("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert known_peak("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12


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
