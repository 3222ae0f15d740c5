"""Errors of predictions of a table against its published step times and out-of-memory labels."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.study.cells import Contradiction, measured_step_time, number


@dataclass(frozen=True)
class RowScore:
    """A predicted row.

    Attributes:
        source: whose row it is.
        text: model, GPUs and layout.
        error: predicted / measured step time - 1; None without a measured time.
        fits_right: whether the fits/does-not-fit label is right; None without a label.
        fits: the label.
        memory_error: predicted / measured memory - 1, where the row prints it (GiB).
    """

    source: str
    text: str
    error: float | None
    fits_right: bool | None
    predicted: float = 0.0
    measured: float | None = None
    group: tuple[str, ...] = ()
    fits: bool | None = None
    memory_error: float | None = None


#: Rows that agree in these columns differ in their layout only.
GROUP = ("source", "table", "model_name", "layers", "hidden", "heads", "seq_len", "gpu", "gpus", "global_batch", "precision")
#: Layouts that a group has at least.
LAYOUTS = 3


def regrets(scores: list[RowScore]) -> list[float]:
    """Return for every group how much longer the layout takes that is predicted to be the fastest, over the fastest published one."""
    groups: dict[tuple[str, ...], list[RowScore]] = {}
    for row in scores:
        if row.measured:
            groups.setdefault(row.group, []).append(row)
    lost = []
    for rows in groups.values():
        if len(rows) >= LAYOUTS:
            chosen = min(rows, key=lambda row: row.predicted)
            lost.append((chosen.measured or 0.0) / min(row.measured or 0.0 for row in rows) - 1)
    return lost


def quantiles(values: Sequence[tuple[str, float]], shares: Sequence[float]) -> list[float]:
    """Return the values below which these shares of the rows are, every source weighted equally.

    Args:
        values: source and value of every row.
        shares: in ascending order.
    """
    counts = Counter(source for source, _ in values)
    below, result = 0.0, list[float]()
    for source, value in sorted(values, key=lambda row: row[1]):
        below += 1 / counts[source] / len(counts)
        while len(result) < len(shares) and below >= shares[len(result)] - 1e-9:
            result.append(value)
    return result


def score(predictions: Path) -> tuple[list[RowScore], int]:
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
            RowScore(
                row.get("source") or "(no source)",
                " ".join(f"{name}={row.get(name)}" for name in ("model_name", "gpu", "gpus", "tp", "pp", "micro_batch", "global_batch")),
                float(row["predicted_step_time_s"]) / measured - 1 if measured else None,
                None if fits is None else (row["fits"] == "yes") == fits,
                float(row["predicted_step_time_s"]),
                measured,
                tuple(row.get(name, "") for name in GROUP),
                fits,
                _memory_error(row),
            )
        )
    return scores, refused


def _memory_error(row: dict[str, str]) -> float | None:
    try:
        measured = number(row, "memory_gb_per_gpu")
    except Contradiction:
        return None
    return float(row["predicted_memory_gb"]) / measured - 1 if measured else None
