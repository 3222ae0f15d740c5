"""Fits the constants of GPUs, fabrics and frameworks to published step times, and the error on sources that were left out of the fit.

Constants are those of a generation of GPUs (shares of its peaks), of a fabric, or of a kind of framework, never of a source or a row. The
fit is Gauss-Newton on the logarithms of predicted over measured time, with weights for the mean absolute error in which every source counts
the same, and a weak pull to neutral values, which a constant has without the source that it follows from.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.config import hardware as hardware_files
from pipeline.config.hardware import Hardware
from pipeline.planner.trace import Trace
from tools.study.cells import Contradiction, measured_step_time
from tools.study.frameworks import FITTED
from tools.study.runs import PublishedRun, read
from tools.study.tables import predict

#: Generation of GPUs -> its files in conf/hardware/, which share the fitted constants.
GENERATIONS = {
    "V100": ("v100-16", "v100-32"),
    "A100": ("a100-40", "a100-64", "a100-80"),
    "H100": ("gh200", "h100", "h200"),
    "B200": ("b200", "gb200"),
}
#: Technology of the network -> files, and its constants with their largest values: no library is known to sustain more. Bandwidths are
#: those of data sheets, so one share holds for all generations of InfiniBand with an adapter for every GPU or two.
FABRICS = {
    "InfiniBand": (("a100-40", "a100-80", "gh200", "h100", "h200", "b200", "gb200"), {"network_share": 0.95}),
    "one EDR port": (("v100-16", "v100-32"), {"network_share": 0.95}),
    "Leonardo": (("a100-64",), {"network_share": 0.95, "ring_us": 1000.0}),
}
#: Key -> largest value.
SHARES = {"product_share": 0.95, "attention_share": 0.8, "memory_share": 0.93, "link_share": 0.9}
#: Constant of frameworks -> its neutral and its largest value.
FRAMEWORKS = {
    "sharded_products": (0.9, 1.0),
    "old_products": (0.9, 1.0),
    "eager_attention": (0.9, 1.0),
    "eager_attention_new": (0.57, 1.0),  # FlashAttention 3 is 1.5 to 2 times as fast as 2 (Shah et al. 2024)
    "hand_fused": (1.5, 4.0),
    "host_us": (7.0, 20.0),
    "tensor_overlap": (0.5, 0.95),
    "loss_bytes": (30.0, 100.0),
    "omni_path": (Hardware().network_share, 0.95),
    "fp8_products": (0.9, 1.0),
}
#: Rows of a source that are fitted, at equal distances; all of them are predicted.
ROWS = 24
#: Difference of a constant's logarithm for derivatives, and the largest step of an iteration.
STEP, LARGEST = 0.03, 0.25
#: Weight of the squared change of a constant's logarithm, beside the errors of the sources.
PULL = 0.05
#: Errors below this count quadratically.
SMALL = 0.02


@dataclass(frozen=True)
class FittedConstant:
    """A fitted constant: a key of some hardware files, or with no files a field of Frameworks; its value may not exceed `most`."""

    name: str
    files: tuple[str, ...]
    key: str
    most: float

    @property
    def start(self) -> float:
        """The value that it has in the repository."""
        return float(getattr(hardware_files.load(self.files[0]) if self.files else FITTED, self.key))

    @property
    def neutral(self) -> float:
        """The value that it would have without any measurement."""
        return float(getattr(Hardware(), self.key)) if self.files else FRAMEWORKS[self.key][0]


@dataclass(frozen=True)
class MeasuredRow:
    """A row with a measured step time."""

    source: str
    row: dict[str, str]
    measured: float
    file: str


def constants() -> list[FittedConstant]:
    """Return all constants that are fitted."""
    fitted = [FittedConstant(f"{name} {key}", files, key, most) for name, files in GENERATIONS.items() for key, most in SHARES.items()]
    fitted += [FittedConstant(f"{name} {key}", files, key, most) for name, (files, keys) in FABRICS.items() for key, most in keys.items()]
    return fitted + [FittedConstant(name, (), name, most) for name, (_, most) in FRAMEWORKS.items()]


class Fit:
    """Rows with measured times, and the constants.

    Args:
        rows: of a table.
        chosen: the constants to fit; all when None.
    """

    def __init__(self, rows: list[dict[str, str]], chosen: list[FittedConstant] | None = None) -> None:
        self.constants, self.traces = chosen or constants(), dict[str, Trace]()
        self.all = list(self._read(rows))
        by_source: dict[str, list[MeasuredRow]] = defaultdict(list)
        for sample in self.all:
            by_source[sample.source].append(sample)
        self.samples = [sample for rows in by_source.values() for sample in rows[:: math.ceil(len(rows) / ROWS)]]
        self.start = torch.tensor([math.log(constant.start) for constant in self.constants], dtype=torch.float64)
        self.of_fabric = torch.tensor([constant.key in ("network_share", "ring_us", "omni_path") for constant in self.constants])
        self.neutral = torch.tensor([math.log(constant.neutral) for constant in self.constants], dtype=torch.float64)

    def _read(self, rows: list[dict[str, str]]) -> Iterator[MeasuredRow]:
        for row in rows:
            try:
                measured = measured_step_time(row) if row.get("status", "ok") in ("ok", "") else None
                if measured:
                    run = read(row)
                    yield MeasuredRow(row.get("source") or "(no source)", row, measured, run.file)
            except Contradiction:
                continue

    @property
    def sources(self) -> list[str]:
        """Names of the sources."""
        return sorted({sample.source for sample in self.samples})

    def run_of(self, sample: MeasuredRow, x: Tensor) -> PublishedRun:
        """The run of a row with these logarithms of the constants."""
        changed: dict[str, dict[str, float]] = defaultdict(dict)
        frameworks = FITTED
        for constant, value in zip(self.constants, x.exp().tolist(), strict=True):
            for file in constant.files:
                changed[file][constant.key] = min(value, constant.most)
            if not constant.files:
                frameworks = replace(frameworks, **{constant.key: value})
        return read(sample.row, frameworks, changed)

    def residual(self, sample: MeasuredRow, x: Tensor) -> float:
        """The logarithm of predicted over measured time."""
        return math.log(predict(self.run_of(sample, x), self.traces).step_time / sample.measured)

    def residuals(self, x: Tensor, without: Collection[str] = ()) -> Tensor:
        """The logarithms of predicted over measured time of all samples; 0 for those of publications that are left out."""
        values = [0.0 if publication(sample.source) in without else self.residual(sample, x) for sample in self.samples]
        return torch.tensor(values, dtype=torch.float64)

    def jacobian(self, x: Tensor, at: Tensor, without: Collection[str] = ()) -> Tensor:
        """Derivatives of the residuals by the logarithms of the constants, by differences; 0 for publications that are left out."""
        derivatives = torch.zeros(len(self.samples), len(self.constants), dtype=torch.float64)
        for column, constant in enumerate(self.constants):
            moved = x.clone()
            moved[column] -= STEP  # downwards: shares are at most one
            for index, sample in enumerate(self.samples):
                depends = not constant.files or sample.file in constant.files
                if depends and publication(sample.source) not in without:
                    derivatives[index, column] = (at[index] - self.residual(sample, moved)) / STEP
        return derivatives

    def solve(self, x: Tensor, at: Tensor, jacobian: Tensor, without: Collection[str] = ()) -> Tensor:
        """The constants with the least mean absolute error by a linear model of the residuals, without some publications."""
        counts: Mapping[str, int] = {source: sum(s.source == source for s in self.samples) for source in self.sources}
        share = torch.tensor([0.0 if publication(s.source) in without else 1 / counts[s.source] for s in self.samples], dtype=torch.float64)
        pull = torch.eye(len(self.constants), dtype=torch.float64) * PULL
        # In the common fit, constants that no row depends on keep their values; those of a fabric have no neutral value but that of others.
        known = (jacobian.abs().sum(dim=0) > 0) & ~self.of_fabric
        target = self.neutral if without else torch.where(known, self.neutral, x)
        step = torch.zeros_like(x)
        for _ in range(30):  # weights for absolute values
            weight = share / (at + jacobian @ step).abs().clamp(min=SMALL)
            left = jacobian.T @ (weight[:, None] * jacobian) + pull
            right = -(jacobian.T @ (weight * at)) - pull @ (x - target)
            step = torch.linalg.solve(left, right)
            if not without:
                step = step.clamp(-LARGEST, LARGEST)
        most = torch.tensor([math.log(constant.most) for constant in self.constants], dtype=torch.float64)
        return torch.minimum(x + step, most)

    def run(self, iterations: int, report: Callable[[Tensor], None] = lambda _: None) -> tuple[Tensor, Tensor, Tensor]:
        """Fit; returns the constants' logarithms, and the residuals of the fitted rows there with their derivatives.

        Args:
            iterations: of Gauss-Newton.
            report: called with the residuals before every iteration and after the last one.
        """
        x = self.start
        at = self.residuals(x)
        report(at)
        jacobian = self.jacobian(x, at)
        for _ in range(iterations):
            target = self.solve(x, at, jacobian)
            for part in (1.0, 0.5, 0.25):  # the model is not linear: a whole step may be too long
                there = x + part * (target - x)
                after = self.residuals(there)
                if self.objective(after) < self.objective(at):
                    break
            else:
                break
            x, at = there, after
            report(at)
            jacobian = self.jacobian(x, at)
        return x, at, jacobian

    def objective(self, at: Tensor) -> float:
        """The mean absolute residual of the fitted rows, every source weighted equally."""
        by_source: dict[str, list[float]] = defaultdict(list)
        for sample, value in zip(self.samples, at.tolist(), strict=True):
            by_source[sample.source].append(abs(value))
        return statistics.fmean(map(statistics.fmean, by_source.values()))

    def errors(self, x: Tensor, source: str = "") -> dict[str, list[float]]:
        """Relative errors of the predictions of all rows by source; of one source only if it is given."""
        found: dict[str, list[float]] = defaultdict(list)
        for sample in self.all:
            if source in ("", sample.source):
                found[sample.source].append(math.exp(self.residual(sample, x)) - 1)
        return dict(found)

    def refitted(self, x: Tensor, at: Tensor, jacobian: Tensor, without: Collection[str], iterations: int = 1) -> Tensor:
        """Return the constants that are fitted again without some publications.

        Args:
            x: constants of the common fit.
            at: residuals there.
            jacobian: their derivatives.
            without: the publications; no residual and no derivative of their rows is used.
            iterations: of Gauss-Newton after the linear solution from the common fit.
        """
        x = self.solve(x, at, jacobian, without)
        for _ in range(iterations):
            at = self.residuals(x, without)
            x = self.solve(x, at, self.jacobian(x, at, without), without)
        return x

    def left_out(self, x: Tensor, at: Tensor, jacobian: Tensor, iterations: int = 1) -> dict[str, Tensor]:
        """Return for every publication the constants that are fitted again without it."""
        names = sorted({publication(source) for source in self.sources})
        return {name: self.refitted(x, at, jacobian, (name,), iterations) for name in names}

    def predicted_without(self, constants: Mapping[str, Tensor], only: Collection[str] = ()) -> dict[str, list[tuple[MeasuredRow, float]]]:
        """Return the rows of every source with the logarithm of predicted over measured time.

        Args:
            constants: of every publication, as left_out returns them.
            only: these publications; all when empty.
        """
        found: dict[str, list[tuple[MeasuredRow, float]]] = defaultdict(list)
        for sample in self.all:
            if only and publication(sample.source) not in only:
                continue
            found[sample.source].append((sample, self.residual(sample, constants[publication(sample.source)])))
        return dict(found)


def publication(source: str) -> str:
    """Return what a source belongs to: rows of one publication differ in brackets only, and are left out together."""
    return source.partition(" (")[0]


def mean_error(errors: dict[str, list[float]]) -> float:
    """Return the mean absolute error, every source weighted equally."""
    return statistics.fmean(statistics.fmean(map(abs, values)) for values in errors.values())
