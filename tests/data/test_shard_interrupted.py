"""Text shards of runs that end early or share their work: full disks, kills, job arrays."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.data.library import LIBRARY, here
from tests.data.raw_files import json_line
from tests.helpers import RAW, environment, pipeline, program, python, same_files, words

#: The command line with a limit on the size of files: its first word, in bytes.
LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
del sys.argv[1]
runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_full_disk_ends_clearly_and_the_rerun_completes(tmp_path):
    """A file-size limit emulates a full disk: the same writes fail, and no root is required."""
    (tmp_path / "x.jsonl").write_text("".join(json_line(words(n, 40)) for n in range(400)))
    settings = ("stage=shard", *RAW, f"data.input=[{tmp_path}/x.jsonl]")
    here(*settings, f"data.shards={tmp_path}/complete")
    folder = tmp_path / "limited"
    for kilobytes in (50, 200):  # too small for the spill; large enough for it, but not for the shard
        code, printed = python("-c", LIMITED, kilobytes << 10, *settings, f"data.shards={folder}")
        assert code == 2, printed
        assert f"{folder}: cannot be written" in printed
        assert "Traceback" not in printed
        assert [path.name for path in folder.iterdir()] == [".unfinished"]
    here(*settings, f"data.shards={folder}")
    assert same_files(tmp_path / "complete", folder)


def start(*arguments: object) -> warm.Process:
    return warm.start("-m", "pipeline", *arguments, environment=environment())


def wait_for(folder: Path, mark: str, process: warm.Process | subprocess.Popen) -> None:
    while process.poll() is None and not list(folder.glob(mark)):
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    "marks",
    [
        ("train-00001.tar",),  # writing
        pytest.param((".unfinished/part-000001.json", ".unfinished/plan.json", "train-00001.tar"), marks=pytest.mark.long),
    ],
    ids=["once", "in every phase"],
)
def test_killed_runs_write_no_manifest_and_the_rerun_equals_an_uninterrupted_one(library, cleaned, tmp_path, marks):
    folder = tmp_path / "killed"
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
    for mark in marks:
        process = start(*settings)
        wait_for(folder, mark, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        assert not (folder / "manifest.json").exists()
    recorded = {path.name.removesuffix(".json") for path in (folder / ".unfinished").iterdir()}
    done = {path.name: path.stat().st_ino for path in folder.glob("*.tar") if path.name in recorded}
    assert done
    pipeline(*settings, ranks=2)
    assert same_files(cleaned, folder)
    assert all((folder / name).stat().st_ino == inode for name, inode in done.items()), "finished shards were written again"


def test_ctrl_c_ends_a_stage_without_a_traceback(library, cleaned, tmp_path):
    for attempt in range(10):
        folder = tmp_path / f"s{attempt}"
        settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
        with open(tmp_path / "printed", "w") as output:
            process = warm.start("-m", "pipeline", *settings, environment=environment(), output=output.fileno())
            wait_for(folder, ".unfinished/part-*.json", process)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            code = process.wait(60)
        if not (folder / "manifest.json").exists():  # on a busy machine it may have finished before the signal was sent
            break
    assert code == 128 + signal.SIGINT
    printed = (tmp_path / "printed").read_text()
    assert printed.endswith("interrupted; run the same command again to continue\n")
    assert "Traceback" not in printed
    here(*settings)
    assert same_files(cleaned, folder)


def ranks_of(process: subprocess.Popen, count: int) -> list[psutil.Process]:
    """The processes of the ranks, once all are started."""
    found: list[psutil.Process] = []
    while len(found) < count and process.poll() is None:
        found = []
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "python" in child.name() and "stage=shard" in child.cmdline():
                    found.append(child)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "phases",
    [
        {".unfinished/plan.json": 3},
        pytest.param(
            {".unfinished/part-000002.json": 2, ".unfinished/*.drop": 4, ".unfinished/plan.json": 2, "train-00001.tar": 3},
            marks=pytest.mark.long,
        ),
    ],
    ids=["once", "in every phase"],
)
def test_one_killed_rank_ends_the_job_and_the_rerun_equals_an_uninterrupted_one(library, cleaned, tmp_path, phases):
    """Once parts are read, drops saved, shards planned or written, and continued on another number of ranks."""
    folder = tmp_path / "killed"
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
    for mark, ranks in phases.items():
        command = [program("mpirun"), "-n", str(ranks), sys.executable, "-m", "pipeline", *settings]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started = ranks_of(process, ranks)
        wait_for(folder, mark, process)
        started[-1].kill()
        assert process.wait(timeout=60) != 0, f"it ended before it could be killed at {mark}"
        psutil.wait_procs(started, timeout=30)
        assert not (folder / "manifest.json").exists()
    pipeline(*settings, ranks=2)
    assert same_files(cleaned, folder)


@pytest.mark.slow
def test_a_second_job_on_one_folder_is_refused(library, cleaned, tmp_path):
    folder = tmp_path / "s"
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
    first = start(*settings)
    wait_for(folder, ".lock", first)
    while not (folder / ".lock").read_text():  # the owner's name is written once the lock is held
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    try:
        for ranks in (0, 2):
            refused = pipeline(*settings, ranks=ranks, expect=2)
            assert f"data.shards={folder}: is being written by another job" in refused
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=120) == 0
    assert same_files(cleaned, folder)
    assert not (folder / ".lock").exists()


@pytest.mark.slow
def test_the_tasks_of_a_job_array_share_the_work_without_mpi(library, cleaned, tmp_path):
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={tmp_path}/s")
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "3"}
    for task in ("3", "1"):
        assert "this task has read its parts" in pipeline(*settings, env={**array, "SLURM_ARRAY_TASK_ID": task})
        assert not (tmp_path / "s" / "manifest.json").exists()
    pipeline(*settings, env={**array, "SLURM_ARRAY_TASK_ID": "2"})
    assert same_files(cleaned, tmp_path / "s")
    gaps = {**array, "SLURM_ARRAY_TASK_MAX": "9", "SLURM_ARRAY_TASK_ID": "9"}
    assert "not numbered with a constant step" in pipeline(*settings, env=gaps, expect=2)
