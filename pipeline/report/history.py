"""A whole run: all lines of metrics.jsonl, where its node-hours went, which data it has seen, and whether its loss is healthy."""

from __future__ import annotations

import dataclasses
import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from pipeline.common import metrics_file
from pipeline.report import run as runs
from pipeline.report import run_files
from pipeline.report.run import Run

T = TypeVar("T")
#: Most losses of a block: a spike is a loss more than SPIKE robust standard deviations above the median of the block before.
BLOCK, SPIKE = 100, 8.0
#: Steps of the two means that are compared at the end of a run, at most.
TREND_STEPS = 500
#: What became of node-hours, besides failures.
TRAINING, START_UP, BETWEEN, REST = "training", "start-up", "between starts, preflight and spare nodes", "validation and checkpoints"
_UNKNOWN_START_UP = "start-up, validation and checkpoints"


@dataclass(frozen=True)
class CorpusProgress:
    """A corpus.

    Attributes:
        corpus: its name; empty if the data has no names.
        samples: samples of it that were trained; for shards without a blend, in proportion to the tokens of the corpus.
        tokens: tokens of these samples.
        epoch: samples of one epoch; None if it is unknown.
    """

    corpus: str
    samples: int
    tokens: int
    epoch: int | None

    @property
    def epochs(self) -> float | None:
        """How often the corpus was read."""
        return self.samples / self.epoch if self.epoch else None


def seen(config: Mapping[str, Any], epochs: Mapping[str, int], samples: int) -> tuple[tuple[CorpusProgress, ...], tuple[str, ...]]:
    """Return the corpora, and why they are unknown.

    Args:
        config: resolved configuration of the run.
        epochs: samples of an epoch of each corpus, of event run_start; empty for older versions.
        samples: that were trained.
    """
    data, training = config.get("data"), config.get("training")
    length = training.get("sequence_length") if isinstance(training, dict) else None
    if isinstance(training, dict) and training.get("phases"):  # a sample has the length of the first one
        length = training["phases"][0].get("sequence_length")
    if not samples or not isinstance(data, dict) or not isinstance(length, int):
        return (), ()
    try:
        taken = _blended(data, epochs, samples, length) if data.get("blend") else _in_proportion(epochs, samples)
    except (TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        return (), (f"config.yaml: data.blend cannot be read: {error!r}",)
    if not taken:
        return (), ("no event names the corpora of this run: it was made by an older version",)
    return tuple(CorpusProgress(name, count, count * length, epochs.get(name)) for name, count in taken.items()), ()


def _in_proportion(epochs: Mapping[str, int], samples: int) -> dict[str, int]:
    """Samples of the corpora of shards that are read in one order."""
    total = sum(epochs.values())
    return {name: round(samples * count / total) for name, count in epochs.items()} if total else {}


def _blended(data: Mapping[str, Any], epochs: Mapping[str, int], samples: int, length: int) -> dict[str, int]:
    """Samples of the corpora of a blend, as its schedule assigns them."""
    from pipeline.config.data import CorpusConfig, DataConfig, PhaseConfig  # loads omegaconf, and the next one numpy
    from pipeline.data.load.blend import phases
    from pipeline.data.load.blend_schedule import BlendSchedule

    blend = {str(name): _known(CorpusConfig, corpus or {}) for name, corpus in data["blend"].items()}
    plan = [_known(PhaseConfig, phase) for phase in data.get("phases") or []]
    settings = dataclasses.replace(_known(DataConfig, {"blend_weights": data.get("blend_weights", "samples")}), blend=blend, phases=plan)
    names = sorted(blend)
    epoch = [epochs[name] for name in names] if set(names) <= set(epochs) else None
    counts = BlendSchedule(phases(settings, length, epoch)).counts(samples)
    return dict(zip(names, counts.tolist(), strict=True))


def _known(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from the values that it knows: another version may have written more."""
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True)
class Spent:
    """Node-hours of a kind.

    Attributes:
        kind: training, or what they were lost to; a failure by its reason.
        node_hours: of this kind.
        count: number of starts of the ranks with this kind.
        lost: to failures, start-up or waiting nodes; training, validation and checkpoints are not lost.
    """

    kind: str
    node_hours: float
    count: int
    lost: bool


@dataclass(frozen=True)
class Health:
    """The training loss.

    Attributes:
        last, before: mean loss of the last `steps` steps, and of as many before them, nats per target.
        begin: mean loss of the first `steps` steps.
        error: standard error of the difference of `last` and `before`, with steps taken as independent.
        steps: of each mean.
        count: steps with a finite loss.
        not_finite: steps of metrics.jsonl without a finite loss.
        spikes: steps whose loss is more than SPIKE robust standard deviations above the median of the block of losses before its own.
    """

    last: float
    before: float
    begin: float
    error: float
    steps: int
    count: int
    not_finite: int
    spikes: tuple[int, ...]


@dataclass(frozen=True)
class History:
    """A run with all of its lines.

    Attributes:
        run: its numbers at this moment.
        columns: of metrics.jsonl: name -> (step, value).
        config: resolved configuration; empty if it is missing.
        spent: where its node-hours went, the largest first; their sum is Run.node_hours. Empty for runs without events.
        seen: data by corpus.
        health: None for fewer than 8 steps.
    """

    run: Run
    columns: dict[str, list[tuple[int, float]]]
    config: dict[str, Any]
    spent: tuple[Spent, ...]
    seen: tuple[CorpusProgress, ...]
    health: Health | None

    @property
    def lost(self) -> float:
        """Node-hours lost to failures, start-up and waiting nodes."""
        return sum(spent.node_hours for spent in self.spent if spent.lost)


def read(run_dir: Path, now: float | None = None) -> History:
    """Read a run; arguments as of run.read."""
    run = runs.read(run_dir, now)
    lines = run_files.read_metrics(run_dir)
    config, config_problems = run_files.read_config(run_dir, whole=True)
    columns = metrics_file.columns(lines.content)
    corpora, problems = seen(config, run.life.corpora, run.samples or 0)
    known = (*run.problems, *(problem for problem in (*config_problems, *lines.problems, *problems) if problem not in run.problems))
    return History(
        run=replace(run, problems=known),
        columns=columns,
        config=config,
        spent=spent(run, columns.get("seconds", [])),
        seen=corpora,
        health=health(lines.content),
    )


def spent(run: Run, seconds: Sequence[tuple[int, float]]) -> tuple[Spent, ...]:
    """Return where the node-hours of a run went.

    The steps of metrics.jsonl up to the checkpoint with which a start ended are training. What is left of the time of a start that failed
    is lost to its reason, such as steps after its last checkpoint and the time in which nobody noticed; of another start it is
    validation and checkpoints.

    Args:
        seconds: (step, seconds) of the steps.
    """
    if run.node_hours is None:
        return ()
    sums = [0.0, *accumulate(value for _, value in seconds)]
    steps = [step for step, _ in seconds]
    by_kind: dict[tuple[str, bool], tuple[float, int]] = {}

    def add(kind: str, hours: float, *, lost: bool = True) -> None:
        before, count = by_kind.get((kind, lost), (0.0, 0))
        by_kind[kind, lost] = (before + hours, count + 1)

    of_starts = 0.0
    for number, start in enumerate(run.starts):
        nodes, end = max(len(start.nodes), 1) / 3600, start.end or run.last_sign or start.last
        whole = max(end - start.begin, 0)
        last_step = _end_step(run, number)
        trained = min(_between(steps, sums, start.step, last_step), whole)
        starting = 0.0 if start.ready is None else min(max(start.ready - start.begin, 0), whole - trained)
        rest = whole - trained - starting
        of_starts += whole * nodes
        add(TRAINING, trained * nodes, lost=False)
        if starting:
            add(START_UP, starting * nodes)
        if start.failed:
            add(start.reason or "failed", rest * nodes)
        else:
            add(_UNKNOWN_START_UP if start.ready is None else REST, rest * nodes, lost=False)
    if (between := run.node_hours - of_starts) > 1e-9:
        add(BETWEEN, between)
    kinds = [Spent(kind, hours, count, lost) for (kind, lost), (hours, count) in by_kind.items()]
    return tuple(sorted(kinds, key=lambda kind: (kind.lost, -kind.node_hours)))


def _end_step(run: Run, number: int) -> int:
    """The last step of a start that counts: that of its last checkpoint, or of the next start; for the last start, the last one written."""
    start = run.starts[number]
    if number + 1 < len(run.starts):
        return run.starts[number + 1].step
    return run.step if start.end is None or start.end_step is None else start.end_step


def _between(steps: Sequence[int], sums: Sequence[float], first: int, last: int) -> float:
    """Seconds of the steps after `first`, up to `last`.

    Args:
        steps: ascending.
        sums: seconds of the first 0, 1, ... of them.
        first, last: steps.
    """
    return max(sums[bisect_right(steps, last)] - sums[bisect_right(steps, first)], 0.0)


def health(lines: Sequence[dict[str, Any]]) -> Health | None:
    """Return what the losses of the steps tell; None for fewer than 8 of them.

    Args:
        lines: of metrics.jsonl.
    """
    trained = [line for line in lines if "loss" in line]
    losses = [(line["step"], float(line["loss"])) for line in trained if isinstance(line["loss"], int | float)]
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if len(finite) < 8:
        return None
    count = min(TREND_STEPS, len(finite) // 4)
    last, before = ([loss for _, loss in some] for some in (finite[-count:], finite[-2 * count : -count]))
    error = math.sqrt((statistics.variance(last) + statistics.variance(before)) / count)
    begin = statistics.fmean(loss for _, loss in finite[:count])
    means = statistics.fmean(last), statistics.fmean(before), begin
    return Health(*means, error, count, len(finite), len(trained) - len(finite), _spikes(finite))


def _spikes(losses: Sequence[tuple[int, float]]) -> tuple[int, ...]:
    """The steps that are spikes (Health.spikes)."""
    spikes: list[int] = []
    size = min(BLOCK, len(losses) // 4)
    for begin in range(size, len(losses), size):
        before = [loss for _, loss in losses[begin - size : begin]]
        middle = statistics.median(before)
        deviation = 1.4826 * statistics.median(abs(loss - middle) for loss in before)
        spikes += [step for step, loss in losses[begin : begin + size] if loss > middle + SPIKE * deviation > middle]
    return tuple(spikes)
