"""Master weights and optimizer state in host memory (parallel.offload=optimizer), updated by the CPU.

On a GPU, the gradient of a bucket is copied to the host when its last reduction of the step ends, beside the backward pass. The update
waits for the global norm. The CPU then updates one bucket after the other, in the order in which the next step uses them, while the weights
of the buckets before it are copied to the device and gathered (Ren et al. 2021, https://arxiv.org/abs/2101.06840, sections 4 and 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig
from pipeline.training.elementwise_optimizers import Groups
from pipeline.training.gradient_clipping import is_skipped
from pipeline.training.loss_scale import LossScale
from pipeline.training.weight_update import StepResult, WeightUpdate


class OffloadedUpdate(WeightUpdate):
    """As WeightUpdate, in host memory: the same arithmetic, by PyTorch's fused AdamW of the CPU.

    DeepSpeed's CPU Adam takes the same time, and is compiled by a job, which needs a compiler on compute nodes.

    Args:
        groups, optimizer, training, loss_scale: see WeightUpdate. One group for each bucket.
        device: of the weights and gradients.
    """

    def __init__(
        self, groups: Groups, optimizer: OptimizerConfig, training: TrainingConfig, loss_scale: LossScale, device: torch.device
    ) -> None:
        super().__init__(groups, optimizer, training, loss_scale, torch.device("cpu"))
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._gradients: dict[int, Tensor] = {}
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._rounded: dict[int, Tensor] = {}

    def begin_weights(self, weights: Sequence[Tensor], order: Sequence[int], changed: Callable[[int], None]) -> None:
        """Adopt the weights on the device.

        Args:
            weights: this rank's partitions, those of the master weights in their order, in the dtype of the model.
            order: indices, in the order in which they are updated.
            changed: called with an index when the weights have been updated; on a GPU, the current stream waits for them.
        """
        self._weights, self._order, self._changed = list(weights), list(order), changed

    def fetch(self, index: int, gradient: Tensor) -> None:
        """Start to copy the final gradient of a master weight to the host; the current stream has computed it."""
        if self._stream is None:
            self._gradients[index] = gradient
            return
        if index not in self._gradients:
            self._gradients[index] = torch.empty_like(gradient, device="cpu", pin_memory=True)
            self._arrived[index] = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._gradients[index].copy_(gradient, non_blocking=True)
            self._arrived[index].record()

    @torch.no_grad()
    def step(self, norm: Tensor, gradients: Sequence[Tensor | None]) -> StepResult:  # noqa: ARG002 - `fetch` had them
        """See WeightUpdate; waits for the device."""
        factor = self._loss_scale.factor
        skipped = self._prepare(norm.cpu(), None if factor is None else factor.cpu())
        groups = self.optimizer.param_groups
        for index in self._order:
            master = self._masters[index]
            if self._stream is not None:
                self._arrived[index].synchronize()
            master.grad = self._gradients[index]
            self.optimizer.param_groups = groups[index : index + 1]
            self.optimizer.step()
            master.grad = None
            self._send(index)
        self.optimizer.param_groups = groups
        if self._stream is None:
            self._gradients.clear()
        self._updates += (1 - skipped).long()
        self.average.update(skipped)
        there = is_skipped(norm)
        self._loss_scale.update(there)
        # From pageable memory, the copy would wait for the weights that are being sent.
        lr = self._lr.clone() if self._stream is None else self._lr.pin_memory().to(self._device, non_blocking=True)
        return StepResult(norm, there, lr)

    def _send(self, index: int) -> None:
        """Round the weights of a bucket on the host, and copy them to the device."""
        weights, master = self._weights[index], self._masters[index]
        if self._stream is None:
            weights.copy_(master)
        else:
            if index not in self._rounded:
                self._rounded[index] = torch.empty_like(weights, device="cpu", pin_memory=True)
            self._rounded[index].copy_(master)
            with torch.cuda.stream(self._stream):
                weights.copy_(self._rounded[index], non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
        self._changed(index)

    def counters(self) -> Tensor:
        """See Engine."""
        return torch.cat([self._updates.double()[None].to(self._device), self._loss_scale.counters(self._device)])
