"""The planner's layouts for a number of nodes (cluster.choose_layout=planner), from stage=plan in a process of its own: it loads torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import RunConfig
from pipeline.launch import job

#: File in the run directory: what the planner has found, by number of nodes.
FILE = "layouts.json"
#: Layouts that are kept, the fastest first: a later one is used if a rule of the run excludes the first.
KEPT = 20
#: Keys that the planner sets, with their values where it names none: planner/search.py, CHOSEN.
_DEFAULTS = {
    **{f"parallel.{name}": getattr(ParallelConfig(), name) for name in ("tensor", "pipeline", "context", "expert", "schedule", "balance")},
    "parallel.stages_per_rank": "null",
    "parallel.layers_per_stage": "[]",
    "training.activation_checkpointing": "none",
}


class PlannedLayouts:
    """The planner's layouts of a job by its number of nodes, kept in the run directory once it exists.

    Args:
        config: configuration of the job.
        overrides: arguments of `python -m pipeline` that compose it.
        tasks_per_node: ranks on a node.
    """

    def __init__(self, config: RunConfig, overrides: Sequence[str], tasks_per_node: int) -> None:
        self._run_dir, self._tasks_per_node = Path(config.run_dir), tasks_per_node
        self._overrides = [word for word in overrides if not re.match(r"[+~]*(stage|dry_run)[.=]", word)]
        settings = repr((self._overrides, tasks_per_node, config.model, config.training, config.precision, config.cluster.hardware))
        self._key = xxhash.xxh3_64_hexdigest(settings.encode())
        self._found: dict[int, list[list[str]]] = {}

    def __call__(self, nodes: int) -> list[list[str]]:
        """Return the layouts for a number of nodes, fastest first, each as settings of the command line; empty if none is legal and fits.

        Raises:
            UserError: the planner has failed.
        """
        if nodes not in self._found:
            stored = self._stored()
            self._found[nodes] = stored[str(nodes)] if str(nodes) in stored else self._search(nodes)
            if str(nodes) not in stored and self._run_dir.is_dir():
                with atomic_file(self._run_dir / FILE, "w") as file:
                    json.dump({"key": self._key, "nodes": {**stored, str(nodes): self._found[nodes]}}, file, indent=1)
        return self._found[nodes]

    def _stored(self) -> dict[str, Any]:
        """What earlier jobs with the same settings have found: number of nodes -> layouts."""
        try:
            content = json.loads((self._run_dir / FILE).read_text(encoding="utf-8"))
            return dict(content["nodes"]) if content["key"] == self._key else {}
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged: the planner is asked again
            return {}

    def _search(self, nodes: int) -> list[list[str]]:
        """Ask the planner."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "choices.json"
            size = [f"cluster.nodes={nodes}", f"cluster.tasks_per_node={self._tasks_per_node}", "cluster.min_nodes=null"]
            words = ["stage=plan", *self._overrides, *size, "cluster.choose_layout=configured", "stage.search=true", f"stage.out={out}"]
            command = [sys.executable, "-m", "pipeline", *words]
            done = subprocess.run(command, env=job.outside(os.environ), capture_output=True, text=True, errors="replace", check=False)
            if done.returncode == 0:
                choices = json.loads(out.read_text(encoding="utf-8"))[:KEPT]
                return [_complete(choice["settings"]) for choice in choices]
        if re.search(r"no layout (of [\d,]+ ranks is legal|fits in)", done.stderr):
            return []
        reason = " ".join((done.stderr.strip() or f"exit code {done.returncode}").split())[-500:]
        raise UserError.of("cluster.choose_layout", "planner", f"the planner has failed: {reason}", "set it to configured")


def _complete(settings: Sequence[str]) -> list[str]:
    """The settings of a layout with those that it leaves at their defaults, which the configuration may have otherwise."""
    named = {word.partition("=")[0] for word in settings}
    return [*settings, *(f"{key}={value}" for key, value in _DEFAULTS.items() if key not in named)]
