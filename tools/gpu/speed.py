"""Section speed: tokens/s, MFU, peak memory beside stage=plan, and retries of the allocator, of Llama 1B and of some layers of 8B."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pipeline.certification.batches import random_batches, split, to_device
from pipeline.certification.distributed import run_ranks
from pipeline.common import host_memory
from pipeline.config import hardware
from pipeline.config.schema import RunConfig
from pipeline.layers import gpu
from pipeline.parallel import device as rank_device
from pipeline.planner import flops
from pipeline.planner.plan import JobPlan, plan
from pipeline.training import profiling
from tools.bench.tensor_memory import TensorMemory
from tools.gpu.rows import Row, Setup
from tools.jobs import build_trainer, configured

#: Peak of the tensors over the planned one: the planner's is within some percent, and libraries have workspaces.
MEMORY = 1.1
BATCH = ("training.sequence_length=4096", "training.micro_batch_size=2", "training.global_batch_size=8", "precision=bf16")
ONE = ("model=llama3.2-1b", *BATCH, "parallel.zero_stage=1")
#: The first one that fits is trained.
SLICES: list[tuple[str, ...]] = [
    ("model=llama3.1-8b", f"model.layers={layers}", *BATCH, "parallel.zero_stage=1") for layers in (8, 4, 2, 1)
]
EXPERTS: list[tuple[str, ...]] = [("model=mixtral-8x7b", f"model.layers={layers}", *BATCH, "parallel.zero_stage=1") for layers in (2, 1)]
ONES: list[tuple[str, ...]] = [ONE, (*ONE, "training.micro_batch_size=1", "training.activation_checkpointing=full")]
#: In place of them on a CPU.
TINY = (
    *("model=llama-tiny", "model.layers=3", "model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.ffn_hidden=96"),
    *("model.vocab_size=256", "training.sequence_length=64", "training.micro_batch_size=2", "training.global_batch_size=4"),
    *("model.max_positions=64", "precision=bf16", "parallel.zero_stage=1", "training.compile=off"),
)
#: Steps before the measured ones, in which blocks are compiled.
WARM = 3
#: Seconds that a job may take.
PATIENCE = 600.0


@dataclass(frozen=True)
class Measured:
    """A training.

    Attributes:
        step: seconds of a step.
        tokens: per second, of all ranks.
        peak: bytes of the tensors of this rank, at most in a step.
        outside: bytes of the GPU that are not PyTorch's: of CUDA, its libraries, and communicators.
        retries: of the allocator.
        exposed: share of a profiled step in which only collectives run.
    """

    step: float
    tokens: float
    peak: int
    outside: int
    retries: int
    exposed: float


def rows(setup: Setup) -> Iterator[Row]:
    if not setup.cuda:
        yield Row.skipped("models", "a tiny model on the CPU stands in for Llama 1B and layers of 8B: its speed says nothing")
    fp8 = ("precision=fp8", "precision.fp8_exclude_layers=0")
    offloaded = ("parallel.offload=optimizer",)
    small, large = ("llama 1B", "llama 8B slice") if setup.cuda else ("tiny for llama 1B", "tiny for llama 8B slice")
    jobs: dict[str, tuple[list[tuple[str, ...]], tuple[str, ...]]]
    jobs = {small: (ONES, ()), large: (SLICES, ()), f"{large} fp8": (SLICES, fp8), f"{small} offloaded": (ONES, offloaded)}
    if setup.quick:
        del jobs[large]
    tokens: dict[str, float] = {}
    for name, (choices, more) in jobs.items():
        if more == fp8 and setup.cuda and not gpu.of(setup.device).fp8:
            yield Row.skipped(name, "this GPU has no 8-bit products")
            continue
        try:
            config, planned = fitting(setup, choices, more)
            if planned is not None and setup.cuda and (reason := lacks_host_memory(planned)):
                yield Row.skipped(name, reason)
                continue
            found = in_processes(setup, config, 1)
        except Exception as error:
            yield Row.failed(name, error)
            continue
        tokens[name] = found.tokens
        yield from rows_of(setup, name, config, planned, found)
    for title, name, other in (("fp8 / bf16", f"{large} fp8", large), ("offloaded / not", f"{small} offloaded", small)):
        if name in tokens and other in tokens:
            yield Row(f"{other}: tokens/s {title}", value=tokens[name] / tokens[other])


def fitting(setup: Setup, choices: list[tuple[str, ...]], more: tuple[str, ...], ranks: int = 1) -> tuple[RunConfig, JobPlan | None]:
    """Return the first configuration that fits as planned, and its plan; of an unknown GPU the last one, without a plan.

    It is planned in a process group of its own, so that there must be none.
    """
    if not setup.cuda:
        config = configured(*TINY, *more, ranks=ranks)
        return config, plan(config, ranks, hardware.load("h100"))
    gpu = hardware.of_device(torch.cuda.get_device_name(setup.device))
    for words in choices:
        config = configured(*words, *more, ranks=ranks)
        if gpu is not None and (planned := plan(config, ranks, gpu)).estimate.fits:
            return config, planned
    return config, None


def lacks_host_memory(planned: JobPlan) -> str:
    """Return why the host cannot hold what is offloaded to it, "" if it can."""
    needed, available = planned.estimate.memory.host, host_memory.available_bytes()
    return f"needs {needed / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB are free" if needed > 0.9 * available else ""


def in_processes(setup: Setup, config: RunConfig, ranks: int) -> Measured:
    """Measure a job in processes of its own: a trainer keeps memory until its process ends.

    Args:
        setup: of the section.
        config: of the job, valid for the number of ranks.
        ranks: of the job.

    Raises:
        RanksFailedError: see run_ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured"
        run_ranks(ranks, be_rank, config, setup, file, seconds=PATIENCE, gpus=setup.cuda)
        found: Measured = torch.load(file, weights_only=False)
    return found


def be_rank(config: RunConfig, setup: Setup, file: Path) -> None:
    """Measure a job on this rank; rank 0 writes the figures."""
    own = dataclasses.replace(setup, device=rank_device.choose(dist.get_rank()))
    found = measured(own, config)
    if dist.get_rank() == 0:
        torch.save(found, file)


def measured(setup: Setup, config: RunConfig) -> Measured:
    """Train some steps on this rank; collective."""
    trainer = build_trainer(config, setup.device)
    layout = trainer.mesh.layout
    whole = random_batches(config, 1)[0]
    tokens, batch = to_device(*split(*whole, layout.batch_shards)[layout.batch_shard(trainer.mesh.coordinates)], setup.device)
    steps, memory = (10 if setup.cuda and not setup.quick else 2), None if setup.cuda else TensorMemory()
    for _ in range(WARM):
        trainer.train(tokens, batch)
    if setup.cuda:
        torch.cuda.reset_peak_memory_stats(setup.device)
    with memory.counting() if memory else nullcontext():
        trainer.train(tokens, batch)
    _finish(setup)
    peak = torch.cuda.max_memory_allocated(setup.device) if memory is None else memory.peak
    started = time.perf_counter()
    for _ in range(steps):
        trainer.train(tokens, batch)
    _finish(setup)
    seconds = (time.perf_counter() - started) / steps
    retries = torch.cuda.memory_stats(setup.device)["num_alloc_retries"] if setup.cuda else 0
    free, whole_gpu = torch.cuda.mem_get_info(setup.device) if setup.cuda else (0, 0)
    outside = whole_gpu - free - torch.cuda.memory_reserved(setup.device) if setup.cuda else 0
    exposed = exposed_share(setup, partial(trainer.train, tokens, batch)) if layout.world_size > 1 else 0.0
    return Measured(seconds, whole[0].numel() / seconds, peak, outside, retries, exposed)


def exposed_share(setup: Setup, step: Callable[[], object]) -> float:
    """Return the share of a profiled step in which collectives run and nothing is computed."""
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * setup.cuda) as found:
        step()
        _finish(setup)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        found.export_chrome_trace(str(path))
        summary = profiling.summary(profiling.read(path))
    return summary.exposed / summary.seconds


def rows_of(setup: Setup, name: str, config: RunConfig, planned: JobPlan | None, found: Measured, ranks: int = 1) -> Iterator[Row]:
    """Yield the rows of a job on a number of ranks."""
    training = config.training
    size = f"{config.model.layers} layers, batch {training.global_batch_size} x {training.sequence_length}"
    expected = ""
    if planned is not None and setup.cuda:
        rate = training.global_batch_size * training.sequence_length / planned.estimate.step_time
        expected = f"; planned {rate:,.0f}"
    yield Row(f"{name}: tokens/s", value=found.tokens, remark=f"{size}, {found.step:.3f} s a step{expected}")
    peak = flops.peak_flops(config.cluster, config.precision, setup.device)
    if peak is not None:
        used = flops.flops_per_token(config.model, training.sequence_length) * found.tokens / ranks
        yield Row.bounded(f"{name}: MFU, %", 100 * used / (peak.tflops * 1e12), 100, f"of {peak}")
    elif setup.cuda:
        yield Row.skipped(f"{name}: MFU, %", "conf/hardware/ does not have this GPU")
    memory = f"{name}: peak memory / plan"
    if planned is None:
        yield Row.skipped(memory, f"{found.peak / 1e9:.2f} GB; no plan, since conf/hardware/ does not have this GPU")
        return
    wanted = planned.estimate.memory.total - planned.estimate.memory.overhead
    text = f"tensors of {found.peak / 1e9:.3f} GB, planned {wanted / 1e9:.3f} GB"
    if setup.cuda:
        yield Row.bounded(memory, found.peak / wanted, MEMORY, text)
        text = f"planned {planned.estimate.memory.outside / 1e9:.2f} GB, with the communicators of the job"
        yield Row(f"{name}: beside the allocator, GB", value=found.outside / 1e9, remark=text)
        yield Row.bounded(f"{name}: retries of the allocator", found.retries, 0)
    else:
        yield Row(memory, value=found.peak / wanted, remark=f"{text} for a GPU; host memory counts too")


def _finish(setup: Setup) -> None:
    if setup.cuda:
        torch.cuda.synchronize(setup.device)
