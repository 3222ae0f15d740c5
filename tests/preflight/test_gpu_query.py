"""The GPUs of a node in the output of nvidia-smi, of older and newer drivers, and in the files of AMD's driver."""

import os
from pathlib import Path

import pytest

from pipeline.preflight import gpu_query

GPU = """<gpu id="00000000:1A:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-11</uuid>
<clocks_KIND_reasons><clocks_KIND_reason_gpu_idle>Active</clocks_KIND_reason_gpu_idle>
<clocks_KIND_reason_sw_power_cap>Active</clocks_KIND_reason_sw_power_cap>
<clocks_KIND_reason_hw_slowdown>HOT</clocks_KIND_reason_hw_slowdown>
<clocks_KIND_reason_hw_thermal_slowdown>HOT</clocks_KIND_reason_hw_thermal_slowdown></clocks_KIND_reasons>
<clocks_event_reasons_counters><clocks_event_reasons_counters_hw_therm_slowdown>7 us</clocks_event_reasons_counters_hw_therm_slowdown>
</clocks_event_reasons_counters>
<fb_memory_usage><total>81559 MiB</total><used>4 MiB</used><free>81000 MiB</free></fb_memory_usage>
<ecc_errors><volatile>ECC</volatile><aggregate><dram_uncorrectable>3</dram_uncorrectable></aggregate></ecc_errors>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_unc>1</remapped_row_unc><remapped_row_pending>No</remapped_row_pending>
<remapped_row_failure>FAILED</remapped_row_failure></remapped_rows>
<clocks><sm_clock>345 MHz</sm_clock></clocks><max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks></gpu>"""
NEWER = "<sram_uncorrectable_parity>0</sram_uncorrectable_parity><sram_uncorrectable_secded>1</sram_uncorrectable_secded>"
OLDER = "<sram_uncorrectable>0</sram_uncorrectable>"


def output(kind: str, hot: str, ecc: str, failed: str) -> str:
    gpu = GPU.replace("KIND", kind).replace("HOT", hot).replace("ECC", ecc).replace("FAILED", failed)
    return f'<?xml version="1.0" ?><nvidia_smi_log><driver_version>550.54</driver_version>{gpu}{gpu}</nvidia_smi_log>'


def test_a_healthy_node():
    found = gpu_query.parse(output("throttle", "Not Active", OLDER + "<dram_uncorrectable>0</dram_uncorrectable>", "No"))
    assert found["driver"] == "550.54"
    assert len(found["gpus"]) == 2
    assert found["gpus"][0] == {
        "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-11", "memory_gb": 85.52, "sm_mhz": 345.0, "max_sm_mhz": 1980.0, "ecc": 0,
        "faults": [], "throttled": [],
    }  # fmt: skip


def test_faults():
    gpu = gpu_query.parse(output("event", "Active", NEWER + "<dram_uncorrectable>2</dram_uncorrectable>", "Yes"))["gpus"][0]
    assert gpu["ecc"] == 3
    assert gpu["faults"] == ["a row that could not be remapped"]
    assert gpu["throttled"] == ["hw_slowdown", "hw_thermal_slowdown"]


def test_memory_without_ecc():
    na = "<sram_uncorrectable_parity>N/A</sram_uncorrectable_parity><dram_uncorrectable>N/A</dram_uncorrectable>"
    assert gpu_query.parse(output("event", "Not Active", na, "N/A"))["gpus"][0]["ecc"] is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "echo 'Unable to determine the device handle for GPU 0000:1A:00.0: Unknown Error'; exit 15",
            "nvidia-smi: Unable to determine the device handle",
        ),
        ("echo nonsense", "cannot be read"),
        ("exec sleep 60", "did not answer within 1 s"),
    ],
)
def test_a_command_that_fails(script, expected, tmp_path: Path, monkeypatch):
    """A lost GPU shows itself so."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert expected in gpu_query.query(1)["error"]


@pytest.fixture
def cards(tmp_path: Path, monkeypatch) -> Path:
    """Two GCDs of a MI250X, the display of the host, and its output."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for card in (2, 10):
        files = {
            "vendor": "0x1002", "unique_id": f"8f5{card}", "product_name": "AMD INSTINCT MI250X", "mem_info_vram_total": 68702699520,
            "pp_dpm_sclk": "0: 500Mhz\n1: 800Mhz *\n2: 1700Mhz", "ras/umc_err_count": "ue: 0\nce: 3\nde: 0",
            "ras/gfx_err_count": "ue: 0\nce: 0", "ras/gpu_vram_bad_pages": "0x00000001 : 0x00001000 : R",
        }  # fmt: skip
        for name, text in files.items():
            path = tmp_path / f"drm/card{card}/device" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    (tmp_path / "drm/card0/device").mkdir(parents=True)
    (tmp_path / "drm/card0/device/vendor").write_text("0x1a03\n")
    (tmp_path / "drm/card0-VGA-1").mkdir()
    return tmp_path / "drm"


def test_gpus_of_amd(cards: Path):
    first, second = gpu_query.query(1, cards)["gpus"]
    assert first == {
        "name": "AMD INSTINCT MI250X", "uuid": "8f52", "memory_gb": 68.7, "sm_mhz": 800.0, "max_sm_mhz": 1700.0, "ecc": 0, "faults": [],
        "throttled": [],
    }  # fmt: skip
    assert second["uuid"] == "8f510"


def test_faults_of_amd(cards: Path):
    ras = cards / "card10/device/ras"
    (ras / "gfx_err_count").write_text("ue: 2\nce: 0\n")
    (ras / "gpu_vram_bad_pages").write_text("0x1 : 0x1000 : R\n0x2 : 0x1000 : P\n0x3 : 0x1000 : P\n0x4 : 0x1000 : F\n")
    first, second = gpu_query.query(1, cards)["gpus"]
    assert (first["ecc"], first["faults"]) == (0, [])
    assert (second["ecc"], second["faults"]) == (2, ["2 pages to be retired at the next reset", "1 pages that could not be retired"])


def test_gpus_of_amd_with_few_files(cards: Path):
    """A kernel without RAS, on a card that has no name."""
    for name in ("ras/umc_err_count", "ras/gfx_err_count", "ras/gpu_vram_bad_pages", "product_name", "pp_dpm_sclk"):
        (cards / "card2/device" / name).unlink()
    gpu = gpu_query.query(1, cards)["gpus"][0]
    assert (gpu["name"], gpu["ecc"], gpu["max_sm_mhz"], gpu["faults"]) == ("AMD GPU", None, None, [])


def test_a_gpu_of_amd_that_is_lost(cards: Path):
    """Its files are there, and reading one fails."""
    clock = cards / "card2/device/pp_dpm_sclk"
    clock.unlink()
    clock.symlink_to("/proc/self/mem")
    assert "card2/device cannot be read: Input/output error" in gpu_query.query(1, cards)["error"]


def test_no_gpus(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_query.query(1, tmp_path) is None
