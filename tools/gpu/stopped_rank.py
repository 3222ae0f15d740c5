"""A rank that stops answering within training: the watchdog of another one must name it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

from pipeline.certification.batches import random_batches, split, to_device
from pipeline.certification.layout_training import begin
from pipeline.config.schema import RunConfig
from pipeline.parallel import mesh as meshes
from pipeline.training.watchdog import Watchdog
from tools.audit.family_cases import MODELS
from tools.faults.job import free_port
from tools.gpu import models
from tools.gpu.rows import Row, Setup
from tools.jobs import configured

#: Minutes without progress after which the watchdog ends the run.
MINUTES = 0.25
#: A stopped process keeps its connections, as a node without power does. The end of a process is noticed by gloo or NCCL at once.
STOP = signal.SIGSTOP
#: The step after which the last rank stops.
LAST = 3
#: Seconds until the run must have ended.
PATIENCE = 240.0


def stopped_rank(setup: Setup, count: int, section: str, name: str) -> Row:
    """Train on all ranks, stop the last one, and look for its name in the log of the first."""
    words = (*models.WIDER, f"training.global_batch_size={4 * count}", f"training.timeout_minutes={MINUTES}")
    config = configured(*MODELS["llama"].overrides, *words, ranks=count)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn" if setup.cuda else "forkserver")
        job = count, f"tcp://127.0.0.1:{free_port()}", config, folder
        processes = [context.Process(target=be_rank, args=(rank, *job)) for rank in range(count)]
        try:
            for process in processes:
                process.start()
            processes[0].join(PATIENCE)
            code = processes[0].exitcode
        finally:
            for process in processes:
                process.kill()
                process.join()
        text = "".join(Path(folder, str(rank)).read_text(errors="replace") for rank in range(count - 1))
    named = next((line for line in text.splitlines() if "the run waits for" in line), "")
    done = f"{STOP.name} of rank {count - 1} after step {LAST}"
    if code is None:
        return Row.failed(section, name, f"{done}: rank 0 still runs after {PATIENCE:g} s")
    if f"the run waits for rank {count - 1} " not in named:
        last = text.strip().splitlines()[-1:] or ["no output"]
        return Row.failed(section, name, f"{done}: not named; {named or last[0]}")
    return Row(section, name, remark=f"{done}: {named.partition('no progress')[2]}")


def be_rank(rank: int, count: int, store: str, config: RunConfig, folder: str) -> None:
    """Train until the last rank stops itself, with both output streams in a file."""
    with open(Path(folder, str(rank)), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    torch.set_num_threads(1)
    meshes.init_distributed(rank, count, rank, store, MINUTES)
    trainer = begin(config)
    whole = random_batches(config, 1)[0]
    layout = trainer.mesh.layout
    tokens, batch = to_device(*split(*whole, layout.batch_shards)[layout.batch_shard(trainer.mesh.coordinates)], trainer.mesh.device)
    with Watchdog(MINUTES) as watchdog:
        for step in range(1_000_000):
            watchdog.report(f"step {step + 1}")
            loss, _ = trainer.train(tokens, batch)
            float(loss)  # on a GPU the host would be ahead
            if step + 1 == LAST and rank == count - 1:
                os.kill(os.getpid(), STOP)
