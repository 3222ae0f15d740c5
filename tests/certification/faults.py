"""Mistakes of a trainer, planted in the ranks of a certificate from outside: each replaces one function while the ranks work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by what `make` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def wrong_gradient(weight: str = "blocks.0.mlp_norm.weight") -> Any:
    """One of two tensor ranks scales the gradient of a weight by 1.01."""
    from pipeline.training.trainer import Trainer

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, config: Any, mesh: Any, model: Any = None) -> None:
            original(self, config, mesh, model)
            for parameter, piece in self.model.pieces.items():
                if piece.name == weight and mesh.coordinates.tensor == 0:
                    parameter.register_hook(lambda gradient: gradient * 1.01)

        return init

    return replaced(Trainer, "__init__", make)


def wrong_gradient_of_one_piece() -> Any:
    """As wrong_gradient, of a weight that is divided."""
    return wrong_gradient("blocks.1.attention.query.weight")


def clipped_on_one_tensor_rank() -> Any:
    """Replicated vectors are clipped on even ranks only, those with the primary copy (DeepSpeed#1801, BLOOM-176B)."""
    from pipeline.training.weight_update import WeightUpdate

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, norm: torch.Tensor, gradients: Any) -> Any:
            if dist.get_rank() % 2:
                gradients[-1].mul_(2)  # the last bucket: vectors
            return original(self, norm, gradients)

        return step

    return replaced(WeightUpdate, "step", make)


def bias_added_by_every_rank() -> Any:
    """The bias of a row-parallel layer is part of every rank's partial product."""
    from pipeline.parallel.tensor_parallel import RowParallelLinear

    def make(_: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = self._partial_product(x)
            return self.leave(y if self.bias is None else y + self.bias)

        return forward

    return replaced(RowParallelLinear, "forward", make)


def second_moments_are_not_loaded() -> Any:
    """A resumed optimizer begins with second moments of zero."""
    from pipeline.checkpoint import load_any_layout

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(checkpoint: Any, fragments: Any) -> None:
            original(checkpoint, fragments)
            for fragment in fragments:
                if "exp_avg_sq" in fragment.tensors:
                    fragment.tensors["exp_avg_sq"].zero_()

        return load

    return replaced(load_any_layout, "load", make)


def schedule_restarts_at_resume() -> Any:
    """The learning rate and the optimizer's step count begin again after loading."""
    from pipeline.training.weight_update import WeightUpdate

    return replaced(WeightUpdate, "loaded", lambda original: lambda self, updates: original(self, 0))  # noqa: ARG005


def rate_of_the_first_phase() -> Any:
    """A run goes on in another phase with the learning rate of the phase before."""
    return _continued_with({"optimizer.lr": 3e-4})


def positions_of_the_first_phase() -> Any:
    """A run goes on in another phase with the rotary positions of the phase before."""
    return _continued_with({"model.rope_theta": 1e4})


def _continued_with(values: dict[str, Any]) -> Any:
    from pipeline.certification import state
    from pipeline.common import knobs

    return replaced(state, "begin", lambda original: lambda config: original(knobs.changed(config, values)))


def data_ranks_read_the_same() -> Any:
    """Every data rank reads the samples of the first one."""
    from pipeline.training.batch_loader import BatchLoader

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            self._rank = 0

        return init

    return replaced(BatchLoader, "__init__", make)


def resumed_run_repeats_samples() -> Any:
    """A run that is resumed reads from the first sample on (accelerate#4071)."""
    from pipeline.training.batch_loader import BatchLoader

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, state, *more: original(self, dataclasses.replace(state, samples=0), *more)

    return replaced(BatchLoader, "remaining", make)


def epoch_repeats_a_sequence() -> Any:
    """The permutation of an epoch maps two indices to one sequence."""
    from pipeline.data.load import samples

    return replaced(samples, "permute", lambda original: lambda *arguments: original(*arguments) // 2 * 2)


def epochs_have_one_order() -> Any:
    """The permutation of every epoch is that of the first one."""
    from pipeline.data.load import samples

    return replaced(samples, "permute", lambda original: lambda index, count, seed, epoch: original(index, count, seed, epoch * 0))


def masks_of_all_samples_are_equal() -> Any:
    """The masks of all samples are drawn with one seed."""
    from pipeline.data.load.objectives import masked

    return replaced(masked, "mask", lambda original: lambda tokens, samples, *more: original(tokens, samples * 0, *more))


def targets_are_the_tokens() -> Any:
    """Targets are not shifted."""
    from pipeline.data.load.objectives.causal import Causal

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def arrays(self: Any, indices: Any) -> Any:
            found = original(self, indices)
            return {**found, "targets": found["tokens"]}

        return arrays

    return replaced(Causal, "arrays", make)


def ignored_targets_are_kept() -> Any:
    """A position without a target has none in later batches either (Megatron-LM#1298)."""
    from pipeline.data.load.objectives.causal import Causal
    from pipeline.data.load.objectives.objective import IGNORE

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def arrays(self: Any, indices: Any) -> Any:
            found = original(self, indices)
            ignored = self.ignored = (found["tokens"] == self.samples.end_of_document).any(0) | getattr(self, "ignored", False)
            return {**found, "targets": np.where(ignored, np.int32(IGNORE), found["targets"].astype(np.int32))}

        return arrays

    return replaced(Causal, "arrays", make)


def gradients_scaled_in_bf16() -> Any:
    """Gradients are 1.5 times too large, in bf16 only."""
    from pipeline.training.trainer import Trainer

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, config: Any, mesh: Any, model: Any = None) -> None:
            original(self, config, mesh, model)
            for parameter in self.model.pieces if config.precision.dtype == "bf16" else ():
                parameter.register_hook(lambda gradient: gradient * 1.5)

        return init

    return replaced(Trainer, "__init__", make)


def gradients_summed_in_bf16() -> Any:
    """The sum of the gradients of micro-batches is rounded to the dtype of the weight."""
    from pipeline.training.gradient_reduction import _State

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def add(self: Any, parameter: torch.nn.Parameter) -> None:
            original(self, parameter)
            total = self._sums[parameter]
            total.copy_(total.to(parameter.dtype))

        return add

    return replaced(_State, "add", make)


def validation_averages_sequences() -> Any:
    """The loss of a split is the mean of those of its sequences, not of its targets."""
    from pipeline.training import validation

    def make(_: Callable[..., Any]) -> Callable[..., Any]:
        def mean(losses: torch.Tensor, targets: torch.Tensor, _text: Any) -> Any:
            return validation.MeanLoss(float((losses / targets.clamp(min=1)).mean()), None, int(targets.sum()))

        return mean

    return replaced(validation, "_mean", make)


def further_targets_wrap_around() -> Any:
    """The last position of a sequence predicts its first token as a further one. The layout and the plain model share the layer."""
    from pipeline.layers import multi_token

    return replaced(multi_token, "shift_labels", lambda _: lambda labels: labels.roll(-1, dims=1))


def loss_of_last_chunk() -> Any:
    """Only the last chunk of rows contributes to the gradient of the output matrix."""
    from pipeline.layers import loss

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, *more: Any) -> Any:
            total = original(ctx, hidden, weight, bias, targets, *more)
            grad_hidden, grad_weight, grad_bias = ctx.to_save
            if grad_weight is not None and len(hidden) > loss.chunk_rows(*hidden.shape[1:], len(weight), hidden.device):
                ctx.save_for_backward(grad_hidden, grad_weight / 2, grad_bias)
            return total

        return staticmethod(forward)

    return replaced(loss._LinearCrossEntropy, "forward", make)


def blend_weights_are_swapped() -> Any:
    """The weights of a blend are those of the corpora in the opposite order."""
    from pipeline.data.load import blend_schedule

    def make(original: Callable[..., None]) -> Callable[..., None]:
        return lambda self, phases: original(self, [dataclasses.replace(phase, weights=phase.weights[::-1]) for phase in phases])

    return replaced(blend_schedule.BlendSchedule, "__init__", make)


def ends_of_long_documents_are_dropped() -> Any:
    """Of a document that is longer than a sequence, the rest is left out of the packing."""
    from pipeline.data.load import packing

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def split(positions: np.ndarray, lengths: np.ndarray, capacity: int) -> Any:
            starts, kept = original(positions, lengths, capacity)
            return (starts[kept == capacity], kept[kept == capacity]) if (kept == capacity).any() else (starts, kept)

        return split

    return replaced(packing, "split_long", make)


def decay_begins_one_step_late() -> Any:
    """The progress of every schedule is that of the step before."""
    from pipeline.training import lr_schedule

    return replaced(lr_schedule, "_progress", lambda original: lambda update, first, steps: original(update - 1, first, steps))


def far_positions_are_rounded() -> Any:
    """The angles of rotary embeddings from position 40 on are those of even positions."""
    from pipeline.layers.rotary import Rotary

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def compute(self: Any, device: Any) -> None:
            original(self, device)
            for table in (self.cos, self.sin):
                table[41::2] = table[40:-1:2]

        return compute

    return replaced(Rotary, "compute_buffers", make)


def targets_have_holes() -> Any:
    """The token before the last one of each sequence is no target."""
    from pipeline.data.load.objectives.causal import Causal

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def arrays(self: Any, indices: Any) -> Any:
            found = original(self, indices)
            found["targets"] = found["targets"].astype(np.int64)
            found["targets"][:, -2] = -100
            return found

        return arrays

    return replaced(Causal, "arrays", make)


def state_not_decayed_between_chunks() -> Any:
    """Linear attention passes its state to the next chunk of tokens as it is."""
    from pipeline.layers import delta_rule

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def solve(*arguments: Any) -> Any:
            solved = original(*arguments)
            return solved._replace(across=torch.ones_like(solved.across))

        return solve

    return replaced(delta_rule, "_solve", make)


def largest_logits_not_bounded() -> Any:
    """QK-clip does nothing."""
    from pipeline.training.qk_clip import QKClip

    return replaced(QKClip, "after_update", lambda _: lambda *_: None)


def scores_not_capped() -> Any:
    """Attention has no soft cap of its scores."""
    from pipeline.layers import mask

    return replaced(mask, "capped", lambda _: lambda scores, _: scores)


def gate_clamped_at_twice_the_bound() -> Any:
    """The gate of a clamped SwiGLU has twice the bound of what it multiplies."""
    from pipeline.layers.mlp import ClampedSwiGLU

    def make(_: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            gate = gate.clamp(max=2 * self.limit)
            return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)

        return apply

    return replaced(ClampedSwiGLU, "__call__", make)


def last_round_not_updated() -> Any:
    """Muon updates its matrices in rounds, but for the last one of several."""
    from pipeline.training import matrix_homes

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def divide_in_rounds(*arguments: Any) -> Any:
            rounds = original(*arguments)
            return rounds[:-1] or rounds

        return divide_in_rounds

    return replaced(matrix_homes, "divide_in_rounds", make)


def window_on_one_side() -> Any:
    """The window of an encoder does not bound the tokens after a query; the plain loop has the same masks."""
    from pipeline.layers.mask import Mask

    def make(_original: Callable[..., Any]) -> Callable[..., Any]:
        def visible(self: Any, queries: int, keys: int, device: torch.device, window: int | None) -> torch.Tensor:
            before, after = self.token_positions(queries, keys, device)
            distance = before[:, None, :, None] - after[:, None, None, :]
            documents = self.documents[:, None, :, None] == self.documents[:, None, None, :] if self.documents is not None else True
            return (distance < (window or queries)) & documents

        return visible

    return replaced(Mask, "_visible", make)


def half_a_gradient_in_a_shared_layer() -> Any:
    """The backward pass of the MLP, which the layout and the plain loop share, halves every gradient."""
    from pipeline.layers.mlp import GatedMLP

    def make(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = original(self, x)
            return y.detach() + 0.5 * (y - y.detach())

        return forward

    return replaced(GatedMLP, "forward", make)


def pieces_leave_a_gap() -> Any:
    """The last tensor rank's piece of a weight is one row too short."""
    from pipeline.parallel import pieces

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def slice_weight(name: str, shape: Any, role: str, axes: Any, **more: Any) -> Any:
            piece = original(name, shape, role, axes, **more)
            size, rank = axes.get("tensor", (1, 0))
            cut = tuple(
                dataclasses.replace(s, stop=s.stop - 1) if s.axis == "tensor" and rank == size - 1 and name.endswith("key.weight") else s
                for s in piece.slices
            )
            return dataclasses.replace(piece, slices=cut)

        return slice_weight

    return replaced(pieces, "slice_weight", make)


def partitions_are_too_short() -> Any:
    """A bucket is not padded up to a multiple of its ranks."""
    from pipeline.training import buckets

    return replaced(buckets, "padded_elements", lambda _: lambda elements, ranks: elements // ranks * ranks)


@contextmanager
def together(*planted: Callable[[], Any]) -> Iterator[None]:
    """Several faults at once."""
    with ExitStack() as stack:
        for fault in planted:
            stack.enter_context(fault())
        yield


def with_fault(fault: Callable[[], Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function with the fault."""
    with fault():
        return function(*arguments)
