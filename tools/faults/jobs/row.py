"""A training job that has one fault, until its run is complete, and the verdict."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass, field

from tools.faults.jobs.cases import ONE_NODE, Case
from tools.faults.jobs.kind import FEWER, OTHER, SAME, SPARE, SUBMISSION
from tools.faults.jobs.scene import Scene
from tools.faults.runs import compare, last_line

#: Seconds after which a run that is not complete is a defect.
PATIENCE = 240.0
#: Seconds until a job must reach the line of its fault.
START = 180.0


@dataclass
class Row:
    """The verdict on a fault.

    Attributes:
        case: see there.
        step: steps trained when it happened.
        seen: what shows that it happened; empty: the row does not count.
        resumed: the step from which the run continued; None: it went on without a restart, or was complete.
        lost: steps that were trained again.
        seconds: from the fault to the end of the first step after it; None if no step followed a restart.
        again: whether the command was submitted again.
        problems: what is wrong; empty if nothing is.
    """

    case: Case
    step: int = 0
    seen: str = ""
    resumed: int | None = None
    lost: int = 0
    seconds: float | None = None
    again: bool = False
    problems: list[str] = field(default_factory=list)


def undisturbed(scene: Scene) -> Scene:
    """Run a job without a fault.

    Raises:
        RuntimeError: the job failed.
    """
    scene.submit(scene.layout)
    scene.wait(lambda: not scene.state().alive, PATIENCE)
    scene.read(0.5)
    if (found := scene.state()).name != "COMPLETED":
        raise RuntimeError(f"the undisturbed run: {found.text}\n{scene.new_log()[-3000:]}")
    return scene


def run(scene: Scene, reference: Scene) -> Row:
    """Run a job with a fault until the run is complete, and return the verdict. Its folder remains if there is a problem."""
    row, kind = Row(scene.case), scene.kind
    assert kind is not None
    scene.step_id = reference.ranks[0].step_id
    try:
        scene.submit(scene.layout, hold=True)
        kind.submitted()
        scene.begin()
        if problem := _reach(scene):
            row.problems.append(problem)
        else:
            scene.note_fault()
            row.step = last_line(scene.run_dir)
            kind.strike()
            scene.release()
            _follow(scene, row)
    finally:
        scene.release()
        scene.clean()
    if row.seen:
        _judge(scene, row, reference)
    if not row.problems:
        shutil.rmtree(scene.folder)
    return row


def _reach(scene: Scene) -> str:
    """Wait for the moment of the fault; returns why it did not come."""
    started, running, case = time.monotonic(), 0.0, scene.case
    while True:
        scene.read(0.2)
        if scene.held or case.moment == SUBMISSION:
            return ""
        found = scene.state()
        if not found.alive:
            return f"the job was over before: {found.text}"
        if found.name == "RUNNING":
            running = running or time.monotonic()
            if case.line is None and time.monotonic() - running >= case.delay * scene.pace:
                return ""
        if time.monotonic() - started > START:
            return f"the moment did not come in {START:.0f} s"


def _follow(scene: Scene, row: Row) -> None:
    """Watch the job until the run is complete, or has no job that could complete it."""
    kind, case = scene.kind, scene.case
    assert kind is not None
    deadline = time.monotonic() + PATIENCE
    while True:
        scene.read(0.3)
        kind.look()
        found = scene.state()
        if not found.alive:
            kind.look()
            done = (scene.run_dir / "manifest.json").is_file()
            if found.name == "COMPLETED" and done:
                kind.completed()
                break
            if not row.again and kind.may_end(found.name, found.code):
                if found.restarts:
                    row.problems.append(f"it was requeued: {found.text}")
                row.again = True
                scene.submit({SAME: case.layout, OTHER: case.other, FEWER: ONE_NODE}[case.after])
                continue
            row.problems.append(f"it ended {'complete' if done else 'not complete'}: {found.text}")
            break
        if time.monotonic() > deadline:
            row.problems.append(f"not complete {PATIENCE:.0f} s after the fault: {found.text}")
            break
    row.seen = kind.evidence
    if not row.problems:
        row.problems += scene.settled()


def _judge(scene: Scene, row: Row, reference: Scene) -> None:
    """Compare the run with the undisturbed one, and look at processes."""
    assert scene.kind is not None
    resumes = re.findall(r"continuing from \S+: step (\d+)", scene.new_log())
    row.seconds = scene.recovered
    if row.seconds is not None:
        row.resumed = int(resumes[0]) if resumes else 0
        row.lost = max(0, row.step - row.resumed)
        if scene.kind.ends_job and not row.again:
            row.problems.append("the job went on, although it was told to end")
        if scene.kind.saves and row.lost:
            row.problems.append(f"lost {row.lost} steps, although the end was announced")
        if row.resumed < scene.complete:
            row.problems.append(f"continued from step {row.resumed}, but that of step {scene.complete} was complete")
    if not row.problems:
        same = row.case.after in (SAME, SPARE) or (bool(scene.kind.ends) and not row.again)
        row.problems += compare(scene.run_dir, reference.run_dir, same_layout=same)
    scene.wait(lambda: not scene.left(), 15)
    if left := scene.left():
        row.problems.append(f"processes run after the end: {left}")
