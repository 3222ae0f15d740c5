"""Mutants of ZeRO, accumulation, precision, optimizers, checkpoints, resuming, and of the data that a run reads."""

from __future__ import annotations

from collections.abc import Iterator

from tools.mutants.models import BERT, DEEPSEEK, LLAMA
from tools.mutants.mutation import Edit, mutant

DATA, ZERO_1, ZERO_2 = (f" parallel.zero_stage={stage}" for stage in range(3))
PACKED = " data.packing=best_fit data.tokens={padded} training.sequence_length=64"
FP8 = f"{LLAMA} model.layers=4 precision=fp8{ZERO_1}"
MUON = " optimizer.name=muon"


@mutant(35, LLAMA + ZERO_1, exact=True)
def later_contribution_lost() -> Iterator[Edit]:
    """Only the first of several contributions to a gradient is kept."""
    yield Edit("_State.add", "T.add_(G)", "pass")


@mutant(36, LLAMA + ZERO_2, exact=True)
def gradients_not_zeroed() -> Iterator[Edit]:
    """The gradients of a step are added to those of the steps before."""
    yield Edit("_State.start", "self.reduced = None", "pass")
    yield Edit("GradientReducer.release", "for S in self._states.values():\n    S.reduced = None", "pass")


@mutant(37, f"{LLAMA} precision=bf16{ZERO_1}")
def gradients_accumulate_in_bf16() -> Iterator[Edit]:
    """The gradients of micro-batches are added in the dtype of the weights."""
    yield Edit("_State.add", "T.add_(G)", "T.copy_(T.to(G.dtype) + G)")


@mutant(
    37, f"{LLAMA} model.max_positions=512 training.sequence_length=512 training.global_batch_size=4 training.micro_batch_size=1{ZERO_1}"
)
def positions_rounded_beyond_256() -> Iterator[Edit]:
    """Rotary tables are computed from positions in bf16, which has not all integers above 256."""
    yield Edit("Rotary.compute_buffers", "torch.arange(N, ..., dtype=torch.float32)", "torch.arange(N, ..., dtype=torch.bfloat16).float()")


@mutant(38, f"{LLAMA} training.max_skipped_steps=100{ZERO_1}")
def large_gradients_skipped() -> Iterator[Edit]:
    """Steps with a gradient norm above 0.5 change nothing."""
    yield Edit("is_skipped", "~N.isfinite()", "~N.isfinite() | (N > 0.5)")


@mutant(39, LLAMA + ZERO_2)
def reduced_before_last_gradient() -> Iterator[Edit]:
    """The last gradient of a bucket arrives after its reduction has begun."""
    yield Edit("_State.add", "V.copy_(G)", "V.copy_(G if self.missing > 1 else torch.zeros_like(G))")


@mutant(40, FP8)
def last_blocks_in_fp8() -> Iterator[Edit]:
    """The key precision.fp8_exclude_layers excludes the first blocks of the model only: the last ones multiply in fp8, too."""
    yield Edit("multiplies_8_bits", "E <= B < L", "E <= B")


@mutant(41, f"{LLAMA} training.frozen=[blocks.0.mlp.*]{DATA}", ranks=1)
def frozen_weights_updated() -> Iterator[Edit]:
    """The key training.frozen has no effect."""
    yield Edit("partition_model", "P and C.is_frozen(N)", "False")


@mutant(42, f"{LLAMA}{MUON} parallel.tensor=2{ZERO_1}")
def factor_of_own_slice() -> Iterator[Edit]:
    """Muon scales the update of a matrix by the shape of the slice of a tensor rank."""
    yield Edit("local_matrices", "LocalMatrix(S, F, R, C, W, D, adjust(*W))", "LocalMatrix(S, F, R, C, W, D, adjust(R, C))")


@mutant(45, f"{LLAMA} model.kv_heads=4 parallel.tensor=2 training.activation_checkpointing=full{DATA}")
def fused_weights_in_other_order() -> Iterator[Edit]:
    """The weights of a fused projection are concatenated in reverse order."""
    yield Edit("_joint_weight", "L[0].joined", "None")
    yield Edit("_joint_weight", "torch.cat(W)", "torch.cat(W[::-1])")


@mutant(46, f"{LLAMA} optimizer.weight_decay=1.0{ZERO_1}", exact=True)
def norms_decay() -> Iterator[Edit]:
    """Norms and biases decay, too."""
    yield Edit("build_buckets", "F(..., decays=D)", "F(..., decays=True)")


@mutant(46, f"{LLAMA} optimizer.name=lion{ZERO_1}")
def lion_decays_by_gradient() -> Iterator[Edit]:
    """Lion adds the decay to the gradient, whose sign alone counts."""
    yield Edit("ElementwiseOptimizer.update", "S.gradient(W)", "S.gradient(W).add_(W, alpha=weight_decay)")
    yield Edit("ElementwiseOptimizer.update", "W.mul_(1 - L * D)", "W")


@mutant(47, f"{LLAMA} checkpoint.every=1{DATA}", ranks=1, resumed="", exact=True)
def checkpoints_repeat_the_first() -> Iterator[Edit]:
    """Every asynchronous checkpoint has the weights of the first one."""
    yield Edit(
        "LiveSource.live",
        "return T",
        'first = globals().setdefault("_first", {})\nreturn first.setdefault((self.part.name, kind, self.first), T.clone())',
    )


@mutant(48, f"{LLAMA} checkpoint.every=1{DATA}", ranks=1, resumed="")
def snapshot_not_waited_for() -> Iterator[Edit]:
    """The copy of a checkpoint is made while the next steps change the weights."""
    yield Edit("AsyncSaver.before_update", "self._snapshot.wait()", "pass")
    yield Edit("Staging._run", "", "threading.Event().wait(0.3)\nBODY")


@mutant(49, LLAMA + ZERO_1, resumed="parallel.tensor=2")
def moments_lost_in_other_layout() -> Iterator[Edit]:
    """A checkpoint that is loaded in another layout has no moments."""
    yield Edit(
        "resume.load",
        "trainer.engine.loaded(U)",
        "trainer.engine.loaded(U)\n"
        'if checkpoint.config["parallel"]["tensor"] != trainer.mesh.layout.tensor:\n'
        "    for fragment in fragments:\n"
        '        fragment.tensors["exp_avg"].zero_()',
    )


@mutant(50, DEEPSEEK + ZERO_1, resumed="")
def router_biases_restart() -> Iterator[Edit]:
    """A resumed run loads what the optimizer updates, and the routers' correction biases begin again."""
    yield Edit("resume.load", "load_any_layout.load(C, F)", 'load_any_layout.load(C, [each for each in F if "exp_avg" in each.tensors])')


@mutant(51, LLAMA + ZERO_2, resumed="")
def bias_correction_restarts() -> Iterator[Edit]:
    """A resumed run corrects the bias of loaded moments as in its first steps."""
    yield Edit("WeightUpdate.loaded", 'S["step"].fill_(U)', "pass")


@mutant(55, f"{LLAMA} optimizer.name=schedule_free{ZERO_1}")
def gradient_point_is_validated() -> Iterator[Edit]:
    """The validation of schedule-free AdamW reads the weights at which gradients are computed."""
    yield Edit("Engine.trained_weights", "self.round_weights(trained=True)", "self.round_weights()")


@mutant(28, f"{LLAMA} training.document_mask=true{ZERO_1}")
def end_of_document_in_next_document() -> Iterator[Edit]:
    """Under a document mask, the token that closes a document belongs to the next one."""
    yield Edit("document_ids", "np.cumsum(T[:, :-1] == E, axis=1, out=I[:, 1:])", "np.cumsum(T == E, axis=1, out=I)")


@mutant(52, LLAMA + ZERO_1, resumed="", exact=True)
def resumed_run_repeats_samples() -> Iterator[Edit]:
    """A resumed run reads its samples from the beginning."""
    yield Edit("BatchLoader.remaining", "self.training(S.samples, ...)", "self.training(0, ...)")


@mutant(52, f"{LLAMA} training.global_batch_size=512 training.sequence_length=32{ZERO_1}", exact=True)
def epochs_in_one_order() -> Iterator[Edit]:
    """Every epoch reads the samples in the order of the first one."""
    yield Edit("Samples.sequences", "permute(S, C, D, E)", "permute(S, C, D, E * 0)")


@mutant(52, f"{LLAMA}{PACKED} training.sequence_length=16{ZERO_1}")
def ends_of_long_documents_dropped() -> Iterator[Edit]:
    """Packing leaves out the rest of a document that is longer than a sequence."""
    yield Edit("split_long", "-(-L // C)", "np.maximum(L // C, 1)")


@mutant(53, f"{BERT} model.vocab_size=520 data.tokens={{masked}} tokenizer.path={{masked_tokenizer}}{ZERO_1}", exact=True)
def equal_masks() -> Iterator[Edit]:
    """The masks of all samples are drawn with the same seed."""
    yield Edit("masked.mask", "random_words(S, np.repeat(A, L), ...)", "random_words(S, np.repeat(A * 0, L), ...)")


@mutant(54, LLAMA + ZERO_1, exact=True)
def ranks_read_the_same_samples() -> Iterator[Edit]:
    """Every data rank reads the first rank's part of a batch."""
    yield Edit("BatchLoader.load", "np.arange(C) + self._rank * C", "np.arange(C)")
