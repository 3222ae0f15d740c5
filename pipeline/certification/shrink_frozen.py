"""training.frozen of a small version: its few blocks freeze what the many blocks of the planned model freeze."""

from __future__ import annotations

import torch

from pipeline.common import knobs
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.config.trained import is_frozen
from pipeline.parallel.parallelize import build_model


def shrink_frozen(small: RunConfig, planned: RunConfig, before: Layout, after: Layout) -> RunConfig:
    """Return the small version with patterns of training.frozen for its own blocks.

    Every small block stands for a planned one of its stage. Planned blocks that freeze different weights are represented first, as far as
    the small stage has blocks.

    Args:
        small: with the small sizes.
        planned: a legal configuration.
        before, after: the layouts of both.
    """
    if not planned.training.frozen:
        return small
    with torch.device("meta"):
        names = [name for name, _ in build_model(small).named_parameters()]
    inside = {name.split(".", 2)[2] for name in names if name.startswith("blocks.")}
    represented: dict[int, int] = {}
    for stage in range(after.stage_count):
        planned_stage = round(stage * (before.stage_count - 1) / max(1, after.stage_count - 1))
        blocks = list(after.layers(stage, small.model.layers))
        chosen = _represented(planned, list(before.layers(planned_stage, planned.model.layers)), sorted(inside), len(blocks))
        represented |= zip(blocks, chosen, strict=True)
    frozen = [name for name in names if is_frozen(planned, _planned_name(name, represented))]
    if frozen == [name for name in names if is_frozen(small, name)]:
        return small
    return knobs.changed(small, {"training.frozen": frozen})


def _represented(planned: RunConfig, blocks: list[int], inside: list[str], count: int) -> list[int]:
    """Return `count` blocks of a planned stage: the first one of each kind of frozen weights, then others; in their order."""
    kinds: dict[tuple[bool, ...], int] = {}
    for block in blocks:
        kinds.setdefault(tuple(is_frozen(planned, f"blocks.{block}.{name}") for name in inside), block)
    first = list(kinds.values())
    others = [block for block in blocks if block not in first]
    chosen = sorted([*first, *others][:count])
    return [*chosen, *chosen[-1:] * (count - len(chosen))]


def _planned_name(name: str, represented: dict[int, int]) -> str:
    """Return the name of a weight of the small model in the planned one."""
    first, *rest = name.split(".", 2)
    return name if first != "blocks" else f"blocks.{represented[int(rest[0])]}.{rest[1]}"
