"""A family's correspondence with the stock Hugging Face class, as two tables: of weights and of config.json keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.models.families import ModelConfig


@dataclass(frozen=True)
class Row:
    """One Hugging Face tensor and the weights of ours that it holds.

    Attributes:
        theirs: its name; `{i}` stands for every block's index.
        ours: our names, in the order in which theirs has them below each other (fused projections).
        transposed: theirs is (input, output), as GPT-2's Conv1D keeps it; ours is always (output, input).
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def of_block(self, index: int) -> Row:
        """The row with a block's index filled in."""
        return replace(self, theirs=self.theirs.format(i=index), ours=tuple(name.format(i=index) for name in self.ours))

    def join(self, weights: Sequence[Tensor]) -> Tensor:
        """Their tensor, from ours in the order of `ours`."""
        whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        return whole.t().contiguous() if self.transposed else whole


def rows(theirs: str, *ours: str, leaves: Sequence[str] = ("weight",), transposed: bool = False) -> tuple[Row, ...]:
    """A module's rows, one for each of its leaves (weight, bias); only a weight can be transposed."""
    return tuple(
        Row(f"{theirs}.{leaf}", tuple(f"{module}.{leaf}" for module in ours), transposed=transposed and leaf == "weight") for leaf in leaves
    )


@dataclass(frozen=True)
class Adapter:
    """The two tables of a family.

    Attributes:
        architecture: the stock class.
        model_type: its name in config.json.
        fields: key of config.json -> field (or property) of our configuration.
        constants: key of config.json -> what is true of every model of this family.
        table: every weight, blocks as `{i}`.
    """

    architecture: str
    model_type: str
    fields: dict[str, str]
    constants: dict[str, Any]
    table: tuple[Row, ...]

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """The content of config.json, but for what the tokenizer and the export say (token ids, number format)."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.constants,
            **{theirs: getattr(config, ours) for theirs, ours in self.fields.items()},
        }

    def weights(self, config: ModelConfig) -> Iterator[Row]:
        """Every tensor of the stock model, in its order; a tied head has none of its own."""
        blocks = [row for row in self.table if "{i}" in row.theirs]
        first = self.table.index(blocks[0])
        yield from self.table[:first]
        for index in range(config.layers):
            yield from (row.of_block(index) for row in blocks)
        yield from (row for row in self.table[first + len(blocks) :] if not (config.tie_embeddings and row.ours == ("head.weight",)))
