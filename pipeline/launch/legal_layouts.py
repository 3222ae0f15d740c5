"""Which layout of a training job is legal on a number of nodes. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.common.errors import UserError, Violation
from pipeline.config import layouts
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.launch.planned_layouts import PlannedLayouts

Planned = Callable[[int], Sequence[Sequence[str]]]
"""Number of nodes -> the planner's layouts, fastest first, each as settings of the command line; empty if none is legal and fits."""


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
        return [replace(found, rule=f"{found.rule} (no layout is legal on {shown})") for found in self.broken(most)]

    def _candidates(self, nodes: int) -> list[tuple[str, ...]]:
        """The layouts that apply to a number of nodes, the best first."""
        if self._by_planner:
            return [tuple(settings) for settings in self._planned(nodes)]
        return [layouts.overrides_of(self.config, nodes)]

    def _violations(self, settings: tuple[str, ...], nodes: int) -> list[Violation]:
        """The rules that a layout violates on a number of nodes."""
        if settings not in self._settings:
            config = layouts.with_overrides(self.config, settings)
            changed = list(layouts.unchanged(self.config, layouts.read(settings)))
            self._settings[settings] = config, [*changed, *check.settings_violations(config)]
        config, found = self._settings[settings]
        return [*found, *check.size_violations(config, nodes * self.tasks_per_node, self._step)]


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
