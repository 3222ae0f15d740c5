"""Conversion of token shards to the formats of other tools, and back."""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common import artifact
from pipeline.common.artifact import MANIFEST
from pipeline.data.shard import text_shards
from pipeline.data.tokenize import megatron
from pipeline.data.tokenize.token_shards import ids, lengths
from tests.data.library import here
from tests.helpers import pipeline, same_files
from tools.bench.token_dataset import TokenDataset


def documents(folder: Path, split: str) -> list[list[int]]:
    """Every document of a split in order, end-of-document tokens included."""
    files = artifact.read(folder, key="data.tokens", stage="tokenize").files
    found: list[list[int]] = []
    for name, entry in sorted(files.items()):
        if entry["split"] == split:
            ends = np.cumsum(lengths(folder / name, entry))[:-1]
            found += [part.tolist() for part in np.split(ids(folder / name, entry), ends)]
    return found


def convert(tokens: Path, to: str, *settings: str, ranks: int = 0, expect: int = 0) -> str:
    words = ("stage=convert_tokens", f"data.tokens={tokens}", f"stage.to={to}", *settings)
    return pipeline(*words, ranks=ranks, expect=expect) if ranks else here(*words, expect=expect)


@pytest.fixture(scope="module")
def indexed(tokens, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("indexed") / "tokens"
    convert(tokens, "megatron", f"stage.output={folder}")
    return folder


def test_megatron_core_reads_what_we_write(tokens, indexed):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for split in ("train", "validation"):
        dataset = IndexedDataset(str(indexed / f"{split}-default"))
        expected = documents(tokens, split)
        assert len(dataset) == len(expected) > 0
        assert [dataset[number].tolist() for number in range(len(dataset))] == expected
        assert dataset.document_indices.tolist() == list(range(len(expected) + 1))


def test_we_read_what_megatron_core_writes(tokens, tokenizer, tmp_path):
    """An int32 dataset with a document of two sequences, one without an end-of-document token, and an empty one."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    end = artifact.read(tokens, key="data.tokens", stage="tokenize").totals["end_of_document"]
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    builder.add_document([5, 6, 7, 8, end], [2, 3])
    builder.add_document([9, 10], [2])
    builder.add_document([], [])
    builder.add_document([end], [1])
    builder.finalize(str(tmp_path / "text.idx"))
    convert(tmp_path / "t", "shards", f"stage.input=[{tmp_path}/text]", f"tokenizer.path={tokenizer}")
    assert documents(tmp_path / "t", "train") == [[5, 6, 7, 8, end], [9, 10, end], [end]]
    manifest = artifact.read(tmp_path / "t", key="data.tokens", stage="tokenize")
    assert list(manifest.files) == ["train-text-00000.tar"]
    assert manifest.totals["corpora"]["text"]["train"]["tokens"] == manifest.totals["train"]["tokens"] == 9


def test_round_trip(tokens, tokenizer, indexed, tmp_path):
    inputs = f"stage.input=[{indexed}/train-default,{indexed}/validation-default]"
    settings = (inputs, f"tokenizer.path={tokenizer}", "data.shard_megabytes=0.02")
    convert(tmp_path / "back", "shards", *settings, ranks=3)
    for split in ("train", "validation"):
        assert documents(tmp_path / "back", split) == documents(tokens, split)
        before, after = (TokenDataset(folder, split, 16, 0) for folder in (tokens, tmp_path / "back"))
        assert np.array_equal(before.samples(np.arange(20)), after.samples(np.arange(20)))
        sizes = [sum(corpus.total("text_bytes") for corpus in dataset.corpora) for dataset in (before, after)]
        assert sizes[0] == sizes[1] > 0
        assert after.end_of_document == before.end_of_document
    back = artifact.read(tmp_path / "back", key="data.tokens", stage="tokenize")
    assert back.totals["train"]["shards"] > 3
    convert(tmp_path / "back", "megatron", f"stage.output={tmp_path}/again")
    for name in ("train-default.bin", "train-default.idx", "validation-default.bin", "validation-default.idx"):
        assert (tmp_path / "again" / name).read_bytes() == (indexed / name).read_bytes()
    assert "nothing to do" in convert(tmp_path / "back", "shards", *settings)


def test_parquet_on_any_number_of_ranks(shards, tokens, tmp_path):
    for ranks in (0, 2):
        convert(tokens, "parquet", f"stage.output={tmp_path}/{ranks}", f"data.shards={shards}", ranks=ranks)
    assert same_files(tmp_path / "0", tmp_path / "2")
    tables = [pq.read_table(path) for path in sorted((tmp_path / "0").glob("train-*.parquet"))]
    rows = [row for table in tables for row in table["tokens"].to_pylist()]
    assert rows == documents(tokens, "train")
    assert [size for table in tables for size in table["length"].to_pylist()] == [len(row) for row in rows]
    assert {corpus for table in tables for corpus in table["corpus"].to_pylist()} == {"default"}
    expected = [about["id"] for path in sorted(shards.glob("train-*.tar")) for _, about in text_shards.documents(path)]
    assert [name for table in tables for name in table["id"].to_pylist()] == expected
    assert "column id of the Parquet files is empty" in convert(tokens, "parquet", f"stage.output={tmp_path}/none", f"data.shards={tokens}")
    assert pq.read_table(tmp_path / "none" / "train-00000.parquet")["id"].null_count == len(tables[0])
    assert "nothing to do" in convert(tokens, "parquet", f"stage.output={tmp_path}/0")
    assert "was created with stage.to=parquet" in convert(tokens, "megatron", f"stage.output={tmp_path}/0", expect=2)


def test_a_rerun_converts_only_missing_parts_and_keeps_foreign_files(tokens, indexed, tmp_path):
    folder = tmp_path / "indexed"
    folder.mkdir()
    (folder / "mine.bin").write_text("mine")
    assert "files of another run or program: mine.bin" in convert(tokens, "megatron", f"stage.output={folder}", expect=2)
    assert (folder / "mine.bin").read_text() == "mine"
    damaged = tmp_path / "tokens"
    damaged.mkdir()
    for path in tokens.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    good = (damaged / "validation-00000.tar").read_bytes()
    (damaged / "validation-00000.tar").write_bytes(good[:-1] + b"x")
    assert "validation-00000.tar: is corrupt" in convert(damaged, "megatron", f"stage.output={tmp_path}/m", expect=2)
    kept = (tmp_path / "m/train-default.bin").stat().st_ino
    assert not (tmp_path / "m" / MANIFEST).exists()
    (damaged / "validation-00000.tar").write_bytes(good)
    convert(damaged, "megatron", f"stage.output={tmp_path}/m")
    assert same_files(tmp_path / "m", indexed)
    assert (tmp_path / "m/train-default.bin").stat().st_ino == kept


def test_datasets_that_cannot_be_read(tokenizer, indexed, tmp_path):
    def refused(*names: str, ranks: int = 0) -> str:
        inputs = f"stage.input=[{','.join(f'{tmp_path}/{name}' for name in names)}]"
        return convert(tmp_path / "t", "shards", inputs, f"tokenizer.path={tokenizer}", ranks=ranks, expect=2)

    def dataset(name: str, index: bytes, content: bytes) -> None:
        (tmp_path / f"{name}.idx").write_bytes(index)
        (tmp_path / f"{name}.bin").write_bytes(content)

    index, content = ((indexed / f"validation-default.{suffix}").read_bytes() for suffix in ("idx", "bin"))
    dataset("whole", index, content)
    dataset("cut", index[:-100], content)
    dataset("short", index, content[:-2])
    dataset("other", b"PAR1" + index, content)
    dataset("large", index, struct.pack("<H", 60_000) + content[2:])
    dataset("validation-only", index, content)
    printed = refused("cut", "short", "other", "missing", ranks=2)
    assert printed.count("4 problems") == 1
    for told in ("cut.idx: is truncated", "short.idx: does not cover", "other.idx: is not an index", "missing.idx: requires missing.bin"):
        assert told in printed
    assert "contains the token 60000" in refused("large")
    assert "contains no training documents" in refused("validation-only")
    assert "as another dataset does" in refused("whole", "whole")
    assert "contains no dataset" in refused()
    assert not list(tmp_path.glob("t/*.tar"))


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 100))
def test_partition_covers_all_documents_once(sizes, size):
    dataset = object.__new__(megatron.IndexedDataset)
    dataset.starts = np.cumsum([0, *sizes])
    ranges = dataset.partition(size)
    assert [number for first, stop in ranges for number in range(first, stop)] == list(range(len(sizes)))
    assert json.loads(json.dumps(ranges)) == [list(part) for part in ranges]
