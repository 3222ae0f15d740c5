"""Which corpus a run has seen how often: arithmetic on the number of samples, as the order of its data is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
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


def seen(config: Mapping[str, Any], epochs: Mapping[str, int], samples: int) -> tuple[tuple[Seen, ...], tuple[str, ...]]:
    """Return the corpora, and why they are unknown.

    Args:
        config: resolved configuration of the run.
        epochs: samples of an epoch of each corpus, of event run_start; empty for older versions.
        samples: that were trained.
    """
    data, training = config.get("data"), config.get("training")
    length = training.get("sequence_length") if isinstance(training, dict) else None
    if not samples or not isinstance(data, dict) or not isinstance(length, int):
        return (), ()
    try:
        taken = _blended(data, epochs, samples, length) if data.get("blend") else _in_proportion(epochs, samples)
    except (TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        return (), (f"config.yaml: data.blend cannot be read: {error!r}",)
    if not taken:
        return (), ("no event names the corpora of this run: it was made by an older version",)
    return tuple(Seen(name, count, count * length, epochs.get(name)) for name, count in taken.items()), ()


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
