"""Mutants of a second author who had not seen the certificate: losses, parallel layouts and experts."""

from __future__ import annotations

from tools.mutants.models import DEEPSEEK, LLAMA, MIXTRAL, TRANSFORMER
from tools.mutants.mutation import Edit, Mutant

LOSS, MULTI_TOKEN, ROUTER = "pipeline/layers/loss.py", "pipeline/layers/multi_token.py", "pipeline/layers/router.py"
CAUSAL, VALIDATION = "pipeline/data/load/objectives/causal.py", "pipeline/training/validation.py"
PARALLELIZE, TENSOR = "pipeline/parallel/parallelize.py", "pipeline/parallel/tensor_parallel.py"
RING, ULYSSES, EXPERTS = (
    "pipeline/parallel/ring_attention.py",
    "pipeline/parallel/context_parallel.py",
    "pipeline/parallel/expert_parallel.py",
)
SCHEDULES = "pipeline/parallel/pipeline_schedules.py"

PACKED = ("data.tokens={padded}", "data.packing=best_fit", "training.sequence_length=64")
#: Its scores are divided by another root than that of the width of a head, as in the model of 27 billion parameters.
GEMMA = (
    *("model=gemma3-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.head_width=8"),
    *("model.ffn_hidden=48", "model.window=8", "model.query_pre_attn_scalar=16"),
)
#: Logits of a micro-batch in two chunks (layers/loss.py).
TWO_CHUNKS = (
    *("model.vocab_size=8192", "training.sequence_length=64", "training.micro_batch_size=16", "training.global_batch_size=32"),
    "parallel.zero_stage=1",
)

MUTANTS = (
    Mutant(
        name="ignored_positions_have_gradient",
        bug=28,
        what="positions without a target do not count in the loss, but have the gradient of the softmax",
        ranks=2,
        words=(*LLAMA, *PACKED, "parallel.zero_stage=1"),
        edits=(Edit(LOSS, "torch.where(is_target, sums[0], torch.inf)", "sums[0]"),),
        exact=False,
    ),
    Mutant(
        name="ends_of_documents_are_no_targets",
        bug=6,
        what="the end-of-document token is also the padding, and is never a target: the model does not learn to end a text",
        ranks=2,
        words=(*LLAMA, *PACKED, "parallel.zero_stage=1"),
        edits=(Edit(CAUSAL, 'padding = (arrays["tokens"] == end) & (arrays["targets"] == end)', 'padding = arrays["targets"] == end'),),
        exact=False,
    ),
    Mutant(
        name="further_depths_read_the_next_token",
        bug=3,
        what="every MTP module reads the embedding of the next token, instead of the one shifted by its depth",
        ranks=2,
        words=(*DEEPSEEK, "model.mtp_depth=2", "parallel.zero_stage=1"),
        edits=(Edit(MULTI_TOKEN, "hidden = depth(self.embed(labels.clamp(min=0))", "hidden = depth(self.embed(targets.clamp(min=0))"),),
        exact=False,
    ),
    Mutant(
        name="head_learns_from_last_chunk",
        bug=35,
        what="of the gradient of the output matrix, only the last chunk of the logits remains",
        ranks=2,
        words=(*LLAMA, *TWO_CHUNKS),
        edits=(
            Edit(
                LOSS,
                "grad_weight = product.to(compute_dtype) if grad_weight is None else grad_weight.add_(product)",
                "grad_weight = product.to(compute_dtype)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="small_batches_divided_by_final_micro_batches",
        bug=8,
        what="gradients of a smaller batch at the begin of a run are divided by the number of micro-batches of the final one",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", "training.batch_rampup=[{{until_step:3,value:8}}]"),
        edits=(
            Edit(SCHEDULES, "mean = loss / micro_batches", "mean = loss / layout.micro_batches"),
            Edit(
                SCHEDULES,
                "return stacked.sum() if reduced else stacked",
                "return stacked.sum() * self._mesh.layout.micro_batches / self.micro_batches if reduced else stacked",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="validation_averages_sequences",
        bug=5,
        what="the loss of a validation is the mean of the means of its sequences, which have different numbers of targets",
        ranks=2,
        words=(
            *TRANSFORMER,
            "data.pairs.train=[{pairs}]",
            "data.pairs.validation=[{pairs}]",
            "tokenizer.path={t5_tokenizer}",
            "model.vocab_size=640",
        ),
        edits=(Edit(VALIDATION, "MeanLoss(float(total / count)", "MeanLoss(float((losses / targets.clamp(min=1)).mean())"),),
        exact=False,
    ),
    Mutant(
        name="slices_begin_equal",
        bug=53,
        what="all tensor ranks draw the same initial values for their slices of a weight",
        ranks=2,
        words=(*LLAMA, "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                PARALLELIZE,
                "part = [(piece.start(dim), size) for dim, size in enumerate(piece.shape)]",
                "part = [(0, size) for size in piece.shape]",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="first_token_from_own_rows",
        bug=12,
        what="a rank multiplies its number by its own rows to find the first token of its logits: the last rank has fewer rows",
        ranks=2,
        words=(*LLAMA, "model.vocab_size=321", "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                TENSOR,
                "self.first_token, self.vocabulary = piece.start(0), piece.full_shape[0]",
                "self.first_token, self.vocabulary = group.rank() * piece.shape[0], piece.full_shape[0]",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="rounded_by_largest_of_own_slice",
        bug=42,
        what="quantization-aware training rounds a row that is divided over tensor ranks by the largest value of each slice",
        ranks=2,
        words=(*LLAMA, "parallel.tensor=2", "parallel.zero_stage=1", "training.fake_quantize=int8"),
        edits=(
            Edit(
                TENSOR,
                '                    linear.reduce_max = partial(collectives.all_reduce, group=group, op="max")',
                "                    linear.reduce_max = None",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="ring_backward_with_default_scale",
        bug=17,
        what="the backward pass of ring attention scales the scores by the root of the width, whatever the layer's scale is",
        ranks=2,
        words=(*GEMMA, "parallel.context=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                RING,
                "                window=window,\n                scale=scale,\n            )\n            grad_q[",
                "                window=window,\n                scale=None,\n            )\n            grad_q[",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="ulysses_across_documents",
        bug=18,
        what="Ulysses attends across documents, since their numbers are those of the local tokens",
        ranks=2,
        words=(*LLAMA, "parallel.context=2", "parallel.context_kind=ulysses", "parallel.zero_stage=1", "training.document_mask=true"),
        edits=(
            Edit(
                ULYSSES,
                "documents = None if mask.documents is None else torch.cat(collectives.all_gather(mask.documents, self.group), dim=1)",
                "documents = None",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="balance_gradient_of_own_tokens",
        bug=29,
        what="the balance loss covers the tokens of all context ranks, its gradient only those of the rank",
        ranks=2,
        words=(*MIXTRAL, "parallel.context=2", "parallel.zero_stage=1"),
        edits=(Edit(EXPERTS, "partial(collectives.all_reduce_with_grad,", "partial(collectives.reduce,"),),
        exact=False,
    ),
    Mutant(
        name="head_scaled_twice_in_split_backward",
        bug=35,
        what="with zbv, the gradients of the head are scaled in place, once for its input and again for its weight",
        ranks=2,
        words=(*LLAMA, "model.layers=4", "parallel.pipeline=2", "parallel.schedule=zbv", "parallel.zero_stage=1"),
        edits=(Edit(LOSS, "grad * factor if kept else grad.mul_(factor)", "grad.data.mul_(factor)"),),
        exact=False,
    ),
    Mutant(
        name="balance_of_second_chunk_not_scaled",
        bug=29,
        what="with interleaved stages, the balance losses of the second stage of a rank are not divided by the micro-batches",
        ranks=2,
        words=(*MIXTRAL, "model.layers=4", "parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.zero_stage=1"),
        edits=(Edit(SCHEDULES, "list(moe_layers(stages))", "list(moe_layers(next(iter(stages.values()))))"),),
        exact=False,
    ),
    Mutant(
        name="norms_without_gradient_in_split_backward",
        bug=39,
        what="with zbv, only matrices have a separate pass for the weights: the gradients of norms are not collected",
        ranks=2,
        words=(*LLAMA, "model.layers=4", "parallel.pipeline=2", "parallel.schedule=zbv", "parallel.zero_stage=1"),
        edits=(
            Edit(
                SCHEDULES,
                "(p for p in self.submod.parameters() if p.grad is not None)",
                "(p for p in self.submod.parameters() if p.grad is not None and p.dim() > 1)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="weights_of_experts_with_correction_bias",
        bug=30,
        what="the router's correction bias, which is meant for the selection only, is also in the weights of the experts",
        ranks=2,
        words=(*DEEPSEEK, "parallel.zero_stage=1"),
        edits=(
            Edit(
                ROUTER,
                "weights = scores.gather(1, experts)",
                "weights = (scores if self.bias is None else scores + self.bias).gather(1, experts)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="normalization_of_experts_without_gradient",
        bug=26,
        what="the sum by which the weights of a token's experts are divided has no gradient",
        ranks=2,
        words=(*MIXTRAL, "parallel.expert=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                ROUTER,
                "weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)",
                "weights = weights / (weights.sum(dim=1, keepdim=True).detach() + 1e-20)",
            ),
        ),
        exact=False,
    ),
)
