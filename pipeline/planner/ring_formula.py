"""Ring attention where no fused kernel applies: what the formula of layers/partial_attention.py executes, and the scores that it allocates.

The fused kernel for documents leaves short ones to the formula (layers/document_attention.py).
The formula runs on the meta device for one chunk of queries of each size that occurs in the ring, and counts as often as it has chunks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from pipeline.layers import document_attention, document_segments, partial_attention
from pipeline.layers.attention_kernel import Case, choose_partial
from pipeline.layers.mask import Mask
from pipeline.parallel.ring_layout import attended
from pipeline.planner.kernel_fusion import fuse
from pipeline.planner.operations import AttentionCall, Operation, RingRules
from pipeline.planner.recorder import Recorder, Recording, Storage

#: Dtypes of queries, keys and values by their size.
_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_PART = "ring"
#: Compute capability of the GPUs that are planned for: from Ampere on, the rules of partial attention do not depend on it.
_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class FormulaWork:
    """What a rank executes in one call of ring attention.

    Attributes:
        operations: with the number of times that each is executed.
        allocated: most bytes that it allocates at a time, besides queries, keys, values and output.
    """

    operations: tuple[tuple[Operation, float], ...]
    allocated: int


def is_unfused(call: AttentionCall) -> bool:
    """Whether a GPU has no fused kernel for a call of ring attention."""
    if call.rules is None:
        return False
    masked = call.rules.masked and not call.rules.segmented
    dtype, capped = _DTYPES[call.bytes_per_element], call.rules.softcap is not None
    case = Case("cuda", dtype, call.head_dim, call.value_dim, _CAPABILITY, masked=masked, capped=capped)
    return choose_partial(case) == "unfused"


def runs_formula(call: AttentionCall) -> bool:
    """Whether a call of ring attention runs the formula, for all pairs or beside a fused kernel for those of short documents."""
    return is_unfused(call) or (call.rules is not None and call.rules.segmented)


@lru_cache(maxsize=256)
def work(call: AttentionCall) -> FormulaWork:
    """Return the work of the formula in a call that runs_formula, on the rank that computes most pairs of query and key."""
    assert call.rules is not None
    rules, ranks, tokens = call.rules, call.ring, call.queries
    if not is_unfused(call):
        executed, allocated = _executed(call, short=True)
        kernel = document_segments.workspace(call.batch, tokens, call.heads, call.head_dim) if call.phase == "backward" else 0
        return FormulaWork(tuple((operation, 1.0) for operation in executed), max(allocated, kernel))
    ring = [
        [(len(range(*q.indices(tokens))), len(range(*k.indices(tokens)))) for q, k in filter(None, _steps(rank, ranks, tokens, rules))]
        for rank in range(ranks)
    ]
    steps = max(ring, key=lambda sizes: sum(queries * keys for queries, keys in sizes))
    operations: list[tuple[Operation, float]] = []
    allocated = 0
    for (queries, keys), count in Counter(steps).items():
        rows = min(queries, max(1, partial_attention.MAX_SCORES // (call.batch * call.heads * keys)))
        executed, most = _executed(replace(call, queries=rows, keys=keys))
        operations += [(operation, count * queries / rows) for operation in executed]
        allocated = max(allocated, most)
    return FormulaWork(tuple(operations), allocated)


def moved(call: AttentionCall) -> float:
    """Return the bytes that a call that is_unfused reads and writes."""
    return sum(count * operation.bytes for operation, count in work(call).operations)


def _steps(rank: int, ranks: int, tokens: int, rules: RingRules) -> list[tuple[slice, slice] | None]:
    """Return the slices of queries and keys of every step of the ring on a rank."""
    return [attended(rank, source, tokens, causal=rules.causal, window=rules.window) for source in range(ranks)]


def _executed(call: AttentionCall, *, short: bool = False) -> tuple[list[Operation], int]:
    """Return what a chunk of queries, or the part for short documents, executes, and the most bytes that it allocates."""
    assert call.rules is not None
    rules, backward = call.rules, call.phase == "backward"

    def tokens(heads: int, positions: int, width: int) -> Tensor:
        return torch.empty(call.batch, heads, positions, width, dtype=_DTYPES[call.bytes_per_element])

    def per_token(rows: int, positions: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, positions, dtype=dtype)

    with torch.device("meta"), torch.no_grad():
        q, k = tokens(call.heads, call.queries, call.head_dim), tokens(call.kv_heads, call.keys, call.head_dim)
        v, out = tokens(call.kv_heads, call.keys, call.value_dim), tokens(call.heads, call.queries, call.value_dim)
        mask = Mask(causal=rules.causal, softcap=rules.softcap)
        if short:
            mask = mask.replace(documents=per_token(call.batch, call.queries, torch.int32))
        elif rules.masked:
            mask = mask.replace(
                documents=per_token(call.batch, call.queries, torch.int32) if rules.documents else None,
                key_documents=per_token(call.batch, call.keys, torch.int32) if rules.documents else None,
                positions=per_token(1, call.queries, torch.int64),
                key_positions=per_token(1, call.keys, torch.int64),
                slopes=torch.empty(call.heads) if rules.slopes else None,
            )
        recorder = Recorder({}, {}, {})
        recorder.part, recorder.in_backward = _PART, backward
        with recorder:
            if backward:
                lse = torch.empty(q.shape[:3])
                if short:
                    document_attention.short_backward(out, q, k, v, out, lse, mask)
                else:
                    partial_attention.backward(out, q, k, v, out, lse, mask, window=rules.window)
            elif short:
                document_attention.short_forward(q, k, v, mask)
            else:
                partial_attention.forward(q, k, v, mask, window=rules.window)
    fused = fuse(recorder.recording, fused=False)
    return fused.operations[_PART], fused.peak[_PART][backward]


def add_memory(recording: Recording) -> None:
    """Add what ring attention allocates inside of its operator to a recording."""
    for index, kernel in enumerate(recording.kernels):
        call = kernel.operation
        if isinstance(call, AttentionCall) and runs_formula(call):
            key = max(recording.storages, default=0) + 1
            recording.storages[key] = Storage(work(call).allocated, kernel.part, kernel.phase, index, index, index + 1)
