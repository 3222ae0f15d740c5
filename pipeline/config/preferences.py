"""Where the reference log-probabilities of training.objective=dpo come from."""

from __future__ import annotations

from pipeline.config.schema import RunConfig

#: Losses of training.preference_loss without a reference model.
REFERENCE_FREE = ("simpo", "orpo")


def has_reference(config: RunConfig) -> bool:
    """Whether a run compares with a reference model."""
    return config.objective == "dpo" and config.training.preference_loss not in REFERENCE_FREE


def stores_reference(config: RunConfig) -> bool:
    """Whether the reference is computed once and stored: with adapters it need not be, it is the model without them."""
    return has_reference(config) and (config.lora.rank == 0 or config.data.instructions.reference is not None)
