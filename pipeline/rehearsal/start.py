"""Starts the command again: in the interpreter with a CUDA build, and there with the driver without a GPU. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.hardware import Hardware
from pipeline.launch import rank_environment
from pipeline.rehearsal import driver, interpreter

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
    python = interpreter.choose(wanted)
    environment = {**os.environ, "PYTHONPATH": _search_path(), "DS_ACCELERATOR": "cuda"}
    if is_this(python):
        library = driver.build(hardware)
        environment |= {**driver.environment(library), ACTIVE: str(library)}
        rank_environment.add(environment, rank_environment.NVIDIA_DEFAULTS)  # the allocator of the job
    return subprocess.run([python, *program, *arguments], env=environment, check=False).returncode


def is_this(python: Path) -> bool:
    """Whether an interpreter is that of this process; links are not followed, since environments link to the same file."""
    return python.absolute() == Path(sys.executable).absolute()


def _search_path() -> str:
    """PYTHONPATH with this package, which the environment need not have."""
    return os.pathsep.join(filter(None, (str(interpreter.ROOT), os.environ.get("PYTHONPATH", ""))))
