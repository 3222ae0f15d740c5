"""The result of a training, and the relative differences of two of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

#: The compared quantities, in the order of a report: losses and gradient norms of all steps; gradients of the first step, after clipping;
#: Adam's first moments and the weights after the last step. Moments are compared because Adam's updates are invariant to the scale of a
#: gradient, and the moments are not. With training.ema, "average" follows: that of the weights.
QUANTITIES = ("loss", "norm", "gradient", "moment", "weight")
#: What follows if the gradient of a weight is zero in exact arithmetic: its size relative to that of all weights, and how far rounding
#: errors, which Adam scales to updates of full size, have moved the weight, relative to the most that they can.
ZERO, DRIFT = "zero", "drift"
#: A gradient is zero if it is at most this fraction of that of all weights in fp64.
EXACT = 1e-11
#: Weight -> mask of its elements whose gradient is zero in exact arithmetic, None for all of them.
Zeros = Mapping[str, Tensor | None]
NO_ZEROS: Zeros = MappingProxyType({})
#: What follows the name of a weight of which only some elements are such.
PART = " (elements without a gradient)"


@dataclass
class Outcome:
    """What a training computed.

    Attributes:
        losses: mean loss of each step's global batch.
        norms: global gradient norm of each step before clipping.
        tensors: "gradient", "moment", "weight" and, with training.ema, "average" -> name in the full model -> unsharded tensor, fp32 or
            fp64.
        router_records: what every MoE layer of the plain loop recorded in each step (MoELayer.take_record); not compared.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, dict[str, Tensor]]
    router_records: list[list[Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one quantity.

    Attributes:
        value: of scalars |a - b| / |b|, of tensors the norm of the difference divided by the norm of the tensor. inf if elements are
            missing or not finite.
        where: the step (from 1), or the name of the weight.
    """

    value: float
    where: str


def differences(
    run: Outcome, reference: Outcome, *, together: bool = False, zero: Zeros = NO_ZEROS, drift: float = math.inf
) -> dict[str, Difference]:
    """Return the largest difference of every quantity.

    Args:
        run: a training.
        reference: the other one.
        together: compare all weights as one vector, not each by itself.
        zero: weights, or elements of them, whose gradient is zero in exact arithmetic, as that of a key's bias, since softmax is
            invariant to a shift of all scores; with rotary positions in a part of the dims, that of the other dims. Their relative
            differences are those of rounding errors. Compared are instead, as ZERO, their gradients and moments relative to those of all
            weights, and, as DRIFT, the difference of the weights relative to `drift`.
        drift: the largest difference that updates from rounding errors can cause.
    """
    run, reference = (_separated(outcome, zero) for outcome in (run, reference))
    names = frozenset(name if mask is None else f"{name}{PART}" for name, mask in zero.items())
    by_kind = {"loss": _of_scalars(run.losses, reference.losses), "norm": _of_scalars(run.norms, reference.norms)}
    by_kind |= {kind: _of_tensors(run.tensors[kind], values, together, names) for kind, values in reference.tensors.items()}
    quantities = {quantity: by_kind[quantity] for quantity in dict.fromkeys((*QUANTITIES, *by_kind))}
    return quantities | (_of_zeros(run, reference, sorted(names), drift) if names else {})


def largest_of_each(comparisons: Sequence[dict[str, Difference]]) -> dict[str, Difference]:
    """Return the largest difference of each quantity, of several comparisons."""
    return {name: max((comparison[name] for comparison in comparisons), key=lambda difference: difference.value) for name in comparisons[0]}


def zero_gradients(precise: Outcome) -> Zeros:
    """Return the weights and elements whose gradient is zero in exact arithmetic, from a training in fp64.

    Elements count in key biases only. Elsewhere a gradient of exactly zero, as that of a token that does not occur, has no rounding errors.
    """
    gradients = precise.tensors["gradient"]
    largest = EXACT * math.hypot(*(float(gradient.norm()) for gradient in gradients.values()))
    zeros: dict[str, Tensor | None] = {name: None for name, gradient in gradients.items() if float(gradient.norm()) <= largest}
    for name, gradient in gradients.items():
        if name not in zeros and name.endswith("attention.key.bias") and bool((mask := gradient.abs() <= largest).any()):
            zeros[name] = mask
    return zeros


def _separated(outcome: Outcome, zero: Zeros) -> Outcome:
    """Return an outcome in which the elements of `zero` that are a part of a weight are a tensor of their own."""
    masks = {name: mask for name, mask in zero.items() if mask is not None}
    tensors = {
        kind: values
        | {name: values[name][~mask] for name, mask in masks.items() if name in values}
        | {f"{name}{PART}": values[name][mask] for name, mask in masks.items() if name in values}
        for kind, values in outcome.tensors.items()
    }
    return replace(outcome, tensors=tensors)


def _of_zeros(run: Outcome, reference: Outcome, names: list[str], drift: float) -> dict[str, Difference]:
    """Return the differences of weights whose gradient is zero in exact arithmetic."""
    sizes = []
    for kind in ("gradient", "moment"):
        whole = math.hypot(*(float(values.norm()) for values in reference.tensors[kind].values()))
        sizes += [(_ratio(float(run.tensors[kind][name].norm()), whole), name) for name in names if name in run.tensors[kind]]
    before, after = reference.tensors["weight"], run.tensors["weight"]
    changes = [(_ratio(float((after[name] - before[name]).abs().max()), drift), name) for name in names if name in after]
    return {ZERO: _largest(sizes), DRIFT: _largest(changes)}


def _of_scalars(values: list[float], expected: list[float]) -> Difference:
    pairs = zip(values, expected, strict=True)
    return _largest((_ratio(abs(a - b), abs(b)), f"step {step}") for step, (a, b) in enumerate(pairs, 1))


def _of_tensors(values: dict[str, Tensor], expected: dict[str, Tensor], together: bool, zero: frozenset[str]) -> Difference:
    if values.keys() != expected.keys():
        return Difference(math.inf, f"weights of only one training: {', '.join(sorted(values.keys() ^ expected.keys()))}")
    names = [name for name in expected if name not in zero]
    sizes = {name: (float((values[name] - expected[name]).norm()), float(expected[name].norm())) for name in names}
    if together:
        return Difference(_ratio(*(math.hypot(*norms) for norms in zip(*sizes.values(), strict=True))), "all weights")
    return _largest((_ratio(*norms), name) for name, norms in sizes.items())


def _ratio(difference: float, size: float) -> float:
    """Return difference / size; 0 if both are 0, inf if the result is not a finite number."""
    if difference == 0:
        return 0.0
    ratio = difference / size if size else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def _largest(pairs: Iterable[tuple[float, str]]) -> Difference:
    value, where = max(pairs, key=lambda pair: pair[0])
    return Difference(value, where)
