"""Activation checkpointing: what a block keeps for its backward pass, and what it computes again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.layers.gated_delta_net import DeltaRuleLayer
from pipeline.layers.lora import dropout_of
from pipeline.layers.meta_attention import meta_core
from pipeline.layers.moe import MoE, moe_layers
from pipeline.layers.row_counts import ReadCounts
from pipeline.layers.stack import Stack
from pipeline.parallel import ring_attention, tensor_parallel  # noqa: F401 - ring_attention registers its operator
from pipeline.parallel.mesh import Mesh

Kind = Literal["reduction", "attention", "product"]

#: The operations whose results selective activation checkpointing saves, besides matrix products: the most FLOPs or communication per
#: byte. The sums of row-parallel products are saved, sharded along the sequence with sequence parallelism, instead of the products.
_SAVED_OPS: dict[Any, Kind] = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: "attention",
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: "attention",
    torch.ops.aten._scaled_dot_product_efficient_attention.default: "attention",
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: "attention",
    torch.ops.pipeline.ring_attention.default: "attention",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduction",
    torch.ops._c10d_functional.all_reduce.default: "reduction",
}


@dataclass(frozen=True)
class Result:
    """A result that a block can keep for its backward pass.

    Attributes:
        kind: of the operation.
        index: number of results of this kind in the block before it.
        bytes: of the result.
        flops: to compute it again.
    """

    kind: Kind
    index: int
    bytes: int
    flops: float

    @property
    def flops_per_byte(self) -> float:
        """What keeping it saves; sums over ranks before anything else, since they are communicated."""
        return math.inf if self.kind == "reduction" else self.flops / self.bytes


def kind_of(operation: Any) -> Kind | None:
    """The kind of an operation whose result may be kept, None for others."""
    if isinstance(operation, HigherOrderOperator):  # by name: the import of flex attention loads the compiler
        return "attention" if operation.name() == "flex_attention" else None
    return "product" if tensor_parallel.is_saved_product(operation) else _SAVED_OPS.get(operation)


def _breaks(block: nn.Module) -> bool:
    """Return whether a block has a graph break: linear attention, or MoE layers whose experts have as many rows as the router gives."""
    return any(not moe.parts for moe in moe_layers(block)) or any(isinstance(module, DeltaRuleLayer) for module in block.modules())


def stays_eager(block: nn.Module, mode: str) -> bool:
    """Return whether a block is not compiled, see `checkpoint_and_compile`: with a graph break, and recomputed in parts."""
    return mode == "selective" and _breaks(block)


def checkpoint_and_compile(block: nn.Module, mode: str, *, compiled: bool, kept: Collection[Result] | None = None) -> None:
    """Recompute a block in the backward pass (`full`, `offload`), or all its operations but matrix products and attention (`selective`).

    A block is compiled as one graph, with what is recomputed. Dispatch of MoE layers without padding and the chunks of linear attention
    (layers/delta_rule.py) break the graph, and torch.compile compiles nothing inside a checkpoint with a break: there, `full` and `offload`
    recompute compiled pieces, and `selective` stays uncompiled.

    Args:
        block: the block.
        mode: training.activation_checkpointing.
        compiled: whether to compile.
        kept: for selective, the results to keep; all when None.
    """
    breaks = mode != "none" and _breaks(block)
    if compiled and breaks and mode != "selective":
        block.forward = torch.compile(block.forward)
    if mode != "none":
        options: dict[str, Any] = {"preserve_rng_state": dropout_of(block) > 0}
        if mode == "selective":
            options["context_fn"] = _contexts(None if kept is None else {(result.kind, result.index) for result in kept})
        if breaks:
            options["context_fn"] = _with_counts(options.get("context_fn"))
        block.forward = _checkpointed(block.forward, options)
    if compiled and not breaks:
        block.compile()
        buffered = [moe for moe in moe_layers(block) if moe.row_buffers is not None]
        if buffered and mode != "none":
            block._compiled_call_impl = partial(_compiled_with_buffers, block, buffered[0], block._compiled_call_impl)


def _compiled_with_buffers(block: nn.Module, moe: MoE, compiled: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call a block that is recomputed, not compiled where its MoE layer waits for numbers of rows.

    torch.compile would not guard by what that depends on, since the checkpoint has a break, and never use the compiled block again.
    """
    output: Tensor = (block._call_impl if moe.exact else compiled)(*args, **kwargs)
    return output


def _checkpointed(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    """Return `forward` under `checkpoint`. A function, not a partial: torch.compile does not compile a forward that is torch's own code."""

    def forward_and_recompute(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
        return output

    return forward_and_recompute


def _contexts(kept: set[tuple[Kind, int]] | None) -> Callable[[], Any]:
    """A context_fn of `checkpoint` that keeps these results, or those of all operations with a kind."""

    def contexts() -> Any:
        counts: dict[bool, Counter[Kind]] = {False: Counter(), True: Counter()}

        def policy(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:  # noqa: ARG001 - torch's signature
            kind = kind_of(operation)
            if kind is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            index = counts[context.is_recompute][kind]
            counts[context.is_recompute][kind] += 1
            saved = kept is None or (kind, index) in kept
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _with_counts(contexts: Callable[[], Any] | None) -> Callable[[], Any]:
    """A context_fn of `checkpoint` that adds to another one: MoE layers wait for their numbers of rows in the forward pass only."""

    def both() -> Any:
        sizes: list[list[int]] = []
        forward, recompute = contexts() if contexts is not None else (nullcontext(), nullcontext())
        return _Nested(forward, ReadCounts(sizes, again=False)), _Nested(recompute, ReadCounts(sizes, again=True))

    return both


class _Nested:
    """Two contexts as one, which may be entered again if these may: a graph that is kept is recomputed in each of its backward passes."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def choose(stage: Stack, config: RunConfig, mesh: Mesh, dtype: torch.dtype) -> dict[str, list[Result]]:
    """Choose which results each block keeps within training.activation_budget: the most FLOPs per byte first.

    Args:
        stage: a pipeline stage with sharded weights on the meta device, before its attention cores are set.
        dtype: of the activations.

    Returns:
        Name of a block -> the results that it keeps.

    Raises:
        UserError: the input of a block alone exceeds the budget.
    """
    assert config.training.activation_budget is not None
    budget = config.training.activation_budget * 1e6
    length = config.training.sequence_length // mesh.layout.context
    if config.parallel.sequence_parallel:
        length //= mesh.layout.tensor
    x = torch.empty(config.training.micro_batch_size, length, config.model.hidden, dtype=dtype, device="meta")
    if x.nbytes > budget:
        rule = f"is less than the input of a block, {x.nbytes / 1e6:.1f} MB, which is always kept"
        fix = "increase it, reduce training.micro_batch_size, or set parallel.context or parallel.tensor"
        raise UserError.of("training.activation_budget", config.training.activation_budget, rule, fix)
    return {name: fill(measure(stage, block, x), budget - x.nbytes) for name, block in stage.blocks.items()}


def fill(results: Collection[Result], budget: float) -> list[Result]:
    """Return the results with the most FLOPs per byte whose bytes fit into the budget."""
    kept = []
    for result in sorted(results, key=lambda result: result.flops_per_byte, reverse=True):
        if result.bytes <= budget:
            kept.append(result)
            budget -= result.bytes
    return kept


def measure(stage: Stack, block: nn.Module, x: Tensor) -> list[Result]:
    """Return the results that a block can keep, in order; the block and its input are on the meta device."""
    layers = [module for module in block.modules() if hasattr(module, "core")]
    cores, dtype = [layer.core for layer in layers], next(block.parameters()).dtype
    for layer in layers:
        layer.core = meta_core  # type: ignore[assignment]
    try:
        with torch.no_grad(), _Results() as recorded:
            block.to(x.dtype)(x, stage.attention_context({}))
    finally:
        block.to(dtype)
        for layer, core in zip(layers, cores, strict=True):
            layer.core = core
    return recorded.results


class _Results(TorchDispatchMode):
    """Records the results that a block can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Result] = []
        self._counts: Counter[Kind] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        kind = kind_of(operation)
        if kind is not None:
            count = flop_registry.get(operation.overloadpacket)
            flops = float(count(*args, **(kwargs or {}), out_val=output)) if count is not None else 0.0
            size = sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            self.results.append(Result(kind, self._counts[kind], size, flops))
            self._counts[kind] += 1
        return output
