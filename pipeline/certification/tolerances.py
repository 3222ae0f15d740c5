"""Differences between the layout and the plain loop in one precision, and how large they may be."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.certification.comparison import Difference, Outcome, differences

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
