"""What a run starts from: the checkpoint that it continues, the weights of another run, or an adapter."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.checkpoint import compatibility, growth, load_any_layout, native
from pipeline.checkpoint.fragments import Fragment, extract_fragment
from pipeline.checkpoint.grown_weights import GrownWeights
from pipeline.checkpoint.lora_adapter import Adapter, adapter_of, check_base
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.peft_format import read_peft
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import DamagedCheckpointError, UserError
from pipeline.config.lora import factor_of, is_adapter, layer_of
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.parallel.mesh import on_rank_0
from pipeline.training import weight_averaging
from pipeline.training.starting_checkpoint import initial_checkpoint, is_own, older_checkpoint
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


def begin(config: RunConfig, trainer: Trainer, path: Path | None, training_data: Objective) -> TrainState:
    """Load what a run starts from, and return its state; collective. With checkpoint.skip_damaged, an older checkpoint if one is damaged.

    Args:
        path: the checkpoint to resume from; None for none.

    Raises:
        UserError: as resume and initialize.
    """
    settings = config.checkpoint
    if path is None and settings.initialize_from is not None:
        weights = on_rank_0(lambda: initial_checkpoint(settings.initialize_from or ""))
        return initialize(config, trainer, load_any_layout.open_on_all_ranks(weights))
    damaged: dict[Path, DamagedCheckpointError] = {}
    while True:
        try:
            state = resume(config, trainer, path, training_data)
            break
        except DamagedCheckpointError as error:
            if not settings.skip_damaged or path is None or not is_own(Path(config.run_dir), path):
                raise
            damaged[path] = error
            path = on_rank_0(partial(older_checkpoint, Path(config.run_dir), damaged))
    for folder, reason in damaged.items():  # only now: without an older checkpoint the next start has to find them
        aside, violation = on_rank_0(partial(native.set_aside, folder)), reason.violations[0]
        log.warning("renamed a damaged checkpoint to %s (%s: %s), continuing from %s", aside, violation.value, violation.rule, path)
    return state


def resume(config: RunConfig, trainer: Trainer, path: Path | None, training_data: Objective) -> TrainState:
    """Load a checkpoint into the trainer, and return its state; the initial state when `path` is None.

    The samples that the checkpoint has consumed must be those of the current data configuration.

    Raises:
        UserError: the checkpoint is of another model or other data, or is corrupt.
    """
    if path is None:
        return TrainState()
    checkpoint = load_any_layout.open_on_all_ranks(path)
    if not checkpoint.train_state.samples and _has_other_head(config, checkpoint):
        return _begin_imported(config, trainer, checkpoint)
    is_fork = not is_own(Path(config.run_dir), path)
    compatibility.check_same_run(checkpoint, config, training_data, is_fork=is_fork)
    if config.lora.rank and not checkpoint.train_state.samples and adapter_of(checkpoint) is None:
        return _begin_imported(config, trainer, checkpoint)
    state = load(trainer, checkpoint)
    log.info("%s %s: step %d, %d samples", "fork of" if is_fork else "continuing from", path, state.step, state.samples)
    if state.samples:  # otherwise it is an imported model: nothing was trained with the settings of that command
        for key, old, new in compatibility.changed_settings(checkpoint.config, config):
            log.info("changed since that checkpoint: %s=%s, was %s", key, new, old)
        first = config.checkpoint.initialize_from
        if not is_fork and first is not None and first != checkpoint.config.get("checkpoint", {}).get("initialize_from"):
            log.warning("checkpoint.initialize_from=%s has no effect: the run continues from its own checkpoint", first)
    return state


def _begin_imported(config: RunConfig, trainer: Trainer, checkpoint: Checkpoint) -> TrainState:
    """Begin a run with other weights than those of an imported model; collective. Errors as in initialize.

    Raises:
        UserError: the model was imported with its step, below which the checkpoints of this run would begin.
    """
    if checkpoint.step:
        rule = f"continues at step {checkpoint.step}, with moments of the imported weights, and adapters or a new head begin at step 0"
        fix = f"set checkpoint.initialize_from={checkpoint.path}, and another run_dir"
        raise UserError.of("run_dir", config.run_dir, rule, fix)
    return initialize(config, trainer, checkpoint)


def initialize(config: RunConfig, trainer: Trainer, checkpoint: Checkpoint) -> TrainState:
    """Load the weights of a checkpoint, without its optimizer state, and return the state of a run that begins; collective.

    A classifier starts with the encoder of the checkpoint and a new head, unless the checkpoint has the same labels.

    The adapter that the checkpoint has is merged into its weights. The run's own adapters begin with the values of lora.adapter, if it is
    set.

    Raises:
        UserError: the checkpoint is of another model, or is corrupt; or lora.adapter is of another base.
    """
    has_other_head = _has_other_head(config, checkpoint)
    grown = growth.of(config, checkpoint.path, checkpoint.config) if config.stage.name == "pretrain" else None
    if grown is None:
        compatibility.check_same_model(checkpoint, config, other_head=has_other_head, context_factor=config.training.context_factor)
    else:
        compatibility.check_tokenizer(checkpoint.path, checkpoint.config, Path(config.tokenizer.path))
    adapter = None if config.lora.adapter is None else _read_adapter(config, config.lora.adapter, checkpoint)
    fragments = trainer.engine.fragments()
    weights = [fragment for fragment in fragments if not is_adapter(fragment.piece.name)]
    if has_other_head:  # its last layer is new, and so is the first one if the checkpoint has none
        stored = {name for name in checkpoint.names() if not name.startswith("head.sentence.output.")}
        weights = [fragment for fragment in weights if fragment.piece.name in stored or not fragment.piece.name.startswith("head.")]
    base = MergedWeights(checkpoint, None if adapter is None else dataclasses.replace(adapter, layers={}))
    source = base if grown is None else GrownWeights(base, grown, config)
    load_any_layout.load(source, [dataclasses.replace(f, tensors={"weight": f.tensors["weight"]}) for f in weights])
    if adapter is not None:
        _load_adapter(adapter, [f for f in fragments if is_adapter(f.piece.name)])
    weight_averaging.begin(fragments)
    trainer.engine.loaded(0)
    dist.barrier()
    larger = "" if grown is None else f", grown to a larger model: {grown.text}"
    log.info("starting with the weights of %s (step %d)%s", checkpoint.path, checkpoint.step, larger)
    return TrainState()


def _has_other_head(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Whether the run trains a classifier, and the checkpoint has none for the same labels."""
    labels = getattr(config.model, "labels", [])
    return bool(labels) and labels != checkpoint.config["model"].get("labels")


def _read_adapter(config: RunConfig, folder: str, checkpoint: Checkpoint) -> Adapter:
    """Read the adapter that a run begins with, which must be one of the checkpoint's model."""
    adapter = read_peft(Path(folder), config.model, "lora.adapter")
    on_rank_0(lambda: check_base(adapter, MergedWeights(checkpoint), config.model, "lora.adapter"))
    return adapter


@torch.no_grad()
def _load_adapter(adapter: Adapter, fragments: list[Fragment]) -> None:
    """Start adapters with the values of another one."""
    for fragment in fragments:
        factors = adapter.layers[layer_of(fragment.piece.name)]
        full = factors.a if factor_of(fragment.piece.name) == "a" else factors.b
        weight = fragment.tensors["weight"]
        weight.copy_(extract_fragment(full, fragment.piece, fragment.start, weight.numel()))


def load(trainer: Trainer, checkpoint: Checkpoint | MergedWeights) -> TrainState:
    """Load a checkpoint into the trainer, and return its state; collective.

    Raises:
        UserError: the checkpoint is corrupt, or its weights have other shapes.
    """
    fragments = trainer.engine.fragments()
    load_any_layout.load(checkpoint, fragments)
    weight_averaging.begin_where_missing(fragments, checkpoint)
    state = checkpoint.train_state
    trainer.engine.loaded(state.updates)
    trainer.engine.loss_scale.load(state.loss_scale, state.finite_steps)
    dist.barrier()
    return state
