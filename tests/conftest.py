"""Session fixtures: artifacts created once by the stages and shared by test files, which treat them as read-only."""

from pathlib import Path

import pytest

from tests.helpers import SHARDS, pipeline, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of JSON lines: 200 documents."""
    folder = tmp_path_factory.mktemp("corpus") / "documents"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def shards(corpus) -> Path:
    """Text shards of the corpus: several of the train split, one of the validation split."""
    folder = corpus.parent / "shards"
    pipeline("stage=shard", f"data.input=[{corpus}]", f"data.shards={folder}", *SHARDS)
    return folder


@pytest.fixture(scope="session")
def tokenizer(shards) -> Path:
    """A tokenizer with 300 entries, trained on the shards."""
    folder = shards.parent / "tokenizer"
    pipeline(
        "stage=train_tokenizer", f"data.shards={shards}", f"tokenizer.path={folder}", "tokenizer.vocab_size=300", "tokenizer.report=false"
    )
    return folder


@pytest.fixture(scope="session")
def tokens(shards, tokenizer) -> Path:
    """Token shards of the text shards."""
    folder = shards.parent / "tokens"
    pipeline("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}", f"data.tokens={folder}")
    return folder


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Four gloo ranks, shared by all multi-rank tests."""
    from tests.world import World

    ranks = World(4, tmp_path_factory.mktemp("world"))
    yield ranks
    ranks.stop()
