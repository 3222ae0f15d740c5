"""Rules of the group dedup."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.data import DedupConfig


def violations(dedup: DedupConfig) -> Iterator[Violation]:
    """Yield the violated rules: bands find most pairs at the threshold; signatures of other corpora need exact and near deduplication."""
    share = 1 - (1 - dedup.threshold**dedup.rows) ** dedup.bands
    if dedup.near and share < 0.5:
        why = f"with dedup.bands={dedup.bands} finds {share:.0%} of the pairs at dedup.threshold={dedup.threshold}"
        yield Violation("dedup.rows", dedup.rows, why, "use fewer rows, more bands or a higher threshold, to find at least half")
    for key, value in (("dedup.against", dedup.against), ("dedup.save_signatures", dedup.save_signatures)):
        if value and not (dedup.exact and dedup.near):
            yield Violation(key, value, "needs dedup.exact and dedup.near", f"set both to true, or leave {key} out")
