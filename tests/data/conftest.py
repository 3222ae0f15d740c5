"""Shards of the library, which several test files compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.library import LIBRARY, write_library
from tests.helpers import pipeline


@pytest.fixture(scope="session")
def library(once) -> Path:
    """A folder of documents with copies, near copies, and text to repair and to drop."""
    return once("library", write_library)


@pytest.fixture(scope="session")
def cleaned(once, library) -> Path:
    """The shards of the library with the default steps, written by one process."""
    return once("cleaned", lambda folder: pipeline(*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}"))
