"""The reference: a plain PyTorch training loop in one process, with stock cross-entropy and clipping, and the optimizer as a plain loop.

It uses the model of the package and nothing of its engines, process groups or tensor-parallel tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from pipeline.certification import plain_optimizers
from pipeline.certification.batches import RandomBatch, permuted, random_batches, split, with_loss_scale
from pipeline.certification.comparison import Outcome
from pipeline.certification.plain_optimizers import plain_rate
from pipeline.certification.plain_qk_clip import PlainQKClip
from pipeline.certification.reference_loss import reference_loss
from pipeline.config import loss_weights, phases
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import set_loss
from pipeline.layers.experts import Experts
from pipeline.layers.fp8_products import FP8_PRODUCTS
from pipeline.layers.init import initial_tensor
from pipeline.layers.moe import moe_layers
from pipeline.layers.stack import Stack
from pipeline.models import registry
from pipeline.models.config import ModelConfig

#: Tokens and other inputs of a micro-batch -> its loss.
Loss = Callable[[Tensor, Batch], Tensor]


def initial_noise(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return noise that is added to an initial weight, so that no bias is zero and no norm weight is one."""
    return initial_tensor(f"noise/{name}", shape, 0.02, 0)


def train_plain(
    config: RunConfig,
    dtype: torch.dtype = torch.float32,
    steps: int | None = None,
    *,
    perturbed: int | None = None,
    reordered: int | None = None,
    tied: bool = False,
    after_step: Callable[[], object] = lambda: None,
) -> Outcome:
    """Train the model of a run on random batches in a plain loop.

    Args:
        config: of the run; its parallel layout is ignored.
        dtype: of weights and activations. Master weights, gradients and moments are fp32, or fp64 for an fp64 model. The initial weights
            are those of fp32, rounded to a lower precision as a job's are.
        steps: number of steps; training.steps when None.
        perturbed: seed of random changes of every weight by at most a rounding error of the dtype, in every step; None for no changes.
        reordered: seed of another order of the micro-batches of each step, and of the sequences within them; None for the order of the
            layout. Where experts have a capacity, which tokens they drop depends on the order of the sequences, which then stays.
        tied: see plain_optimizers.build.
        after_step: called after every step.
    """
    order = None if reordered is None else torch.Generator().manual_seed(reordered)
    within = getattr(config.model, "capacity_factor", None) is None

    def batches() -> Iterator[RandomBatch]:
        for step, (tokens, batch) in enumerate(random_batches(config, steps)):
            if order is not None:
                parts = micro_batches_of(phases.at(config, step), tokens)
                tokens, batch = permuted(tokens, batch, parts, order, within=within)
            yield tokens, with_loss_scale(batch)
            after_step()

    noise = None if perturbed is None else torch.Generator().manual_seed(perturbed)
    return plain_loop(config, build_plain(config, dtype), batches(), dtype=dtype, noise=noise, tied=tied)


def plain_loop(
    config: RunConfig,
    model: nn.Module,
    batches: Iterable[RandomBatch],
    loss: Loss | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    micro_batches: int | None = None,
    noise: torch.Generator | None = None,
    tied: bool = False,
) -> Outcome:
    """Train an initialized model, in place up to the second phase of training.phases, which gets a model of its own.

    Args:
        config: of the run: optimizer, schedule and micro-batch size.
        model: parameters that do not require a gradient are fixed.
        batches: one global batch a step.
        loss: (tokens, other inputs) -> loss of a micro-batch; the step's loss is the mean of its micro-batches. reference_loss when
            None.
        dtype: of weights and activations.
        micro_batches: number of micro-batches of a step; that of training.micro_batch_size when None.
        noise: of random changes of the weights in every step by at most a rounding error; None for no changes.
        tied: see plain_optimizers.build.
    """
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    masters = {name: nn.Parameter(parameter.detach().to(precise, copy=True)) for name, parameter in learned.items()}
    _cast(learned.values(), dtype)
    _copy(masters, learned, noise)
    optimizer, ema = plain_optimizers.build(config, masters, tied=tied), config.training.ema or 0.0
    averages = {} if not ema else {name: master.detach().clone() for name, master in masters.items()}
    clipping = config.optimizer.gradient_clipping or math.inf
    outcome = Outcome([], [], {"gradient": {}, "moment": {}, "weight": {}})
    run, clip = config, PlainQKClip(model, config.optimizer.qk_clip)
    for step, (tokens, fields) in enumerate(batches):
        if step and phases.number_at(run, step) != phases.number_at(run, step - 1):
            config = phases.at(run, step)
            model = _same_weights(build_plain(config, dtype), model)
            learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            plain_optimizers.change(optimizer, config, masters)
            clip, clipping = PlainQKClip(model, config.optimizer.qk_clip), config.optimizer.gradient_clipping or math.inf
        set_loss(model, config.training.head_z_loss)
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            stack.set_loss_weights(loss_weights.at(config.model, config.training, step))
        parts = split(tokens, fields, micro_batches or micro_batches_of(config, tokens))
        outcome.losses.append(_accumulate(config, model, learned, masters, parts, loss or partial(reference_loss, model)))
        outcome.norms.append(float(nn.utils.clip_grad_norm_(masters.values(), clipping)))
        if step == 0:
            signed = OPTIMIZERS[config.optimizer.name].moment == "exp_avg"  # of the square no sign is known
            gradients = {name: master.grad for name, master in masters.items() if master.grad is not None}
            outcome.tensors["gradient"] = {name: value.clone() if signed else value.abs() for name, value in gradients.items()}
        for group in optimizer.param_groups:
            group["lr"] = plain_rate(step, config.optimizer, config.training) * group.get("rate", 1.0)
        optimizer.step()
        clip.after_update(masters)
        optimizer.zero_grad()
        _copy(masters, learned, noise)
        with torch.no_grad():
            for name, average in averages.items():
                average.mul_(ema).add_(masters[name], alpha=1 - ema)
        outcome.router_records.append(_update_router_biases(model))
    fixed = {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    outcome.tensors["weight"] = {**{name: plain_optimizers.trained(optimizer, master) for name, master in masters.items()}, **fixed}
    moment = OPTIMIZERS[config.optimizer.name].moment
    outcome.tensors["moment"] = {name: optimizer.state[master][moment] for name, master in masters.items()}
    if averages:
        outcome.tensors["average"] = averages
    return outcome


def build_plain(config: RunConfig, dtype: torch.dtype) -> nn.Module:
    """Return the full model with its initial weights; frozen ones without a gradient; with precision.fp8, 8-bit products.

    Arguments as in train_plain.
    """
    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if dtype != torch.float64 and parameter.requires_grad:  # those without a gradient, biases of routers, are fp32
                _cast([parameter], dtype)
            parameter.add_(initial_noise(name, tuple(parameter.shape)))
            if config.is_frozen(name):
                parameter.requires_grad_(False)
    if config.precision.fp8 != "none":
        _use_fp8(model, config)
    return model.to(dtype) if dtype == torch.float64 else model


def _use_fp8(model: nn.Module, config: RunConfig) -> None:
    """Multiply 8-bit numbers, emulated, in the linear layers of the blocks but the first and last precision.fp8_exclude_layers.

    With precision.fp8_experts also in their experts.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    excluded, layers = config.precision.fp8_exclude_layers, config.model.layers
    inner = [f"blocks.{index}." for index in range(excluded, layers - excluded)]
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name(config.precision.fp8), emulate=True)
    convert_to_float8_training(
        model, config=recipe, module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and name.startswith(tuple(inner))
    )
    for name, module in model.named_modules():
        if isinstance(module, Experts) and config.precision.fp8_experts and name.startswith(tuple(inner)):
            module.products = FP8_PRODUCTS


@torch.no_grad()
def _same_weights(model: nn.Module, other: nn.Module) -> nn.Module:
    """Return a model with the weights of another one, whose other settings differ."""
    weights = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].detach().clone()
    return model


@torch.no_grad()
def _copy(masters: Mapping[str, Tensor], learned: Mapping[str, nn.Parameter], noise: torch.Generator | None) -> None:
    """Round the master weights to the weights of the model, with noise up to a rounding error wrong."""
    for name, parameter in learned.items():
        master = masters[name]
        if noise is not None:
            master = master * (1 + torch.finfo(parameter.dtype).eps / 2 * (2 * torch.rand(master.shape, generator=noise) - 1))
        parameter.copy_(master)


def _cast(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast parameters in place. Buffers, such as the tables of rotary embeddings, keep their dtype."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def micro_batches_of(config: RunConfig, tokens: Tensor) -> int:
    """Return how many micro-batches a global batch has.

    A micro-batch has the tokens of training.micro_batch_size samples, also when a sequence warm-up splits them.
    """
    return tokens.numel() // config.training.sequence_length // config.training.micro_batch_size


def _accumulate(
    config: RunConfig,
    model: nn.Module,
    learned: dict[str, nn.Parameter],
    masters: dict[str, nn.Parameter],
    parts: list[RandomBatch],
    loss_of: Loss,
) -> float:
    """Add the gradients of all micro-batches of a global batch to those of the masters, and return the mean loss."""
    fp16 = next(iter(learned.values())).dtype == torch.float16
    loss_scale = config.precision.initial_loss_scale if fp16 else 1.0
    for moe in moe_layers(model):
        moe.loss_scale = loss_scale / len(parts)
    total = 0.0
    for inputs, rest in parts:
        loss = loss_of(inputs, rest) / len(parts)
        (loss * loss_scale).backward()
        total += float(loss.detach())
        for name, parameter in learned.items():
            if parameter.grad is not None:
                gradient, before = parameter.grad.to(masters[name].dtype) / loss_scale, masters[name].grad
                masters[name].grad = gradient if before is None else before + gradient
                parameter.grad = None
    return total


@torch.no_grad()
def _update_router_biases(model: nn.Module) -> list[Tensor]:
    """Update the biases of the routers from the expert load of the step, and return the record of every MoE layer."""
    records = []
    for moe in moe_layers(model):
        record, bias = moe.take_record(), moe.router.bias
        records.append(record)
        if bias is not None:
            load = record[: len(bias)]
            bias.add_(moe.router.bias_update_speed * (load.mean() - load).sign())
    return records


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialize every parameter of an unsharded model by the family's recipe; a tied parameter once, under its first name."""
    initial_std = registry.family_of(config).initial_std
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_tensor(name, parameter.shape, initial_std(config, name), seed))
