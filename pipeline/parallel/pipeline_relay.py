"""A forward pass through pipeline stages on several ranks, one after the other, without a schedule: for generation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.mesh import Mesh


class Relay:
    """Passes hidden states from stage to stage, and the result of the last one to all. Each rank has one stage."""

    def __init__(self, mesh: Mesh) -> None:
        self.group, self.device = mesh.pipeline, mesh.device
        self.index, self.last = self.group.rank(), self.group.size() - 1

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the hidden states of the previous stage."""
        states = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(states, dist.get_global_rank(self.group, self.index - 1), group=self.group)
        return states

    def send(self, states: Tensor) -> None:
        """Send hidden states to the next stage."""
        dist.send(states.contiguous(), dist.get_global_rank(self.group, self.index + 1), group=self.group)

    def share(self, result: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the result of the last stage; it is None on the other ranks."""
        result = torch.empty(shape, dtype=dtype, device=self.device) if result is None else result.contiguous()
        dist.broadcast(result, dist.get_global_rank(self.group, self.last), group=self.group)
        return result
