"""Frequencies of rotary position embeddings, and their scaling for sequences longer than those of the original training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Method and parameters of RoPE scaling; Hugging Face's config.json calls them rope_scaling.

    Attributes:
        kind: a key of SCALINGS.
        factor: ratio of the new to the original context length.
        original_positions: context length of the original training, in tokens.
        low_frequency, high_frequency: llama3: a frequency with fewer rotations than the first over the original context is divided by
            `factor`, one with more than the second is unchanged.
        beta_slow, beta_fast: yarn: the same bounds.
        truncate: yarn: the dimensions of these bounds are rounded outward to whole ones.
        mscale, mscale_all: yarn: growth of the attention temperature with the factor, in the tables and (DeepSeek) in the softmax scale.
        attention_factor: yarn: factor of the tables; None derives it from the other parameters.
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
    truncate: bool = True

    @property
    def attention_scaling(self) -> float:
        """Factor of the cosine and sine tables (Peng et al. 2023, equation 22; DeepSeek's form if both mscales are set)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all)
        return yarn_mscale(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """Additional factor of the scores of multi-head latent attention (DeepSeek-V2, section 3.1.4): it scales all dims of q and k."""
        return yarn_mscale(self.factor, self.mscale_all) ** 2 if self.kind == "yarn" and self.mscale_all else 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 0.1 * mscale * ln(factor) + 1, the factor of queries and keys (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the frequencies in radians per position, fp32 (head_dim / 2,) on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return SCALINGS[scaling.kind](1.0 / theta**exponents, theta, scaling)


def _none(inv_freq: Tensor, theta: float, scaling: RopeScaling) -> Tensor:  # noqa: ARG001 - as the others
    return inv_freq


def _linear(inv_freq: Tensor, theta: float, scaling: RopeScaling) -> Tensor:  # noqa: ARG001 - as the others
    """Position interpolation: divide all frequencies by the factor (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""
    return inv_freq / scaling.factor


def _llama3(inv_freq: Tensor, theta: float, scaling: RopeScaling) -> Tensor:  # noqa: ARG001 - as the others
    """Divide low frequencies by the factor, keep high ones, interpolate between (Llama 3.1's reference code)."""
    rotations = scaling.original_positions * inv_freq / (2 * math.pi)
    smooth = ((rotations - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)).clamp(0, 1)
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq


def _yarn(inv_freq: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Interpolate along a linear ramp over the dimensions (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2).

    As in the authors' code, the ends of the ramp are the dimensions with beta rotations, rounded outward to whole dimensions. Those of
    gpt-oss are not rounded.
    """
    head_dim = 2 * len(inv_freq)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(len(inv_freq), dtype=torch.float32, device="cpu") - first) / (last - first if last != first else 0.001)
    ramp = ramp.clamp(0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


SCALINGS = {"none": _none, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
