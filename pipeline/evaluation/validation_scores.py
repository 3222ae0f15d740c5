"""Loss, perplexity and bits per byte of a checkpoint on the validation split and its corpora."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import Objective
from pipeline.data.load.objectives.pseudo_likelihood import PseudoLikelihood
from pipeline.data.load.objectives.sliding import Sliding
from pipeline.evaluation import record
from pipeline.training.trainer import Trainer
from pipeline.training.validation import validate

log = logging.getLogger("pipeline")

Scores = dict[str, float | None]
"""Name of a score -> value, None for one that does not exist."""


@dataclass(frozen=True)
class ValidationData:
    """What checkpoints are evaluated on: corpus -> samples, None for a corpus without a sample; "" is the full validation split.

    Attributes:
        whole: the full validation split.
        corpora: for the loss of all targets.
        pseudo: for stage.pseudo_perplexity; empty without it.
    """

    whole: Objective
    corpora: dict[str, Objective | None]
    pseudo: dict[str, PseudoLikelihood | None]

    def objectives(self) -> list[Objective | None]:
        """Return all samples that were opened."""
        return [*self.corpora.values(), *self.pseudo.values()]


def open_data(config: RunConfig, stage: Evaluate, share: tuple[int, int]) -> ValidationData:
    """Open the validation data.

    Args:
        config: configuration of the job.
        stage: the settings of the evaluation.
        share: (rank, ranks) of the job.

    Raises:
        UserError: it is missing or too short, or its vocabulary is larger than the model's.
    """
    corpora: Mapping[str, Objective | None]
    if stage.stride is None:
        objective = registry.objective_of(config)
        whole, corpora = objective.open_validation(config, share), objective.open_validation_corpora(config, share)
    else:
        whole = Sliding.open_windows(config, share, stage.stride)
        corpora = Sliding.open_windows_of_corpora(config, share, stage.stride)
    if whole is None:
        rule = "has a validation split shorter than training.sequence_length"
        raise UserError.of("data.tokens", config.data.tokens, rule, "run stage=shard with a larger data.validation_fraction")
    registry.check_vocabulary(config, whole)
    registry.warn_of_few_documents(whole)
    corpora = corpora if len(corpora) > 1 else {}
    pseudo: dict[str, PseudoLikelihood | None] = {}
    if stage.pseudo_perplexity:
        pseudo_corpora = PseudoLikelihood.open_validation_corpora(config, share) if corpora else {}
        pseudo = {"": PseudoLikelihood.open_validation(config, share), **pseudo_corpora}
    return ValidationData(whole, {"": whole, **corpora}, pseudo)


def settings_of(config: RunConfig, stage: Evaluate, data: Objective) -> dict[str, Any]:
    """Return what the scores of a checkpoint on the validation split depend on."""
    return {
        "stage.batches": stage.batches,
        **({"sample": "of all corpora"} if stage.batches else {}),  # earlier versions read the first batches
        **({} if stage.stride is None else {"stage.stride": stage.stride}),
        **({"stage.pseudo_perplexity": True} if stage.pseudo_perplexity else {}),
        "training.global_batch_size": config.training.global_batch_size if stage.batches else None,
        "training.sequence_length": config.training.sequence_length,
        "training.document_mask": config.training.document_mask,
        "precision.dtype": config.precision.dtype,
        "data": [corpus.fingerprint for corpus in data.samples.corpora],
    }


def evaluate(config: RunConfig, stage: Evaluate, trainer: Trainer, data: ValidationData) -> dict[str, Scores]:
    """Return the scores of the weights in the trainer; collective.

    Args:
        config: configuration of the job.
        stage: the settings of the evaluation.
        trainer: has the weights.
        data: what the weights are evaluated on.

    Returns:
        Corpus -> scores; "" is the full validation split. The perplexity of a large loss is None: it is infinite, which JSON has no number
        for. A pseudo-perplexity is the exponential of the mean negative log-probability of each token given all others, of the sequences
        of stage.batches.
    """
    scores: dict[str, Scores] = {}
    for name, samples in data.corpora.items():
        scores[name] = {}
        if samples is not None:
            result = validate(trainer, samples, config.training, batches=stage.batches, prefetch=config.data.prefetch)
            perplexity = math.exp(result.loss) if result.loss < 700 else None
            scores[name] = {"validation_loss": result.loss, "perplexity": perplexity, "bits_per_byte": result.bits_per_byte}
            if stage.batches is not None:
                scores[name]["validation_loss_stderr"] = result.standard_error
    batches = None if stage.batches is None else stage.batches * config.training.sequence_length
    for name, masked in data.pseudo.items():
        if masked is not None:
            loss = validate(trainer, masked, config.training, batches=batches, prefetch=config.data.prefetch).loss
            scores[name]["pseudo_perplexity"] = math.exp(min(loss, 700))
    return scores


def write(run_dir: Path, checkpoint: Path, step: int, scores: dict[str, Scores], settings: dict[str, Any]) -> None:
    """Record the scores of a checkpoint, and log them.

    Args:
        run_dir: the run directory.
        checkpoint: its folder.
        step: of the checkpoint.
        scores: as `evaluate` returns them.
        settings: what they depend on.
    """
    whole, corpora = scores[""], {name: values or None for name, values in scores.items() if name}
    with atomic_file(run_dir / "evaluation.json", "w") as handle:
        json.dump({"checkpoint": str(checkpoint), "step": step, **whole} | ({"corpora": corpora} if corpora else {}), handle, indent=1)
    record.write(run_dir, step, "validation", scores, settings)
    log.info("step %d: %s", step, _text(whole))
    for name, values in corpora.items():
        log.info("step %d, %s: %s", step, name, _text(values) if values else "no sequence of training.sequence_length")


def _text(scores: Scores) -> str:
    """Format scores for the log."""
    bits, perplexity = scores["bits_per_byte"], scores["perplexity"]
    error = scores.get("validation_loss_stderr")
    parts = [f"validation loss {scores['validation_loss']:.4f}{'' if error is None else f' +- {error:.4f}'} nats per target"]
    parts += [] if bits is None else [f"{bits:.4f} bits per byte"]
    parts += [] if perplexity is None else [f"perplexity {perplexity:.4g}"]
    parts += [f"pseudo-perplexity {scores['pseudo_perplexity']:.4g}"] if "pseudo_perplexity" in scores else []
    return ", ".join(parts)
