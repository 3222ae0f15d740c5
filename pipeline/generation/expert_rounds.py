"""Forward passes of ranks that share experts: ranks of an expert group decode different prompts, and send tokens to each other's experts.

Each pass calls every MoE layer once, so the passes of a group are rounds that all of its ranks enter. How many sequences and tokens a rank
has in a round does not matter; a rank without prompts computes its experts for the others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.layers.moe import moe_layers
from pipeline.parallel import collectives
from pipeline.parallel.expert_parallel import ExpertParallelExperts


class ExpertRounds:
    """The rounds of one rank. Without experts of several ranks, both methods return at once.

    Args:
        model: this rank's part of the model.
        group: the expert-parallel group.
    """

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

    def _any_has_tokens(self, own: bool) -> Tensor:
        """Return whether a rank of the group runs a forward pass in this round, int64 (); only a rank that runs none waits for it."""
        device = self._experts[0].experts.gate.device
        return collectives.all_reduce(torch.tensor(int(own), device=device), self.group, "max")
