"""The state space recurrence of Mamba-2 in chunks (Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section 6).

Each head has a state S, a matrix (key_dim, value_dim). A token decays it, adds a key with a value, and reads it with a query:

    S <- a S + k v^T,    o = q^T S        (a = exp(log_decay))

These are the paper's C (query), B (key) and x times its step (value); the heads of a group share queries and keys. Within a chunk, the
outputs are those of attention without a softmax, whose scores decay. All chunks are computed at once, in products of matrices: there is
no loop over them, only over levels of them.

Any part of a sequence maps the state S before it to t S + Z, with the product t of its decays and the state Z that follows from zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers.recurrent import StateBefore, chunks_of, decays_between, segment_chunks

#: Tokens of a chunk, as in released configurations.
CHUNK = 128
#: Chunks, or groups of them, whose states are computed in one product.
LEVEL = 32


def chunked_state_space(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    skip: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to a sequence.

    Args:
        q, k: (batch, groups, sequence, key_dim); `heads / groups` successive heads share them.
        v: (batch, heads, sequence, value_dim).
        log_decay: (batch, heads, sequence), at most 0.
        skip: (batch, heads, sequence, value_dim), added to the outputs.
        segments: int (batch, sequence), not decreasing: the state is reset where it changes. None for no reset.
        state: (batch, heads, key_dim, value_dim), before the first token; zero when None.
        chunk: tokens of a chunk; CHUNK when None.

    Returns:
        The outputs (batch, heads, sequence, value_dim), and the state after the last token.
    """
    chunks = _compute(q, k, v, log_decay, segments, None, chunk)
    if state is None:
        state = torch.zeros_like(chunks.states[:, :, 0])
    return chunks.outputs(state, q.shape[2]) + skip, chunks.states[:, :, -1] + chunks.decays[:, :, -1, None, None] * state


def state_space_of_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    skip: Tensor,
    state_before: StateBefore,
    *,
    segments: Tensor | None = None,
    segment_before: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Apply the recurrence to a part of a sequence, whose state follows from the maps of the parts before it.

    Args:
        q, k, v, log_decay, skip, segments, chunk: as in chunked_state_space.
        state_before: its transition is (batch, heads, key_dim, 1), which a state is multiplied by.
        segment_before: int (batch,), the segment of the token before the part; that of the first token when None.

    Returns:
        The outputs, (batch, heads, sequence, value_dim).
    """
    chunks = _compute(q, k, v, log_decay, segments, segment_before, chunk)
    transition = chunks.decays[:, :, -1, None, None].expand(-1, -1, k.shape[3], 1)
    return chunks.outputs(state_before(transition, chunks.states[:, :, -1]), q.shape[2]) + skip


class _Chunks(NamedTuple):
    """What the chunks compute without a state before the sequence.

    Attributes:
        within: (batch, heads, chunks, chunk, value_dim), the outputs from the values of the same chunk.
        q: (batch, groups, chunks, chunk, key_dim).
        before: (batch, heads, chunks, chunk), the decay from the start of the chunk.
        states: (batch, heads, chunks + 1, key_dim, value_dim), before each chunk, and after the last one.
        decays: (batch, heads, chunks + 1), of a state before the sequence, up to there.
    """

    within: Tensor
    q: Tensor
    before: Tensor
    states: Tensor
    decays: Tensor

    def outputs(self, state: Tensor, length: int) -> Tensor:
        """Return the outputs of the first `length` tokens, from the state before the sequence."""
        states = (self.states + self.decays[..., None, None] * state.unsqueeze(2))[:, :, :-1]
        groups = self.q.shape[1]
        read = torch.einsum("bgcin,bgrcnp->bgrcip", self.q, states.unflatten(1, (groups, -1))).flatten(1, 2)
        return (self.within + read * self.before.unsqueeze(4)).flatten(2, 3)[:, :, :length]


def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segments: Tensor | None,
    segment_before: Tensor | None,
    chunk: int | None,
) -> _Chunks:
    """Compute all chunks; arguments as in state_space_of_part."""
    chunk = min(CHUNK if chunk is None else chunk, q.shape[2])
    groups = q.shape[1]
    q, k, v, log_decay = (chunks_of(x, chunk) for x in (q, k, v, log_decay))
    apart = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    before, across = log_decay.cumsum(dim=3).exp(), log_decay.sum(dim=3)
    if segments is not None:
        parts, first = segment_chunks(segments, chunk, segment_before)
        apart = apart | (parts.unsqueeze(4) != parts.unsqueeze(3))
        before = before * (parts == first.unsqueeze(3))
        across = across.masked_fill(parts[..., -1] != first, -torch.inf)
    between = decays_between(log_decay, apart)
    scores = (q @ k.transpose(3, 4)).unsqueeze(2) * between.unflatten(1, (groups, -1))
    within = scores.flatten(1, 2) @ v
    ending = (v * between[..., -1, :].unsqueeze(4)).unflatten(1, (groups, -1))
    added = torch.einsum("bgcin,bgrcip->bgrcnp", k, ending).flatten(1, 2)
    states, decays = _states(added, across)
    return _Chunks(within, q, before, states, decays)


def _states(added: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk and after the last one, from zeros, and the decays from the start up to there.

    Args:
        added: (batch, heads, chunks, key_dim, value_dim), the state that each chunk adds.
        log_decay: (batch, heads, chunks), of the state before a chunk.

    Returns:
        (batch, heads, chunks + 1, key_dim, value_dim) and (batch, heads, chunks + 1).
    """
    count, level = added.shape[2], min(LEVEL, added.shape[2])
    missing = -count % level
    added = F.pad(added, (0, 0, 0, 0, 0, missing)).unflatten(2, (-1, level))
    log_decay = F.pad(log_decay, (0, missing)).unflatten(2, (-1, level))
    later = torch.ones(level, level, dtype=torch.bool, device=added.device).triu(1)
    between, within = decays_between(log_decay, later), F.pad(log_decay.cumsum(dim=3), (1, 0)).exp()
    ends = (between @ added.flatten(4)).unflatten(4, added.shape[4:])  # after each chunk, from zeros before its group
    starts = F.pad(ends, (0, 0, 0, 0, 1, 0))
    if ends.shape[2] == 1:
        states, decays = starts.squeeze(2), within.squeeze(2)
    else:
        of_groups, total = _states(ends[:, :, :, -1], log_decay.sum(dim=3))
        onward = starts + within[..., None, None] * of_groups[:, :, :-1, None]
        last = of_groups[:, :, -1:]
        states = torch.cat([onward[:, :, :, :-1].flatten(2, 3), last], dim=2)
        decays = torch.cat([(within * total[:, :, :-1, None])[..., :-1].flatten(2, 3), total[:, :, -1:]], dim=2)
    # Chunks that fill the last group change nothing.
    return states[:, :, : count + 1], decays[:, :, : count + 1]
