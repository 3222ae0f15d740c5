"""One rank's model, engine and pipeline, and what they do with a batch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.parallel.schedules import Pipeline
from pipeline.training.engine import StepResult, build_engine
from pipeline.training.routing import RouterStatistics


class Trainer:
    """Trains and evaluates on batches that somebody else chooses.

    Args:
        config: of the run.
        mesh: this rank's groups.
        model: this rank's stages; made from the configuration when None.
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
            batch: what belongs to them, with targets.

        Returns:
            The mean loss of the global batch, a 0-dim tensor the same on every rank, and what the step did.
        """
        batch = self._scaled(batch)
        with self.engine.accumulate():
            loss = self._pipeline(tokens, batch).train(tokens, batch)
        result = self.engine.step()
        return self._mean(loss), replace(result, more=self._routing.after_step(result.skipped))

    def evaluate(self, tokens: Tensor, batch: Batch) -> Tensor:
        """The mean loss of the global batch; arguments as in train."""
        return self._mean(self._pipeline(tokens, batch).evaluate(tokens, self._scaled(batch)))

    def _scaled(self, batch: Batch) -> Batch:
        """The batch with Batch.loss_scale, where not every position counts: the mean is over what counts in the global batch."""
        if self._config.model.objective == "causal" and self._config.data.packing == "windows":
            return batch
        targets = batch["targets"]
        counts = torch.stack([torch.full((), targets.numel(), device=targets.device), (targets != IGNORE).sum()])
        for group in (self.mesh.data, self.mesh.expert):
            dist.all_reduce(counts, group=group)
        scale = counts[0].float() / counts[1].clamp(min=1)
        return {**batch, "loss_scale": scale.expand(len(targets)).contiguous()}

    def _pipeline(self, tokens: Tensor, batch: Batch) -> Pipeline:
        """The pipeline for batches of this shape; a warm-up has several."""
        shape = (*tokens.shape, *batch["decoder_tokens"].shape[1:]) if "decoder_tokens" in batch else tuple(tokens.shape)
        if shape not in self._pipelines:
            self._pipelines[shape] = Pipeline(self.model.stages, self._config, self.mesh, shape)
        return self._pipelines[shape]

    def _mean(self, loss: Tensor) -> Tensor:
        """The mean over all shares of the batch of what the last stage's ranks know, for everyone."""
        if self.mesh.layout.world_size == 1:
            return loss
        total = loss.clone() if self.mesh.where.tensor == 0 else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total / (self.mesh.layout.batch_shards * self.mesh.layout.context)
