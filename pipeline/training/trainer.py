"""The trainer of one rank: model, engine and pipeline, and their training and evaluation steps."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.registry import objective_of
from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.parallel.schedules import Pipeline
from pipeline.training.engine import StepResult, build_engine
from pipeline.training.routing import RouterStatistics


class Trainer:
    """Runs training and evaluation steps on batches that the caller provides.

    Args:
        config: configuration of the run.
        mesh: this rank's process groups.
        model: this rank's stages; built from the configuration when None.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, model: LocalModel | None = None) -> None:
        self.mesh = mesh
        self.model = model or parallelize(config, mesh)
        self.engine = build_engine(config, self.model, mesh)
        self._routing = RouterStatistics(self.model, mesh, getattr(config.model, "experts", 0))
        self._config = config
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}

    def train(self, tokens: Tensor, batch: Batch) -> tuple[Tensor, StepResult]:
        """One optimizer step.

        Args:
            tokens: int64 (sequences, sequence), this rank's share of the global batch, on the mesh's device.
            batch: the other model inputs, with targets.

        Returns:
            The mean loss of the global batch, 0-dim, the same on every rank; and the result of the step.
        """
        batch = self._with_loss_scale(batch)
        with self.engine.accumulate():
            loss = self._pipeline(tokens, batch).train(tokens, batch)
        result = self.engine.step()
        return self._global_mean(loss), replace(result, more=self._routing.after_step(result.skipped))

    def evaluate(self, tokens: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of the global batch; arguments as in train."""
        return self._global_mean(self._pipeline(tokens, batch).evaluate(tokens, self._with_loss_scale(batch)))

    def _with_loss_scale(self, batch: Batch) -> Batch:
        """Add Batch.loss_scale if some positions have no target: the loss is the mean over the counted targets of the global batch."""
        if objective_of(self._config).every_position_counts(self._config):
            return batch
        targets = batch["targets"]
        counts = torch.stack([torch.full((), targets.numel(), device=targets.device), (targets != IGNORE).sum()])
        for group in (self.mesh.data, self.mesh.expert):
            dist.all_reduce(counts, group=group)
        scale = counts[0].float() / counts[1].clamp(min=1)
        return {**batch, "loss_scale": scale.expand(len(targets)).contiguous()}

    def _pipeline(self, tokens: Tensor, batch: Batch) -> Pipeline:
        """Return the pipeline for batches of this shape; a warm-up has several shapes."""
        shape = (*tokens.shape, *batch["decoder_tokens"].shape[1:]) if "decoder_tokens" in batch else tuple(tokens.shape)
        if shape not in self._pipelines:
            self._pipelines[shape] = Pipeline(self.model.stages, self._config, self.mesh, shape)
        return self._pipelines[shape]

    def _global_mean(self, loss: Tensor) -> Tensor:
        """Average the losses of all shares of the batch, which the ranks of the last stage hold, over all ranks."""
        if self.mesh.layout.world_size == 1:
            return loss
        total = loss.clone() if self.mesh.coordinates.tensor == 0 else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total / (self.mesh.layout.batch_shards * self.mesh.layout.context)
