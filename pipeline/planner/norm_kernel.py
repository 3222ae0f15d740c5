"""The kernel of RMSNorm on a GPU, for the trace: on the meta device PyTorch composes it of other operators, which save more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("planner::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm (..., hidden) of x and 1 / root mean square (..., 1) in fp32; only the meta device is supported."""
    raise NotImplementedError


@torch.library.custom_op("planner::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight from that of the norm; only the meta device is supported."""
    raise NotImplementedError


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - arguments of the operator
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - arguments of the operator
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = rms_norm_backward(grad, *ctx.saved_tensors)
    return grads


rms_norm.register_autograd(_differentiate, setup_context=_save)


@contextmanager
def norm_kernels() -> Iterator[None]:
    """While it is active, RMSNorm is one operator where CUDA has a kernel: the weight has the dtype of the input.

    The function is replaced: modes of torch's functions are not active while a checkpoint recomputes.
    """
    composed = F.rms_norm

    def rms_norm_of(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is None or weight.dtype != input.dtype:
            return composed(input, list(normalized_shape), weight, eps)
        result: Tensor = rms_norm(input, weight)[0]
        return result

    F.rms_norm = rms_norm_of
    try:
        yield
    finally:
        F.rms_norm = composed
