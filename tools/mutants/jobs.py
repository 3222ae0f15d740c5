"""The commands of a mutant: its job, trained by stage=pretrain, and its certificate, by stage=certify."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutants import processes

STEPS = 6
#: Settings of all jobs; those of a mutant replace them.
COMMON = (
    *("model.vocab_size=320", "model.max_positions=64", "training.sequence_length=16", "training.global_batch_size=16"),
    *("training.micro_batch_size=2", "precision=fp32", "optimizer.lr=0.01", "optimizer.schedule=constant", "optimizer.warmup_steps=2"),
    *("tracking=disabled", "data.tokens={tokens}", "tokenizer.path={tokenizer}"),
)
#: Settings of the runs of stage=pretrain: a checkpoint at the end of each half.
TRAINED = ("training.validation_batches=1", "checkpoint.every=3", "checkpoint.keep=100", "checkpoint.every_minutes=0")
#: Key of the configuration with which a run checks its copies while it trains.
RUN_TIME_KEY = "training.check_replicas_every"
SECONDS = 240


@dataclass(frozen=True)
class Job:
    """A job and the files that its overrides name.

    Attributes:
        ranks: how many.
        words: overrides.
        resumed: as in Mutant.
        files: name in braces -> path.
    """

    ranks: int
    words: tuple[str, ...]
    resumed: tuple[str, ...] | None
    files: Mapping[str, Path]

    def overrides(self, *more: str) -> list[str]:
        """The settings of the job: of a key that is set several times, the last one."""
        kept: dict[str, str] = {}
        for word in (*COMMON, *self.words, *more):
            kept[word.partition("=")[0]] = word.format_map(self.files) if "{" in word else word
        # A group is selected before its keys are set.
        first = [word for key, word in kept.items() if key in ("model", "precision", "optimizer")]
        return [*first, *(word for word in kept.values() if word not in first)]


@dataclass(frozen=True)
class Verdict:
    """What certify says of a job.

    Attributes:
        code: exit code: 0 certified, 1 not certified, 2 refused, others for an error.
        failures: lines of the certificate.
        seconds: of the command.
        output: what it printed.
    """

    code: int
    failures: list[str]
    seconds: float
    output: str


def pretrain(tree: Path, job: Job, run_dir: Path, *more: str) -> int:
    """Train the job, in two halves if it is resumed. Returns the exit code of the first part that fails; see run_dir/output."""
    output = run_dir.with_suffix(".txt")
    output.unlink(missing_ok=True)
    fixed = ("stage=pretrain", f"run_dir={run_dir}", *TRAINED)
    own = tuple(word for word in job.words if word.startswith("checkpoint."))
    halves = [((), STEPS)] if job.resumed is None else [((), STEPS // 2), (job.resumed, STEPS)]
    for words, steps in halves:
        arguments = job.overrides(*fixed, *own, *words, *more, f"training.steps={steps}")
        if code := processes.run(tree, arguments, job.ranks, output, SECONDS):
            return code
    return 0


def certify(tree: Path, job: Job, run_dir: Path) -> Verdict:
    """Certify the job."""
    output, path = run_dir.with_suffix(".txt"), run_dir / "certificate.json"
    output.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    started = time.monotonic()
    words = ("stage=certify", f"stage.world_size={job.ranks}", "stage.steps=4", f"run_dir={run_dir}", "training.steps=6")
    code = processes.run(tree, job.overrides(*words), 1, output, SECONDS)
    seconds = time.monotonic() - started
    written: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return Verdict(code, list(written.get("failures", [])), seconds, output.read_text())


def reason(text: str) -> str:
    """Why a command failed: the first problem that it lists, else the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    problems = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return problems[0] if problems else lines[-1] if lines else ""
