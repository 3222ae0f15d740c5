"""GPTQ (Frantar et al. 2023, https://arxiv.org/abs/2210.17323): rounding that minimizes the error of a layer's outputs on given inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.common.progress import Progress
from pipeline.layers.lora import linear_layers
from pipeline.layers.uniform_quantization import QuantizedMatrix, Scheme, range_parameters, round_to_codes
from pipeline.quantization.blocks import CPU, BlockByBlock

#: Added to the diagonal of the Hessian, relative to its mean, as in the paper.
DAMPING = 0.01
#: Columns whose errors are collected before all columns behind them are updated.
_COLUMNS = 128


class Hessian:
    """The sum of x x^T over the inputs x of a layer: the second derivative of half its squared output error, the same for each row."""

    def __init__(self, layer: nn.Linear) -> None:
        self.value = torch.zeros(layer.in_features, layer.in_features, device=layer.weight.device)
        self._handle = layer.register_forward_pre_hook(self._add)

    def _add(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).float()
        self.value.addmm_(rows.t(), rows)

    def remove(self) -> None:
        """Stop collecting."""
        self._handle.remove()


def solve_layer(weight: Tensor, hessian: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    """Quantize a weight column by column; the columns behind each one compensate its error.

    Args:
        weight: (output, input).
        hessian: (input, input), as Hessian.value.
        scheme: not per tensor. The scale of a group is that of its weights when its first column is reached.
        dtype: dtype in which scales are stored.
    """
    weight, inputs = weight.float().clone(), weight.shape[1]
    group = scheme.group or inputs
    factor = _inverse_factor(hessian)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    parameters: list[tuple[Tensor, Tensor]] = []
    for start in range(0, inputs, _COLUMNS):
        stop = min(start + _COLUMNS, inputs)
        errors = torch.zeros(weight.shape[0], stop - start, device=weight.device)
        for column in range(start, stop):
            if column % group == 0:
                # Within a block of columns, those behind `stop` have not been updated yet.
                ahead = weight[:, column : column + group].clone()
                if column + group > stop and column > start:
                    ahead[:, stop - column :] -= errors[:, : column - start] @ factor[start:column, stop : column + group]
                parameters.append(range_parameters(ahead, Scheme(scheme.bits, scheme.symmetric), dtype))
            scale, zero_point = parameters[-1]
            now = weight[:, column : column + 1]
            codes[:, column : column + 1] = round_to_codes(now, scale, zero_point, scheme)
            rounded = (codes[:, column : column + 1].float() - zero_point.float()) * scale.float()
            error = (now - rounded) / factor[column, column]
            weight[:, column:stop] -= error @ factor[column : column + 1, column:stop]
            errors[:, column - start] = error[:, 0]
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    scales, zero_points = zip(*parameters, strict=True)
    return QuantizedMatrix(codes, torch.cat(scales, dim=1), torch.cat(zero_points, dim=1))


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian. Inputs that are always 0 get a diagonal of their own."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    damped = hessian + torch.diag(torch.where(diagonal == 0, mean, DAMPING * mean))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped.double())), upper=True).float()


def solve(model: BlockByBlock, sequences: Tensor, scheme: Scheme, dtype: torch.dtype) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Quantize the linear layers of a decoder, block by block: each block sees the outputs of the quantized blocks before it.

    Args:
        model: with the original weights.
        sequences: calibration tokens, int64 (sequences, length).
        scheme: how matrices are quantized, not per tensor.
        dtype: dtype in which scales are stored.

    Yields:
        Each layer and its quantized weight, on the CPU.
    """
    hidden = model.embed(sequences)
    with Progress(len(model), "GPTQ", "blocks") as progress:
        for name, block in model.blocks():
            yield from _solve_block(model, name, block, hidden, scheme, dtype)
            progress.advance(1, name)


def _solve_block(
    model: BlockByBlock, name: str, block: nn.Module, hidden: list[Tensor], scheme: Scheme, dtype: torch.dtype
) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Quantize the layers of a block, and replace its inputs by the outputs of the quantized block."""
    layers = dict(linear_layers(block))
    hessians = {layer: Hessian(linear) for layer, linear in layers.items()}
    model.apply(block, hidden, keep=False)
    for layer, linear in layers.items():
        hessian = hessians.pop(layer)
        hessian.remove()
        solved = solve_layer(linear.weight, hessian.value, scheme, dtype)
        linear.weight = nn.Parameter(solved.dequantize(), requires_grad=False)  # not in place: the weights may have others' memory
        yield f"{name}.{layer}", QuantizedMatrix(*(part.to(CPU) for part in (solved.codes, solved.scale, solved.zero_point)))
    model.apply(block, hidden)
