"""Mutants of tensor, sequence, context, expert and pipeline parallelism, and of the gradient norm."""

from __future__ import annotations

from tools.mutants.models import DEEPSEEK, GPT, LLAMA, MISTRAL, MIXTRAL, MODERNBERT, QWEN3_NEXT
from tools.mutants.mutation import Edit, Mutant

DATA, ZERO_1 = " parallel.zero_stage=0", " parallel.zero_stage=1"
TENSOR, CONTEXT, PIPELINE = (f" parallel.{axis}=2{DATA}" for axis in ("tensor", "context", "pipeline"))
SPLIT = f" model.layers=4 parallel.pipeline=2 parallel.schedule=zbv{ZERO_1}"
MASKED = " data.tokens={masked} tokenizer.path={masked_tokenizer} model.vocab_size=520"
RING = "ring_attention_backward"

PARALLEL = (
    Mutant(
        "last_norm_not_summed",
        9,
        "under sequence parallelism, the gradient of the last norm is that of the rank's tokens",
        LLAMA + TENSOR,
        (Edit("sums_over_tensor", "S or P.role in R", '(S and P.name != "norm.weight") or P.role in R'),),
        exact=True,
    ),
    Mutant(
        "bias_added_by_every_rank",
        11,
        "the bias of a row-parallel layer is added before the sum over the ranks",
        GPT + TENSOR,
        (
            Edit(
                "RowParallelLinear.forward",
                "Y = self.leave(P)\nreturn Y if self.bias is None else Y + self.bias",
                "Y = P\nreturn self.leave(Y if self.bias is None else Y + self.bias)",
            ),
        ),
        exact=True,
    ),
    Mutant(
        "first_token_from_own_rows",
        12,
        "a rank multiplies its number by its own rows to find the first token of its logits: the last rank has fewer rows",
        f"{LLAMA} model.vocab_size=321 parallel.tensor=2{ZERO_1}",
        (Edit("VocabParallelHead.__init__", "(P.start(0), P.full_shape[0])", "(group.rank() * P.shape[0], P.full_shape[0])"),),
    ),
    Mutant(
        "window_on_one_side",
        12,
        "the window of an encoder bounds the tokens before a query, not those after it",
        f"{MODERNBERT}{MASKED} parallel.tensor=2{ZERO_1}",
        (Edit("Mask._visible", "D.abs() < W", "D < W"),),
    ),
    Mutant(
        "recomputed_from_wrong_input",
        16,
        "a block is recomputed from the other sequence of its micro-batch",
        f"{LLAMA}{TENSOR} training.activation_checkpointing=full",
        (
            Edit(
                "activation_checkpointing._checkpointed",
                "O: Tensor = checkpoint(F, ...)",
                "calls = []\n"
                "def again(x, *inner, **more):\n"
                "    calls.append(1)\n"
                "    return F(x if len(calls) == 1 else x.roll(1, dims=0), *inner, **more)\n"
                "O: Tensor = checkpoint(again, ...)",
            ),
        ),
        exact=True,
    ),
    Mutant(
        "slices_begin_equal",
        53,
        "all tensor ranks draw the same initial values for their slices of a weight",
        LLAMA + TENSOR,
        (Edit("init_piece", "[(P.start(D), S) for D, S in enumerate(P.shape)]", "[(0, S) for S in P.shape]"),),
    ),
    Mutant(
        "ring_backward_overwrites",
        17,
        "in the backward pass of ring attention, the last step overwrites the gradient of the queries",
        LLAMA + CONTEXT,
        (Edit(RING, "G[:, :, R] += B", "G[:, :, R] = B"),),
        exact=True,
    ),
    Mutant(
        "ring_skips_chunks_within_window",
        17,
        "a step of the ring is left out if the farthest key of the neighboring chunk is outside the window",
        f"{MISTRAL} model.window=3{CONTEXT}",
        (Edit("ring_layout.attended", "(abs(R - S) - 1) * H + 1", "abs(R - S) * H"),),
    ),
    Mutant(
        "ring_merges_in_bf16",
        18,
        "the log-sum-exp of the steps of a ring is merged in bf16",
        LLAMA + CONTEXT,
        (Edit("partial_attention.merge_", "torch.logaddexp(L, O)", "torch.logaddexp(L.bfloat16(), O.bfloat16())"),),
        exact=True,
    ),
    Mutant(
        "ulysses_across_documents",
        18,
        "Ulysses attends across documents, since their numbers are those of the local tokens",
        f"{LLAMA} parallel.context=2 parallel.context_kind=ulysses training.document_mask=true{ZERO_1}",
        (Edit("UlyssesCore._compute_full_mask", "D = None if M.documents is None else X", "D = None"),),
    ),
    Mutant(
        "state_not_decayed_between_chunks",
        18,
        "the state of linear attention passes from chunk to chunk of 64 tokens without the decay over a chunk",
        f"{QWEN3_NEXT} model.max_positions=256 training.sequence_length=256 parallel.tensor=2{ZERO_1}",
        (Edit("chunked_delta_rule", "S = S * D + K", "S = S + K"),),
    ),
    Mutant(
        "keys_and_values_swapped",
        32,
        "gradients of keys and values are taken from a message in the wrong order",
        LLAMA + CONTEXT,
        (Edit(RING, "K, V = N.wait().split(W, dim=3)", "V, K = N.wait().split(W, dim=3)"),),
    ),
    Mutant(
        "tied_gradients_not_summed",
        31,
        "the gradients of the two copies of a tied embedding are not summed",
        GPT + PIPELINE,
        (Edit("GradientReducer._sum_over_stages", "S.stages is not None", 'S.stages is not None and S.bucket.name == ""'),),
        exact=True,
    ),
    Mutant(
        "block_on_two_stages",
        33,
        "the last stage begins one block too early",
        f"{LLAMA} model.layers=4 parallel.pipeline=3{DATA}",
        (Edit("Layout.layers", "sum(self.blocks[:S])", "sum(self.blocks[:S]) - (S == self.stage_count - 1)"),),
        ranks=3,
        exact=True,
    ),
    Mutant(
        "norms_without_gradient_in_split_backward",
        39,
        "with zbv, only matrices have a separate pass for the weights: the gradients of norms are not collected",
        LLAMA + SPLIT,
        (
            Edit(
                "pipeline_schedules._build_stage",
                "(P for P in self.submod.parameters() if P.grad is not None)",
                "(P for P in self.submod.parameters() if P.grad is not None and P.dim() > 1)",
            ),
        ),
    ),
)

EXPERTS = (
    Mutant(
        "router_learns_from_balance_only",
        26,
        "the weights of the experts' outputs pass no gradient to the router",
        f"{MIXTRAL} parallel.expert=2{ZERO_1}",
        (Edit("Router.forward", "S.gather(1, E)", "S.detach().gather(1, E)"),),
    ),
    Mutant(
        "auxiliary_loss_on_every_rank",
        29,
        "every tensor rank adds the full auxiliary loss",
        f"{MIXTRAL}{TENSOR} training.balance_loss=0.1",
        (Edit("Pipeline.__init__", "1 / (M * L.tensor)", "1 / M"),),
        exact=True,
    ),
    Mutant(
        "router_bias_not_updated",
        30,
        "the biases of the routers stay as they are",
        f"{DEEPSEEK} parallel.expert=2{DATA}",
        (Edit("RouterStatistics._update_biases", "B is not None and self._updates", "B is not None and not self._updates"),),
        exact=True,
    ),
    Mutant(
        "router_bias_from_own_load",
        30,
        "every data rank updates the biases of the routers from its own load: the copies drift apart",
        f"{DEEPSEEK} training.bias_update_speed=0.05{DATA}",
        (Edit("RouterStatistics._all_reduce_records", "reduce_over(R, T)", "pass"),),
    ),
    Mutant(
        "weights_of_experts_with_correction_bias",
        30,
        "the router's correction bias, which is meant for the selection only, is also in the weights of the experts",
        DEEPSEEK + ZERO_1,
        (Edit("Router.forward", "S.gather(1, E)", "(S if self.bias is None else S + self.bias).gather(1, E)"),),
    ),
)

NORM = (
    Mutant(
        "norm_of_every_zero_group",
        20,
        "with several groups of ZeRO, the partitions of each of them count in the norm",
        f"{LLAMA} parallel.zero_group=2 optimizer.gradient_clipping=0.3{ZERO_1}",
        (Edit("NativeEngine.__init__", "B.replica == 0 and P", "P"),),
        ranks=4,
    ),
    Mutant(
        "norm_over_replicas",
        23,
        "the squares are also summed over the data ranks",
        LLAMA + DATA,
        (Edit("NativeEngine.__init__", "(M.tensor, M.expert, M.pipeline)", "(M.tensor, M.expert, M.pipeline, M.data)"),),
        exact=True,
    ),
    Mutant(
        "clipping_on_some_copies",
        24,
        "replicated weights are clipped on the first tensor rank only: their copies drift apart",
        f"{LLAMA}{TENSOR} optimizer.gradient_clipping=0.3",
        (
            Edit(
                "NativeEngine.step",
                "R = U.step(N, ...)",
                "for flat, gradient in zip(self.weights, gradients, strict=True):\n"
                "    for p, piece in flat.bucket.pieces.items():\n"
                '        if self._mesh.coordinates.tensor > 0 and not piece.is_sliced_along("tensor"):\n'
                "            flat.bucket.view(gradient, p).mul_(gradient_clipping.divisor(N, U._clipping))\n"
                "R = U.step(N, ...)",
            ),
        ),
        exact=True,
    ),
    Mutant(
        "small_gradients_scaled_up",
        24,
        "a gradient whose norm is below the largest one is scaled up to it",
        f"{LLAMA} optimizer.gradient_clipping=4{ZERO_1}",
        (Edit("gradient_clipping.divisor", "N.clamp(min=1.0)", "N"),),
    ),
)

MUTANTS = (*PARALLEL, *EXPERTS, *NORM)
