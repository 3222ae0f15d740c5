"""Which weights a run trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.errors import Violation


def is_frozen(config: RunConfig, name: str) -> bool:
    """Whether training leaves a weight as it is."""
    return any(fnmatchcase(name, pattern) for pattern in config.training.frozen)


def violations(config: RunConfig, layout: Layout, names: Mapping[str, bool]) -> list[Violation]:
    """Return the rules of training.frozen that a configuration violates.

    Args:
        config: configuration of the run.
        layout: the layout of the job.
        names: all weights of the model -> whether the model has a gradient for it.
    """
    found = []
    for pattern in config.training.frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            fix = f"choose names such as {', '.join(_examples(names))}"
            found.append(Violation("training.frozen", pattern, f"matches no weight of model.family={config.model.family}", fix))
    trained = {
        _stage(name, layout, config.model.layers) for name, has_gradient in names.items() if has_gradient and not is_frozen(config, name)
    }
    if idle := sorted(set(range(layout.stage_count)) - trained):
        where = "the model" if layout.stage_count == 1 else f"pipeline stage {idle[0]} of {layout.stage_count}"
        fix = "freeze fewer weights" + ("" if layout.stage_count == 1 else ", or use fewer pipeline stages")
        found.append(Violation("training.frozen", ", ".join(config.training.frozen), f"leaves nothing to train in {where}", fix))
    return found


def _stage(name: str, layout: Layout, layers: int) -> int:
    """The pipeline stage that holds a weight."""
    first, _, rest = name.partition(".")
    if first != "blocks":
        return 0 if first == "embed" else layout.stage_count - 1
    block = int(rest.partition(".")[0])
    return next(stage for stage in range(layout.stage_count) if block in layout.layers(stage, layers))


def _examples(names: Iterable[str]) -> list[str]:
    """One name for each kind of weight, at most four."""
    return list({name.rpartition(".")[0].partition(".")[0]: name for name in names}.values())[:4]
