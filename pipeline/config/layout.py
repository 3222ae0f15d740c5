"""Layout arithmetic: coordinates of ranks, layers of pipeline stages, number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import inf

from pipeline.config import zero_group
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank: its index on each mesh axis."""

    pipeline: int
    data: int
    expert: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and derived quantities.

    The axis order is tensor (innermost: most communication, so it stays within a node), context, expert, data, pipeline.
    Ranks on the expert axis and on the data axis process different samples; ranks on the context axis process the same samples.
    """

    pipeline: int
    data: int
    tensor: int
    expert: int = 1
    context: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    micro_batches: int = 1
    blocks: tuple[int, ...] = ()
    """Number of blocks of each stage; empty to distribute them evenly."""
    zero_block: tuple[int, int, int] | None = None
    """Sizes along the data, expert and context axes of the groups over which ZeRO shards; None for the whole axes."""
    folded: bool = False
    """Whether whole experts are distributed over tensor x expert ranks, expert ranks first; else tensor ranks slice each expert."""

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> Layout:
        """Create the layout of a configuration that is valid for this world size (config/rules/check.py)."""
        parallel, training = config.parallel, config.training
        data = world_size // parallel.model_ranks
        return cls(
            pipeline=parallel.pipeline,
            data=data,
            tensor=parallel.tensor,
            expert=parallel.expert,
            context=parallel.context,
            schedule=parallel.schedule,
            stages_per_rank=stages_per_rank(parallel),
            micro_batches=training.global_batch_size // (data * parallel.expert * training.micro_batch_size),
            blocks=blocks_per_stage(config),
            zero_block=_zero_block(config, world_size),
            folded=parallel.folded,
        )

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.pipeline * self.data * self.expert * self.context * self.tensor

    @property
    def batch_shards(self) -> int:
        """Number of ranks that process different samples: data x expert."""
        return self.data * self.expert

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts of a layer are distributed."""
        return self.expert * (self.tensor if self.folded else 1)

    @property
    def stage_count(self) -> int:
        """Total number of pipeline stages."""
        return self.pipeline * self.stages_per_rank

    def axes_text(self) -> str:
        """Return the sizes of the axes in use, such as "tensor 2 x data 4"."""
        sizes = {axis: getattr(self, axis) for axis in ("tensor", "pipeline", "context", "expert", "data")}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data")

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank."""
        outer, tensor = divmod(rank, self.tensor)
        outer, context = divmod(outer, self.context)
        outer, expert = divmod(outer, self.expert)
        pipeline, data = divmod(outer, self.data)
        return Coordinates(pipeline, data, expert, context, tensor)

    def rank(self, where: Coordinates) -> int:
        """Return the rank at the given coordinates."""
        outer = (where.pipeline * self.data + where.data) * self.expert + where.expert
        return (outer * self.context + where.context) * self.tensor + where.tensor

    def batch_shard(self, where: Coordinates) -> int:
        """Return the index of the shard of each batch that the rank at the given coordinates processes."""
        return where.data * self.expert + where.expert

    def zero_members(self, where: Coordinates, *, experts: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks over which ZeRO shards what the rank at the given coordinates holds, and those with the same partition.

        Args:
            where: coordinates of the rank, which is one of both.
            experts: of the weights of experts, which ranks on the data and context axes hold, else of the others.
        """
        sizes = {"data": self.data, "expert": self.expert, "context": self.context}
        block = dict(zip(sizes, self.zero_block or sizes.values(), strict=True))
        axes = {axis: getattr(where, axis) for axis in sizes if axis != "expert" or not experts}

        def ranks(indices: Iterable[Iterable[int]]) -> tuple[int, ...]:
            return tuple(self.rank(replace(where, **dict(zip(axes, index, strict=True)))) for index in product(*indices))

        shards = ranks(range(at - at % block[axis], at - at % block[axis] + block[axis]) for axis, at in axes.items())
        return shards, ranks(range(at % block[axis], sizes[axis], block[axis]) for axis, at in axes.items())

    def zero_sizes(self, *, experts: bool) -> tuple[int, int]:
        """Return the number of ranks over which ZeRO shards weights, and that of ranks with the same partition; as zero_members."""
        data, expert, context = self.zero_block or (self.data, self.expert, self.context)
        shards, holders = data * context, self.data * self.context
        if not experts:
            shards, holders = shards * expert, holders * self.expert
        return shards, holders // shards

    def zero_text(self, stage: int) -> str:
        """Return the ZeRO stage, and the number of groups over which it shards if there are several."""
        _, groups = self.zero_sizes(experts=False)
        return f"ZeRO {stage} in {groups} groups" if groups > 1 else f"ZeRO {stage}"

    def zero_group_of(self, where: Coordinates) -> tuple[int, ...]:
        """Return the number of a rank's ZeRO group, along the data, expert and context axes."""
        block = self.zero_block or (self.data, self.expert, self.context)
        return tuple(at // size for at, size in zip((where.data, where.expert, where.context), block, strict=True))

    def stages(self, pipeline_rank: int) -> list[int]:
        """Return the stages of a pipeline rank: in V order for zbv (first and last stage on rank 0), otherwise round-robin."""
        if self.schedule == "zbv" and self.stages_per_rank == 2:
            return [pipeline_rank, self.stage_count - 1 - pipeline_rank]
        return [pipeline_rank + chunk * self.pipeline for chunk in range(self.stages_per_rank)]

    def holder(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        return next(rank for rank in range(self.pipeline) if stage in self.stages(rank))

    def layers(self, stage: int, layers: int) -> range:
        """Return the blocks of a stage.

        Without `blocks`, remaining blocks are assigned one per stage from stage 1 on, since stage 0 holds the embedding.
        """
        if self.blocks:
            assert sum(self.blocks) == layers, f"{self.blocks} are not {layers} blocks"
            first = sum(self.blocks[:stage])
            return range(first, first + self.blocks[stage])
        base, remainder = divmod(layers, self.stage_count)
        first = stage * base + max(0, min(stage - 1, remainder))
        return range(first, first + base + (1 if 1 <= stage <= remainder else 0))


def _zero_block(config: RunConfig, world_size: int) -> tuple[int, int, int] | None:
    """Layout.zero_block of a configuration."""
    parallel = config.parallel
    if parallel.zero_stage == 0 or parallel.zero_group == zero_group.JOB:
        return None
    data = world_size // parallel.model_ranks
    ranks = zero_group.group_ranks(parallel, config.cluster.tasks_per_node, world_size)
    block = zero_group.block(ranks, parallel, data) if ranks else None
    return None if block == (data, parallel.expert, parallel.context) else block


def stages_per_rank(parallel: ParallelConfig) -> int:
    """Return the number of pipeline stages per rank: the configured value, else the default of the schedule; 1 without a pipeline."""
    if parallel.pipeline == 1:
        return 1
    return parallel.stages_per_rank or (1 if parallel.schedule == "1f1b" else 2)


def may_compile(training: TrainingConfig, parallel: ParallelConfig) -> bool:
    """Whether blocks are compiled on a GPU. torch.compile does not support the split backward pass of zbv."""
    return training.compile != "off" and not (parallel.schedule == "zbv" and parallel.pipeline > 1)


def blocks_per_stage(config: RunConfig) -> tuple[int, ...]:
    """Return the number of blocks of each stage that the configuration sets; empty to distribute them evenly."""
    parallel = config.parallel
    if parallel.layers_per_stage:
        return tuple(parallel.layers_per_stage)
    if parallel.balance == "layers" or parallel.pipeline == 1:
        return ()
    from pipeline.models.registry import family_of  # loads torch

    costs = family_of(config.model).costs_per_token(config.model, config.training.sequence_length)
    stages = parallel.pipeline * stages_per_rank(parallel)
    return balanced(costs.first, costs.blocks, costs.last, stages) if stages <= len(costs.blocks) else ()


def job_size(config: RunConfig, started: int) -> int:
    """Return the number of ranks of the job: the started ranks, those of a dry run, or the planned ranks of certify, plan and rehearse."""
    if config.dry_run.enabled:
        return config.dry_run.world_size or config.cluster.nodes * config.cluster.tasks_per_node
    if config.stage.name == "plan":
        return config.cluster.nodes * config.cluster.tasks_per_node
    if config.stage.name == "certify":
        return getattr(config.stage, "world_size", None) or _planned_size(config)
    if config.stage.name == "rehearse":
        return getattr(config.stage, "world_size", None) or config.cluster.nodes * config.cluster.tasks_per_node
    return started


def _planned_size(config: RunConfig) -> int:
    """Return the size of the cluster's job; if that is a single rank, the model's ranks with two data ranks where the batch suffices."""
    if (size := config.cluster.nodes * config.cluster.tasks_per_node) > 1:
        return size
    parallel, training = config.parallel, config.training
    ranks = parallel.model_ranks
    micro_batches, rest = divmod(training.global_batch_size, 2 * parallel.expert * training.micro_batch_size)
    return ranks if rest or micro_batches < 2 * parallel.pipeline else 2 * ranks


#: By how much the largest cost of a stage may exceed the smallest possible one, for numbers of blocks that are more even: the additional
#: block of a stage needs memory, and costs are FLOPs, which are no more exact as times.
TOLERANCE = 0.02


@cache
def balanced(first: float, blocks: tuple[float, ...], last: float, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, so that the largest cost of a stage is within TOLERANCE of the smallest possible one.

    Among these distributions, one with the most even numbers of blocks: their sum of squares is the smallest.

    Args:
        first: cost of what the first stage computes besides its blocks.
        blocks: cost of each block, in order; at least as many as stages.
        last: cost of what the last stage computes besides its blocks.
        stages: number of stages; each gets at least one block.
    """
    sums = [0.0, *accumulate(blocks)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    limit, _ = _smallest(stages, len(blocks), cost, max)
    allowed = limit * (1 + TOLERANCE)

    def unevenness(stage: int, start: int, stop: int) -> float:
        return (stop - start) ** 2 if cost(stage, start, stop) <= allowed else inf

    return _smallest(stages, len(blocks), unevenness, float.__add__)[1]


def _smallest(
    stages: int, blocks: int, cost: Callable[[int, int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The smallest combined cost(stage, start, stop) of a distribution, and its numbers of blocks; dynamic programming over the stages."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        following = stages - 1 - stage
        best = {
            stop: min(
                (combine(before, float(cost(stage, start, stop))), (*sizes, stop - start))
                for start, (before, sizes) in best.items()
                if start < stop
            )
            for stop in (range(stage + 1, blocks - following + 1) if following else [blocks])
        }
    return best[blocks]
