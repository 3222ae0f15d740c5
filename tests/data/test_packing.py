"""Documents within samples: best-fit packing, fill-in-the-middle, and document boundaries."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common import artifact
from pipeline.data.load.corpus import Corpus
from pipeline.data.load.fill_in_the_middle import Infill
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.packing import BestFit, best_fit, document_ids, split_long
from pipeline.data.load.samples import Samples
from pipeline.data.load.token_stream import TokenStream
from tests.data.test_samples import stream
from tests.world import configured
from tools.bench.token_dataset import cumulative_lengths

PREFIX, MIDDLE, SUFFIX = 101, 102, 103

batches = st.integers(1, 12).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=1, max_size=4)
)


@given(batches)
def test_document_ids_count_the_end_tokens_before(rows):
    ids = document_ids(np.array(rows), end_of_document=0)
    assert ids.dtype == np.int32
    assert ids.tolist() == [[row[:t].count(0) for t in range(len(row))] for row in rows]


@given(batches)
def test_bounds_agree_with_the_document_ids(rows):
    tokens = np.array(rows, dtype=np.uint16)
    bounds = cumulative_lengths(tokens, end_of_document=0)
    assert bounds.dtype == np.int32
    assert bounds[0] == 0
    assert bounds[-1] == tokens.size
    whole = document_ids(tokens, 0) + np.arange(len(rows))[:, None] * tokens.shape[1]  # ids that are unique across sequences
    flat = whole.ravel()
    assert bounds[1:-1].tolist() == (np.flatnonzero(np.diff(flat)) + 1).tolist()


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(1, 40))
def test_packing_splits_only_long_documents_and_respects_the_capacity(documents, capacity):
    lengths = np.array(documents, dtype=np.int64)
    starts, pieces = split_long(np.cumsum(lengths) - lengths, lengths, capacity)
    covered = [t for start, length in zip(starts, pieces, strict=True) for t in range(start, start + length)]
    assert covered == list(range(sum(documents))), "the chunks cover the documents"
    assert len(pieces) == sum(-(-length // capacity) for length in documents), "only documents that are too long are split"
    chosen = best_fit(pieces, capacity)
    filled = np.bincount(chosen, weights=pieces)
    assert (filled <= capacity).all()
    assert (filled > 0).all()
    if len(filled) > 1:
        assert np.sort(filled)[:2].sum() > capacity, "no two sequences fit into one"


def test_best_fit_chooses_the_least_sufficient_space():
    assert best_fit(np.array([3, 6, 7, 4, 3]), 10).tolist() == [0, 1, 0, 1, 2]


@settings(max_examples=10)
@given(length=st.integers(20, 700), seed=st.integers(0, 100))
def test_packed_samples_are_complete_documents(tokens, length, seed):
    manifest = artifact.read(tokens, key="data.tokens", stage="tokenize")
    corpus, end = Corpus.of(tokens, manifest, "train"), manifest.totals["end_of_document"]
    packed = TokenStream(corpus.shards)
    sequences = BestFit(packed, [corpus.shards], length, end)
    samples = Samples([corpus], packed, sequences, seed).samples(np.arange(sequences.counts[0]))
    assert samples.shape == (sequences.counts[0], length + 1)
    text = stream(tokens, "train")
    documents = np.split(text, np.flatnonzero(text == end)[:-1] + 1)
    wanted = [tuple(d[i : i + length + 1].tolist()) for d in documents for i in range(0, len(d), length + 1)]
    found = []
    for row in samples.tolist():
        begin = 0
        for stop in [i + 1 for i, token in enumerate(row) if token == end] or [len(row)]:
            found.append(tuple(row[begin:stop]))
            begin = stop
        found.append(tuple(row[begin:]))
    whole = [piece for piece in found if piece not in ((), (end,))]
    assert sorted(whole) == sorted(piece for piece in wanted if piece != (end,))
    padding = samples.size - len(text)
    assert sequences.padding == np.float64(padding / samples.size) or abs(sequences.padding - padding / samples.size) < 1e-9


def test_padding_is_not_a_target(tokens):
    config = configured("stage=pretrain", f"data.tokens={tokens}", "data.packing=best_fit", "training.sequence_length=200")
    objective = registry.open_training(config)
    found = objective.arrays(np.arange(objective.samples.counts[0]))
    text, end = stream(tokens, "train"), objective.samples.end_of_document
    first = objective.samples.samples(np.arange(len(found["tokens"])))[:, 0]
    asked = found["targets"][found["targets"] != IGNORE]
    assert 0 < (found["targets"] == IGNORE).mean() < 0.5
    assert np.array_equal(np.sort(np.concatenate([asked, first])), np.sort(text)), "the full text, once"
    assert ((found["tokens"] == end) & (found["targets"] == IGNORE)).sum() == (found["targets"] == IGNORE).sum()


def infill(rate=1.0, spm_rate=0.5, seed=3):
    return Infill(rate, spm_rate, PREFIX, MIDDLE, SUFFIX, end_of_document=0, seed=seed)


def restored(document):
    """The original order of a transformed document, without sentinels."""
    prefix, suffix, middle = (document.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
    assert prefix == 0
    if suffix == 1:  # SPM order: prefix and middle follow the middle sentinel
        return document[middle + 1 :] + document[suffix + 1 : middle]
    return document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle]


def test_infill_moves_nothing_before_the_token_that_begins_a_document():
    source = np.array([[9, 1, 2, 3, 4, 0, 9, 5, 6, 7, 8, 0, 9, 1, 2, 3]], dtype=np.uint16)
    plain, begun = infill().apply(source[:, 1:], np.array([4])), replace(infill(), bos=9).apply(source, np.array([4]))
    assert begun[0, 0] == 9
    assert begun[0, 1] == PREFIX == plain[0, 0]
    assert all(document[:2] == [9, PREFIX] for document in split(begun[0].tolist()) if len(document) > 4)


rows = st.lists(st.integers(0, 9), min_size=1, max_size=60)


@given(rows, st.integers(0, 10**12), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_infill_reorders_tokens_and_drops_them_only_at_the_end(row, number, rate, spm_rate):
    source = np.array([row], dtype=np.uint16)
    changed = infill(rate, spm_rate).apply(source, np.array([number]))
    assert changed.shape == source.shape
    assert changed.dtype == source.dtype
    before, after = split(row), split(changed[0].tolist())
    for mine, theirs in zip(before, after, strict=False):
        plain = restored(theirs) if PREFIX in theirs else theirs
        last = theirs is after[-1]
        assert plain == mine[: len(plain)] if last else plain == mine
        assert rate > 0 or theirs == mine
    if rate == 1.0 and len(row) > 3 and before[0]:
        assert after[0][0] == PREFIX
        assert (after[0][1] == SUFFIX) == (spm_rate == 1.0) or spm_rate == 0.5 or after[0][1] == SUFFIX


def split(row):
    """The documents of a row, without their end-of-document tokens."""
    found = [[]]
    for token in row:
        if token == 0:
            found.append([])
        else:
            found[-1].append(token)
    return found


def test_infill_depends_only_on_the_sample_and_has_the_configured_rates():
    source = np.tile(np.array([*range(1, 40), 0] * 5, dtype=np.uint16), (400, 1))
    numbers = np.arange(400)
    changed = infill(0.4, 0.25).apply(source, numbers)
    assert np.array_equal(infill(0.4, 0.25).apply(source[7:8], numbers[7:8])[0], changed[7])
    assert not np.array_equal(changed[0], changed[1])
    assert not np.array_equal(infill(0.4, 0.25, seed=4).apply(source, numbers), changed)
    first = [split(row)[0] for row in changed.tolist()]
    treated = [document for document in first if PREFIX in document]
    assert 120 < len(treated) < 200
    assert 20 < sum(document[1] == SUFFIX for document in treated) < 65
