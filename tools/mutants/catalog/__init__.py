"""All mutants."""

from __future__ import annotations

from tools.mutants.catalog import (
    blind,
    blind_second,
    blind_second_state,
    blind_state,
    experts,
    loss,
    norm,
    parallel,
    precision,
    recent,
    recent_models,
    state,
)
from tools.mutants.mutation import Mutant

#: In the order of their numbers.
MUTANTS: tuple[Mutant, ...] = tuple(
    sorted(
        (
            *blind.MUTANTS,
            *blind_second.MUTANTS,
            *blind_second_state.MUTANTS,
            *blind_state.MUTANTS,
            *loss.MUTANTS,
            *parallel.MUTANTS,
            *norm.MUTANTS,
            *experts.MUTANTS,
            *precision.MUTANTS,
            *recent.MUTANTS,
            *recent_models.MUTANTS,
            *state.MUTANTS,
        ),
        key=lambda mutant: mutant.bug,
    )
)
