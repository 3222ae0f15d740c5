"""A published run of any framework, as a row of a table, and what the planner understands of it (columns: pipeline/planner/README.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config import hardware as hardware_files
from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.config.schema import ParallelConfig, RunConfig, TrainingConfig
from pipeline.planner.cells import Contradiction, integer, number
from pipeline.planner.frameworks import FITTED, Frameworks, eager, practice_of
from pipeline.planner.practice import Practice
from pipeline.planner.published_model import model_of

#: Columns without which a row cannot be predicted.
REQUIRED = ("gpu", "gpus", "seq_len", "global_batch")
#: Bandwidth between nodes for each GPU, GB/s in one direction, of systems that a row names in its text (their documentation).
SYSTEMS = {
    "jean zay": 6.25,
    "leonardo": 12.5,
    "lumi": 12.5,
    "frontier": 12.5,
    "juwels": 25.0,
    "jupiter": 25.0,
    "selene": 25.0,
    "perlmutter": 25.0,
    "alps": 25.0,
    "marenostrum": 25.0,
    "100 gb/s ib": 1.5625,
}


#: File of conf/hardware/ -> values that replace some of its keys.
Changes = Mapping[str, Mapping[str, Any]]


@dataclass
class Run:
    """A row as the planner understands it.

    Attributes:
        config: with the layout, batch and model of the row.
        layout: of the row.
        hardware: its GPU, node and network.
        zero_stage: 0 to 3.
        practice: what its framework does.
        fused: whether memory-bound operators are fused into few kernels.
        assumptions: made for empty cells.
        expert_tensor: ranks over which each expert is sharded.
        file: of conf/hardware/.
    """

    config: RunConfig
    layout: Layout
    hardware: Hardware
    zero_stage: int
    practice: Practice
    fused: bool = True
    assumptions: list[str] = field(default_factory=list)
    expert_tensor: int = 1
    file: str = ""


def read(row: dict[str, str], constants: Frameworks = FITTED, changed: Changes | None = None) -> Run:
    """Understand a row.

    Args:
        row: cells by column.
        constants: of frameworks.
        changed: values of hardware that replace those of its file (in a fit).

    Raises:
        Contradiction: cells contradict each other, a required cell is empty, or the GPU is unknown.
    """
    assumed: list[str] = []
    for name in REQUIRED:
        if not row.get(name, "").strip():
            raise Contradiction(f"{name} is empty")
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
    recompute = _recompute(row, year, assumed)
    zero, shards = _sharding(row, model_ranks, assumed)
    practice = practice_of(row, year, zero, shards, constants)
    if expert > 1:
        practice = replace(practice, expert_ranks=expert_ranks, expert_stride=expert_tensor)
    sequence_parallel = row.get("sequence_parallel", "").strip().lower()
    if not sequence_parallel and tensor > 1:
        assumed.append(f"sequence_parallel={'y' if year >= 2023 else 'n'}")
        sequence_parallel = "y" if year >= 2023 else "n"
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
            zero_stage=zero,
            schedule="interleaved" if chunks > 1 else "1f1b",
            stages_per_rank=chunks,
            sequence_parallel=sequence_parallel.startswith(("y", "t", "1")) and sequence % (tensor * context) == 0,
        ),
    )
    layout = Layout(
        pipeline, data // expert, tensor, expert, context, config.parallel.schedule, chunks if pipeline > 1 else 1, micro_batches
    )
    return Run(
        config,
        layout,
        hardware_of(row, assumed, changed or {}),
        zero,
        practice,
        fused=not eager(row),
        assumptions=assumed,
        expert_tensor=expert_tensor,
        file=file_of(row),
    )


def file_of(row: dict[str, str]) -> str:
    """Return the file of conf/hardware/ for the GPU of a row.

    Raises:
        Contradiction: there is none.
    """
    name = row["gpu"].lower()
    memory = number(row, "gpu_mem_gb")
    kinds = {"v100": "v100-32", "gh200": "gh200", "gb200": "gb200", "h200": "h200", "h100": "h100", "h800": "h100", "b200": "b200"}
    kinds |= {"mi250": "mi250x", "mi300": "mi300x", "a100": "a100-80"}
    found = next((file for word, file in sorted(kinds.items(), key=lambda item: -len(item[0])) if word in name), None)
    if found is None:
        raise Contradiction(f"gpu={row['gpu']} is not one of {', '.join(hardware_files.names())}")
    if found == "a100-80":
        found = "a100-64" if "custom" in name or memory == 64 else "a100-40" if memory == 40 else found
    if found == "v100-32" and memory == 16:
        found = "v100-16"
    return found


def hardware_of(row: dict[str, str], assumed: list[str], changed: Changes) -> Hardware:
    """Return the hardware of a row.

    Raises:
        Contradiction: no file of conf/hardware/ describes its GPU.
    """
    found, memory = file_of(row), number(row, "gpu_mem_gb")
    hardware = replace(hardware_files.load(found), **changed.get(found, {}))
    node = integer(row, "gpus_per_node", hardware.gpus_per_node, assumed)
    text = " ".join(row.values()).lower()
    network = next((rate for word, rate in SYSTEMS.items() if word in text), 0.0)
    if not network and integer(row, "gpus", 1, []) > node:
        assumed.append(f"network={hardware.network_gb_s:g} GB/s a GPU")
    if found.startswith(("a100", "h100", "h200")):  # boards of four GPUs have no switch
        hardware = replace(hardware, switch=node >= 8)
    if memory and found not in ("a100-64", "gb200", "b200") and abs(memory * 2**30 / 1e9 - hardware.memory_gb) > 4:
        hardware = replace(hardware, memory_gb=memory * 2**30 / 1e9)
    if found == "gb200":
        node = hardware.gpus_per_node  # one NVLink domain, of which a tray of four GPUs is a part
    return hardware_files.with_node(hardware, gpus_per_node=node, network_gb_s=network)


def _recompute(row: dict[str, str], year: int, assumed: list[str]) -> str:
    """Activation checkpointing: fused attention recomputes the scores by itself, so `selective` is none."""
    given = row.get("recompute", "").strip().lower()
    if not given:
        assumed.append("recompute=none")
    if given == "selective" and year >= 2023:
        return "none"
    return "full" if given == "full" else "none"


def _sharding(row: dict[str, str], model_ranks: int, assumed: list[str]) -> tuple[int, int]:
    """The ZeRO stage, and over how many ranks it shards (0: all data ranks)."""
    text = row.get("zero_or_fsdp", "").lower()
    if not text.strip():
        stage = 1 if model_ranks > 1 else 3
        assumed.append(f"zero_or_fsdp=ZeRO-{stage}")
        return stage, 0
    if found := re.search(r"fsdp (\d+) x dp", text):
        return 3, int(found[1])
    if "hybrid" in text:
        return 3, integer(row, "gpus_per_node", 8, [])
    if "shard_grad" in text or re.search(r"zero-?_? ?2", text):
        return 2, 0
    if "fsdp" in text or re.search(r"zero-?_? ?3", text):
        return 3, 0
    return (1, 0) if "distributed optimizer" in text or re.search(r"zero-?_? ?1", text) else (0, 0)
