"""evaluate: loss, perplexity and bits per byte of checkpoints on the validation split and its corpora, or scores of lm-eval's tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.checkpoint import compatibility, native, reader
from pipeline.checkpoint.load_any_layout import open_on_all_ranks
from pipeline.checkpoint.lora_merge import open_merged
from pipeline.checkpoint.newest import read_newest
from pipeline.common import knobs
from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Layout
from pipeline.config.rules.check import layout_violations
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.conversion import imported
from pipeline.conversion.tokenizer import check_tokenizer, open_tokenizer
from pipeline.data.load import stage_in
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import TokenShardObjective
from pipeline.data.tokenize import chat_template
from pipeline.evaluation import checkpoint_selection, harness, record, tasks, teacher_answers, validation_scores
from pipeline.generation import weights
from pipeline.parallel import mesh as meshes
from pipeline.parallel.mesh import Mesh
from pipeline.training import shard_verification
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

T = TypeVar("T")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Evaluate a checkpoint or all of them, and write run_dir/evaluations: a record of each, table.csv and report.html with plots.

    Without stage.tasks, run_dir/evaluation.json has the scores of the last evaluated checkpoint on the validation split: step, loss (nats
    per target), perplexity, bits per byte (null if not every token is a target), with stage.pseudo_perplexity also pseudo-perplexity; with
    several corpora, "corpora" has the same for each of them. The validation split may be another one than that of training, with another
    sequence length. With stage.distill, the predictions of the checkpoint for the training data are written instead.

    Raises:
        UserError: a checkpoint, the validation split, the tokenizer or a task is missing, or they do not match.
    """
    stage = config.stage
    assert isinstance(stage, Evaluate)
    if stage.distill is not None:
        _distill(config, stage, ranks)
    else:
        (_evaluate_tasks if stage.tasks else _evaluate_validation_split)(config, stage, ranks)


def _evaluate_validation_split(config: RunConfig, stage: Evaluate, ranks: Ranks) -> None:
    """Record the scores on the validation split for a checkpoint, or for all of them."""
    config = checkpoint_selection.complete_config(config, stage, ranks.world_size)
    read = replace(config, data=stage_in.staged(config.data, only_urls=True, split="validation"))
    data = validation_scores.open_data(read, stage, (ranks.rank, ranks.world_size))
    run_dir, minutes = Path(config.run_dir), config.training.timeout_minutes
    settings = validation_scores.settings_of(config, stage, data.whole)
    with meshes.process_group(ranks, minutes) as device:
        # Rank 0 chooses for all: other ranks may see an older listing of the folder.
        paths = meshes.on_rank_0(lambda: _selected(run_dir, stage, "validation", settings, config.training.steps))
        trainer: Trainer | None = None
        for path in paths:
            if stage.checkpoint == checkpoint_selection.ALL and not checkpoint_selection.fits_config(config, path):
                log.info("evaluate: %s is left out: it has another model than the newest checkpoint, or no adapter", path)
                continue
            trainer = trainer or Trainer(config, meshes.build_mesh(Layout.of(config, ranks.world_size), device, minutes, ranks.local_size))
            load = partial(_load, config, stage, trainer, settings)
            path, step, evaluated = _read(run_dir, stage, path, load, ranks)
            scores = validation_scores.evaluate(config, stage, trainer, data)
            if ranks.rank == 0:
                validation_scores.write(run_dir, path, step, scores, evaluated)
        shard_verification.finish(data.objectives())


def _distill(config: RunConfig, stage: Evaluate, ranks: Ranks) -> None:
    """Write what a checkpoint predicts for the samples of a run, whose data and batches the configuration has."""
    config = checkpoint_selection.complete_config(config, stage, ranks.world_size)
    config = knobs.changed(config, {"data.teacher": None})  # which is written here
    read = replace(config, data=stage_in.staged(config.data, only_urls=True))
    data = registry.open_training(read, (ranks.rank, ranks.world_size))
    registry.check_vocabulary(config, data, ranks.rank)
    assert isinstance(data, TokenShardObjective), "a rule of the stage"
    run_dir, minutes = Path(config.run_dir), config.training.timeout_minutes
    with meshes.process_group(ranks, minutes) as device:
        path = meshes.on_rank_0(lambda: native.find(run_dir, stage.checkpoint))
        trainer = Trainer(config, meshes.build_mesh(Layout.of(config, ranks.world_size), device, minutes, ranks.local_size))
        load = partial(_load, config, stage, trainer, {})
        _, _, weights_of = _read(run_dir, stage, path, load, ranks)
        teacher_answers.write(config, stage, trainer, data, weights_of)
        shard_verification.finish([data])


def _read(run_dir: Path, stage: Evaluate, path: Path, load: Callable[[Path], T], ranks: Ranks) -> T:
    """Load a chosen checkpoint; in a single process also a newer one, if the run has removed it meanwhile."""
    find = partial(checkpoint_selection.current, run_dir, stage, path) if ranks.world_size == 1 else lambda: [path]
    return read_newest(find, load, ranks=ranks.world_size)


def _load(config: RunConfig, stage: Evaluate, trainer: Trainer, settings: dict[str, Any], path: Path) -> tuple[Path, int, dict[str, Any]]:
    """Load the weights of a checkpoint into the trainer. Returns the checkpoint, its step, and what its scores depend on."""
    compatibility.check_same_model(open_on_all_ranks(path), config)
    step = checkpoint_selection.load_weights(config, stage, trainer, path).step
    return path, step, meshes.on_rank_0(partial(checkpoint_selection.settings_of, path, stage, settings))


def _selected(run_dir: Path, stage: Evaluate, kind: str, settings: dict[str, Any], steps: int) -> list[Path]:
    """Return the checkpoints to evaluate, if their scores can be written."""
    paths = checkpoint_selection.checkpoints(run_dir, stage, kind, settings, steps)
    if paths:
        make_folder(run_dir, "run_dir")
    return paths


def _evaluate_tasks(config: RunConfig, stage: Evaluate, ranks: Ranks) -> None:
    """Record the metrics of every task of lm-eval for a checkpoint, or for all of them. Neither model= nor an export is required."""
    run_dir, minutes, steps = Path(config.run_dir), config.training.timeout_minutes, config.training.steps
    encoder = open_tokenizer(config.tokenizer, run_dir)
    original = imported.original_of(run_dir / imported.FOLDER, encoder.path.parent)
    chats = chat_template.of(config.tokenizer) if stage.apply_chat_template else None
    if stage.apply_chat_template and chats is None:
        rule = f"requires a chat template, and the tokenizer of {config.tokenizer.path} has none"
        raise UserError.of("stage.apply_chat_template", True, rule, f"set tokenizer.chat_template={chat_template.NAMES}, or a file")
    text = harness.Text(encoder, original.ends if original else (), chats)
    settings = tasks.settings_of(stage, encoder, config.precision.dtype, chats)
    with meshes.process_group(ranks, minutes) as device:
        # Rank 0 chooses for all: other ranks may see an older listing of the folder.
        paths = meshes.on_rank_0(lambda: _selected(run_dir, stage, "tasks", settings, steps))
        mesh: Mesh | None = None
        for path in paths:
            checkpoint = open_merged(reader.with_weights(open_on_all_ranks(path), stage.weights), stage.adapter)
            model = weights.model_of(checkpoint)
            tasks.check_model(model, run_dir)
            check_tokenizer(encoder, checkpoint, model.vocab_size)
            config = weights.for_generation(config, model)
            UserError.raise_for(layout_violations(config))
            mesh = mesh or meshes.build_mesh(Layout.of(config, ranks.world_size), device, minutes, ranks.local_size)
            evaluated = meshes.on_rank_0(partial(checkpoint_selection.settings_of, path, stage, settings))
            scores = tasks.evaluate(stage, mesh, weights.load(checkpoint, config, mesh), model, text)
            if ranks.rank == 0:
                record.write(run_dir, checkpoint.step, "tasks", scores, evaluated)
                log.info("step %d, %s:\n%s", checkpoint.step, path, tasks.text_table(scores))
