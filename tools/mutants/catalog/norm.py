"""Mutants of the gradient norm and of clipping."""

from __future__ import annotations

from tools.mutants.models import GPT, LLAMA, MIXTRAL
from tools.mutants.mutation import Edit, Mutant

BUCKETS, REPLICATED, ZERO = "pipeline/training/buckets.py", "pipeline/training/replicated_engine.py", "pipeline/training/zero_engine.py"
MODEL = "model = (self._mesh.tensor, self._mesh.expert, self._mesh.pipeline)"
PRIMARY = "all(piece.is_sliced_along(axis) or coordinate == 0 for axis, coordinate in axes.items())"

MUTANTS = (
    Mutant(
        name="replicated_counted_as_sharded",
        bug=19,
        what="replicated weights count in the norm on every tensor rank",
        ranks=2,
        words=(*LLAMA, "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                REPLICATED,
                "if p.grad is not None and is_primary_copy(piece, self._mesh)]",
                'if p.grad is not None and (is_primary_copy(piece, self._mesh) or not piece.is_sliced_along("tensor"))]',
            ),
        ),
    ),
    Mutant(
        name="squares_summed_over_tensor_twice",
        bug=20,
        what="under ZeRO, the squares are summed over the tensor ranks twice",
        ranks=4,
        words=(*LLAMA, "parallel.tensor=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                ZERO,
                "gradient_clipping.global_norm(primary, self._mesh.all_ranks, self._mesh.device)",
                "gradient_clipping.global_norm(primary, (*self._mesh.all_ranks, self._mesh.tensor), self._mesh.device)",
            ),
        ),
    ),
    Mutant(
        name="experts_of_own_rank",
        bug=21,
        what="the norm counts the experts of the rank only",
        ranks=2,
        words=(*MIXTRAL, "parallel.expert=2", "parallel.zero_stage=0"),
        edits=(Edit(REPLICATED, MODEL, "model = (self._mesh.tensor, self._mesh.pipeline)"),),
    ),
    Mutant(
        name="tied_embedding_counted_twice",
        bug=22,
        what="both copies of a tied embedding count in the norm",
        ranks=2,
        words=(*GPT, "parallel.pipeline=2", "parallel.zero_stage=1"),
        edits=(Edit(BUCKETS, f"return not piece.copy and {PRIMARY}", f"return {PRIMARY}"),),
    ),
    Mutant(
        name="norm_over_replicas",
        bug=23,
        what="the squares are also summed over the data ranks",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=0"),
        edits=(Edit(REPLICATED, MODEL, "model = (self._mesh.tensor, self._mesh.expert, self._mesh.pipeline, self._mesh.data)"),),
    ),
    Mutant(
        name="clipping_on_some_copies",
        bug=24,
        what="replicated weights are clipped on the first tensor rank only: their copies drift apart",
        ranks=2,
        words=(*LLAMA, "parallel.tensor=2", "parallel.zero_stage=0", "optimizer.gradient_clipping=0.3"),
        edits=(
            Edit(
                REPLICATED,
                "        result = self._update.step(norm,",
                "        clipping = gradient_clipping.divisor(norm, self._update._clipping)\n"
                "        for p, piece in self.model.pieces.items():\n"
                '            if self._mesh.coordinates.tensor > 0 and not piece.is_sliced_along("tensor"):\n'
                "                p.grad.mul_(clipping)\n"
                "        result = self._update.step(norm,",
            ),
        ),
    ),
    Mutant(
        name="sharded_vectors_on_first_rank",
        bug=25,
        what="sharded vectors count in the norm on the first tensor rank only",
        ranks=2,
        words=(*GPT, "parallel.tensor=2", "parallel.zero_stage=0"),
        edits=(
            Edit(
                BUCKETS,
                "all(piece.is_sliced_along(axis) or coordinate == 0",
                "all((piece.is_sliced_along(axis) and len(piece.full_shape) > 1) or coordinate == 0",
            ),
        ),
        exact=False,
    ),
)
