"""The loss of the validation split or of a sample of it, during training and by stage=evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.common.progress import Progress
from pipeline.config.schema import TrainingConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.trainer import Trainer


@dataclass(frozen=True)
class MeanLoss:
    """The loss of a set of sequences.

    Attributes:
        loss: nats per target.
        bits_per_byte: None if the objective does not predict every token.
        targets: number of targets.
    """

    loss: float
    bits_per_byte: float | None
    targets: int


@dataclass(frozen=True)
class Validation(MeanLoss):
    """The result of a validation.

    Attributes:
        standard_error: of the loss, from reading a sample of the split; 0 for the full split, None for a sample of one sequence.
        samples: number of samples that were read.
        available: number of samples of the split.
        measures: those of Objective.measures.
        corpora: by name, those of which samples were read; empty if the split is not divided into corpora.
        sums: what the measures were computed from.
    """

    standard_error: float | None
    samples: int
    available: int
    measures: dict[str, float]
    corpora: dict[str, MeanLoss]
    sums: list[float] = field(default_factory=list)


def validate(
    trainer: Trainer,
    data: Objective,
    training: TrainingConfig,
    *,
    batches: int | None,
    prefetch: int,
    on_batch: Callable[[], None] = lambda: None,
) -> Validation:
    """Compute the mean loss over a split, or over a sample of all its corpora in proportion to their tokens; collective.

    The sample depends on its size and on the split only. Every target counts once, so the result depends neither on the batch size nor
    on the layout.

    Args:
        trainer: computes the losses.
        data: the split.
        training: sequence length and batch sizes.
        batches: number of global batches in the sample, None for the full split.
        prefetch: batches that are loaded ahead.
        on_batch: called after every batch.
    """
    samples = data.validation_sample(None if batches is None else batches * training.global_batch_size)
    loader = BatchLoader(data, training, trainer.mesh, prefetch)
    found: dict[str, list[Tensor]] = {"loss": [], "targets": []}
    measured = torch.zeros(data.sums, dtype=torch.float64, device=trainer.mesh.device)
    with Progress(math.ceil(len(samples) / training.global_batch_size), "validate", "batch", trainer.mesh.rank) as bar:
        for tokens, batch in loader.validation(samples):
            losses, targets = trainer.evaluate(tokens, batch)
            found["loss"].append(losses)
            found["targets"].append(targets)
            if data.sums:
                measured += trainer.measured(data.sums).double()
            bar.advance(1)
            on_batch()
    sums = {name: torch.cat(values).cpu()[: len(samples)] for name, values in found.items()}
    bytes_per_target = data.bytes_per_target(samples)
    text = None if bytes_per_target is None else sums["targets"] * torch.from_numpy(bytes_per_target)
    ends = torch.tensor([count for _, count in data.parts]).cumsum(0)
    parts = torch.searchsorted(ends, torch.from_numpy(samples), right=True)
    corpora: dict[str, MeanLoss] = {}
    for corpus in dict.fromkeys(name for name, _ in data.parts):
        numbers = torch.tensor([number for number, (name, _) in enumerate(data.parts) if name == corpus])
        mine = torch.isin(parts, numbers)
        if sums["targets"][mine].sum():
            corpora[corpus] = _mean(sums["loss"][mine], sums["targets"][mine], None if text is None else text[mine])
    whole, available = _mean(sums["loss"], sums["targets"], text), int(ends[-1])
    return Validation(
        whole.loss,
        whole.bits_per_byte,
        whole.targets,
        standard_error=_standard_error(sums["loss"], sums["targets"], available),
        samples=len(samples),
        available=available,
        measures=data.measures(measured.cpu().numpy()),
        corpora=corpora if len({name for name, _ in data.parts}) > 1 else {},
        sums=measured.tolist(),
    )


def _mean(losses: Tensor, targets: Tensor, text: Tensor | None) -> MeanLoss:
    """The loss of sequences, from sum, number of targets and UTF-8 bytes of each."""
    total, count = losses.sum(), targets.sum()
    bits = None if text is None else float(total / math.log(2) / text.sum())
    return MeanLoss(float(total / count), bits, int(count))


def _standard_error(losses: Tensor, targets: Tensor, available: int) -> float | None:
    """The standard error of a loss per target, as of a simple random sample: an upper bound where corpora differ.

    It is that of a ratio of means (Cochran 1977, "Sampling Techniques", equation 6.13).

    Args:
        losses: (n,) fp64, of the sequences in the sample.
        targets: (n,) their numbers of targets.
        available: number of sequences of the split.
    """
    size = len(losses)
    if size == available:
        return 0.0
    if size < 2:
        return None
    residuals = losses - losses.sum() / targets.sum() * targets
    variance = (1 - size / available) * size / (size - 1) * residuals.square().sum() / targets.sum().square()
    return float(variance.sqrt())
