"""fp8 training: the linear layers of the blocks multiply 8-bit numbers, by torchao's float8 training; on request routed experts, too.

Inputs, weights and gradients of the outputs are scaled and rounded to 8 bits for each matrix product (Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433), whose result is bf16. Everything else is as in bf16: weights, gradients, collectives, checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from pipeline.common.errors import UserError, Violation
from pipeline.config.schema import PrecisionConfig
from pipeline.layers import gpu
from pipeline.layers.experts import Experts
from pipeline.layers.fp8_products import FP8_PRODUCTS
from pipeline.layers.stack import Stack
from pipeline.models.vectors import is_matrix

log = logging.getLogger("pipeline")

#: The kernels of fp8 products require sizes that are multiples of this.
ALIGNMENT = 16


def apply(stage: Stack, precision: PrecisionConfig, layers: int, device: torch.device) -> None:
    """Replace the linear layers of the stage's blocks, except the first and last blocks of the model. On a CPU, fp8 is emulated.

    With precision.fp8_experts, replace also the products of their routed experts.

    Args:
        stage: a pipeline stage with sharded weights, after tensor.apply.
        precision: the kind of scales, and the blocks to exclude.
        layers: number of blocks of the model.
        device: of the rank; on the meta device, linear layers are only checked.

    Raises:
        UserError: the GPU has no fp8 products, or a layer has a size that they do not support.
    """
    modules = {
        f"blocks.{name}.{path}": module
        for name, block in stage.blocks.items()
        if multiplies_8_bits(int(name), precision, layers)
        for path, module in block.named_modules()
    }
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    experts = {name: module for name, module in modules.items() if isinstance(module, Experts) and precision.fp8_experts}
    UserError.raise_for([*_violations(linears, precision.fp8, device), *_expert_violations(experts, device)])
    for module in experts.values():
        module.products = FP8_PRODUCTS
    if device.type == "meta":
        return
    emulated = ", emulated" if device.type == "cpu" else ""
    weights = {f"{name}.weight" for name in linears}
    weights |= {f"{name}.{weight}" for name, module in experts.items() for weight, _ in module.named_parameters()}
    in_bf16 = _products_in_bf16(stage, weights)
    of_experts = f" and the experts of {len(experts)} blocks" if experts else ""
    log.info("fp8 (%s) in %d linear layers%s of this stage%s; in bf16: %s", precision.fp8, len(linears), of_experts, emulated, in_bf16)
    if not linears:
        return
    try:
        logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of kernels for other GPUs
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError:
        raise UserError.of("precision.fp8", precision.fp8, "requires the package torchao", "pip install '.[fp8]'") from None
    recipe = Float8LinearConfig.from_recipe_name(precision.fp8)
    chosen = set(linears.values())
    convert_to_float8_training(
        stage, config=replace(recipe, emulate=device.type == "cpu"), module_filter_fn=lambda module, _: module in chosen
    )


def multiplies_8_bits(block: int, precision: PrecisionConfig, layers: int) -> bool:
    """Whether a block of the model has fp8 products."""
    return precision.fp8 != "none" and precision.fp8_exclude_layers <= block < layers - precision.fp8_exclude_layers


def _products_in_bf16(stage: Stack, in_8_bits: Collection[str]) -> str:
    """Name the weights of a stage whose products stay bf16, with their share: whole blocks by number, others by name."""
    sizes = {
        name: weight.numel() for name, weight in stage.named_parameters() if is_matrix(name, weight.shape) and not name.startswith("embed.")
    }
    left = [name for name in sizes if name not in in_8_bits]
    if not left:
        return "none"
    mixed = {name.split(".")[1] for name in in_8_bits}
    kinds = dict.fromkeys(_kind(name.split("."), mixed) for name in left)
    return f"{', '.join(kinds)} ({sum(sizes[name] for name in left) / sum(sizes.values()):.0%} of the weights of matrix products)"


def _kind(name: list[str], mixed: set[str]) -> str:
    """The name of a weight, for all blocks of `mixed` at once; of a weight in another block, the block; of any other one, its module."""
    if name[0] != "blocks":
        return name[0]
    return ".".join(["blocks", "*", *name[2:]]) if name[1] in mixed else f"blocks.{name[1]}"


def _violations(linears: Mapping[str, nn.Linear], value: str, device: torch.device) -> list[Violation]:
    key = "precision.fp8"
    if device.type == "cuda" and not (properties := gpu.of(device)).fp8:
        rule = f"requires an NVIDIA GPU with fp8 products (from Ada and Hopper on), this is {properties.name}"
        return [Violation(key, value, rule, "set precision=bf16")]
    for name, linear in linears.items():
        if any(size % ALIGNMENT for size in linear.weight.shape):
            shape = " x ".join(map(str, linear.weight.shape))
            rule = f"requires matrices whose sizes are multiples of {ALIGNMENT}; a rank's piece of {name} is {shape}"
            return [Violation(key, value, rule, "set precision=bf16, or reduce parallel.tensor")]
    return []


def _expert_violations(experts: Mapping[str, Experts], device: torch.device) -> Iterator[Violation]:
    key = "precision.fp8_experts"
    if experts and device.type == "cuda" and not (properties := gpu.of(device)).fp8_experts:
        yield Violation(key, True, f"requires a Hopper GPU, this is {properties.name}", "set it to false")
    for name, module in experts.items():
        _, ffn_hidden, hidden = module.up.shape
        if hidden % ALIGNMENT or ffn_hidden % ALIGNMENT:
            piece = f"a rank's piece of an expert of {name} is {ffn_hidden} x {hidden}"
            yield Violation(
                key,
                True,
                f"requires matrices whose sizes are multiples of {ALIGNMENT}; {piece}",
                "set it to false, or reduce parallel.tensor",
            )
            return
