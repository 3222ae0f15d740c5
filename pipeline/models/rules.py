"""Rules between sizes that several families share, and what follows from the sizes. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import Violation


class MultiHead:
    """Attention whose heads share the width of the residual stream and nothing else (Vaswani et al. 2017)."""

    hidden: int
    heads: int

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as query heads."""
        return self.heads


def heads_violations(hidden: int, heads: int) -> Iterator[Violation]:
    """The heads of an attention that divide the width among them."""
    if hidden % heads:
        yield Violation("model.heads", heads, f"must divide model.hidden={hidden}", "choose a divisor of model.hidden")


def rotary_heads_violations(hidden: int, heads: int, kv_heads: int, width: int | None = None) -> Iterator[Violation]:
    """Heads that are turned in pairs of dims, of a width of their own or of hidden / heads, and share key and value heads."""
    if width is None:
        yield from heads_violations(hidden, heads)
    key, value, dim = ("model.heads", heads, hidden / heads) if width is None else ("model.head_width", width, width)
    if dim % 2 == 1:
        yield Violation(key, value, f"gives odd head width {dim:g}; rotary turns pairs", "choose it so that the width of a head is even")
    if heads % kv_heads:
        yield Violation("model.kv_heads", kv_heads, f"must divide model.heads={heads}", "choose a divisor of model.heads")


def window_violations(key: str, window: int | None, max_positions: int) -> Iterator[Violation]:
    """A window of `window` tokens, None for all."""
    if window is not None and window > max_positions:
        rule = f"is longer than model.max_positions={max_positions}"
        yield Violation(key, window, rule, f"shorten the window, or set {key}=null to look at all tokens")
