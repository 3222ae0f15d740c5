"""evaluate: loss, perplexity and bits per byte of checkpoints on the validation split and its corpora, or scores of lm-eval's tasks."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

from pipeline.checkpoint import compatibility
from pipeline.checkpoint.lora_merge import open_merged
from pipeline.common.errors import UserError
from pipeline.common.files import atomic_file
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Layout
from pipeline.config.lora import LoraConfig
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import Objective
from pipeline.data.load.objectives.pseudo_likelihood import PseudoLikelihood
from pipeline.data.load.objectives.sliding import Sliding
from pipeline.evaluation import record, selection
from pipeline.parallel import mesh as meshes
from pipeline.stages import evaluate_tasks
from pipeline.stages.pretrain import check_vocabulary
from pipeline.training import shard_verification, start
from pipeline.training.trainer import Trainer
from pipeline.training.validation import Validation, validate

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Evaluate a checkpoint or all of them, and write run_dir/evaluations: a record of each, table.csv and report.html with plots.

    Without stage.tasks, run_dir/evaluation.json has the scores of the last evaluated checkpoint on the validation split: step, loss (nats
    per target), perplexity, bits per byte (null if not every token is a target), with stage.pseudo_perplexity also pseudo-perplexity; with
    several corpora, "corpora" has the same for each of them. The validation split may be another one than that of training, with another
    sequence length.

    Raises:
        UserError: a checkpoint, the validation split or a task is missing, or they do not match.
    """
    stage = config.stage
    assert isinstance(stage, Evaluate)
    if stage.tasks:
        evaluate_tasks.run(config, ranks, stage)
        return
    objective = registry.objective_of(config) if stage.stride is None else Sliding
    share = ranks.rank, ranks.world_size
    data = objective.open_validation(config, share)
    if data is None:
        rule = "has a validation split shorter than training.sequence_length"
        raise UserError.of("data.tokens", config.data.tokens, rule, "run stage=shard with a larger data.validation_fraction")
    check_vocabulary(config, data)
    corpora = objective.open_validation_corpora(config, share)
    parts = {"": data, **(corpora if len(corpora) > 1 else {})}
    each: dict[str, PseudoLikelihood | None] = {}
    if stage.pseudo_perplexity:
        corpora_each = PseudoLikelihood.open_validation_corpora(config, share) if len(parts) > 1 else {}
        each = {"": PseudoLikelihood.open_validation(config, share), **corpora_each}
    minutes = config.training.timeout_minutes
    device = meshes.init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous(), minutes)
    try:
        # Rank 0 chooses for all: other ranks may see an older listing of the folder.
        settings = _settings(config, stage, data)
        paths = meshes.on_rank_0(lambda: selection.checkpoints(Path(config.run_dir), stage, "validation", settings, config.training.steps))
        config = dataclasses.replace(config, lora=LoraConfig())
        trainer: Trainer | None = None
        for path in paths:
            checkpoint = open_merged(path, stage.adapter)
            compatibility.check_same_model(checkpoint, config)
            trainer = trainer or Trainer(config, meshes.build_mesh(Layout.of(config, ranks.world_size), device, minutes))
            state = start.load(trainer, checkpoint)
            scores = {
                name: _scores(validate(trainer, part, config.training, batches=stage.batches, prefetch=config.data.prefetch))
                if part is not None
                else {}
                for name, part in parts.items()
            }
            for name, masked in each.items():
                scores[name] |= _pseudo_perplexity(config, trainer, masked, stage) if masked is not None else {}
            if ranks.rank == 0:
                _write(config, path, state.step, scores, selection.settings_of(path, stage, settings))
        shard_verification.finish([*parts.values(), *each.values()])
    finally:
        meshes.destroy_process_group()


def _settings(config: RunConfig, stage: Evaluate, data: Objective) -> dict[str, Any]:
    """Return what the scores of a checkpoint on the validation split depend on."""
    return {
        "stage.batches": stage.batches,
        **({} if stage.stride is None else {"stage.stride": stage.stride}),
        **({"stage.pseudo_perplexity": True} if stage.pseudo_perplexity else {}),
        "training.global_batch_size": config.training.global_batch_size if stage.batches else None,
        "training.sequence_length": config.training.sequence_length,
        "training.document_mask": config.training.document_mask,
        "precision.dtype": config.precision.dtype,
        "data": [corpus.fingerprint for corpus in data.samples.corpora],
    }


def _write(config: RunConfig, path: Path, step: int, scores: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    """Record the scores of a checkpoint, and log them."""
    whole, corpora = scores[""], {name: part or None for name, part in scores.items() if name}
    with atomic_file(Path(config.run_dir) / "evaluation.json", "w") as handle:
        json.dump({"checkpoint": str(path), "step": step, **whole} | ({"corpora": corpora} if corpora else {}), handle, indent=1)
    record.write(Path(config.run_dir), step, "validation", scores, settings)
    log.info("step %d: %s", step, _text(whole))
    for name, part in corpora.items():
        log.info("step %d, %s: %s", step, name, _text(part) if part else "no sequence of training.sequence_length")


def _scores(result: Validation) -> dict[str, float | None]:
    """The scores of a validation split; the perplexity of a large loss is infinite, which JSON has no number for."""
    perplexity = math.exp(result.loss) if result.loss < 700 else None
    return {"validation_loss": result.loss, "perplexity": perplexity, "bits_per_byte": result.bits_per_byte}


def _pseudo_perplexity(config: RunConfig, trainer: Trainer, data: PseudoLikelihood, stage: Evaluate) -> dict[str, float]:
    """The exponential of the mean negative log-probability of each token given all others, of the sequences of stage.batches."""
    batches = None if stage.batches is None else stage.batches * config.training.sequence_length
    found = validate(trainer, data, config.training, batches=batches, prefetch=config.data.prefetch)
    return {"pseudo_perplexity": math.exp(min(found.loss, 700))}


def _text(scores: dict[str, float | None]) -> str:
    """Format scores for the log."""
    bits, perplexity = scores["bits_per_byte"], scores["perplexity"]
    parts = [f"validation loss {scores['validation_loss']:.4f} nats per target"]
    parts += [] if bits is None else [f"{bits:.4f} bits per byte"]
    parts += [] if perplexity is None else [f"perplexity {perplexity:.4g}"]
    return ", ".join([*parts, *(f"{name.replace('_', '-')} {scores[name]:.4g}" for name in ("pseudo_perplexity",) if name in scores)])
