"""Runs a decoder on the new tokens of a batch, with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.generation.cache import KeyValueCache, Pass, detach
from pipeline.layers.attention import AttentionContext
from pipeline.layers.moe import moe_layers
from pipeline.layers.stack import Stack
from pipeline.models.config import ModelConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pipeline_relay import Relay


class Runner:
    """A decoder and its cache.

    Args:
        model: the full model, with weights, or with `relay` this rank's stage. Its attention layers get the cache as their core.
        max_positions: longest sequence, tokens.
        lookahead: as in KeyValueCache.
        relay: connects the pipeline stages.
        vocab_size: width of the logits; read with `relay`.
        hidden: width of the hidden states; read with `relay`.
    """

    def __init__(
        self, model: Stack, max_positions: int, *, lookahead: int = 1, relay: Relay | None = None, vocab_size: int = 0, hidden: int = 0
    ) -> None:
        self.relay, self.vocab_size, self.hidden = relay, vocab_size, hidden
        self.model, self.max_positions, self.lookahead = model, max_positions, lookahead
        self.device = next(model.parameters()).device
        for moe in moe_layers(model):
            # Dropping tokens would make a result depend on the other sequences of the batch.
            moe.capacity_factor, moe.parts = None, 0
        self.cache = KeyValueCache((), 0, 0)

    def start(self, rows: int) -> None:
        """Begin with an empty cache for `rows` sequences."""
        self.cache = KeyValueCache(self.model.blocks.values(), rows, 0, lookahead=self.lookahead)

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens can follow a prompt."""
        return self.max_positions - self.length(prompt)

    def length(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens that a prompt occupies in the cache."""
        return len(prompt)

    def reserve(self, tokens: int) -> None:
        """Provide storage for sequences of a length, rounded up so that it seldom grows."""
        self.cache.reserve(min(-(-tokens // 64) * 64, self.max_positions))

    def keep(self, rows: Tensor) -> None:
        """As KeyValueCache.keep."""
        self.cache.keep(rows)

    def detach(self) -> None:
        """Restore the model as it was given."""
        detach(self.model.blocks.values())

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Process prompts in empty rows; returns the logits that follow them, (batch, vocabulary)."""
        return self.forward(rows, prompts)

    @torch.inference_mode()
    def forward(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], *, every: bool = False) -> Tensor:
        """Compute the logits that follow new tokens.

        Args:
            rows: the row of the cache of each sequence; all rows in order, unless these are empty.
            tokens: the new tokens of each sequence; none for a row that is idle.
            every: return the logits of all new tokens instead of those of the last one.

        Returns:
            (batch, vocabulary), with `every` (batch, most new tokens, vocabulary); undefined for idle rows and padding.
        """
        padded, counts = pad(tokens, self.device)
        step = self.cache.begin(torch.tensor(rows, device="cpu"), counts, self.device)
        if self.relay is None:
            logits = self._logits(*self.hidden_states(padded, step), counts, every=every)
        else:
            logits = self._relayed(self.relay, padded, step, counts, every=every)
        return logits if every else logits[:, 0]

    def _logits(self, x: Tensor, context: AttentionContext, counts: Tensor, *, every: bool) -> Tensor:
        """Apply the head, (batch, tokens or 1, vocabulary)."""
        if not every:
            last = (counts - 1).clamp(min=0).to(self.device)
            x = x[torch.arange(len(x), device=self.device), last][:, None]
        return self.model.forward_head(x, context, {})

    def _relayed(self, relay: Relay, tokens: Tensor, step: Pass, counts: Tensor, *, every: bool) -> Tensor:
        """Compute the logits with the stages of all pipeline ranks; every rank gets them."""
        dtype = next(self.model.parameters()).dtype
        x = tokens if relay.index == 0 else relay.receive((*tokens.shape, self.hidden), dtype)
        x, context = self.hidden_states(x, step)
        logits = None
        if relay.index == relay.last:
            logits = self._logits(x, context, counts, every=every)
        else:
            relay.send(x)
        return relay.share(logits, (len(tokens), tokens.shape[1] if every else 1, self.vocab_size), dtype)

    def hidden_states(self, tokens: Tensor, step: Pass) -> tuple[Tensor, AttentionContext]:
        """Return the output of the last block, (batch, tokens, hidden), and the context of the blocks."""
        return self.model.hidden_states(tokens, {} if step.fresh else {"positions": step.positions})


def decoder_runner(local: LocalModel, model: ModelConfig, mesh: Mesh, *, lookahead: int = 1) -> Runner:
    """Return what runs a decoder that may be divided into pipeline stages.

    Args:
        local: this rank's part of the model.
        model: configuration of the full model.
        mesh: this rank's process groups.
        lookahead: as in KeyValueCache.
    """
    relay = Relay(mesh) if mesh.layout.pipeline > 1 else None
    module = next(local.stage_modules())
    return Runner(module, model.max_positions, lookahead=lookahead, relay=relay, vocab_size=model.vocab_size, hidden=model.hidden)


def pad(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens with padding at the end, int64 (batch, longest) on the device, and their numbers, int64 (batch,) on the CPU."""
    counts = [len(sequence) for sequence in sequences]
    width = max(1, *counts)
    padded = [[*sequence, *[0] * (width - count)] for sequence, count in zip(sequences, counts, strict=True)]
    return torch.tensor(padded, device=device), torch.tensor(counts, device="cpu")
