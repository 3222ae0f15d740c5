"""Mutants of attention sinks, windows, soft caps and linear attention, of routers, and of goldfish, diffusion and z-loss.

By the author of recent.py, with the certificate known for `state_not_decayed_between_chunks` and `keys_on_both_sides_share_buckets`.
"""

from __future__ import annotations

from tools.mutants.models import GEMMA2, GPT_OSS, LLAMA, MODERNBERT, OLMOE, QWEN3_NEXT
from tools.mutants.mutation import Edit, Mutant

PARTIAL, LINEAR = "pipeline/layers/partial_attention.py", "pipeline/parallel/context_parallel.py"
CAUSAL, GOLDFISH = "pipeline/data/load/objectives/causal.py", "pipeline/data/load/objectives/causal.py"
#: Of all weights, the gradient of the sinks of a tiny model is 1e-3.
ALL_BUT_SINKS = (
    *("embed.*", "head.*", "norm.*", "blocks.*.attention_norm.*", "blocks.*.mlp_norm.*", "blocks.*.mlp.*"),
    *(f"blocks.*.attention.{name}.*" for name in ("query", "key", "value", "output")),
)
MASKED = ("data.tokens={masked}", "tokenizer.path={masked_tokenizer}", "model.vocab_size=520")

MUTANTS = (
    Mutant(
        name="z_loss_of_local_vocabulary",
        bug=2,
        what="the z-loss reads the log-sum-exp of the logits of a tensor rank",
        ranks=2,
        words=(*LLAMA, "training.head_z_loss=0.01", "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/layers/loss.py",
                "1 + 2 * z_loss * (sums[0].log() + largest.squeeze(1))",
                "1 + 2 * z_loss * (exponentials.sum(dim=1).log() + largest.squeeze(1))",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="validation_drops_targets",
        bug=55,
        what="the goldfish loss drops targets of the validation, too",
        ranks=2,
        words=(*LLAMA, "training.goldfish_k=4", "training.goldfish_context=4", "parallel.zero_stage=1"),
        edits=(
            Edit(
                CAUSAL,
                'return cls(samples, document_mask=config.training.document_mask, padded=config.data.packing == "best_fit")',
                'objective = cls(samples, document_mask=config.training.document_mask, padded=config.data.packing == "best_fit")\n'
                "        objective._goldfish = (config.training.goldfish_k, config.training.goldfish_context)\n"
                "        return objective",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="goldfish_hashes_the_row",
        bug=54,
        what="which targets the goldfish loss drops depends on the place of a sample in the share of its rank",
        ranks=2,
        words=(*LLAMA, "training.goldfish_k=4", "training.goldfish_context=4", "parallel.zero_stage=1"),
        edits=(Edit(GOLDFISH, "sums = np.zeros_like(words)", "sums = np.zeros_like(words) + np.arange(rows, dtype=np.uint64)[:, None]"),),
        exact=False,
    ),
    Mutant(
        name="diffusion_divided_by_masked_tokens",
        bug=8,
        what="the loss of masked diffusion is divided by the number of masked tokens, not by that of all tokens",
        ranks=2,
        words=(*MODERNBERT, *MASKED, "training.objective=masked_diffusion", "parallel.zero_stage=1"),
        edits=(Edit("pipeline/training/trainer.py", 'return batch["loss_weights"] > 0', 'return batch["targets"] != IGNORE'),),
        exact=False,
    ),
    Mutant(
        name="window_on_one_side",
        bug=12,
        what="the window of an encoder bounds the tokens before a query, not those after it",
        ranks=2,
        words=(*MODERNBERT, *MASKED, "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(Edit("pipeline/layers/mask.py", "allowed & (distance.abs() < window)", "allowed & (distance < window)"),),
        exact=False,
    ),
    Mutant(
        name="keys_on_both_sides_share_buckets",
        bug=12,
        what="the position biases of T5's encoder do not tell the keys before a query from those after it",
        ranks=2,
        words=(
            *("model=t5-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn_hidden=64", "model.vocab_size=640"),
            *("data.tokens={t5}", "tokenizer.path={t5_tokenizer}", "parallel.tensor=2", "parallel.zero_stage=1"),
        ),
        edits=(
            Edit(
                "pipeline/layers/position_bias.py",
                "first, distance = count * (offsets > 0), offsets.abs()",
                "first, distance = torch.zeros_like(offsets), offsets.abs()",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="sinks_missing_in_backward_of_ring",
        bug=17,
        what="the backward pass of ring attention has the probabilities without the sinks",
        ranks=2,
        words=(*GPT_OSS, "parallel.context=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                PARTIAL,
                "return with_sinks(out, lse, sinks), torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))",
                "return with_sinks(out, lse, sinks), lse",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="sinks_of_first_heads",
        bug=18,
        what="with Ulysses, every context rank has the sinks of the first heads",
        ranks=2,
        words=(*GPT_OSS, "parallel.context=2", "parallel.context_kind=ulysses", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/parallel/context_parallel.py",
                "sinks.chunk(self.group.size())[self.group.rank()]",
                "sinks.chunk(self.group.size())[0]",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="sinks_of_first_rank_in_norm",
        bug=56,
        what="of the attention sinks, which are divided over the tensor ranks, the norm has those of the first rank",
        ranks=2,
        words=(*GPT_OSS, f"training.frozen=[{','.join(ALL_BUT_SINKS)}]", "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/training/zero_engine.py",
                "if bucket.replica == 0 and is_primary_copy(bucket.pieces[parameter], mesh, sharded=True)",
                "if bucket.replica == 0\n"
                "            and is_primary_copy(bucket.pieces[parameter], mesh, sharded=True)\n"
                '            and not (bucket.pieces[parameter].name.endswith("sinks") and mesh.coordinates.tensor)',
            ),
        ),
    ),
    Mutant(
        name="slope_of_soft_cap_missing_in_ring",
        bug=17,
        what="the backward pass of ring attention has no derivative of the soft cap of the scores",
        ranks=2,
        words=(*GEMMA2, "parallel.context=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                PARTIAL,
                "factor = scale if mask.softcap is None else scale * _cap_slope(scores, mask.softcap)",
                "factor: float | Tensor = scale",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="scores_not_capped",
        bug=17,
        what="attention has no soft cap of its scores",
        ranks=2,
        words=(*GEMMA2, "parallel.zero_stage=1"),
        edits=(Edit("pipeline/layers/mask.py", "return capped(scores, self.softcap)", "return scores"),),
        exact=False,
    ),
    Mutant(
        name="logits_not_capped",
        bug=17,
        what="the loss and the head have no soft cap of the logits",
        ranks=2,
        words=(*GEMMA2, "model.final_logit_softcapping=1.0", "parallel.zero_stage=1"),
        edits=(Edit("pipeline/models/families/gemma2.py", '"softcap": config.final_logit_softcapping', '"softcap": None'),),
        exact=False,
    ),
    Mutant(
        name="gate_clamped_at_twice_the_bound",
        bug=17,
        what="the gate of a clamped SwiGLU has twice the bound of what it multiplies",
        ranks=2,
        words=(*GPT_OSS, "model.swiglu_limit=0.2", "parallel.zero_stage=1"),
        edits=(Edit("pipeline/layers/mlp.py", "gate = gate.clamp(max=self.limit)", "gate = gate.clamp(max=2 * self.limit)"),),
        exact=False,
    ),
    Mutant(
        name="state_enters_the_next_document",
        bug=28,
        what="a document that begins with a part of a context rank begins with the state of linear attention of the one before",
        ranks=2,
        words=(*QWEN3_NEXT, "data.tokens={padded}", "training.document_mask=true", "parallel.context=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                LINEAR,
                "segment_before=None if segments is None else segments[:, self.kernel - 1],",
                "segment_before=None if segments is None else segments[:, self.kernel],",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="parts_of_sequence_in_order_of_ranks",
        bug=32,
        what="linear attention composes the maps of the parts in the order of the ranks, not in that of the ring's parts",
        ranks=2,
        words=(*QWEN3_NEXT, "parallel.context=2", "parallel.zero_stage=1"),
        edits=(Edit(LINEAR, "torch.cat([gathered[:, :, 0], gathered[:, :, 1].flip(1)], dim=1)", "gathered.flatten(1, 2)"),),
        exact=False,
    ),
    Mutant(
        name="state_not_decayed_between_chunks",
        bug=18,
        what="the state of linear attention passes from chunk to chunk of 64 tokens without the decay over a chunk",
        ranks=2,
        words=(*QWEN3_NEXT, "model.max_positions=256", "training.sequence_length=256", "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(Edit("pipeline/layers/delta_rule.py", "state = state * across + k_to_end", "state = state + k_to_end"),),
        exact=False,
    ),
    Mutant(
        name="weights_of_router_normalized",
        bug=30,
        what="the weights of the selected experts are normalized in a model that does not normalize them",
        ranks=2,
        words=(*OLMOE, "parallel.zero_stage=1"),
        edits=(Edit("pipeline/layers/router.py", "if self.normalize:", "if self.top_k > 1:"),),
        exact=False,
    ),
)
