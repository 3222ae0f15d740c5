"""The maximal update parametrization (muP): the best learning rate of a narrow model is that of a wide one.

Yang et al. 2022 (https://arxiv.org/abs/2203.03466), for Adam; Muon below. With m = width / base width:

    weight                                    initial standard deviation   learning rate   table
    embeddings, norms, biases                 1                            1               3 and 8, "input weights & all biases"
    matrices of the blocks                    1 / sqrt(m)                  1 / m           3 and 8, "hidden weights"
    output head, routers of experts           1 / m                        1 / m           3, "output weights"
    output head, tied to the embedding        1, logits times 1 / m        1               8, "output weights"

These are factors of what the standard parametrization has. Scores of attention are divided by the width d of a head instead of its square
root (their definition 4.1). The experts of a layer grow in width, not in number (Malasnicki et al. 2025, https://arxiv.org/abs/2508.09752),
so that a router has as many outputs at every width. With CompleteP (Dey et al. 2025, https://arxiv.org/abs/2505.01618, table 1, alpha = 1),
outputs of attention and feed-forward are multiplied by base depth / depth, and initial values do not depend on the depth.

Models have no multipliers, so that stock classes compute the same logits from the same weights. A weight W with a multiplier c is the
weight V = c W, whose initial standard deviation and learning rate in Adam are c times those of W (lemma J.1 of Yang et al.): both are
equal but for the term optimizer.eps. The multiplier

- of the logits is part of the final norm, of a tied head,
- of the scores, sqrt(base d / d) beside the 1 / sqrt(d) of the model, of the query projection, or of the norm of queries,
- of a layer's output, of the output projection of attention and the down projection of the feed-forward.

The update of a hidden matrix (fan-out, fan-in) must have a spectral norm of sqrt(fan-out / fan-in) at every width, up to a constant (Yang
et al. 2023, https://arxiv.org/abs/2310.17813, condition 1). In Muon that norm is the factor of optimizer.muon_adjust_lr: with `original` it
depends on the ratio of both only, so that the rate in the table is 1, not 1 / m; with `match_rms_adamw` it grows with sqrt(m), so that the
rate is 1 / sqrt(m). Its update does not depend on the size of the gradient, so that the multipliers are those in Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Constant, Init
from pipeline.models.config import Sizes


@dataclass(frozen=True)
class MupConfig(Sizes):
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

    def violations(self) -> list[Violation]:
        """See Sizes."""
        wrong = super().violations()
        if self.parametrization == "mup" and self.mup_base_width is None:
            rule = "is required with model.parametrization=mup"
            wrong.append(Violation("model.mup_base_width", None, rule, "set it to model.hidden of the model whose learning rate was tuned"))
        for name in ("mup_base_width", "mup_base_head_width", "mup_base_depth") if self.parametrization == "standard" else ():
            if (value := getattr(self, name)) is not None:
                rule = "has no effect with model.parametrization=standard"
                wrong.append(Violation(f"model.{name}", value, rule, "set model.parametrization=mup, or leave it out"))
        return wrong


def initial(recipe: Callable[[Any, str], float | None]) -> Callable[[Any, str], Init]:
    """Return the initial values of a family with muP: Family.initial_std.

    Args:
        recipe: those of the standard parametrization: (configuration, name of a weight) -> standard deviation; None for constants.
    """

    def initial_std(config: Any, name: str) -> Init:
        std, (factor, _) = recipe(config, name), _factors(config, name)
        if std is not None:
            return std * factor
        return None if factor == 1 or name.endswith(".bias") else Constant(factor)

    return initial_std


def rate(config: Any, name: str) -> float:
    """Return the learning rate of a weight, as a factor of optimizer.lr: Family.rate.

    Args:
        config: of a family with the fields of MupConfig.
        name: of the weight in the full model. Adapters (LoRA) have the standard rate.
    """
    return _factors(config, name)[1]


def muon_rate(config: Any, adjust_lr: str) -> float:
    """Return the learning rate of hidden matrices in Muon, over that in Adam, which `rate` returns.

    Args:
        config: of any family.
        adjust_lr: optimizer.muon_adjust_lr.
    """
    if getattr(config, "parametrization", "standard") == "standard":
        return 1.0
    width = config.hidden / config.mup_base_width
    return float(width if adjust_lr == "original" else math.sqrt(width))


def _factors(config: Any, name: str) -> tuple[float, float]:
    """The initial standard deviation (or the initial value of a norm) and the learning rate, over those of the standard parametrization."""
    layer, _, leaf = name.rpartition(".")
    if config.parametrization == "standard" or layer.endswith(".lora"):
        return 1.0, 1.0
    width = config.hidden / config.mup_base_width
    if layer == "head" or layer.endswith(".router"):
        return 1 / width, 1 / width
    multiplier, depth = _multiplier(config, name if layer.endswith(".experts") else layer, width)
    if leaf == "bias" or layer.endswith("norm") or layer.startswith("embed."):
        return multiplier, multiplier
    return multiplier * depth / math.sqrt(width), multiplier / width


def _multiplier(config: Any, layer: str, width: float) -> tuple[float, float]:
    """The multiplier of a layer, and the factor by which the standard initial values decrease with the depth, which is taken back."""
    if layer == "norm" and config.tie_embeddings:
        return 1 / width, 1.0
    scores = ".attention.query_norm" if getattr(config, "query_key_norm", False) else ".attention.query"
    if layer.endswith(scores) and config.mup_base_head_width is not None:
        return math.sqrt(config.mup_base_head_width / config.head_dim), 1.0
    if layer.endswith((".attention.output", ".mlp.down", ".experts.down")) and config.mup_base_depth is not None:
        return config.mup_base_depth / config.layers, math.sqrt(config.layers / config.mup_base_depth)
    return 1.0, 1.0
