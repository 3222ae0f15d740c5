"""The weights of a model that grows, computed from those of a smaller one: one matrix at a time, and the same in every layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import cast

import torch
from torch import Tensor

from pipeline.checkpoint.growth import Growth
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.reader import WantedRun
from pipeline.config.schema import RunConfig
from pipeline.layers.init import initial_tensor
from pipeline.models.registry import family_of

#: Ends of the weights whose product a block adds to the residual stream: zero in a new block, which is then the identity.
_OUTPUTS = ("attention.output.weight", "attention.output.bias", "mlp.down.weight", "mlp.down.bias", "experts.down")


class GrownWeights:
    """The weights of the larger model, read as those of a checkpoint are. Random values are those of layers/init.py."""

    def __init__(self, source: MergedWeights, growth: Growth, config: RunConfig) -> None:
        self._source, self._growth, self._config = source, growth, config
        self._names = frozenset(source.names())
        self._last: tuple[object, Tensor] = (None, torch.empty(0))

    @torch.no_grad()
    def read(self, runs: Iterable[WantedRun]) -> None:
        """As Checkpoint.read, of weights alone. A weight that is not copied is computed from a full matrix of the smaller model."""
        copied: list[WantedRun] = []
        for run in runs:
            name, is_new = self._in_source(run.name)
            grows = name not in self._names or self._source.shape(name) != run.shape
            if is_new and name.endswith(_OUTPUTS):
                cast(Tensor, run.tensors["weight"]).zero_()
            elif ".mlp." in name and grows:
                self._compute(run, name)
            else:
                copied.append(replace(run, name=name))
        self._source.read(copied)

    def _in_source(self, name: str) -> tuple[str, bool]:
        """Return the name in the smaller model, and whether the weight is one of a new block."""
        if not name.startswith("blocks."):
            return name, False
        _, block, rest = name.split(".", 2)
        source, is_new = self._growth.blocks[int(block)]
        return f"blocks.{source}.{rest}", is_new

    def _compute(self, run: WantedRun, name: str) -> None:
        """Compute elements of a weight, one matrix of a stack at a time."""
        values, is_stack = cast(Tensor, run.tensors["weight"]), len(run.shape) == 3
        stack, box = (run.box[0], run.box[1:]) if is_stack else ((0, 1), run.box)
        size = prod(last - first for first, last in box)
        for place, number in enumerate(range(*stack)):
            first, last = max(run.start, place * size), min(run.start + values.numel(), (place + 1) * size)
            if first >= last:
                continue
            if name.endswith("router.weight"):
                matrix = self._router(run, name)
            else:
                matrix = self._expert(run, name, number) if is_stack else self._wider(self._source.tensor(name), run)
            wanted = matrix[tuple(slice(*side) for side in box)].flatten()
            values[first - run.start : last - run.start].copy_(wanted[first - place * size : last - place * size])

    def _router(self, run: WantedRun, name: str) -> Tensor:
        """Return a router: equal rows for the parts of a feed-forward (virtual groups of He et al. 2024, arxiv.org/abs/2410.07524)."""
        parts, copies = self._growth.parts, self._growth.copies
        rows = self._source.tensor(name) if copies else self._drawn(run.name, (run.shape[0] // parts, run.shape[1]))
        return rows.repeat_interleave(copies or parts, dim=0)

    def _expert(self, run: WantedRun, name: str, expert: int) -> Tensor:
        """Return a matrix of an expert: a part of a feed-forward, or of an expert, of the smaller model."""
        growth, dim, matrix = self._growth, _inner_dim(name), self._whole(name, expert)
        width = matrix.shape[dim] // growth.parts
        if growth.parts > 1:  # the weights of the parts sum to that of the whole
            matrix = matrix.narrow(dim, expert % growth.parts * width, width) * (growth.parts if dim == 1 else 1)
        if growth.copies != 1:
            matrix = self._changed(matrix, run, expert)
        return self._wider(matrix, run, expert)

    def _whole(self, name: str, expert: int) -> Tensor:
        """Return the matrix of the smaller model that an expert is made of; the last one is kept for the next expert."""
        number = expert // self._growth.copies if self._growth.copies else None
        if self._last[0] != (name, number):
            if number is None:
                matrix = self._source.tensor(f"{name.replace('.experts.', '.')}.weight")
            else:
                shape = self._source.shape(name)
                matrix = torch.empty(shape[1:])
                box = ((number, number + 1), *((0, size) for size in shape[1:]))
                self._source.read([WantedRun(name, shape, box, 0, {"weight": matrix.view(-1)})])
            self._last = (name, number), matrix
        return self._last[1]

    def _changed(self, matrix: Tensor, run: WantedRun, expert: int) -> Tensor:
        """Add noise to the matrix of an expert, and draw the weights of some intermediate dims anew, the same ones in its matrices.

        They are normal with mean and standard deviation of the weights that they replace (Drop-Upcycling, Nakamura et al. 2025,
        https://arxiv.org/abs/2502.19261).
        """
        settings, seed, stack = self._config.checkpoint, self._config.training.seed, (run.shape[0], *matrix.shape)
        part, changed = [(expert, 1), *((0, size) for size in matrix.shape)], matrix
        if settings.expert_noise:
            std = settings.expert_noise * _moments(matrix)[1]
            changed = matrix + initial_tensor(f"{run.name}.noise", stack, std, seed, part=part)[0]
        dim = _inner_dim(run.name)
        width = matrix.shape[dim]
        if count := round(settings.expert_reinitialized * width):
            layer = run.name.rpartition(".")[0]
            order = initial_tensor(f"{layer}.reinitialized", (run.shape[0], width), 1.0, seed, part=[(expert, 1), (0, width)])[0]
            chosen = order.argsort(stable=True)[:count]
            mean, std = _moments(matrix.index_select(dim, chosen))
            drawn = initial_tensor(f"{run.name}.reinitialized", stack, std, seed, part=part)[0] + mean
            changed = changed.index_copy(dim, chosen, drawn.index_select(dim, chosen))
        return changed

    def _wider(self, matrix: Tensor, run: WantedRun, expert: int | None = None) -> Tensor:
        """Return a matrix or bias with more intermediate dims: initial values before the activation, and zeros behind it."""
        shape, dim = run.shape if expert is None else run.shape[1:], _inner_dim(run.name)
        added = [(0, size) for size in shape]
        added[dim] = (matrix.shape[dim], shape[dim] - matrix.shape[dim])
        if not added[dim][1]:
            return matrix
        if dim == 1:
            return torch.cat([matrix, torch.zeros([size for _, size in added])], dim)
        drawn = self._drawn(run.name, run.shape, added if expert is None else [(expert, 1), *added])
        return torch.cat([matrix, drawn if expert is None else drawn[0]], dim)

    def _drawn(self, name: str, shape: tuple[int, ...], part: list[tuple[int, int]] | None = None) -> Tensor:
        """Return initial values, as a run from scratch draws them."""
        model = self._config.model
        return initial_tensor(name, shape, family_of(model).initial_std(model, name), self._config.training.seed, part=part)


def _inner_dim(name: str) -> int:
    """The dim of a matrix of a feed-forward that is the intermediate width."""
    return 1 if name.endswith(("down.weight", ".down")) else 0


def _moments(values: Tensor) -> tuple[float, float]:
    """Mean and standard deviation; NumPy's do not depend on the number of threads."""
    array = values.contiguous().numpy().astype("float64")
    return float(array.mean()), float(array.std())
