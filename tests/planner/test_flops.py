"""The peak of a device: one table, conf/hardware/, by the name that CUDA gives it or by cluster.hardware."""

from __future__ import annotations

import re

import pytest
import torch

from pipeline.config import hardware as hardware_files
from pipeline.config.cluster import ClusterConfig
from pipeline.config.schema import PrecisionConfig
from pipeline.planner.flops import peak_flops

#: torch.cuda.get_device_name() -> file of conf/hardware/, and the dense 16-bit peak of the manufacturer's data sheet, TFLOP/s.
DEVICES = {
    "Tesla V100-SXM2-16GB": ("v100-16", 125),
    "Tesla V100-SXM2-32GB": ("v100-32", 125),
    "NVIDIA A40": ("a40", 149.7),
    "A100-SXM4-40GB": ("a100-40", 312),
    "NVIDIA A100-SXM4-40GB": ("a100-40", 312),
    "NVIDIA A100-SXM4-80GB": ("a100-80", 312),
    "NVIDIA A800-SXM4-80GB": ("a100-80", 312),
    "NVIDIA A100-SXM-64GB": ("a100-64", 358),  # Leonardo
    "NVIDIA A100-PCIE-40GB": ("a100-pcie", 312),
    "NVIDIA A100 80GB PCIe": ("a100-pcie", 312),
    "NVIDIA L40S": ("l40s", 362),
    "NVIDIA H100 80GB HBM3": ("h100", 989.4),
    "NVIDIA H800": ("h100", 989.4),
    "NVIDIA H100 64GB HBM2": ("h100-64", 989.4),
    "NVIDIA H100 96GB HBM2e": ("h100-96", 989.4),
    "NVIDIA H100 PCIe": ("h100-pcie", 756),
    "NVIDIA H100 NVL": ("h100-nvl", 835.5),
    "NVIDIA H200": ("h200", 989.4),
    "NVIDIA GH200 120GB": ("gh200", 989.4),
    "NVIDIA GH200 480GB": ("gh200", 989.4),
    "NVIDIA B200": ("b200", 2250),
    "NVIDIA GB200": ("gb200", 2450),
    "AMD Instinct MI250X": ("mi250x", 191.5),  # a die
    "AMD Instinct MI300X": ("mi300x", 1307),
}
#: Devices without a file: other peaks than those of similar names, or none that is published.
UNKNOWN = (
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10", "NVIDIA A30", "NVIDIA L40", "NVIDIA H20", "NVIDIA H200 NVL"),
    *("Tesla V100-PCIE-16GB", "AMD Instinct MI300A", "AMD Instinct MI250", "NVIDIA GeForce RTX 4090", ""),
)
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("name", "file", "tflops"), [(name, *expected) for name, expected in DEVICES.items()])
def test_the_peak_follows_from_the_name_of_the_device(name, file, tflops, monkeypatch):
    matching = [other for other in hardware_files.names() if re.fullmatch(hardware_files.load(other).device, name, re.IGNORECASE)]
    assert matching == [file]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(ClusterConfig(), PrecisionConfig(), GPU).tflops == tflops


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_device_has_no_peak(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(ClusterConfig(), PrecisionConfig(), GPU) is None


def test_every_hardware_file_is_that_of_a_device():
    assert {file for file, _ in DEVICES.values()} == set(hardware_files.names())


def test_the_configured_hardware_counts_before_the_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H20")
    assert peak_flops(ClusterConfig(hardware="h100-pcie"), PrecisionConfig(), GPU).tflops == 756


def test_a_cpu_has_no_peak():
    assert peak_flops(ClusterConfig(hardware="h100"), PrecisionConfig(), torch.device("cpu")) is None


@pytest.mark.parametrize(
    "hardware, precision, peak",
    [
        ("h100", PrecisionConfig("fp16"), "989.4 TFLOP/s, the fp16 peak of H100 SXM 80 GB"),
        ("h100", PrecisionConfig("fp32"), "67 TFLOP/s, the fp32 peak of H100 SXM 80 GB"),
        ("h100", PrecisionConfig("bf16", fp8="rowwise"), "1978.9 TFLOP/s, the fp8 peak of H100 SXM 80 GB"),
        ("v100-16", PrecisionConfig("bf16", fp8="tensorwise"), "125 TFLOP/s, the bf16 peak of V100 SXM2 16 GB"),  # no 8-bit products
    ],
)
def test_the_peak_is_that_of_the_trained_precision(hardware, precision, peak):
    assert str(peak_flops(ClusterConfig(hardware=hardware), precision, GPU)) == peak
