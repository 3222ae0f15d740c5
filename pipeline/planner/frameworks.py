"""What the frameworks of published runs do, by their year, sharding and number format, with few fitted constants."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.planner.practice import Practice


@dataclass(frozen=True)
class Frameworks:
    """Constants of frameworks that are fitted to published runs (tools/plan_score --fit); never of a source or a row.

    Attributes:
        eager_products: rate of matrix products beside the collectives of FSDP, by generation of the GPU (up to A100, newer).
        eager_attention: rate of FlashAttention 2 over that of the kernel that was written for the GPU.
        hand_fused: bytes of the memory-bound kernels that frameworks fuse by hand, over those that a compiler fuses.
        host_us: microseconds for which PyTorch's host code is busy with an operator.
        tensor_overlap: share of the collectives of tensor parallelism that frameworks of 2024 on hide behind products.
        loss_bytes: bytes that an unfused loss moves for each logit; frameworks fuse it since 2024.
        fp8_products: share of their peak that products in 8 bits sustain, over that of products in 16 bits.
    """

    eager_products: float = 0.926
    eager_products_new: float = 0.786
    eager_attention: float = 0.838
    eager_attention_new: float = 0.453
    hand_fused: float = 2.47
    host_us: float = 7
    tensor_overlap: float = 0.478
    loss_bytes: float = 26.8
    fp8_products: float = 0.848


#: The values of the last fit.
FITTED = Frameworks()
#: Bytes for each logit of a loss in one kernel, whose gradient replaces the logits (flash-attn, Apex).
FUSED_LOSS_BYTES = 10.0


def practice_of(row: dict[str, str], year: int, zero: int, shards: int, constants: Frameworks) -> Practice:
    """What a framework of that year does: kernels, overlap, number formats."""
    precision = row.get("precision", "").lower()
    modern = year >= 2023  # fused attention, and collectives of data parallelism beside the backward pass
    tensor = row.get("sequence_parallel", "").lower().startswith("y") and year >= 2024
    sharding = row.get("zero_or_fsdp", "").lower()
    # Recipes of NVIDIA's frameworks accumulate and reduce 16-bit gradients.
    sixteen = year >= 2024 and "distributed optimizer" in sharding
    # Megatron-LM accumulates in the products that compute gradients since 2022, its distributed optimizer always did; other sharded
    # frameworks accumulate partitions.
    accumulates = year < 2022 or ("zero-" in sharding and "distributed optimizer" not in sharding and zero < 3)
    plain, old = eager(row), bool(re.search("a100|v100", row["gpu"].lower()))
    eager_products = constants.eager_products if old else constants.eager_products_new
    eager_attention = constants.eager_attention if old else constants.eager_attention_new
    return Practice(
        flash=modern,
        products=eager_products if plain else 1.0,
        attention=eager_attention if plain else 1.0,
        elementwise=1.0 if plain or compiled(row) else constants.hand_fused,
        host_us=constants.host_us if plain else 0.0,
        recompute_scores=row.get("recompute", "") == "selective",
        overlap_data=_overlap(row, modern, zero),
        overlap_tensor=constants.tensor_overlap if tensor else 0.0,
        fp8_products=constants.fp8_products if "fp8" in precision else 0.0,
        logits_bytes=4 if plain else 6,  # in 16 bits with their gradients; or in 16 bits and in fp32, which become the gradients
        loss_bytes=FUSED_LOSS_BYTES if plain or year >= 2024 else constants.loss_bytes,
        accumulation_bytes=10.0 if accumulates else 0.0,
        gradient_copy=2 if "fp32 grad" in precision else 0,
        gradient_bytes=4 if ("amp" in precision or ("bf16" in precision and zero < 3) or not precision) and not sixteen else 2,
        shard_ranks=shards,
        # DeepSpeed reduced every partition to its owner, one after another.
        all_reduces=zero == 1 and "zero-1" in sharding and not modern,
        # DeepSpeed gathered one weight at a time, in one ring.
        rails=1 if zero == 3 and "deepspeed" in sharding and not modern else 0,
    )


def _overlap(row: dict[str, str], modern: bool, zero: int) -> float:
    """Share of the compute beside which collectives of data parallelism run."""
    if zero == 3 and not modern and "deepspeed" in row.get("zero_or_fsdp", "").lower():
        return 0.7  # chosen by six runs of Narayanan et al. 2021
    if modern or zero == 3:
        return 0.9
    return 0.5 if compiled(row) else 0.0  # 0.5 is chosen by runs of OneFlow; the first frameworks reduced after the backward pass


def eager(row: dict[str, str]) -> bool:
    """Whether a framework launches PyTorch's operators one by one: FSDP without a compiler."""
    return "fsdp" in row.get("zero_or_fsdp", "").lower() and not compiled(row)


def compiled(row: dict[str, str]) -> bool:
    """Whether a compiler fuses the memory-bound kernels and orders the collectives, as the row says."""
    return bool(re.search(r"jax|xla|compile|oneflow framework", " ".join(row.values()).lower()))
