"""Differences between the layout and the plain loop in one precision, and how large they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pipeline.certification.comparison import DRIFT, NO_ZEROS, Difference, Outcome, Zeros, differences, largest_of_each
from pipeline.config import phases
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.training.lr_schedule import learning_rate

#: Smallest tolerance in fp32, as that of tools/numerics.
FP32_FLOOR = 1e-5
#: The tolerance is this multiple of the rounding error of the plain loop, if that is larger than the floor.
FP32_FACTOR = 10
#: Largest tolerance: above it, a wrong gradient would pass.
FP32_CEILING = 1e-3
#: With Lion, whose signs of numbers close to 0 are those of rounding errors: the tolerance is at least so many times the difference of a
#: plain loop that takes one other sign of every weight. The norm of a difference grows with the root of their number.
SIGNS = 2
#: Largest drift of a weight whose gradient is zero, as a multiple of largest_drift, which Lion reaches up to rounding.
LARGEST_DRIFT = 1.001
#: As FP32_FACTOR, for lower precisions: the tolerance is this multiple of the largest difference of a perturbed run.
LOW_FACTOR = 4
#: The same for the loss and the norm: a few numbers, which estimate the size of rounding errors less well than all weights do.
SCALAR_FACTOR = 10
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
        differences: quantity -> largest difference.
    """

    dtype: str
    method: str
    rounding: dict[str, Difference]
    tolerances: dict[str, float]
    differences: dict[str, Difference]

    def failures(self) -> list[str]:
        """Return a line for every quantity above its tolerance."""
        return [
            f"{name} in {self.dtype}: differs by {difference.value:.1e} ({difference.where}), tolerance {self.tolerances[name]:.1e}"
            for name, difference in self.differences.items()
            if not difference.value <= self.tolerances[name]
        ]


def largest_drift(config: RunConfig) -> float:
    """Return the most by which two runs can move an element of a weight apart, each in its updates.

    With Muon the weights whose gradient is zero are vectors, such as a key's bias, which Adam updates.
    """
    optimizers = [phases.at(config, step).optimizer for step in range(config.training.steps)]
    kind = OPTIMIZERS[config.optimizer.name]
    return 2 * sum(learning_rate(step, now, config.training) * kind.largest_update(now) for step, now in enumerate(optimizers))


def compare_fp32(
    run: Outcome,
    reference: Outcome,
    rounding: dict[str, Difference],
    zero: Zeros = NO_ZEROS,
    drift: float = math.inf,
    signs: Mapping[str, Difference] = MappingProxyType({}),
) -> Comparison:
    """Compare in fp32: the same arithmetic in another order, so that differences are rounding errors.

    Args:
        run: in the layout.
        reference: the plain loop.
        rounding: the differences that rounding errors make to the plain loop.
        zero, drift: as in differences.
        signs: with Lion, the differences that one other sign of every weight makes.
    """
    tolerances = {name: min(max(FP32_FLOOR, FP32_FACTOR * difference.value), FP32_CEILING) for name, difference in rounding.items()}
    method = (
        f"layout and plain loop in fp32; tolerance {FP32_FLOOR:g}, or {FP32_FACTOR} x the rounding error of the plain loop (its largest "
        f"difference from fp64 and, above that, from runs with weights changed by rounding errors), at most {FP32_CEILING:g}"
    )
    if signs:
        tolerances |= {name: min(max(tolerances[name], SIGNS * difference.value), FP32_CEILING) for name, difference in signs.items()}
        method += f"; and {SIGNS} x the difference of a plain loop that takes one other sign of every weight"
    if zero:
        tolerances[DRIFT] = LARGEST_DRIFT
        method += f"; the gradient of {', '.join(sorted(zero))} is zero in exact arithmetic, and is compared with that of all weights"
    return Comparison("fp32", method, rounding, tolerances, differences(run, reference, zero=zero, drift=drift))


def compare_low(dtype: str, run: Outcome, reference: Outcome, perturbed: Sequence[Outcome]) -> Comparison:
    """Compare in a low precision: the order of additions changes the rounding of every activation, and in MoE layers also the routing.

    Args:
        dtype: for readers.
        run: in the layout.
        reference: the plain loop in the same precision.
        perturbed: the plain loop with weights changed by rounding errors in every step, and in the next higher precision.
    """
    rounding = largest_of_each([differences(other, reference, together=True) for other in perturbed])
    factors = {"loss": SCALAR_FACTOR, "norm": SCALAR_FACTOR}
    tolerances = {name: min(factors.get(name, LOW_FACTOR) * difference.value, LOW_CEILING) for name, difference in rounding.items()}
    method = (
        f"layout in {dtype}, plain loop in {dtype} with fp32 gradients and master weights, all weights together; tolerance "
        f"{LOW_FACTOR} ({SCALAR_FACTOR} for loss and norm) x the largest difference of {len(perturbed)} perturbed runs of the plain loop: "
        f"the next higher precision, and weights changed by rounding errors; at most {LOW_CEILING:g}; finds wrong scales and lost "
        "updates, while the comparison in fp32 finds the wrong gradient of a single weight"
    )
    return Comparison(dtype, method, rounding, tolerances, differences(run, reference, together=True))
