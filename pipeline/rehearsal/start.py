"""Starts the command again: in the interpreter with a CUDA build, and there with the driver without a GPU. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.config.hardware import Hardware
from pipeline.launch import site
from pipeline.rehearsal import driver

#: Environment variable of the process that rehearses: path of the driver.
ACTIVE = "PIPELINE_REHEARSAL"


def is_active() -> bool:
    """Whether this process has the driver and is to rehearse."""
    return ACTIVE in os.environ


def again(arguments: list[str], hardware: Hardware, wanted: str | None, program: Sequence[str] = ("-m", "pipeline")) -> int:
    """Run the command in a child process that has what this one lacks, and return its exit code.

    Args:
        arguments: the command line.
        hardware: GPU of the job.
        wanted: stage.python.
        program: what the interpreter runs.

    Raises:
        UserError: there is no interpreter with a CUDA build, or the driver cannot be built.
    """
    python = choose(wanted)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))  # the environment need not have this package
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cuda"}
    if is_this(python):
        library = driver.build(hardware)
        environment |= {**driver.environment(library), ACTIVE: str(library)}
        site.add(environment, site.NVIDIA_DEFAULTS)  # the allocator of the job
    return subprocess.run([python, *program, *arguments], env=environment, check=False).returncode


def is_this(python: Path) -> bool:
    """Whether an interpreter is that of this process; links are not followed, since environments link to the same file."""
    return python.absolute() == Path(sys.executable).absolute()


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
        version = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return version or None
