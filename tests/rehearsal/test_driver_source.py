"""The source of the driver without a GPU: the GPU of a file of conf/hardware/, and stubs that tell their names."""

from __future__ import annotations

import dataclasses
import re

import pytest

from pipeline.common.errors import UserError
from pipeline.config import hardware
from pipeline.rehearsal import driver_source


def defines(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE))


def test_the_gpu_is_that_of_the_file():
    values = defines(driver_source.constants(hardware.load("h100"), "13.0"))
    assert (values["MAJOR"], values["MINOR"], values["MULTIPROCESSORS"], values["CUDA_VERSION"]) == ("9", "0", "132", "13000")
    assert values["DEVICE_NAME"] == '"NVIDIA H100 80GB HBM3"'
    assert defines(driver_source.constants(hardware.load("a100-40"), "13.2"))["CUDA_VERSION"] == "13020"


@pytest.mark.parametrize("memory_gb, pages", [(85.899345920, 40960), (0.0042, 2), (0.0041, 1)])
def test_memory_is_whole_pages(memory_gb, pages):
    assert driver_source.memory_bytes(dataclasses.replace(hardware.load("h100"), memory_gb=memory_gb)) == pages << 21


@pytest.mark.parametrize("name", hardware.names())
def test_each_gpu_can_be_answered_for_or_says_why_not(name):
    gpu = hardware.load(name)
    if gpu.device.startswith("AMD"):
        with pytest.raises(UserError, match=r"must be a GPU of NVIDIA(.|\n)*dry_run=true(.|\n)*stage=plan"):
            driver_source.constants(gpu, "13.0")
    else:
        assert re.fullmatch(gpu.device, gpu.device_name, re.IGNORECASE), "the rehearsal shows a name by which the file is found"
        assert hardware.of_device(gpu.device_name) == gpu
        assert defines(driver_source.constants(gpu, "13.0"))["MAJOR"] == gpu.capability.split(".")[0]


def test_a_capability_that_is_not_known_is_told():
    with pytest.raises(UserError, match="capability"):
        driver_source.constants(dataclasses.replace(hardware.load("h100"), capability="11.7"), "13.0")


def test_only_functions_that_are_not_known_become_stubs():
    text = driver_source.source(hardware.load("h100"), {"cudaMalloc", "cublasSgemm_v2", "cudaNew", "cublasNew", "cuNew", "ncclNew"}, "13.0")
    stubs = re.findall(r"^UNKNOWN\((\w+), (\d+)\)$", text, re.MULTILINE)
    assert stubs == [("cuNew", "801"), ("cublasNew", "15"), ("cudaNew", "801"), ("ncclNew", "5")]


def test_a_function_of_another_library_is_no_stub():
    with pytest.raises(ValueError, match="mkl_new"):
        driver_source.stubs({"mkl_new"})
