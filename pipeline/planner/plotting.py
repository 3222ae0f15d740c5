"""Pictures of the planner: what all have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError


def new_figure(path: Path, width: float, height: float) -> Any:
    """Return an empty figure of matplotlib, which is an optional package.

    Raises:
        UserError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError.of("stage.plot", path, "requires matplotlib", "pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG."""
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with 1, 2, 5, 10, ... instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())
