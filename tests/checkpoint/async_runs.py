"""Runs whose checkpoints are saved asynchronously, all in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pipeline.checkpoint import catalog
from pipeline.checkpoint.async_save import AsyncSaver, Node
from pipeline.checkpoint.fragments import Held, plan
from pipeline.checkpoint.handover import Commit, LastUpdate
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.saver import SaveOutcome, SaveRequest
from pipeline.checkpoint.writer_process import WriterProcess
from pipeline.config.optimizer import OptimizerConfig

KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Run:
    """A training run of two weights, and its saver."""

    def __init__(self, run_dir: Path, lock: int | None = None, before_next: float = 60.0) -> None:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.run_dir, self.step, self.lr = run_dir, 0, 0.01
        self.sizes = {"blocks.0.weight": (3, 50), "norm.weight": (7,)}
        self.state = {name: {kind: torch.rand(shape).flatten() for kind in KINDS} for name, shape in self.sizes.items()}
        held = [
            Held(name, shape, tuple((0, size) for size in shape), 0, int(np.prod(shape)), dict.fromkeys(KINDS, "F32"))
            for name, shape in self.sizes.items()
        ]
        self.process = WriterProcess(f"test-{os.getpid()}-{id(self)}")
        self.process.start()
        device = torch.device("cpu")
        node = Node(self.process.name, (0,), 0, 1)
        self.saver = AsyncSaver(run_dir, 0, node, self.process, plan(held), "rank", device, "job", lock, 60.0, before_next)

    def update(self) -> None:
        """A step of the optimizer."""
        self.saver.before_update()
        for tensors in self.state.values():
            tensors["weight"].sub_(self.lr * tensors["exp_avg"] / tensors["exp_avg_sq"].sqrt())
        self.step += 1

    def fragments(self) -> list[Any]:
        return [SimpleNamespace(tensors=tensors) for tensors in self.state.values()]

    def begin(self) -> None:
        update = LastUpdate(self.lr, self.step, OptimizerConfig(beta1=0.0, beta2=0.0), 0)
        index = Index(TrainState(self.step), {})
        self.saver.begin(SaveRequest(self.step, self.fragments(), lambda: update, lambda: Commit(index, 9, 0, frozenset())))

    def end(self) -> SaveOutcome:
        self.saver.wait()
        self.saver.wait_for_commit()
        (outcome,) = self.saver.poll()
        return outcome

    def save(self) -> SaveOutcome:
        self.begin()
        return self.end()

    def stored(self, step: int) -> np.ndarray:
        """The bytes of the first weight in the checkpoint of a step."""
        from safetensors import safe_open

        with safe_open(catalog.folder_of(self.run_dir, step) / "rank-00000.safetensors", "np") as file:
            return file.get_tensor("weight/blocks.0.weight[0:3,0:50]@0")


def complete(run: Run) -> list[int]:
    return catalog.read(run.run_dir).complete


def kill(process: WriterProcess) -> None:
    """Kill a writer process, and wait for its end, which a rank learns of later."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def hand_over(saver: AsyncSaver) -> None:
    """Hand over the save that was begun."""
    saver.before_update()
    saver._staging._thread.join(60)


class Job:
    """Ranks of several nodes, all in this process: no call of a saver waits for another rank. Each has a weight of its own."""

    def __init__(self, run_dir: Path, nodes: int, local: int, files: str) -> None:
        (run_dir / "checkpoints").mkdir()
        self.run_dir = run_dir
        self.processes = [WriterProcess(f"test-{os.getpid()}-{id(self)}-{node}") for node in range(nodes)]
        self.weights = [torch.rand(600 + rank) for rank in range(nodes * local)]
        self.savers = []
        for rank, weight in enumerate(self.weights):
            node, count = rank // local, weight.numel()
            first = node * local
            where = Node(self.processes[node].name, tuple(range(first, first + local)), node, nodes)
            shares = plan([Held(f"w{rank}", (count,), ((0, count),), 0, count, {"weight": "F32"})])
            process = self.processes[node] if rank == first else None
            self.savers.append(AsyncSaver(run_dir, rank, where, process, shares, files, torch.device("cpu"), "job", None, 20.0, 20.0))

    def begin(self, rank: int, step: int) -> None:
        """One rank begins a save."""
        fragments: list[Any] = [SimpleNamespace(tensors={"weight": self.weights[rank]})]
        commit = None if rank else lambda: Commit(Index(TrainState(step), {}), 9, 0, frozenset())
        self.savers[rank].begin(SaveRequest(step, fragments, lambda: None, commit))

    def save(self, step: int, torn: tuple[int, ...] = (), dying: int | None = None) -> list[list[SaveOutcome]]:
        """The outcomes of the ranks; the copies of some are useless, and a writer dies when it has got those of its node."""
        if dying is not None:
            os.kill(self.processes[dying].pid, signal.SIGSTOP)
        for rank in range(len(self.savers)):
            self.begin(rank, step)
            if rank in torn:
                self.weights[rank].add_(1)
        for saver in self.savers:
            hand_over(saver)
        if dying is not None:
            kill(self.processes[dying])
        for saver in reversed(self.savers):  # a rank tells what it did not hand over when it waits
            saver.wait()
        found = [saver.poll() for saver in self.savers[1:]]
        self.savers[0].wait_for_commit()
        return [self.savers[0].poll(), *found]

    def close(self) -> None:
        for saver in reversed(self.savers):
            saver.close()
