"""Compares a kernel with a plain formula in fp64, forward and backward; bounds come from the formula's own rounding in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: A kernel may have this multiple of the error of the plain formula in its dtype. FlashAttention's own tests allow 2, plus a constant.
FACTOR = 3.0
#: A relative error that always passes: a rounding of the result, and in fp32 the tolerance of tools/numerics.
FLOOR = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-5}

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Compared:
    """The largest error of a kernel in relation to its bound.

    Attributes:
        error: norm of the difference divided by the norm of the exact tensor.
        bound: largest error that passes.
        where: the output, or the input whose gradient it is.
    """

    error: float
    bound: float
    where: str


def compare(
    kernel: Function, formula: Function, inputs: dict[str, Tensor], dtype: torch.dtype, *, backward: bool = True, slack: float = 1.0
) -> Compared:
    """Compare output and gradients of a kernel in a dtype with a formula in fp64 on the same, rounded inputs.

    Args:
        kernel: function of the inputs, in order.
        formula: the same function, unfused.
        inputs: name -> floating-point tensor.
        dtype: of the kernel.
        backward: whether gradients are compared.
        slack: factor of the errors that pass.
    """
    rounded = [tensor.to(dtype) for tensor in inputs.values()]
    exact = _run(formula, [tensor.double() for tensor in rounded], backward)
    plain = _errors(_run(formula, rounded, backward), exact)
    found = _errors(_run(kernel, rounded, backward), exact)
    names = ("output", *(f"gradient of {name}" for name in inputs if backward))
    bounds = [slack * max(FLOOR[dtype], FACTOR * error) for error in plain]
    # nan is the worst.
    worst = max(range(len(names)), key=lambda at: found[at] / bounds[at] if found[at] == found[at] else float("inf"))
    return Compared(found[worst], bounds[worst], names[worst])


def _run(function: Function, inputs: Sequence[Tensor], backward: bool) -> list[Tensor]:
    """Return the output and, if asked for, the gradients of the inputs."""
    if not backward:
        with torch.no_grad():
            return [function(*inputs)]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
