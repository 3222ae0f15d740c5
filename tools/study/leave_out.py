"""What the planner predicts of a publication that nothing was fitted to: errors, bias by number of GPUs, ranges, and anchors."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.planner.site_correction import Anchor, corrected, fitted
from tools.study.fit import Fit, MeasuredRow, publication
from tools.study.runs import PublishedRun
from tools.study.tables import predict

#: Bounds of the classes of GPUs of a run.
GPUS = (8, 32, 128, 512, 1024)
#: Share of unseen runs that a range shall contain.
COVERED = 0.8
#: Choices of anchors of each number, and the fewest runs of a publication on a GPU from which they are chosen.
CHOICES, FEWEST = 12, 6
#: Runs that each choice of anchors is scored on, at equal distances.
SCORED = 24


@dataclass(frozen=True)
class Unseen:
    """A run that was predicted without its publication.

    Attributes:
        source: whose row it is.
        gpus: of the run.
        error: logarithm of predicted over measured time.
    """

    source: str
    gpus: int
    error: float

    @property
    def relative(self) -> float:
        """Predicted over measured time, minus 1."""
        return math.exp(self.error) - 1


def unseen(found: Mapping[str, Iterable[tuple[MeasuredRow, float]]]) -> list[Unseen]:
    """Return the runs of Fit.left_out."""
    return [Unseen(source, int(float(sample.row["gpus"])), error) for source, rows in found.items() for sample, error in rows]


def time_range(runs: Sequence[Unseen], covered: float = COVERED) -> tuple[float, float]:
    """Return the factors of a predicted time between which the given share of the measured times is, every publication weighted equally.

    Args:
        runs: predicted without their publications.
        covered: share of the runs inside; half of the others are on each side.
    """
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        counts[publication(run.source)] += 1
    ordered = sorted((-run.error, 1 / counts[publication(run.source)] / len(counts)) for run in runs)
    return math.exp(_quantile(ordered, (1 - covered) / 2)), math.exp(_quantile(ordered, (1 + covered) / 2))


def _quantile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """The value below which a share of the weights is."""
    below = 0.0
    for value, weight in ordered:
        below += weight
        if below >= share:
            return value
    return ordered[-1][0]


def inside(run: Unseen, factors: tuple[float, float]) -> bool:
    """Whether the measured time is in the range of the predicted one."""
    return factors[0] <= math.exp(-run.error) <= factors[1]


def coverage(runs: Sequence[Unseen]) -> dict[str, float]:
    """Return for every publication the share of its runs that is in the range which the others give."""
    names = sorted({publication(run.source) for run in runs})
    result = {}
    for name in names:
        factors = time_range([run for run in runs if publication(run.source) != name])
        result[name] = statistics.fmean(inside(run, factors) for run in runs if publication(run.source) == name)
    return result


def by_gpus(runs: Sequence[Unseen]) -> Iterator[tuple[str, list[Unseen]]]:
    """Yield the runs by their number of GPUs."""
    for least, most in zip((0, *GPUS), (*GPUS, None), strict=True):
        chosen = [run for run in runs if run.gpus > least and (most is None or run.gpus <= most)]
        if chosen:
            yield (f"more than {least:,}" if most is None else f"up to {most:,}"), chosen


def anchored(job: Fit, x: Mapping[str, object], numbers: Sequence[int] = (0, 1, 2, 3)) -> dict[tuple[str, str], dict[int, float]]:
    """Return the mean absolute error of the runs of a publication on a GPU with some of them as anchors, by their number.

    The anchors are chosen at random (seeds 0, 1, ...), and the runs that are not among them are predicted.

    Args:
        job: rows and traces.
        x: publication -> the constants that were fitted without it, as Fit.refitted returns them.
        numbers: of anchors.
    """
    groups: dict[tuple[str, str], list[MeasuredRow]] = defaultdict(list)
    for sample in job.all:
        groups[sample.source, sample.file].append(sample)
    result: dict[tuple[str, str], dict[int, float]] = {}
    for (source, file), samples in groups.items():
        if len(samples) < FEWEST:
            continue
        runs = [(job.run_of(sample, x[publication(source)]), sample.measured) for sample in samples]
        result[source, file] = {number: _anchored_error(job, runs, number) for number in numbers}
    return result


def _anchored_error(job: Fit, runs: list[tuple[PublishedRun, float]], number: int) -> float:
    """The mean absolute error of the runs that are no anchors."""
    errors = []
    for seed in range(CHOICES if number else 1):
        chosen = set(random.Random(seed).sample(range(len(runs)), number))
        correction = fitted([_anchor(job, *runs[index]) for index in sorted(chosen)])
        others = [index for index in range(len(runs)) if index not in chosen]
        for index in others[:: math.ceil(len(others) / SCORED)]:
            run, measured = runs[index]
            errors.append(abs(_seconds(job, replace(run, hardware=corrected(run.hardware, *correction))) / measured - 1))
    return statistics.fmean(errors)


def _anchor(job: Fit, run: PublishedRun, measured: float) -> Anchor:
    return Anchor.of(measured, run.hardware, lambda hardware: _seconds(job, replace(run, hardware=hardware)))


def _seconds(job: Fit, run: PublishedRun) -> float:
    return predict(replace(run, assumptions=list(run.assumptions)), job.traces).step_time
