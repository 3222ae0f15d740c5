"""The pipeline: PyTorch's schedules over this rank's stages; a lone stage runs its micro-batches one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.layers.moe import moe_layers
from pipeline.parallel import context
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import DTYPES

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


class Pipeline:
    """Runs a rank's share of a batch of one shape through its stages.

    Args:
        stages: stage index (as text) -> module, as in LocalModel.stages; the last stage returns the mean loss of a micro-batch.
        config: of the run.
        mesh: this rank's groups.
        shape: (sequences, tokens a sequence) of the rank's share, and the decoder's tokens a sequence where there is one. However it is
            cut into sequences, a micro-batch has the tokens of training.micro_batch_size samples.
            Context ranks are given whole sequences and cut their tokens out.
    """

    def __init__(self, stages: nn.ModuleDict, config: RunConfig, mesh: Mesh, shape: tuple[int, ...]) -> None:
        layout, training = mesh.layout, config.training
        micro_batch = (training.micro_batch_size * training.sequence_length // shape[1], *shape[1:])
        micro_batches = shape[0] // micro_batch[0]
        self._micro_batches, self._mesh, self._context_kind = micro_batches, mesh, config.parallel.context_kind
        self.is_first = "0" in stages
        self.is_last = str(layout.stage_count - 1) in stages
        self._moe_layers = list(moe_layers(stages))
        # Losses of mixtures are means over a micro-batch, and each tensor rank has the whole one within its region.
        self._aux_loss_scale = 1 / (micro_batches * layout.tensor)

        def loss_fn(loss: Tensor, _: Tensor | None = None) -> Tensor:
            return loss / micro_batches

        self._schedule = (
            _schedule(stages, config, mesh, micro_batch, micro_batches, loss_fn)
            if layout.pipeline > 1
            else SingleStageSchedule(stages["0"], micro_batches, loss_fn)
        )

    def train(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Forward and backward pass; gradients are added to the parameters' .grad.

        Args:
            inputs: int64 (sequences, sequence), this rank's tokens of one global batch.
            batch: what belongs to them, with targets.

        Returns:
            The mean loss of these sequences as a 0-dim tensor on the rank of the last stage, zero on the others.
        """
        for moe in self._moe_layers:
            moe.loss_scale = self._aux_loss_scale
        return self._run(self._schedule.step, inputs, batch)

    def evaluate(self, inputs: Tensor, batch: Batch) -> Tensor:
        """The mean loss alone; arguments and result as in train."""
        with torch.no_grad(), _forward_only(self._schedule):
            return self._run(self._schedule.eval, inputs, batch)

    def _run(self, step: Any, inputs: Tensor, batch: Batch) -> Tensor:
        if self._mesh.layout.context > 1:
            inputs, batch = context.shard_sequence(inputs, batch, self._mesh.context, self._context_kind, self._micro_batches)
        losses: list[Tensor] = []
        arguments = (inputs,) if self.is_first else ()
        with_loss = {"target": batch["targets"], "losses": losses} if self.is_last else {}
        step(*arguments, **batch, **with_loss, return_outputs=False)
        if not losses:
            return torch.zeros((), device=self._mesh.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


#: The actions of PyTorch's schedules that an evaluation has, as they write them.
_AHEAD = ("F", "SEND_F", "RECV_F")


@contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Take the backward passes out of a schedule: PyTorch's `eval` stumbles over them where a rank holds two stages in a row (zbv)."""
    whole = getattr(schedule, "pipeline_order_with_comms", None)
    if whole is None:
        yield
        return
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.value in _AHEAD] for rank, actions in whole.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


class SingleStageSchedule:
    """The schedule of a model that is one stage: forward and backward for every micro-batch in turn.

    It has the face of PyTorch's schedules, which take two seconds to import.
    """

    def __init__(self, module: nn.Module, micro_batches: int, loss_fn: Callable[[Tensor], Tensor]) -> None:
        self._module, self._micro_batches, self._loss_fn = module, micro_batches, loss_fn

    def step(self, inputs: Tensor, losses: list[Tensor], **batch: Any) -> None:
        """Train on a batch."""
        for loss in self._losses(inputs, batch):
            loss.backward()
            losses.append(loss.detach())

    def eval(self, inputs: Tensor, losses: list[Tensor], **batch: Any) -> None:
        """Evaluate a batch."""
        losses.extend(self._losses(inputs, batch))

    def _losses(self, inputs: Tensor, batch: dict[str, Any]) -> Iterator[Tensor]:
        """Each micro-batch's share of the mean loss."""
        chunks = {name: batch[name].chunk(self._micro_batches) for name in Batch.__annotations__ if name in batch}
        for index, tokens in enumerate(inputs.chunk(self._micro_batches)):
            yield self._loss_fn(self._module(tokens, **{name: parts[index] for name, parts in chunks.items()}))


def _schedule(
    stages: nn.ModuleDict, config: RunConfig, mesh: Mesh, micro_batch: tuple[int, ...], micro_batches: int, loss_fn: Callable[..., Tensor]
) -> Any:
    """PyTorch's schedule of the configured kind."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

    layout = mesh.layout
    parts = [_stage(int(index), module, config, mesh, micro_batch) for index, module in stages.items()]
    if layout.stages_per_rank == 1:
        return Schedule1F1B(parts[0], micro_batches, loss_fn=loss_fn, scale_grads=False)
    kind = ScheduleZBVZeroBubble if layout.schedule == "zbv" else ScheduleInterleaved1F1B
    return kind(parts, micro_batches, loss_fn=loss_fn, scale_grads=False)  # type: ignore[arg-type]


def _stage(index: int, module: nn.Module, config: RunConfig, mesh: Mesh, micro_batch: tuple[int, ...]) -> PipelineStage:
    """One stage with the shapes of what it receives and sends, so that nothing has to be tried out: a state for each of the lengths."""
    from torch.distributed.pipelining import PipelineStage

    layout = mesh.layout
    last = layout.stage_count - 1
    sequences, *whole = micro_batch
    lengths = [length // layout.context for length in whole]
    tokens = torch.empty(sequences, lengths[0], dtype=torch.int64, device="meta")
    cut = layout.tensor if config.parallel.sequence_parallel else 1
    loss = torch.empty((), dtype=torch.float32, device="meta")
    dtype = DTYPES[config.precision.dtype]
    hidden = [torch.empty(sequences, rows // cut, config.model.hidden, dtype=dtype, device="meta") for rows in lengths]
    states, gradients = tuple(state.clone().requires_grad_() for state in hidden), tuple(hidden)
    shapes: dict[str, Any] = {
        "input_args": tokens if index == 0 else states,
        "output_args": loss.clone().requires_grad_() if index == last else states,
    }
    if "input_grads" in inspect.signature(PipelineStage).parameters:  # from torch 2.12 on
        shapes["input_grads"] = (None,) if index == 0 else gradients
        shapes["output_grads"] = (loss,) if index == last else gradients
    return PipelineStage(module, index, layout.stage_count, mesh.device, group=mesh.pipeline, **shapes)
