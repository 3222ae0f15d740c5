"""The CUDA build of torch on the driver without a GPU: of $TANNSCHEN_CUDA_PYTHON, or .venv-cuda/bin/python of the repository."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import hardware
from pipeline.rehearsal import driver_source

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TANNSCHEN_CUDA_PYTHON") or ROOT / ".venv-cuda" / "bin" / "python")
GIB = 1 << 30
#: Of two blocks of on_driver.py, (m, n, k, batch) of cuBLAS -> how often in a step: forward, gradient of the input, gradient of the weight.
PRODUCTS = {
    "[1024, 2048, 1024, 1]": 16,
    "[1024, 1024, 2048, 1]": 8,
    "[2816, 2048, 1024, 1]": 6,
    "[1024, 2048, 2816, 1]": 6,
    "[1024, 2816, 2048, 1]": 4,
    "[2816, 1024, 2048, 1]": 2,
}
BUILD = """
import json, sys
from pipeline.config import hardware
from pipeline.rehearsal import driver
print(json.dumps(driver.environment(driver.build(hardware.load(sys.argv[1])))))
"""
TABLES = """
import ctypes, json
from pipeline.rehearsal.device_record import DeviceRecord
code = ctypes.CDLL("libcuda.so.1").cuGetExportTable(ctypes.byref(ctypes.c_void_p()), bytes(16))
print(json.dumps([code, DeviceRecord().unknown()]))
"""
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no CUDA build of torch: neither TANNSCHEN_CUDA_PYTHON nor {ROOT / '.venv-cuda'}"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler `cc`"),
]


@functools.cache
def variables_of(gpu: str) -> dict[str, str]:
    """Build the driver for a GPU and return the variables for a process that uses it."""
    return python("-c", BUILD, gpu)


def python(*arguments: str, **variables: str) -> Any:
    """Return what the interpreter with CUDA prints as its last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([PYTHON, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def on_driver(function: str, gpu: str = "h100", **variables: str) -> Any:
    """Return the result of a function of on_driver.py."""
    return python(str(Path(__file__).parent / "on_driver.py"), function, **variables_of(gpu), **variables)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory) -> Iterator[None]:
    """The driver is compiled anew, once for each GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANNSCHEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        variables_of.cache_clear()
        yield


def test_private_tables_of_functions_are_refused_without_being_unknown():
    assert python("-c", TABLES, **variables_of("h100")) == [801, []]


@pytest.mark.parametrize("gpu", ["a100-80", "b200"])
def test_torch_sees_the_gpu_of_the_file(gpu):
    file = hardware.load(gpu)
    capability = [int(part) for part in file.capability.split(".")]
    expected = {"name": file.device_name, "capability": capability, "memory": driver_source.memory_bytes(file), "sms": file.multiprocessors}
    assert on_driver("device", gpu) == expected


def test_a_step_launches_products_kernels_and_attention():
    result = on_driver("block")
    first, second, without_cudnn = result["steps"]
    assert second == {**first, **{name: second[name] for name in ("kernels", "allocated", "blocks")}}, "gradients are new in the first step"
    assert second["products"] == PRODUCTS
    assert second["graphs"] == {"cudnn_attention_forward": 2, "cudnn_attention_backward": 2}
    assert without_cudnn["graphs"] == {}
    assert without_cudnn["kernels"]["void pytorch_flash::flash_fwd_kernel"] == 2
    assert (second["waits"], second["recorded_waits"], second["value"], second["unknown"]) == (1, 1, 0.0, [])
    assert all(step["allocated"] == step["blocks"] for step in result["steps"])
    assert second["blocks"] == 2048 * 1024 * 2 + 512, "the gradient of the input, and that of the loss"
    assert result["reserved"] == result["used"]


@pytest.mark.parametrize("segments", ["False", "True"])
def test_memory_is_retried_and_ends(segments):
    result = on_driver("memory", PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{segments}")
    assert result["retries"] > 0 or segments == "True"
    assert "GPU 0 has a total capacity of 80.00 GiB" in result["error"]
    assert 77 * GIB < result["reserved"] == result["used"] <= 80 * GIB
    assert (result["left"], result["unknown"]) == (0, [])


def test_values_let_checks_pass():
    assert on_driver("values") == {"rate": 0.25, "checks": [True] * 3 + [False] * 2, "norm": 0.0, "token": 3}


def test_products_in_8_bits_and_grouped_products_launch():
    e4m3 = 28
    expected = {"products": [[1024, 256, 512, 1]] * 2, "types": [e4m3] * 2, "grouped": 3, "unknown": []}
    assert on_driver("low_precision") == expected


def test_the_first_call_of_attention_runs_the_chosen_kernel():
    assert on_driver("attention_order")["kernels"] == ["ScaledDotProductEfficientAttentionBackward0"] * 2


def test_a_function_that_is_not_known_is_named():
    result = on_driver("refused")
    assert "the driver without a GPU has no answer for it" in result["error"]
    assert result["unknown"] == ["cudaStreamBeginCapture"]


@pytest.mark.long
def test_compiled_kernels_launch():
    result = on_driver("compiled")
    kernels = {name: count for name, count in result["step"]["kernels"].items() if name.startswith("triton_")}
    assert len(kernels) >= 5
    assert result["step"]["unknown"] == []
    assert 8 <= result["registers"] <= 64
    assert result["spills"] == 0
    recorded = Counter(name for _, name in result["work"] if name.startswith("triton_"))
    assert recorded == kernels, "a recorded step runs what is compiled"
    assert Counter(kind for kind, _ in result["work"])["product"] == sum(result["step"]["products"].values())
    assert {one["name"]: one["launches"] for one in result["generated"]} == kernels
    assert max(one["bytes"] for one in result["generated"]) >= 2048 * 1024 * 2
    hidden = 2048 * 1024 * 2
    for one in result["generated"]:
        assert 8 <= one["registers"] <= 255
        assert 2 * 1024 < one["bytes"] <= 16 * hidden, one  # the smallest one adds up partial gradients of a norm
