"""All mutants."""

from __future__ import annotations

from tools.mutants.catalog import layouts, losses, runs
from tools.mutants.mutation import Mutant

#: In the order of their numbers.
MUTANTS: tuple[Mutant, ...] = tuple(sorted((*losses.MUTANTS, *layouts.MUTANTS, *runs.MUTANTS), key=lambda mutant: mutant.bug))
