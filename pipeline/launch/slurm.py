"""Questions to Slurm and changes of jobs, from inside of a job. Every call has a time limit; none of them loads torch."""

from __future__ import annotations

import logging
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime

from pipeline.common.errors import UserError
from pipeline.common.ranks import expand_hosts

log = logging.getLogger("pipeline")

#: Longest time of a command, seconds; the controller of a busy cluster can take a minute to answer.
TIMEOUT = 90
#: Slurm ends all processes of a job that is preempted or requeued by SIGTERM, also these commands, which are then needed most.
_SHELL = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh")
#: Longest time that a job waits for a controller that does not answer, and between two attempts, seconds. Steps cannot start meanwhile.
PATIENCE, _PAUSE = 1800.0, 5.0
#: What the commands print if the controller does not answer.
_SILENT = re.compile("Unable to contact slurm controller|Socket timed out|Zero Bytes|Connection refused|connect failure|timed out after")
#: Lines of `scontrol show job` that have a single field, whose value may have spaces.
_TEXT = re.compile(r"^ *(Comment|Command|WorkDir|StdErr|StdIn|StdOut|AdminComment|SystemComment)=(.*?) *$", re.MULTILINE)


class SlurmError(Exception):
    """A command of Slurm failed, timed out or is not installed; the message has its output."""


def command(words: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT, patience: float = 0.0) -> str:
    """Run a command of Slurm and return what it prints.

    Args:
        environment: its variables; those of this process when None.
        timeout: seconds.
        patience: seconds in which it is repeated while the controller does not answer.

    Raises:
        SlurmError: see there.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            call = [*_SHELL, *words]
            done = subprocess.run(call, capture_output=True, text=True, errors="replace", timeout=timeout, check=False, env=environment)
            if not done.returncode:
                return done.stdout
            failure = f"{' '.join(words[:2])}: {' '.join(done.stderr.split()) or done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"{' '.join(words[:2])}: timed out after {timeout:.0f} s"
        except OSError as error:
            failure = f"{words[0]}: {error}"
        if time.monotonic() >= deadline or not _SILENT.search(failure):
            raise SlurmError(failure)
        log.warning("Slurm does not answer, and is asked again for %.0f s: %s", deadline - time.monotonic(), failure)
        time.sleep(_PAUSE)


def facts(job: str, patience: float = 0.0) -> dict[str, str]:
    """Return the fields of a job, as `scontrol show job` prints them; empty if Slurm does not answer in `patience` seconds."""
    try:
        return parse_facts(command(["scontrol", "show", "job", job], patience=patience))
    except SlurmError as error:
        log.warning("the fields of job %s are unknown: %s", job, error)
        return {}


def ask(job: str) -> Future[dict[str, str]]:
    """Ask for the facts of a job in a thread: the answer can take longer than the job has left, and the ranks need this process."""
    answer: Future[dict[str, str]] = Future()
    threading.Thread(target=lambda: answer.set_result(facts(job)), daemon=True).start()
    return answer


def parse_facts(printed: str) -> dict[str, str]:
    """Return the fields that `scontrol show job` prints."""
    return dict(re.findall(r"(?:^|\s)([\w/:]+)=(\S*)", _TEXT.sub("", printed))) | dict(_TEXT.findall(printed))


def seconds_of(moment: str) -> float | None:
    """Return the seconds since 1970 of a local time of Slurm, None if it is unknown."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None


def is_preempted(fields: Mapping[str, str]) -> bool:
    """Return whether Slurm takes the nodes of a job for another one. A job that was canceled has no PreemptTime."""
    return fields.get("PreemptTime", "None") not in ("None", "Unknown", "")


def is_requeued(fields: Mapping[str, str], restarts: int) -> bool:
    """Return whether Slurm has put a job back into the queue since it was started for the (`restarts` + 1)-th time."""
    return fields.get("Restarts", "").isdecimal() and int(fields["Restarts"]) > restarts


def is_out_of_time(fields: Mapping[str, str]) -> bool:
    """Return whether Slurm ends a job because of its time limit."""
    return fields.get("Reason") == "TimeLimit"


def is_canceled(fields: Mapping[str, str], restarts: int) -> bool:
    """Return whether somebody has canceled a job that got SIGTERM; not without its fields."""
    return bool(fields) and not (is_preempted(fields) or is_requeued(fields, restarts) or is_out_of_time(fields))


def hosts(nodelist: str) -> list[str]:
    """Return the nodes of a node list, empty for none or for one that cannot be read."""
    try:
        return expand_hosts(nodelist) if nodelist and nodelist != "(null)" else []
    except UserError:
        return []


def usable(partition: str = "") -> dict[str, bool]:
    """Return the nodes of Slurm, or of a partition, and whether jobs can run on them; empty if it does not answer."""
    try:
        printed = command(["sinfo", "--noheader", "--Node", "--format=%N %T", *([f"--partition={partition}"] if partition else [])])
    except SlurmError as error:
        log.warning("the state of the nodes is unknown: %s", error)
        return {}
    return {words[0]: not re.match(r"down|drain|fail|.*\*$", words[1]) for line in printed.splitlines() if len(words := line.split()) == 2}


def answering(nodes: Sequence[str], timeout: float = 40) -> set[str]:
    """Return the nodes of this job on which a step starts, within a time limit in seconds.

    Used after ranks have died: Slurm may notice only minutes later that a node is lost (SlurmdTimeout).
    """
    words = ["srun", "--overlap", "--mem=0", "--no-kill", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    words += [f"--nodelist={','.join(nodes)}", "--cpus-per-task=1", "sh", "-c", "echo answers $SLURMD_NODENAME"]
    try:
        printed = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout, check=False).stdout
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
    except OSError:
        return set(nodes)
    return set(re.findall(r"^answers (\S+)$", printed.decode(errors="replace"), re.MULTILINE))


def requeue(job: str, patience: float = 0.0) -> str:
    """Put this job back into the queue under its id; Slurm then ends it. Returns why Slurm refused it, empty if it did not."""
    try:
        command(["scontrol", "requeue", job], patience=patience)
    except SlurmError as error:
        return str(error)
    return ""


def set_excluded(job: str, nodes: Iterable[str]) -> None:
    """Set all nodes that a waiting job, also this one after it was requeued, shall not get; an error is logged."""
    _update(job, f"ExcNodeList={','.join(sorted(nodes))}")


def resize(job: str, fewest: int, most: int, tasks_per_node: int | None) -> None:
    """Change the nodes that a waiting job asks for, submitted with tasks_per_node; an error is logged."""
    size = [f"NumNodes={fewest}-{most}"]  # a single number is the least alone, and refused above the most
    size += [f"NumTasks={most * tasks_per_node}"] if fewest == most and tasks_per_node is not None else []
    _update(job, *size)


def _update(job: str, *fields: str) -> None:
    """Change a job that waits; an error is logged."""
    try:
        command(["scontrol", "update", f"JobId={job}", *fields])
    except SlurmError as error:
        log.warning("job %s was not changed to %s: %s", job, " ".join(fields), error)


def cancel(*jobs: object) -> bool:
    """Cancel jobs, of which some may have ended, and return whether that succeeded; an error is logged."""
    try:
        command(["scancel", *map(str, jobs)])
    except SlurmError as error:
        log.warning("job %s was not canceled: %s", " ".join(map(str, jobs)), error)
        return False
    return True


def move_dependents(job: str, successor: str) -> None:
    """Let the jobs of this user that wait for the success of a job wait for that of another one instead.

    Raises:
        SlurmError: a command failed.
    """
    printed = command(["squeue", "--me", "--noheader", "--states=PENDING", "--format=%A %E"])
    for line in printed.splitlines():
        waiting, _, dependency = line.partition(" ")
        moved = re.sub(rf"\b(after(?:ok|any)):{job}\b(?:\([^)]*\))?", rf"\1:{successor}", dependency)
        moved = re.sub(r"\([^)]*\)", "", moved)
        if waiting != successor and moved != re.sub(r"\([^)]*\)", "", dependency):
            command(["scontrol", "update", f"JobId={waiting}", f"Dependency={moved}"])
            log.info("job %s waits for job %s instead of %s", waiting, successor, job)
