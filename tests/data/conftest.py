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


@pytest.fixture(scope="session")
def text(shards, tmp_path_factory) -> Path:
    """Token shards whose tokenizer has the tokens of RoBERTa, and that tokenizer."""
    folder = tmp_path_factory.mktemp("masked")
    common = ("tokenizer=roberta", f"data.shards={shards}", f"tokenizer.path={folder}/tokenizer")
    pipeline("stage=train_tokenizer", *common, "tokenizer.vocab_size=300", "tokenizer.report=false")
    pipeline("stage=tokenize", *common, f"data.tokens={folder}/tokens")
    return folder
