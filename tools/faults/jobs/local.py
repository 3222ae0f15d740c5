"""Jobs of few ranks on this machine, without Slurm: kill -9 of a rank, of the writer process, or of all."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

from tools.faults.job import forked, free_port, is_alive
from tools.faults.jobs.cases import SETTINGS, Layout, saves
from tools.faults.jobs.kind import SAME, Kind
from tools.faults.jobs.kinds import KillRank
from tools.faults.jobs.scene import Scene, State

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("1 rank, ZeRO 0", 1, ("parallel.zero_stage=0",)),
        Layout("2 ranks, ZeRO 2", 2, ("parallel.zero_stage=2",)),
        Layout("1 rank, ZeRO 1", 1, ("parallel.zero_stage=1", "checkpoint.async_save=off")),
        Layout("2 ranks, tensor 2, ZeRO 0", 2, ("parallel.tensor=2", "parallel.zero_stage=0")),
        Layout("2 ranks, DeepSpeed, ZeRO 2", 2, ("parallel.engine=deepspeed", "parallel.zero_stage=2")),
        Layout("2 ranks, DeepSpeed, ZeRO 3", 2, ("parallel.engine=deepspeed", "parallel.zero_stage=3")),
    )
}


class KillOneRank(KillRank):
    """kill -9 of one rank."""

    after = (SAME,)


class KillWriter(Kind):
    """kill -9 of the writer process: the job goes on."""

    def victims(self) -> list[int]:
        """The processes that are killed."""
        return self.scene.writers

    def strike(self) -> None:
        """Kill those that are alive."""
        alive = [pid for pid in self.victims() if is_alive(pid)]
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        self.scene.wait(lambda: not any(map(is_alive, alive)), 5)
        self.evidence = f"{len(alive)} processes are gone" if alive and not any(map(is_alive, alive)) else ""


class KillAll(KillWriter):
    """kill -9 of all ranks and of the writer process."""

    def victims(self) -> list[int]:
        return [*(rank.pid for rank in self.scene.ranks.values()), *self.scene.writers]


KINDS: dict[str, type[Kind]] = {"kill rank": KillOneRank, "kill writer": KillWriter, "kill all": KillAll}


class LocalScene(Scene):
    """Jobs on this machine, whose processes are forked from that of `job.preload`.

    The run without a fault has all checkpoints. A job that a fault has ended is started again by the same command, in half of the cases
    while its writer may still commit.
    """

    pace = 0.15
    kinds = KINDS

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._restarts = 0
        self._processes: list[BaseProcess] = []
        self._saves = saves(1, 1_000_000)
        if self._case is not None:
            self._saves = saves(self.chance.choice([1, 1, 2]), self.chance.choice([1_000_000, 1_000_000, 2]))

    def submit(self, layout: Layout, *, hold: bool = False) -> None:
        self.layout = layout
        if not hold:
            self.begin()

    def begin(self) -> None:
        count = self.layout.nodes
        words = [*SETTINGS, *self._saves, *self.layout.settings, f"data.tokens={self.data}", f"run_dir={self.run_dir}"]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "lo"}
        job |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **self.environment()}
        self._processes = [
            forked(
                ["-m", "tools.faults.tracing", "stage=pretrain", *words],
                {**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                self.folder / "log",
            )
            for rank in range(count)
        ]

    def state(self) -> State:
        """As a launcher: when a rank has failed, the others are killed, in half of the cases after two seconds."""
        codes = self._codes()
        if any(codes) and None in codes:
            deadline = time.monotonic() + self.chance.choice((0.0, 2.0))
            while None in self._codes() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.clean()
            codes = self._codes()
        running = None in codes
        if not running and any(codes) and self.struck_at is not None and self.case.fault != "kill writer" and not self._restarts:
            if self.chance.random() < 0.5:
                self.wait(lambda: not any(map(is_alive, self.writers)), 30)
            self._restarts, running = 1, True
            self.begin()
        name = "RUNNING" if running else "FAILED" if any(codes) else "COMPLETED"
        return State(name, running, "", self._restarts, f"{name}, exit codes {codes}, {self._restarts} restarts")

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def settled(self) -> list[str]:
        return []

    def clean(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
