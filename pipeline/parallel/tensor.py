"""Tensor and sequence parallelism: weights are cut by the plan, modules that must talk are swapped or hooked.

A block's attention and feed-forward are regions where each rank holds a piece of the weights: column-cut products at the
entry, row-cut products at the exit (Shoeybi et al. 2019). Entry and exit are collectives; with sequence parallelism
(Korthikanti et al. 2022) everything between two regions is cut along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.layers.decoder import Decoder, OutputHead
from pipeline.layers.loss import linear_cross_entropy
from pipeline.models.plan import role
from pipeline.parallel import collectives
from pipeline.parallel.pieces import Piece, cut

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

    def __init__(self, weight: nn.Parameter, first_token: int, group: ProcessGroup, enter: Region) -> None:
        super().__init__()
        self.weight = weight
        self.first_token = first_token
        self.enter = enter
        self.reduce_max = partial(collectives.all_reduce, group=group, op=dist.ReduceOp.MAX)
        self.reduce_sum = partial(collectives.all_reduce, group=group)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean next-token loss of (batch, sequence, hidden) against (batch, sequence) targets; a 0-dim tensor."""
        assert targets is not None, "logits of a cut vocabulary are never put together"
        return linear_cross_entropy(
            self.enter(hidden),
            self.weight,
            targets,
            first_token=self.first_token,
            reduce_max=self.reduce_max,
            reduce_sum=self.reduce_sum,
        )


def replace_weights(stages: Iterable[nn.Module], new: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put `new(name, parameter)` in every parameter's place; a parameter that stands in two places stays one."""
    done: dict[nn.Parameter, nn.Parameter] = {}
    for stage in stages:
        for prefix, module in stage.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in done:
                    done[parameter] = new(f"{prefix}.{leaf}", parameter)
                setattr(module, leaf, done[parameter])


def cut_weights(stages: Iterable[nn.Module], plan: dict[str, str], ranks: int, rank: int, *, tied: bool) -> dict[nn.Parameter, Piece]:
    """Replace every weight (on the meta device) by this tensor rank's piece of it.

    Args:
        stages: parts of one model, in order; names are those of the whole model.
        plan: the family's parallel plan.
        ranks: tensor ranks.
        rank: this one.
        tied: the head is the embedding; a stage that has a head of its own then holds a copy.

    Returns:
        The new parameters and which piece each is.
    """
    pieces: dict[nn.Parameter, Piece] = {}

    def piece_of(name: str, parameter: nn.Parameter) -> nn.Parameter:
        is_copy = tied and name == "head.weight"
        name = "embed.tokens.weight" if is_copy else name
        piece = cut(name, tuple(parameter.shape), role(plan, name), ranks, rank, copy=is_copy)
        local = nn.Parameter(parameter.new_empty(piece.shape))
        pieces[local] = piece
        return local

    replace_weights(stages, piece_of)
    return pieces


def apply(model: Decoder, pieces: dict[nn.Parameter, Piece], plan: dict[str, str], group: ProcessGroup, *, sequence: bool) -> None:
    """Put the collectives around the regions of a model whose weights are cut.

    Args:
        model: a pipeline stage (or the whole); `embed` or `head` may be None.
        pieces: what cut_weights returned.
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
            module.register_forward_pre_hook(lambda _, args: (enter(args[0]), *args[1:]))
        for name, linear in linears.items():
            if roles[name] == "row":
                setattr(module, name, RowLinear(linear, leave))

    embed: Any = model.embed
    if embed is not None:
        weight = embed.tokens.weight
        embed.tokens = VocabularyEmbedding(weight, pieces[weight].start, group)
        if sequence:
            embed.register_forward_hook(lambda _, args, output: collectives.scatter_sequence(output, group))  # noqa: ARG005 - hook's signature
    if isinstance(model.head, OutputHead):
        weight = model.head.weight
        model.head = VocabularyHead(weight, pieces[weight].start, group, enter)


def sums_over_sequence(piece: Piece) -> bool:
    """Whether a weight's gradient must be summed over the tensor ranks when activations are cut along the sequence.

    True for what every rank holds whole and applies to its own rows: norms, and the biases added after a region.
    The embedding's positions are applied before the cut.
    """
    return piece.dim is None and not piece.name.startswith("embed.")
