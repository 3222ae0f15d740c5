"""The result of one node: a JSON file in a folder that all nodes share, or a line of standard output where the file cannot be written."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file

Result = dict[str, Any]
#: What a node has done, in this order; its file names the last one.
PHASES = ("started", "local", "connected", "inside", "between", "complete")
#: Begins the line of standard output that holds the result of a node which could not write its file.
MARK = "preflight-result "


def step_id(environment: Mapping[str, str] = os.environ) -> str:
    """The step that a result belongs to, equal on all its ranks: a folder may have results of an earlier one."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    if "SLURM_STEP_ID" in environment:
        return ".".join(environment.get(name, "0") for name in names)
    if "MASTER_PORT" in environment:
        return f"torchrun-{environment['MASTER_PORT']}"
    return f"launcher-{os.getppid()}"  # mpirun on one host, or a shell


def path_of(folder: Path, node: str) -> Path:
    """The file of a node."""
    return folder / f"{node}.json"


def write(folder: Path, result: Result) -> None:
    """Write the file of a node, or print its content where that fails, such as on a full disk."""
    text = json.dumps(result)
    try:
        with atomic_file(path_of(folder, result["node"]), "w") as handle:
            handle.write(text)
    except OSError:  # the check of the file system has recorded why
        print(f"\n{MARK}{text}", file=sys.stdout, flush=True)


def read(folder: Path, nodes: Iterable[str], step: str | None = None) -> dict[str, Result]:
    """Read the results of these nodes; a node without a readable file is left out.

    Args:
        folder: the folder of the files.
        nodes: names; no other file is looked at, and the folder is not listed.
        step: leave out results of another step (step_id).
    """
    found = {}
    for node in nodes:
        try:
            result = json.loads(path_of(folder, node).read_bytes())
        except (OSError, ValueError):
            continue
        if step is None or result.get("step") == step:
            found[node] = result
    return found


def printed(output: str) -> dict[str, Result]:
    """Read the results in the output of a step; the last one of each node counts."""
    found = {}
    for line in re.findall(rf"{MARK}(\{{.*)", output):
        try:
            result = json.loads(line)
            found[str(result["node"])] = result
        except (ValueError, KeyError):  # two processes have written at once
            continue
    return found
