"""A published run of any framework, as a row of a table, and what the planner understands of it (columns: tools/study/README.md)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig
from tools.study.cells import EMPTY, Contradiction, flag, integer, number
from tools.study.framework_model import FrameworkModel
from tools.study.frameworks import Sharding, eager, framework_model, sharding_of
from tools.study.gpus import hardware_of
from tools.study.models import model_of

#: Columns without which a row cannot be predicted.
REQUIRED = ("gpu", "gpus", "seq_len", "global_batch")


@dataclass
class PublishedRun:
    """A row as the planner understands it.

    Attributes:
        config: with the layout, batch and model of the row.
        layout: of the row.
        hardware: its GPU, node and network.
        sharding: of its model state.
        engine: what its framework does.
        fused: whether memory-bound operators are fused into few kernels.
        assumptions: made for empty cells.
        expert_tensor: ranks over which each expert is sharded.
    """

    config: RunConfig
    layout: Layout
    hardware: Hardware
    sharding: Sharding
    engine: FrameworkModel
    fused: bool = True
    assumptions: list[str] = field(default_factory=list)
    expert_tensor: int = 1


def read(row: dict[str, str]) -> PublishedRun:
    """Understand a row.

    Args:
        row: cells by column.

    Raises:
        Contradiction: cells contradict each other, a required cell is empty, or the GPU is unknown.
    """
    assumed: list[str] = []
    row = _completed(row, assumed)
    for name in REQUIRED:
        if not row.get(name, "").strip():
            raise Contradiction(f"{name} is empty")
    if not_16_bit := re.search(r"^(tf32|fp32|float32|fp64)(?!.*(16|8))", row.get("precision", "").strip().lower()):
        raise Contradiction(f"precision={not_16_bit[1]} is not supported: products are in 16 or 8 bits")
    gpus, tensor, pipeline, context = (integer(row, name, 1, assumed) for name in ("gpus", "tp", "pp", "cp"))
    model_ranks = tensor * pipeline * context
    if gpus % model_ranks:
        raise Contradiction(f"gpus={gpus} is not a multiple of tp x pp x cp = {model_ranks}")
    data = integer(row, "dp", gpus // model_ranks, assumed)
    if data * model_ranks != gpus:
        raise Contradiction(f"tp x pp x cp x dp = {data * model_ranks} is not gpus={gpus}")
    expert = expert_ranks = integer(row, "ep", 1, [])
    # Megatron-LM's experts are sharded over the tensor ranks, or are spread over them (expert tensor size 1).
    expert_tensor = 1 if data % expert or "etp 1" in row.get("notes", "").lower() else tensor
    if data % expert:
        shared = math.gcd(data, expert)
        assumed.append(f"experts over {shared} data ranks instead of ep={expert}")
        expert = shared
    sequence, batch = integer(row, "seq_len", 0, assumed), integer(row, "global_batch", 0, assumed)
    micro = integer(row, "micro_batch", 1, assumed)
    if batch % data:
        raise Contradiction(f"global_batch={batch} is not a multiple of dp={data}")
    if (batch // data) % micro:
        raise Contradiction(f"global_batch={batch} is not a multiple of dp x micro_batch = {data * micro}")
    micro_batches = batch // data // micro
    model = model_of(row, sequence, tensor, expert, pipeline, assumed)
    year = integer(row, "year", 2024, assumed)
    usual = model.layers // pipeline if year >= 2024 and model.layers % pipeline == 0 and micro_batches % pipeline == 0 else 1
    chunks = integer(row, "interleave", usual, assumed) if pipeline > 1 else 1
    if chunks > 1 and (model.layers < pipeline * chunks or micro_batches % pipeline):
        assumed.append(f"no interleaving, since {chunks} stages a rank do not divide layers or micro-batches")
        chunks = 1
    if model.layers < pipeline:
        raise Contradiction(f"layers={model.layers} are fewer than pp={pipeline}")
    hardware = hardware_of(row, assumed)
    sharding = sharding_of(row, model_ranks, hardware.gpus_per_node, assumed)
    if sharding.ranks and data % sharding.ranks:
        assumed.append(f"sharded over all ranks, since {sharding.ranks} do not divide dp={data}")
        sharding = replace(sharding, ranks=0)
    if sharding.stage == 2 and pipeline > 1:
        assumed.append("zero_or_fsdp=ZeRO-1, since a pipeline reduces gradients once a step")
        sharding = replace(sharding, stage=1)
    recompute = _recompute(row, sharding.engine, assumed)
    engine = framework_model(row, year, sharding)
    if expert > 1:
        engine = replace(engine, expert_group=(expert_ranks, expert_tensor))
    sequence_parallel = tensor > 1 and flag(row, "sequence_parallel", year >= 2023, assumed)
    config = RunConfig(
        model=model,
        training=TrainingConfig(
            global_batch_size=batch, micro_batch_size=micro, sequence_length=sequence, activation_checkpointing=recompute
        ),
        parallel=ParallelConfig(
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            zero_stage=sharding.stage,
            schedule="interleaved" if chunks > 1 else "1f1b",
            stages_per_rank=chunks,
            sequence_parallel=sequence_parallel and sequence % (tensor * context) == 0,
        ),
    )
    layout = Layout(
        pipeline, data // expert, tensor, expert, context, config.parallel.schedule, chunks if pipeline > 1 else 1, micro_batches
    )
    return PublishedRun(
        config,
        layout,
        hardware,
        sharding,
        engine,
        fused=not eager(row, sharding),
        assumptions=assumed,
        expert_tensor=expert_tensor,
    )


def _completed(row: dict[str, str], assumed: list[str]) -> dict[str, str]:
    """The row with the number of GPUs and the batch that follow from others of its cells."""
    row = {name: "" if cell.strip().lower() in EMPTY and name in REQUIRED else cell for name, cell in row.items()}
    ranks = [number(row, name) for name in ("tp", "pp", "cp", "dp")]
    if not row.get("gpus") and ranks[3]:
        row["gpus"] = f"{math.prod(size or 1 for size in ranks):g}"
        assumed.append(f"gpus={row['gpus']}")
    gpus, micro = number(row, "gpus"), number(row, "micro_batch")
    if not row.get("global_batch") and gpus and micro and (ranks[1] or 1) == 1:
        row["global_batch"] = f"{micro * (ranks[3] or gpus / math.prod(size or 1 for size in ranks[:3])):g}"
        assumed.append(f"global_batch={row['global_batch']}")
    return row


#: Spelling of `recompute` -> its meaning; the first that matches counts.
RECOMPUTE = {
    r"^(none|no|n|false|off|disabled?|0)\b": "none",
    r"select|\bop\b|\bsac\b|core|attn|attention|partial": "selective",
    r"^(full|yes|y|true|on|enabled?|all|block|uniform|1)\b|every|full|layer|block|checkpoint": "full",
}


def _recompute(row: dict[str, str], engine: str, assumed: list[str]) -> str:
    """Activation checkpointing: fused attention recomputes the scores by itself, so `selective` is none in Megatron-LM."""
    text = row.get("recompute", "").strip().lower()
    given = next((meaning for spelling, meaning in RECOMPUTE.items() if re.search(spelling, text)), "")
    if not given:
        assumed.append("recompute=none")
    if given == "selective":  # PyTorch's, with FSDP, keeps the results of matrix products and attention
        return "selective" if engine == "fsdp" else "none"
    return given or "none"
