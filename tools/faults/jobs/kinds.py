"""The faults of tools/chaos: how each happens, and what shows that it did."""

from __future__ import annotations

import os
import signal

from pipeline.common.ranks import expand_hosts
from tools.faults.job import handles, is_alive, process_state
from tools.faults.jobs import cluster
from tools.faults.jobs.file_kinds import DamagedCheckpoint, DiskFull, InodesFull, PortTaken
from tools.faults.jobs.kind import FEWER, LINES, OTHER, SAME, SPARE, Kind


class KillRank(Kind):
    """kill -9 of one rank."""

    after: tuple[str, ...] = (SAME, SAME, SPARE)

    def strike(self) -> None:
        rank = self.scene.rank()
        if rank is not None and is_alive(rank.pid):
            os.kill(rank.pid, signal.SIGKILL)
            self.scene.wait(lambda: not is_alive(rank.pid), 5)
            self.evidence = f"process {rank.pid} is gone" * (not is_alive(rank.pid))


class CrashNode(Kind):
    """A node is lost: its slurmd and all processes on it."""

    after = (SAME, SPARE, FEWER)

    def strike(self) -> None:
        """Crash the node of the victim."""
        scene, found = self.scene, cluster.facts(self.scene.job)
        if found["JobState"] != "RUNNING":
            return
        rank = scene.rank()
        if rank is not None and is_alive(rank.pid):
            scene.cluster.crash(rank.node)
            scene.wait(lambda: not is_alive(rank.pid), 5)  # a process that is killed is there for a moment
            self.evidence = f"{rank.node} is lost" * (not is_alive(rank.pid))
        else:
            node = expand_hosts(found["NodeList"])[scene.case.victim]
            scene.cluster.crash(node)
            self.evidence = f"{node} is lost"


class Scancel(Kind):
    """Scancel of the job."""

    after = (SAME, OTHER, FEWER)
    ends = (("CANCELLED", ""),)
    ends_job = True

    def strike(self) -> None:
        cluster.command("scancel", str(self.scene.job), check=False)

    def look(self) -> None:
        """See whether Slurm says so."""
        if cluster.facts(self.scene.first_job)["JobState"] == "CANCELLED":
            self.evidence = "the job is CANCELLED"


class TimeLimit(Kind):
    """The signal that Slurm sends before the time limit."""

    moments = LINES
    saves = True
    ranks = True
    options = ("--time=2", "--signal=USR1@75")

    def strike(self) -> None:
        """Wait until Slurm sends it."""
        scene = self.scene
        scene.wait(lambda: signal.SIGUSR1 in scene.received or not scene.held_is_alive(), 100)
        self.evidence = f"{scene.held} got USR1" * (signal.SIGUSR1 in scene.received)
        scene.note_fault()


class Requeue(Kind):
    """Scontrol requeue of the job."""

    def strike(self) -> None:
        cluster.command("scontrol", "requeue", str(self.scene.job), check=False)

    def look(self) -> None:
        """See whether it was started again."""
        count = cluster.facts(self.scene.first_job)["Restarts"]
        self.evidence = "" if count == "0" else f"{count} restarts"


class Preemption(Kind):
    """A job of the partition high needs the nodes; Slurm requeues the job after the time of grace."""

    moments = LINES
    saves = True
    options = ("--partition=low",)
    _high = 0

    def strike(self) -> None:
        """Submit the other job, and wait until Slurm begins to preempt this one."""
        self._high = cluster.sbatch("--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

        def is_preempted() -> bool:
            found = cluster.facts(self.scene.job)
            if (when := found.get("PreemptTime", "None")) not in ("None", "Unknown", "N/A"):
                self.evidence = f"PreemptTime={when}"
            return bool(self.evidence) or not cluster.is_alive(found)

        self.scene.wait(is_preempted, 30)

    def undo(self) -> None:
        """Cancel the other job, if it still waits."""
        if self._high:
            cluster.command("scancel", "--quiet", str(self._high), check=False)


class PreemptionByCancel(Preemption):
    """As Preemption, but Slurm cancels the job."""

    after = (SAME, OTHER)
    options = ("--partition=lowest",)
    ends = (("PREEMPTED", ""), ("CANCELLED", ""), ("FAILED", "143:0"))


class Suspend(Kind):
    """SIGSTOP of one rank."""

    moments = ("start-up", "first step", "mid-step", "staging", "validation", "finishing")
    settings = ("training.timeout_minutes=0.15",)

    def strike(self) -> None:
        rank = self.scene.rank()
        if rank is not None and is_alive(rank.pid):
            os.kill(rank.pid, signal.SIGSTOP)
            self.scene.wait(lambda: process_state(rank.pid) in "Tt", 2)
            self.evidence = f"process {rank.pid} is stopped" * (process_state(rank.pid) in "Tt")


class Usr1(Kind):
    """A signal to all ranks, and in some cases also to the batch script: SIGUSR1, after which the run saves and is requeued."""

    number = signal.SIGUSR1
    saves = True
    ranks = True

    def strike(self) -> None:
        """Send it, and wait until the process at the line has it."""
        scene = self.scene
        full = ("--full",) if scene.chance.random() < 0.3 else ()
        self.saves = not (full and self.number == signal.SIGTERM)  # srun gets it as well, and kills the ranks
        if not full and scene.case.moment == "start-up":  # it may end ranks that do not handle it yet: they are started again
            self.ends_job = False
        held = scene.held_is_alive()
        if not held:  # before the ranks are there, or handle it, the signal of a job that runs goes nowhere, or kills
            scene.wait(lambda: self._is_handled() or not cluster.is_alive(cluster.facts(scene.job)), 30)
        alive = cluster.facts(scene.job)["JobState"] == "RUNNING" and (held or self._is_handled())
        cluster.command("scancel", f"--signal={self.number.name[3:]}", *full, str(scene.job), check=False)

        def arrived() -> bool:
            return self.number in scene.received or not scene.held_is_alive()

        if held:
            scene.wait(arrived, 5)
        if alive and (not held or arrived()):
            self.evidence = f"{self.number.name} to ranks" + (" and script" if full else "")

    def _is_handled(self) -> bool:
        """Whether the rank that is hit has a handler of the signal."""
        rank = self.scene.rank()
        return rank is not None and handles(rank.pid, self.number)


class Term(Usr1):
    """As Usr1, with SIGTERM, after which the run saves and ends."""

    number = signal.SIGTERM
    after = (SAME, OTHER, FEWER)
    ends = (("FAILED", "143:0"), ("CANCELLED", ""))
    ends_job = True


KINDS: dict[str, type[Kind]] = {
    "kill rank": KillRank,
    "crash node": CrashNode,
    "scancel": Scancel,
    "time limit": TimeLimit,
    "requeue": Requeue,
    "preemption": Preemption,
    "cancelling preemption": PreemptionByCancel,
    "SIGSTOP": Suspend,
    "disk full": DiskFull,
    "no inodes": InodesFull,
    "damaged checkpoint": DamagedCheckpoint,
    "port taken": PortTaken,
    "USR1": Usr1,
    "TERM": Term,
}
