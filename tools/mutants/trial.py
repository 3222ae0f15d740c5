"""The trial of a mutant: its effect, whether certify or a check of the training itself finds it, and the table of the results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutants import effect, processes
from tools.mutants.mutation import Mutant, copy_tree

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


#: Verdicts: certify found it; the training stopped by itself; nobody found it; it changes nothing; the tool could not judge it.
KILLED, STOPPED, SURVIVED, INEFFECTIVE, FAILED = "killed", "stopped", "survived", "no effect", "failed"
#: Share of the mutants that must be found.
REQUIRED = 0.95
HEADER = f"{'bug':>3} {'mutant':<34}{'effect':<22}{'verdict':<10}{'seconds':>7}  found by"


@dataclass(frozen=True)
class Result:
    """A row of the table.

    Attributes:
        name, bug, digest: of the mutant.
        verdict: see above.
        effect: what differs in its training -> largest relative difference.
        found_by: the line that found it, or why there is no verdict.
        seconds: of certify.
        all_seconds: of the trial.
    """

    name: str
    bug: int
    verdict: str
    effect: dict[str, float]
    found_by: str
    seconds: float
    all_seconds: float
    digest: str = ""


class Trials:
    """Runs trials in a folder, in which the runs without a mutant are kept.

    Args:
        folder: of the runs.
        files: as in Job.
    """

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self._folder, self._files = folder, files
        self._original = copy_tree(folder / "original")

    def run(self, mutant: Mutant) -> Result:
        """Return the row of a mutant."""
        started = time.monotonic()
        own = self._folder / "mutant"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        tree = copy_tree(own / "tree", mutant)
        resumed = None if mutant.resumed is None else tuple(mutant.resumed.split())
        job = Job(mutant.ranks, tuple(mutant.words.split()), resumed, self._files)

        def result(verdict: str, found_by: str, differences: dict[str, float], seconds: float = 0.0) -> Result:
            return Result(mutant.name, mutant.bug, verdict, differences, found_by, seconds, time.monotonic() - started, mutant.digest)

        right = self._undisturbed(job)
        if right is None:
            return result(FAILED, "the job fails without the mutant", {})
        # Without run-time checks: they are tried below, and would end the run before its effect is seen.
        code = pretrain(tree, job, own / "run", f"{RUN_TIME_KEY}=0")
        if code:
            output = (own / "run.txt").read_text()
            said = reason(output)
            if "Traceback" in output or code == 124:  # a mutant that crashes or hangs is no silent mistake, and says nothing of certify
                return result(FAILED, f"the mutant crashes: {said}", {})
            return result(STOPPED, f"pretrain, exit code {code}: {said}", {"exit code": float("inf")})
        differences = self._differences(own, own / "run", right)
        if not differences or max(differences.values()) < effect.SMALLEST:
            return result(INEFFECTIVE, "", differences)
        certified = certify(tree, job, own / "certificate")
        if certified.code == 1 and certified.failures:
            return result(KILLED, telling(certified.failures), differences, certified.seconds)
        if certified.code:
            said = f"certify, exit code {certified.code}: {reason(certified.output)}"
            return result(FAILED, said, differences, certified.seconds)
        if pretrain(tree, job, own / "checked", f"{RUN_TIME_KEY}=1"):
            return result(KILLED, "while training: " + reason((own / "checked.txt").read_text()), differences, certified.seconds)
        return result(SURVIVED, "", differences, certified.seconds)

    def _undisturbed(self, job: Job) -> Path | None:
        """The run directory of the job without a mutant, None if it fails."""
        key = json.dumps([job.ranks, job.words, job.resumed])
        run_dir = self._folder / "undisturbed" / hashlib.sha256(key.encode()).hexdigest()[:16]
        done = run_dir.with_suffix(".done")
        if not done.exists():
            run_dir.parent.mkdir(exist_ok=True)
            shutil.rmtree(run_dir, ignore_errors=True)
            if pretrain(self._original, job, run_dir):
                return None
            done.touch()
        return run_dir

    def _differences(self, own: Path, run_dir: Path, right: Path) -> dict[str, float]:
        """In what a run differs from the right one."""
        path = own / "tensors.json"
        code = processes.call(self._original, lambda: effect.write_tensors(run_dir, right, path), own / "tensors.txt")
        found = effect.scalars(run_dir, right)
        return found | (json.loads(path.read_text()) if code == 0 else {"checkpoints": float("inf")})


def telling(failures: list[str]) -> str:
    """The line of a certificate that names a weight, else the first one."""
    return next((failure for failure in failures if failure.startswith("gradient")), failures[0])


def from_json(values: dict[str, object]) -> Result:
    """Return a row that was written as JSON."""
    names = {field.name for field in dataclasses.fields(Result)}
    return Result(**{name: value for name, value in values.items() if name in names})  # type: ignore[arg-type]


def line(row: Result) -> str:
    changed = effect.largest(row.effect) if row.effect else ""
    return f"{row.bug:>3} {row.name:<34}{changed:<22}{row.verdict:<10}{row.seconds:>7.1f}  {row.found_by:.110}"


def summary(rows: Sequence[Result], seconds: float) -> str:
    """The last lines: how many were found, and the names of the others."""
    counts = Counter(row.verdict for row in rows)
    effective = sum(counts[verdict] for verdict in (KILLED, STOPPED, SURVIVED))
    found = counts[KILLED] + counts[STOPPED]
    lines = [
        f"{found} of {effective} mutants found ({found / max(1, effective):.0%}): {counts[KILLED]} by a certificate or a run-time check, "
        f"{counts[STOPPED]} stopped their training; {seconds:.0f} s"
    ]
    for verdict in (SURVIVED, INEFFECTIVE, FAILED):
        if names := [row.name for row in rows if row.verdict == verdict]:
            lines.append(f"{verdict}: {', '.join(names)}")
    return "\n".join(lines)


def is_failure(rows: Sequence[Result]) -> bool:
    """Whether a mutant has no effect or no verdict, or too many survive."""
    counts = Counter(row.verdict for row in rows)
    return bool(counts[INEFFECTIVE] or counts[FAILED]) or counts[SURVIVED] > (1 - REQUIRED) * len(rows)
