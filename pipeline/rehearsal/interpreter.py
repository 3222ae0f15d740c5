"""Which Python runs a rehearsal: one whose torch is a CUDA build. Imports no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.common.errors import UserError

#: Root of the repository, or the folder of the installed package.
ROOT = Path(__file__).parents[2]
#: Environment that tools/install --cuda creates.
CUDA_ENVIRONMENT = ROOT / ".venv-cuda"
#: What still works without a CUDA build.
STILL = "dry_run=true and stage=plan work without one"
#: Prints the CUDA version of the installed torch without importing it; nothing for a build without CUDA.
_PROBE = """
import importlib.util, re
found = importlib.util.find_spec("torch")
text = open(found.origin.replace("__init__.py", "version.py")).read() if found else ""
match = re.search(r"^cuda\\b[^=]*= *'([^']*)'", text, re.MULTILINE)
print(match[1] if match else "")
"""


def choose(wanted: str | None) -> Path:
    """Return the interpreter of a rehearsal: `wanted`, this one if its torch is a CUDA build, or that of .venv-cuda.

    Args:
        wanted: stage.python.

    Raises:
        UserError: there is none, or `wanted` is none.
    """
    if wanted is not None:
        if cuda_version(Path(wanted)) is None:
            rule = "must be a Python interpreter whose torch is a CUDA build"
            raise UserError.of("stage.python", wanted, rule, f"name another one, or run tools/install --cuda; {STILL}")
        return Path(wanted)
    for candidate in (Path(sys.executable), CUDA_ENVIRONMENT / "bin/python"):
        if cuda_version(candidate) is not None:
            return candidate
    rule = f"requires a CUDA build of torch, which runs without a GPU: {sys.executable} has none, and there is no {CUDA_ENVIRONMENT}"
    fix = f"run tools/install --cuda, or set stage.python to the interpreter of an environment that has one; {STILL}"
    raise UserError.of("stage.name", "rehearse", rule, fix)


def cuda_version(python: Path) -> str | None:
    """Return the CUDA version of an interpreter's torch, such as "13.0"; None without a CUDA build, or if it cannot be run."""
    try:
        found = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return found or None
