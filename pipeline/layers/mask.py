"""Attention masks: causal, bidirectional, prefix, sliding window, documents and padding; and what changes the scores besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def capped(x: Tensor, bound: float) -> Tensor:
    """Return bound * tanh(x / bound): about x for small x, never above the bound (Bello et al. 2016, https://arxiv.org/abs/1611.09940)."""
    return bound * torch.tanh(x / bound)


@dataclass(frozen=True)
class Mask:
    """The rules of an attention mask, and biases and the soft cap of the attention scores.

    A query attends to a key if all rules that are set allow it. `None` sets no rule.

    Attributes:
        causal: a query does not attend to later positions.
        documents: int (batch, queries), a query attends only to keys of the same document. Padding is a separate document, by convention
            -1: it attends only to padding, so that no query has all its keys masked.
        key_documents: int (batch, keys), if the keys are other tokens than the queries (cross-attention); else `documents` holds for them.
        positions: int (batch, queries), the position of each token in its sequence; 0, 1, ... when None.
        key_positions: the same for the keys, if they are other tokens than the queries.
        prefix: int (batch,), every query attends to the keys before this position (prefix language model).
        slopes: (heads,), adds -slope * distance to the scores (ALiBi, Press et al. 2022, https://arxiv.org/abs/2108.12409).
        bias: (1, heads, queries, keys), added to the scores.
        softcap: bound of the scores (see `capped`), of a model without biases and slopes; None for none.
    """

    causal: bool = True
    documents: Tensor | None = None
    key_documents: Tensor | None = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    prefix: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    _cache: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def cached(self, name: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, cached under `name`: blocks share the mask and compute what they derive from it once.

        A compiled block computes what is not there itself: within recomputation, torch.compile does not support writing to a shared dict.
        """
        if name not in self._cache:
            if torch.compiler.is_compiling():
                return compute()
            self._cache[name] = compute()
        return self._cache[name]

    def replace(self, **changes: Any) -> Mask:
        """Return the mask with other attributes and an empty cache."""
        return dataclasses.replace(self, **changes, _cache={})

    def token_positions(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, (batch or 1, queries) and (batch or 1, keys)."""
        query_positions = torch.arange(queries, device=device)[None] if self.positions is None else self.positions
        if self.key_positions is not None:
            return query_positions, self.key_positions
        same = self.positions is not None and queries == keys
        return query_positions, query_positions if same else torch.arange(keys, device=device)[None]

    def visible(self, queries: int, keys: int, device: torch.device, window: int | None = None) -> Tensor | None:
        """Return the boolean mask (batch or 1, 1, queries, keys), True where a query attends; None if only `causal` applies.

        Args:
            queries: number of queries.
            keys: number of keys.
            device: device of the mask.
            window: sliding window in tokens, including the query's own position (on both sides of it, if not causal).
        """
        if not self.has_rules(keys, window):
            return None
        return self.cached(("visible", window), lambda: self._visible(queries, keys, device, window))

    def has_rules(self, keys: int, window: int | None = None) -> bool:
        """Whether a rule other than `causal` applies, so that `visible` returns a tensor; arguments as in `visible`."""
        windowed = window is not None and (window < keys or self.key_positions is not None)
        explicit_positions = self.positions is not None or self.key_positions is not None
        return (
            windowed
            or self.documents is not None
            or self.key_documents is not None
            or self.prefix is not None
            or (self.causal and explicit_positions)
        )

    def _visible(self, queries: int, keys: int, device: torch.device, window: int | None) -> Tensor:
        query_positions, key_positions = self.token_positions(queries, keys, device)
        distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            allowed = distance >= 0
            if self.prefix is not None:
                allowed = allowed | (key_positions[:, None, None, :] < self.prefix[:, None, None, None])
        if window is not None:
            allowed = allowed & (distance.abs() < window)
        key_documents = self.documents if self.key_documents is None else self.key_documents
        if self.documents is not None and key_documents is not None:
            allowed = allowed & (self.documents[:, None, :, None] == key_documents[:, None, None, :])
        elif key_documents is not None:
            allowed = allowed & (key_documents[:, None, None, :] >= 0)
        return allowed

    def changed(self, scores: Tensor) -> Tensor:
        """Return scores (batch, heads, queries, keys) with the soft cap or the bias, before masking."""
        if self.softcap is not None:
            assert self.slopes is None, "a soft cap comes without slopes"
            assert self.bias is None, "a soft cap comes without a bias"
            return capped(scores, self.softcap)
        bias = self.score_bias(scores.shape[2], scores.shape[3], scores.device, scores.dtype)
        return scores if bias is None else scores + bias

    def score_bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return the bias that is added to the scores, (batch or 1, heads, queries, keys); None for none."""
        if self.slopes is None:
            return None if self.bias is None else self.bias.to(dtype)
        query_positions, key_positions = self.token_positions(queries, keys, device)
        distance = (query_positions[:, None, :, None] - key_positions[:, None, None, :]).abs()
        return (-self.slopes[None, :, None, None] * distance).to(dtype)

    def attn_mask(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype, window: int | None = None) -> Tensor | None:
        """Return the attn_mask argument of SDPA: boolean without a score bias, else the bias with -inf at masked keys; None for none."""
        allowed, scores = self.visible(queries, keys, device, window), self.score_bias(queries, keys, device, dtype)
        if scores is None:
            return allowed
        if allowed is None and self.causal:
            allowed = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
