"""Mutants of a second author who had not seen the certificate: ZeRO, optimizer, precision, checkpoints and data."""

from __future__ import annotations

from tools.mutants.catalog.blind_second import GEMMA, PACKED
from tools.mutants.models import DEEPSEEK, LLAMA, MIXTRAL
from tools.mutants.mutation import Edit, Mutant

ZERO, REPLICATED = "pipeline/training/zero_engine.py", "pipeline/training/replicated_engine.py"
CLIPPING, AVERAGE = (f"pipeline/training/{name}.py" for name in ("gradient_clipping", "weight_averaging"))
RESUME, LOADER = "pipeline/training/resume.py", "pipeline/training/batch_loader.py"
ROTARY, NORM = "pipeline/layers/rotary.py", "pipeline/layers/norm.py"
SCHEDULES, FLOAT8 = "pipeline/parallel/pipeline_schedules.py", "pipeline/parallel/float8.py"
SAMPLES, BLEND, PACKING, BOUNDARIES = (f"pipeline/data/load/{name}.py" for name in ("samples", "blend", "packing", "document_boundaries"))

#: Two folders of one corpus each, in another order than that of their names.
BLENDED = (
    "data.blend={{small:{{tokens:{padded},corpus:default}},large:{{tokens:{tokens},corpus:default}}}}",
    "data.blend_weights=epochs",
)

MUTANTS = (
    Mutant(
        name="norm_of_every_zero_group",
        bug=20,
        what="with several groups of ZeRO, the partitions of each of them count in the norm",
        ranks=4,
        words=(*LLAMA, "parallel.zero_stage=1", "parallel.zero_group=2", "optimizer.gradient_clipping=0.3"),
        edits=(Edit(ZERO, "if bucket.replica == 0 and is_primary_copy(", "if is_primary_copy("),),
        exact=False,
    ),
    Mutant(
        name="small_gradients_scaled_up",
        bug=24,
        what="a gradient whose norm is below the largest one is scaled up to it",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", "optimizer.gradient_clipping=4"),
        edits=(Edit(CLIPPING, "((norm + 1e-6) / largest).clamp(min=1.0)", "(norm + 1e-6) / largest"),),
        exact=False,
    ),
    Mutant(
        name="decay_takes_a_tenth",
        bug=44,
        what="the final decay of the learning rate always takes a tenth of the run, whatever optimizer.decay_steps is",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", "optimizer.schedule=wsd", "optimizer.decay_steps=3"),
        edits=(Edit("pipeline/config/warmup.py", "optimizer.decay_steps or max(1, end // 10)", "max(1, end // 10)"),),
        exact=False,
    ),
    Mutant(
        name="positions_rounded_beyond_256",
        bug=37,
        what="rotary tables are computed from positions in bf16, which has not all integers above 256",
        ranks=2,
        words=(
            *(*LLAMA, "parallel.zero_stage=1", "model.max_positions=512", "training.sequence_length=512"),
            *("training.global_batch_size=4", "training.micro_batch_size=1"),
        ),
        edits=(
            Edit(
                ROTARY,
                'torch.arange(self.cos.shape[0], dtype=torch.float32, device="cpu")',
                'torch.arange(self.cos.shape[0], dtype=torch.bfloat16, device="cpu").float()',
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="offset_of_norm_added_in_bf16",
        bug=37,
        what="Gemma's norms add one to their weight in bf16, which loses the low bits of the weight",
        ranks=2,
        words=(*GEMMA, "parallel.zero_stage=1", "precision=bf16"),
        edits=(Edit(NORM, "1.0 + self.weight.to(wide), self.eps", "(1.0 + self.weight).to(wide), self.eps"),),
        exact=False,
    ),
    Mutant(
        name="last_blocks_in_fp8",
        bug=40,
        what="precision.fp8_exclude_layers excludes the first blocks of the model only: the last ones multiply in fp8, too",
        ranks=2,
        words=(*LLAMA, "model.layers=4", "parallel.zero_stage=1", "precision=fp8"),
        edits=(Edit(FLOAT8, "<= block < layers - precision.fp8_exclude_layers", "<= block"),),
        exact=False,
    ),
    Mutant(
        name="balance_loss_without_loss_scale",
        bug=29,
        what="the balance losses do not have the loss scale of fp16, by which the gradients are divided",
        ranks=2,
        words=(*MIXTRAL, "parallel.zero_stage=1", "precision=fp16", "precision.initial_loss_scale=1024"),
        edits=(
            Edit(
                SCHEDULES,
                "moe.loss_scale = scale if loss_scale is None else scale * loss_scale",
                "moe.loss_scale = scale",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="masters_resume_from_rounded_weights",
        bug=49,
        what="a resumed run takes its fp32 weights from those of the model, which are rounded to bf16",
        ranks=2,
        words=(*LLAMA, "parallel.tensor=2", "parallel.zero_stage=0", "precision=bf16"),
        edits=(
            Edit(
                REPLICATED,
                "        self._update.loaded(updates)\n        self.round_weights()\n",
                "        self._update.loaded(updates)\n        self.round_weights()\n"
                "        for master, low in zip(self._masters, self._low, strict=False):\n"
                "            master.copy_(low)\n",
            ),
        ),
        resumed=("parallel.tensor=1",),
        exact=False,
    ),
    Mutant(
        name="router_biases_restart",
        bug=50,
        what="a resumed run loads what the optimizer updates, and the routers' correction biases begin again",
        ranks=2,
        words=(*DEEPSEEK, "parallel.zero_stage=1"),
        edits=(
            Edit(
                RESUME,
                "    load_any_layout.load(checkpoint, fragments)\n    weight_averaging.begin_where_missing(",
                '    load_any_layout.load(checkpoint, [each for each in fragments if "exp_avg" in each.tensors])\n'
                "    weight_averaging.begin_where_missing(",
            ),
        ),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="sequence_warmup_restarts",
        bug=51,
        what="a resumed run begins again with the short sequences of its warm-up",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", "training.sequence_warmup=[{{until_step:2,value:8}}]"),
        edits=(Edit(LOADER, "range(state.step, self._training.steps)", "range(self._training.steps - state.step)"),),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="average_counts_skipped_steps",
        bug=38,
        what="a step that fp16 skips moves the average of the weights, too",
        ranks=2,
        words=(
            *(*LLAMA, "parallel.zero_stage=1", "precision=fp16", "precision.initial_loss_scale=4194304", "precision.loss_scale_window=1"),
            "training.ema=0.9",
        ),
        edits=(Edit(AVERAGE, "step = self._step * (1 - skipped)", "step = self._step"),),
        exact=False,
    ),
    Mutant(
        name="batch_across_epochs_in_first_order",
        bug=52,
        what="in a batch that begins in one epoch and ends in the next, all samples have the order of the first",
        ranks=2,
        words=(*LLAMA, *PACKED, "parallel.zero_stage=1", "training.global_batch_size=64", "training.micro_batch_size=8"),
        edits=(
            Edit(
                SAMPLES,
                "if len(counts) == 1 and len(epochs) > 0 and epochs.min() == epochs.max():",
                "if len(counts) == 1 and len(epochs) > 0:",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="epochs_of_blend_in_other_order",
        bug=54,
        what="with weights in epochs, the sizes of corpora in the order of their names are assigned in the order of the configuration",
        ranks=2,
        words=(*LLAMA, *BLENDED, "parallel.zero_stage=1"),
        edits=(Edit(BLEND, "worth = dict(zip(names, epoch, strict=True))", "worth = dict(zip(data.blend, epoch, strict=True))"),),
        exact=False,
    ),
    Mutant(
        name="ends_of_long_documents_dropped",
        bug=52,
        what="packing leaves out the rest of a document that is longer than a sequence",
        ranks=2,
        words=(*LLAMA, *PACKED, "parallel.zero_stage=1", "training.sequence_length=16"),
        edits=(Edit(PACKING, "counts = -(-lengths // capacity)", "counts = np.maximum(lengths // capacity, 1)"),),
        exact=False,
    ),
    Mutant(
        name="end_of_document_in_next_document",
        bug=28,
        what="under a document mask, the token that closes a document belongs to the next one",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1", "training.document_mask=true"),
        edits=(
            Edit(
                BOUNDARIES,
                "np.cumsum(tokens[:, :-1] == end_of_document, axis=1, out=ids[:, 1:])",
                "np.cumsum(tokens == end_of_document, axis=1, out=ids)",
            ),
        ),
        exact=False,
    ),
)
