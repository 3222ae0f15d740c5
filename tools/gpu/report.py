"""The verdict and the JSON of tools/gpu_check."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file
from tools.gpu.rows import Row

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
    content = dataclasses.asdict(row)
    return {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in content.items()}


def from_json(content: dict[str, Any]) -> Row:
    """Return the row of as_json."""
    numbers = {key: None if content[key] is None else float(content[key]) for key in ("value", "bound")}
    return Row(**{**content, **numbers})
