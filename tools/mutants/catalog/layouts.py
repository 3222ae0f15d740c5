"""Mutants of tensor, sequence, context, expert and pipeline parallelism, and of the gradient norm."""

from __future__ import annotations

from collections.abc import Iterator

from tools.mutants.models import DEEPSEEK, GPT, LLAMA, MISTRAL, MIXTRAL, MODERNBERT, QWEN3_NEXT
from tools.mutants.mutation import Edit, mutant

DATA, ZERO_1 = " parallel.zero_stage=0", " parallel.zero_stage=1"
TENSOR, CONTEXT, PIPELINE = (f" parallel.{axis}=2{DATA}" for axis in ("tensor", "context", "pipeline"))
SPLIT = f" model.layers=4 parallel.pipeline=2 parallel.schedule=zbv{ZERO_1}"
MASKED = " data.tokens={masked} tokenizer.path={masked_tokenizer} model.vocab_size=520"
RING = "ring_attention_backward"


@mutant(9, LLAMA + TENSOR, exact=True)
def last_norm_not_summed() -> Iterator[Edit]:
    """Under sequence parallelism, the gradient of the last norm is that of the rank's tokens."""
    yield Edit("sums_over_tensor", "S or P.role in R", '(S and P.name != "norm.weight") or P.role in R')


@mutant(11, GPT + TENSOR, exact=True)
def bias_added_by_every_rank() -> Iterator[Edit]:
    """The bias of a row-parallel layer is added before the sum over the ranks."""
    yield Edit(
        "RowParallelLinear.forward",
        "Y = self.leave(P)\nreturn Y if self.bias is None else Y + self.bias",
        "Y = P\nreturn self.leave(Y if self.bias is None else Y + self.bias)",
    )


@mutant(12, f"{LLAMA} model.vocab_size=321 parallel.tensor=2{ZERO_1}")
def first_token_from_own_rows() -> Iterator[Edit]:
    """A rank multiplies its number by its own rows to find the first token of its logits: the last rank has fewer rows."""
    yield Edit("VocabParallelHead.__init__", "(P.start(0), P.full_shape[0])", "(group.rank() * P.shape[0], P.full_shape[0])")


@mutant(12, f"{MODERNBERT}{MASKED} parallel.tensor=2{ZERO_1}")
def window_on_one_side() -> Iterator[Edit]:
    """The window of an encoder bounds the tokens before a query, not those after it."""
    yield Edit("Mask._visible", "D.abs() < W", "D < W")


@mutant(16, f"{LLAMA}{TENSOR} training.activation_checkpointing=full", exact=True)
def recomputed_from_wrong_input() -> Iterator[Edit]:
    """A block is recomputed from the other sequence of its micro-batch."""
    yield Edit(
        "activation_checkpointing._checkpointed",
        "O: Tensor = checkpoint(F, ...)",
        "calls = []\n"
        "def again(x, *inner, **more):\n"
        "    calls.append(1)\n"
        "    return F(x if len(calls) == 1 else x.roll(1, dims=0), *inner, **more)\n"
        "O: Tensor = checkpoint(again, ...)",
    )


@mutant(53, LLAMA + TENSOR)
def slices_begin_equal() -> Iterator[Edit]:
    """All tensor ranks draw the same initial values for their slices of a weight."""
    yield Edit("init_piece", "[(P.start(D), S) for D, S in enumerate(P.shape)]", "[(0, S) for S in P.shape]")


@mutant(17, LLAMA + CONTEXT, exact=True)
def ring_backward_overwrites() -> Iterator[Edit]:
    """In the backward pass of ring attention, the last step overwrites the gradient of the queries."""
    yield Edit(RING, "G[:, :, R] += B", "G[:, :, R] = B")


@mutant(17, f"{MISTRAL} model.window=3{CONTEXT}")
def ring_skips_chunks_within_window() -> Iterator[Edit]:
    """A step of the ring is left out if the farthest key of the neighboring chunk is outside the window."""
    yield Edit("ring_layout.attended", "(abs(R - S) - 1) * H + 1", "abs(R - S) * H")


@mutant(18, LLAMA + CONTEXT, exact=True)
def ring_merges_in_bf16() -> Iterator[Edit]:
    """The log-sum-exp of the steps of a ring is merged in bf16."""
    yield Edit("partial_attention.merge_", "torch.logaddexp(L, O)", "torch.logaddexp(L.bfloat16(), O.bfloat16())")


@mutant(18, f"{LLAMA} parallel.context=2 parallel.context_kind=ulysses training.document_mask=true{ZERO_1}")
def ulysses_across_documents() -> Iterator[Edit]:
    """Ulysses attends across documents, since their numbers are those of the local tokens."""
    yield Edit("UlyssesCore._compute_full_mask", "D = None if M.documents is None else X", "D = None")


@mutant(18, f"{QWEN3_NEXT} model.max_positions=256 training.sequence_length=256 parallel.tensor=2{ZERO_1}")
def state_not_decayed_between_chunks() -> Iterator[Edit]:
    """The state of linear attention passes from chunk to chunk of 64 tokens without the decay over a chunk."""
    yield Edit("chunked_delta_rule", "S = S * D + K", "S = S + K")


@mutant(32, LLAMA + CONTEXT)
def keys_and_values_swapped() -> Iterator[Edit]:
    """Gradients of keys and values are taken from a message in the wrong order."""
    yield Edit(RING, "K, V = N.wait().split(W, dim=3)", "V, K = N.wait().split(W, dim=3)")


@mutant(31, GPT + PIPELINE, exact=True)
def tied_gradients_not_summed() -> Iterator[Edit]:
    """The gradients of the two copies of a tied embedding are not summed."""
    yield Edit("GradientReducer._sum_over_stages", "S.stages is not None", 'S.stages is not None and S.bucket.name == ""')


@mutant(33, f"{LLAMA} model.layers=4 parallel.pipeline=3{DATA}", ranks=3, exact=True)
def block_on_two_stages() -> Iterator[Edit]:
    """The last stage begins one block too early."""
    yield Edit("Layout.layers", "sum(self.blocks[:S])", "sum(self.blocks[:S]) - (S == self.stage_count - 1)")


@mutant(39, LLAMA + SPLIT)
def norms_without_gradient_in_split_backward() -> Iterator[Edit]:
    """With zbv, only matrices have a separate pass for the weights: the gradients of norms are not collected."""
    yield Edit(
        "pipeline_schedules._build_stage",
        "(P for P in self.submod.parameters() if P.grad is not None)",
        "(P for P in self.submod.parameters() if P.grad is not None and P.dim() > 1)",
    )


@mutant(26, f"{MIXTRAL} parallel.expert=2{ZERO_1}")
def router_learns_from_balance_only() -> Iterator[Edit]:
    """The weights of the experts' outputs pass no gradient to the router."""
    yield Edit("Router.forward", "S.gather(1, E)", "S.detach().gather(1, E)")


@mutant(29, f"{MIXTRAL}{TENSOR} training.balance_loss=0.1", exact=True)
def auxiliary_loss_on_every_rank() -> Iterator[Edit]:
    """Every tensor rank adds the full auxiliary loss."""
    yield Edit("Pipeline.__init__", "1 / (M * L.tensor)", "1 / M")


@mutant(30, f"{DEEPSEEK} parallel.expert=2{DATA}", exact=True)
def router_bias_not_updated() -> Iterator[Edit]:
    """The biases of the routers stay as they are."""
    yield Edit("RouterStatistics._update_biases", "B is not None and self._updates", "B is not None and not self._updates")


@mutant(30, f"{DEEPSEEK} training.bias_update_speed=0.05{DATA}")
def router_bias_from_own_load() -> Iterator[Edit]:
    """Every data rank updates the biases of the routers from its own load: the copies drift apart."""
    yield Edit("RouterStatistics._all_reduce_records", "reduce_over(R, T)", "pass")


@mutant(30, DEEPSEEK + ZERO_1)
def weights_of_experts_with_correction_bias() -> Iterator[Edit]:
    """The router's correction bias, which is meant for the selection only, is also in the weights of the experts."""
    yield Edit("Router.forward", "S.gather(1, E)", "(S if self.bias is None else S + self.bias).gather(1, E)")


@mutant(20, f"{LLAMA} parallel.zero_group=2 optimizer.gradient_clipping=0.3{ZERO_1}", ranks=4)
def norm_of_every_zero_group() -> Iterator[Edit]:
    """With several groups of ZeRO, the partitions of each of them count in the norm."""
    yield Edit("NativeEngine.__init__", "B.replica == 0 and P", "P")


@mutant(23, LLAMA + DATA, exact=True)
def norm_over_replicas() -> Iterator[Edit]:
    """The squares are also summed over the data ranks."""
    yield Edit("NativeEngine.__init__", "(M.tensor, M.expert, M.pipeline)", "(M.tensor, M.expert, M.pipeline, M.data)")


@mutant(24, f"{LLAMA}{TENSOR} optimizer.gradient_clipping=0.3", exact=True)
def clipping_on_some_copies() -> Iterator[Edit]:
    """Replicated weights are clipped on the first tensor rank only: their copies drift apart."""
    yield Edit(
        "NativeEngine.step",
        "R = U.step(N, ...)",
        "for flat, gradient in zip(self.weights, gradients, strict=True):\n"
        "    for p, piece in flat.bucket.pieces.items():\n"
        '        if self._mesh.coordinates.tensor > 0 and not piece.is_sliced_along("tensor"):\n'
        "            flat.bucket.view(gradient, p).mul_(gradient_clipping.divisor(N, U._clipping))\n"
        "R = U.step(N, ...)",
    )


@mutant(24, f"{LLAMA} optimizer.gradient_clipping=4{ZERO_1}")
def small_gradients_scaled_up() -> Iterator[Edit]:
    """A gradient whose norm is below the largest one is scaled up to it."""
    yield Edit("gradient_clipping.divisor", "N.clamp(min=1.0)", "N")
