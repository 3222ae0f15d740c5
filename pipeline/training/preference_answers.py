"""What a trainer does besides for objectives of preferences: log-probabilities of answers, those of the reference, and rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.layers.lora import without_adapters
from pipeline.layers.preference import PreferenceLoss
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pipeline_schedules import Pipeline


class PreferenceAnswers:
    """Computes log-probabilities of answers with this rank's stages, which get the loss. Its methods are collective."""

    def __init__(self, config: RunConfig, mesh: Mesh, model: LocalModel) -> None:
        self._config, self._mesh, self._model = config, mesh, model
        self._pipeline: Pipeline | None = None
        training = config.training
        for stage in model.stage_modules():
            stage.preference = PreferenceLoss(training.preference_loss, training.dpo_beta, training.simpo_margin)

    def with_reference(self, tokens: Tensor, batch: Batch) -> Batch:
        """Add Batch.reference to a batch that lacks it: the log-probabilities of the answers without adapters, or 0."""
        if "reference" in batch:
            return batch
        if not self._config.has_reference:
            return {**batch, "reference": torch.zeros(len(tokens), 2, device=tokens.device)}
        assert self._config.lora.rank, "training/reference_answers.py gives the log-probabilities to the data"
        with without_adapters(self._model):
            return {**batch, "reference": self.answers(tokens, batch)}

    def answers(self, tokens: Tensor, batch: Batch) -> Tensor:
        """Return the log-probabilities of the answers of this rank's sequences, fp32 (sequences, 2); zeros without the last stage."""
        if self._pipeline is None:
            self._pipeline = Pipeline(self._model.stages, self._config, self._mesh, tuple(tokens.shape), values=2)
        return self._pipeline.evaluate(tokens, batch).float()


def rewards(sums: Tensor) -> dict[str, Tensor]:
    """Return the mean rewards of a step for metrics.jsonl, 0-dim, from the sums that the loss measures, (PREFERENCE_SUMS,)."""
    chosen, rejected, accuracy = (sums[:3] / sums[3].clamp(min=1)).unbind()
    return {"rewards_chosen": chosen, "rewards_rejected": rejected, "rewards_margin": chosen - rejected, "rewards_accuracy": accuracy}
