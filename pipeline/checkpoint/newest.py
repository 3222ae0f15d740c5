"""Reads the newest checkpoint of a run that trains on, and removes it meanwhile: the one that is newest then is read. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pipeline.checkpoint import native
from pipeline.common.errors import UserError

log = logging.getLogger("pipeline")

#: How often reading begins again: a run that removes each checkpoint before it is read writes them too often to be read.
RETRIES = 4

T = TypeVar("T")


def read_newest(find: Callable[[], Sequence[Path]], read: Callable[..., T], *, ranks: int = 1) -> T:
    """Read checkpoints, and begin again with what `find` returns then if one of them was removed while it was read.

    Args:
        find: returns the folders of the checkpoints; those of run directories are the newest ones.
        read: reads them; its arguments are the folders.
        ranks: processes that read together. Only a single one begins again: others do not know where it failed.

    Raises:
        UserError: as find and read; a checkpoint that was removed, and that no newer one replaces, is named.
    """
    folders = list(find())
    for retry in range(RETRIES + 1):
        try:
            return read(*folders)
        except (UserError, OSError) as error:
            gone = next((folder for folder in folders if not folder.is_dir()), None)
            if gone is None:
                raise
            newer = folders
            if ranks == 1 and retry < RETRIES:
                with suppress(UserError):  # a step that was named
                    newer = list(find())
            if gone in newer:
                raise native.unreadable(gone, gone, "is missing") from error
            log.info("%s was removed by its run while it was read: beginning again with %s", gone, ", ".join(map(str, newer)))
            folders = newer
    raise AssertionError("the last try returns or raises")
