"""The gated delta rule in chunks (Yang et al. 2024, Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.2).

Each head has a state S, a matrix (key_dim, value_dim) that maps keys to values. A token decays it and corrects what it returns for its key:

    S <- a S,    S <- S + b k (v - k^T S),    o = q^T S        (a = exp(log_decay), b = beta)

Within a chunk, all corrections are the solution of one triangular system, and only the states between the chunks are computed one after
the other. `u` and `w` below are the paper's: the corrections are u - w S with the state S before the chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers.uncompiled import uncompiled

#: Tokens of a chunk, as in the authors' kernels.
CHUNK = 64


@uncompiled  # a loop over all chunks, which the compiler would unroll
def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to a sequence.

    Args:
        q: (batch, heads, sequence, key_dim), scaled.
        k: (batch, heads, sequence, key_dim), of length one.
        v: (batch, heads, sequence, value_dim).
        log_decay: (batch, heads, sequence), at most 0.
        beta: (batch, heads, sequence), from 0 to 1.
        segments: int (batch, sequence), not decreasing: the state is reset where it changes. None for no reset.
        state: (batch, heads, key_dim, value_dim), before the first token; zero when None.
        chunk: tokens of a chunk.

    Returns:
        The outputs (batch, heads, sequence, value_dim), and the state after the last token.
    """
    length = q.shape[2]
    chunk = min(chunk, length)
    q, k, v = (_chunks(x, chunk) for x in (q, k, v))
    log_decay, beta = (_chunks(x, chunk) for x in (log_decay, beta))
    total = log_decay.cumsum(dim=3)  # log of the decay from the start of the chunk
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    before, to_end = total.exp(), (total[..., -1:] - total).exp()
    across = before[..., -1]
    if segments is not None:
        parts = _segment_chunks(segments, chunk)
        first = torch.cat([parts[:, :, :1, 0], parts[:, :, :-1, -1]], dim=2)  # the segment of the state before each chunk
        later = later | (parts.unsqueeze(4) != parts.unsqueeze(3))
        before = before * (parts == first.unsqueeze(3))
        to_end = to_end * (parts == parts[..., -1:])
        across = across * (parts[..., -1] == first)
    # The exponents of other pairs may be positive and large.
    between = (total.unsqueeze(4) - total.unsqueeze(3)).masked_fill(later, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(4)
    system = k_beta @ k.transpose(3, 4) * between
    right = torch.cat([v * beta.unsqueeze(4), k_beta * before.unsqueeze(4)], dim=4)
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([v.shape[4], k.shape[4]], dim=4)
    scores = q @ k.transpose(3, 4) * between
    q_before, k_to_end = q * before.unsqueeze(4), (k * to_end.unsqueeze(4)).transpose(3, 4)
    state = v.new_zeros(*v.shape[:2], k.shape[4], v.shape[4]) if state is None else state
    outputs = []
    for index in range(q.shape[2]):
        corrections = u[:, :, index] - w[:, :, index] @ state
        outputs.append(q_before[:, :, index] @ state + scores[:, :, index] @ corrections)
        state = state * across[:, :, index, None, None] + k_to_end[:, :, index] @ corrections
    return torch.cat(outputs, dim=2)[:, :, :length], state


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """(batch, heads, sequence, ...) -> (batch, heads, chunks, chunk, ...), with zeros at the end: tokens that change nothing."""
    missing = -x.shape[2] % chunk
    return F.pad(x, [0, 0] * (x.dim() - 3) + [0, missing]).unflatten(2, (-1, chunk))


def _segment_chunks(segments: Tensor, chunk: int) -> Tensor:
    """(batch, sequence) -> (batch, 1, chunks, chunk); the tokens at the end are of the last segment."""
    missing = -segments.shape[1] % chunk
    return torch.cat([segments, segments[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, chunk)).unsqueeze(1)
