"""What is drawn for a row of tools/chaos: fault, moment, line, layout, and the layout after the fault."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.faults.job import Traced
from tools.faults.jobs.kind import ANY_TIME, MOMENTS, SUBMISSION, Kind
from tools.faults.tracing import FINISHING, LEAVING, MOMENT_OF, STARTING, TRAINING

#: Steps of a run, steps between its checkpoints and between its validations.
STEPS, EVERY, VALIDATE = 12, 2, 4
#: A tiny model whose step takes milliseconds; fp32 on a CPU is deterministic.
SETTINGS = (
    *("model=llama-tiny", "model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_heads=2"),
    *("model.ffn_hidden=24", "model.vocab_size=320", "training.sequence_length=16", "training.global_batch_size=4"),
    *("training.micro_batch_size=2", f"training.validate_every={VALIDATE}", "training.validation_batches=1", f"training.steps={STEPS}"),
    *("optimizer.warmup_steps=2", "optimizer.lr=0.01", "precision=fp32", "tracking=disabled"),
)


def saves(every: int, keep: int) -> tuple[str, ...]:
    """Settings of a run that saves after so many steps and keeps so many checkpoints."""
    return f"checkpoint.every={every}", f"checkpoint.keep={keep}", "checkpoint.every_minutes=0"


@dataclass(frozen=True)
class Layout:
    """Nodes, with one rank each, and settings."""

    name: str
    nodes: int
    settings: tuple[str, ...]


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("data2", 2, ("parallel.zero_stage=0",)),
        Layout("tensor2", 2, ("parallel.tensor=2", "parallel.zero_stage=0")),
        Layout("zero2", 2, ("parallel.zero_stage=2",)),
        Layout("pipeline2", 2, ("parallel.pipeline=2", "parallel.zero_stage=0")),
        Layout("deepspeed2", 2, ("parallel.engine=deepspeed", "parallel.zero_stage=2")),
    )
}
ONE_NODE = Layout("single", 1, ("parallel.engine=native", "parallel.tensor=1", "parallel.pipeline=1", "parallel.zero_stage=0"))

_STEP_FILES = tuple(f"pipeline/training/{name}.py" for name in ("trainer", "native_engine", "deepspeed_engine", "loop"))
Line = tuple[str, str, int, str]
"""Role, file, line, phase."""


def lines_of(moment: str, traced: Traced) -> list[Line]:
    """The lines of a moment among those that an undisturbed run executes."""

    def belongs(line: Line) -> bool:
        _, file, _, phase = line
        match moment:
            case "start-up":
                return phase == STARTING
            case "first step" | "mid-step":
                return phase == TRAINING and file in _STEP_FILES and (moment == "first step" or traced.lines[line] > 2)
            case "validation":
                return phase == TRAINING and file.endswith("/validation.py")
            case "finishing":
                return phase == FINISHING
            case "after the manifest":
                return phase == LEAVING
        return phase == TRAINING and MOMENT_OF.get(file) == moment

    return sorted(line for line in traced.lines if belongs(line))


@dataclass(frozen=True)
class Case:
    """A fault that is to happen.

    Attributes:
        fault: name of a class of kinds.py or local.py.
        moment: one of MOMENTS.
        layout: of the run.
        after: SAME, OTHER, FEWER or SPARE.
        line: where `role` stops for the fault; None: at a random time.
        count: for which time it executes the line.
        delay: at a random time, seconds after the start of the job.
        victim: the rank that is hit.
        other: the layout after the fault, for OTHER.
    """

    fault: str
    moment: str
    layout: Layout
    after: str
    line: Line | None
    count: int
    delay: float
    victim: int
    other: Layout

    @property
    def where(self) -> str:
        """The moment, for the table."""
        if self.line is None:
            return self.moment
        role, file, line, _ = self.line
        return f"{self.moment}: {role} at {file.rpartition('/')[2]}:{line}" + (f", pass {self.count}" if self.count > 1 else "")


class Cases:
    """Draws cases: all faults alike often, and all moments and layouts of a fault.

    Args:
        chance: the seed decides.
        kinds: the faults.
        layouts: of the runs.
        moments: only these.
    """

    def __init__(
        self, chance: random.Random, kinds: dict[str, type[Kind]], layouts: Sequence[Layout], moments: tuple[str, ...] = MOMENTS
    ) -> None:
        self._chance, self._kinds = chance, kinds
        self._faults = _shuffled(chance, list(kinds))
        self._moments = {fault: _shuffled(chance, [m for m in kind.moments if m in moments]) for fault, kind in kinds.items()}
        self._after = {fault: _shuffled(chance, list(kind.after)) for fault, kind in kinds.items()}
        self._layouts = _shuffled(chance, list(layouts))

    def draw(self, traced: dict[str, Traced]) -> Case:
        """Return the next case.

        Args:
            traced: layout -> the lines of its undisturbed run.
        """
        chance, fault, layout = self._chance, next(self._faults), next(self._layouts)
        moment, after, found = next(self._moments[fault]), next(self._after[fault]), traced[layout.name]
        lines = self._lines(fault, moment, found)
        while not lines and moment not in (ANY_TIME, SUBMISSION):
            moment = next(self._moments[fault])
            lines = self._lines(fault, moment, found)
        roles = sorted({line[0] for line in lines})
        role = chance.choice(roles) if roles else ""
        line = chance.choice([line for line in lines if line[0] == role]) if lines else None
        most = found.lines[line] if line is not None else 1
        late = most // 2 * self._kinds[fault].late
        count = 1 if moment == "first step" or most < 3 else chance.randint(max(2, late), most - 1)
        other = chance.choice([other for other in LAYOUTS.values() if other != layout])
        return Case(fault, moment, layout, after, line, count, chance.uniform(0, 12), chance.randrange(layout.nodes), other)

    def _lines(self, fault: str, moment: str, traced: Traced) -> list[Line]:
        """The lines at which a fault may happen."""
        lines = [] if moment in (ANY_TIME, SUBMISSION) else lines_of(moment, traced)
        return [line for line in lines if line[0] != "writer"] if self._kinds[fault].ranks else lines


def _shuffled(chance: random.Random, values: list) -> Iterator:
    """Repeat the values for ever, each round in another order."""
    while True:
        yield from chance.sample(values, len(values))
