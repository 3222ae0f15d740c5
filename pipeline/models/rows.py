"""The table of a family's weights in the stock Hugging Face class: one row a stock tensor, read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]

#: What stands for a block's index -> (index in their model, index in ours) of all the blocks that it stands for.
SECTIONS: dict[str, Callable[[Any], Iterable[tuple[int, int]]]] = {
    "i": lambda config: ((index, index) for index in range(config.layers)),
    "encoder": lambda config: ((index, index) for index in range(config.encoder_blocks)),
    "decoder": lambda config: ((index, index + config.encoder_blocks) for index in range(config.decoder_blocks)),
}


@dataclass(frozen=True)
class Row:
    """One Hugging Face tensor and the weights of ours that it holds.

    Attributes:
        theirs: its name; `{i}` stands for every block's index, `{encoder}` and `{decoder}` for those of one of them, `{e}` for every
            expert's.
        ours: our names, in the order in which theirs has them below each other (fused projections).
        transposed: theirs is (input, output), as GPT-2's Conv1D keeps it; ours is always (output, input).
        interleaved: field of our configuration that counts groups of rows (BLOOM: heads), when theirs has the first group of each of
            ours, then the second of each, and so on; empty when they stand below each other whole.
        groups: that count, once `of` has looked it up.
        expert: theirs is this slice of dim 0 of ours, a stack of experts.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    interleaved: str = ""
    groups: int = 1
    expert: int | None = None

    def of(self, config: Any) -> Row:
        """The row for the sizes of a configuration."""
        return replace(self, groups=getattr(config, self.interleaved)) if self.interleaved else self

    @property
    def blocks(self) -> str:
        """The blocks the row stands for: a key of SECTIONS, or "" for a weight outside the blocks."""
        return next((name for name in SECTIONS if f"{{{name}}}" in self.theirs), "")

    def of_block(self, theirs: int, ours: int) -> Row:
        """The row with a block's index in their model and in ours filled in."""
        mark = f"{{{self.blocks}}}"
        return replace(self, theirs=self.theirs.replace(mark, str(theirs)), ours=tuple(name.replace(mark, str(ours)) for name in self.ours))

    def of_expert(self, index: int) -> Row:
        """The row with an expert's index filled in."""
        return replace(self, theirs=self.theirs.replace("{e}", str(index)), expert=index)

    def join(self, weights: Sequence[Tensor]) -> Tensor:
        """Their tensor, from ours in the order of `ours`."""
        parts = [weight if self.expert is None else weight[self.expert] for weight in weights]
        if self.groups > 1:
            parts = [torch.stack([part.unflatten(0, (self.groups, -1)) for part in parts], dim=1).flatten(0, 2)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.t().contiguous() if self.transposed else whole.contiguous()

    def split(self, theirs: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Ours from their tensor, the inverse of `join`: views in the order of `ours`.

        Args:
            theirs: of the shape that `shape` tells.
            shapes: of ours; where theirs is an expert's, the parts that come back are slices of them along dim 0.
        """
        whole = theirs.t() if self.transposed else theirs
        if self.groups > 1:
            grouped = whole.unflatten(0, (self.groups, len(shapes), -1))
            return [grouped[:, part].flatten(0, 1) for part in range(len(shapes))]
        return list(whole.split([shape[0] for shape in self._parts(shapes)]))

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of their tensor, from the shapes of ours."""
        parts = self._parts(shapes)
        whole = (sum(part[0] for part in parts), *parts[0][1:])
        return whole[::-1] if self.transposed else whole

    def elements(self, shapes: Sequence[Shape]) -> int:
        """How many numbers their tensor has."""
        return prod(self.shape(shapes))

    def _parts(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [tuple(shape) if self.expert is None else tuple(shape[1:]) for shape in shapes]


def rows(theirs: str, *ours: str, leaves: Sequence[str] = ("weight",), transposed: bool = False, interleaved: str = "") -> tuple[Row, ...]:
    """A module's rows, one for each of its leaves (weight, bias); only a weight can be transposed."""
    return tuple(
        Row(f"{theirs}.{leaf}", tuple(f"{module}.{leaf}" for module in ours), transposed and leaf == "weight", interleaved)
        for leaf in leaves
    )


@dataclass(frozen=True)
class Blocks:
    """Rows that repeat for some of the blocks only, or for every expert of a block.

    Attributes:
        rows: with `{i}`, and `{e}` in those of experts.
        where: (index in their model, index in ours) of the blocks that have them.
        experts: field of our configuration that counts experts.
    """

    rows: tuple[Row, ...]
    where: Callable[[Any], Iterable[tuple[int, int]]] = SECTIONS["i"]
    experts: str = ""

    def written_out(self, config: Any) -> Iterator[Row]:
        """The rows of all these blocks."""
        for theirs, ours in self.where(config):
            for row in self.rows:
                filled = row.of_block(theirs, ours)
                if "{e}" in row.theirs:
                    yield from (filled.of_expert(index) for index in range(getattr(config, self.experts)))
                else:
                    yield filled


def written_out(table: Iterable[Row | Blocks], config: Any) -> Iterator[Row]:
    """Every row of a table for the sizes of a configuration. Neighbouring rows of the same blocks follow each other block by block."""
    for section, group in groupby(table, key=lambda item: item.blocks if isinstance(item, Row) else "BLOCKS"):
        if section in SECTIONS:
            found = Blocks(tuple(row for row in group if isinstance(row, Row)), SECTIONS[section]).written_out(config)
            yield from (row.of(config) for row in found)
            continue
        for item in group:
            yield from (row.of(config) for row in ([item] if isinstance(item, Row) else item.written_out(config)))
