"""The warning that a validation split has too few documents to say much about other texts."""

from __future__ import annotations

import logging

log = logging.getLogger("pipeline")

#: Documents from which on there is no warning. The mean loss of fewer depends on which ones they are.
ENOUGH = 30


def warn(documents: int, fix: str) -> None:
    """Warn of a split with too few documents.

    Args:
        documents: of the split; without any there is no validation.
        fix: what would give more.
    """
    if 0 < documents < ENOUGH:
        count = "1 document" if documents == 1 else f"{documents} documents"
        log.warning("the validation split has %s: its loss says little about other texts; %s", count, fix)
