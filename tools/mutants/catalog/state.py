"""Mutants of checkpoints, of resuming, and of the data that a run reads."""

from __future__ import annotations

from tools.mutants.models import BERT, LLAMA
from tools.mutants.mutation import Edit, Mutant

RESUME, LOADER = "pipeline/training/resume.py", "pipeline/training/batch_loader.py"
ONE = (*LLAMA, "parallel.zero_stage=1")
LOADED = "    trainer.engine.loaded(state.updates)\n"

MUTANTS = (
    Mutant(
        name="checkpoints_repeat_the_first",
        bug=47,
        what="every asynchronous checkpoint has the weights of the first one",
        ranks=1,
        words=(*LLAMA, "parallel.zero_stage=0", "checkpoint.every=1"),
        edits=(
            Edit(
                "pipeline/checkpoint/staging.py",
                "        return self.tensors[kind].detach().view(-1)[self.first : self.first + self.part.count]\n",
                "        found = self.tensors[kind].detach().view(-1)[self.first : self.first + self.part.count]\n"
                "        return _FIRST.setdefault((self.part.name, kind, self.first), found.clone())\n",
            ),
            Edit("pipeline/checkpoint/staging.py", "_END = 10.0\n", "_END = 10.0\n_FIRST: dict[tuple[str, str, int], Tensor] = {}\n"),
        ),
        resumed=(),
    ),
    Mutant(
        name="snapshot_not_waited_for",
        bug=48,
        what="the copy of a checkpoint is made while the next steps change the weights",
        ranks=1,
        words=(*LLAMA, "parallel.zero_stage=0", "checkpoint.every=1"),
        edits=(
            Edit("pipeline/checkpoint/async_save.py", "            self._snapshot.wait()\n", ""),
            Edit(
                "pipeline/checkpoint/staging.py",
                "        try:\n            with torch.no_grad(), self._on_stream(snapshot.started):\n",
                "        threading.Event().wait(0.3)\n        try:\n            with torch.no_grad(), self._on_stream(snapshot.started):\n",
            ),
        ),
        resumed=(),
        exact=False,
    ),
    Mutant(
        name="moments_lost_in_other_layout",
        bug=49,
        what="a checkpoint that is loaded in another layout has no moments",
        ranks=2,
        words=ONE,
        edits=(
            Edit(
                RESUME,
                LOADED,
                LOADED + '    if checkpoint.config["parallel"]["tensor"] != trainer.mesh.layout.tensor:\n'
                "        for fragment in fragments:\n"
                '            fragment.tensors["exp_avg"].zero_()\n',
            ),
        ),
        resumed=("parallel.tensor=2",),
        exact=False,
    ),
    Mutant(
        name="replicas_not_loaded",
        bug=50,
        what="only the first of several copies of a weight is loaded",
        ranks=2,
        words=(*LLAMA, "parallel.zero_stage=0"),
        edits=(
            Edit(
                "pipeline/checkpoint/load_any_layout.py",
                "[Run.of(fragment) for fragment in fragments]",
                "[Run.of(fragment) for fragment in fragments if fragment.replica == 0]",
            ),
        ),
        resumed=(),
    ),
    Mutant(
        name="schedule_restarts",
        bug=51,
        what="a resumed run counts its updates from zero",
        ranks=2,
        words=ONE,
        edits=(Edit(RESUME, LOADED, "    trainer.engine.loaded(0)\n"),),
        resumed=(),
    ),
    Mutant(
        name="resumed_run_repeats_samples",
        bug=52,
        what="a resumed run reads its samples from the beginning",
        ranks=2,
        words=ONE,
        edits=(
            Edit(
                LOADER,
                "self.training(state.samples, range(state.step, self._training.steps), skipped)",
                "self.training(0, range(state.step, self._training.steps), skipped)",
            ),
        ),
        resumed=(),
    ),
    Mutant(
        name="epochs_in_one_order",
        bug=52,
        what="every epoch reads the samples in the order of the first one",
        ranks=2,
        words=(*ONE, "training.global_batch_size=512", "training.sequence_length=32"),
        edits=(
            Edit(
                "pipeline/data/load/samples.py",
                "permute(sequences, counts, self._seeds[corpora], epochs)",
                "permute(sequences, counts, self._seeds[corpora], epochs * 0)",
            ),
        ),
    ),
    Mutant(
        name="equal_masks",
        bug=53,
        what="the masks of all samples are drawn with the same seed",
        ranks=2,
        words=(*BERT, "model.vocab_size=520", "parallel.zero_stage=1", "data.tokens={masked}", "tokenizer.path={masked_tokenizer}"),
        edits=(
            Edit(
                "pipeline/data/load/objectives/masked.py",
                "random_words(seed, np.repeat(samples, length),",
                "random_words(seed, np.repeat(samples * 0, length),",
            ),
        ),
    ),
    Mutant(
        name="ranks_read_the_same_samples",
        bug=54,
        what="every data rank reads the first rank's part of a batch",
        ranks=2,
        words=ONE,
        edits=(Edit(LOADER, "rows = np.arange(count) + self._rank * count", "rows = np.arange(count) + 0 * count"),),
    ),
)
