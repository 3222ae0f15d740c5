"""Rank detection from the environment variables of torchrun, srun and mpirun, and the formats of Slurm. Imports no torch."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.common.errors import UserError, Violation

DEFAULT_PORT = 29500
TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# Below the ephemeral ports of Linux (32768 and above), which outgoing connections may occupy.
FIRST_PORT, PORTS = 20000, 12000
MPICH = {"rank": "PMI_RANK", "size": "PMI_SIZE", "local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}
OPENMPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_NEW_SHELL = "start the command in a new shell or job; these variables are set by the launcher, do not set them manually"

#: Seconds that a rank other than 0 waits before it reports an error: launchers terminate all ranks after one has failed.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process, and the address of rank 0.

    Attributes:
        rank: global rank, 0 <= rank < world_size.
        local_rank: rank on this host, 0 <= local_rank < local_size; selects the GPU.
        local_size: number of ranks on this host.
        master_host: host name of rank 0; empty if it is unknown (mpirun on several hosts without MASTER_ADDR).
        launcher: torchrun, mpirun, srun, or none for a process started without a launcher.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_host: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    launcher: str = "none"

    def rendezvous(self) -> str:
        """Return the init method of torch.distributed: `tcp://host:port`, or `env://` under torchrun, whose agent hosts the store.

        Raises:
            UserError: the host of rank 0 is unknown.
        """
        if not self.master_host:
            fix = "export MASTER_ADDR=<host of rank 0>, or start the ranks with srun or torchrun"
            raise UserError.of("MASTER_ADDR", "", "is required: mpirun on several hosts does not provide the host of rank 0", fix)
        return "env://" if self.launcher == "torchrun" else f"tcp://{self.master_host}:{self.master_port}"


@dataclass(frozen=True)
class ArrayTask:
    """The Slurm array task of this process: task `index` of `size` tasks of array job `job`."""

    job: str
    index: int
    size: int


def array_task(environment: Mapping[str, str] = os.environ) -> ArrayTask | None:
    """Return the array task of this process, None outside of a job array and for an array with a single task (--array=0).

    Raises:
        UserError: a variable is missing, empty or no number, or the tasks have no constant step.
    """
    job = environment.get("SLURM_ARRAY_JOB_ID")
    if job is None:
        return None
    count, last = "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MAX"
    names = {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", count, last}
    number = _numbers(environment, names, {"SLURM_ARRAY_TASK_STEP": 1})
    if number[count] == 1:
        return None
    first, step = number["SLURM_ARRAY_TASK_MIN"], number["SLURM_ARRAY_TASK_STEP"]
    index = (number["SLURM_ARRAY_TASK_ID"] - first) // step
    size = (number[last] - first) // step + 1
    if size != number[count]:
        rule = f"{number[count]} tasks are not numbered with a constant step"
        raise UserError.of("--array", number["SLURM_ARRAY_TASK_ID"], rule, "use a range, for example --array=0-15")
    return ArrayTask(job, index, size)


def detect(environment: Mapping[str, str] = os.environ, host_suffix: str = "") -> Ranks:
    """Detect rank and world size of this process; without a launcher it is a single process.

    The innermost launcher takes precedence: torchrun and mpirun may run inside a Slurm job, where the variables of srun are set, too.
    RANK and WORLD_SIZE without torchrun are those of srun, or were left in the shell.

    Args:
        host_suffix: suffix of the host name of rank 0, for clusters whose fast network has separate host names.

    Raises:
        UserError: the variables of the launcher are incomplete or inconsistent.
    """
    mpi = next((names for names in (MPICH, OPENMPI) if names["rank"] in environment and names["local_rank"] in environment), None)
    if "TORCHELASTIC_RUN_ID" in environment:
        here = _from_torchrun(environment)
    elif mpi is not None:
        here = _from_mpirun(environment, mpi)
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        here = _from_srun(environment, host_suffix)
    else:
        here = _from_torchrun(environment) if environment.keys() >= TORCHRUN else Ranks()
    if not (0 <= here.rank < here.world_size and 0 <= here.local_rank < here.local_size <= here.world_size):
        rule = f"are inconsistent: rank {here.rank} of {here.world_size}, {here.local_rank} of {here.local_size} on this host"
        raise UserError.of(f"variables of {here.launcher}", "", rule, _NEW_SHELL)
    if here.launcher == "srun":
        _refuse_leftovers(environment, here)
    return here


def _refuse_leftovers(environment: Mapping[str, str], here: Ranks) -> None:
    """Refuse RANK and WORLD_SIZE of another job, which other libraries would read.

    Raises:
        UserError: they contradict the variables of srun.
    """
    expected = {"RANK": here.rank, "WORLD_SIZE": here.world_size}
    conflicts = {name: environment[name] for name in expected if environment.get(name, str(expected[name])) != str(expected[name])}
    fix = f"unset {' '.join(sorted(TORCHRUN))} before sbatch or srun; Slurm passes the variables of the submitting shell on"
    rule = f"contradicts srun, which started rank {here.rank} of {here.world_size}"
    UserError.raise_for(Violation(name, value, rule, fix) for name, value in conflicts.items())


def error_report_delay() -> float | None:
    """Return the delay in seconds before this process reports an error, None if it must not report it.

    Rank 0 reports immediately. The other ranks of torchrun and srun wait: if rank 0 finds the same error, the launcher terminates them
    when rank 0 exits. mpirun does not terminate other ranks, but its ranks exchange their errors (common/mpi.py).
    """
    try:
        here = detect()
    except UserError:  # the variables of the launcher are inconsistent; srun still sets the rank
        return 0 if os.environ.get("SLURM_PROCID", "0") == "0" else GRACE_SECONDS
    if here.rank == 0:
        return 0
    return None if here.launcher == "mpirun" else GRACE_SECONDS


def _from_torchrun(environment: Mapping[str, str]) -> Ranks:
    """Read the variables of torchrun (or the same variables set by a user)."""
    number = _numbers(environment, {"RANK", "WORLD_SIZE", "MASTER_PORT"}, {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1})
    return Ranks(
        rank=number["RANK"],
        world_size=number["WORLD_SIZE"],
        local_rank=number["LOCAL_RANK"],
        local_size=number["LOCAL_WORLD_SIZE"],
        master_host=environment.get("MASTER_ADDR", ""),
        master_port=number["MASTER_PORT"],
        launcher="torchrun",
    )


def _from_mpirun(environment: Mapping[str, str], names: dict[str, str]) -> Ranks:
    """Read the variables of mpirun. srun --mpi=pmi2 also sets PMI_RANK, but no local rank."""
    number = _numbers(environment, set(names.values()), {"MASTER_PORT": DEFAULT_PORT})
    one_host = number[names["local_size"]] == number[names["size"]]
    return Ranks(
        rank=number[names["rank"]],
        world_size=number[names["size"]],
        local_rank=number[names["local_rank"]],
        local_size=number[names["local_size"]],
        master_host=environment.get("MASTER_ADDR", "127.0.0.1" if one_host else ""),
        master_port=number["MASTER_PORT"],
        launcher="mpirun",
    )


def _from_srun(environment: Mapping[str, str], host_suffix: str) -> Ranks:
    """Read the variables of srun. The port is derived from job id and step id, so that jobs on the same node use different ports."""
    number = _numbers(
        environment, {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"}, {"SLURM_NODEID": 0}
    )
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    world_size, node = number["SLURM_STEP_NUM_TASKS"], number["SLURM_NODEID"]
    if world_size > 1 and "SLURM_PTY_PORT" in environment and sys.stdin.isatty():  # not in a step that is started in that shell
        rule = f"is that of a shell of srun --pty, one of {world_size} tasks: it would wait for the other ones"
        fix = "start the ranks with srun --overlap in it, or a shell for one process with srun --pty --ntasks=1"
        raise UserError.of("SLURM_PTY_PORT", environment["SLURM_PTY_PORT"], rule, fix)
    tasks = expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(tasks) != len(hosts) or sum(tasks) != world_size:
        rule = f"is inconsistent with {world_size} tasks (SLURM_STEP_NUM_TASKS) on {len(hosts)} nodes (SLURM_STEP_NODELIST)"
        raise UserError.of("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_STEP_TASKS_PER_NODE"), rule, _NEW_SHELL)
    return Ranks(
        rank=number["SLURM_PROCID"],
        world_size=world_size,
        local_rank=number["SLURM_LOCALID"],
        local_size=tasks[node] if node < len(tasks) else 0,
        master_host=hosts[0] + host_suffix,
        master_port=FIRST_PORT + (16 * number["SLURM_JOB_ID"] + number["SLURM_STEP_ID"]) % PORTS,
        launcher="srun",
    )


def _numbers(environment: Mapping[str, str], required: set[str], optional: dict[str, int]) -> dict[str, int]:
    """Parse variables as integers >= 0. Raises a UserError with all variables that are missing or not an integer."""
    values = {name: environment.get(name) for name in sorted(required)} | {n: environment.get(n, str(v)) for n, v in optional.items()}
    invalid = {name: value for name, value in values.items() if value is None or not re.fullmatch(r"\d+", value, re.ASCII)}
    UserError.raise_for(Violation(name, value or "", "must be an integer >= 0", _NEW_SHELL) for name, value in invalid.items())
    return {name: int(value) for name, value in values.items() if value is not None}


def expand_hosts(nodelist: str) -> list[str]:
    """Expand a compressed host list of Slurm: `n[1-2,07],r[0-1]c[3-4]x` -> n1, n2, n07, r0c3x, r0c4x, r1c3x, r1c4x.

    Raises:
        UserError: the list is malformed.
    """
    name = r"[^\s,\[\]]*(?:\[[0-9,-]+\][^\s,\[\]]*)*"
    if not re.fullmatch(rf"{name}(,{name})*", nodelist) or "" in (terms := re.findall(rf"(?:^|,)({name})", nodelist)):
        raise UserError.of("SLURM_STEP_NODELIST", nodelist, "must be a Slurm host list, for example n[1-2,07]", _NEW_SHELL)
    return [host for term in terms for host in _expand_term(term, nodelist)]


def _expand_term(term: str, nodelist: str) -> list[str]:
    """Expand one term of a host list; the last bracket varies fastest."""
    hosts = [""]
    for literal, ranges in re.findall(r"([^\[\]]*)(?:\[([0-9,-]+)\])?", term):
        numbers = [n for part in ranges.split(",") for n in _expand_range(part, nodelist)] if ranges else [""]
        hosts = [host + literal + number for host in hosts for number in numbers]
    return hosts


def _expand_range(part: str, nodelist: str) -> list[str]:
    """Expand a range, zero-padded to the width of its first number: `08-11` -> 08, 09, 10, 11."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if not match or int(match[1]) > int(match[2] or match[1]):
        raise UserError.of("SLURM_STEP_NODELIST", nodelist, f"[{part}] is not a range of numbers", _NEW_SHELL)
    return [f"{n:0{len(match[1])}d}" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]


def expand_tasks(counts: str) -> list[int]:
    """Expand the compressed task counts per node of Slurm: `2(x3),1` -> 2, 2, 2, 1.

    Raises:
        UserError: the text is malformed.
    """
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", counts, re.ASCII):
        raise UserError.of("SLURM_STEP_TASKS_PER_NODE", counts, "must be Slurm task counts, for example 2(x3),1", _NEW_SHELL)
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]


def is_slurm_limit(time: str) -> bool:
    """Whether a text is a time limit: days-hours[:minutes[:seconds]], [hours:]minutes:seconds, or UNLIMITED. A plain number is not."""
    return re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}|UNLIMITED", time) is not None


def slurm_seconds(time: str) -> float:
    """Return a time of Slurm in seconds: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]], or UNLIMITED."""
    if (match := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)) is None:
        return math.inf
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] or match[4]:  # the first number is hours
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second
