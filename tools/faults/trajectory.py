"""A training run that is killed and started again until it is complete, and the verdict on each of its faults."""

from __future__ import annotations

import random
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.checkpoint import native
from tools.faults.choice import Faults
from tools.faults.job import Fault, Job, Listener, Start, Traced, processes_of
from tools.faults.runs import SETTINGS, Layout, Undisturbed, difference, exact, last_line, newest_step, saves_every

#: Steps of a run of tools/chaos_checkpoint.
STEPS = 60
#: Faults of one run directory, at most.
PER_RUN = 12
#: Seconds after which a job that makes no progress is a defect.
PATIENCE = 120.0


@dataclass
class Row:
    """The verdict on a fault.

    Attributes:
        fault: see there.
        where: file, line and function where it happened; for a random time, what was in the checkpoint folder.
        layout: of the run.
        step: steps trained when it happened.
        complete: the newest complete checkpoint at that time; 0 without one.
        resumed: the step from which the run continued; None: the job went on without a restart.
        lost: steps that were trained again.
        seconds: from the restart to its first step; without a restart, from the fault to the next complete checkpoint.
        problems: what is wrong; empty if nothing is.
    """

    fault: Fault
    where: str
    layout: str
    step: int
    complete: int
    resumed: int | None = None
    lost: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Trajectory:
    """One run directory, from the first start of the command to the end of the run.

    Args:
        start: starts a process.
        layout: of the run.
        undisturbed: the run beside which it is put.
        data: token shards.
        folder: an empty folder of this trajectory.
        listener: for the reports of the processes.
        traced: the lines that processes execute; extended.
        chance: decides about everything else.
        faults: chooses them.
    """

    def __init__(
        self,
        start: Start,
        layout: Layout,
        undisturbed: Undisturbed,
        data: Path,
        folder: Path,
        listener: Listener,
        traced: Traced,
        chance: random.Random,
        faults: Faults,
    ) -> None:
        self._start, self._layout, self._undisturbed, self._listener, self._traced = start, layout, undisturbed, listener, traced
        self._chance, self._faults, self._folder = chance, faults, folder
        self._run_dir = folder / "run"
        self._every, self._keep = chance.choice([1, 1, 2, 3]), chance.choice([1_000_000, 1_000_000, 2])
        self._arguments = [
            *SETTINGS,
            f"training.steps={undisturbed.steps}",
            *layout.settings,
            f"data.tokens={data}",
            f"run_dir={self._run_dir}",
            *saves_every(self._every, self._keep),
        ]
        self._rows: list[Row] = []
        self._waiting: list[Row] = []
        self._compared: set[str] = set()
        self._attempt = 0
        self._pids: list[int] = []

    def run(self, faults: int) -> list[Row]:
        """Start the command again and again, with up to this many faults, until the run is complete; return the rows."""
        done, tried = False, 0
        while not done:
            fault = None
            if len(self._rows) < faults and tried < 3 * faults:
                steps = self._undisturbed.steps
                fault = self._faults.choose(self._layout, self._traced, steps, steps - newest_step(self._run_dir), self._every)
                tried += 1
            done = self._one_start(fault)
            if self._attempt > 3 * faults + 10:
                self._report("the run did not end")
                break
        self._finish()
        return self._rows

    def _one_start(self, fault: Fault | None) -> bool:
        """Start the command once, with a fault or without. Returns whether the run is complete."""
        self._attempt += 1
        log = self._folder / f"{self._attempt}.log"
        complete = newest_step(self._run_dir)
        job = Job(self._start, self._arguments, self._layout.ranks, self._listener, fault, log)
        started = quiet = struck_at = time.monotonic()
        struck: Row | None = None
        resumed: int | None = None
        while None in job.codes():
            message = job.next(self._traced, 0.005)
            if message is not None:
                quiet = time.monotonic()
            if resumed is None and job.first_step:
                resumed = self._check_start(log, complete, time.monotonic() - started)
            if struck is None and fault is not None and (where := self._is_time(job, message, complete)):
                row = Row(fault, where, self._layout.name, last_line(self._run_dir), newest_step(self._run_dir))
                if job.strike(message[2] if message is not None else None):
                    struck, struck_at = row, time.monotonic()
                    self._rows.append(row)
                    if fault.victim != "writer":
                        break
            if struck is not None and newest_step(self._run_dir) > struck.complete:  # the job went on
                struck.seconds = time.monotonic() - struck_at
                break
            if time.monotonic() - quiet > PATIENCE:
                self._report(f"start {self._attempt}: no progress for {PATIENCE:g} s", struck)
                break
        ended = job.codes()
        job.stop(grace=2.0 if self._chance.random() < 0.5 else 0.0)
        by_itself = struck is None or struck.fault.victim == "writer"
        if resumed is None and (job.first_step or (by_itself and None not in ended)):  # it may have had nothing to do
            self._check_start(log, complete, time.monotonic() - started)
        if self._chance.random() < 0.5 or fault is None:  # else the next job starts while the writer of this one may still commit
            self._await_writers(job)
        self._compare()
        if by_itself and any(ended):
            self._report(f"start {self._attempt} ended with exit codes {ended}: {log.read_text()[-1500:]}", struck)
        if struck is not None and not by_itself:
            self._waiting.append(struck)
        return by_itself and None not in ended

    def _is_time(self, job: Job, message: tuple[str, dict[str, Any], socket.socket] | None, begun: int) -> str:
        """Where the fault lands if its moment has come, else empty. `begun`: the newest checkpoint when the job was started."""
        assert job.fault is not None
        if job.fault.line is not None:
            if message is None or "landed" not in message[1]:
                return ""
            file, line, _ = message[1]["landed"]
            return f"{message[0]} at {Path(file).name}:{line} ({message[1]['function']})"
        if not job.first_step or last_line(self._run_dir) < min(job.fault.step + begun, self._undisturbed.steps - 3):
            return ""
        time.sleep(job.fault.delay)
        partial = sorted((self._run_dir / "checkpoints").glob(".step-*"))
        content = [path.name for path in partial[:1] for path in path.glob("*")]
        return (
            f"after line {last_line(self._run_dir)}, {partial[0].name}: {len(content)} files"
            if partial
            else f"after line {last_line(self._run_dir)}"
        )

    def _check_start(self, log: Path, complete: int, seconds: float) -> int:
        """Check what a start continues from; the rows that waited for it get the verdict."""
        found = re.search(r"continuing from \S+: step (\d+)", log.read_text())
        step = int(found[1]) if found else 0
        newest = max([complete, *(row.complete for row in self._waiting)])
        if step < newest:
            self._report(f"start {self._attempt} continued from step {step}, but that of step {newest} was complete")
        if step:
            self._compare()
        for row in self._waiting:
            row.resumed, row.lost, row.seconds = step, max(0, row.step - step), seconds
        self._waiting.clear()
        return step

    def _compare(self) -> None:
        """Compare all complete checkpoints that were not compared yet with those of the undisturbed run."""
        for folder in native.complete(self._run_dir):
            try:
                key = f"{folder.name} {folder.stat().st_ino}"
            except FileNotFoundError:
                self._check_removal(folder)
                continue
            if key not in self._compared and (folder / native.INDEX).is_file():
                self._compared.add(key)
                wrong = difference(folder, self._undisturbed.run_dir)
                if wrong and not (folder / native.INDEX).is_file():
                    self._check_removal(folder)
                elif wrong:
                    self._report(wrong)

    def _check_removal(self, folder: Path) -> None:
        """Check that a checkpoint that a writer has removed meanwhile is not one that checkpoint.keep keeps."""
        newer = [other for other in native.complete(self._run_dir) if native.step_of(other) > native.step_of(folder)]
        if len(newer) < self._keep:
            self._report(f"{folder.name} was removed, although {len(newer)} checkpoints are newer and checkpoint.keep={self._keep}")

    def _await_writers(self, job: Job) -> None:
        deadline = time.monotonic() + 30
        while (left := job.living_writers()) and time.monotonic() < deadline:
            job.next(self._traced, 0.01)
        if left:
            self._report(f"start {self._attempt}: the writer runs 30 s after all ranks have ended")

    def _finish(self) -> None:
        """Compare the end of the run with the undisturbed one, and look for leftovers."""
        deadline = time.monotonic() + 30
        while (left := processes_of(self._listener.name)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            names = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in left]
            self._report(f"processes run after the end: {names}")
        self._compare()
        if newest_step(self._run_dir) != self._undisturbed.steps:
            self._report(f"the newest checkpoint is of step {newest_step(self._run_dir)}")
        if (ours := exact(self._run_dir)) != (theirs := exact(self._undisturbed.run_dir)):
            first = next((a for a, b in zip(ours, theirs, strict=False) if a != b), f"{len(ours)} lines")
            self._report(f"metrics.jsonl differs: {first}")
        if not (self._run_dir / "manifest.json").is_file():
            self._report("manifest.json is missing")
        hidden = [str(path.relative_to(self._run_dir)) for path in self._run_dir.rglob(".*") if path.name not in (".lock", ".wandb_id")]
        if hidden:
            self._report(f"leftovers: {hidden}")
        if self._waiting:
            self._report("no start followed the fault", self._waiting[0])
        if not any(row.problems for row in self._rows):
            shutil.rmtree(self._folder)

    def _report(self, problem: str, row: Row | None = None) -> None:
        """Add a problem to a row, the last one by default."""
        if row is None and not self._rows:
            self._rows.append(Row(Fault("none", "none"), "", self._layout.name, 0, 0))
        (row or self._rows[-1]).problems.append(problem)


def run(faults: int, seed: int, layouts: tuple[Layout, ...], data: Path, folder: Path, start: Start, steps: int = STEPS) -> Iterator[Row]:
    """Yield the rows of at least `faults` faults, spread over the layouts.

    Args:
        faults: how many.
        seed: of all random choices.
        layouts: of the runs.
        data: token shards.
        folder: for the runs; those with a problem remain.
        start: starts a process.
        steps: of a run.
    """
    chance, listener = random.Random(seed), Listener()
    chooser = Faults(chance)
    for number, layout in enumerate(layouts):
        share = faults // len(layouts) + (number < faults % len(layouts))
        if not share:
            continue
        own, traced = folder / str(number), Traced()
        own.mkdir(parents=True)
        undisturbed = Undisturbed(start, layout, steps, data, own, listener, traced)
        found = attempt = 0
        while found < share:
            (own / f"run-{attempt}").mkdir()
            trajectory = Trajectory(start, layout, undisturbed, data, own / f"run-{attempt}", listener, traced, chance, chooser)
            rows = trajectory.run(min(PER_RUN, share - found))
            found, attempt = found + len(rows), attempt + 1
            yield from rows
