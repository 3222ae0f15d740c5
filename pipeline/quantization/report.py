"""The report of a quantized export: bits per weight, sizes, error of the weights, perplexity before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QuantizationReport:
    """What quantization has changed.

    Attributes:
        quantize: stage.quantize.
        rounding: stage.rounding.
        parameters: number of weights of the model.
        quantized: number of them that are quantized; with GGUF all of them, its vectors included.
        bits: stored bits per quantized weight, with scales and zero points.
        bytes_before, bytes_after: of all weights, in stage.dtype and as exported.
        error: norm of the difference of the quantized weights, relative to their norm.
        perplexity_before, perplexity_after: on held_out_tokens targets of stage.held_out; None without it.
        held_out_tokens: number of targets.
    """

    quantize: str
    rounding: str
    parameters: int
    quantized: int
    bits: float
    bytes_before: int
    bytes_after: int
    error: float
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    held_out_tokens: int = 0

    def text(self) -> str:
        """One line for the log."""
        share = self.quantized / self.parameters
        parts = [
            f"{self.quantize}: {self.bits:.2f} bits per quantized weight ({share:.0%} of the weights)",
            f"{self.bytes_before / 1e6:.1f} -> {self.bytes_after / 1e6:.1f} MB",
            f"relative error of the weights {self.error:.2%}",
        ]
        if self.perplexity_before is not None:
            parts.append(f"perplexity {self.perplexity_before:.4f} -> {self.perplexity_after:.4f} on {self.held_out_tokens:,} tokens")
        return ", ".join(parts)


class ErrorSum:
    """Relative error of several tensors."""

    def __init__(self) -> None:
        self._squares, self._total = 0.0, 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add a tensor and its quantized values."""
        self._squares += float((after.float() - before.float()).square().sum(dtype=torch.float64))
        self._total += float(before.float().square().sum(dtype=torch.float64))

    @property
    def relative(self) -> float:
        """Norm of the differences over the norm of the tensors."""
        return float((self._squares / self._total) ** 0.5) if self._total else 0.0
