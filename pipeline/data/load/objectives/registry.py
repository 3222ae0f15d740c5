"""The objectives by name: that of training.objective, or the one that a model's configuration gives in `objective`."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.objectives.classification import Classification
from pipeline.data.load.objectives.masked import Masked
from pipeline.data.load.objectives.objective import Objective
from pipeline.data.load.objectives.pairs import Pairs
from pipeline.data.load.objectives.preferences import Preferences
from pipeline.data.load.objectives.spans import SpanCorruption
from pipeline.data.load.objectives.supervised import Supervised

OBJECTIVES: dict[str, type[Objective]] = {
    "causal": Causal,
    "classification": Classification,
    "dpo": Preferences,
    "masked": Masked,
    "pairs": Pairs,
    "span_corruption": SpanCorruption,
    "supervised": Supervised,
}


def objective_of(config: RunConfig) -> type[Objective]:
    """The configured objective; that of the model's family with training.objective=auto."""
    return OBJECTIVES[config.objective]


def open_training(config: RunConfig, share: tuple[int, int] = (0, 1)) -> Objective:
    """The objective of the run over its training data; arguments and errors as in Objective.open_training."""
    return objective_of(config).open_training(config, share)


def open_validation(config: RunConfig, share: tuple[int, int] = (0, 1)) -> Objective | None:
    """The objective of the run over its validation data; None if it holds no sample."""
    return objective_of(config).open_validation(config, share)
