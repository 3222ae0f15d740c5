"""Which rank of how many this process is, from the variables of torchrun, srun or mpirun. Loads no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import UserError, Violation

DEFAULT_PORT = 29500
TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# Below Linux's ephemeral ports (32768 and up), which outgoing connections may hold.
FIRST_PORT, PORTS = 20000, 12000
MPICH = {"rank": "PMI_RANK", "size": "PMI_SIZE", "local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}
OPENMPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_FRESH_SHELL = "start the command in a fresh shell or job: these variables belong to the launcher, do not set them by hand"

#: Seconds in which launchers end all ranks after one has failed, or ranks find the same mistake one after the other.
GRACE = 10.0


@dataclass(frozen=True)
class Ranks:
    """The place of this process in its job, and where rank 0 listens.

    Attributes:
        rank: 0 <= rank < world_size.
        local_rank: 0 <= local_rank < local_size, the rank among those of this host; picks the GPU.
        master_host: name of rank 0's host; empty where no variable tells it (mpirun on several hosts without MASTER_ADDR).
        launcher: torchrun, mpirun, srun, or none for a process started by hand.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_host: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    launcher: str = "none"

    def rendezvous(self) -> str:
        """Where torch.distributed meets: `tcp://host:port`, or `env://` under torchrun, whose agent holds the store.

        Raises:
            UserError: no variable tells the host.
        """
        if not self.master_host:
            fix = "export MASTER_ADDR=<host of rank 0>, or start the ranks with srun or torchrun"
            raise UserError.of("MASTER_ADDR", "", "mpirun on several hosts does not say which is the first", fix)
        return "env://" if self.launcher == "torchrun" else f"tcp://{self.master_host}:{self.master_port}"


@dataclass(frozen=True)
class ArrayTask:
    """The place of this process in a Slurm job array: task `index` of `size` of job `job`."""

    job: str
    index: int
    size: int


def array_task(environment: Mapping[str, str] = os.environ) -> ArrayTask | None:
    """Which task of a job array this is, None outside of one. A lone task (--array=0) is none either."""
    job = environment.get("SLURM_ARRAY_JOB_ID")
    if job is None or int(environment["SLURM_ARRAY_TASK_COUNT"]) == 1:
        return None
    first, step = int(environment["SLURM_ARRAY_TASK_MIN"]), int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
    index = (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
    size = (int(environment["SLURM_ARRAY_TASK_MAX"]) - first) // step + 1
    if size != int(environment["SLURM_ARRAY_TASK_COUNT"]):
        rule = f"{environment['SLURM_ARRAY_TASK_COUNT']} tasks are not numbered evenly"
        raise UserError.of("--array", environment["SLURM_ARRAY_TASK_ID"], rule, "give a range, such as --array=0-15")
    return ArrayTask(job, index, size)


def detect(environment: Mapping[str, str] = os.environ, host_suffix: str = "") -> Ranks:
    """The place of this process; a lone process when no launcher set the variables.

    The innermost launcher wins: torchrun and mpirun may run inside a Slurm job, where variables of srun stand beside theirs.

    Args:
        host_suffix: appended to the first node's name on clusters whose fast network has names of its own.

    Raises:
        UserError: the launcher's variables are incomplete or contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in environment or environment.keys() >= TORCHRUN:
        return _from_torchrun(environment)
    for names in (MPICH, OPENMPI):
        if names["rank"] in environment and names["local_rank"] in environment:
            return _from_mpirun(environment, names)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _from_srun(environment, host_suffix)
    return Ranks()


def error_report_delay() -> float | None:
    """Seconds after which this process tells the user of a mistake, None for never.

    Rank 0 speaks at once. The other ranks of torchrun and srun wait: the launcher ends them as soon as rank 0 has left, unless they are
    the only ones that know. mpirun ends nobody, but its ranks tell each other what they find (data/mpi.py).
    """
    try:
        here = detect()
    except UserError:
        return 0
    if here.rank == 0:
        return 0
    return None if here.launcher == "mpirun" else GRACE


def _from_torchrun(environment: Mapping[str, str]) -> Ranks:
    """The rank of a process that torchrun (or a user who set the same variables) started."""
    number = _numbers(environment, {"RANK", "WORLD_SIZE", "MASTER_PORT"}, {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1})
    return _checked(
        Ranks(
            rank=number["RANK"],
            world_size=number["WORLD_SIZE"],
            local_rank=number["LOCAL_RANK"],
            local_size=number["LOCAL_WORLD_SIZE"],
            master_host=environment.get("MASTER_ADDR", ""),
            master_port=number["MASTER_PORT"],
            launcher="torchrun",
        )
    )


def _from_mpirun(environment: Mapping[str, str], names: dict[str, str]) -> Ranks:
    """The rank of a process of mpirun. srun --mpi=pmi2 sets PMI_RANK too, but no rank among those of a host."""
    number = _numbers(environment, set(names.values()), {"MASTER_PORT": DEFAULT_PORT})
    one_host = number[names["local_size"]] == number[names["size"]]
    return _checked(
        Ranks(
            rank=number[names["rank"]],
            world_size=number[names["size"]],
            local_rank=number[names["local_rank"]],
            local_size=number[names["local_size"]],
            master_host=environment.get("MASTER_ADDR", "127.0.0.1" if one_host else ""),
            master_port=number["MASTER_PORT"],
            launcher="mpirun",
        )
    )


def _from_srun(environment: Mapping[str, str], host_suffix: str) -> Ranks:
    """The rank of a task of srun. Jobs on one node meet at different ports: a port follows from the job's and the step's number."""
    number = _numbers(
        environment, {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"}, {"SLURM_NODEID": 0}
    )
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    world_size, node = number["SLURM_STEP_NUM_TASKS"], number["SLURM_NODEID"]
    tasks = expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(tasks) != len(hosts) or sum(tasks) != world_size:
        rule = f"does not give {world_size} tasks (SLURM_STEP_NUM_TASKS) on {len(hosts)} nodes (SLURM_STEP_NODELIST)"
        raise UserError.of("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_STEP_TASKS_PER_NODE"), rule, _FRESH_SHELL)
    return _checked(
        Ranks(
            rank=number["SLURM_PROCID"],
            world_size=world_size,
            local_rank=number["SLURM_LOCALID"],
            local_size=tasks[node] if node < len(tasks) else 0,
            master_host=hosts[0] + host_suffix,
            master_port=FIRST_PORT + (16 * number["SLURM_JOB_ID"] + number["SLURM_STEP_ID"]) % PORTS,
            launcher="srun",
        )
    )


def _numbers(environment: Mapping[str, str], required: set[str], optional: dict[str, int]) -> dict[str, int]:
    """The named variables as numbers >= 0; all that are missing or no numbers are named at once."""
    found = {name: environment.get(name) for name in sorted(required)} | {n: environment.get(n, str(v)) for n, v in optional.items()}
    wrong = {name: value for name, value in found.items() if value is None or not re.fullmatch(r"\d+", value, re.ASCII)}
    if wrong:
        raise UserError(
            [Violation(name, "" if value is None else value, "must be a number", _FRESH_SHELL) for name, value in wrong.items()]
        )
    return {name: int(value) for name, value in found.items() if value is not None}


def _checked(ranks: Ranks) -> Ranks:
    """The ranks, if they can be."""
    if not (0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.local_size <= ranks.world_size):
        rule = f"contradict each other: rank {ranks.rank} of {ranks.world_size}, {ranks.local_rank} of {ranks.local_size} on this host"
        raise UserError.of(f"variables of {ranks.launcher}", "", rule, _FRESH_SHELL)
    return ranks


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of Slurm's compressed list, in order: `n[1-2,07],r[0-1]c[3-4]x` -> n1, n2, n07, r0c3x, r0c4x, r1c3x, r1c4x.

    Raises:
        UserError: the list does not have that form.
    """
    name = r"[^\s,\[\]]*(?:\[[0-9,-]+\][^\s,\[\]]*)*"
    if not re.fullmatch(rf"{name}(,{name})*", nodelist) or "" in (terms := re.findall(rf"(?:^|,)({name})", nodelist)):
        raise UserError.of(
            "SLURM_STEP_NODELIST", nodelist, "must be a list of hosts as Slurm writes it, for example n[1-2,07]", _FRESH_SHELL
        )
    return [host for term in terms for host in _expand_term(term, nodelist)]


def _expand_term(term: str, nodelist: str) -> list[str]:
    """The hosts of one term; the last bracket counts fastest."""
    hosts = [""]
    for literal, ranges in re.findall(r"([^\[\]]*)(?:\[([0-9,-]+)\])?", term):
        numbers = [n for part in ranges.split(",") for n in _expand_range(part, nodelist)] if ranges else [""]
        hosts = [host + literal + number for host in hosts for number in numbers]
    return hosts


def _expand_range(part: str, nodelist: str) -> list[str]:
    """`08-11` -> 08, 09, 10, 11: as wide as the first number is written."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if not match or int(match[1]) > int(match[2] or match[1]):
        raise UserError.of("SLURM_STEP_NODELIST", nodelist, f"[{part}] is no range of numbers", _FRESH_SHELL)
    return [f"{n:0{len(match[1])}d}" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]


def expand_tasks(counts: str) -> list[int]:
    """Tasks on each node from Slurm's compressed form: `2(x3),1` -> 2, 2, 2, 1.

    Raises:
        UserError: the text does not have that form.
    """
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", counts, re.ASCII):
        raise UserError.of("SLURM_STEP_TASKS_PER_NODE", counts, "must be counts as Slurm writes them, for example 2(x3),1", _FRESH_SHELL)
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
