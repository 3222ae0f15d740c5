"""The configuration group of the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel layout. The data-parallel size is the world size divided by the product of the other sizes."""

    tensor: int = knob(1, "tensor-parallel size", unit="ranks", at_least=1)
    pipeline: int = knob(1, "pipeline-parallel size", unit="ranks", at_least=1)
    context: int = knob(1, "context-parallel size: ranks over which each sequence is split", unit="ranks", at_least=1)
    context_kind: str = knob(
        "ring",
        "context parallelism: ring attention (keys and values are passed around a ring) or Ulysses (all-to-all between tokens and heads)",
        choices=("ring", "ulysses"),
    )
    expert: int = knob(1, "expert-parallel size of an MoE model; each of these ranks processes different samples", unit="ranks", at_least=1)
    expert_padding: bool = knob(
        False,
        "no size depends on the router: no layer waits for the device, and MoE blocks are compiled as one graph. Every expert gets as many "
        "rows as model.capacity_factor allows, filled with zeros; without that key, rows travel in buffers, and no token is dropped",
    )
    expert_buffer: float = knob(
        1.5,
        "room for the tokens that a rank sends to another one, over what it sends on average; with expert_padding and without "
        "model.capacity_factor. A step in which a rank sends more is computed again without buffers",
        at_least=1,
    )
    expert_parts: int = knob(
        1,
        "parts in which tokens travel to the experts of other ranks: one travels while another one is computed; needs expert_padding",
        at_least=1,
        at_most=8,
    )
    expert_tensor: int | None = knob(
        None,
        "tensor ranks over which each expert is sliced: parallel.tensor (the default), or 1: whole experts are distributed over tensor x "
        "expert ranks, and each tensor rank sends its own tokens of a sequence to them",
        unit="ranks",
        at_least=1,
    )
    zero_stage: int = knob(
        1,
        "ZeRO stage, sharding over the data ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights",
        at_least=0,
        at_most=3,
    )
    zero_group: str = knob(
        "job",
        "ranks over which ZeRO shards, with a copy of the state in every group: all data ranks of the job, those of a node "
        "(cluster.tasks_per_node), or so many successive data x expert x context ranks, such as 8",
    )
    schedule: str = knob("1f1b", "pipeline schedule", choices=("1f1b", "interleaved", "zbv"))
    stages_per_rank: int | None = knob(None, "pipeline stages per rank; default: 1 for 1f1b, 2 for interleaved and zbv", at_least=1)
    balance: str = knob(
        "flops",
        "distribution of the layers over pipeline stages: equal FLOPs, which count the output head (flops), or equal numbers (layers)",
        choices=("layers", "flops"),
    )
    layers_per_stage: list[int] = knob([], "number of layers of each pipeline stage, instead of parallel.balance", at_least=1)
    async_tensor: str = knob(
        "auto",
        "fuse the collectives of sequence parallelism with the matrix products beside them, in compiled blocks; auto: from Hopper GPUs on, "
        "if the tensor ranks are on one node",
        choices=("auto", "on", "off"),
    )
    sequence_parallel: bool = knob(True, "split norms and residuals along the sequence over the tensor ranks")
    offload: str = knob(
        "none",
        "what is kept in host memory: optimizer: master weights and optimizer state, which the CPU updates (ZeRO 1 to 3)",
        choices=("none", "optimizer"),
    )
    engine: str = knob(
        "native",
        "who owns weights, gradients and optimizer: this program, in every layout (native), or DeepSpeed's engine with its configuration, "
        "for data and tensor parallelism (deepspeed)",
        choices=("native", "deepspeed"),
    )
    deepspeed: str | None = knob(
        None,
        "configuration of DeepSpeed's engine (JSON), which selects that engine and sets batch sizes and precision",
    )

    @property
    def model_ranks(self) -> int:
        """Number of ranks without data parallelism, tensor x context x expert x pipeline: the world size is a multiple of it."""
        return self.tensor * self.context * self.expert * self.pipeline

    @property
    def folded(self) -> bool:
        """Whether whole experts are distributed over tensor x expert ranks; else every tensor rank holds a slice of each expert."""
        return self.expert_tensor == 1 and self.tensor > 1

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts are distributed."""
        return self.expert * (self.tensor if self.folded else 1)
