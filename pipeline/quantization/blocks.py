"""A decoder in bounded memory: the weights of one block at a time are read, used on the device and freed.

The hidden states of all sequences are on the CPU between the blocks, and one batch of them is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.checkpoint.weights import Weights
from pipeline.layers.computed_buffers import ComputedBuffers
from pipeline.layers.stack import Stack, prepare_layer
from pipeline.models import registry
from pipeline.models.config import ModelConfig

#: Sequences of a forward pass.
BATCH = 8
CPU = torch.device("cpu")


class BlockByBlock:
    """A decoder whose weights are on the meta device until their block is used. It computes what the model in memory computes, fp32.

    Args:
        weights: full weights by name.
        device: where the blocks are computed.
        prepare: called with each block at the start, for hooks.
    """

    def __init__(
        self, weights: Weights, config: ModelConfig, device: torch.device = CPU, prepare: Callable[[nn.Module], None] | None = None
    ) -> None:
        with torch.device("meta"):
            self._model: Stack = registry.build(config)
        self._model.eval().requires_grad_(False)
        self._weights, self.device = weights, device
        self._names = {parameter: name for name, parameter in self._model.named_parameters()}  # a tied head has the name of the embedding
        for name, module in self._model.named_modules():
            if isinstance(module, ComputedBuffers) and not name.startswith("blocks."):
                module.reset_buffers(device)
        if prepare is not None:
            for block in self._model.blocks.values():
                prepare(block)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._model.blocks)

    @torch.no_grad()
    def embed(self, sequences: Tensor) -> list[Tensor]:
        """Return the hidden states before the first block, of BATCH sequences each, on the CPU.

        Args:
            sequences: int64 (sequences, length).
        """
        assert self._model.embed is not None
        with self._present(self._model.embed):
            return [self._model.embed(batch.to(self.device)).to(CPU) for batch in sequences.split(BATCH)]

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each block with its name in the model. Its weights are freed when the next one is wanted."""
        for index, block in self._model.blocks.items():
            with self._present(block):
                yield f"blocks.{index}", block

    @torch.no_grad()
    def apply(self, block: nn.Module, hidden: list[Tensor], *, keep: bool = True) -> None:
        """Replace the hidden states by the outputs of a block.

        Args:
            block: as `blocks` yields it.
            hidden: on the CPU, each (batch, length, hidden).
            keep: False to compute the outputs for the hooks of the block only.
        """
        context = self._model.attention_context({})
        for index, x in enumerate(hidden):
            prepare_layer(block.attention, context.mask, (*x.shape[:2], x.shape[1]), self.device)
            output = block(x.to(self.device), context)
            if keep:
                hidden[index] = output.to(CPU)

    @torch.no_grad()
    def losses(self, hidden: list[Tensor], targets: Tensor) -> list[float]:
        """Return the mean loss of each batch of hidden states after the last block.

        Args:
            hidden: on the CPU, each (batch, length, hidden).
            targets: int64 (sequences, length).
        """
        context = self._model.attention_context({})
        head = [module for module in (self._model.norm, self._model.head) if module is not None]
        with self._present(*head):
            return [
                float(self._model.forward_head(x.to(self.device), context, {"targets": batch.to(self.device)}))
                for x, batch in zip(hidden, targets.split(BATCH), strict=True)
            ]

    @contextmanager
    def _present(self, *modules: nn.Module) -> Iterator[None]:
        """Read the weights of some modules, and free them at the end."""
        held = [part for module in modules for part in module.modules()]
        absent = [(part, dict(part._parameters)) for part in held]
        read: dict[nn.Parameter, nn.Parameter] = {}
        for part, parameters in absent:
            if isinstance(part, ComputedBuffers):
                part.reset_buffers(self.device)
            for leaf, parameter in parameters.items():
                if parameter is not None:
                    if parameter not in read:
                        value = self._weights.tensor(self._names[parameter]).to(self.device, parameter.dtype)
                        read[parameter] = nn.Parameter(value, requires_grad=False)
                    part._parameters[leaf] = read[parameter]
        read.clear()
        try:
            yield
        finally:
            for part, parameters in absent:
                part._parameters.update(parameters)
