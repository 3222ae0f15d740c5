"""Order of the rows that experts process: permutation by expert, and rows of experts that all have the same number of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def tokens_per_expert(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Count the tokens of each expert: int64 (tokens, top_k) of 0 .. num_experts, `num_experts` for none -> int64 (num_experts,)."""
    flat, counts = expert_ids.flatten(), torch.zeros(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    return counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))[:num_experts].long()  # int64 is not compiled


def drop_over_capacity(expert_ids: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Drop assignments beyond the capacity of an expert, keeping those of the first tokens.

    Args:
        expert_ids: int64 (tokens, top_k) of 0 .. num_experts.
        capacity: maximum number of assignments of each expert.

    Returns:
        int64 (tokens, top_k), `num_experts` for dropped assignments.
    """
    order = expert_ids.flatten().argsort(stable=True)
    ordered = expert_ids.flatten()[order]
    load = tokens_per_expert(expert_ids, num_experts + 1)
    slot = torch.arange(len(order), device=order.device) - (load.cumsum(0) - load)[ordered]
    return torch.empty_like(ordered).scatter(0, order, ordered.masked_fill(slot >= capacity, num_experts)).view_as(expert_ids)


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the inverse of a permutation: int64 (n,) -> int32 (n,). Inductor compiles no scatter of int64."""
    numbers = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return torch.empty_like(numbers).scatter(0, order, numbers)


class Slots(NamedTuple):
    """Where the rows of padded experts come from and go to.

    Attributes:
        slot: int32 (tokens * top_k,), the row of each assignment; the number of rows for an assignment that is dropped or of no expert.
        assignment: int32 (rows,), the assignment of each row; tokens * top_k for a row without one.
        counts: int32 (experts,), rows of each expert that have an assignment; of `buffer_slots` (parts, experts).
    """

    slot: Tensor
    assignment: Tensor
    counts: Tensor


def padded_slots(expert_ids: Tensor, num_experts: int, capacity: int, parts: int) -> Slots:
    """Assign rows to the first `capacity` assignments of each expert, in the order of tokens; drops what `drop_over_capacity` drops.

    The rows are (parts, experts, rows of a part): the first part has the first assignments of every expert. No size depends on the load.

    Args:
        expert_ids: int64 (tokens, top_k) of 0 .. num_experts, `num_experts` for none.
        capacity: maximum number of assignments of each expert; rounded up to a multiple of `parts`, it is that of their rows.
        parts: number of parts.
    """
    flat, rows = expert_ids.flatten(), -(-capacity // parts)
    counts, position = _positions(flat, num_experts)
    slot = (position // rows * num_experts + flat) * rows + position % rows
    none = (flat == num_experts) | (position >= capacity)
    return _slots(slot, none, parts * num_experts * rows, counts.clamp(max=capacity))


def buffer_slots(expert_ids: Tensor, num_experts: int, buffers: int, rows: int, parts: int) -> Slots:
    """Assign the rows of buffers, each of successive experts, to the first assignments of these experts, sorted by expert and token.

    The rows are (parts, buffers, rows / parts), and each part of a buffer is sorted, too: every `parts`-th row of the whole.

    Args:
        expert_ids: int64 (tokens, top_k) of 0 .. num_experts, `num_experts` for none.
        rows: of a buffer, a multiple of `parts`. Assignments beyond them have no row.
    """
    flat = expert_ids.flatten()
    counts, position = _positions(flat, num_experts)
    of_buffer = counts.view(buffers, -1)
    begins = (of_buffer.cumsum(1, dtype=torch.int32) - of_buffer).flatten()
    expert = flat.clamp(max=num_experts - 1)
    row = begins[expert] + position
    slot = (row % parts * buffers + expert // of_buffer.shape[1]) * (rows // parts) + row // parts
    # Row r is in part r % parts: of the rows before a limit, each part has the quotient of what this rounds up.
    rounded = parts - 1 - torch.arange(parts, dtype=torch.int32, device=flat.device).unsqueeze(1)
    kept = ((begins + counts).clamp(max=rows) + rounded) // parts - (begins.clamp(max=rows) + rounded) // parts
    return _slots(slot, (flat == num_experts) | (row >= rows), buffers * rows, kept)


def sorted_slots(counts: Tensor, rows: int) -> Slots:
    """Sort the rows of several buffers by expert: assignments are rows of the buffers, their slots rows by expert, buffer and row.

    Args:
        counts: int32 (buffers, experts), the first rows of each buffer, which are sorted by expert; the rest of it has no slot.
        rows: of a buffer.
    """
    buffers, experts = counts.shape
    ends = counts.cumsum(1, dtype=torch.int32)
    number = torch.arange(buffers * rows, dtype=torch.int32, device=counts.device)
    buffer = number // rows
    first = torch.arange(buffers, dtype=torch.int32, device=counts.device).unsqueeze(1) * rows
    group = torch.bucketize(number, (ends + first).flatten(), right=True, out_int32=True)  # of rows of a buffer and an expert
    sorted_ends = counts.t().flatten().cumsum(0, dtype=torch.int32).view(experts, buffers).t()
    moved = (sorted_ends - ends - first).flatten()[group.clamp(max=buffers * experts - 1)]
    return _slots(number + moved, group >= (buffer + 1) * experts, len(number), counts.sum(0, dtype=torch.int32))


def _positions(flat: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the load of each expert, int32 (experts,), and the number of assignments to the same expert before each, int32."""
    chosen = flat == torch.arange(num_experts, device=flat.device).unsqueeze(1)
    load = chosen.to(torch.int32).cumsum(1, dtype=torch.int32)
    return load[:, -1], load.gather(0, flat.clamp(max=num_experts - 1).unsqueeze(0)).squeeze(0) - 1


def _slots(slot: Tensor, without: Tensor, rows: int, counts: Tensor) -> Slots:
    """Return the slots of assignments, where it is known which of them have none."""
    slot = slot.to(torch.int32).masked_fill(without, rows)
    numbers = torch.arange(len(slot), dtype=torch.int32, device=slot.device)
    assignment = torch.full((rows + 1,), len(slot), dtype=torch.int32, device=slot.device).scatter(0, slot.long(), numbers)
    return Slots(slot, assignment[:rows], counts)


class _Permute(torch.autograd.Function):
    """Permutation of rows; forward and backward are both gathers, so the result is deterministic on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int, partial: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies, ctx.partial = copies, partial
        return select_rows(x, order, copies, partial=partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = select_rows(grad, inverse, partial=ctx.partial)
        return rows if ctx.copies == 1 else rows.unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None, None


def select_rows(x: Tensor, index: Tensor, copies: int = 1, *, partial: bool = False) -> Tensor:
    """Return the rows of an index, each of which is there `copies` times; with `partial` zeros for an index past the end."""
    row = index if copies == 1 else index // copies
    if not partial:
        return x.index_select(0, row)
    valid = row < len(x)
    return x.index_select(0, row.where(valid, 0)).where(valid.unsqueeze(1), 0)


def permute(x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1, *, partial: bool = False) -> Tensor:
    """Repeat each row `copies` times and permute the result.

    Args:
        x: (rows, hidden).
        order: int64 (rows * copies,), a permutation; copy c of row r has index r * copies + c.
        inverse: the inverse permutation, int32 or int64 as order may be.
        copies: repetitions of each row (top_k).
        partial: order and inverse may have other lengths and numbers past the end: such rows of the result are zeros, and rows of x that
            are left out have a gradient of zeros.

    Returns:
        (rows * copies, hidden); of the length of order with `partial`.
    """
    result: Tensor = _Permute.apply(x, order, inverse, copies, partial)
    return result
