"""What an engine does, where engines differ: kernels, overlap, number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Practice:
    """What an engine does; the defaults are this project's on GPUs.

    Attributes:
        scores: of attention: `fused` never writes them, `saved` keeps them for the backward pass, `recomputed` computes them again there
            (Korthikanti et al. 2022).
        overlap_data: share of the compute during which collectives of data parallelism run beside it.
        overlap_tensor: share of the collectives of tensor parallelism that is hidden behind products.
        fp8_products: factor of the rate of the products of the blocks in 8 bits; 0 where they are in 16 bits.
        logits_bytes: of each logit of a micro-batch, which are all in memory; 0 for this project's fused loss.
        gradient_copy: bytes of a 16-bit gradient that is kept beside the accumulated one.
        gradient_bytes: of an accumulated gradient, and of a gradient in a collective.
        scaled: loss scaling in fp16: the optimizer has fp32 gradients of its own.
        context_bytes: what CUDA, NCCL, the libraries of matrix products and the buffers of collectives take on a GPU.
        keeps_outputs: a pipeline stage keeps the output of every micro-batch in flight, as PyTorch's schedules do.
        products: factor of the rate of matrix products; below 1 where collectives beside them take multiprocessors and power.
        attention: factor of the rate of the attention kernel; below 1 for kernels that were not written for the GPU.
        elementwise: factor of the bytes of memory-bound kernels; above 1 where fewer of them are fused than in the trace.
        host_us: microseconds that the host needs to launch an operation; they count where a part's kernels are shorter.
        shard_ranks: ranks over which ZeRO 3 shards (hybrid sharding); 0 for all that hold the same weights.
        loss_bytes: bytes that the loss moves for each logit; 0 for this project's loss, which is traced.
        accumulation_bytes: bytes that the accumulation of gradients moves for each weight and micro-batch; 0 where it is part of the
            products, or where only partitions are accumulated.
        all_reduces: ZeRO 1 reduces gradients in the time of an all-reduce.
        rails: network adapters of a node that a collective of data parallelism uses; 0 for all.
        expert_group: ranks over which experts are spread, and their distance; None for this project's.
    """

    scores: Literal["fused", "saved", "recomputed"] = "fused"
    overlap_data: float = 0.9
    overlap_tensor: float = 0.0
    fp8_products: float = 0.0
    logits_bytes: int = 0
    gradient_copy: int = 0
    gradient_bytes: int = 4
    scaled: bool = False
    context_bytes: float = 1.6e9
    keeps_outputs: bool = True
    products: float = 1.0
    attention: float = 1.0
    elementwise: float = 1.0
    host_us: float = 0.0
    shard_ranks: int = 0
    loss_bytes: float = 0.0
    accumulation_bytes: float = 10.0
    all_reduces: bool = False
    rails: int = 0
    expert_group: tuple[int, int] | None = None
