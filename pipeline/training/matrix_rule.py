"""Which weights Muon updates, and as which matrices: a property of the full weight, so that it is the same in every layout.

Newton-Schulz of a stack or of a part of a matrix is another update. The rule reads the name of a weight and its full shape, never the
shape of a rank's piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pipeline.config.optimizer import OptimizerConfig
from pipeline.models import mup
from pipeline.models.vectors import is_matrix
from pipeline.parallel.pieces import Piece

#: Names of the hidden matrices within a block, of all families. Queries, keys and values are separate weights, and so are gates and up
#: projections: none is fused. Of multi-head latent attention, each projection is a matrix, as in Moonlight (Liu et al. 2025).
_IN_BLOCKS = (
    *("query", "key", "group_query", "group_key", "value", "attention.gate", "output", "query_down", "query_up", "key_value_down"),
    *("key_value_up", "mlp.gate", "mlp.up", "mlp.down", "mlp.shared.gate", "mlp.shared.up", "mlp.shared.down"),
    *("layer_input.gate", "layer_input.project", "decay_down", "decay_up", "gate_down", "gate_up"),
)
_BLOCKS = ("blocks.*", "head.depths.*")
#: Patterns of the names of matrices that Muon updates. Experts are a stack: a matrix for each.
HIDDEN = (
    *(f"{block}.{name}.weight" for block in _BLOCKS for name in _IN_BLOCKS),
    *(f"{block}.experts.{name}" for block in _BLOCKS for name in ("gate", "up", "down")),
    "head.depths.*.project.weight",
)
#: Patterns of the names of matrices that AdamW updates: embeddings, tables of position biases, and routers; those of heads; gates of one
#: number for each token or head, and convolutions.
OTHER = (
    *("embed.*", "*coder_bias.weight", "*.router.weight"),
    *("*.shared_gate.weight", "*.attention.beta.weight", "*.attention.decay.weight", "*_conv"),
)


@dataclass(frozen=True)
class Matrices:
    """A weight as a stack of matrices: its elements in order are (count, rows, columns)."""

    count: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.count} x ({self.rows}, {self.columns})" if self.count > 1 else f"({self.rows}, {self.columns})"


@dataclass(frozen=True)
class MatrixRule:
    """The rule of a run.

    Attributes:
        muon: whether the optimizer is Muon; otherwise it has no matrices.
        heads: name of a projection -> number of heads that are a matrix each; empty for one matrix a weight.
        rate: learning rate of the matrices, over that of the same weights in AdamW.
    """

    muon: bool = False
    heads: Mapping[str, int] = field(default_factory=dict)
    rate: float = 1.0

    @classmethod
    def of(cls, optimizer: OptimizerConfig, model: Any) -> MatrixRule:
        """The rule of an optimizer and a model configuration."""
        if optimizer.name != "muon":
            return cls()
        heads = {"query": model.heads, "key": model.kv_heads, "value": model.kv_heads} if optimizer.muon_per_head else {}
        return cls(muon=True, heads=heads, rate=mup.muon_rate(model, optimizer.muon_adjust_lr))

    def matrices(self, name: str, shape: tuple[int, ...]) -> Matrices | None:
        """Return a weight as the matrices that Muon updates, None for a weight of AdamW.

        Args:
            name: of the weight in the full model.
            shape: of the full weight.

        Raises:
            KeyError: the weight is a matrix that the tables do not have.
        """
        if not self.muon or not is_matrix(name, shape):
            return None
        if any(fnmatchcase(name, pattern) for pattern in HIDDEN):
            *stack, rows, columns = shape
            count = stack[0] if stack else self.heads.get(name.split(".")[-2], 1)
            return Matrices(count, rows if stack else rows // count, columns)
        of_head = name.startswith("head.") and not name.startswith("head.depths.")
        if of_head or any(fnmatchcase(name, pattern) for pattern in OTHER):
            return None
        raise KeyError(f"weight {name} is in no table of training/matrix_rule.py")

    def rate_of(self, piece: Piece) -> float:
        """The learning rate of the weight of a piece, as a factor of optimizer.lr."""
        return piece.rate * self.rate if self.is_hidden(piece) else piece.rate

    def is_hidden(self, piece: Piece) -> bool:
        """Whether Muon updates the weight of a piece."""
        return self.matrices(piece.name, piece.full_shape) is not None


#: The rule of optimizers that update every weight alike.
ADAMW = MatrixRule()


def lines(rule: MatrixRule, pieces: Iterable[Piece]) -> Iterator[str]:
    """Yield what Muon updates and what AdamW does: names with * for a number, matrices of a weight, number of such weights."""
    counts: dict[tuple[str, str], int] = {}
    for piece in pieces:
        pattern = ".".join("*" if part.isdecimal() else part for part in piece.name.split("."))
        matrices = rule.matrices(piece.name, piece.full_shape)
        key = pattern, "adamw" if matrices is None else f"muon {matrices}"
        counts[key] = counts.get(key, 0) + 1
    width = max(len(pattern) for pattern, _ in counts)
    for (pattern, how), count in counts.items():
        yield f"{pattern:<{width}}  {count:>4} of {how}"
