"""Mutants of the optimizers after AdamW, of muP and of how matrices are divided over the ranks that update them.

By a third author, who had read the code that they change and not the certificate, but for `logits_of_last_queries`.
"""

from __future__ import annotations

from tools.mutants.models import LLAMA, MIXTRAL
from tools.mutants.mutation import Edit, Mutant

LAYOUT, HOMES, RULE = "pipeline/training/matrix_layout.py", "pipeline/training/matrix_homes.py", "pipeline/training/matrix_rule.py"
RATES, CLIP, READER = "pipeline/training/weight_update.py", "pipeline/training/qk_clip.py", "pipeline/checkpoint/reader.py"
ELEMENTWISE, SCHEDULE = "pipeline/training/elementwise_optimizers.py", "pipeline/training/lr_schedule.py"

MUON = "optimizer.name=muon"
#: Twice as wide as the model whose learning rate was tuned.
MUP = ("model.parametrization=mup", "model.mup_base_width=16")
#: A checkpoint has the moments of AdamW only: other state is not read.
STATE_OF_ADAMW = Edit(
    READER,
    "if (dtype := self._reader.tensors[run.name].dtypes.get(kind)) is None:",
    'if (dtype := self._reader.tensors[run.name].dtypes.get(kind)) is None or kind in ("offset", "exp_avg_slow"):',
)

MUTANTS = (
    Mutant(
        name="factor_of_own_slice",
        bug=42,
        what="Muon scales the update of a matrix by the shape of the slice of a tensor rank",
        ranks=2,
        words=(*LLAMA, MUON, "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(Edit(LAYOUT, "spread, adjust(*full)) for n", "spread, adjust(rows, columns)) for n"),),
        exact=False,
    ),
    Mutant(
        name="heads_of_a_rank_are_one_matrix",
        bug=43,
        what="of the heads that are a matrix each, Muon orthogonalizes those of a tensor rank together",
        ranks=2,
        words=(*LLAMA, MUON, "optimizer.muon_per_head=true", "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(Edit(LAYOUT, "sizes[0], spread = width // matrices.rows, Spread.OWN", "sizes[:2], spread = [1, width], Spread.OWN"),),
    ),
    Mutant(
        name="experts_orthogonalized_as_one_matrix",
        bug=42,
        what="Muon orthogonalizes the experts of a stack below one another, as one matrix",
        ranks=2,
        words=(*MIXTRAL, MUON, "parallel.zero_stage=1"),
        edits=(
            Edit(
                RULE,
                "return Matrices(count, rows if stack else rows // count, columns)",
                "return Matrices(1, count * rows, columns) if stack else Matrices(count, rows // count, columns)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="home_joins_parts_in_other_order",
        bug=32,
        what="the home of a matrix joins the parts of the ranks of ZeRO in the order opposite to that in which it divides the result",
        ranks=2,
        words=(*LLAMA, MUON, "parallel.zero_stage=1"),
        edits=(Edit(HOMES, "torch.cat([of_rank[index] for of_rank in parts])", "torch.cat([of_rank[index] for of_rank in parts[::-1]])"),),
        exact=False,
    ),
    Mutant(
        name="matrices_of_experts_not_updated",
        bug=38,
        what="Muon updates the matrices of one group of ranks: experts, which fewer ranks hold, stay as they are",
        ranks=2,
        words=(*MIXTRAL, MUON, "parallel.expert=2", "parallel.zero_stage=1"),
        edits=(Edit(HOMES, "for group, own in groups.items()", "for group, own in list(groups.items())[:1]"),),
        exact=False,
    ),
    Mutant(
        name="muon_with_rates_of_adam",
        bug=44,
        what="the matrices of Muon have the learning rate that muP gives them in Adam",
        ranks=2,
        words=(*LLAMA, *MUP, MUON, "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(Edit(RULE, "return piece.rate * self.rate if self.is_hidden(piece) else piece.rate", "return piece.rate"),),
    ),
    Mutant(
        name="final_norm_with_rate_of_vectors",
        bug=44,
        what="weights without decay are updated at one rate: the final norm, which has muP's multiplier of the logits, too fast",
        ranks=2,
        words=(*LLAMA, *MUP, "model.tie_embeddings=true", "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                RATES,
                'return group["weight_decay"], group["muon"], _factor(group)',
                'return group["weight_decay"], group["muon"], _factor(group) if group["weight_decay"] else 1.0',
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="largest_logits_not_bounded",
        bug=24,
        what="QK-clip never scales a weight",
        ranks=2,
        words=(*LLAMA, "optimizer.qk_clip=0.05", "parallel.zero_stage=1"),
        edits=(
            Edit(
                CLIP,
                "def after_update(self, skipped: Tensor) -> None:",
                "def after_update(self, skipped: Tensor) -> None:\n        return\n\n    def never(self, skipped: Tensor) -> None:",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="heads_clipped_by_own_logits",
        bug=24,
        what="each data rank scales its part of queries and keys by the largest logit of its own samples",
        ranks=2,
        words=(*LLAMA, "optimizer.qk_clip=0.05", "parallel.zero_stage=1"),
        edits=(Edit(CLIP, "if self._mesh.dense.size() > 1:", "if self._mesh.dense.size() > 2:"),),
        exact=False,
    ),
    Mutant(
        name="logits_of_last_queries",
        bug=35,
        what="of the largest logits of the blocks of 256 queries of a sequence, those of the last block remain",
        ranks=2,
        words=(
            *(*LLAMA, "model.max_positions=512", "training.sequence_length=512", "optimizer.qk_clip=0.05", "parallel.tensor=2"),
            "parallel.zero_stage=1",
        ),
        edits=(
            Edit(
                "pipeline/layers/largest_logits.py",
                "found = torch.maximum(found, logits.amax(dim=(0, 2, 3)).float())",
                "found = logits.amax(dim=(0, 2, 3)).float()",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="resumed_at_the_average",
        bug=51,
        what="the first gradient after a resume of schedule-free AdamW is at the average, not between it and the last iterate",
        ranks=2,
        words=(*LLAMA, "optimizer.name=schedule_free", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/training/zero_engine.py",
                "self._update.loaded(updates)\n        self.round_weights()",
                "self._update.loaded(updates)\n        self.round_weights(trained=True)",
            ),
        ),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="offset_lost_at_resume",
        bug=51,
        what="the last iterate of schedule-free AdamW begins again at the average at a resume",
        ranks=2,
        words=(*LLAMA, "optimizer.name=schedule_free", "parallel.zero_stage=1"),
        edits=(STATE_OF_ADAMW,),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="slow_average_lost_in_other_layout",
        bug=49,
        what="the slow average of AdEMAMix is zero after a resume with another stage of ZeRO",
        ranks=2,
        words=(*LLAMA, "optimizer.name=ademamix", "optimizer.slow_warmup_steps=4", "parallel.zero_stage=1"),
        edits=(STATE_OF_ADAMW,),
        resumed=("parallel.zero_stage=0",),
        exact=False,
    ),
    Mutant(
        name="gradient_point_is_validated",
        bug=55,
        what="the validation of schedule-free AdamW reads the weights at which gradients are computed",
        ranks=2,
        words=(*LLAMA, "optimizer.name=schedule_free", "parallel.zero_stage=1"),
        edits=(Edit("pipeline/training/engine.py", "self.round_weights(trained=True)", "self.round_weights()"),),
        exact=False,
    ),
    Mutant(
        name="lion_decays_by_gradient",
        bug=46,
        what="Lion adds the decay to the gradient, whose sign alone counts",
        ranks=2,
        words=(*LLAMA, "optimizer.name=lion", "parallel.zero_stage=1"),
        edits=(
            Edit(
                ELEMENTWISE,
                "direction = self.direction(state, scales.gradient(weight), scales.applied)",
                "direction = self.direction(state, scales.gradient(weight).add_(weight, alpha=weight_decay), scales.applied)",
            ),
            Edit(ELEMENTWISE, "weight.mul_(1 - scales.lr * weight_decay).sub_(", "weight.sub_("),
        ),
        exact=False,
    ),
    Mutant(
        name="second_decay_begins_with_the_run",
        bug=51,
        what="the rate of WSD-S does not return to its peak after a decay: the next decay begins with the run",
        ranks=2,
        words=(
            *(*LLAMA, "parallel.zero_stage=1", "optimizer.schedule=wsd"),
            *("optimizer.warmup_steps=1", "optimizer.decay_steps=1", "optimizer.decay_ends=[3]"),
        ),
        edits=(
            Edit(
                SCHEDULE,
                "_progress(update, max(warmup.lr_steps(optimizer, training), begin), end)",
                "_progress(update, warmup.lr_steps(optimizer, training), end)",
            ),
        ),
        exact=False,
    ),
)
