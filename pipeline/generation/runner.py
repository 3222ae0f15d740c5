"""Runs a decoder on the new tokens of a batch, with a KV cache.

Each pass calls every MoE layer once, so the passes of a group are rounds that all of its ranks enter. How many sequences and tokens a rank
has in a round does not matter; a rank without prompts computes its experts for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.generation.cache import KeyValueCache, detach
from pipeline.generation.passes import Pass
from pipeline.layers.attention import AttentionContext
from pipeline.layers.moe import moe_layers
from pipeline.layers.stack import Stack
from pipeline.models.config import ModelConfig
from pipeline.parallel import collectives
from pipeline.parallel.expert_parallel import ExpertParallelExperts
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pipeline_relay import Relay


class Runner:
    """A decoder and its cache.

    Args:
        model: the full model, with weights, or with `relay` this rank's stage. Its attention layers get the cache as their core.
        max_positions: longest sequence, tokens.
        lookahead: as in KeyValueCache.
        vocab_size: width of the logits; read with `relay`.
        hidden: width of the hidden states; read with `relay`.
    """

    def __init__(
        self,
        model: Stack,
        max_positions: int,
        *,
        lookahead: int = 1,
        relay: Relay | None = None,
        rounds: ExpertRounds | None = None,
        vocab_size: int = 0,
        hidden: int = 0,
    ) -> None:
        self.relay, self.rounds, self.vocab_size, self.hidden = relay, rounds, vocab_size, hidden
        self.model, self.max_positions, self.lookahead = model, max_positions, lookahead
        self.device = next(model.parameters()).device
        for moe in moe_layers(model):
            # Dropping tokens would make a result depend on the other sequences of the batch.
            moe.capacity_factor, moe.parts = None, 0
        self.cache = KeyValueCache((), 0, 0)

    def start(self, rows: int) -> None:
        """Begin with an empty cache for `rows` sequences."""
        self.cache = KeyValueCache(self.model.blocks.values(), rows, self.max_positions, lookahead=self.lookahead)

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens can follow a prompt."""
        return self.max_positions - self.length(prompt)

    def length(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens that a prompt occupies in the cache."""
        return len(prompt)

    def bytes_of(self, length: int) -> int:
        """Return the bytes of a sequence of `length` tokens in the cache; needs no `start`."""
        if not (self.cache.layers or self.cache.recurrent):
            self.start(0)
        return self.cache.bytes_of(length)

    def keep(self, rows: Tensor) -> None:
        """As KeyValueCache.keep."""
        self.cache.keep(rows)

    def detach(self) -> None:
        """Restore the model as it was given."""
        detach(self.model.blocks.values())

    def finish(self) -> None:
        """Wait until no rank that shares experts with this one has prompts; a generator calls it after its last pass."""
        if self.rounds is not None:
            self.rounds.finish()

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Process prompts in empty rows; returns the logits that follow them, (prompts, vocabulary)."""
        return self.forward(rows, self.begin_prompts(rows, prompts))

    def begin_prompts(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Empty rows for prompts. Returns the tokens that are then passed to `forward`, all at once or in parts."""
        self.cache.clear(rows)
        return prompts

    @torch.inference_mode()
    def forward(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: Sequence[int] | None = None) -> Tensor:
        """Compute the logits that follow the new tokens of each sequence, at least one.

        `wanted` is of how many of the last tokens of each sequence logits are returned, 1 when None: (sum of wanted, vocabulary).
        """
        if self.rounds is not None:
            self.rounds.begin()
        counts = [len(new) for new in tokens]
        wanted = [1] * len(rows) if wanted is None else wanted
        step = self.cache.begin(rows, counts, self.device)
        flat = torch.tensor([[token for member in step.order for token in tokens[member]]], device=self.device)
        ends = dict(zip(step.order, accumulate(counts[member] for member in step.order), strict=True))
        chosen = [place for member, count in enumerate(wanted) for place in range(ends[member] - count, ends[member])]
        if self.relay is None:
            return self._logits(*self.hidden_states(flat, step), chosen)
        return self._relayed(self.relay, flat, step, chosen)

    def _logits(self, x: Tensor, context: AttentionContext, chosen: Sequence[int]) -> Tensor:
        """Apply the head to some of the tokens, (chosen, vocabulary)."""
        if list(chosen) != list(range(x.shape[1])):
            x = x[:, torch.tensor(chosen, dtype=torch.int64, device=self.device)]
        return self.model.forward_head(x, context, {})[0]

    def _relayed(self, relay: Relay, tokens: Tensor, step: Pass, chosen: Sequence[int]) -> Tensor:
        """Compute the logits with the stages of all pipeline ranks; every rank gets them."""
        dtype = next(self.model.parameters()).dtype
        x = tokens if relay.index == 0 else relay.receive((*tokens.shape, self.hidden), dtype)
        x, context = self.hidden_states(x, step)
        logits = None
        if relay.index == relay.last:
            logits = self._logits(x, context, chosen)
        else:
            relay.send(x)
        return relay.share(logits, (len(chosen), self.vocab_size), dtype)

    def hidden_states(self, tokens: Tensor, step: Pass) -> tuple[Tensor, AttentionContext]:
        """Return the output of the last block, (1, tokens, hidden), and the context of the blocks."""
        return self.model.hidden_states(tokens, {"positions": step.positions})


def decoder_runner(local: LocalModel, model: ModelConfig, mesh: Mesh, *, lookahead: int = 1) -> Runner:
    """Return what runs a decoder that may be divided into pipeline stages, and whose experts may be on several ranks."""
    relay = Relay(mesh) if mesh.layout.pipeline > 1 else None
    module = next(local.stage_modules())
    rounds = ExpertRounds(module, mesh.expert) if mesh.layout.expert > 1 else None
    sizes = {"vocab_size": model.vocab_size, "hidden": model.hidden}
    return Runner(module, model.max_positions, lookahead=lookahead, relay=relay, rounds=rounds, **sizes)


def pad(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens with padding at the end, int64 (batch, longest) on the device, and their numbers, int64 (batch,) on the CPU."""
    counts = [len(sequence) for sequence in sequences]
    width = max(1, *counts)
    padded = [[*sequence, *[0] * (width - count)] for sequence, count in zip(sequences, counts, strict=True)]
    return torch.tensor(padded, device=device), torch.tensor(counts, device="cpu")


class ExpertRounds:
    """The rounds of one rank. Without experts of several ranks, both methods return at once."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.group = group
        self._experts = [moe.experts for moe in moe_layers(model) if isinstance(moe.experts, ExpertParallelExperts)]

    def begin(self) -> None:
        """Enter a round in which this rank runs a forward pass."""
        if self._experts:
            self._any_has_tokens(True)

    @torch.inference_mode()
    def finish(self) -> None:
        """Compute this rank's experts for the other ranks of the group until none of them has prompts."""
        while self._experts and bool(self._any_has_tokens(False)):
            for experts in self._experts:
                experts.serve()

    def _any_has_tokens(self, active: bool) -> Tensor:
        """Return whether a rank of the group runs a forward pass in this round, int64 (); only a rank that runs none waits for it."""
        device = self._experts[0].experts.up.device
        return collectives.all_reduce(torch.tensor(int(active), device=device), self.group, "max")
