"""Part "copies": after every step, all copies of every weight and of its optimizer state have the same bits on all ranks."""

from __future__ import annotations

from pipeline.certification.parts import PartReport
from pipeline.parallel.mesh import gather_objects
from pipeline.training.trainer import Trainer
from pipeline.training.weight_copies import ROUNDED, PieceDigest, disagreements, on_host, parts_of, scalars
from pipeline.training.weight_update import StepResult


class CopyLog:
    """The digests of what this rank holds, after every step.

    Attributes:
        steps: the digests of this rank, by step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.steps: dict[int, list[PieceDigest]] = {}

    def held(self) -> list[PieceDigest]:
        """Return the digests of what this rank holds now. Collective."""
        return on_host(parts_of(self._trainer.engine))

    def after_step(self, step: int, result: StepResult) -> None:
        """Record the digests. Collective."""
        engine = self._trainer.engine
        numbers = {"gradient norm": result.gradient_norm, "learning rate": result.lr, "skipped steps": result.skipped}
        counters = {"updates and loss scale": engine.counters()}
        self.steps[step] = on_host([*parts_of(engine), *scalars(numbers | counters)])

    def report(self) -> PartReport:
        """Compare the digests of all ranks. Collective; every rank returns the same report."""
        ranks = gather_objects(self.steps)
        layout = self._trainer.mesh.layout
        names = {part.name for steps in ranks for part in steps[max(steps)] if part.kind != "scalar"}
        kinds = dict.fromkeys(part.kind for steps in ranks for part in steps[max(steps)])
        report = PartReport("copies")
        compared = ", ".join(kind for kind in kinds if kind not in ("scalar", ROUNDED))
        report.covered.append(f"{compared} of {len(names)} weights on {len(ranks)} ranks, bit by bit after each of {len(self.steps)} steps")
        for step in self.steps:
            if differing := disagreements(layout, [steps[step] for steps in ranks]):
                report.failures += [f"step {step + 1}: {difference}" for difference in differing]
                break
        return report


def same_bits(actual: list[PieceDigest], expected: list[PieceDigest]) -> list[str]:
    """Return the weights and kinds of this rank whose bits differ between two runs in the same layout."""
    kinds = {part.kind for part in actual}  # at a resume, there is no step yet whose numbers could be compared
    values = {(part.kind, part.name, part.box): part.digest for part in actual}
    wanted = {(part.kind, part.name, part.box): part.digest for part in expected if part.kind in kinds}
    differ: dict[str, list[str]] = {}
    for (kind, name, box), digest in wanted.items():
        if kind != ROUNDED and values.get((kind, name, box)) != digest:
            differ.setdefault(name, []).append(kind)
    return [f"{name} ({', '.join(kinds)})" for name, kinds in differ.items()]
