"""The layout as arithmetic: which rank is where, which layers a stage holds, how many micro-batches it sees."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.schema import RunConfig


@dataclass(frozen=True)
class Coordinates:
    """A rank's index on every mesh axis."""

    pipeline: int
    data: int
    expert: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and what follows from them.

    Ranks are laid out with tensor innermost (it talks most, so it stays within a node), then context, expert, data and pipeline.
    The ranks of the expert axis see other samples each, like those of the data axis; the ranks of the context axis see the same.
    """

    pipeline: int
    data: int
    tensor: int
    expert: int = 1
    context: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    micro_batches: int = 1

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> Layout:
        """The layout of a configuration that config/check.py has accepted for this world size."""
        parallel, training = config.parallel, config.training
        data = world_size // (parallel.tensor * parallel.pipeline * parallel.context * parallel.expert)
        return cls(
            pipeline=parallel.pipeline,
            data=data,
            tensor=parallel.tensor,
            expert=parallel.expert,
            context=parallel.context,
            schedule=parallel.schedule,
            stages_per_rank=stages_per_rank(config),
            micro_batches=training.global_batch_size // (data * parallel.expert * training.micro_batch_size),
        )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pipeline * self.data * self.expert * self.context * self.tensor

    @property
    def batch_shards(self) -> int:
        """Ranks that see different samples: data x expert."""
        return self.data * self.expert

    @property
    def stage_count(self) -> int:
        """Pipeline stages in all."""
        return self.pipeline * self.stages_per_rank

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, expert = divmod(rest, self.expert)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, expert, context, tensor)

    def rank(self, where: Coordinates) -> int:
        """Which rank stands there."""
        share = (where.pipeline * self.data + where.data) * self.expert + where.expert
        return (share * self.context + where.context) * self.tensor + where.tensor

    def batch_shard(self, where: Coordinates) -> int:
        """Which part of every batch the rank there sees."""
        return where.data * self.expert + where.expert

    def stages(self, pipeline_rank: int) -> list[int]:
        """The stages a pipeline rank holds: in a V for zbv (first and last on rank 0), else round-robin."""
        if self.schedule == "zbv" and self.stages_per_rank == 2:
            return [pipeline_rank, self.stage_count - 1 - pipeline_rank]
        return [pipeline_rank + turn * self.pipeline for turn in range(self.stages_per_rank)]

    def holder(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return next(rank for rank in range(self.pipeline) if stage in self.stages(rank))

    def layers(self, stage: int, layers: int) -> range:
        """The decoder blocks of a stage. What does not divide goes one each to the stages after the first, which has the embedding."""
        base, rest = divmod(layers, self.stage_count)
        first = stage * base + max(0, min(stage - 1, rest))
        return range(first, first + base + (1 <= stage <= rest))


def stages_per_rank(config: RunConfig) -> int:
    """Stages a rank holds: as configured, else the schedule's own. Without a pipeline it is one."""
    if config.parallel.pipeline == 1:
        return 1
    own = 1 if config.parallel.schedule == "1f1b" else 2
    return config.parallel.stages_per_rank or own


def job_size(config: RunConfig, started: int) -> int:
    """Ranks of the job: those that were started, or for a dry run those to imagine."""
    if not config.dry_run.enabled:
        return started
    return config.dry_run.world_size or config.cluster.nodes * config.cluster.tasks_per_node
