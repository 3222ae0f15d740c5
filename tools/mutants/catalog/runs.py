"""Mutants of ZeRO, accumulation, precision, optimizers, checkpoints, resuming, and of the data that a run reads."""

from __future__ import annotations

from tools.mutants.models import BERT, DEEPSEEK, LLAMA
from tools.mutants.mutation import Edit, Mutant

DATA, ZERO_1, ZERO_2 = (f" parallel.zero_stage={stage}" for stage in range(3))
PACKED = " data.packing=best_fit data.tokens={padded} training.sequence_length=64"
FP8 = f"{LLAMA} model.layers=4 precision=fp8{ZERO_1}"
MUON = " optimizer.name=muon"

PRECISION = (
    Mutant(
        "later_contribution_lost",
        35,
        "only the first of several contributions to a gradient is kept",
        LLAMA + ZERO_1,
        (Edit("_State.add", "T.add_(G)", "pass"),),
        exact=True,
    ),
    Mutant(
        "gradients_not_zeroed",
        36,
        "the gradients of a step are added to those of the steps before",
        LLAMA + ZERO_2,
        (
            Edit("_State.start", "self.reduced = None", "pass"),
            Edit("GradientReducer.release", "for S in self._states.values():\n    S.reduced = None", "pass"),
        ),
        exact=True,
    ),
    Mutant(
        "gradients_accumulate_in_bf16",
        37,
        "the gradients of micro-batches are added in the dtype of the weights",
        f"{LLAMA} precision=bf16{ZERO_1}",
        (Edit("_State.add", "T.add_(G)", "T.copy_(T.to(G.dtype) + G)"),),
    ),
    Mutant(
        "positions_rounded_beyond_256",
        37,
        "rotary tables are computed from positions in bf16, which has not all integers above 256",
        f"{LLAMA} model.max_positions=512 training.sequence_length=512 training.global_batch_size=4 training.micro_batch_size=1{ZERO_1}",
        (
            Edit(
                "Rotary.compute_buffers", "torch.arange(N, ..., dtype=torch.float32)", "torch.arange(N, ..., dtype=torch.bfloat16).float()"
            ),
        ),
    ),
    Mutant(
        "large_gradients_skipped",
        38,
        "steps with a gradient norm above 0.5 change nothing",
        f"{LLAMA} training.max_skipped_steps=100{ZERO_1}",
        (Edit("is_skipped", "~N.isfinite()", "~N.isfinite() | (N > 0.5)"),),
    ),
    Mutant(
        "reduced_before_last_gradient",
        39,
        "the last gradient of a bucket arrives after its reduction has begun",
        LLAMA + ZERO_2,
        (Edit("_State.add", "V.copy_(G)", "V.copy_(G if self.missing > 1 else torch.zeros_like(G))"),),
    ),
    Mutant(
        "last_blocks_in_fp8",
        40,
        "precision.fp8_exclude_layers excludes the first blocks of the model only: the last ones multiply in fp8, too",
        FP8,
        (Edit("multiplies_8_bits", "E <= B < L", "E <= B"),),
    ),
    Mutant(
        "frozen_weights_updated",
        41,
        "training.frozen has no effect",
        f"{LLAMA} training.frozen=[blocks.0.mlp.*]{DATA}",
        (Edit("partition_model", "P and C.is_frozen(N)", "False"),),
        ranks=1,
    ),
)

OPTIMIZER = (
    Mutant(
        "factor_of_own_slice",
        42,
        "Muon scales the update of a matrix by the shape of the slice of a tensor rank",
        f"{LLAMA}{MUON} parallel.tensor=2{ZERO_1}",
        (Edit("local_matrices", "LocalMatrix(S, F, R, C, W, D, adjust(*W))", "LocalMatrix(S, F, R, C, W, D, adjust(R, C))"),),
    ),
    Mutant(
        "fused_weights_in_other_order",
        45,
        "the weights of a fused projection are concatenated in reverse order",
        f"{LLAMA} model.kv_heads=4 parallel.tensor=2 training.activation_checkpointing=full{DATA}",
        (Edit("_joint_weight", "L[0].joined", "None"), Edit("_joint_weight", "torch.cat(W)", "torch.cat(W[::-1])")),
    ),
    Mutant(
        "norms_decay",
        46,
        "norms and biases decay, too",
        f"{LLAMA} optimizer.weight_decay=1.0{ZERO_1}",
        (Edit("build_buckets", "F(..., decays=D)", "F(..., decays=True)"),),
        exact=True,
    ),
    Mutant(
        "lion_decays_by_gradient",
        46,
        "Lion adds the decay to the gradient, whose sign alone counts",
        f"{LLAMA} optimizer.name=lion{ZERO_1}",
        (
            Edit("ElementwiseOptimizer.update", "S.gradient(W)", "S.gradient(W).add_(W, alpha=weight_decay)"),
            Edit("ElementwiseOptimizer.update", "W.mul_(1 - L * D)", "W"),
        ),
    ),
)

STATE = (
    Mutant(
        "checkpoints_repeat_the_first",
        47,
        "every asynchronous checkpoint has the weights of the first one",
        f"{LLAMA} checkpoint.every=1{DATA}",
        (
            Edit(
                "LiveSource.live",
                "return T",
                'first = globals().setdefault("_first", {})\nreturn first.setdefault((self.part.name, kind, self.first), T.clone())',
            ),
        ),
        ranks=1,
        resumed="",
        exact=True,
    ),
    Mutant(
        "snapshot_not_waited_for",
        48,
        "the copy of a checkpoint is made while the next steps change the weights",
        f"{LLAMA} checkpoint.every=1{DATA}",
        (
            Edit("AsyncSaver.before_update", "self._snapshot.wait()", "pass"),
            Edit("Staging._run", "", "threading.Event().wait(0.3)\nBODY"),
        ),
        ranks=1,
        resumed="",
    ),
    Mutant(
        "moments_lost_in_other_layout",
        49,
        "a checkpoint that is loaded in another layout has no moments",
        LLAMA + ZERO_1,
        (
            Edit(
                "resume.load",
                "trainer.engine.loaded(U)",
                "trainer.engine.loaded(U)\n"
                'if checkpoint.config["parallel"]["tensor"] != trainer.mesh.layout.tensor:\n'
                "    for fragment in fragments:\n"
                '        fragment.tensors["exp_avg"].zero_()',
            ),
        ),
        resumed="parallel.tensor=2",
    ),
    Mutant(
        "router_biases_restart",
        50,
        "a resumed run loads what the optimizer updates, and the routers' correction biases begin again",
        DEEPSEEK + ZERO_1,
        (Edit("resume.load", "load_any_layout.load(C, F)", 'load_any_layout.load(C, [each for each in F if "exp_avg" in each.tensors])'),),
        resumed="",
    ),
    Mutant(
        "bias_correction_restarts",
        51,
        "a resumed run corrects the bias of loaded moments as in its first steps",
        LLAMA + ZERO_2,
        (Edit("WeightUpdate.loaded", 'S["step"].fill_(U)', "pass"),),
        resumed="",
    ),
    Mutant(
        "gradient_point_is_validated",
        55,
        "the validation of schedule-free AdamW reads the weights at which gradients are computed",
        f"{LLAMA} optimizer.name=schedule_free{ZERO_1}",
        (Edit("Engine.trained_weights", "self.round_weights(trained=True)", "self.round_weights()"),),
    ),
)

READ = (
    Mutant(
        "end_of_document_in_next_document",
        28,
        "under a document mask, the token that closes a document belongs to the next one",
        f"{LLAMA} training.document_mask=true{ZERO_1}",
        (Edit("document_ids", "np.cumsum(T[:, :-1] == E, axis=1, out=I[:, 1:])", "np.cumsum(T == E, axis=1, out=I)"),),
    ),
    Mutant(
        "resumed_run_repeats_samples",
        52,
        "a resumed run reads its samples from the beginning",
        LLAMA + ZERO_1,
        (Edit("BatchLoader.remaining", "self.training(S.samples, ...)", "self.training(0, ...)"),),
        resumed="",
        exact=True,
    ),
    Mutant(
        "epochs_in_one_order",
        52,
        "every epoch reads the samples in the order of the first one",
        f"{LLAMA} training.global_batch_size=512 training.sequence_length=32{ZERO_1}",
        (Edit("Samples.sequences", "permute(S, C, D, E)", "permute(S, C, D, E * 0)"),),
        exact=True,
    ),
    Mutant(
        "ends_of_long_documents_dropped",
        52,
        "packing leaves out the rest of a document that is longer than a sequence",
        f"{LLAMA}{PACKED} training.sequence_length=16{ZERO_1}",
        (Edit("split_long", "-(-L // C)", "np.maximum(L // C, 1)"),),
    ),
    Mutant(
        "equal_masks",
        53,
        "the masks of all samples are drawn with the same seed",
        f"{BERT} model.vocab_size=520 data.tokens={{masked}} tokenizer.path={{masked_tokenizer}}{ZERO_1}",
        (Edit("masked.mask", "random_words(S, np.repeat(A, L), ...)", "random_words(S, np.repeat(A * 0, L), ...)"),),
        exact=True,
    ),
    Mutant(
        "ranks_read_the_same_samples",
        54,
        "every data rank reads the first rank's part of a batch",
        LLAMA + ZERO_1,
        (Edit("BatchLoader.load", "np.arange(C) + self._rank * C", "np.arange(C)"),),
        exact=True,
    ),
)

MUTANTS = (*PRECISION, *OPTIMIZER, *STATE, *READ)
