"""What the frameworks of published runs do, by their year, sharding and number format, with few fitted FITTED."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pipeline.planner.engine_model import SHARDED_PRODUCTS
from tools.study.cells import flag, integer, text_of
from tools.study.framework_model import FrameworkModel


@dataclass(frozen=True)
class Sharding:
    """What a row says about ZeRO or FSDP.

    Attributes:
        stage: 0 to 3.
        engine: fsdp, deepspeed, megatron (its distributed optimizer), or none.
        ranks: over which stage 3 shards (hybrid sharding); 0 for all that hold the same weights.
    """

    stage: int
    engine: str = "none"
    ranks: int = 0


#: Spelling -> stage and engine; the first that matches counts.
SPELLINGS: dict[str, tuple[int, str]] = {
    r"no_?shard": (0, "none"),
    r"shard_?grad_?op": (2, "fsdp"),
    r"fsdp|fully_?shard|full_?shard|hsdp|hybrid_?shard": (3, "fsdp"),
    r"dist\w*[ _-]*opt\w*": (1, "megatron"),
    r"(?:zero|stage|^z)\D{0,8}([0-3])": (-1, "deepspeed"),
    r"zero\s*\+\+|mics|zero-infinity": (3, "deepspeed"),
    r"^([0-3])(?:\.0)?$": (-1, "deepspeed"),
    r"\bddp\b|^no(ne)?\b|^false$|^off$|replicat": (0, "none"),
}
#: Words in the name or notes of a source -> engine, where the cell is empty.
ENGINES = {
    r"torchtitan|fsdp|modalities|llm-foundry|litgpt|lit-gpt|olmo": "fsdp",
    r"deepspeed|gpt-neox": "deepspeed",
    r"megatron|nemo": "megatron",
}


def sharding_of(row: dict[str, str], model_ranks: int, gpus_per_node: int, assumed: list[str]) -> Sharding:
    """Return the sharding of a row; an empty or unknown cell is assumed.

    Args:
        row: cells by column.
        model_ranks: ranks of a replica.
        gpus_per_node: over which hybrid sharding shards.
        assumed: list to which assumptions are added.
    """
    text = row.get("zero_or_fsdp", "").strip().lower()
    if found := re.search(r"fsdp (\d+) x dp", text):
        return Sharding(3, "fsdp", int(found[1]))
    for spelling, (stage, engine) in SPELLINGS.items():
        if match := re.search(spelling, text):
            stage = int(match[1]) if stage < 0 else stage
            hybrid = stage == 3 and re.search(r"hybrid|hsdp|mics", text)
            return Sharding(stage, engine if stage else "none", integer(row, "gpus_per_node", gpus_per_node, []) if hybrid else 0)
    written = text_of(row, "source", "table", "notes", "model_name").lower()
    engine = next((engine for word, engine in ENGINES.items() if re.search(word, written)), "")
    stage = {"fsdp": 3, "megatron": 1}.get(engine, 1 if model_ranks > 1 else 3)
    assumed.append(f"zero_or_fsdp=ZeRO-{stage}" + (f" ({text} is not known)" if text else ""))
    return Sharding(stage, engine or ("deepspeed" if stage == 1 else "fsdp"))


@dataclass(frozen=True)
class Frameworks:
    """Constants of frameworks that are fitted to published runs (README.md); never of a source or a row.

    Attributes:
        sharded_products: rate of matrix products beside the collectives of ZeRO 3, which take multiprocessors and power.
        old_products: rate of matrix products of libraries before 2023.
        eager_attention: rate of FlashAttention 2 over that of the kernel that was written for the GPU (Hopper and Blackwell; others).
        hand_fused: bytes of the memory-bound kernels that frameworks fuse by hand, over those that a compiler fuses.
        host_us: microseconds for which PyTorch's host code is busy with an operator.
        tensor_overlap: share of the collectives of tensor parallelism that frameworks of 2024 on hide behind products.
        loss_bytes: bytes that an unfused loss moves for each logit; frameworks fuse it since 2024.
        omni_path: share of its bandwidth that Omni-Path sustains between GPUs.
        fp8_products: share of their peak that products in 8 bits sustain, over that of products in 16 bits.
    """

    sharded_products: float = SHARDED_PRODUCTS
    old_products: float = 0.896
    eager_attention: float = 0.841
    eager_attention_new: float = 0.442
    hand_fused: float = 2.42
    host_us: float = 7
    tensor_overlap: float = 0.489
    loss_bytes: float = 27.2
    omni_path: float = 0.238
    fp8_products: float = 0.847


#: The values of the last fit.
FITTED = Frameworks()
#: Bytes for each logit of a loss in one kernel, whose gradient replaces the logits (flash-attn, Apex).
FUSED_LOSS_BYTES = 10.0


def framework_model(row: dict[str, str], year: int, sharding: Sharding) -> FrameworkModel:
    """Return what a framework of that year does: kernels, overlap, number formats."""
    precision, zero = re.sub("[_-]", "", row.get("precision", "").lower()), sharding.stage
    modern = year >= 2023  # fused attention, and collectives of data parallelism beside the backward pass
    tensor = flag(row, "sequence_parallel", False, []) and overlaps_tensor(row, year)
    deepspeed, megatron = sharding.engine == "deepspeed", sharding.engine == "megatron"
    # Recipes of NVIDIA's frameworks accumulate and reduce 16-bit gradients.
    sixteen = year >= 2024 and megatron
    # DeepSpeed keeps gradients in the format of the weights, unless a row says otherwise, and those of its partition in fp32.
    fp32_gradients = "fp32 grad" in precision
    # Megatron-LM accumulates in the products that compute gradients since 2022, its distributed optimizer always did; other sharded
    # frameworks accumulate partitions.
    accumulates = (year < 2022 and not megatron) or (deepspeed and zero < 3)
    # Loss scaling needs fp32 copies of fp16 gradients in the optimizer. Before 2023, bf16 is stated where it is used.
    half = not (modern or re.search(r"bf16|bfloat|amp", precision))
    narrow, pure = half or sixteen or deepspeed, zero == 3 and "bf16" in precision and "amp" not in precision
    # torch.compile fuses memory-bound kernels, and leaves products, attention and collectives as they are.
    pytorch = sharding.engine == "fsdp" and not other_stack(row)
    beside = pytorch or (deepspeed and zero == 3 and modern)
    plain, new = eager(row, sharding), bool(re.search("h[128]00|b[23]00", row["gpu"].lower()))
    eager_attention = FITTED.eager_attention_new if new else FITTED.eager_attention
    gradient_bytes = 2 if (narrow or pure) and not fp32_gradients else 4
    return FrameworkModel(
        scores=_scores(row, modern),
        products=(FITTED.sharded_products if beside else 1.0) * (1.0 if modern else FITTED.old_products),
        attention=eager_attention if pytorch else 1.0,
        elementwise=1.0 if plain or compiled(row) else FITTED.hand_fused,
        host_us=FITTED.host_us if plain else 0.0,
        overlap_data=_overlap(row, modern, sharding),
        overlap_tensor=FITTED.tensor_overlap if tensor else 0.0,
        fp8_products=FITTED.fp8_products if re.search("fp8|float8|e4m3|nvfp4|fp4", precision) else 0.0,
        logits_bytes=4 if plain else 6,  # in 16 bits with their gradients; or in 16 bits and in fp32, which become the gradients
        loss_bytes=FUSED_LOSS_BYTES if plain or year >= 2024 else FITTED.loss_bytes,
        accumulation_bytes=10.0 if accumulates else 0.0,
        gradient_copy=2 if fp32_gradients else 0,
        gradient_bytes=gradient_bytes,
        reduce_bytes=gradient_bytes,
        scaled=(half and not compiled(row)) or (deepspeed and not fp32_gradients),
        # Before 2023, PyTorch loaded all its kernels, and DeepSpeed has two buckets for reductions and one for gatherings (5e8 elements).
        context_bytes=1.6e9 + (0.0 if modern or compiled(row) else 2.4e9) + (3e9 if deepspeed and not modern else 0.0),
        keeps_outputs=deepspeed or year < 2022,
        shard_ranks=sharding.ranks,
        # DeepSpeed reduced every partition to its owner, one after another.
        all_reduces=zero == 1 and deepspeed and not modern,
        # DeepSpeed gathered one weight at a time, in one ring.
        rails=1 if zero == 3 and deepspeed and not modern else 0,
    )


def _scores(row: dict[str, str], modern: bool) -> Literal["fused", "saved", "recomputed"]:
    """Whether attention is fused, as the row says; otherwise from its year."""
    text = text_of(row).lower()
    unfused = re.search(r"(no|without|w/o|non-?|un)[ -]?(flash|fused)[ -]?attention|no flash", text)
    if not unfused and (modern or "flash" in text):
        return "fused"
    return "recomputed" if "select" in row.get("recompute", "").lower() else "saved"


def _overlap(row: dict[str, str], modern: bool, sharding: Sharding) -> float:
    """Share of the compute beside which collectives of data parallelism run; the first frameworks reduced after the backward pass."""
    return 0.9 if modern or sharding.stage == 3 or compiled(row) else 0.0


def overlaps_tensor(row: dict[str, str], year: int) -> bool:
    """Whether collectives of tensor parallelism run beside products: NVIDIA's recipes set it, Megatron-LM alone does not."""
    recipes = re.search(r"\bnemo\b|nvidia|dgxc", text_of(row, "source").lower())
    return year >= 2024 and bool(recipes or re.search(r"tp_comm_overlap(?! off)|userbuffers", text_of(row).lower()))


def eager(row: dict[str, str], sharding: Sharding) -> bool:
    """Whether a framework launches PyTorch's operators one by one: FSDP without a compiler."""
    return sharding.engine == "fsdp" and not compiled(row)


def compiled(row: dict[str, str]) -> bool:
    """Whether a compiler fuses the memory-bound kernels, as the row says."""
    return other_stack(row) or bool(re.search(r"(?<!no )(?<!not )(?<!without )(?<!no torch\.)(?<!un)compile", text_of(row).lower()))


def other_stack(row: dict[str, str]) -> bool:
    """Whether a compiler outside PyTorch also chooses the kernels and orders the collectives."""
    return bool(re.search(r"\bjax|\bxla|maxtext|oneflow framework", text_of(row).lower()))
