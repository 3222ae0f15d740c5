"""Runs an encoder-decoder: the encoder once for each prompt, the decoder with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from pipeline.generation.cache import KeyValueCache
from pipeline.generation.passes import Pass
from pipeline.generation.runner import Runner, pad
from pipeline.layers.attention import Attention, AttentionContext, Core, CoreOptions
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.linear import Projection
from pipeline.layers.mask import Mask


class MemoryProjection:
    """The keys and values of the encoder's output in one cross-attention layer: projected once for each prompt, then returned.

    It replaces the layer's `project` (layers/linear.py).
    """

    def __init__(self, attention: Attention, rows: int) -> None:
        self.attention, self.rows = attention, rows
        given = attention.project
        self.project: Projection = given.project if isinstance(given, MemoryProjection) else given
        self.stored: list[Tensor] = []
        self.chosen: Tensor | None = None

    def store(self, rows: Tensor, memory: Tensor) -> None:
        """Project the encoder's output of some rows, (batch, keys, hidden)."""
        for index, new in enumerate(self.project(memory, self.attention.key, self.attention.value)):
            if len(self.stored) <= index:
                self.stored.append(new.new_zeros(self.rows, *new.shape[1:]))
            if (missing := new.shape[1] - self.stored[index].shape[1]) > 0:
                self.stored[index] = nn.functional.pad(self.stored[index], (0, 0, 0, missing))
            self.stored[index][rows, : new.shape[1]] = new

    def keep(self, rows: Tensor) -> None:
        """As KeyValueCache.keep."""
        self.rows, self.stored = len(rows), [stored[rows.to(stored.device)] for stored in self.stored]

    def __call__(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        """See Projection; the input of the key and value projections is not read."""
        if len(linears) == 1:
            return self.project(x, *linears)
        return [stored if self.chosen is None else stored[self.chosen] for stored in self.stored]


class Seq2SeqRunner(Runner):
    """An encoder-decoder and its caches. A prompt is the encoder's input; the decoder's sequence begins with a start token.

    Args:
        max_positions: longest sequence of encoder and decoder, tokens.
    """

    model: EncoderDecoder

    def __init__(self, model: EncoderDecoder, max_positions: int, *, start: int) -> None:
        super().__init__(model, max_positions)
        blocks = list(model.blocks.values())
        self.encoder, self.decoder = blocks[: model.encoder_blocks], blocks[model.encoder_blocks :]
        self.start_token = start
        self.memory: list[MemoryProjection] = []
        self.source_lengths = torch.zeros(0, dtype=torch.int64)

    def start(self, rows: int) -> None:
        """See Runner."""
        bias = self.model.decoder_bias
        self.cache = KeyValueCache(self.decoder, rows, self.max_positions, bias=None if bias is None else bias.between)
        self.memory = []
        for block in self.decoder:
            cross = block.cross
            assert isinstance(cross, Attention)
            cross.project = MemoryProjection(cross, rows)
            cross.core = cross.core if isinstance(cross.core, TokenByToken) else TokenByToken(cross.core)
            self.memory.append(cross.project)
        self.source_lengths = torch.zeros(rows, dtype=torch.int64, device="cpu")

    def room(self, prompt: Sequence[int]) -> int:  # noqa: ARG002 - of Runner
        """See Runner; the prompt is not part of the decoder's sequence."""
        return self.max_positions - 1

    def length(self, prompt: Sequence[int]) -> int:  # noqa: ARG002 - only the start token
        """See Runner."""
        return 1

    def keep(self, rows: Tensor) -> None:
        """See Runner."""
        super().keep(rows)
        self.source_lengths = self.source_lengths[rows]
        for memory in self.memory:
            memory.keep(rows)

    def detach(self) -> None:
        """See Runner."""
        super().detach()
        for memory in self.memory:
            memory.attention.project = memory.project
            if isinstance(memory.attention.core, TokenByToken):
                memory.attention.core = memory.attention.core.core

    @torch.inference_mode()
    def begin_prompts(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """See Runner: encode the prompts. The decoder reads the start token."""
        self.cache.clear(rows)
        model, (tokens, counts) = self.model, pad(prompts, self.device)
        chosen = torch.tensor(rows, device="cpu")
        self.source_lengths[chosen] = counts
        documents = torch.where(torch.arange(tokens.shape[1], device="cpu") < counts[:, None], 0, -1).to(self.device)
        bias = None if model.encoder_bias is None else model.encoder_bias(tokens.shape[1])
        context = AttentionContext(Mask(causal=False, documents=documents, bias=bias))
        assert model.embed is not None
        x = model.embed(tokens)
        for block in self.encoder:
            x = block(x, context)
        for memory in self.memory:
            memory.store(chosen.to(self.device), x)
        return [[self.start_token]] * len(rows)

    def hidden_states(self, tokens: Tensor, step: Pass) -> tuple[Tensor, AttentionContext]:
        """See Runner. Every sequence has one new token."""
        model, everything = self.model, step.rows.tolist() == list(range(self.cache.rows))
        rows = step.rows.to(self.device)
        keys = torch.arange(max([projection.stored[0].shape[1] for projection in self.memory]), device=self.device)
        lengths = self.source_lengths.to(self.device)[rows]
        key_documents = torch.where(keys < lengths.clamp(min=1)[:, None], 0, -1)
        context = AttentionContext(Mask(), cross=Mask(causal=False, key_documents=key_documents))
        assert model.embed is not None
        x = model.embed(tokens, step.positions)
        for block, memory in zip(self.decoder, self.memory, strict=True):
            memory.chosen = None if everything else rows
            x = block(x, context, x)
        return x, context


class TokenByToken:
    """The core of cross-attention of a pass whose tokens, in one sequence, attend to the encoder's output of different prompts."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Unpack[CoreOptions]) -> Tensor:
        """See Core; q is (1, heads, tokens, width), k and v are (tokens, heads, keys, width)."""
        return self.core(q.transpose(0, 2), k, v, mask, **options).transpose(0, 2)
