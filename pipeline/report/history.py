"""A whole run: all lines of metrics.jsonl, where its node-hours went, which data it has seen, and whether its loss is healthy."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.common import metrics_file
from pipeline.report import run as runs
from pipeline.report import run_files
from pipeline.report.account import Columns, account_of, add
from pipeline.report.run import Run

T = TypeVar("T")
#: Most losses of a block: a spike is a loss more than SPIKE robust standard deviations above the median of the block before.
BLOCK, SPIKE = 100, 8.0
#: Steps of the two means that are compared at the end of a run, at most.
TREND_STEPS = 500
#: Buckets of an account that nobody wants.
LOST = ("loading", "start-up", "waiting", "lost")


@dataclass(frozen=True)
class CorpusProgress:
    """A corpus.

    Attributes:
        corpus: its name; empty if the data has no names.
        samples: samples of it that were trained; for shards without a blend, in proportion to the tokens of the corpus.
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
        kind: a bucket of account.BUCKETS; of what is lost, its cause.
        count: number of starts of the ranks with this kind.
        lost: whether the bucket is of LOST.
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
        spent=spent(run, columns),
        seen=corpora,
        health=health(lines.content),
    )


def spent(run: Run, columns: Columns) -> tuple[Spent, ...]:
    """Return where the node-hours of a run went: its account, with what was lost by cause."""
    found, hours = account_of(run, columns, run.last_sign or 0.0), dict[tuple[str, str], float]()
    for (bucket, cause, _), seconds in found.seconds.items():
        add(hours, {(bucket, cause): seconds / 3600})
    kinds = [
        Spent(cause or bucket, value, int(found.starts.get((bucket, cause), 0)), bucket in LOST) for (bucket, cause), value in hours.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: (kind.lost, -kind.node_hours)))


def health(lines: Sequence[dict[str, Any]]) -> Health | None:
    """Return what the losses of the steps tell; None for fewer than 8 of them."""
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
