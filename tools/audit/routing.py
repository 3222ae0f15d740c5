"""Whether layouts of an MoE model differ by more than rounding at ties of a router.

A router selects the experts with the highest scores. Two layouts sum in different orders, so their scores differ by rounding, and a token
whose best and next scores are that close gets other experts. From then on the two runs train different models, and biases of routers, which
move by the sign of a load, can differ by whole steps. To tell this from a defect, one process replays the run of a layout with the
layout's selections: then scores, losses, gradient norms and biases must agree to rounding in every step, and each replayed selection that
differs from the process's own must be a tie within the difference of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.certification.batches import random_batches, split
from pipeline.layers.moe import moe_layers
from pipeline.layers.router import Router


class Selections(NamedTuple):
    """What a router did in all steps. Tokens are in the order of the global batch.

    Attributes:
        scores: (steps, tokens, experts), with the correction bias.
        experts: int64 (steps, tokens, top_k), the experts that were used.
        own: int64 (steps, tokens, top_k), the experts that the scores select; differs from `experts` in a replay only.
    """

    scores: Tensor
    experts: Tensor
    own: Tensor


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        losses: of each step.
        norms: gradient norm of each step.
        selections: of each router, by the name of its weight.
        biases: final correction biases by the same name, fp32 (experts,).
    """

    losses: list[float]
    norms: list[float]
    selections: dict[str, Selections]
    biases: dict[str, Tensor]


class RouterRecorder:
    """Records the selections of one router, and replaces them in a replay.

    Args:
        router: the router.
        replay: int64 (steps, tokens, top_k), experts to use instead of its own.
    """

    def __init__(self, router: Router, replay: Tensor | None) -> None:
        self._select, self._bias, self._replay = router._select_experts, router.bias, replay
        self._steps: list[Selections] = []
        self._calls: list[Selections] = []
        router._select_experts = self._record  # type: ignore[method-assign]

    def _record(self, scores: Tensor) -> Tensor:
        own = self._select(scores)
        if scores.is_meta:  # the pipeline infers shapes
            return own
        start = sum(len(call.own) for call in self._calls)
        used = own if self._replay is None else self._replay[len(self._steps), start : start + len(own)]
        self._calls.append(Selections(scores if self._bias is None else scores + self._bias, used, own))
        return used

    def end_step(self) -> None:
        """Concatenate the micro-batches of the step."""
        self._steps.append(Selections(*map(torch.cat, zip(*self._calls, strict=True))))
        self._calls.clear()

    def selections(self) -> Selections:
        """The selections of all steps, of the tokens of this rank."""
        return Selections(*map(torch.stack, zip(*self._steps, strict=True)))


def train(config: Any, world_size: int, replay: Run | None = None, *, spoil: bool = False) -> Run:
    """Train on random batches. Collective.

    Args:
        config: checked configuration, without context parallelism and without whole experts (parallel.expert_tensor=1).
        world_size: number of ranks.
        replay: use the selections of this run.
        spoil: move one correction bias by one step after the first step.

    Raises:
        AssertionError: ranks with the same tokens (tensor and expert-data replicas) differ in a score or in a selection.
    """
    from pipeline.config.layout import Layout
    from pipeline.parallel import mesh as meshes
    from pipeline.parallel.parallelize import parallelize
    from pipeline.training.trainer import Trainer

    mesh = meshes.build_mesh(Layout.of(config, world_size), torch.device("cpu"))
    model = parallelize(config, mesh)
    names = {parameter: piece.name for parameter, piece in model.pieces.items()}
    routers = {names[moe.router.weight]: moe.router for moe in moe_layers(model)}
    recorders = {name: RouterRecorder(router, replay and replay.selections[name].experts) for name, router in routers.items()}
    trainer = Trainer(config, mesh, model)
    losses, norms = [], []
    shard = mesh.layout.batch_shard(mesh.coordinates)
    for step, (tokens, batch) in enumerate(random_batches(config)):
        loss, result = trainer.train(*split(tokens, batch, mesh.layout.batch_shards)[shard])
        losses.append(float(loss))
        norms.append(float(result.gradient_norm))
        for recorder in recorders.values():
            recorder.end_step()
        if spoil and step == 0:
            for router in routers.values():
                assert router.bias is not None
                router.bias.data[0] += router.bias_update_speed
    found = {name: (shard, recorder.selections(), routers[name].bias) for name, recorder in recorders.items()}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, found)
    shards: dict[str, dict[int, Selections]] = {}
    biases: dict[str, Tensor] = {}
    for name, (shard, selections, bias) in (item for rank in gathered for item in rank.items()):
        same = shards.setdefault(name, {}).setdefault(shard, selections)
        assert all(torch.equal(a, b) for a, b in zip(same, selections, strict=True)), f"{name}: ranks with the same tokens differ"
        if bias is not None:
            assert torch.equal(biases.setdefault(name, bias.detach().clone()), bias), f"{name}: the biases of the ranks differ"
    joined = {name: [selections for _, selections in sorted(of.items())] for name, of in shards.items()}
    whole = {name: Selections(*(torch.cat(parts, dim=1) for parts in zip(*of, strict=True))) for name, of in joined.items()}
    return Run(losses, norms, whole, biases)


def smallest_change(scores: Tensor, top_k: int, groups: int, topk_group: int) -> Tensor:
    """Return how much every score must change at least to select other experts.

    Args:
        scores: (..., experts), with the correction bias.
        top_k, groups, topk_group: as in Router.

    Returns:
        (...,), half the difference of two scores, or a quarter of the difference of two groups, which are sums of two scores.
    """
    change = torch.full(scores.shape[:-1], torch.inf)
    if topk_group < groups:
        grouped = scores.unflatten(-1, (groups, -1))
        terms = min(2, grouped.shape[-1])
        sums = grouped.topk(terms).values.sum(-1)
        best = sums.topk(topk_group + 1).values
        change = (best[..., -2] - best[..., -1]) / (2 * terms)
        kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, sums.topk(topk_group).indices, value=True)
        scores = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    best = scores.topk(top_k + 1).values
    return torch.minimum(change, (best[..., -2] - best[..., -1]) / 2)


@dataclass(frozen=True)
class Tie:
    """A token for which two runs select other experts.

    Attributes:
        step: from 1.
        router: name of its weight.
        token: index in the global batch.
        experts: selected in the one run and in the other.
        margin: smallest change of the scores that selects other experts.
        difference: largest difference of the scores of the two runs.
    """

    step: int
    router: str
    token: int
    experts: tuple[list[int], list[int]]
    margin: float
    difference: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.router}, token {self.token}: experts {self.experts[0]} and {self.experts[1]}, "
            f"margin {self.margin:.1e}, scores differ by {self.difference:.1e}"
        )


def ties(run: Run, other: Run, router: Any) -> Iterator[Tie]:
    """Yield the tokens for which the scores of `run` and `other` select other experts, by step and layer.

    Args:
        run: whose margins are given.
        other: a run of the same tokens.
        router: has top_k, groups and topk_group.
    """
    for step in range(len(run.losses)):
        for name in sorted(run.selections, key=depth):
            a, b = run.selections[name], other.selections[name]
            differ = (a.own[step].sort(dim=1).values != b.own[step].sort(dim=1).values).any(dim=1)
            margins = smallest_change(a.scores[step], router.top_k, router.groups, router.topk_group)
            for token in differ.nonzero().flatten().tolist():
                difference = float((a.scores[step, token] - b.scores[step, token]).abs().max())
                experts = (a.own[step, token].tolist(), b.own[step, token].tolist())
                yield Tie(step + 1, name, token, experts, float(margins[token]), difference)


def depth(name: str) -> tuple[bool, int]:
    """Sort key of a parameter name: blocks in order, then the modules of the head."""
    parts = name.split(".")
    return parts[0] != "blocks", next((int(part) for part in parts if part.isdigit()), 0)


def largest_score_difference(run: Run, other: Run) -> float:
    """The largest difference of two scores in all steps."""
    return max(float((run.selections[name].scores - other.selections[name].scores).abs().max()) for name in run.selections)


def relative_difference(values: list[float], others: list[float]) -> float:
    """The largest relative difference of two lists of numbers."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, others, strict=True))


def differing_biases(run: Run, other: Run) -> int:
    """The number of correction biases that are not equal bit by bit."""
    return sum(int((run.biases[name] != other.biases[name]).sum()) for name in run.biases)
