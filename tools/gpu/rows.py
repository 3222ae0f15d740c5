"""A row of the table of tools/gpu_check, what the sections are given, the verdict and the JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.common.atomic_files import atomic_file

Status = Literal["ok", "failed", "skipped"]

#: Longest remark of a row that is printed; the JSON has all of it.
PRINTED = 100


@dataclass(frozen=True)
class Row:
    """A checked or measured quantity.

    Attributes:
        name: of the quantity, unique in its section.
        status: failed if the value exceeds the bound, or could not be determined; skipped if this machine cannot have it.
        value: what was found; None without a number.
        bound: largest value that passes; None for a row that only reports.
        remark: unit and conditions of the value, or why there is none.
        section: the section that it belongs to, which sections.run adds.
    """

    name: str
    status: Status = "ok"
    value: float | None = None
    bound: float | None = None
    remark: str = ""
    section: str = ""

    @classmethod
    def bounded(cls, name: str, value: float, bound: float, remark: str = "") -> Row:
        """Return a row that fails unless the value is at most the bound; nan fails."""
        return cls(name, "ok" if value <= bound else "failed", value, bound, remark)

    @classmethod
    def skipped(cls, name: str, reason: str) -> Row:
        """Return a row of what this machine cannot have."""
        return cls(name, "skipped", remark=reason)

    @classmethod
    def failed(cls, name: str, error: BaseException | str) -> Row:
        """Return a row of what ended with an error."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return cls(name, "failed", remark=" ".join(text.split()))

    def line(self) -> str:
        remark = self.remark if len(self.remark) <= PRINTED else f"{self.remark[: PRINTED - 4]} ..."
        return f"{self.section:<12}{self.name:<58}{self.status:<8}{number(self.value):>10}{number(self.bound):>10}  {remark}".rstrip()


#: The first line of the table.
TITLES = f"{'section':<12}{'check':<58}{'status':<8}{'value':>10}{'bound':>10}  remark"


def number(value: float | None) -> str:
    """Format a number in at most ten characters; None is empty."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 100 <= abs(value) < 1e7 else f"{value:.2f}" if 0.1 <= abs(value) < 100 else f"{value:.1e}"


@dataclass(frozen=True)
class Setup:
    """What the sections run on.

    Attributes:
        device: the GPU, or the CPU without one.
        ranks: processes of the section `ranks`.
        quick: whether only a few cases of each section run.
        spoil: whether faults are planted, so that rows must fail.
        folder: for files of the sections.
    """

    device: torch.device
    ranks: int
    quick: bool
    spoil: bool
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def described(self) -> str:
        """Return the devices of this machine in words."""
        if not self.cuda:
            return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(self.device)}"


def guarded(name: str, check: Callable[..., Row], *arguments: Any, **more: Any) -> Row:
    """Return the row of `check(name, ...)`; a failed one with the error if it raises: the other rows of the section still run."""
    try:
        return check(name, *arguments, **more)
    except Exception as error:
        return Row.failed(name, error)


#: Name of the file in the output folder.
FILE = "gpu_check.json"


def verdict(rows: Sequence[Row], device: str, sections: Sequence[str]) -> str:
    """Return the last line of the report."""
    counts = Counter(row.status for row in rows)
    failed = list(dict.fromkeys(row.section for row in rows if row.status == "failed"))
    text = f"{counts['ok']} checks passed, {counts['failed']} failed, {counts['skipped']} skipped"
    where = f" in {', '.join(failed)}" if failed else ""
    return f"gpu_check: {'FAILED' if failed else 'PASSED'}{where} on {device}: {text} ({', '.join(sections)})"


def write(folder: Path, rows: Sequence[Row], about: dict[str, Any]) -> Path:
    """Write all rows as JSON, and return the file.

    Args:
        folder: of the file.
        rows: of all sections.
        about: further keys of the file.
    """
    path = folder / FILE
    with atomic_file(path, "w") as handle:
        handle.write(json.dumps({**about, "rows": [as_json(row) for row in rows]}, indent=1) + "\n")
    return path


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON has it: numbers that are not finite, which JSON lacks, as text."""
    content = {"section": row.section, **dataclasses.asdict(row)}
    return {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in content.items()}


def from_json(content: dict[str, Any]) -> Row:
    """Return the row of as_json."""
    numbers = {key: None if content[key] is None else float(content[key]) for key in ("value", "bound")}
    return Row(**{**content, **numbers})
