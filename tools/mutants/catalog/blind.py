"""Mutants whose author had not seen the certificate: siblings of public bugs in losses, parallel axes, norms and stages."""

from __future__ import annotations

from tools.mutants.models import BERT, BLOOM, DEEPSEEK, GPT, LLAMA, MIXTRAL
from tools.mutants.mutation import Edit, Mutant

TRAINER, SCHEDULES = "pipeline/training/trainer.py", "pipeline/parallel/pipeline_schedules.py"
TENSOR, RING = "pipeline/parallel/tensor_parallel.py", "pipeline/parallel/ring_layout.py"
UPDATE = "pipeline/training/weight_update.py"
ZERO = "pipeline/training/zero_engine.py"
PADDED = ("data.packing=best_fit", "data.tokens={padded}", "training.sequence_length=64")
NEXT_SENTENCE = ("model.vocab_size=520", "model.next_sentence=true", "data.tokens={masked}", "tokenizer.path={masked_tokenizer}")
FOUR_LAYERS = ("model.layers=4", "parallel.pipeline=2", "parallel.zero_stage=0")
OLMO = ("model=olmo2-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=48")
MISTRAL = ("model=mistral-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=48")
T5 = (
    *("model=t5-tiny", "model.hidden=32", "model.heads=4", "model.head_width=8", "model.ffn_hidden=48"),
    *("model.vocab_size=640", "data.tokens={t5}", "tokenizer.path={t5_tokenizer}"),
)

LOSS = (
    Mutant(
        name="next_sentence_times_tensor_ranks",
        bug=8,
        what="every tensor rank contributes the full gradient of the next-sentence loss to the encoder",
        ranks=2,
        words=(*BERT, *NEXT_SENTENCE, "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                TENSOR,
                "            module.register_forward_hook(lambda _, args, output: collectives.scale_gradient(output, group))"
                "  # noqa: ARG005 - hook's signature\n",
                "",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="further_tokens_scaled_as_the_next",
        bug=3,
        what="the loss of a further token is divided by the number of targets of the next token",
        ranks=2,
        words=(*DEEPSEEK, *PADDED, "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/layers/multi_token.py",
                "            total = total + self.output(hidden, labels)\n",
                "            total = total + self.output(hidden, labels, loss_scale)\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="loss_of_last_micro_batch_displayed",
        bug=5,
        what="the displayed loss is that of the last micro-batch",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=2"),
        edits=(
            Edit(
                SCHEDULES,
                "        return stacked.sum() if reduced else stacked\n",
                "        return stacked[-1] * self.micro_batches if reduced else stacked\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="counts_of_first_batch",
        bug=6,
        what="the targets of the first batch are counted, and the counts are used for all batches",
        ranks=2,
        words=(*LLAMA, *PADDED, "parallel.zero_stage=2"),
        edits=(
            Edit(
                TRAINER,
                "        return _with_scale(batch, self._counts(batch))\n",
                "        if self._first_counts is None:\n"
                "            self._first_counts = self._counts(batch)\n"
                "        return _with_scale(batch, self._first_counts)\n",
            ),
            Edit(
                TRAINER,
                "        self._loss_weights: dict[str, float] = {}\n",
                "        self._loss_weights: dict[str, float] = {}\n        self._first_counts: Tensor | None = None\n",
            ),
        ),
        exact=False,
    ),
)

PARALLEL = (
    Mutant(
        name="columns_of_experts_reduced_again",
        bug=13,
        what="the gradient of columns that all tensor ranks have gathered is summed over these ranks",
        ranks=4,
        words=(*MIXTRAL, "parallel.tensor=2", "parallel.expert=2", "parallel.sequence_parallel=false", "parallel.zero_stage=0"),
        edits=(Edit(TENSOR, "if sequence else collectives.replicate_columns\n", "if sequence else collectives.gather_columns\n"),),
        exact=False,
    ),
    Mutant(
        name="mean_square_without_gradient_of_other_ranks",
        bug=10,
        what="the backward pass of a norm over all heads sees the rank's own part of the mean square",
        ranks=2,
        words=(*OLMO, "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                TENSOR,
                "collectives.all_reduce_with_grad(wide.square().sum(dim=-1, keepdim=True), self.group)",
                "collectives.reduce(wide.square().sum(dim=-1, keepdim=True), self.group)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="positions_from_zero_on_every_rank",
        bug=12,
        what="under sequence parallelism, every rank's part of a sequence begins at position 0",
        ranks=2,
        words=(*GPT, "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                TENSOR,
                "        positions = torch.arange(tokens.shape[1], device=tokens.device)\n",
                "        positions = torch.arange(tokens.shape[1] // group.size(), device=tokens.device).repeat(group.size())\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="ring_with_documents_of_own_keys",
        bug=17,
        what="the keys of another rank are masked with the documents of the rank's own keys",
        ranks=2,
        words=(*LLAMA, "training.document_mask=true", "training.sequence_length=64", "parallel.context=2", "parallel.zero_stage=0"),
        edits=(Edit(RING, "documents[source][:, blocks[1]]", "documents[rank][:, blocks[1]]"),),
        exact=False,
    ),
    Mutant(
        name="ring_skips_chunks_within_window",
        bug=17,
        what="a step of the ring is left out if the farthest key of the neighboring chunk is outside the window",
        ranks=2,
        words=(*MISTRAL, "model.window=3", "parallel.context=2", "parallel.zero_stage=0"),
        edits=(Edit(RING, "(abs(rank - source) - 1) * half + 1", "abs(rank - source) * half"),),
        exact=False,
    ),
    Mutant(
        name="ulysses_with_slopes_of_first_rank",
        bug=18,
        what="every context rank uses the position slopes of the first rank's heads",
        ranks=2,
        words=(*BLOOM, "parallel.context=2", "parallel.context_kind=ulysses", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/parallel/context_parallel.py",
                "mask.slopes.chunk(self.group.size())[self.group.rank()]",
                "mask.slopes.chunk(self.group.size())[0]",
            ),
        ),
        exact=False,
    ),
)

NORM = (
    Mutant(
        name="every_stage_clips_by_its_own_norm",
        bug=24,
        what="the squares of a norm are not summed over the pipeline stages",
        ranks=2,
        words=(*LLAMA, "parallel.pipeline=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/training/replicated_engine.py",
                "(self._mesh.tensor, self._mesh.expert, self._mesh.pipeline)",
                "(self._mesh.tensor, self._mesh.expert)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="clips_the_scaled_norm",
        bug=23,
        what="in fp16, the norm that decides about clipping still has the loss scale",
        ranks=2,
        words=(*LLAMA, "precision=fp16", "parallel.zero_stage=1"),
        edits=(
            Edit(
                UPDATE,
                "gradient_clipping.divisor(norm, self._clipping, loss_scale)",
                "gradient_clipping.divisor(norm if loss_scale is None else norm * loss_scale, self._clipping, loss_scale)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="partitions_of_other_expert_ranks_not_counted",
        bug=21,
        what="under ZeRO, the partitions of dense weights on expert ranks after the first do not count in the norm",
        ranks=2,
        words=(*MIXTRAL, "parallel.expert=2", "parallel.zero_stage=2"),
        edits=(
            Edit(ZERO, "is_primary_copy(bucket.pieces[parameter], mesh, sharded=True)", "is_primary_copy(bucket.pieces[parameter], mesh)"),
        ),
        exact=False,
    ),
)

EXPERTS = (
    Mutant(
        name="balance_of_own_chunk",
        bug=29,
        what="under context parallelism, the balance loss covers the rank's part of each sequence",
        ranks=2,
        words=(*MIXTRAL, "training.balance_loss=0.1", "parallel.context=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/parallel/expert_parallel.py",
                "        if mesh.layout.context > 1:\n"
                "            moe.reduce_sums = partial(collectives.all_reduce_with_grad, group=mesh.context)\n",
                "",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="router_learns_from_balance_only",
        bug=26,
        what="the weights of the experts' outputs pass no gradient to the router",
        ranks=2,
        words=(*MIXTRAL, "parallel.expert=2", "parallel.zero_stage=1"),
        edits=(Edit("pipeline/layers/router.py", "weights = scores.gather(1, experts)", "weights = scores.detach().gather(1, experts)"),),
        exact=False,
    ),
    Mutant(
        name="balance_loss_of_every_micro_batch",
        bug=29,
        what="the balance losses of micro-batches are summed, not averaged",
        ranks=2,
        words=(*MIXTRAL, "training.balance_loss=0.1", "parallel.zero_stage=3"),
        edits=(Edit(SCHEDULES, "self._aux_loss_scale = 1 / (micro_batches * layout.tensor)", "self._aux_loss_scale = 1 / layout.tensor"),),
        exact=False,
    ),
)

PIPELINE = (
    Mutant(
        name="loss_weights_of_first_stage_only",
        bug=34,
        what="only the first of a rank's stages gets the configured weight of the balance loss",
        ranks=2,
        words=(*MIXTRAL, *FOUR_LAYERS, "training.balance_loss=0.5", "parallel.schedule=interleaved"),
        edits=(
            Edit(
                TRAINER,
                "            for stage in self.model.stage_modules():\n                stage.set_loss_weights",
                "            for stage in [next(self.model.stage_modules())]:\n                stage.set_loss_weights",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="position_biases_not_summed_over_stages",
        bug=31,
        what="the gradients of T5's position biases, which all stages hold, are not summed over the stages",
        ranks=2,
        words=(*T5, *FOUR_LAYERS),
        edits=(Edit("pipeline/training/gradient_reduction.py", '"pipeline": mesh.pipeline}[kind]', '"pipeline": None}[kind]'),),
        exact=False,
    ),
    Mutant(
        name="seed_of_stage",
        bug=31,
        what="every pipeline stage draws its initial weights with its own seed, also the copy of a tied embedding",
        ranks=2,
        words=(*GPT, "parallel.pipeline=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/parallel/parallelize.py",
                "        return init_piece(piece, std, config.training.seed, dtype=dtype, device=device)\n",
                "        seed = config.training.seed + 100 * int(next(iter(model.stages)))\n"
                "        return init_piece(piece, std, seed, dtype=dtype, device=device)\n",
            ),
        ),
        exact=False,
    ),
)

MUTANTS = (*LOSS, *PARALLEL, *NORM, *EXPERTS, *PIPELINE)
