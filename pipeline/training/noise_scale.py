"""The gradient noise scale of a batch size (McCandlish et al. 2018, https://arxiv.org/abs/1812.06162).

Far below it, a batch of twice the size is worth almost twice as much; far above it, almost nothing.

A batch has n equal shares, whose gradients g are computed before their mean, the gradient G of the batch. If samples are independent
(appendix A.1), E |g|^2 = signal + n v and E |G|^2 = signal + v: the signal is the squared norm of the expected gradient, and v the variance
of G, summed over its elements. The norms of shares and batch therefore estimate both without bias. The noise is v times the size of the
batch, and the noise scale B_simple is noise / signal. The mean of ratios would be biased: it is the ratio of the means of several steps.
"""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from torch import Tensor

from pipeline.common import metrics_file
from pipeline.training.loss_scale import LossScale

#: Keys of metrics.jsonl. Noise and scale are in sequences.
NOISE, SIGNAL, SCALE = "gradient_noise", "gradient_signal", "gradient_noise_scale"
#: Number of measurements of which the means are taken.
WINDOW = 64


def measured(norm: Tensor, shares: tuple[Tensor, int] | None, loss_scale: LossScale) -> dict[str, Tensor]:
    """Return the variance of the gradient of a batch, as NOISE, and its SIGNAL; fp32, 0-dim. Nothing if the shares were not measured.

    Args:
        norm: of the gradient of the batch, without the loss scale.
        shares: GradientReducer.shares; at least 2.
        loss_scale: whose factor the gradients of the shares have.
    """
    if shares is None:
        return {}
    share_square, count = loss_scale.divide(loss_scale.divide(shares[0])), shares[1]
    square = norm.double().square()
    variance = (share_square - square) / (count - 1)
    return {NOISE: variance.float(), SIGNAL: (square - variance).float()}


class NoiseScale:
    """Adds the noise scale to the metrics of a step; a run that continues has the measurements of metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._found: deque[tuple[float, float]] | None = None

    def added(self, metrics: dict[str, float], samples: int) -> dict[str, float]:
        """Return the metrics of a step, with the noise of a sequence and the noise scale if the step has measured them.

        Args:
            metrics: with the result of `measured`, if the step has any.
            samples: size of the batch.
        """
        if NOISE not in metrics:
            return metrics
        if self._found is None:
            lines = metrics_file.last_with(self._run_dir, NOISE, WINDOW)
            self._found = deque(((_number(line[NOISE]), _number(line[SIGNAL])) for line in lines), maxlen=WINDOW)
        noise, signal = metrics[NOISE] * samples, metrics[SIGNAL]
        self._found.append((noise, signal))
        finite = [pair for pair in self._found if math.isfinite(sum(pair))]
        noises, signals = (math.fsum(pair[which] for pair in finite) for which in (0, 1))
        scale = noises / signals if signals > 0 else math.nan
        return {**metrics, NOISE: noise, SCALE: scale}


def _number(value: float | None) -> float:
    """A value of metrics.jsonl, which has null for a number that is not finite."""
    return math.nan if value is None else value
