"""The certificate of a planned job: a small version of it, trained in its layout and in a plain loop, and the differences."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.certification import shrink as shrinking
from pipeline.certification.comparison import QUANTITIES, Difference, Outcome, differences
from pipeline.certification.distributed import RanksFailedError, preload, run_ranks, train_in_layout
from pipeline.certification.reference import train_plain
from pipeline.certification.shrink import Shrunk, shrink
from pipeline.common.progress import Progress
from pipeline.config.schema import RunConfig
from pipeline.parallel.parallelize import DTYPES

log = logging.getLogger("pipeline")

#: Smallest tolerance in fp32, as that of tools/numerics.
FP32_FLOOR = 1e-5
#: The tolerance is this multiple of the rounding error of the plain loop, if that is larger than the floor.
FP32_FACTOR = 10
#: Largest tolerance: above it, a wrong gradient would pass.
FP32_CEILING = 1e-3
#: As FP32_FACTOR, for lower precisions.
LOW_FACTOR = 4
#: Rounding error of a bf16 number.
LOW_FLOOR = 2.0**-8
#: Largest tolerance in lower precisions, also if the plain loop diverges.
LOW_CEILING = 0.5
#: Seeds that are tried for one with which the plain loop's own rounding errors are below the floor. A ReLU whose input is zero up to
#: rounding, or a token whose experts are equally likely, changes gradients by more.
SEEDS = 4
#: The file in which rank 0 counts its steps.
STEPS = "steps"


@dataclass(frozen=True)
class Comparison:
    """The differences between the layout and the plain loop in one precision.

    Attributes:
        dtype: of weights and activations of both.
        method: what the tolerance is, for readers.
        rounding: the differences between the plain loop in this precision and in a higher one.
        tolerances: quantity -> largest difference that passes.
        found: quantity -> largest difference.
    """

    dtype: str
    method: str
    rounding: dict[str, Difference]
    tolerances: dict[str, float]
    found: dict[str, Difference]

    def failures(self) -> list[str]:
        """Return a line for every quantity above its tolerance."""
        return [
            f"{name} in {self.dtype}: differs by {found.value:.1e} ({found.where}), tolerance {self.tolerances[name]:.1e}"
            for name, found in self.found.items()
            if not found.value <= self.tolerances[name]
        ]


@dataclass(frozen=True)
class Certificate:
    """The result.

    Attributes:
        small: the job that was trained.
        comparisons: in every precision; none if the ranks failed.
        failures: a line for each quantity above its tolerance, or why the ranks failed; empty for a certified job.
        details: the traceback of a rank that failed.
    """

    small: Shrunk
    comparisons: list[Comparison]
    failures: list[str]
    details: str = ""


def certify(planned: RunConfig, world_size: int, *, steps: int, seconds: float, spoil: str | None = None) -> Certificate:
    """Train the small version of a job in its layout, on ranks of this machine, and in a plain loop, and compare.

    Args:
        planned: a legal configuration.
        world_size: ranks of the planned job.
        steps: of the small run.
        seconds: time limit of the ranks.
        spoil: as in train_in_layout.
    """
    preload()
    torch.set_num_threads(1)
    small = shrink(planned, world_size, steps)
    precisions = list(dict.fromkeys(["fp32", planned.precision.dtype]))
    passes = 2 + len(precisions) + len(precisions[1:])  # the plain loop in fp32 and fp64, the ranks, and the plain loop in low precisions
    try:
        with Progress(1 + passes * steps, "certify", "training steps", every=10) as progress:
            small, reference, rounding = well_conditioned(planned, with_active_clipping(planned, small, progress), progress)
            configs = {precision: in_precision(small.config, precision) for precision in precisions}
            runs = train_ranks(small.world_size, configs, spoil, seconds, progress)
            found = [compare_fp32(runs.pop("fp32"), reference, rounding)]
            for dtype, run in runs.items():
                plain = train_plain(configs[dtype], DTYPES[dtype], after_step=progress.advance)
                found.append(compare_low(dtype, run, plain, reference))
    except RanksFailedError as error:
        return Certificate(small, [], [str(error)], error.details)
    return Certificate(small, found, [failure for comparison in found for failure in comparison.failures()])


def train_ranks(size: int, configs: Mapping[str, RunConfig], spoil: str | None, seconds: float, progress: Progress) -> dict[str, Outcome]:
    """Train every configuration on ranks of this machine, and return the outcomes by name; arguments as in certify."""
    with tempfile.TemporaryDirectory() as folder:
        seen, steps = 0, Path(folder, STEPS)

        def report() -> None:
            nonlocal seen
            counted = steps.stat().st_size if steps.exists() else 0
            progress.advance(counted - seen)
            seen = counted

        run_ranks(size, train_all, configs, folder, spoil, seconds=seconds, watch=report)
        report()
        return {name: torch.load(f"{folder}/{name}", weights_only=False) for name in configs}


def train_all(configs: Mapping[str, RunConfig], folder: str, spoil: str | None) -> None:
    """Train every configuration on this rank; rank 0 writes the outcomes, and a byte for each finished step."""
    writes = dist.get_rank() == 0
    with open(Path(folder, STEPS) if writes else os.devnull, "ab", buffering=0) as steps:
        for name, config in configs.items():
            outcome = train_in_layout(config, spoil, after_step=lambda: steps.write(b"."))
            if writes:
                torch.save(outcome, f"{folder}/{name}")


def in_precision(config: RunConfig, dtype: str) -> RunConfig:
    """Return the configuration with another precision.dtype, and without fp8: a layout rounds other numbers to 8 bits than a process."""
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, dtype=dtype, fp8="none"))


def with_active_clipping(planned: RunConfig, small: Shrunk, progress: Progress) -> Shrunk:
    """Lower the clipping threshold below the first gradient norm of the small model if it is above: clipping is then compared, too."""
    threshold = small.config.optimizer.gradient_clipping
    plain = train_plain(in_precision(small.config, "fp32"), steps=1, after_step=progress.advance) if threshold else None
    norm = plain.norms[0] if plain else 0.0
    if norm > threshold or not threshold:
        return small
    config = dataclasses.replace(small.config, optimizer=dataclasses.replace(small.config.optimizer, gradient_clipping=norm / 2))
    return Shrunk(config, small.world_size, shrinking.changes(planned, config))


def well_conditioned(planned: RunConfig, small: Shrunk, progress: Progress) -> tuple[Shrunk, Outcome, dict[str, Difference]]:
    """Choose the seed of the initial weights, so that rounding errors hide nothing.

    Returns:
        The small version with that seed, the outcome of its plain loop in fp32, and the differences between fp32 and fp64.
    """
    tried: list[tuple[float, RunConfig, Outcome, dict[str, Difference]]] = []
    for seed in range(planned.training.seed, planned.training.seed + SEEDS):
        if tried:
            progress.extend(2 * small.config.training.steps)
        config = dataclasses.replace(small.config, training=dataclasses.replace(small.config.training, seed=seed))
        fp32 = in_precision(config, "fp32")
        reference = train_plain(fp32, after_step=progress.advance)
        rounding = differences(reference, train_plain(fp32, torch.float64, after_step=progress.advance))
        tried.append((max(found.value for found in rounding.values()), config, reference, rounding))
        if tried[-1][0] <= FP32_FLOOR:
            break
    _, config, reference, rounding = min(tried, key=lambda entry: entry[0])
    return Shrunk(config, small.world_size, shrinking.changes(planned, config)), reference, rounding


def compare_fp32(run: Outcome, reference: Outcome, rounding: dict[str, Difference]) -> Comparison:
    """Compare in fp32: the same arithmetic in another order, so that differences are rounding errors."""
    tolerances = {name: min(max(FP32_FLOOR, FP32_FACTOR * found.value), FP32_CEILING) for name, found in rounding.items()}
    method = (
        f"layout and plain loop in fp32; tolerance {FP32_FLOOR:g}, or {FP32_FACTOR} x the difference of the plain loop in fp32 and fp64, "
        f"at most {FP32_CEILING:g}"
    )
    return Comparison("fp32", method, rounding, tolerances, differences(run, reference))


def compare_low(dtype: str, run: Outcome, reference: Outcome, precise: Outcome) -> Comparison:
    """Compare in a low precision: the order of additions changes the rounding of every activation, and in MoE layers also the routing."""
    rounding = differences(reference, precise, together=True)
    tolerances = {name: min(LOW_FACTOR * max(found.value, LOW_FLOOR), LOW_CEILING) for name, found in rounding.items()}
    method = (
        f"layout in {dtype}, plain loop in {dtype} with fp32 gradients and master weights, all weights together; tolerance "
        f"{LOW_FACTOR} x the difference of the plain loop in {dtype} and fp32, from {LOW_FACTOR * LOW_FLOOR:.1e} to {LOW_CEILING:g}; finds "
        "wrong scales and lost updates, while the comparison in fp32 finds the wrong gradient of a single weight"
    )
    return Comparison(dtype, method, rounding, tolerances, differences(run, reference, together=True))


def table(certificate: Certificate) -> list[str]:
    """Return the differences as lines of a table."""
    names = next((list(comparison.found) for comparison in certificate.comparisons), QUANTITIES)
    lines = [f"{'largest relative difference':<30}" + "".join(f"{name:>10}" for name in names)]
    for comparison in certificate.comparisons:
        rows = {
            f"{comparison.dtype}: rounding": [d.value for d in comparison.rounding.values()],
            f"{comparison.dtype}: tolerance": list(comparison.tolerances.values()),
            f"{comparison.dtype}: layout": [d.value for d in comparison.found.values()],
        }
        lines += [f"  {title:<28}" + "".join(f"{value:10.1e}" for value in values) for title, values in rows.items()]
    return lines
