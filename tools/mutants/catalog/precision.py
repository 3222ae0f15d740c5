"""Mutants of ZeRO, accumulation, precision and the optimizer."""

from __future__ import annotations

from tools.mutants.models import LLAMA
from tools.mutants.mutation import Edit, Mutant

REDUCTION, UPDATE = "pipeline/training/gradient_reduction.py", "pipeline/training/weight_update.py"
DECAYS = "decays=all(is_matrix(piece.name, piece.full_shape) for piece in held.values())"
DECAY = ("optimizer.weight_decay=1.0",)
FP8 = (
    *("model=llama-tiny", "model.layers=3", "model.hidden=32", "model.heads=4", "model.kv_heads=4", "model.ffn_hidden=64"),
    *("precision=bf16", "precision.fp8=tensorwise", "parallel.zero_stage=1"),
)

MUTANTS = (
    Mutant(
        name="later_contribution_lost",
        bug=35,
        what="only the first of several contributions to a gradient is kept",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1"),
        edits=(Edit(REDUCTION, "            total.add_(gradient)\n", "            pass\n"),),
    ),
    Mutant(
        name="gradients_not_zeroed",
        bug=36,
        what="the gradients of a step are added to those of the steps before",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=2"),
        edits=(
            Edit(REDUCTION, "        self.reduced = None\n        self._passes", "        self._passes"),
            Edit(
                REDUCTION,
                "        for state in self._states.values():\n            state.reduced = None\n",
                "        pass\n",
            ),
        ),
    ),
    Mutant(
        name="reduction_in_bf16",
        bug=37,
        what="gradients are rounded to bf16 before they are reduced",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=2"),
        edits=(
            Edit(
                REDUCTION,
                "        flat, bucket = state.complete(), state.bucket\n",
                "        flat, bucket = state.complete().bfloat16().float(), state.bucket\n",
            ),
        ),
    ),
    Mutant(
        name="large_gradients_skipped",
        bug=38,
        what="steps with a gradient norm above 0.5 change nothing",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", "training.max_skipped_steps=100"),
        edits=(
            Edit(
                "pipeline/training/gradient_clipping.py",
                "(~gradient_norm.isfinite()).float()",
                "(~gradient_norm.isfinite() | (gradient_norm > 0.5)).float()",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="reduced_before_last_gradient",
        bug=39,
        what="the last gradient of a bucket arrives after its reduction has begun",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=2"),
        edits=(
            Edit(
                REDUCTION,
                "parameter).copy_(gradient)\n",
                "parameter).copy_(gradient if self.missing > 1 else torch.zeros_like(gradient))\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="stale_fp8_scale",
        bug=40,
        what="inputs of fp8 products are cut off at the maximum of the first micro-batch",
        ranks=1,
        words=FP8,
        edits=(
            Edit(
                "pipeline/parallel/float8.py",
                "        module_filter_fn=lambda module, _: module in chosen,\n    )\n",
                "        module_filter_fn=lambda module, _: module in chosen,\n    )\n"
                "    largest: dict[nn.Module, torch.Tensor] = {}\n\n"
                "    def cut(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:\n"
                "        most = largest.setdefault(module, args[0].detach().abs().amax())\n"
                "        return (args[0].clamp(-most, most), *args[1:])\n\n"
                "    for module in stage.modules():\n"
                '        if type(module).__name__ == "Float8Linear":\n'
                "            module.register_forward_pre_hook(cut)\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="frozen_weights_updated",
        bug=41,
        what="training.frozen has no effect",
        ranks=1,
        words=(*LLAMA, "parallel.zero_stage=0", "training.frozen=[blocks.0.mlp.*]"),
        edits=(
            Edit(
                "pipeline/parallel/parallelize.py",
                "if parameter.requires_grad and trained.is_frozen(config, piece.name):",
                'if parameter.requires_grad and piece.name == "" and trained.is_frozen(config, piece.name):',
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="decay_by_shape_of_piece",
        bug=42,
        what="which matrices decay is decided from the shape of the rank's piece",
        ranks=2,
        words=(*LLAMA, "model.ffn_hidden=32", "model.kv_heads=4", "parallel.tensor=2", "parallel.zero_stage=0", *DECAY),
        edits=(
            Edit(
                "pipeline/training/buckets.py",
                DECAYS,
                "decays=all(len(piece.shape) >= 2 and piece.shape[0] >= 32 for piece in held.values())",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="rate_of_other_weights",
        bug=44,
        what="matrices of experts and embeddings are updated with half of the learning rate: a rule for another kind of weight",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1"),
        edits=(
            Edit(
                UPDATE,
                "        self.optimizer.step()\n        self.optimizer.param_groups = groups\n",
                "        before = self._masters[0].detach().clone()\n"
                "        self.optimizer.step()\n"
                "        self._masters[0].lerp_(before, 0.5)\n"
                "        self.optimizer.param_groups = groups\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="norms_decay",
        bug=46,
        what="norms and biases decay, too",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", *DECAY),
        edits=(Edit("pipeline/training/buckets.py", DECAYS, "decays=True"),),
    ),
    Mutant(
        name="nothing_decays",
        bug=46,
        what="under ZeRO, no weight decays",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", *DECAY),
        edits=(Edit("pipeline/training/zero_engine.py", "decay if b.decays else 0.0", "0.0"),),
    ),
)
