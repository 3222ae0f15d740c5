"""Configuration of families that support the maximal update parametrization; models/mup.py has its rules. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob


@dataclass(frozen=True)
class MupConfig:
    """Fields of such a family: the sizes of the base model, at which muP equals the standard parametrization."""

    parametrization: str = knob(
        "standard",
        "how initial weights and learning rates depend on the width: not at all (standard), or such that the best learning rate of a "
        "narrow model is that of a wide one (mup: Yang et al. 2022)",
        choices=("standard", "mup"),
    )
    mup_base_width: int | None = knob(
        None, "mup: model.hidden of the base model, whose hyper-parameters this model has; the other widths grow in proportion", at_least=1
    )
    mup_base_head_width: int | None = knob(
        None, "mup: width of a head of the base model; default: that of this model, which has more heads", at_least=1
    )
    mup_base_depth: int | None = knob(
        None,
        "mup: model.layers of the base model, if the depth differs, too (CompleteP: Dey et al. 2025); default: no rule for the depth",
        at_least=1,
    )


def mup_violations(config: MupConfig) -> Iterator[Violation]:
    """Yield the rules between these fields that are violated."""
    if config.parametrization == "mup" and config.mup_base_width is None:
        rule = "is required with model.parametrization=mup"
        yield Violation("model.mup_base_width", None, rule, "set it to model.hidden of the model whose learning rate was tuned")
    if config.parametrization == "standard":
        for name in ("mup_base_width", "mup_base_head_width", "mup_base_depth"):
            if (value := getattr(config, name)) is not None:
                rule = "has no effect with model.parametrization=standard"
                yield Violation(f"model.{name}", value, rule, "set model.parametrization=mup, or leave it out")
