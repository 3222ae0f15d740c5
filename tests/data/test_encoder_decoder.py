"""Span corruption and pairs: what the encoder and the decoder get, whatever the rates and the files."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.common.errors import UserError
from pipeline.config.data import SpansConfig
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.objectives.pairs import PairFiles, Pairs, TokenizedPairs
from pipeline.data.load.objectives.span_corruption import SpanCorruption, lengths, longest, partitions
from pipeline.data.tokenize.tokenizer import TextEncoder
from tests.data.library import here

RATES = st.builds(SpansConfig, rate=st.floats(0.01, 0.5), mean_length=st.floats(2, 20))
SENTINELS = np.arange(5000, 6000)[::-1]
END, START = 1, 0


class Text:
    """Samples of ordinary tokens, each of which tells its sample and place."""

    end_of_document = END

    def __init__(self, length: int) -> None:
        self.length = length

    def samples(self, indices):
        return (10 + (indices[:, None] * 7 + np.arange(self.length + 1)) % 4000).astype(np.uint16)


def restored(encoder: list[int], written: list[int]) -> list[int]:
    """The text: each sentinel of the encoder's sequence replaced by what the decoder writes after it."""
    spans: dict[int, list[int]] = {}
    assert encoder[-1] == written[-1] == END
    for token in written[:-1]:
        if token >= 5000:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    text = [token for mark in encoder[:-1] for token in (spans.pop(mark) if mark >= 5000 else [mark])]
    assert not spans
    return text


@given(encoder=st.integers(4, 2000), rates=RATES)
def test_the_longest_text_fills_the_encoder(encoder, rates):
    found = longest(encoder, rates)
    assert found.encoder == encoder
    assert lengths(found.text + 1, rates).encoder > encoder
    assert found.spans <= found.removed < found.text


def test_the_lengths_of_t5():
    """512 tokens of the encoder come from 568 of text, and the decoder has 114 (t5/data/preprocessors.py, random_spans_helper)."""
    found = longest(512, SpansConfig())
    assert (found.text, found.decoder) == (568, 114)


@given(encoder=st.integers(4, 300), rates=RATES, first=st.integers(0, 1000), seed=st.integers(0, 9), extra=st.integers(0, 3))
@settings(max_examples=50)
def test_what_the_decoder_writes_restores_the_text(encoder, rates, first, seed, extra):
    sizes = longest(encoder, rates)
    objective = SpanCorruption(Text(sizes.text), sizes, SENTINELS, START, seed, sizes.decoder + extra)
    indices = np.arange(first, first + 5)
    found = objective.arrays(indices)
    assert found["tokens"].shape == (5, encoder)
    assert found["targets"].shape == found["decoder_tokens"].shape == (5, sizes.decoder + extra)
    texts = Text(sizes.text).samples(indices)[:, :-1]
    for row, text in enumerate(texts):
        written = found["targets"][row, : sizes.decoder].tolist()
        assert restored(found["tokens"][row].tolist(), written) == text.tolist()
        assert found["decoder_tokens"][row, : sizes.decoder].tolist() == [START, *written[:-1]]
        assert (found["targets"][row, sizes.decoder :] == IGNORE).all()
        assert written[0] == SENTINELS[0]
        alone = objective.arrays(indices[row : row + 1])
        assert all(np.array_equal(alone[name][0], found[name][row]) for name in found), "a sample depends on its number alone"


@given(items=st.integers(1, 200), parts=st.integers(1, 50), seed=st.integers(0, 99))
def test_partitions_add_up(items, parts, seed):
    parts = min(items, parts)
    found = partitions(items, parts, np.arange(20), seed)
    assert found.shape == (20, parts)
    assert (found >= 1).all()
    assert (found.sum(axis=1) == items).all()


def test_every_partition_is_as_likely():
    found = partitions(5, 3, np.arange(6000), 0)
    _, counts = np.unique(found, axis=0, return_counts=True)
    assert len(counts) == 6
    assert counts.min() > 850, "a thousand each are expected, with a standard deviation of 29"


@pytest.fixture(scope="module")
def with_pad(shards, tmp_path_factory):
    """A tokenizer with padding and sentinels, and token shards made with it."""
    folder = tmp_path_factory.mktemp("t5")
    special = ",".join(f"'{name}'" for name in ("<pad>", *(f"<extra_id_{number}>" for number in range(8))))
    common = (f"data.shards={shards}", f"tokenizer.path={folder}/tokenizer")
    trained = ("tokenizer.vocab_size=310", "tokenizer.report=false", f"tokenizer.special_tokens=[{special}]")
    here("stage=train_tokenizer", *common, *trained)
    here("stage=tokenize", *common, f"data.tokens={folder}/tokens")
    return folder


TRANSLATIONS = [(f"the tree of winter number {n}", f"Tännchen und Schnee {n}") for n in range(40)]


@pytest.fixture
def files(tmp_path):
    """The pairs in two files of both kinds."""
    (tmp_path / "a.tsv").write_text("".join(f"{source}\t{target}\tmore\n" for source, target in TRANSLATIONS[:25]), encoding="utf-8")
    lines = [json.dumps({"en": source, "de": target}) for source, target in TRANSLATIONS[25:]]
    (tmp_path / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [str(tmp_path / "a.tsv"), str(tmp_path / "b.jsonl")]


def test_pairs_are_read_whole_and_padded(files, with_pad):
    encoder = TextEncoder(with_pad / "tokenizer", "<|endoftext|>")
    tokenizer = Tokenizer.from_file(str(with_pad / "tokenizer" / "tokenizer.json"))
    source = TokenizedPairs(PairFiles(files, ("en", "de"), "data.pairs.train"), encoder, seed=3)
    assert source.counts.tolist() == [40]
    found = Pairs(source, 64, START).arrays(np.arange(40, 80))  # the second epoch
    seen = set()
    for tokens, documents, read, targets in zip(*found.values(), strict=True):
        length, written = (documents == 0).sum(), targets[targets != IGNORE]
        assert (documents[:length] == 0).all()
        assert tokens[length - 1] == written[-1] == encoder.end_of_document
        assert read[: len(written)].tolist() == [START, *written[:-1]]
        seen.add((tokenizer.decode(tokens[: length - 1].tolist()), tokenizer.decode(written[:-1].tolist())))
    assert seen == set(TRANSLATIONS), "every pair once an epoch"


def test_a_pair_that_is_cut_is_told_of_once(files, with_pad, caplog):
    source = TokenizedPairs(PairFiles(files, ("en", "de"), "data.pairs.train"), TextEncoder(with_pad / "tokenizer", "<|endoftext|>"), None)
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        found = Pairs(source, 4, START).arrays(np.arange(10))
    assert found["tokens"].shape == found["targets"].shape == (10, 4)
    assert [record.message.partition(";")[2] for record in caplog.records] == [" pairs are truncated to training.sequence_length=4"]


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("a.tsv", "one\ttwo\nthree\n", "line 2 is not a pair"),
        ("a.tsv", "one\t \n", "line 1 is not a pair"),
        ("a.jsonl", '{"en": "one"}\n', "line 1 is not a pair"),
        ("a.jsonl", "no json\n", "line 1 is not a pair"),
        ("a.tsv", "", "is empty"),
        ("a.txt", "one\ttwo\n", "neither .tsv nor .jsonl"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=told):
        PairFiles([str(tmp_path / name)], ("en", "de"), "data.pairs.train")
