"""Text shards of runs that end early or share their work: full disks, kills, job arrays."""

import contextlib
import errno
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.common import locks, ranks
from pipeline.common.errors import UserError
from pipeline.data.dedup import duplicates
from pipeline.data.shard import passes, shards, span_search
from pipeline.data.shard.spilled_documents import SpillPool
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


def test_a_full_disk_ends_clearly_and_the_rerun_keeps_complete_shards(tmp_path):
    """A file-size limit emulates a full disk: the same writes fail, and no root is required."""
    for corpus, documents in (("a", 20), ("b", 400)):
        (tmp_path / f"{corpus}.jsonl").write_text("".join(json_line(words(n, 40)) for n in range(documents)))
    corpora = f"data.corpora={{a: [{tmp_path}/a.jsonl], b: [{tmp_path}/b.jsonl]}}"
    settings = ("stage=shard", *RAW, "data.input=[]", corpora)
    here(*settings, f"data.shards={tmp_path}/complete")
    folder, of_a = tmp_path / "limited", {"train-a-00000.tar", "validation-a-00000.tar"}
    for kilobytes, left in ((50, set()), (200, of_a)):  # too small for the spill; large enough for it, but not for the shard of b
        code, printed = python("-c", LIMITED, kilobytes << 10, *settings, f"data.shards={folder}")
        assert code == 2, printed
        assert f"{folder}: cannot be written" in printed
        assert "Traceback" not in printed
        assert {path.name for path in folder.iterdir()} == {".unfinished", *left}
    kept = {name: (folder / name).stat().st_ino for name in of_a}
    planned = len(json.loads((folder / ".unfinished" / "plan.json").read_text())["shards"])
    assert f"wrote {planned - 2} of {planned} shards; 2 were written before" in here(*settings, f"data.shards={folder}")
    assert same_files(tmp_path / "complete", folder)
    assert {name: (folder / name).stat().st_ino for name in of_a} == kept


def test_searches_for_duplicates_are_kept(library, tmp_path, monkeypatch):
    """The disk is full after each search in turn, and nothing is searched for twice."""
    settings = (*LIBRARY, f"data.input=[{library}]", "dedup.url=true", "dedup.paragraphs=true", "dedup.spans=30", "data.save_dropped=true")
    here(*settings, f"data.shards={tmp_path}/complete")
    searches: list[str] = []

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def search(*arguments: object) -> object:
            if len(searches) == limit:
                raise OSError(errno.ENOSPC, "No space left on device")
            searches.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, name, search)

    for owner, name in ((duplicates, "find"), (SpillPool, "find_repeated"), (span_search, "find"), (passes, "plan_shards")):
        counted(owner, name)
    counted(shards, "write")
    for limit in range(1, 6):
        assert "No space left on device" in here(*settings, f"data.shards={tmp_path}/s", expect=2)
        assert len(searches) == limit
    assert searches == ["find", "find", "find_repeated", "find", "plan_shards"]
    limit = -1
    here(*settings, f"data.shards={tmp_path}/s")
    assert set(searches[5:]) == {"write"}
    assert same_files(tmp_path / "complete", tmp_path / "s")


def start(*arguments: object) -> warm.Process:
    return warm.start("-m", "pipeline", *arguments, environment=environment())


def wait_for(folder: Path, mark: str, process: warm.Process | subprocess.Popen) -> None:
    while process.poll() is None and not list(folder.glob(mark)):
        time.sleep(0.001)


@pytest.mark.long
def test_killed_runs_write_no_manifest_and_the_rerun_equals_an_uninterrupted_one(library, cleaned, tmp_path):
    """In every phase; the default tier kills a task of an array."""
    folder = tmp_path / "killed"
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
    for mark in (".unfinished/part-000001.json", ".unfinished/plan.json", "train-00001.tar"):
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


def test_ctrl_c_ends_a_stage_without_a_traceback_and_other_ranks_continue(library, cleaned, tmp_path):
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
    pipeline(*settings, ranks=2)
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


@pytest.mark.long
def test_one_killed_rank_ends_the_job_and_the_rerun_equals_an_uninterrupted_one(library, cleaned, tmp_path):
    """Once parts are read, drops saved, shards planned or written, and continued on another number of ranks."""
    folder = tmp_path / "killed"
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
    phases = {".unfinished/part-000002.json": 2, ".unfinished/*.drop": 4, ".unfinished/plan.json": 2, "train-00001.tar": 3}
    for mark, count in phases.items():
        command = [program("mpirun"), "-n", str(count), sys.executable, "-m", "pipeline", *settings]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started = ranks_of(process, count)
        wait_for(folder, mark, process)
        started[-1].kill()
        assert process.wait(timeout=60) != 0, f"it ended before it could be killed at {mark}"
        psutil.wait_procs(started, timeout=30)
        assert not (folder / "manifest.json").exists()
    pipeline(*settings, ranks=2)
    assert same_files(cleaned, folder)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.common import mpi, ranks
with mpi.world(ranks.detect(), Path()) as comm:
    sys.stdout.write(Path("/proc/self/maps").read_text())
    sys.stdout.flush()
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_ranks_leave_no_shared_memory():
    """A job that is requeued to the node would find it under the same name, and wait for ranks that are gone."""
    command = [program("mpirun"), "-n", "2", sys.executable, "-c", KILLED]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    mapped = set(re.findall(r"/dev/shm/mpich_shm_\w+", done.stdout))
    assert mapped, done.stderr
    assert not [name for name in mapped if Path(name).exists()]


def test_a_second_job_on_one_folder_is_refused(library, cleaned, tmp_path):
    folder = tmp_path / "s"
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
    first = start(*settings)
    wait_for(folder, ".lock", first)
    while not (folder / ".lock").read_text():  # the owner's name is written once the lock is held
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    try:
        assert f"data.shards={folder}: is being written by another job" in pipeline(*settings, ranks=2, expect=2)
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=120) == 0
    assert same_files(cleaned, folder)
    assert not (folder / ".lock").exists()


def array_task(job: int, task: int, last: int = 3) -> dict[str, str]:
    """The environment of a task of an array of two, which are numbered 1 and 3."""
    names = ("JOB_ID", "TASK_ID", "TASK_COUNT", "TASK_MIN", "TASK_MAX", "TASK_STEP")
    return {f"SLURM_ARRAY_{name}": str(value) for name, value in zip(names, (job, task, 2, 1, last, 2), strict=True)}


def test_the_tasks_of_a_job_array_share_the_shards_and_a_killed_one_loses_only_its_own(library, cleaned, tmp_path):
    folder = tmp_path / "s"
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}")
    pipeline(*settings, "stage.until=read", env=array_task(7, 1))
    assert "this task has read its parts" in pipeline(*settings, "stage.until=duplicates", env=array_task(7, 1))
    pipeline(*settings, "stage.until=duplicates", env=array_task(7, 3))
    assert not list(folder.glob("*.tar"))
    names = [shard["name"] for shard in json.loads((folder / ".unfinished" / "plan.json").read_text())["shards"]]
    assert len(names) > 3
    killed = warm.start("-m", "pipeline", *settings, environment=environment(**array_task(8, 1)))
    wait_for(folder, ".unfinished/*.tar.json", killed)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "it ended before it could be killed"
    left = [name for name in names if not (folder / ".unfinished" / f"{name}.json").exists()]
    assert 0 < len(left) < len(names)
    done = {name: (folder / name).stat().st_ino for name in set(names) - set(left)}

    with locks.claimed(folder / ".unfinished", "data.shards", file=f"{left[0]}.lock"):  # as another task does that writes this shard
        printed = pipeline(*settings, env=array_task(9, 3))
    assert f"wrote {len(left) - 1} of {len(names)} shards; {len(done)} were written before" in printed
    assert not (folder / "manifest.json").exists()
    printed = pipeline(*settings, env=array_task(9, 1))
    assert f"wrote 1 of {len(names)} shards; {len(names) - 1} were written before" in printed
    assert same_files(cleaned, folder)
    assert all((folder / name).stat().st_ino == inode for name, inode in done.items())
    assert not list(folder.glob(".*"))


def test_tasks_without_a_constant_step_are_refused():
    with pytest.raises(UserError, match="2 tasks are not numbered with a constant step"):
        ranks.array_task(array_task(7, 1, last=9))


def test_the_tasks_of_a_job_array_run_at_the_same_time_and_one_completes_the_stage(library, cleaned, tmp_path):
    settings = (*LIBRARY, f"data.input=[{library}]", f"data.shards={tmp_path}/s")
    tasks = [warm.start("-m", "pipeline", *settings, environment=environment(**array_task(7, task))) for task in (1, 3)]
    assert [task.wait(120) for task in tasks] == [0, 0]
    assert same_files(cleaned, tmp_path / "s")
    assert not list((tmp_path / "s").glob(".*"))
