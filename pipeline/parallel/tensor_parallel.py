"""Tensor and sequence parallelism: weights are sharded by the family's table; modules that communicate are replaced or get hooks.

Attention and feed-forward of a block are tensor-parallel regions, in which each rank holds a piece of the weights: column-parallel linear
layers at the entry, row-parallel ones at the exit (Shoeybi et al. 2019). Entry and exit are collectives. With sequence parallelism
(Korthikanti et al. 2022), activations between two regions are sharded along the sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.fake_quantization import FakeQuantizedLinear
from pipeline.layers.linear import Linear, Projection, project
from pipeline.layers.lora import LoRAExperts, LoRALinear, LowRank, dropout_of
from pipeline.layers.loss import linear_cross_entropy, mean_factor, position_weights
from pipeline.layers.mask import capped
from pipeline.layers.masked_head import NextSentenceHead
from pipeline.layers.mlp import MLP, GatedMLP
from pipeline.layers.moe import MoE
from pipeline.layers.position_bias import PerHead
from pipeline.layers.recurrent import RecurrentLayer
from pipeline.layers.teacher import Teacher
from pipeline.models.tensor_parallel_roles import role
from pipeline.parallel import collectives
from pipeline.parallel.pieces import Piece

RegionBoundary = Callable[[Tensor], Tensor]

#: Whether the product of a RowParallelLinear is being computed: selective activation checkpointing saves its sum over the ranks instead.
_PARTIAL_PRODUCT: ContextVar[bool] = ContextVar("partial product", default=False)
#: The operators of nn.Linear, and those of experts on a GPU.
PRODUCTS = (
    *(torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    *(torch.ops.aten._grouped_mm.default, torch.ops.aten._scaled_grouped_mm.default),
)


class RowParallelLinear(nn.Module):
    """A linear layer with a sharded input: the partial outputs of the ranks are summed, then the bias is added once."""

    def __init__(self, linear: nn.Linear, leave: RegionBoundary) -> None:
        super().__init__()
        self.bias = linear.bias
        linear.register_parameter("bias", None)
        self.linear, self.leave = linear, leave

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, input / ranks) -> (batch, sequence, output)."""
        y = self.leave(self._partial_product(x))
        return y if self.bias is None else y + self.bias

    def _partial_product(self, x: Tensor) -> Tensor:
        """Compute the rank's product, and mark it as partial."""
        if torch.compiler.is_compiling():  # the compiler saves only what the backward pass reads, and that is the sum
            return self.linear(x)
        token = _PARTIAL_PRODUCT.set(True)
        try:
            return self.linear(x)
        finally:
            _PARTIAL_PRODUCT.reset(token)


def is_saved_product(operation: object) -> bool:
    """Whether selective activation checkpointing saves the result of an operation as that of a matrix product."""
    return operation in PRODUCTS and not _PARTIAL_PRODUCT.get()


def fused_project(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """As `project`, with one matrix product for all layers: their slices of the outputs are too narrow to use a GPU well.

    One product is also what inductor fuses with the collective of its input, and in the backward pass with that of the input's gradient.
    Weights that are not joined in memory are concatenated. Autograd then saves the concatenated weights, unless they are concatenated again
    in the backward pass (activation checkpointing).
    """
    plain = [linear for linear in linears if type(linear) is Linear and isinstance(linear.weight, Tensor)]
    if len(plain) < len(linears):  # an adapter, or a weight in 4 bits, for example
        return project(x, *linears)
    widths = [linear.weight.shape[0] for linear in plain]
    y = F.linear(x, _joint_weight(plain))
    biases = [linear.bias for linear in plain if linear.bias is not None]
    assert len(biases) in (0, len(plain)), "layers with the same input all have a bias, or none has"
    if biases:
        y = y + torch.cat(tuple(biases))
    return list(y.split(widths, dim=-1))


def _joint_weight(linears: list[Linear]) -> Tensor:
    """The weights of some layers below one another: (all outputs, input)."""
    weights = [linear.weight for linear in linears]
    if len(weights) == 1:
        return weights[0]
    joined = linears[0].joined
    if joined is None or joined.shape[0] != sum(weight.shape[0] for weight in weights):
        return torch.cat(weights)
    view: Tensor = _JoinedWeights.apply(joined, *weights) if torch.is_grad_enabled() else joined
    return view


class _JoinedWeights(torch.autograd.Function):
    """A tensor that holds some weights already, in their order: its gradient is divided among them."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, *weights: Tensor) -> Tensor:
        ctx.rows = [weight.shape[0] for weight in weights]
        return joined.view_as(joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grad.split(ctx.rows)


def joint_layers(model: nn.Module) -> Iterator[tuple[Linear, ...]]:
    """Yield the layers that may be computed as one, those of a cross-attention's memory besides."""
    for module in model.modules():
        if isinstance(module, Attention):
            gates = [] if module.gate is None else [module.gate]
            groups: list[tuple[Linear, ...]] = [(module.query, module.key, module.value, *gates), (module.key, module.value)]
        elif isinstance(module, RecurrentLayer):
            groups = [module.projections()]
        elif isinstance(module, GatedMLP):
            groups = [(module.gate, module.up)]
        else:
            continue
        yield from (layers for layers in groups if all(type(layer) is Linear and isinstance(layer.weight, Tensor) for layer in layers))


def gathered_projection(enter: RegionBoundary, apply_layers: Projection) -> Projection:
    """Linear layers behind one entry to a tensor-parallel region. Their input, which is as large as on a single rank, is saved."""

    def projected(x: Tensor, *linears: nn.Module) -> list[Tensor]:
        return apply_layers(enter(x), *linears)

    return projected


def regathered_projection(enter: RegionBoundary, *, dropout: bool) -> Projection:
    """As gathered_projection, but only the local input is saved, and gathered again in the backward pass (Korthikanti et al. 2022).

    With dropout in adapters, the same elements are dropped again.
    """

    def policy(context: object, operation: object, *args: object, **options: object) -> CheckpointPolicy:  # noqa: ARG001 - torch's signature
        return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    def projected(x: Tensor, *linears: nn.Module) -> list[Tensor]:
        def gather_and_project(x: Tensor) -> tuple[Tensor, ...]:
            return tuple(fused_project(enter(x), *linears))

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return list(checkpoint(gather_and_project, x, use_reentrant=False, preserve_rng_state=dropout, context_fn=contexts))

    return projected


class ParallelRMSNorm(nn.Module):
    """RMSNorm over a width that is sharded over the ranks: the mean square is that of the full width (OLMo 2's queries and keys)."""

    def __init__(self, norm: nn.RMSNorm, width: int, group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self.eps, self.width, self.group = norm.weight, norm.eps, width, group

    def forward(self, x: Tensor) -> Tensor:
        """(..., width / ranks) -> (..., width / ranks)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Every rank's output depends on the sum, so the gradients of the ranks are summed too.
        squares = collectives.all_reduce_with_grad(wide.square().sum(dim=-1, keepdim=True), self.group)
        assert self.eps is not None
        return (wide * torch.rsqrt(squares / self.width + self.eps) * self.weight).to(x.dtype)


class VocabParallelEmbedding(nn.Module):
    """The rows of the embedding from `first_token` on; tokens of other ranks embed to zero, and `leave` sums over ranks."""

    def __init__(self, weight: nn.Parameter, first_token: int, leave: RegionBoundary) -> None:
        super().__init__()
        self.weight = weight
        self.first_token = first_token
        self.leave = leave

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence, hidden), with sequence parallelism the local (batch, sequence / ranks, hidden)."""
        local = tokens - self.first_token
        out_of_range = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(out_of_range, 0), self.weight)
        return self.leave(rows.masked_fill(out_of_range.unsqueeze(-1), 0.0))


def local_positions(
    module: nn.Module, args: tuple[Tensor | None, ...], group: ProcessGroup
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the arguments of an Embedding whose output is sharded along the sequence: all tokens, but local positions and segments."""
    assert isinstance(module, Embedding)
    tokens, positions, segments = (*args, None, None)[:3]
    assert tokens is not None
    if positions is None and (module.positions is not None or module.sinusoids is not None):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    if segments is None and module.segments is not None:
        segments = torch.zeros_like(tokens)

    def local(full: Tensor | None) -> Tensor | None:
        return None if full is None else full.chunk(group.size(), dim=-1)[group.rank()]

    return tokens, local(positions), local(segments)


class VocabParallelHead(nn.Module):
    """The rows of the output matrix from `first_token` on, with the cross-entropy over the full vocabulary."""

    z_loss, teacher_weight = 0.0, 1.0

    def __init__(self, head: OutputHead, piece: Piece, group: ProcessGroup, enter: RegionBoundary) -> None:
        super().__init__()
        self.project, self.weight, self.bias = head.project, head.weight, head.bias
        self.factor, self.label_smoothing, self.softcap = head.factor, head.label_smoothing, head.softcap
        self.first_token, self.vocabulary = piece.start(0), piece.full_shape[0]
        self.enter, self.group = enter, group
        self.reduce_max = partial(collectives.all_reduce, group=group, op="max")
        self.reduce_sum = partial(collectives.all_reduce, group=group)

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, loss_scale: Tensor | None = None, teacher: Teacher | None = None
    ) -> Tensor:
        """The mean loss, a 0-dim tensor, or without targets the logits of the full vocabulary; arguments as in OutputHead."""
        if self.project is not None:
            hidden = self.project(hidden)
        if self.factor != 1.0:
            hidden = hidden * self.factor
        if targets is None:
            logits = F.linear(self.enter(hidden), self.weight, self.bias)
            return self._gather_logits(logits if self.softcap is None else capped(logits, self.softcap))
        loss = linear_cross_entropy(
            self.enter(hidden),
            self.weight,
            targets,
            bias=self.bias,
            weights=position_weights(loss_scale),
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            vocabulary=self.vocabulary,
            first_token=self.first_token,
            reduce_max=self.reduce_max,
            reduce_sum=self.reduce_sum,
            teacher=teacher,
            teacher_weight=self.teacher_weight,
        )
        return loss * mean_factor(targets, loss_scale)

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """(batch, sequence, local vocabulary) -> (batch, sequence, vocabulary), the same on every rank. Not differentiable."""
        width = -(-self.vocabulary // self.group.size())  # the last pieces may be shorter
        pieces = collectives.all_gather(F.pad(logits, (0, width - logits.shape[2])), self.group)
        return torch.cat(pieces, dim=2)[..., : self.vocabulary]


def apply(
    model: nn.Module,
    pieces: dict[nn.Parameter, Piece],
    table: dict[str, str],
    group: ProcessGroup,
    *,
    sequence: bool,
    gather_again: bool = False,
    recomputed: bool = False,
    dispatched: bool = False,
    folded: bool = False,
) -> None:
    """Insert the collectives around the tensor-parallel regions of a model with sharded weights.

    Args:
        model: a pipeline stage, or the full model.
        pieces: parameter -> its piece of the full weight.
        table: the family's tensor-parallel table.
        group: the tensor-parallel group.
        sequence: shard activations along the sequence between the regions.
        gather_again: gather inputs of attention and feed-forward again in the backward pass instead of saving them.
        recomputed: the blocks are recomputed in the backward pass.
        dispatched: expert parallelism dispatches tokens, a slice of the columns by each tensor rank (parallel/expert_parallel.py).
        folded: experts are whole, and each tensor rank dispatches its own tokens: routed experts are no tensor-parallel region.
    """
    enter: RegionBoundary = partial(collectives.gather_sequence if sequence else collectives.copy, group=group)
    leave: RegionBoundary = partial(collectives.reduce_scatter_sequence if sequence else collectives.reduce, group=group)
    from_columns = collectives.scatter_sequence_gather_columns if sequence else collectives.replicate_columns
    leave_experts: RegionBoundary = partial(from_columns, group=group) if dispatched else leave

    for prefix, module in list(model.named_modules()):
        linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        roles = {name: role(table, f"{prefix}.{name}.weight") for name in linears}
        if "column" in roles.values() and isinstance(module, Attention | RecurrentLayer | MLP | GatedMLP):
            once = gathered_projection(enter, fused_project if recomputed else project)
            again = regathered_projection(enter, dropout=dropout_of(module) > 0)
            module.project = again if sequence and gather_again else once
        elif "column" in roles.values():
            module.register_forward_pre_hook(lambda _, args: tuple(enter(a) if isinstance(a, Tensor) else a for a in args))
        for name, linear in linears.items():
            if roles[name] == "row":
                if isinstance(linear, FakeQuantizedLinear):
                    linear.reduce_max = partial(collectives.all_reduce, group=group, op="max")
                if isinstance(linear, LoRALinear):
                    _slice_input(linear.lora, group)
                setattr(module, name, RowParallelLinear(linear, leave))
        for name, child in list(module.named_children()):
            if isinstance(child, OutputHead):
                setattr(module, name, VocabParallelHead(child, pieces[child.weight], group, enter))
            if isinstance(child, nn.RMSNorm) and role(table, f"{prefix}.{name}.weight".lstrip(".")) == "column":
                setattr(module, name, ParallelRMSNorm(child, pieces[child.weight].full_shape[0], group))
        if isinstance(module, MoE) and not folded:  # one region, including the router: the expert weights are sharded
            module.register_forward_pre_hook(lambda _, args: tuple(enter(a) if isinstance(a, Tensor) else a for a in args))
            module.register_forward_hook(lambda _, args, output: leave_experts(output))  # noqa: ARG005 - hook's signature
            if isinstance(module.experts, Experts):
                module.experts.down_ranks = group.size()
            adapters = module.experts.lora.items() if isinstance(module.experts, LoRAExperts) else ()
            for matrix, adapter in adapters:
                if role(table, f"{prefix}.experts.{matrix}") == "expert_row":
                    _slice_input(adapter, group)
        if isinstance(module, NextSentenceHead):  # all ranks compute the same, from the first token of each sequence
            module.register_forward_pre_hook(lambda _, args: (enter(args[0]),))
            module.register_forward_hook(lambda _, args, output: collectives.scale_gradient(output, group))  # noqa: ARG005 - hook's signature
        if isinstance(module, PerHead):
            module.register_forward_hook(lambda _, args, output: collectives.scatter_heads(output, group))  # noqa: ARG005 - hook's signature
        if isinstance(module, Embedding):
            weight = module.tokens.weight
            module.tokens = VocabParallelEmbedding(weight, pieces[weight].start(0), leave)  # type: ignore[arg-type, index, assignment]
            if sequence:
                module.register_forward_pre_hook(partial(local_positions, group=group))


def _slice_input(adapter: nn.Module, group: ProcessGroup) -> None:
    """Tell an adapter which slice of the full input it gets."""
    assert isinstance(adapter, LowRank)
    adapter.input_slices, adapter.input_slice = group.size(), group.rank()


def start_gathers_early() -> None:
    """Make inductor start gatherings of compiled blocks before the products that do not need them."""
    from pipeline.parallel.early_gathers import EarlyGathers  # loads inductor

    torch._inductor.config.post_grad_custom_post_pass = EarlyGathers()
    torch._inductor.config.reorder_for_peak_memory = False  # which moves them back


def fuse_collectives(group: ProcessGroup) -> None:
    """Make inductor compute each product of a compiled block in pieces, while its input is gathered or its output is reduced.

    Pieces travel through memory that the GPUs of the group share: all of them must be in one node.
    """
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():  # deprecated, but inductor's pass still requires it
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def sums_over_tensor(piece: Piece, *, sequence: bool) -> bool:
    """Whether the gradient of a weight is partial on each tensor rank and must be summed.

    True for weights that are replicated within a tensor-parallel region. With sequence parallelism also for weights that are applied to
    the local tokens: norms, biases added after a region, and embeddings of positions and segments. False for whole experts, of which each
    tensor rank has other ones.
    """
    return not piece.is_sliced_along("tensor") and (sequence or piece.role in ("partial", "expert_partial"))
