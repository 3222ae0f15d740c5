"""Mutants whose author had not seen the certificate: siblings of public bugs in precision, optimizer, state and data."""

from __future__ import annotations

from tools.mutants.models import LLAMA, MIXTRAL
from tools.mutants.mutation import Edit, Mutant

UPDATE, OFFLOADED = "pipeline/training/weight_update.py", "pipeline/training/offloaded_update.py"
ZERO, RESUME = "pipeline/training/zero_engine.py", "pipeline/training/resume.py"
LOADER = "pipeline/training/batch_loader.py"
FP8 = (
    *("model=llama-tiny", "model.layers=4", "model.hidden=32", "model.heads=4", "model.kv_heads=4", "model.ffn_hidden=64"),
    *("precision=bf16", "precision.fp8=tensorwise", "parallel.pipeline=2", "parallel.zero_stage=1"),
)
INFILL = (
    *("data.infill.rate=1.0", "data.infill.prefix='<extra_id_0>'", "data.infill.middle='<extra_id_1>'"),
    *("data.infill.suffix='<extra_id_2>'", "model.vocab_size=640", "data.tokens={t5}", "tokenizer.path={t5_tokenizer}"),
)
#: The second phase begins in the middle of the run: 48 samples of 16 tokens.
BLEND = (
    "data.blend={{one:{{corpus:default}},two:{{corpus:default,tokens:{padded}}}}}",
    "data.phases=[{{until_tokens:768,weights:{{one:0.9,two:0.1}}}},{{weights:{{one:0.6,two:0.4}}}}]",
)

PRECISION = (
    Mutant(
        name="offload_keeps_the_first_gradients",
        bug=36,
        what="the host's buffers of gradients are filled in the first step only",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=3", "parallel.offload=optimizer"),
        edits=(
            Edit(
                OFFLOADED,
                "            self._gradients[index] = gradient\n            return\n",
                "            self._gradients.setdefault(index, gradient)\n            return\n",
            ),
            Edit(OFFLOADED, "            self._gradients.clear()\n", "            pass\n"),
        ),
        exact=False,
    ),
    Mutant(
        name="fp8_layers_counted_by_stage",
        bug=40,
        what="the last layers, which stay bf16, are counted from the number of blocks of the stage",
        ranks=2,
        words=FP8,
        edits=(
            Edit(
                "pipeline/parallel/parallelize.py",
                "float8.apply(stage, config.precision, config.model.layers, mesh.device)",
                "float8.apply(stage, config.precision, len(stage.blocks), mesh.device)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="gradients_accumulate_in_bf16",
        bug=37,
        what="the gradients of micro-batches are added in the dtype of the weights",
        ranks=2,
        words=(*LLAMA, "precision=bf16", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/training/gradient_reduction.py",
                "            total.add_(gradient)\n",
                "            total.copy_(total.to(gradient.dtype) + gradient)\n",
            ),
        ),
        exact=False,
    ),
)

OPTIMIZER = (
    Mutant(
        name="decay_of_rate_begins_at_step_zero",
        bug=44,
        what="the cosine counts the steps of the warm-up, and the learning rate jumps down after it",
        ranks=2,
        words=(*LLAMA, "optimizer.schedule=cosine", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/training/lr_schedule.py",
                "    return _progress(update, warmup.lr_steps(optimizer, training), training.steps)\n",
                "    return _progress(update, 0, training.steps)\n",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="average_one_step_behind",
        bug=44,
        what="the average of the weights is updated before the weights are",
        ranks=2,
        words=(*LLAMA, "training.ema=0.5", "parallel.zero_stage=1"),
        edits=(
            Edit(UPDATE, "        self.average.update(skipped)\n", ""),
            Edit(UPDATE, "        self.optimizer.step()\n", "        self.average.update(skipped)\n        self.optimizer.step()\n"),
        ),
        exact=False,
    ),
    Mutant(
        name="stacked_experts_do_not_decay",
        bug=46,
        what="weights with three dimensions, which are the matrices of all experts, do not decay",
        ranks=2,
        words=(*MIXTRAL, "optimizer.weight_decay=1.0", "parallel.expert=2", "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/training/buckets.py",
                "decays=all(is_matrix(piece.name, piece.full_shape) for piece",
                "decays=all(len(piece.full_shape) == 2 for piece",
            ),
        ),
        exact=False,
    ),
)

STATE = (
    Mutant(
        name="bias_correction_restarts",
        bug=51,
        what="a resumed run corrects the bias of loaded moments as in its first steps",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=2"),
        edits=(Edit(UPDATE, '            self.optimizer.state[master]["step"].fill_(updates)\n', "            pass\n"),),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="average_restarts",
        bug=51,
        what="the average of the weights begins again when a run is resumed",
        ranks=2,
        words=(*LLAMA, "training.ema=0.5", "parallel.zero_stage=1"),
        edits=(
            Edit(RESUME, "    weight_averaging.begin_where_missing(fragments, checkpoint)\n", "    weight_averaging.begin(fragments)\n"),
        ),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="weights_not_gathered_after_loading",
        bug=50,
        what="the first step after loading computes with the initial weights of the other ranks' partitions",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=1"),
        edits=(
            Edit(
                ZERO,
                "        self._update.loaded(updates)\n        self.round_weights()\n",
                "        self._update.loaded(updates)\n        self._zero.round_weights()\n",
            ),
        ),
        resumed=(),
        exact=False,
    ),
)

DATA = (
    Mutant(
        name="resume_assumes_the_last_batch_size",
        bug=52,
        what="a run that is resumed after a batch ramp-up skips samples: it multiplies its steps by the batch size",
        ranks=2,
        words=(*LLAMA, "training.batch_rampup=[{{until_step:2,value:8}}]", "parallel.zero_stage=1"),
        edits=(
            Edit(
                LOADER,
                "        return self.training(state.samples, range(state.step, self._training.steps), skipped)\n",
                "        first = state.step * self._training.global_batch_size\n"
                "        return self.training(first, range(state.step, self._training.steps), skipped)\n",
            ),
        ),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="every_phase_reads_from_the_beginning",
        bug=52,
        what="in a new phase of a blend, every corpus begins again with its first sample",
        ranks=2,
        words=(*LLAMA, *BLEND, "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/data/load/blend_schedule.py",
                "ordinals[of_phase[assigned]] = before[assigned] + self._before[phase, corpus]",
                "ordinals[of_phase[assigned]] = before[assigned]",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="documents_split_by_row",
        bug=53,
        what="fill-in-the-middle draws its random numbers by the row of a batch, not by the sample",
        ranks=2,
        words=(*LLAMA, *INFILL, "parallel.zero_stage=1"),
        edits=(
            Edit(
                "pipeline/data/load/fill_in_the_middle.py",
                "zip(changed, tokens, samples.tolist(), strict=True)",
                "zip(changed, tokens, range(len(samples)), strict=True)",
            ),
        ),
        exact=False,
    ),
    Mutant(
        name="expert_ranks_read_the_same_samples",
        bug=54,
        what="the ranks of an expert group read the same part of a batch",
        ranks=2,
        words=(*MIXTRAL, "parallel.expert=2", "parallel.zero_stage=3"),
        edits=(Edit(LOADER, "mesh.layout.batch_shard(mesh.coordinates), mesh", "mesh.coordinates.data, mesh"),),
        exact=False,
    ),
)

MUTANTS = (*PRECISION, *OPTIMIZER, *STATE, *DATA)
