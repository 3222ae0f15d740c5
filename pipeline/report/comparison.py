"""Several runs side by side: which is best and by how much, with the noise of validation, and in which settings they differ."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import knobs
from pipeline.common.texts import first_names
from pipeline.report.run import Run
from pipeline.report.run_files import is_finite

#: Standard errors that two runs must differ by, so that the difference is not called noise.
ERRORS = 2.0
#: Runs that a sentence names at most.
_NAMED = 4
#: Settings that differ between runs without a meaning for their result.
_OWN = ("run_dir", "tracking", "stage.name", "cluster", "dry_run")


@dataclass(frozen=True)
class RankedRun:
    """A run in a comparison.

    Attributes:
        name: end of its path that tells it apart.
        score: last validation loss, nats per target; bits per byte of text if the runs have different tokenizers. None without one.
        behind: score above that of the best run; None without one, and if the validations cannot be compared.
        error: standard error of `behind`, with the two validations taken as independent: on the same split it is an upper bound. None
            if a run does not tell its own.
        values: settings in which the runs differ, "key=value".
    """

    name: str
    run: Run
    score: float | None
    behind: float | None
    error: float | None
    values: tuple[str, ...]

    @property
    def within_noise(self) -> bool:
        """Whether the run may be as good as the best one."""
        return self.behind is not None and (self.behind == 0 or self.behind <= ERRORS * (self.error or 0.0))


def compare(runs: Sequence[Run], values: Sequence[tuple[str, ...]], names: Sequence[str] | None = None) -> list[RankedRun]:
    """Return the runs, the lowest score first, else the lowest training loss; those without a finite loss are last.

    Args:
        runs: at least one.
        values: settings of each of them.
        names: of the runs; default: names_of their paths.
    """
    names = names_of([Path(run.run_dir) for run in runs]) if names is None else names
    scores = [score(run, per_byte=per_byte(runs)) for run in runs]
    order = sorted(range(len(runs)), key=lambda n: (bool(runs[n].trouble), *rank(scores[n], runs[n].loss)))
    first = order[0] if not incomparable(runs) else None
    behind = [(None, None) if first is None else _behind(n == first, runs[n], scores[n], runs[first], scores[first]) for n in order]
    return [RankedRun(names[n], runs[n], scores[n], *of_best, values[n]) for n, of_best in zip(order, behind, strict=True)]


def per_byte(runs: Sequence[Run]) -> bool:
    """Whether the runs have different tokenizers, so that losses per token cannot be compared."""
    return len({run.tokenizer for run in runs if run.tokenizer and run.validation_loss is not None}) > 1


def score(run: Run, *, per_byte: bool) -> float | None:
    """Return the number by which runs are compared, the smaller one is better: bits per byte, or the last validation loss."""
    return run.bits_per_byte if per_byte else run.validation_loss


def incomparable(runs: Sequence[Run]) -> str:
    """Return why the validations of the runs say nothing about which one is better; empty if they do, or if fewer than two have one."""
    validated = [run for run in runs if is_finite(run.validation_loss) and not run.trouble]
    if len(validated) < 2:
        return ""
    if len({run.validation_data for run in validated if run.validation_data}) > 1:
        return "their validation data differ"
    if any(run.validation_samples == 1 for run in validated):
        return "a validation of one sequence says too little"
    if per_byte(validated) and not all(is_finite(run.bits_per_byte) for run in validated):
        return "their tokenizers differ, and not all have bits per byte"
    return ""


def rank(*losses: float | None) -> tuple[float, ...]:
    """Return the key by which runs are sorted: a loss that is missing, infinite or not a number comes after all others."""
    return tuple(loss if is_finite(loss) else math.inf for loss in losses)


def _behind(first: bool, run: Run, score: float | None, best: Run, lowest: float | None) -> tuple[float | None, float | None]:
    """Difference of the scores of two runs, and its standard error. Bits per byte are a multiple of the loss, and so is their error."""
    if run.trouble or not (is_finite(score) and is_finite(lowest)):
        return None, None
    errors = [
        None if run.validation_loss_stderr is None else run.validation_loss_stderr * value / (run.validation_loss or 1.0)
        for run, value in ((run, score), (best, lowest))
    ]
    return score - lowest, None if first or None in errors else math.hypot(*(value or 0.0 for value in errors))


def verdict(places: Sequence[RankedRun]) -> str:
    """Return which run is best, by how much, and which others may be as good. A run that has lost its finite loss is not counted."""
    bad = [place.name for place in places if place.run.trouble]
    end = f"; not counted, without a finite loss: {first_names(bad, _NAMED)}" if bad else ""
    return _best(places) + end


def _best(places: Sequence[RankedRun]) -> str:
    """The verdict on the runs that have a loss."""
    best, others = places[0], [place for place in places[1:] if place.behind is not None]
    runs = [place.run for place in places]
    if why := incomparable(runs):
        return f"no run is called the best: {why}"
    if best.behind is None:
        if best.run.trouble or not is_finite(best.run.loss):
            return "no run has a finite loss yet"
        return f"run {best.name} has the lowest training loss ({best.run.loss:.4f}); no run has a validation loss"
    measure, lowest = "validation loss", f"{best.score:.4f}"
    if per_byte(runs):
        measure, lowest = "number of bits per byte of the validation split", f"{lowest}; their tokenizers differ"
    head = f"run {best.name} has the lowest {measure} ({lowest})"
    if not others:
        return f"{head}; no other run has one"
    steps = {place.run.validation_step for place in (best, *others)}
    end = "; the runs were validated at different steps" if len(steps) > 1 else ""
    ahead = f"{head}, lower by {others[0].behind:.4f} than that of run {others[0].name}"
    if all(place.error is None for place in others):
        equal = [place.name for place in others if place.behind == 0]
        if equal:
            return f"{1 + len(equal)} runs have the lowest {measure} ({lowest}): {first_names([best.name, *equal], _NAMED)}{end}"
        return f"{ahead}; the noise of validation is not known{end}"
    within = [place.name for place in others if place.within_noise]
    if not within and others[0].error == 0:
        return f"{ahead}, on the full split{end}"
    if not within:
        return f"{ahead}, more than {ERRORS:g} standard errors of the difference ({others[0].error or 0.0:.4f}){end}"
    noise = f"within the noise ({ERRORS:g} standard errors of the difference)"
    return (
        f"{head}; {len(within)} of {len(others)} others {'is' if len(within) == 1 else 'are'} {noise}: {first_names(within, _NAMED)}{end}"
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the paths below their common folder, as tools/status names them."""
    whole = [path.absolute() for path in paths]
    folder = os.path.commonpath([path.parent for path in whole])
    return [os.path.relpath(path, folder) for path in whole]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return for each configuration the settings in which they differ, without those of the place where a run is."""
    flat = [dict(knobs.leaves("", config)) if config else {} for config in configs]
    known = [settings for settings in flat if settings]
    keys = sorted({key for settings in known for key in settings if not key.startswith(_OWN)})
    different = [key for key in keys if len({repr(settings.get(key)) for settings in known}) > 1]
    return [tuple(f"{key}={settings[key]}" for key in different if key in settings) for settings in flat]
