"""Section ranks: layouts beside one process, speed and exposed communication, a checkpoint on another number of ranks, a stopped rank."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.certification.batches import random_batches, split, to_device
from pipeline.certification.comparison import Outcome
from pipeline.certification.conditioning import in_precision
from pipeline.certification.distributed import RanksFailedError, run_ranks
from pipeline.certification.layout_training import begin, train_in_layout
from pipeline.certification.ranks_work import RankResult, RankWork, continue_elsewhere, train_all
from pipeline.certification.reference import train_plain
from pipeline.certification.state import other_layout
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.layers import gpu
from pipeline.parallel import mesh as meshes
from pipeline.training import determinism
from pipeline.training.watchdog import Watchdog
from tools.audit.family_cases import MODELS
from tools.faults.job import free_port
from tools.gpu import models, speed, step
from tools.gpu.rows import Row, Setup, guarded
from tools.jobs import configured

#: Name of a layout -> family, and settings of parallel. The ranks that are not named are data ranks.
LAYOUTS = {
    **{f"zero {zero}": ("llama", f"zero_stage={zero}") for zero in range(4)},
    "tensor 2, zero 1": ("llama", "tensor=2 zero_stage=1"),
    "tensor 2 without sequence parallelism, zero 2": ("llama", "tensor=2 sequence_parallel=false zero_stage=2"),
    "pipeline 2 1f1b, zero 1": ("llama", "pipeline=2 zero_stage=1"),
    "pipeline 2 zbv, zero 0": ("llama", "pipeline=2 schedule=zbv zero_stage=0"),
    "ring of 2, zero 3": ("llama", "context=2 zero_stage=3"),
    "ulysses 2, zero 1": ("llama", "context=2 context_kind=ulysses zero_stage=1"),
    "expert 2, zero 1": ("mixtral", "expert=2 zero_stage=1"),
    "tensor 2 expert 2, zero 2": ("mixtral", "tensor=2 expert=2 zero_stage=2"),
}
QUICK = ("zero 0", "zero 3", "tensor 2, zero 1", "ring of 2, zero 3", "expert 2, zero 1")
#: Fused products and collectives need blocks that are compiled, and sizes that are worth it.
ASYNC_MODEL = (
    *("model=llama-tiny", "model.hidden=1024", "model.heads=8", "model.kv_heads=8", "model.layers=2", "model.ffn_hidden=2816"),
    *("model.max_positions=1024", "training.sequence_length=1024", "training.micro_batch_size=2", "training.steps=3", "precision=bf16"),
    *("parallel.tensor=2", "optimizer.warmup_steps=0"),
)
#: Largest relative difference of their losses: a rounding of bf16.
ASYNC_BOUND = 2**-7
#: Seconds that the ranks of one start may take.
PATIENCE = 600.0


def rows(setup: Setup) -> Iterator[Row]:
    count = min(setup.ranks, torch.cuda.device_count()) if setup.cuda else setup.ranks
    if count < 2:
        yield Row.skipped("all", "one GPU" if setup.cuda else "one rank")
        return
    if count < setup.ranks:
        yield Row.failed("GPUs", f"--ranks={setup.ranks}, but {count} GPUs are visible")
    yield from layouts(setup, count)
    yield from fused(setup, count)
    yield from rates(setup, count)
    yield guarded("saved, and continued on another number of ranks", saved, setup, count)
    yield guarded("a stopped rank is named by the watchdog", stopped_rank, setup, count)


def trained(setup: Setup, count: int, configs: dict[str, RunConfig]) -> Iterator[tuple[str, Outcome | RanksFailedError]]:
    """Train every configuration on all ranks, and yield what it computed. After an error, the ranks are started again for the rest."""
    with tempfile.TemporaryDirectory() as folder:
        left = dict(configs)
        while left:
            error = None
            try:
                run_ranks(count, train_each, list(left.items()), folder, seconds=PATIENCE, gpus=setup.cuda)
            except RanksFailedError as failed:
                error = failed
            for name in list(left):
                file = file_of(folder, name)
                if file.exists():
                    yield name, torch.load(file, weights_only=False)
                else:
                    yield name, error or RanksFailedError("no result was written")
                    del left[name]
                    break
                del left[name]


def layouts(setup: Setup, count: int) -> Iterator[Row]:
    """Yield the rows of layouts beside a plain loop in one process on the CPU."""
    steps, configs = 2 if setup.quick else 4, {}
    common = (*models.WIDER, f"training.steps={steps}", f"training.global_batch_size={4 * count}")
    for name, (family, words) in LAYOUTS.items():
        sizes = dict(word.split("=") for word in words.split())
        needed = int(sizes.get("tensor", 1)) * int(sizes.get("pipeline", 1)) * int(sizes.get("context", 1)) * int(sizes.get("expert", 1))
        if (setup.quick and name not in QUICK) or count % needed:
            continue
        layout = [f"parallel.{word}" for word in words.split()]
        configs[f"{family} {name}"] = configured(*MODELS[family].overrides, *common, *layout, ranks=count)
    references: dict[str, tuple[Outcome, Outcome]] = {}
    for name, found in trained(setup, count, configs):
        if isinstance(found, RanksFailedError):
            yield Row.failed(name, found)
            continue
        config, family = configs[name], name.partition(" ")[0]
        if family not in references:
            references[family] = train_plain(config), train_plain(config, torch.float64)
        tolerances, differences = models.against(setup, config, *references[family], found)
        remark = f"{Layout.of(config, count).axes_text()}, fp32, {steps} steps, beside one process"
        yield models.worst(name, tolerances, differences, remark)


def fused(setup: Setup, count: int) -> Iterator[Row]:
    """Yield the rows of tensor parallelism with products that are fused with collectives, and without."""
    name = "async tensor parallelism, on beside off"
    if not setup.cuda or count % 2 or not gpu.of(setup.device).symmetric_memory:
        yield Row.skipped(name, "requires an even number of GPUs from Hopper on")
        return
    words = (*ASYNC_MODEL, f"training.global_batch_size={2 * count}")
    configs = {mode: configured(*words, f"parallel.async_tensor={mode}", ranks=count) for mode in ("off", "on")}
    found = dict(trained(setup, count, configs))
    if error := next((each for each in found.values() if isinstance(each, RanksFailedError)), None):
        yield Row.failed(name, error)
        return
    losses = [each.losses for each in found.values() if isinstance(each, Outcome)]
    difference = step.largest_difference(*losses)
    yield Row.bounded(name, difference, ASYNC_BOUND, "relative difference of the loss, bf16, compiled")


def rates(setup: Setup, count: int) -> Iterator[Row]:
    """Yield tokens/s, memory and exposed communication of Llama 1B on all ranks, of a tiny model on a CPU, and of experts on all ranks."""
    model = "llama 1B" if setup.cuda else "tiny for llama 1B"
    batch = f"training.global_batch_size={(8 if setup.cuda else 4) * count}"
    jobs = {f"{model} zero {zero}": (speed.ONES, (f"parallel.zero_stage={zero}",)) for zero in ((3,) if setup.quick else (1, 3))}
    if 8 % count == 0:  # what their exchange holds beside the allocator is the largest part of it
        words = () if setup.cuda else ("model=mixtral-tiny",)
        jobs[f"{'mixtral 8x7B slice' if setup.cuda else 'tiny mixtral'} expert {count}"] = (
            speed.EXPERTS,
            (*words, f"parallel.expert={count}"),
        )
    for name, (choices, words) in jobs.items():
        config, planned = speed.fitting(setup, choices, (*words, batch), count)
        try:
            found = speed.in_processes(setup, config, count)
        except RanksFailedError as error:
            yield Row.failed(f"{name}: tokens/s", error)
            continue
        yield from speed.rows_of(setup, name, config, planned, found, count)
        where = "of a profiled step, rank 0" + ("" if setup.cuda else "; over gloo")
        yield Row(f"{name}: exposed communication, %", value=100 * found.exposed, remark=where)


def saved(name: str, setup: Setup, count: int) -> Row:
    """Train, save, continue in the same layout, and load the checkpoint on another number of ranks: all bits."""
    layout = ("parallel.tensor=2",) if count % 2 == 0 else ()
    words = (*models.WIDER, "training.steps=6", f"training.global_batch_size={4 * count}", "parallel.zero_stage=1", *layout)
    config = in_precision(configured(*MODELS["llama"].overrides, *words, ranks=count), "bf16")
    other, size = other_layout(config)
    if size == count:
        other, size = dataclasses.replace(other, parallel=dataclasses.replace(other.parallel, tensor=1, zero_stage=0)), 1
    with tempfile.TemporaryDirectory() as folder:
        work = RankWork({"bf16": config}, folder, copies=False, saved="bf16")
        run_ranks(count, train_deterministically, work, seconds=PATIENCE, gpus=setup.cuda)
        run_ranks(size, continue_elsewhere, other, folder, seconds=PATIENCE, gpus=setup.cuda)
        result: RankResult = torch.load(f"{folder}/bf16", weights_only=False)
        report, _ = torch.load(f"{folder}/elsewhere", weights_only=False)
    failures = [line for part in (*result.reports, report) for line in part.failures]
    remark = "; ".join(failures) or f"by {count} ranks, loaded by {size}: all bits of weights and moments"
    return Row.bounded(name, len(failures), 0, remark)


def file_of(folder: str, name: str) -> Path:
    return Path(folder, name.replace(" ", "-").replace(",", ""))


def train_each(configs: Sequence[tuple[str, RunConfig]], folder: str) -> None:
    """Train every configuration; rank 0 writes what each computed."""
    for name, config in configs:
        _write(folder, name, train_in_layout(config, begin(config)))


def train_deterministically(work: RankWork) -> None:
    """Train, save and continue, with equal bits on a GPU too."""
    if torch.cuda.is_available():
        determinism.enable()
    train_all(work)


def _write(folder: str, name: str, result: object) -> None:
    """Write a result on rank 0; another rank may go on before."""
    if dist.get_rank() == 0:
        file = file_of(folder, name)
        torch.save(result, file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)


#: Minutes without progress after which the watchdog ends the run.
MINUTES = 0.25
#: A stopped process keeps its connections, as a node without power does. The end of a process is noticed by gloo or NCCL at once.
STOP = signal.SIGSTOP
#: The step after which the last rank stops.
LAST = 3
#: Seconds until the run of a stopped rank must have ended.
STOPPED_PATIENCE = 240.0


def stopped_rank(name: str, setup: Setup, count: int) -> Row:
    """Train on all ranks, stop the last one, and look for its name in the log of the first."""
    words = (*models.WIDER, f"training.global_batch_size={4 * count}", f"training.timeout_minutes={MINUTES}")
    config = configured(*MODELS["llama"].overrides, *words, ranks=count)
    with tempfile.TemporaryDirectory() as folder:
        context: Any = multiprocessing.get_context("spawn" if setup.cuda else "forkserver")
        job = count, f"tcp://127.0.0.1:{free_port()}", config, folder
        processes = [context.Process(target=be_rank, args=(rank, *job)) for rank in range(count)]
        try:
            for process in processes:
                process.start()
            processes[0].join(STOPPED_PATIENCE)
            code = processes[0].exitcode
        finally:
            for process in processes:
                process.kill()
                process.join()
        text = "".join(Path(folder, str(rank)).read_text(errors="replace") for rank in range(count - 1))
    named = next((line for line in text.splitlines() if "the run waits for" in line), "")
    done = f"{STOP.name} of rank {count - 1} after step {LAST}"
    if code is None:
        return Row.failed(name, f"{done}: rank 0 still runs after {STOPPED_PATIENCE:g} s")
    if f"the run waits for rank {count - 1} " not in named:
        last = text.strip().splitlines()[-1:] or ["no output"]
        return Row.failed(name, f"{done}: not named; {named or last[0]}")
    return Row(name, remark=f"{done}: {named.partition('no progress')[2]}")


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
