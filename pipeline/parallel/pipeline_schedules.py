"""Pipeline parallelism: PyTorch's schedules over this rank's stages; a single stage runs its micro-batches sequentially."""

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
from pipeline.parallel import context_parallel, rehearsed_group
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import DTYPES

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


class Pipeline:
    """Runs this rank's share of a batch through its stages. All batches have the same shape.

    Args:
        stages: stage index (as str) -> module, as in LocalModel.stages; the last stage returns the mean loss of a micro-batch.
        shape: (sequences, sequence length) of the rank's share; for encoder-decoders also the decoder's sequence length. A micro-batch
            has the tokens of training.micro_batch_size samples, independent of the sequence length. Context ranks receive full
            sequences and take their shards.
        values: number of values that the last stage returns for each sequence instead of the loss, for evaluate.
        backward: of the loss of a micro-batch, if there is a single stage.
    """

    def __init__(
        self,
        stages: nn.ModuleDict,
        config: RunConfig,
        mesh: Mesh,
        shape: tuple[int, ...],
        values: int | None = None,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> None:
        layout, training = mesh.layout, config.training
        micro_batch = (training.micro_batch_size * training.sequence_length // shape[1], *shape[1:])
        micro_batches = shape[0] // micro_batch[0]
        self.micro_batches, self._mesh, self._context_kind = micro_batches, mesh, config.parallel.context_kind
        self._result = () if values is None else (micro_batch[0], values)
        self.is_first = "0" in stages
        self.is_last = str(layout.stage_count - 1) in stages
        self._moe_layers = list(moe_layers(stages))
        # Auxiliary losses of MoE layers are means over a micro-batch, and each tensor rank computes the full loss.
        self._aux_loss_scale = 1 / (micro_batches * layout.tensor)

        self._loss_scale: Tensor | None = None

        def loss_fn(loss: Tensor, _: Tensor | None = None) -> Tensor:
            mean = loss / micro_batches
            return mean if self._loss_scale is None else mean * self._loss_scale

        self._schedule = (
            _build_schedule(stages, config, mesh, micro_batch, micro_batches, loss_fn, self._result)
            if layout.pipeline > 1
            else SingleStageSchedule(stages["0"], micro_batches, loss_fn, backward)
        )

    def train(self, inputs: Tensor, batch: Batch, loss_scale: Tensor | None = None) -> Tensor:
        """Forward and backward pass; gradients are added to the parameters' .grad.

        Args:
            inputs: int64 (sequences, sequence), this rank's tokens of one global batch.
            batch: the other model inputs, with targets.
            loss_scale: 0-dim factor of the loss in the backward pass; None for 1.

        Returns:
            The mean loss of these sequences, 0-dim; zero on ranks without the last stage.
        """
        if self._moe_layers:  # a tensor: compiled blocks do not depend on its value
            scale = torch.full((), self._aux_loss_scale, dtype=torch.float32, device=self._mesh.device)
            for moe in self._moe_layers:
                moe.loss_scale = scale if loss_scale is None else scale * loss_scale
        self._loss_scale = loss_scale
        try:
            loss = self._run_schedule(self._schedule.step, inputs, batch)
        finally:
            self._loss_scale = None
        return loss if loss_scale is None else loss / loss_scale

    def evaluate(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Forward pass only; arguments as in train, of a pipeline with `values`.

        Returns:
            What the model returns for each sequence, (sequences, values); zeros on ranks without the last stage.
        """
        with torch.no_grad(), _forward_only(self._schedule):
            values = self._run_schedule(self._schedule.eval, inputs, batch, reduced=False)
        return (values * self.micro_batches).expand(self.micro_batches, *self._result).flatten(0, 1)

    def _run_schedule(self, step: Any, inputs: Tensor, batch: Batch, *, reduced: bool = True) -> Tensor:
        if self._mesh.layout.context > 1:
            inputs, batch = context_parallel.shard_sequence(inputs, batch, self._mesh.context, self._context_kind, self.micro_batches)
        losses: list[Tensor] = []
        arguments = (inputs,) if self.is_first else ()
        with_loss = {"target": batch["targets"], "losses": losses} if self.is_last else {}
        step(*arguments, **batch, **with_loss, return_outputs=False)
        if not losses:
            return torch.zeros((), device=self._mesh.device)
        stacked = torch.stack([loss.detach() for loss in losses])
        return stacked.sum() if reduced else stacked


#: The actions of a forward pass in PyTorch's schedules.
_FORWARD_ACTIONS = ("F", "SEND_F", "RECV_F")


@contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Remove the backward passes from a schedule: PyTorch's `eval` fails on them where a rank holds two consecutive stages (zbv)."""
    full_order = getattr(schedule, "pipeline_order_with_comms", None)
    if full_order is None:
        yield
        return
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.value in _FORWARD_ACTIONS] for rank, actions in full_order.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = full_order


class SingleStageSchedule:
    """The schedule of a model with a single stage: forward and backward pass of one micro-batch after another.

    It has the interface of PyTorch's schedules, whose import takes two seconds.
    """

    def __init__(
        self, module: nn.Module, micro_batches: int, loss_fn: Callable[[Tensor], Tensor], backward: Callable[[Tensor], None]
    ) -> None:
        self._module, self._micro_batches, self._loss_fn, self._backward = module, micro_batches, loss_fn, backward

    def step(self, inputs: Tensor, losses: list[Tensor], **batch: Any) -> None:
        """Forward and backward pass of a batch."""
        for loss in self._losses(inputs, batch):
            self._backward(loss)
            losses.append(loss.detach())

    def eval(self, inputs: Tensor, losses: list[Tensor], **batch: Any) -> None:
        """Forward pass of a batch."""
        losses.extend(self._losses(inputs, batch))

    def _losses(self, inputs: Tensor, batch: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch, scaled by loss_fn."""
        chunks = {name: batch[name].chunk(self._micro_batches) for name in Batch.__annotations__ if name in batch}
        for index, tokens in enumerate(inputs.chunk(self._micro_batches)):
            yield self._loss_fn(self._module(tokens, **{name: values[index] for name, values in chunks.items()}))


def _build_schedule(
    stages: nn.ModuleDict,
    config: RunConfig,
    mesh: Mesh,
    micro_batch: tuple[int, ...],
    micro_batches: int,
    loss_fn: Callable[..., Tensor],
    result: tuple[int, ...],
) -> Any:
    """Build the PyTorch schedule that parallel.schedule selects."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

    layout = mesh.layout
    pipeline_stages = [_build_stage(int(index), module, config, mesh, micro_batch, result) for index, module in stages.items()]
    if layout.stages_per_rank == 1:
        return Schedule1F1B(pipeline_stages[0], micro_batches, loss_fn=loss_fn, scale_grads=False)
    kind = ScheduleZBVZeroBubble if layout.schedule == "zbv" else ScheduleInterleaved1F1B
    return kind(pipeline_stages, micro_batches, loss_fn=loss_fn, scale_grads=False)  # type: ignore[arg-type]


def _build_stage(
    index: int, module: nn.Module, config: RunConfig, mesh: Mesh, micro_batch: tuple[int, ...], result: tuple[int, ...]
) -> PipelineStage:
    """Build a PipelineStage. Static input and output shapes, one hidden state per sequence length, avoid its shape inference.

    `result` is the shape of what the last stage returns.
    """
    from torch.distributed.pipelining import PipelineStage

    layout = mesh.layout
    last = layout.stage_count - 1
    sequences, *full_lengths = micro_batch
    lengths = [length // layout.context for length in full_lengths]
    tokens = torch.empty(sequences, lengths[0], dtype=torch.int64, device="meta")
    sequence_shards = layout.tensor if config.parallel.sequence_parallel else 1
    loss = torch.empty(result, dtype=torch.float32, device="meta")
    dtype = DTYPES[config.precision.dtype]
    hidden = [torch.empty(sequences, length // sequence_shards, config.model.hidden, dtype=dtype, device="meta") for length in lengths]
    states, gradients = tuple(state.clone().requires_grad_() for state in hidden), tuple(hidden)
    shapes: dict[str, Any] = {
        "input_args": tokens if index == 0 else states,
        "output_args": loss.clone().requires_grad_() if index == last else states,
    }
    if "input_grads" in inspect.signature(PipelineStage).parameters:  # from torch 2.12 on
        shapes["input_grads"] = (None,) if index == 0 else gradients
        shapes["output_grads"] = (loss,) if index == last else gradients

    class Stage(PipelineStage):
        """A stage whose separate pass for the weights (zbv) calls their hooks after accumulation, as autograd does in a full pass.

        In a rehearsal, the other stages, which do not exist, vote for static shapes.
        """

        def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
            result = super()._warmup_backward_result(received_result)
            return torch.ones(1, dtype=torch.int32) if rehearsed_group.is_initialized() else result

        def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **options: Any) -> Any:
            result = super().backward_maybe_with_nosync(backward_type, *args, **options)
            if backward_type == "weight":
                for parameter in (p for p in self.submod.parameters() if p.grad is not None):
                    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                        hook(parameter)
            return result

    return Stage(module, index, layout.stage_count, mesh.device, group=mesh.pipeline, **shapes)
