"""The gated delta rule by the Triton kernels of flash-linear-attention (Yang et al., https://github.com/fla-org/flash-linear-attention).

They compute what `chunked_delta_rule` does, in chunks of 64 tokens as well, in 16 bits with sums in fp32, and keep the states of the chunks
out of a loop in Python. Their documents of several lengths need those lengths on the host, which would wait for the GPU: here a document
begins with a decay that leaves nothing of the state before it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.layers.delta_rule import CHUNK
from pipeline.layers.recurrent import chunks_of
from pipeline.layers.uncompiled import uncompiled

#: Package on PyPI, and the one that it installs.
PACKAGE, _MODULE = "flash-linear-attention", "fla"
#: Logarithm of the decay before a document: 1e-14 of the state is left, less than fp32 resolves. A larger one rounds the sums of a chunk.
_RESET = -32.0


def installed() -> bool:
    """Whether the package is there."""
    return find_spec(_MODULE) is not None


@uncompiled  # as the kernels are
def fused_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    dtype: torch.dtype,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to a sequence; arguments and results as in chunked_delta_rule.

    Args:
        dtype: of queries, keys, values and outputs in the kernels; decays, betas and states are fp32.
    """
    if segments is not None:
        begins = F.pad(segments.diff(dim=1) != 0, (1, 0))
        log_decay = log_decay.masked_fill(begins[:, None, :, None], _RESET)
    # (batch, sequence, heads, width), as the layers compute them before they transpose.
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    decay, beta = log_decay.float().transpose(1, 2), beta.float().transpose(1, 2)
    state = None if state is None else state.float()
    if decay.shape[3] > 1:
        from fla.ops.kda import chunk_kda as kernels
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernels

        decay = decay.squeeze(3)
    outputs, after = kernels(q, k, v, decay, beta, scale=1.0, initial_state=state, output_final_state=True)
    return outputs.transpose(1, 2), after


@uncompiled
def planned_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    dtype: torch.dtype,
    segments: Tensor | None = None,  # noqa: ARG001 - a rule
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply matrices of the shapes of fused_delta_rule's, without its values: what the planner counts on the meta device.

    The kernels keep queries, keys and values, and compute the rest again in the backward pass.
    """
    q, k, v = (chunks_of(x.to(dtype), CHUNK).flatten(0, 2) for x in (q, k, v))

    def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k.transpose(1, 2)
        inverse, states = k @ keys, keys @ v
        corrections = inverse @ v - (inverse @ k) @ states
        return q @ states + (q @ keys) @ corrections

    shape = beta.shape
    outputs = checkpoint(products, q, k, v, use_reentrant=False, preserve_rng_state=False)
    outputs = outputs.unflatten(0, (*shape[:2], -1)).flatten(2, 3)[:, :, : shape[2]] * (log_decay[..., :1] + beta.unsqueeze(3)).to(dtype)
    return outputs, outputs.new_zeros(*shape[:2], k.shape[2], v.shape[2], dtype=torch.float32) if state is None else state
