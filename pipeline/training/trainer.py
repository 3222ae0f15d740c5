"""The trainer of one rank: model, engine and pipeline, and their training and evaluation steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from pipeline.config import loss_weights
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.registry import objective_of
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import set_loss
from pipeline.layers.loss import IGNORE
from pipeline.layers.preference import PREFERENCE_SUMS
from pipeline.layers.shifted_attention import full_attention
from pipeline.parallel import context_parallel, expert_parallel
from pipeline.parallel.mesh import Mesh, reduce_over
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.parallel.pipeline_schedules import Pipeline
from pipeline.training.engine import build_engine
from pipeline.training.matrix_rule import MatrixRule
from pipeline.training.preference_answers import PreferenceAnswers, rewards
from pipeline.training.qk_clip import QKClip
from pipeline.training.router_statistics import RouterStatistics
from pipeline.training.weight_update import StepResult

log = logging.getLogger("pipeline")


class Trainer:
    """Runs training and evaluation steps on batches that the caller provides. Without a model, it builds this rank's stages."""

    def __init__(self, config: RunConfig, mesh: Mesh, model: LocalModel | None = None) -> None:
        self.mesh = mesh
        self.model = model or parallelize(config, mesh)
        rule = MatrixRule.of(config.optimizer, config.model)
        self.engine = build_engine(self.model, mesh, config.optimizer, config.training, config.parallel, config.precision, rule)
        self._routers = RouterStatistics(config, self.model, mesh)
        self._qk_clip = None if config.optimizer.qk_clip is None else QKClip(config.optimizer.qk_clip, self.engine, mesh)
        self._preferences = PreferenceAnswers(config, mesh, self.model) if config.objective == "dpo" else None
        self._config = config
        self._pipelines: dict[tuple[tuple[int, ...], int | None], Pipeline] = {}
        self._loss_weights: dict[str, float] = {}
        for stage in self.model.stage_modules():
            set_loss(stage, config.training.head_z_loss, config.training.teacher_weight)
        #: Called before every update of the optimizer: a checkpoint may be copying the weights.
        self.before_update: Callable[[], None] = lambda: None

    def train(self, tokens: Tensor, batch: Batch, requests: Sequence[bool] = (), step: int = 0) -> tuple[Tensor, StepResult]:
        """One optimizer step.

        Args:
            tokens: int64 (sequences, sequence), this rank's share of the global batch, on the mesh's device.
            batch: the other model inputs, with targets.
            requests: of this rank, to be counted over all ranks.
            step: steps before this one; selects the random numbers of dropout, and weights of losses.

        Returns:
            The mean loss of the global batch, 0-dim, the same on every rank; and the result of the step.
        """
        weights = loss_weights.at(self._config.model, self._config.training, step)
        if weights != self._loss_weights:  # schedules have few values, and a model many modules
            self._loss_weights = weights
            for stage in self.model.stage_modules():
                stage.set_loss_weights(weights)
        batch = self._with_reference(tokens, self._with_loss_scale(batch))
        scale_before = copy(self.engine.loss_scale)
        mean, counted, sums, result = self._update(tokens, batch, requests, step)
        beyond = self._routers.beyond_buffers
        if lost := self._routers.beyond_on_host():  # the update was skipped
            if self.mesh.rank == 0:
                text = "step %d: %.0f assignments were beyond the buffers of experts, and it is computed again: parallel.expert_buffer=%g"
                log.warning(text, step + 1, lost, self._config.parallel.expert_buffer)
            self._forget_measured()
            self.engine.loss_scale.restore(scale_before)
            with expert_parallel.without_buffers(self.model.stage_modules()):
                mean, counted, sums, result = self._update(tokens, batch, requests, step)
        more = {**result.more, **self._routers.after_update(result.skipped)}
        if beyond is not None:
            more["router_beyond_buffers"] = beyond
        if self._qk_clip is not None:
            more["attention_logit_max"] = self._qk_clip.largest
        if scale_before.factor is not None:
            more["loss_scale"] = scale_before.factor
        if self._preferences is not None:
            more |= rewards(sums)
        return mean, replace(result, requests=counted, more=more)

    def _update(self, tokens: Tensor, batch: Batch, requests: Sequence[bool], step: int) -> tuple[Tensor, Tensor, Tensor, StepResult]:
        """Compute the gradients of a step, and queue the update, which is skipped if a MoE layer could not send all its tokens."""
        pipeline = self._pipeline(tokens, batch)
        if self._config.lora.dropout:
            # Tensor ranks drop the elements that one process would drop, others draw their own.
            where = self.mesh.coordinates
            place = (self._config.training.seed, step, where.pipeline, where.data, where.expert, where.context)
            torch.manual_seed(xxh3_64_intdigest(repr(place).encode()))
        every = self._config.training.noise_scale_every
        with self.engine.accumulate(pipeline.micro_batches, measure=bool(every) and (step + 1) % every == 0):
            loss = pipeline.train(tokens, batch, self.engine.loss_scale.factor)
        # Before the update, which gathers the new weights: NCCL runs the operations of a communicator in order, so that sums behind these
        # would let the device wait for all of them.
        mean, counted, sums = self._global_mean(loss, requests, None if self._preferences is None else self._measured(PREFERENCE_SUMS))
        self._routers.sum_records()
        self.before_update()
        return mean, counted, sums, self.engine.step(self._routers.beyond_buffers)

    def evaluate(self, tokens: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of each sequence without a gradient; arguments as in train. BERT's next-sentence loss is not included.

        Returns:
            For each sequence of the global batch, in the order of its samples, the sum of the loss over its targets other than IGNORE,
            fp64 (sequences,), and their number, fp64 (sequences,); of preferences the loss of its pair, and whether it has one. Both are
            the same on every rank.
        """
        self._forget_measured()
        batch = batch.copy()
        batch.pop("next_sentence", None)
        targets = self._is_counted(batch)
        counts = targets.sum(dim=1) if targets.dim() > 1 else targets
        if self._config.lora.dropout:
            self.model.eval()
        with full_attention(self.model):
            batch = self._with_reference(tokens, batch)
            if "loss_weights" in batch:
                batch["loss_scale"] = batch.pop("loss_weights")
            batch["per_sequence"] = torch.ones(len(tokens), device=tokens.device)
            losses = self._pipeline(tokens, batch).evaluate(tokens, batch).flatten()
        if self._config.lora.dropout:
            self.model.train()
        if self.mesh.coordinates.context or self.mesh.coordinates.pipeline:  # counted once
            counts = torch.zeros_like(counts)
        gathered = self._gather_sequences(torch.stack([losses.double(), counts.double()], dim=1))
        return gathered[:, 0], gathered[:, 1]

    def top_tokens(self, tokens: Tensor, batch: Batch, k: int) -> Tensor:
        """Compute the most probable next tokens of each position; arguments as in train.

        Returns:
            fp32 (sequences of the global batch, sequence, 2 k + 1), as top_log_probabilities, the same on every rank.
        """
        mesh, (rows, length) = self.mesh, tokens.shape
        for stage in self.model.stage_modules():
            stage.top_k = k
        pipeline = self._pipeline(tokens, batch, length // mesh.layout.context * (2 * k + 1))
        top = torch.zeros(rows, length, 2 * k + 1, device=mesh.device)
        positions: slice | Tensor = slice(None)
        if mesh.layout.context > 1:
            positions = context_parallel.local_positions(length, mesh.context, self._config.parallel.context_kind, mesh.device)
        top[:, positions] = pipeline.evaluate(tokens, batch).unflatten(1, (-1, 2 * k + 1))
        for stage in self.model.stage_modules():
            stage.top_k = 0
        top[..., :k].round_()  # the mean over micro-batches divides by their number, and multiplies again
        return self._gather_sequences(top)

    def measured(self, size: int) -> Tensor:
        """Return the sums over sequences of the last evaluated batch that the loss measures besides, fp32 (size,); collective."""
        return self._global_mean(torch.zeros((), device=self.mesh.device), sums=self._measured(size))[2]

    def _with_loss_scale(self, batch: Batch) -> Batch:
        """Add Batch.loss_scale if some positions have no target: the loss is the mean over the counted targets of the global batch."""
        if objective_of(self._config).every_position_counts(self._config):
            return batch
        counts = self._counts(batch)
        scale = counts[0].float() / counts[1].clamp(min=1)
        if "loss_weights" in batch:
            batch = batch.copy()
            batch["loss_scale"] = batch.pop("loss_weights") * scale
            return batch
        return {**batch, "loss_scale": scale.expand(len(batch["targets"])).contiguous()}

    def answers(self, tokens: Tensor, batch: Batch, *, full: bool) -> Tensor:
        """Compute the log-probabilities of the answers of preferences; collective.

        Args:
            tokens, batch: as in train.
            full: with full attention, as in evaluate, and not with that of training.

        Returns:
            fp64 (sequences, 2), of each sequence of the global batch, in the order of its samples; the same on every rank.
        """
        if self._config.lora.dropout:
            self.model.eval()
        assert self._preferences is not None, "the objective has answers"
        with full_attention(self.model) if full else nullcontext():
            answers = self._preferences.answers(tokens, batch)
        if self._config.lora.dropout:
            self.model.train()
        return self._gather_sequences(answers.double())

    def _with_reference(self, tokens: Tensor, batch: Batch) -> Batch:
        """Add what a batch of preferences lacks, and forget what was measured before."""
        if self._preferences is None:
            return batch
        batch = self._preferences.with_reference(tokens, batch)
        self._forget_measured()
        return batch

    def _measured(self, size: int) -> Tensor:
        """Return the sums of Stack.measured over the micro-batches of a step, fp32 (size,); zeros on ranks without the last stage."""
        measured = [sums for stage in self.model.stage_modules() for sums in stage.measured]
        return torch.stack(measured).sum(dim=0) if measured else torch.zeros(size, device=self.mesh.device)

    def _forget_measured(self) -> None:
        """Clear Stack.measured."""
        for stage in self.model.stage_modules():
            stage.measured.clear()

    @staticmethod
    def _is_counted(batch: Batch) -> Tensor:
        """The positions over which the loss is averaged, bool (sequences, positions); of preferences which pairs, bool (sequences,)."""
        if "loss_weights" in batch:
            return batch["loss_weights"] > 0
        counted = batch["targets"] != IGNORE
        return counted.any(dim=1) if "choices" in batch else counted

    def _counts(self, batch: Batch) -> Tensor:
        """The number of positions and of targets other than IGNORE in the global batch, int64 (2,); of pairs in a batch of preferences."""
        counted = self._is_counted(batch)
        counts = torch.stack([torch.full((), counted.numel(), device=counted.device), counted.sum()])
        reduce_over((self.mesh.dense,), counts)
        return counts // self.mesh.layout.context  # context ranks have the same sequences

    def _gather_sequences(self, values: Tensor) -> Tensor:
        """Gather (sequences, ...) of the shares of the batch; context ranks and stages add what they have of the same sequences."""
        layout, where, count = self.mesh.layout, self.mesh.coordinates, len(values)
        if layout.world_size == 1:
            return values
        gathered = values.new_zeros(layout.batch_shards * count, *values.shape[1:])
        if where.tensor == 0:
            gathered[layout.batch_shard(where) * count :][:count] = values
        reduce_over(self.mesh.all_ranks, gathered)
        return gathered

    def _pipeline(self, tokens: Tensor, batch: Batch, values: int | None = None) -> Pipeline:
        """Return the pipeline for batches of this shape and their result, `values` of a sequence; a warm-up has several shapes."""
        shape = (*tokens.shape, *batch["decoder_tokens"].shape[1:]) if "decoder_tokens" in batch else tuple(tokens.shape)
        values = 1 if "per_sequence" in batch else values
        if (shape, values) not in self._pipelines:
            self._pipelines[shape, values] = Pipeline(
                self.engine.stages, self._config, self.mesh, shape, values=values, backward=self.engine.backward
            )
        return self._pipelines[shape, values]

    def _global_mean(self, loss: Tensor, requests: Sequence[bool] = (), sums: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Average the losses of all shares of the batch, which the ranks of the last stage hold; count requests; add `sums` of all shares.

        The sums run over the groups of Mesh.all_ranks, in fp64: a sum over all ranks at once would need a communicator
        of the whole job, and in fp32 the groups of an axis could round the same sum differently.
        """
        flags = [loss.new_full((), float(request)) for request in requests]  # filled on the device: a copy from the host would wait
        sums = loss.new_zeros(0) if sums is None else sums
        if self.mesh.layout.world_size == 1:
            return loss, torch.stack(flags) if flags else loss.new_zeros(0), sums
        local = torch.cat([loss[None], sums]) * float(self.mesh.coordinates.tensor == 0)
        totals = torch.cat([local, *(flag[None] for flag in flags)]).double()
        reduce_over(self.mesh.all_ranks, totals)
        shares = self.mesh.layout.batch_shards * self.mesh.layout.context
        mean, added, counted = (part.to(loss.dtype) for part in totals.split([1, len(sums), len(flags)]))
        return mean[0] / shares, counted, added
