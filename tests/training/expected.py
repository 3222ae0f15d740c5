"""What a run must compute: the result of certification's plain loop, which has no parallelism, no engine and no DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeline.certification.batches import with_loss_scale
from pipeline.certification.reference import initialize, plain_loop
from pipeline.certification.reference_loss import reference_loss
from pipeline.layers.moe import moe_layers
from pipeline.models import registry

Batch = tuple[torch.Tensor, dict[str, torch.Tensor]]

#: Keys of the statistics of an MoE model, in the order in which `statistics` returns them.
STATISTICS = ("router_entropy", "router_load_max", "router_dropped", "aux_loss")


class Trained(NamedTuple):
    """A training.

    Attributes:
        numbers: loss and gradient norm of every step, and the statistics of an MoE model.
        validated: the loss of every step's batch before the step, by evaluation: without next-sentence prediction; empty for MoE models.
        weights: the final weights by name.
        moments: the final first moments by name.
        averages: the final averages of the weights by name; empty without training.ema.
    """

    numbers: list[tuple[float, ...]]
    validated: list[float]
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]


def train_plain(config: Any, batches: list[Batch], *, model: nn.Module | None = None, own_loss: bool = False) -> Trained:
    """Train on one batch a step, which is one micro-batch unless the model has experts: the losses that balance them are a micro-batch's.

    Args:
        config: the configuration of a run.
        batches: tokens and the other fields of the global batch.
        model: an initialized model; that of the configuration when None.
        own_loss: train with the loss that the model returns, and do not evaluate.
    """
    if model is None:
        model = registry.build(config.model)
        initialize(model, config.model, config.training.seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not config.is_frozen(name))
    routed = any(True for _ in moe_layers(model))
    validated: list[float] = []

    def evaluated() -> Iterator[Any]:
        for tokens, batch in batches:
            if not routed and not own_loss:
                rest: Any = {name: value for name, value in batch.items() if name != "next_sentence"}
                with torch.no_grad():
                    validated.append(float(reference_loss(model, tokens, with_loss_scale(rest))))
            yield tokens, batch if own_loss else with_loss_scale(batch)  # type: ignore[arg-type]

    loss = (lambda tokens, batch: model(tokens, **batch)) if own_loss else None
    outcome = plain_loop(config, model, evaluated(), loss, micro_batches=None if routed else 1)
    numbers = [
        (loss, norm, *(statistics(records, config.model.experts) if records else ()))
        for loss, norm, records in zip(outcome.losses, outcome.norms, outcome.router_records, strict=True)
    ]
    return Trained(numbers, validated, outcome.tensors["weight"], outcome.tensors["moment"], outcome.tensors.get("average", {}))


def statistics(records: list[torch.Tensor], experts: int) -> tuple[float, float, float, float]:
    """Return the STATISTICS from the records of all layers."""
    means = [record[experts : experts + 3] / record[-1] for record in records]
    worst = max(float(record[:experts].max() / record[:experts].mean()) for record in records)
    entropy, dropped, loss = (torch.stack(values) for values in zip(*means, strict=True))
    return float(entropy.mean()), worst, float(dropped.mean()), float(loss.sum())
