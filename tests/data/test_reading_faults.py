"""Faults in files are reported with file, position and reason, and never stop the reader."""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import socket
import tarfile
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.data.read import input_files, reader, suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions, Skipped
from tests.data.library import here
from tests.data.raw_files import (
    FORMATS,
    GOOD,
    LONG,
    PACKED,
    PAGE,
    PARQUET,
    TAR,
    all_of,
    arrow_of,
    json_line,
    page,
    parquet_of,
    read,
    spans_of,
    tar_of,
    texts,
    warc_record,
    zip_of,
)
from tests.helpers import RAW, one_in, pipeline, words


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


ARROW, ARROW_FILE = (arrow_of([{"text": "good"}] * 5, new) for new in (pa.ipc.new_stream, pa.ipc.new_file))
ZIP = zip_of({f"{n}.txt": b"good" for n in range(4)})
ENCRYPTED = flipped(flipped(ZIP, 8 * 6), 8 * (ZIP.index(b"PK\1\2") + 8))  # the flag of the first member
WIKI_PAGE = b"<page><ns>0</ns><revision><text>good</text></revision></page>\n"
WIKI_OF_GOOD = b"<mediawiki>%b</mediawiki>" % (WIKI_PAGE * 3)
UNDECODABLE = parquet_of([{"text": "good"}, {"text": "b" + "a" * 9}, {"text": "good"}], use_dictionary=False, compression="none").replace(
    b"b" + b"a" * 9, b"b" + b"\xff" * 9
)
GZIPPED = gzip.compress(warc_record(PAGE))
INCOMPRESSIBLE = json_line(os.urandom(9000).hex()).encode()
#: case -> (name, content, number of documents that are still read, (position, a part of the reason) of every report)
FAULTS: dict[str, tuple[str, bytes, int, list[tuple[str, str]]]] = {
    "broken JSON": ("x.jsonl", GOOD + b'{"text": "bro\n' + GOOD, 2, [("line 2", "is not JSON")]),
    "last line cut": ("x.jsonl", GOOD + b'{"text": "bro', 1, [("line 2", "is not JSON")]),
    "no object": ("x.jsonl", GOOD * 2 + b'["text"]\n' + GOOD, 3, [("line 3", "is a JSON list, not an object")]),
    "missing field": ("x.jsonl", GOOD + b'\n{"body": "x"}\n', 1, [("line 3", "has no field 'text' (data.text_field), only 'body'")]),
    "null": ("x.jsonl", GOOD + b'{"text": null}\n' + GOOD, 2, [("line 2", "null instead of text")]),
    "number": ("x.jsonl", GOOD + b'{"text": 7}\n' + GOOD, 2, [("line 2", "int instead of text")]),
    "surrogate": ("x.jsonl", GOOD + b'{"text": "\\ud800"}\n' + GOOD, 2, [("line 2", "surrogate")]),
    "surrogate beside NaN": ("x.jsonl", GOOD + b'{"text": "\\ud800", "x": NaN}\n', 1, [("line 2", "surrogates")]),
    "Latin-1 line": ("x.jsonl", GOOD + '{"text": "grün"}\n'.encode("latin-1"), 1, [("line 2", "not UTF-8: byte 0xfc at position 12")]),
    "NUL line": ("x.jsonl", GOOD + bytes(4096), 1, [("line 2", "is not JSON")]),
    "nested line": ("x.jsonl", GOOD + b"[" * 50_000 + b"\n" + GOOD, 2, [("line 2", "is not JSON")]),
    "large line": ("x.jsonl", GOOD + json_line("x" * 300_000).encode() + GOOD, 2, [("line 2", "larger than data.document_megabytes=0.1")]),
    "large last line": ("x.jsonl.gz", gzip.compress(GOOD + b"x" * 300_000), 1, [("line 2", "larger than")]),
    "large text": ("x.txt", b"x" * 300_000, 0, [("", "larger than")]),
    "large page": ("x.html", b"x" * 300_000, 0, [("", "larger than")]),
    "large member": ("x.tar", tar_of({"1.txt": b"x" * 300_000, "2.txt": b"good"}), 1, [("member 1.txt", "larger than")]),
    "large record": ("x.warc", warc_record(page("x" * 300_000)) + warc_record(PAGE), 1, [("byte 0", "larger than")]),
    "large after decoding": (
        "x.warc",
        warc_record(gzip.compress(page("x" * 300_000)), Content_Encoding="gzip") + warc_record(PAGE),
        1,
        [("byte 0", "larger than")],
    ),
    "large row": ("x.parquet", parquet_of([{"text": "ü" * 60_000}, {"text": "good"}]), 1, [("row 0", "larger than")]),
    "Latin-1 text": ("x.txt", "grün".encode("latin-1"), 0, [("", "not UTF-8: byte 0xfc at position 2")]),
    "UTF-16 text": ("x.txt", "grün".encode("utf-16"), 0, [("", "not UTF-8")]),
    "NUL text": ("x.txt", b"a\0b", 0, [("", "is not a text: NUL at position 1")]),
    "empty lines file": ("x.jsonl", b"", 0, [("", "is an empty file")]),
    "empty gzip file": ("x.jsonl.gz", b"", 0, [("", "is an empty file")]),
    "empty Parquet file": ("x.parquet", b"", 0, [("", "is an empty file")]),
    "blank lines": ("x.jsonl", b"\n \n", 0, [("", "contains no document")]),
    "tar of images": ("x.tar", tar_of({"1.jpg": b"\xff\xd8"}), 0, [("", "contains no document")]),
    "cut gzip": ("x.jsonl.gz", gzip.compress(GOOD * 500 + INCOMPRESSIBLE)[:-2000], 0, [("byte 0", "ends within its gzip data")]),
    "cut gzip trailer": ("x.jsonl.gz", gzip.compress(GOOD * 500)[:-3], 0, [("byte 0", "ends within its gzip data")]),
    "second member cut": ("x.jsonl.gz", gzip.compress(GOOD) + gzip.compress(INCOMPRESSIBLE)[:-99], 1, [("byte ", "ends within")]),
    "bad checksum": ("x.jsonl.gz", gzip.compress(GOOD)[:-8] + bytes(8), 0, [("byte 0", "incorrect data check")]),
    "no gzip": ("x.jsonl.gz", GOOD, 0, [("byte 0", "is damaged or truncated")]),
    "rubbish after gzip": ("x.jsonl.gz", gzip.compress(GOOD) + b"rubbish", 1, [("byte 17", "is damaged")]),
    "cut zstd": ("x.jsonl.zst", zstandard.compress(GOOD * 500 + INCOMPRESSIBLE)[:-9], 0, [("byte ", "ends within its zstd data")]),
    "no zstd": ("x.jsonl.zst", GOOD, 0, [("byte 0", "is damaged or truncated")]),
    "cut bzip2": ("x.jsonl.bz2", bz2.compress(GOOD) + bz2.compress(GOOD)[:-9], 2, [("byte 34", "ends within its bzip2 data")]),
    "no bzip2": ("x.jsonl.bz2", GOOD, 0, [("byte 0", "is damaged or truncated")]),
    "large line of bzip2": ("x.jsonl.bz2", bz2.compress(bytes(50_000_000) + b"\n" + GOOD), 1, [("line 1", "larger than")]),
    "cut xz": ("x.jsonl.xz", lzma.compress(GOOD) + lzma.compress(GOOD)[:-9], 1, [("byte 17", "ends within its xz data")]),
    "bad checksum of xz": ("x.jsonl.xz", lzma.compress(GOOD)[:-40] + bytes(40), 0, [("byte ", "is damaged")]),
    "no xz": ("x.jsonl.xz", GOOD, 0, [("byte 0", "is damaged or truncated")]),
    "cut text": ("x.txt.gz", gzip.compress(b"good")[:-3], 0, [("byte 0", "ends within its gzip data")]),
    "no Parquet": ("x.parquet", GOOD, 0, [("", "is damaged or truncated")]),
    "cut Parquet": ("x.parquet", PARQUET[: len(PARQUET) // 2], 0, [("", "is damaged or truncated")]),
    "other schema": ("x.parquet", parquet_of([{"body": "x"}]), 0, [("", "has no column 'text' (data.text_field), only 'body'")]),
    "other type": ("x.parquet", parquet_of([{"text": 7}]), 0, [("", "has int64 instead of text in column 'text'")]),
    "row of CSV": (
        "x.csv",
        b'text,n\ngood,1\ngood\ngood,2,3\n"good" x,4\n"good",5',
        2,
        [("row 2", "has 1 fields"), ("row 3", "has 3"), ("row 4", "is not CSV")],
    ),
    "Latin-1 row of CSV": ("x.csv", "text\ngood\ngrün\ngood\n".encode("latin-1"), 2, [("row 2", "contains invalid Unicode")]),
    "open quotation mark": ("x.csv", b'text\ngood\n"good\ngood\n', 1, [("row 2", "is not CSV")]),
    "large row of CSV": ("x.tsv", b"text\n" + b"x" * 300_000 + b"\ngood\n", 1, [("row 1", "is not CSV: field larger than field limit")]),
    "other columns": ("x.csv", b"body,n\ngood,1\n", 0, [("", "has no column 'text' (data.text_field), only 'body', 'n'")]),
    "cut CSV": ("x.csv.gz", gzip.compress(b"text\ngood\n") + gzip.compress(b"good\ngood")[:-9], 1, [("byte 10", "ends within")]),
    "record of an array": (
        "x.json",
        b'[{"text": "good"}, 7, {"a": 1}, {"text": "\\ud800"}, {"text": "good"}]',
        2,
        [("record 1", "is a JSON int"), ("record 2", "has no field 'text'"), ("record 3", "invalid Unicode")],
    ),
    "damaged array": ("x.json", b'[{"text": "good"}, {"text" "bad"}, {"text": "good"}]', 1, [("byte 19", "is not JSON")]),
    "cut array": ("x.json", b'[{"text": "good"}, {"text": "go', 1, [("byte 19", "is not JSON")]),
    "large record of an array": (
        "x.json",
        json.dumps([{"text": "good"}, {"text": "x" * 300_000}, {"text": "good"}]).encode(),
        2,
        [("record 1", "larger than")],
    ),
    "no dump": ("x.xml", b"<html><body>good</body></html>", 0, [("", "contains no document")]),
    "cut dump": ("x.xml", WIKI_OF_GOOD[:-60], 2, [("byte ", "not XML: unclosed token")]),
    "damaged dump": ("x.xml", WIKI_OF_GOOD.replace(b"</ns>", b"</n>", 1), 0, [("byte ", "not XML: mismatched tag")]),
    "cut Arrow": ("x.arrow", ARROW[: len(ARROW) * 2 // 3], 3, [("row 3", "is damaged or truncated")]),
    "cut Arrow file": ("x.arrow", ARROW_FILE[: len(ARROW_FILE) // 2], 0, [("", "is damaged or truncated")]),
    "no Arrow": ("x.arrow", GOOD, 0, [("", "is damaged or truncated")]),
    "other schema of Arrow": ("x.arrow", arrow_of([{"body": "x"}]), 0, [("", "has no column 'text'")]),
    "damaged member of a zip": ("x.zip", flipped(ZIP, 8 * 37), 3, [("member 0.txt", "cannot be read: ")]),
    "cut zip": ("x.zip", ZIP[:-30], 0, [("", "is damaged or truncated")]),
    "password": ("x.zip", ENCRYPTED, 3, [("member 0.txt", "cannot be read: File")]),
    "null row": ("x.parquet", parquet_of([{"text": "good"}, {"text": None}, {"text": "good"}]), 2, [("row 1", "null instead of text")]),
    "Latin-1 row": ("x.parquet", UNDECODABLE, 2, [("row 1", "invalid UTF-8")]),
    "cut tar": ("x.tar", TAR[: 3 * 1024 + 512 + 2], 3, [("byte 3586", "the archive is truncated")]),
    "tar without end": ("x.tar", TAR[: 4 * 1024], 4, [("byte 4096", "the archive has no end marker")]),
    "damaged tar": ("x.tar", TAR[:1024] + b"x" * 512 + TAR[1536:], 1, [("byte 1024", "invalid tar header")]),
    "cut tar.gz": ("x.tar.gz", gzip.compress(TAR)[:-20], 0, [("byte ", "ends within its gzip data")]),
    "broken record beside text": ("x.tar", tar_of({"1.txt": b"t", "1.json": b"{"}), 0, [("member 1.txt", "has a .json that is not JSON")]),
    "broken line in tar": ("x.tar", tar_of({"a b.jsonl": GOOD + b"{\n" + GOOD}), 2, [("member a b.jsonl, line 2", "is not JSON")]),
    "cut WARC": ("x.warc", warc_record(PAGE) * 2 + warc_record(PAGE)[:-900], 2, [("byte ", "is truncated")]),
    "cut WARC header": ("x.warc", warc_record(PAGE) * 2 + warc_record(PAGE)[:50], 2, [("byte ", "is truncated within its header")]),
    "cut WARC.gz": (
        "x.warc.gz",
        gzip.compress(warc_record(PAGE)) * 3 + gzip.compress(warc_record(PAGE))[:-99],
        3,
        [("byte ", "ends within")],
    ),
    "rubbish in WARC": (
        "x.warc",
        warc_record(PAGE) + b"rubbish\r\n" + warc_record(PAGE),
        1,
        [("after the record at byte 0", "no readable WARC record")],
    ),
    "no WARC": ("x.warc", GOOD, 0, [("", "no readable WARC record")]),
    "no gzip in WARC": (
        "x.warc",
        warc_record(b"no gzip", Content_Encoding="gzip") + warc_record(PAGE),
        1,
        [("byte 0", "an HTTP response that cannot be decoded")],
    ),
    "deep page": ("x.html", b"<div>" * 5000 + b"x", 0, [("", "nests more than 1000 elements")]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_reported_and_the_other_documents_are_read(tmp_path, case):
    name, content, good, faults = FAULTS[case]
    (tmp_path / f"Bücher & {name}").write_bytes(content)
    documents, bad = read(tmp_path, document_bytes=100_000)
    assert set(texts(documents)) <= {"good", LONG}
    assert len(documents) == good
    assert len(bad) == len(faults)
    for report, (position, reason) in zip(bad, faults, strict=True):
        assert report.source == f"Bücher & {name}"
        assert report.position.startswith(position)
        assert bool(report.position) == bool(position)
        assert reason in report.reason


MANY = b"".join(json_line(os.urandom(9000).hex()).encode() for _ in range(40))
MEMBERS_OF_MANY = [gzip.compress(line) for line in MANY.splitlines(keepends=True)]
MANY_ROWS = parquet_of([{"text": os.urandom(9000).hex()} for _ in range(40)], row_group_size=4, compression="none")
GZIP_OF_MANY = gzip.compress(MANY)
ZIP_OF_MANY = zip_of({f"{n}.txt": os.urandom(9000).hex().encode() for n in range(4)})
GZIPPED_TAR = gzip.compress(tar_of({f"{n}.txt": os.urandom(900).hex().encode() for n in range(9)}))


#: case -> (name, content, the stored bytes that are lost, as a share of the file)
LOSSES: dict[str, tuple[str, bytes, float]] = {
    "bad line": ("x.jsonl", b"{\n" + MANY, 0),
    "cut gzip": ("x.jsonl.gz", GZIP_OF_MANY[: len(GZIP_OF_MANY) // 3], 1),
    "damaged gzip": ("x.jsonl.gz", b"".join([*MEMBERS_OF_MANY[:10], b"rubbish", *MEMBERS_OF_MANY[20:]]), 0),
    "damaged member": (
        "x.jsonl.gz",
        b"".join([*MEMBERS_OF_MANY[:10], b"".join(MEMBERS_OF_MANY[10:20])[9:-9], *MEMBERS_OF_MANY[20:]]),
        0.05,
    ),
    "flipped bit": ("x.jsonl.gz", flipped(GZIP_OF_MANY, 300_000), 1),
    "flipped bit of a tar": ("x.tar.gz", flipped(GZIPPED_TAR, 3000), 1),
    "cut Parquet": ("x.parquet", MANY_ROWS[: len(MANY_ROWS) // 2], 1),
    "damaged Parquet": ("x.parquet", bytes(len(MANY_ROWS) // 2) + MANY_ROWS[len(MANY_ROWS) // 2 :], 0.6),  # 6 of 10 row groups
    "other schema": ("x.parquet", parquet_of([{"body": "x"}] * 9), 1),
    "cut tar": ("x.tar", TAR[: 3 * 1024 + 512 + 2], 1),
    "other columns": ("x.csv", b"body,n\n" + MANY, 1),
    "open quotation mark": ("x.csv", b"text\n" + MANY[:90_000].replace(b'"', b"") + b'\n"' + MANY[:90_000].replace(b'"', b""), 0.5),
    "damaged array": ("x.json", b"[%b{]" % b",".join(MANY.splitlines()[:20]) + MANY, 2 / 3),
    "damaged dump": ("x.xml", WIKI_OF_GOOD.replace(b"good", MANY.replace(b'"', b"")) * 2, 0.5),
    "damaged member of a zip": ("x.zip", ZIP_OF_MANY[:1000] + bytes(9) + ZIP_OF_MANY[1009:], 0.25),
    "cut zip": ("x.zip", ZIP_OF_MANY[:-30], 1),
    "cut Arrow": ("x.arrow", ARROW[: len(ARROW) * 2 // 3], 1),
    "tar without end": ("x.tar", TAR[: 4 * 1024], 0),
    "damaged tar": ("x.tar", TAR[:1024] + b"x" * 512 + TAR[1536:], 1 - 1024 / len(TAR)),
    "cut WARC": ("x.warc", warc_record(PAGE) * 2 + warc_record(PAGE)[:-900], 1),
    "no WARC": ("x.warc", GOOD, 1),
}


@pytest.mark.parametrize("case", LOSSES)
def test_damage_is_weighed_by_the_bytes_that_are_lost(tmp_path, case):
    name, content, share = LOSSES[case]
    (tmp_path / name).write_bytes(content)
    source = input_files.InputFile(str(tmp_path / name), name, len(content))
    for part_bytes in (1 << 30, 100_000):  # the sum over the parts of a file is the same
        spans = [span for part in input_files.parts([source], part_bytes) for span in part.spans]
        bad = [found for found in all_of(spans) if isinstance(found, Bad)]
        assert bad
        assert sum(found.lost_bytes for found in bad) == pytest.approx(share * len(content), abs=0.02 * len(content))


def checked_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


SHORT = [words(n, 12) for n in range(120)]
CHECKED = {"gz": gzip.compress, "zst": checked_zstd, "bz2": bz2.compress, "xz": lzma.compress}
#: format -> (its records, which follow each other in a file, and whether the file is read on behind damage)
RECORDS_OF = {
    "jsonl": ([json_line(text).encode() for text in SHORT], True),
    "wet": ([warc_record(text.encode(), kind="conversion") for text in SHORT], True),
    "warc": ([warc_record(page(text)) for text in SHORT], True),
    "json": ([json_line(text).encode() for text in SHORT], True),
    "tar": ([tar_of({f"{n}.txt": text.encode() for n, text in enumerate(SHORT)})], False),
    "csv": ([b"text\n", *(b'"%b"\n' % text.encode() for text in SHORT)], False),
    "xml": ([b"<mediawiki>", *(WIKI_PAGE.replace(b"good", text.encode()) for text in SHORT), b"</mediawiki>"], False),
    "txt": ([SHORT[0].encode()], False),
    "html": ([page(LONG)], False),
}


@pytest.mark.parametrize("members", ["one", "several"])
@pytest.mark.parametrize("compression", CHECKED)
@pytest.mark.parametrize("ending", one_in(3, RECORDS_OF))
def test_text_whose_check_fails_is_not_read(tmp_path, ending, compression, members):
    """One bit of compressed data is another one: no text differs, and of several members the others are read."""
    fsspec = pytest.importorskip("fsspec")
    records, goes_on = RECORDS_OF[ending]
    one = members == "one" or len(records) == 1
    pieces = [CHECKED[compression](piece) for piece in ([b"".join(records)] if one else records)]
    content, name = b"".join(pieces), f"x.{ending}.{compression}"
    (tmp_path / name).write_bytes(content)
    intact, none = read(tmp_path)
    assert (len(intact), none) == (1 if ending in ("txt", "html") else len(SHORT), [])
    for bit in random.Random(0).sample(range(8 * len(content)), 12):
        (tmp_path / name).write_bytes(flipped(content, bit))
        documents, bad = read(tmp_path)
        assert set(texts(documents)) <= set(texts(intact))
        assert bad or documents == intact  # a bit of a header without a meaning
        assert all(report.lost_bytes >= 0 for report in bad)
        if one or not goes_on:
            continue
        assert len(documents) >= len(SHORT) - 1
        assert sum(report.lost_bytes for report in bad) <= max(map(len, pieces))
    fsspec.filesystem("memory").pipe(f"/flips/{name}", flipped(content, bit))
    assert [(d.offset, d.text) for d in read(f"memory://flips/{name}")[0]] == [(d.offset, d.text) for d in documents]


def test_members_that_end_within_a_line_do_not_make_a_line_of_two(tmp_path):
    """The halves of two lines around a damaged member are not joined."""
    lines = b"".join(json_line(f"{n} {words(n, 40)}").encode() for n in range(99))
    pieces = [gzip.compress(lines[start : start + 1000]) for start in range(0, len(lines), 1000)]
    pieces[3] = pieces[3][:-8] + bytes(8)
    (tmp_path / "x.jsonl.gz").write_bytes(b"".join(pieces))
    documents, bad = read(tmp_path)
    assert {document.text for document in documents} < {f"{n} {words(n, 40)}" for n in range(99)}
    assert [report.position for report in bad] == ["byte 3000", "byte 3000"]
    assert "is not JSON" in bad[1].reason
    assert documents[-1].text.startswith("98 ")


def test_documents_that_can_be_read_of_damaged_data_are_counted(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(MEMBERS_OF_MANY[0] + flipped(GZIP_OF_MANY, 8 * len(GZIP_OF_MANY) - 40))
    documents, (bad,) = read(tmp_path)
    assert (len(documents), bad.position) == (1, "byte 18013")
    assert "; 39 documents, 702,000 bytes, that can be read do not pass its check, and are left out" in bad.reason


@pytest.mark.parametrize("content", [b"", b"<html><body><p>good", b"<b><i>good</b></i></html></div>", b"\xff\0<p>good", b"<!DOCTYPE"])
def test_broken_html_is_read_like_in_a_browser(tmp_path, content):
    (tmp_path / "x.html").write_bytes(content or b" ")
    documents, bad = read(tmp_path)
    assert not bad
    assert ("good" in documents[0].text) == (b"good" in content)
    assert documents[0].meta == {}


def test_one_invalid_byte_does_not_change_the_encoding_of_a_page(tmp_path):
    (tmp_path / "x.html").write_bytes(page(LONG).replace(b"</p>", b" \xff</p>"))
    documents, _ = read(tmp_path)
    assert documents[0].text == LONG + " \ufffd"


JANE = "Jane Doe, jane@example.org " * 1000
#: case -> (name, content): unreadable input whose faulty part is personal data.
PERSONAL = {
    "field": ("x.jsonl", json.dumps({JANE: 1, "jane@example.org": 1, "body": 1}).encode()),
    "broken JSON": ("x.jsonl", b'{"text": "' + JANE.encode()),
    "page as a record": ("x.jsonl", json.dumps(JANE).encode()),
    "column": ("x.parquet", parquet_of([{JANE: 1, "jane@example.org": 1}])),
    "type": ("x.parquet", parquet_of([{"text": {JANE: 1}}])),
    "chunk header": ("x.warc", warc_record(JANE.encode(), Transfer_Encoding="chunked")),
    "encoding": ("x.warc", warc_record(JANE.encode(), Content_Encoding="gzip")),
    "no WARC": ("x.warc", JANE.encode()),
    "tar header": ("x.tar", b"x" * 124 + b"Jane Doe    " + b"x" * 400),
    "extended header": ("x.tar", tar_of({"ä" * 120: b""}, tarfile.PAX_FORMAT).replace(b"250 path=", b"Jane Doe=")),
    "JSON of a tar": ("x.tar", tar_of({"1.json": JANE.encode()})),
    "field of a tar": ("x.tar", tar_of({"1.json": json.dumps({JANE: 1}).encode()})),
}


@pytest.mark.parametrize("case", PERSONAL)
def test_a_reason_contains_nothing_of_the_text(tmp_path, case):
    name, content = PERSONAL[case]
    (tmp_path / name).write_bytes(content)
    documents, bad = read(tmp_path)
    assert not documents
    assert bad
    for report in bad:
        assert "jane" not in report.reason.lower()
        assert len(report.reason) < 200


def test_a_name_in_an_archive_is_cut_in_the_position(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_of({f"{'long' * 1000}.txt": b"\xff"}, tarfile.PAX_FORMAT))
    (bad,) = read(tmp_path)[1]
    assert bad.position.startswith("member longlong")
    assert len(bad.position) < 400


CHANGES = {
    "shrinks": lambda path: os.truncate(path, path.stat().st_size // 2 + 5),
    "grows": lambda path: path.write_bytes(path.read_bytes() + GOOD),
    "is replaced": lambda path: (path.with_name("new").write_bytes(path.read_bytes()), path.with_name("new").replace(path)),
    "vanishes": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "ending, packing", [(".jsonl", ""), (".jsonl", ".gz"), (".jsonl", ".xz"), (".parquet", ""), (".tar", ""), (".warc", "")]
)
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, ending, packing, change):
    path = tmp_path / f"x{ending}{packing}"
    path.write_bytes(PACKED[packing](FORMATS[ending][0]))
    os.utime(path, (1, 1))  # else the replacement may have the same time
    size = path.stat().st_size
    (file,) = input_files.find({"web": [str(tmp_path)]}, [], []).files
    found = reader.read(input_files.Span(file), ReadOptions())
    next(found)
    CHANGES[change](path)
    with pytest.raises(UserError, match=rf"data.corpora.web={path}: had {size:,} bytes .*its bytes 0 to {size:,} were read"):
        list(found)


def test_a_part_of_a_file_that_has_shrunk_is_not_taken_for_empty(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD * 100)
    (file,) = input_files.find({"default": [str(path)]}, [], []).files
    os.truncate(path, 800)
    with pytest.raises(UserError, match=r"had 1,700 bytes .* has 800 .*after its bytes 850 to 1,700 were read"):
        list(reader.read(input_files.Span(file, 850, 1700), ReadOptions()))


def test_a_file_that_disappears_is_reported(tmp_path):
    span = input_files.Span(input_files.InputFile(str(tmp_path / "x.jsonl"), "x.jsonl", 5))
    assert list(reader.read(span, ReadOptions())) == [Bad("x.jsonl", "", "cannot be read: No such file or directory", 5)]


def test_unreadable_folder_entries_are_reported(tmp_path, monkeypatch):
    folder = tmp_path / "Köche & Bücher"
    (folder / "x.jsonl" / "tief er").mkdir(parents=True)
    (folder / "x.jsonl" / "tief er" / "größe.txt").write_text("gut")
    (folder / "broken.txt").symlink_to("nowhere")
    (folder / "loop").symlink_to(folder)
    (folder / "notes.md").write_text("not a document")
    (folder / ".hidden.txt").write_text("not a document")
    Path(os.fsdecode(os.fsencode(folder) + b"/gr\xfcn.txt")).write_text("Latin-1 name")
    monkeypatch.chdir(folder)  # a socket's address is at most 107 bytes long
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.bind("socket.txt")
    os.mkfifo(folder / "pipe.txt")
    (tmp_path / "nothing").mkdir()
    documents, bad = read(folder, tmp_path / "nothing")
    assert {document.source: document.text for document in documents} == {
        "x.jsonl/tief er/größe.txt": "gut",
        r"gr\xfcn.txt": "Latin-1 name",
    }
    json.dumps([document.id for document in documents]).encode()
    assert {(report.source, report.reason.partition(":")[0]) for report in bad} == {
        ("broken.txt", "is a broken link"),
        ("socket.txt", "is a socket, not a file"),
        ("pipe.txt", "is a FIFO (named pipe), not a file"),
        (str(tmp_path / "nothing"), f"contains no file with suffix {suffixes.described(suffixes.SEARCHED)}"),
    }


def test_a_file_without_read_permission_is_reported():
    """Root may read everything: then as another user, who may not enter tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file in ("x.txt", "y.txt"):
            (folder / file).write_text(file[0])
        assert texts(read(folder)[0]) == ["x", "y"]
        (folder / "x.txt").chmod(0)
        root = os.geteuid() == 0
        if root:
            os.setresuid(65534, 65534, 0)
        try:
            documents, bad = read(folder)
        finally:
            if root:
                os.setresuid(0, 0, 0)
    assert texts(documents) == ["y"]
    assert "permissions" in bad[0].reason


def test_the_stage_counts_what_it_reads_and_quarantines_and_leaves_out(tmp_path, tmp_path_factory):
    shards = tmp_path_factory.mktemp("shards") / "s"
    (tmp_path / "good.jsonl").write_bytes(GOOD * 500)
    (tmp_path / "good.txt").write_bytes(b"text")
    (tmp_path / "images.tar").write_bytes(tar_of({"1.jpg": b"\xff\xd8", "2.txt": b"text"}))
    for name in ("notes.md", "more.md", ".hidden"):
        (tmp_path / name).write_bytes(b"text")
    (tmp_path / "bad one.jsonl.gz").write_bytes(gzip.compress(GOOD * 3)[:-1])
    (tmp_path / "flipped.jsonl.gz").write_bytes(gzip.compress(GOOD) + flipped(GZIP_OF_MANY, 8 * len(GZIP_OF_MANY) - 40))
    (tmp_path / "unchecked.jsonl.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=False).compress(GOOD))
    command = ["stage=shard", *RAW, f"data.input=[{tmp_path}]", f"data.shards={shards}"]
    refused = here(*command, expect=2)
    assert re.search(r"about 4\d\d,\d+ of 4\d\d,\d+ bytes, in damaged files, could not be read", refused)
    assert "flipped.jsonl.gz byte 17 is damaged or truncated" in refused
    printed = pipeline(*command, "data.quarantine_limit=1", ranks=2)
    assert "2 unreadable documents; 4 files or parts of files not read" in printed
    assert (
        "shard: input of 6 files, 0.4 MB: 2 .jsonl.gz (0.4 MB), 1 .jsonl (0.0 MB), 1 .jsonl.zst (0.0 MB), 1 .tar (0.0 MB), 1 .txt (0.0 MB)"
        in printed
    )
    assert "data.input: not read: 2 with suffix .md (0.0 MB), 1 excluded by data.exclude (0.0 MB)" in printed
    assert "data.suffixes=[.jsonl,.jsonl.gz,.jsonl.zst,.tar,.txt,.md]" in printed
    assert "a name has several files that differ only in their suffix, such as good.jsonl and good.txt: all are read" in printed
    report = json.loads((shards / "report.json").read_text())
    assert report["input"]["files"]["default"][".tar"] == [1, (tmp_path / "images.tar").stat().st_size]
    assert report["input"]["skipped"]["default"] == {
        "file excluded by data.exclude": [1, 4],
        "file with suffix .md": [2, 8],
        "archive member with suffix .jpg": [1, 2],
    }
    assert report["input"]["same_names"] == {"default": {"names": 1, "example": ["good.jsonl", "good.txt"]}}
    shown = (shards / "report.html").read_text()
    assert all(text in shown for text in ("archive member with suffix .jpg", "good.jsonl and good.txt", ".jsonl.gz"))
    manifest = json.loads((shards / "manifest.json").read_text())
    assert manifest["totals"]["train"]["documents"] + manifest["totals"]["validation"]["documents"] == 504
    assert (manifest["totals"]["files"], manifest["totals"]["skipped"]) == (6, 4)
    assert (report["input"]["documents"], report["input"]["unchecked_files"]) == (504, 1)
    assert "1 compressed files have no checksum" in shown


def test_all_missing_inputs_are_named_at_once(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("x")
    (tmp_path / "notes.md").write_text("x")
    os.mkfifo(tmp_path / "pipe.jsonl")
    inputs = ["nowhere.jsonl", "*.parquet", "notes.md", "a", "b", "pipe.jsonl"]
    given = ",".join(str(tmp_path / name) for name in inputs)
    arguments = [f"data.input=[{given}]", f"data.corpora={{web:[{tmp_path}/missing]}}", f"data.shards={tmp_path}/s"]
    printed = here("stage=shard", *arguments, expect=2)
    assert "6 problems" in printed
    assert "pipe.jsonl: is a FIFO (named pipe), not a file" in printed
    assert "nowhere.jsonl: no such file" in printed
    assert "*.parquet: no such file, folder or match" in printed
    assert "notes.md: does not have the suffix .jsonl" in printed
    assert "common parent" in printed
    assert f"data.corpora.web={tmp_path}/missing: no such file" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "s").exists()
    (tmp_path / "empty").mkdir()
    nothing = here("stage=shard", f"data.input=[{tmp_path}/empty]", f"data.shards={tmp_path}/s", expect=2)
    assert "empty: contains no file with suffix .jsonl" in nothing


@settings(max_examples=150)
@given(st.sampled_from(list(FORMATS)), st.sampled_from(list(PACKED)), st.data())
def test_no_kind_of_damage_stops_the_reader(tmp_path_factory, ending, packing, data):
    packing = "" if ending in suffixes.INTERNAL else packing
    content = FORMATS[ending][0]
    for step in (PACKED[packing], bytes):  # damage before compression, then after it
        for _ in range(data.draw(st.integers(0, 2))):
            first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
            content = content[:first] + data.draw(st.binary(max_size=9)) + content[data.draw(st.sampled_from([first, first + 1, last])) :]
        content = step(content)
    path = tmp_path_factory.mktemp("damage") / f"x{ending}{packing}"
    path.write_bytes(content)
    for found in all_of(spans_of(path, 1 << 30)):
        if isinstance(found, Document):
            found.text.encode()
            json.dumps([found.id, found.meta], allow_nan=False)
        elif isinstance(found, Skipped):
            assert len(found.reason) < 100
        elif isinstance(found, Bad):
            assert found.source == path.name
            assert found.reason
