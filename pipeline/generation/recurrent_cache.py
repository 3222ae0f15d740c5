"""The states of a layer with a recurrent state (layers/recurrent.py), one for each sequence of the cache."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipeline.generation.passes import Pass
from pipeline.layers.mask import Mask
from pipeline.layers.recurrent import RecurrentLayer, RecurrentState


class Rows(Protocol):
    """What a layer reads of the cache of all layers.

    Attributes:
        rows: number of sequences.
        step: the present pass.
    """

    rows: int
    step: Pass | None


class CachedMixing:
    """Mixes the new tokens of each sequence with the state of its row, and stores the state after them. See Mixing for the call.

    Args:
        layer: the layer, whose `mix` this becomes.

    Attributes:
        state: of all rows, None before the first pass. Those of rows without tokens are not read.
        row_bytes: size of the state of a row.
    """

    def __init__(self, cache: Rows, layer: RecurrentLayer) -> None:
        self.cache = cache
        self.state: RecurrentState | None = None
        convolutions = layer.convolutions()
        inputs = sum(map(len, convolutions)) * (layer.kernel - 1) * convolutions[0].element_size()
        wide = torch.promote_types(convolutions[0].dtype, torch.float32)
        self.row_bytes = inputs + len(layer.decay_bias) * layer.key_dim * layer.value_dim * wide.itemsize
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
        for group in step.groups:
            parts = [group.split(x.unsqueeze(1)).squeeze(1) for x in (inputs, *gates)]
            rows = group.rows.to(inputs.device)
            output, state = layer.advance(*parts, state=None if group.fresh else self._of(rows))
            self._store(rows, state)
            outputs.append(group.join(output.flatten(2).unsqueeze(1)).squeeze(1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return joined.unflatten(2, (-1, layer.value_dim))

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
