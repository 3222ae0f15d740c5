"""Tensor and sequence parallelism: weights are cut by the plan, modules that must talk are swapped or hooked.

A block's attention and feed-forward are regions where each rank holds a piece of the weights: column-cut products at the
entry, row-cut products at the exit (Shoeybi et al. 2019). Entry and exit are collectives; with sequence parallelism
(Korthikanti et al. 2022) everything between two regions is cut along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.loss import linear_cross_entropy, mean_factor
from pipeline.layers.masked_head import NextSentenceHead
from pipeline.layers.moe import MoE
from pipeline.layers.position_bias import PerHead
from pipeline.models.plan import role
from pipeline.parallel import collectives
from pipeline.parallel.pieces import Piece

Region = Callable[[Tensor], Tensor]


class RowLinear(nn.Module):
    """A linear map whose input is cut: the ranks' parts of the output are summed, then the bias is added once."""

    def __init__(self, linear: nn.Linear, leave: Region) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, input / ranks) -> (batch, sequence, output)."""
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Module):
    """Rows `first_token` and on of the embedding; tokens of other ranks give zero, and the sum over ranks is the lookup."""

    def __init__(self, weight: nn.Parameter, first_token: int, group: ProcessGroup) -> None:
        super().__init__()
        self.weight = weight
        self.first_token = first_token
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence, hidden)."""
        local = tokens - self.first_token
        foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return collectives.reduce(rows.masked_fill(foreign.unsqueeze(-1), 0.0), self.group)


class VocabularyHead(nn.Module):
    """Rows `first_token` and on of the output matrix, with the cross-entropy over all of them."""

    def __init__(self, head: OutputHead, piece: Piece, group: ProcessGroup, enter: Region) -> None:
        super().__init__()
        self.project, self.weight, self.bias = head.project, head.weight, head.bias
        self.factor, self.label_smoothing = head.factor, head.label_smoothing
        self.first_token, self.vocabulary = piece.start(0), piece.full_shape[0]
        self.enter = enter
        self.reduce_max = partial(collectives.all_reduce, group=group, op=dist.ReduceOp.MAX)
        self.reduce_sum = partial(collectives.all_reduce, group=group)

    def forward(self, hidden: Tensor, targets: Tensor | None = None, loss_scale: Tensor | None = None) -> Tensor:
        """The mean loss, a 0-dim tensor; arguments as in OutputHead."""
        assert targets is not None, "logits of a cut vocabulary are never put together"
        if self.project is not None:
            hidden = self.project(hidden)
        if self.factor != 1.0:
            hidden = hidden * self.factor
        loss = linear_cross_entropy(
            self.enter(hidden),
            self.weight,
            targets,
            bias=self.bias,
            label_smoothing=self.label_smoothing,
            vocabulary=self.vocabulary,
            first_token=self.first_token,
            reduce_max=self.reduce_max,
            reduce_sum=self.reduce_sum,
        )
        return loss * mean_factor(targets, loss_scale)


def apply(model: nn.Module, pieces: dict[nn.Parameter, Piece], plan: dict[str, str], group: ProcessGroup, *, sequence: bool) -> None:
    """Put the collectives around the regions of a model whose weights are cut.

    Args:
        model: a pipeline stage (or the whole).
        pieces: which piece of which full weight each parameter is.
        plan: the family's parallel plan.
        group: the tensor ranks.
        sequence: cut activations along the sequence between the regions.
    """
    enter: Region = partial(collectives.gather_sequence if sequence else collectives.copy, group=group)
    leave: Region = partial(collectives.reduce_scatter_sequence if sequence else collectives.reduce, group=group)

    for prefix, module in list(model.named_modules()):
        linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        roles = {name: role(plan, f"{prefix}.{name}.weight") for name in linears}
        if "column" in roles.values():
            module.register_forward_pre_hook(lambda _, args: tuple(enter(a) if isinstance(a, Tensor) else a for a in args))
        for name, linear in linears.items():
            if roles[name] == "row":
                setattr(module, name, RowLinear(linear, leave))
        for name, child in list(module.named_children()):
            if isinstance(child, OutputHead):
                setattr(module, name, VocabularyHead(child, pieces[child.weight], group, enter))
        if isinstance(module, MoE):  # one region, its router included: the stacks are cut inside it
            module.register_forward_pre_hook(lambda _, args: tuple(enter(a) if isinstance(a, Tensor) else a for a in args))
            module.register_forward_hook(lambda _, args, output: leave(output))  # noqa: ARG005 - hook's signature
        if isinstance(module, NextSentenceHead):  # a region where all ranks compute the same, from the first row of each
            module.register_forward_pre_hook(lambda _, args: (enter(args[0]),))
            module.register_forward_hook(lambda _, args, output: collectives.share(output, group))  # noqa: ARG005 - hook's signature
        if isinstance(module, PerHead):
            module.register_forward_hook(lambda _, args, output: collectives.own_heads(output, group))  # noqa: ARG005 - hook's signature
        if isinstance(module, Embedding):
            weight = module.tokens.weight
            module.tokens = VocabularyEmbedding(weight, pieces[weight].start(0), group)  # type: ignore[arg-type, index, assignment]
            if sequence:
                module.register_forward_hook(lambda _, args, output: collectives.scatter_sequence(output, group))  # noqa: ARG005 - as above


def sums_over_tensor(piece: Piece, *, sequence: bool) -> bool:
    """Whether each tensor rank has a part of a weight's gradient.

    True for what every rank holds whole within a region of cut weights; with activations cut along the sequence also for what it applies
    to its own rows: norms, and the biases added after a region. An embedding's parts are applied before the cut.
    """
    if piece.role == "partial":
        return True
    return sequence and not piece.is_sliced_along("tensor") and ".embed." not in f".{piece.name}"
