"""What a teacher predicts for the samples of a run: its most probable next tokens, which stage=evaluate stage.distill writes.

A folder has files of `samples_per_file` samples each, in the order of the run's samples. A position of a sample is a record: the ids of k
tokens, from the most probable, and k + 1 log-probabilities in fp16, of these tokens and of all others together. An id has 2 bytes, or 4 if
the vocabulary has more than 65,536 tokens: with k = 64, a token takes 4.03 or 6.03 bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load import blend
from pipeline.data.load.objectives.objective import TokenShardObjective
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream

#: Configuration key of the folder, and the stage in its manifest.
KEY, STAGE = "data.teacher", "evaluate"


def record(vocabulary: int, k: int) -> np.dtype[Any]:
    """Return the dtype of a position."""
    return np.dtype([("tokens", "<u2" if vocabulary <= 1 << 16 else "<u4", (k,)), ("log_probabilities", "<f2", (k + 1,))])


def identity(config: RunConfig, data: TokenShardObjective, samples: int) -> dict[str, Any]:
    """Return what determines the first samples of a run, by configuration key."""
    return {
        "training.seed": config.training.seed,
        "training.sequence_length": config.training.sample_length,
        "data.tokens, data.blend, data.packing and data.infill": blend.fingerprint(config, data.samples, samples, {}),
    }


class TeacherAnswers:
    """Reads what a teacher predicts for samples; `totals` has "samples", "vocabulary", "top_k", and tokens of a sample ("length")."""

    def __init__(self, folder: Path, verify: str, share: tuple[int, int]) -> None:
        """Open a folder; `verify` is data.verify, and `share` as in Objective.open_training.

        Raises:
            UserError: it is not complete, or a file is damaged.
        """
        made_as = (KEY, "stage=evaluate stage.distill")
        if not (folder / artifact.MANIFEST).is_file():
            raise UserError.of(KEY, folder, "has no predictions of a teacher", f"run {made_as[1]}={folder} with its weights first")
        manifest = artifact.read(folder, key=KEY, stage=STAGE)
        shards = [Shard(folder / name, entry, made_as).of_bytes("bytes") for name, entry in sorted(manifest.files.items())]
        self._folder, self._settings, self.totals = folder, manifest.settings, manifest.totals
        self._record = record(self.totals["vocabulary"], self.totals["top_k"])
        self.stream = TokenStream(shards, lazy_checks=verify == "lazy", share=share)
        if share[0] == 0:
            self.stream.check_sizes()
        if verify == "all":
            self.stream.verify()

    def check(self, config: RunConfig, data: TokenShardObjective) -> None:
        """Verify that these are the predictions of all samples of a run, whose number of steps is known.

        Raises:
            UserError: the run reads other samples, or more of them, or the teacher has tokens that the model has not.
        """
        samples = int(self.totals["samples"])
        self._check_number(warmup.samples(config.training, config.training.steps))
        if self.totals["vocabulary"] > config.model.vocab_size:
            rule = f"is less than the {self.totals['vocabulary']} tokens of the teacher"
            raise UserError.of("model.vocab_size", config.model.vocab_size, rule, f"set it to {self.totals['vocabulary']}")
        wanted = identity(config, data, samples)
        recorded = {name: self._settings.get(name) for name in wanted}
        artifact.check_settings(recorded, wanted, f"{self._folder} was written with", "set it to that, or write the predictions again")

    def _check_number(self, samples: int) -> None:
        """Refuse a run that reads more samples."""
        if samples > self.totals["samples"]:
            rule = f"has the predictions of {self.totals['samples']:,} samples, and the run reads {samples:,}"
            raise UserError.of(KEY, self._folder, rule, "lower training.steps, or write more with stage=evaluate stage.distill")

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return what the teacher predicts at the positions of samples, as in Batch (layers/batch.py).

        Args:
            indices: (n,) sample numbers.

        Raises:
            UserError: there are fewer samples: a run that skips some reads others after them.
        """
        self._check_number(int(np.max(indices, initial=-1)) + 1)
        size = self._record.itemsize * int(self.totals["length"])
        records = self.stream.read(np.asarray(indices, dtype=np.int64) * size, size).view(self._record)
        return {f"teacher_{name}": np.ascontiguousarray(records[name]) for name in ("tokens", "log_probabilities")}
