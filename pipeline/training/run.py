"""A training run: claims its directory, opens data, model and checkpoint, trains, and writes the manifest."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import catalog, native
from pipeline.checkpoint.native import TrainState
from pipeline.common import ends, events, knobs, signals
from pipeline.common.errors import CONTINUE, NEXT_PHASE, ToBeContinued, UserError
from pipeline.common.ranks import Ranks
from pipeline.config import layouts, phases, warmup
from pipeline.config.cluster import ClusterConfig
from pipeline.config.hardware import Peak
from pipeline.config.layout import Layout
from pipeline.config.rules import objectives, optimizer, unread
from pipeline.config.run_tokenizer import AUTO, bos_of_tokens
from pipeline.config.schema import PrecisionConfig, RunConfig
from pipeline.data.load import blend, removal, stage_in
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.objectives.objective import Objective, TokenShardObjective
from pipeline.models.registry import family_of
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import check_trained, fuses_delta_rule
from pipeline.training import (
    choose_saver,
    determinism,
    garbage_collection,
    lineage,
    loop,
    reference_answers,
    resume,
    rewinds,
    run_directory,
    run_events,
    shard_verification,
    step_control,
)
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.garbage_collection import GarbageCollection
from pipeline.training.metrics import FILE, Metrics
from pipeline.training.profiling import Profiler
from pipeline.training.recomputation_checks import RecomputationChecks
from pipeline.training.replica_checks import ReplicaChecks
from pipeline.training.rewinds import SpikeWatch
from pipeline.training.saves import Saves
from pipeline.training.skipped_samples import SkippedSamples
from pipeline.training.starting_checkpoint import first_step_of, initial_checkpoint, parent_of, with_loss_weights
from pipeline.training.step_control import StepControl
from pipeline.training.stragglers import Stragglers
from pipeline.training.trainer import Trainer
from pipeline.training.validation import Validations
from pipeline.training.watchdog import Watchdog

log = logging.getLogger("pipeline")

#: What Ctrl-C prints.
_INTERRUPTED = "interrupted: the run writes a checkpoint and stops; a second Ctrl-C ends it at once, without a checkpoint"

HooksOf = Callable[[RunConfig], CheckpointHooks]
"""Configuration with the number of steps -> hooks."""
PeakFlops = Callable[[ClusterConfig, PrecisionConfig, torch.device], Peak | None]
"""Cluster settings, precision and device -> peak, for the model FLOPs utilization; None if it is unknown."""


def run(config: RunConfig, ranks: Ranks, hooks_of: HooksOf, peak_flops: PeakFlops) -> None:
    """Train up to training.steps, or for training.epochs, starting from the newest checkpoint of the run directory, phase by phase.

    Raises:
        UserError: before training starts: token shards are missing, the vocabulary is too large, run_dir contains another model or is in
            use by another job, an environment variable contradicts training.deterministic; during training: too many steps are skipped,
            or a checkpoint cannot be written.
        ToBeContinued: a signal or the file `stop` ended the job, or the run needs other nodes, and a checkpoint has been written.
    """
    while True:
        try:
            return _run_phase(config, ranks, hooks_of, peak_flops)
        except ToBeContinued as end:
            if end.reason != NEXT_PHASE:
                raise
        gc.collect()  # the model of this phase, before the next one is built
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _run_phase(config: RunConfig, ranks: Ranks, hooks_of: HooksOf, peak_flops: PeakFlops) -> None:
    """Train one phase of training.phases, or the run if it has none; arguments and errors as in run.

    Raises:
        ToBeContinued: also when the next phase begins.
    """
    signals.record_end(ends.note_told)
    check_nodes(config, ranks)
    if config.checkpoint.initialize_from is not None:
        initial_checkpoint(config.checkpoint.initialize_from)
    config, data, validation_data = _open_data(config, ranks)
    hooks, first, run_dir, minutes = hooks_of(config), ranks.rank == 0, Path(config.run_dir), config.training.timeout_minutes
    if config.training.deterministic:
        determinism.enable()
    run_events.announce(run_dir, ranks)
    process = choose_saver.start_writer(config.checkpoint, ranks)
    with meshes.process_group(ranks, minutes) as device, ExitStack() as claims:
        if process is not None:
            claims.callback(process.close)
        check_device(config, device)
        with Watchdog(minutes) as watchdog:
            begin, lock = meshes.on_rank_0(lambda: run_directory.claim(run_dir, config.checkpoint, claims, minutes))
            parent = meshes.on_rank_0(lambda: parent_of(config, begin))
            config, data = _without_removed(config, ranks, data, parent)
            if first:
                hooks.written()  # for checkpoints of an earlier job
            phase = phases.number_at(config, 0 if begin is None else native.step_of(begin))
            if config.training.phases:
                config = phases.at(config, phases.starts(config)[phase])
                validation_data = registry.open_validation(_staged(config), (ranks.rank, ranks.world_size))
                log.info("training.phases.%d: sequences of %d tokens", phase, config.training.sequence_length)
            config = with_loss_weights(config, begin)
            layout = Layout.of(config, ranks.world_size)
            check_trained(config, layout)
            trainer = Trainer(config, meshes.build_mesh(layout, device, minutes, ranks.local_size))
            claims.callback(trainer.engine.close)
            since = time.monotonic()
            state = resume.begin(config, trainer, begin, data)
            loading = time.monotonic() - since
            reference_answers.attach(config, trainer, begin, state, data, validation_data, watchdog.report)
            hosts = meshes.gather_objects(socket.gethostname())
            if state.step >= config.training.steps:
                meshes.on_rank_0(partial(run_directory.finish_without_training, config, state, hosts, parent))
                if first:
                    hooks.finished()
                return
            recorded: AbstractContextManager[None] = nullcontext()
            if first:
                with run_directory.disk_errors(run_dir):
                    changed = run_directory.begin_training(config, begin)
                recorded = run_events.recorded(config, layout, hosts, state.step, data.samples, parent, changed, loading)
            metrics_of = _metrics_of(config, ranks, data, parent, peak_flops(config.cluster, config.precision, device))
            saver = choose_saver.choose(config, ranks, trainer, process, lock if first else None)
            stragglers = Stragglers(config, trainer, hosts)  # outside of attempts: it registers hooks

            def attempt(state: TrainState, skipped: SkippedSamples) -> TrainState:
                """Train from a state; the list has what happens besides the steps."""
                if phases.number_at(config, state.step) != phase:  # an older checkpoint, after damage or a loss spike
                    nodes = [layouts.nodes_of_phase(config, step) for step in (state.step, phases.starts(config)[phase])]
                    raise ToBeContinued(CONTINUE, NEXT_PHASE if nodes[0] == nodes[1] else "phase")
                loader = BatchLoader(data, config.training, trainer.mesh, config.data.prefetch, skipped)
                with metrics_of(state) as metrics, signals.interrupt_recorded(_INTERRUPTED if first else ""):
                    last_step = step_control.last_step(config, state.step, ranks)
                    control = StepControl(config, ranks.rank, last_step, phases.end(config, state.step))
                    saves = Saves(config, trainer, data, metrics, watchdog, hooks, saver, parent, control.complete)
                    callbacks = [
                        stragglers,
                        GarbageCollection(),
                        Profiler(config, ranks.rank),
                        metrics,
                        control,
                        saves,
                        SpikeWatch(config, state, metrics, saves, parent),
                        Validations(config, trainer, validation_data, metrics.validation, watchdog.report),
                        ReplicaChecks(config, trainer, hosts),
                        RecomputationChecks(config, trainer, hosts),
                    ]
                    if first:
                        events.record(run_dir, "steps_start", step=state.step)
                    return loop.train(state, loader, trainer, callbacks, watchdog.report)

            with recorded, closing(saver), run_directory.disk_errors(run_dir), garbage_collection.at_fixed_steps():
                state = rewinds.train(config, trainer, data, state, attempt)
            unverified = shard_verification.finish([data, validation_data])
            if first:
                run_directory.finish(config, state, hosts, parent, unverified)
                hooks.finished()


def _open_data(config: RunConfig, ranks: Ranks) -> tuple[RunConfig, Objective, Objective | None]:
    """Open the training and the validation split, staged in if that is configured. The returned configuration has training.steps.

    Raises:
        UserError: token shards are missing or do not fit the configuration.
    """
    staged = _staged(config)
    data, validation_data = registry.open_data(staged, (ranks.rank, ranks.world_size))
    if config.tokenizer.bos == AUTO and (bos := bos_of_tokens(staged)):  # of shards from a URL
        config = knobs.changed(config, {"tokenizer.bos": bos})
    config = with_steps(config, data, ranks.rank)
    if isinstance(data, Causal) and data.teacher is not None:
        data.teacher.check(config, data)
    blend.check_epochs(config.data, config.training, data.samples, logs=ranks.rank == 0)
    for line in unread.beyond_the_end(config) if ranks.rank == 0 else ():
        log.warning(line)
    return config, data, validation_data


def _without_removed(config: RunConfig, ranks: Ranks, data: Objective, parent: dict[str, Any] | None) -> tuple[RunConfig, Objective]:
    """Leave out the documents of data.remove, and those of earlier starts and of the runs that this one begins with; collective.

    Raises:
        UserError: a document is in no shard of the run, or the model cannot leave documents out.
    """
    if not isinstance(data, TokenShardObjective):
        return config, data
    run_dir, shards = Path(config.run_dir), data.samples.stream.shards
    if not meshes.on_rank_0(lambda: removal.keep(run_dir, config.data.remove, lineage.run_dirs(parent), shards)):
        return config, data
    config = knobs.changed(config, {"data.remove": str(run_dir / removal.FILE)})
    UserError.raise_for([*objectives.violations(config), *unread.violations(config)])
    data = registry.open_training(_staged(config), (ranks.rank, ranks.world_size))
    assert isinstance(data, TokenShardObjective)
    if ranks.rank == 0 and (removed := data.samples.stream.removal) is not None:
        tokens, total = removed.tokens, data.samples.stream.tokens
        text = "data.remove: %s of %s tokens of the training data are read as end-of-document tokens without a target (%.2g %%)"
        log.info(text, f"{tokens:,}", f"{total:,}", 100 * tokens / total)
    return config, data


def _staged(config: RunConfig) -> RunConfig:
    """Return the configuration with the folders from which data is read."""
    key = registry.objective_of(config).data_key
    staged = key in ("data.tokens", "data.instructions.train")
    return dataclasses.replace(config, data=stage_in.staged(config.data, examples=key != "data.tokens")) if staged else config


def _metrics_of(
    config: RunConfig, ranks: Ranks, data: Objective, parent: dict[str, Any] | None, peak: Peak | None
) -> Callable[[TrainState], Metrics]:
    """Return what opens metrics.jsonl for a run that continues from a state."""
    if peak is not None and ranks.rank == 0:
        log.info("mfu in %s: share of %s", FILE, peak)
    costs = family_of(config.model).costs_per_token(config.model, config.training.sequence_length, data.decoder_length)
    flops = None if peak is None else peak.tflops * 1e12 * ranks.world_size
    return partial(Metrics, config, ranks.rank, flops_per_token=costs.total, peak_flops=flops, first_step=first_step_of(parent))


def summary(config: RunConfig, ranks: Ranks, parameters: int) -> str:
    """Return the first line of the stage: ranks, layout, model and where it starts."""
    complete = native.complete(Path(config.run_dir))
    config = phases.at(config, native.step_of(complete[-1]) if complete else 0)
    layout = Layout.of(config, ranks.world_size)
    begin = "no checkpoint yet" if config.checkpoint.fork is None else f"begins as a fork of {config.checkpoint.fork}"
    begin = f"newest checkpoint: step {native.step_of(complete[-1])}" if complete else begin
    if pending := catalog.read(Path(config.run_dir)).pending:
        begin += f", that of step {pending.step} was not finished"
    count = "1 rank" if ranks.world_size == 1 else f"{ranks.world_size} ranks"
    here = f"{ranks.local_size} on {socket.gethostname()}"
    model = f"{config.stage.name}: {config.model.family} with {parameters:,} parameters on {count} ({here})"
    return f"{model}, {layout.axes_text()}, {layout.zero_text(config.parallel.zero_stage)}; {config.run_dir}: {begin}"


def check_nodes(config: RunConfig, ranks: Ranks) -> None:
    """Refuse groups of ZeRO that would not be those of the nodes.

    Raises:
        UserError: the nodes have another number of ranks than the configuration says.
    """
    tasks, here = config.cluster.tasks_per_node, ranks.local_size
    if config.parallel.zero_group == "node" and here not in (tasks, ranks.world_size):
        rule = f"shards over nodes of cluster.tasks_per_node={tasks} ranks, and this node has {here}"
        raise UserError.of("parallel.zero_group", "node", rule, f"set cluster.tasks_per_node={here}, or a number of ranks")


def check_device(config: RunConfig, device: torch.device) -> None:
    """Refuse settings that the device does not support.

    Raises:
        UserError: flex attention on a CPU, where it has no backward pass, the kernels of linear attention without GPU or package, or
            products fused with collectives.
    """
    if config.training.attention == "flex" and device.type == "cpu":
        raise UserError.of("training.attention", "flex", "requires a GPU; this rank has none", "set training.attention=auto")
    fuses_delta_rule(config, device)  # raises
    if config.parallel.async_tensor == "on" and device.type == "cpu":
        raise UserError.of("parallel.async_tensor", "on", "requires a GPU; this rank has none", "set parallel.async_tensor=auto")


def with_steps(config: RunConfig, data: Objective, rank: int) -> RunConfig:
    """Return the configuration with the smallest number of steps that reads every sequence training.epochs times; rank 0 logs it.

    It depends on the data and the batches only, so that a resumed run has the same one. A configuration with training.steps is unchanged.

    Raises:
        UserError: the warm-up or the decay is longer than the run.
    """
    training, samples = config.training, int(sum(data.samples.counts))
    if not training.steps:
        epochs = training.epochs or warmup.DEFAULT_EPOCHS
        wanted = math.ceil(epochs * samples - 1e-6)  # 0.1 x 30 is more than 3 in floating point
        steps = max(1, warmup.steps_for_samples(training, wanted))
        config = knobs.changed(config, {"training.steps": steps, "training.epochs": epochs})
        UserError.raise_for(optimizer.violations(config))
        if rank == 0:
            log.info("training.epochs=%g of %s sequences: %s steps", epochs, f"{samples:,}", f"{config.training.steps:,}")
    if rank == 0 and config.stage.name == "finetune" and training.global_batch_size > samples:
        text = "training.global_batch_size=%d is more than an epoch of %s sequences: a step reads examples several times; lower it"
        log.warning(text, training.global_batch_size, f"{samples:,}")
    return config
