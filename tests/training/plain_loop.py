"""The reference of the tests of layouts: a plain training loop without parallelism and DeepSpeed, with PyTorch's AdamW and clipping."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pipeline.certification.initial_weights import initialize
from pipeline.layers.loss import IGNORE
from pipeline.layers.moe import moe_layers
from pipeline.models import registry
from pipeline.training.lr_schedule import learning_rate

#: Keys of the statistics of an MoE model, in the order in which `statistics` returns them.
STATISTICS = ("router_entropy", "router_load_max", "router_dropped", "aux_loss")


class Trained(NamedTuple):
    """A training.

    Attributes:
        numbers: loss and gradient norm of every step, and the statistics of an MoE model.
        validated: the loss of every step's batch before the step, by evaluation: without next-sentence prediction; empty for MoE models.
        weights: the final weights by name.
        moments: the final first moments by name.
    """

    numbers: list[tuple[float, ...]]
    validated: list[float]
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


def plain_loop(
    config: Any, batches: list[tuple[torch.Tensor, dict[str, torch.Tensor]]], *, own_loss: bool, model: torch.nn.Module | None = None
) -> Trained:
    """Train on one batch a step.

    Args:
        config: the configuration of a run.
        batches: tokens and the other fields of the global batch.
        own_loss: use the loss that the model returns. Otherwise PyTorch's cross-entropy of its logits.
        model: an initialized model; that of the configuration when None.
    """
    if model is None:
        model = registry.build(config.model)
        initialize(model, config.model, config.training.seed)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in learned if (p.dim() >= 2) == matrices]} for matrices in (True, False)]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = config.optimizer.weight_decay, 0.0
    optimizer = torch.optim.AdamW(groups, betas=(config.optimizer.beta1, config.optimizer.beta2), eps=config.optimizer.eps)
    routed = list(moe_layers(model))
    # The losses that balance the experts are those of a micro-batch.
    parts = config.training.global_batch_size // config.training.micro_batch_size if routed else 1
    for moe in routed:
        moe.loss_scale = 1 / parts
    numbers, validated = [], []
    for step, (tokens, batch) in enumerate(batches):
        if not routed:
            with torch.no_grad():
                rest = {name: value for name, value in batch.items() if name != "next_sentence"}
                validated.append(float(loss_of(model, tokens, rest, own_loss)))
        chunks = {name: value.chunk(parts) for name, value in batch.items()}
        loss = torch.zeros(())
        for index, part in enumerate(tokens.chunk(parts)):
            partial = loss_of(model, part, {name: values[index] for name, values in chunks.items()}, own_loss) / parts
            partial.backward()
            loss += partial.detach()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer, config.training)
        norm = torch.nn.utils.clip_grad_norm_(learned, config.optimizer.gradient_clipping)
        records = [moe.take_record() for moe in routed]
        numbers.append((float(loss), float(norm), *(statistics(records, config.model.experts) if records else ())))
        optimizer.step()
        optimizer.zero_grad()
        for moe, record in zip(routed, records, strict=True):
            if moe.router.bias is not None:
                load = record[: config.model.experts]
                moe.router.bias += config.model.bias_update_speed * torch.sign(load.mean() - load)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters() if p.requires_grad}
    return Trained(numbers, validated, weights, moments)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, batch: dict[str, torch.Tensor], own_loss: bool) -> torch.Tensor:
    """Return the loss of a micro-batch."""
    if own_loss:
        return model(tokens, **batch)
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    return F.cross_entropy(model(tokens, **inputs).flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORE)


def statistics(records: list[torch.Tensor], experts: int) -> tuple[float, float, float, float]:
    """Return the STATISTICS from the records of all layers."""
    means = [record[experts:-1] / record[-1] for record in records]
    worst = max(float(record[:experts].max() / record[:experts].mean()) for record in records)
    entropy, dropped, loss = (torch.stack(values) for values in zip(*means, strict=True))
    return float(entropy.mean()), worst, float(dropped.mean()), float(loss.sum())
