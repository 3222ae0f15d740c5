"""stage=preflight without Slurm: the checks of this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.common.ranks import Ranks
from pipeline.launch import preflight_step
from pipeline.preflight import file_system, node_result
from pipeline.stages import preflight
from tests.helpers import pipeline, run_ranks

#: Ranks of a test share the cores with other tests: what they measure differs.
SHARED = ("cluster.slow_factor=100",)


@pytest.mark.world
def test_two_ranks_of_this_machine(tmp_path: Path) -> None:
    printed = run_ranks(2, "stage=preflight", f"run_dir={tmp_path}", *SHARED)
    assert "preflight: the node passed" in printed
    (path,) = (tmp_path / "preflight").glob("*.json")
    result = json.loads(path.read_text())
    assert (result["phase"], result["error"], result["missing_ranks"]) == ("complete", None, [])
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert result["inside_gb_s"] > 0
    assert result["all_gb_s"] > 0
    assert re.search(rf"^{result['node']} +all-reduce inside +\S+ GB/s .* ok$", printed, re.MULTILINE)
    assert not list((tmp_path / "preflight").glob(".*")), "the test file of the file system is left"


def test_a_limit_of_the_file_system_and_missing_gpus_are_named(tmp_path: Path) -> None:
    limited = ("bash", "-c", 'ulimit -f 512; exec "$@"', "bash")  # 512 kB
    settings = (f"run_dir={tmp_path}", "cluster.gpus_per_node=4", "cluster.hardware=h100")
    printed = pipeline("stage=preflight", *settings, prefix=limited, cold=True, expect=1, env={"CUDA_VISIBLE_DEVICES": ""})
    assert "a file of 1 MB cannot be written, flushed and read back: File too large (" in printed
    assert "has 0 GPUs, not 4" in printed
    assert "Traceback" not in printed


def test_a_result_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A node whose file system is full, or not mounted, still says what it has found."""
    (tmp_path / "file").touch()
    result = {"node": "n1", "phase": "local", "file_system": {"error": "Not a directory"}}
    node_result.write(tmp_path / "file" / "folder", result)
    output = f"12:00:00 some line\n{capsys.readouterr().out}[1]: {node_result.MARK}{{torn\n"
    assert node_result.printed(output) == {"n1": result}


def test_results_of_another_step_do_not_count(tmp_path: Path) -> None:
    node_result.write(tmp_path, {"node": "n1", "step": "7.0.0", "phase": "complete"})
    node_result.path_of(tmp_path, "n2").write_text("{torn")
    assert node_result.read(tmp_path, ["n1", "n2", "n3"]).keys() == {"n1"}
    assert node_result.read(tmp_path, ["n1"], "7.1.0") == {}
    others = ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"})
    assert len({node_result.step_id({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", **other}) for other in others}) == 3


def test_a_rank_that_failed_has_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 judges the nodes; the others say by their exit code that they have failed."""
    from pipeline.preflight import measure  # loads torch
    from tests.world import configured

    monkeypatch.setattr(preflight, "GRACE_SECONDS", 0)
    monkeypatch.setattr(measure, "RankChecks", lambda *_: SimpleNamespace(run=lambda: False))
    with pytest.raises(SystemExit, match=r"^1$"):
        preflight.run(configured("stage=preflight", f"run_dir={tmp_path}"), Ranks(1, 2, 1, 2, launcher="torchrun"))


@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ("     /dev/sda1  104800*  100000  110000   6days       7     0     0", True),
        ("/scratch  1.2T*  1T  2T  -  12  0  0  -", True),
        ("     /dev/sda1   99800   100000  110000               7     0     0", False),
        ("Disk quotas for user me (uid 1000): none", False),
    ],
)
def test_lines_of_quota_commands(line: str, marked: bool) -> None:
    assert file_system.marks_excess(line) is marked


@pytest.mark.parametrize(
    ("stage", "preflight", "gpus", "nodes", "expected"),
    [
        ("pretrain", "auto", 4, 2, True),
        ("finetune", "auto", 4, 2, True),
        ("pretrain", "auto", 4, 1, False),
        ("pretrain", "auto", 0, 2, False),
        ("evaluate", "auto", 4, 2, False),
        ("pretrain", "off", 4, 2, False),
        ("pretrain", "on", 0, 1, True),
    ],
)
def test_which_jobs_begin_with_a_preflight(stage: str, preflight: str, gpus: int, nodes: int, expected: bool) -> None:
    from tests.world import configured

    config = configured(f"stage={stage}", f"cluster.preflight={preflight}", f"cluster.gpus_per_node={gpus}")
    assert preflight_step.wanted(config, ["n"] * nodes) is expected


def test_an_empty_fabric_is_refused() -> None:
    printed = pipeline("stage=preflight", "cluster.fabric=''", expect=2)
    assert "cluster.fabric='': must be the name of a network" in printed
