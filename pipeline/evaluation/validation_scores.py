"""Loss, perplexity and bits per byte of a checkpoint on the validation split and its corpora."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.common.texts import table_lines
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.causal import Sliding
from pipeline.data.load.objectives.classification import Classification
from pipeline.data.load.objectives.masked import PseudoLikelihood
from pipeline.data.load.objectives.objective import Objective, TokenShardObjective
from pipeline.evaluation import record
from pipeline.training.trainer import Trainer
from pipeline.training.validation import validate

log = logging.getLogger("pipeline")

Scores = dict[str, float | None]
"""Name of a score -> value, None for one that does not exist."""


@dataclass(frozen=True)
class Evaluation:
    """The result for a checkpoint.

    Attributes:
        scores: corpus -> scores; "" is the full validation split.
        read: "sequences" of the split that were read, those "available", and their "targets".
        confusion: of a classifier: "labels", and "counts" of texts by label (row) and by predicted label (column).
    """

    scores: dict[str, Scores]
    read: dict[str, int]
    confusion: dict[str, Any] | None = None


@dataclass(frozen=True)
class ValidationData:
    """What checkpoints are evaluated on: corpus -> samples, None for a corpus without a sample; "" is the full validation split.

    Attributes:
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
    """Open the validation data; `share` is (rank, ranks) of the job.

    Raises:
        UserError: it is missing or too short, or its vocabulary is larger than the model's.
    """
    objective = registry.objective_of(config) if stage.stride is None else Sliding
    whole, corpora = objective.open_validation(config, share), objective.open_validation_corpora(config, share)
    if whole is None:
        key = registry.objective_of(config).data_key.replace("train", "validation")
        if key != "data.tokens":
            raise UserError.of(key, [], "names no file", "name files of lines that training has not seen")
        rule, fix = "has a validation split shorter than training.sequence_length", "run stage=shard with a larger data.validation_fraction"
        raise UserError.of(key, config.data.tokens, rule, fix)
    registry.check_vocabulary(config, whole, share[0])
    registry.warn_of_few_documents(whole, share[0])
    corpora = corpora if len(corpora) > 1 else {}
    pseudo: dict[str, PseudoLikelihood | None] = {}
    if stage.pseudo_perplexity:
        pseudo_corpora = PseudoLikelihood.open_validation_corpora(config, share) if corpora else {}
        pseudo = {"": PseudoLikelihood.open_validation(config, share), **pseudo_corpora}
    return ValidationData(whole, {"": whole, **corpora}, pseudo)


def settings_of(config: RunConfig, stage: Evaluate, data: Objective) -> dict[str, Any]:
    """Return what the scores of a checkpoint on the validation split depend on."""
    kind = registry.objective_of(config)
    samples = kind.sample_settings(config) if issubclass(kind, TokenShardObjective) else {}
    return {
        "stage.batches": stage.batches,
        **({"sample": "of all corpora"} if stage.batches else {}),  # earlier versions read the first batches
        **({} if stage.stride is None else {"stage.stride": stage.stride}),
        **({"stage.pseudo_perplexity": True} if stage.pseudo_perplexity else {}),
        "training.global_batch_size": config.training.global_batch_size if stage.batches else None,
        "training.sequence_length": config.training.sequence_length,
        "training.document_mask": config.training.document_mask,
        "precision.dtype": config.precision.dtype,
        **({} if config.training.objective == "auto" else {"training.objective": config.training.objective}),
        **{f"training.{name}": getattr(config.training, name) for name in kind.loss_settings},
        **({"samples": samples} if samples else {}),
        "data": [corpus.fingerprint for corpus in data.samples.corpora],
    }


def evaluate(config: RunConfig, stage: Evaluate, trainer: Trainer, data: ValidationData) -> Evaluation:
    """Return the scores of the weights in the trainer; collective.

    Returns:
        The perplexity of a large loss is None: it is infinite, which JSON has no number for. A pseudo-perplexity is the exponential of the
        mean negative log-probability of each token given all others, of the sequences of stage.batches.
    """
    scores: dict[str, Scores] = {}
    confusion, read = None, dict[str, int]()
    for name, samples in data.corpora.items():
        scores[name] = {}
        if samples is not None:
            result = validate(trainer, samples, config.training, batches=stage.batches, prefetch=config.data.prefetch)
            scores[name] = {"validation_loss": result.loss, **result.measures}
            if stage.batches is not None:
                scores[name]["validation_loss_stderr"] = result.standard_error
            if not samples.sums:  # the loss of a classifier, or of pairs, is not that of text
                perplexity = math.exp(result.loss) if result.loss < 700 else None
                scores[name] |= {"perplexity": perplexity, "bits_per_byte": result.bits_per_byte}
            if isinstance(samples, Classification):
                counts = samples.confusion(np.array(result.sums)).tolist()
                confusion = {"labels": getattr(config.model, "labels", []), "counts": counts}
            if not name:
                read = {"sequences": result.samples, "available": result.available, "targets": result.targets}
    batches = None if stage.batches is None else stage.batches * config.training.sequence_length
    for name, masked in data.pseudo.items():
        if masked is not None:
            loss = validate(trainer, masked, config.training, batches=batches, prefetch=config.data.prefetch).loss
            scores[name]["pseudo_perplexity"] = math.exp(min(loss, 700))
    return Evaluation(scores, read, confusion)


def write(run_dir: Path, checkpoint: Path, step: int, evaluation: Evaluation, settings: dict[str, Any]) -> None:
    """Record the scores of a checkpoint, and log them."""
    scores, confusion = evaluation.scores, evaluation.confusion
    whole, corpora = scores[""], {name: values or None for name, values in scores.items() if name}
    more = {"read": evaluation.read} | ({} if confusion is None else {"confusion": confusion})
    with atomic_file(run_dir / "evaluation.json", "w") as handle:
        weights = {} if record.WEIGHTS not in settings else {"weights": settings[record.WEIGHTS]}
        content = {"checkpoint": str(checkpoint), "step": step, **weights, **whole, **({"corpora": corpora} if corpora else {}), **more}
        json.dump(content, handle, indent=1)
    record.write(run_dir, step, "validation", scores, settings, more)
    log.info("step %d: %s", step, _text(whole))
    if confusion is not None:
        rows = [["", *confusion["labels"]], *([label, *map(str, row)] for label, row in zip(*confusion.values(), strict=True))]
        text = "\n".join(table_lines(rows, right=range(len(rows))))
        log.info("texts by label (row) and predicted label (column):\n%s", text)
    for name, values in corpora.items():
        log.info("step %d, %s: %s", step, name, _text(values) if values else "no sequence of training.sequence_length")


def _text(scores: Scores) -> str:
    """Format scores for the log."""
    values = {name: value for name, value in scores.items() if value is not None}
    loss, error = values.pop("validation_loss"), values.pop("validation_loss_stderr", None)
    unit = "target" if "perplexity" in scores else "sequence"
    parts = [f"validation loss {loss:.4f}{'' if error is None else f' +- {error:.4f}'} nats per {unit}"]
    parts += [f"{values.pop('bits_per_byte'):.4f} bits per byte"] if "bits_per_byte" in values else []
    named = {name.removeprefix("validation_").replace("_", " "): value for name, value in values.items()}
    parts += [f"{name} {value:.4g}" for name, value in named.items()]
    return ", ".join(parts).replace("pseudo perplexity", "pseudo-perplexity")
