"""From the configuration to the objective of its model, over the samples of a split."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.data.load import blend
from pipeline.data.load.objectives import pairs
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.objectives.masked import Masked
from pipeline.data.load.objectives.objective import Objective
from pipeline.data.load.objectives.pairs import Pairs
from pipeline.data.load.objectives.spans import SpanCorruption

#: A model configuration's `objective` -> what makes its batches.
OBJECTIVES: dict[str, type[Objective]] = {"causal": Causal, "masked": Masked, "pairs": Pairs, "span_corruption": SpanCorruption}


def open_training(config: RunConfig, share: tuple[int, int] = (0, 1)) -> Objective:
    """What a run trains on; arguments and errors as in blend.open_training, and those of the objective."""
    kind = OBJECTIVES[config.model.objective]
    if kind is Pairs:
        return pairs.open_training(config, share)
    return kind.of(config, blend.open_training(config, share, kind.text_length(config)))


def open_validation(config: RunConfig, share: tuple[int, int] = (0, 1)) -> Objective | None:
    """The same of the validation split; None if it holds no sample."""
    kind = OBJECTIVES[config.model.objective]
    if kind is Pairs:
        return pairs.open_validation(config, share)
    samples = blend.open_validation(config, share, kind.text_length(config))
    return kind.of(config, samples) if samples is not None else None
