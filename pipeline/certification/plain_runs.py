"""The plain loops in the job's own precision, in a thread beside the ranks: they need nothing of each other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

from pipeline.certification.comparison import Outcome
from pipeline.certification.conditioning import in_precision
from pipeline.certification.reference import train_plain
from pipeline.config.schema import RunConfig
from pipeline.parallel.parallelize import DTYPES

#: Runs of the plain loop with perturbed initial weights, in low precisions.
PERTURBED = 2


class _StoppedError(Exception):
    """The ranks failed: the plain loops are not needed."""


@dataclass(frozen=True)
class LowRuns:
    """The plain loops in the job's precision.

    Attributes:
        reference: in this precision.
        perturbed: in the next higher precision, and with weights changed by rounding errors in every step.
    """

    reference: Outcome
    perturbed: list[Outcome]


@dataclass
class Running:
    """Plain loops that run in a thread.

    Attributes:
        finished: an entry for each finished step.
        runs: the results; None if there is nothing to run.
    """

    finished: list[None] = field(default_factory=list)
    runs: Future[LowRuns] | None = None


@contextmanager
def beside_ranks(name: str | None, config: RunConfig) -> Iterator[Running]:
    """Run the plain loops in low precision in a thread while the caller waits for the ranks. Where the caller fails, they are ended.

    Args:
        name: "fp8" or the dtype; None for no runs.
        config: in this precision.
    """
    running, stop = Running(), Event()

    def after_step() -> None:
        if stop.is_set():
            raise _StoppedError
        running.finished.append(None)

    def run_all() -> LowRuns:
        dtype = DTYPES[config.precision.dtype]
        reference = train_plain(config, dtype, after_step=after_step)
        above = config.precision.dtype if name == "fp8" else "fp32"
        higher = train_plain(in_precision(config, above), DTYPES[above], after_step=after_step)
        return LowRuns(
            reference, [higher, *(train_plain(config, dtype, perturbed=seed, after_step=after_step) for seed in range(PERTURBED))]
        )

    with ThreadPoolExecutor(1) as threads:
        running.runs = threads.submit(run_all) if name else None
        try:
            yield running
        finally:
            stop.set()
