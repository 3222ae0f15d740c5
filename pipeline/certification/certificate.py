"""The certificate of a planned job: a small version of it, trained in its layout and in a plain loop, and the differences."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event

import torch

from pipeline.certification import data_order, exported, phase_changes, shapes
from pipeline.certification import state as saved_state
from pipeline.certification.comparison import QUANTITIES, Outcome
from pipeline.certification.conditioning import (
    in_precision,
    reordered_runs,
    well_conditioned,
    with_active_bounds,
    with_active_clipping,
    with_small_updates,
)
from pipeline.certification.distributed import RanksFailedError, preload, run_ranks
from pipeline.certification.first_difference import begins
from pipeline.certification.parts import PartReport, left_out, merged
from pipeline.certification.ranks_work import (
    ELSEWHERE,
    OUTPUTS,
    STEPS,
    RankResult,
    RankWork,
    compare_outputs,
    continue_elsewhere,
    in_folder,
    train_all,
)
from pipeline.certification.reference import train_plain
from pipeline.certification.shrink import Shrunk, shrink
from pipeline.certification.tolerances import Comparison, compare_fp32, compare_low, largest_drift
from pipeline.common import knobs
from pipeline.common.progress import Progress
from pipeline.config import phases
from pipeline.config.layout import Layout
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.parallel.parallelize import DTYPES


@dataclass(frozen=True)
class Certificate:
    """The result.

    Attributes:
        small: the job that was trained.
        comparisons: in every precision; none if the ranks failed.
        failures: a line for each quantity above its tolerance and for each difference that a part has found, or why the ranks failed;
            empty for a certified job.
        details: the traceback of a rank that failed.
        parts: what every part has compared, and what it has not.
        phases: of the later phases of a run that have other settings, by number; their failures are those of the run, too.
    """

    small: Shrunk
    comparisons: list[Comparison]
    failures: list[str]
    details: str = ""
    parts: list[PartReport] = field(default_factory=list)
    phases: dict[int, Certificate] = field(default_factory=dict)


def certify(planned: RunConfig, world_size: int, *, steps: int, seconds: float, skip: Sequence[str] = ()) -> Certificate:
    """Train the small version of a job in its layout, on ranks of this machine, and in a plain loop, and compare.

    Of a run with training.phases, every phase of other settings is a job, and every change between two of them is trained.

    Args:
        planned: a legal configuration.
        world_size: ranks of the planned job.
        steps: of the small run.
        seconds: time limit of the ranks.
        skip: parts that are left out.
    """
    preload()
    torch.set_num_threads(1)
    whole = {"training.steps": planned.training.steps}  # each phase has the schedule of the run
    jobs = [(knobs.changed(job, whole), size) for job, size in phases.alone(planned, world_size)]
    numbers = [jobs.index(job) for job in jobs]
    certificates = {number: _certify(*jobs[number], steps, seconds, skip) for number in dict.fromkeys(numbers)}
    reports = left_out(skip) + ([] if "data" in skip else [data_order.report(planned, world_size)])
    for pair in dict.fromkeys(pair for pair in pairwise(numbers) if len(set(pair)) == 2 and "phases" not in skip):
        before, after = ((jobs[number][0], certificates[number].small) for number in pair)
        reports.append(_change(before, after, f"from training.phases.{pair[0]} to {pair[1]}", seconds))
    failures = [line for report in merged(reports) for line in report.lines()]
    for number, other in certificates.items():
        failures += [f"training.phases.{number}: {failure}" if number else failure for failure in other.failures]
    first = certificates.pop(0)
    details = "\n".join(other.details for other in (first, *certificates.values()) if other.details)
    return replace(first, failures=failures, details=details, parts=merged([*reports, *first.parts]), phases=certificates)


def _certify(planned: RunConfig, world_size: int, steps: int, seconds: float, skip: Sequence[str]) -> Certificate:
    """Certify a run without phases, but for the part "data"; as certify."""
    small = shrink(planned, world_size, steps)
    dtype = "fp8" if planned.precision.fp8 != "none" else planned.precision.dtype
    low = [dtype] if dtype != "fp32" and "precision" not in skip else []
    saved = None if "state" in skip else (low or ["fp32"])[-1]
    # The plain loop for the clipping threshold, in fp32 and fp64, with reordered sums, and the ranks; in the job's precision ranks, plain
    # loop and perturbed ones.
    passes = 4 + reordered_runs(planned) + (1 if OPTIMIZERS[planned.optimizer.name].moves_by_signs else 0) + (3 + PERTURBED) * len(low)
    reports = [] if "shapes" in skip else [shapes.report(planned, world_size)]
    if "bounds" not in skip:
        small, bounds = with_active_bounds(planned, small)
        reports.append(bounds)
    try:
        with Progress(passes * steps, "certify", "training steps", every=10) as progress, tempfile.TemporaryDirectory() as folder:
            plain = well_conditioned(planned, with_active_clipping(planned, small, progress), progress)
            small = plain.small
            configs = {"fp32": in_precision(small.config, "fp32"), **{name: with_small_updates(small.config) for name in low}}
            work = RankWork(configs, folder, copies="copies" not in skip, validation="validation" not in skip, saved=saved)
            with beside_ranks(low[0] if low else None, configs[(low or ["fp32"])[0]]) as running:
                runs = _train_ranks(small.world_size, work, seconds, progress, running)
                plain_low = running.runs.result() if running.runs else None
            drift = largest_drift(small.config)
            compared = [compare_fp32(runs["fp32"].outcome, plain.reference, plain.rounding, plain.zero, drift, plain.signs)]
            if plain_low:
                compared.append(compare_low(dtype, runs[dtype].outcome, plain_low.reference, plain_low.perturbed))
                reports.append(PartReport("precision", [f"layout and plain loop in {dtype}; bounds from {PERTURBED + 1} perturbed runs"]))
            elif small.config.optimizer.state_dtype != "fp32":
                reports.append(PartReport("precision", not_covered=["optimizer.state_dtype: in fp32, moments are compared in fp32"]))
            for mode, run in runs.items():
                reports += [report.inside(mode) for report in run.reports]
            if saved is not None:
                reports.append(_continue_elsewhere(configs[saved], runs[saved].outcome, compared[-1].tolerances["loss"], folder, seconds))
                if not reports[-1].failures:
                    reports.append(exported.report(in_folder(configs[saved], folder)))
    except RanksFailedError as error:
        return Certificate(small, [], [str(error)], error.details, merged(reports))
    parts = merged(reports)
    failures = [failure for comparison in compared for failure in comparison.failures()]
    if compared[0].failures():
        fp32 = configs["fp32"]
        module = partial(_first_module, fp32, small.world_size, seconds)
        where = begins(fp32, small.world_size, runs["fp32"].outcome, plain.reference, compared[0].tolerances, module)
        failures[:0] = [f"begins at {where}"] if where else []
    return Certificate(small, compared, failures + [line for part in parts for line in part.lines()], parts=parts)


def _train_ranks(size: int, work: RankWork, seconds: float, progress: Progress, beside: Running) -> dict[str, RankResult]:
    """Train every configuration on ranks of this machine, and return the results by name; arguments as in certify."""
    seen, steps = 0, Path(work.folder, STEPS)

    def report() -> None:
        nonlocal seen
        counted = len(beside.finished) + (steps.stat().st_size if steps.exists() else 0)
        progress.advance(counted - seen)
        seen = counted

    run_ranks(size, train_all, work, seconds=seconds, watch=report)
    if beside.runs:
        beside.runs.result()
    report()
    return {name: torch.load(f"{work.folder}/{name}", weights_only=False) for name in work.configs}


def _continue_elsewhere(config: RunConfig, run: Outcome, tolerance: float, folder: str, seconds: float) -> PartReport:
    """Continue the saved run in another layout, and compare its losses with those of the uninterrupted run."""
    first = saved_state.saved_steps(config)[-1]
    if not Path(in_folder(config, folder).run_dir, saved_state.UNSHARDED).exists():
        return PartReport("state", failures=[f"no checkpoint of step {first} was written"])
    other, size = saved_state.other_layout(config)
    run_ranks(size, continue_elsewhere, other, folder, seconds=seconds, watch=lambda: None)
    report, outcome = torch.load(f"{folder}/{ELSEWHERE}", weights_only=False)
    for step, (loss, expected) in enumerate(zip(outcome.losses, run.losses[first:], strict=True), first + 1):
        if not abs(loss - expected) <= tolerance * abs(expected):
            layout = Layout.of(other, size).axes_text()
            report.failures.append(f"step {step}, continued in {layout}: loss {loss:.6g}, {expected:.6g} without interruption")
            break
    return report


def _change(first: tuple[RunConfig, Shrunk], second: tuple[RunConfig, Shrunk], name: str, seconds: float) -> PartReport:
    """Train a small run that changes from one phase to another, planned and small ones, and compare it with the plain loop."""
    report = PartReport("phases")
    (planned, small), (_, after) = first, second
    config = phase_changes.small_run((planned, second[0]), (small, after))
    if config is None:
        report.not_covered.append(f"{name}: no small model is legal in both layouts")
        return report
    with Progress(4 * config.training.steps, "certify", "training steps", every=10) as progress, tempfile.TemporaryDirectory() as folder:
        plain = well_conditioned(planned, replace(small, config=config), progress)
        config = plain.small.config
        begin = phases.starts(config)[1]
        layouts = [Layout.of(phases.at(config, step), size) for step, size in ((0, small.world_size), (begin, after.world_size))]
        try:
            run_ranks(small.world_size, phase_changes.train_first, phases.at(config, 0), folder, seconds=seconds, watch=lambda: None)
            run_ranks(after.world_size, continue_elsewhere, phases.at(config, begin), folder, seconds=seconds, watch=lambda: None)
        except RanksFailedError as error:
            report.failures.append(f"{name}: {error}")
            return report
        before = torch.load(f"{folder}/{phase_changes.FIRST}", weights_only=False)
        loaded, outcome = torch.load(f"{folder}/{ELSEWHERE}", weights_only=False)
    run = phase_changes.together(before, outcome)
    comparison = compare_fp32(run, plain.reference, plain.rounding, plain.zero, largest_drift(config), plain.signs)
    report.failures += [f"{name}: {failure}" for failure in (*loaded.failures, *comparison.failures())]
    changes = f"{layouts[0].axes_text()} -> {layouts[1].axes_text()}"
    steps = f"{config.training.steps} steps of the run and of the plain loop, which changes after {begin}"
    report.covered.append(f"{name}, {changes}: all bits of the state, and {steps}")
    return report


def _first_module(config: RunConfig, world_size: int, seconds: float, tolerance: float) -> str:
    """Run one step again in the layout, and return the first module whose output differs; empty if the ranks find none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(world_size, compare_outputs, config, folder, tolerance, seconds=seconds, watch=lambda: None)
        except RanksFailedError as error:
            return f"a module that could not be found ({error})"
        return Path(folder, OUTPUTS).read_text()


def table(certificate: Certificate) -> list[str]:
    """Return the differences as lines of a table."""
    names = next((list(comparison.differences) for comparison in certificate.comparisons), QUANTITIES)
    lines = [f"{'largest relative difference':<30}" + "".join(f"{name:>10}" for name in names)]
    for comparison in certificate.comparisons:
        rows = {
            f"{comparison.dtype}: rounding": {name: d.value for name, d in comparison.rounding.items()},
            f"{comparison.dtype}: tolerance": comparison.tolerances,
            f"{comparison.dtype}: layout": {name: d.value for name, d in comparison.differences.items()},
        }
        lines += [f"  {title:<28}" + "".join(_cell(values.get(name)) for name in names) for title, values in rows.items()]
    return lines


def _cell(value: float | None) -> str:
    """Return a column of the table; empty for what was not compared."""
    return f"{value:10.1e}" if value is not None else " " * 10


def coverage(certificate: Certificate) -> list[str]:
    """Return what was shrunk, and what every part has compared and what it has not, as lines."""
    lines = ["shrunk: " + ", ".join(f"{change.key} {change.planned} -> {change.small}" for change in certificate.small.changes)]
    for part in certificate.parts:
        lines += [f"{part.part}: {line}" for line in part.covered]
        lines += [f"{part.part}: not covered: {line}" for line in part.not_covered]
    return lines


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
