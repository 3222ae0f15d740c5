"""Who may look at whom: causal, bidirectional, prefix, sliding window, documents and padding, and the biases that depend on positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """What attention needs to know of its queries and keys.

    A query may look at a key when all rules that are set agree. `None` sets no rule.

    Attributes:
        causal: not at later positions.
        documents: int (batch, queries), only at keys of the same document. Padding is a document of its own, by custom -1: it looks
            at padding alone, so that no row of scores is empty.
        key_documents: int (batch, keys), where the keys are other tokens than the queries (cross-attention); else they are `documents`.
        positions: int (batch, queries), where each token stands in its sequence; counted from 0 when None.
        key_positions: the same for the keys, where they are other tokens than the queries.
        prefix: int (batch,), keys before this position may be looked at from everywhere (prefix language model).
        slopes: (heads,), adds -slope * distance to the scores (ALiBi, Press et al. 2022, https://arxiv.org/abs/2108.12409).
        bias: (1, heads, queries, keys), added to the scores as it is.
    """

    causal: bool = True
    documents: Tensor | None = None
    key_documents: Tensor | None = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    prefix: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, made at the first call: blocks share their mask, so what they derive from it is made once a pass."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def having(self, **changes: Any) -> Mask:
        """The mask with other attributes; nothing that was made of this one is kept."""
        return replace(self, **changes, _made={})

    def places(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of queries and keys, (batch or 1, queries) and (batch or 1, keys)."""
        own = torch.arange(queries, device=device)[None] if self.positions is None else self.positions
        if self.key_positions is not None:
            return own, self.key_positions
        same = self.positions is not None and queries == keys
        return own, own if same else torch.arange(keys, device=device)[None]

    def visible(self, queries: int, keys: int, device: torch.device, window: int | None = None) -> Tensor | None:
        """Bool (batch or 1, 1, queries, keys), true where a query may look; None when the answer is `causal` and nothing else.

        Args:
            queries: their number.
            keys: theirs.
            device: where to make it.
            window: keys that a query may look at, itself and those before it (both sides, when not causal).
        """
        if not self.has_rules(keys, window):
            return None
        return self.once(("visible", window), lambda: self._visible(queries, keys, device, window))

    def has_rules(self, keys: int, window: int | None = None) -> bool:
        """Whether `visible` is more than `causal` can say; arguments as there."""
        limited = window is not None and (window < keys or self.key_positions is not None)
        moved = self.positions is not None or self.key_positions is not None
        return limited or self.documents is not None or self.key_documents is not None or self.prefix is not None or (self.causal and moved)

    def _visible(self, queries: int, keys: int, device: torch.device, window: int | None) -> Tensor:
        own, other = self.places(queries, keys, device)
        distance = own[:, None, :, None] - other[:, None, None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            seen = distance >= 0
            if self.prefix is not None:
                seen = seen | (other[:, None, None, :] < self.prefix[:, None, None, None])
        if window is not None:
            seen = seen & (distance.abs() < window)
        theirs = self.documents if self.key_documents is None else self.key_documents
        if self.documents is not None and theirs is not None:
            seen = seen & (self.documents[:, None, :, None] == theirs[:, None, None, :])
        elif theirs is not None:
            seen = seen & (theirs[:, None, None, :] >= 0)
        return seen

    def scores(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores, (batch or 1, heads, queries, keys); None when nothing is."""
        if self.slopes is None:
            return None if self.bias is None else self.bias.to(dtype)
        own, other = self.places(queries, keys, device)
        distance = (own[:, None, :, None] - other[:, None, None, :]).abs()
        return (-self.slopes[None, :, None, None] * distance).to(dtype)

    def dense(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype, window: int | None = None) -> Tensor | None:
        """Everything in one tensor as SDPA takes it: bool where there are only rules, else scores with -inf where a query may not look."""
        seen, scores = self.visible(queries, keys, device, window), self.scores(queries, keys, device, dtype)
        if scores is None:
            return seen
        if seen is None and self.causal:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)
