"""Part "state": the small run is saved with the job's checkpoint settings, and continued in the same and in another layout."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from pipeline.certification.batches import random_batches
from pipeline.certification.comparison import Outcome
from pipeline.certification.copies import CopyLog, same_bits
from pipeline.certification.layout_training import begin, gather, train_steps, trained
from pipeline.certification.parts import PartReport
from pipeline.checkpoint import native
from pipeline.checkpoint.native import TrainState
from pipeline.common.ranks import Ranks
from pipeline.config import warmup
from pipeline.config.layout import Layout
from pipeline.config.parallel import ParallelConfig
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.parallel.mesh import on_rank_0
from pipeline.training import choose_saver, resume
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.metrics import Metrics
from pipeline.training.saves import Saves
from pipeline.training.trainer import Trainer
from pipeline.training.watchdog import Watchdog
from pipeline.training.weight_copies import gathered
from pipeline.training.weight_update import StepResult

#: File with the unsharded state of the uninterrupted run after the step that is continued.
UNSHARDED = "unsharded.pt"


class _RandomTokens:
    """Stands for the data of the run: its batches are random tokens."""

    settings: tuple[str, ...] = ()
    data_key = "data.tokens"

    def fingerprint(self, _config: RunConfig, _consumed: int) -> str:
        """See Objective."""
        return "random tokens"


class _NoMetrics:
    """Stands for the writer of metrics.jsonl."""

    def flush(self) -> None:
        """See Metrics."""

    def check_file(self) -> None:
        """See Metrics."""


def saved_steps(config: RunConfig) -> tuple[int, int]:
    """Return the steps after which the small run is saved. The second checkpoint, which is continued, must not repeat the first one."""
    steps = config.training.steps
    return max(1, steps // 3), max(2, 2 * steps // 3)


def state_after(config: RunConfig, step: int) -> TrainState:
    """Return the progress of a run after a step, without the engine's counters."""
    return TrainState(step, warmup.samples(config.training, step))


class Saving:
    """Saves a run while it trains, as a job does.

    Args:
        config: of the run; run_dir receives the checkpoints.
        trainer: of the run.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        ranks, run_dir = Ranks(rank, size, rank, size), Path(config.run_dir)
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        process = choose_saver.start_writer(config.checkpoint, ranks)
        dist.barrier()
        self._config, self._trainer = config, trainer
        self._saver = choose_saver.choose(config, ranks, trainer, process, None)
        data, metrics = cast(Objective, _RandomTokens()), cast(Metrics, _NoMetrics())
        watchdog = Watchdog(config.training.timeout_minutes)
        self._saves = Saves(config, trainer, data, metrics, watchdog, CheckpointHooks(), self._saver)
        self._steps = saved_steps(config)

    def after_step(self, step: int, _: StepResult) -> None:
        """Begin a checkpoint if it is due. Collective."""
        self._saves.poll()
        if step + 1 in self._steps:
            self._saves.begin(state_after(self._config, step + 1))
        if step + 1 == self._steps[-1]:
            full = unsharded(self._trainer)
            if dist.get_rank() == 0:
                torch.save(full, Path(self._config.run_dir, UNSHARDED))

    def finish(self) -> None:
        """Wait for the checkpoints. Collective.

        Raises:
            UserError: one could not be written.
        """
        self._saves.finish(state_after(self._config, self._steps[-1]))
        self._saver.close()


def unsharded(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Return everything that a checkpoint stores, unsharded: kind -> name -> tensor. Collective."""
    fixed = trainer.model.fixed_names()
    local = list(dict.fromkeys(kind for fragment in trainer.engine.fragments() for kind in fragment.tensors))
    kinds = dict.fromkeys(gathered(local))  # a rank may hold only weights whose optimizer has less state, as the matrices of Muon
    return gather(trainer.engine.fragments(), {kind: kind for kind in kinds}, fixed)


def continued(config: RunConfig) -> tuple[Trainer, TrainState]:
    """Return a trainer with the state of the newest checkpoint of run_dir. Collective."""
    # Other initial weights: a weight that is not loaded differs.
    trainer = begin(dataclasses.replace(config, training=dataclasses.replace(config.training, seed=config.training.seed + 1)))
    newest = on_rank_0(lambda: native.complete(Path(config.run_dir))[-1])
    return trainer, resume.begin(config, trainer, newest, cast(Objective, _RandomTokens()))


def resume_in_same_layout(config: RunConfig, uninterrupted: CopyLog) -> PartReport:
    """Continue the run in its own layout, and compare all bits with those of the uninterrupted run. Collective."""
    report = PartReport("state")
    trainer, state = continued(config)
    first, steps = saved_steps(config)[-1], config.training.steps
    if lost := _progress(config, state):
        report.failures += lost
        return report
    log = CopyLog(trainer)
    if lost := gathered(same_bits(log.held(), uninterrupted.steps[first - 1])):
        report.failures += [f"step {first}, loaded in the same layout: {name} differs from what was saved" for name in lost]
        return report
    train_steps(trainer, islice(enumerate(random_batches(config)), state.step, None), (log.after_step,))
    for step in range(first, steps):
        if different := gathered(same_bits(log.steps[step], uninterrupted.steps[step])):
            where = f"step {step + 1}, continued from step {first}"
            report.failures += [f"{where}: {name} differs from the uninterrupted run" for name in different]
            break
    settings = config.checkpoint
    report.covered.append(
        f"saved after steps {' and '.join(map(str, saved_steps(config)))} with checkpoint.async_save={settings.async_save} and "
        f"checkpoint.files={settings.files}, continued from step {first} in the same layout: all bits"
    )
    return report


def resume_in_other_layout(config: RunConfig) -> tuple[PartReport, Outcome]:
    """Load the checkpoint in another layout, compare the unsharded state, and train the remaining steps. Collective."""
    layout = Layout.of(config, dist.get_world_size()).axes_text()
    report = PartReport("state")
    trainer, state = continued(config)
    report.failures += _progress(config, state)
    saved = torch.load(Path(config.run_dir, UNSHARDED))
    for kind, tensors in unsharded(trainer).items():
        names = [name for name in saved[kind] if not torch.equal(saved[kind][name], tensors.get(name, torch.empty(0)))]
        report.failures += [f"{name} ({kind}) differs after loading in {layout}, ZeRO {config.parallel.zero_stage}" for name in names]
    losses, norms = train_steps(trainer, islice(enumerate(random_batches(config)), state.step, None), ())
    report.covered.append(f"loaded in {layout} with ZeRO {config.parallel.zero_stage}: all bits, and the losses of the remaining steps")
    return report, Outcome(losses, norms, trained(config, trainer))


def other_layout(config: RunConfig) -> tuple[RunConfig, int]:
    """Return a legal layout of few ranks that divides the state otherwise, and its number of ranks."""
    # fp8 requires multiples of 16 on every rank, of which the small sizes have as many as its own layout needs.
    tensor = 1 if config.parallel.tensor > 1 or config.precision.fp8 != "none" else 2
    zero = 2 if config.parallel.zero_stage in (0, 3) else 0
    for size, axes in ((2 * tensor, {"tensor": tensor, "zero_stage": zero}), (2, {"zero_stage": zero}), (1, {"zero_stage": 0})):
        single: dict[str, Any] = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "schedule": "1f1b", "offload": "none"}
        single |= {
            "stages_per_rank": None,
            "layers_per_stage": [],
            "balance": "flops",
            "context_kind": "ring",
            "zero_group": "job",
            "expert_tensor": None,
            "expert_buffer": ParallelConfig.expert_buffer,
            "engine": "native",
            "deepspeed": None,
        }
        parallel = dataclasses.replace(config.parallel, **{**single, **axes})
        other = dataclasses.replace(config, parallel=parallel)
        if not check.violations(other, size):
            return other, size
    raise AssertionError("a legal job is illegal in one process")


def _progress(config: RunConfig, state: TrainState) -> list[str]:
    """Return what a loaded checkpoint has lost of the progress of the run."""
    step = saved_steps(config)[-1]
    wanted = dataclasses.replace(state_after(config, step), updates=step)
    loaded = dataclasses.replace(state, loss_scale=0.0, finite_steps=0)
    names = [field.name for field in dataclasses.fields(wanted) if getattr(wanted, field.name) != getattr(loaded, field.name)]
    if config.precision.dtype == "fp16" and state.updates < step:
        names = [name for name in names if name != "updates"]  # a step was skipped to lower the loss scale
    return [f"step {step}: {name}={getattr(loaded, name)} in the checkpoint, {getattr(wanted, name)} in the run" for name in names]
