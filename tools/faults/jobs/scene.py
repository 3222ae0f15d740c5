"""The jobs of one run directory: submits them, and knows what their processes report."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.faults.job import INJECT, ROOT, Listener, Traced, is_alive, processes_of
from tools.faults.jobs import cluster
from tools.faults.jobs.cases import EVERY, ONE_NODE, SETTINGS, Case, Layout, saves
from tools.faults.jobs.kind import FEWER, SPARE, Kind
from tools.faults.jobs.kinds import KINDS
from tools.faults.runs import steps_with_index


@dataclass(frozen=True)
class Process:
    """A rank.

    Attributes:
        pid: of its process.
        node: host name.
        step_id: of its job step.
    """

    pid: int
    node: str
    step_id: int


@dataclass(frozen=True)
class State:
    """The state of a job.

    Attributes:
        name: as Slurm calls it: RUNNING, COMPLETED, ...
        alive: whether it waits, runs or ends at the moment.
        code: exit code, "1:0".
        restarts: how often it was started again.
        text: for messages.
    """

    name: str
    alive: bool
    code: str
    restarts: int
    text: str


class Scene(ABC):
    """The jobs of one run directory.

    Args:
        case: the fault; None for a run without one.
        layout: of the run.
        folder: an empty folder.
        data: token shards.
        chance: decides what the case leaves open.

    Attributes:
        kinds: the faults that can happen to its jobs.
        kind: that of the case.
        traced: lines that processes have executed.
        ranks: the newest processes.
        writers: process ids of the writers.
        received: signals that the held process has received.
        held: role of the process that waits at the line of the fault.
        complete: step of the newest checkpoint at the time of the fault.
        complete_before: of the one before it.
        step_id: of the job step that has the ranks, if nothing goes wrong.
        pace: factor of random delays.
        recovered: seconds from the fault to the end of the first step after it.
    """

    pace = 1.0
    kinds: dict[str, type[Kind]]

    def __init__(self, case: Case | None, layout: Layout, folder: Path, data: Path, chance: random.Random) -> None:
        self._case, self.layout, self.data, self.folder, self.chance = case, layout, data, folder, chance
        self.step_id = 0
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        self.run_dir = self.disk / "run"
        self._listener = Listener()
        self.traced = Traced()
        self.ranks: dict[int, Process] = {}
        self.writers: list[int] = []
        self.received: set[int] = set()
        self.held, self._held_pid = "", 0
        self._connection: socket.socket | None = None
        self.kind = None if case is None else self.kinds[case.fault](self)
        self.complete = self.complete_before = 0
        self.struck_at: float | None = None
        self._known: set[int] = set()
        self._log_size = 0
        self.recovered: float | None = None

    @abstractmethod
    def submit(self, layout: Layout, *, hold: bool = False) -> None:
        """Submit the training job; with `hold` it waits for `begin`."""

    @abstractmethod
    def begin(self) -> None:
        """Start the job that was held."""

    @abstractmethod
    def state(self) -> State:
        """The state of the newest job."""

    @abstractmethod
    def settled(self) -> list[str]:
        """Wait for what follows the run; returns what is wrong with it."""

    @abstractmethod
    def clean(self) -> None:
        """End what is left, and restore the machine."""

    @property
    def case(self) -> Case:
        assert self._case is not None
        return self._case

    def environment(self) -> dict[str, str]:
        """The variables by which the processes of a job find this tool and the line of the fault."""
        found = {"CHAOS_SOCKET": self._listener.name, "PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        if self._case is not None and self._case.line is not None:
            role, file, line, phase = self._case.line
            fault = {"id": self.folder.name, "role": role, "file": file, "line": line, "phase": phase, "count": self._case.count}
            found["CHAOS_FAULT"] = json.dumps(fault)
        return found

    def rank(self) -> Process | None:
        """The rank that is hit; None before it starts."""
        return self.ranks.get(self.case.victim)

    def held_is_alive(self) -> bool:
        """Whether a process waits at the line of the fault."""
        return bool(self._held_pid) and is_alive(self._held_pid)

    def new_log(self) -> str:
        """What the jobs have printed since the fault."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / "log", "rb") as file:
            file.seek(self._log_size)
            return file.read().decode(errors="replace")
        return ""

    def note_fault(self) -> None:
        """Note the state of the run at the time of the fault."""
        steps = steps_with_index(self.run_dir)
        self.complete, self.complete_before = ([0, 0, *steps])[-1], ([0, 0, *steps])[-2]
        with contextlib.suppress(FileNotFoundError):
            self._log_size = (self.folder / "log").stat().st_size
        self.struck_at, self._known = time.monotonic(), {rank.pid for rank in self.ranks.values()}

    def release(self) -> None:
        """Let the process that waits go on."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(b"go on\n")
        self._connection = None

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Read messages until a condition is true, for so many seconds."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.read(0.2)

    def read(self, seconds: float) -> None:
        """Read the messages of all processes; wait for one for so many seconds."""
        wait = seconds
        while True:
            try:
                role, pid, message, connection = self._listener.messages.get(timeout=wait)
            except queue.Empty:
                return
            wait = 0.001
            self._act(role, pid, message, connection)

    def _act(self, role: str, pid: int, message: dict[str, Any], connection: socket.socket) -> None:
        self.traced.add(role, message)
        if "role" in message and role.startswith("rank "):
            self.ranks[int(role[5:])] = Process(pid, message["node"], int(message["step_id"] or 0))
        if "role" in message and role == "writer":
            self.writers.append(pid)
        if "landed" in message:
            self.held, self._held_pid, self._connection = role, pid, connection
        if "received" in message:
            self.received |= set(message["received"])
        if "stepped" in message and role == "rank 0" and self.struck_at is not None and pid not in self._known and self.recovered is None:
            self.recovered = time.monotonic() - self.struck_at

    def left(self) -> list[str]:
        """Command lines of processes of this run that are alive."""
        found = []
        for pid in processes_of(self._listener.name):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:150])
        return found


class SlurmScene(Scene):
    """Jobs on the development cluster. Arguments as in Scene, and the cluster.

    Attributes:
        job: newest job.
        first_job: first one.
        dependents: jobs that depend on a training job.
    """

    kinds = KINDS

    def __init__(self, controlled: cluster.Cluster, *arguments: Any, **more: Any) -> None:
        self.cluster = controlled
        self.job = self.first_job = 0
        self.dependents: list[int] = []
        super().__init__(*arguments, **more)

    def submit(self, layout: Layout, *, hold: bool = False) -> None:
        """Submit the training job, and one that depends on it."""
        spare = self._case is not None and self._case.after == SPARE
        shrinks = self._case is not None and self._case.after == FEWER and self.kind is not None and not self.kind.ends
        nodes = layout.nodes + int(spare)
        words = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--output={self.folder}/log", "--job-name=chaos", *(["--hold"] * hold)]
        words += ["--no-kill"] * (spare or shrinks)
        settings = [*SETTINGS, *saves(EVERY, 1000), *layout.settings, f"data.tokens={self.data}", f"run_dir={self.run_dir}"]
        settings += ["cluster.spares=1"] * spare
        if shrinks:
            lists = {1: ONE_NODE.settings, layout.nodes: layout.settings}
            texts = [f"{nodes}:[{','.join(json.dumps(setting) for setting in own)}]" for nodes, own in lists.items()]
            settings += [f"cluster.nodes={layout.nodes}", "cluster.min_nodes=1", f"cluster.layouts={{{','.join(texts)}}}"]
        if self.kind is not None:
            words, settings = [*words, *self.kind.options], [*settings, *self.kind.settings]
        self.command = ["sbatch", *words, "slurm/pretrain.sbatch", *settings]
        self.job = cluster.sbatch(*self.command[1:], environment=self.environment())
        self.first_job = self.first_job or self.job
        after = ["--job-name=chaos-after", f"--dependency=afterok:{self.job}", "--kill-on-invalid-dep=yes", "--output=/dev/null"]
        self.dependents.append(cluster.sbatch(*after, f"--wrap=test -f {self.run_dir}/manifest.json"))

    def begin(self) -> None:
        cluster.command("scontrol", "release", str(self.job))

    def state(self) -> State:
        found = cluster.facts(self.job)
        text = f"job {self.job} is {cluster.describe(found)}"
        return State(found["JobState"], cluster.is_alive(found), found["ExitCode"], int(found["Restarts"]), text)

    def settled(self) -> list[str]:
        """Wait for the jobs that depend on the training; only the last one has run."""
        self.wait(lambda: not any(cluster.is_alive(cluster.facts(job)) for job in self.dependents), 30)
        problems = []
        for job in self.dependents:
            found, expected = cluster.facts(job), "COMPLETED" if job == self.dependents[-1] else "CANCELLED"
            if found["JobState"] != expected:
                problems.append(f"the job that depends on it is {cluster.describe(found)}")
        return problems

    def clean(self) -> None:
        """Cancel what is queued, and restore the cluster."""
        for job in (self.first_job, self.job, *self.dependents):
            cluster.command("scancel", "--quiet", str(job), check=False)
        self.wait(lambda: not any(cluster.is_alive(cluster.facts(job)) for job in (self.job, *self.dependents)), 30)
        assert self.kind is not None
        self.kind.undo()
        self.cluster.restore()
