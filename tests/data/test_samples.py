"""The loader: permutation, windows across shards, and the errors for a damaged folder."""

import json
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common import artifact
from pipeline.common.artifact import MANIFEST
from pipeline.common.errors import UserError
from pipeline.data.load import retries
from pipeline.data.load import token_stream as streams
from pipeline.data.load.corpus import Corpus
from pipeline.data.load.permutation import permute
from pipeline.data.load.retries import UnreadableFile
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream
from tests.helpers import with_manifest
from tools.bench.token_dataset import TokenDataset


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 1000))
def test_permutation_is_one_to_one(size, seed, epoch):
    images = permute(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(images), np.arange(size))


@given(st.integers(5000, 2**61), st.integers(0, 2**63), st.integers(0, 2**32))
def test_permutation_of_a_large_corpus_is_one_to_one(size, seed, epoch):
    values = np.unique(np.linspace(0, size - 1, 1000).astype(np.int64).clip(0, size - 1))
    images = permute(values, size, seed, epoch)
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(values)
    assert np.array_equal(permute(values[::-1], size, seed, epoch), images[::-1])


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2**64 - 1), st.integers(0, 5), st.floats(0, 0.999)), min_size=1, max_size=30)
)
def test_many_permutations_at_once_are_the_same_as_one_by_one(rows):
    values = np.array([int(share * size) for size, _, _, share in rows])
    sizes, seeds, epochs = (np.array([row[i] for row in rows], dtype=np.uint64) for i in range(3))
    alone = [int(permute(values[i : i + 1], *row[:3])[0]) for i, row in enumerate(rows)]
    assert permute(values, sizes, seeds, epochs).tolist() == alone


def test_permutation_spreads_evenly_and_depends_on_seed_and_epoch():
    size = 1000
    counts = np.zeros((10, 10))
    for epoch in range(200):
        np.add.at(counts, (np.arange(size) // 100, permute(np.arange(size), size, 5, epoch) // 100), 1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 40 < chi_square < 150  # 81 degrees of freedom
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_order_does_not_change_between_versions():
    """A resumed run continues in its original order, so these numbers must not change."""
    assert permute(np.arange(12), 12, 7, 3).tolist() == [10, 5, 7, 0, 9, 3, 8, 2, 1, 6, 11, 4]


def stream(folder, split):
    """The tokens of a split as one array, read without the loader."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    shards = [(folder / name, files[name]) for name in sorted(files) if name.startswith(split)]
    return np.concatenate([np.fromfile(path, f["dtype"], count=f["tokens"], offset=f["offset"]) for path, f in shards])


@settings(max_examples=30)
@given(length=st.integers(2, 20000), seed=st.integers(0, 100), first=st.integers(0, 10**7), count=st.integers(0, 20))
def test_samples_are_windows_of_the_stream_in_permuted_order(tokens, length, seed, first, count):
    text = stream(tokens, "train").astype(np.int64)
    dataset = TokenDataset(tokens, "train", length, seed)
    windows = (len(text) - 1) // length
    assert (dataset.tokens, dataset.windows) == (len(text), windows)
    numbers = np.arange(first, first + count)
    batch = dataset.samples(numbers)
    assert batch.shape == (count, length + 1)
    assert batch.dtype == np.uint16
    for number, row in zip(numbers, batch, strict=True):
        window = int(permute(np.array([number % windows]), windows, seed, number // windows)[0])
        assert np.array_equal(row, text[window * length : window * length + length + 1])


def test_a_sample_depends_only_on_its_index(tokens, monkeypatch):
    dataset = TokenDataset(tokens, "train", 33, seed=4)
    numbers = np.random.default_rng(0).integers(0, 5 * dataset.windows, 300)
    one_by_one = np.concatenate([TokenDataset(tokens, "train", 33, seed=4).samples(numbers[i : i + 1]) for i in range(0, 300, 30)])
    together = dataset.samples(numbers)
    assert np.array_equal(together[::30], one_by_one)
    assert np.array_equal(dataset.samples(numbers), together)
    # Concurrent threads evict each other's files from the cache and still read correct tokens.
    monkeypatch.setattr(streams, "OPEN_SHARDS", 1)
    crowded = TokenDataset(tokens, "train", 33, seed=4)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(crowded.samples, [numbers[i : i + 1] for i in range(300)]))
    assert np.array_equal(np.concatenate(parts), together)


def test_validation_is_read_in_order(tokens):
    text = stream(tokens, "validation")
    dataset = TokenDataset(tokens, "validation", 40, seed=9)
    batch = dataset.samples(np.arange(dataset.windows))
    assert np.array_equal(batch[:, :-1].ravel(), text[: dataset.windows * 40])
    assert np.array_equal(dataset.samples(np.array([dataset.windows])), batch[:1])


def test_a_missing_artifact_names_the_key_and_the_stage(tmp_path, shards):
    with pytest.raises(UserError, match=r"data\.tokens=.*\n.*run stage=tokenize"):
        TokenDataset(tmp_path / "nothing", "train", 8, seed=0)
    with pytest.raises(UserError, match="written by stage=shard"):
        TokenDataset(shards, "train", 8, seed=0)


def test_missing_truncated_and_corrupt_shards_are_named(tokens, tmp_path):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens, folder)
    TokenDataset(folder, "train", 8, seed=0).stream.verify()
    raw = bytearray((folder / "train-00001.tar").read_bytes())
    raw[3000] ^= 1
    (folder / "train-00001.tar").write_bytes(raw)
    with pytest.raises(UserError, match=r"train-00001\.tar: is corrupt"):
        TokenDataset(folder, "train", 8, seed=0).stream.verify()
    (folder / "train-00000.tar").unlink()
    (folder / "train-00001.tar").write_bytes(raw[:-1])
    with pytest.raises(UserError) as refused:
        TokenDataset(folder, "train", 8, seed=0)
    assert "train-00000.tar: is missing" in str(refused.value)
    assert "train-00001.tar: is truncated" in str(refused.value)
    TokenDataset(folder, "validation", 8, seed=0).stream.verify()


def test_fewer_tokens_than_a_window_are_refused(tokens):
    count = len(stream(tokens, "validation"))
    assert TokenDataset(tokens, "validation", count - 1, seed=0).windows == 1
    with pytest.raises(UserError, match=f"needs {count + 1} tokens, the validation split .* has {count}"):
        TokenDataset(tokens, "validation", count, seed=0)


def corpus(folder):
    return Corpus.of(folder, artifact.read(folder, key="data.tokens", stage="tokenize"), "train")


def test_a_corrupt_shard_is_found_while_others_are_read(tokens, tmp_path):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens, folder)
    damaged = sorted(folder.glob("train-*.tar"))[1]
    raw = bytearray(damaged.read_bytes())
    raw[-3000] ^= 1
    damaged.write_bytes(raw)
    shards = corpus(folder).shards
    starts = np.cumsum([0, *(shard.entry["tokens"] for shard in shards)])
    elsewhere = TokenStream(shards, lazy_checks=True)
    elsewhere.read(starts[[0, 2]], 5)
    elsewhere.wait_verified()
    mine, others = (TokenStream(shards, lazy_checks=True, share=(rank, 2)) for rank in (1, 0))
    for stream in (mine, others):
        stream.read(starts[:3], 5)
    others.wait_verified()
    others.read(starts[:3], 5)
    with pytest.raises(UserError, match=rf"{damaged.name}: is corrupt"):
        mine.wait_verified()
    with pytest.raises(UserError, match=rf"{damaged.name}: is corrupt"):
        mine.read(starts[[0]], 5)


def test_what_another_rank_has_read_is_verified_at_the_end(tokens):
    shards = corpus(tokens).shards
    starts = np.cumsum([0, *(shard.entry["tokens"] for shard in shards)])
    reader, owner = (TokenStream(shards, lazy_checks=True, share=(rank, 2)) for rank in (0, 1))
    reader.read(starts[:2], 5)
    assert np.flatnonzero(reader.read_shards).tolist() == [0, 1]
    assert np.flatnonzero(reader.wait_verified()).tolist() == [0]
    assert not owner.wait_verified().any()
    assert np.flatnonzero(owner.wait_verified(reader.read_shards)).tolist() == [1]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any), st.sampled_from(["uint16", "uint32"]), st.data())
def test_ranges_are_slices_of_the_stream_for_any_shard_sizes(tmp_path_factory, counts, dtype, data):
    offsets = data.draw(st.permutations(range(8)))
    folder, shards, total = tmp_path_factory.mktemp("cut"), [], sum(counts)
    text = (np.arange(total) * 7919 + 65000).astype(dtype)
    for number, (part, offset) in enumerate(zip(np.split(text, np.cumsum(counts)[:-1]), offsets, strict=False)):
        path = folder / f"{number}"
        path.write_bytes(bytes(offset) + part.tobytes() + bytes(3))
        shards.append(Shard(path, {"bytes": path.stat().st_size, "dtype": dtype, "tokens": len(part), "offset": offset}))
    stream = TokenStream(shards)
    assert stream.dtype == dtype
    length = data.draw(st.integers(1, total))
    positions = np.array(data.draw(st.lists(st.integers(0, total - length), max_size=6)), dtype=np.int64)
    assert stream.read(positions, length).tolist() == [text[p : p + length].tolist() for p in positions]


def test_a_shard_that_changes_its_length_is_named_when_it_is_read(tokens, tmp_path, monkeypatch):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens, folder)
    shards = corpus(folder).shards
    stream = TokenStream(shards)
    first = np.array([0])
    stream.read(first, 5)
    shards[0].path.write_bytes(b"")
    with pytest.raises(UserError, match=r"train-00000\.tar: is truncated or overwritten: 0 bytes"):
        stream.read(first, 5)
    with pytest.raises(UserError, match="is truncated"):
        TokenStream(shards).read(first, 5)
    shards[0].path.unlink()
    monkeypatch.setattr(retries, "WAITS", (0.0, 0.0))
    with pytest.raises(UnreadableFile, match=r"train-00000\.tar: cannot be read: No such file"):
        TokenStream(shards).read(first, 5)


def test_files_without_a_split_are_no_shards(tokens, tmp_path):
    page = {"train-report.html": {"bytes": 1, "xxh3": ""}}
    folder = with_manifest(tokens, tmp_path / "tokens", lambda manifest: manifest["files"].update(page))
    assert TokenDataset(folder, "train", 8, seed=0).windows == TokenDataset(tokens, "train", 8, seed=0).windows


def test_a_folder_of_an_earlier_version_is_refused(tokens, tmp_path):
    folder = with_manifest(tokens, tmp_path / "tokens", lambda manifest: [entry.pop("split") for entry in manifest["files"].values()])
    with pytest.raises(UserError, match="earlier version"):
        TokenDataset(folder, "train", 8, seed=0)


def test_a_trillion_tokens_are_opened_in_constant_memory(tmp_path):
    """Sparse files of 8 GB: memory does not depend on the number of tokens or samples."""
    each, files = 4_000_000_000, {}
    for number in range(250):
        name = f"train-{number:05d}.tar"
        with open(tmp_path / name, "wb") as shard:
            shard.truncate(1024 + 2 * each)
        entry = {"split": "train", "corpus": "default", "dtype": "uint16", "tokens": each, "offset": 1024, "text_bytes": 4 * each}
        files[name] = {"bytes": 1024 + 2 * each, "xxh3": f"{number}", **entry}
    with open(tmp_path / "train-00249.tar", "r+b") as last:
        last.seek(-4096, 2)
        last.write(np.arange(2048, dtype="<u2").tobytes())
    artifact.write(tmp_path, artifact.Manifest("tokenize", {}, files, {"vocab_size": 65536, "end_of_document": 0}))
    tracemalloc.start()
    dataset = TokenDataset(tmp_path, "train", 2048, seed=0)
    batch = dataset.samples(np.arange(256) + 10**9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch.shape == (256, 2049)
    assert peak < 8e6
    assert dataset.tokens == 10**12
    assert dataset.stream.read(np.array([10**12 - 2048]), 2048)[0].tolist() == list(range(2048))
