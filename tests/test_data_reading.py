"""From files of any form to documents; what is bad is told with file, position and reason, and never ends the reading."""

import datetime
import gzip
import io
import itertools
import json
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers import RAW, pipeline, words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.read import reader, sources, suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.errors import UserError


def read(*named: Path | str, suffixes: tuple[str, ...] = (), **options: object) -> tuple[list[Document], list[Bad]]:
    """Every document below the inputs, and every complaint."""
    found, bad = sources.find({"default": [str(name) for name in named]}, suffixes, [".*"])
    results = [each for part in sources.parts(found, 64 << 20) for span in part.spans for each in reader.read(span, ReadOptions(**options))]
    documents = [each for each in results if isinstance(each, Document)]
    assert len({document.id for document in documents}) == len(documents)
    return documents, bad + [each for each in results if isinstance(each, Bad)]


def texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


def json_line(text: str, **more: object) -> str:
    return json.dumps({"text": text, **more}, ensure_ascii=False) + "\n"


def page(text: str, title: str = "Titel") -> bytes:
    body = f"<nav><a href=/>Start</a><a href=/a>Menu</a></nav><main><article><p>{text}</p></article></main><footer>Impressum</footer>"
    return f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{title}</title></head><body>{body}</body></html>'.encode()


def warc_record(body: bytes, kind: str = "response", uri: str = "http://example.org/", **headers: str) -> bytes:
    """One record; a response is wrapped in HTTP."""
    if kind == "response":
        headers = {"Content-Type": "text/html; charset=utf-8"} | {name.replace("_", "-"): value for name, value in headers.items()}
        status = headers.pop("status", "200 OK")
        http = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        body = f"HTTP/1.1 {status}\r\n{http}\r\n".encode() + body
    about = {"WARC-Type": kind, "WARC-Target-URI": uri, "WARC-Date": "2026-01-02T03:04:05Z", "WARC-Record-ID": "<urn:uuid:1>"}
    about |= {"Content-Type": "application/http" if kind == "response" else "text/plain", "Content-Length": str(len(body))}
    return b"WARC/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in about.items()).encode() + b"\r\n" + body + b"\r\n\r\n"


def tar_of(members: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def parquet_of(rows: list[dict], **more: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, **more)
    return out.getvalue()


LONG = " ".join(words(1, 200).split())
ROWS = [
    {"text": "eins", "day": datetime.date(2026, 1, 2), "raw": b"x", "big": "x" * 2000, "more": {"a": [1]}},
    {"text": "zwei", "raw": b"y", "big": "y" * 2000},
]
MEMBERS = {
    "a/1.json": b'{"lang": "de"}',
    "a/1.txt": b"eins",
    "a/1.jpg": b"\xff\xd8",
    "b/1.txt": b"zwei",
    "b/2.json": b'{"text": "drei"}',
    "b/3.html": page(LONG),
    "4.jsonl": json_line("vier").encode() * 2,
    "5.txt": "fünf".encode(),
    "5.json": b'{"id": "i", "source": "s", "meta": {"lang": "en"}}',
}
RECORDS = [
    warc_record(b"GET / HTTP/1.1\r\n\r\n", kind="request"),
    warc_record(page(LONG, "A"), uri="http://example.org/ü"),
    warc_record(b"\x89PNG", Content_Type="image/png"),
    warc_record(page("gone"), status="404 Not Found"),
    warc_record(gzip.compress(page(LONG + "!", "B")), Content_Encoding="gzip"),
]
WET = [warc_record(b"software", kind="warcinfo"), warc_record("Grün".encode(), kind="conversion")]

#: ending -> (a file of that form, its texts, the metadata of the first)
FORMS: dict[str, tuple[bytes, list[str], dict]] = {
    ".jsonl": ((json_line("eins", lang="de", n=1) + "\n" + json_line("zwei")).encode(), ["eins", "zwei"], {"lang": "de", "n": 1}),
    ".ndjson": (b"\xef\xbb\xbf" + json_line("eins").replace("\n", "\r\n").encode(), ["eins"], {}),
    ".json": (b'{"text": "eins", "score": NaN}', ["eins"], {"score": None}),
    ".txt": ("\ufeffEin Dokument\r\nin zwei Zeilen\u2028oder drei".encode(), ["Ein Dokument\r\nin zwei Zeilen\u2028oder drei"], {}),
    ".html": (page(LONG), [LONG], {"title": "Titel"}),
    ".htm": (page(LONG).replace(b"utf-8", b"iso-8859-1").decode().encode("latin-1"), [LONG], {"title": "Titel"}),
    ".warc": (
        b"".join(RECORDS),
        [LONG, LONG + "!"],
        {"url": "http://example.org/ü", "date": "2026-01-02T03:04:05Z", "title": "A"},
    ),
    ".wet": (b"".join(WET), ["Grün"], {"url": "http://example.org/", "date": "2026-01-02T03:04:05Z"}),
    ".parquet": (parquet_of(ROWS), ["eins", "zwei"], {"day": "2026-01-02", "more": {"a": [1]}}),
    ".tar": (tar_of(MEMBERS), ["eins", "zwei", "drei", LONG, "vier", "vier", "fünf"], {"lang": "de"}),
}
PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def test_every_form_is_in_the_table() -> None:
    assert FORMS.keys() == suffixes.FORMS.keys()


@pytest.mark.parametrize("ending, packing", [(e, p) for e in FORMS for p in PACKED if e != ".parquet" or not p])
def test_every_form_is_read(tmp_path, ending, packing):
    content, expected, meta = FORMS[ending]
    (tmp_path / f"x{ending}{packing}").write_bytes(PACKED[packing](content))
    documents, bad = read(tmp_path, suffixes=(f"{ending}{packing}",))
    assert not bad
    assert texts(documents) == expected
    assert documents[0].meta == meta
    assert {document.source for document in documents} == {f"x{ending}{packing}"}


@pytest.mark.parametrize("ending, padding", [(".gz", b""), (".gz", bytes(700)), (".zst", b"")])
def test_files_of_many_compressed_pieces_are_read_whole(tmp_path, ending, padding):
    lines = [json_line(words(n, 2000)) for n in range(30)]
    (tmp_path / f"x.jsonl{ending}").write_bytes(b"".join(PACKED[ending](line.encode()) for line in [*lines, ""]) + padding)
    documents, bad = read(tmp_path)
    assert not bad
    assert texts(documents) == [words(n, 2000) for n in range(30)]


def test_the_whole_page_is_kept_where_that_is_asked_for(tmp_path):
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


def test_shards_written_here_are_read_back(shards, corpus):
    documents, bad = read(shards, suffixes=(".tar",))
    originals, _ = read(corpus)
    assert not bad
    assert sorted(texts(documents)) == sorted(texts(originals))
    assert sorted(document.meta["id"] for document in documents) == sorted(document.meta["id"] for document in originals)


GOOD = b'{"text": "good"}\n'
PAGE = page(LONG)
TAR = tar_of({f"{n}.txt": b"good" for n in range(4)})
PARQUET = parquet_of([{"text": "good"}] * 5, row_group_size=2)
UNDECODABLE = parquet_of([{"text": "good"}, {"text": "b" + "a" * 9}, {"text": "good"}], use_dictionary=False, compression="none").replace(
    b"b" + b"a" * 9, b"b" + b"\xff" * 9
)
GZIPPED = gzip.compress(warc_record(PAGE))
INCOMPRESSIBLE = json_line(os.urandom(9000).hex()).encode()
#: case -> (name, content, documents that are read all the same, (position, a part of the reason) of what is told)
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
    "NUL text": ("x.txt", b"a\0b", 0, [("", "is no text: a NUL stands at position 1")]),
    "empty lines file": ("x.jsonl", b"", 0, [("", "is an empty file")]),
    "empty gzip file": ("x.jsonl.gz", b"", 0, [("", "is an empty file")]),
    "empty Parquet file": ("x.parquet", b"", 0, [("", "is an empty file")]),
    "blank lines": ("x.jsonl", b"\n \n", 0, [("", "holds no document")]),
    "tar of images": ("x.tar", tar_of({"1.jpg": b"\xff\xd8"}), 0, [("", "holds no document")]),
    "cut gzip": ("x.jsonl.gz", gzip.compress(GOOD * 500 + INCOMPRESSIBLE)[:-2000], 500, [("byte ", "ends within its gzip data")]),
    "cut gzip trailer": ("x.jsonl.gz", gzip.compress(GOOD * 500)[:-3], 500, [("byte 8500", "ends within its gzip data")]),
    "second member cut": ("x.jsonl.gz", gzip.compress(GOOD) + gzip.compress(INCOMPRESSIBLE)[:-99], 1, [("byte ", "ends within")]),
    "bad checksum": ("x.jsonl.gz", gzip.compress(GOOD)[:-8] + bytes(8), 0, [("byte 0", "incorrect data check")]),
    "no gzip": ("x.jsonl.gz", GOOD, 0, [("byte 0", "is damaged or cut short")]),
    "rubbish after gzip": ("x.jsonl.gz", gzip.compress(GOOD) + b"rubbish", 1, [("byte 17", "is damaged")]),
    "cut zstd": ("x.jsonl.zst", zstandard.compress(GOOD * 500 + INCOMPRESSIBLE)[:-9], 0, [("byte ", "ends within its zstd data")]),
    "no zstd": ("x.jsonl.zst", GOOD, 0, [("byte 0", "is damaged or cut short")]),
    "cut text": ("x.txt.gz", gzip.compress(b"good")[:-3], 0, [("byte 4", "ends within its gzip data")]),
    "no Parquet": ("x.parquet", GOOD, 0, [("", "is damaged or cut short")]),
    "cut Parquet": ("x.parquet", PARQUET[: len(PARQUET) // 2], 0, [("", "is damaged or cut short")]),
    "other schema": ("x.parquet", parquet_of([{"body": "x"}]), 0, [("", "has no column 'text' (data.text_field), only 'body'")]),
    "other type": ("x.parquet", parquet_of([{"text": 7}]), 0, [("", "has int64 instead of text in column 'text'")]),
    "null row": ("x.parquet", parquet_of([{"text": "good"}, {"text": None}, {"text": "good"}]), 2, [("row 1", "null instead of text")]),
    "Latin-1 row": ("x.parquet", UNDECODABLE, 2, [("row 1", "no UTF-8")]),
    "cut tar": ("x.tar", TAR[: 3 * 1024 + 512 + 2], 3, [("byte 3586", "the archive ends too early")]),
    "tar without end": ("x.tar", TAR[: 4 * 1024], 4, [("byte 4096", "the archive ends too early")]),
    "damaged tar": ("x.tar", TAR[:1024] + b"x" * 512 + TAR[1536:], 1, [("byte 1024", "no header of a tar member")]),
    "cut tar.gz": ("x.tar.gz", gzip.compress(TAR)[:-20], 3, [("byte ", "ends within its gzip data")]),
    "broken record beside text": ("x.tar", tar_of({"1.txt": b"t", "1.json": b"{"}), 0, [("member 1.txt", "has a .json that is not JSON")]),
    "broken line in tar": ("x.tar", tar_of({"a b.jsonl": GOOD + b"{\n" + GOOD}), 2, [("member a b.jsonl, line 2", "is not JSON")]),
    "cut WARC": ("x.warc", warc_record(PAGE) * 2 + warc_record(PAGE)[:-900], 2, [("byte ", "is cut short")]),
    "cut WARC header": ("x.warc", warc_record(PAGE) * 2 + warc_record(PAGE)[:50], 2, [("byte ", "is cut within its header")]),
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
        [("after the record at byte 0", "no WARC record")],
    ),
    "no WARC": ("x.warc", GOOD, 0, [("", "no WARC record that can be read")]),
    "no gzip in WARC": (
        "x.warc",
        warc_record(b"no gzip", Content_Encoding="gzip") + warc_record(PAGE),
        1,
        [("byte 0", "an HTTP response that cannot be decoded")],
    ),
    "deep page": ("x.html", b"<div>" * 5000 + b"x", 0, [("", "nests more than 1000 elements")]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_told_and_all_else_is_read(tmp_path, case):
    name, content, good, faults = FAULTS[case]
    (tmp_path / f"Bücher & {name}").write_bytes(content)
    documents, bad = read(tmp_path, document_bytes=100_000)
    assert set(texts(documents)) <= {"good", LONG}
    assert len(documents) == good
    assert len(bad) == len(faults)
    for told, (position, reason) in zip(bad, faults, strict=True):
        assert told.source == f"Bücher & {name}"
        assert told.position.startswith(position)
        assert bool(told.position) == bool(position)
        assert reason in told.reason


@pytest.mark.parametrize("content", [b"", b"<html><body><p>good", b"<b><i>good</b></i></html></div>", b"\xff\0<p>good", b"<!DOCTYPE"])
def test_broken_html_is_read_as_browsers_do(tmp_path, content):
    (tmp_path / "x.html").write_bytes(content or b" ")
    documents, bad = read(tmp_path)
    assert not bad
    assert ("good" in documents[0].text) == (b"good" in content)
    assert documents[0].meta == {}


def test_one_wrong_byte_does_not_change_the_encoding_of_a_page(tmp_path):
    (tmp_path / "x.html").write_bytes(page(LONG).replace(b"</p>", b" \xff</p>"))
    documents, _ = read(tmp_path)
    assert documents[0].text == LONG + " \ufffd"


def test_a_file_that_vanishes_is_told(tmp_path):
    span = sources.Span(sources.Source(str(tmp_path / "x.jsonl"), "x.jsonl", 5))
    assert list(reader.read(span, ReadOptions())) == [Bad("x.jsonl", "", "cannot be read: No such file or directory")]


def test_what_cannot_be_a_document_in_a_folder_is_told(tmp_path):
    folder = tmp_path / "Köche & Bücher"
    (folder / "x.jsonl" / "tief er").mkdir(parents=True)
    (folder / "x.jsonl" / "tief er" / "größe.txt").write_text("gut")
    (folder / "broken.txt").symlink_to("nowhere")
    (folder / "loop").symlink_to(folder)
    (folder / "notes.md").write_text("not asked for")
    (folder / ".hidden.txt").write_text("not asked for")
    Path(os.fsdecode(os.fsencode(folder) + b"/gr\xfcn.txt")).write_text("Latin-1 name")
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.bind(os.path.relpath(folder / "socket.txt"))
    (tmp_path / "nothing").mkdir()
    documents, bad = read(folder, tmp_path / "nothing")
    assert {document.source: document.text for document in documents} == {
        "x.jsonl/tief er/größe.txt": "gut",
        r"gr\xfcn.txt": "Latin-1 name",
    }
    json.dumps([document.id for document in documents]).encode()
    assert {(told.source, told.reason.partition(":")[0]) for told in bad} == {
        ("broken.txt", "is a broken link"),
        ("socket.txt", "is no regular file"),
        (str(tmp_path / "nothing"), f"holds no file ending in {', '.join(suffixes.SEARCHED)}"),
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_told(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "y.txt").write_text("y")
    (tmp_path / "x.txt").chmod(0)
    documents, bad = read(tmp_path)
    assert texts(documents) == ["y"]
    assert "permissions" in bad[0].reason


def test_the_stage_quarantines_what_is_bad(tmp_path):
    (tmp_path / "good.jsonl").write_bytes(GOOD * 200)
    (tmp_path / "bad one.jsonl.gz").write_bytes(gzip.compress(GOOD * 3)[:-1])
    printed = pipeline("stage=shard", *RAW, f"data.input=[{tmp_path}]", f"data.shards={tmp_path}/s", ranks=2)
    assert "1 not readable" in printed
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert manifest["totals"]["train"]["documents"] + manifest["totals"]["validation"]["documents"] == 203


def test_all_missing_inputs_are_named_at_once(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("x")
    (tmp_path / "notes.md").write_text("x")
    inputs = ["nowhere.jsonl", "*.parquet", "notes.md", "a", "b"]
    given = ",".join(str(tmp_path / name) for name in inputs)
    arguments = [f"data.input=[{given}]", f"data.corpora={{web:[{tmp_path}/missing]}}", f"data.shards={tmp_path}/s"]
    printed = pipeline("stage=shard", *arguments, expect=2)
    assert "5 problems" in printed
    assert "nowhere.jsonl: no such file" in printed
    assert "*.parquet: no such file, folder or match" in printed
    assert "notes.md: does not end in .jsonl" in printed
    assert "common parent" in printed
    assert f"data.corpora.web={tmp_path}/missing: no such file" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "s").exists()
    (tmp_path / "empty").mkdir()
    nothing = pipeline("stage=shard", f"data.input=[{tmp_path}/empty]", f"data.shards={tmp_path}/s", expect=2)
    assert "empty: holds no file ending in .jsonl" in nothing


def test_corpora_are_named_by_the_user_and_kept_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    found, _ = sources.find({"web": [f"{tmp_path}/a", f"{tmp_path}/a/x.txt"], "default": [f"{tmp_path}/b"]}, [], [])
    documents = [
        document for part in sources.parts(found, 64 << 20) for span in part.spans for document in reader.read(span, ReadOptions())
    ]
    assert [(d.id, d.text, d.corpus) for d in documents] == [("x.txt:0", "b", "default"), ("web/x.txt:0", "a", "web")]
    refused = pipeline("stage=shard", "data.corpora={Web:[x],default:[x]}", "data.corpora.web=[x]", f"data.shards={tmp_path}/s", expect=2)
    assert "2 problems" in refused
    assert "data.corpora=Web: must consist of a-z" in refused
    assert "data.corpora=default: is what data.input is called" in refused
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
    assert [told.source for told in bad] == ["deep/d.warc.gz"]
    assert [d.source for d in read("memory://corpus/deep/b*")[0]] == ["b ü.jsonl.gz"]
    assert [d.source for d in read("memory://corpus/a.jsonl")[0]] == ["a.jsonl"]
    (tmp_path / "x.txt").write_text("local")
    assert texts(read(f"file://{tmp_path}")[0]) == ["local"]
    for url, reason in (("memory://nowhere", "no such file"), ("nosuch://x", "cannot be listed"), ("s3://bucket/x", "data.input=s3://")):
        with pytest.raises(UserError, match=reason):
            read(url)


def spans_of(path: Path, size: int) -> list[sources.Span]:
    source = sources.Source(str(path), path.name, path.stat().st_size)
    return [sources.Span(source, start, start + size) for start in range(0, source.size, size)]


def all_of(spans: list[sources.Span]) -> list[Document | Bad]:
    return [found for span in spans for found in reader.read(span, ReadOptions())]


LINE_OR_FAULT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(json_line), st.sampled_from(["\n", "{\n", "\r\n"])
)


@settings(deadline=None)
@given(st.lists(LINE_OR_FAULT, max_size=20), st.integers(1, 200))
def test_byte_ranges_of_a_file_hold_each_document_once(tmp_path_factory, lines, size):
    path = tmp_path_factory.mktemp("ranges") / "x.jsonl"
    path.write_bytes("".join(lines).encode())
    whole, cut = (all_of(spans_of(path, step)) for step in (1 << 30, size))
    assert [d for d in cut if isinstance(d, Document)] == [d for d in whole if isinstance(d, Document)]
    assert [d.text for d in whole if isinstance(d, Document)] == [json.loads(line)["text"] for line in lines if line.startswith('{"')]
    assert len(cut) == len(whole)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("aä", max_size=9), min_size=1, max_size=30), st.integers(1, 9), st.integers(100, 3000))
def test_byte_ranges_of_a_parquet_file_hold_each_row_once(tmp_path_factory, rows, group, size):
    path = tmp_path_factory.mktemp("groups") / "x.parquet"
    path.write_bytes(parquet_of([{"n": n, "text": text} for n, text in enumerate(rows)], row_group_size=group))
    found = all_of(spans_of(path, size))
    assert [(d.offset, d.meta["n"], d.text) for d in found] == [(n, n, text) for n, text in enumerate(rows)]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.sampled_from(list(FORMS)), st.sampled_from(list(PACKED)), st.data())
def test_damage_of_any_kind_never_ends_the_reading(tmp_path_factory, ending, packing, data):
    packing = "" if ending == ".parquet" else packing
    content = FORMS[ending][0]
    for step in (PACKED[packing], bytes):  # damage within, damage without
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
        else:
            assert found.source == path.name
            assert found.reason


NAMES = st.sampled_from(["x.jsonl", "x.txt", "x.parquet", "x.jsonl.gz"])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NAMES, st.integers(0, 1_000_000)), max_size=30), st.integers(1, 7))
def test_parts_cover_the_input_once_and_every_rank_gets_its_share(files, ranks):
    found = [sources.Source(f"{n}/{name}", f"{n}/{name}", size) for n, (name, size) in enumerate(files)]
    parts = sources.parts(found, 100_000)
    assert [part.number for part in parts] == list(range(len(parts)))
    covered: dict[str, list] = {source.name: [] for source in found}
    for span in (span for part in parts for span in part.spans):
        covered[span.source.name].append((span.start, span.source.size if span.end is None else span.end))
    for source in found:
        ranges = covered[source.name]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == source.size
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert len(ranges) == 1 or source.cut
    assert all(part.size <= 100_000 or len(part.spans) == 1 for part in parts)
    shares = [sources.share(parts, rank, ranks) for rank in range(ranks)]
    assert sorted(part.number for share in shares for part in share) == list(range(len(parts)))
    loads = [sum(part.cost for part in share) for share in shares]
    assert max(loads) - min(loads) <= max((part.cost for part in parts), default=0)


def test_many_small_files_are_one_part() -> None:
    found = [sources.Source(f"{n}.txt", f"{n}.txt", 1000) for n in range(1000)]
    assert len(sources.parts(found, 64 << 20)) == 1
