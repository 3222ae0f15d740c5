"""Wave lengths of rotary positions, and how they are stretched so that a model sees further than it was first trained to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """A choice of stretching, and its numbers.

    Attributes:
        kind: a key of SCALINGS.
        factor: how much further.
        original_positions: the length that the model was first trained at.
        low_frequency, high_frequency: of llama3: turns over the original length below which a wave is stretched whole, and above which
            it is left alone.
        beta_slow, beta_fast: the same of yarn, where whole dimensions are counted between them.
        mscale, mscale_all: of yarn: how the scores' temperature grows with the factor, in the tables and (DeepSeek) beside them.
        attention_factor: of yarn's tables, instead of what follows from the others; None for that.
    """

    kind: str = "none"
    factor: float = 1.0
    original_positions: int = 4096
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    mscale: float = 0.0
    mscale_all: float = 0.0
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        """Factor of the tables of cosines and sines (Peng et al. 2023, equation 22; DeepSeek's form when both mscales are set)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all:
            return magnitude(self.factor, self.mscale) / magnitude(self.factor, self.mscale_all)
        return magnitude(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """Further factor of the scores of latent attention (DeepSeek-V2, section 3.1.4): queries and keys of all dims are scaled."""
        return magnitude(self.factor, self.mscale_all) ** 2 if self.kind == "yarn" and self.mscale_all else 1.0


def magnitude(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1: how much longer queries and keys become (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(head_dim: int, theta: float, scaling: Scaling) -> Tensor:
    """Radians a position, fp32 (head_dim / 2,) on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return SCALINGS[scaling.kind](1.0 / theta**exponents, theta, scaling)


def _none(plain: Tensor, theta: float, scaling: Scaling) -> Tensor:  # noqa: ARG001 - as the others
    return plain


def _linear(plain: Tensor, theta: float, scaling: Scaling) -> Tensor:  # noqa: ARG001 - as the others
    """Positions are divided (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""
    return plain / scaling.factor


def _llama3(plain: Tensor, theta: float, scaling: Scaling) -> Tensor:  # noqa: ARG001 - as the others
    """Long waves are stretched, short ones not, those between in part (Llama 3.1's reference code)."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = ((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, theta: float, scaling: Scaling) -> Tensor:
    """The same along a ramp over dimensions (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2).

    As in the authors' code the ramp's ends are the whole dimensions around those where a wave makes beta turns.
    """
    head_dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        return head_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(dimension(scaling.beta_fast)), 0)
    last = min(math.ceil(dimension(scaling.beta_slow)), head_dim - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32, device="cpu") - first) / (last - first if last != first else 0.001)
    stretched = ramp.clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


SCALINGS = {"none": _none, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
