"""Mutants of losses, and of the bounds of scores, logits and gates."""

from __future__ import annotations

from collections.abc import Iterator

from tools.mutants.models import DEEPSEEK, GEMMA2, GPT_OSS, LLAMA, TRANSFORMER
from tools.mutants.mutation import Edit, mutant

DATA, ZERO_1 = " parallel.zero_stage=0", " parallel.zero_stage=1"
#: Packed documents end with padding, which has no targets: counts of targets differ by rank.
PADDED = " data.packing=best_fit data.tokens={padded} training.sequence_length=64"
#: Logits of a micro-batch in two chunks (layers/loss.py).
TWO_CHUNKS = " model.vocab_size=8192 training.sequence_length=64 training.micro_batch_size=16 training.global_batch_size=32"
PAIRS = " data.pairs.train=[{pairs}] data.pairs.validation=[{pairs}]"


@mutant(
    1,
    f"{TRANSFORMER}{PAIRS} model.label_smoothing=0.1 tokenizer.path={{masked_tokenizer}} model.vocab_size=520 parallel.tensor=2{DATA}",
    exact=True,
)
def smoothing_over_local_vocabulary() -> Iterator[Edit]:
    """Label smoothing spreads over the rank's rows of the output matrix."""
    yield Edit("VocabParallelHead.forward", "F(..., vocabulary=V)", "F(..., vocabulary=self.weight.shape[0])")


@mutant(3, f"{DEEPSEEK} model.mtp_depth=2{ZERO_1}")
def further_depths_read_the_next_token() -> Iterator[Edit]:
    """Every MTP module reads the embedding of the next token, instead of the one shifted by its depth."""
    yield Edit("MultiTokenHead.forward", "self.embed(L.clamp(min=0))", "self.embed(targets.clamp(min=0))")


@mutant(4, f"{LLAMA} parallel.context=2{ZERO_1}", exact=True)
def gradient_times_context_ranks() -> Iterator[Edit]:
    """Gradients are summed over the context ranks, not averaged."""
    yield Edit("_State.__init__", "M.data.size() * M.layout.expert", "M.layout.data * M.layout.expert")


@mutant(5, f"{TRANSFORMER}{PAIRS} tokenizer.path={{t5_tokenizer}} model.vocab_size=640")
def validation_averages_sequences() -> Iterator[Edit]:
    """The loss of a validation is the mean of the means of its sequences, which have different numbers of targets."""
    yield Edit("validation._mean", "MeanLoss(float(T / C), ...)", "MeanLoss(float((losses / targets.clamp(min=1)).mean()), ...)")


@mutant(6, f"{LLAMA}{PADDED} data.prefetch=1{DATA}", ranks=1, exact=True)
def cached_mask_grows() -> Iterator[Edit]:
    """The mask of padding is kept and changed in place: more targets are ignored in every batch."""
    yield Edit(
        "Causal.arrays",
        'P = (A["tokens"] == E) & (A["targets"] == E)',
        'P = self._kept = (A["tokens"] == E) & (A["targets"] == E) | getattr(self, "_kept", False)',
    )


@mutant(6, LLAMA + PADDED + ZERO_1)
def ends_of_documents_are_no_targets() -> Iterator[Edit]:
    """The end-of-document token is also the padding, and is never a target: the model does not learn to end a text."""
    yield Edit("Causal.arrays", '(A["tokens"] == E) & (A["targets"] == E)', 'A["targets"] == E')


@mutant(8, LLAMA + PADDED + DATA)
def targets_of_own_rank() -> Iterator[Edit]:
    """Every data rank divides by its own number of targets."""
    yield Edit("Trainer._counts", "reduce_over((self.mesh.dense,), C)", "pass")


@mutant(28, LLAMA + PADDED + ZERO_1)
def ignored_positions_have_gradient() -> Iterator[Edit]:
    """Positions without a target do not count in the loss, but have the gradient of the softmax."""
    yield Edit("_LinearCrossEntropy.forward", "torch.where(T, S, torch.inf)", "S")


@mutant(35, LLAMA + TWO_CHUNKS + ZERO_1)
def head_learns_from_last_chunk() -> Iterator[Edit]:
    """Of the gradient of the output matrix, only the last chunk of the logits remains."""
    yield Edit("_LinearCrossEntropy.forward", "P.to(D) if G is None else G.add_(P)", "P.to(D)")


@mutant(17, GEMMA2 + ZERO_1)
def scores_not_capped() -> Iterator[Edit]:
    """Attention has no soft cap of its scores."""
    yield Edit("Mask.changed", "capped(S, self.softcap)", "S")


@mutant(17, f"{GEMMA2} model.final_logit_softcapping=1.0{ZERO_1}")
def logits_not_capped() -> Iterator[Edit]:
    """The loss and the head have no soft cap of the logits."""
    yield Edit("OutputHead.__init__", "", "softcap = None\nBODY")


@mutant(17, f"{GPT_OSS} model.swiglu_limit=0.2{ZERO_1}")
def gate_clamped_at_twice_the_bound() -> Iterator[Edit]:
    """The gate of a clamped SwiGLU has twice the bound of what it multiplies."""
    yield Edit("ClampedSwiGLU.__call__", "G.clamp(max=self.limit)", "G.clamp(max=2 * self.limit)")


@mutant(24, f"{LLAMA} optimizer.qk_clip=0.05{ZERO_1}")
def largest_logits_not_bounded() -> Iterator[Edit]:
    """QK-clip never scales a weight."""
    yield Edit("QKClip.after_update", "", "return")
