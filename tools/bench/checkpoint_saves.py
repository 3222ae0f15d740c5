"""The saves of tools/bench_checkpoint: one implementation in one process, training steps beside its saves.

usage: checkpoint_saves.py '{"implementation": "ours" | "dcp-thread" | "dcp-process", "folder": ..., ...}'; prints the results as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.checkpoint_state import batches, build, checksums, configuration, disk_bytes, plain_write, state_of


class Job:
    """A trainer on one rank, with random batches, and the times of its steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.config = configuration(options)
        self.trainer = build(self.config)
        self._batches = batches(self.config)
        self.steps = 0
        self.step()
        self.state = state_of(self.trainer)

    @property
    def bytes(self) -> int:
        """Bytes of weights and moments."""
        return sum(tensor.nbytes for tensor in self.state.values())

    def step(self) -> float:
        """Train one step. Returns seconds."""
        tokens, batch = next(self._batches)
        started = time.perf_counter()
        self.trainer.train(tokens, batch, step=self.steps)
        self.steps += 1
        return time.perf_counter() - started


def beside(job: Job, begin: Callable[[], Callable[[], bool]], steps: int) -> dict[str, Any]:
    """Save while training continues.

    Args:
        job: trains.
        begin: starts the save and returns what tells whether it is complete.
        steps: at least this number of steps follows.

    Returns:
        pause: seconds that the call took.
        times: seconds of the steps that ended while the save was active.
        complete: seconds from the call to the end of the save.
        total: seconds from the call to the end of the last step, or to the end of the save if that is later.
        steps: number of steps in that time.
    """
    started = time.perf_counter()
    complete = begin()
    pause = time.perf_counter() - started
    ended: list[float] = []

    def watch() -> None:
        while not complete():
            time.sleep(0.02)
        ended.append(time.perf_counter() - started)

    watcher = threading.Thread(target=watch)
    watcher.start()
    times: list[float] = []
    taken = 0
    while watcher.is_alive() or taken < steps:
        seconds = job.step()
        taken += 1
        if not ended:
            times.append(seconds)
    watcher.join()
    return {"pause": pause, "times": times, "complete": ended[0], "total": time.perf_counter() - started, "steps": taken}


def quiet(job: Job, steps: int) -> list[float]:
    """Seconds of steps without a save."""
    return [job.step() for _ in range(steps)]


def dcp(job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """torch.distributed.checkpoint.async_save with a stager that keeps its buffers, in shared memory for the process."""
    from torch.distributed.checkpoint import FileSystemWriter, async_save
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType(options["implementation"].removeprefix("dcp-"))
    share = kind is AsyncCheckpointerType.PROCESS
    stager = DefaultStager(
        StagingOptions(use_pinned_memory=False, use_shared_memory=share, use_async_staging=False, use_non_blocking_copy=False)
    )
    result: dict[str, Any] = {"saves": []}
    futures: list[Any] = []
    for number in range(options["rounds"]):
        target = Path(options["folder"], options["implementation"], str(number))

        def begin(target: Path = target) -> Callable[[], bool]:
            writer = FileSystemWriter(target)
            future = async_save(job.state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager)
            futures.append(future)
            return future.done

        result["quiet"] = result.get("quiet", []) + quiet(job, options["steps"])
        result["checksums"] = checksums(job.state)
        result["saves"].append(beside(job, begin, options["steps"]))
        futures.pop().result()
        result["disk"] = disk_bytes(target)
        if number:
            shutil.rmtree(target.with_name(str(number - 1)))
        result["checkpoint"] = str(target)
    stager.close()
    return result


def ours(job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """The plain write, the synchronous save, and the asynchronous one."""
    from pipeline.checkpoint import save
    from pipeline.checkpoint.native import Index, TrainState

    folder = Path(options["folder"], "plain")
    folder.mkdir(parents=True)
    result: dict[str, Any] = {"plain": [], "synchronous": [], "quiet": [], "saves": []}
    for _ in range(options["rounds"]):
        result["plain"].append(plain_write(folder / "plain.bin", job.state))
        index = Index(TrainState(step=job.steps, samples=job.steps, updates=job.steps), configuration_of(job))
        started = time.perf_counter()
        path = save.save(Path(options["run_dir"]), index, job.trainer.engine.fragments(), 1)
        result["synchronous"].append(time.perf_counter() - started)
        result["checksums"] = checksums(job.state)
        result["disk"], result["checkpoint"] = disk_bytes(path), str(path)
        result["quiet"] += quiet(job, options["steps"])
    return result


def configuration_of(job: Job) -> dict[str, Any]:
    """The configuration as the index has it."""
    import dataclasses

    return dataclasses.asdict(job.config)


def main() -> None:
    """Measure and print the results."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options['port']}", rank=0, world_size=1)
        job = Job(options)
        measured = (ours if options["implementation"] == "ours" else dcp)(job, options)
        measured |= {"bytes": job.bytes, "step": median(measured["quiet"]), "parameters": job.bytes // 12}
        dist.destroy_process_group()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
