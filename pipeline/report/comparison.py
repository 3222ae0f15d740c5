"""Several runs side by side: which is best and by how much, with the noise of validation, and in which settings they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.report.history import History
from pipeline.report.run import Run

#: Standard errors that two runs must differ by, so that the difference is not called noise.
ERRORS = 2.0
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


def compare(histories: Sequence[History]) -> list[Place]:
    """Return the runs, the lowest last validation loss first, else the lowest training loss; those without a loss are last."""

    def order(history: History) -> tuple[float, float]:
        run = history.run
        return tuple(math.inf if loss is None else loss for loss in (run.validation_loss, run.loss))  # type: ignore[return-value]

    ordered = sorted(histories, key=order)
    names = names_of([Path(history.run.run_dir) for history in ordered])
    values = differing([history.config for history in ordered])
    best = ordered[0].run
    return [Place(names[n], one.run, *_behind(one.run, best), values[n]) for n, one in enumerate(ordered)]


def _behind(run: Run, best: Run) -> tuple[float | None, float | None]:
    """Difference of the validation losses of two runs, and its standard error."""
    if run.validation_loss is None or best.validation_loss is None:
        return None, None
    errors = (run.validation_loss_stderr, best.validation_loss_stderr)
    error = None if run is best or None in errors else math.hypot(*(value or 0.0 for value in errors))
    return run.validation_loss - best.validation_loss, error


def verdict(places: Sequence[Place]) -> str:
    """Return which run is best, and by how much."""
    best, second = places[0], places[1] if len(places) > 1 else None
    if best.run.validation_loss is None:
        if best.run.loss is None:
            return "no run has a loss yet"
        return f"{best.name} has the lowest training loss ({best.run.loss:.4f}); no run was validated"
    if second is None or second.behind is None:
        return f"{best.name}: {best.run.validation_loss:.4f}; no other run was validated"
    equal = [place.name for place in places if place.behind == 0]
    if len(equal) > 1:
        return f"{', '.join(equal)} have the same validation loss, {best.run.validation_loss:.4f}, which is the lowest"
    ahead = f"{best.name} has the lowest validation loss ({best.run.validation_loss:.4f}), {second.behind:.4f} below {second.name}"
    steps = {place.run.validation_step for place in places if place.behind is not None}
    other = "; the runs were validated at different steps" if len(steps) > 1 else ""
    if second.error is None:
        return f"{ahead}; the noise of validation is not known{other}"
    within = [place.name for place in places[1:] if place.behind is not None and place.behind <= ERRORS * (place.error or 0.0)]
    if not within:
        return f"{ahead}, more than {ERRORS:g} standard errors ({second.error:.4f} each){other}"
    return f"{ahead}; within the noise of validation ({ERRORS:g} standard errors) of it: {', '.join(within)}{other}"


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that tell them apart."""
    whole = [path.resolve() for path in paths]
    parts = 1
    while len({path.parts[-parts:] for path in whole}) < len(set(whole)):
        parts += 1
    return [str(Path(*path.parts[-parts:])) for path in whole]


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
