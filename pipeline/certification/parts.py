"""The parts of a certificate, and what each of them has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config.stages import CERTIFICATE_PARTS

#: Failures of one part that are listed; the others are counted.
LISTED = 5


@dataclass
class PartReport:
    """What a part of a certificate has compared.

    Attributes:
        part: one of CERTIFICATE_PARTS.
        covered: what was compared, for readers.
        not_covered: what was not, and why.
        failures: a line for each difference.
    """

    part: str
    covered: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def inside(self, precision: str) -> PartReport:
        """Return the report with the precision in every line."""
        kinds = (self.covered, self.not_covered, self.failures)
        return PartReport(self.part, *([f"{precision}: {line}" for line in lines] for lines in kinds))

    def lines(self) -> list[str]:
        """Return the failures with the name of the part, the first ones and the number of the others."""
        shown = [f"{self.part}: {failure}" for failure in self.failures[:LISTED]]
        more = len(self.failures) - LISTED
        return [*shown, f"{self.part}: {more} more differences"] if more > 0 else shown


def left_out(skip: Sequence[str]) -> list[PartReport]:
    """Return the reports of the parts that stage.skip names."""
    return [PartReport(part, not_covered=[f"left out by stage.skip={part}"]) for part in CERTIFICATE_PARTS if part in skip]


def merged(reports: list[PartReport]) -> list[PartReport]:
    """Return one report of each part, in the order of CERTIFICATE_PARTS."""
    by_part = {part: PartReport(part) for part in CERTIFICATE_PARTS}
    for report in reports:
        whole = by_part[report.part]
        whole.covered += report.covered
        whole.not_covered += report.not_covered
        whole.failures += report.failures
    return [report for report in by_part.values() if report.covered or report.not_covered or report.failures]
