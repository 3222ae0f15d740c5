"""What the planner predicts of a publication that nothing was fitted to: errors, bias by number of GPUs, ranges, and anchors."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

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


def range_factor(runs: Sequence[Unseen], covered: float = COVERED) -> float:
    """Return the factor above and below a prediction within which the runs of another publication are.

    It is the quantile of the absolute logarithms in which every publication counts the same, and so does the unknown one, with errors that
    may be of any size (conformal prediction of hierarchical data; Lee et al. 2023, https://arxiv.org/abs/2306.06342). With few publications
    that is the largest error.

    Args:
        runs: predicted without their publications.
        covered: share of the runs of another publication that are inside, on average.
    """
    counts = Counter(publication(run.source) for run in runs)
    below, target = 0.0, covered * (len(counts) + 1) / len(counts)
    for size, name in sorted((abs(run.error), publication(run.source)) for run in runs):
        below += 1 / counts[name] / len(counts)
        if below >= target - 1e-9:
            return math.exp(size)
    return math.exp(max(abs(run.error) for run in runs))


def quantiles(runs: Sequence[Unseen], shares: Sequence[float]) -> list[float]:
    """Return the measured over the predicted times below which these shares of the runs are, every source weighted equally."""
    counts = Counter(run.source for run in runs)
    ordered = sorted((-run.error, run.source) for run in runs)
    below, result = 0.0, []
    for value, source in ordered:
        below += 1 / counts[source] / len(counts)
        while len(result) < len(shares) and below >= shares[len(result)] - 1e-9:
            result.append(math.exp(value))
    return result


def coverage(runs: Sequence[Unseen]) -> dict[str, float]:
    """Return for every publication the share of its runs that is in the range which the others give."""
    names = sorted({publication(run.source) for run in runs})
    result = {}
    for name in names if len(names) > 1 else ():
        most = math.log(range_factor([run for run in runs if publication(run.source) != name])) + 1e-9
        result[name] = statistics.fmean(abs(run.error) <= most for run in runs if publication(run.source) == name)
    return result


def by_gpus(runs: Sequence[Unseen]) -> Iterator[tuple[str, list[Unseen]]]:
    """Yield the runs by their number of GPUs."""
    for least, most in zip((0, *GPUS), (*GPUS, None), strict=True):
        chosen = [run for run in runs if run.gpus > least and (most is None or run.gpus <= most)]
        if chosen:
            yield (f"more than {least:,}" if most is None else f"up to {most:,}"), chosen


def anchored(job: Fit, x: Mapping[str, Tensor], numbers: Sequence[int] = (0, 1, 2, 3)) -> dict[tuple[str, str], dict[int, list[Unseen]]]:
    """Return what is predicted of the runs of a publication on a GPU with some of them as anchors, by their number.

    The anchors are chosen at random (seeds 0, 1, ...), and the runs that are not among them are predicted.

    Args:
        job: rows and traces.
        x: publication -> the constants that were fitted without it, as Fit.refitted returns them.
        numbers: of anchors.
    """
    groups: dict[tuple[str, str], list[MeasuredRow]] = defaultdict(list)
    for sample in job.all:
        groups[sample.source, sample.file].append(sample)
    result: dict[tuple[str, str], dict[int, list[Unseen]]] = {}
    for (source, file), samples in groups.items():
        if len(samples) < FEWEST:
            continue
        runs = [(job.run_of(sample, x[publication(source)]), sample.measured) for sample in samples]
        result[source, file] = {number: list(_anchored(job, source, runs, number)) for number in numbers}
    return result


def _anchored(job: Fit, source: str, runs: list[tuple[PublishedRun, float]], number: int) -> Iterator[Unseen]:
    """The runs that are no anchors, for every choice of anchors."""
    for seed in range(CHOICES if number else 1):
        chosen = set(random.Random(seed).sample(range(len(runs)), number))
        correction = fitted([_anchor(job, *runs[index]) for index in sorted(chosen)])
        others = [index for index in range(len(runs)) if index not in chosen]
        for index in others[:: math.ceil(len(others) / SCORED)]:
            run, measured = runs[index]
            seconds = _seconds(job, replace(run, hardware=corrected(run.hardware, *correction)))
            yield Unseen(source, run.layout.world_size, math.log(seconds / measured))


def _anchor(job: Fit, run: PublishedRun, measured: float) -> Anchor:
    return Anchor.of(measured, run.hardware, lambda hardware: _seconds(job, replace(run, hardware=hardware)))


def _seconds(job: Fit, run: PublishedRun) -> float:
    return predict(replace(run, assumptions=list(run.assumptions)), job.traces).step_time
