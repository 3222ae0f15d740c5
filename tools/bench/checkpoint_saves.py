"""The saves of tools/bench_checkpoint: one implementation in one process, training steps beside its saves.

usage: checkpoint_saves.py '{"implementation": "ours" | "dcp-thread" | "dcp-process", "folder": ..., ...}'; prints the results as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from pipeline.checkpoint import native
from pipeline.checkpoint.async_save import AsyncSaver
from pipeline.checkpoint.handover import Commit, LastUpdate
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.saver import SaveRequest, SyncSaver
from pipeline.checkpoint.writer_process import WriterProcess
from pipeline.common.ranks import Ranks
from pipeline.config.schema import CheckpointConfig
from pipeline.training import choose_saver
from tools.bench.checkpoint_state import batches, checksums, configuration, disk_bytes, plain_write, state_of
from tools.bench.harness import resident
from tools.jobs import build_trainer


class Job:
    """A trainer on one rank, with random batches, and the times of its steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.config = configuration(options)
        self.trainer = build_trainer(self.config)
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
    result: dict[str, Any] = {"saves": [], "quiet": []}
    futures: list[Any] = []
    for number in range(options["rounds"]):
        target = Path(options["folder"], options["implementation"], str(number))

        def begin(target: Path = target) -> Callable[[], bool]:
            writer = FileSystemWriter(target)
            futures.append(async_save(job.state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager))
            return futures[-1].done

        result["quiet"] += quiet(job, options["steps"])
        result["checksums"] = checksums(job.state)
        result["saves"].append(beside(job, begin, options["steps"]))
        futures.pop().result()
        result["disk"], result["checkpoint"] = disk_bytes(target), str(target)
        if number:
            shutil.rmtree(target.with_name(str(number - 1)))
    stager.close()
    return result


def ours(job: Job, options: dict[str, Any], process: WriterProcess) -> dict[str, Any]:
    """The plain write, the save for which training waits, and that beside training by the writer process."""
    run_dir, plain = Path(options["run_dir"]), Path(options["folder"], "plain.bin")
    (run_dir / "checkpoints").mkdir(parents=True)
    result: dict[str, Any] = {"plain": [], "synchronous": [], "quiet": [], "saves": []}
    for _ in range(options["synchronous"]):
        result["plain"].append(plain_write(plain, job.state))
        plain.unlink()
        started = time.perf_counter()
        SyncSaver(run_dir, "rank").begin(request_of(job))
        result["synchronous"].append(time.perf_counter() - started)
        job.step()
    saver = choose_saver.choose(job.config, Ranks(), job.trainer, process, None)
    assert isinstance(saver, AsyncSaver), "the benchmark needs memory for the copies"
    for _ in range(options["rounds"]):
        blocked: list[float] = []

        def wait(blocked: list[float] = blocked) -> None:
            started = time.perf_counter()
            saver.before_update()
            blocked.append(time.perf_counter() - started)

        def begin() -> Callable[[], bool]:
            saver.begin(request_of(job))
            index = native.folder_of(run_dir, job.steps) / native.INDEX
            return index.is_file

        job.trainer.before_update = wait
        result["quiet"] += quiet(job, options["steps"])
        result["checksums"] = checksums(job.state)
        path = native.folder_of(run_dir, job.steps)
        found = beside(job, begin, options["steps"])
        saver.wait_for_commit()
        result["saves"].append({**found, "pause": found["pause"] + sum(blocked)})
        result["disk"], result["checkpoint"] = disk_bytes(path), str(path)
    result["writer"], result["buffer"] = resident("VmHWM", process.pid or 0), job.bytes
    result["writer alone"] = resident("RssAnon", process.pid or 0)
    saver.close()
    return result


def request_of(job: Job) -> SaveRequest:
    index = native.new_index(TrainState(job.steps, job.steps, job.steps), dataclasses.asdict(job.config), "", 1)
    optimizer = job.config.optimizer
    update = LastUpdate(optimizer.lr, job.steps, optimizer, job.steps)
    return SaveRequest(job.steps, job.trainer.engine.fragments(), lambda: update, lambda: Commit(index, 1, 0, frozenset()))


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    process = None
    if options["implementation"] == "ours":  # started before process groups exist, as in a run
        process = choose_saver.start_writer(CheckpointConfig(), Ranks())
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options['port']}", rank=0, world_size=1)
        job = Job(options)
        measured = dcp(job, options) if process is None else ours(job, options, process)
        measured |= {"bytes": job.bytes, "step": median(measured["quiet"]), "parameters": job.bytes // 12}
        dist.destroy_process_group()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
