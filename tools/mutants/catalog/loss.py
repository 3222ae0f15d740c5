"""Mutants of the loss and its normalization."""

from __future__ import annotations

from tools.mutants.models import DEEPSEEK, LLAMA, TRANSFORMER
from tools.mutants.mutation import Edit, Mutant

TRAINER, TENSOR, REDUCTION = (
    "pipeline/training/trainer.py",
    "pipeline/parallel/tensor_parallel.py",
    "pipeline/training/gradient_reduction.py",
)
#: Packed documents end with padding, which has no targets: counts of targets differ by rank.
PADDED = ("data.packing=best_fit", "data.tokens={padded}", "training.sequence_length=64")

MUTANTS = (
    Mutant(
        name="smoothing_over_local_vocabulary",
        bug=1,
        what="label smoothing spreads over the rank's rows of the output matrix",
        ranks=2,
        words=(
            *(*TRANSFORMER, "model.vocab_size=520", "model.label_smoothing=0.1", "parallel.tensor=2", "parallel.zero_stage=0"),
            *("data.pairs.train=[{pairs}]", "tokenizer.path={masked_tokenizer}"),
        ),
        edits=(Edit(TENSOR, "            vocabulary=self.vocabulary,\n", "            vocabulary=self.weight.shape[0],\n"),),
    ),
    Mutant(
        name="loss_plus_log_of_ranks",
        bug=2,
        what="the loss is too large by log(tensor ranks); gradients are right",
        ranks=2,
        words=(*LLAMA, "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                TENSOR,
                "        return loss * mean_factor(targets, loss_scale)\n\n    def _gather_logits",
                "        loss = loss + torch.tensor(float(self.group.size())).log()\n"
                "        return loss * mean_factor(targets, loss_scale)\n\n    def _gather_logits",
            ),
        ),
    ),
    Mutant(
        name="mtp_loss_over_all_positions",
        bug=3,
        what="under tensor parallelism, the loss of a further token is divided by all positions",
        ranks=2,
        words=(*DEEPSEEK, "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                TENSOR,
                "        return loss * mean_factor(targets, loss_scale)\n\n    def _gather_logits",
                "        return loss if loss_scale is None else loss * loss_scale[0]\n\n    def _gather_logits",
            ),
        ),
    ),
    Mutant(
        name="targets_of_own_rank",
        bug=3,
        what="every data rank divides by its own number of targets",
        ranks=2,
        words=(*LLAMA, *PADDED, "parallel.zero_stage=0"),
        edits=(
            Edit(
                TRAINER,
                "        if self.mesh.dense.size() > 1:\n            dist.all_reduce(counts, group=self.mesh.dense)\n",
                "",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="gradient_times_context_ranks",
        bug=4,
        what="gradients are summed over the context ranks, not averaged",
        ranks=2,
        words=(*LLAMA, "parallel.context=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                REDUCTION,
                "self.replicas = mesh.data.size() * mesh.layout.expert",
                "self.replicas = mesh.layout.data * mesh.layout.expert",
            ),
        ),
    ),
    Mutant(
        name="displayed_loss_over_context_ranks",
        bug=5,
        what="the displayed loss is divided by the context ranks twice",
        ranks=2,
        words=(*LLAMA, "parallel.context=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                TRAINER,
                "shares = self.mesh.layout.batch_shards * self.mesh.layout.context",
                "shares = self.mesh.layout.batch_shards * self.mesh.layout.context**2",
            ),
        ),
    ),
    Mutant(
        name="cached_mask_grows",
        bug=6,
        what="the mask of padding is kept and changed in place: more targets are ignored in every batch",
        ranks=1,
        words=(*LLAMA, *PADDED, "data.prefetch=1", "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/data/load/objectives/causal.py",
                '            arrays["targets"] = np.where(padding,',
                '            padding = self._kept = padding | getattr(self, "_kept", False)\n'
                '            arrays["targets"] = np.where(padding,',
            ),
        ),
    ),
    Mutant(
        name="last_micro_batch_not_reduced",
        bug=7,
        what="under ZeRO 2, the gradient of the last micro-batch is left out",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=2"),
        edits=(
            Edit(
                REDUCTION,
                "            state.reduced = result if state.reduced is None else state.reduced.add_(result)\n",
                "            if state.reduced is None or state.remaining > 1:\n"
                "                state.reduced = result if state.reduced is None else state.reduced.add_(result)\n",
            ),
        ),
    ),
    Mutant(
        name="loss_scale_of_own_data_rank",
        bug=8,
        what="targets are counted over the context ranks, not over the data ranks",
        ranks=4,
        words=(*LLAMA, *PADDED, "parallel.context=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                TRAINER,
                "            dist.all_reduce(counts, group=self.mesh.dense)\n",
                "            dist.all_reduce(counts, group=self.mesh.context)\n",
            ),
        ),
    ),
)
