"""Files of every format with their expected documents, for the tests of the readers."""

import bz2
import datetime
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipeline.data.read import input_files, reader
from pipeline.data.read.documents import Bad, Document, ReadOptions, Skipped
from tests.helpers import words


def read(*named: Path | str, suffixes: tuple[str, ...] = (), **options: object) -> tuple[list[Document], list[Bad]]:
    """Every document below the inputs, and every Bad."""
    listing = input_files.find({"default": [str(name) for name in named]}, suffixes, [".*"])
    results = [
        each
        for part in input_files.parts(listing.files, 64 << 20)
        for span in part.spans
        for each in reader.read(span, ReadOptions(**options))
    ]
    documents = [each for each in results if isinstance(each, Document)]
    assert len({document.id for document in documents}) == len(documents)
    return documents, listing.bad + [each for each in results if isinstance(each, Bad)]


def texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


def json_line(text: str, **more: object) -> str:
    return json.dumps({"text": text, **more}, ensure_ascii=False) + "\n"


def page(text: str, title: str = "Titel") -> bytes:
    body = f"<nav><a href=/>Start</a><a href=/a>Menu</a></nav><main><article><p>{text}</p></article></main><footer>Impressum</footer>"
    return f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{title}</title></head><body>{body}</body></html>'.encode()


def warc_record(body: bytes, kind: str = "response", uri: str = "http://example.org/", **headers: str) -> bytes:
    """One WARC record; the body of a response is wrapped in HTTP."""
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


def arrow_of(rows: list[dict], new=pa.ipc.new_stream) -> bytes:
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    with new(out, table.schema) as writer:
        writer.write_table(table, 1)
    return out.getvalue()


def zip_of(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
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

WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">
  <siteinfo><sitename>Wiki</sitename></siteinfo>
  <page><title>Ä</title><ns>0</ns><id>7</id><revision><id>1</id><text>old</text></revision>
    <revision><id>2</id><contributor><id>3</id></contributor><text bytes="2">'''Eins''' &amp; [[zwei]]</text></revision></page>
  <page><title>B</title><ns>0</ns><id>8</id><redirect title="Ä" /><revision><text>#REDIRECT [[Ä]]</text></revision></page>
  <page><title>Talk:B</title><ns>1</ns><id>9</id><revision><text>talk</text></revision></page>
  <page><title>C</title><ns>0</ns><id>10</id><revision><text /></revision></page>
</mediawiki>""".encode()

#: suffix -> (a file of that format, its texts, the metadata of the first document)
FORMATS: dict[str, tuple[bytes, list[str], dict]] = {
    ".jsonl": ((json_line("eins", lang="de", n=1) + "\n" + json_line("zwei")).encode(), ["eins", "zwei"], {"lang": "de", "n": 1}),
    ".ndjson": (b"\xef\xbb\xbf" + json_line("eins").replace("\n", "\r\n").encode(), ["eins"], {}),
    ".json": (b'{"text": "eins", "score": NaN}', ["eins"], {"score": None}),
    ".csv": ('\ufefftext,lang\r\n"eins, ""zwei""\r\ndrei",de\r\n\r\nvier,\r\n'.encode(), ['eins, "zwei"\r\ndrei', "vier"], {"lang": "de"}),
    ".tsv": (b'lang\ttext\nde\teins, "zwei"\nen\tdrei', ['eins, "zwei"', "drei"], {"lang": "de"}),
    ".txt": ("\ufeffEin Dokument\r\nin zwei Zeilen\u2028oder drei".encode(), ["Ein Dokument\r\nin zwei Zeilen\u2028oder drei"], {}),
    ".html": (page(LONG), [LONG], {"title": "Titel"}),
    ".htm": (page(LONG).replace(b"utf-8", b"iso-8859-1").decode().encode("latin-1"), [LONG], {"title": "Titel"}),
    ".warc": (b"".join(RECORDS), [LONG, LONG + "!"], {"url": "http://example.org/ü", "date": "2026-01-02T03:04:05Z", "title": "A"}),
    ".wet": (b"".join(WET), ["Grün"], {"url": "http://example.org/", "date": "2026-01-02T03:04:05Z"}),
    ".xml": (WIKI, ["'''Eins''' & [[zwei]]", ""], {"title": "Ä", "id": "7"}),
    ".parquet": (parquet_of(ROWS), ["eins", "zwei"], {"day": "2026-01-02", "more": {"a": [1]}}),
    ".arrow": (arrow_of(ROWS), ["eins", "zwei"], {"day": "2026-01-02", "more": {"a": [1]}}),
    ".zip": (zip_of(MEMBERS), ["vier", "vier", "fünf", "eins", "zwei", "drei", LONG], {}),
    ".tar": (tar_of(MEMBERS), ["eins", "zwei", "drei", LONG, "vier", "vier", "fünf"], {"lang": "de"}),
}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}

GOOD = b'{"text": "good"}\n'
PAGE = page(LONG)
TAR = tar_of({f"{n}.txt": b"good" for n in range(4)})
PARQUET = parquet_of([{"text": "good"}] * 5, row_group_size=2)


def spans_of(path: Path, size: int) -> list[input_files.Span]:
    source = input_files.InputFile(str(path), path.name, path.stat().st_size)
    return [input_files.Span(source, start, start + size) for start in range(0, source.size, size)]


def all_of(spans: list[input_files.Span]) -> list[Document | Bad | Skipped]:
    return [found for span in spans for found in reader.read(span, ReadOptions())]
