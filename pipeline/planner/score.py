"""Errors of predictions of a table against its published step times and out-of-memory labels."""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

from pipeline.planner.published import Contradiction, measured_step_time


@dataclass(frozen=True)
class Score:
    """A predicted row.

    Attributes:
        source: whose row it is.
        text: model, GPUs and layout.
        error: predicted / measured step time - 1; None without a measured time.
        fits_right: whether the fits/does-not-fit label is right; None without a label.
    """

    source: str
    text: str
    error: float | None
    fits_right: bool | None


def score(predictions: Path) -> tuple[list[Score], int]:
    """Return the scores of all predicted rows, and the number of refused rows.

    Raises:
        OSError: the file cannot be read.
        KeyError: it has no column of predictions.
    """
    with open(predictions, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    scores, refused = [], 0
    for row in rows:
        if not row["predicted_step_time_s"]:
            refused += 1
            continue
        status = row.get("status", "ok")
        try:
            measured = measured_step_time(row) if status in ("ok", "") else None
        except Contradiction:
            measured = None
        fits = {"ok": True, "oom": False}.get(status)
        scores.append(
            Score(
                row.get("source") or "(no source)",
                " ".join(f"{name}={row.get(name)}" for name in ("model_name", "gpu", "gpus", "tp", "pp", "micro_batch", "global_batch")),
                float(row["predicted_step_time_s"]) / measured - 1 if measured else None,
                None if fits is None else (row["fits"] == "yes") == fits,
            )
        )
    return scores, refused


def one_out(source: str, sources: dict[str, list[Score]]) -> float:
    """Return the mean absolute error of a source after the median error of each other source is taken out of its predictions."""
    others = [statistics.median(errors) for name, rows in sources.items() if name != source and (errors := _errors(rows))]
    factor = 1 + (statistics.fmean(others) if others else 0.0)
    return statistics.fmean(abs((1 + error) / factor - 1) for error in _errors(sources[source]))


def _errors(rows: list[Score]) -> list[float]:
    return [row.error for row in rows if row.error is not None]
