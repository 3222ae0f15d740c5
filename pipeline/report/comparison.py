"""Several runs side by side: which is best and by how much, with the noise of validation, and in which settings they differ."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.report.run import Run, is_finite

#: Standard errors that two runs must differ by, so that the difference is not called noise.
ERRORS = 2.0
#: Runs that a sentence names at most.
_NAMED = 4
#: Settings that differ between runs without a meaning for their result.
_OWN = ("run_dir", "tracking", "stage.name", "cluster", "dry_run")


@dataclass(frozen=True)
class Place:
    """A run in a comparison.

    Attributes:
        name: end of its path that tells it apart.
        run: the run.
        behind: validation loss above that of the best run, nats per target; None without one.
        error: standard error of `behind`, with the two validations taken as independent: on the same split it is an upper bound. None
            if a run does not tell its own.
        values: settings in which the runs differ, "key=value".
    """

    name: str
    run: Run
    behind: float | None
    error: float | None
    values: tuple[str, ...]

    @property
    def within_noise(self) -> bool:
        """Whether the run may be as good as the best one."""
        return self.behind is not None and (self.behind == 0 or self.behind <= ERRORS * (self.error or 0.0))


def compare(runs: Sequence[Run], values: Sequence[tuple[str, ...]], names: Sequence[str] | None = None) -> list[Place]:
    """Return the runs, the lowest last validation loss first, else the lowest training loss; those without a finite loss are last.

    Args:
        runs: at least one.
        values: settings of each of them.
        names: of the runs; default: names_of their paths.
    """
    names = names_of([Path(run.run_dir) for run in runs]) if names is None else names
    order = sorted(range(len(runs)), key=lambda n: (bool(runs[n].trouble), *rank(runs[n].validation_loss, runs[n].loss)))
    best = runs[order[0]]
    return [Place(names[n], runs[n], *_behind(runs[n], best), values[n]) for n in order]


def rank(*losses: float | None) -> tuple[float, ...]:
    """Return the key by which runs are sorted: a loss that is missing, infinite or not a number comes after all others."""
    return tuple(loss if is_finite(loss) else math.inf for loss in losses)


def _behind(run: Run, best: Run) -> tuple[float | None, float | None]:
    """Difference of the validation losses of two runs, and its standard error."""
    if run.trouble or not (is_finite(run.validation_loss) and is_finite(best.validation_loss)):
        return None, None
    errors = (run.validation_loss_stderr, best.validation_loss_stderr)
    error = None if run is best or None in errors else math.hypot(*(value or 0.0 for value in errors))
    return run.validation_loss - best.validation_loss, error


def verdict(places: Sequence[Place]) -> str:
    """Return which run is best, by how much, and which others may be as good. A run that has lost its finite loss is not counted."""
    bad = [place.name for place in places if place.run.trouble]
    end = f"; not counted, without a finite loss: {named(bad)}" if bad else ""
    return _best(places) + end


def _best(places: Sequence[Place]) -> str:
    """The verdict on the runs that have a loss."""
    best, others = places[0], [place for place in places[1:] if place.behind is not None]
    if best.behind is None:
        if best.run.trouble or not is_finite(best.run.loss):
            return "no run has a finite loss yet"
        return f"run {best.name} has the lowest training loss ({best.run.loss:.4f}); no run has a validation loss"
    head = f"run {best.name} has the lowest validation loss ({best.run.validation_loss:.4f})"
    if not others:
        return f"{head}; no other run has one"
    steps = {place.run.validation_step for place in (best, *others)}
    end = "; the runs were validated at different steps" if len(steps) > 1 else ""
    ahead = f"{head}, lower by {others[0].behind:.4f} than that of run {others[0].name}"
    if all(place.error is None for place in others):
        equal = [place.name for place in others if place.behind == 0]
        if equal:
            loss = f"{best.run.validation_loss:.4f}"
            return f"{1 + len(equal)} runs have the lowest validation loss ({loss}): {named([best.name, *equal])}{end}"
        return f"{ahead}; the noise of validation is not known{end}"
    within = [place.name for place in others if place.within_noise]
    if not within:
        return f"{ahead}, more than {ERRORS:g} standard errors of the difference ({others[0].error or 0.0:.4f}){end}"
    noise = f"within the noise ({ERRORS:g} standard errors of the difference)"
    return f"{head}; {len(within)} of {len(others)} others {'is' if len(within) == 1 else 'are'} {noise}: {named(within)}{end}"


def named(names: Sequence[str]) -> str:
    """Return the first names, and how many there are more."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the paths below their common folder, as tools/status names them."""
    whole = [path.absolute() for path in paths]
    folder = os.path.commonpath([path.parent for path in whole])
    return [os.path.relpath(path, folder) for path in whole]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return for each configuration the settings in which they differ, without those of the place where a run is."""
    flat = [dict(_flat(config)) for config in configs]
    known = [one for one in flat if one]
    keys = sorted({key for one in known for key in one if not key.startswith(_OWN)})
    different = [key for key in keys if len({repr(one.get(key)) for one in known}) > 1]
    return [tuple(f"{key}={one[key]}" for key in different if key in one) for one in flat]


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, value)]
    return found
