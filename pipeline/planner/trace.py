"""The operations of each part of a model on one rank, from the model's own code on the meta device with its parallel plan.

One block of each kind is traced, in a fake process group of the size of the tensor, context and expert axes; pipeline and data parallelism
do not change what a block executes for a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.layout import Coordinates, Layout, may_compile
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.lora import without_adapters
from pipeline.layers.mask import Mask
from pipeline.layers.meta_attention import meta_core
from pipeline.layers.moe import filled_rows
from pipeline.layers.nf4 import NF4Weight, stored_bytes
from pipeline.layers.stack import Stack
from pipeline.layers.uncompiled import noted
from pipeline.models import registry
from pipeline.models.vectors import is_matrix
from pipeline.parallel import mesh as meshes
from pipeline.parallel.activation_checkpointing import stays_eager
from pipeline.parallel.float8 import multiplies_8_bits
from pipeline.parallel.parallelize import DTYPES, LocalModel, attention_layers, build_model, connect, is_sharded_frozen, layers_in_4_bits
from pipeline.parallel.partition import partition_weights, replace_weights
from pipeline.parallel.tensor_parallel import VocabParallelEmbedding, sums_over_tensor
from pipeline.planner import ring_formula
from pipeline.planner.kernel_fusion import fuse
from pipeline.planner.norm_kernel import norm_kernels
from pipeline.planner.operations import TracedPart, TracedWeights
from pipeline.planner.operator_kinds import visible_share
from pipeline.planner.recorder import Recorder, Recording
from pipeline.training import qk_clip
from pipeline.training.matrix_layout import planned_matrices
from pipeline.training.matrix_rule import MatrixRule

_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@dataclass(frozen=True)
class Trace:
    """The parts of a model on one rank, for one micro-batch.

    Attributes:
        parts: embed, one block of each kind by the index of its first block, and head.
        kinds: the kind (a key of parts) of every block of the model.
        compiled: whether the blocks are compiled: the gradients of all weights of a block are computed before the first one is reduced.
    """

    parts: dict[str, TracedPart]
    kinds: tuple[str, ...]
    compiled: bool = False

    @property
    def has_reference(self) -> bool:
        """Whether a reference model processes every micro-batch, too (DPO)."""
        return any(part.reference for part in self.parts.values())

    def block(self, index: int) -> TracedPart:
        """The operations of a block of the model."""
        return self.parts[self.kinds[index]]

    def stage_parts(self, layout: Layout, stage: int) -> list[TracedPart]:
        """The parts of a pipeline stage, in order."""
        parts = [self.block(index) for index in layout.layers(stage, len(self.kinds))]
        first, last = stage == 0, stage == layout.stage_count - 1
        return [*([self.parts["embed"]] if first else []), *parts, *([self.parts["head"]] if last else [])]


def trace(
    config: RunConfig,
    *,
    fused: bool | None = None,
    fused_saves: bool | None = None,
    copies: bool = True,
    norm_kernel: bool = True,
    breaks: bool = True,
    every_block: bool = False,
) -> Trace:
    """Trace one micro-batch of the model in the tensor, context and expert sizes of a configuration.

    Args:
        config: a valid configuration; it selects model, micro-batch, sequence length, number format, recomputation and parallel sizes.
        fused: as in `fuse`; whether the job compiles its blocks when None.
        fused_saves: whether only what fused kernels save is saved; as `fused` when None.
        copies: as in `fuse`.
        norm_kernel: RMSNorm is one kernel, as PyTorch's on GPUs; else composed of others.
        breaks: what this project does not compile (the dispatch of experts) is not fused; frameworks have kernels of their own for it.
        every_block: trace all blocks, not one of each kind (to test that both are equal).
    """
    parallel = config.parallel
    fused = may_compile(config.training, config.parallel) if fused is None else fused
    layout = Layout(1, 1, parallel.tensor, parallel.expert, parallel.context, micro_batches=1, folded=parallel.folded)
    stage, kinds = one_of_each_kind(config, every_block=every_block)
    excepthook = sys.excepthook  # every process group wraps it once more
    device = meshes.init_fake(0, layout.world_size)
    try:
        mesh = meshes.build_mesh(layout, device)
        model = LocalModel({0: stage}, partition_weights({0: stage}, config.model, layout, Coordinates(0, 0, 0, 0, 0)))
        for parameter, piece in model.pieces.items():
            parameter.data = parameter.data.to(DTYPES[config.precision.dtype])
            if parameter.requires_grad and config.is_frozen(piece.name):
                parameter.requires_grad_(False)
                model.frozen.add(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        connect(replace(config, training=replace(config.training, compile="off")), mesh, model, _recorded_attention)
        if config.optimizer.qk_clip is not None:
            for layer in attention_layers(stage):
                qk_clip.measured(layer, device)
        axes = {"expert": mesh.dispatch, "context": mesh.context, "tensor": mesh.tensor}  # the last name of a group counts
        groups: dict[str, str] = {group.group_name: axis for axis, group in axes.items() if group.size() > 1}
        held = list(_weights(stage, model, config))
        quantized = _quantize(stage, model, config)
        constants = dict.fromkeys(_constants(stage), "") | {parameter: piece.name for parameter, piece in model.pieces.items()}
        constants |= {weight.codes: name for weight, name in quantized.items()}
        mode = config.training.activation_checkpointing
        eager = [name for name, block in stage.blocks.items() if stays_eager(block, mode)] if breaks else None
        recorder = Recorder(constants, groups, layout.__dict__, eager, filled_rows(stage))
        tokens, batch = empty_inputs(config)
        with norm_kernels() if norm_kernel else nullcontext():
            _run(stage, recorder, tokens, batch)
            reference = _reference(stage, config, Recorder(constants, groups, layout.__dict__, eager), tokens, batch)
    finally:
        meshes.destroy_process_group()
        sys.excepthook = excepthook
    ring_formula.add_memory(recorder.recording)
    operations = fuse(recorder.recording, fused=fused, copies=copies)
    memory = operations if fused_saves in (None, fused) else fuse(recorder.recording, fused=not fused)
    parts = {
        name: TracedPart(
            name, operations.operations.get(name, []), producers=memory.saved.get(name, {}), peaks=memory.peak.get(name, (0, 0))
        )
        for name in ("embed", *stage.blocks, "head")
    }
    for block in stage.blocks if mode == "offload" else ():
        parts[block].offload(int(hidden_bytes(config)))
    for name, weights in held:
        parts[name].weights.append(weights)
    if reference is not None:
        for name, executed in fuse(reference, fused=fused, copies=copies).operations.items():
            parts[name].reference.extend(executed)
    return Trace(parts, kinds, fused)


def _quantize(stage: Stack, model: LocalModel, config: RunConfig) -> dict[NF4Weight, str]:
    """Replace the weights that QLoRA keeps in 4 bits, and return them with their names."""
    in_4_bits = {layer.weight for layer in layers_in_4_bits(config.lora, model)}
    quantized: dict[NF4Weight, str] = {}

    def replaced(_: str, parameter: nn.Parameter) -> nn.Parameter | NF4Weight:
        if parameter not in in_4_bits:
            return parameter
        quantized[weight := NF4Weight(parameter.detach())] = model.pieces[parameter].name
        return weight

    if in_4_bits:
        replace_weights([stage], replaced)
    return quantized


def _constants(stage: Stack) -> Iterator[Tensor]:
    """Tables that the model keeps, such as those of rotary position embeddings: no activations."""
    yield from stage.buffers()
    for module in stage.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _drop_gradient(parameter: Tensor) -> None:
    """Free a gradient as soon as it is complete, as the engine does."""
    parameter.grad = None


#: model, adapters and trained weights (as text) -> the stack with one block of each kind on the meta device, and the kind of every block
_STACKS: dict[str, tuple[Stack, tuple[str, ...]]] = {}


def one_of_each_kind(config: RunConfig, *, every_block: bool = False) -> tuple[Stack, tuple[str, ...]]:
    """Return a new model on the meta device with one block of each kind (or every block), and the kind of every block."""
    key = f"{every_block} {config.model} {config.lora} {config.training.frozen} {config.precision}"
    if key not in _STACKS:
        with torch.device("meta"):
            stack = build_model(config)
        kinds = tuple(stack.blocks) if every_block else kinds_of(stack, config)
        for index in [index for index in stack.blocks if index not in kinds]:
            del stack.blocks[index]
        _STACKS[key] = stack, kinds
    stack, kinds = _STACKS[key]
    return deepcopy(stack), kinds


def kinds_of(model: Stack, config: RunConfig) -> tuple[str, ...]:
    """Return the kind of every block, named by the first block that has the same modules, sizes, settings, trained weights and products.

    Blocks whose input has no gradient, because nothing before them is trained, are kinds of their own.
    """
    first: dict[Hashable, str] = {}
    boundary = model.encoder_blocks if isinstance(model, EncoderDecoder) else 0
    kinds, trains = [], any(not config.is_frozen(name) for name, _ in model.embed.named_parameters("embed"))  # type: ignore[union-attr]
    for index, block in model.blocks.items():
        names = [name for name, _ in block.named_parameters()]
        learned = tuple(name for name in names if not config.is_frozen(f"blocks.{index}.{name}"))
        in_8_bits = config.precision.fp8_experts and multiplies_8_bits(int(index), config.precision, config.model.layers)
        kinds.append(first.setdefault((int(index) < boundary, trains, learned, in_8_bits, _signature(block)), index))
        trains = trains or bool(learned)
    return tuple(kinds)


def _signature(block: nn.Module) -> Hashable:
    """What distinguishes blocks: the types of their modules, shapes of weights, and plain settings (windows, rotary tables)."""
    signature: list[Hashable] = []
    for name, module in block.named_modules():
        settings = {k: v for k, v in vars(module).items() if not k.startswith("_") and isinstance(v, int | float | str | bool | None)}
        shapes = tuple((k, tuple(p.shape)) for k, p in module.named_parameters(recurse=False))
        signature.append((name, type(module).__name__, tuple(sorted(settings.items(), key=str)), shapes))
    return tuple(signature)


def _recorded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention core of the trace: the flash kernel of PyTorch, which on the meta device has no restrictions."""
    recorder = _RECORDER.get()
    assert recorder is not None
    recorder.pairs = visible_share(q.shape[2], k.shape[2], causal=mask.causal, window=window)
    return meta_core(q, k, v, mask, window=window, scale=scale, sinks=sinks)


def hidden_bytes(config: RunConfig) -> float:
    """Return the bytes of the activations between two pipeline stages on a rank, for a micro-batch."""
    parallel, training = config.parallel, config.training
    shards = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)
    tokens = training.micro_batch_size * training.sequence_length / shards
    return tokens * config.model.hidden * DTYPES[config.precision.dtype].itemsize


def empty_inputs(config: RunConfig, device: torch.device | str = "meta") -> tuple[Tensor, Batch]:
    """Return a micro-batch of tokens without values, as the stages receive it."""
    rows, length = config.training.micro_batch_size, config.training.sequence_length // config.parallel.context
    tokens = torch.empty(rows, length, dtype=torch.int64, device=device)
    batch: Batch = {"targets": tokens.clone()}
    if config.parallel.context > 1:
        batch["positions"] = tokens.clone()
        if config.training.document_mask:
            batch["documents"] = torch.empty(rows, length, dtype=torch.int32, device=device)
        batch["loss_scale"] = torch.empty(rows, device=device)
    if config.model.objective == "encoder_decoder" or hasattr(config.model, "encoder_blocks"):
        batch["decoder_tokens"] = tokens.clone()
    if getattr(config.model, "next_sentence", False):
        batch["next_sentence"] = torch.empty(rows, dtype=torch.int64, device=device)
    if config.objective == "dpo":
        batch["choices"], batch["reference"] = tokens.clone(), torch.empty(rows, 2, device=device)
    return tokens, batch


def _reference(stage: Stack, config: RunConfig, recorder: Recorder, tokens: Tensor, batch: Batch) -> Recording | None:
    """The forward pass of the reference model of DPO, which is the model without adapters; None if no step has one."""
    if not config.has_reference or config.stores_reference:
        return None
    given = batch.copy()
    given.pop("reference")
    with _marked(stage, recorder), torch.no_grad(), without_adapters(stage), _recording(recorder):
        stage(tokens, **given)
    return recorder.recording


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    """Record, and tell the attention core where."""
    token = _RECORDER.set(recorder)
    try:
        with recorder, noted(recorder.calls):
            yield
    finally:
        _RECORDER.reset(token)


def _run(stage: Stack, recorder: Recorder, tokens: Tensor, batch: Batch) -> None:
    """Forward and backward pass of a micro-batch under the recorder."""
    with _marked(stage, recorder), _recording(recorder):
        loss = stage(tokens, **batch)
        recorder.in_backward = True
        recorder.part = "head"
        loss.backward()


@contextmanager
def _marked(stage: Stack, recorder: Recorder) -> Iterator[None]:
    """Set the recorder's part at the boundaries of the blocks, in the forward and in the backward pass."""
    handles = []

    def before(name: str, inputs: tuple[Any, ...]) -> None:
        if recorder.in_backward:
            return
        recorder.part = name
        previous = list(stage.blocks).index(name) - 1
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(_setter(recorder, "embed" if previous < 0 else list(stage.blocks)[previous]))
                break

    def after(name: str, output: Any) -> None:
        if recorder.in_backward:
            return
        if name == list(stage.blocks)[-1]:
            recorder.part = "head"
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(_setter(recorder, name))

    for name, block in stage.blocks.items():
        handles.append(block.register_forward_pre_hook(lambda _, inputs, name=name: before(name, inputs)))
        handles.append(block.register_forward_hook(lambda _, inputs, output, name=name: after(name, output)))  # noqa: ARG005 - hook's signature
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _setter(recorder: Recorder, name: str) -> Any:
    """A hook of a tensor that marks the part whose backward pass begins."""

    def mark(_: Tensor) -> None:
        recorder.part = name

    return mark


def _weights(stage: Stack, model: LocalModel, config: RunConfig) -> Iterator[tuple[str, TracedWeights]]:
    """Yield the weights with the part that holds them."""
    family = registry.family_of(config.model)
    in_4_bits = {layer.weight for layer in layers_in_4_bits(config.lora, model)}
    itemsize = DTYPES[config.precision.dtype].itemsize
    rule = MatrixRule.of(config.optimizer, config.model)
    tied, everywhere = set(family.tied_weights(config.model).values()), family.on_every_stage
    for parameter, names in _names(stage).items():
        piece = model.pieces[parameter]
        shared = "tied_embedding" if piece.name in tied else "pipeline" if any(fnmatchcase(piece.name, p) for p in everywhere) else ""
        words = names[0].split(".")
        stored = stored_bytes(*parameter.shape) if parameter in in_4_bits else parameter.numel() * itemsize
        weights = TracedWeights(
            piece.name,
            parameter.numel(),
            axis="data" if piece.is_sliced_along("expert") else "dense",
            matrix=is_matrix(piece.name, piece.full_shape),
            summed=config.parallel.tensor > 1 and sums_over_tensor(piece, sequence=config.parallel.sequence_parallel),
            shared=shared,
            fixed=not parameter.requires_grad,
            stored=stored if parameter in model.frozen else 0,
            sharded=parameter not in in_4_bits and is_sharded_frozen(parameter, piece, model),
            unit="" if words[0] == "blocks" else words[0],
            gathers=sum(_gathers(stage, name) for name in names),
            matrices=planned_matrices(piece, rule),
            rate=rule.rate_of(piece),
        )
        embeds = words[0] == "embed" or shared == "pipeline"
        yield words[1] if words[0] == "blocks" else "embed" if embeds else "head", weights
        if shared == "tied_embedding":
            yield "head", replace(weights, copy=True)


def _gathers(stage: Stack, name: str) -> int:
    """How often ZeRO 3 gathers a weight for its use under a name: the head and tables of embeddings once, others for each pass."""
    table = isinstance(stage.get_submodule(name.rpartition(".")[0]), nn.Embedding | VocabParallelEmbedding)
    return 1 if table or name.startswith("head.") else 2


def _names(stage: Stack) -> dict[nn.Parameter, list[str]]:
    """All names of every parameter: a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names
