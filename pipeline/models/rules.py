"""Rules between sizes that several families share. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation


def heads_violations(hidden: int, heads: int) -> Iterator[Violation]:
    """Yield a violation if the heads do not divide the hidden width."""
    if hidden % heads:
        yield Violation("model.heads", heads, f"must divide model.hidden={hidden}", "choose a divisor of model.hidden")


def rotary_heads_violations(hidden: int, heads: int, kv_heads: int, width: int | None = None) -> Iterator[Violation]:
    """Yield violations of grouped-query attention with rotary position embeddings; `width` is head_dim, hidden / heads when None."""
    if width is None:
        yield from heads_violations(hidden, heads)
    key, value, dim = ("model.heads", heads, hidden / heads) if width is None else ("model.head_width", width, width)
    if dim % 2 == 1:
        yield Violation(
            key, value, f"results in the odd head_dim {dim:g}; rotary embeddings rotate pairs of dims", "choose it so that head_dim is even"
        )
    if heads % kv_heads:
        yield Violation("model.kv_heads", kv_heads, f"must divide model.heads={heads}", "choose a divisor of model.heads")


def rotated_dims(head_dim: int, factor: float) -> int:
    """Return the number of dims of a head that are rotated, the first ones: a share of them, rounded down."""
    return int(head_dim * factor)


def partial_rotary_violations(head_dim: int, factor: float) -> Iterator[Violation]:
    """Yield a violation if rotary position embeddings do not rotate pairs of dims."""
    if (dims := rotated_dims(head_dim, factor)) % 2 or not dims:
        rule = f"rotates {dims} of the {head_dim} dims of a head, which must be an even number of at least 2"
        yield Violation("model.partial_rotary_factor", factor, rule, "choose another share")


def window_violations(key: str, window: int | None, max_positions: int) -> Iterator[Violation]:
    """Yield a violation if a sliding window is longer than the longest sequence; None means no window."""
    if window is not None and window > max_positions:
        rule = f"is longer than model.max_positions={max_positions}"
        yield Violation(key, window, rule, f"shorten the window, or set {key}=null for full attention")


def top_k_violations(top_k: int, experts: int) -> Iterator[Violation]:
    """Yield a violation if a token is routed to more experts than there are."""
    if top_k > experts:
        yield Violation("model.top_k", top_k, f"is more than model.experts={experts}", "choose at most that many")
