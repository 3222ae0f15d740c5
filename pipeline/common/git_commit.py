"""The commit of this repository, which manifests and certificates record."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """Return the commit of this repository, with "-dirty" if files were changed; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
