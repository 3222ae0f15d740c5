"""The GPUs of a node as nvidia-smi describes them: memory, ECC errors, clocks and what slows them down."""

from __future__ import annotations

import re
import shutil
import subprocess
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


def query(seconds: float) -> dict[str, Any] | None:
    """Ask nvidia-smi for the GPUs of this node; None where it is not installed.

    Returns:
        As parse(), or {"error": TEXT} if it failed or did not answer in time, which is a sign of a lost GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"nvidia-smi did not answer within {seconds:.0f} s"}
    except OSError as error:
        return {"error": f"nvidia-smi cannot be started: {error.strerror}"}
    if done.returncode:
        return {"error": " ".join((done.stdout + done.stderr).split())[-300:] or f"nvidia-smi ended with exit code {done.returncode}"}
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


def _number(text: str | None) -> float | None:
    """The number of "81559 MiB", None of "N/A"."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)", text or "")
    return float(match[1]) if match else None
