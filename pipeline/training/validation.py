"""The loss of the validation split or of a sample of it, during training and by stage=evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipeline.common.progress import Progress
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.callback import Callback, Step
from pipeline.training.trainer import Trainer


@dataclass(frozen=True)
class MeanLoss:
    """The loss of a set of sequences.

    Attributes:
        loss: nats per target.
        bits_per_byte: None if the objective does not predict every token.
    """

    loss: float
    bits_per_byte: float | None
    targets: int


@dataclass(frozen=True)
class Validation(MeanLoss):
    """The result of a validation.

    Attributes:
        standard_error: of the loss, from reading a sample of the split; 0 for the full split, None for one sequence.
        samples: number of samples that were read.
        available: number of samples of the split.
        measures: those of Objective.measures.
        corpora: by name, those of which samples were read; empty if the split is not divided into corpora.
        sums: what the measures were computed from, fp64 (Objective.sums,).
    """

    standard_error: float | None
    samples: int
    available: int
    measures: dict[str, float]
    corpora: dict[str, MeanLoss]
    sums: np.ndarray = field(compare=False)


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
        batches: number of global batches in the sample, None for the full split.
    """
    samples = data.validation_sample(None if batches is None else batches * training.global_batch_size)
    loader = BatchLoader(data, training, trainer.mesh, prefetch)
    results: list[Tensor] = []  # of each batch, by sequence: the sum of the loss, and the number of targets
    measured = torch.zeros(data.sums, dtype=torch.float64, device=trainer.mesh.device)
    progress = Progress(math.ceil(len(samples) / training.global_batch_size), "validate", "batch", trainer.mesh.rank)
    with progress as bar, trainer.engine.trained_weights():
        for tokens, batch in loader.validation(samples):
            results.append(torch.stack(trainer.evaluate(tokens, batch)))
            if data.sums:
                measured += trainer.measured(data.sums).double()
            bar.advance(1)
            on_batch()
    losses, targets = torch.cat(results, dim=1).cpu()[:, : len(samples)]
    bytes_per_target = data.bytes_per_target(samples)
    text = None if bytes_per_target is None else targets * torch.from_numpy(bytes_per_target)
    sums = measured.cpu().numpy()
    whole, available = _mean(losses, targets, text), sum(count for _, count in data.parts)
    return Validation(
        whole.loss,
        whole.bits_per_byte,
        whole.targets,
        standard_error=_standard_error(losses, targets, available),
        samples=len(samples),
        available=available,
        measures=data.measures(sums),
        corpora=_by_corpus(data.parts, samples, losses, targets, text),
        sums=sums,
    )


class Validations(Callback):
    """Validates every training.validate_every steps, and after the last one.

    Args:
        data: the validation split; None if there is none.
        record: called with step, result, Objective.identity and seconds, as Metrics.validation.
        report: called with what is done next, as Watchdog.report.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        data: Objective | None,
        record: Callable[[int, Validation, Mapping[str, str], float], None],
        report: Callable[[str], None],
    ) -> None:
        self._trainer, self._data, self._training, self._prefetch = trainer, data, config.training, config.data.prefetch
        self._record, self._report = record, report

    def after_step(self, step: Step) -> None:
        """See Callback."""
        number, every = step.state.step, self._training.validate_every
        if self._data is None or not (step.last or (every and number % every == 0)):
            return
        report = partial(self._report, f"validation after step {number}")
        report()
        batches = self._training.validation_batches
        result = validate(self._trainer, self._data, self._training, batches=batches, prefetch=self._prefetch, on_batch=report)
        now = time.monotonic()
        seconds, step.since = now - step.since, now
        self._record(number, result, self._data.identity, seconds)


def _by_corpus(
    parts: Sequence[tuple[str, int]], samples: np.ndarray, losses: Tensor, targets: Tensor, text: Tensor | None
) -> dict[str, MeanLoss]:
    """The loss of each corpus that has targets; empty for a split with one corpus. `parts` are those of the objective."""
    names = np.array([name for name, _ in parts])
    if len(set(names)) < 2:
        return {}
    ends = np.cumsum([count for _, count in parts])
    corpora = names[np.searchsorted(ends, samples, side="right")]
    members = {str(name): torch.from_numpy(corpora == name) for name in dict.fromkeys(corpora.tolist())}
    return {
        name: _mean(losses[mine], targets[mine], None if text is None else text[mine])
        for name, mine in members.items()
        if targets[mine].sum() > 0
    }


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
    if size < 2:
        return None
    if size == available:
        return 0.0
    residuals = losses - losses.sum() / targets.sum() * targets
    variance = (1 - size / available) * size / (size - 1) * residuals.square().sum() / targets.sum().square()
    return float(variance.sqrt())
