"""The version of this package, and the commit of its repository, which manifests and certificates record."""

from __future__ import annotations

import functools
import logging
import subprocess
import tomllib
from pathlib import Path

log = logging.getLogger("pipeline")

PACKAGE = Path(__file__).resolve().parents[1]


def commit() -> str | None:
    """Return the commit of the repository, with "-dirty" if files were changed.

    Of an installed wheel, it is the commit that it was built from. None if that is unknown, and without git.
    """
    if (PACKAGE / "COMMIT").is_file():
        return (PACKAGE / "COMMIT").read_text(encoding="ascii").strip()
    if not (PACKAGE.parent / ".git").exists():  # another repository may be above the environment that has the package
        return None
    described = git("describe", "--always", "--dirty", "--abbrev=40")
    return None if described is None else described.decode(errors="replace").strip()


@functools.cache
def git(*words: str) -> bytes | None:
    """Return the output of a git command in the repository of this package; None if it fails, which is logged."""
    root = PACKAGE.parent
    options = ("-c", f"safe.directory={root}")  # git refuses the clone of another user, whose code runs here all the same
    try:
        return subprocess.run(["git", "-C", str(root), *options, *words], capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
        reason = " ".join(said.decode(errors="replace").split()) or error
        log.warning("the commit and the changes of %s are not recorded: %s", root, reason)
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
