"""The gated delta rule in chunks (Yang et al. 2024, Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.2).

Each head has a state S, a matrix (key_dim, value_dim) that maps keys to values. A token decays it and corrects what it returns for its key:

    S <- a S,    S <- S + b k (v - k^T S),    o = q^T S        (a = exp(log_decay), b = beta)

The decay is a number, or one for each row of S: a is then a diagonal matrix (Kimi Team 2025, https://arxiv.org/abs/2510.26692, section 3).

Within a chunk, all corrections are the solution of one triangular system, and only the states between the chunks are computed one after
the other. `u` and `w` below are the paper's: the corrections are u - w S with the state S before the chunk.

Any part of a sequence thus maps the state S before it to T S + Z, with a transition T (key_dim, key_dim) and the state Z that follows from
a state of zeros. The state before a part is that of the composed maps of the parts before it, which may be computed at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.layers.recurrent import StateBefore, chunks_of, decays_between, segment_chunks
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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to a sequence.

    Args:
        q: (batch, heads, sequence, key_dim), scaled.
        k: (batch, heads, sequence, key_dim), of length one.
        v: (batch, heads, sequence, value_dim).
        log_decay: (batch, heads, sequence, 1), or (batch, heads, sequence, key_dim) for a decay of each row of the state; at most 0.
        beta: (batch, heads, sequence), from 0 to 2; above 1 the correction reverses the sign of what the state returns.
        segments: int (batch, sequence), not decreasing: the state is reset where it changes. None for no reset.
        state: (batch, heads, key_dim, value_dim), before the first token; zero when None.
        chunk: tokens of a chunk; CHUNK when None.

    Returns:
        The outputs (batch, heads, sequence, value_dim), and the state after the last token.
    """
    solved = _solve(q, k, v, log_decay, beta, segments, None, chunk)
    state = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    before, corrections = [], []
    for u, w, k_to_end, across in _each(solved.u, solved.w, solved.k_to_end, solved.across):
        before.append(state)
        corrections.append(u - w @ state)
        state = state * across + k_to_end @ corrections[-1]
    return solved.outputs(torch.stack(before, dim=2), torch.stack(corrections, dim=2), q.shape[2]), state


@uncompiled  # as above
def delta_rule_of_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state_before: StateBefore,
    *,
    segments: Tensor | None = None,
    segment_before: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Apply the gated delta rule to a part of a sequence, whose state follows from the maps of the parts before it.

    Args:
        q, k, v, log_decay, beta, segments, chunk: as in chunked_delta_rule.
        state_before: returns the state before the part, (batch, heads, key_dim, value_dim), from the part's own map: the transition
            (batch, heads, key_dim, key_dim), and the state (batch, heads, key_dim, value_dim) after a part that begins with zeros.
        segment_before: int (batch,), the segment of the token before the part; that of the first token when None.

    Returns:
        The outputs, (batch, heads, sequence, value_dim).
    """
    solved = _solve(q, k, v, log_decay, beta, segments, segment_before, chunk)
    batch, heads, _, _, value_dim = solved.u.shape
    key_dim = k.shape[3]
    identity = torch.eye(key_dim, dtype=v.dtype, device=v.device).expand(batch, heads, -1, -1)
    # The transition and the state from zeros, side by side: a transition is the state of a part without values that begins with one.
    both, before = torch.cat([identity, v.new_zeros(batch, heads, key_dim, value_dim)], dim=3), []
    for u, w, k_to_end, across in _each(F.pad(solved.u, (key_dim, 0)), solved.w, solved.k_to_end, solved.across):
        before.append(both)
        both = both * across + k_to_end @ (u - w @ both)
    transitions, states = torch.stack(before, dim=2).split([key_dim, value_dim], dim=4)
    state = states + transitions @ state_before(*both.split([key_dim, value_dim], dim=3)).unsqueeze(2)
    return solved.outputs(state, solved.u - solved.w @ state, q.shape[2])


class _Solved(NamedTuple):
    """What the chunks compute without a state, (batch, heads, chunks, ...).

    Attributes:
        u: (..., chunk, value_dim), the corrections without a state.
        w: (..., chunk, key_dim), what a state takes off them.
        scores: (..., chunk, chunk), between queries and keys.
        q_before: (..., chunk, key_dim), the queries that read the state.
        k_to_end: (..., key_dim, chunk), the keys that change it.
        across: (..., 1 or key_dim, 1), the decay of the state.
    """

    u: Tensor
    w: Tensor
    scores: Tensor
    q_before: Tensor
    k_to_end: Tensor
    across: Tensor

    def outputs(self, states: Tensor, corrections: Tensor, length: int) -> Tensor:
        """Return the outputs of the first `length` tokens, from the states before the chunks and their corrections."""
        return (self.q_before @ states + self.scores @ corrections).flatten(2, 3)[:, :, :length]


def _solve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    segment_before: Tensor | None,
    chunk: int | None,
) -> _Solved:
    """Solve the systems of all chunks; arguments as in delta_rule_of_part."""
    chunk = min(CHUNK if chunk is None else chunk, q.shape[2])
    by_row = log_decay.shape[3] > 1
    if by_row:
        chunk = 1 << (chunk - 1).bit_length()  # it is divided into halves
    q, k, v, log_decay, beta = (chunks_of(x, chunk) for x in (q, k, v, log_decay, beta.unsqueeze(3)))
    apart = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    before, to_end = log_decay.cumsum(dim=3).exp(), _sums_after(log_decay).exp()  # the decays from the start of the chunk, and to its end
    across = before[..., -1, :]
    if segments is not None:
        parts, first = segment_chunks(segments, chunk, segment_before)
        apart = apart | (parts.unsqueeze(4) != parts.unsqueeze(3))
        before = before * (parts == first.unsqueeze(3)).unsqueeze(4)
        to_end = to_end * (parts == parts[..., -1:]).unsqueeze(4)
        across = across * (parts[..., -1] == first).unsqueeze(3)
    k_beta = k * beta
    if by_row:
        scores, overlaps = (x.masked_fill(apart, 0) for x in decayed_products(q, k_beta, k, log_decay))
    else:
        between = decays_between(log_decay.squeeze(4), apart)
        scores, overlaps = (x @ k.transpose(3, 4) * between for x in (q, k_beta))
    inverse = unit_lower_inverse(overlaps.tril(-1))
    u, w = inverse @ (v * beta), inverse @ (k_beta * before)
    return _Solved(u, w, scores, q * before, (k * to_end).transpose(3, 4), across.unsqueeze(4))


def decayed_products(q: Tensor, k_beta: Tensor, k: Tensor, log_decay: Tensor) -> list[Tensor]:
    """Return the products of the rows of q, and of k_beta, with keys that have decayed since, (..., i, j); 0 for later keys j > i.

    That is the sum over c of q_ic k_jc exp(the sum of log_decay_c after j up to i). As a product of two matrices, it needs a point in time
    between j and i: with one before both, a factor overflows. Of blocks of 2, 4, 8, ... tokens, the rows of the later half meet the keys of
    the earlier half at the middle, and no factor is above 1. All blocks are computed at once, by products of full matrices: a GPU computes
    those faster than products of many small blocks.

    The decayed rows of all levels are 5 log2(n) tensors of the size of q: the backward pass computes them again, level by level.

    Args:
        q, k_beta, k, log_decay: (..., n, key_dim), where n is a power of two.
    """
    products = [(x * k).sum(dim=-1).diag_embed() for x in (q, k_beta)]
    for level in range((k.shape[-2] - 1).bit_length()):
        of_level = checkpoint(_between_halves, q, k_beta, k, log_decay, level, use_reentrant=False, preserve_rng_state=False)
        products = [product + more for product, more in zip(products, of_level, strict=True)]
    return products


def _between_halves(q: Tensor, k_beta: Tensor, k: Tensor, log_decay: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Return such products of the later half of each block of 2^(level + 1) tokens with its earlier half, (..., n, n), and zeros."""
    early, late = log_decay.unflatten(-2, (-1, 2, 1 << level)).unbind(-3)
    none, until, since = torch.zeros_like(early), _sums_after(early).exp(), late.cumsum(dim=-2).exp()
    until, since = (torch.stack(halves, dim=-3).flatten(-4, -2) for halves in ((until, none), (none, since)))
    index = torch.arange(k.shape[-2], device=k.device)
    keys, of_block = (k * until).transpose(-1, -2), (index[:, None] ^ index) >> level == 1
    return (q * since) @ keys * of_block, (k_beta * since) @ keys * of_block


def _sums_after(x: Tensor) -> Tensor:
    """Return the sums over the later tokens, (..., tokens, width): differences of sums from the start round by the largest."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(dim=-2).flip(-2)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + lower, (..., n, n), in products of matrices alone; `lower` has zeros on and above its diagonal."""
    with torch.no_grad():
        inverse = _inverse_by_halves(lower)
    # A step of Newton's iteration, which has the gradient of the inverse and takes off rounding errors.
    return 2 * inverse - inverse @ (inverse + lower @ inverse)


def _inverse_by_halves(lower: Tensor) -> Tensor:
    """The inverse of 1 + lower: blocks on the diagonal of 1, 2, 4, ... rows are inverted, two by two.

    With the inverses A' and B' of two blocks, that of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. All pairs are computed at once, by
    products of full matrices: a GPU computes those as fast as products of many small blocks.
    """
    index = torch.arange(lower.shape[-1], device=lower.device)
    differ = index[:, None] ^ index  # from 2^k to 2^(k + 1) - 1 for rows and columns of the two blocks of a pair, each of 2^k rows
    inverse = torch.ones_like(lower[..., 0]).diag_embed() - lower * (differ == 1)
    for level in range(1, (lower.shape[-1] - 1).bit_length()):
        inverse = inverse - inverse @ (lower * (differ >> level == 1)) @ inverse
    return inverse


def _each(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over the chunks. The gradients of views that are taken at once are stacked; each select would have one of the full size."""
    return zip(*(tensor.unbind(2) for tensor in tensors), strict=True)
