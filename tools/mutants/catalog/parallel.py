"""Mutants of tensor, sequence, context and pipeline parallelism, and of recomputation."""

from __future__ import annotations

from tools.mutants.models import BLOOM, DEEPSEEK, GPT, LLAMA, QWEN
from tools.mutants.mutation import Edit, Mutant

TENSOR, RING = "pipeline/parallel/tensor_parallel.py", "pipeline/parallel/ring_attention.py"
SUMS = '(sequence or piece.role in ("partial", "expert_partial"))'
TENSOR_2 = ("parallel.tensor=2", "parallel.zero_stage=0")
PLAIN_TENSOR_2 = (*TENSOR_2, "parallel.sequence_parallel=false")
CONTEXT_2 = ("parallel.context=2", "parallel.zero_stage=0")
MERGE = "pipeline/layers/partial_attention.py"

MUTANTS = (
    Mutant(
        name="last_norm_not_summed",
        bug=9,
        what="under sequence parallelism, the gradient of the last norm is that of the rank's tokens",
        ranks=2,
        words=(*LLAMA, *TENSOR_2),
        edits=(Edit(TENSOR, SUMS, SUMS.replace("sequence", '(sequence and piece.name != "norm.weight")')),),
    ),
    Mutant(
        name="norm_of_heads_not_summed",
        bug=10,
        what="without sequence parallelism, the gradient of the norm of queries is that of the rank's heads",
        ranks=2,
        words=(*QWEN, *PLAIN_TENSOR_2),
        edits=(
            Edit(
                "pipeline/models/tensor_parallel_roles.py",
                "for name, ends in _ENDS.items() for end in ends}",
                "for name, ends in _ENDS.items() for end in ends} | {'query_norm.weight': 'replicate'}",
            ),
        ),
    ),
    Mutant(
        name="bias_added_by_every_rank",
        bug=11,
        what="the bias of a row-parallel layer is added before the sum over the ranks",
        ranks=2,
        words=(*GPT, *TENSOR_2),
        edits=(
            Edit(
                TENSOR,
                "        y = self.leave(self._partial_product(x))\n        return y if self.bias is None else y + self.bias\n",
                "        y = self._partial_product(x)\n        return self.leave(y if self.bias is None else y + self.bias)\n",
            ),
        ),
    ),
    Mutant(
        name="embedding_not_masked",
        bug=12,
        what="a token of another rank's rows embeds to this rank's first row, not to zero",
        ranks=2,
        words=(*LLAMA, *TENSOR_2),
        edits=(Edit(TENSOR, "self.leave(rows.masked_fill(out_of_range.unsqueeze(-1), 0.0))", "self.leave(rows)"),),
    ),
    Mutant(
        name="rotary_key_of_local_heads",
        bug=13,
        what="the projection of the shared rotary key gets the gradient of the rank's heads only",
        ranks=2,
        words=(*DEEPSEEK, *PLAIN_TENSOR_2),
        edits=(
            Edit(
                "pipeline/models/tensor_parallel_roles.py",
                "for name, ends in _ENDS.items() for end in ends}",
                "for name, ends in _ENDS.items() for end in ends} | {'key_value_down.weight': 'replicate'}",
            ),
        ),
    ),
    Mutant(
        name="biases_not_summed",
        bug=14,
        what="under sequence parallelism, gradients of replicated biases are not summed over tensor ranks",
        ranks=2,
        words=(*GPT, *TENSOR_2),
        edits=(Edit(TENSOR, SUMS, SUMS.replace("sequence", '(sequence and not piece.name.endswith("bias"))')),),
        exact=False,
    ),
    Mutant(
        name="gathered_again_from_wrong_ranks",
        bug=15,
        what="in the backward pass, the input of a region is gathered again in the order of another group",
        ranks=2,
        words=(*LLAMA, *TENSOR_2),
        edits=(
            Edit(
                TENSOR,
                "        def gather_and_project(x: Tensor) -> tuple[Tensor, ...]:\n"
                "            return tuple(fused_project(enter(x), *linears))\n",
                "        calls: list[int] = []\n\n"
                "        def gather_and_project(x: Tensor) -> tuple[Tensor, ...]:\n"
                "            calls.append(1)\n"
                "            full = enter(x)\n"
                "            return tuple(fused_project(full.roll(x.shape[1] * (len(calls) > 1), dims=1), *linears))\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="recomputed_from_wrong_input",
        bug=16,
        what="a block is recomputed from the other sequence of its micro-batch",
        ranks=2,
        words=(*LLAMA, *TENSOR_2, "training.activation_checkpointing=full"),
        edits=(
            Edit(
                "pipeline/parallel/activation_checkpointing.py",
                "        output: Tensor = checkpoint(forward, *args,",
                "        calls: list[int] = []\n\n"
                "        def again(x: Tensor, *inner: Any, **more: Any) -> Tensor:\n"
                "            calls.append(1)\n"
                "            return forward(x if len(calls) == 1 else x.roll(1, dims=0), *inner, **more)\n\n"
                "        output: Tensor = checkpoint(again, *args,",
            ),
        ),
    ),
    Mutant(
        name="ring_backward_overwrites",
        bug=17,
        what="in the backward pass of ring attention, the last step overwrites the gradient of the queries",
        ranks=2,
        words=(*LLAMA, *CONTEXT_2),
        edits=(Edit(RING, "grad_q[:, :, rows] += block_grad_q", "grad_q[:, :, rows] = block_grad_q"),),
    ),
    Mutant(
        name="ring_merges_in_bf16",
        bug=18,
        what="the log-sum-exp of the steps of a ring is merged in bf16",
        ranks=2,
        words=(*LLAMA, *CONTEXT_2),
        edits=(
            Edit(
                MERGE,
                "lse.copy_(torch.logaddexp(lse, other_lse))",
                "lse.copy_(torch.logaddexp(lse.bfloat16(), other_lse.bfloat16()))",
            ),
        ),
    ),
    Mutant(
        name="ring_merges_swapped",
        bug=18,
        what="the outputs of two steps of a ring are merged with each other's weights",
        ranks=2,
        words=(*LLAMA, *CONTEXT_2),
        edits=(
            Edit(
                MERGE,
                "out.lerp_(other.to(out.dtype), share.unsqueeze(3))",
                "out.lerp_(other.to(out.dtype), 1 - share.unsqueeze(3))",
            ),
        ),
    ),
    Mutant(
        name="tied_gradients_not_summed",
        bug=31,
        what="the gradients of the two copies of a tied embedding are not summed",
        ranks=2,
        words=(*GPT, "parallel.pipeline=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/training/gradient_reduction.py",
                "            if state.stages is not None:\n",
                '            if state.stages is not None and state.bucket.name == "":\n',
            ),
        ),
    ),
    Mutant(
        name="keys_and_values_swapped",
        bug=32,
        what="gradients of keys and values are taken from a message in the wrong order",
        ranks=2,
        words=(*LLAMA, *CONTEXT_2),
        edits=(
            Edit(RING, "grad_k, grad_v = next_grad.wait().split(widths, dim=3)", "grad_v, grad_k = next_grad.wait().split(widths, dim=3)"),
        ),
        exact=False,
    ),
    Mutant(
        name="block_on_two_stages",
        bug=33,
        what="the last stage begins one block too early",
        ranks=3,
        words=(*LLAMA, "model.layers=4", "parallel.pipeline=3", "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/config/layout.py",
                "first = stage * base + max(0, min(stage - 1, remainder))",
                "first = stage * base + max(0, min(stage - 1, remainder) - (stage == self.stage_count - 1))",
            ),
        ),
    ),
    Mutant(
        name="rate_differs_by_stage",
        bug=34,
        what="the learning rate of later pipeline ranks is half",
        ranks=2,
        words=(*LLAMA, "parallel.pipeline=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/training/replicated_engine.py",
                "        self._update.begin(self._masters)\n",
                "        self._update.begin(self._masters)\n        self._update._rates *= 0.5 if mesh.coordinates.pipeline else 1.0\n",
            ),
        ),
    ),
    Mutant(
        name="slopes_of_first_heads",
        bug=43,
        what="every tensor rank uses the position slopes of the first heads",
        ranks=2,
        words=(*BLOOM, *TENSOR_2),
        edits=(
            Edit(
                "pipeline/parallel/collectives.py",
                "    return tensor.chunk(group.size())[group.rank()].contiguous()\n",
                "    return tensor.chunk(group.size())[0].contiguous()\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="fused_weights_in_other_order",
        bug=45,
        what="the weights of a fused projection are concatenated in reverse order",
        ranks=2,
        words=(*LLAMA, "model.kv_heads=4", *TENSOR_2, "training.activation_checkpointing=full"),
        edits=(
            Edit(TENSOR, "    joined = linears[0].joined\n", "    joined = None\n"),
            Edit(TENSOR, "return torch.cat(weights)", "return torch.cat(weights[::-1])"),
        ),
        exact=False,
    ),
)
