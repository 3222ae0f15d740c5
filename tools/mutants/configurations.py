"""Certify on random legal configurations without a mutant: every job that is not certified is a defect."""

from __future__ import annotations

from pathlib import Path


def run(count: int, seed: int, folder: Path) -> int:
    """See the tool."""
    raise NotImplementedError
