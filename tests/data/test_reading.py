"""Reading documents from files of all supported formats."""

import gzip
import tarfile

import pytest

from pipeline.common.errors import UserError
from pipeline.data.read import input_files, reader, suffixes
from pipeline.data.read.documents import ReadOptions
from tests.data.raw_files import FORMATS, GOOD, LONG, PACKED, PAGE, PARQUET, TAR, json_line, page, read, tar_of, texts, warc_record
from tests.helpers import pipeline, words


def test_every_format_is_in_the_table() -> None:
    assert FORMATS.keys() == suffixes.FORMATS.keys()


@pytest.mark.parametrize("ending, packing", [(e, p) for e in FORMATS for p in PACKED if e != ".parquet" or not p])
def test_every_format_is_read(tmp_path, ending, packing):
    content, expected, meta = FORMATS[ending]
    (tmp_path / f"x{ending}{packing}").write_bytes(PACKED[packing](content))
    documents, bad = read(tmp_path, suffixes=(f"{ending}{packing}",))
    assert not bad
    assert texts(documents) == expected
    assert documents[0].meta == meta
    assert {document.source for document in documents} == {f"x{ending}{packing}"}


@pytest.mark.parametrize("ending, padding", [(".gz", b""), (".gz", bytes(700)), (".zst", b"")])
def test_files_of_many_compressed_members_are_read_completely(tmp_path, ending, padding):
    lines = [json_line(words(n, 2000)) for n in range(30)]
    (tmp_path / f"x.jsonl{ending}").write_bytes(b"".join(PACKED[ending](line.encode()) for line in [*lines, ""]) + padding)
    documents, bad = read(tmp_path)
    assert not bad
    assert texts(documents) == [words(n, 2000) for n in range(30)]


def test_the_full_page_is_kept_without_main_content(tmp_path):
    (tmp_path / "x.html").write_bytes(page(LONG))
    documents, _ = read(tmp_path, main_content=False)
    assert "Menu" in documents[0].text
    assert LONG in documents[0].text
    assert "Impressum" in documents[0].text


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_of_tar_is_read(tmp_path, form):
    names = ["short/1.txt", f"{'long' * 20}/{'name' * 10}.txt", *([] if form == tarfile.USTAR_FORMAT else [f"{'ä' * 120}.txt"])]
    (tmp_path / "x.tar").write_bytes(tar_of({name: name.encode() for name in names}, form))
    documents, bad = read(tmp_path)
    assert (texts(documents), bad) == (names, [])


def test_numbered_shards_are_read_in_the_notation_of_webdataset(tmp_path):
    for number in range(3):
        (tmp_path / f"shard-{number:02d}.tar").write_bytes(tar_of({f"{number}.txt": words(number, 200).encode()}))
    documents, bad = read(tmp_path / "shard-{00..01}.tar")
    assert (texts(documents), bad) == ([words(0, 200), words(1, 200)], [])
    with pytest.raises(UserError, match=r"shard-03\.tar: no such file"):
        read(tmp_path / "shard-{01..03}.tar")


def test_text_shards_of_this_pipeline_are_read_back(shards, corpus):
    documents, bad = read(shards, suffixes=(".tar",))
    originals, _ = read(corpus)
    assert not bad
    assert sorted(texts(documents)) == sorted(texts(originals))
    assert sorted(document.meta["id"] for document in documents) == sorted(document.meta["id"] for document in originals)


def test_corpora_are_named_by_the_user_and_kept_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    found, _ = input_files.find({"web": [f"{tmp_path}/a", f"{tmp_path}/a/x.txt"], "default": [f"{tmp_path}/b"]}, [], [])
    documents = [
        document for part in input_files.parts(found, 64 << 20) for span in part.spans for document in reader.read(span, ReadOptions())
    ]
    assert [(d.id, d.text, d.corpus) for d in documents] == [("x.txt:0", "b", "default"), ("web/x.txt:0", "a", "web")]
    refused = pipeline("stage=shard", "data.corpora={Web:[x],default:[x]}", "data.corpora.web=[x]", f"data.shards={tmp_path}/s", expect=2)
    assert "2 problems" in refused
    assert "data.corpora=Web: must consist of a-z" in refused
    assert "data.corpora=default: is the reserved name of the corpus of data.input" in refused
    assert "write data.corpora={NAME: [x]}" in pipeline("stage=shard", "data.corpora=[x]", expect=2)


def test_urls_are_read_through_fsspec(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    content = {"a.jsonl": GOOD, "deep/b ü.jsonl.gz": gzip.compress(GOOD), "deep/c.parquet": PARQUET, "deep/d.warc.gz": b"", ".e.txt": b"no"}
    content |= {"deep/e.warc.gz": gzip.compress(warc_record(PAGE)), "deep/f.tar": TAR}
    for name, data in content.items():
        memory.pipe(f"/corpus/{name}", data)
    documents, bad = read("memory://corpus")
    assert [document.source for document in documents if document.offset == 0 and document.source != "deep/f.tar"] == [
        "a.jsonl", "deep/b ü.jsonl.gz", "deep/c.parquet", "deep/e.warc.gz",
    ]  # fmt: skip
    assert len(documents) == 1 + 1 + 5 + 1 + 4
    assert [report.source for report in bad] == ["deep/d.warc.gz"]
    assert [d.source for d in read("memory://corpus/deep/b*")[0]] == ["b ü.jsonl.gz"]
    assert [d.source for d in read("memory://corpus/a.jsonl")[0]] == ["a.jsonl"]
    (tmp_path / "x.txt").write_text("local")
    assert texts(read(f"file://{tmp_path}")[0]) == ["local"]
    for url, reason in (("memory://nowhere", "no such file"), ("nosuch://x", "cannot be listed"), ("s3://bucket/x", "data.input=s3://")):
        with pytest.raises(UserError, match=reason):
            read(url)
