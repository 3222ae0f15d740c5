"""The GPUs of a node as nvidia-smi, or the driver of AMD, describes them: memory, ECC errors, clocks and what slows them down."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

#: Reasons of reduced clocks that a healthy GPU does not have. A power cap, an idle GPU and configured clocks are no faults.
_THROTTLED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
#: Marks of memory that needs a reset of the GPU, or its replacement.
_MEMORY_FAULTS = (
    ("remapped_rows/remapped_row_pending", "rows to be remapped at the next reset"),
    ("remapped_rows/remapped_row_failure", "a row that could not be remapped"),
    ("retired_pages/pending_retirement", "pages to be retired at the next reset"),
    ("retired_pages/pending_blacklist", "pages to be retired at the next reset"),
)
_AMD = "0x1002"
#: Flags of pages in amdgpu's gpu_vram_bad_pages that need a reset of the GPU, or its replacement; R is a page that is set aside.
_PAGE_FAULTS = {"P": "pages to be retired at the next reset", "F": "pages that could not be retired"}


def query(seconds: float, devices: Path = Path("/sys/class/drm")) -> dict[str, Any] | None:
    """Ask nvidia-smi, where it is installed, or the driver of AMD's GPUs; None where there is neither.

    Returns:
        As parse(), or {"error": TEXT} if that failed or was not answered in time, which is a sign of a lost GPU.
    """
    if shutil.which("nvidia-smi") is None:
        gpus = []
        for vendor in sorted(devices.glob("card*/device/vendor"), key=lambda path: (len(str(path)), path)):
            if vendor.read_text().strip() == _AMD:
                try:
                    gpus.append(_amd_gpu(vendor.parent))
                except OSError as error:
                    return {"error": f"amdgpu: {vendor.parent} cannot be read: {error.strerror}"}
        return {"driver": f"amdgpu of Linux {platform.release()}", "gpus": gpus} if gpus else None
    try:
        done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"nvidia-smi did not answer within {seconds:.0f} s"}
    except OSError as error:
        return {"error": f"nvidia-smi cannot be started: {error.strerror}"}
    if done.returncode:
        return {"error": f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())[-300:] or f'exit code {done.returncode}'}"}
    return parse(done.stdout)


def parse(text: str) -> dict[str, Any]:
    """Read the output of `nvidia-smi -q -x`, whose older and newer versions name some fields differently.

    Returns:
        "driver": its version; "gpus": of each "name", "uuid", "memory_gb" (total), "sm_mhz" and "max_sm_mhz" (clocks, None if unknown),
        "ecc": uncorrected errors since the driver was loaded (None without ECC), "faults": marks of damaged memory, "throttled": reasons.
        {"error": TEXT} if it is not that format.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        return {"error": f"the output of nvidia-smi cannot be read: {error}"}
    return {"driver": root.findtext("driver_version", "unknown"), "gpus": [_gpu(gpu) for gpu in root.iter("gpu")]}


def _gpu(gpu: ElementTree.Element) -> dict[str, Any]:
    volatile = gpu.find("ecc_errors/volatile")
    counts = [_number(field.text) for field in volatile if "uncorrectable" in field.tag] if volatile is not None else []
    known = [count for count in counts if count is not None]
    reasons = next((part for name in ("event", "throttle") if (part := gpu.find(f"clocks_{name}_reasons")) is not None), ())
    memory = _number(gpu.findtext("fb_memory_usage/total"))
    return {
        "name": gpu.findtext("product_name", "unknown"),
        "uuid": gpu.findtext("uuid", ""),
        "memory_gb": round(memory * 2**20 / 1e9, 2) if memory else None,
        "sm_mhz": _number(gpu.findtext("clocks/sm_clock")),
        "max_sm_mhz": _number(gpu.findtext("max_clocks/sm_clock")),
        "ecc": int(sum(known)) if known else None,
        "faults": list(dict.fromkeys(text for path, text in _MEMORY_FAULTS if gpu.findtext(path, "No").strip() == "Yes")),
        "throttled": [
            name for name in _THROTTLED if any(r.tag.endswith(f"_{name}") and (r.text or "").strip() == "Active" for r in reasons)
        ],
    }


def _amd_gpu(device: Path) -> dict[str, Any]:
    """The values of `_gpu` from the files of amdgpu, which amd-smi and rocm-smi read as well (docs.kernel.org/gpu/amdgpu).

    Files that a kernel or a kind of GPU lacks are None, and no fault. What slows a GPU down has no file in text.
    """

    def lines(name: str) -> list[str]:
        return (device / name).read_text().splitlines() if (device / name).is_file() else []

    clocks = [(_number(line.partition(":")[2]), line.endswith("*")) for line in lines("pp_dpm_sclk")]  # "1: 1700Mhz *"
    counts = [line for path in device.glob("ras/*_err_count") for line in lines(f"ras/{path.name}")]
    errors = [int(line[3:]) for line in counts if re.fullmatch(r"ue: *\d+", line)]
    pages = Counter(line.split()[-1] for line in lines("ras/gpu_vram_bad_pages") if ":" in line)  # "0x00000001 : 0x00001000 : R"
    memory = _number(next(iter(lines("mem_info_vram_total")), None))
    return {
        "name": next(iter(lines("product_name")), "") or "AMD GPU",
        "uuid": next(iter(lines("unique_id")), "") or device.resolve().name,
        "memory_gb": round(memory / 1e9, 2) if memory else None,
        "sm_mhz": next((clock for clock, current in clocks if current), None),
        "max_sm_mhz": max((clock for clock, _ in clocks if clock), default=None),
        "ecc": sum(errors) if errors else None,
        "faults": [f"{pages[flag]} {text}" for flag, text in _PAGE_FAULTS.items() if pages[flag]],
        "throttled": [],
    }


def _number(text: str | None) -> float | None:
    """The number of "81559 MiB", None of "N/A"."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)", text or "")
    return float(match[1]) if match else None
