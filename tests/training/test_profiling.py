"""training.profile: what a trace says, on made-up events, and traces and reports of a run that trains."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.rules import check
from pipeline.training import profiling
from tests.training import one_rank
from tests.world import configured


def event(name: str, begin: float, duration: float, category: str = "kernel", tid: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "tid": tid}


def memory(total: int, size: int, device: int) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "ts": 0, "args": {"Total Allocated": total, "Bytes": size, "Device Type": device}}


def test_the_figures_of_a_gpu() -> None:
    kernels = [event("gemm", 100, 300), event("ncclDevKernel_AllReduce_Sum", 200, 400), event("gemm", 500, 50), event("gemm", 700, 100)]
    host = [
        event("aten::mm", 0, 1000, "cpu_op"),
        memory(9, 9, 0),
        memory(3_000, 1_000, 1),
        memory(5_000, 2_000, 1),
        memory(4_000, -1_000, 1),
    ]
    found = profiling.summary(kernels + host)
    assert found == profiling.StepProfile("GPU", 1e-3, 450e-6, 400e-6, 150e-6, (2_000, 5_000, 4_000))
    assert "exposed communication 0.15 ms (15.0%)" in str(found)
    assert "0.0000 GB at the begin" in str(found)


def test_the_picture_of_a_gpu() -> None:
    """Two streams and the host: each column has the color of what runs, and what the device waits for."""
    kernels = [
        event("sm90_xmma_gemm", 0, 400, tid=7),
        event("ncclDevKernel_AllReduce_Sum", 300, 300, tid=9),
        event("flash_fwd_kernel", 600, 100, tid=7),
        event("Memcpy HtoD", 700, 50, "gpu_memcpy", tid=7),
        event("triton_poi_add", 900, 100, tid=7),
    ]
    events = [*kernels, event("cudaStreamSynchronize", 750, 150, "cuda_runtime", tid=1), event("aten::mm", 0, 10, "cpu_op", tid=1)]
    step = profiling.picture(events)
    kinds = {name: [span.kind for span in spans] for name, spans in step.rows}
    assert kinds == {
        "host": ["waits of the host"],
        "stream 7": ["matrix products", "attention", "copies", "other kernels"],
        "stream 9": ["collectives"],
    }
    assert (step.window, step.exposed, step.late) == ((0, 1e-3), [pytest.approx((400e-6, 600e-6))], [pytest.approx((750e-6, 900e-6))])
    assert profiling.costs(events)[0].split() == ["0.40", "ms", "40.0%", "1", "x", "sm90_xmma_gemm"]


def test_the_own_time_of_operations_of_a_cpu() -> None:
    calls = [("aten::linear", 0, 100), ("aten::addmm", 10, 80), ("aten::copy_", 20, 10), ("aten::addmm", 200, 50)]
    events = [event(name, begin, duration, "cpu_op", tid=1) for name, begin, duration in calls]
    assert [line.split()[::5] for line in profiling.costs(events)] == [
        ["0.12", "aten::addmm"],
        ["0.02", "aten::linear"],
        ["0.01", "aten::copy_"],
    ]
    kinds = [(span.kind, round(1e6 * span.begin), round(1e6 * span.end)) for span in profiling.picture(events).rows[0][1]]
    assert kinds == [
        ("other kernels", 0, 10),
        ("other kernels", 90, 100),
        ("matrix products", 10, 20),
        ("matrix products", 30, 90),
        ("other kernels", 20, 30),
        ("matrix products", 200, 250),
    ]
    assert profiling.picture([]).window == (0, 0)


def test_a_trace_without_events() -> None:
    assert profiling.summary([]) == profiling.StepProfile("CPU", 0.0, 0.0, 0.0, 0.0, None)


def test_profiled_steps_of_a_run(tokens: Path, tmp_path: Path) -> None:
    settings = (f"data.tokens={tokens}", "training.steps=3")
    one_rank.run("pretrain", tmp_path / "plain", *settings)
    one_rank.run("pretrain", tmp_path / "run", *settings, "training.profile=[2,3]")
    assert [line["loss"] for line in one_rank.lines(tmp_path / "run").values()] == [
        line["loss"] for line in one_rank.lines(tmp_path / "plain").values()
    ]
    names = [f"step-0000000{step}-rank-00000.{end}" for step in (2, 3) for end in ("html", "json.gz", "txt")]
    assert sorted(path.name for path in (tmp_path / "run" / profiling.FOLDER).iterdir()) == names
    with gzip.open(tmp_path / "run" / profiling.FOLDER / names[1], "rt") as handle:
        assert any("mm" in line["name"] for line in json.load(handle)["traceEvents"])
    report = (tmp_path / "run" / profiling.FOLDER / names[2]).read_text()
    assert report.startswith("step 2, rank 0 on ")
    assert "ms; CPU: computes " in report
    assert "memory of tensors on the CPU: " in report
    assert "Self CPU" in report
    page = (tmp_path / "run" / profiling.FOLDER / names[0]).read_text()
    for name in ("Step 2, rank 0", "matrix products", "ms; CPU: computes ", "largest costs", "x aten::"):
        assert name in page
    assert not (tmp_path / "plain" / profiling.FOLDER).exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / profiling.FOLDER).write_text("a file")
    config = configured("stage=pretrain", "model=gpt-tiny", "training.profile=[1]", "training.profile_ranks=[0]", f"run_dir={tmp_path}")
    with caplog.at_level(logging.WARNING), profiling.Profiler(config, 0).during_step(1):
        pass
    assert "step 1: the profile was not written" in caplog.text


def test_steps_and_ranks_that_are_not_there_are_refused() -> None:
    config = configured("stage=pretrain", "model=gpt-tiny", "training.steps=5", "training.profile=[5,6]", "training.profile_ranks=[0,8]")
    found = {violation.key: violation.value for violation in check.violations(config, 8) if "profile" in violation.key}
    assert found == {"training.profile": 6, "training.profile_ranks": 8}
