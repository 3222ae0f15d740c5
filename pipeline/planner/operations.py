"""What a rank executes, as data: matrix products, attention calls, memory-bound kernels and collectives of a part of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.training.matrix_layout import LocalMatrix

Phase = Literal["forward", "backward", "recompute", "update"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True)
class Product:
    """`batch` matrix products (m, k) x (k, n).

    Attributes:
        name: the weight, or an empty string for a product of activations.
        phase: forward, backward, recompute, or update of the weights.
        bytes_per_element: of operands and result.
    """

    name: str
    phase: Phase
    m: int
    n: int
    k: int
    batch: int = 1
    bytes_per_element: int = 2

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Operands and result, each once."""
        return float(self.bytes_per_element * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n))


@dataclass(frozen=True)
class RingRules:
    """What decides the kernel of ring attention, besides shapes and dtype.

    Attributes:
        causal: a query does not attend to later positions.
        documents: a query attends only to its document.
        slopes: ALiBi slopes are added to the scores.
        window: sliding window in tokens, None for none.
        softcap: bound of the scores, None for none.
    """

    causal: bool
    documents: bool = False
    slopes: bool = False
    window: int | None = None
    softcap: float | None = None

    @property
    def masked(self) -> bool:
        """Whether a rule besides `causal` applies."""
        return self.documents or self.slopes or self.window is not None

    @property
    def segmented(self) -> bool:
        """Whether the kernel takes the documents as segments: no other rule applies besides `causal`."""
        return self.documents and not (self.slopes or self.window is not None or self.softcap is not None)


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention kernel, or the backward pass of one.

    Attributes:
        phase: forward, backward or recompute.
        batch: sequences.
        heads, kv_heads: of this rank.
        queries, keys: positions.
        head_dim, value_dim: widths of a head.
        pairs: share of all (query, key) pairs that are computed: one half for a causal mask, less for a window.
        ring: ranks between which keys and values rotate.
        bytes_per_element: of queries, keys, values and output.
        rules: of ring attention, else None.
    """

    phase: Phase
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    pairs: float
    ring: int = 1
    bytes_per_element: int = 2
    rules: RingRules | None = None

    @property
    def products(self) -> int:
        """Number of matrix products over all pairs: two in the forward pass, five in the backward pass, which recomputes the scores."""
        return 5 if self.phase == "backward" else 2

    @property
    def flops(self) -> float:
        """Multiplications and additions of the pairs that are computed."""
        pairs = self.batch * self.heads * self.queries * self.keys * self.ring * self.pairs
        return pairs * self.products * (self.head_dim + self.value_dim)

    @property
    def bytes(self) -> float:
        """Queries, keys, values and output, each once; in the backward pass also their gradients."""
        query, key = self.heads * self.queries, self.kv_heads * self.keys * self.ring
        once = self.batch * (query + key) * (self.head_dim + self.value_dim) * self.bytes_per_element
        return float(once * (2 if self.phase == "backward" else 1))

    @property
    def sent(self) -> float:
        """Bytes that a rank sends around the ring: keys and values, and in the backward pass their fp32 gradients back to their rank."""
        if self.ring == 1:
            return 0.0
        elements = self.batch * self.kv_heads * self.keys * (self.head_dim + self.value_dim)
        gradients = self.ring * 4 if self.phase == "backward" else 0
        return float(elements * ((self.ring - 1) * self.bytes_per_element + gradients))


@dataclass(frozen=True)
class Elementwise:
    """A memory-bound kernel: everything else (norms, activations, residual sums, permutations, the softmax of the loss).

    Attributes:
        name: operator, or the operators that are fused.
        bytes: read and written.
    """

    name: str
    phase: Phase
    bytes: float


@dataclass(frozen=True)
class Collective:
    """A collective over a mesh axis.

    Attributes:
        axis: mesh axis (tensor, context, expert).
        phase: forward, backward, recompute, or update of the weights.
        bytes: size of the full buffer: the result of an all-gather, the input of the others.
    """

    kind: Kind
    axis: str
    phase: Phase
    bytes: float


Operation = Product | AttentionCall | Elementwise | Collective


@dataclass(frozen=True)
class TracedWeights:
    """Weights of a part that the engine treats alike.

    Attributes:
        name: of the weight in the full model; in blocks, that of the traced block of its kind.
        elements: on this rank.
        axis: the ranks that hold the same ones: dense, or data for experts.
        matrix: whether they are matrices (decayed, and freed by ZeRO 3) or vectors.
        matrices: those of this rank if Muon updates them, else none.
        summed: whether their gradients are summed over the tensor ranks.
        shared: "tied_embedding" or "pipeline" where other stages hold them too, else empty.
        copy: whether this is the head's copy of a tied embedding.
        fixed: whether they have no gradient.
        stored: bytes of weights that the configuration does not train; 0 for others.
        sharded: whether ZeRO 3 shards these bytes: those of matrices that are not in 4 bits.
        unit: module whose gradients are reduced together; empty for the part itself.
        gathers: under ZeRO 3, how often a rank that holds the whole model gathers them for a micro-batch.
        rate: learning rate as a factor of optimizer.lr.
    """

    name: str
    elements: int
    axis: str = "dense"
    matrix: bool = True
    summed: bool = False
    shared: str = ""
    copy: bool = False
    fixed: bool = False
    stored: int = 0
    sharded: bool = False
    unit: str = ""
    gathers: int = 2
    matrices: tuple[LocalMatrix, ...] = ()
    rate: float = 1.0

    @property
    def muon(self) -> bool:
        """Whether Muon updates them."""
        return bool(self.matrices)


@dataclass
class TracedPart:
    """The operations of one micro-batch in one part of the model: its embedding, one block, or norm and head.

    Attributes:
        name: embed, the index of a block, or head.
        operations: in order of execution.
        producers: bytes that stay allocated between forward and backward pass, without weights, by what produces them.
        offloaded: bytes of its input if that is in host memory meanwhile.
        output: bytes of the result.
        peaks: most bytes that its forward and its backward pass allocate, beyond what was saved, without gradients of weights.
        weights: of this rank.
        reference: operations of the forward pass of the reference model (DPO), in order of execution.
    """

    name: str
    operations: list[Operation] = field(default_factory=list)
    producers: dict[str, int] = field(default_factory=dict)
    offloaded: int = 0
    output: int = 0
    peaks: tuple[int, int] = (0, 0)
    weights: list[TracedWeights] = field(default_factory=list)
    reference: list[Operation] = field(default_factory=list)

    @property
    def saved(self) -> int:
        """Bytes that stay allocated between forward and backward pass, without weights."""
        return sum(self.producers.values())

    def offload(self, size: int) -> None:
        """Keep the input in host memory. It is on the device while the part computes, and while the backward pass behind it does."""
        if not self.producers:  # frozen: it has no backward pass
            return
        largest = max(self.producers, key=self.producers.__getitem__)
        self.producers[largest] -= size
        self.offloaded, self.peaks = size, (self.peaks[0] + size, self.peaks[1] + 2 * size)

    @property
    def parameters(self) -> int:
        """Elements of all weights of this rank; those of a tied embedding count where the embedding is."""
        return sum(weights.elements for weights in self.weights if not weights.copy)

    @property
    def trained(self) -> int:
        """As `parameters`, without the weights that the configuration does not train."""
        return sum(weights.elements for weights in self.weights if not (weights.copy or weights.stored))

    @property
    def products(self) -> list[Product]:
        """The matrix products."""
        return [operation for operation in self.operations if isinstance(operation, Product)]

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention, with recomputation."""
        return sum(operation.flops for operation in self.operations if isinstance(operation, Product | AttentionCall))
