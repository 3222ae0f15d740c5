"""The training loop: batch, step, metrics, validation, checkpoint. The state is that of the engine and the number of consumed samples."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from pipeline.checkpoint import adapter, save
from pipeline.checkpoint.adapter_factors import Adapter
from pipeline.checkpoint.consolidate import extract_fragment
from pipeline.checkpoint.fragment import Fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.peft_format import read_peft
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import warmup
from pipeline.config.lora import PARTS, is_adapter, layer_of
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.errors import ToBeContinued
from pipeline.evaluation.schedule import Schedule
from pipeline.layers.batch import Batch
from pipeline.parallel.mesh import INPUT_OUTPUT, on_rank_0
from pipeline.progress import Progress
from pipeline.training.batches import BatchLoader
from pipeline.training.metrics import Metrics, memory_used
from pipeline.training.step_control import StepControl
from pipeline.training.trainer import Trainer
from pipeline.training.watchdog import Watchdog

log = logging.getLogger("pipeline")


def train(
    config: RunConfig,
    trainer: Trainer,
    training_data: Objective,
    validation_data: Objective | None,
    state: TrainState,
    metrics: Metrics,
    control: StepControl,
    watchdog: Watchdog,
    evaluations: Schedule | None = None,
) -> TrainState:
    """Train from `state` up to training.steps, or until a signal announces the end of the job.

    Args:
        config: configuration of the run.
        trainer: its model and optimizer are in the state `state`.
        training_data: the training split.
        validation_data: the validation split, None if there is none.
        state: the state to continue from.
        metrics: writer of metrics.jsonl.
        control: decides when to save and to stop.
        watchdog: to which progress is reported.
        evaluations: submits the evaluation of checkpoints, None without.

    Returns:
        The final state; its checkpoint has been written.

    Raises:
        UserError: too many steps in a row were skipped, the weights are not finite, a checkpoint could not be written, or the run directory
            was removed.
        ToBeContinued: a signal announced the end of the job, and a checkpoint was written.
    """
    training, checkpoint = config.training, config.checkpoint
    loader = BatchLoader(training_data, config, trainer.mesh)
    started = time.monotonic()
    with Progress(training.steps - state.step, config.stage.name, "step", trainer.mesh.rank, every=math.inf) as bar:
        watchdog.report(f"loading the batch of step {state.step + 1}")
        for tokens, batch in loader.training(state.samples, range(state.step, training.steps)):
            waited = time.monotonic() - started
            watchdog.report(f"step {state.step + 1}")
            loss, result = trainer.train(tokens, batch, control.requests(), state.step)
            size = warmup.batch_size(training, state.step)
            state = dataclasses.replace(state, step=state.step + 1, samples=state.samples + size)
            now = time.monotonic()
            metrics.add(state, loss, result, size, now - started, {"data_seconds": waited, "data_stalls": loader.stalls, **memory_used()})
            started = now
            bar.advance(1, f"loss {metrics.last['loss']:.3f}" if metrics.last else "")

            last = state.step == training.steps
            decision = control.after_step(result, last=last)
            if validation_data is not None and (last or (training.validate_every and state.step % training.validate_every == 0)):
                watchdog.report(f"validation after step {state.step}")
                validate(config, trainer, validation_data, state.step, metrics, training.validation_batches, watchdog)
                started = time.monotonic()
            is_evaluated = evaluations is not None and evaluations.is_due(state.step)
            scheduled = bool(checkpoint.every and state.step % checkpoint.every == 0)
            if last or decision.save or decision.stop is not None or scheduled or is_evaluated:
                metrics.flush()
                watchdog.report(f"checkpoint of step {state.step}", INPUT_OUTPUT)
                on_rank_0(metrics.check_file)
                factor, finite_steps = trainer.engine.loss_scale.state()
                state = dataclasses.replace(state, updates=trainer.engine.updates(), loss_scale=factor, finite_steps=finite_steps)
                index = Index(state, dataclasses.asdict(config), training_data.fingerprint(config, state.samples))
                needed = evaluations.waits if evaluations is not None else lambda _: False
                path = save.save(Path(config.run_dir), index, trainer.engine.fragments(), checkpoint.keep, needed)
                log.info("step %d: wrote %s", state.step, path)
                if evaluations is not None and is_evaluated and trainer.mesh.rank == 0:
                    evaluations.submit()
                control.saved()
                started = time.monotonic()
            if decision.stop is not None and not last:
                log.info("stopped after step %d; the same command continues", state.step)
                raise ToBeContinued(decision.stop)
            watchdog.report(f"loading the batch of step {state.step + 1}")
    return state


def validate(
    config: RunConfig,
    trainer: Trainer,
    data: Objective,
    step: int,
    metrics: Metrics | None,
    batches: int | None,
    watchdog: Watchdog | None = None,
) -> tuple[float, float | None]:
    """Compute mean loss and bits per byte over the first `batches` global batches of the validation split (all of it when None).

    Every target of these batches counts once, so the result for a full split does not depend on the batch size. The measures of
    the objective are written to the metrics.

    Returns:
        (nats per target, bits per byte); the latter is None if the objective does not predict every token.
    """
    samples = int(data.samples.counts[0])
    available = math.ceil(samples / config.training.global_batch_size)
    count = available if batches is None else min(batches, available)
    loader = BatchLoader(data, config, trainer.mesh)
    measured = dict.fromkeys(data.measures, 0.0)
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.mesh.device)  # of the losses, and the number of targets
    with Progress(count, "validate", "batch", trainer.mesh.rank) as bar:
        for tokens, batch in loader.validation(count, samples):
            mean, targets = trainer.evaluate(tokens, batch)
            sums += torch.stack([mean.double() * targets, targets.double()])
            for name in measured:
                value, _ = trainer.evaluate(tokens, cast(Batch, {**batch, name: torch.ones(len(tokens), device=tokens.device)}))
                measured[name] += float(value.double() * targets.double())
            bar.advance(1)
            if watchdog is not None:
                watchdog.report(f"validation after step {step}")
    loss = float(sums[0] / sums[1])
    bits = loss / math.log(2) / data.bytes_per_token if data.bytes_per_token else None
    if metrics is not None:
        metrics.validation(step, loss, bits, {name: value / float(sums[1]) for name, value in measured.items()})
    return loss, bits


def resume(config: RunConfig, trainer: Trainer, path: Path | None, training_data: Objective) -> TrainState:
    """Load a checkpoint into the trainer, and return its state; the initial state when `path` is None.

    The samples that the checkpoint has consumed must be those of the current data configuration.

    Raises:
        UserError: the checkpoint is of another model or other data, or is corrupt.
    """
    if path is None:
        return TrainState()
    checkpoint = Checkpoint(path)
    if not checkpoint.train_state.samples and _has_other_head(config, checkpoint):
        return initialize(config, trainer, checkpoint)  # an imported model
    save.check_same_run(checkpoint, config, training_data)
    if config.lora.rank and not checkpoint.train_state.samples and adapter.of_checkpoint(checkpoint) is None:
        return initialize(config, trainer, checkpoint)  # an imported model
    state = load(trainer, checkpoint)
    log.info("continuing from %s: step %d, %d samples", path, state.step, state.samples)
    if state.step:  # a checkpoint of step 0 is an imported model: nothing was trained with the settings of that command
        for key, old, new in save.changed_settings(checkpoint, config):
            log.info("changed since that checkpoint: %s=%s, was %s", key, new, old)
    return state


def initialize(config: RunConfig, trainer: Trainer, checkpoint: Checkpoint) -> TrainState:
    """Load the weights of a checkpoint, without its optimizer state, and return the state of a run that begins; collective.

    A classifier starts with the encoder of the checkpoint and a new head, unless the checkpoint has the same labels.

    The adapter that the checkpoint has is merged into its weights. The run's own adapters begin with the values of lora.adapter, if it is
    set.

    Raises:
        UserError: the checkpoint is of another model, or is corrupt; or lora.adapter is of another base.
    """
    has_other_head = _has_other_head(config, checkpoint)
    save.check_same_model(checkpoint, config, other_head=has_other_head, context_factor=config.training.context_factor)
    found = None if config.lora.adapter is None else _read_adapter(config, config.lora.adapter, checkpoint)
    fragments = trainer.engine.fragments()
    weights = [fragment for fragment in fragments if not is_adapter(fragment.piece.name)]
    if has_other_head:  # its last layer is new, and so is the first one if the checkpoint has none
        stored = {name for name in checkpoint.names() if not name.startswith("head.sentence.output.")}
        weights = [fragment for fragment in weights if fragment.piece.name in stored or not fragment.piece.name.startswith("head.")]
    base = adapter.MergedWeights(checkpoint, None if found is None else dataclasses.replace(found, layers={}))
    save.load(base, [dataclasses.replace(f, tensors={"weight": f.tensors["weight"]}) for f in weights])
    if found is not None:
        _load_adapter(found, [f for f in fragments if is_adapter(f.piece.name)])
    trainer.engine.loaded(0)
    dist.barrier()
    log.info("starting with the weights of %s (step %d)", checkpoint.path, checkpoint.step)
    return TrainState()


def _has_other_head(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Whether the run trains a classifier, and the checkpoint has none for the same labels."""
    labels = getattr(config.model, "labels", [])
    return bool(labels) and labels != checkpoint.config["model"].get("labels")


def _read_adapter(config: RunConfig, folder: str, checkpoint: Checkpoint) -> Adapter:
    """Read the adapter that a run begins with, which must be one of the checkpoint's model."""
    found = read_peft(Path(folder), config.model, "lora.adapter")
    on_rank_0(lambda: adapter.check_base(found, adapter.MergedWeights(checkpoint), config.model, "lora.adapter"))
    return found


@torch.no_grad()
def _load_adapter(found: Adapter, fragments: list[Fragment]) -> None:
    """Start adapters with the values of another one."""
    for fragment in fragments:
        factors = found.layers[layer_of(fragment.piece.name)]
        full = factors.a if fragment.piece.name.endswith(PARTS[0]) else factors.b
        weight = fragment.tensors["weight"]
        weight.copy_(extract_fragment(full, fragment.piece, fragment.start, weight.numel()))


def load(trainer: Trainer, checkpoint: Checkpoint | adapter.MergedWeights) -> TrainState:
    """Load a checkpoint into the trainer, and return its state; collective.

    Raises:
        UserError: the checkpoint is corrupt, or its weights have other shapes.
    """
    save.load(checkpoint, trainer.engine.fragments())
    state = checkpoint.train_state
    trainer.engine.loaded(state.updates)
    trainer.engine.loss_scale.load(state.loss_scale, state.finite_steps)
    dist.barrier()
    return state
