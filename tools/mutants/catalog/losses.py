"""Mutants of losses, and of the bounds of scores, logits and gates."""

from __future__ import annotations

from tools.mutants.models import DEEPSEEK, GEMMA2, GPT_OSS, LLAMA, TRANSFORMER
from tools.mutants.mutation import Edit, Mutant

DATA, ZERO_1 = " parallel.zero_stage=0", " parallel.zero_stage=1"
#: Packed documents end with padding, which has no targets: counts of targets differ by rank.
PADDED = " data.packing=best_fit data.tokens={padded} training.sequence_length=64"
#: Logits of a micro-batch in two chunks (layers/loss.py).
TWO_CHUNKS = " model.vocab_size=8192 training.sequence_length=64 training.micro_batch_size=16 training.global_batch_size=32"
PAIRS = " data.pairs.train=[{pairs}] data.pairs.validation=[{pairs}]"

LOSSES = (
    Mutant(
        "smoothing_over_local_vocabulary",
        1,
        "label smoothing spreads over the rank's rows of the output matrix",
        f"{TRANSFORMER}{PAIRS} model.label_smoothing=0.1 tokenizer.path={{masked_tokenizer}} model.vocab_size=520 parallel.tensor=2{DATA}",
        (Edit("VocabParallelHead.forward", "F(..., vocabulary=V)", "F(..., vocabulary=self.weight.shape[0])"),),
        exact=True,
    ),
    Mutant(
        "further_depths_read_the_next_token",
        3,
        "every MTP module reads the embedding of the next token, instead of the one shifted by its depth",
        f"{DEEPSEEK} model.mtp_depth=2{ZERO_1}",
        (Edit("MultiTokenHead.forward", "self.embed(L.clamp(min=0))", "self.embed(targets.clamp(min=0))"),),
    ),
    Mutant(
        "gradient_times_context_ranks",
        4,
        "gradients are summed over the context ranks, not averaged",
        f"{LLAMA} parallel.context=2{ZERO_1}",
        (Edit("_State.__init__", "M.data.size() * M.layout.expert", "M.layout.data * M.layout.expert"),),
        exact=True,
    ),
    Mutant(
        "validation_averages_sequences",
        5,
        "the loss of a validation is the mean of the means of its sequences, which have different numbers of targets",
        f"{TRANSFORMER}{PAIRS} tokenizer.path={{t5_tokenizer}} model.vocab_size=640",
        (Edit("validation._mean", "MeanLoss(float(T / C), ...)", "MeanLoss(float((losses / targets.clamp(min=1)).mean()), ...)"),),
    ),
    Mutant(
        "cached_mask_grows",
        6,
        "the mask of padding is kept and changed in place: more targets are ignored in every batch",
        f"{LLAMA}{PADDED} data.prefetch=1{DATA}",
        (
            Edit(
                "Causal.arrays",
                'P = (A["tokens"] == E) & (A["targets"] == E)',
                'P = self._kept = (A["tokens"] == E) & (A["targets"] == E) | getattr(self, "_kept", False)',
            ),
        ),
        ranks=1,
        exact=True,
    ),
    Mutant(
        "ends_of_documents_are_no_targets",
        6,
        "the end-of-document token is also the padding, and is never a target: the model does not learn to end a text",
        LLAMA + PADDED + ZERO_1,
        (Edit("Causal.arrays", '(A["tokens"] == E) & (A["targets"] == E)', 'A["targets"] == E'),),
    ),
    Mutant(
        "targets_of_own_rank",
        8,
        "every data rank divides by its own number of targets",
        LLAMA + PADDED + DATA,
        (Edit("Trainer._counts", "reduce_over((self.mesh.dense,), C)", "pass"),),
    ),
    Mutant(
        "ignored_positions_have_gradient",
        28,
        "positions without a target do not count in the loss, but have the gradient of the softmax",
        LLAMA + PADDED + ZERO_1,
        (Edit("_LinearCrossEntropy.forward", "torch.where(T, S, torch.inf)", "S"),),
    ),
    Mutant(
        "head_learns_from_last_chunk",
        35,
        "of the gradient of the output matrix, only the last chunk of the logits remains",
        LLAMA + TWO_CHUNKS + ZERO_1,
        (Edit("_LinearCrossEntropy.forward", "P.to(D) if G is None else G.add_(P)", "P.to(D)"),),
    ),
)

BOUNDS = (
    Mutant(
        "scores_not_capped",
        17,
        "attention has no soft cap of its scores",
        GEMMA2 + ZERO_1,
        (Edit("Mask.changed", "capped(S, self.softcap)", "S"),),
    ),
    Mutant(
        "logits_not_capped",
        17,
        "the loss and the head have no soft cap of the logits",
        f"{GEMMA2} model.final_logit_softcapping=1.0{ZERO_1}",
        (Edit("OutputHead.__init__", "", "softcap = None\nBODY"),),
    ),
    Mutant(
        "gate_clamped_at_twice_the_bound",
        17,
        "the gate of a clamped SwiGLU has twice the bound of what it multiplies",
        f"{GPT_OSS} model.swiglu_limit=0.2{ZERO_1}",
        (Edit("ClampedSwiGLU.__call__", "G.clamp(max=self.limit)", "G.clamp(max=2 * self.limit)"),),
    ),
    Mutant(
        "largest_logits_not_bounded",
        24,
        "QK-clip never scales a weight",
        f"{LLAMA} optimizer.qk_clip=0.05{ZERO_1}",
        (Edit("QKClip.after_update", "", "return"),),
    ),
)

MUTANTS = (*LOSSES, *BOUNDS)
