"""Which faults happen: all moments alike often, and every line of a moment."""

from __future__ import annotations

import random

from tools.faults.job import Fault, Traced
from tools.faults.runs import Layout
from tools.faults.tracing import MOMENT_OF, MOMENTS, STARTING


class Faults:
    """Chooses faults: all moments and victims alike often, and every line of a moment's files.

    Args:
        chance: the seed decides.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._moments: list[str] = []

    def choose(self, layout: Layout, traced: Traced, steps: int, left: int, every: int) -> Fault:
        """Return a fault for the next start of a job.

        Args:
            layout: of the run.
            traced: the lines that jobs of this layout execute; the undisturbed one saved after every step.
            steps: training.steps.
            left: steps that are not trained yet.
            every: checkpoint.every.
        """
        if not self._moments:
            self._moments = [*MOMENTS, "any time"]
            self._chance.shuffle(self._moments)
        moment = self._moments.pop()
        roles = [f"rank {rank}" for rank in range(layout.ranks)]
        roles += ["writer"] * any(key[0] == "writer" for key in traced.lines)
        if moment == "starting":
            found = [key for key in traced.lines if key[3] == STARTING and key[1] in MOMENT_OF]
        else:
            found = [key for key in traced.lines if key[3] != STARTING and MOMENT_OF.get(key[1]) == moment]
        if not found:
            victim = self._chance.choice([*roles, "all"])
            return Fault("any time", victim, step=self._chance.randint(1, 8), delay=self._chance.random() * 0.05)
        role = self._chance.choice(sorted({key[0] for key in found}))
        key = self._chance.choice(sorted(key for key in found if key[0] == role))
        victim = self._chance.choice([role, role, "all", *roles])
        times = min(left if moment == "training" else left // every, 8) * traced.lines[key] / steps
        return Fault(moment, victim, key[1:], role, max(1, int(max(1.0, times) ** self._chance.random())) if key[3] != STARTING else 1)
