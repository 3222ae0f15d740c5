"""Mutants of mixtures of experts."""

from __future__ import annotations

from tools.mutants.models import DEEPSEEK, MIXTRAL
from tools.mutants.mutation import Edit, Mutant

MUTANTS = (
    Mutant(
        name="router_not_summed",
        bug=26,
        what="without sequence parallelism, the gradient of the router is that of the rank's part of the experts",
        ranks=2,
        words=(*MIXTRAL, "parallel.tensor=2", "parallel.zero_stage=0", "parallel.sequence_parallel=false"),
        edits=(
            Edit(
                "pipeline/models/tensor_parallel_roles.py",
                "for name, ends in _ENDS.items() for end in ends}",
                "for name, ends in _ENDS.items() for end in ends} | {'router.weight': 'replicate'}",
            ),
        ),
    ),
    Mutant(
        name="expert_gradients_too_large",
        bug=27,
        what="gradients of experts are divided by the ranks that hold them, not by all ranks with other samples",
        ranks=2,
        words=(*MIXTRAL, "parallel.expert=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/training/gradient_reduction.py",
                "self.replicas = mesh.data.size() * mesh.layout.expert",
                "self.replicas = bucket.group.size()",
            ),
        ),
    ),
    Mutant(
        name="auxiliary_loss_on_every_rank",
        bug=29,
        what="every tensor rank adds the full auxiliary loss",
        ranks=2,
        words=(*MIXTRAL, "parallel.tensor=2", "parallel.zero_stage=0", "training.balance_loss=0.1"),
        edits=(
            Edit(
                "pipeline/parallel/pipeline_schedules.py",
                "self._aux_loss_scale = 1 / (micro_batches * layout.tensor)",
                "self._aux_loss_scale = 1 / micro_batches",
            ),
        ),
    ),
    Mutant(
        name="router_bias_not_updated",
        bug=30,
        what="the biases of the routers stay as they are",
        ranks=2,
        words=(*DEEPSEEK, "parallel.expert=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/training/router_statistics.py",
                "            if bias is not None and self._updates:\n",
                "            if bias is not None and not self._updates:\n",
            ),
        ),
    ),
    Mutant(
        name="router_bias_from_own_load",
        bug=30,
        what="every data rank updates the biases of the routers from its own load: the copies drift apart",
        ranks=2,
        words=(*DEEPSEEK, "parallel.zero_stage=0", "training.bias_update_speed=0.05"),
        edits=(
            Edit(
                "pipeline/training/router_statistics.py",
                "        if self._mesh.dense.size() > 1:\n            dist.all_reduce(records, group=self._mesh.dense)\n",
                "",
            ),
        ),
        exact=False,
    ),
)
