"""training.recompute_every: a forward pass is computed twice, and once more by another data rank, and all bits are compared.

GPUs with errors that no counter reports change results now and then, or always in the same way (Dixit et al. 2021, "Silent data corruptions
at scale", https://arxiv.org/abs/2102.11245). The first kind differs from itself, the second kind from another GPU. Compared are 64-bit
digests of what every pipeline stage returns, of what its head reads, and of the losses. Kernels of the forward pass add in a fixed order,
also without training.deterministic; those of the backward pass do not, and are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.parallel.mesh import gather_objects
from pipeline.training.callback import Callback, Step
from pipeline.training.trainer import Trainer
from pipeline.training.weight_copies import digest, on_any_rank

KEY = "training.recompute_every"
#: Most ranks that a message names.
_NAMED = 8


class RecomputationChecks(Callback):
    """Compares forward passes every training.recompute_every steps.

    Args:
        hosts: host name of each rank.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, hosts: Sequence[str]) -> None:
        self._every, self._training = config.training.recompute_every, config.training
        self._trainer, self._mesh, self._hosts = trainer, trainer.mesh, hosts

    def after_step(self, step: Step) -> None:
        """Check the ranks after a step if it is due. Collective.

        Raises:
            UserError: bits differ. No checkpoint of this state is to be written.
        """
        if not self._every or step.state.step % self._every:
            return
        tokens, batch = step.tokens, step.batch
        rows = self._rows(tokens)
        inputs = {"tokens": tokens[:rows], **{name: cast(Tensor, value)[:rows] for name, value in batch.items()}}
        first, second = self._digests(inputs), self._digests(inputs)
        flags = [(first != second).any()]
        if self._mesh.layout.data > 1:
            expected = self._from_other(first)
            flags.append((self._digests({name: self._from_other(value) for name, value in inputs.items()}) != expected).any())
        differs = torch.stack(flags)
        if any(on_any_rank(self._mesh, differs)):
            raise self._error(step.state.step, differs.tolist())

    def _rows(self, tokens: Tensor) -> int:
        """The sequences of a micro-batch; all of the step if there are pipeline stages, whose schedules need several micro-batches."""
        if self._mesh.layout.pipeline > 1:
            return len(tokens)
        return self._training.micro_batch_size * self._training.sequence_length // tokens.shape[1]

    def _digests(self, inputs: dict[str, Tensor]) -> Tensor:
        """Compute a forward pass, and return the digests of its results, int64 (results,)."""
        batch = inputs.copy()
        tokens = batch.pop("tokens")
        with self._recorded() as digests:
            losses, _ = self._trainer.evaluate(tokens, cast(Batch, batch))
        first = self._mesh.layout.batch_shard(self._mesh.coordinates) * len(tokens)
        return torch.stack([*digests, digest(losses[first : first + len(tokens)])])

    @contextmanager
    def _recorded(self) -> Iterator[list[Tensor]]:
        """Record the digests of what the stages of this rank return and their heads read."""
        digests: list[Tensor] = []

        def record(value: Any) -> None:
            if isinstance(value, Tensor) and value.is_floating_point():
                digests.append(digest(value))

        handles = []
        for stage in self._trainer.model.stage_modules():
            # Not of blocks: a compiled block with another hook is compiled again.
            handles.append(stage.register_forward_hook(lambda _module, _inputs, output: record(output)))
            if stage.head is not None:
                handles.append(stage.head.register_forward_pre_hook(lambda _module, arguments: record(arguments[0])))
        try:
            yield digests
        finally:
            for handle in handles:
                handle.remove()

    def _from_other(self, value: Tensor) -> Tensor:
        """Send a tensor to the same rank of the next data rank, and return that of the one before."""
        group, shift = self._mesh.data, self._mesh.layout.context
        sent, received = value.contiguous(), torch.empty_like(value, memory_format=torch.contiguous_format)
        peers = [(group.rank() + direction * shift) % group.size() for direction in (1, -1)]
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=peers[0])
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=peers[1])
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    def _error(self, step: int, differs: list[bool]) -> UserError:
        """What to say of ranks whose bits differ; every rank returns the same. Collective."""
        gathered = gather_objects(differs)
        unstable = [rank for rank, flags in enumerate(gathered) if flags[0]]
        pairs = [rank for rank, flags in enumerate(gathered) if len(flags) > 1 and flags[1] and not flags[0]]
        if unstable:
            finding = f"{self._named(unstable)} computed other bits when they computed a forward pass again"
        else:
            finding = f"{self._named(pairs)} computed other bits than the data rank before theirs from its batch: {self._suspects(pairs)}"
        rule = f"{finding}, after step {step}; no checkpoint of step {step} was written"
        fix = "run again without these nodes (sbatch --exclude): the newest checkpoint is continued; have their GPUs tested"
        return UserError.of(KEY, self._every, rule, fix)

    def _suspects(self, ranks: list[int]) -> str:
        """Which data ranks may compute wrongly: one that does differs from the one before it and from the one after it."""
        size = self._mesh.layout.data
        data = {self._mesh.layout.coordinates(rank).data for rank in ranks}
        twice = [index for index in sorted(data) if (index + 1) % size in data and size > 2]
        if len(twice) == 1:
            return f"data rank {twice[0]} differs from both of its neighbors"
        both = sorted(data | {(index - 1) % size for index in data})
        return f"one of data ranks {', '.join(map(str, both))} is wrong"

    def _named(self, ranks: list[int]) -> str:
        """Ranks with their hosts, those of the first pipeline rank: what later ones compute from wrong inputs is wrong as well."""
        stages = {rank: self._mesh.layout.coordinates(rank).pipeline for rank in ranks}
        first = [rank for rank in ranks if stages[rank] == min(stages.values())]
        shown = ", ".join(f"{rank} (on {self._hosts[rank]})" for rank in first[:_NAMED])
        return f"ranks {shown}" + (f" and {len(first) - _NAMED} more" if len(first) > _NAMED else "")
