"""The version of this package, and the commit of its repository, which manifests and certificates record."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def commit() -> str | None:
    """Return the commit of the repository, with "-dirty" if files were changed.

    Of an installed wheel, it is the commit that it was built from. None if that is unknown, and without git.
    """
    if (PACKAGE / "COMMIT").is_file():
        return (PACKAGE / "COMMIT").read_text(encoding="ascii").strip()
    if not (PACKAGE.parent / ".git").exists():  # another repository may be above the environment that has the package
        return None
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def version() -> str:
    """Return the version and the commit, such as "0.1.0 (1a2b3c4d5e6f)"; that of pyproject.toml in a checkout."""
    project = PACKAGE.parent / "pyproject.toml"
    if (PACKAGE / "COMMIT").is_file() or not project.is_file():
        import importlib.metadata

        number = importlib.metadata.version("tannschen")
    else:
        number = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    name, mark, dirty = (commit() or "").partition("-dirty")
    return f"{number} ({name[:12]}{mark}{dirty})" if name else number
