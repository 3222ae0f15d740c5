"""The states of a layer with a recurrent state (layers/recurrent.py), one for each sequence of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.generation.passes import SequenceGroup
from pipeline.layers.mask import Mask
from pipeline.layers.recurrent import RecurrentLayer, RecurrentState

if TYPE_CHECKING:
    from pipeline.generation.cache import KeyValueCache


class CachedMixing:
    """Mixes the new tokens of each sequence with the state of its row, and stores the state after them. See Mixing for the call.

    Args:
        layer: the layer, whose `mix` this becomes.

    Attributes:
        state: of all rows, None before the first pass. Those of rows without tokens are not read.
        row_bytes: size of the state of a row, and of what removes tokens from it.
    """

    def __init__(self, cache: KeyValueCache, layer: RecurrentLayer) -> None:
        self.cache, self.layer = cache, layer
        self.state: RecurrentState | None = None
        # Groups of the last pass, their inputs, and the states before them, where tokens can be removed again.
        self._removable: list[tuple[SequenceGroup, list[Tensor], RecurrentState]] = []
        convolutions = layer.convolutions()
        token = sum(map(len, convolutions)) * convolutions[0].element_size()
        wide = torch.promote_types(convolutions[0].dtype, torch.float32)
        state = token * (layer.kernel - 1) + len(layer.decay_rate_log) * layer.key_dim * layer.value_dim * wide.itemsize
        self.row_bytes = state if cache.lookahead == 1 else 2 * state + token * cache.lookahead
        layer.mix = self

    @property
    def allocated(self) -> int:
        """Bytes of the states of all rows."""
        return 0 if self.state is None else self.state.inputs.nbytes + self.state.memory.nbytes

    def __call__(self, layer: RecurrentLayer, inputs: Tensor, *gates: Tensor, mask: Mask) -> Tensor:  # noqa: ARG002 - as Mixing
        """See Mixing; the tokens are those of the pass, (1, tokens, ...)."""
        step = self.cache.step
        assert step is not None
        outputs = []
        self._removable = []
        for group in step.groups:
            parts = [group.split(x.unsqueeze(1)).squeeze(1) for x in (inputs, *gates)]
            rows = group.rows.to(inputs.device)
            before = None if group.fresh else self._of(rows)
            output, state = layer.advance(*parts, state=before)
            self._store(rows, state)
            if before is not None and group.count <= self.cache.lookahead > 1:
                self._removable.append((group, parts, before))
            outputs.append(group.join(output.flatten(2).unsqueeze(1)).squeeze(1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return joined.unflatten(2, (-1, layer.value_dim))

    @torch.inference_mode()
    def remove(self, counts: Tensor) -> None:
        """Remove the last tokens of the rows, tokens of the last pass: the state before it is advanced by those that remain.

        Args:
            counts: int64 (rows,), how many tokens of each row, on the CPU.
        """
        left = counts.clone()
        for group, parts, before in self._removable:
            removed, left[group.rows] = counts[group.rows], 0
            for count in sorted({*removed.tolist()} - {0}):
                members, kept = (removed == count).nonzero().squeeze(1), group.count - count
                assert kept >= 0, "tokens of an earlier pass"
                state = RecurrentState(before.inputs[members], before.memory[members])
                if kept:
                    _, state = self.layer.advance(*(part[members, :kept] for part in parts), state=state)
                self._store(group.rows[members].to(state.memory.device), state)
        assert not left.any(), "tokens of an earlier pass"
        self._removable = []

    def keep(self, rows: Tensor) -> None:
        """As KeyValueCache.keep."""
        if self.state is not None:
            self.state = self._of(rows.to(self.state.memory.device))

    def _of(self, rows: Tensor) -> RecurrentState:
        """Return the states of rows."""
        assert self.state is not None
        return RecurrentState(self.state.inputs[rows], self.state.memory[rows])

    def _store(self, rows: Tensor, state: RecurrentState) -> None:
        """Replace the states of rows."""
        if self.state is None:
            count = self.cache.rows
            inputs, memory = state.inputs, state.memory
            self.state = RecurrentState(inputs.new_zeros(count, *inputs.shape[1:]), memory.new_zeros(count, *memory.shape[1:]))
        self.state.inputs[rows] = state.inputs
        self.state.memory[rows] = state.memory
