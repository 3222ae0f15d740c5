"""Where a difference begins: the first step and pass, and in the backward pass the weight and the rank, from what the comparison has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from pipeline.certification.comparison import Outcome
from pipeline.certification.shapes import pieces_by_rank
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.parallel.parallelize import partition_model


def begins(
    config: RunConfig,
    world_size: int,
    run: Outcome,
    reference: Outcome,
    tolerances: dict[str, float],
    first_module: Callable[[float], str] = lambda _: "",
) -> str:
    """Return where a training in a layout first differs from the plain loop, for readers; empty if nothing differs.

    The loss of a step is computed before its gradients, and the gradient of a later module before that of an earlier one.

    Args:
        config: of both.
        world_size: of the layout.
        run: in the layout.
        reference: the plain loop.
        tolerances: quantity -> largest difference that is a rounding error.
        first_module: called with a tolerance if the first loss differs: returns the module and the rank whose output differs, if it finds
            one, and by how much.
    """
    for step, (loss, expected) in enumerate(zip(run.losses, reference.losses, strict=True), 1):
        if (value := _relative(abs(loss - expected), abs(expected))) > tolerances["loss"]:
            module = first_module(tolerances["gradient"]) if step == 1 else ""
            return f"step {step}, forward, {module}" if module else f"step {step}, forward: the loss differs by {value:.1e}"
        if step == 1 and (text := _in_backward(config, world_size, run, reference, tolerances["gradient"])):
            return f"step 1, backward, {text}"
        norm, expected = run.norms[step - 1], reference.norms[step - 1]
        if (value := _relative(abs(norm - expected), abs(expected))) > tolerances["norm"]:
            return f"step {step}, gradient norm: differs by {value:.1e}"
    for kind in ("moment", "weight", "average"):
        for name, values in reference.tensors.get(kind, {}).items():
            actual = run.tensors[kind].get(name)
            if actual is not None and (value := _of_piece(actual, values)) > tolerances[kind]:
                return f"an update of the optimizer, {name} ({kind}): {value:.1e}"
    return ""


def _in_backward(config: RunConfig, world_size: int, run: Outcome, reference: Outcome, tolerance: float) -> str:
    """Return the last module whose gradient differs in the first step, which the backward pass reaches first, and the rank."""
    ours, theirs = (_before_clipping(config, outcome) for outcome in (run, reference))
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    layout = Layout.of(config, world_size)
    alone = replace(layout, pipeline=1, data=1, expert=1, context=1, tensor=1, stages_per_rank=1, schedule="1f1b", blocks=())
    whole = {piece.name: piece for piece in partition_model(config, alone, 0).pieces.values()}
    for name in reversed(theirs):
        gradient, expected = ours.get(name), theirs[name]
        if gradient is None or float(expected.norm()) <= tolerance * largest or name not in whole:
            continue
        value = _relative(float((gradient - expected).norm()), float(expected.norm()))
        if not value > tolerance:
            continue
        parts = pieces_by_rank(layout, whole[name])
        sliced = next(iter(parts.values())).slices
        if not sliced:
            return f"{name}: {value:.1e}"
        errors = {where: _of_piece(piece.narrow(gradient), piece.narrow(expected)) for where, piece in parts.items()}
        tensor, expert = max(errors, key=lambda where: errors[where])
        axes = {"tensor": tensor, "expert": expert}
        ranks = ", ".join(f"{s.axis} rank {axes[s.axis]}" for s in sliced)
        return f"{name}, {ranks}: {errors[tensor, expert]:.1e}"
    return ""


def _before_clipping(config: RunConfig, outcome: Outcome) -> dict[str, Tensor]:
    """Return the gradients of the first step without the factor of clipping, in which one wrong gradient changes all."""
    largest = config.optimizer.gradient_clipping
    factor = max(1.0, outcome.norms[0] / largest) if largest else 1.0
    return {name: gradient * factor for name, gradient in outcome.tensors["gradient"].items()}


def _of_piece(actual: Tensor, expected: Tensor) -> float:
    return _relative(float((actual - expected).norm()), float(expected.norm()))


def _relative(difference: float, size: float) -> float:
    """Return difference / size; 0 if both are 0, inf if it is not finite."""
    if difference == 0:
        return 0.0
    ratio = difference / size if size else math.inf
    return ratio if math.isfinite(ratio) else math.inf
