"""Applies every kind of parallelism to a plain model, in a fixed order, and returns this rank's part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.common.errors import UserError
from pipeline.config import lora
from pipeline.config.layout import Layout, may_compile
from pipeline.config.lora import LoraConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.rules import trained_weights
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig
from pipeline.layers import delta_kernels, gpu
from pipeline.layers.attention import Core, plain, sdpa
from pipeline.layers.attention_kernel import automatic
from pipeline.layers.fake_quantization import fake_quantize_layers
from pipeline.layers.flex import flex
from pipeline.layers.gated_delta_net import DeltaRuleLayer
from pipeline.layers.init import initial_tensor
from pipeline.layers.linear import Linear
from pipeline.layers.lora import LoraSpec, add_adapters
from pipeline.layers.nf4 import NF4Weight
from pipeline.layers.recipes import Constant, Init
from pipeline.layers.shifted_attention import ShiftedSparseAttention
from pipeline.layers.stack import Stack
from pipeline.models import registry
from pipeline.models.vectors import is_matrix
from pipeline.parallel import (
    activation_checkpointing,
    context_parallel,
    expert_parallel,
    float8,
    overlapped_collectives,
    tensor_parallel,
)
from pipeline.parallel.activation_offload import InputOffload
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.partition import extract_stage, partition_weights, replace_weights
from pipeline.parallel.pieces import Piece

log = logging.getLogger("pipeline")

#: training.attention -> attention core
CORES: dict[str, Core] = {"auto": automatic, "sdpa": sdpa, "flex": flex, "plain": plain}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LocalModel(nn.Module):
    """The pipeline stages of one rank. The pipeline schedule calls the stages; the container itself has no forward.

    Attributes:
        stages: stage index (as str) -> its part of the model.
        pieces: parameter -> its piece of the full weight.
        frozen: weights that have no gradient because the configuration says so, until they are initialized.
        fixed: the same for weights without a gradient: the fp32 bias of a router, a plain tensor; and frozen weights, in the dtype of the
            run. DeepSpeed neither casts nor shards them.
        sharded: frozen matrices under ZeRO 3, which training/native_engine.py shards. Like trained ones, they have no storage at first.
        quantized: frozen weights in 4 bits (QLoRA).
    """

    def __init__(self, stages: dict[int, Stack], pieces: dict[nn.Parameter, Piece]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(stage): module for stage, module in stages.items()})
        self.pieces = pieces
        self.fixed: dict[Tensor, Piece] = {}
        self.sharded: dict[nn.Parameter, Piece] = {}
        self.quantized: dict[NF4Weight, Piece] = {}
        self.frozen: set[nn.Parameter] = set()
        self._initial_value: Callable[[Piece], Tensor] | None = None

    def materialize(self, parameter: nn.Parameter) -> None:
        """Allocate and draw a weight that init_weights has left without storage."""
        if parameter.untyped_storage().nbytes() == 0 and self._initial_value is not None:
            parameter.data = self._initial_value((self.sharded if parameter in self.sharded else self.pieces)[parameter])

    def fixed_names(self) -> set[str]:
        """Names of the weights without a gradient, those in 4 bits besides."""
        return {piece.name for piece in (*self.fixed.values(), *self.sharded.values())}

    def stage_modules(self) -> Iterator[Stack]:
        """The stages in order of their index."""
        for module in self.stages.values():
            assert isinstance(module, Stack)
            yield module


def parallelize(config: RunConfig, mesh: Mesh, value: Callable[[Piece, torch.dtype], Tensor] | None = None) -> LocalModel:
    """Build this rank's stages: sharded on the meta device, connected to the process groups, then initialized on the rank's device.

    Args:
        mesh: this rank's process groups. If its device is the meta device (the dry run), the weights are not initialized.
        value: returns a piece of a weight on the rank's device; by the recipe of the family when None.
    """
    model = partition_model(config, mesh.layout, mesh.rank)
    connect(config, mesh, model)
    if mesh.device.type != "meta":
        init_weights(model, config, mesh.device, value)
    return model


def connect(config: RunConfig, mesh: Mesh, model: LocalModel, core: Core | None = None) -> None:
    """Insert collectives, attention cores, recomputation and compilation into stages with sharded weights.

    Args:
        model: this rank's stages.
        core: the attention core on local heads; that of training.attention when None.
    """
    table = registry.family_of(config.model).tensor_parallel
    for stage in model.stage_modules():
        if mesh.layout.tensor > 1:
            again, recomputed = gather_again(config.training, config.parallel), config.training.activation_checkpointing != "none"
            sequence = config.parallel.sequence_parallel
            dispatched, folded = mesh.layout.expert > 1, mesh.layout.folded
            tensor_parallel.apply(
                *(stage, model.pieces, table, mesh.tensor),
                sequence=sequence,
                gather_again=again,
                recomputed=recomputed,
                dispatched=dispatched,
                folded=folded,
            )
        if config.precision.fp8 != "none":
            float8.apply(stage, config.precision, config.model.layers, mesh.device)
        expert_parallel.apply(stage, mesh, config.parallel)
        budget, dtype = config.training.activation_budget, DTYPES[config.precision.dtype]
        kept = {} if budget is None else activation_checkpointing.choose(stage, config, mesh, dtype)
        for layer in attention_layers(stage):
            layer.core = core or attention_core(config.training, config.model.heads, mesh)
        choose_delta_rule(stage, config, mesh.device)
        if mesh.layout.context > 1:
            context_parallel.apply(stage, mesh.context, config.parallel.context_kind)
        compiled = compile_enabled(config.training, config.parallel, mesh.device)
        if compiled and mesh.layout.tensor > 1 and config.parallel.sequence_parallel:
            tensor_parallel.start_gathers_early()
        if async_tensor_enabled(config.training, config.parallel, mesh):
            tensor_parallel.fuse_collectives(mesh.tensor)
        if compiled and config.parallel.expert_padding and mesh.layout.expert_ranks > 1:
            overlapped_collectives.keep_order()
        mode = config.training.activation_checkpointing
        moves = mode == "offload" and mesh.device.type != "meta"  # plans count the inputs by their size
        offload = InputOffload(mesh.device) if moves else None
        received = 0 if stage.embed is not None else 1  # the input of a later stage is a buffer that the pipeline keeps
        for index, (name, block) in enumerate(stage.blocks.items()):
            activation_checkpointing.checkpoint_and_compile(block, mode, compiled=compiled, kept=kept.get(name))
            if offload is not None and index >= received:
                offload.apply(block, first=index == received)


def attention_core(training: TrainingConfig, heads: int, mesh: Mesh) -> Core:
    """Return the attention core on the rank's heads, which are those after the heads of the tensor ranks before it."""
    core = CORES[training.attention]
    if not training.attention_group:
        return core
    local = heads // mesh.layout.tensor
    plain_heads = min(max(heads // 2 - mesh.coordinates.tensor * local, 0), local)
    return ShiftedSparseAttention(core, training.attention_group, plain_heads)


def fuses_delta_rule(config: RunConfig, device: torch.device) -> bool:
    """Whether the model has linear attention, by the kernels of flash-linear-attention. Plans, made where no GPU is, count on them.

    Raises:
        UserError: training.delta_rule=fla on a CPU, or without the package.
    """
    chosen, there = config.training.delta_rule, device.type == "meta" or (device.type == "cuda" and delta_kernels.installed())
    if chosen == "fla" and not there:
        rule = f"requires a GPU and the package {delta_kernels.PACKAGE}; this rank lacks one of them"
        raise UserError.of("training.delta_rule", "fla", rule, f"pip install {delta_kernels.PACKAGE}, or set training.delta_rule=auto")
    supported = config.precision.dtype != "fp32" and config.parallel.context == 1
    return hasattr(config.model, "linear_key_heads") and supported and there and chosen != "plain"


def choose_delta_rule(stage: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Give linear attention its kernels, and log the choice."""
    layers, fuses = [module for module in stage.modules() if isinstance(module, DeltaRuleLayer)], fuses_delta_rule(config, device)
    kernels = delta_kernels.planned_delta_rule if device.type == "meta" else delta_kernels.fused_delta_rule
    for layer in layers if fuses else ():
        layer.rule = partial(kernels, dtype=DTYPES[config.precision.dtype])
    if layers and device.type == "cuda":
        by = f"the kernels of {delta_kernels.PACKAGE}" if fuses else f"PyTorch's operators; {delta_kernels.PACKAGE} has faster kernels"
        log.info("linear attention (training.delta_rule=%s): %s", config.training.delta_rule, by)


def attention_layers(model: nn.Module) -> list[Any]:
    """Return all modules with an attention `core`."""
    return [module for module in model.modules() if hasattr(module, "core")]


def partition_model(config: RunConfig, layout: Layout, rank: int) -> LocalModel:
    """Return the rank's stages with its piece of every weight, on the meta device. Needs no process group."""
    coordinates = layout.coordinates(rank)
    with torch.device("meta"):
        stages = {index: extract_stage(build_model(config), layout, index) for index in layout.stages(coordinates.pipeline)}
        model = LocalModel(stages, partition_weights(stages, config.model, layout, coordinates))
    for parameter, piece in model.pieces.items():
        if parameter.requires_grad and config.is_frozen(piece.name):
            parameter.requires_grad_(False)
            model.frozen.add(parameter)
    return model


def build_model(config: RunConfig) -> Stack:
    """Build the full model, with adapters (LoRA) or rounded weights (fake quantization); uninitialized, on torch's default device."""
    model = registry.build(config.model)

    def spec(layer: str) -> LoraSpec | None:
        rank = config.lora.rank_of(layer)
        return LoraSpec(rank, config.lora.alpha_of(layer), config.lora.dropout) if rank else None

    add_adapters(model, spec)
    if config.training.fake_quantize != "none":
        fake_quantize_layers(model)
    return model


def check_trained(config: RunConfig, layout: Layout) -> None:
    """Refuse settings that freeze nothing, or everything in a pipeline stage.

    Raises:
        UserError: with one violation for each pattern.
    """
    if not (config.training.frozen or config.lora.rank):
        return
    with torch.device("meta"):
        names = {name: parameter.requires_grad for name, parameter in build_model(config).named_parameters()}
    UserError.raise_for(trained_weights.violations(config, layout, names))


def init_weights(
    model: LocalModel, config: RunConfig, device: torch.device, value: Callable[[Piece, torch.dtype], Tensor] | None = None
) -> None:
    """Materialize every weight on the device with its initial values: `value`, or what depends only on the seed, the name and the element.

    Under ZeRO 3 a rank could not hold all its weights: they get no storage until LocalModel.materialize.
    """
    dtype = DTYPES[config.precision.dtype]
    pieces: dict[nn.Parameter, Piece] = {}
    in_4_bits = {layer.weight for layer in layers_in_4_bits(config.lora, model)}

    def initial_value(piece: Piece, dtype: torch.dtype = dtype) -> Tensor:
        if value is not None:
            return value(piece, dtype)
        std = adapter_std(piece) if lora.is_adapter(piece.name) else registry.family_of(config.model).initial_std(config.model, piece.name)
        return init_piece(piece, std, config.training.seed, dtype=dtype, device=device)

    def materialized(_: str, parameter: nn.Parameter) -> Tensor | NF4Weight:
        piece = model.pieces[parameter]
        if parameter in in_4_bits:
            quantized = NF4Weight(initial_value(piece))
            model.quantized[quantized] = piece
            return quantized
        if config.parallel.zero_stage == 3 and (parameter.requires_grad or is_sharded_frozen(parameter, piece, model)):
            empty = nn.Parameter(torch.empty(piece.shape, dtype=dtype, device=device), requires_grad=parameter.requires_grad)
            empty.untyped_storage().resize_(0)
            (pieces if parameter.requires_grad else model.sharded)[empty] = piece
            return empty
        if not parameter.requires_grad:
            frozen = parameter in model.frozen
            fixed = nn.Parameter(initial_value(piece), requires_grad=False) if frozen else initial_value(piece, torch.float32)
            model.fixed[fixed] = piece
            return fixed
        trainable = nn.Parameter(initial_value(piece))
        pieces[trainable] = piece
        return trainable

    replace_weights(model.stage_modules(), materialized)
    model.pieces, model._initial_value = pieces, initial_value
    for stage in model.stage_modules():
        stage.reset_buffers()
    if model.quantized:
        stored, before = sum(w.nbytes for w in model.quantized), sum(w.numel() for w in model.quantized) * dtype.itemsize
        where = " (each data rank has all of them)" if config.parallel.zero_stage == 3 else ""
        log.info("nf4: %d weights of this rank in %.1f MB instead of %.1f MB%s", len(model.quantized), stored / 1e6, before / 1e6, where)


def is_sharded_frozen(parameter: nn.Parameter, piece: Piece, model: LocalModel) -> bool:
    """Whether ZeRO 3 shards a weight that has no gradient, if it is not in 4 bits: it is a frozen matrix."""
    return parameter in model.frozen and is_matrix(piece.name, piece.full_shape)


def layers_in_4_bits(lora: LoraConfig, model: LocalModel) -> list[Linear]:
    """Return the layers whose weights QLoRA quantizes: the linear layers of the blocks, without those that are trained."""
    if lora.quantize == "none":
        return []
    layers = [layer for stage in model.stage_modules() for layer in stage.blocks.modules() if isinstance(layer, Linear)]
    return [layer for layer in layers if layer.weight in model.frozen]


def adapter_std(piece: Piece) -> Init:
    """Return the initial values of an adapter's weight: `b` is zero, `a` has PEFT's standard deviation (Kaiming uniform with a=5**0.5)."""
    return Constant(0.0) if piece.name.endswith(".b") else (3 * piece.full_shape[-1]) ** -0.5


def init_piece(piece: Piece, std: Init, seed: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Return the initial value of a piece. Only its own elements are drawn, on the device."""
    part = [(piece.start(dim), size) for dim, size in enumerate(piece.shape)]
    return initial_tensor(piece.name, piece.full_shape, std, seed, part=part, dtype=dtype, device=device)


def gather_again(training: TrainingConfig, parallel: ParallelConfig) -> bool:
    """Whether inputs of tensor-parallel regions are gathered again in the backward pass instead of being saved.

    With activation checkpointing, the blocks recompute them anyway, and zbv's split backward pass would gather twice.
    """
    zbv = parallel.schedule == "zbv" and parallel.pipeline > 1
    return training.activation_checkpointing == "none" and not zbv


def compile_enabled(training: TrainingConfig, parallel: ParallelConfig, device: torch.device) -> bool:
    """Whether the blocks are compiled."""
    return may_compile(training, parallel) and (training.compile == "on" or device.type == "cuda")


def async_tensor_enabled(training: TrainingConfig, parallel: ParallelConfig, mesh: Mesh) -> bool:
    """Whether inductor fuses the collectives of sequence parallelism with matrix products, through memory that GPUs of a node share.

    By default on NVIDIA GPUs of one node, of which each rank sees those of all tensor ranks: with one visible GPU a rank
    (srun --gpus-per-task=1), all have number 0, which symmetric memory takes for one device. `parallel.async_tensor=on` serves nodes that
    share memory (NVL72).

    Raises:
        UserError: the GPU has no such memory.
    """
    compiled = compile_enabled(training, parallel, mesh.device) and mesh.device.type == "cuda"
    if parallel.async_tensor == "off" or not (parallel.tensor > 1 and parallel.sequence_parallel and compiled):
        return False
    properties = gpu.of(mesh.device)
    if parallel.async_tensor == "on":
        if not properties.symmetric_memory:
            rule = f"requires memory that GPUs of a node share (Hopper, MI300X, and later ones), this is {properties.name}"
            raise UserError.of("parallel.async_tensor", "on", rule, "set parallel.async_tensor=auto")
        return True
    return mesh.tensor_in_node and properties.capability >= (9, 0) and torch.cuda.device_count() >= parallel.tensor
