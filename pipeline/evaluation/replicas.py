"""Work that rank 0 hands out: every replica of the model computes a share of the items, and rank 0 gets all results.

Only rank 0 runs the evaluation itself, so that a data set is read once, not by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from pipeline.common.errors import UserError, Violation
from pipeline.parallel.mesh import Mesh


@dataclass(frozen=True)
class _Order:
    """What rank 0 asks for.

    Attributes:
        items: to compute; None at the end.
        options: of the computation.
        problems: why rank 0 has stopped.
    """

    items: Sequence[Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    problems: Sequence[Violation] = ()


class Replicas:
    """The replicas of a model.

    Args:
        mesh: this rank's process groups.
        compute: items, and options that are the same for all of them -> one result for each item; runs on every rank of a replica.
    """

    def __init__(self, mesh: Mesh, compute: Callable[..., list[Any]]) -> None:
        self._mesh, self._compute = mesh, compute

    def lead(self, work: Callable[[], Any]) -> Any:
        """Run `work`, which calls `map`, on rank 0, while the other ranks take part in its calls; its result on rank 0, else None.

        Raises:
            UserError: of `work` or of a computation, on every rank.
        """
        if self._mesh.rank > 0:
            while (order := _broadcast(None)).items is not None:
                self._take_part(order)
            if order.problems:
                raise UserError(order.problems)
            return None
        try:
            result = work()
        except UserError as error:
            _broadcast(_Order(None, problems=error.violations))
            raise
        _broadcast(_Order(None))
        return result

    def map(self, items: Sequence[Any], **options: Any) -> list[Any]:
        """Return the results of the items, in their order; on rank 0 within `lead`.

        Raises:
            UserError: of the computation.
        """
        results: list[Any] = [None] * len(items)
        problems: list[Violation] = []
        for share, found, violations in filter(None, self._take_part(_broadcast(_Order(items, options)))):
            problems += violations
            if found is not None:
                results[share :: self._mesh.layout.batch_shards] = found
        if problems:
            raise UserError(list(dict.fromkeys(problems)))
        return results

    def _take_part(self, order: _Order) -> list[Any]:
        """Compute this replica's share; returns by rank the number of the share, its results, and why there are none."""
        layout, where = self._mesh.layout, self._mesh.coordinates
        share = layout.batch_shard(where)
        assert order.items is not None
        answer: tuple[int, list[Any] | None, Sequence[Violation]]
        try:
            answer = share, self._compute(order.items[share :: layout.batch_shards], **order.options), ()
        except UserError as error:
            answer = share, None, error.violations
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, answer if where.tensor == where.pipeline == 0 else None)
        return answers


def _broadcast(order: _Order | None) -> _Order:
    """Return the order of rank 0."""
    box = [order]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]
