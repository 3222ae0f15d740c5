"""Loss spikes: a robust rule on the losses and gradient norms of a run, which finds them on rank 0.

A limit is median + factor * s of the last steps, with s = 1.4826 * MAD, the median absolute deviation from the median. This is the Hampel
identifier (Leys et al. 2013, "Detecting outliers"); 1.4826 = 1 / quantile(3/4) of the normal distribution makes s its standard deviation.
Unlike mean and standard deviation, neither moves with outliers as long as they are fewer than half of the values. Losses and norms are
compared by their logarithms, since norms vary by factors. A loss that falls keeps the median above it, so that a trend raises no alarm.

The window ends before the steps that are judged: whether there is a spike is a function of the last window + patience steps alone, and a
run that continues from a checkpoint decides as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.common import metrics_file
from pipeline.config.training import TrainingConfig

#: Steps from the last one of a spike to the step after which all ranks act on it: rank 0 reads the metrics of a step when the next one is
#: queued, sends its request with the one after that, and its sum is read when a further one is queued.
DELAY = 3
#: Standard deviations of normally distributed values in their median absolute deviation.
_NORMAL = 1.4826
#: Least standard deviation of a logarithm: a thousandth of the value.
_LEAST = 1e-3


@dataclass(frozen=True)
class Spike:
    """A loss spike.

    Attributes:
        first: its first step; the first step of a run is 1.
        last: the step at which it was long enough.
        reason: its quantity, with the value at the first step and the limit.
    """

    first: int
    last: int
    reason: str


class LossSpikes:
    """Finds the first loss spike: training.spike_patience steps in a row whose loss or gradient norm is above its limit, or not finite.

    Args:
        training: with spike_factor, spike_window and spike_patience.
        earliest: spikes that begin before this step are ignored, since no checkpoint precedes them.
        scaled: the loss is scaled (fp16): a gradient that is not finite changes the scale and is no spike.

    Attributes:
        found: the first spike, None if there is none.
    """

    def __init__(self, training: TrainingConfig, earliest: int = 0, *, scaled: bool = False) -> None:
        self._factor, self._window, self._patience = training.spike_factor, training.spike_window, training.spike_patience
        self._earliest, self._scaled = earliest, scaled
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=self._window + self._patience)
        self.found: Spike | None = None

    def restore(self, run_dir: Path) -> None:
        """Observe the last steps of metrics.jsonl, as many as decide about the spikes on which the run has not acted yet."""
        for content in metrics_file.last_with(run_dir, "grad_norm", self._window + self._patience + DELAY):
            self.observe(content)

    def observe(self, line: Mapping[str, Any]) -> None:
        """Take note of a step.

        Args:
            line: of metrics.jsonl, with step, loss and grad_norm (None or NaN if they are not finite); empty for none.
        """
        if not line or (self._steps and line["step"] <= self._steps[-1][0]):
            return
        step = int(line["step"])
        if self._steps and step != self._steps[-1][0] + 1:  # a gap in the file
            self._steps.clear()
        norm = _logarithm(line["grad_norm"])
        self._steps.append((step, _logarithm(line["loss"]), -math.inf if self._scaled and norm == math.inf else norm))
        if self.found is None and len(self._steps) == self._steps.maxlen:
            self.found = self._judge()

    def _judge(self) -> Spike | None:
        """Return the spike that the last `patience` steps are, None if they are none."""
        steps = list(self._steps)
        before, last = steps[: self._window], steps[self._window :]
        limits = [self._limit([step[quantity] for step in before]) for quantity in (1, 2)]
        if last[0][0] < self._earliest or not all(loss > limits[0] or norm > limits[1] for _, loss, norm in last):
            return None
        step, *values = last[0]
        which = 0 if values[0] > limits[0] else 1
        name, value, limit = ("loss", "gradient norm")[which], math.exp(values[which]), math.exp(limits[which])
        return Spike(step, last[-1][0], f"{name} {value:.4g} above {limit:.4g}" if math.isfinite(value) else f"{name} not finite")

    def _limit(self, logarithms: Iterable[float]) -> float:
        """Return the limit of a logarithm; infinity if fewer than half of the window are finite."""
        finite = [value for value in logarithms if math.isfinite(value)]
        if 2 * len(finite) < self._window:
            return math.inf
        middle = median(finite)
        return middle + self._factor * max(_NORMAL * median(abs(value - middle) for value in finite), _LEAST)


def _logarithm(value: float | None) -> float:
    """The logarithm, infinity of a value that is not finite, minus infinity of one that is not positive."""
    if value is None or not math.isfinite(value):
        return math.inf
    return math.log(value) if value > 0 else -math.inf
