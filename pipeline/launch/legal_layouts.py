"""Which layout of a training job is legal on a number of nodes: that of the configuration, or one of the planner. Loads no torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError, Violation
from pipeline.config import layouts, phases
from pipeline.config.parallel import ParallelConfig
from pipeline.config.rules import check
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
Planned = Callable[[int], Sequence[Sequence[str]]]
"""Number of nodes -> the planner's layouts, fastest first, each as settings of the command line; empty if none is legal and fits."""


class PlannedLayouts:
    """The planner's layouts of a job by its number of nodes, kept in the run directory once it exists.

    Args:
        overrides: arguments of `python -m pipeline` that compose it.
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


class LegalLayouts:
    """The layouts that are legal, by the number of nodes."""

    def __init__(self, config: RunConfig, overrides: Sequence[str], tasks_per_node: int, step: int, planned: Planned | None) -> None:
        self.config, self.tasks_per_node, self._step = with_model(config), tasks_per_node, step
        self._by_planner = config.cluster.choose_layout == "planner"
        self._planned = planned or PlannedLayouts(config, overrides, tasks_per_node)
        self._settings: dict[tuple[str, ...], tuple[RunConfig, list[Violation]]] = {}

    def layout(self, nodes: int) -> tuple[RunConfig, tuple[str, ...]] | None:
        """The configuration with the layout for a number of nodes, and the settings of the layout; None if none is legal."""
        for settings in self._candidates(nodes):
            if not self._violations(settings, nodes):
                return self._settings[settings][0], settings
        return None

    def broken(self, nodes: int) -> list[Violation]:
        """The rules that the first layout for a number of nodes violates."""
        if candidates := self._candidates(nodes):
            return self._violations(candidates[0], nodes)
        return [Violation("nodes", nodes, "the planner has found no layout that is legal and fits", "use more nodes, or another batch")]

    def reasons(self, fewest: int, most: int) -> list[Violation]:
        """Why no layout is legal on these numbers of nodes."""
        shown = (
            f"{most} nodes x {self.tasks_per_node} ranks" if fewest == most else f"{fewest} to {most} nodes x {self.tasks_per_node} ranks"
        )
        return [replace(violation, rule=f"{violation.rule} (no layout is legal on {shown})") for violation in self.broken(most)]

    def _candidates(self, nodes: int) -> list[tuple[str, ...]]:
        """The layouts that apply to a number of nodes, the best first."""
        if self._by_planner:
            return [tuple(settings) for settings in self._planned(nodes)]
        return [layouts.overrides_of(self.config, nodes)]

    def _violations(self, settings: tuple[str, ...], nodes: int) -> list[Violation]:
        if settings not in self._settings:
            config = phases.at(layouts.with_overrides(self.config, settings), self._step)
            changed = list(layouts.unchanged(self.config, layouts.read(settings)))
            self._settings[settings] = config, [*changed, *check.settings_violations(config)]
        config, violations = self._settings[settings]
        return [*violations, *check.size_violations(config, nodes * self.tasks_per_node, self._step)]


def has_model(config: RunConfig) -> bool:
    """Return whether the model is known: that of a fine-tuning run is in a checkpoint, which an earlier job may still have to write."""
    return config.stage.name != "finetune" or with_model(config) is not config


def with_model(config: RunConfig) -> RunConfig:
    """Return the configuration with the model of the checkpoint that a fine-tuning run starts from, if there is one."""
    if config.stage.name != "finetune":
        return config
    from pipeline.checkpoint import native  # loads NumPy
    from pipeline.models import config_classes
    from pipeline.models.rope import extended
    from pipeline.training.starting_checkpoint import checkpoint_of_finetuning, is_own

    run_dir = Path(config.run_dir)
    try:
        start = checkpoint_of_finetuning(run_dir, config.checkpoint)
        index = native.read_index(start)
        model = config_classes.from_dict(index.config["model"])
    except UserError:
        return config
    resumes = (is_own(run_dir, start) or config.checkpoint.fork is not None) and index.train_state.samples
    model = model if resumes else extended(model, config.training.context_factor)
    objective = "supervised" if config.training.objective == "auto" else config.training.objective
    return replace(config, model=model, training=replace(config.training, objective=objective))
