"""All mutants."""

from __future__ import annotations

from tools.mutants.catalog import layouts, losses, runs
from tools.mutants.mutation import Mutant

_FOUND = (value for module in (losses, layouts, runs) for value in vars(module).values() if isinstance(value, Mutant))
#: In the order of their numbers.
MUTANTS: tuple[Mutant, ...] = tuple(sorted(_FOUND, key=lambda mutant: mutant.bug))
